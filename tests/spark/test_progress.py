"""Tasks report their progress to the driver while they run, and a failed report fails no task; no JVM runs."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import anyio.to_thread
import pytest

from lanes.history.writer import key_hash
from lanes_spark import run_task
from lanes_spark.driver.progress import OldestMessage, Progress, ProgressTracker, Pulse, TaskReports
from lanes_spark.task import progress as task_telling
from lanes_spark.task.progress import sender
from tests.components import wait_until
from tests.spark.rows import batches, job, rows


def session(**conf: str) -> Any:
    names = {"spark.driver.host": "127.0.0.1", **conf}
    return SimpleNamespace(_jvm=object(), conf=SimpleNamespace(get=lambda name, default: names.get(name, default)))


@contextmanager
def hearing() -> Iterator[TaskReports]:
    reports = TaskReports(session())
    try:
        yield reports
    finally:
        reports.close()


def told(delivered: int, *, ended: bool = False, age: float | None = None) -> dict[str, object]:
    oldest = None
    if age is not None:
        oldest = {"partition": "orders/1", "position": 7, "attempt": 2, "age": age, "key": "00" * 8}
    return {"delivered": delivered, "finished": delivered - 1, "dead_lettered": 1, "oldest": oldest, "ended": ended}


def test_the_reports_of_a_batch_are_added_up() -> None:
    with hearing() as reports:
        reports.begin(4)
        with (
            sender(reports.address, 4, 0, 0) as one,
            sender(reports.address, 4, 1, 0) as given_up,
            sender(reports.address, 4, 1, 1) as other,
            sender(reports.address, 3, 2, 0) as late,
        ):
            assert one is not None
            assert other is not None
            assert given_up is not None
            assert late is not None
            late(told(1_000))
            one(told(5, age=1.0))
            one(told(9, age=2.0))
            given_up(told(500, age=99.0))
            other(told(20, age=3.0))
            other(told(30, ended=True))
            given_up(told(600, age=99.0))
            one(told(10, age=2.0))
            wait_until(lambda: reports.running().delivered == 40, "the last report")
        found = reports.running()
        assert (found.tasks, found.finished, found.dead_lettered) == (1, 38, 2)
        assert found.oldest == OldestMessage(partition="orders/1", position=7, attempt=2, age=2.0, key="00" * 8)
        reports.begin(5)
        assert reports.running().delivered == 0


def test_a_datagram_that_is_no_progress_report_is_ignored() -> None:
    with hearing() as reports:
        reports.begin(0)
        assert reports.address is not None
        host, port, secret = reports.address
        good = {**told(7), "secret": secret, "batch": 0, "task": 0, "attempt": 0}
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            for data in (
                b"",
                b"\xff",
                b"[]",
                b"[" * 2_000,
                json.dumps({**good, "secret": "0", "task": 1, "delivered": 1_000}).encode(),
                json.dumps({**good, "task": 2, "oldest": {"rm": 1}}).encode(),
                json.dumps({**good, "task": 3, "oldest": 3}).encode(),
                json.dumps({"secret": secret}).encode(),
                json.dumps(good).encode(),
            ):
                stranger.sendto(data, (host, port))
        wait_until(lambda: reports.running().delivered == 7, "the only valid report")
        assert reports.running().tasks == 1


def test_a_task_goes_on_if_the_progress_socket_is_closed() -> None:
    with hearing() as reports:
        heard = reports._socket
        assert heard is not None
        gone = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        gone.close()
        reports._socket = gone
        reports.close()
        # The thread ends in spite of the error.
        heard.sendto(b"", heard.getsockname())
        reports._thread.join(10)
        assert not reports._thread.is_alive()


def test_a_close_waits_for_the_end_of_the_progress_thread() -> None:
    for _ in range(50):
        with hearing() as reports:
            assert reports._thread.is_alive()
        assert not reports._thread.is_alive()


def test_a_session_without_an_own_driver_receives_no_reports() -> None:
    connect = SimpleNamespace(conf=session().conf)
    reports = TaskReports(cast(Any, connect))
    assert reports.address is None
    assert reports.running().tasks == 0
    reports.close()
    nowhere = TaskReports(session(**{"spark.driver.host": "192.0.2.99", "spark.driver.bindAddress": "no such name"}))
    assert nowhere.address is None
    with sender(None, 0, 0, 0) as tell:
        assert tell is None


def test_a_task_reports_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_telling, "EVERY", 0.001)
    said: list[dict[str, Any]] = []
    go_on = threading.Event()
    held = rows(60)[4]
    # Later messages of the same key wait for this one.
    others = sum(one["key"] != held["key"] or one["offset"] < held["offset"] for one in rows(60))

    async def handler(message: Any) -> None:
        if (message.partition.id.number, message.position) == (held["partition"], held["offset"]):
            await anyio.to_thread.run_sync(go_on.wait)

    def tell(one: Any) -> None:
        said.append(dict(one))
        if one["finished"] == others and one["oldest"] is not None and one["oldest"]["age"] > 0:
            go_on.set()

    list(run_task(batches(rows(60)), job(handler), tell=tell))
    waiting = next(one for one in said if one["finished"] == others)
    assert waiting["oldest"]["partition"] == "orders/1"
    assert (waiting["oldest"]["position"], waiting["oldest"]["attempt"]) == (held["offset"], 1)
    assert waiting["oldest"]["key"] == key_hash(held["key"])
    assert not waiting["ended"]
    assert said[-1] == {"delivered": 60, "finished": 60, "dead_lettered": 0, "oldest": None, "ended": True}
    assert [one["ended"] for one in said].count(True) == 1


def test_after_a_failed_call_the_progress_is_not_called_again() -> None:
    calls = []

    def tell() -> None:
        calls.append(1)
        raise ValueError("the terminal is gone")

    pulse = Pulse(tell, 0.001)
    pulse.start()
    wait_until(lambda: bool(calls), "the first call")
    pulse.stop()
    for _ in range(2):
        with pytest.raises(ValueError, match="the terminal is gone"):
            pulse.now()
    assert len(calls) == 1
    pulse.stop()


def test_positions_that_an_earlier_run_handled_do_not_count_as_left() -> None:
    tracker = ProgressTracker(session(), None)
    tracker.begin({0: (100, 200), 1: (0, 50)}, {})
    assert (tracker.progress().positions, tracker.progress().left) == (150, 150)
    # The checkpoint may be below the first selected position.
    tracker.reach({0: 170, 1: -5})
    assert tracker.progress().left == 30 + 50
    tracker.done({0: (170, 190), 1: (0, 20)})
    assert (tracker.progress().positions, tracker.progress().left) == (150, 10 + 30)


def test_the_rate_is_of_the_whole_run() -> None:
    counts: dict[str, Any] = {"batches": 0, "finished": 0, "dead_lettered": 0, "positions": 9, "left": 9}
    assert Progress(delivered=50, seconds=2.0, **counts).rate == 25
    assert Progress(delivered=0, seconds=0.0, **counts).rate == 0
