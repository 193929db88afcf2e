"""The part of the contract suite about room: how much comes, of what nothing does, and what a cancelled call has taken;
see ``memsource.contract``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import anyio
import anyio.lowlevel

from lanes.core.types import Message, Room
from memsource.contract.harness import BYTES, Harness, Sample, expect, messages_of, numbered, opened, rising

__all__ = ["ROOM_CHECKS"]


async def check_room_is_respected(harness: Harness) -> None:
    """``receive`` never brings more new messages than it was given room for, however many there are."""
    await harness.publish(numbered(60))
    async with opened(harness) as session:
        for count in (1, 7, 13, 39):
            # The session looks at every single receive.
            messages = await session.take(count)
            await session.expect_nothing(Room(0, 0))
            await session.settle(messages)


async def check_no_room_no_messages(harness: Harness) -> None:
    """Without room nothing is delivered, and what is there comes when there is room."""
    await harness.publish(numbered(2))
    async with opened(harness) as session:
        await session.expect_nothing(Room(0, 0))
        await harness.publish(numbered(3))
        await session.expect_nothing(Room(0, 0))
        rising(await session.take(5))


async def check_paused_partitions_are_left_out(harness: Harness) -> None:
    """Nothing of a paused partition is delivered, neither right after its assignment nor what a client has fetched
    meanwhile; all of it comes afterwards."""
    samples = numbered(20)
    await harness.publish(samples)
    async with opened(harness) as session:
        everything = frozenset(await session.assigned())
        await session.expect_nothing(Room(20, BYTES, everything))
        first, *others = session.partitions
        came: list[Message] = []
        with anyio.move_on_after(harness.patience):
            while len(came) < 5:
                # The session refuses what comes of those that are paused.
                came += messages_of(await session.receive(Room(5 - len(came), BYTES, frozenset(others))))
        await session.settle(came)
        await session.expect_nothing(Room(20, BYTES, everything))
        for _ in range(len(samples) - len(came)):
            came += await session.take(1)
        await session.settle(came)
        await session.expect_nothing()
        expect(first in session.partitions, f"{first!r} was taken away")
    expect(sorted(m.value for m in came) == sorted(s.value for s in samples), "other messages came than were published")


async def check_large_message_comes_alone(harness: Harness) -> None:
    """A message larger than the room for bytes comes all the same: it must not hold up its partition for ever."""
    await harness.publish([Sample(b"large", b"x" * 4096) for _ in range(3)])
    async with opened(harness) as session:
        for _ in range(3):
            await session.take(1, size=100)


async def check_receive_is_cancel_safe(harness: Harness) -> None:
    """A cancelled ``receive`` has taken nothing: what it might have returned comes with the next call."""
    samples = numbered(120)
    messages: list[Message] = []
    async with opened(harness) as session:

        async def receive() -> None:
            messages.extend(messages_of(await session.receive(Room(len(samples) - len(messages), BYTES))))

        for number, sample in enumerate(samples):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(receive)
                for _ in range(number % 3):
                    await anyio.lowlevel.checkpoint()
                await harness.publish([sample])
                # Before, while and after the message arrives: in memory that is a matter of a few turns, of which
                # each is tried often because a scheduler may be random; over a network it takes longer.
                for _ in range(number % 6 if number < 80 else number - 80):
                    await anyio.lowlevel.checkpoint()
                tasks.cancel_scope.cancel()
        if len(messages) < len(samples):
            messages += await session.take(len(samples) - len(messages))
        await session.expect_nothing()
    rising(messages)
    came = sorted(message.value for message in messages)
    expect(came == sorted(sample.value for sample in samples), "other messages came than were published")


async def check_start_is_cancel_safe(harness: Harness) -> None:
    """A ``receive`` that is cancelled while it still gets things going leaves a source that works."""
    for moment in range(30):
        (sample,) = numbered(1)
        async with opened(harness) as session:
            await session.receive(Room(0, 0))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(session.source.receive, Room(0, 0))
                for _ in range(moment):
                    await anyio.lowlevel.checkpoint()
                tasks.cancel_scope.cancel()
            await harness.publish([sample])
            (message,) = await session.take(1)
            expect(message.value == sample.value, "another message than the published one came")
            await session.settle([message])
            await session.expect_unsettled(0)


ROOM_CHECKS: Final[tuple[Callable[[Harness], Awaitable[None]], ...]] = (
    check_room_is_respected,
    check_no_room_no_messages,
    check_paused_partitions_are_left_out,
    check_large_message_comes_alone,
    check_receive_is_cancel_safe,
    check_start_is_cancel_safe,
)
