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
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

from lanes.dead_letter import error_text
from lanes.errors import ConfigError, LanesError, SourceError
from lanes_spark.positions import Span

log = logging.getLogger("lanes")

_PATIENCE: Final = 180.0
"""Seconds that an answer may take: the brokers have some seconds for each of several questions."""


class OffsetServer:
    """Answers with the ranges that ``read`` returns for the stream's positions, in its own thread.

    After ``stop`` it answers that nothing follows. ``stopped`` is set once that answer is given: no batch is under way
    then, and none begins. Raises ``ConfigError`` on a system without such sockets.
    """

    def __init__(self, read: Callable[[Mapping[int, int]], Mapping[int, Span]]) -> None:
        if not hasattr(socket, "AF_UNIX"):
            raise ConfigError("stream: this system lacks sockets with a path (AF_UNIX); use replay")
        self._read = read
        self._folder = tempfile.mkdtemp(prefix="lanes-")
        self.path = os.path.join(self._folder, "offsets")
        self._server = socket.socket(socket.AF_UNIX)
        self._stopping = threading.Event()
        self.stopped = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="lanes-offset-server", daemon=True)

    def start(self) -> None:
        """Begin to answer. Raises ``ConfigError`` if the socket cannot be made."""
        try:
            self._server.bind(self.path)
            self._server.listen()
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
        """Stop serving. Blocks until the answer under way is given. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._thread.is_alive():
            try:
                # This wakes the thread that waits for the next question.
                with socket.socket(socket.AF_UNIX) as client:
                    client.connect(self.path)
                self._thread.join()
            except OSError as error:
                # The socket was removed. The thread may stay; the stream ends all the same.
                log.debug("the socket of a stream is gone: %s: %s", self.path, error)
                with suppress(OSError):
                    self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                if self._closed:
                    return
                raise
            with client:
                if self._closed:
                    return
                try:
                    client.settimeout(_PATIENCE)
                    client.sendall(json.dumps(self._answer(dict(json.loads(_received(client))))).encode())
                except (OSError, ValueError) as error:
                    # The asking process is gone, and the query with it.
                    log.debug("the query no longer waits for offset ranges: %s", error)

    def _answer(self, at: Mapping[int, int]) -> dict[str, object]:
        if self._stopping.is_set():
            self.stopped.set()
            return {"stop": True}
        try:
            return {"spans": sorted([partition, *span] for partition, span in self._read(at).items())}
        except LanesError as error:
            return {"error": str(error)}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error_text(error)}"}


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
            text = _received(client)
        except OSError as error:
            raise SourceError(
                f"the driver does not tell offset ranges ({error}): it has ended; start the stream again"
            ) from None
    answer = json.loads(text or b'{"error": "the driver has ended; start the stream again"}')
    if "error" in answer:
        raise SourceError(answer["error"])
    return None if "stop" in answer else {number: (first, end) for number, first, end in answer["spans"]}


def _received(peer: socket.socket) -> bytes:
    parts = []
    while part := peer.recv(65_536):
        parts.append(part)
    return b"".join(parts)
