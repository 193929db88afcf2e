"""A naive model of the engine in every mode, for sources whose positions rise."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from lanes.core import ring
from lanes.core.policy import Policy
from lanes.core.types import ABANDON, ACK, Failure, Message, Outcome, Partition

GIVEN_UP = {"skip": "dead_lettering", "block": "blocked", "block_and_dlq": "dead_lettering_blocked", "exit": "blocked"}


class NaiveModes:
    """States in flight: waiting, queued, running, held, dead-lettering (blocked or not), blocked, done."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.state: dict[Message, str] = {}
        self.attempt: dict[Message, int] = {}
        self.until: dict[Message, float] = {}
        self.unkept: list[Message] = []  # held, and not in the store of attempts yet
        self.failed: dict[Message, str] = {}  # the outcomes of one batch, at least for a moment
        self.draining: set[Partition] = set()
        self.fenced: set[Partition] = set()

    def lane(self, m: Message) -> object:
        order, place = self.policy.order, m.partition.id
        if order == "none" or (order == "key" and m.key is None and self.policy.keyless == "any"):
            return m
        if order == "key" and m.key is not None and self.policy.lanes:
            return place, ring.lane(m.key, self.policy.lanes)
        return place, m.key if order == "key" else "all"

    def blocks(self, o: Message, m: Message) -> bool:
        before = o.partition is not m.partition or o.position < m.position
        return before and self.state[o] != "done" and self.lane(o) == self.lane(m)

    def startable(self, batch: Collection[Message] = ()) -> list[Message]:
        queued = [m for m in self.state if self.state[m] == "queued" and m not in batch]
        return [m for m in queued if not any(self.blocks(o, m) for o in self.state if o not in batch)]

    def finish(self, batch: Sequence[Message], outcomes: Sequence[Outcome], until: float) -> list[Message]:
        dropped: list[Message] = []
        for m, outcome in zip(batch, outcomes, strict=True):
            if self.state.get(m) != "running":
                continue
            if m.partition in self.fenced or (outcome is not ACK and m.partition in self.draining):
                del self.state[m]
                if isinstance(outcome, Failure) and m.partition not in self.fenced:
                    self.failed[m] = "left"
            elif outcome is ACK:
                self.state[m] = "done"
            elif outcome is ABANDON:
                self.state[m] = "interrupted"
            elif isinstance(outcome, Failure):
                given_up = outcome.terminal or self.attempt[m] >= self.policy.retry.attempts
                self.state[m], self.until[m] = GIVEN_UP[self.policy.poison] if given_up else "held", until
                self.failed[m] = self.state[m]
            if outcome is not ACK and m.partition not in self.fenced:
                rest = [o for o in batch if o.position > m.position and self.lane(o) == self.lane(m)]
                self.state |= {o: "queued" for o in rest if o in self.state}
                successor = [o for o in self.state if self.state[o] == "queued" and self.lane(o) == self.lane(m)]
                if m.partition in self.draining:
                    dropped += self.drop(o for o in successor if o.partition is m.partition)
            if self.state.get(m) == "interrupted":
                del self.state[m]
                dropped += self.drain(m.partition, set())
        return dropped

    def waiting(self) -> list[Message]:
        """The held messages whose hold may end."""
        return [m for m in self.state if self.state[m] == "held" and m not in self.unkept]

    def kept(self, partition: Partition, finished: Collection[int]) -> set[Message]:
        mine = [m for m in self.state if m.partition is partition]
        limit = max([*finished, *(m.position for m in mine if self.state[m] in ("running", "done"))], default=-1)
        below = [m for m in mine if self.state[m] == "queued" and m.position < limit]
        free = ("queued", "running")
        stuck = [o for o in self.state if o.partition in self.fenced or self.state[o] not in free]
        return {m for m in below if not any(self.blocks(o, m) for o in stuck)}

    def drain(self, partition: Partition, keep: set[Message]) -> list[Message]:
        self.draining.add(partition)
        mine = [m for m in self.state if m.partition is partition and m not in keep]
        return self.drop(m for m in mine if self.state[m] not in ("running", "done"))

    def drop(self, messages: Iterable[Message]) -> list[Message]:
        return [m for m in list(messages) if self.state.pop(m, None)]
