"""The contract of locks: at most one process handles a partition at a time.

A lock is exclusive until its *deadline*, the time up to which this process certainly holds it. The holder renews its
locks, which raises the deadlines. A process that is frozen, or cut off, reads a deadline in the past when it wakes, and
starts no handler. The epoch of a state, and not the lock, is what refuses a late write: see ``lanes.ownership.state``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Held(Protocol):
    """One acquisition of a lock. The properties are read on the event loop, and neither block nor raise."""

    @property
    def name(self) -> str:
        """The name of the lock."""

    @property
    def deadline(self) -> float:
        """The time up to which no other process can acquire the lock, in seconds of ``lanes.clock.monotonic``.

        A renewal raises the deadline, and counts from the moment at which it was sent. The deadline never falls, and
        never rises after it has passed. Infinity = the lock is held until the process ends.
        """

    @property
    def lost(self) -> str:
        """The reason why the lock is lost, for logs; "" = the lock is not lost. A lost lock stays lost.

        A lock is lost when its service says so, when the connection that holds it ends, or when its deadline passes
        without a confirmed renewal. ``Locks.run`` notices each of them, and gives a lock with a passed deadline up at
        its service too. A released lock is not lost.
        """

    async def release(self) -> None:
        """Give the lock up. When the call returns, another process can acquire the lock. Idempotent.

        The call never frees a later acquisition, of this or another process. If the service does not answer, the lock
        ends by itself after its time, and the call raises nothing. After a cancellation, this process no longer holds
        the lock, which ends at the service at once or after its time.
        """


class Locks(Protocol):
    """Locks of one process, by name.

    Each consumer has its own object, and makes all calls on one event loop. It calls ``open`` first, then ``run`` in a
    task of its own. It calls ``aclose`` last, even if ``open`` failed. ``HeldLock`` is a ready ``Held`` for your own
    locks.
    """

    async def open(self) -> None:
        """Connect, and check that the service can keep the promises of this contract.

        Raises:
            ConfigError: The service cannot hold locks, for example because a proxy shares its connections.
            SourceError: The service does not answer, or refuses the login.
        """

    async def run(self) -> None:
        """Renew the held locks and notice lost ones, until the task is cancelled. Called once.

        In an outage the call reports the locks lost and waits for the service, because any exception ends the consumer.

        Raises:
            ConfigError: A check that ``open`` could not make has failed, or the set-up has changed since.
            SourceError: The service cannot be used any more.
        """

    async def try_acquire(self, name: str, changed: Callable[[], None]) -> Held | None:
        """Acquire a lock if no one holds it. Never waits for another holder.

        Not re-entrant: a lock that this object holds already is not acquired. A cancelled call leaves no lock behind:
        what it may have acquired ends at the service at once or after its time.

        Args:
            name: Name of the lock, 1 to 1,000 characters without zero bytes.
            changed: Function that is called on the event loop when ``deadline`` has risen or ``lost`` is set. Must not
                block or raise. Not called after ``release`` has begun.

        Returns:
            The lock; None = this or another process holds it.

        Raises:
            ConfigError: The name is invalid, or the set-up must be changed.
            SourceError: The service does not answer; ``retryable`` in an outage.
        """

    async def aclose(self) -> None:
        """Release every held lock and close what ``open`` opened. Idempotent. Raises nothing for a lost connection."""
