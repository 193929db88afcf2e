"""The common parts of all servers: each server is a context manager, and a process that a test may kill and freeze."""

from __future__ import annotations

import signal
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.components.supervised import Supervised


class Started:
    """A component that runs during a `with` block."""

    def start(self) -> None:
        """Start the component, and block until it answers. Idempotent."""
        raise NotImplementedError

    def stop(self) -> None:
        """End the component, remove its folder, and block until both are done. Idempotent."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


class Server(Started):
    """A server that is one process in one folder."""

    _process: Supervised

    @property
    def pid(self) -> int:
        """The process id of the server. Raises `ComponentError` if this object did not start the server, or the server
        has ended."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the server that this object started runs or is paused."""
        return self._process.alive

    @property
    def folder(self) -> Path:
        """The folder of the server, with `log`, `data/` and `run/state.json`."""
        return self._process.folder

    def kill(self) -> None:
        """Kill the server with signal 9, and block until it has ended. `start` then uses the same data and ports."""
        self._process.signal(signal.SIGKILL)
        self._process.wait()

    def pause(self) -> None:
        """Freeze the server, and block until it has stopped. Its connections stay open, but nothing answers."""
        self._process.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """End a `pause`; does nothing without one."""
        self._process.signal(signal.SIGCONT)
