"""The handlers of the members in both worlds. Each world adds its own settlements."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import Protocol

from lanes.core.types import Message, Partition
from lanes.history.recorder import Recorder
from lanes.history.rules import Rules


class Held(Protocol):
    """One partition at one member: its unfinished messages, running messages, and unconfirmed dead letters."""

    partition: Partition
    unfinished: dict[int, Message]
    running: dict[int, Message]
    parking: dict[int, Message]

    def finish(self, message: Message) -> None:
        """The message has ended."""


class Handling:
    """Handlers that start, end, fail and outlive their assignment, and the history of one process."""

    def __init__(self, directory: Path, name: str, random: Random, tick: Callable[[], float], rules: Rules) -> None:
        self.random = random
        self.tick = tick
        self.bound = random.randint(2, 12)
        self.history = Recorder(directory, member=name)
        self.history.open(
            source="S",
            concurrency=4,
            max_in_flight=self.bound,
            max_in_flight_bytes=10**6,
            now=tick(),
            rules=rules,
        )
        self.zombies: list[Message] = []
        self.latest_assignment = 0

    def start_heads(self, held: Held, messages: Iterable[Message]) -> None:
        """Start some of these messages; each must be the first unfinished message of its lane."""
        busy = {(m.partition.id, m.key) for m in self.zombies}
        for message in messages:
            lane = (message.partition.id, message.key)
            if message.key is None or lane not in busy:
                waiting = message.position in held.running or message.position in held.parking
                if not waiting and self.random.random() < 0.7:
                    row = self.history.started(message, self.tick())
                    self.history.flush()
                    assert self.history.written >= row
                    held.running[message.position] = message
            busy.add(lane)

    def end_zombies(self) -> None:
        for message in list(self.zombies):
            if self.random.random() < 0.15:
                self.zombies.remove(message)
                self.history.ended(message, self.random.choice(["ok", "cancelled"]), self.tick())
                self.history.zombie(message, self.tick())

    def end_some(self, held: Held, chance: Callable[[int], float]) -> None:
        """End running handlers with the outcome that each position draws, and confirm some dead letters."""
        for position, message in list(held.running.items()):
            if self.random.random() < chance(position):
                del held.running[position]
                self._end(held, message)
        for position, message in list(held.parking.items()):
            if self.random.random() < 0.6:
                del held.parking[position]
                self.history.dlq_confirmed(message, self.tick())
                held.finish(message)

    def _end(self, held: Held, message: Message) -> None:
        chance = self.random.random()
        if chance < 0.7:
            self.history.ended(message, "ok", self.tick())
            held.finish(message)
            return
        self.history.ended(message, "error", self.tick(), ValueError("no"))
        if chance < 0.85 and message.attempt < 3:
            self.history.retry(message, 0.0, self.tick())
            message.attempt += 1
        else:
            self.history.dlq_sent(message, self.tick())
            held.parking[message.position] = message

    def drain(self, held: Held) -> None:
        """Drain in order: running handlers may end, and the other messages are abandoned."""
        self.history.revoking(held.partition, self.tick())
        abandoned = [m for p, m in held.unfinished.items() if p not in held.running]
        self.history.abandoned(abandoned, self.tick())
        for message in list(held.running.values()):
            result = self.random.choice(["ok", "error", "cancelled"])
            self.history.ended(message, result, self.tick())
            if result == "ok":
                held.finish(message)
        self.history.drained(held.partition, self.tick())

    def outlive(self, held: Held) -> None:
        """Lose the partition; its running handlers continue."""
        self.zombies += held.running.values()
        self.history.lost(held.partition, self.tick())
        self.history.flush()

    def die(self) -> None:
        """Crash like ``kill -9``: unflushed rows are lost, and the last line may be torn."""
        assert self.history.path is not None
        survived = self.history.path.read_bytes()
        self.history.close("failed", self.tick())
        self.history.path.write_bytes(survived + self.random.choice([b"", b'{"n":9', b"{"]))
