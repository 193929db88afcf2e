"""The state that a checker keeps for each assignment of a partition."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Generic, Literal, TypeVar

from lanes.history.rules import Rules
from memsource.checkers.checker import Handler, PromiseChecker, on
from memsource.checkers.verdict import Findings
from memsource.history.reader import Segment
from memsource.history.rows import Row, whole
from memsource.history.timeline import Assignment, Timeline

State = TypeVar("State")
Owner = TypeVar("Owner", bound="AssignmentChecker[Any]")


class Assignments(Generic[State]):
    """One state for each assignment without missing rows. ``make`` returns the state for a first row.

    After a gap in the rows of a process, only an assignment that begins after the gap has a state.
    """

    def __init__(self, make: Callable[[], State]) -> None:
        self._make = make
        self._gaps: set[Segment] = set()
        self._over: set[Assignment] = set()
        self.states: dict[Assignment, State] = {}

    def begin(self, segment: Segment, row: Row) -> State:
        """Begin a new assignment."""
        state = self.states[segment, row.partition, row.assignment] = self._make()
        return state

    def of(self, segment: Segment, row: Row) -> State | None:
        """Return the state of an assignment; None if its rows may be missing, or if the assignment is over."""
        assignment = segment, row.partition, row.assignment
        state = self.states.get(assignment)
        if state is not None:
            return state
        if segment not in self._gaps and assignment not in self._over:
            state = self.states[assignment] = self._make()
        return state

    def known(self, segment: Segment, row: Row) -> State | None:
        """Return the existing state of an assignment, or None."""
        return self.states.get((segment, row.partition, row.assignment))

    def end(self, segment: Segment, row: Row) -> State | None:
        """End an assignment, and return its last state or None."""
        assignment = segment, row.partition, row.assignment
        self._over.add(assignment)
        return self.states.pop(assignment, None)

    def ending(self, segment: Segment, row: Row) -> Iterator[tuple[Row, State]]:
        """Yield each state of a segment, with a copy of ``row`` that names the state's partition and assignment."""
        for (one, partition, assignment), state in self.states.items():
            if one is segment:
                yield row._replace(partition=partition, assignment=assignment), state

    def gap(self, segment: Segment) -> None:
        """Record a gap in a segment, and forget the states of the segment's assignments."""
        self._gaps.add(segment)
        self.drop(segment)

    def drop(self, segment: Segment) -> list[State]:
        """Forget the states of a segment, and return the forgotten states."""
        mine = [assignment for assignment in self.states if assignment[0] is segment]
        return [self.states.pop(assignment) for assignment in mine]


class AssignmentChecker(PromiseChecker, Generic[State]):
    """A checker with a state for each assignment. The state ends at the latest at a loss, or at a gap in the rows."""

    _state_class: type[State]
    _ends_at: ClassVar[tuple[str, ...]] = ()
    """The other events that end the state of an assignment."""

    def __init__(self, timeline: Timeline) -> None:
        super().__init__(timeline)
        self._assignments: Assignments[State] = Assignments(self._state_class)

    def handlers(self) -> Mapping[str, Handler]:
        return {**dict.fromkeys(self._ends_at, self._lost), **super().handlers()}

    @on("lost")
    def _lost(self, segment: Segment, row: Row) -> None:
        self._assignments.end(segment, row)

    @on("gap")
    def _gap(self, segment: Segment, row: Row) -> None:
        self._assignments.gap(segment)


def with_state(
    *events: str, find: Literal["of", "known", "end"] = "of"
) -> Callable[[Callable[[Owner, Segment, Row, State], None]], Callable[[Owner, Segment, Row], None]]:
    """Register a method of an ``AssignmentChecker`` for rows of these events. The method receives row and state.

    The method receives the state of the row's assignment. The decorator skips rows of an assignment without a state.

    Args:
        *events: Names of the events, as for ``memsource.checkers.checker.on``.
        find: Name of the method of ``Assignments`` that returns the state.

    Returns:
        A decorator for a method with the parameters segment, row and state.
    """

    def mark(method: Callable[[Owner, Segment, Row, State], None]) -> Callable[[Owner, Segment, Row], None]:
        @on(*events)
        def take(self: Owner, segment: Segment, row: Row) -> None:
            state = getattr(self._assignments, find)(segment, row)
            if state is not None:
                method(self, segment, row, state)

        return take

    return mark


def begin_committing(
    assignments: Assignments[State], findings: Findings, segment: Segment, row: Row, setting: str, value: float | None
) -> None:
    """Begin an assignment if its source commits and the history has the ``setting`` that the checker needs."""
    if row.floor < 0:
        return
    if value is None:
        findings.unsaid(segment, setting)
    else:
        assignments.begin(segment, row)


class LatestRun:
    """The latest unbroken series of ``delivered`` rows, without the messages that were already in flight.

    The rows ``redelivered`` follow after the whole series.
    """

    __slots__ = ("_n", "_new")

    def __init__(self) -> None:
        self._n = -1
        self._new: dict[int, int] = {}  # position -> number of its deliveries that may be new

    def delivered(self, row: Row, *, new: bool) -> None:
        """Record a delivery, which continues the series or begins a new series."""
        if row.n != self._n + 1:
            self._new.clear()
        self._n = row.n
        if new:
            self._new[row.position] = 1
        elif row.position in self._new:
            self._new[row.position] += 1

    def not_held(self, row: Row) -> bool:
        """Return whether a ``redelivered`` row shows a settled message of the series that is not in flight."""
        if row.text == "late" or row.position not in self._new:
            return False
        self._new[row.position] -= 1
        return not self._new[row.position]


def lane_of(rules: Rules, row: Row) -> str | None:
    """Return the name of a message's lane within its partition, or None for a message without a lane.

    If keys share lanes, each key has its own name, because a history does not show which keys share a lane.
    """
    if rules.order == "none":
        return None
    if rules.order in ("partition", "serial"):
        return "partition"
    if row.key is None:
        return "keyless" if rules.keyless == "one_lane" else None
    return row.key


def has_budgets(segment: Segment) -> bool:
    """Return whether the run of a segment has bounds per partition, so that its partitions take turns."""
    rules = segment.rules
    return bool(rules.concurrency_per_partition or rules.max_in_flight_per_partition)


class Budgets:
    """The budget that each partition uses under bounds per partition: its physical queue, or a budget of its own.

    The pieces of a partition share the budget of the partition.
    """

    def __init__(self) -> None:
        self._queues: dict[tuple[Segment, str], str] = {}

    def assigned(self, segment: Segment, row: Row) -> None:
        """Remember the physical queue of an assigned partition, which stays the same for the whole run."""
        if row.queue and segment.rules.queues_share_bounds:
            self._queues[segment, row.partition] = f"queue {row.queue}"

    def of(self, segment: Segment, partition: str) -> str:
        """Return the budget of a partition. A partition whose ``assigned`` row is in a gap has a budget of its own."""
        return self._queues.get((segment, partition)) or whole(partition)


def closes_prefix(rules: Rules) -> bool | None:
    """Return whether a drain still runs messages queued below the highest started message; None = unknown."""
    if rules.settles is None or rules.hands_over is None:
        return None
    return rules.settles == "cumulative" and not rules.hands_over
