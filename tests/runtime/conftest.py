"""The fixtures that tests of the runtime share."""

from pathlib import Path

import pytest

from tests.fakes.fixtures import anyio_backend, hurried, leave_uvloop_to_slow_tests, none_left, sdk, workers

__all__ = ["anyio_backend", "hurried", "none_left", "sdk", "workers"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    leave_uvloop_to_slow_tests(items, Path(__file__).parent, ("test_settlements", "test_stop"))
