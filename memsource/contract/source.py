"""The contract suite: what every source promises, as functions that fail with ``ContractBroken``.

Whoever writes a source writes a ``Harness`` for its broker and runs every check of ``checks(harness.can)``, each
with a harness of its own, under any test runner:

    @pytest.mark.parametrize("check", checks(OurHarness.can), ids=lambda check: check.__name__)
    async def test_our_source(check: Check) -> None:
        await check(OurHarness())

A harness says in ``can`` what its broker and source are able to; what they are not able to is not checked.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Awaitable, Callable, Collection
from typing import Final, get_args

import anyio

from lanes.core.types import Room
from lanes.source import Assigned, Exhausted, Lost, Revoking
from memsource.contract.commits import COMMIT_CHECKS
from memsource.contract.harness import BYTES, Ability, ContractBroken, Harness, Sample, expect, numbered, opened, rising
from memsource.contract.room import ROOM_CHECKS

__all__ = ["NOT_CHECKED", "Ability", "Check", "ContractBroken", "Harness", "Sample", "checks"]

Check = Callable[[Harness], Awaitable[None]]
"""One promise of the contract, as a function that raises ``ContractBroken`` where it is not kept."""

NOT_CHECKED: Final = {
    "max_in_flight": "more than it had to be published, and what the broker allows is the broker's to keep",
    "remembers": "a settlement had to be lost on its way, and no harness can do that to every broker",
    "ordered": "it is about several processes, and the suite sees one source at a time",
    "exclusive": "it is about several processes, and the suite sees one source at a time",
}
"""The traits that nothing here can hold against a source, and why."""

_CHECKS: Final[list[tuple[Check, tuple[Ability, ...]]]] = []


def checks(can: Collection[Ability]) -> list[Check]:
    """The checks for a source that is able to do this, in order.

    Raises ``ValueError`` for what is no ability: a misspelt one would leave its checks out.
    """
    known = get_args(Ability)
    for each in can:
        if each not in known:
            raise ValueError(f"{each!r} in can={can!r} is no ability: must be one of {', '.join(map(repr, known))}")
    return [check for check, needs in _CHECKS if all(each in can for each in needs)]


def _check(*needs: Ability) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        @functools.wraps(check)
        async def plain(harness: Harness) -> None:
            try:
                await check(harness)
            except BaseExceptionGroup as group:
                # From a task group inside the check: one reason is easier to read than a group of one.
                if len(group.exceptions) > 1:
                    raise
                raise group.exceptions[0] from None

        _CHECKS.append((plain, needs))
        return plain

    return register


# --- what is delivered


@_check()
async def check_assigns_before_it_delivers(harness: Harness) -> None:
    """A partition is announced by ``Assigned`` before its first message, as a fresh ``Partition``."""
    await harness.publish(numbered(3))
    async with opened(harness) as session:
        first = (await session.receive(Room(0, 0)))[0]
        expect(isinstance(first, Assigned), f"the first event is {first!r}, not Assigned")
        # The session refuses messages of partitions that were not announced.
        await session.take(3)
        for partition in session.partitions:
            fresh = partition.assignment == 0 and not partition.live
            expect(fresh, f"{partition!r} was touched by the source: assignment and liveness are the engine's")


@_check()
async def check_delivers_everything_in_order(harness: Harness) -> None:
    """Every message comes once; positions of a partition rise, and a key's messages come as published."""
    samples = numbered(200)
    await harness.publish(samples)
    async with opened(harness) as session:
        messages = await session.take(len(samples))
        await session.expect_nothing()
    rising(messages)
    for key in {sample.key for sample in samples}:
        published = [sample.value for sample in samples if sample.key == key]
        came = [message.value for message in messages if message.key == key]
        expect(came == published, f"the messages of key {key!r} came in another order than published")


@_check()
async def check_goes_on_with_what_is_published_later(harness: Harness) -> None:
    """A ``receive`` that waits returns what is published meanwhile."""
    samples = numbered(4)
    async with opened(harness) as session:
        for sample in samples:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(harness.publish, [sample])
                (message,) = await session.take(1)
            expect(message.value == sample.value, "another message than the published one came")


@_check()
async def check_messages_can_be_read(harness: Harness) -> None:
    """Key, value, headers and subject are those of the published message; ``size`` is at least its payload."""
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
            expect(isinstance(message.subject, str) and message.subject != "", "there is no subject")
            expect(message.size >= len(published.value), f"size {message.size} is less than the payload")


@_check()
async def check_traits_can_be_kept(harness: Harness) -> None:
    """``open`` returns traits a runtime can work with, which say the same as the harness does in ``can``, and as the
    source does behind them: about partitions and plans."""
    can = harness.can
    await harness.publish(numbered(3))
    async with opened(harness) as session:
        traits = session.traits
        expect(traits.name != "" and traits.system != "", f"the source has no name, or no system: {traits!r}")
        interval, limit, count = traits.extend_interval, traits.revoke_limit, traits.partitions
        expect(interval is None or interval > 0, f"extend_interval is {interval}")
        expect(limit is None or limit > 0, f"revoke_limit is {limit}")
        named = interval is None or "ack wait" in can
        expect(
            named, f"extend_interval is {interval}, so the broker delivers again: the harness's can needs 'ack wait'"
        )
        commits = traits.settles == "cumulative"
        expect(commits == ("commits" in can), f"settles is {traits.settles!r}, and can is {can!r}: see 'commits'")
        over = commits and traits.hands_over
        expect(over == ("hands over" in can), f"hands_over is {traits.hands_over}, and can is {can!r}: 'hands over'")
        assigned = await session.assigned()
        expect(count is None or count >= len(assigned), f"{len(assigned)} were assigned, partitions is {count}")
        expect(bool(session.plans) == traits.plans, f"plans is {traits.plans}, Generation came {len(session.plans)}x")


# --- room


for room_check in ROOM_CHECKS:
    _check()(room_check)


# --- settling


@_check()
async def check_settled_stays_settled(harness: Harness) -> None:
    """What is settled leaves the broker's books; the rest does not."""
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
    """The same settlement again changes nothing and raises nothing."""
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
    """The next owner gets what the former one left unsettled, in order and before anything new; nothing else."""
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
            otherwise="; what the former source left must come to this one: see Harness.source about the broker's time",
        )
        rising(again)
        came = sorted(message.value for message in again)
        expected = sorted([*left, *(sample.value for sample in samples[8:])])
        expect(came == expected, f"came {came}, expected what was left and what is new: {expected}")
        await session.expect_nothing()


@_check()
async def check_release_flushes(harness: Harness) -> None:
    """When ``release`` returns, everything settled before has reached the broker."""
    await harness.publish(numbered(20))
    async with opened(harness) as session:
        messages = await session.take(20)
        await session.settle(messages[:15])
        for partition in session.partitions:
            await session.source.release(partition)
        left = await harness.unsettled()
        expect(left == 5, f"{left} messages are unsettled right after release, not 5")


@_check()
async def check_release_twice_at_once_is_one(harness: Harness) -> None:
    """A run that stops gives a partition back that may be revoked at that moment: both calls of ``release`` return."""
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
    """An unsettled message comes again after the broker's own time, at its position, with a token of its own."""
    await harness.publish(numbered(3))
    async with opened(harness) as session:
        first = await session.take(3)
        await session.settle(first[:1])
        await session.expect_unsettled(2)
        await harness.elapse(harness.ack_wait * 1.2)
        again = await session.take(2)
        for message in again:
            known = [m for m in first[1:] if (m.partition, m.position) == (message.partition, message.position)]
            expect(len(known) == 1, f"{message!r} came again, which was settled or never came before")
            expect(message.token != known[0].token, f"{message!r} came again with the token of its first delivery")
        await session.settle(again)
        await session.expect_unsettled(0)


@_check("ack wait")
async def check_extend_keeps_messages(harness: Harness) -> None:
    """A message that is extended every ``extend_interval`` seconds does not come again. Repeating it is harmless."""
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
    """``Revoking`` comes even while there is no room, and no message of the partition comes behind it."""
    async with opened(harness) as session:
        for partition in await session.assigned():
            await harness.revoke(partition)
            (event,) = await session.receive(Room(0, 0))
            told = isinstance(event, Revoking) and event.partition is partition and event.timeout > 0
            expect(told, f"{event!r} came, not Revoking of {partition!r} with some time")
            limit = session.traits.revoke_limit
            within = limit is None or (isinstance(event, Revoking) and event.timeout <= limit)
            expect(within, f"{event!r} gives more time than revoke_limit, {limit} s")
        await harness.publish(numbered(3))
        await session.expect_nothing()
        for partition in session.partitions:
            await session.source.release(partition)


@_check("lose")
async def check_loss_is_told_without_room(harness: Harness) -> None:
    """``Lost`` comes even while there is no room, and no message of the partition comes behind it."""
    async with opened(harness) as session:
        for partition in await session.assigned():
            await harness.lose(partition)
            (event,) = await session.receive(Room(0, 0))
            told = isinstance(event, Lost) and event.partition is partition
            expect(told, f"{event!r} came, not Lost of {partition!r}")
        await harness.publish(numbered(3))
        await session.expect_nothing()


@_check("finish")
async def check_exhausted_is_the_last_event(harness: Harness) -> None:
    """A finite source says ``Exhausted`` once, behind everything it delivered."""
    await harness.publish(numbered(5))
    async with opened(harness) as session:
        await harness.finish()
        await session.take(5)
        (event,) = await session.receive(Room(1, BYTES))
        expect(isinstance(event, Exhausted), f"{event!r} came, not Exhausted")
        await session.expect_nothing()


# --- commits


for commit_check, abilities in COMMIT_CHECKS:
    _check(*abilities)(commit_check)


# --- closing


@_check()
async def check_aclose_is_idempotent(harness: Harness) -> None:
    """``aclose`` may be called again, and without anything having been received."""
    async with opened(harness) as session:
        await session.source.aclose()
        await session.source.aclose()


@_check()
async def check_aclose_without_open(harness: Harness) -> None:
    """``aclose`` may be called on a source whose ``open`` failed or was never called."""
    await harness.source().aclose()
