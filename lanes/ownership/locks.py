"""The contract of locks: at most one process handles a partition at a time.

A lock is exclusive until its *deadline*, the time until which this process certainly holds the lock. The holder renews
its locks, which raises the deadlines. After a freeze or a lost connection, the deadline has passed, and the process
starts no handler. The store refuses a late write because of the epoch of the state, not because of the lock: see
``lanes.ownership.state``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Held(Protocol):
    """One acquisition of a lock.

    The consumer reads the properties on the event loop; the properties neither block nor raise an exception.
    """

    @property
    def name(self) -> str:
        """The name of the lock."""

    @property
    def deadline(self) -> float:
        """Time until which no other process can acquire the lock, in seconds of ``lanes.clock.monotonic``.

        A renewal increases the deadline, counted from the time at which the process sent the renewal. The deadline
        never decreases. A deadline that has passed does not change. Infinity = the lock lasts until the process ends.
        """

    @property
    def lost(self) -> str:
        """The reason for the loss of the lock, for logs; "" = the lock is not lost. A lost lock stays lost.

        A lock is lost when its service reports the loss, its connection ends, or its deadline passes without a
        confirmed renewal. ``Locks.run`` detects each loss, and also releases a lock with a passed deadline at its
        service. A released lock is not lost.
        """

    async def release(self) -> None:
        """Release the lock. After the call, another process can acquire the lock. Idempotent.

        The call never releases a later acquisition of this or another process. If the service does not answer, the lock
        expires, and the call raises no exception. After a cancellation, this process no longer has the lock. The
        service frees the lock immediately or at its expiry.
        """


class Locks(Protocol):
    """Locks of one process, by name.

    Each consumer has its own object, and makes all calls on one event loop. The consumer calls ``open`` first, and then
    ``run`` in a separate task. The consumer calls ``aclose`` last, even if ``open`` failed. ``HeldLock`` implements
    ``Held`` for your own locks.
    """

    async def open(self) -> None:
        """Connect, and check that the service can fulfil this contract.

        Raises:
            ConfigError: The service cannot hold locks, for example because a proxy shares its connections.
            SourceError: The service does not answer, or refuses the login.
        """

    async def run(self) -> None:
        """Renew the held locks and detect lost locks, until the task is cancelled. The consumer makes this call once.

        In an outage the call reports the locks as lost and waits for the service, because an exception would end the
        consumer.

        Raises:
            ConfigError: A check that ``open`` could not make has failed, or the set-up has changed since ``open``.
            SourceError: No later call to the service can succeed.
        """

    async def try_acquire(self, name: str, changed: Callable[[], None]) -> Held | None:
        """Acquire a lock that is free. The call never waits for another holder.

        Locks are not re-entrant: the call does not acquire a lock that this object already holds. After a cancellation,
        the service frees a lock that the call may have acquired, at once or at its expiry.

        Args:
            name: Name of the lock, 1 to 1,000 characters without zero bytes.
            changed: Function that the locks call on the event loop after ``deadline`` has increased or ``lost`` has a
                value. The function must not block or raise. The locks do not call the function after ``release`` has
                begun.

        Returns:
            The lock; None = this or another process already has the lock.

        Raises:
            ConfigError: The name or the set-up is invalid.
            SourceError: The service does not answer; ``retryable`` in an outage.
        """

    async def aclose(self) -> None:
        """Release every held lock and close what ``open`` opened.

        Idempotent. The call raises no exception for a lost connection.
        """
