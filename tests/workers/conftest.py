"""The fixtures that tests of the workers share."""

from tests.fakes.fixtures import hurried, none_left, sdk, workers

__all__ = ["hurried", "none_left", "sdk", "workers"]
