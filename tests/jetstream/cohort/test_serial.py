"""order="serial" over a cohort: one member at a time handles the whole stream."""

from __future__ import annotations

import anyio
import pytest

import lanes
from memsource import MemoryAttempts
from tests.jetstream.cohort_workload import CohortStream, Log, members, owned
from tests.jetstream.conftest import MakeCohortStream
from tests.jetstream.workload import never_called, until

pytestmark = pytest.mark.anyio


class NoDeadLetters:
    """Dead letters that a test expects never to be written."""

    async def open(self) -> None:
        """Do nothing: a test has no connection."""

    async def put(self, dead_letter: lanes.DeadLetter) -> None:
        raise AssertionError(f"{dead_letter!r} was to be skipped")

    async def aclose(self) -> None:
        """Do nothing: a test has no connection."""


class Letters:
    """The dead letters of a test, in memory. ``repaired``: whether the cause of the failure is gone."""

    def __init__(self) -> None:
        self.positions: list[int] = []
        self.repaired = False

    async def open(self) -> None:
        """Do nothing: a test has no connection."""

    async def put(self, dead_letter: lanes.DeadLetter) -> None:
        self.positions.append(dead_letter.position)

    async def aclose(self) -> None:
        """Do nothing: a test has no connection."""


async def test_with_order_serial_only_one_of_two_members_gets_messages(make_cohort_stream: MakeCohortStream) -> None:
    """One message at a time in the whole stream: one cohort partition, whose lease is the reservation."""
    stream, log = await make_cohort_stream(partitions=1), Log()
    settings = lanes.Settings(order="serial", poison="exit")
    keys = [stream.key(0, number) for number in range(5)]
    a, b = (lanes.Consumer(stream.source(name), log.handler(name), settings=settings) for name in "ab")
    async with members() as running:
        await stream.publish(*keys, times=4)
        running.join(a, b)
        await log.handled(20)
        await until(lambda: a.ready and b.ready)
        assert len({run.member for run in log.runs}) == 1
        winner, other = (a, b) if log.runs[0].member == "a" else (b, a)
        await stream.publish(*keys, times=4)
        await log.handled(40)
        assert len({run.member for run in log.runs}) == 1
        await running.leave(winner)
        await stream.publish(*keys)
        await log.handled(45)
        assert owned(other) == {0}
    assert log.violations == []
    assert [run.position for run in log.runs] == list(range(1, 46))


async def test_with_order_serial_a_policy_that_skips_messages_is_refused(make_cohort_stream: MakeCohortStream) -> None:
    """By default, a message that exhausts its retries is not skipped, and the next owner begins with this message."""
    stream, log = await make_cohort_stream(partitions=1), Log()
    with pytest.raises(lanes.ConfigError, match='order="serial" with poison="skip"'):
        lanes.Settings(order="serial", poison="skip")
    keys = [stream.key(0, number) for number in range(3)]
    await stream.publish(*keys)

    async def fail(message: lanes.Message) -> None:
        if message.position == 2:
            raise lanes.Term("never")

    settings = lanes.Settings(order="serial")
    a = lanes.Consumer(stream.source("a"), log.handler("a", fail), settings=settings, dead_letters=NoDeadLetters())
    with anyio.fail_after(20):
        with pytest.raises(lanes.HandlerHalted):
            await a.run()
    b = lanes.Consumer(stream.source("b"), log.handler("b"), settings=settings, dead_letters=NoDeadLetters())
    async with members() as running:
        running.join(b)
        await log.handled(3)
    assert [(run.member, run.position) for run in log.runs] == [("a", 1), ("a", 2), ("b", 2), ("b", 3)]
    assert log.violations == []


async def test_with_order_serial_a_dead_letter_still_blocks_the_partition_after_a_handover(
    make_cohort_stream: MakeCohortStream,
) -> None:
    """With a store of attempts the next owner neither runs the message again nor writes a second dead letter."""
    stream, log, store = await make_cohort_stream(partitions=1), Log(), MemoryAttempts()
    await stream.publish(*(stream.key(0, number) for number in range(4)))
    dead_letters = Letters()

    async def fail(message: lanes.Message) -> None:
        if message.position == 2 and not dead_letters.repaired:
            raise lanes.Term("never")

    def member(name: str) -> lanes.Consumer:
        settings = lanes.Settings(order="serial", poison="block_and_dlq")
        handler = log.handler(name, fail)
        source = stream.source(name)
        return lanes.Consumer(source, handler, settings=settings, dead_letters=dead_letters, attempts=store)

    a, b = member("a"), member("b")
    async with members() as running:
        running.join(a)
        await until(lambda: a.ready and a.status().blocked == 1)
        assert dead_letters.positions == [2]
        await running.leave(a)
        running.join(b)
        await until(lambda: b.ready and b.status().blocked == 1)
        assert [(run.member, run.position) for run in log.runs] == [("a", 1), ("a", 2)]
        dead_letters.repaired = True
        assert b.unblock(stream.key(0, 1).encode()) == 1
        await log.handled(4)
    assert [run.position for run in log.of("b")] == [2, 3, 4]
    assert dead_letters.positions == [2]
    assert log.violations == []


async def test_order_serial_over_several_partitions_is_refused(cohort_stream: CohortStream) -> None:
    consumer = lanes.Consumer(cohort_stream.source("a"), never_called, settings=lanes.Settings(order="serial"))
    with pytest.raises(lanes.ConfigError, match=r"serial.*partition"):
        await consumer.run()
