"""A server of one process that other processes share: the first request starts the server, and its owner ends it."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

from tests.components.supervised import ComponentError


class OnDemand:
    """The thread of the owner, which answers requests of other processes on a socket.

    Args:
        start: Function that starts the server, blocks until the server answers, and returns its description, which can
            be pickled. The first request calls the function once, on the thread. An error is the answer to all
            requests, as a `ComponentError`.
    """

    def __init__(self, start: Callable[[], Any]) -> None:
        self._start = start
        self._folder = Path(tempfile.mkdtemp(prefix="lanes-on-demand-"))
        self._listener = Listener(self.address, backlog=64)
        self._thread = threading.Thread(target=self._serve, name="on demand", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """The address for `ask`."""
        return str(self._folder / "socket")

    def close(self) -> None:
        """Answer no more requests, and block until a start has ended. The server keeps running."""
        with Client(self.address) as connection:
            connection.send("close")
        self._thread.join()
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _serve(self) -> None:
        answer: Any = None
        while True:
            with self._listener.accept() as connection:
                try:
                    if connection.recv() == "close":
                        return
                    if answer is None:
                        answer = self._started()
                    connection.send(answer)
                except (EOFError, OSError):
                    continue  # the asking process has ended

    def _started(self) -> Any:
        try:
            return self._start()
        except ComponentError as error:
            return error
        except Exception as error:
            return ComponentError(f"the start failed with {error!r}")


def ask(address: str) -> Any:
    """Return the description of the server. The first call starts the server. Blocks.

    Raises `ComponentError` if the server does not start.
    """
    with Client(address) as connection:
        connection.send("start")
        answer = connection.recv()
    if isinstance(answer, ComponentError):
        raise answer
    return answer
