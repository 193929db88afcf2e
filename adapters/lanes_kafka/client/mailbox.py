"""What the event loop asks of the thread that owns a client, and the mailbox it is asked through."""

from __future__ import annotations

from queue import Empty, SimpleQueue
from typing import Protocol

from lanes.core.types import Partition
from lanes_kafka.bridge import Answer
from lanes_kafka.client.commits import Commit


class Want:
    """What the event loop has room for. ``number`` rises; ``paused``: of what nothing is delivered; ``resting``: those
    of them that the client is to be paused for; ``rewind``: by which request, and from where, partitions are read again
    that the loop has forgotten messages of. ``held``: messages that it has and that wait for room; ``aside``: those of
    paused partitions; ``received``: all it ever got."""

    __slots__ = ("aside", "bytes", "held", "messages", "number", "paused", "received", "resting", "rewind")

    def __init__(
        self,
        number: int,
        messages: int,
        size: int,
        paused: frozenset[Partition],
        rewind: dict[Partition, tuple[int, int]],
        *,
        resting: frozenset[Partition] = frozenset(),
        held: int = 0,
        aside: int = 0,
        received: int = 0,
    ) -> None:
        self.number = number
        self.messages = messages
        self.bytes = size
        self.paused = paused
        self.rewind = rewind
        self.resting = resting
        self.held = held
        self.aside = aside
        self.received = received


class Release:
    """Give a partition back that is drained. ``committed``: its position, where nothing is completed above that."""

    def __init__(self, partition: Partition, answer: Answer, committed: int | None) -> None:
        self.partition = partition
        self.answer = answer
        self.committed = committed


class Expire:
    """Presume everything lost: the client was not polled for too long."""


class Close:
    """Leave the group and end."""


Command = Commit | Release | Expire | Close | None
"""None only wakes: there is a new ``Want``."""


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
