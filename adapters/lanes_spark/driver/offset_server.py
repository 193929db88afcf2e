"""Runs a server on the driver that sends current offset ranges to the Python process of a stream's source.

The Python process has no JVM, so it cannot ask the brokers. It asks the driver over a socket that only this user can
open. To stop a stream between two batches, the driver answers that the stream has ended.
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
"""Maximum time in seconds for an answer. An answer needs several requests to the brokers."""

_LOOK: Final = 0.1
"""Seconds between two checks of the server whether ``close`` was called."""


class OffsetServer(socketserver.UnixStreamServer):
    """A server in its own thread that answers each request with the current offset ranges.

    Args:
        read: Function that takes the stream's positions, and returns the current ranges.

    Attributes:
        path: Path of the socket.
        stopped: Event that the server sets when it answers with the end of the stream. After this answer, no batch
            runs.
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
        """Begin to answer requests. Raises ``ConfigError`` if the system refuses the socket."""
        try:
            self.server_bind()
            self.server_activate()
        except OSError as error:
            self.close()
            raise ConfigError(
                f"a stream cannot create its socket {self.path}: {error.strerror or error}; set TMPDIR to a writable "
                "folder with a short path"
            ) from None
        self._thread.start()

    def stop(self) -> None:
        """Answer all later requests with the end of the stream.

        Does not block. Idempotent. Callable from a signal handler.
        """
        self._stopping.set()

    def close(self) -> None:
        """Stop serving. Blocks until the server has sent the current answer. Idempotent."""
        if self._thread.is_alive():
            self.shutdown()
            self._thread.join()
        self.server_close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def answer(self, at: Mapping[int, int]) -> dict[str, object]:
        """Return the answer for a stream that has handled all messages below the positions ``at``."""
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
        """Log the failure of one answer, for example because the source's process has ended."""
        log.debug("cannot send offset ranges to the query: %s", sys.exception())


class _Question(socketserver.StreamRequestHandler):
    """The connection of one request."""

    server: OffsetServer
    timeout = _PATIENCE

    def handle(self) -> None:
        at = dict(json.loads(self.rfile.read()))
        self.wfile.write(json.dumps(self.server.answer(at)).encode())


def ask_offsets(path: str, at: Mapping[int, int]) -> dict[int, Span] | None:
    """Ask the driver for the topic's offset ranges. Blocks.

    Args:
        path: Path of the server's socket.
        at: Next position of the stream by partition. The stream has handled all messages below these positions.

    Returns:
        The ranges by partition; None = the stream must stop.

    Raises:
        SourceError: The driver could not read the ranges, did not answer in time, or has ended.
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
                f"the driver sent no offset ranges ({error}), because it has ended or did not answer within "
                f"{_PATIENCE:g} s; start the stream again"
            ) from None
    answer = json.loads(text or b'{"error": "the driver has ended; start the stream again"}')
    if "error" in answer:
        raise SourceError(answer["error"])
    return None if "stop" in answer else {number: (first, end) for number, first, end in answer["spans"]}
