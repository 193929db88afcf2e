"""Rare events have rows in the history, from which the checkers learn the duties of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from lanes import Consumer, History, Message, Nak, Retry, Settings
from lanes.core.types import Room
from lanes.history.recorder import recorder_of
from lanes.history.rules import Rules
from lanes.source import Delivered, Revoking, SourceEvent
from memsource import CHECKERS, Group, GroupSource, Verdict, check, read
from memsource.memory.broker import MemoryBroker
from memsource.memory.source import MemorySource
from tests.fakes.grouped import group_of
from tests.fakes.support import Gated, consumer_of, published, started, turns, until


def rows(history: History, *events: str) -> list[dict[str, Any]]:
    """The rows of these events in the file."""
    if history.path is None:
        return []
    recorder_of(history).flush()
    found = [json.loads(line) for line in history.path.read_text().splitlines()]
    return [row for row in found if row["event"] in events]


def verdicts(directory: Path) -> dict[str, Verdict]:
    return {verdict.name: verdict for verdict in check(read([directory]), CHECKERS)}


@pytest.mark.anyio
async def test_the_begin_row_has_the_settings(tmp_path: Path) -> None:
    group = Group(1)
    source = GroupSource(group, "m-1", hands_over=False)
    settings = Settings(concurrency=3, lanes=5, max_ahead=77, grace=1.5, retry=Retry(attempts=2), poison="block")
    source.finish()
    await Consumer(source, Gated(), settings=settings, history=History(tmp_path)).run()
    (segment,) = read([tmp_path])
    assert segment.rules == Rules.of(settings, await GroupSource(group, "m-2", hands_over=False).open(), "block")
    assert (segment.rules.settles, segment.rules.hands_over, segment.rules.max_ahead) == ("cumulative", False, 77)


@pytest.mark.anyio
async def test_a_blocked_lane_has_rows(tmp_path: Path) -> None:
    history = History(tmp_path)
    failing = True

    async def handler(message: Message) -> None:
        if failing:
            raise ValueError("no")

    consumer = consumer_of(MemorySource(published("a")), handler, poison="block", history=history)
    async with started(consumer) as run:
        await until(lambda: run.consumer.ready and not run.consumer.healthy)
        failing = False
        assert consumer.unblock("b") == 0
        assert consumer.unblock("a") == 1
        await until(lambda: consumer.status().settled == 1)
        assert await run.stop() is None
    assert [row["position"] for row in rows(history, "blocked")] == [0]
    (unblocked,) = rows(history, "unblocked")
    assert (unblocked["key"], unblocked["count"]) == (rows(history, "blocked")[0]["key"], 1)
    assert verdicts(tmp_path)["AttemptsCount"].status == verdicts(tmp_path)["RetryHoldsLane"].status == "passed"


@pytest.mark.anyio
async def test_a_delay_of_a_nak_is_marked_in_its_row(tmp_path: Path) -> None:
    history = History(tmp_path)

    async def handler(message: Message) -> None:
        if message.attempt == 1:
            raise Nak(delay=0.002) if message.key == b"a" else ValueError("no")

    broker = published("a", "b")
    source = MemorySource(broker)
    source.finish()
    await consumer_of(source, handler, attempts=2, backoff=0.001, history=history).run()
    assert {row["position"]: row.get("asked") for row in rows(history, "retry")} == {0: 1, 1: None}
    assert {verdict.status for verdict in check(read([tmp_path]))} == {"passed"}


@pytest.mark.anyio
async def test_extended_messages_have_rows(tmp_path: Path) -> None:
    history = History(tmp_path)
    source = MemorySource(MemoryBroker(ack_wait=0.06))
    for key in "aab":
        source.broker.publish(key=key)
    handler = Gated()
    async with started(consumer_of(source, handler, history=history)) as run:
        await until(lambda: rows(history, "extended"))
        handler.let(0, 1, 2)
        assert await run.stop() is None
    assert rows(history, "extended")[0]["runs"] == [[0, 2]]
    assert verdicts(tmp_path)["KeptAlive"].checked >= 3


@pytest.mark.anyio
async def test_the_message_that_stalls_a_partition_has_a_row(tmp_path: Path) -> None:
    history = History(tmp_path)
    group = group_of("abcd")
    handler = Gated(free=[b"b", b"c", b"d"])
    async with started(consumer_of(GroupSource(group, "m-1"), handler, max_ahead=3, history=history)) as run:
        await until(lambda: rows(history, "ahead_reached"))
        handler.let(0)
        await until(lambda: rows(history, "ahead_left"))
        await until(lambda: group.unfinished == 0)
        assert await run.stop() is None
    assert rows(history, "ahead_reached")[0]["position"] == 0
    assert verdicts(tmp_path)["StallNamed"].checked >= 1
    assert {verdict.status for verdict in check(read([tmp_path]))} == {"passed"}


@pytest.mark.anyio
async def test_a_shortened_drain_has_a_row(tmp_path: Path) -> None:
    history = History(tmp_path)
    source = MemorySource(published("a"))
    handler = Gated()
    async with started(consumer_of(source, handler, drain_timeout=30.0, grace=0.05, history=history)) as run:
        await until(lambda: handler.started)
        run.consumer.stop()
        await turns()
        source.revoke(0, timeout=0.01)
        assert await run.end() is None
    assert [row["timeout"] for row in rows(history, "revoking", "hastened")] == [30.0, 0.01]
    drained = verdicts(tmp_path)["HandedOverAfterDrain"]
    assert (drained.status, drained.checked) == ("passed", 1)


@pytest.mark.anyio
async def test_messages_completed_by_a_former_owner_are_committed_in_time(tmp_path: Path) -> None:
    """No other message finishes, so no such event wakes the settlement task."""
    group = group_of("ab")
    first = Gated(free=[b"b"])
    async with started(consumer_of(GroupSource(group, "m-1"), first, drain_timeout=0.0, grace=0.01)) as run:
        await until(lambda: first.ended == [1])
        assert await run.stop() is None
    history = History(tmp_path)
    async with started(consumer_of(GroupSource(group, "m-2"), Gated(), drain_timeout=0.0, grace=0.01, history=history)):
        await until(lambda: rows(history, "commit_ok"))
        assert not rows(history, "ended")


@pytest.mark.anyio
async def test_a_commit_cancelled_with_its_run_has_a_failed_row(tmp_path: Path) -> None:
    """A second commit may follow. That commit would appear to overtake a commit without an end."""
    history = History(tmp_path)
    source = GroupSource(group_of("a"), "m-1")
    source.block("settle")
    async with started(consumer_of(source, Gated(free=[b"a"]), history=history)) as run:
        await until(lambda: rows(history, "commit_sent"))
        run.scope.cancel()
        await turns()
        source.unblock("settle")
        await run.end()
    assert [row["event"] for row in rows(history, "commit_sent", "commit_failed", "commit_ok")][:2] == [
        "commit_sent",
        "commit_failed",
    ]
    assert verdicts(tmp_path)["OneCommitAtATime"].status == "passed"


@pytest.mark.anyio
async def test_a_batch_that_outlives_its_partition_is_a_zombie_at_the_end(tmp_path: Path) -> None:
    history = History(tmp_path)
    over = anyio.Event()

    async def handler(batch: list[Message]) -> None:
        try:
            await anyio.sleep_forever()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await over.wait()
            raise

    source = MemorySource(published("a"))
    settings = Settings(concurrency=1, batch=2, drain_timeout=0.0, grace=0.01)
    async with started(Consumer(source, handler, settings=settings, history=history)) as run:
        await until(lambda: rows(history, "started"))
        run.consumer.stop()
        await until(lambda: rows(history, "revoked"))
        await turns()
        over.set()
        assert await run.end() is None
    assert len(rows(history, "zombie")) == 1
    assert verdicts(tmp_path)["ZombiesDoNotCount"].status == "passed"


class AsksAndDelivers(MemorySource):
    """After the revoke, the source delivers the first run again, because it was already under way."""

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__(broker)
        self.first: Delivered | None = None

    async def receive(self, room: Room) -> Sequence[SourceEvent]:
        events = [*await super().receive(room)]
        self.first = self.first or next((event for event in events if isinstance(event, Delivered)), None)
        if self.first is not None and any(isinstance(event, Revoking) for event in events):
            again = [Message(m.partition, m.position, m.key, m.size, m.raw, m.token) for m in self.first.run]
            events.append(Delivered(self.first.partition, again, self.first.size))
        return events


@pytest.mark.anyio
async def test_redeliveries_during_a_drain_have_no_rows(tmp_path: Path) -> None:
    history = History(tmp_path)
    source = AsksAndDelivers(published("a"))
    handler = Gated()
    async with started(consumer_of(source, handler, history=history)) as run:
        await until(lambda: handler.running == 1)
        source.revoke(0, timeout=30.0)
        await until(lambda: run.consumer.status().redelivered == {"held": 1})
        handler.let(0)
        await until(lambda: source.called("release"))
        assert await run.stop() is None
    assert len(rows(history, "delivered")) == 1
    assert rows(history, "redelivered") == []
    assert {verdict.status for verdict in verdicts(tmp_path).values()} == {"passed"}
