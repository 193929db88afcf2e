"""Locks over a lease store, with one expiring key for each lock, like the leases of a cohort."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Final

import anyio
from blake3 import blake3

from lanes.arguments import check_whole_seconds
from lanes.clock import Clock, monotonic
from lanes.cohort.leases import Conflict, LeaseStore, UnknownResult
from lanes.core.cohort.held_lease import WRITE, HeldLease
from lanes.dead_letter import members_of
from lanes.errors import SourceError
from lanes.ownership.held_lock import HeldLock, check_lock_name
from lanes.ownership.locks import Held

_LEAST: Final = 3

_MARGIN: Final = 1 / 6
"""Share of the lease in which no handler starts."""

_PAUSE: Final = 0.1
"""Seconds after which the locks repeat a request without an answer."""

_LAST: Final = 1.0
"""Seconds in which the locks try to release a lost lock at the store."""

_FREE: Final = b""
"""The value of a released lock. The value expires, because a store has no deletion."""

_PREFIX: Final = "k."


def key_of(name: str) -> str:
    """Return the key of a lock in the store.

    The key is a hash, because every store accepts the characters of a hash.
    """
    return _PREFIX + blake3(name.encode(), derive_key_context="lanes-runtime v1: key of a lock").hexdigest(32)


class LeaseLocks:
    """Locks over any ``lanes.cohort.LeaseStore``; see ``lanes.ownership.Locks``. The locks run on asyncio and trio.

    Each lock is a key with a time to live, which its holder renews. The locks of a frozen process expire. All processes
    use stores of one bucket. The bucket of a cohort can also store the locks.

    Args:
        store: The store. The caller opens and closes the store.
        lease: Seconds until a lock ends without a renewal, a whole number of 3 or more.
        clock: Clock of the deadlines.
        nonce: Function that returns a unique value at each call.

    Raises:
        ConfigError: The lease is out of its range.
    """

    def __init__(
        self,
        store: LeaseStore,
        *,
        lease: float = 10.0,
        clock: Clock = monotonic,
        nonce: Callable[[], str] = lambda: secrets.token_hex(16),
    ) -> None:
        check_whole_seconds("lease", lease, _LEAST)
        self._store = store
        self._lease = lease
        self._clock = clock
        self._nonce = nonce
        self._held: dict[str, tuple[HeldLock, HeldLease]] = {}
        self._taking: set[str] = set()
        self._new: list[tuple[HeldLock, HeldLease]] = []
        self._wake = anyio.Event()

    def __repr__(self) -> str:
        return f"<LeaseLocks: {len(self._held)} held, lease {self._lease:g} s>"

    async def open(self) -> None:
        """See ``Locks.open``.

        Raises:
            SourceError: The store does not answer or no longer exists.
        """
        try:
            await self._store.read(key_of("open"))
        except UnknownResult as error:
            raise SourceError(f"locks: {error}", retryable=True) from error

    async def run(self) -> None:
        """Renew each held lock in a separate task; see ``Locks.run``.

        Raises:
            SourceError: No later call to the store can succeed.
        """
        try:
            async with anyio.create_task_group() as tasks:
                self._new = list(self._held.values())
                while True:
                    for held, lease in self._new:
                        tasks.start_soon(self._keep, held, lease)
                    self._new, self._wake = [], anyio.Event()
                    await self._wake.wait()
        except BaseExceptionGroup as group:
            raise members_of(group)[0] from group

    async def try_acquire(self, name: str, changed: Callable[[], None]) -> Held | None:
        """Acquire a lock that is free; see ``Locks.try_acquire``.

        Args:
            name: Name of the lock, 1 to 1,000 characters without zero bytes.
            changed: Function that the locks call after an increase of the deadline, or after the loss of the lock.

        Returns:
            The lock; None = this or another process already has the lock.

        Raises:
            ConfigError: The name is invalid.
            SourceError: The store does not answer; retryable if a later call may succeed.
        """
        check_lock_name(name)
        if name in self._held or name in self._taking:
            return None
        self._taking.add(name)
        try:
            return await self._take(name, changed)
        except UnknownResult as error:
            # If the write takes effect, its lease expires, because no one uses the nonce.
            raise SourceError(f"the lock {name!r}: {error}", retryable=True) from error
        finally:
            self._taking.discard(name)

    async def aclose(self) -> None:
        """Release the held locks; see ``Locks.aclose``. The store stays open."""
        async with anyio.create_task_group() as tasks:
            for held, _ in list(self._held.values()):
                tasks.start_soon(held.release)

    async def _take(self, name: str, changed: Callable[[], None]) -> Held | None:
        key, nonce = key_of(name), self._nonce()
        found = await self._store.read(key)
        if found.value:
            return None
        sent = self._clock()
        try:
            revision = await self._store.write(key, nonce.encode(), revision=found.revision, ttl=self._lease)
        except Conflict:
            return None
        lease = HeldLease(nonce, revision, sent, ttl=self._lease, margin=self._lease * _MARGIN)
        held = HeldLock(name, changed, self._free, deadline=lease.expires, clock=self._clock)
        self._held[name] = held, lease
        self._new.append((held, lease))
        self._wake.set()
        return held

    # --- one task for each lock

    async def _keep(self, held: HeldLock, lease: HeldLease) -> None:
        while held.active:
            now = self._clock()
            if held.expired():
                break
            if not lease.due(now):
                await anyio.sleep(min(lease.renew_at, held.deadline) - now)
                continue
            answered = False
            # A request must not delay the news that the lock is lost at its deadline.
            with anyio.move_on_after(held.deadline - now):
                answered = await self._renew(held, lease)
            if not answered:
                await anyio.sleep(min(_PAUSE, max(0.0, held.deadline - self._clock())))
        try:
            if held.lost:
                # A renewal without an answer may have taken effect, and would keep the lock for another lease.
                with anyio.move_on_after(_LAST):
                    await self._freed(key_of(held.name), lease)
        finally:
            self._forget(held)

    async def _renew(self, held: HeldLock, lease: HeldLease) -> bool:
        """Make the next request of a renewal. Return whether the store answered."""
        key = key_of(held.name)
        try:
            if lease.step != WRITE:
                found = await self._store.read(key)
                if found.value != lease.nonce.encode():
                    held.lose("the store no longer has its lease")
                    return True
                lease.found(found.revision)
            sent = self._clock()
            try:
                revision = await self._store.write(key, lease.nonce.encode(), revision=lease.revision, ttl=self._lease)
                lease.renewed(revision, sent)
            except Conflict:
                lease.refused()
            except UnknownResult:
                lease.unknown(sent)
                return False
        except UnknownResult:
            return False
        held.renewed(lease.expires)
        return True

    async def _free(self, held: HeldLock) -> None:
        found = self._held.get(held.name)
        if found is None or found[0] is not held:
            return
        lease = found[1]
        try:
            # After its deadline the lease ends by itself.
            while self._clock() < held.deadline:
                if await self._freed(key_of(held.name), lease):
                    break
                await anyio.sleep(_PAUSE)
        except SourceError:
            pass
        finally:
            self._forget(held)

    async def _freed(self, key: str, lease: HeldLease) -> bool:
        try:
            found = await self._store.read(key)
            if found.value == lease.nonce.encode():
                # A renewal on its way compares with an old revision, and fails.
                await self._store.write(key, _FREE, revision=found.revision, ttl=1.0)
        except (Conflict, UnknownResult):
            return False
        return True

    def _forget(self, held: HeldLock) -> None:
        if (found := self._held.get(held.name)) is not None and found[0] is held:
            del self._held[held.name]
