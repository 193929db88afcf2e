"""A server on the driver that tells current offset ranges to the process in which Spark runs a stream's source.

That process has no JVM to ask the brokers with, so it asks the driver over a socket that only this user can reach. The
driver may answer that nothing follows: a stream stops that way between two batches.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import socketserver
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from typing import Final

from lanes.dead_letter import error_text
from lanes.errors import ConfigError, LanesError, SourceError
from lanes_spark.positions import Span

log = logging.getLogger("lanes")

_PATIENCE: Final = 180.0
"""Seconds that an answer may take: the brokers have some seconds for each of several questions."""

_LOOK: Final = 0.1
"""Seconds until the server notices that it is closed."""


class OffsetServer(socketserver.UnixStreamServer):
    """A server in its own thread that answers with the ranges that ``read`` returns for the stream's positions.

    After ``stop`` every answer is that nothing follows. ``stopped`` is set after the first such answer: no batch is
    under way then, and none begins.
    """

    def __init__(self, read: Callable[[Mapping[int, int]], Mapping[int, Span]]) -> None:
        self._read = read
        self._folder = tempfile.mkdtemp(prefix="lanes-")
        self.path = os.path.join(self._folder, "offsets")
        self._stopping = threading.Event()
        self.stopped = threading.Event()
        self._thread = threading.Thread(
            target=self.serve_forever, args=(_LOOK,), name="lanes-offset-server", daemon=True
        )
        super().__init__(self.path, _Question, bind_and_activate=False)

    def start(self) -> None:
        """Begin to answer. Raises ``ConfigError`` if the socket cannot be made."""
        try:
            self.server_bind()
            self.server_activate()
        except OSError as error:
            self.close()
            raise ConfigError(
                f"a stream needs a socket at {self.path}: {error.strerror or error}; set TMPDIR to a folder with a "
                "short path that this user may write to"
            ) from None
        self._thread.start()

    def stop(self) -> None:
        """Answer from now on that nothing follows. Does not block. Idempotent; a signal handler may call it."""
        self._stopping.set()

    def close(self) -> None:
        """Stop serving. Blocks until the current answer is sent. Idempotent."""
        if self._thread.is_alive():
            self.shutdown()
            self._thread.join()
        self.server_close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def answer(self, at: Mapping[int, int]) -> dict[str, object]:
        """Return the answer for a stream that has handled all messages before ``at``."""
        if self._stopping.is_set():
            self.stopped.set()
            return {"stop": True}
        try:
            return {"spans": sorted([partition, *span] for partition, span in self._read(at).items())}
        except LanesError as error:
            return {"error": str(error)}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error_text(error)}"}

    def handle_error(self, request: object, client_address: object) -> None:
        """Log the failure of one answer: the asking process has ended, and the query with it."""
        log.debug("the query no longer waits for offset ranges: %s", sys.exception())


class _Question(socketserver.StreamRequestHandler):
    """One question of the process in which Spark runs the stream's source."""

    server: OffsetServer
    timeout = _PATIENCE

    def handle(self) -> None:
        at = dict(json.loads(self.rfile.read()))
        self.wfile.write(json.dumps(self.server.answer(at)).encode())


def ask_offsets(path: str, at: Mapping[int, int]) -> dict[int, Span] | None:
    """Ask for the topic's offset ranges; None means that nothing follows. Blocks.

    Messages before ``at`` are handled. Raises ``SourceError`` if reading them failed or the driver is gone.
    """
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(_PATIENCE)
        try:
            client.connect(path)
            client.sendall(json.dumps(sorted(at.items())).encode())
            client.shutdown(socket.SHUT_WR)
            with client.makefile("rb") as answered:
                text = answered.read()
        except OSError as error:
            raise SourceError(
                f"the driver does not tell offset ranges ({error}): it has ended; start the stream again"
            ) from None
    answer = json.loads(text or b'{"error": "the driver has ended; start the stream again"}')
    if "error" in answer:
        raise SourceError(answer["error"])
    return None if "stop" in answer else {number: (first, end) for number, first, end in answer["spans"]}
