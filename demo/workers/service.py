"""The service for approvals and for writes to the ledger: a local socket in the parent process.

A request is one line, and an answer is one line with the number of its request. A connection may have any number of
open requests:

- ``h <token>`` opens the connection. The service closes a connection that begins with another line.
- ``a <number> <case> <step>`` asks for an approval. The service answers after the latency.
- ``w <number> <case> <step> <epoch>`` applies a step. The answer is the ledger's verdict, after the commit.
- ``s <json>`` reports the status of the worker, and has no answer.

All writes of one turn of the loop share one transaction. Answers that are due together share one write. The service
therefore answers thousands of requests a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import socket
from collections.abc import Callable
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, Final

from demo.errors import DemoError
from demo.faults import draw
from demo.ledger import Apply, Ledger

_TICK: Final = 0.001
"""Length of a tick in seconds. The service sends the answers of one tick together."""

_LINE_LIMIT: Final = 1 << 16
"""Most bytes of an unfinished line. The service closes a connection with a longer unfinished line."""


class Service:
    """A service for approvals and for writes to one ledger. Runs on asyncio only.

    An approval takes 0.5 to 1.5 times the mean, as a function of case and step. Two concurrent handlers of one key
    therefore sooner or later finish in the wrong order.

    Args:
        ledger: Ledger to write to; None = approvals only.
        latency: Mean time of an approval, in seconds.
        token: Secret that opens a connection.
        on_status: Function that receives the reports of workers.
        on_commit: Function that the service calls after every committed batch, before the answers of the batch.

    Attributes:
        address: Address of the service; "" before ``start``.
        failure: Error of a ledger with failed writes; None without an error.
    """

    def __init__(
        self,
        ledger: Ledger | None,
        *,
        latency: float,
        token: str,
        on_status: Callable[[dict[str, Any]], None],
        on_commit: Callable[[], None],
    ) -> None:
        self._ledger = ledger
        self._latency = latency
        self._token = token.encode()
        self._on_status = on_status
        self._on_commit = on_commit
        self._server: asyncio.Server
        self._loop: asyncio.AbstractEventLoop
        self._connections: set[_Connection] = set()
        self._applies: list[tuple[_Connection, bytes, Apply]] = []
        self._due: dict[int, list[tuple[_Connection, bytes]]] = {}
        self._ticks: list[int] = []
        self._timer: asyncio.TimerHandle | None = None
        self.address = ""
        self.failure: DemoError | None = None

    async def start(self, folder: Path) -> None:
        """Listen on a socket in ``folder``, or on a loopback port if that fails, and set ``address``."""
        self._loop = asyncio.get_running_loop()
        path = folder / "approvals.sock"
        if hasattr(socket, "AF_UNIX"):
            # A path may be too long for a socket. A port is as safe, because a connection needs the token.
            with contextlib.suppress(OSError):
                self._server = await self._loop.create_unix_server(lambda: _Connection(self), str(path))
                self.address = f"unix:{path}"
                return
        self._server = await self._loop.create_server(lambda: _Connection(self), "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.address = f"tcp:{host}:{port}"

    def break_connections(self) -> None:
        """Cut every connection, like a crashing service. The call does not block."""
        for connection in list(self._connections):
            connection.transport.abort()

    async def close(self) -> None:
        """Stop listening and cut every connection. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        if hasattr(self, "_server"):
            self._server.close()
            self.break_connections()
            await self._server.wait_closed()

    # --- approvals

    def _approve(self, connection: _Connection, number: bytes, event: bytes) -> None:
        delay = self._latency * (0.5 + draw(event) / 0x1_0000_0000)
        tick = round((self._loop.time() + delay) / _TICK)
        answers = self._due.get(tick)
        if answers is None:
            answers = self._due[tick] = []
            heappush(self._ticks, tick)
            if self._timer is None or self._ticks[0] == tick:
                self._set_timer()
        answers.append((connection, number))

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._ticks[0] * _TICK, self._answer_due)

    def _answer_due(self) -> None:
        now = self._loop.time()
        while self._ticks and self._ticks[0] * _TICK <= now + _TICK / 2:
            for connection, number in self._due.pop(heappop(self._ticks)):
                connection.answer(number + b" ok\n")
        self._timer = None
        if self._ticks:
            self._set_timer()

    # --- applies

    def _apply(self, connection: _Connection, number: bytes, apply: Apply) -> None:
        if not self._applies:
            # The commit waits for the end of this turn of the loop, so that further writes join the batch.
            self._loop.call_soon(self._commit)
        self._applies.append((connection, number, apply))

    def _commit(self) -> None:
        batch, self._applies = self._applies, []
        assert self._ledger is not None, "only a service with a ledger applies steps"
        try:
            verdicts = self._ledger.apply(apply for _, _, apply in batch)
        except DemoError as error:
            # A write that is not stored gets no answer. The worker's handlers wait until the run ends with this error.
            self.failure = self.failure or error
            return
        self._on_commit()
        for (connection, number, _), verdict in zip(batch, verdicts, strict=True):
            connection.answer(b"%b %b\n" % (number, verdict.encode()))


class _Connection(asyncio.Protocol):
    """The connection of one client."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._rest = b""
        self._admitted = False
        self._answers: list[bytes] = []
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._service._connections.add(self)

    def connection_lost(self, _: Exception | None) -> None:
        self._service._connections.discard(self)

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        service = self._service
        try:
            for line in lines:
                kind, _, rest = line.partition(b" ")
                if not self._admitted:
                    self._admitted = kind == b"h" and hmac.compare_digest(rest, service._token)
                    if not self._admitted:
                        raise ValueError("no token")
                elif kind == b"a":
                    number, case, step = rest.split(b" ")
                    service._approve(self, number, b"%b/%b" % (case, step))
                elif kind == b"w" and service._ledger is not None:
                    number, case, step, epoch = rest.split(b" ")
                    service._apply(self, number, Apply(case.decode(), int(step), int(epoch)))
                elif kind == b"s":
                    service._on_status(json.loads(rest))
                else:
                    raise ValueError("unknown request")
            if len(self._rest) > _LINE_LIMIT:
                raise ValueError("line too long")
        except ValueError:
            # The client is no worker of the demo, or is broken. A worker retries the failed handlers.
            self.transport.abort()

    def answer(self, line: bytes) -> None:
        if not self._answers:
            self._service._loop.call_soon(self._write)
        self._answers.append(line)

    def _write(self) -> None:
        answers, self._answers = self._answers, []
        if not self.transport.is_closing():
            self.transport.write(b"".join(answers))
