"""The client of the approval service, which sends any number of concurrent requests on one connection."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from typing import Final

from demo.errors import DemoError

_RECONNECT: Final = 0.02
"""Seconds between two attempts to reconnect."""

_CONNECT_TIMEOUT: Final = 5.0
"""Most seconds that a request waits for a connection."""


class ServiceGone(ConnectionError):
    """The connection broke or failed to open. The service may have handled the request."""


class Client:
    """A client of ``demo.workers.service``. Runs on asyncio only. One event loop must make all calls.

    The client sends all requests of one turn of the event loop in one write. If the connection breaks, its open
    requests fail, and the client connects again.
    """

    def __init__(self, address: str, token: str) -> None:
        self._address = address
        self._token = token
        self._connected = asyncio.Event()
        self._connecting: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport
        self._requests: list[bytes] = []
        self._open: dict[bytes, asyncio.Future[str]] = {}
        self._number = 0
        self._closed = False
        self._loop = asyncio.get_running_loop()

    async def connect(self) -> None:
        """Connect to the service. Raises ``DemoError`` if no service answers."""
        try:
            await self._connect()
        except OSError as error:
            raise DemoError(f"no approval service at {self._address} ({error}): start `python -m demo run`") from None

    async def approve(self, case: str, step: int) -> None:
        """Wait for the approval of a step. Raises ``ServiceGone`` if the connection breaks or is missing."""
        await self._request("a", f"{case} {step}")

    async def apply(self, case: str, step: int, epoch: int) -> str:
        """Apply a step, and return the ledger's verdict after the commit. Raises ``ServiceGone`` like ``approve``."""
        return await self._request("w", f"{case} {step} {epoch}")

    def say(self, status: Mapping[str, object]) -> None:
        """Send a status, or drop the status if no connection is open. The call does not block."""
        if self._connected.is_set():
            self._write(f"s {json.dumps(status)}\n".encode())

    async def close(self) -> None:
        """Send all statuses, and then close the connection. Idempotent."""
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._connecting
        if self._connected.is_set():
            self._send()
            self._transport.close()

    async def _request(self, kind: str, text: str) -> str:
        if not self._connected.is_set():
            await self._reconnected()
        self._number += 1
        number = b"%d" % self._number
        answer: asyncio.Future[str] = self._loop.create_future()
        self._open[number] = answer
        self._write(f"{kind} {self._number} {text}\n".encode())
        try:
            return await answer
        finally:
            # A cancelled handler's answer is ignored.
            self._open.pop(number, None)

    def _write(self, line: bytes) -> None:
        if not self._requests:
            self._loop.call_soon(self._send)
        self._requests.append(line)

    def _send(self) -> None:
        requests, self._requests = self._requests, []
        if requests and not self._transport.is_closing():
            self._transport.write(b"".join(requests))

    # --- the connection

    async def _connect(self) -> None:
        kind, _, where = self._address.partition(":")
        if kind == "unix":
            transport, _ = await self._loop.create_unix_connection(lambda: _Wire(self), where)
        else:
            host, _, port = where.rpartition(":")
            transport, _ = await self._loop.create_connection(lambda: _Wire(self), host, int(port))
        self._transport = transport
        transport.write(f"h {self._token}\n".encode())
        self._connected.set()

    async def _connect_again(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                await self._connect()
                return
            await asyncio.sleep(_RECONNECT)

    async def _reconnected(self) -> None:
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT):
                await self._connected.wait()
        except TimeoutError:
            raise ServiceGone(f"no connection to the approval service for {_CONNECT_TIMEOUT:g} s") from None

    def _lost(self) -> None:
        self._connected.clear()
        self._requests.clear()
        for answer in self._open.values():
            if not answer.done():
                answer.set_exception(ServiceGone("the approval service closed the connection"))
        self._open.clear()
        if not self._closed:
            self._connecting = self._loop.create_task(self._connect_again())

    def _answered(self, lines: list[bytes]) -> None:
        for line in lines:
            number, _, word = line.partition(b" ")
            answer = self._open.get(number)
            if answer is not None and not answer.done():
                answer.set_result(word.decode())


class _Wire(asyncio.Protocol):
    def __init__(self, client: Client) -> None:
        self._client = client
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._client._answered(lines)

    def connection_lost(self, _: Exception | None) -> None:
        self._client._lost()
