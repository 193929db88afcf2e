"""The contract suite of a cohort's durables: each check raises ``ContractBroken`` if the backend breaks a promise.

The author of a ``lanes.cohort.leases.EpochConsumers`` writes an ``EpochHarness`` and runs every check of
``EPOCH_CHECKS`` with each retention of the broker. Each run needs a new harness.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, Literal, Protocol

from lanes.cohort.leases import ConsumerExists, EpochConsumer, EpochConsumers
from memsource.contract.harness import ContractBroken, checks_of, expect
from memsource.contract.leases import expect_unknown
from memsource.jetstream.epoch_consumers import Durable, Retention

__all__ = ["EPOCH_CHECKS", "EpochCheck", "EpochHarness"]

MANY: Final = 100
"""Number of messages that is larger than the number that any check publishes."""


class EpochHarness(Protocol):
    """An empty stream of four cohort partitions, and clients of the stream. Each check needs a new harness."""

    @property
    def retention(self) -> Retention:
        """Retention of the stream."""

    def consumers(self, lease: int = 0) -> EpochConsumers:
        """Return a new client of a member, with its own connection.

        Args:
            lease: Lease time of the member, in seconds; 0 = unknown.

        Returns:
            The new client.
        """

    async def publish(self, *partitions: int) -> list[int]:
        """Publish one message for each partition.

        Args:
            *partitions: Numbers of cohort partitions, 0 to 3. A number may repeat.

        Returns:
            The sequences, in the order of ``partitions``.
        """

    async def pull(self, durable: Durable, count: int) -> list[int] | None:
        """Pull messages, and acknowledge none of them.

        Args:
            durable: The durable.
            count: Maximum number of messages.

        Returns:
            The sequences of the messages, or None if the durable does not exist.
        """

    async def ack(self, durable: Durable, sequence: int) -> bool:
        """Acknowledge a pulled message.

        Args:
            durable: The durable that delivered the message.
            sequence: The sequence of the message.

        Returns:
            Whether a durable accepted the acknowledgement.
        """

    def fail(self, consumers: EpochConsumers, what: Literal["request", "reply"]) -> None:
        """Lose the next write of a client.

        Args:
            consumers: The client.
            what: ``"request"``: the server never receives the write. ``"reply"``: the server applies the write, and
                its answer is lost.
        """


EpochCheck = Callable[[EpochHarness], Awaitable[None]]
"""One promise of the contract, as a function that raises ``ContractBroken`` if the backend breaks it."""


def _start(harness: EpochHarness, sequence: int) -> int | None:
    """Return the argument ``start`` of a new durable; None on a work queue, whose durables have no start."""
    return None if harness.retention == "workqueue" else sequence


async def _there(consumers: EpochConsumers, partition: int, *expected: EpochConsumer) -> None:
    found, _ = await consumers.found(partition)
    expect(list(found) == list(expected), f"found({partition}) returned {list(found)}, but {expected} exist")


async def _refused(consumers: EpochConsumers, name: Durable, nonce: str, start: int | None, by: str | None) -> None:
    """Try a creation that the stream must refuse without a change."""
    before, _ = await consumers.found(name.partition)
    try:
        await consumers.create(*name, nonce=nonce, start=start)
    except ConsumerExists as there:
        expect(there.nonce == by, f"create({name}) reported the nonce {there.nonce!r}, but must report {by!r}")
        await _there(consumers, name.partition, *before)
    else:
        raise ContractBroken(f"create({name}) with nonce {nonce!r} must be refused, because {list(before)} exist")


async def check_nothing_is_found_at_first(harness: EpochHarness) -> None:
    """A new stream has no durables. The server's clock is in milliseconds and does not go back."""
    consumers = harness.consumers()
    await harness.publish(0, 1)
    expect(not await consumers.names(), "names() lists durables that were never created")
    clocks = [(await consumers.found(partition))[1] for partition in (0, 1, 3)]
    await _there(consumers, 0)
    expect(clocks == sorted(clocks), f"the server's clock goes back: {clocks}")
    # Epochs begin at the clock. With a clock in seconds, they would begin far below the epochs of an older cohort.
    expect(all(isinstance(clock, int) and clock > 10**12 for clock in clocks), f"{clocks} are not milliseconds")


async def check_a_mark_outlives_every_durable(harness: EpochHarness) -> None:
    """Every client sees the mark of the cohort, even after the deletion of the last durable.

    The mark prevents no creation of a durable.
    """
    one, other = harness.consumers(), harness.consumers()
    expect(await one.marked() is None, "marked() reports a mark that was never made")
    first, second = Durable(1, 1, 0), Durable(1, 2, 0)
    await one.create(*first, nonce="a", start=_start(harness, 1))
    for consumers in (one, other):
        await _mark(consumers)
        for each in (one, other):
            expect(await each.marked() is not None, "marked() returned None to a client after mark()")
    names = list(await other.names())
    expect(names == [tuple(first)], f"names() lists {names}, but only {first} exists")
    await one.delete(*first)
    await _there(other, 1)
    expect(await other.marked() is not None, "the mark is gone after the last durable was deleted")
    await other.create(*second, nonce="b", start=_start(harness, 1))
    sequences = await harness.publish(1, 2, 1)
    wanted = [sequences[0], sequences[2]]
    pulled = await harness.pull(second, MANY)
    expect(pulled == wanted, f"{pulled} were delivered, but {wanted} were published")


async def check_a_mark_tells_the_longest_lease(harness: EpochHarness) -> None:
    """The mark contains the longest lease time of its writers.

    After the loss of a bucket, a member waits for this time.
    """
    for lease, longest in ((5, 5), (7, 7), (3, 7)):
        consumers = harness.consumers(lease=lease)
        await _mark(consumers)
        found = await consumers.marked()
        expect(found == longest, f"marked() returned a lease of {found} s, but the longest lease was {longest} s")


async def _mark(consumers: EpochConsumers) -> None:
    try:
        await consumers.mark()
    except ConsumerExists as there:
        raise ContractBroken(f"a second mark() raised {there!r}; it must succeed and change nothing") from there


async def check_what_is_made_is_found_by_every_client(harness: EpochHarness) -> None:
    """Every client finds the durables of a partition with their nonces, and lists all durables by one request."""
    one, other = harness.consumers(), harness.consumers()
    made = [Durable(0, 7, 0), Durable(2, 1_700_000_000_123, 0), Durable(3, 1, 12)]
    for name in made:
        await one.create(*name, nonce=f"n{name.partition}", start=_start(harness, 1))
    for consumers in (one, other):
        for name in made:
            await _there(consumers, name.partition, EpochConsumer(*name, f"n{name.partition}", 0))
        await _there(consumers, 1)
        names = list(await consumers.names())
        expect(sorted(names) == sorted(map(tuple, made)), f"names() lists {names}, but {made} were created")


async def check_each_tells_the_lease_of_who_made_it(harness: EpochHarness) -> None:
    """Each durable reports the lease time of its creator to members that find it after the loss of a bucket."""
    one, other = harness.consumers(lease=7), harness.consumers(lease=3)
    await one.create(0, 1, 0, nonce="a", start=_start(harness, 1))
    await other.create(1, 1, 0, nonce="b", start=_start(harness, 1))
    for consumers in (one, other):
        await _there(consumers, 0, EpochConsumer(0, 1, 0, "a", 0, 7))
        await _there(consumers, 1, EpochConsumer(1, 1, 0, "b", 0, 3))


async def check_they_rise_by_epoch_and_sub_number(harness: EpochHarness) -> None:
    """``found`` sorts durables by epoch and sub-number. A work queue has only one durable of a partition at a time."""
    if harness.retention == "workqueue":
        return
    consumers = harness.consumers()
    for epoch, sub in ((10, 0), (9, 2), (9, 10), (9, 0)):
        await consumers.create(1, epoch, sub, nonce=f"{epoch}-{sub}", start=1)
    expected = [EpochConsumer(1, epoch, sub, f"{epoch}-{sub}", 0) for epoch, sub in ((9, 0), (9, 2), (9, 10), (10, 0))]
    await _there(consumers, 1, *expected)


async def check_they_are_made_strictly(harness: EpochHarness) -> None:
    """The stream refuses a second durable of the same name, and reports the nonce of the first durable.

    The stream may also refuse a second creation by the same creator.
    """
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
    """A work queue refuses a second durable of a partition, without a nonce, until the first is deleted."""
    consumers = harness.consumers()
    old, new = Durable(1, 5, 0), Durable(1, 6, 0)
    await consumers.create(*old, nonce="old", start=_start(harness, 1))
    await consumers.create(2, 5, 0, nonce="beside", start=_start(harness, 1))
    if harness.retention == "workqueue":
        await _refused(consumers, new, "new", None, None)
        await consumers.delete(*old)
    await consumers.create(*new, nonce="new", start=_start(harness, 1))
    found, _ = await consumers.found(1)
    expect(found[-1] == EpochConsumer(*new, "new", 0), f"found(1) returned {found}, but {new} was created last")


async def check_it_delivers_what_it_begins_with(harness: EpochHarness) -> None:
    """A durable delivers all messages of its partition from its first sequence on, and no other message."""
    consumers = harness.consumers()
    first = Durable(0, 1, 0)
    await consumers.create(*first, nonce="n", start=_start(harness, 1))
    sequences = await harness.publish(0, 1, 0, 0, 2)
    came = await harness.pull(first, MANY)
    own = [sequences[0], sequences[2], sequences[3]]
    expect(came == own, f"{came} were delivered, but {own} exist")
    if harness.retention == "workqueue":
        return
    later = Durable(0, 2, 0)
    await consumers.create(*later, nonce="n", start=sequences[2])
    all_of_it = Durable(0, 3, 0)
    await consumers.create(*all_of_it, nonce="n", start=None)
    own += await harness.publish(0)
    for durable, expected in ((later, own[1:]), (all_of_it, own)):
        came = await harness.pull(durable, MANY)
        expect(came == expected, f"{durable} delivered {came}, but {expected} exist")


async def check_the_floor_is_what_is_acknowledged(harness: EpochHarness) -> None:
    """All messages up to the floor are acknowledged. The floor of a new durable is 1 below its first sequence."""
    consumers = harness.consumers()
    name = Durable(3, 4, 0)
    await consumers.create(*name, nonce="n", start=_start(harness, 1))
    await _there(consumers, 3, EpochConsumer(*name, "n", 0))
    one, _, three, four = await harness.publish(3, 0, 3, 3)
    await harness.pull(name, MANY)
    for acknowledged, floor in ((three, 0), (one, three), (four, four)):
        expect(await harness.ack(name, acknowledged), f"the acknowledgement of sequence {acknowledged} was refused")
        await _there(consumers, 3, EpochConsumer(*name, "n", floor))


async def check_what_is_deleted_is_gone(harness: EpochHarness) -> None:
    """A deletion removes one durable. The deletion of a deleted or unknown durable changes nothing."""
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
    expect(names == [(1, 3, 0)], f"names() lists {names}, but only (1, 3, 0) exists")


async def check_what_is_deleted_answers_nobody(harness: EpochHarness) -> None:
    """A deleted durable refuses pulls and acknowledgements, which fences the former owner in a cohort."""
    consumers = harness.consumers()
    name = Durable(2, 1, 0)
    await consumers.create(*name, nonce="n", start=_start(harness, 1))
    (sequence,) = await harness.publish(2)
    await harness.pull(name, 1)
    await consumers.delete(*name)
    expect(await harness.pull(name, 1) is None, "a deleted durable delivered a message")
    expect(not await harness.ack(name, sequence), "a deleted durable accepted an acknowledgement")


async def check_the_next_one_gets_what_is_not_acknowledged(harness: EpochHarness) -> None:
    """The next durable delivers all unacknowledged messages.

    On a work queue the check first deletes the former durable.
    """
    consumers = harness.consumers()
    old, new = Durable(1, 1, 0), Durable(1, 2, 0)
    await consumers.create(*old, nonce="old", start=_start(harness, 1))
    sequences = await harness.publish(1, 1, 1, 1)
    await harness.pull(old, 3)
    for number in (0, 2):
        await harness.ack(old, sequences[number])
    floor = (await consumers.found(1))[0][-1].floor
    expect(floor == sequences[0], f"the floor is {floor}, but must be {sequences[0]}, below the first gap")
    if harness.retention == "workqueue":
        await consumers.delete(*old)
    await consumers.create(*new, nonce="new", start=_start(harness, floor + 1))
    if harness.retention != "workqueue":
        await consumers.delete(*old)
    came = await harness.pull(new, MANY)
    # A stream with the retention "limits" redelivers messages acknowledged above the floor. A cohort skips these
    # messages.
    left = [sequences[1], *([sequences[2]] if harness.retention == "limits" else []), sequences[3]]
    expect(came == left, f"the next durable delivered {came}, but must deliver {left}")


async def check_a_lost_request_is_unknown(harness: EpochHarness) -> None:
    """A call whose request is lost raises ``UnknownResult``, has no effect, and does not take effect later."""
    consumers = harness.consumers()
    harness.fail(consumers, "request")
    await expect_unknown(consumers.create(0, 1, 0, nonce="n", start=_start(harness, 1)))
    await _there(consumers, 0)
    await consumers.create(0, 1, 0, nonce="again", start=_start(harness, 1))
    harness.fail(consumers, "request")
    await expect_unknown(consumers.delete(0, 1, 0))
    await _there(consumers, 0, EpochConsumer(0, 1, 0, "again", 0))


async def check_a_lost_reply_is_unknown(harness: EpochHarness) -> None:
    """A call whose answer is lost raises ``UnknownResult``, but takes effect. The nonce identifies the creator."""
    consumers = harness.consumers()
    harness.fail(consumers, "reply")
    await expect_unknown(consumers.create(0, 1, 0, nonce="n", start=_start(harness, 1)))
    await _there(consumers, 0, EpochConsumer(0, 1, 0, "n", 0))
    harness.fail(consumers, "reply")
    await expect_unknown(consumers.delete(0, 1, 0))
    await _there(consumers, 0)


EPOCH_CHECKS: Final[tuple[EpochCheck, ...]] = checks_of(globals())
"""All checks, in the order to run them."""
