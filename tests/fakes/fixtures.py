"""Fixtures of the tests of runtime, workers and observe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from lanes.workers.threads import ThreadWorkers
from tests.fakes.support import TIMEOUT
from tests.fakes.telemetry import Sdk, use
from tests.fakes.threaded import Options, threads


@pytest.fixture(autouse=True)
def none_left() -> Iterator[None]:
    """Fail a test that leaves a thread behind."""
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
    """A drain gives up its last settlement almost at once."""
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
