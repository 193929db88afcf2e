"""Fixtures of the tests of runtime, workers and observe."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from lanes.workers.threads import ThreadWorkers
from tests.fakes.support import TIMEOUT
from tests.fakes.telemetry import Sdk, use
from tests.fakes.threaded import Options, threads

UVLOOP = ("asyncio", {"use_uvloop": True})
"""The backend of anyio's plugin for tests on uvloop."""


@pytest.fixture(scope="module", params=["asyncio", "trio", pytest.param(UVLOOP, id="uvloop")])
def anyio_backend(request: pytest.FixtureRequest) -> object:
    """The backends of async tests. The tests on uvloop are slow tests, except the tests of a few modules."""
    if request.param == UVLOOP:
        pytest.importorskip("uvloop")
    return request.param


def leave_uvloop_to_slow_tests(items: Sequence[pytest.Item], folder: Path, chosen: Collection[str]) -> None:
    """Mark the tests on uvloop as slow, except the tests of the chosen modules. Most faults appear on every loop.

    Args:
        items: The collected tests.
        folder: Folder of the tests to mark.
        chosen: Names of modules.
    """
    for item in items:
        backend = item.callspec.params.get("anyio_backend") if hasattr(item, "callspec") else None
        if backend == UVLOOP and item.path.parent == folder and item.path.stem not in chosen:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def none_left() -> Iterator[None]:
    """Fail a test whose threads outlive the test."""
    assert [thread.name for thread in threads()] == []
    yield
    for thread in threads():
        thread.join(TIMEOUT)
    assert [thread.name for thread in threads()] == []


@pytest.fixture
def sdk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sdk]:
    """An OpenTelemetry SDK that is global for this test."""
    made = Sdk()
    use(monkeypatch, made.tracers, made.meters)
    yield made
    made.shutdown()


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drains that end their last settlement almost at once."""
    monkeypatch.setattr("lanes.runtime.handover.SETTLE_WITHIN", 0.02)


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> tuple[Options, list[ThreadWorkers]]:
    """Extra arguments for the thread workers of this test, and the workers that were made."""
    options: Options = {}
    made: list[ThreadWorkers] = []

    def make(*args: Any, **kwargs: Any) -> ThreadWorkers:
        made.append(ThreadWorkers(*args, **{**kwargs, **options}))
        return made[-1]

    monkeypatch.setattr("lanes.runtime.run.ThreadWorkers", make)
    return options, made
