"""A TCP proxy in front of a server. Tests silence the proxy, cut its connections, or drop single bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Self

Passing = Callable[[bytes], bytes]
"""Takes the bytes that were read and returns the bytes that pass. ``OSError`` cuts the connection."""


class TcpProxy:
    """A proxy between clients and one server.

    Attributes:
        host: Host of the server and of the proxy.
        port: Port of the proxy; 0 before ``open``.
    """

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = 0
        self._server_port = port
        self._pass = asyncio.Event()
        self._pass.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def directions(self) -> tuple[Passing, Passing]:
        """Return the filters of a new connection: of the bytes to the server, and of the bytes to the client."""
        return _everything, _everything

    def silence(self) -> None:
        """Hold back all data until ``resume``."""
        self._pass.clear()

    def resume(self) -> None:
        self._pass.set()

    def drop(self) -> None:
        """End all connections."""
        for writer in self._writers:
            writer.transport.abort()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Self]:
        server = await asyncio.start_server(self._serve, self.host, 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            self.drop()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "a connection is served by a task"
        self._tasks.add(task)
        self._writers.add(writer)
        there, back = self.directions()
        try:
            far_reader, far_writer = await asyncio.open_connection(self.host, self._server_port)
            self._writers.add(far_writer)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pump(reader, far_writer, there))
                tasks.create_task(self._pump(far_reader, writer, back))
        except* (OSError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passing: Passing) -> None:
        try:
            while data := await reader.read(65_536):
                await self._pass.wait()
                writer.write(passing(data))
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.transport.abort()


def _everything(data: bytes) -> bytes:
    return data
