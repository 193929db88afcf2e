"""How far a world is: what its broker and its workers have finished."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from lanes.core.types import Settlement
from lanes.observe.status import Status
from memsource.memory.topic import Record
from memsource.personality import Personality

__all__ = ["Progress"]

_NAMED: Final = 5


class Progress:
    """Of one ``broker``, which must not be told of a commit without ``note``. Nothing blocks."""

    def __init__(self, broker: Personality) -> None:
        self._broker = broker
        self._committed: dict[int, tuple[int, Sequence[tuple[int, int]]]] = {}

    def note(self, settlements: Sequence[Settlement]) -> None:
        """The broker has them."""
        for settlement in settlements:
            number, floor = settlement.partition.id.number, settlement.floor
            if floor is not None:
                furthest = self._committed.get(number)
                if furthest is None or floor >= furthest[0]:
                    self._committed[number] = floor, settlement.completed

    def left(self) -> list[Record]:
        """What was never finished. A commit that comes late may set a position back: what was finished once is run
        again at worst."""
        return [record for record in self._broker.unfinished if not self._was_committed(record)]

    def left_in_words(self) -> tuple[int, str]:
        """How many are left, and the places of the first five."""
        left = self.left()
        few = ", ".join(f"partition {record.partition} position {record.position}" for record in left[:_NAMED])
        return len(left), few + (", …" if len(left) > _NAMED else "")

    def caught_up(self, asked: Callable[[], Sequence[Status]]) -> bool:
        """Whether nothing is left, or what is left cannot get further: a poison policy has blocked it.

        ``asked``: the statuses of all workers that are ready. They are asked for where they matter alone.
        """
        left = Counter(record.partition for record in self.left())
        if not left:
            return True
        statuses = asked()
        if not any(status.blocked for status in statuses):
            return False
        if any(status.running or status.ready or status.held or status.parking for status in statuses):
            return False
        return all(_stands_still(partition, count, statuses) for partition, count in left.items())

    def _was_committed(self, record: Record) -> bool:
        floor, completed = self._committed.get(record.partition, (0, ()))
        return record.position < floor or any(start <= record.position < end for start, end in completed)


def _stands_still(partition: int, left: int, statuses: Sequence[Status]) -> bool:
    """Whether all that is left of a partition is delivered, or has no room, where nobody is at work: blocked, behind
    what is, or finished above it."""
    owners = [
        (status, owned)
        for status in statuses
        for name, owned in status.partitions.items()
        if name.rpartition("/")[2] == str(partition)
    ]
    full = any(owned.ahead_reached or not status.taking for status, owned in owners)
    return full or left <= sum(max(owned.holes, owned.ahead or 0) for _, owned in owners)
