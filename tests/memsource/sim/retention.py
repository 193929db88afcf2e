"""A naive second opinion about unfinished messages that the broker is about to delete."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import anyio

from memsource.kafka.broker import KafkaBroker
from memsource.sim.world.worker import Worker
from memsource.sim.world.world import World
from tests.memsource.sim.watched import Watched, Watching

_EVERY: Final = 0.5
_PERIOD: Final = 1.0
"""Seconds between two checks of the consumer itself."""

_SLACK: Final = _PERIOD + _EVERY


class RetentionOpinion:
    """Compares the status of all workers with the times at which their messages were written.

    The findings are ``DeletionTold`` (the oldest message has had less than a tenth of its time left at several
    comparisons, and the status does not name a message), and ``DeletionIsNear`` (the status names a message that has
    enough time).
    """

    def __init__(self, world: World, broker: Watching) -> None:
        self._world = world
        self._broker = broker
        # The epoch and the position of the oldest message, and since when it is in danger and not named.
        self._since: dict[tuple[str, str], tuple[tuple[int, int], float]] = {}

    async def compare(self, workers: Iterable[Worker]) -> None:
        """Compare once for each worker, and wait until the next comparison is due."""
        for worker in workers:
            if worker.consumer.ready:
                self._compare(worker)
        await anyio.sleep(_EVERY)

    def _compare(self, worker: Worker) -> None:
        span = self._broker.span
        assert span is not None
        for name, partition in worker.consumer.status().partitions.items():
            oldest, named, place = partition.oldest, partition.expiring, (worker.name, name)
            left = span if oldest is None or oldest.age < 1.0 else self._left(name, oldest.position)
            if oldest is None or named is not None or left >= span / 10:
                self._since.pop(place, None)
            else:
                at = partition.epoch, oldest.position
                if self._since.get(place, ((0, -1), 0.0))[0] != at:
                    self._since[place] = at, self._world.now
                if self._world.now - self._since[place][1] > _SLACK:
                    self._world.find("DeletionTold", f"{worker.name}, {name}: {oldest} has {left:g} s left")
            if named is not None:
                left = self._left(name, named.position)
                if abs(max(0.0, left) - named.left) > 0.01 or left > span / 10 + 2 * _PERIOD + _SLACK:
                    self._world.find("DeletionIsNear", f"{worker.name}, {name}: {named} has {left:g} s left of {span}")

    def _left(self, partition: str, position: int) -> float:
        written = self._broker.written[int(partition.rpartition("/")[2]), position]
        assert self._broker.span is not None
        return written + self._broker.span - self._world.now


_FILLER: Final = 100
"""Bytes that each comparison writes."""

_PACE: Final = 2 * _FILLER / _EVERY
"""Bytes a second that a partition gets at most, with room for the messages of the test."""


class SizeOpinion:
    """Fills one partition of a Kafka broker, and compares the status of its owner with the bytes that were written.

    The findings are those of ``RetentionOpinion``. A message is in danger when the newer bytes reach nine tenths of the
    bytes that the broker keeps.
    """

    def __init__(self, world: World, broker: KafkaBroker, keeps: int, partition: int) -> None:
        self._world = world
        self._broker = broker
        self._keeps = keeps
        self._partition = partition
        self._filled: list[int] = []  # positions
        self._since: tuple[tuple[int, int], float] | None = None

    async def compare(self, workers: Iterable[Worker], sources: dict[str, Watched]) -> None:
        """Write once, unless a message is not delivered yet, and compare. Wait until the next comparison is due."""
        name = f"{self._broker.topic}/{self._partition}"
        for worker in workers:
            status = worker.consumer.status() if worker.consumer.ready else None
            position = sources[worker.name].positions().get(name)
            if status is None or position is None or name not in status.partitions:
                self._since = None
                continue
            log = self._broker.group.topic.log(self._partition)
            if not log.positions or log.positions[-1] < position:
                self._filled.append(log.end)
                self._broker.skip(1, partition=self._partition, size=_FILLER)
            self._compare(worker)
        await anyio.sleep(_EVERY)

    def _compare(self, worker: Worker) -> None:
        now = self._world.now
        found = worker.consumer.status().partitions[f"{self._broker.topic}/{self._partition}"]
        oldest, named = found.oldest, found.expiring
        danger = oldest is not None and oldest.age >= 1.0 and self._newer(oldest.position) >= 0.9 * self._keeps
        if oldest is None or named is not None or not danger:
            self._since = None
        else:
            at = found.epoch, oldest.position
            if self._since is None or self._since[0] != at:
                self._since = at, now
            if now - self._since[1] > _SLACK:
                newer = self._newer(oldest.position)
                self._world.find("DeletionTold", f"{worker.name}: {oldest} and {newer} of {self._keeps} newer bytes")
        if named is not None:
            newer = self._newer(named.position)
            if newer < 0.9 * self._keeps - _PACE * (2 * _PERIOD + _SLACK):
                self._world.find("DeletionIsNear", f"{worker.name}: {named} and {newer} of {self._keeps} newer bytes")

    def _newer(self, position: int) -> int:
        records = self._broker.group.topic.log(self._partition).records.values()
        published = sum(record.size for record in records if record.position > position)
        return published + _FILLER * sum(filled > position for filled in self._filled)
