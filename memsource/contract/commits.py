"""The contract suite of sources that commit one position for each partition; see ``memsource.contract``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import anyio
import anyio.lowlevel

from lanes.core.types import Partition, PartitionId, Room, Settlement
from lanes.source import Lost, Revoking
from memsource.contract.harness import Ability, Harness, expect, numbered, opened

__all__ = ["COMMIT_CHECKS"]


async def check_assigns_with_a_floor(harness: Harness) -> None:
    """A partition without a commit begins at or below its first message, without completed positions."""
    await harness.publish(numbered(10))
    async with opened(harness) as session:
        # The session compares each message with the floor of its partition.
        await session.take(10)
        for partition in session.partitions:
            expect(not partition.completed, f"{partition!r} begins with {partition.completed} completed, not ()")


async def check_starts_at_the_committed_floor(harness: Harness) -> None:
    """The next owner begins at the committed position, and receives no message below that position."""
    await harness.publish(numbered(20))
    async with opened(harness) as session:
        messages = await session.take(20)
        await session.settle(messages[:10])
        committed = session.committed
    async with opened(harness) as session:
        await session.assigned()
        for partition in session.partitions:
            _begins_at(partition, committed)
        again = await session.take(10)
        values = [message.value for message in again]
        same = sorted(values) == sorted(m.value for m in messages[10:])
        expect(same, f"the source delivered {values}, not only the unsettled messages")


async def check_completed_is_handed_over(harness: Harness) -> None:
    """The next owner receives the committed floor and the positions completed above the floor, unchanged."""
    await harness.publish(numbered(30))
    async with opened(harness) as session:
        messages = await session.take(30)
        await session.settle([message for number, message in enumerate(messages) if number % 4 not in (0, 3)])
        committed = session.committed
    async with opened(harness) as session:
        await session.assigned()
        for partition in session.partitions:
            settlement = committed.get(partition.id)
            if settlement is not None:
                before = settlement.floor, list(settlement.completed)
                after = partition.floor, list(partition.completed)
                expect(before == after, f"{partition!r} begins with {after}, but {before} was committed")
    expect(any(each.completed for each in committed.values()), "no commit has completed positions above its floor")


async def check_the_latest_commit_counts(harness: Harness) -> None:
    """Commits of a partition take effect in the order of the calls.

    Each commit replaces the former commit as a whole.
    """
    await harness.publish(numbered(12))
    async with opened(harness) as session:
        messages = await session.take(12)
        # The first commit has holes, the second commit has no holes.
        await session.settle(messages[1::2])
        await session.settle(messages[::2])
        committed = session.committed
    async with opened(harness) as session:
        for partition in await session.assigned():
            expect(not partition.completed, f"{partition!r} begins with {partition.completed} of an older commit")
            _begins_at(partition, committed)
        await session.expect_nothing()


async def check_partitions_commit_at_once(harness: Harness) -> None:
    """Calls of ``settle`` for different partitions may run at the same time."""
    await harness.publish(numbered(20))
    async with opened(harness) as session:
        for message in await session.take(20):
            session.ledgers[message.partition].settle(message.position)
        async with anyio.create_task_group() as tasks:
            for partition in session.partitions:
                tasks.start_soon(session.source.settle, [session.commit_of(partition)])
        await session.expect_unsettled(0)


async def check_release_commits_all(harness: Harness) -> None:
    """When ``release`` returns, the broker has committed all earlier settlements, even before the source closes."""
    await harness.publish(numbered(12))
    async with opened(harness) as session:
        messages = await session.take(12)
        await session.settle(messages[:9])
        for partition in list(session.partitions):
            await session.source.release(partition)
        left = await harness.unsettled()
        expect(left == 3, f"{left} messages are unsettled right after release(), but must be 3")
    async with opened(harness) as session:
        again = await session.take(3)
        expect(sorted(m.value for m in again) == sorted(m.value for m in messages[9:]), f"{again} were delivered again")
        await session.expect_nothing()


async def check_nothing_more_after_revoking(harness: Harness) -> None:
    """The next owner receives the messages undelivered at ``Revoking``, but no message settled after ``Revoking``."""
    await harness.publish(numbered(20))
    async with opened(harness) as session:
        messages = await session.take(5)
        partitions = list(session.partitions)
        for partition in partitions:
            await harness.revoke(partition)
            told = [event for event in await session.receive(Room(0, 0)) if isinstance(event, Revoking)]
            expect(
                [event.partition for event in told] == [partition],
                f"receive() returned {told}, not Revoking of {partition!r}",
            )
        await session.expect_nothing()
        await session.settle(messages)
        for partition in partitions:
            await session.source.release(partition)
    async with opened(harness) as session:
        await session.take(15)
        await session.expect_nothing()


async def check_nothing_more_after_loss(harness: Harness) -> None:
    """After ``Lost``, the source delivers no more messages of the lost assignment."""
    await harness.publish(numbered(20))
    async with opened(harness) as session:
        await session.take(5)
        for partition in list(session.partitions):
            await harness.lose(partition)
            (event,) = await session.receive(Room(0, 0))
            told = isinstance(event, Lost) and event.partition is partition
            expect(told, f"receive() returned {event!r}, not Lost of {partition!r}")
        await session.expect_nothing()


def _begins_at(partition: Partition, committed: Mapping[PartitionId, Settlement]) -> None:
    if partition.id in committed:
        floor = committed[partition.id].floor
        expect(partition.floor == floor, f"{partition!r} begins at {partition.floor}, but {floor} was committed")


COMMIT_CHECKS: Final[tuple[tuple[Callable[[Harness], Awaitable[None]], tuple[Ability, ...]], ...]] = (
    (check_assigns_with_a_floor, ("commits",)),
    (check_starts_at_the_committed_floor, ("commits",)),
    (check_completed_is_handed_over, ("commits", "hands over")),
    (check_the_latest_commit_counts, ("commits",)),
    (check_partitions_commit_at_once, ("commits",)),
    (check_release_commits_all, ("commits",)),
    (check_nothing_more_after_revoking, ("commits", "revoke")),
    (check_nothing_more_after_loss, ("commits", "lose")),
)
"""All checks, each with the abilities that it needs."""
