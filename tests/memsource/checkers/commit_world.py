"""Small members of a ``Group`` that keep every promise, commit floors, and write a history with ``lanes.History``.

Everything random comes from one ``Random``, so that Hypothesis can shrink a run. Time is a number.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import cast

from lanes.core.types import Message, Partition, PartitionId, Reader
from lanes.history.recorder import Recorder
from memsource import Group
from tests.memsource.checkers.handling import Handling
from tests.memsource.checkers.made import Made
from tests.memsource.checkers.world import KEYS, RULES


class Assignment:
    """One partition at one member, for as long as the member believes that it owns the partition."""

    def __init__(self, group: Group, number: int, assignment: int) -> None:
        floor, completed = group.committed(number)
        self.number = number
        self.partition = Partition(PartitionId("S", number), cast(Reader, None), floor=floor, completed=completed)
        self.partition.assignment = assignment
        self.read = floor
        self.unfinished: dict[int, Message] = {}
        self.running: dict[int, Message] = {}
        self.parking: dict[int, Message] = {}
        self.finished: list[int] = []
        self.committed = floor
        self.revoking = False

    def finish(self, message: Message) -> None:
        del self.unfinished[message.position]
        self.finished.append(message.position)

    def snapshot(self) -> tuple[int, list[tuple[int, int]]]:
        """The floor, and the completed set above it."""
        floor = min(self.unfinished, default=self.read)
        runs = [(position, position + 1) for position in self.finished if position >= floor]
        above = [(max(start, self.read), end) for start, end in self.partition.completed if end > self.read]
        return floor, sorted(runs) + above


class Member(Handling):
    """One process, which crashes or stops in order."""

    def __init__(self, world: CommitWorld, name: str) -> None:
        super().__init__(world.directory, name, world.random, world.tick, replace(RULES, settles="cumulative"))
        self.world = world
        self.group = world.group
        self.name = name
        self.assignments: dict[int, Assignment] = {}
        self.group.join(name)

    @property
    def room(self) -> int:
        return self.bound - sum(len(a.unfinished) for a in self.assignments.values()) - len(self.zombies)

    def step(self) -> None:
        self.random.choice([self.poll, self.deliver, self.start, self.start, self.end, self.end, self.commit])()

    def poll(self) -> None:
        notices = self.group.poll(self.name)
        for index, (kind, number) in enumerate(notices):
            if kind == "assigned":
                self.latest_assignment += 1
                assignment = self.assignments[number] = Assignment(self.group, number, self.latest_assignment)
                self.history.assigned(assignment.partition, self.tick())
            elif kind == "revoking":
                if ("lost", number) not in notices[index:]:
                    self.release(self.assignments[number])
            else:
                self.lose(self.assignments[number])

    def deliver(self) -> None:
        for number, assignment in self.assignments.items():
            records = self.group.fetch(self.name, number, self.random.randint(0, max(0, self.room)))
            run = [Message(assignment.partition, r.position, r.key, 10, None, None) for r in records]
            if run:
                self.history.delivered(run, self.tick())
                known = [m for m in run if any(s <= m.position < e for s, e in assignment.partition.completed)]
                for message in known:
                    self.history.redelivered(message, "settled", self.tick())
                assignment.finished += [message.position for message in known]
                assignment.unfinished.update((m.position, m) for m in run if m not in known)
            assignment.read = self.group.position(self.name, number)

    def start(self) -> None:
        for assignment in self.assignments.values():
            self.start_heads(assignment, assignment.unfinished.values())

    def end(self) -> None:
        self.end_zombies()
        for assignment in self.assignments.values():
            # A few messages are slow, so messages above them finish first.
            self.end_some(assignment, lambda position: 0.1 if position % 5 == 3 else 0.6)

    def commit(self) -> None:
        for assignment in self.assignments.values():
            self._commit(assignment, self.random.choice(["ok", "ok", "ok", "refused", "unknown"]))

    def _commit(self, assignment: Assignment, result: str) -> None:
        floor, completed = assignment.snapshot()
        if floor == assignment.committed and not completed:
            return
        self.history.commit_sent(assignment.partition, floor, len(completed), self.tick())
        self.history.flush()
        if result != "refused":
            self.group.commit(self.name, assignment.number, floor, completed)
        if result == "ok":
            assignment.committed = floor
            self.history.commit_ok(assignment.partition, floor, self.tick())
        elif result != "crashed":
            self.history.commit_failed(assignment.partition, floor, self.tick())

    def release(self, assignment: Assignment) -> None:
        self.drain(assignment)
        self._commit(assignment, "ok")
        self.history.revoked(assignment.partition, self.tick())
        self.history.flush()
        del self.assignments[assignment.number]
        self.group.release(self.name, assignment.number)

    def lose(self, assignment: Assignment) -> None:
        self.outlive(assignment)
        del self.assignments[assignment.number]

    def stop(self) -> None:
        for assignment in list(self.assignments.values()):
            self.release(assignment)
        while self.zombies:
            self.end()
        self.history.close("drained", self.tick())
        self._gone()

    def crash(self) -> None:
        if self.random.random() < 0.7:
            for assignment in self.assignments.values():
                self._commit(assignment, "crashed")
        elif self.random.random() < 0.5:
            self.history.flush()
        self.die()
        self._gone()

    def _gone(self) -> None:
        self.group.leave(self.name)
        self.world.members.remove(self)


class CommitWorld:
    """A topic of one or two partitions with gaps, and two members at a time, until everything is committed."""

    def __init__(self, directory: Path, random: Random) -> None:
        self.directory = directory
        self.random = random
        self.now = 100.0
        self.members: list[Member] = []
        self.group = Group(random.randint(1, 2), name="S", cooperative=random.random() < 0.5)
        for number in self.group.topic.partitions:
            for _ in range(random.randint(1, 25)):
                self.group.skip(random.choice([0, 0, 0, 1, 1000]), partition=number)
                self.group.publish(key=random.choice(KEYS), partition=number)
            self.group.skip(random.randint(0, 2), partition=number)
        self._born = 0
        self._trouble = random.randint(0, 12)

    def tick(self) -> float:
        self.now += self.random.choice([0.0, 0.000001, 0.0007, 0.003])
        return self.now

    def run(self) -> None:
        producer = Recorder(self.directory, member="producer")
        producer.open(source="S", concurrency=1, max_in_flight=1, max_in_flight_bytes=1, now=self.tick())
        for number, log in enumerate(self.group.topic.logs):
            for record in log.records.values():
                producer.produced(PartitionId("S", number), record.position, record.key, self.tick())
        producer.close("drained", self.tick())
        while self.group.unfinished:
            while len(self.members) < 2:
                self._born += 1
                self.members.append(Member(self, f"m-{self._born}"))
            for _ in range(self.random.randint(1, 12)):
                self.random.choice(self.members).step()
            if self._trouble:
                self._trouble -= 1
                self._make_trouble()
        for member in list(self.members):
            member.poll()
            member.stop()

    def _make_trouble(self) -> None:
        member = self.random.choice(self.members)
        trouble = self.random.choice(["crash", "stop", "lose", "lose", "revoke", "revoke"])
        owned = [n for n in self.group.topic.partitions if self.group.owner(n) == member.name]
        if trouble == "crash":
            member.crash()
        elif trouble == "stop":
            member.poll()
            member.stop()
        elif trouble == "lose" and owned:
            self.group.lose(member.name, owned[0])
            # These members learn of a loss at once: a member that cannot know of the loss is not at fault.
            member.poll()
        elif trouble == "revoke" and owned:
            self.group.revoke(owned[0])


_made = Made(lambda directory, random: CommitWorld(directory, random).run())
history_of = _made.history_of
segments_of = _made.segments_of
