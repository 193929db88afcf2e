"""What a topic has by now, for the process in which Spark asks a stream how far it may go.

That process has no JVM to ask the brokers by, and the driver has. So it asks the driver, by a socket that only this
user can reach; and the driver can answer that nothing is to follow, which is how a stream stops between two batches.
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

__all__ = ["LiveEnds", "ask_ends"]

log = logging.getLogger("lanes")

_PATIENCE: Final = 180.0
"""Seconds that an answer may take: the brokers have some for each of several questions."""


class LiveEnds:
    """Answers with what ``read`` returns, which is called with the positions that the stream has reached; in a
    thread of its own, from ``start`` to ``close``.

    ``stop`` makes it answer that nothing follows; ``stopped`` is set when that was heard: no batch is under way then,
    and none begins. Raises ``ConfigError`` where there are no such sockets.
    """

    def __init__(self, read: Callable[[Mapping[int, int]], Mapping[int, Span]]) -> None:
        if not hasattr(socket, "AF_UNIX"):
            raise ConfigError("a stream needs sockets that have a path, which this system has not: use replay")
        self._read = read
        self._folder = tempfile.mkdtemp(prefix="lanes-")
        self.path = os.path.join(self._folder, "ends")
        self._server = socket.socket(socket.AF_UNIX)
        self._stopping = threading.Event()
        self.stopped = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="lanes-live-ends", daemon=True)

    def start(self) -> None:
        """Begin to answer. Raises ``ConfigError`` where the socket cannot be made."""
        try:
            self._server.bind(self.path)
            self._server.listen()
        except OSError as error:
            self.close()
            raise ConfigError(
                f"a stream needs a socket at {self.path}: {error.strerror or error}; let TMPDIR name a folder with a "
                "short path, in which this user may write"
            ) from None
        self._thread.start()

    def stop(self) -> None:
        """Let nothing follow. Does not block. Idempotent; a signal handler may call it."""
        self._stopping.set()

    def close(self) -> None:
        """End. Blocks until the answer under way is given. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._thread.is_alive():
            try:
                # It wakes who waits for the next question.
                with socket.socket(socket.AF_UNIX) as client:
                    client.connect(self.path)
                self._thread.join()
            except OSError as error:
                # Somebody has removed it. Where nothing wakes the thread, it is left: the stream ends all the same.
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
                    # Who asked is gone, and with it the query.
                    log.debug("nobody waits for the ends of the topic any more: %s", error)

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


def ask_ends(path: str, at: Mapping[int, int]) -> dict[int, Span] | None:
    """What the topic has, None where nothing is to follow. ``at``: what is in front of it is done. Blocks.

    Raises ``SourceError`` for what reading it raised, and where the driver is gone.
    """
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(_PATIENCE)
        try:
            client.connect(path)
            client.sendall(json.dumps(sorted(at.items())).encode())
            client.shutdown(socket.SHUT_WR)
            text = _received(client)
        except OSError as error:
            raise SourceError(f"the driver does not say what the topic has: {error}: it has ended") from None
    answer = json.loads(text or b'{"error": "the driver has ended"}')
    if "error" in answer:
        raise SourceError(answer["error"])
    return None if "stop" in answer else {number: (first, end) for number, first, end in answer["spans"]}


def _received(peer: socket.socket) -> bytes:
    parts = []
    while part := peer.recv(65_536):
        parts.append(part)
    return b"".join(parts)
