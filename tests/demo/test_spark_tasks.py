"""A worker of the demo on Spark, without Spark: a task runs the handler, whose effects are in PostgreSQL."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pytest

import lanes
from demo.config import settings
from demo.events import Event, load
from demo.faults import POISON, Faults
from demo.spark import tasks
from demo.spark.config import ReplayConfig
from demo.spark.judge import judge
from demo.spark.tables import Tables
from demo.workers.service import Service
from lanes_spark import TaskJob, run_task
from tests.components import PostgresServer
from tests.demo.test_spark_parts import told

FAULTS = Faults(fail_every=9, poison_every=40)
SCHEMA = pa.schema([("key", pa.binary()), ("partition", pa.int32()), ("offset", pa.int64()), ("value", pa.binary())])


class Letters:
    """Dead letters in the memory of this process."""

    def __init__(self) -> None:
        self.steps: list[bytes] = []

    async def open(self) -> None: ...

    async def put(self, dead_letter: lanes.DeadLetter) -> None:
        self.steps.append(dead_letter.value or b"")

    async def aclose(self) -> None: ...


class Approvals:
    """The service in a separate thread, and the statuses that tasks reported."""

    def __init__(self, folder: Path) -> None:
        self.statuses: list[dict[str, Any]] = []
        self._loop = asyncio.new_event_loop()
        self._service = Service(
            None, latency=0.001, token="token", on_status=self.statuses.append, on_commit=lambda: None
        )
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._run(self._service.start(folder))
        self.address = self._service.address

    def close(self) -> None:
        self._run(self._service.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30.0)


@pytest.fixture
def approvals(tmp_path: Path) -> Iterator[Approvals]:
    made = Approvals(tmp_path)
    yield made
    made.close()


@pytest.fixture
def config(
    approvals: Approvals, tmp_path: Path, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> ReplayConfig:
    found = told(approvals.address, tmp_path, postgres.url)
    found = ReplayConfig(**{**vars(found), "connections": 4, "fail_every": 9, "poison_every": 40})
    for name, value in found.environment().items():
        monkeypatch.setenv(name, value)
    return found


def handle(events: list[Event], letters: Letters) -> dict[str, int]:
    """Handle all events in one task, and return its counts."""
    rows = [
        {"key": event.case.encode(), "partition": 0, "offset": at, "value": event.payload}
        for at, event in enumerate(events)
    ]
    job = TaskJob(
        topic="declarations",
        handler=tasks.handle,
        name="demo",
        settings=settings(100, 200),
        dead_letters=lambda: letters,
        setup=tasks.begin,
        teardown=tasks.end,
    )
    *_, counts = run_task([pa.RecordBatch.from_pylist(rows, schema=SCHEMA)], job)
    return {name: counts[name].to_pylist()[0] for name in ("delivered", "finished", "dead_lettered")}


def test_a_task_that_is_run_again_has_each_effect_once(config: ReplayConfig, approvals: Approvals) -> None:
    events = load(None, 120, 3)
    poison = {(each.case, each.step) for each in events if FAULTS.failures(each.case, each.step) == POISON}
    assert poison, "some events never succeed"
    tables = Tables(config.postgres, config.schema)
    tables.make((each.case, each.step) for each in events)
    try:
        for repeats in (0, len(events) - len(poison)):
            letters = Letters()
            counts = handle(events, letters)
            assert counts == {"delivered": 120, "finished": 120, "dead_lettered": len(poison)}
            assert len(letters.steps) == len(poison)
            found = judge(tables)
            assert (set(found.lost), found.repeats) == (poison, repeats)
            assert (found.doubled, found.violations, found.foreign, found.states) == ([], [], [], [])
        # Each task has reported its start and its end.
        names = [status["task"] for status in approvals.statuses]
        assert names[0] == names[1] != names[2] == names[3]
        assert [status["ended"] for status in approvals.statuses] == [False, True, False, True]
    finally:
        assert tables.drop()
