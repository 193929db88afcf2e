"""The outputs of finished messages that wait for their transaction. All calls come from the event loop."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from lanes.core.types import Partition, PartitionId
from lanes.outputs.publisher import Output
from lanes_kafka.transactions.coverage import Coverage

OVERHEAD = 500
"""Bytes of memory of an output besides its key, value and headers, about."""


@dataclass(slots=True, eq=False)
class _OfPartition:
    """The outputs of one assignment, by the position of their message.

    Attributes:
        partition: The assignment.
        outputs: Outputs of the newest attempt of each message.
        refused: The attempts with a refused output, by position. No output of such an attempt is kept.
        size: Size of the outputs in memory, in bytes.
    """

    partition: Partition
    outputs: dict[int, list[Output]] = field(default_factory=dict)
    refused: dict[int, int] = field(default_factory=dict)
    size: int = 0


class WaitingOutputs:
    """The outputs of one consumer.

    A transaction removes its outputs only after the broker has committed it, so an aborted transaction loses no output.

    Args:
        most: Size in bytes from which on the object has no room.

    Attributes:
        size: Size of all outputs in memory, in bytes.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._partitions: dict[PartitionId, _OfPartition] = {}
        self.size = 0

    def assign(self, partition: Partition) -> None:
        """Accept outputs of a new assignment."""
        self.forget(partition.id)
        self._partitions[partition.id] = _OfPartition(partition)

    def forget(self, partition_id: PartitionId) -> None:
        """Drop the outputs of a partition that was lost or released. Idempotent."""
        found = self._partitions.pop(partition_id, None)
        if found is not None:
            self.size -= found.size

    def owns(self, partition: Partition) -> bool:
        """Return whether this assignment accepts outputs."""
        found = self._partitions.get(partition.id)
        return found is not None and found.partition is partition

    def accepts(self, output: Output) -> bool:
        """Return whether the assignment of the output's message still accepts outputs."""
        found = self._partitions.get(output.source)
        return found is not None and found.partition.assignment == output.assignment

    def has_room(self, output: Output) -> bool:
        """Return whether the output may enter now.

        The outputs of the lowest message of a partition always may. The floor cannot rise without this message, and
        outputs above the floor may have to wait for a higher floor.
        """
        if self.size < self._most:
            return True
        positions = self._partitions[output.source].outputs
        return not positions or output.position <= min(positions)

    def has_refused(self, output: Output) -> bool:
        """Return whether an output of the same attempt was refused."""
        found = self._partitions.get(output.source)
        return found is not None and found.refused.get(output.position) == output.attempt

    def add(self, output: Output) -> None:
        """Add an output that ``accepts`` allows. Drop the outputs of an earlier attempt of its message."""
        found = self._partitions[output.source]
        earlier = found.outputs.get(output.position)
        if earlier and earlier[0].attempt != output.attempt:
            self._drop(found, output.position)
        found.outputs.setdefault(output.position, []).append(output)
        self._count(found, output.size + OVERHEAD)

    def refuse(self, output: Output) -> None:
        """Refuse the attempt of an output, and drop the other outputs of its message. Idempotent."""
        found = self._partitions.get(output.source)
        if found is not None and found.partition.assignment == output.assignment:
            found.refused[output.position] = output.attempt
            self._drop(found, output.position)

    def covered(self, partition: Partition, coverage: Coverage) -> list[Output]:
        """Return the outputs of the covered messages, in the order of the partition. The outputs stay here."""
        if not self.owns(partition):
            return []
        outputs = self._partitions[partition.id].outputs
        positions = sorted(position for position in outputs if coverage.covers(position))
        return [output for position in positions for output in sorted(outputs[position], key=lambda each: each.number)]

    def remove(self, partition: Partition, outputs: Iterable[Output]) -> None:
        """Remove outputs that the broker has committed. Has no effect for an assignment that has ended."""
        if self.owns(partition):
            for position in {output.position for output in outputs}:
                self._drop(self._partitions[partition.id], position)

    def settled(self, partition: Partition, coverage: Coverage) -> None:
        """Forget which attempts of covered messages were refused, because these messages have ended."""
        if self.owns(partition):
            refused = self._partitions[partition.id].refused
            for position in [each for each in refused if coverage.covers(each)]:
                del refused[position]

    def _drop(self, found: _OfPartition, position: int) -> None:
        for output in found.outputs.pop(position, ()):
            self._count(found, -output.size - OVERHEAD)

    def _count(self, found: _OfPartition, size: int) -> None:
        found.size += size
        self.size += size

    def __repr__(self) -> str:
        return f"<WaitingOutputs of {len(self._partitions)} partitions, {self.size} bytes>"
