"""What a client has read, made events: a run for each partition, and how far there is nothing more.

Used in the thread that owns the client.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from confluent_kafka import Consumer, KafkaError
from confluent_kafka import Message as Raw

from lanes.core.types import Partition, PartitionId
from lanes.source import Delivered, Progressed
from lanes_kafka.client.group import Assignment, Group
from lanes_kafka.client.lag import heard
from lanes_kafka.client.records import KeyFunction, messages, offset_of

_BEHIND: Final = 1_000
"""Messages that are read to find what lies behind the last one of a partition, at most."""


class Intake:
    """Reads from one client what its ``group`` owns. ``on_error``: called with a message that is an error.

    ``average``: bytes of a message, roughly, of late.
    """

    def __init__(
        self, client: Consumer, group: Group, key: KeyFunction, on_error: Callable[[KafkaError, Raw], None]
    ) -> None:
        self.average = 1_024.0
        self._client = client
        self._group = group
        self._key = key
        self._on_error = on_error

    def read(self, count: int, timeout: float) -> tuple[list[Delivered], bool]:
        """At most ``count`` messages, as runs, and whether that many came, so that there may be more; calls back what
        there is to be called back.

        Blocks up to ``timeout`` seconds for the first, and no longer for the others.
        """
        # A call that asks for a batch waits for all of it, so one message first.
        raws = self._consume(1, timeout)
        events = self._events(raws)
        if events and count > 1:
            raws = self._consume(count - 1, 0.0)
            events += self._events(raws)
            count -= 1
        return events, len(raws) >= count

    def progress(self) -> list[Progressed]:
        """Partitions in which more was read than messages: gaps at the end of what there is, from transaction markers,
        compaction and aborted messages."""
        owned = [each for each in self._group.owned.values() if not each.released]
        if not owned:
            return []
        events = []
        for each, found in zip(owned, self._client.position([one.at() for one in owned]), strict=True):
            # After a seek there is none until something is read.
            if found.offset > each.position:
                each.position = found.offset
                events.append(Progressed(each.partition, found.offset))
        return events

    def gap_behind(self, partition: Partition, committed: int) -> int | None:
        """Up to where there is no message behind ``committed``; None where nothing was found there, or a message.

        In a callback as well: what the call around it has read already is in no position before it returns.
        """
        assignment = self._group.owned.get(partition.id)
        if assignment is None or assignment.partition is not partition or assignment.end > committed:
            return None
        (found,) = self._client.position([assignment.at()])
        return found.offset if found.offset > committed else None

    def read_behind(self, partition: Partition, committed: int, patience: float) -> list[Delivered]:
        """Read on until it is known whether a message lies behind ``committed``, where the log goes on there: a marker
        may be read after its last message. A revoke that comes meanwhile takes the partition. Returns what was read of
        other partitions.

        Not in a callback. Blocks for ``patience`` seconds at most, and reads ``_BEHIND`` messages.
        """
        assignment = self._group.owned.get(partition.id)
        others: list[Delivered] = []
        if assignment is None or assignment.partition is not partition:
            return others
        deadline, left = time.monotonic() + patience, _BEHIND
        # A revoke within would wait for this release, which goes on behind it.
        assignment.returning = True
        try:
            while self._is_unknown(assignment, committed) and left > 0 and (seconds := deadline - time.monotonic()) > 0:
                if assignment.paused:
                    self._group.resume(self._client, [assignment])
                events, _ = self.read(min(left, 100), min(seconds, 0.02))
                left -= sum(len(event.run) for event in events)
                # Whoever gives it back wants nothing more of it.
                others += [event for event in events if event.partition is not partition]
        finally:
            assignment.returning = False
        return others

    def _is_unknown(self, assignment: Assignment, committed: int) -> bool:
        return (
            self._group.owned.get(assignment.partition.id) is assignment
            and assignment.end <= committed < heard(self._client, assignment)
            and self.gap_behind(assignment.partition, committed) is None
        )

    def _consume(self, count: int, timeout: float) -> list[Raw]:
        rounds = self._group.rounds
        raws = self._client.consume(count, timeout)
        return self._without_old(raws, rounds) if raws and self._group.rounds != rounds else raws

    def _without_old(self, raws: list[Raw], rounds: int) -> list[Raw]:
        """Without what may be of a former assignment, where a partition was assigned anew in the same call."""
        again: dict[PartitionId, Assignment] = {}
        kept = []
        for raw in raws:
            assignment = self._group.owned.get(partition_id_of(raw)) if raw.error() is None else None
            if assignment is not None and assignment.made > rounds:
                again[assignment.partition.id] = assignment
            else:
                kept.append(raw)
        for assignment in again.values():
            # Of which of the two it is nobody can tell: all of it is read again.
            self._client.seek(assignment.at(assignment.position))
        return kept

    def _events(self, raws: list[Raw]) -> list[Delivered]:
        events: list[Delivered] = []
        runs: dict[PartitionId, list[Raw]] = {}
        last: tuple[str | None, int | None] = (None, None)
        run: list[Raw] = []
        for raw in raws:
            error = raw.error()
            if error is not None:
                # What came before it comes before what it changes: it may move a position.
                events += self._runs(runs)
                runs, last = {}, (None, None)
                self._on_error(error, raw)
                continue
            where = (raw.topic(), raw.partition())
            if where != last:
                last = where
                run = runs.setdefault(partition_id_of(raw), [])
            run.append(raw)
        return events + self._runs(runs)

    def _runs(self, runs: dict[PartitionId, list[Raw]]) -> list[Delivered]:
        return [event for one, run in runs.items() if (event := self._delivered(one, run)) is not None]

    def _delivered(self, partition_id: PartitionId, run: list[Raw]) -> Delivered | None:
        assignment = self._group.owned.get(partition_id)
        if assignment is None or assignment.drained:
            # Of a former assignment.
            return None
        if offset_of(run[0]) < assignment.position:
            run = [raw for raw in run if offset_of(raw) >= assignment.position]
            if not run:
                return None
        found, size = messages(assignment.partition, run, self._key)
        assignment.position = assignment.end = found[-1].position + 1
        self.average += (size / len(found) - self.average) * min(1.0, len(found) / 100)
        return Delivered(assignment.partition, found, size)


def partition_id_of(raw: Raw) -> PartitionId:
    """Where a message, or an error of a partition, comes from."""
    topic, number = raw.topic(), raw.partition()
    assert topic is not None and number is not None, "it says where it comes from"
    return PartitionId(topic, number)
