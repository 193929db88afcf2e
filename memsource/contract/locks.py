"""The contract suite of locks: each check raises ``ContractBroken`` if the backend breaks a promise.

The author of a ``lanes.ownership.Locks`` writes a ``LocksHarness`` and runs the checks that ``lock_checks`` returns for
its abilities, each with a new harness. Checks of locks that expire wait for up to three leases.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final, Literal, Protocol

import anyio
import anyio.lowlevel

from lanes.dead_letter import members_of
from lanes.errors import ConfigError, SourceError
from lanes.ownership.locks import Held, Locks
from memsource.contract.harness import ContractBroken, checks_of, checks_within, cut_short, expect

__all__ = ["LOCK_CHECKS", "LockAbility", "LockCheck", "LocksHarness", "lock_checks"]

LockAbility = Literal["expire", "lose"]
"""An ability of locks or of their harness.

- ``expire``: The locks of a process that does not renew them end after a time.
- ``lose``: The harness can take the locks of a process away at once.
"""

LATE: Final = 5.0
"""Maximum seconds from the end of a lease to the end of the lock, and to the detection of the loss."""

_PAUSE: Final = 0.02


class LocksHarness(Protocol):
    """A service without locks, and processes over it. Each check needs a new harness."""

    @property
    def can(self) -> Collection[LockAbility]:
        """The abilities of locks and harness. The suite omits a check that needs any other ability."""

    @property
    def lease(self) -> float:
        """Seconds until a lock ends without a renewal. Only checks of the ability ``expire`` use this member."""

    def locks(self) -> Locks:
        """Return the unopened locks of another process."""

    async def elapse(self, seconds: float) -> None:
        """Let time pass, on the clock of the deadlines too.

        Args:
            seconds: The time to pass.
        """

    def now(self) -> float:
        """Return the time of the clock of the deadlines; ``lanes.clock.monotonic`` in most harnesses."""

    async def lose(self, locks: Locks) -> None:
        """Take all locks of a process away, as a service does when the session ends.

        Only checks of the ability ``lose`` use this member.

        Args:
            locks: The locks of the process.
        """


LockCheck = Callable[[LocksHarness], Awaitable[None]]
"""One promise of the contract, as a function that raises ``ContractBroken`` if the backend breaks it."""


class _Changes:
    """Counts the calls of ``changed``."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


@asynccontextmanager
async def _process(harness: LocksHarness) -> AsyncIterator[Locks]:
    """Open the locks of a process, run them, and close them at the end."""
    locks = harness.locks()
    try:
        await locks.open()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(locks.run)
            yield locks
            tasks.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        raise members_of(group)[0] from None
    finally:
        with anyio.CancelScope(shield=True):
            await locks.aclose()


@asynccontextmanager
async def _two(harness: LocksHarness) -> AsyncIterator[tuple[Locks, Locks]]:
    async with _process(harness) as one, _process(harness) as other:
        yield one, other


async def _acquire(locks: Locks, name: str = "orders/billing/7", changed: Callable[[], None] | None = None) -> Held:
    held = await locks.try_acquire(name, changed or _Changes())
    if held is None:
        raise ContractBroken(
            f"try_acquire({name!r}) returned None, but must return the lock, because no process holds the lock"
        )
    expect(held.name == name, f"a lock acquired as {name!r} has the name {held.name!r}")
    expect(not held.lost, f"a lock is lost when it is acquired: {held.lost!r}")
    return held


async def _held_elsewhere(locks: Locks, name: str = "orders/billing/7") -> None:
    expect(
        await locks.try_acquire(name, _Changes()) is None,
        f"try_acquire({name!r}) returned a lock that is held already",
    )


async def check_a_lock_has_one_holder(harness: LocksHarness) -> None:
    """No other process can acquire a held lock. The next process can acquire the lock at once after its release."""
    async with _two(harness) as (one, other):
        for _ in range(3):
            held = await _acquire(one)
            expect(held.deadline > harness.now(), "the deadline of a new lock has passed already")
            await _held_elsewhere(other)
            await held.release()
            held = await _acquire(other)
            await _held_elsewhere(one)
            await held.release()


async def check_a_lock_is_not_reentrant(harness: LocksHarness) -> None:
    """The holder cannot acquire its lock a second time, and one release frees the lock after such attempts."""
    async with _two(harness) as (one, other):
        held = await _acquire(one)
        for _ in range(3):
            await _held_elsewhere(one)
        await held.release()
        await _acquire(other)


async def check_names_are_independent(harness: LocksHarness) -> None:
    """Locks of different names are independent, for names of any characters and length."""
    names = [
        "a",
        "A",
        "a ",
        "a/1",
        "a/11",
        "é",
        "%s{}'\"\\",
        "x" * 1_000,
        "x" * 999,
        "a.b",
        "a*b",
        *map(str, range(50)),
    ]
    async with _two(harness) as (one, other):
        held = [await _acquire(one, name) for name in names]
        for name in names:
            await _held_elsewhere(other, name)
        for each in held[::2]:
            await each.release()
        for number, name in enumerate(names):
            if number % 2 == 0:
                await _acquire(other, name)
            else:
                await _held_elsewhere(other, name)


async def check_an_invalid_name_is_refused(harness: LocksHarness) -> None:
    """A name that is empty, too long, or has a zero byte or a lone surrogate raises ``ConfigError``."""
    async with _process(harness) as locks:
        for name in ("", "a\0b", "x" * 1_001, "\ud800"):
            try:
                await locks.try_acquire(name, _Changes())
            except ConfigError:
                continue
            raise ContractBroken(f"try_acquire({name[:20]!r}) must raise ConfigError")
        await _acquire(locks)


async def check_of_many_at_once_one_wins(harness: LocksHarness) -> None:
    """If several processes try a lock at once, one process acquires the lock.

    Concurrent calls of one process acquire it once.
    """
    async with AsyncExitStack() as processes:
        clients = [await processes.enter_async_context(_process(harness)) for _ in range(3)]
        for number in range(5):
            won: list[Held] = []

            async def race(locks: Locks, won: list[Held], name: str) -> None:
                held = await locks.try_acquire(name, _Changes())
                if held is not None:
                    won.append(held)

            async with anyio.create_task_group() as tasks:
                for locks in (*clients, *clients):
                    tasks.start_soon(race, locks, won, f"race {number}")
            expect(len(won) == 1, f"{len(won)} of 6 concurrent calls of try_acquire() got one lock")


async def check_a_release_frees_no_later_acquisition(harness: LocksHarness) -> None:
    """A repeated release changes nothing: a lock that any process acquired later stays."""
    async with _two(harness) as (one, other):
        first = await _acquire(one)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(first.release)
            tasks.start_soon(first.release)
        second = await _acquire(one)
        await first.release()
        await _held_elsewhere(other)
        await second.release()
        third = await _acquire(other)
        await first.release()
        await second.release()
        await _held_elsewhere(one)
        expect(not first.lost and not second.lost and not third.lost, "a released lock must not count as lost")


async def check_a_cancelled_call_holds_nothing(harness: LocksHarness) -> None:
    """A cancelled ``try_acquire`` leaves no lock behind, and a cancelled ``release`` gives the lock up."""
    async with _two(harness) as (one, other):
        for turns in range(12):
            name = f"cut {turns}"
            got: list[Held | None] = []

            async def acquire(name: str = name, got: list[Held | None] = got) -> None:
                got.append(await one.try_acquire(name, _Changes()))

            await cut_short(acquire, turns)
            held = got[0] if got else None
            if held is not None:
                await cut_short(held.release, turns)
            await _until_acquired(harness, other, name, "a lock to end whose try_acquire() or release() was cancelled")


async def check_a_closed_process_holds_nothing(harness: LocksHarness) -> None:
    """``aclose`` releases every lock, is idempotent, and works without ``open``."""
    unopened = harness.locks()
    await unopened.aclose()
    async with _process(harness) as other:
        async with _process(harness) as locks:
            held = [await _acquire(locks, f"closed {number}") for number in range(20)]
        await locks.aclose()
        for each in held:
            await _acquire(other, each.name)
            await each.release()


async def check_a_renewed_lock_stays(harness: LocksHarness) -> None:
    """While ``run`` runs, a lock outlives its lease. The deadline rises in time, and ``run`` calls ``changed``."""
    changes = _Changes()
    async with _two(harness) as (one, other):
        held = await _acquire(one, changed=changes)
        first, last = held.deadline, harness.now() + 2 * harness.lease
        expect(first <= harness.now() + harness.lease, "the deadline of a lock is later than the end of its lease")
        while harness.now() < last:
            expect(not held.lost, f"a lock whose process renews it was lost: {held.lost}")
            expect(held.deadline > harness.now(), "the deadline of a lock has passed although its process renews it")
            await _held_elsewhere(other)
            await _pass(harness)
        expect(held.deadline > first, "the deadline has not risen within two leases")
        expect(changes.count > 0, "changed() was not called although the deadline has risen")


async def check_a_frozen_process_loses_its_locks(harness: LocksHarness) -> None:
    """A process without renewals loses its locks soon after the end of the lease, and never before their deadlines."""
    frozen = harness.locks()
    try:
        await frozen.open()
        async with _process(harness) as other:
            held = await _acquire(frozen)
            deadline = held.deadline
            taken = await _until_acquired(harness, other, held.name, "the lock of a frozen process to end")
            expect(
                harness.now() >= deadline,
                f"another process has a lock {deadline - harness.now():.3f} s before the deadline of its holder",
            )
            expect(held.deadline == deadline, "the deadline of a frozen process has moved")
            # The frozen process wakes, and finds its lock lost. Its release frees nothing.
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(frozen.run)
                await _until_lost(harness, held)
                tasks.cancel_scope.cancel()
            await held.release()
            expect(
                await _tried(frozen, held.name) is None, "a process that was frozen has acquired a lock held elsewhere"
            )
            expect(not taken.lost, f"the new holder lost its lock to the former one: {taken.lost}")
    finally:
        await frozen.aclose()


async def check_a_lost_lock_is_noticed(harness: LocksHarness) -> None:
    """A lock that the service took away permanently counts as lost. The process can acquire the name again."""
    changes = _Changes()
    async with _two(harness) as (one, other):
        names = ["lost 0", "lost 1"]
        held = [await _acquire(one, name, changes) for name in names]
        kept = await _acquire(other, "kept")
        await harness.lose(one)
        for each in held:
            await _until_lost(harness, each)
        expect(changes.count >= 2, f"changed() was called {changes.count} times for 2 lost locks")
        deadlines = [each.deadline for each in held]
        taken = await _until_acquired(harness, other, names[0], "a lost lock to be free for another process")
        again = await _until_acquired(harness, one, names[1], "a lost lock to be free for its former holder")
        for each in held:
            await each.release()
        await _held_elsewhere(one, names[0])
        await _held_elsewhere(other, names[1])
        expect(all(each.lost for each in held), "a lost lock must stay lost")
        expect(deadlines == [each.deadline for each in held], "the deadline of a lost lock has moved")
        expect(not (taken.lost or again.lost or kept.lost), "a release of a lost lock has taken another lock away")


_NEEDS: Final[dict[LockCheck, tuple[LockAbility, ...]]] = {
    check_a_renewed_lock_stays: ("expire",),
    check_a_frozen_process_loses_its_locks: ("expire",),
    check_a_lost_lock_is_noticed: ("lose",),
}

LOCK_CHECKS: Final[tuple[LockCheck, ...]] = checks_of(globals())
"""All checks, in the order to run them."""


def lock_checks(can: Collection[LockAbility]) -> Sequence[LockCheck]:
    """Return the checks for locks with these abilities, in the order to run them.

    Args:
        can: The abilities; see ``LockAbility``.

    Returns:
        The checks.

    Raises:
        ValueError: An ability is unknown.
    """
    return checks_within([(check, _NEEDS.get(check, ())) for check in LOCK_CHECKS], can, ("expire", "lose"))


# --- tools of the checks


async def _pass(harness: LocksHarness) -> None:
    """Let a short time pass on the clock of the harness, while the tasks of the locks run."""
    await harness.elapse(_PAUSE)
    await anyio.lowlevel.checkpoint()


async def _until(harness: LocksHarness, done: Callable[[], Awaitable[bool]], what: str) -> None:
    """Wait until a condition is true, for at most a lease plus the allowed delay of a service."""
    within = (harness.lease if "expire" in harness.can else 0.0) + LATE
    end = harness.now() + within
    while not await done():
        expect(harness.now() < end, f"waited {within:g} s for {what}")
        await _pass(harness)


async def _tried(locks: Locks, name: str) -> Held | None:
    """Try a lock of a process that may have to connect again, because its session ended."""
    try:
        return await locks.try_acquire(name, _Changes())
    except SourceError as error:
        if not error.retryable:
            raise
        return None


async def _until_acquired(harness: LocksHarness, locks: Locks, name: str, what: str) -> Held:
    got: list[Held] = []

    async def tried() -> bool:
        held = await _tried(locks, name)
        if held is not None:
            got.append(held)
        return bool(got)

    await _until(harness, tried, what)
    return got[0]


async def _until_lost(harness: LocksHarness, held: Held) -> None:
    async def lost() -> bool:
        return bool(held.lost)

    await _until(harness, lost, f"the loss of {held.name!r} to be noticed")
