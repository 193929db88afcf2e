"""An unfinished message that the broker is about to delete raises an alarm in the log, the status and a gauge."""

from __future__ import annotations

import logging

import pytest

from lanes.core.types import ACK, Message, Partition
from lanes.observe.instruments import GAUGES
from lanes.observe.retention import RetentionWatch
from lanes.retention import Pace, by_age, by_newer, soonest
from lanes.source import Retention
from memsource import GroupSource, MemorySource
from tests.core.builders import assigned, deliver, new_engine, take_all
from tests.fakes.grouped import group_of
from tests.fakes.support import Gated, consumer_of, published, started, until

SPAN = 100.0


class Broker:
    """A source that keeps each message for ``SPAN`` seconds, from the time at its position."""

    def __init__(self) -> None:
        self.now = 0.0
        self.asked: list[int] = []
        self.known = True

    def retention(self, message: Message) -> Retention | None:
        self.asked.append(message.position)
        return by_age(float(message.position), SPAN, self.now, "retention.ms=100000") if self.known else None


class Stand:
    """A partition whose messages 0, 10 and 20 were written at these seconds and delivered at 30 s."""

    def __init__(self, *, floor: int | None = 0, key: bytes | None = b"secret") -> None:
        self.engine = new_engine()
        self.partition: Partition = assigned(self.engine, floor=floor)
        self.run = deliver(self.engine, self.partition, 0, 10, 20, key=key, now=30.0)
        self.broker = Broker()
        self.watch = RetentionWatch("orders", self.broker)

    def look(self, now: float) -> float | None:
        """Look; return the time left of the message in danger."""
        self.broker.now = now
        self.watch.look([self.partition], now)
        found = self.watch.expiring(self.partition, now)
        return None if found is None else found.left


@pytest.mark.parametrize("floor", [0, None])
def test_the_alarm_comes_while_a_tenth_of_the_time_is_left(floor: int | None, caplog: pytest.LogCaptureFixture) -> None:
    stand = Stand(floor=floor)
    assert stand.look(87.9) is None
    assert stand.look(88.0) == 12.0
    assert stand.look(89.0) == 11.0
    found = stand.watch.expiring(stand.partition, 90.5)
    assert found is not None and (found.partition, found.position, found.attempt) == ("S/0", 0, 1)
    assert (found.left, found.rule, found.key) == (9.5, "retention.ms=100000", b"secret")
    assert "secret" not in repr(found)
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.getMessage().startswith("orders: S/0 position 0, key ")
    assert "attempt 1, is unfinished for 58.0 s, and the broker may delete it in 12.0 s by retention.ms=100000" in (
        record.getMessage()
    )
    assert "secret" not in record.getMessage()


def test_the_log_says_once_more_that_the_message_may_be_deleted(caplog: pytest.LogCaptureFixture) -> None:
    stand = Stand()
    for now in range(88, 140):
        stand.look(float(now))
    assert [("may delete it in 12.0 s" in line, "may have deleted it" in line) for line in caplog.messages] == [
        (True, False),
        (False, True),
    ]
    assert stand.look(140.0) == 0.0


def test_lines_about_different_messages_of_a_partition_are_half_a_minute_apart(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stand = Stand(key=None)
    take_all(stand.engine)
    lines = []
    for now in range(95, 130):
        if now == 99:
            stand.engine.finish(stand.run[0], ACK, 99.0)
        stand.look(float(now))
        lines += [(now, line.partition(" position ")[2][:2]) for line in caplog.messages]
        caplog.clear()
    # Message 10 is in danger from 99 s on.
    assert lines == [(95, "0,"), (125, "10")]


def test_many_partitions_in_danger_share_a_line(caplog: pytest.LogCaptureFixture) -> None:
    stands = [Stand() for _ in range(8)]
    watch = RetentionWatch("orders", stands[0].broker)
    stands[0].broker.now = 95.0
    partitions = [stand.partition for stand in stands]
    watch.look(partitions, 95.0)
    assert len(caplog.messages) == 6
    assert caplog.messages[5] == "orders: 3 more partitions have an unfinished message that the broker may delete soon"
    assert all(watch.expiring(partition, 95.0) is not None for partition in partitions)
    # The next look names the others.
    watch.look(partitions, 96.0)
    watch.look(partitions, 97.0)
    lines = caplog.messages
    assert [" position 0, key " in line for line in lines] == [*[True] * 5, False, *[True] * 3]


def test_each_of_many_blocked_partitions_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    stands = [Stand() for _ in range(23)]
    watch = RetentionWatch("orders", stands[0].broker)
    named: list[int] = []
    stands[0].broker.now = 95.0
    for second in range(100):
        watch.look([stand.partition for stand in stands], 95.0 + second)
        named.append(sum(" position 0, key " in line for line in caplog.messages))
        caplog.clear()
    assert named == [5, 5, 5, 5, 3, *[0] * 95]


class Soon:
    """A source whose broker is about to delete everything."""

    def retention(self, message: Message) -> Retention | None:
        return Retention(5.0, SPAN, "retention.ms=100000")


def test_many_partitions_with_ever_new_messages_write_few_lines(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stands = [Stand() for _ in range(50)]
    watch = RetentionWatch("orders", Soon())
    partitions = [stand.partition for stand in stands]
    monkeypatch.setattr(
        "lanes.observe.retention._head", lambda partition, now: Message(partition, int(now), None, 10, None, None)
    )
    for second in range(600):
        watch.look(partitions, 100.0 + second)
    # One line for each partition, and then six lines in 30 s.
    assert 50 < len(caplog.messages) <= 50 + 6 * 21


def test_a_message_is_watched_when_it_was_unfinished_for_a_second() -> None:
    stand = Stand()
    assert stand.look(30.9) is None and stand.broker.asked == []
    stand.look(31.0)
    assert stand.broker.asked == [0]


def test_a_finished_message_raises_no_alarm() -> None:
    stand = Stand(floor=None, key=None)
    take_all(stand.engine)
    assert stand.look(95.0) == 5.0
    stand.engine.finish(stand.run[0], ACK, 95.5)
    assert stand.watch.expiring(stand.partition, 95.5) is None
    assert stand.look(96.0) is None


def test_a_lost_partition_is_not_watched() -> None:
    stand = Stand()
    assert stand.look(95.0) == 5.0
    stand.engine.lose(stand.partition)
    assert stand.look(96.0) is None


def test_without_known_retention_rules_no_message_raises_an_alarm() -> None:
    stand = Stand()
    stand.broker.known = False
    assert stand.look(1_000.0) is None


# --- estimates


def test_a_retention_by_age_ends_at_the_age() -> None:
    assert by_age(100.0, 60.0, 130.0, "r") == Retention(30.0, 60.0, "r")
    assert by_age(100.0, 60.0, 500.0, "r") == Retention(0.0, 60.0, "r")
    assert by_age(100.0, 0.0, 100.0, "r").span > 0


def test_a_retention_by_newer_messages_follows_their_pace() -> None:
    assert by_newer(75.0, 100.0, 5.0, "r") == Retention(5.0, 20.0, "r")
    assert by_newer(175.0, 100.0, 5.0, "r") == Retention(0.0, 20.0, "r")
    assert by_newer(75.0, 100.0, 0.0, "r") is None


def test_the_rule_that_leaves_the_smallest_share_counts() -> None:
    slow, fast = Retention(50.0, 1_000.0, "slow"), Retention(10.0, 20.0, "fast")
    assert soonest([None, fast, slow]) is slow
    assert soonest([None]) is soonest([]) is None


def test_the_pace_of_new_messages_covers_the_last_minute() -> None:
    pace = Pace()
    assert pace.per_second() == 0.0
    pace.note(1_000.0, 10.0)
    assert pace.per_second() == 0.0
    pace.note(1_000.0, 10.0)
    assert pace.per_second() == 0.0
    for second in range(11, 200):
        pace.note(1_000.0 + (second - 10) * 3, float(second))
    assert pace.per_second() == pytest.approx(3.0)
    for second in range(200, 265):
        pace.note(1_567.0, float(second))
    assert pace.per_second() == 0.0
    pace.note(5.0, 300.0)
    assert pace.per_second() == 0.0


# --- in a consumer


class Forgetful(MemorySource):
    """A source whose broker is about to delete everything."""

    def retention(self, message: Message) -> Retention | None:
        return Retention(3.0, 60.0, "max_age=60 s")


@pytest.mark.anyio
async def test_the_status_and_the_gauge_name_the_message(caplog: pytest.LogCaptureFixture) -> None:
    handler = Gated()
    async with started(consumer_of(Forgetful(published("secret")), handler)) as run:
        await until(lambda: run.consumer.active and handler.running == 1)
        await until(lambda: [each for each in run.consumer.status().partitions.values() if each.expiring is not None])
        status = run.consumer.status()
        ((name, partition),) = status.partitions.items()
        assert partition.expiring is not None and partition.expiring.position == 0
        assert 0.0 < partition.expiring.left <= 3.0
        (gauge,) = [each for each in GAUGES if each.name == "lanes.expiring.left"]
        ((left, labels),) = gauge.read(status)
        assert left == partition.expiring.left and "/".join(labels.values()) == name
        assert run.consumer.healthy
        handler.let(0)
        await until(lambda: not list(gauge.read(run.consumer.status())))
        assert await run.stop() is None
    assert len([line for line in caplog.messages if "max_age=60 s" in line]) == 1


@pytest.mark.anyio
async def test_a_source_without_retention_starts_no_watch() -> None:
    async with started(consumer_of(GroupSource(group_of(()), "m"), Gated())) as run:
        await until(lambda: run.consumer.active)
        assert run.consumer._life.run is not None and run.consumer._life.run.retention is None
        assert await run.stop() is None
