"""A partitioned queue on a Kafka broker as data: each physical queue is a topic.

A member reads the topics below its width. Producers and members may use different widths, as during a change of the
number of partitions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from lanes.clock import Clock, monotonic
from lanes.core.ring import lane
from lanes.core.types import PartitionId, Room
from lanes.queues.partitioned import PartitionedQueue, Route
from lanes.queues.registered import queue_partitions
from lanes.queues.stranded import QueueFacts, Stranded
from lanes.source import SourceEvent, SourceTraits
from memsource.kafka.coordinator import KafkaSettings
from memsource.kafka.source import KafkaMemberSource, KafkaPersonality
from memsource.memory.stranded_looks import GROUP, StrandedLooks


class QueuePersonality(KafkaPersonality):
    """A broker with the physical queues of one logical queue, as topics.

    Partition n of the simulation is a Kafka partition of topic n // ``split``. All topics up to the largest width
    exist.

    Args:
        name: Name of the logical queue.
        most: Number of topics, the largest width of producers and members.
        width: Width of the producers and of the first members.
        split: Number of Kafka partitions of each topic, 1 or more.
        settings: Settings of the broker and its clients; None = the defaults of ``KafkaSettings``.

    Attributes:
        names: Names of the topics.
        split: Number of Kafka partitions of each topic.
        producers: The queue as the producers know it.
        workers: The queue of the next sources.
        rolling: True, because members of different widths may run at the same time.
    """

    rolling = True

    def __init__(
        self,
        name: str = "updates",
        *,
        most: int = 8,
        width: int = 1,
        split: int = 1,
        settings: KafkaSettings | None = None,
    ) -> None:
        super().__init__(most * split, topic=name, settings=settings, assignor=self._assign)
        self.names: Final = PartitionedQueue(name, most).names
        self.split: Final = split
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
        """The partition with number n, in the topic that contains the partition."""
        return PartitionId(self.name_of(number), number)

    def name_of(self, number: int) -> str:
        """The topic of partition n."""
        return self.names[number // self.split]

    def partition_for(self, route: Route) -> int:
        """The partition to which a producer writes the message of a route. The key decides the Kafka partition."""
        within = 0 if route.key is None else lane(route.key, self.split)
        return route.partition * self.split + within

    def facts(self, names: Sequence[str]) -> Mapping[str, QueueFacts]:
        """The facts of the topics with these names, as the broker knows them."""
        left = Counter(self.name_of(record.partition) for record in self.unfinished)
        numbers = {name: [n for n in self.partitions if self.name_of(n) == name] for name in names}
        return {
            name: QueueFacts(
                size=self.split,
                messages=sum(len(self.group.topic.log(number).positions) for number in own),
                unfinished={GROUP: left[name]},
                readers={GROUP: int(all(self.group.owner(number) is not None for number in own))},
            )
            for name, own in numbers.items()
            if own
        }

    @property
    def known_names(self) -> frozenset[str]:
        """Names of the topics in which the group has a committed position."""
        return frozenset(self.name_of(number) for number in self.partitions if self.committed(number) is not None)

    def _assign(self, owners: Sequence[str | None], members: Sequence[str]) -> list[str | None]:
        """Give each partition to a member that reads its topic, with few moves and about even shares; deterministic."""
        # The coordinator numbers the processes of a member. A member that only joins and leaves reads every topic.
        every = frozenset(range(len(self.names)))
        reads = {member: self._read.get(member.rpartition("#")[0], every) for member in members}
        most = -(-len(owners) // max(1, len(members)))
        loads: Counter[str] = Counter()
        target: list[str | None] = [None] * len(owners)
        for number, owner in enumerate(owners):
            if owner in reads and number // self.split in reads[owner] and loads[owner] < most:
                target[number] = owner
                loads[owner] += 1
        for number, owner in enumerate(target):
            able = [member for member in members if number // self.split in reads[member]]
            if owner is None and able:
                target[number] = min(able, key=lambda member: loads[member])
                loads[target[number] or ""] += 1
        return target


class QueueMemberSource(KafkaMemberSource):
    """The source of a member that reads the topics of a partitioned queue; see ``KafkaMemberSource``.

    A waiting ``receive`` checks for stranded messages every 5 s.

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
        self._looks = StrandedLooks(queue, broker, self.client.clock, broker.wait_until)

    async def open(self) -> SourceTraits:
        """Join the group; see ``KafkaMemberSource.open``."""
        traits = await super().open()
        self._looks.look_after()
        return replace(traits, queues=(self.queue,))

    def stranded(self) -> Sequence[Stranded]:
        """Messages that no member of the group reads; see ``lanes.source.Stranding.stranded``."""
        return self._looks.found

    def _next(self, room: Room) -> list[SourceEvent]:
        if self.client.running and self.broker.up:
            self._looks.look_if_due()
        return super()._next(room)
