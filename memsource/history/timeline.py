"""All rows of a history in one order, with what can and cannot be said across segments.

Within a segment the order is that of its rows. Between segments of one boot of one machine it is ``mono``.
Between different boots, or where the boot is unknown, it is ``wall``, which orders only segments that do not
overlap: about a partition that appears in overlapping ones nothing is said across segments. Nor is anything about
a partition whose topic or stream was recreated, because its positions began anew.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Sequence
from itertools import combinations
from math import inf

from memsource.history.reader import Segment
from memsource.history.rows import Row

__all__ = ["Assignment", "Timeline"]

Assignment = tuple[Segment, str, int]
"""A partition at a process: (segment, partition, assignment)."""

# Results that come after one of these rows of their assignment change nothing.
_FENCES = frozenset({"drained", "revoked", "lost"})
_FENCED = frozenset({"ended", "dlq_confirmed"})


class Timeline:
    """An order over ``segments``; iterating yields (event, segment, row).

    The event is the row's, with three exceptions: what ended after its assignment was fenced is a ``zombie``;
    ``over`` comes with the last row of a segment again, when nothing of that process follows; and in front of the
    first ``commit_sent`` whose floor is above a message of its assignment, ``passed`` comes with the row of that
    message's delivery, under the number and time of the commit. A ``gap`` comes where what is missing may have begun.

    ``committing`` are the assignments whose source commits one position for everything below it. ``incomparable``
    maps the partitions of which nothing can be said across segments to the reason. ``recreated`` are those of them
    whose positions mean several messages.

    ``taken``: (member, partition, number) of assignments of which the broker says that it has taken them away, whatever
    their members have heard of it; as an attribute the assignments. A file alone never says that of a process that has
    died, or stood still, before it heard of its loss. ``deadlines``: of the assignments under a lease, when it ran out
    at last, as ``mono``.
    """

    def __init__(self, segments: Sequence[Segment], *, taken: Collection[tuple[str, str, int]] = ()) -> None:
        self.segments = segments
        self.taken: set[Assignment] = {
            (segment, partition, assignment)
            for member, partition, assignment in taken
            for segment in segments
            if segment.member == member
        }
        self.deadlines: dict[Assignment, float] = {}
        self._find_leases()
        self.incomparable: dict[str, str] = {}
        self.recreated: set[str] = set()
        self.committing: set[Assignment] = {
            (segment, row.partition, row.assignment) for segment in segments for row in segment.rows if row.floor >= 0
        }
        self._shift = _shifts(segments)
        self._find_incomparable()

    def __iter__(self) -> Iterator[tuple[str, Segment, Row]]:
        fenced: set[Assignment] = set()
        delivered: dict[Assignment, deque[Row]] = {assignment: deque() for assignment in self.committing}
        # The index decides between equal times, so segments and rows are never compared.
        ordered = sorted(self.segments, key=self._begin)
        for _, _, event, segment, row in heapq.merge(*(self._rows(i, s) for i, s in enumerate(ordered))):
            if event in _FENCES:
                fenced.add((segment, row.partition, row.assignment))
            elif fenced and event in _FENCED and (segment, row.partition, row.assignment) in fenced:
                yield "zombie", segment, row
                continue
            if delivered and event in ("delivered", "commit_sent"):
                rows = delivered.get((segment, row.partition, row.assignment))
                if rows is not None and event == "delivered":
                    rows.append(row)
                # Within one assignment a source that commits goes only onwards, so the lowest are in front.
                while rows and rows[0].position < row.floor:
                    yield "passed", segment, rows.popleft()._replace(n=row.n, mono=row.mono)
            yield event, segment, row

    def _rows(self, index: int, segment: Segment) -> Iterator[tuple[float, int, str, Segment, Row]]:
        shift = self._shift[segment]
        latest = segment.mono_first
        for row in segment.rows:
            # Rows may carry a clock reading that is a little older than that of the row before.
            if row.mono > latest:
                latest = row.mono
            # What is missing in front of a segment may have happened at any time.
            lost = row.event == "gap" and row is segment.rows[0]
            yield -inf if lost else latest + shift, index, row.event, segment, row
        yield latest + shift, index, "over", segment, segment.rows[-1]

    def _begin(self, segment: Segment) -> float:
        return segment.mono_first + self._shift[segment]

    def _end(self, segment: Segment) -> float:
        return max(row.mono for row in segment.rows) + self._shift[segment]

    def _find_leases(self) -> None:
        for segment in self.segments:
            for row in segment.rows:
                if row.event in ("leased", "lost") and row.number:
                    self.deadlines[segment, row.partition, row.assignment] = row.number

    def _find_incomparable(self) -> None:
        incarnations: dict[str, set[str]] = defaultdict(set)
        holders: dict[str, list[Segment]] = defaultdict(list)
        for segment in self.segments:
            # What a producer notes holds whenever it was noted, so it needs no order.
            partitions = {row.partition for row in segment.rows if row.event != "produced"} - {""}
            for partition in partitions:
                holders[partition].append(segment)
            for row in segment.rows:
                if row.event == "assigned":
                    incarnations[row.partition].add(row.text)
        ends = {segment: self._end(segment) for segment in self.segments}
        for partition, segments in holders.items():
            if len(incarnations[partition]) > 1:
                self.recreated.add(partition)
                self.incomparable[partition] = "recreated: its positions began anew"
            elif any(self._overlap(a, b, ends) for a, b in combinations(segments, 2)):
                self.incomparable[partition] = "in overlapping segments of different boots"

    def _overlap(self, one: Segment, other: Segment, ends: dict[Segment, float]) -> bool:
        if _same_boot(one, other):
            return False
        first, second = sorted((one, other), key=lambda segment: segment.wall_first)
        # By the wall clocks, and by the order this timeline makes of them: they differ after a clock was set.
        return second.wall_first <= first.wall_last or self._begin(second) <= ends[first]


def _same_boot(one: Segment, other: Segment) -> bool:
    return one is other or (one.boot != "" and one.boot == other.boot)


def _shifts(segments: Sequence[Segment]) -> dict[Segment, float]:
    """What makes ``mono`` comparable: nothing within one boot, else the first segment's way to the wall clock."""
    boots: dict[object, float] = {}
    shifts = {}
    for segment in sorted(segments, key=lambda segment: segment.wall_first):
        boot: object = segment.boot or segment
        shifts[segment] = boots.setdefault(boot, segment.wall_first - segment.mono_first)
    if len(boots) == 1:
        # Nothing to convert, and so nothing to round.
        return dict.fromkeys(segments, 0.0)
    return shifts
