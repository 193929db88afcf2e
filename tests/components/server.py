"""What all servers have in common: each is a block, and one process that may be killed and frozen."""

from __future__ import annotations

import signal
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.components.supervised import Supervised


class Started:
    """Something that runs for the length of a block."""

    def start(self) -> None:
        """Block until it answers. Idempotent."""
        raise NotImplementedError

    def stop(self) -> None:
        """Block until it is gone, folder included. Idempotent."""
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
    """One server that is one process in one folder."""

    _process: Supervised

    @property
    def pid(self) -> int:
        """Of the server itself; ComponentError when this object has not started it or it is gone."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the server that this object started is there. A paused one is."""
        return self._process.alive

    @property
    def folder(self) -> Path:
        """Its folder, with `log`, `data/` and `run/state.json`."""
        return self._process.folder

    def kill(self) -> None:
        """End the server with -9 and block until it is gone. Its data and its ports stay for `start`."""
        self._process.signal(signal.SIGKILL)
        self._process.wait()

    def pause(self) -> None:
        """Freeze the server: connections stay open and nothing answers. It has stopped when this returns."""
        self._process.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """End a `pause`. Harmless without one."""
        self._process.signal(signal.SIGCONT)
