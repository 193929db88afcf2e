"""A start at a time: each partition begins at its first message of that time or later, and the group decides once."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta, timezone

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import NewPartitions

from lanes_kafka.client.offsets import milliseconds
from tests.kafka.conftest import MakeTopic
from tests.kafka.members import PROTOCOLS, Story, Work, group
from tests.kafka.workload import QUIET, Topic, produce, until

pytestmark = pytest.mark.anyio

# Old enough for the broker, which refuses times of the future, and young enough for its retention.
_BASE = int(datetime.now(UTC).timestamp()) * 1000 - 3_600_000
_TIMES: Sequence[Sequence[int]] = (
    # Rising, with equal times.
    (1, 2, 2, 2, 5, 9, 9, 14),
    # The clocks of producers differ.
    (4, 1, 9, 2, 7, 14, 3),
    (),
    (9,),
)
_LATEST = 14
_REFRESH = {"topic_metadata_refresh_interval_ms": 300}


def at(milliseconds: float) -> datetime:
    """The event time so many milliseconds after the base of this module."""
    return datetime.fromtimestamp(_BASE // 1000, UTC) + timedelta(milliseconds=milliseconds)


def produce_at(topic: Topic, partition: int, times: Sequence[int]) -> None:
    """Produce one message for each event time, and wait for all confirmations. Blocks."""
    producer = Producer({**QUIET, "bootstrap.servers": topic.url, "enable.idempotence": True})
    for time in times:
        producer.produce(topic.name, b"", key=b"k", partition=partition, timestamp=_BASE + time)
    assert not producer.flush(20)


def first(times: Sequence[int], start: float) -> int:
    """The position of the first message of this time or later; without such a message, the end."""
    return next((position for position, time in enumerate(times) if time >= start), len(times))


@pytest.mark.long
@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_start_time_delivers_exactly_the_messages_from_that_time_on(protocol: str, topic: MakeTopic) -> None:
    events = topic(len(_TIMES))
    for number, times in enumerate(_TIMES):
        produce_at(events, number, times)
    known = sorted({time for times in _TIMES for time in times})
    # A microsecond after a message, the start excludes the message; the last start is after the end.
    starts = [start for time in known for start in (time, time + 0.001)]
    expected = {
        f"m{index}": {number: first(times, start) for number, times in enumerate(_TIMES)}
        for index, start in enumerate(starts)
    }
    story = Story()
    async with group(events, protocol, Work(story)) as members:
        for name, start in zip(expected, starts, strict=True):
            members.start(name, config={"group.id": f"{members.id}-{name}"}, start=at(start))
        await members.owning(**dict.fromkeys(expected, len(_TIMES)))
        for name, wanted in expected.items():
            left = sum(len(_TIMES[number]) - position for number, position in wanted.items())
            await until(lambda name=name, left=left: len(story.of("end", name)) >= left)  # type: ignore[misc]
    for name, wanted in expected.items():
        assert {each.partition: each.position for each in story.of("assigned", name)} == wanted, name
        handled = sorted((each.partition, each.position) for each in story.of("end", name))
        assert handled == [
            (number, position) for number in wanted for position in range(wanted[number], len(_TIMES[number]))
        ]
    assert expected[f"m{len(starts) - 1}"] == {number: len(times) for number, times in enumerate(_TIMES)}


@pytest.mark.long
@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_time_is_looked_up_once_for_a_group(protocol: str, topic: MakeTopic) -> None:
    events = topic(3)
    produce_at(events, 0, (1, 5, 9))
    produce_at(events, 1, (1, 2))
    decided = {0: 1, 1: 2, 2: 0}
    story = Story()
    work = Work(story)
    async with group(events, protocol, work) as members:
        one = members.start("first", start=at(5))
        one.consumer.pause()
        await members.owning(first=3)
        await one.consumer.drain()
    assert story.of("start") == [] and members.committed() == [1, 2, 0]
    # Between the runs: messages before and after the time of either start.
    for number in range(3):
        produce_at(events, number, (3, 20))
    async with group(events, protocol, work) as members:
        members.start("second", start=at(20))
        await members.owning(second=3)
        await until(lambda: len(work.ended) == 8)
    for name in ("first", "second"):
        assert {each.partition: each.position for each in story.of("assigned", name)} == decided
    assert sorted(work.ended) == [(0, 1), (0, 2), (0, 3), (0, 4), (1, 2), (1, 3), (2, 0), (2, 1)]
    assert set(work.ended.values()) == {1} and members.committed() == [5, 4, 2]


@pytest.mark.long
@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_partition_added_after_the_first_run_starts_at_its_beginning(protocol: str, topic: MakeTopic) -> None:
    events = topic(1)
    produce_at(events, 0, (1, 5, 9))
    story = Story()
    work = Work(story)
    async with group(events, protocol, work, **_REFRESH) as members:
        members.start("first", start=at(9))
        await members.owning(first=1)
        # One partition joins a running member, the other one waits for the next run.
        for count in (2, 3):
            events.admin.create_partitions([NewPartitions(events.name, count)])[events.name].result(10)
            events.partitions = count
            await until(events.exists)
            produce_at(events, count - 1, (1, 2))
            if count == 2:
                await members.owning(first=2)
                await until(lambda: len(work.ended) == 3)
                members.members[0].consumer.stop()
                await members.members[0].ended.wait()
        members.start("second", start=at(9))
        await members.owning(second=3)
        await until(lambda: len(work.ended) == 5)
    assert sorted(work.ended) == [(0, 2), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert set(work.ended.values()) == {1} and members.committed() == [3, 2, 2]


async def test_a_start_time_inside_an_open_transaction_loses_nothing(topic: MakeTopic) -> None:
    events = topic(1)
    produce_at(events, 0, (1, 2))
    producer = Producer({**QUIET, "bootstrap.servers": events.url, "transactional.id": events.name})
    producer.init_transactions(20)
    producer.begin_transaction()
    for time in (3, 9):
        producer.produce(events.name, b"", key=b"k", partition=0, timestamp=_BASE + time)
    assert not producer.flush(20)
    story = Story()
    work = Work(story)
    async with group(events, "eager", work) as members:
        members.start("first", start=at(9))
        await members.owning(first=1)
        producer.commit_transaction(20)
        produce(events, 1)
        await until(lambda: (0, 5) in work.ended)
    # The broker finds no message of the open transaction, so the group starts at the first one.
    assert [each.position for each in story.of("assigned")] == [2]
    assert sorted(work.ended) == [(0, 2), (0, 3), (0, 5)]


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        pytest.param(datetime(2026, 11, 23, 9, 30, 0, 9_000, UTC), 1_795_426_200_009, id="whole"),
        pytest.param(datetime(2026, 11, 23, 9, 30, 0, 9_001, UTC), 1_795_426_200_010, id="fraction"),
        pytest.param(
            datetime(2026, 11, 23, 11, 30, 0, 9_000, timezone(timedelta(hours=2))), 1_795_426_200_009, id="zone"
        ),
        # A float of seconds lies below these two milliseconds.
        pytest.param(datetime(1987, 2, 24, 12, 51, 47, 341_000, UTC), 541_169_507_341, id="1987"),
        pytest.param(datetime(2039, 6, 8, 1, 27, 14, 732_000, UTC), 2_191_109_234_732, id="2039"),
        # The broker reads -1 as the end, -2 as the beginning, and refuses most other negative times.
        pytest.param(datetime(1969, 12, 31, 23, 59, 59, 999_000, UTC), 0, id="1969"),
        pytest.param(datetime.min.replace(tzinfo=UTC), 0, id="first"),
        pytest.param(datetime.max.replace(tzinfo=UTC), 253_402_300_800_000, id="last"),
    ],
)
def test_a_time_is_rounded_up_to_its_millisecond(start: datetime, expected: int) -> None:
    assert milliseconds(start) == expected


@pytest.mark.long
async def test_a_start_time_before_1970_is_the_beginning(topic: MakeTopic) -> None:
    events = topic(1)
    produce_at(events, 0, (1, 2))
    work = Work(Story())
    async with group(events, "eager", work) as members:
        members.start("first", start=datetime(1969, 12, 31, 23, 59, 59, 999_000, UTC))
        await until(lambda: len(work.ended) == 2)
