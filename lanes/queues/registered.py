"""The physical queues of the partitioned queues that a source reads.

Labels with the name of a logical queue use this mapping. The mapping does not parse names, so a queue that a user names
``orders__p1`` belongs to no logical queue.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from lanes.queues.partitioned import PartitionedQueue


class QueuePartition(NamedTuple):
    """A physical queue.

    Attributes:
        queue: Name of its logical queue.
        number: Number of its partition in the logical queue.
    """

    queue: str
    number: int


def queue_partitions(queues: Iterable[PartitionedQueue]) -> dict[str, QueuePartition]:
    """Return the physical queues by their names."""
    return {name: QueuePartition(queue.name, number) for queue in queues for number, name in enumerate(queue.names)}
