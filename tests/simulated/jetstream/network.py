"""The network between the real nats client of a member and a simulated server, in virtual time.

A connection keeps the order of its bytes, as TCP does. While a member is cut off, its bytes wait for the end of the
cut, or the network loses bytes and connection. A killed process ends its connection at once. A lost machine leaves its
connection open at the server.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextvars import copy_context
from random import Random
from typing import Any, Final
from urllib.parse import ParseResult

from nats.aio.transport import Transport

from memsource.sim.loop.event_loop import GROUP, current
from tests.simulated.jetstream.server.server import NatsServer, Session

HOST: Final = "server.simulated"

_LINGERS: Final = (5.0, 25.0)
"""Seconds after which the server notices a lost machine."""


class Network:
    """The connections of all members to one server. Only one network exists at a time.

    Args:
        server: The server.
        rng: Source of the latencies and of the kinds of cuts.
        latencies: Seconds that bytes take, for successive connections.

    Attributes:
        current: The network of the present run.
        lines: All connections of the run.
        context: Context of the callbacks of network and server.
    """

    current: Network

    def __init__(self, server: NatsServer, rng: Random, latencies: tuple[float, ...]) -> None:
        self.server = server
        self._rng = rng
        self._latencies = latencies
        self._connections = 0
        self._cut: dict[str, float] = {}
        self.lines: list[Line] = []
        self._timer: asyncio.TimerHandle | None = None
        # The context of no member, so that a frozen member freezes neither the network nor the server.
        self.context = copy_context()
        Network.current = self

    def __repr__(self) -> str:
        return f"<Network of {self.server!r}>"

    async def dial(self, timeout: float) -> Line:
        """Connect the member whose task calls, or raise an ``OSError``."""
        member = GROUP.get() or ""
        latency = self._latencies[self._connections % len(self._latencies)]
        self._connections += 1
        loop = asyncio.get_running_loop()
        if self.cut_until(member) > loop.time():
            await asyncio.sleep(timeout)
            raise TimeoutError
        await asyncio.sleep(latency)
        if not self.server.up:
            raise ConnectionRefusedError(f"{HOST} is down")
        line = Line(self, member, latency)
        self.lines.append(line)
        return line

    def cut_until(self, member: str) -> float:
        """Return the end of the last cut of a member, in seconds; minus infinity = no cut."""
        return self._cut.get(member, float("-inf"))

    def cut(self, member: str, until: float) -> bool:
        """Stop all bytes of a member until a time. In half of the cuts, the cut also ends the connection."""
        self._cut[member] = max(until, self.cut_until(member))
        if self._rng.random() < 0.5:
            for line in self._of(member):
                line.break_at(until)
        return True

    def disconnect(self, member: str) -> bool:
        """End the connections of a member. Returns False without a connection."""
        lines = self._of(member)
        for line in lines:
            line.session.end()
        return bool(lines)

    def kill(self, member: str) -> None:
        """End the process of a member, or in half of the cases its machine."""
        lingers = self._rng.choice(_LINGERS) if self._rng.random() < 0.5 else 0.0
        for line in self._of(member):
            line.kill(lingers)

    def _of(self, member: str) -> list[Line]:
        return [line for line in self.lines if line.member == member and line.session.open]

    def end(self) -> None:
        """Drop all bytes on their way, and stop the timers of the server."""
        for line in self.lines:
            line.dead = True
        if self._timer is not None:
            self._timer.cancel()

    def schedule(self) -> None:
        """Wake the server at its next timer. Call this method after each change of the server."""
        at = self.server.next_at()
        if self._timer is not None:
            if self._timer.when() <= at and not self._timer.cancelled():
                return
            self._timer.cancel()
            self._timer = None
        if at < math.inf:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(at, loop.time()), self._tick, context=self.context)

    def _tick(self) -> None:
        self._timer = None
        try:
            self.server.advance(asyncio.get_running_loop().time())
            self.schedule()
        except Exception as error:
            # Otherwise the loop would only log the error of the simulated server.
            current().fail(error)


class Line:
    """One connection, as its client sees it."""

    def __init__(self, network: Network, member: str, latency: float) -> None:
        self.member = member
        self.dead = False
        self.eof = False
        self._network = network
        self._latency = latency
        self._loop = asyncio.get_running_loop()
        self._last = {True: 0.0, False: 0.0}
        self._data = bytearray()
        self._waiting: asyncio.Future[None] | None = None
        self._closed = False
        self.session: Session = network.server.connect(member, self._to_client, self._ended)

    # --- the bytes on their way

    def _later(self, out: bool, act: Callable[[], None]) -> None:
        """Act when bytes that leave now arrive, in the order of the bytes of this direction."""
        at = max(self._loop.time() + self._latency, self._network.cut_until(self.member), self._last[out])
        self._last[out] = at
        self._loop.call_at(at, act, context=self._network.context)

    def _to_client(self, data: bytes) -> None:
        self._later(False, lambda: self._arrived(data))

    def _arrived(self, data: bytes) -> None:
        if not self.dead:
            self._data += data
            self._wake()

    def _ended(self) -> None:
        self._later(False, self._end)

    def _end(self) -> None:
        self.eof = True
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    # --- faults

    def break_at(self, at: float) -> None:
        """Drop all bytes that have not arrived, and end the connection at a time."""
        self.dead = True
        self._loop.call_at(at, self._break, context=self._network.context)

    def _break(self) -> None:
        self.session.lose()
        self._end()

    def kill(self, lingers: float) -> None:
        """End the process of the client. The server notices the end after ``lingers`` seconds."""
        self._loop.call_at(
            self._loop.time() + self._latency + lingers, self.session.lose, context=self._network.context
        )

    # --- for the transport

    def send(self, data: bytes) -> None:
        """Send bytes to the server. Raises ``OSError`` after the end of the connection."""
        if self.eof or self._closed:
            raise ConnectionResetError("the connection is closed")
        self._later(True, lambda: self._received(data))

    def _received(self, data: bytes) -> None:
        if self.dead:
            return
        try:
            self.session.receive(data, self._loop.time())
            self._network.schedule()
        except Exception as error:
            # Otherwise the loop would only log the error of the simulated server.
            current().fail(error)

    async def read(self, *, line: bool = False) -> bytes:
        """Wait for bytes, or for a whole line. Returns no bytes at the end of the connection."""
        while not self._complete(line):
            if self.eof or self._closed:
                return b""
            self._waiting = self._loop.create_future()
            await self._waiting
        size = self._data.index(b"\n") + 1 if line else len(self._data)
        data = bytes(self._data[:size])
        del self._data[:size]
        return data

    def _complete(self, line: bool) -> bool:
        return b"\n" in self._data if line else bool(self._data)

    @property
    def at_eof(self) -> bool:
        """Whether the connection has ended and all its bytes were read."""
        return self.eof and not self._data

    def close(self) -> None:
        """End the connection by the client. Idempotent."""
        if not self._closed:
            self._closed = True
            self._wake()
            self._later(True, self.session.lose)


class SimTransport(Transport):
    """The transport of a nats client to the server of the current network."""

    def __init__(self) -> None:
        self._line: Line | None = None
        self._buffer: list[bytes] = []

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:
        self._buffer.clear()
        self._line = await Network.current.dial(connect_timeout)

    async def connect_tls(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("the simulated server has no TLS")

    def write(self, payload: bytes) -> None:
        self._buffer.append(payload)

    def writelines(self, payload: list[bytes]) -> None:
        self._buffer += payload

    async def read(self, buffer_size: int) -> bytes:
        return await self._open_line.read()

    async def readline(self) -> bytes:
        return await self._open_line.read(line=True)

    async def drain(self) -> None:
        buffer, self._buffer = b"".join(self._buffer), []
        if buffer:
            self._open_line.send(buffer)

    async def wait_closed(self) -> None:
        """Return at once, because ``close`` does not block."""

    def close(self) -> None:
        if self._line is not None:
            self._line.close()

    def at_eof(self) -> bool:
        return self._open_line.at_eof

    def __bool__(self) -> bool:
        return self._line is not None

    @property
    def _open_line(self) -> Line:
        assert self._line is not None, "connect comes first"
        return self._line
