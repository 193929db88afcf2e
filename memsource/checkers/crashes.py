"""How much is run again behind a crash or a loss, where partitions are under leases."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping

from memsource.checkers.verdict import Findings, Handler, Verdict
from memsource.history.reader import Segment
from memsource.history.rows import Row
from memsource.history.timeline import Assignment, Timeline

__all__ = ["BoundedRepeats"]


class BoundedRepeats:
    """Of what an owner under a lease had finished, the next ones run again: nothing when it was handed over cleanly;
    behind a crash or a loss at most what was not written down (56).

    That is what has finished since ``written_every`` messages were (None = ``max_in_flight``, as a cohort does), and as
    many again as may be in flight, whose acknowledgements were on their way. ``excused``: member, partition and number
    of assignments behind which the broker has forgotten something, or could not be told; a file alone never says that,
    so this checker is not one of ``CHECKERS``.
    """

    name = "BoundedRepeats"

    def __init__(
        self,
        timeline: Timeline,
        *,
        written_every: int | None = None,
        excused: Collection[tuple[str, str, int]] = (),
    ) -> None:
        self._findings = Findings(self.name, timeline)
        self._incomparable = timeline.incomparable
        self._leased = timeline.deadlines
        self._written_every = written_every
        self._excused = frozenset(excused)
        self._finished: dict[str, dict[int, Assignment]] = defaultdict(dict)
        self._abandoned: dict[Assignment, set[int]] = defaultdict(set)
        self._clean: set[Assignment] = set()
        self._repeated: Counter[Assignment] = Counter()
        self._stopped = False

    def handlers(self) -> Mapping[str, Handler]:
        return {
            "assigned": self._assigned,
            "started": self._started,
            "ended": self._ended,
            "dlq_confirmed": self._letter,
            "abandoned": self._given_up,
            "revoked": self._revoked,
            "gap": self._gap,
        }

    def verdict(self) -> Verdict:
        most = max(self._repeated.values(), default=0)
        return self._findings.verdict(across=True, note=f"at most {most} repeated of one assignment")

    def _assigned(self, segment: Segment, row: Row) -> None:
        self._findings.checked += bool(self._finished[row.partition])

    def _ended(self, segment: Segment, row: Row) -> None:
        if row.text == "ok":
            self._done(segment, row)

    def _letter(self, segment: Segment, row: Row) -> None:
        # One that is confirmed when its message was given up changes nothing: it runs again.
        if row.position not in self._abandoned[segment, row.partition, row.assignment]:
            self._done(segment, row)

    def _done(self, segment: Segment, row: Row) -> None:
        assignment = segment, row.partition, row.assignment
        if assignment in self._leased:
            self._finished[row.partition][row.position] = assignment

    def _given_up(self, segment: Segment, row: Row) -> None:
        self._abandoned[segment, row.partition, row.assignment].add(row.position)

    def _revoked(self, segment: Segment, row: Row) -> None:
        self._clean.add((segment, row.partition, row.assignment))

    def _started(self, segment: Segment, row: Row) -> None:
        former = self._finished[row.partition].pop(row.position, None)
        if former is None or former == (segment, row.partition, row.assignment):
            return
        if self._stopped or row.partition in self._incomparable:
            return
        owner, _, assignment = former
        if (owner.member, row.partition, assignment) in self._excused:
            return
        self._repeated[former] += 1
        bound = self._bound(former)
        if bound is not None and self._repeated[former] == bound + 1:
            how = "handed it over cleanly" if former in self._clean else f"may leave {bound} of them to be run again"
            self._findings.violation(
                segment,
                row,
                f"started again after it had finished at {owner.label} in assignment {assignment}, which {how}",
            )

    def _bound(self, assignment: Assignment) -> int | None:
        """How many messages of an assignment may be repeated; None = the history does not say."""
        if assignment in self._clean:
            return 0
        flight = assignment[0].max_in_flight
        if flight is None:
            self._findings.unsaid(assignment[0], "max_in_flight")
            return None
        return flight + (flight if self._written_every is None else self._written_every)

    def _gap(self, segment: Segment, row: Row) -> None:
        # Whatever was handed over, or began, may be in it.
        self._stopped = True
        self._finished.clear()
