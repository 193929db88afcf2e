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
    """No test leaves a thread to the next one."""
    assert threads() == []
    yield
    for thread in threads():
        thread.join(TIMEOUT)
    assert threads() == []


@pytest.fixture
def sdk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sdk]:
    """An OpenTelemetry SDK, which is the process's own for this test."""
    made = Sdk()
    use(monkeypatch, made.tracers, made.meters)
    yield made
    made.shutdown()


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be settled in a drain is given up almost at once."""
    monkeypatch.setattr("lanes.runtime.handover.SETTLE_WITHIN", 0.02)


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> tuple[Options, list[ThreadWorkers]]:
    """What else the threads of the consumers of this test are made with, and what was made."""
    options: Options = {}
    made: list[ThreadWorkers] = []

    def make(*args: Any, **kwargs: Any) -> ThreadWorkers:
        made.append(ThreadWorkers(*args, **{**kwargs, **options}))
        return made[-1]

    monkeypatch.setattr("lanes.runtime.run.ThreadWorkers", make)
    return options, made
