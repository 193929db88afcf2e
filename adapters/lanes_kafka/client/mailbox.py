"""The event loop's demands and commands for a client's thread, and the mailbox that queues the commands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol

from lanes.core.types import Partition
from lanes_kafka.bridge import Answer
from lanes_kafka.client.commits import Commit
from lanes_kafka.client.prefetch import Credit


@dataclass(slots=True, eq=False)
class Demand:
    """The number of messages that the thread may read, and the partitions that it may read.

    Attributes:
        number: Number of this demand, higher than the number of every earlier demand.
        messages: Number of messages for which the event loop has room; 0 or less = no room.
        credit: Upper limit of the messages and bytes that the thread reads in total after its start.
        assigned: Number of assignments that the loop had received. The thread ignores a demand with less than the
            newest number.
        paused: Partitions whose messages the loop does not deliver.
        rewind: For each partition with dropped messages: the number of the demand that dropped the messages, and the
            position from which to read again.
        client_paused: Partitions of ``paused`` for which the thread pauses the client.
    """

    number: int
    messages: int
    credit: Credit
    assigned: int
    paused: frozenset[Partition]
    rewind: dict[Partition, tuple[int, int]]
    client_paused: frozenset[Partition] = frozenset()


@dataclass(slots=True, eq=False)
class Release:
    """The command to release a drained partition.

    Attributes:
        partition: The assignment.
        answer: The answer of the thread.
        committed: The committed position; None = an unknown position, or a completed message above the position.
    """

    partition: Partition
    answer: Answer[None]
    committed: int | None


class Expire:
    """The command to treat every partition as lost, because the thread has not polled the client in time."""


@dataclass(slots=True, eq=False)
class Confirm:
    """The command to ask the broker whether this client still owns partitions.

    Attributes:
        partitions: The assignments.
        answer: Receives the assignments that this client still owns.
    """

    partitions: Sequence[Partition]
    answer: Answer[Sequence[Partition]]


class Close:
    """The command to leave the group and to end the thread."""


Command = Commit | Release | Expire | Confirm | Close | None
"""A command for the thread. ``None`` only wakes the thread, for a new ``Demand`` or an answer about topics."""


class Perform(Protocol):
    """A function that performs one command.

    Args:
        command: The command.
        until: Time of the clock at which the running callback of the client must end; None outside of callbacks.
            The client delivers no answers of the broker during a callback.
    """

    def __call__(self, command: Command, *, until: float | None) -> None: ...


class Mailbox:
    """A queue of commands for a thread; an empty mailbox is False.

    Other threads may call only ``put``.

    Args:
        perform: Function that performs one command. The thread calls the function in the order of the queue.
    """

    def __init__(self, perform: Perform) -> None:
        self._perform = perform
        self._commands: SimpleQueue[Command] = SimpleQueue()

    def __bool__(self) -> bool:
        return not self._commands.empty()

    def put(self, command: Command) -> None:
        """Queue a command. Any thread may call this method. The call does not block."""
        self._commands.put(command)

    def serve(self) -> bool:
        """Perform all queued commands, and return whether the queue had a command other than ``None``."""
        served = False
        while True:
            try:
                command = self._commands.get_nowait()
            except Empty:
                return served
            self._perform(command, until=None)
            served = served or command is not None

    def wait(self, seconds: float, *, until: float | None = None) -> bool:
        """Wait for one command and perform it; return False if no command arrived within ``seconds``.

        For ``until`` see ``Perform``.
        """
        try:
            command = self._commands.get(timeout=max(0.0, seconds))
        except Empty:
            return False
        self._perform(command, until=until)
        return True
