"""Plain functions as handlers that a test controls, and the threads that call them."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lanes import Message
from memsource import check, read
from tests.fakes.support import TIMEOUT

Options = dict[str, Any]


class Gates:
    """A handler whose messages end on demand; messages with ``free`` keys end by themselves.

    ``started`` and ``ended`` are positions, in order; ``peak`` is the largest number of handlers that ran at once.
    """

    def __init__(self, *, free: Iterable[bytes] = ()) -> None:
        self.started: list[int] = []
        self.ended: list[int] = []
        self.threads: set[threading.Thread] = set()
        self.peak = 0
        self.free = set(free)
        self._lock = threading.Lock()
        self._gates: dict[int, threading.Event] = {}

    def __call__(self, message: Message) -> None:
        with self._lock:
            self.started.append(message.position)
            self.threads.add(threading.current_thread())
            self.peak = max(self.peak, self.running)
        if message.key not in self.free and not self._gate(message.position).wait(TIMEOUT):
            raise AssertionError(f"position {message.position} waited in vain; let() must name the position")
        with self._lock:
            self.ended.append(message.position)

    @property
    def running(self) -> int:
        """Number of handlers that run."""
        return len(self.started) - len(self.ended)

    def let(self, *positions: int) -> None:
        """Let the handlers of these positions end, now or when they start."""
        for position in positions:
            self._gate(position).set()

    def shut(self, position: int) -> None:
        """Let the handler of a position wait again at its next start."""
        with self._lock:
            del self._gates[position]

    def join(self) -> None:
        """Wait for the threads that have called the handler."""
        for thread in self.threads:
            thread.join(TIMEOUT)
            assert not thread.is_alive()

    def _gate(self, position: int) -> threading.Event:
        with self._lock:
            return self._gates.setdefault(position, threading.Event())


class Order:
    """A handler that notes (partition, position)."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def __call__(self, message: Message) -> None:
        self.seen.append((message.partition.id.number, message.position))


def threads() -> list[threading.Thread]:
    """The threads that call handlers."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("lanes-")]


def assert_kept(directory: Path, *, left: bool = False) -> None:
    """Assert every promise; with ``left``, unfinished messages may remain at the broker."""
    for verdict in check(read([directory])):
        assert verdict.violations == 0, verdict
        if verdict.status != "passed":
            assert left, verdict
            assert (verdict.name, len(verdict.reasons)) == ("AtLeastOnce", 1), verdict
            assert "left at the broker" in verdict.reasons[0], verdict
