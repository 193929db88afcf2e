"""The link of a client to a server in memory, with faults of its requests and answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

import anyio
import anyio.lowlevel

from lanes.clock import Clock
from lanes.cohort.leases import Conflict, ConsumerExists, UnknownResult
from lanes.errors import SourceError

T = TypeVar("T")

TIMEOUT: Final = 2.0
"""Seconds that a client waits for an answer."""

Later = Callable[[float, Callable[[float], None]], None]
"""Schedules an action of the server, at a time of its clock. It outlives the client."""


@dataclass(frozen=True, slots=True)
class LinkFault:
    """The fault of one call.

    ``"request lost"``: the server does nothing. ``"reply lost"``: the server does it, and its answer is lost.
    ``"late"``: the server does a write ``seconds`` later, when the client may have given up; it loses a read.
    """

    kind: Literal["request lost", "reply lost", "late"]
    seconds: float = 0.0


class Link:
    """The link of one client.

    ``clock`` is that of the server, ``later`` schedules its actions. ``timeout``: seconds that the client waits.
    ``latency``: seconds of each request. ``cut``: no request arrives. ``reads`` and ``writes`` count the requests.

    ``before`` is awaited before and after each request, with whether it writes. Its first result is the fault of the
    request. ``faults`` come first: they are the faults of the next calls. After ``sever`` every call raises
    ``SourceError``, and the server does nothing.
    """

    def __init__(
        self,
        clock: Clock,
        later: Later,
        *,
        timeout: float = TIMEOUT,
        before: Callable[[bool], Awaitable[LinkFault | None]] | None = None,
    ) -> None:
        self.latency = 0.0
        self.cut = False
        self.faults: deque[LinkFault | None] = deque()
        self.reads = 0
        self.writes = 0
        self._clock = clock
        self._later = later
        self._timeout = timeout
        self._before = before
        self._severed = False

    def __repr__(self) -> str:
        state = "severed" if self._severed else "cut" if self.cut else "open"
        return f"<Link: {state}, {self.reads} reads, {self.writes} writes>"

    def sever(self) -> None:
        """The client's process is gone. Idempotent."""
        self._severed = True

    @property
    def severed(self) -> bool:
        """Whether the client's process is gone."""
        return self._severed

    async def read(self, act: Callable[[float], T]) -> T:
        """Make a request that changes nothing, and return its answer. Raises ``UnknownResult`` without one."""
        self.reads += 1
        return await self._call(act, writes=False)

    async def write(self, act: Callable[[float], T]) -> T:
        """Make a request that changes something. Without an answer it was done, will be done, or never is."""
        self.writes += 1
        return await self._call(act, writes=True)

    async def _call(self, act: Callable[[float], T], *, writes: bool) -> T:
        fault = await self._reach(writes)
        if self.faults:
            fault = self.faults.popleft()
        if self.latency:
            await anyio.sleep(self.latency)
        # Nothing suspends from here to the action of the server.
        self._alive()
        if fault is not None and fault.kind == "late" and writes:
            self._later(self._clock() + fault.seconds, lambda now: _unheard(act, now))
        elif fault is not None and fault.kind == "reply lost" and not self.cut:
            _unheard(act, self._clock())
        elif fault is None and not self.cut:
            done = act(self._clock())
            await self._reach(writes)
            return done
        await anyio.sleep(self._timeout)
        raise UnknownResult(f"no answer within {self._timeout:g} s")

    async def _reach(self, writes: bool) -> LinkFault | None:
        await anyio.lowlevel.checkpoint()
        self._alive()
        return None if self._before is None else await self._before(writes)

    def _alive(self) -> None:
        if self._severed:
            raise SourceError("the process has crashed: make a new one")


def _unheard(act: Callable[[float], object], now: float) -> None:
    """Do a request whose answer is lost, a refusal included."""
    with suppress(Conflict, ConsumerExists):
        act(now)
