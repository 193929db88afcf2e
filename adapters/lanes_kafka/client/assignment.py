"""One assignment of a partition, as the thread that owns the client knows it."""

from __future__ import annotations

from typing import NamedTuple

from confluent_kafka import TopicPartition

from lanes.core.types import Partition


class Place(NamedTuple):
    """A partition of a topic."""

    topic: str
    number: int


class Assignment:
    """``partition`` until it is revoked or lost.

    ``position``: next to be delivered, so whatever comes below it was delivered before. ``end``: behind the last
    message that was read. ``paused``: what the client was told last. ``drained``: nothing of it is delivered any more;
    ``returning``: it is being given back by us, in a call in which callbacks may come; ``released``: it was given back,
    and nothing is committed any more either. ``made``: in which round of callbacks it was made.
    """

    __slots__ = ("drained", "end", "made", "partition", "paused", "place", "position", "released", "returning")

    def __init__(self, place: Place, partition: Partition, position: int, made: int) -> None:
        self.place = place
        self.partition = partition
        self.position = self.end = position
        self.made = made
        self.paused = False
        self.drained = self.returning = self.released = False

    def at(self, offset: int | None = None) -> TopicPartition:
        """It as the client names it, with a position."""
        if offset is None:
            return TopicPartition(self.place.topic, self.place.number)
        return TopicPartition(self.place.topic, self.place.number, offset)

    def __repr__(self) -> str:
        return f"<Assignment {self.partition.id} at {self.position}>"
