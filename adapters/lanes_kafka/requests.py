"""What the event loop asks of the thread that owns a client."""

from __future__ import annotations

from lanes.core.types import Partition
from lanes_kafka.bridge import Answer
from lanes_kafka.committing import Commit


class Want:
    """What the event loop has room for. ``number`` rises; ``rewind``: where partitions that it has forgotten messages
    of are read from again."""

    __slots__ = ("bytes", "messages", "number", "paused", "rewind")

    def __init__(
        self, number: int, messages: int, size: int, paused: frozenset[Partition], rewind: dict[Partition, int]
    ) -> None:
        self.number = number
        self.messages = messages
        self.bytes = size
        self.paused = paused
        self.rewind = rewind


class Release:
    """Give a partition back that is drained."""

    def __init__(self, partition: Partition, answer: Answer) -> None:
        self.partition = partition
        self.answer = answer


class Expire:
    """Presume everything lost: the client was not polled for too long."""


class Close:
    """Leave the group and end."""


Command = Commit | Release | Expire | Close | None
"""None only wakes: there is a new ``Want``."""
