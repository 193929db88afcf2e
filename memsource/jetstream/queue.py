"""A partitioned queue in a JetStream stream as data: each physical queue has its subjects and its durable.

The members form a cohort over the physical queues. As in the adapter, the cohort stores its number of partitions, and
refuses a member with another number. The number can change only while no member lives. Producers may use another
number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from lanes.clock import Clock, monotonic
from lanes.core.types import PartitionId, Room
from lanes.errors import ConfigError
from lanes.queues.partitioned import PartitionedQueue, Route
from lanes.queues.registered import queue_partitions
from lanes.queues.stranded import QueueFacts, Stranded
from lanes.source import SourceEvent, SourceTraits
from memsource.jetstream.broker import JetStreamBroker
from memsource.jetstream.pull_consumer import ConsumerSettings
from memsource.jetstream.source import JetStreamMemberSource
from memsource.memory.stranded_looks import GROUP, StrandedLooks


class JetStreamQueuePersonality(JetStreamBroker):
    """A stream with the subjects of the physical queues of one logical queue, and the cohort that reads them.

    Partition n of the simulation has the subjects of partition n of the queue. The stream stores all subjects up to the
    largest width.

    Args:
        name: Name of the logical queue.
        most: Number of physical queues, the largest width of producers and members.
        width: Width of the producers and of the first members.
        settings: Settings of all durables; None = defaults.

    Attributes:
        names: Names of the physical queues.
        producers: The queue as the producers know it.
        workers: The queue of the next sources.
        rolling: False, because all members of a cohort have the same width.
        finished_from: Number of the first partition that the operator has found finished; None = no partition. The
            server has all acknowledgements of the finished partitions, so no acknowledgement can be lost.
    """

    rolling = False
    finished_from: int | None = None

    def __init__(
        self, name: str = "updates", *, most: int = 8, width: int = 1, settings: ConsumerSettings | None = None
    ) -> None:
        super().__init__(most, topic=name, settings=settings)
        self.names: Final = PartitionedQueue(name, most).names
        self.producers = self.workers = PartitionedQueue(name, width)
        self._stored: int | None = None
        self._widths: dict[str, int] = {}

    def source(self, member: str, clock: Clock = monotonic) -> JetStreamQueueSource:
        """Create the source of a new member, which reads the physical queues of ``workers``."""
        numbers = frozenset(self.names.index(name) for name in queue_partitions([self.workers]))
        self._widths[member] = self.workers.partitions
        return JetStreamQueueSource(self, f"{member}#{len(self._by_lease) + 1}", clock, self.workers, numbers)

    def join(self, queue: PartitionedQueue, numbers: frozenset[int]) -> None:
        """Store the number of partitions if the server stores no number.

        Raises ``ConfigError`` if the server stores another number.
        """
        if self._stored is None:
            self._stored = queue.partitions
            self.cohort.planned = numbers
        if self._stored != queue.partitions:
            raise ConfigError(
                f"cohort {GROUP!r} has {self._stored} partitions, and this member has {queue.partitions}: start all "
                "members with the same number"
            )

    def forget_width(self) -> bool:
        """Delete the stored number of partitions, as ``lanes queue … --apply`` does.

        Returns False if a member may live.
        """
        if self.cohort.members:
            return False
        self._stored = None
        return True

    def redeliver(self, partition: int, now: float) -> bool:
        """Lose an acknowledgement; see ``JetStreamBroker.redeliver``.

        Returns False for a free or finished partition.
        """
        if self.finished_from is not None and partition >= self.finished_from:
            return False
        return self.cohort.owner(partition) is not None and super().redeliver(partition, now)

    def width_of(self, member: str) -> int:
        """The number of physical queues that a member reads."""
        return self._widths[member]

    def place(self, number: int) -> PartitionId:
        """The partition with number n, named after its physical queue."""
        return PartitionId(self.names[number], number)

    def name_of(self, number: int) -> str:
        """The physical queue of partition n."""
        return self.names[number]

    def partition_for(self, route: Route) -> int:
        """The partition to which a producer writes the message of a route."""
        return route.partition

    def facts(self, names: Sequence[str]) -> Mapping[str, QueueFacts]:
        """The facts of the physical queues with these names, as the server knows them."""
        left = Counter(record.partition for record in self.unfinished)
        return {
            name: QueueFacts(
                size=1,
                messages=len(self.topic.log(number).positions),
                unfinished={GROUP: left[number]},
                readers={GROUP: int(self.cohort.owner(number) is not None)},
            )
            for number, name in enumerate(self.names)
            if name in names
        }

    @property
    def known_names(self) -> frozenset[str]:
        """Names of the physical queues for which the cohort has had a consumer."""
        return frozenset(name for number, name in enumerate(self.names) if self.cohort.epoch(number))


class JetStreamQueueSource(JetStreamMemberSource):
    """The source of a member that reads a partitioned queue; see ``JetStreamMemberSource``.

    A waiting ``receive`` checks for stranded messages every 5 s.

    Args:
        broker: The broker.
        member: Name of the member, with ``#`` and a number.
        clock: Function that returns the broker's time in seconds.
        queue: The queue as this member knows it.
        numbers: Numbers of the partitions of the queue.

    Attributes:
        queue: The queue as this member knows it.
    """

    def __init__(
        self,
        broker: JetStreamQueuePersonality,
        member: str,
        clock: Clock,
        queue: PartitionedQueue,
        numbers: frozenset[int],
    ) -> None:
        super().__init__(broker, member, clock)
        self.queue = queue
        self._numbers = numbers
        self._physical = broker
        self._looks = StrandedLooks(queue, broker, clock, broker.wake_at)

    async def open(self) -> SourceTraits:
        """Join the cohort; see ``JetStreamMemberSource.open``. Raises ``ConfigError`` for another number."""
        self._physical.join(self.queue, self._numbers)
        traits = await super().open()
        self._looks.look_after()
        return replace(traits, queues=(self.queue,))

    def stranded(self) -> Sequence[Stranded]:
        """Messages that no member of the cohort reads; see ``lanes.source.Stranding.stranded``."""
        return self._looks.found

    def _next(self, room: Room) -> list[SourceEvent]:
        self._alive()
        if self.broker.cohort.runs(self.member):
            self._looks.look_if_due()
        return super()._next(room)
