"""All rows of a history in one order, and the limits of that order across segments.

Rows of one segment keep their order in the file. The field ``mono`` orders segments of one boot of one machine. The
field ``wall`` orders segments of different or unknown boots, if the segments do not overlap.

A partition in overlapping segments of different or unknown boots is *incomparable*: the order of its rows across
segments is unknown. A partition of a recreated topic or stream is incomparable too, because its positions started
again.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Sequence
from itertools import combinations
from math import inf

from memsource.history.outputs import VisibleOutput
from memsource.history.reader import Segment
from memsource.history.rows import Row, is_piece, whole

Assignment = tuple[Segment, str, int]
"""An assignment of a partition to a process: (segment, partition, assignment)."""

# A result after one of these rows of its assignment changes nothing.
_FENCES = frozenset({"drained", "revoked", "lost"})
_FENCED = frozenset({"ended", "dlq_confirmed"})


class Timeline:
    """The rows of several segments in one order. Iteration yields (event, segment, row).

    The first item is the event of the row. The timeline adds four events that the files do not contain:

    - ``zombie`` replaces ``ended`` and ``dlq_confirmed`` after the fence of their assignment.
    - ``over`` follows the last row of a segment, with the last row as its row.
    - ``passed`` precedes the first ``commit_sent`` above a message of its assignment. The row of
      ``passed`` is the row of the delivery, with number and time of the commit.
    - ``gap`` stands for missing rows, at the earliest possible time of these rows.

    Args:
        segments: The segments, in any order.
        taken: Assignments that the broker has taken away, as (member, partition, number). The segment of such an
            assignment may have no ``lost`` row, because the process crashed or froze before the event.
        outputs: Outputs that the broker shows to readers. ``None`` = the visible outputs are unknown.

    Attributes:
        segments: The segments.
        taken: Assignments that the broker has taken away, as (member, partition, number).
        outputs: Outputs that the broker shows to readers.
        shows_outputs: Whether the visible outputs are known.
        deadlines: Last deadline of each assignment under a lease, in seconds of ``mono``.
        committing: Assignments of sources that commit one position for each partition.
        incomparable: Partitions whose rows have no known order across segments, with the reason.
        recreated: The incomparable partitions in which one position stands for several messages.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        *,
        taken: Collection[tuple[str, str, int]] = (),
        outputs: Sequence[VisibleOutput] | None = None,
    ) -> None:
        self.segments = segments
        self.outputs = outputs or ()
        self.shows_outputs = outputs is not None
        self.taken: set[Assignment] = {
            (segment, partition, assignment)
            for member, partition, assignment in taken
            for segment in segments
            if segment.member == member
        }
        self.deadlines: dict[Assignment, float] = {
            (segment, row.partition, row.assignment): row.number
            for segment in segments
            for row in segment.rows
            if row.event in ("leased", "lost") and row.number
        }
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
        # The index breaks ties of time, so segments and rows are never compared.
        draining: set[Assignment] = set()
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
                # Positions of an assignment of a committing source rise, so the lowest are first.
                while rows and rows[0].position < row.floor:
                    yield "passed", segment, rows.popleft()._replace(n=row.n, mono=row.mono)
            elif event == "revoking":
                draining.add((segment, row.partition, row.assignment))
            elif event == "abandoned" and is_piece(row.partition):
                # A part of a piece was given up to its next owner, and the floor may pass its messages after that.
                self._give_up(delivered, draining, segment, row)
            yield event, segment, row

    @staticmethod
    def _give_up(
        delivered: dict[Assignment, deque[Row]], draining: set[Assignment], segment: Segment, row: Row
    ) -> None:
        assignment = segment, row.partition, row.assignment
        if assignment not in draining and assignment in delivered:
            rows = delivered[assignment]
            delivered[assignment] = deque(each for each in rows if each.position != row.position)

    def _rows(self, index: int, segment: Segment) -> Iterator[tuple[float, int, str, Segment, Row]]:
        shift = self._shift[segment]
        latest = segment.mono_first
        for row in segment.rows:
            # The time of a row may be a little older than the time of the row before.
            if row.mono > latest:
                latest = row.mono
            # The events of missing rows before a segment may have happened at any time.
            lost = row.event == "gap" and row is segment.rows[0]
            yield -inf if lost else latest + shift, index, row.event, segment, row
        yield latest + shift, index, "over", segment, segment.rows[-1]

    def _begin(self, segment: Segment) -> float:
        return segment.mono_first + self._shift[segment]

    def _end(self, segment: Segment) -> float:
        return max(row.mono for row in segment.rows) + self._shift[segment]

    def _find_incomparable(self) -> None:
        incarnations: dict[str, set[str]] = defaultdict(set)
        holders: dict[str, list[Segment]] = defaultdict(list)
        pieces: dict[str, set[str]] = defaultdict(set)
        for segment in self.segments:
            # Rows of a producer are valid at any time, so they need no order.
            partitions = {row.partition for row in segment.rows if row.event != "produced"} - {""}
            for partition in {whole(partition) for partition in partitions}:
                holders[partition].append(segment)
            for partition in partitions:
                pieces[whole(partition)].add(partition)
            for row in segment.rows:
                if row.event == "assigned":
                    incarnations[whole(row.partition)].add(row.text)
        ends = {segment: self._end(segment) for segment in self.segments}
        for partition, segments in holders.items():
            why = ""
            if len(incarnations[partition]) > 1:
                self.recreated.add(partition)
                why = "recreated: its positions started again"
            elif any(self._overlap(a, b, ends) for a, b in combinations(segments, 2)):
                why = "in overlapping segments of different boots"
            if why:
                self.incomparable.update(dict.fromkeys(sorted(pieces[partition]), why))

    def _overlap(self, one: Segment, other: Segment, ends: dict[Segment, float]) -> bool:
        if _same_boot(one, other):
            return False
        first, second = sorted((one, other), key=lambda segment: segment.wall_first)
        # Compare wall clocks and the order of this timeline, because both differ after somebody has set a clock.
        return second.wall_first <= first.wall_last or self._begin(second) <= ends[first]


def _same_boot(one: Segment, other: Segment) -> bool:
    return one is other or (one.boot != "" and one.boot == other.boot)


def _shifts(segments: Sequence[Segment]) -> dict[Segment, float]:
    """Return the seconds that make ``mono`` comparable, by segment; 0 = all segments have one boot."""
    boots: dict[object, float] = {}
    shifts = {}
    for segment in sorted(segments, key=lambda segment: segment.wall_first):
        boot: object = segment.boot or segment
        shifts[segment] = boots.setdefault(boot, segment.wall_first - segment.mono_first)
    if len(boots) == 1:
        # With one boot, avoid the rounding of a conversion.
        return dict.fromkeys(segments, 0.0)
    return shifts
