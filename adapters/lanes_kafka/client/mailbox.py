"""The requests of the event loop to the thread that owns a client, and the mailbox they go through."""

from __future__ import annotations

from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol

from lanes.core.types import Partition
from lanes_kafka.bridge import Answer
from lanes_kafka.client.commits import Commit


@dataclass(slots=True, eq=False)
class Demand:
    """The messages that the event loop has room for.

    Attributes:
        number: Number of this demand; it rises.
        messages: Messages that fit; 0 or less when full.
        bytes: Bytes that fit; 0 or less when full.
        paused: Partitions of which nothing is delivered.
        rewind: For each partition whose messages the loop has dropped, the demand that dropped them and the position
            to read from again.
        client_paused: Those of ``paused`` that the client is to be paused for as well.
        waiting: Messages that the loop has and that wait for room.
        waiting_paused: Messages of paused partitions that the loop has.
        received: Messages that the loop ever received.
    """

    number: int
    messages: int
    bytes: int
    paused: frozenset[Partition]
    rewind: dict[Partition, tuple[int, int]]
    client_paused: frozenset[Partition] = frozenset()
    waiting: int = 0
    waiting_paused: int = 0
    received: int = 0


@dataclass(slots=True, eq=False)
class Release:
    """Give a drained partition back. ``committed``: its position, or None where a message above it is completed."""

    partition: Partition
    answer: Answer[None]
    committed: int | None


class Expire:
    """Presume every partition lost: the client was not polled for too long."""


class Close:
    """Leave the group and end."""


Command = Commit | Release | Expire | Close | None
"""None only wakes the thread: there is a new ``Demand``."""


class Perform(Protocol):
    """Performs one command.

    Inside a callback of the client no answer of the broker arrives. ``until`` is then the time of the clock at which
    the callback has to end; outside of callbacks it is None.
    """

    def __call__(self, command: Command, *, until: float | None) -> None: ...


class Mailbox:
    """A queue of commands for a thread; it is False while empty.

    ``perform`` is called in that thread, with one command at a time, in the order they were sent. Only ``put`` may be
    called from other threads.
    """

    def __init__(self, perform: Perform) -> None:
        self._perform = perform
        self._commands: SimpleQueue[Command] = SimpleQueue()

    def __bool__(self) -> bool:
        return not self._commands.empty()

    def put(self, command: Command) -> None:
        """Queue a command. Callable from any thread. Does not block."""
        self._commands.put(command)

    def serve(self) -> None:
        """Perform all commands that are queued."""
        while True:
            try:
                command = self._commands.get_nowait()
            except Empty:
                return
            self._perform(command, until=None)

    def wait(self, seconds: float, *, until: float | None = None) -> bool:
        """Wait for one command and perform it; return False when none came in time. ``until``: see ``Perform``."""
        try:
            command = self._commands.get(timeout=max(0.0, seconds))
        except Empty:
            return False
        self._perform(command, until=until)
        return True
