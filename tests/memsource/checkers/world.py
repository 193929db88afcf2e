"""A small broker and small members that keep every promise, and write a history with ``lanes.History``.

Everything random comes from one ``Random``, so that Hypothesis can shrink a run. Time is a number.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import cast

from lanes.core.types import Message, Partition, PartitionId, Reader
from lanes.history.recorder import Recorder
from lanes.history.rules import Rules
from tests.memsource.checkers.handling import Handling

RULES = Rules(
    order="key",
    keyless="any",
    lanes=1,  # This world draws the next lane at random, and a history does not record the turn of folded lanes.
    batch=0,
    timeout=0,
    poison="skip",
    attempts=3,
    backoff=0.2,
    max_backoff=30.0,
    max_ahead=10**6,
    commit_interval=10**6,
    drain_timeout=30.0,
    grace=2.0,
    settles="individual",
    hands_over=True,
    extend_interval=0,
)
KEYS = (b"hot", b"hot", b"hot", b"warm", b"warm", b"cold", b'\x00\xff\n"{', None)


class Broker:
    """One partition: its owner, its acknowledged positions, its delivered positions."""

    def __init__(self, number: int, keys: list[bytes | None]) -> None:
        self.id = PartitionId("S", number)
        self.keys = keys
        self.acked: set[int] = set()
        self.cursor = 0
        self.owner: Member | None = None

    @property
    def done(self) -> bool:
        return len(self.acked) == len(self.keys)


class Assignment:
    """One partition at one member, for as long as the member owns the partition."""

    def __init__(self, broker: Broker, assignment: int) -> None:
        self.broker = broker
        self.partition = Partition(broker.id, cast(Reader, None))
        self.partition.assignment = assignment
        # Unacknowledged deliveries come first, in order.
        self.orphans = [p for p in range(broker.cursor) if p not in broker.acked]
        self.unfinished: dict[int, Message] = {}
        self.running: dict[int, Message] = {}
        self.parking: dict[int, Message] = {}
        self.finished: dict[int, Message] = {}
        self.settled: dict[int, Message] = {}

    @property
    def in_flight(self) -> int:
        return len(self.unfinished) + len(self.finished)

    def begun(self, message: Message) -> bool:
        return message.attempt > 1 or message.position in self.running or message.position in self.parking

    def finish(self, message: Message) -> None:
        del self.unfinished[message.position]
        self.finished[message.position] = message


class Member(Handling):
    """One process, which crashes or stops in order."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world.directory, name, world.random, world.tick, RULES)
        self.world = world
        self.assignments: list[Assignment] = []

    def assign(self, broker: Broker) -> None:
        self.latest_assignment += 1
        assignment = Assignment(broker, self.latest_assignment)
        self.assignments.append(assignment)
        broker.owner = self
        self.history.assigned(assignment.partition, self.tick())

    @property
    def room(self) -> int:
        return self.bound - sum(a.in_flight for a in self.assignments) - len(self.zombies)

    def step(self) -> None:
        actions = [self.deliver, self.start, self.start, self.end, self.end, self.settle, self.redeliver]
        self.random.choice(actions)()

    def deliver(self) -> None:
        for assignment in self.assignments:
            room, broker = self.room, assignment.broker
            orphans = assignment.orphans[: max(0, self.random.randint(0, max(0, room)))]
            del assignment.orphans[: len(orphans)]
            fresh = 0 if assignment.orphans else min(room - len(orphans), len(broker.keys) - broker.cursor)
            fresh = self.random.randint(0, max(0, fresh))
            positions = [*orphans, *range(broker.cursor, broker.cursor + fresh)]
            broker.cursor += fresh
            run = [Message(assignment.partition, p, broker.keys[p], 10, None, None) for p in positions]
            if run:
                self.history.delivered(run, self.tick())
                assignment.unfinished.update((message.position, message) for message in run)

    def redeliver(self) -> None:
        for assignment in self.assignments:
            known = [*assignment.unfinished.values(), *assignment.finished.values()]
            for cause, messages in (("held", known), ("settled", list(assignment.settled.values()))):
                if messages and self.random.random() < 0.3:
                    message = self.random.choice(messages)
                    self.history.delivered([message], self.tick())
                    self.history.redelivered(message, cause, self.tick())
                    if cause == "settled":
                        self.history.acks([message], self.tick())
            self._repeat(assignment)

    def _repeat(self, assignment: Assignment) -> None:
        """Deliver messages again that another assignment settled, because the broker forgot the settlements."""
        broker = assignment.broker
        known = assignment.unfinished.keys() | assignment.finished.keys() | assignment.settled.keys()
        forgotten = [p for p in sorted(broker.acked - known) if known and p < max(known)]
        if forgotten and self.room > 0 and self.random.random() < 0.2:
            position = self.random.choice(forgotten)
            message = Message(assignment.partition, position, broker.keys[position], 10, None, None)
            self.history.delivered([message], self.tick())
            self.history.redelivered(message, "late", self.tick())
            assignment.unfinished[position] = message

    def start(self) -> None:
        for assignment in self.assignments:
            # A started message is the head of its lane, even if a lower message arrives late.
            by_turn = sorted(assignment.unfinished.values(), key=lambda m: (not assignment.begun(m), m.position))
            self.start_heads(assignment, by_turn)

    def end(self) -> None:
        self.end_zombies()
        for assignment in self.assignments:
            self.end_some(assignment, lambda position: 0.6)

    def settle(self, *, reaches_broker: bool = True) -> None:
        for assignment in self.assignments:
            self.history.acks(list(assignment.finished.values()), self.tick())
            self.history.flush()
            if reaches_broker:
                assignment.broker.acked.update(assignment.finished)
            assignment.settled.update(assignment.finished)
            assignment.finished.clear()

    def release(self, assignment: Assignment) -> None:
        self.drain(assignment)
        self.settle()
        self.history.revoked(assignment.partition, self.tick())
        self._forget(assignment)

    def lose(self, assignment: Assignment) -> None:
        self.outlive(assignment)
        self._forget(assignment)

    def _forget(self, assignment: Assignment) -> None:
        assignment.broker.owner = None
        self.assignments.remove(assignment)

    def stop(self) -> None:
        for assignment in list(self.assignments):
            self.release(assignment)
        while self.zombies:
            self.end()
        self.history.close("drained", self.tick())
        self.world.members.remove(self)

    def crash(self) -> None:
        if self.random.random() < 0.5:
            # The history has the settlement, but the settlement was never sent.
            self.settle(reaches_broker=False)
        elif self.random.random() < 0.5:
            self.history.flush()
        self.die()
        for assignment in list(self.assignments):
            self._forget(assignment)
        self.world.members.remove(self)


class World:
    """A stream of one or two partitions, and two members at a time, until everything is acknowledged."""

    def __init__(self, directory: Path, random: Random, *, trouble: bool = True) -> None:
        self.directory = directory
        self.random = random
        self.now = 100.0
        self.members: list[Member] = []
        self.brokers = [
            Broker(number, [random.choice(KEYS) for _ in range(random.randint(1, 25))])
            for number in range(random.randint(1, 2))
        ]
        self._born = 0
        self._trouble = random.randint(0, 6) if trouble else 0

    def tick(self) -> float:
        self.now += self.random.choice([0.0, 0.000001, 0.0007, 0.3])
        return self.now

    def run(self) -> None:
        producer = Recorder(self.directory, member="producer")
        producer.open(source="S", concurrency=1, max_in_flight=1, max_in_flight_bytes=1, now=self.tick())
        for broker in self.brokers:
            for position, key in enumerate(broker.keys):
                producer.produced(broker.id, position, key, self.tick())
        producer.close("drained", self.tick())
        while not all(broker.done for broker in self.brokers):
            self._own()
            for _ in range(self.random.randint(1, 12)):
                self.random.choice(self.members).step()
            if self._trouble:
                self._trouble -= 1
                self._make_trouble()
        for member in list(self.members):
            member.stop()

    def _own(self) -> None:
        while len(self.members) < 2:
            self._born += 1
            self.members.append(Member(self, f"m-{self._born}"))
        for broker in self.brokers:
            if broker.owner is None:
                # Prefer a member that does not run the message, or two members would run the same message.
                others = [m for m in self.members if all(z.partition.id != broker.id for z in m.zombies)]
                self.random.choice(others or self.members).assign(broker)

    def _make_trouble(self) -> None:
        member = self.random.choice(self.members)
        trouble = self.random.choice(["crash", "stop", "lose", "lose", "revoke", "none"])
        if trouble == "crash":
            member.crash()
        elif trouble == "stop":
            member.stop()
        elif trouble == "lose" and member.assignments:
            member.lose(member.assignments[0])
        elif trouble == "revoke" and member.assignments:
            member.release(member.assignments[0])
