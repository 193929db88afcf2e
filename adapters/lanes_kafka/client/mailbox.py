"""The mailbox of the thread that owns a client: what the event loop asks of it, performed in the order it was sent."""

from __future__ import annotations

from queue import Empty, SimpleQueue
from typing import Protocol

from lanes_kafka.client.requests import Command


class Perform(Protocol):
    """``until``: in a callback of the client, while which no answer of the broker comes: when that has to end, in
    seconds of the clock; None = in none."""

    def __call__(self, command: Command, *, until: float | None) -> None: ...


class Mailbox:
    """Commands on their way to a thread; False while it is empty. ``perform`` is called in that thread, with one after
    the other; all but ``put`` is for that thread alone."""

    def __init__(self, perform: Perform) -> None:
        self._perform = perform
        self._commands: SimpleQueue[Command] = SimpleQueue()

    def __bool__(self) -> bool:
        return not self._commands.empty()

    def put(self, command: Command) -> None:
        """Have a command performed. From any thread. Does not block."""
        self._commands.put(command)

    def serve(self) -> None:
        """Perform all that are there."""
        while True:
            try:
                command = self._commands.get_nowait()
            except Empty:
                return
            self._perform(command, until=None)

    def wait(self, seconds: float, *, until: float | None = None) -> bool:
        """Wait for one so long, and perform it; False when there was none. ``until``: see ``Perform``."""
        try:
            command = self._commands.get(timeout=max(0.0, seconds))
        except Empty:
            return False
        self._perform(command, until=until)
        return True
