"""Short turns of the threads while the port answers a request beside a busy event loop."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

SHORT: Final = 0.0005
"""Seconds after which a waiting thread gets the interpreter, during a request."""

_LASTS: Final = 0.05
"""Seconds from the last bytes of a connection until the end of the short turns."""


class ShortTurns:
    """The interval after which Python changes the thread, shortened while at least one caller wants it.

    An answer takes about ten calls of the system, and each call gives the interpreter to a thread that waits. A busy
    event loop keeps the interpreter for the whole interval, 5 ms by default, so an answer would take 50 ms or longer.
    Any thread may call every method, and no method blocks.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callers = 0
        self._before = 0.0

    def begin(self) -> None:
        """Shorten the interval."""
        with self._lock:
            self._callers += 1
            if self._callers == 1:
                self._before = sys.getswitchinterval()
                if self._before > SHORT:
                    sys.setswitchinterval(SHORT)

    def end(self) -> None:
        """Restore the interval after the last caller, unless the program has set another interval meanwhile."""
        with self._lock:
            self._callers -= 1
            if not self._callers and self._before > SHORT >= sys.getswitchinterval():
                # Python cuts the value to whole microseconds, so an addition of half of one keeps it.
                sys.setswitchinterval(self._before + 5e-7)


TURNS: Final = ShortTurns()
"""The only object of its class, because the interval belongs to the process."""


class QuickProtocol(H11Protocol):
    """A connection of the port. Its bytes shorten the turns of the threads for a moment."""

    _until: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin; see ``asyncio.Protocol``."""
        self._shorten()
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Receive bytes; see ``asyncio.Protocol``."""
        self._shorten()
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """End; see ``asyncio.Protocol``."""
        super().connection_lost(exc)
        if self._until is not None:
            self._until.cancel()
            self._restore()

    def _shorten(self) -> None:
        loop: Any = self.loop
        if self._until is None:
            TURNS.begin()
        else:
            self._until.cancel()
        self._until = loop.call_later(_LASTS, self._restore)

    def _restore(self) -> None:
        self._until = None
        TURNS.end()
