"""The progress of a world: the messages that its broker and its workers have finished."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from lanes.core.types import Settlement
from lanes.observe.status import PartitionStatus, Status
from memsource.history.rows import number_of, piece_of
from memsource.memory.topic import Record
from memsource.personality import Personality

_NAMED: Final = 5


class WorldProgress:
    """The progress of one ``broker``. The workers record each settlement. No method blocks."""

    def __init__(self, broker: Personality) -> None:
        self._broker = broker
        self._committed: dict[int, tuple[int, Sequence[tuple[int, int]]]] = {}

    def note(self, settlements: Sequence[Settlement]) -> None:
        """Record settlements that the broker has stored."""
        for settlement in settlements:
            number, floor = settlement.partition.id.number, settlement.floor
            # The floor of a piece passes messages of other pieces.
            if floor is not None and not settlement.partition.id.piece:
                furthest = self._committed.get(number)
                if furthest is None or floor >= furthest[0]:
                    self._committed[number] = floor, settlement.completed

    def forget(self) -> None:
        """Forget all settlements, after the broker has lost its messages. Idempotent."""
        self._committed.clear()

    def left(self) -> list[Record]:
        """Return the messages that have never finished.

        A late commit may set a position back. A redelivered message that has finished before still counts as finished.
        """
        return [record for record in self._broker.unfinished if not self._was_committed(record)]

    def caught_up(self, asked: Callable[[], Sequence[Status]]) -> bool:
        """Return whether all messages are finished, except for messages that a poison policy has blocked.

        Args:
            asked: Returns the statuses of all ready workers; called only if messages are unfinished.

        Returns:
            Whether no other message is unfinished.
        """
        left = Counter((record.partition, self.piece_of(record)) for record in self.left())
        if not left:
            return True
        statuses = asked()
        if not any(status.blocked for status in statuses):
            return False
        if any(status.running or status.ready or status.held or status.parking for status in statuses):
            return False
        return all(_stands_still(*place, count, statuses) for place, count in left.items())

    def piece_of(self, record: Record) -> int:
        """Return the number of the piece that owns a message; 0 = the broker's members own whole partitions."""
        return 0

    def _was_committed(self, record: Record) -> bool:
        floor, completed = self._committed.get(record.partition, (0, ()))
        return record.position < floor or any(start <= record.position < end for start, end in completed)


def listed(records: Sequence[Record]) -> str:
    """Return the partitions and positions of the first five records."""
    few = ", ".join(f"partition {record.partition} position {record.position}" for record in records[:_NAMED])
    return few + (", …" if len(records) > _NAMED else "")


def _stands_still(partition: int, piece: int, left: int, statuses: Sequence[Status]) -> bool:
    """Return whether the unfinished messages of a partition, or of one piece of it, cannot run.

    Messages cannot run if their owner receives no more messages, or if all of them are delivered and no handler runs.
    Delivered messages that cannot run are blocked, queued after a blocked message, or finished above the floor.

    Args:
        partition: Number of the partition.
        piece: Number of the piece; 0 = the whole partition.
        left: Number of the unfinished messages.
        statuses: Statuses of all workers that are ready.
    """
    owners = [
        (status, owned)
        for status in statuses
        for name, owned in status.partitions.items()
        if (number_of(name), piece_of(name)) == (partition, piece)
    ]
    stopped = any(
        owned.ahead_reached or _is_full(partition, owned, status) or _is_at_a_bound(status) for status, owned in owners
    )
    return stopped or left <= sum(max(owned.holes, owned.ahead or 0) for _, owned in owners)


def _is_full(partition: int, owned: PartitionStatus, status: Status) -> bool:
    """Return whether a partition is full, with more than half of its ``max_in_flight_per_partition`` in flight.

    The pieces of a partition in one process share this bound, so blocked messages of a piece stop the others.
    """
    used = sum(each.in_flight for name, each in status.partitions.items() if number_of(name) == partition)
    return owned.full and used > owned.capacity.max_in_flight // 2


def _is_at_a_bound(status: Status) -> bool:
    """Return whether a consumer has no room. Below its bounds, its intake starts again when a handler is idle."""
    return status.in_flight >= status.max_in_flight or status.in_flight_bytes >= status.max_in_flight_bytes
