"""What a cohort's members share, naively: a bucket, one partition's messages, and its durables.

A request is performed when it arrives; whether it arrives, when, and whether the answer gets back is for others to say.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lanes.core.cohort.actions import (
    Action,
    Consumer,
    CreateConsumer,
    DeleteConsumer,
    FindConsumers,
    Found,
    Overlapping,
    Read,
    Refused,
    Taken,
    Write,
)
from lanes.core.cohort.ledger import NOTHING
from lanes.core.cohort.records import State, decode, encode, state_key
from lanes.core.types import NEVER

MESSAGES = frozenset(range(1, 9))


@dataclass
class Durable:
    """``acks``: on their way to it. ``missed``: a delivery of it got lost, which its delivery numbers show."""

    nonce: str
    start: int
    delivered: set[int] = field(default_factory=set)
    acked: set[int] = field(default_factory=set)
    acks: set[int] = field(default_factory=set)
    missed: bool = False

    def has(self, sequence: int) -> bool:
        return sequence < self.start or sequence in self.acked

    @property
    def floor(self) -> int:
        floor = self.start - 1
        while self.has(floor + 1):
            floor += 1
        return floor


class Server:
    """``gone``: messages that the stream has no more. ``air``: requests that were given up and may still arrive.

    ``written``: what some state that was applied says is done.
    """

    def __init__(self, retention: str) -> None:
        self.retention = retention
        self.now = 1000.0
        self.entries: dict[str, tuple[bytes | None, int, float]] = {}
        self.revision = 0
        self.durables = {(0, 0): Durable("", 1)}
        self.gone: set[int] = set()
        self.air: list[Action] = []
        self.written: set[int] = set()
        self.perform(Write(state_key(0), encode(State(0, NOTHING)), 0))

    def perform(self, action: Action) -> Any:
        match action:
            case Read(key):
                return self.read(key)
            case Write():
                return self.write(action)
            case FindConsumers():
                found = sorted((*name, durable.nonce, durable.floor) for name, durable in self.durables.items())
                return Found(tuple(Consumer(*one) for one in found), int(self.now))
            case CreateConsumer():
                return self.create(action)
            case DeleteConsumer():
                self.durables.pop((action.epoch, action.sub), None)
                self.forget()
        return None

    def read(self, key: str) -> tuple[bytes | None, int]:
        value, revision, expires = self.entries.get(key, (None, 0, NEVER))
        if value is not None and self.now >= expires:
            # What expires leaves a mark, with a revision that nobody has.
            self.revision += 1
            value, revision = None, self.revision
            self.entries[key] = value, revision, NEVER
        return value, revision

    def write(self, write: Write) -> Any:
        key, revision = write.fence or (write.key, write.revision)
        if revision is not None and self.read(key)[1] != revision:
            return Refused
        self.revision += 1
        self.entries[write.key] = write.value, self.revision, NEVER if write.ttl is None else self.now + write.ttl
        if write.key == state_key(0):
            done = decode(State, write.key, write.value).done
            self.written |= {
                sequence for sequence in MESSAGES if sequence <= done.highest and sequence not in done.outstanding
            }
        return self.revision

    def create(self, action: CreateConsumer) -> Any:
        name = action.epoch, action.sub
        if name in self.durables:
            return Taken(self.durables[name].nonce)
        if self.retention == "workqueue" and self.durables:
            return Overlapping
        self.durables[name] = Durable(action.nonce, action.start or 1)
        return None

    def forget(self) -> None:
        """What the retention needs no more: acknowledged once (workqueue), by every consumer (interest)."""
        if self.retention == "workqueue":
            self.gone.update(*(durable.acked for durable in self.durables.values()))
        elif self.retention == "interest":
            self.gone |= {s for s in MESSAGES if all(durable.has(s) for durable in self.durables.values())}

    def left(self, durable: Durable) -> list[int]:
        """What the durable still has to deliver, or to see acknowledged."""
        return sorted(s for s in MESSAGES - self.gone if not durable.has(s))

    def lose_bucket(self) -> None:
        """A new one is there at once, and its revisions lie above the old ones."""
        self.entries.clear()
        self.revision += 1000

    def land(self, number: int) -> None:
        """Something that was given up arrives."""
        if self.air:
            self.perform(self.air.pop(number % len(self.air)))
