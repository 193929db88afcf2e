"""Who owns a partition, and what becomes of the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from memsource.checkers.verdict import Findings, Handler, Verdict, at
from memsource.history.reader import Segment
from memsource.history.rows import Row
from memsource.history.timeline import Assignment, Timeline

__all__ = ["ExclusiveOwner", "KeptWorkGoesOn"]


class _Tenure:
    """``rival``: who was assigned it meanwhile; ``acted``: what its owner did with it after that."""

    __slots__ = ("acted", "rival")

    def __init__(self) -> None:
        self.rival: tuple[Segment, Row] | None = None
        self.acted: tuple[Segment, Row] | None = None


class ExclusiveOwner:
    """A partition has one owner or none (43).

    An owner has it from ``assigned`` until it is drained, lost, or its process is gone. Two at once there are only
    between a loss and its holder's learning of it: whoever starts a handler or commits while another process has it
    already, and then hands it over as if it had been its own, was one of two, unless it was the other that lost it, or
    the broker says that it had taken it from one of them. A process never has two assignments of one partition.

    A task of Spark shares a partition with others, each with keys of its own: it is nobody's rival. ``NoOverlap``
    judges these by their keys.
    """

    name = "ExclusiveOwner"

    def __init__(self, timeline: Timeline) -> None:
        self._findings = Findings(self.name, timeline)
        self._incomparable = timeline.incomparable
        self._taken = timeline.taken
        self._owners: dict[str, dict[Assignment, _Tenure]] = defaultdict(dict)
        # Those of them that have a rival.
        self._contested: dict[Assignment, _Tenure] = {}

    def handlers(self) -> Mapping[str, Handler]:
        return {
            "assigned": self._assigned,
            "started": self._acts,
            "commit_sent": self._acts,
            "drained": self._drained,
            "revoked": self._revoked,
            "lost": self._lost,
            "gap": self._gone,
            "over": self._gone,
        }

    def verdict(self) -> Verdict:
        return self._findings.verdict(across=True)

    def _assigned(self, segment: Segment, row: Row) -> None:
        self._findings.checked += 1
        owners = self._owners[row.partition]
        taken = (segment, row.partition, row.assignment) in self._taken
        for assignment, tenure in owners.items():
            if assignment[0] is segment:
                what = f"assigned while the process had it in assignment {assignment[2]}"
                self._findings.violation(segment, row, what)
            elif taken or assignment in self._taken or _shares(segment) or _shares(assignment[0]):
                continue
            elif tenure.rival is None and row.partition not in self._incomparable:
                tenure.rival = segment, row
                self._contested[assignment] = tenure
        owners[segment, row.partition, row.assignment] = _Tenure()

    def _acts(self, segment: Segment, row: Row) -> None:
        if self._contested:
            tenure = self._contested.get((segment, row.partition, row.assignment))
            # Of rows of two processes at the same moment nobody knows which came first.
            if tenure is not None and tenure.rival is not None and row.mono > tenure.rival[1].mono:
                tenure.acted = tenure.acted or (segment, row)

    def _drained(self, segment: Segment, row: Row) -> None:
        # What it does until it is handed over still tells, but from now on somebody else may have it.
        self._owners[row.partition].pop((segment, row.partition, row.assignment), None)

    def _revoked(self, segment: Segment, row: Row) -> None:
        assignment = segment, row.partition, row.assignment
        self._owners[row.partition].pop(assignment, None)
        tenure = self._contested.pop(assignment, None)
        if tenure is not None and tenure.acted is not None and tenure.rival is not None:
            what = f"{tenure.acted[1].event} while it was another process's, assigned there ({at(*tenure.rival)})"
            self._findings.violation(*tenure.acted, what)

    def _lost(self, segment: Segment, row: Row) -> None:
        lost = segment, row.partition, row.assignment
        self._owners[row.partition].pop(lost, None)
        self._contested.pop(lost, None)
        for assignment, tenure in list(self._contested.items()):
            rival = tenure.rival
            if rival is not None and (rival[0], rival[1].partition, rival[1].assignment) == lost:
                tenure.rival = tenure.acted = None
                del self._contested[assignment]

    def _gone(self, segment: Segment, row: Row) -> None:
        for owners in self._owners.values():
            for assignment in [one for one in owners if one[0] is segment]:
                del owners[assignment]
        self._contested = {one: tenure for one, tenure in self._contested.items() if one[0] is not segment}


def _shares(segment: Segment) -> bool:
    # What does not say so is older than this rule: then a source that shares had not been written.
    return segment.rules.exclusive is False


class KeptWorkGoesOn:
    """Giving up one partition cancels no handler of another one (41).

    A handler is cancelled when its own partition is given up, or when the whole run ends: then nothing more is
    delivered. Batches are left out: a call may be in several partitions.
    """

    name = "KeptWorkGoesOn"

    def __init__(self, timeline: Timeline) -> None:
        self._findings = Findings(self.name, timeline)
        self._draining: set[Assignment] = set()
        self._cancelled: dict[Segment, list[Row]] = defaultdict(list)
        self._gaps: set[Segment] = set()

    def handlers(self) -> Mapping[str, Handler]:
        return {
            "revoking": self._given_up,
            "ended": self._ended,
            "delivered": self._delivered,
            "gap": self._gap,
        }

    def verdict(self) -> Verdict:
        return self._findings.verdict()

    def _given_up(self, segment: Segment, row: Row) -> None:
        self._findings.checked += 1
        self._draining.add((segment, row.partition, row.assignment))

    def _ended(self, segment: Segment, row: Row) -> None:
        given_up = (segment, row.partition, row.assignment) in self._draining
        if row.text != "cancelled" or segment in self._gaps or given_up:
            return
        if segment.rules.batch is None:
            self._findings.unsaid(segment, "batch")
        elif not segment.rules.batch:
            self._cancelled[segment].append(row)

    def _delivered(self, segment: Segment, row: Row) -> None:
        for cancelled in self._cancelled.pop(segment, ()):
            what = "cancelled, though neither its partition was given up nor did the run end"
            self._findings.violation(segment, cancelled, what)

    def _gap(self, segment: Segment, row: Row) -> None:
        self._cancelled.pop(segment, None)
        # Which of its partitions were given up in the gap is unknown.
        self._gaps.add(segment)
