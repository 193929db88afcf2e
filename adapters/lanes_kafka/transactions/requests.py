"""The requests to the thread of the transactions, and the counts of their outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from confluent_kafka import TopicPartition

from lanes.core.types import Partition
from lanes.outputs.publisher import Output
from lanes_kafka.bridge import Answer
from lanes_kafka.transactions.coverage import Coverage


@dataclass(slots=True, eq=False)
class Request:
    """The position of one partition, and the outputs that it covers.

    Attributes:
        partition: The assignment.
        coverage: The position to store.
        outputs: The outputs, in the order in which the broker must receive them.
        answer: The answer to the event loop.
        arrived: The outputs that the broker has committed; None = the request has no outcome yet.
        committed: Whether the broker has stored the position.
    """

    partition: Partition
    coverage: Coverage
    outputs: Sequence[Output]
    answer: Answer[None]
    arrived: Sequence[Output] | None = None
    committed: bool = False

    @property
    def offset(self) -> TopicPartition:
        """The position in the client's own type."""
        return TopicPartition(*self.partition.id, self.coverage.floor, self.coverage.metadata)


@dataclass(slots=True, eq=False)
class Counts:
    """The transactions of one process.

    Attributes:
        committed: Number of committed transactions.
        aborted: Number of aborted transactions.
        outputs: Number of committed outputs.
        unknown: Number of commits whose outcome the stored positions had to tell.
        restarts: Number of producers after the first.
    """

    committed: int = 0
    aborted: int = 0
    outputs: int = 0
    unknown: int = 0
    restarts: int = 0
