"""The contract suite of a cohort's durables: what each promises, as functions that fail with ``ContractBroken``.

Whoever writes a ``lanes.cohort.leases.EpochConsumers`` writes an ``EpochHarness`` for it and runs every check of
``EPOCH_CHECKS`` with each retention its broker has, each with a harness of its own, whose stream is empty.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, Literal, Protocol

from lanes.cohort.leases import ConsumerExists, EpochConsumer, EpochConsumers, UnknownResult
from memsource.contract.harness import ContractBroken, expect
from memsource.jetstream.epoch_consumers import Durable, Retention

__all__ = ["EPOCH_CHECKS", "EpochCheck", "EpochHarness"]

MANY: Final = 100
"""More than there is."""


class EpochHarness(Protocol):
    """One stream of four cohort partitions with nothing in it, and clients of it. Used for one check."""

    @property
    def retention(self) -> Retention:
        """Of the stream: whether messages stay, or until when."""

    def consumers(self, lease: int = 0) -> EpochConsumers:
        """A new client, with a connection of its own, of a member whose leases are so many seconds."""

    async def publish(self, *partitions: int) -> list[int]:
        """Publish a message to each of these; their sequences."""

    async def pull(self, durable: Durable, count: int) -> list[int] | None:
        """The sequences of so many messages at most, which are not acknowledged; None = there is no such durable."""

    async def ack(self, durable: Durable, sequence: int) -> bool:
        """Acknowledge what was pulled from a durable; False = nobody took it."""

    def fail(self, consumers: EpochConsumers, what: Literal["request", "reply"]) -> None:
        """Have the next write of a client be lost: before the server has it, or behind, when it has it already."""


EpochCheck = Callable[[EpochHarness], Awaitable[None]]
"""One promise of the contract, as a function that raises ``ContractBroken`` where it is not kept."""


def _start(harness: EpochHarness, sequence: int) -> int | None:
    """Where a durable begins: on a work queue always with all that is left."""
    return None if harness.retention == "workqueue" else sequence


async def _there(consumers: EpochConsumers, partition: int, *expected: EpochConsumer) -> None:
    found, _ = await consumers.found(partition)
    expect(list(found) == list(expected), f"{list(found)} is found of partition {partition}, {expected} is there")


async def _refused(consumers: EpochConsumers, name: Durable, nonce: str, start: int | None, by: str | None) -> None:
    """Create what must not be created; nothing may be changed by it."""
    before, _ = await consumers.found(name.partition)
    try:
        await consumers.create(*name, nonce=nonce, start=start)
    except ConsumerExists as there:
        expect(there.nonce == by, f"{name} is in the way of {there.nonce!r}, it was made by {by!r}")
        await _there(consumers, name.partition, *before)
    else:
        raise ContractBroken(f"{name} was created by {nonce!r}, and {list(before)} is there")


async def check_nothing_is_found_at_first(harness: EpochHarness) -> None:
    """And the server's clock is one in milliseconds, which does not go back."""
    consumers = harness.consumers()
    await harness.publish(0, 1)
    expect(not await consumers.names(), "there are names of durables that nobody has made")
    clocks = [(await consumers.found(partition))[1] for partition in (0, 1, 3)]
    await _there(consumers, 0)
    expect(clocks == sorted(clocks), f"the server's clock goes back: {clocks}")
    # Epochs rise above it: whoever gives seconds here begins far below an older cohort.
    expect(all(isinstance(clock, int) and clock > 10**12 for clock in clocks), f"{clocks} are no milliseconds")


async def check_a_mark_outlives_every_durable(harness: EpochHarness) -> None:
    """Seen by every client, and neither one of the durables nor in their way; what is made later delivers as before."""
    one, other = harness.consumers(), harness.consumers()
    expect(await one.marked() is None, "it is marked, and nobody has done so")
    first, second = Durable(1, 1, 0), Durable(1, 2, 0)
    await one.create(*first, nonce="a", start=_start(harness, 1))
    for consumers in (one, other):
        await _mark(consumers)
        for each in (one, other):
            expect(await each.marked() is not None, "it was marked, and somebody does not see it")
    names = list(await other.names())
    expect(names == [tuple(first)], f"{names} is listed, and {first} is there")
    await one.delete(*first)
    await _there(other, 1)
    expect(await other.marked() is not None, "it was marked, and is not behind the last durable")
    await other.create(*second, nonce="b", start=_start(harness, 1))
    sequences = await harness.publish(1, 2, 1)
    wanted = [sequences[0], sequences[2]]
    pulled = await harness.pull(second, MANY)
    expect(pulled == wanted, f"{pulled} is delivered, {wanted} was published")


async def check_a_mark_tells_the_longest_lease(harness: EpochHarness) -> None:
    """Whoever finds it behind the loss of a bucket has to wait so long."""
    for lease, longest in ((5, 5), (7, 7), (3, 7)):
        consumers = harness.consumers(lease=lease)
        await _mark(consumers)
        found = await consumers.marked()
        expect(found == longest, f"the mark tells a lease of {found} s, the longest one was of {longest} s")


async def _mark(consumers: EpochConsumers) -> None:
    try:
        await consumers.mark()
    except ConsumerExists as there:
        raise ContractBroken(f"it is refused to be marked again: {there}") from there


async def check_what_is_made_is_found_by_every_client(harness: EpochHarness) -> None:
    """With the nonce it was made by; each partition's by themselves, and all by one listing."""
    one, other = harness.consumers(), harness.consumers()
    made = [Durable(0, 7, 0), Durable(2, 1_700_000_000_123, 0), Durable(3, 1, 12)]
    for name in made:
        await one.create(*name, nonce=f"n{name.partition}", start=_start(harness, 1))
    for consumers in (one, other):
        for name in made:
            await _there(consumers, name.partition, EpochConsumer(*name, f"n{name.partition}", 0))
        await _there(consumers, 1)
        names = list(await consumers.names())
        expect(sorted(names) == sorted(map(tuple, made)), f"{names} is listed, {made} was made")


async def check_each_tells_the_lease_of_who_made_it(harness: EpochHarness) -> None:
    """Whoever finds it in a bucket that was lost has to wait so long, whatever leases are elsewhere."""
    one, other = harness.consumers(lease=7), harness.consumers(lease=3)
    await one.create(0, 1, 0, nonce="a", start=_start(harness, 1))
    await other.create(1, 1, 0, nonce="b", start=_start(harness, 1))
    for consumers in (one, other):
        await _there(consumers, 0, EpochConsumer(0, 1, 0, "a", 0, 7))
        await _there(consumers, 1, EpochConsumer(1, 1, 0, "b", 0, 3))


async def check_they_rise_by_epoch_and_sub_number(harness: EpochHarness) -> None:
    """As numbers, in whatever order they were made. On a work queue there is never more than one."""
    if harness.retention == "workqueue":
        return
    consumers = harness.consumers()
    for epoch, sub in ((10, 0), (9, 2), (9, 10), (9, 0)):
        await consumers.create(1, epoch, sub, nonce=f"{epoch}-{sub}", start=1)
    expected = [EpochConsumer(1, epoch, sub, f"{epoch}-{sub}", 0) for epoch, sub in ((9, 0), (9, 2), (9, 10), (10, 0))]
    await _there(consumers, 1, *expected)


async def check_they_are_made_strictly(harness: EpochHarness) -> None:
    """One of the same name is refused, with the nonce of who made it; who made it may hear of it twice."""
    one, other = harness.consumers(), harness.consumers()
    name = Durable(1, 5, 0)
    await one.create(*name, nonce="mine", start=_start(harness, 3))
    await _refused(other, name, "theirs", _start(harness, 3), "mine")
    if harness.retention != "workqueue":
        await _refused(other, name, "theirs", 1, "mine")
    with suppress(ConsumerExists):
        await one.create(*name, nonce="mine", start=_start(harness, 3))
    floor = 0 if harness.retention == "workqueue" else 2
    await _there(one, 1, EpochConsumer(*name, "mine", floor))


async def check_of_two_at_once_only_a_work_queue_refuses_one(harness: EpochHarness) -> None:
    """With no nonce to say: it is another name that is in the way. When that one is gone it may be made."""
    consumers = harness.consumers()
    old, new = Durable(1, 5, 0), Durable(1, 6, 0)
    await consumers.create(*old, nonce="old", start=_start(harness, 1))
    await consumers.create(2, 5, 0, nonce="beside", start=_start(harness, 1))
    if harness.retention == "workqueue":
        await _refused(consumers, new, "new", None, None)
        await consumers.delete(*old)
    await consumers.create(*new, nonce="new", start=_start(harness, 1))
    found, _ = await consumers.found(1)
    expect(found[-1] == EpochConsumer(*new, "new", 0), f"{found} is found, and {new} was made last")


async def check_it_delivers_what_it_begins_with(harness: EpochHarness) -> None:
    """Of its partition alone, from the first sequence on, or all that is there; and what comes later."""
    consumers = harness.consumers()
    first = Durable(0, 1, 0)
    await consumers.create(*first, nonce="n", start=_start(harness, 1))
    sequences = await harness.publish(0, 1, 0, 0, 2)
    came = await harness.pull(first, MANY)
    own = [sequences[0], sequences[2], sequences[3]]
    expect(came == own, f"{came} was delivered, {own} is there")
    if harness.retention == "workqueue":
        return
    later = Durable(0, 2, 0)
    await consumers.create(*later, nonce="n", start=sequences[2])
    all_of_it = Durable(0, 3, 0)
    await consumers.create(*all_of_it, nonce="n", start=None)
    own += await harness.publish(0)
    for durable, expected in ((later, own[1:]), (all_of_it, own)):
        came = await harness.pull(durable, MANY)
        expect(came == expected, f"{came} was delivered by {durable}, {expected} is there")


async def check_the_floor_is_what_is_acknowledged(harness: EpochHarness) -> None:
    """Everything of the partition up to it, without a gap; what it begins behind before anything is."""
    consumers = harness.consumers()
    name = Durable(3, 4, 0)
    await consumers.create(*name, nonce="n", start=_start(harness, 1))
    await _there(consumers, 3, EpochConsumer(*name, "n", 0))
    one, _, three, four = await harness.publish(3, 0, 3, 3)
    await harness.pull(name, MANY)
    for acknowledged, floor in ((three, 0), (one, three), (four, four)):
        expect(await harness.ack(name, acknowledged), "an acknowledgement was not taken")
        await _there(consumers, 3, EpochConsumer(*name, "n", floor))


async def check_what_is_deleted_is_gone(harness: EpochHarness) -> None:
    """It alone, and not twice: to delete it again does nothing, nor to delete what never was."""
    consumers = harness.consumers()
    for partition in (0, 1):
        await consumers.create(partition, 3, 0, nonce="n", start=_start(harness, 1))
    for _ in range(2):
        await consumers.delete(0, 3, 0)
    await consumers.delete(1, 3, 1)
    await consumers.delete(1, 2, 0)
    await _there(consumers, 0)
    await _there(consumers, 1, EpochConsumer(1, 3, 0, "n", 0))
    names = list(await consumers.names())
    expect(names == [(1, 3, 0)], f"{names} is listed, (1, 3, 0) is there")


async def check_what_is_deleted_answers_nobody(harness: EpochHarness) -> None:
    """The fence of a cohort: who pulls from it is refused, and an acknowledgement to it is taken by nobody."""
    consumers = harness.consumers()
    name = Durable(2, 1, 0)
    await consumers.create(*name, nonce="n", start=_start(harness, 1))
    (sequence,) = await harness.publish(2)
    await harness.pull(name, 1)
    await consumers.delete(*name)
    expect(await harness.pull(name, 1) is None, "a durable that was deleted has delivered")
    expect(not await harness.ack(name, sequence), "a durable that was deleted has taken an acknowledgement")


async def check_the_next_one_gets_what_is_not_acknowledged(harness: EpochHarness) -> None:
    """By the order of a takeover: the next one first, and on a work queue the former one's end first."""
    consumers = harness.consumers()
    old, new = Durable(1, 1, 0), Durable(1, 2, 0)
    await consumers.create(*old, nonce="old", start=_start(harness, 1))
    sequences = await harness.publish(1, 1, 1, 1)
    await harness.pull(old, 3)
    for number in (0, 2):
        await harness.ack(old, sequences[number])
    floor = (await consumers.found(1))[0][-1].floor
    expect(floor == sequences[0], f"the floor is {floor}, {sequences[0]} is acknowledged, and what follows is not")
    if harness.retention == "workqueue":
        await consumers.delete(*old)
    await consumers.create(*new, nonce="new", start=_start(harness, floor + 1))
    if harness.retention != "workqueue":
        await consumers.delete(*old)
    came = await harness.pull(new, MANY)
    # Where the stream keeps it, what was acknowledged above the floor comes again: who knows better passes it over.
    left = [sequences[1], *([sequences[2]] if harness.retention == "limits" else []), sequences[3]]
    expect(came == left, f"{came} was delivered to the next one, {left} is left")


async def check_a_lost_request_is_unknown(harness: EpochHarness) -> None:
    """It raises ``UnknownResult``, nothing was done, and nothing is done later."""
    consumers = harness.consumers()
    harness.fail(consumers, "request")
    await _unknown(consumers.create(0, 1, 0, nonce="n", start=_start(harness, 1)))
    await _there(consumers, 0)
    await consumers.create(0, 1, 0, nonce="again", start=_start(harness, 1))
    harness.fail(consumers, "request")
    await _unknown(consumers.delete(0, 1, 0))
    await _there(consumers, 0, EpochConsumer(0, 1, 0, "again", 0))


async def check_a_lost_reply_is_unknown(harness: EpochHarness) -> None:
    """It raises ``UnknownResult``, and was done: the nonce says by whom."""
    consumers = harness.consumers()
    harness.fail(consumers, "reply")
    await _unknown(consumers.create(0, 1, 0, nonce="n", start=_start(harness, 1)))
    await _there(consumers, 0, EpochConsumer(0, 1, 0, "n", 0))
    harness.fail(consumers, "reply")
    await _unknown(consumers.delete(0, 1, 0))
    await _there(consumers, 0)


async def _unknown(asked: Awaitable[None]) -> None:
    try:
        await asked
    except UnknownResult:
        return
    raise ContractBroken("a request without an answer has returned")


EPOCH_CHECKS: Final[tuple[EpochCheck, ...]] = (
    check_nothing_is_found_at_first,
    check_what_is_made_is_found_by_every_client,
    check_a_mark_outlives_every_durable,
    check_a_mark_tells_the_longest_lease,
    check_each_tells_the_lease_of_who_made_it,
    check_they_rise_by_epoch_and_sub_number,
    check_they_are_made_strictly,
    check_of_two_at_once_only_a_work_queue_refuses_one,
    check_it_delivers_what_it_begins_with,
    check_the_floor_is_what_is_acknowledged,
    check_what_is_deleted_is_gone,
    check_what_is_deleted_answers_nobody,
    check_the_next_one_gets_what_is_not_acknowledged,
    check_a_lost_request_is_unknown,
    check_a_lost_reply_is_unknown,
)
"""In the order in which they are best run."""
