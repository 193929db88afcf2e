"""A naive server for the members of a cohort: a bucket, the messages of one partition, and its durables.

The server performs a request when it arrives. The world decides whether and when that happens, and about the answer.
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
from lanes.core.cohort.records import State, decode, encode, lease_key, state_key
from lanes.core.types import NEVER

MESSAGES = frozenset(range(1, 9))


@dataclass
class Durable:
    """A durable. ``acks`` are on their way to the durable. ``missed``: the delivery numbers show a lost delivery.

    ``lease``: the lease of the member that created it, in seconds.
    """

    nonce: str
    start: int
    delivered: set[int] = field(default_factory=set)
    acked: set[int] = field(default_factory=set)
    acks: set[int] = field(default_factory=set)
    missed: bool = False
    lease: int = 0

    def has(self, sequence: int) -> bool:
        return sequence < self.start or sequence in self.acked

    @property
    def floor(self) -> int:
        floor = self.start - 1
        while self.has(floor + 1):
            floor += 1
        return floor


class Server:
    """The server. ``gone``: messages that left the stream.

    ``air``: requests given up that may still arrive, and the leases of their members. ``marked``: the lease in the
    cohort's mark. ``written``: the done sequences of an applied state.
    """

    def __init__(self, retention: str) -> None:
        self.retention = retention
        self.now = 1000.0
        self.entries: dict[str, tuple[bytes | None, int, float]] = {}
        self.revision = 0
        self.durables = {(0, 0): Durable("", 1)}
        self.gone: set[int] = set()
        self.air: list[tuple[Action, float]] = []
        self.written: set[int] = set()
        self.marked = 0
        self.perform(Write(state_key(0), encode(State(0, NOTHING)), 0))

    def perform(self, action: Action, *, lease: float = 0) -> Any:
        """Perform a request of a member with this lease."""
        match action:
            case Read(key):
                return self.read(key)
            case Write():
                return self.write(action)
            case FindConsumers(marked):
                found = sorted(
                    (*name, durable.nonce, durable.floor, durable.lease) for name, durable in self.durables.items()
                )
                return Found(tuple(Consumer(*one) for one in found), int(self.now), self.marked if marked else 0)
            case CreateConsumer():
                answer = self.create(action)
                if answer is None and (name := (action.epoch, action.sub)) in self.durables:
                    self.durables[name].lease = int(lease)
                return answer
            case DeleteConsumer():
                self.durables.pop((action.epoch, action.sub), None)
                self.forget()
        return None

    def read(self, key: str) -> tuple[bytes | None, int]:
        value, revision, expires = self.entries.get(key, (None, 0, NEVER))
        if value is not None and self.now >= expires:
            # An expired key leaves a mark with a revision that no member has.
            self.revision += 1
            value, revision = None, self.revision
            self.entries[key] = value, revision, NEVER
        return value, revision

    @property
    def expiry(self) -> float:
        """The time at which the lease expires, unless it is renewed."""
        return self.entries.get(lease_key(0), (None, 0, NEVER))[2]

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
        """Remove messages acknowledged once (work queue) or by every consumer (interest)."""
        if self.retention == "workqueue":
            self.gone.update(*(durable.acked for durable in self.durables.values()))
        elif self.retention == "interest":
            self.gone |= {s for s in MESSAGES if all(durable.has(s) for durable in self.durables.values())}

    def left(self, durable: Durable) -> list[int]:
        """The messages that the durable must still deliver or see acknowledged."""
        return sorted(s for s in MESSAGES - self.gone if not durable.has(s))

    def lose_bucket(self) -> None:
        """Lose the bucket. A new bucket exists at once, with higher revisions."""
        self.entries.clear()
        self.revision += 1000

    def land(self, number: int) -> None:
        """Let an abandoned request arrive."""
        if self.air:
            action, lease = self.air.pop(number % len(self.air))
            self.perform(action, lease=lease)
