"""Locks in memory and locks of one process keep the contract of locks, and the contract finds those that do not.

Checks of leases run in virtual time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection
from typing import Final

import anyio
import anyio.lowlevel
import pytest

from lanes.clock import monotonic
from lanes.ownership import Held, HeldLock, LeaseLocks, LocalLocks, Locks
from lanes.ownership.lease_locks import key_of
from memsource.contract.harness import ContractBroken
from memsource.contract.locks import LOCK_CHECKS, LockAbility, LockCheck, lock_checks
from memsource.jetstream.lease_store import Bucket, MemoryLeaseStore
from memsource.jetstream.link import Link
from memsource.memory.locks import LockServer, MemoryLocks
from memsource.sim.loop.choosers import Fifo
from memsource.sim.loop.virtual import run

LEASE: Final = 3.0

_domains = itertools.count()


class MemoryHarness:
    """A lock service in memory, in virtual time. ``make`` makes the locks of a process."""

    can: Collection[LockAbility] = ("expire", "lose")
    lease = LEASE

    def __init__(self, make: Callable[[LockServer], MemoryLocks] | None = None) -> None:
        self.server = LockServer()
        self._make = make or (lambda server: MemoryLocks(server, lease=LEASE, clock=anyio.current_time))

    def locks(self) -> MemoryLocks:
        return self._make(self.server)

    async def elapse(self, seconds: float) -> None:
        await anyio.sleep(seconds)

    def now(self) -> float:
        return anyio.current_time()

    async def lose(self, locks: Locks) -> None:
        assert isinstance(locks, MemoryLocks)
        for held in list(locks._held):
            self.server.lose(held.name)


class LeaseHarness:
    """Locks over a bucket in memory, in virtual time."""

    can: Collection[LockAbility] = ("expire", "lose")
    lease = LEASE

    def __init__(self) -> None:
        self.bucket = Bucket()
        self.links: list[Link] = []

    def locks(self) -> LeaseLocks:
        self.links.append(Link(anyio.current_time, _never, timeout=0.5))
        return LeaseLocks(MemoryLeaseStore(self.bucket, self.links[-1]), lease=LEASE, clock=anyio.current_time)

    async def elapse(self, seconds: float) -> None:
        await anyio.sleep(seconds)

    def now(self) -> float:
        return anyio.current_time()

    async def lose(self, locks: Locks) -> None:
        assert isinstance(locks, LeaseLocks)
        for name in locks._held:
            self.bucket.drop(key_of(name), anyio.current_time())


def _never(at: float, act: Callable[[float], None]) -> None:
    raise AssertionError(f"nothing is to be done later, at {at}: {act}")


class LocalHarness:
    """The locks of this process."""

    can: Collection[LockAbility] = ()
    lease = math.inf

    def __init__(self) -> None:
        self._domain = f"test {next(_domains)}"

    def locks(self) -> LocalLocks:
        return LocalLocks(self._domain)

    async def elapse(self, seconds: float) -> None:
        await anyio.sleep(seconds)

    def now(self) -> float:
        return monotonic()

    async def lose(self, locks: Locks) -> None:
        raise AssertionError("a lock of one process cannot be lost")


def name_of(check: object) -> str:
    return getattr(check, "__name__", str(check)).lstrip("_")


@pytest.mark.parametrize("check", LOCK_CHECKS, ids=name_of)
def test_locks_in_memory_keep_the_contract(check: LockCheck) -> None:
    run(check, MemoryHarness(), chooser=Fifo())


@pytest.mark.parametrize("check", LOCK_CHECKS, ids=name_of)
def test_locks_over_a_lease_store_keep_the_contract(check: LockCheck) -> None:
    run(check, LeaseHarness(), chooser=Fifo())


@pytest.mark.anyio
@pytest.mark.parametrize("check", lock_checks(LocalHarness.can), ids=name_of)
async def test_locks_of_one_process_keep_the_contract(check: LockCheck) -> None:
    await check(LocalHarness())


def test_an_unknown_ability_is_refused() -> None:
    with pytest.raises(ValueError, match="'fly' in can="):
        lock_checks(["fly"])  # type: ignore[list-item]
    assert len(lock_checks(())) == len(LOCK_CHECKS) - 3


# --- locks that break the contract


class _Wrong(MemoryLocks):
    """Locks over a service; each subclass breaks one promise."""

    def __init__(self, server: LockServer) -> None:
        super().__init__(server, lease=LEASE, clock=anyio.current_time)
        self.server = server


class _EveryoneHolds(_Wrong):
    async def try_acquire(self, name: str, changed: Callable[[], None]) -> Held | None:
        self.server.lose(name)
        return await super().try_acquire(name, changed)


class _Reentrant(_Wrong):
    """Locks of one session, which the session may take twice, as advisory locks of PostgreSQL."""

    async def try_acquire(self, name: str, changed: Callable[[], None]) -> Held | None:
        for held in self._held:
            if held.name == name:
                return held
        return await super().try_acquire(name, changed)


class _NeedsAnotherRelease(_Wrong):
    """Locks that count the attempts of their holder, and free the lock after as many releases."""

    def __init__(self, server: LockServer) -> None:
        super().__init__(server)
        self.attempts: dict[str, int] = {}

    async def try_acquire(self, name: str, changed: Callable[[], None]) -> Held | None:
        self.attempts[name] = self.attempts.get(name, 0) + 1
        return await super().try_acquire(name, changed)

    async def _free(self, held: HeldLock) -> None:
        self.attempts[held.name] -= 1
        if not self.attempts[held.name]:
            await super()._free(held)


class _CutsNames(_Wrong):
    async def try_acquire(self, name: str, changed: Callable[[], None]) -> Held | None:
        held = await super().try_acquire(name[:999], changed)
        if isinstance(held, HeldLock):
            held._name = name
        return held


class _AnyName(_Wrong):
    async def try_acquire(self, name: str, changed: Callable[[], None]) -> Held | None:
        return await super().try_acquire(name or "empty", changed)


class _LooksThenTakes(_Wrong):
    async def try_acquire(self, name: str, changed: Callable[[], None]) -> Held | None:
        free = self.server.holder(name, self._clock()) is None
        await anyio.lowlevel.checkpoint()
        if not free:
            return None
        self.server.lose(name)
        held = HeldLock(name, changed, self._free)
        self.server.acquire(name, held, self._lease, self._clock())
        return held


class _FreesByName(_Wrong):
    """A release that frees the lock of the name, and not the acquisition."""

    async def _free(self, held: HeldLock) -> None:
        await super()._free(held)
        self.server.lose(held.name)


class _KeepsCancelled(_Wrong):
    async def try_acquire(self, name: str, changed: Callable[[], None]) -> Held | None:
        held = await super().try_acquire(name, changed)
        for _ in range(3):
            await anyio.lowlevel.checkpoint()
        return held


class _KeepsClosed(_Wrong):
    async def aclose(self) -> None:
        for each in self._held:
            self.server.renew(each.name, each, 1_000.0, self._clock())


class _RenewsNothing(_Wrong):
    async def run(self) -> None:
        await anyio.sleep_forever()


class _RenewsSilently(_Wrong):
    async def try_acquire(self, name: str, changed: Callable[[], None]) -> Held | None:
        return await super().try_acquire(name, lambda: None)


class _FrozenOwnerNeverExpires(_Wrong):
    """Locks of a session without a limit on its idle time: a frozen process keeps its connection."""

    async def try_acquire(self, name: str, changed: Callable[[], None]) -> Held | None:
        held = await super().try_acquire(name, changed)
        if held is not None:
            self.server.renew(name, held, math.inf, self._clock())
        return held


class _DeadlineAfterTheLease(_Wrong):
    """A deadline that does not count the way of the request."""

    def _until(self, sent: float) -> float:
        return sent + 1.5 * self._lease


class _FrozenDeadlineRises(_Wrong):
    """Locks whose process, after it wakes, renews a lock that it has lost."""

    def renew(self) -> None:
        for held in self._held:
            held._deadline = self._clock() + self._lease


class _NoticesNoLoss(_Wrong):
    def renew(self) -> None:
        for held in self._held:
            self.server.renew(held.name, held, self._lease, self._clock())
            held.renewed(self._until(self._clock()))


WRONG: Final = {
    _EveryoneHolds: "check_a_lock_has_one_holder",
    _Reentrant: "check_a_lock_is_not_reentrant",
    _NeedsAnotherRelease: "check_a_lock_is_not_reentrant",
    _CutsNames: "check_names_are_independent",
    _AnyName: "check_an_invalid_name_is_refused",
    _LooksThenTakes: "check_of_many_at_once_one_wins",
    _FreesByName: "check_a_release_frees_no_later_acquisition",
    _KeepsCancelled: "check_a_cancelled_call_holds_nothing",
    _KeepsClosed: "check_a_closed_process_holds_nothing",
    _RenewsNothing: "check_a_renewed_lock_stays",
    _RenewsSilently: "check_a_renewed_lock_stays",
    _FrozenOwnerNeverExpires: "check_a_frozen_process_loses_its_locks",
    _DeadlineAfterTheLease: "check_a_frozen_process_loses_its_locks",
    _FrozenDeadlineRises: "check_a_frozen_process_loses_its_locks",
    _NoticesNoLoss: "check_a_lost_lock_is_noticed",
}


@pytest.mark.parametrize("wrong", WRONG, ids=name_of)
def test_the_contract_finds_locks_that_break_it(wrong: type[_Wrong]) -> None:
    (check,) = [check for check in LOCK_CHECKS if check.__name__ == WRONG[wrong]]
    with pytest.raises(ContractBroken):
        run(check, MemoryHarness(wrong), chooser=Fifo())
