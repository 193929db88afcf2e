"""The simulated network between a process and a store in memory."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio.lowlevel

from lanes.arguments import check_seconds, kind_of
from lanes.errors import ConfigError


class Remote:
    """Base of a store that a process reaches over a network.

    Args:
        call: Async function that simulates the network, such as ``World.io``; None = no network. The store awaits
            ``call`` with the name of the operation and ``seconds`` before each operation. If ``call`` raises, the
            store changes nothing.
        seconds: Seconds that the store passes to ``call``, 0 or more.

    Raises:
        ConfigError: An argument is of a wrong type or out of its range.
    """

    def __init__(self, call: Callable[[str, float], Awaitable[None]] | None = None, *, seconds: float = 0.0) -> None:
        if call is not None and not callable(call):
            raise ConfigError(f"call is {kind_of(call)}: pass an async function such as World.io, or leave it out")
        check_seconds("seconds", seconds, 0.0)
        self._call = call
        self._seconds = seconds

    async def _reach(self, what: str) -> None:
        if self._call is None:
            await anyio.lowlevel.checkpoint()
        else:
            await self._call(what, self._seconds)
