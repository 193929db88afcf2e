"""A proxy in front of PostgreSQL that cuts a connection at its COMMIT."""

from __future__ import annotations

from typing import Literal

from tests.components import PostgresServer
from tests.fakes.proxy import Passing, TcpProxy

Lost = Literal["request", "answer"]


class LostCommits(TcpProxy):
    """Cuts the connection at each of the next ``losing`` COMMIT statements.

    Args:
        server: Server after the proxy.
        lost: ``"request"`` cuts before the server receives the COMMIT. ``"answer"`` cuts after the server has answered,
            so the server has committed, and the client never learns the result.

    Attributes:
        losing: Number of COMMIT statements that still lose their connection.
        cut: Number of connections that were cut.
    """

    def __init__(self, server: PostgresServer, lost: Lost) -> None:
        host, _, port = server.url.partition("@")[2].partition("/")[0].rpartition(":")
        super().__init__(host, int(port))
        self._server = server
        self._lost = lost
        self.losing = 0
        self.cut = 0

    @property
    def url(self) -> str:
        # Without encryption, whose handshake would precede the statements.
        url = self._server.url.replace(f":{self._server.port}/", f":{self.port}/")
        return f"{url}?sslmode=disable&gssencmode=disable"

    def directions(self) -> tuple[Passing, Passing]:
        committing = False

        def requests(data: bytes) -> bytes:
            nonlocal committing
            # The client sends a COMMIT alone, after the answer of the statement before.
            if b"COMMIT\0" in data and self.losing:
                self.losing -= 1
                committing = True
                if self._lost == "request":
                    self._cut()
            return data

        def answers(data: bytes) -> bytes:
            if committing:
                assert data.startswith(b"C\0\0\0\x0bCOMMIT\0"), f"the server has not committed: {data!r}"
                self._cut()
            return data

        return requests, answers

    def _cut(self) -> None:
        self.cut += 1
        raise ConnectionResetError("the test loses this COMMIT or its answer")
