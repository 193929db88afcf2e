"""A proxy in front of a Kafka broker that accepts fetches and never answers them, while a test wants so.

A broker answers the requests of one connection in order. After a fetch without an answer, the proxy therefore answers
no later request of the same connection either. Other connections of the client, such as those to the coordinator of
its group, work on.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from tests.fakes.proxy import Passing, TcpProxy

_FETCH = 1


class SilentFetches(TcpProxy):
    """A proxy that the broker's own address leads back to.

    Args:
        url: Address of the broker, as `host:port`.

    Attributes:
        silent: Whether fetches get no answer.
        swallowed: Number of answers that were lost.
    """

    def __init__(self, url: str) -> None:
        host, _, port = url.rpartition(":")
        super().__init__(host, int(port))
        self.silent = False
        self.swallowed = 0

    @property
    def url(self) -> str:
        return f"{self.host}:{self.port}"

    def speak(self) -> None:
        """Answer fetches again, on new connections."""
        self.silent = False
        self.drop()

    def directions(self) -> tuple[Passing, Passing]:
        fetches: set[int] = set()
        requests, answers = _Frames(), _Frames()
        host = self.host.encode()
        # The broker sends its own address to clients, as the text of the host and a port of four bytes.
        own, mine = (host + struct.pack(">i", port) for port in (self._server_port, self.port))
        lost = False

        def there(data: bytes) -> bytes:
            for frame in requests.add(data):
                kind, _, number = struct.unpack(">hhi", frame[4:12])
                if kind == _FETCH:
                    fetches.add(number)
            return data

        def back(data: bytes) -> bytes:
            nonlocal lost
            passing = []
            for frame in answers.add(data):
                (number,) = struct.unpack(">i", frame[4:8])
                lost = lost or (self.silent and number in fetches)
                self.swallowed += lost
                if not lost:
                    passing.append(frame.replace(own, mine))
                fetches.discard(number)
            return b"".join(passing)

        return there, back


class _Frames:
    """Splits the bytes of one direction into frames, each with its size of four bytes in front."""

    def __init__(self) -> None:
        self._rest = b""

    def add(self, data: bytes) -> Iterator[bytes]:
        self._rest += data
        while len(self._rest) >= 4 and len(self._rest) >= 4 + (size := struct.unpack(">i", self._rest[:4])[0]):
            yield self._rest[: 4 + size]
            self._rest = self._rest[4 + size :]
