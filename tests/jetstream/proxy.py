"""A proxy in front of a NATS server. Tests cut the proxy, or make it lose single requests or their answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, Literal, NamedTuple

from tests.fakes.proxy import Passing, TcpProxy

_PAYLOAD: Final = frozenset({b"PUB", b"HPUB", b"MSG", b"HMSG"})
"""Operations with a payload, whose size is the last word of the line."""


class Proxy(TcpProxy):
    """A connection to a NATS server that a test can cut; ``losses`` selects the frames that are lost."""

    def __init__(self, url: str, losses: Losses | None = None) -> None:
        host, _, port = url.removeprefix("nats://").rpartition(":")
        super().__init__(host, int(port))
        self._losses = losses

    @property
    def url(self) -> str:
        return f"nats://{self.host}:{self.port}"

    def directions(self) -> tuple[Passing, Passing]:
        if self._losses is None:
            return super().directions()
        return _passing(self._losses.of_requests), _passing(self._losses.of_answers)


class _Loss(NamedTuple):
    what: Literal["request", "reply"]
    subject: bytes
    having: bytes


class Losses:
    """The frames that a proxy loses. ``lost`` holds their subjects in order.

    Attributes:
        deliveries: Whether the proxy loses all deliveries of consumers. Heartbeats and answers to requests pass.
        undelivered: Number of deliveries that were lost.
    """

    def __init__(self) -> None:
        self.deliveries = False
        self.undelivered = 0
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
        if verb not in (b"MSG", b"HMSG"):
            return False
        if self.deliveries and any(word.startswith(b"$JS.ACK.") for word in words[2:3]):
            self.undelivered += 1
            return True
        if words[0] not in self._replies:
            return False
        self._replies.remove(words[0])
        return True


def _passing(lost: Callable[[bytes], bool]) -> Passing:
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
