"""What the event loop asks of the thread that owns a client."""

from __future__ import annotations

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
