"""A proxy in front of a server. Tests cut it, or make it lose single requests or their answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Final, Literal, NamedTuple

_PAYLOAD: Final = frozenset({b"PUB", b"HPUB", b"MSG", b"HMSG"})
"""Operations with a payload, whose size is the last word of the line."""

_Passing = Callable[[bytes], bytes]
"""Takes bytes that were read and returns the bytes that pass."""


class Proxy:
    """A connection to a server that a test can cut.

    ``silence`` lets nothing pass, and ``drop`` ends the connections. ``losses`` selects the frames that are lost.
    """

    def __init__(self, url: str, losses: Losses | None = None) -> None:
        self._host, _, port = url.removeprefix("nats://").rpartition(":")
        self._port = int(port)
        self._losses = losses
        self._pass = asyncio.Event()
        self._pass.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.url = ""

    def silence(self) -> None:
        self._pass.clear()

    def resume(self) -> None:
        self._pass.set()

    def drop(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Proxy]:
        server = await asyncio.start_server(self._serve, self._host, 0)
        self.url = f"nats://{self._host}:{server.sockets[0].getsockname()[1]}"
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
        there: _Passing = _everything
        back: _Passing = _everything
        if self._losses is not None:
            there, back = _passing(self._losses.of_requests), _passing(self._losses.of_answers)
        try:
            far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
            self._writers.add(far_writer)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pump(reader, far_writer, there))
                tasks.create_task(self._pump(far_reader, writer, back))
        except* (OSError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passing: _Passing) -> None:
        try:
            while data := await reader.read(65_536):
                await self._pass.wait()
                writer.write(passing(data))
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.transport.abort()


class _Loss(NamedTuple):
    what: Literal["request", "reply"]
    subject: bytes
    having: bytes


class Losses:
    """The frames that a proxy loses. ``lost`` holds their subjects in order."""

    def __init__(self) -> None:
        self.lost: list[str] = []
        self._sent: list[bytes] = []
        self._next: list[_Loss] = []
        self._replies: set[bytes] = set()

    def lose(self, what: Literal["request", "reply"], subject: str, having: bytes = b"") -> None:
        """Lose the next request whose subject contains this text, or the server's answer to it."""
        self._next.append(_Loss(what, subject.encode(), having))

    def count(self, subject: str, having: bytes = b"") -> int:
        """Number of requests whose subject contains this text, including lost ones."""
        return sum(frame.split(maxsplit=2)[1] == subject.encode() and having in frame for frame in self._sent)

    def of_requests(self, frame: bytes) -> bool:
        """Whether a frame to the server is lost."""
        verb, *words = frame.partition(b"\r\n")[0].split()
        if verb not in (b"PUB", b"HPUB"):
            return False
        self._sent.append(frame)
        for loss in self._next:
            if loss.subject == words[0] and loss.having in frame:
                self._next.remove(loss)
                self.lost.append(loss.subject.decode())
                if loss.what == "reply":
                    self._replies.add(words[1])
                return loss.what == "request"
        return False

    def of_answers(self, frame: bytes) -> bool:
        """Whether a frame from the server is lost."""
        verb, *words = frame.partition(b"\r\n")[0].split()
        if verb not in (b"MSG", b"HMSG") or words[0] not in self._replies:
            return False
        self._replies.remove(words[0])
        return True


def _everything(data: bytes) -> bytes:
    return data


def _passing(lost: Callable[[bytes], bool]) -> _Passing:
    """Split the pieces of one connection into frames, and return the frames that are not lost."""
    rest = b""

    def passing(data: bytes) -> bytes:
        nonlocal rest
        rest += data
        frames = list(_frames(rest))
        rest = rest[sum(map(len, frames)) :]
        return b"".join(frame for frame in frames if not lost(frame))

    return passing


def _frames(data: bytes) -> Iterator[bytes]:
    begin = 0
    while (line := data.find(b"\r\n", begin)) >= 0:
        end = line + 2
        words = data[begin:line].split()
        if words and words[0] in _PAYLOAD:
            end += int(words[-1]) + 2
        if end > len(data):
            return
        yield data[begin:end]
        begin = end
