"""A naive model of the engine: one dict of all messages in flight, searched from end to end."""

from __future__ import annotations

from lanes.core.publishing import Produced
from lanes.core.types import ABANDON, ACK, Failure, Message, Outcome, Partition

WAITING = ("queued", "held", "stuck", "dead_lettering")
SENDING = ("publishing", "publish_held")


class NaiveEngine:
    """States: the four of ``WAITING``, the two of ``SENDING``, running and done.

    A message without a ``state`` is not in flight.

    ``given_up`` is the state of a message without attempts, "dead_lettering" or "stuck" (everything halts). ``keeps``:
    a held message also waits for ``keep``. ``first``: the first attempt of a message. ``unkept``: held and not kept
    yet.
    """

    def __init__(self, concurrency: int, attempts: int, given_up: str, *, keeps: bool = False) -> None:
        self.concurrency, self.attempts, self.given_up, self.keeps = concurrency, attempts, given_up, keeps
        self.first: dict[Message, int] = {}
        self.unkept: list[Message] = []
        self.state: dict[Message, str] = {}
        self.attempt: dict[Message, int] = {}
        self.until: dict[Message, float] = {}
        self.settled: set[tuple[Partition, int]] = set()
        self.draining: set[Partition] = set()
        self.fenced: set[Partition] = set()
        self.outputs: dict[Message, int] = {}  # the sizes of the unconfirmed outputs
        self.sends: dict[Message, int] = {}
        self.full = False

    def receive(self, message: Message, highest: int) -> str:
        partition, place = message.partition, (message.partition, message.position)
        known = place in [(m.partition, m.position) for m in self.state]
        if partition in self.fenced or (partition in self.draining and not known and place not in self.settled):
            return "ignored"
        if known:
            return "held"
        if place in self.settled:
            return "settled"
        self.state[message] = "queued"
        self.attempt[message] = self.first[message] = message.attempt
        return "late" if message.position <= highest else "new"

    def startable(self) -> list[Message]:
        if self.full or list(self.state.values()).count("running") >= self.concurrency:
            return []
        return self.heads()

    def heads(self) -> list[Message]:
        """The messages that could start if no other handler ran."""
        return [m for m in self.state if self.state[m] == "queued" and not any(self.blocks(o, m) for o in self.state)]

    def blocks(self, other: Message, m: Message) -> bool:
        if other is m or m.key is None or (other.key, other.partition.id) != (m.key, m.partition.id):
            return False
        if self.state[other] == "queued" and self.attempt[other] == self.first[other]:
            return self.attempt[m] == self.first[m] and other.position < m.position
        return self.state[other] != "done"

    def finish(self, m: Message, outcome: Outcome, until: float) -> None:
        if m.partition in self.fenced:
            del self.state[m]
        elif outcome is ACK:
            self.state[m] = "done"
        elif isinstance(outcome, Produced):
            self.state[m], self.outputs[m], self.sends[m] = "publishing", outcome.size, 0
        elif outcome is ABANDON or m.partition in self.draining:
            del self.state[m]
            self.drain(m.partition)
        elif isinstance(outcome, Failure) and (outcome.terminal or self.attempt[m] >= self.attempts):
            self.state[m] = self.given_up
        else:
            self.state[m], self.until[m] = "held", until
            if self.keeps:
                self.unkept.append(m)

    def sent(self, m: Message, failure: Failure | None, until: float) -> None:
        """A send of the outputs of a publishing message has ended."""
        if failure is not None and not failure.terminal:
            self.state[m], self.until[m] = "publish_held", until
            self.sends[m] += 1
            return
        del self.outputs[m]
        self.finish(m, ACK if failure is None else failure, until)

    def look_at_outputs(self, bound: int) -> None:
        self.outputs = {m: size for m, size in self.outputs.items() if m in self.state}
        size = sum(self.outputs.values())
        self.full = size >= bound or (self.full and size > bound // 2)

    def keep(self, m: Message) -> None:
        self.unkept.remove(m)

    def waiting(self) -> list[Message]:
        """The messages whose hold, or whose pause between two sends, may end."""
        return [m for m in self.state if self.state[m] in ("held", "publish_held") and m not in self.unkept]

    def due(self, now: float) -> None:
        for m in [m for m in self.waiting() if self.until[m] <= now]:
            if self.state[m] == "publish_held":
                self.state[m] = "publishing"
            else:
                self.state[m], self.attempt[m] = "queued", self.attempt[m] + 1

    def settle(self, messages: list[Message]) -> None:
        for m in [m for m in messages if m in self.state]:
            del self.state[m]
            self.settled.add((m.partition, m.position))

    def drain(self, partition: Partition) -> list[Message]:
        self.draining.add(partition)
        return self.drop(partition, WAITING)

    def fence(self, partition: Partition) -> None:
        self.fenced.add(partition)
        self.drop(partition, WAITING + SENDING)

    def release(self, partition: Partition) -> None:
        self.fence(partition)
        self.drop(partition, ("done",))

    def drop(self, partition: Partition, states: tuple[str, ...]) -> list[Message]:
        dropped = [m for m in self.state if m.partition is partition and self.state[m] in states]
        for m in dropped:
            del self.state[m]
        return dropped
