"""Locks in memory that a test can lose: the reference of ``lanes.ownership.Locks``.

``LockServer`` is a lock service as data. The service acts only during calls of its methods, which take the time as an
argument. ``MemoryLocks`` are the locks of one process over the service.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import anyio
import anyio.lowlevel

from lanes.arguments import check_positive
from lanes.clock import Clock, monotonic
from lanes.errors import SourceError
from lanes.ownership.held_lock import HeldLock, check_lock_name
from lanes.ownership.locks import Held

_MARGIN: Final = 0.1
"""Share of a lease in which the holder no longer relies on the lease, for the way of a request."""

_SHARE: Final = 3
"""Number of renewals in a lease."""


class LockServer:
    """The locks of all processes: a holder for each name, and the time at which its lease ends.

    No method blocks. ``now`` never decreases.
    """

    def __init__(self) -> None:
        self._holders: dict[str, tuple[object, float]] = {}

    def __repr__(self) -> str:
        return f"<LockServer: {len(self._holders)} locks>"

    def acquire(self, name: str, holder: object, lease: float, now: float) -> bool:
        """Give a lock to a holder, unless another holder has an unexpired lease on the lock.

        Args:
            name: Name of the lock.
            holder: The holder, a new object for each acquisition.
            lease: Seconds until the lock ends without a renewal.
            now: The time, in seconds.

        Returns:
            Whether the holder has the lock.
        """
        if self.holder(name, now) is not None:
            return False
        self._holders[name] = holder, now + lease
        return True

    def renew(self, name: str, holder: object, lease: float, now: float) -> bool:
        """Start the lease of a lock again, if the holder still has the lock.

        Args:
            name: Name of the lock.
            holder: The holder.
            lease: Seconds until the lock ends without a further renewal.
            now: The time, in seconds.

        Returns:
            Whether the holder has the lock.
        """
        if self.holder(name, now) is not holder:
            return False
        self._holders[name] = holder, now + lease
        return True

    def free(self, name: str, holder: object) -> None:
        """Free a lock, if the holder has the lock. Idempotent.

        Args:
            name: Name of the lock.
            holder: The holder.
        """
        if self._holders.get(name, (None,))[0] is holder:
            del self._holders[name]

    def holder(self, name: str, now: float) -> object | None:
        """Return the holder of a lock.

        Args:
            name: Name of the lock.
            now: The time, in seconds.

        Returns:
            The holder; None = the lock is free.
        """
        holder, ends = self._holders.get(name, (None, math.inf))
        return holder if now < ends else None

    def lose(self, name: str | None = None) -> None:
        """Forget the holder of a lock, or of all locks, as a restarted service does. The holders notice at a renewal.

        Args:
            name: Name of the lock; None = all locks.
        """
        if name is None:
            self._holders.clear()
        else:
            self._holders.pop(name, None)


class MemoryLocks:
    """The locks of one process over a ``LockServer``; see ``lanes.ownership.Locks``.

    The class works on asyncio and on trio.

    The locks of a process end after their lease if the process does not run ``run``, or if its link is cut.

    Args:
        server: The service.
        lease: Seconds until a lock ends without a renewal, more than 0.
        clock: Clock of the process and of the service.

    Attributes:
        cut: Whether no request reaches the service.

    Raises:
        ConfigError: The lease is out of its range.
    """

    def __init__(self, server: LockServer, *, lease: float = 10.0, clock: Clock = monotonic) -> None:
        check_positive("lease", lease)
        self.cut = False
        self._server = server
        self._lease = lease
        self._clock = clock
        self._held: list[HeldLock] = []

    def __repr__(self) -> str:
        return f"<MemoryLocks: {len(self._held)} held>"

    async def open(self) -> None:
        """See ``Locks.open``.

        Raises:
            SourceError: The process has no link.
        """
        await self._reach()

    async def run(self) -> None:
        """Renew the held locks, every third of the lease; see ``Locks.run``."""
        while True:
            due = self._clock() + self._lease / _SHARE
            await anyio.sleep(max(0.0, min([due, *(held.deadline for held in self._held)]) - self._clock()))
            self.renew()

    def renew(self) -> None:
        """Renew the held locks once, and report the lost locks. ``run`` calls this method. Does not block."""
        now = self._clock()
        for held in list(self._held):
            if held.expired():
                self._held.remove(held)
            elif self.cut:
                continue
            elif self._server.renew(held.name, held, self._lease, now):
                held.renewed(self._until(now))
            else:
                self._held.remove(held)
                held.lose("the lock service no longer has it")

    async def try_acquire(self, name: str, changed: Callable[[], None]) -> Held | None:
        """Acquire a free lock; see ``Locks.try_acquire``.

        Args:
            name: Name of the lock, 1 to 1,000 characters without zero bytes.
            changed: Function to call when the deadline has risen or the process has lost the lock.

        Returns:
            The lock; None = this or another process already holds the lock.

        Raises:
            ConfigError: The name is invalid.
            SourceError: The process has no link.
        """
        check_lock_name(name)
        await self._reach()
        # Nothing suspends from here on, so a cancelled call has acquired nothing.
        now = self._clock()
        held = HeldLock(name, changed, self._free, deadline=self._until(now), clock=self._clock)
        if not self._server.acquire(name, held, self._lease, now):
            return None
        self._held.append(held)
        return held

    async def aclose(self) -> None:
        """Release the held locks; see ``Locks.aclose``. Over a cut link, the locks end after their lease."""
        for held in list(self._held):
            await held.release()

    async def _free(self, held: HeldLock) -> None:
        if held in self._held:
            self._held.remove(held)
        if not self.cut:
            self._server.free(held.name, held)

    async def _reach(self) -> None:
        await anyio.lowlevel.checkpoint()
        if self.cut:
            raise SourceError("the lock service does not answer; call again when it answers", retryable=True)

    def _until(self, sent: float) -> float:
        return sent + self._lease * (1 - _MARGIN)
