"""The state of one acquisition of a lock: deadline, loss and release. Your own locks can use this class too."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from lanes.arguments import shown_value
from lanes.clock import Clock, monotonic
from lanes.core.types import NEVER
from lanes.errors import ConfigError

_LIMIT: Final = 1_000


class HeldLock:
    """One acquisition of a lock; see ``lanes.ownership.Held``. Not thread-safe: the loop of ``Locks`` makes all calls.

    Args:
        name: Name of the lock.
        changed: See ``Locks.try_acquire``.
        free: Async function that releases the lock at its service. Each ``release`` calls the function, so the function
            is idempotent. The function releases only this acquisition, and raises no exception for a lost connection.
        deadline: The first deadline; infinity = the lock needs no renewal.
        clock: Clock of the deadline.
    """

    __slots__ = ("_changed", "_clock", "_deadline", "_free", "_given_up", "_lost", "_name")

    def __init__(
        self,
        name: str,
        changed: Callable[[], None],
        free: Callable[[HeldLock], Awaitable[None]],
        *,
        deadline: float = NEVER,
        clock: Clock = monotonic,
    ) -> None:
        self._name = name
        self._changed = changed
        self._free = free
        self._deadline = deadline
        self._clock = clock
        self._lost = ""
        self._given_up = False

    def __repr__(self) -> str:
        state = f"lost: {self._lost}" if self._lost else "released" if self._given_up else "held"
        return f"<HeldLock {self._name!r}: {state}>"

    @property
    def name(self) -> str:
        """The name of the lock."""
        return self._name

    @property
    def deadline(self) -> float:
        """Time until which no other process can acquire the lock, in seconds of the clock."""
        return self._deadline

    @property
    def lost(self) -> str:
        """The reason for the loss of the lock; "" = the lock is not lost."""
        return self._lost

    @property
    def active(self) -> bool:
        """Whether the lock is neither lost nor released. The locks renew an active lock."""
        return not self._lost and not self._given_up

    def renewed(self, deadline: float) -> bool:
        """Record a confirmed renewal.

        If the service confirms a renewal after the deadline, the lock is lost, because the consumer may already have
        given up the partition. The call has no effect for an inactive lock.

        Args:
            deadline: The new deadline, counted from the time at which the process sent the renewal.

        Returns:
            Whether the lock is still active.
        """
        if self.expired() or not self.active:
            return False
        if deadline > self._deadline:
            self._deadline = deadline
            self._changed()
        return True

    def expired(self) -> bool:
        """Record the loss of a lock whose deadline has passed.

        Returns:
            Whether the deadline has passed.
        """
        passed = self._clock() >= self._deadline
        if passed:
            self.lose("its deadline passed before a renewal was confirmed")
        return passed

    def lose(self, reason: str) -> None:
        """Record the loss of the lock. The call has no effect for an inactive lock.

        Args:
            reason: Reason of the loss, for logs.
        """
        if self.active:
            self._lost = reason
            self._changed()

    async def release(self) -> None:
        """Release the lock; see ``Held.release``."""
        self._given_up = True
        await self._free(self)


def check_lock_name(name: object) -> None:
    """Raise ``ConfigError`` for an invalid name of a lock.

    Args:
        name: The name.

    Raises:
        ConfigError: The name is not a text of 1 to 1,000 characters, or contains a zero byte or a lone surrogate.
    """
    if not isinstance(name, str) or not 0 < len(name) <= _LIMIT or "\0" in name or not _encodes(name):
        raise ConfigError(
            f"the lock name {shown_value(name)}: must be a str of 1 to {_LIMIT:,} characters, without zero bytes; "
            "name what the lock protects, such as 'orders/billing/7'"
        )


def _encodes(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
