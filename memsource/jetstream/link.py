"""The link of a client to a server in memory, with faults of its requests and answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
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
"""A function that schedules an action of the server at a time of the server's clock. The action outlives the client."""


@dataclass(frozen=True, slots=True)
class LinkFault:
    """The fault of one request.

    Attributes:
        kind: With ``"request lost"`` the request does not reach the server. With ``"reply lost"`` the server acts, but
            its answer is lost. With ``"late"`` a write takes effect ``seconds`` later, and a read has no effect.
            Neither request has an answer.
        seconds: Delay of a late write, in seconds.
    """

    kind: Literal["request lost", "reply lost", "late"]
    seconds: float = 0.0


@dataclass(eq=False, repr=False)
class Link:
    """The link of one client.

    Attributes:
        clock: Function that returns the server's time in seconds.
        later: Function that schedules an action of the server.
        timeout: Seconds that the client waits for an answer.
        before: Async function that the link awaits before each request and after each answer, with True for a request
            that writes. The result before a request is the fault of the request; None = no fault.
        latency: Seconds that each request takes.
        cut: Whether the link loses all requests. A late write of an earlier request still takes effect.
        faults: Faults of the next requests, in order. The listed faults replace the faults of ``before``.
        reads: Number of reading requests.
        writes: Number of writing requests.
        severed: Whether the process of the client has ended.
    """

    clock: Clock
    later: Later
    _: KW_ONLY
    timeout: float = TIMEOUT
    before: Callable[[bool], Awaitable[LinkFault | None]] | None = None
    latency: float = 0.0
    cut: bool = False
    faults: deque[LinkFault | None] = field(default_factory=deque)
    reads: int = 0
    writes: int = 0
    severed: bool = False

    def __repr__(self) -> str:
        state = "severed" if self.severed else "cut" if self.cut else "open"
        return f"<Link: {state}, {self.reads} reads, {self.writes} writes>"

    def sever(self) -> None:
        """End the client's process. Every later call raises ``SourceError``, and makes no request."""
        self.severed = True

    async def read(self, act: Callable[[float], T]) -> T:
        """Make a request that changes nothing, and return its answer.

        Raises ``UnknownResult`` if the request has no answer.
        """
        self.reads += 1
        return await self._call(act, writes=False)

    async def write(self, act: Callable[[float], T]) -> T:
        """Make a request that writes.

        After ``UnknownResult``, the write may have taken effect, or may take effect later.
        """
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
        if fault is not None and fault.kind == "late" and writes and not self.cut:
            self.later(self.clock() + fault.seconds, lambda now: _unheard(act, now))
        elif fault is not None and fault.kind == "reply lost" and not self.cut:
            _unheard(act, self.clock())
        elif fault is None and not self.cut:
            done = act(self.clock())
            await self._reach(writes)
            return done
        await anyio.sleep(self.timeout)
        raise UnknownResult(f"no answer within {self.timeout:g} s")

    async def _reach(self, writes: bool) -> LinkFault | None:
        await anyio.lowlevel.checkpoint()
        self._alive()
        return None if self.before is None else await self.before(writes)

    def _alive(self) -> None:
        if self.severed:
            raise SourceError("the process of the client has crashed; make a new client")


def _unheard(act: Callable[[float], object], now: float) -> None:
    """Act on a request whose answer is lost, even if the answer is a refusal."""
    with suppress(Conflict, ConsumerExists):
        act(now)
