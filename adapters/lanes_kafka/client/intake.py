"""Converts the messages of a client to events: consecutive messages of a partition, and gaps between messages.

The code runs in the thread that owns the client.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from confluent_kafka import Consumer, KafkaError
from confluent_kafka import Message as Raw

from lanes.core.types import Partition, PartitionId
from lanes.source import Delivered, Progressed
from lanes_kafka.client.group import Assignment, Group
from lanes_kafka.client.lag import cached_end
from lanes_kafka.client.records import KeyFunction, messages, offset_of

_READ_PAST_LIMIT: Final = 1_000
"""Maximum number of messages read to find whether a message or a gap follows the last message of a partition."""


@dataclass(eq=False, repr=False)
class Intake:
    """Reads the partitions of a group from one client.

    Attributes:
        client: Client whose messages the object reads.
        group: Assignments of the client.
        key: Function that returns the key of a message.
        on_error: Function that receives each error that the client returns in place of a message.
        average: Moving average of the size of a message, in bytes.
    """

    client: Consumer
    group: Group
    key: KeyFunction
    on_error: Callable[[KafkaError, Raw], None]
    average: float = field(default=1_024.0, init=False)

    def read(self, count: int, timeout: float) -> tuple[list[Delivered], bool]:
        """Read messages, and serve the client's callbacks during the wait.

        The call blocks for up to ``timeout`` seconds for the first message. The call does not wait for further
        messages.

        Args:
            count: Maximum number of messages.
            timeout: Maximum time to wait for the first message, in seconds.

        Returns:
            The messages as runs, and whether the client may have more messages.
        """
        if not timeout:
            raws = self._consume(count, 0.0)
            return self._events(raws), len(raws) >= count
        # A ``consume`` call for several messages waits until it has them all, so ask for one message first.
        raws = self._consume(1, timeout)
        # Record the end of this message first. A callback of the next ``consume`` would otherwise treat the message as
        # a gap.
        events = self._events(raws)
        if events and count > 1:
            raws = self._consume(count - 1, 0.0)
            events = _joined(events[0], self._events(raws))
            count -= 1
        return events, len(raws) >= count

    def progress(self) -> list[Progressed]:
        """Find gaps that the client has skipped: transaction markers, and compacted or aborted messages.

        Returns:
            A ``Progressed`` event for each partition whose last message precedes a gap, with the position after the
            gap.
        """
        owned = [each for each in self.group.owned.values() if not each.released]
        if not owned:
            return []
        events = []
        for each, found in zip(owned, self.client.position([one.at() for one in owned]), strict=True):
            # After a seek the client has no position until it reads again.
            if found.offset > each.position:
                each.positions_read += found.offset - each.position
                each.position = found.offset
                events.append(Progressed(each.partition, found.offset))
        return events

    def gap_after(self, partition: Partition, committed: int) -> int | None:
        """Return the end of the gap that begins at ``committed``; None if no gap begins there.

        A callback may call this method. Inside a callback, the object does not know the messages of the running
        ``consume`` yet.
        """
        assignment = self.group.assignment(partition)
        if assignment is None or assignment.end > committed:
            return None
        (found,) = self.client.position([assignment.at()])
        return found.offset if found.offset > committed else None

    def read_past(self, partition: Partition, committed: int, patience: float) -> list[Delivered]:
        """Read a partition beyond its last message during its release, to find a gap at its end.

        The client may read the last message before the transaction marker that follows it. The call ends when it finds
        a message or a gap after ``committed``, or when the log ends at ``committed``. A revocation may end the
        assignment during the call. A callback must not call this method. Reads at most ``_READ_PAST_LIMIT`` messages.

        Args:
            partition: The assignment.
            committed: Committed position of the partition.
            patience: Maximum time to block, in seconds.

        Returns:
            The messages of other partitions that the call has read.
        """
        assignment = self.group.assignment(partition)
        others: list[Delivered] = []
        if assignment is None:
            return others
        deadline, left = time.monotonic() + patience, _READ_PAST_LIMIT
        # A revocation during this call must not wait for this release, which continues only after the call.
        assignment.returning = True
        try:
            while self._is_unknown(assignment, committed) and left > 0 and (seconds := deadline - time.monotonic()) > 0:
                if assignment.paused:
                    self.group.set_paused(self.client, [assignment], False)
                events, _ = self.read(min(left, 100), min(seconds, 0.02))
                left -= sum(len(event.run) for event in events)
                # Drop messages of the partition itself, because the release is running.
                others += [event for event in events if event.partition is not partition]
        finally:
            assignment.returning = False
        return others

    def _is_unknown(self, assignment: Assignment, committed: int) -> bool:
        return (
            self.group.assignment(assignment.partition) is not None
            and assignment.end <= committed < cached_end(self.client, assignment)
            and self.gap_after(assignment.partition, committed) is None
        )

    def _consume(self, count: int, timeout: float) -> list[Raw]:
        rebalances = self.group.rebalances
        raws = self.client.consume(count, timeout)
        return self._without_stale(raws, rebalances) if raws and self.group.rebalances != rebalances else raws

    def _without_stale(self, raws: list[Raw], rebalances: int) -> list[Raw]:
        """Drop messages of newly assigned partitions, because a former assignment may own these messages."""
        again: dict[PartitionId, Assignment] = {}
        kept = []
        for raw in raws:
            assignment = self.group.owned.get(partition_id_of(raw)) if raw.error() is None else None
            if assignment is not None and assignment.rebalance > rebalances:
                again[assignment.partition.id] = assignment
            else:
                kept.append(raw)
        for assignment in again.values():
            # Each message may belong to either assignment, so read all these messages again.
            self.client.seek(assignment.at(assignment.position))
        return kept

    def _events(self, raws: list[Raw]) -> list[Delivered]:
        events: list[Delivered] = []
        runs: dict[PartitionId, list[Raw]] = {}
        last_topic: str | None = None
        last_number: int | None = None
        run: list[Raw] = []
        for raw in raws:
            error = raw.error()
            if error is not None:
                # The error may move a position, so process the messages before the error first.
                events += self._runs(runs)
                runs, last_topic, last_number = {}, None, None
                self.on_error(error, raw)
                continue
            topic, number = raw.topic(), raw.partition()
            if number != last_number or topic != last_topic:
                last_topic, last_number = topic, number
                run = runs.setdefault(partition_id_of(raw), [])
            run.append(raw)
        return events + self._runs(runs)

    def _runs(self, runs: dict[PartitionId, list[Raw]]) -> list[Delivered]:
        return [event for one, run in runs.items() if (event := self._delivered(one, run)) is not None]

    def _delivered(self, partition_id: PartitionId, run: list[Raw]) -> Delivered | None:
        assignment = self.group.owned.get(partition_id)
        if assignment is None or assignment.drained:
            # The messages belong to a former assignment, or to a partition during its release.
            return None
        if offset_of(run[0]) < assignment.position:
            run = [raw for raw in run if offset_of(raw) >= assignment.position]
            if not run:
                return None
        found, size = messages(assignment.partition, run, self.key)
        end = found[-1].position + 1
        assignment.positions_read += end - assignment.position
        assignment.bytes_read += size
        assignment.position = assignment.end = end
        self.average += (size / len(found) - self.average) * min(1.0, len(found) / 100)
        return Delivered(assignment.partition, found, size)


def _joined(first: Delivered, events: list[Delivered]) -> list[Delivered]:
    """Merge the first message into the next event of its assignment, to save a delivery."""
    for index, event in enumerate(events):
        if event.partition is first.partition:
            events[index] = Delivered(event.partition, first.run + event.run, first.size + event.size)
            return events
    return [first, *events]


def partition_id_of(raw: Raw) -> PartitionId:
    """Return the partition of a message, or of an error that concerns one partition."""
    topic, number = raw.topic(), raw.partition()
    assert topic is not None and number is not None, "a fetched message has a topic and a partition"
    return PartitionId(topic, number)
