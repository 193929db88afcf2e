"""Fixtures that tests of telemetry share."""

from tests.fakes.fixtures import hurried, none_left, sdk, workers

__all__ = ["hurried", "none_left", "sdk", "workers"]
