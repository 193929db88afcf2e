"""A source in memory of a partitioned queue, whose topics have several partitions each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from lanes import PartitionedQueue, SourceTraits
from lanes.core.types import PartitionId
from memsource import MemoryBroker, MemorySource

SPLIT = 2


class QueueSource(MemorySource):
    """A source whose partition n belongs to topic n // 2 of a queue. Each topic has two partitions."""

    def __init__(self, broker: MemoryBroker, *, assigned: Iterable[int] | None = None) -> None:
        self.queue = PartitionedQueue("q", len(broker.partitions) // SPLIT)
        super().__init__(broker, assigned=assigned)

    def topic(self, number: int) -> str:
        return self.queue.names[number // SPLIT]

    def _place(self, number: int) -> PartitionId:
        return PartitionId(self.topic(number), number)

    async def open(self) -> SourceTraits:
        return replace(await super().open(), queues=(self.queue,))
