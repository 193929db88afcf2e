"""A partition with messages at the broker, with room and without deliveries makes the consumer unhealthy."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence

import pytest

from lanes.core.types import Partition, PartitionId, Room
from lanes.observe.intake import IntakeWatch
from lanes.source import Backlog, SourceEvent
from memsource import GroupSource
from memsource.memory.scripted import READER
from tests.fakes.grouped import HandClock, group_of
from tests.fakes.support import Gated, consumer_of, started, until

FREE = Room(10, 1_000)
AFTER = 8.0


class Broker:
    """A source that knows its backlogs."""

    def __init__(self) -> None:
        self.backlogs: dict[int, Backlog] = {}
        self.asked = 0

    def backlog(self, partition: Partition) -> Backlog:
        self.asked += 1
        return self.backlogs.get(partition.id.number, Backlog(None))


class Stand:
    """A watch over some partitions that looks once a second."""

    def __init__(self, partitions: int = 1) -> None:
        self.broker = Broker()
        self.watch = IntakeWatch("orders", self.broker, AFTER)
        assert self.watch.period == 1.0
        self.partitions = [Partition(PartitionId("t", number), READER) for number in range(partitions)]
        for partition in self.partitions:
            partition.steady = True
        self.now = 100.0

    def look(self, times: int = 1, room: Room = FREE, *, before: Callable[[], object] = lambda: None) -> list[str]:
        for _ in range(times):
            before()
            self.now += 1.0
            self.watch.look(self.partitions, room, self.now)
        return self.watch.reasons()


def test_a_silent_partition_is_named_with_its_backlog_and_the_last_error() -> None:
    stand = Stand(2)
    stand.broker.backlogs = {0: Backlog(41, "TIMED_OUT: no\nanswer", 2.5), 1: Backlog(0)}
    assert stand.look(9) == []
    (reason,) = stand.look()
    assert reason == (
        "t/0 delivers nothing for 9.0 s, although 41 messages wait at the broker and the buffer has room; the last "
        "error of the client, 2.5 s ago: TIMED_OUT: no\\nanswer"
    )
    stand.broker.backlogs[0] = Backlog(42)
    (reason,) = stand.look()
    assert reason.endswith(
        "although 42 messages wait at the broker and the buffer has room; the client reports no error"
    )
    stand.broker.backlogs[0] = Backlog(42, "closed")
    (reason,) = stand.look()
    assert reason.endswith("; the last error of the client: closed")
    # A known cause counts more than a former error.
    stand.broker.backlogs[0] = Backlog(42, "closed", 1.0, "its limit\nis reached")
    assert stand.look()[0].endswith("wait at the broker and the buffer has room; its limit\\nis reached")


def test_the_text_of_an_error_is_bounded() -> None:
    stand = Stand()
    stand.broker.backlogs = {0: Backlog(1, "x" * 10_000)}
    (reason,) = stand.look(12)
    assert len(reason) < 700


def test_any_delivery_and_any_read_gap_end_a_silence() -> None:
    stand = Stand()
    stand.broker.backlogs = {0: Backlog(1)}
    assert stand.look(9) == []
    assert stand.look(before=lambda: stand.watch.delivered(stand.partitions[0])) == []
    assert stand.look(9) == []
    assert stand.look()
    # One look without a backlog is enough too.
    stand.broker.backlogs = {0: Backlog(0)}
    assert stand.look() == []
    stand.broker.backlogs = {0: Backlog(1)}
    assert stand.look(9) == []


@pytest.mark.parametrize("unknown", [Backlog(None), Backlog(None, "no answer", 1.0), Backlog(0)])
def test_an_unknown_or_empty_backlog_is_no_silence(unknown: Backlog) -> None:
    stand = Stand()
    stand.broker.backlogs = {0: unknown}
    assert stand.look(50) == []


def test_without_room_nothing_is_silent() -> None:
    stand = Stand()
    stand.broker.backlogs = {0: Backlog(5)}
    paused = FREE._replace(paused=frozenset(stand.partitions))
    for full in (FREE._replace(messages=0), FREE._replace(messages=-1), FREE._replace(bytes=0), paused):
        asked = stand.broker.asked
        assert stand.look(30, full) == []
        assert stand.broker.asked == asked
        # Time without room does not count.
        assert stand.look(9) == []
        assert stand.look()


def test_a_partition_that_is_given_up_is_not_silent() -> None:
    stand = Stand(2)
    stand.broker.backlogs = {0: Backlog(5), 1: Backlog(5)}
    assert len(stand.look(10)) == 2
    stand.partitions[0].steady = False
    (reason,) = stand.look()
    assert reason.startswith("t/1 ")
    del stand.partitions[1]
    assert stand.look() == []


def test_time_in_which_the_process_was_frozen_does_not_count_as_silence() -> None:
    stand = Stand()
    stand.broker.backlogs = {0: Backlog(5)}
    stand.look(5)
    stand.now += 1_000.0
    assert stand.look(9) == []
    assert stand.look()


def test_many_silent_partitions_share_a_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lanes")
    stand = Stand(8)
    stand.broker.backlogs = {number: Backlog(1) for number in range(8)}
    reasons = stand.look(30)
    assert len(reasons) == 6
    assert reasons[5] == "3 more partitions deliver nothing, although messages wait"
    # Each silence is logged once, and so is its end.
    lines = [each.getMessage() for each in caplog.records]
    assert [line.partition(" for ")[0] for line in lines[:5]] == [f"orders: t/{n} delivers nothing" for n in range(5)]
    assert lines[5:] == ["orders: 3 more partitions deliver nothing, although messages wait"]
    caplog.clear()
    stand.look(before=lambda: stand.watch.delivered(stand.partitions[7]))
    assert [(each.levelname, each.getMessage()) for each in caplog.records] == [
        ("INFO", "orders: t/7 delivers again after 30.0 s")
    ]


@pytest.mark.parametrize("after", [1e-6, 0.1, 0.4])
def test_a_backlog_that_may_be_older_than_the_last_delivery_is_no_silence(after: float) -> None:
    watch = IntakeWatch("orders", broker := Broker(), after)
    partition = Partition(PartitionId("t", 0), READER)
    partition.steady = True
    broker.backlogs = {0: Backlog(5)}
    found = []
    for step in range(40):
        now = 100.0 + step / 10
        watch.look([partition], FREE, now)
        found += [now] * bool(watch.reasons())
    assert found[0] == pytest.approx(103.1)


def test_a_short_limit_shortens_the_period() -> None:
    assert IntakeWatch("orders", Broker(), 3.6).period == 0.9
    # The time until a report is at least 3 s, so more looks would find nothing more.
    assert IntakeWatch("orders", Broker(), 1e-6).period == 0.75
    assert IntakeWatch("orders", Broker(), 300.0).period == 1.0


# --- in a consumer


class Hanging(GroupSource):
    """A source that delivers nothing while its broker hangs, and knows its backlog."""

    hangs = False

    def backlog(self, partition: Partition) -> Backlog:
        log = self.group.topic.log(partition.id.number)
        return Backlog(log.end - self._position(partition.id.number), "the broker hangs" if self.hangs else "")

    async def receive(self, room: Room) -> Sequence[SourceEvent]:
        return await super().receive(room._replace(messages=0) if self.hangs else room)


@pytest.mark.anyio
async def test_a_consumer_whose_source_hangs_is_unhealthy_until_it_delivers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lanes.observe.intake.FACTS_AGE", 0.0)
    group = group_of(())
    source, handler = Hanging(group, "m"), Gated(free=[b"a"])
    async with started(consumer_of(source, handler, unhealthy_after=0.2)) as run:
        await until(lambda: run.consumer.active)
        source.hangs = True
        # The next call of receive meets the broker that hangs.
        run.consumer.pause()
        run.consumer.resume()
        group.publish("0", key="a")
        await until(lambda: run.consumer.health().reasons)
        (reason,) = run.consumer.health().reasons
        assert re.match(r"memory/0 delivers nothing for \d+\.\d", reason)
        assert (
            "although 1 messages wait at the broker and the buffer has room; the last error of the client: the "
        ) in reason
        assert not run.consumer.healthy
        source.hangs = False
        run.consumer.pause()
        run.consumer.resume()
        await until(lambda: handler.ended == [0])
        await until(lambda: run.consumer.healthy)
        assert await run.stop() is None


@pytest.mark.anyio
async def test_a_paused_consumer_is_healthy_although_messages_wait() -> None:
    clock = HandClock()
    group = group_of(("a", "b"))
    source = Hanging(group, "m")
    consumer = consumer_of(source, Gated(), clock=clock, unhealthy_after=0.2)
    consumer.pause()
    async with started(consumer) as run:
        await until(lambda: run.consumer.active)
        for _ in range(20):
            await clock.asked_again(1)
            clock.now += 0.05
        assert run.consumer.health().reasons == ()
        assert await run.stop() is None


@pytest.mark.anyio
async def test_a_source_without_a_backlog_starts_no_watch() -> None:
    async with started(consumer_of(GroupSource(group_of(()), "m"), Gated())) as run:
        await until(lambda: run.consumer.active)
        assert run.consumer._life.run is not None and run.consumer._life.run.intake is None
        assert await run.stop() is None
