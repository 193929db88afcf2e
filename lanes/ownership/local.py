"""Locks of one process, which need no service."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

import anyio

from lanes.arguments import shown_value
from lanes.errors import ConfigError
from lanes.ownership.held_lock import HeldLock, check_lock_name
from lanes.ownership.locks import Held

_GUARD: Final = threading.Lock()

_HOLDERS: Final[dict[tuple[str, str], HeldLock]] = {}
"""The held locks of this process, by domain and name."""


class LocalLocks:
    """Locks between the consumers of one process; see ``lanes.ownership.Locks``.

    All objects of a process share their locks, also on event loops of several threads. A lock lasts until its release
    or ``aclose``, and cannot be lost. Two processes cannot read each other's locks. With two processes, the state store
    refuses the writes of one process. Messages then run again, and handlers of one key may overlap. Use ``LocalLocks``
    only where no second process can start.

    The locks run on asyncio and trio.

    Args:
        domain: Text that separates locks of the same name, such as the name of a database.

    Raises:
        ConfigError: The domain is not a text.
    """

    def __init__(self, domain: str = "") -> None:
        if not isinstance(domain, str):
            raise ConfigError(f"domain={shown_value(domain)}: must be a str; omit it for one domain")
        self._domain = domain
        self._held: set[HeldLock] = set()

    def __repr__(self) -> str:
        return f"<LocalLocks: {len(self._held)} held>"

    async def open(self) -> None:
        """See ``Locks.open``. Does nothing."""

    async def run(self) -> None:
        """See ``Locks.run``. Wait for a cancellation."""
        await anyio.sleep_forever()

    async def try_acquire(self, name: str, changed: Callable[[], None]) -> Held | None:
        """Acquire a lock if no consumer of this process holds it; see ``Locks.try_acquire``.

        Args:
            name: Name of the lock, 1 to 1,000 characters without zero bytes.
            changed: The locks never call this function, because a local lock cannot be lost.

        Returns:
            The lock; None = a consumer of this process already has the lock.

        Raises:
            ConfigError: The name is invalid.
        """
        check_lock_name(name)
        with _GUARD:
            if (self._domain, name) in _HOLDERS:
                return None
            held = _HOLDERS[self._domain, name] = HeldLock(name, changed, self._free)
        self._held.add(held)
        return held

    async def aclose(self) -> None:
        """Release the locks of this object; see ``Locks.aclose``."""
        for held in list(self._held):
            await held.release()

    async def _free(self, held: HeldLock) -> None:
        self._held.discard(held)
        with _GUARD:
            if _HOLDERS.get((self._domain, held.name)) is held:
                del _HOLDERS[self._domain, held.name]
