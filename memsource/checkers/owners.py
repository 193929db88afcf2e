"""The checkers of partition owners, and of the work on other partitions while a member releases one partition."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from operator import attrgetter
from typing import Final

from memsource.checkers.checker import PromiseChecker, on
from memsource.checkers.deadlines import FREEZE
from memsource.checkers.verdict import at
from memsource.history.reader import Segment
from memsource.history.rows import Row
from memsource.history.timeline import Assignment, Timeline

_NOT_CALLED: Final = 0.25
"""Maximum number of seconds from the ``started`` row to the call of the handler, and from the end of a freeze to the
row of a handler that was not called."""


class _Tenure:
    """The ownership of a partition by one assignment.

    Attributes:
        rival: The row in which another process received the partition in the meantime.
        acted: The first start or commit of the owner after ``rival``.
    """

    __slots__ = ("acted", "rival")

    def __init__(self) -> None:
        self.rival: tuple[Segment, Row] | None = None
        self.acted: tuple[Segment, Row] | None = None


class ExclusiveOwner(PromiseChecker):
    """A partition has at most one owner (43), and a process never has two assignments of a partition (42).

    A process owns a partition from ``assigned`` until the drain or loss of the partition, or until the end of the
    process. Two processes may both own a partition until the former owner notices its loss. An owner violates the
    promise by a start or commit after another process received the partition, if the owner later hands the partition
    over. The owner keeps the promise if the other process lost the partition, or if the broker took the partition from
    one of the two.

    The checker accepts concurrent Spark tasks of one partition, because each task handles other keys. ``NoOverlap``
    judges the keys of these tasks.

    Args:
        timeline: History to judge.
    """

    _needs_order = True

    def __init__(self, timeline: Timeline) -> None:
        super().__init__(timeline)
        self._owners: dict[str, dict[Assignment, _Tenure]] = defaultdict(dict)
        # Owners of partitions that another process was assigned meanwhile.
        self._contested: dict[Assignment, _Tenure] = {}

    @on("assigned")
    def _assigned(self, segment: Segment, row: Row) -> None:
        self._findings.checked += 1
        owners = self._owners[row.partition]
        taken = (segment, row.partition, row.assignment) in self._taken
        for assignment, tenure in owners.items():
            if assignment[0] is segment:
                what = f"assigned while the process still had the partition in assignment {assignment[2]}"
                self._findings.violation(segment, row, what)
            elif taken or assignment in self._taken or _shares(segment) or _shares(assignment[0]):
                continue
            elif tenure.rival is None and row.partition not in self._incomparable:
                tenure.rival = segment, row
                self._contested[assignment] = tenure
        owners[segment, row.partition, row.assignment] = _Tenure()

    @on("started", "commit_sent")
    def _acts(self, segment: Segment, row: Row) -> None:
        if self._contested:
            tenure = self._contested.get((segment, row.partition, row.assignment))
            # Rows of two processes with the same time have no order.
            if tenure is not None and tenure.rival is not None and row.mono > tenure.rival[1].mono:
                tenure.acted = tenure.acted or (segment, row)

    @on("drained")
    def _drained(self, segment: Segment, row: Row) -> None:
        # Starts and commits until the handover still count, but after this row another process may own the partition.
        self._owners[row.partition].pop((segment, row.partition, row.assignment), None)

    @on("revoked")
    def _revoked(self, segment: Segment, row: Row) -> None:
        assignment = segment, row.partition, row.assignment
        self._owners[row.partition].pop(assignment, None)
        tenure = self._contested.pop(assignment, None)
        if tenure is not None and tenure.acted is not None and tenure.rival is not None:
            what = f"{tenure.acted[1].event} after another process was assigned the partition ({at(*tenure.rival)})"
            self._findings.violation(*tenure.acted, what)

    @on("lost")
    def _lost(self, segment: Segment, row: Row) -> None:
        lost = segment, row.partition, row.assignment
        self._owners[row.partition].pop(lost, None)
        self._contested.pop(lost, None)
        for assignment, tenure in list(self._contested.items()):
            rival = tenure.rival
            if rival is not None and (rival[0], rival[1].partition, rival[1].assignment) == lost:
                tenure.rival = tenure.acted = None
                del self._contested[assignment]

    @on("gap", "over")
    def _gone(self, segment: Segment, row: Row) -> None:
        for owners in self._owners.values():
            for assignment in [one for one in owners if one[0] is segment]:
                del owners[assignment]
        self._contested = {one: tenure for one, tenure in self._contested.items() if one[0] is not segment}


def _shares(segment: Segment) -> bool:
    # A history that does not say whether owners are exclusive is older than the first source that shares partitions.
    return segment.rules.exclusive is False


class KeptWorkGoesOn(PromiseChecker):
    """Giving up one partition cancels no handler of another partition (41).

    A process cancels a handler only when it gives the handler's partition up or the whole run ends. After the end of a
    run, the source delivers no message. If a freeze begins right after the ``started`` row, the process does not call
    the handler, and the row after the freeze is ``cancelled``. The checker does not judge batches, because one call may
    have messages of several partitions.

    Args:
        timeline: History to judge.
    """

    def __init__(self, timeline: Timeline) -> None:
        super().__init__(timeline)
        self._draining: set[Assignment] = set()
        self._cancelled: dict[Segment, list[Row]] = defaultdict(list)
        self._started: dict[tuple[Assignment, int], float] = {}
        self._gaps: set[Segment] = set()

    @on("revoking")
    def _given_up(self, segment: Segment, row: Row) -> None:
        self._findings.checked += 1
        self._draining.add((segment, row.partition, row.assignment))

    @on("started")
    def _begun(self, segment: Segment, row: Row) -> None:
        self._started[(segment, row.partition, row.assignment), row.position] = row.mono

    @on("ended")
    def _ended(self, segment: Segment, row: Row) -> None:
        owner = segment, row.partition, row.assignment
        started = self._started.pop((owner, row.position), row.mono)
        if row.text != "cancelled" or segment in self._gaps or owner in self._draining:
            return
        if _is_recalled(segment, row, started):
            return
        if segment.rules.batch is None:
            self._findings.unsaid(segment, "batch")
        elif not segment.rules.batch:
            self._cancelled[segment].append(row)

    @on("delivered")
    def _delivered(self, segment: Segment, row: Row) -> None:
        for cancelled in self._cancelled.pop(segment, ()):
            what = "cancelled, though neither its partition was given up nor did the run end"
            self._findings.violation(segment, cancelled, what)

    @on("gap")
    def _gap(self, segment: Segment, row: Row) -> None:
        self._cancelled.pop(segment, None)
        # The gap may hide which partitions of the process were given up.
        self._gaps.add(segment)


def _is_recalled(segment: Segment, row: Row, started: float) -> bool:
    """Whether a freeze shortly after the start of the handler ended shortly before ``row``."""
    woke = row.mono
    for each in reversed(segment.rows[: bisect_left(segment.rows, row.n, key=attrgetter("n"))]):
        if woke - each.mono >= FREEZE:
            return each.mono - started <= _NOT_CALLED
        # The process may write other rows first when it wakes.
        woke = each.mono
        if row.mono - woke > _NOT_CALLED:
            break
    return False
