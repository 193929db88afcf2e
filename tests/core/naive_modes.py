"""A naive model of the engine in every mode, for sources whose positions rise."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from lanes.core import ring
from lanes.core.policy import Policy
from lanes.core.publishing import Produced
from lanes.core.types import ABANDON, ACK, Failure, Message, Outcome, Partition

SENDING = ("publishing", "publish_held", "handled")
GIVEN_UP = {"skip": "dead_lettering", "block": "blocked", "block_and_dlq": "dead_lettering_blocked", "exit": "blocked"}


class NaiveModes:
    """States in flight: waiting, queued, running, held, dead-lettering (blocked or not), blocked, done, ``SENDING``."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.state: dict[Message, str] = {}
        self.attempt: dict[Message, int] = {}
        self.until: dict[Message, float] = {}
        self.unkept: list[Message] = []  # held, and not in the store of attempts yet
        self.failed: dict[Message, str] = {}  # the outcomes of one batch, at least for a moment
        self.outputs: dict[Message, int] = {}  # the sizes of the unconfirmed outputs
        self.deferred: dict[Message, tuple[Outcome, float]] = {}
        self.full = False
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
            good = outcome is ACK or isinstance(outcome, Produced)
            if m.partition not in self.fenced and self.waits(m):
                self.state[m], self.deferred[m] = "handled", (outcome, until)
                if isinstance(outcome, Produced):
                    self.outputs[m] = outcome.size
                if not good:
                    rest = [o for o in batch if o.position > m.position and self.lane(o) == self.lane(m)]
                    self.state |= {o: "queued" for o in rest if o in self.state}
                continue
            if m.partition in self.fenced or (not good and m.partition in self.draining):
                del self.state[m]
                if isinstance(outcome, Failure) and m.partition not in self.fenced:
                    self.failed[m] = "left"
            elif outcome is ACK:
                self.state[m] = "done"
            elif isinstance(outcome, Produced):
                self.state[m], self.outputs[m] = "publishing", outcome.size
            elif outcome is ABANDON:
                self.state[m] = "interrupted"
            elif isinstance(outcome, Failure):
                given_up = outcome.terminal or self.attempt[m] >= self.policy.retry.attempts
                self.state[m], self.until[m] = GIVEN_UP[self.policy.poison] if given_up else "held", until
                self.failed[m] = self.state[m]
            if not good and m.partition not in self.fenced:
                rest = [o for o in batch if o.position > m.position and self.lane(o) == self.lane(m)]
                self.state |= {o: "queued" for o in rest if o in self.state}
                successor = [o for o in self.state if self.state[o] == "queued" and self.lane(o) == self.lane(m)]
                if m.partition in self.draining:
                    dropped += self.drop(o for o in successor if o.partition is m.partition)
            if self.state.get(m) == "interrupted":
                del self.state[m]
                dropped += self.drain(m.partition, set())
        return dropped

    def waits(self, m: Message) -> bool:
        """Whether an earlier message of the lane has unconfirmed outputs."""
        before = [o for o in self.state if o.partition is m.partition and o.position < m.position]
        return any(self.state[o] in SENDING and self.lane(o) == self.lane(m) for o in before)

    def sent(self, m: Message, failure: Failure | None, until: float) -> list[Message]:
        """A send of the outputs of a publishing message has ended. Return the dropped messages."""
        if failure is not None and not failure.terminal:
            self.state[m], self.until[m] = "publish_held", until
            return []
        del self.outputs[m]
        self.state[m] = "running"
        if failure is not None:
            self.return_handled(m)
            return self.finish([m], [failure], until)
        dropped = self.finish([m], [ACK], until)
        for o in [o for o in self.state if self.state[o] == "handled" and self.lane(o) == self.lane(m)]:
            if o in self.state and self.state[o] == "handled" and not self.waits(o):
                outcome, at = self.deferred.pop(o)
                self.state[o] = "running"
                dropped += self.finish([o], [outcome], at)
                if self.state.get(o) != "done":
                    break
        return dropped

    def return_handled(self, m: Message) -> None:
        """The handled messages after a message run again."""
        for o in [o for o in self.deferred if self.lane(o) == self.lane(m) and self.state.get(o) == "handled"]:
            del self.deferred[o]
            self.outputs.pop(o, None)
            self.state[o] = "queued"

    def look_at_outputs(self, bound: int) -> None:
        self.outputs = {m: size for m, size in self.outputs.items() if m in self.state}
        self.deferred = {m: each for m, each in self.deferred.items() if m in self.state}
        size = sum(self.outputs.values())
        self.full = size >= bound or (self.full and size > bound // 2)

    def waiting(self) -> list[Message]:
        """The held messages whose hold may end."""
        return [m for m in self.state if self.state[m] == "held" and m not in self.unkept]

    def kept(self, partition: Partition, finished: Collection[int]) -> set[Message]:
        mine = [m for m in self.state if m.partition is partition]
        limit = max(
            [*finished, *(m.position for m in mine if self.state[m] in ("running", "done", *SENDING))], default=-1
        )
        below = [m for m in mine if self.state[m] == "queued" and m.position < limit]
        free = ("queued", "running", *SENDING)
        stuck = [o for o in self.state if o.partition in self.fenced or self.state[o] not in free]
        return {m for m in below if not any(self.blocks(o, m) for o in stuck)}

    def drain(self, partition: Partition, keep: set[Message]) -> list[Message]:
        self.draining.add(partition)
        mine = [m for m in self.state if m.partition is partition and m not in keep]
        return self.drop(m for m in mine if self.state[m] not in ("running", "done", *SENDING))

    def drop(self, messages: Iterable[Message]) -> list[Message]:
        return [m for m in list(messages) if self.state.pop(m, None)]
