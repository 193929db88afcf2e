"""JetStream as data: a stream in partitions, one durable for each partition, and the cohort that shares the partitions.

The server checks no ownership, so a former owner of a partition may still acknowledge a delivery. Sources put the
messages of a takeover in order; see ``memsource.jetstream.takeover``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

from lanes.clock import Clock
from lanes.core.types import Partition, PartitionId
from memsource.jetstream.cohort import Cohort
from memsource.jetstream.pull_consumer import ConsumerSettings, PullConsumer
from memsource.memory.broker import KeepsDeadLetters
from memsource.memory.topic import Record, WatchedTopic
from memsource.personality import PersonalityName


class Member(Protocol):
    """The source of a member, as the broker sees the source.

    Attributes:
        member: Name of the member, with ``#`` and a number.
        clock: Function that returns the broker's time in seconds.
    """

    member: str
    clock: Clock

    @property
    def announced(self) -> Mapping[tuple[int, int], Partition]:
        """All assignments of the member, by partition number and epoch."""

    def sever(self) -> None:
        """End the process of the member. Idempotent."""


class JetStreamBroker(WatchedTopic, KeepsDeadLetters):
    """A stream in partitions, each with a separate durable. ``JetStreamPersonality`` adds the sources of the members.

    Positions are sequences of the stream, from 1. The positions of a partition have gaps where other partitions have
    messages. No method blocks. Not thread-safe.

    Args:
        partitions: Number of partitions, 1 or more. Partition numbers begin at 0.
        topic: Name of the stream.
        settings: Settings of all durables; None = defaults.
        lease: Seconds that a member keeps its partitions without a renewal, more than 0.
        revoke_timeout: Seconds after which the cohort takes a revoked partition that its owner has not released, more
            than 0.

    Attributes:
        topic: The messages.
        cohort: The cohort.
        restarts: Number of restarts of the server.

    Raises:
        ConfigError: ``partitions`` or ``topic`` is invalid.
        ValueError: A time is not more than 0.
    """

    name: PersonalityName = "jetstream"
    takes_in_at_once = False

    def __init__(
        self,
        partitions: int = 1,
        *,
        topic: str = "memory",
        settings: ConsumerSettings | None = None,
        lease: float = 10.0,
        revoke_timeout: float = 30.0,
    ) -> None:
        super().__init__(partitions, topic)
        self.settings = settings or ConsumerSettings()
        self.restarts = 0
        for log in self.topic.logs:
            log.end = 1
        self._consumers = [PullConsumer(log, self.settings, self._changed) for log in self.topic.logs]
        self.cohort = Cohort(partitions, lease=lease, revoke_timeout=revoke_timeout, changed=self._changed)
        self._sources: dict[str, Member] = {}
        self._by_lease: dict[str, Member] = {}
        self._wakes: set[float] = set()
        self._lost_acks = 0

    def __repr__(self) -> str:
        return (
            f"<JetStreamBroker {self.topic.name}: {len(self._consumers)} partitions, {self.topic.published} messages>"
        )

    # --- producers

    def _appended(self, record: Record) -> None:
        for log in self.topic.logs:
            log.end = record.position + 1

    def skip(self, count: int, *, partition: int = 0) -> None:
        """Leave a gap of ``count`` sequences in all partitions, as deleted messages do."""
        self.topic.skip(count, partition=partition)
        for log in self.topic.logs:
            log.end = self.topic.logs[partition].end

    # --- consumers

    @property
    def partitions(self) -> range:
        """The numbers of the partitions."""
        return self.topic.partitions

    @property
    def records(self) -> list[Record]:
        """All published messages, by partition and sequence."""
        return [log.records[position] for log in self.topic.logs for position in log.positions]

    @property
    def taken(self) -> list[tuple[str, Partition]]:
        """Each assignment that the broker took from its member; see ``memsource.personality.Personality.taken``."""
        known = [(name, self._by_lease[name].announced.get((slot, epoch))) for name, slot, epoch in self.cohort.taken]
        return [(name.rpartition("#")[0], partition) for name, partition in known if partition is not None]

    @property
    def unfinished(self) -> list[Record]:
        """The unacknowledged messages, delivered or not."""
        return [
            log.records[sequence]
            for log, consumer in zip(self.topic.logs, self._consumers, strict=True)
            for sequence in consumer.unfinished
        ]

    def place(self, number: int) -> PartitionId:
        """Return the name of partition n."""
        return PartitionId(self.topic.name, number)

    def consumer(self, partition: int) -> PullConsumer:
        """Return the durable of a partition. Raises ``IndexError`` for an unknown partition."""
        self.topic.log(partition)
        return self._consumers[partition]

    def introduce(self, source: Member) -> None:
        """Add the source of a new process. The name of the member then refers to this process."""
        self._sources[source.member.rpartition("#")[0]] = self._by_lease[source.member] = source

    # --- faults

    def crash(self, member: str, now: float) -> None:
        """End a member's process. The member's partitions become free when its lease has expired. Idempotent."""
        source = self._sources.get(member)
        if source is not None:
            source.sever()
            self.cohort.crash(source.member, now)

    def freeze(self, member: str, until: float) -> None:
        """Stop a member's process until ``until``. Until then the process renews no lease and receives no message."""
        source = self._sources.get(member)
        if source is not None:
            self.cohort.freeze(source.member, source.clock(), until)

    def rebalance(self, now: float) -> bool:
        """Plan the owners again, and revoke at least one partition if possible.

        Returns whether the cohort revoked a partition.
        """
        return self.cohort.rebalance(now)

    def lose(self, partition: int, now: float) -> bool:
        """Take a partition from its owner without a revocation. Returns False for a free partition."""
        return self.cohort.lose(partition, now)

    def redeliver(self, partition: int, now: float) -> bool:
        """Redeliver the last acknowledged or the lowest unacknowledged message, alternately.

        Returns False if the broker has no message to redeliver.
        """
        consumer = self.consumer(partition)
        lowest = next(iter(consumer.unacknowledged), None)
        candidates = [consumer.last_acked, lowest]
        if self._lost_acks % 2:
            candidates.reverse()
        self._lost_acks += 1
        return any(sequence is not None and consumer.lose_ack(sequence, now) for sequence in candidates)

    def restart(self, now: float) -> bool:
        """Kill and restart the only server, which loses its connections and its changes of the last 0.1 s."""
        self.restarts += 1
        for consumer in self._consumers:
            consumer.kill(now)
        self._changed()
        return True

    # --- time

    def advance(self, now: float) -> None:
        """Act on every ``ack_wait``, lease, deadline and takeover step that is due."""
        for consumer in self._consumers:
            consumer.advance(now)
        self.cohort.advance(now)
        due = {at for at in self._wakes if at <= now}
        if due:
            self._wakes -= due
            self._changed()

    def next_at(self) -> float:
        """Return the time of the next due action; infinity = no action is due."""
        timers = (consumer.next_at() for consumer in self._consumers)
        return min(self.cohort.next_at(), *timers, min(self._wakes, default=math.inf))

    def wake_at(self, at: float) -> None:
        """Call the watchers at the time ``at``. Idempotent."""
        self._wakes.add(at)
