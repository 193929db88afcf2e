"""The contract suite of lease stores: each check raises ``ContractBroken`` if the backend breaks a promise.

The author of a ``lanes.cohort.leases.LeaseStore`` writes a ``LeaseHarness`` and runs every check of ``LEASE_CHECKS``,
each with a new harness. Some checks wait for the expiry of a key, which takes one second or more.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, Literal, Protocol

import anyio

from lanes.cohort.leases import Conflict, Entry, LeaseStore, UnknownResult
from memsource.contract.harness import ContractBroken, checks_of, expect

__all__ = ["LEASE_CHECKS", "LeaseCheck", "LeaseHarness"]

LATE: Final = 0.5
"""Seconds after its time to live within which a key must expire."""


class LeaseHarness(Protocol):
    """An empty bucket, and clients of the bucket. Each check needs a new harness."""

    def store(self) -> LeaseStore:
        """Return a new client of the bucket, with its own connection."""

    async def elapse(self, seconds: float) -> None:
        """Let time pass at the server.

        Args:
            seconds: The time to pass.
        """

    def fail(self, store: LeaseStore, what: Literal["request", "reply"]) -> None:
        """Lose the next write of a client.

        Args:
            store: The client.
            what: ``"request"``: the server never receives the write. ``"reply"``: the server applies the write, and
                its answer is lost.
        """


LeaseCheck = Callable[[LeaseHarness], Awaitable[None]]
"""One promise of the contract, as a function that raises ``ContractBroken`` if the backend breaks it."""


async def _refused(store: LeaseStore, key: str, revision: int | None, fence: tuple[str, int] | None = None) -> None:
    """Try a write that the bucket must refuse, and check that the key is unchanged."""
    before = await store.read(key)
    try:
        came = await store.write(key, b"refused", revision=revision, fence=fence)
    except Conflict:
        expect(await store.read(key) == before, f"a refused write of {key!r} has changed the key")
    else:
        what = f"write() of {key!r} with revision {revision} and fence {fence} returned revision {came}"
        raise ContractBroken(f"{what}, but must raise Conflict")


async def check_a_key_that_was_never_written_is_empty(harness: LeaseHarness) -> None:
    """A key without a write has no value and the revision 0."""
    came = await harness.store().read("l.7")
    expect(came == Entry(None, 0), f"read() returned {came} for a key that was never written, not Entry(None, 0)")


async def check_a_write_is_read_by_every_client(harness: LeaseHarness) -> None:
    """Every client reads a write at once, with the revision that ``write`` returned. The value keeps all bytes."""
    one, other = harness.store(), harness.store()
    for value in (b"first", b"", bytes(range(256))):
        revision = await one.write("config", value, revision=(await other.read("config")).revision)
        for store in (one, other):
            came = await store.read("config")
            expect(
                came == Entry(value, revision),
                f"read() returned {came}, but {value!r} was written with revision {revision}",
            )


async def check_revision_0_creates_once(harness: LeaseHarness) -> None:
    """The bucket refuses a second write of a key with the revision 0."""
    one, other = harness.store(), harness.store()
    await one.write("plan", b"1", revision=0)
    await _refused(other, "plan", 0)
    await _refused(one, "plan", 0)


async def check_a_write_expects_its_revision(harness: LeaseHarness) -> None:
    """The bucket refuses a write with a wrong revision. Revisions rise over all keys."""
    store = harness.store()
    await _refused(store, "a", 3)
    first = await store.write("a", b"1", revision=0)
    beside = await store.write("b", b"1", revision=0)
    second = await store.write("a", b"2", revision=first)
    expect(first < beside < second, f"revisions must rise from write to write, but are {first}, {beside}, {second}")
    for revision in (first, beside, second + 1):
        await _refused(store, "a", revision)


async def check_of_many_at_once_one_wins(harness: LeaseHarness) -> None:
    """If several clients write a key with the same revision, one write succeeds, and its value remains."""
    won: list[bytes] = []

    async def race(store: LeaseStore, value: bytes, revision: int) -> None:
        with suppress(Conflict):
            await store.write("l.0", value, revision=revision, ttl=5.0)
            won.append(value)

    stores = [harness.store() for _ in range(4)]
    for _ in range(3):
        revision = (await stores[0].read("l.0")).revision
        won.clear()
        async with anyio.create_task_group() as tasks:
            for number, store in enumerate(stores):
                tasks.start_soon(race, store, b"%d" % number, revision)
        stands = (await stores[0].read("l.0")).value
        expect(len(won) == 1 and stands == won[0], f"{won} succeeded, and the value is {stands!r}")


async def check_a_fence_is_the_revision_of_another_key(harness: LeaseHarness) -> None:
    """A write with ``fence=(key, revision)`` succeeds only while ``key`` has that revision."""
    store, rival = harness.store(), harness.store()
    lease = await store.write("l.1", b"mine", revision=0, ttl=5.0)
    await store.write("s.1", b"state", revision=None, fence=("l.1", lease))
    await store.write("s.1", b"state again", revision=None, fence=("l.1", lease))
    await rival.write("l.1", b"theirs", revision=lease, ttl=5.0)
    await _refused(store, "s.1", None, ("l.1", lease))
    await _refused(store, "s.2", None, ("l.2", 1))


async def check_a_key_expires(harness: LeaseHarness) -> None:
    """A key expires soon after its time to live, not before.

    The bucket then refuses a write with the key as fence. A client can create the key again, with the revision that
    ``read`` returns.
    """
    store = harness.store()
    await store.write("s.3", b"stays", revision=0)
    lease = await store.write("l.3", b"mine", revision=0, ttl=6.0)
    # The remaining time to live is for a slow server.
    await harness.elapse(4.0)
    expect((await store.read("l.3")).value == b"mine", "a key has expired before its time to live")
    await harness.elapse(2.0 + LATE)
    left = await store.read("l.3")
    expect(left.value is None, f"a key holds {left.value!r} after its time to live")
    expect(set(await store.entries("")) == {"s.3"}, "entries() must leave out an expired key")
    await _refused(store, "l.3", lease)
    await _refused(store, "s.3", None, ("l.3", lease))
    again = await store.write("l.3", b"theirs", revision=left.revision, ttl=2.0)
    expect(again > lease, f"revision {again} of a key that was created again must be above {lease}")
    expect((await store.read("s.3")).value == b"stays", "a key without a time to live has expired")


async def check_a_renewal_begins_the_time_to_live_anew(harness: LeaseHarness) -> None:
    """Each write replaces the value and the time to live."""
    store = harness.store()
    revision = await store.write("m.a", b"1", revision=0, ttl=4.0)
    revision = await store.write("m.a", b"2", revision=revision, ttl=12.0)
    await harness.elapse(4.0 + LATE)
    expect((await store.read("m.a")).value == b"2", "a renewed key has expired before its new time to live")
    await store.write("m.a", b"3", revision=revision, ttl=1.0)
    await harness.elapse(1.0 + LATE)
    expect((await store.read("m.a")).value is None, "a key must have the time to live of its last write")


async def check_entries_are_those_with_the_prefix(harness: LeaseHarness) -> None:
    """``entries`` returns values and revisions as ``read`` does. The prefix "m." does not match the key "mx.a"."""
    store = harness.store()
    for key in ("m.a", "m.b-2", "mx.a", "l.1", "m.long_name-with_everything-1"):
        await store.write(key, key.encode(), revision=0)
    came = await harness.store().entries("m.")
    expect(set(came) == {"m.a", "m.b-2", "m.long_name-with_everything-1"}, f"entries('m.') returned {sorted(came)}")
    for key, entry in came.items():
        expect(entry == await store.read(key), f"entries() returned {entry} for {key!r}, but read() another entry")
    expect(not await store.entries("drain."), "entries() returned keys that were never written")


async def check_a_lost_request_is_unknown(harness: LeaseHarness) -> None:
    """A write whose request is lost raises ``UnknownResult``, and does not take effect later."""
    store = harness.store()
    revision = await store.write("plan", b"1", revision=0)
    harness.fail(store, "request")
    await expect_unknown(store.write("plan", b"2", revision=revision))
    expect(await store.read("plan") == Entry(b"1", revision), "a write whose request was lost has changed the key")
    await store.write("plan", b"3", revision=revision)


async def check_a_lost_reply_is_unknown(harness: LeaseHarness) -> None:
    """A write whose answer is lost raises ``UnknownResult``. A later ``read`` returns the written value."""
    store = harness.store()
    revision = await store.write("plan", b"1", revision=0)
    harness.fail(store, "reply")
    await expect_unknown(store.write("plan", b"2", revision=revision))
    came = await store.read("plan")
    expect(
        came.value == b"2" and came.revision > revision, f"read() returned {came} after a write whose answer was lost"
    )
    await _refused(store, "plan", revision)


async def expect_unknown(call: Awaitable[object]) -> None:
    """Expect ``UnknownResult`` from a call whose request or answer is lost."""
    try:
        await call
    except UnknownResult:
        return
    raise ContractBroken("a call returned although its request or answer was lost; it must raise UnknownResult")


LEASE_CHECKS: Final[tuple[LeaseCheck, ...]] = checks_of(globals())
"""All checks, in the order to run them."""
