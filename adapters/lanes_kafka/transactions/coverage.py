"""The messages that a stored position covers. Pure.

A commit stores a floor and, as metadata, the completed set above the floor. The metadata may be too small for the set,
and then loses the highest runs. The next owner of the partition sees only the set as encoded, and runs the handlers of
all other messages again. A transaction therefore has exactly the outputs of the messages that the floor and the set as
encoded cover. The outputs of other finished messages wait for a later transaction.

A later commit must cover every message that an earlier one has covered. Otherwise the next owner would run a message
again whose outputs are visible. A set that has become too fragmented for the metadata therefore loses finished messages
of the present transaction, and none of an earlier commit.

After a transaction with an unknown outcome, the stored position decides about each of its outputs. An output of a
covered message is visible, and any other output was never visible.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple, Self

from lanes.core.offset_map import OFFSETS_END, decode, encode


class Coverage(NamedTuple):
    """The messages that a commit reports as finished to the next owner of the partition.

    Attributes:
        floor: The next position to read. Below 0 = the group has no stored position.
        runs: Finished positions above the floor, as rising half-open runs.
        metadata: Text that the commit stores for ``runs``.
    """

    floor: int
    runs: Sequence[tuple[int, int]]
    metadata: str

    def extended(self, floor: int, completed: Sequence[tuple[int, int]], limit: int) -> Coverage | None:
        """Return what the next commit can store of a floor and a completed set.

        Args:
            floor: The next position to read, at or above ``self.floor``.
            completed: Finished positions above the floor, as rising half-open runs.
            limit: Maximum number of characters of the metadata.

        Returns:
            The coverage, which covers all that this coverage covers, and the lowest of the other finished positions.
            ``None`` = the limit is too small for what this coverage covers.
        """
        kept = [(max(start, floor), end) for start, end in self.runs if end > floor]
        whole = Coverage.stored(floor, encode(floor, _union(kept, completed), limit))
        if all(whole.covers(end - 1) for _, end in kept):
            # The encoder drops the highest positions only.
            return whole
        fits = self._fitting(floor, kept, limit)
        few, many = 0, len(completed)
        while fits is not None and many - few > 1:
            middle = (few + many) // 2
            more = self._fitting(floor, _union(kept, completed[:middle]), limit)
            if more is None:
                many = middle
            else:
                few, fits = middle, more
        return fits

    @staticmethod
    def _fitting(floor: int, runs: Sequence[tuple[int, int]], limit: int) -> Coverage | None:
        found = Coverage.stored(floor, encode(floor, runs, limit))
        return found if not runs or found.covers(runs[-1][1] - 1) else None

    @classmethod
    def stored(cls, floor: int, metadata: str | None) -> Self:
        """Return what the next owner reads in a stored commit.

        Args:
            floor: The stored position; below 0 = no position.
            metadata: The stored text, maybe of another program.

        Returns:
            The coverage. Foreign metadata covers nothing.
        """
        runs = decode(metadata, floor, OFFSETS_END) if metadata and floor >= 0 else None
        return cls(floor, runs or [], metadata if metadata and runs else "")

    def covers(self, position: int) -> bool:
        """Return whether the next owner treats the message at ``position`` as finished."""
        if position < self.floor:
            return True
        run = bisect_right(self.runs, position, key=lambda each: each[0]) - 1
        return run >= 0 and position < self.runs[run][1]


def _union(some: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the union of two sets of rising half-open runs."""
    union: list[tuple[int, int]] = []
    for start, end in sorted([*some, *others]):
        if union and start <= union[-1][1]:
            union[-1] = union[-1][0], max(end, union[-1][1])
        else:
            union.append((start, end))
    return union
