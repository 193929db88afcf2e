"""The contract suite of sources: each check raises ``ContractBroken`` if the backend breaks a promise.

The author of a source writes a ``Harness`` for the broker and runs every check of ``checks(harness.can)``, each with a
new harness, under any test runner:

    @pytest.mark.parametrize("check", checks(OurHarness.can), ids=lambda check: check.__name__)
    async def test_our_source(check: Check) -> None:
        await check(OurHarness())

A harness lists in ``can`` the abilities of its broker and source. Checks that need other abilities do not run.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Awaitable, Callable, Collection
from typing import Final, get_args

import anyio
import anyio.lowlevel

from lanes.core.types import Message, Room
from lanes.source import Assigned, Exhausted, Lost, Revoking
from memsource.contract.commits import COMMIT_CHECKS
from memsource.contract.harness import (
    BYTES,
    Ability,
    ContractBroken,
    Harness,
    Sample,
    checks_within,
    expect,
    messages_of,
    numbered,
    opened,
    rising,
)

__all__ = ["NOT_CHECKED", "Ability", "Check", "ContractBroken", "Harness", "Sample", "checks"]

Check = Callable[[Harness], Awaitable[None]]
"""One promise of the contract, as a function that raises ``ContractBroken`` if the source breaks it."""

NOT_CHECKED: Final = {
    "revoke_limit_from": "the trait is a name in the text of an error",
    "max_in_flight": "the suite would have to publish more messages than the bound; the broker itself keeps the bound",
    "remembers": "a settlement would have to be lost between source and broker; not every harness can lose settlements",
    "ordered": "the trait is about several processes; the suite runs one source at a time",
    "exclusive": "the trait is about several processes; the suite runs one source at a time",
    "divides": "the trait is about the requests of an operator; the suite assigns whole partitions",
    "consumer_target": "the trait is advice, which the runtime only reports",
    "queues": "the trait names the partitioned queues of the source, which the runtime only reports",
}
"""The traits that the suite cannot check, and the reasons."""

_CHECKS: Final[list[tuple[Check, tuple[Ability, ...]]]] = []


def checks(can: Collection[Ability]) -> list[Check]:
    """Return the checks for a source with some abilities, in order.

    Args:
        can: The abilities, as in ``Harness.can``.

    Returns:
        The checks whose needed abilities are all in ``can``.

    Raises:
        ValueError: A name in ``can`` is not an ability. The error prevents a misspelt ability from omitting checks.
    """
    return checks_within(_CHECKS, can, get_args(Ability))


def _check(*needs: Ability) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        @functools.wraps(check)
        async def plain(harness: Harness) -> None:
            try:
                await check(harness)
            except BaseExceptionGroup as group:
                # A task group of the check raised one error, which is easier to read without its group.
                if len(group.exceptions) > 1:
                    raise
                raise group.exceptions[0] from None

        _CHECKS.append((plain, needs))
        return plain

    return register


# --- delivery


@_check()
async def check_assigns_before_it_delivers(harness: Harness) -> None:
    """The source delivers ``Assigned`` with a new ``Partition`` before the first message of a partition."""
    await harness.publish(numbered(3))
    async with opened(harness) as session:
        first = (await session.receive(Room(0, 0)))[0]
        expect(isinstance(first, Assigned), f"the first event is {first!r}, but must be Assigned")
        # The session refuses messages of partitions that were not assigned.
        await session.take(3)
        for partition in session.partitions:
            fresh = partition.assignment == 0 and not partition.live
            expect(fresh, f"{partition!r} was changed: only the engine sets assignment and live")


@_check()
async def check_delivers_everything_in_order(harness: Harness) -> None:
    """The source delivers every message exactly once.

    Positions of a partition rise, and messages of a key keep their order.
    """
    samples = numbered(200)
    await harness.publish(samples)
    async with opened(harness) as session:
        messages = await session.take(len(samples))
        await session.expect_nothing()
    rising(messages)
    for key in {sample.key for sample in samples}:
        published = [sample.value for sample in samples if sample.key == key]
        came = [message.value for message in messages if message.key == key]
        expect(came == published, f"the source must deliver the messages of key {key!r} in the order of publication")


@_check()
async def check_goes_on_with_what_is_published_later(harness: Harness) -> None:
    """A waiting ``receive`` returns messages that producers publish during the wait."""
    samples = numbered(4)
    async with opened(harness) as session:
        for sample in samples:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(harness.publish, [sample])
                (message,) = await session.take(1)
            expect(
                message.value == sample.value, f"{message.value!r} was delivered, but {sample.value!r} was published"
            )


@_check()
async def check_messages_can_be_read(harness: Harness) -> None:
    """A delivered message has the key, value and headers of the published message, and a subject and a size."""
    sample = Sample(b"customer-42", b"\x00\xffpayload", (("trace", b"a"), ("kind", b"order")))
    empty = Sample(b"customer-43", b"")
    await harness.publish([sample, empty])
    async with opened(harness) as session:
        messages = {message.key: message for message in await session.take(2)}
        for published in (sample, empty):
            expect(published.key in messages, f"key {published.key!r} is not among the keys {list(messages)}")
            message = messages[published.key]
            expect(message.value == published.value, f"the value is {message.value!r}, not {published.value!r}")
            for header in published.headers:
                expect(header in message.headers, f"header {header!r} is missing in {message.headers!r}")
            expect(isinstance(message.subject, str) and message.subject != "", "the message has no subject")
            expect(
                message.size >= len(published.value),
                f"message.size is {message.size}, below the {len(published.value)} bytes of the payload",
            )


@_check()
async def check_traits_can_be_kept(harness: Harness) -> None:
    """The traits of ``open`` are valid, and agree with ``Harness.can`` and with the events of the source."""
    can = harness.can
    await harness.publish(numbered(3))
    async with opened(harness) as session:
        traits = session.traits
        expect(traits.name != "" and traits.system != "", f"the source has no name, or no system: {traits!r}")
        interval, limit, count = traits.extend_interval, traits.revoke_limit, traits.partitions
        expect(interval is None or interval > 0, f"extend_interval is {interval}, but must be above 0")
        expect(limit is None or limit > 0, f"revoke_limit is {limit}, but must be above 0")
        named = interval is None or "ack wait" in can
        expect(
            named, f"extend_interval is {interval}, so the broker redelivers: add 'ack wait' to the can of the harness"
        )
        commits = traits.settles == "cumulative"
        expect(
            commits == ("commits" in can),
            f"settles is {traits.settles!r}, can is {can!r}: 'cumulative' needs 'commits'",
        )
        over = commits and traits.hands_over
        expect(
            over == ("hands over" in can), f"hands_over is {traits.hands_over}, can is {can!r}: True needs 'hands over'"
        )
        assigned = await session.assigned()
        expect(count is None or count >= len(assigned), f"{len(assigned)} were assigned, but partitions is {count}")
        expect(
            bool(session.plans) == traits.plans, f"plans is {traits.plans}, {len(session.plans)} Generation delivered"
        )


# --- room


@_check()
async def check_room_is_respected(harness: Harness) -> None:
    """``receive`` never returns more new messages than its room."""
    await harness.publish(numbered(60))
    async with opened(harness) as session:
        for count in (1, 7, 13, 39):
            # The session checks each receive.
            messages = await session.take(count)
            await session.expect_nothing(Room(0, 0))
            await session.settle(messages)


@_check()
async def check_no_room_no_messages(harness: Harness) -> None:
    """Without room the source delivers no message. With room the source delivers the waiting messages."""
    await harness.publish(numbered(2))
    async with opened(harness) as session:
        await session.expect_nothing(Room(0, 0))
        await harness.publish(numbered(3))
        await session.expect_nothing(Room(0, 0))
        rising(await session.take(5))


@_check()
async def check_paused_partitions_are_left_out(harness: Harness) -> None:
    """The source delivers no message of a paused partition, even from a prefetch, and loses no message."""
    samples = numbered(20)
    await harness.publish(samples)
    async with opened(harness) as session:
        everything = frozenset(await session.assigned())
        await session.expect_nothing(Room(20, BYTES, everything))
        first, *others = session.partitions
        came: list[Message] = []
        with anyio.move_on_after(harness.patience):
            while len(came) < 5:
                # The session refuses messages of paused partitions.
                came += messages_of(await session.receive(Room(5 - len(came), BYTES, frozenset(others))))
        await session.settle(came)
        await session.expect_nothing(Room(20, BYTES, everything))
        for _ in range(len(samples) - len(came)):
            came += await session.take(1)
        await session.settle(came)
        await session.expect_nothing()
        expect(first in session.partitions, f"the source lost {first!r}")
    same = sorted(m.value for m in came) == sorted(s.value for s in samples)
    expect(same, "the source delivered other messages than the published messages")


@_check()
async def check_large_message_comes_alone(harness: Harness) -> None:
    """The source delivers a message larger than ``room.bytes``, and then the messages after it."""
    await harness.publish([Sample(b"large", b"x" * 4096) for _ in range(3)])
    async with opened(harness) as session:
        for _ in range(3):
            await session.take(1, size=100)


@_check()
async def check_receive_is_cancel_safe(harness: Harness) -> None:
    """A cancelled ``receive`` loses no message: the next call returns its messages."""
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
                # The cancellation happens before, during or after the arrival of the message. In memory an arrival
                # takes a few turns of the loop, and the check tries each turn often because a scheduler may be random.
                # Over a network an arrival takes longer.
                for _ in range(number % 6 if number < 80 else number - 80):
                    await anyio.lowlevel.checkpoint()
                tasks.cancel_scope.cancel()
        if len(messages) < len(samples):
            messages += await session.take(len(samples) - len(messages))
        await session.expect_nothing()
    rising(messages)
    came = sorted(message.value for message in messages)
    same = came == sorted(sample.value for sample in samples)
    expect(same, "the source delivered other messages than the published messages")


@_check()
async def check_start_is_cancel_safe(harness: Harness) -> None:
    """A source works after a cancellation of an early call of ``receive``."""
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
            expect(
                message.value == sample.value, f"{message.value!r} was delivered, but {sample.value!r} was published"
            )
            await session.settle([message])
            await session.expect_unsettled(0)


# --- settling


@_check()
async def check_settled_stays_settled(harness: Harness) -> None:
    """The broker settles exactly the messages that the check passed to ``settle``."""
    await harness.publish(numbered(10))
    async with opened(harness) as session:
        messages = await session.take(10)
        await session.settle(session.to_settle(messages, range(0, 10, 2)))
        await session.expect_unsettled(5)
        await session.settle(messages)
        await session.expect_unsettled(0)
        await session.expect_nothing()


@_check()
async def check_settle_is_idempotent(harness: Harness) -> None:
    """A repeated settlement changes nothing and raises nothing."""
    await harness.publish(numbered(6))
    async with opened(harness) as session:
        messages = await session.take(6)
        for _ in range(3):
            await session.settle(messages[:4])
        await session.settle([])
        await session.expect_unsettled(2)
        await session.expect_nothing()


@_check()
async def check_unsettled_comes_back(harness: Harness) -> None:
    """The next owner receives the unsettled messages in order and before new messages, but no settled message."""
    samples = numbered(12)
    await harness.publish(samples[:8])
    async with opened(harness) as session:
        messages = await session.take(8)
        settled = session.to_settle(messages, (1, 2, 5))
        await session.settle(settled)
        await session.expect_unsettled(5)
        left = [message.value for message in messages if message not in settled]
    await harness.publish(samples[8:])
    async with opened(harness) as session:
        again = await session.take(
            9,
            otherwise="; the next source must deliver the unsettled messages: see Harness.source on the broker's wait",
        )
        rising(again)
        came = sorted(message.value for message in again)
        expected = sorted([*left, *(sample.value for sample in samples[8:])])
        expect(came == expected, f"{came} were delivered, but the unsettled and the new messages are {expected}")
        await session.expect_nothing()


@_check()
async def check_release_flushes(harness: Harness) -> None:
    """When ``release`` returns, all earlier settlements have reached the broker."""
    await harness.publish(numbered(20))
    async with opened(harness) as session:
        messages = await session.take(20)
        await session.settle(messages[:15])
        for partition in session.partitions:
            await session.source.release(partition)
        left = await harness.unsettled()
        expect(left == 5, f"{left} messages are unsettled right after release(), but must be 5")


@_check()
async def check_release_twice_at_once_is_one(harness: Harness) -> None:
    """Two concurrent calls of ``release`` both return, for example during a stop and a revocation."""
    await harness.publish(numbered(4))
    async with opened(harness) as session:
        await session.settle(await session.take(4))
        for partition in session.partitions:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(session.source.release, partition)
                tasks.start_soon(session.source.release, partition)
    await harness.publish(numbered(2))
    async with opened(harness) as session:
        await session.settle(await session.take(2))


# --- redelivery


@_check("ack wait")
async def check_what_is_not_extended_comes_again(harness: Harness) -> None:
    """The broker redelivers an unsettled message after ``ack_wait``, at its position, with a new token."""
    await harness.publish(numbered(3))
    async with opened(harness) as session:
        first = await session.take(3)
        await session.settle(first[:1])
        await session.expect_unsettled(2)
        await harness.elapse(harness.ack_wait * 1.2)
        again = await session.take(2)
        for message in again:
            known = [m for m in first[1:] if (m.partition, m.position) == (message.partition, message.position)]
            expect(len(known) == 1, f"{message!r} was redelivered, but is settled or was never delivered")
            expect(message.token != known[0].token, f"{message!r} was redelivered with an old token")
        await session.settle(again)
        await session.expect_unsettled(0)


@_check("ack wait")
async def check_extend_keeps_messages(harness: Harness) -> None:
    """The broker does not redeliver a message that the source extends twice every ``extend_interval`` seconds."""
    await harness.publish(numbered(3))
    async with opened(harness) as session:
        messages = await session.take(3)
        interval = session.traits.extend_interval
        expect(interval is not None, "the broker has an ack wait, so the source needs an extend_interval")
        assert interval is not None
        for _ in range(math.ceil(harness.ack_wait * 1.3 / interval)):
            await harness.elapse(interval)
            await session.source.extend(messages)
            await session.source.extend(messages)
        await session.expect_nothing()
        await session.settle(messages)
        await session.expect_unsettled(0)


# --- ownership and end


@_check("revoke")
async def check_revoke_is_told_without_room(harness: Harness) -> None:
    """The source delivers ``Revoking`` even without room, and afterwards no message of the partition."""
    async with opened(harness) as session:
        for partition in await session.assigned():
            await harness.revoke(partition)
            (event,) = await session.receive(Room(0, 0))
            told = isinstance(event, Revoking) and event.partition is partition and event.timeout > 0
            expect(told, f"receive() returned {event!r}, not Revoking of {partition!r} with a timeout above 0")
            limit = session.traits.revoke_limit
            within = limit is None or (isinstance(event, Revoking) and event.timeout <= limit)
            expect(within, f"{event!r} has a timeout above revoke_limit, {limit} s")
        await harness.publish(numbered(3))
        await session.expect_nothing()
        for partition in session.partitions:
            await session.source.release(partition)


@_check("lose")
async def check_loss_is_told_without_room(harness: Harness) -> None:
    """The source delivers ``Lost`` even without room, and afterwards no message of the partition."""
    async with opened(harness) as session:
        for partition in await session.assigned():
            await harness.lose(partition)
            (event,) = await session.receive(Room(0, 0))
            told = isinstance(event, Lost) and event.partition is partition
            expect(told, f"receive() returned {event!r}, not Lost of {partition!r}")
        await harness.publish(numbered(3))
        await session.expect_nothing()


@_check("finish")
async def check_exhausted_is_the_last_event(harness: Harness) -> None:
    """A finite source reports ``Exhausted`` once, after all its messages."""
    await harness.publish(numbered(5))
    async with opened(harness) as session:
        await harness.finish()
        await session.take(5)
        (event,) = await session.receive(Room(1, BYTES))
        expect(isinstance(event, Exhausted), f"receive() returned {event!r}, but must return Exhausted")
        await session.expect_nothing()


# --- commits


for commit_check, abilities in COMMIT_CHECKS:
    _check(*abilities)(commit_check)


# --- closing


@_check()
async def check_aclose_is_idempotent(harness: Harness) -> None:
    """The engine may call ``aclose`` repeatedly, even before any ``receive``."""
    async with opened(harness) as session:
        await session.source.aclose()
        await session.source.aclose()


@_check()
async def check_aclose_without_open(harness: Harness) -> None:
    """``aclose`` works on a source whose ``open`` was never called."""
    await harness.source().aclose()
