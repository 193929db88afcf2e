"""What checkers know of each assignment of a partition."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from lanes.history.rules import Rules
from memsource.checkers.verdict import Findings
from memsource.history.reader import Segment
from memsource.history.rows import Row
from memsource.history.timeline import Assignment

__all__ = ["Assignments", "LatestRun", "begin_committing", "closes_prefix", "lane_of"]

State = TypeVar("State")


class Assignments(Generic[State]):
    """A state for each assignment about which everything is known, made by ``make`` when its first row comes.

    About an assignment that began in or before a gap nothing is known until the process is assigned another one.
    """

    def __init__(self, make: Callable[[], State]) -> None:
        self._make = make
        self._gaps: set[Segment] = set()
        self._over: set[Assignment] = set()
        self.states: dict[Assignment, State] = {}

    def begin(self, segment: Segment, row: Row) -> State:
        """It is assigned."""
        state = self.states[segment, row.partition, row.assignment] = self._make()
        return state

    def of(self, segment: Segment, row: Row) -> State | None:
        """Its state; None when not everything is known of it, or it is over."""
        assignment = segment, row.partition, row.assignment
        state = self.states.get(assignment)
        if state is not None:
            return state
        if segment not in self._gaps and assignment not in self._over:
            state = self.states[assignment] = self._make()
        return state

    def known(self, segment: Segment, row: Row) -> State | None:
        """Its state, None when it has none yet."""
        return self.states.get((segment, row.partition, row.assignment))

    def end(self, segment: Segment, row: Row) -> State | None:
        """It is over: nothing more is kept of it."""
        assignment = segment, row.partition, row.assignment
        self._over.add(assignment)
        return self.states.pop(assignment, None)

    def ending(self, segment: Segment, row: Row) -> Iterator[tuple[Row, State]]:
        """The states of this segment, each with ``row`` as one of its assignment."""
        for (one, partition, assignment), state in self.states.items():
            if one is segment:
                yield row._replace(partition=partition, assignment=assignment), state

    def gap(self, segment: Segment) -> None:
        """Anything may have happened to those of this segment."""
        self._gaps.add(segment)
        self.drop(segment)

    def drop(self, segment: Segment) -> list[State]:
        """Forget those of this segment; returns their states."""
        mine = [assignment for assignment in self.states if assignment[0] is segment]
        return [self.states.pop(assignment) for assignment in mine]


def begin_committing(
    assignments: Assignments[State], findings: Findings, segment: Segment, row: Row, setting: str, value: float | None
) -> None:
    """Begin an assignment of a source that commits, where the history says the ``setting`` that it is judged by."""
    if row.floor < 0:
        return
    if value is None:
        findings.unsaid(segment, setting)
    else:
        assignments.begin(segment, row)


class LatestRun:
    """What the latest runs of an assignment brought that was not held before: the rows that say which of a run was not
    new follow it."""

    __slots__ = ("_n", "_new")

    def __init__(self) -> None:
        self._n = -1
        self._new: dict[int, int] = {}  # position -> deliveries of it that may have been new

    def delivered(self, row: Row, *, new: bool) -> None:
        """The next row of a run, or the first of another one."""
        if row.n != self._n + 1:
            self._new.clear()
        self._n = row.n
        if new:
            self._new[row.position] = 1
        elif row.position in self._new:
            self._new[row.position] += 1

    def not_held(self, row: Row) -> bool:
        """Take a ``redelivered`` row; whether it says that its message, which seemed to be new, is not held: it was
        settled, or is being settled."""
        if row.text == "late" or row.position not in self._new:
            return False
        self._new[row.position] -= 1
        return not self._new[row.position]


def lane_of(rules: Rules, row: Row) -> str | None:
    """What names the lane of a message within its partition, None where it has none. Keys that are folded onto one lane
    are told apart: a history does not say which they are."""
    if rules.order == "none":
        return None
    if rules.order in ("partition", "serial"):
        return "partition"
    if row.key is None:
        return "keyless" if rules.keyless == "one_lane" else None
    return row.key


def closes_prefix(rules: Rules) -> bool | None:
    """Whether a drain also runs what is queued below the highest message that has started; None = unknown."""
    if rules.settles is None or rules.hands_over is None:
        return None
    return rules.settles == "cumulative" and not rules.hands_over
