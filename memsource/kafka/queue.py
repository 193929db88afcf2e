"""A partitioned queue on a Kafka broker as data: each physical queue is a topic, and members read those of their width.

Producers and members may use different widths, as during a change of the number of partitions. The sources of the
members look for stranded messages, by the functions that the real sources use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from lanes.clock import Clock, monotonic
from lanes.core.types import PartitionId, Room
from lanes.queues.partitioned import PartitionedQueue
from lanes.queues.registered import queue_partitions
from lanes.queues.stranded import LOOK_EVERY, QueueFacts, Stranded, names_beyond, stranded_in
from lanes.source import SourceEvent, SourceTraits
from memsource.kafka.coordinator import KafkaSettings
from memsource.kafka.source import KafkaMemberSource, KafkaPersonality

GROUP: Final = "g"
"""Name of the group."""

_CONFIRMED_AFTER: Final = 1.0
"""Seconds until the second look at newly found messages, because a rebalance may take a topic away for a moment."""


class QueuePersonality(KafkaPersonality):
    """A broker with the physical queues of one logical queue, as topics with one Kafka partition each.

    Partition n of the simulation is the topic of partition n of the queue. All topics up to the largest width exist.

    Args:
        name: Name of the logical queue.
        most: Number of topics, the largest width of producers and members.
        width: Width of the producers and of the first members.
        settings: Settings of the broker and its clients; None = the defaults of ``KafkaSettings``.

    Attributes:
        names: Names of the topics.
        producers: The queue as the producers know it.
        workers: The queue as members know it whose sources are made from now on.
    """

    def __init__(
        self, name: str = "updates", *, most: int = 8, width: int = 1, settings: KafkaSettings | None = None
    ) -> None:
        super().__init__(most, topic=name, settings=settings, assignor=self._assign)
        self.names: Final = PartitionedQueue(name, most).names
        self.producers = self.workers = PartitionedQueue(name, width)
        self._read: dict[str, frozenset[int]] = {}

    def source(self, member: str, clock: Clock = monotonic) -> QueueMemberSource:
        """Make the source of a new member, which reads the topics of ``workers``."""
        topics = queue_partitions([self.workers])
        self._read[member] = frozenset(self.names.index(name) for name in topics)
        return QueueMemberSource(self, member, clock, self.workers)

    def width_of(self, member: str) -> int:
        """The number of topics that a member reads."""
        return len(self._read[member])

    def place(self, number: int) -> PartitionId:
        """The partition n of the topic of partition n."""
        return PartitionId(self.names[number], number)

    def facts(self, names: Sequence[str]) -> Mapping[str, QueueFacts]:
        """The facts of the topics with these names, as the broker knows them."""
        left = Counter(record.partition for record in self.unfinished)
        return {
            name: QueueFacts(
                size=1,
                messages=len(self.group.topic.log(number).positions),
                unfinished={GROUP: left[number]},
                readers={GROUP: int(self.group.owner(number) is not None)},
            )
            for number, name in enumerate(self.names)
            if name in names
        }

    @property
    def committed_topics(self) -> frozenset[str]:
        """Names of the topics in which the group has a committed position."""
        return frozenset(name for number, name in enumerate(self.names) if self.committed(number) is not None)

    def _assign(self, owners: Sequence[str | None], members: Sequence[str]) -> list[str | None]:
        """Give each topic to a member that reads it, with few moves and about even shares; pure and deterministic."""
        # The coordinator numbers the processes of a member. A member that only joins and leaves reads every topic.
        every = frozenset(range(len(owners)))
        reads = {member: self._read.get(member.rpartition("#")[0], every) for member in members}
        most = -(-len(owners) // max(1, len(members)))
        loads: Counter[str] = Counter()
        target: list[str | None] = [None] * len(owners)
        for number, owner in enumerate(owners):
            if owner in reads and number in reads[owner] and loads[owner] < most:
                target[number] = owner
                loads[owner] += 1
        for number, owner in enumerate(target):
            able = [member for member in members if number in reads[member]]
            if owner is None and able:
                target[number] = min(able, key=lambda member: loads[member])
                loads[target[number] or ""] += 1
        return target


class QueueMemberSource(KafkaMemberSource):
    """The source of a member that reads the topics of a partitioned queue; see ``KafkaMemberSource``.

    A waiting ``receive`` looks for stranded messages every 5 s.

    Args:
        broker: The broker.
        member: Name of the member.
        clock: Clock of the process, in seconds.
        queue: The queue as this member knows it.

    Attributes:
        queue: The queue as this member knows it.
    """

    def __init__(self, broker: QueuePersonality, member: str, clock: Clock, queue: PartitionedQueue) -> None:
        super().__init__(broker, member, clock)
        self.queue = queue
        self._topics = broker
        self._found: tuple[Stranded, ...] = ()
        self._doubted: frozenset[str] = frozenset()
        self._next_look = 0.0

    async def open(self) -> SourceTraits:
        """Join the group; see ``KafkaMemberSource.open``."""
        traits = await super().open()
        self._look_after(LOOK_EVERY)
        return replace(traits, queues=(self.queue,))

    def stranded(self) -> Sequence[Stranded]:
        """Messages that no member of the group reads; see ``lanes.source.Stranding.stranded``."""
        return self._found

    def _next(self, room: Room) -> list[SourceEvent]:
        if self.client.running and self.broker.up and self.client.clock() >= self._next_look:
            self._look()
        return super()._next(room)

    def _look(self) -> None:
        names = names_beyond(self.queue, self._topics.committed_topics)
        found = {each.name: each for each in stranded_in(self.queue, self._topics.facts(names), GROUP)}
        before = {each.name for each in self._found}
        self._found = tuple(each for name, each in found.items() if name in before or name in self._doubted)
        self._doubted = frozenset(found)
        self._look_after(LOOK_EVERY if len(found) == len(self._found) else _CONFIRMED_AFTER)

    def _look_after(self, seconds: float) -> None:
        self._next_look = self.client.clock() + seconds
        self.broker.wait_until(self._next_look)
