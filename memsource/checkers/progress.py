"""The checkers of the progress of lanes whose head can start, and of partitions that take turns."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection
from typing import Any, Final

from memsource.checkers.assignments import AssignmentChecker, Budgets, has_budgets, lane_of
from memsource.checkers.checker import on
from memsource.checkers.verdict import printable
from memsource.history.reader import Segment
from memsource.history.rows import Row, whole
from memsource.history.timeline import Timeline

_TURNS: Final = 2
"""Most calls of another partition while a partition waits: 1, and 1 if a turn of the waiting partition has no row."""


class _Ready:
    """The unfinished messages of each lane of one assignment, and the count of starts when a head became ready."""

    __slots__ = ("ahead", "lanes", "measured", "since")

    def __init__(self) -> None:
        self.lanes: dict[str, deque[int]] = {}
        self.since: dict[int, int] = {}
        self.ahead = False
        self.measured = True


class _ReadyHeads(AssignmentChecker[_Ready]):
    """A checker that knows which heads can start, and judges each start.

    The checker measures nothing in a segment without a bound.
    """

    _state_class = _Ready
    _ends_at = ("revoking",)

    def __init__(self, timeline: Timeline) -> None:
        super().__init__(timeline)
        # By partition if the rules have bounds per partition, else with the partition "" for all partitions together.
        self._starts: dict[tuple[Segment, str], int] = defaultdict(int)
        # (segment, whole partition, lane) -> running handlers, as (assignment, position). Several handlers of a lane
        # run only if earlier handlers were fenced. The pieces of a partition share its lanes.
        self._running: dict[tuple[Segment, str, str], set[tuple[int, int]]] = {}
        self._bounds = {segment: self._bound(segment) for segment in timeline.segments}

    @staticmethod
    def _bound(segment: Segment) -> int | None:
        """Return the largest number of other starts before an awaited start; None = not measured."""
        raise NotImplementedError

    def _judge_start(self, segment: Segment, row: Row, since: int | None, bound: int) -> None:
        """Judge a start. ``since``: count of starts when its head became ready; None = not measured."""
        raise NotImplementedError

    def _judge_end(self, segment: Segment, last: Row, state: _Ready, bound: int) -> None:
        """Judge the heads that never started."""

    @staticmethod
    def _counted(segment: Segment, partition: str) -> tuple[Segment, str]:
        """Return the name under which the checker counts the starts that delay a partition's heads."""
        return segment, partition if has_budgets(segment) else ""

    def _state(self, segment: Segment, row: Row) -> _Ready | None:
        if self._bounds[segment] is None:
            return None
        state = self._assignments.of(segment, row)
        return state if state is not None and state.measured else None

    @on("delivered")
    def _delivered(self, segment: Segment, row: Row) -> None:
        state = self._state(segment, row)
        if state is None:
            if segment.rules.lanes is None:
                self._findings.unsaid(segment, "order, keyless, lanes and batch")
            return
        lane = lane_of(segment.rules, row)
        if lane is not None:
            waiting = state.lanes.get(lane)
            if waiting is not None:
                waiting.append(row.position)
                return
            state.lanes[lane] = deque([row.position])
        if not state.ahead and not self._behind(segment, row, lane):
            state.since.setdefault(row.position, self._starts[self._counted(segment, row.partition)])

    def _behind(self, segment: Segment, row: Row, lane: str | None) -> bool:
        """Return whether a handler of an earlier assignment still runs in the lane."""
        running = self._running.get((segment, whole(row.partition), lane), ()) if lane is not None else ()
        return any(assignment != row.assignment for assignment, _ in running)

    @on("redelivered")
    def _redelivered(self, segment: Segment, row: Row) -> None:
        state = self._state(segment, row)
        if state is None:
            return
        if segment.rules.settles == "cumulative":
            self._leave(segment, row, state)
        else:
            # The history does not show where in its lane the message waits.
            state.measured = False
            state.since.clear()
            state.lanes.clear()

    @on("started")
    def _started(self, segment: Segment, row: Row) -> None:
        bound = self._bounds[segment]
        if bound is None:
            return
        self._starts[self._counted(segment, row.partition)] += 1
        lane = lane_of(segment.rules, row)
        if lane is not None:
            name = segment, whole(row.partition), lane
            self._running.setdefault(name, set()).add((row.assignment, row.position))
        state = self._state(segment, row)
        since = None if state is None else state.since.pop(row.position, None)
        self._judge_start(segment, row, since, bound)

    @on("ended")
    def _ended(self, segment: Segment, row: Row) -> None:
        self._runs_no_more(segment, row)
        if row.text == "ok":
            self._finished(segment, row)

    @on("published")
    def _published(self, segment: Segment, row: Row) -> None:
        self._finished(segment, row)

    @on("zombie")
    def _zombie(self, segment: Segment, row: Row) -> None:
        lane = self._runs_no_more(segment, row)
        name = whole(row.partition)
        if lane is None or self._running.get((segment, name, lane)):
            return
        for (one, partition, _), state in self._assignments.states.items():
            waiting = state.lanes.get(lane)
            if one is segment and whole(partition) == name and waiting and state.measured and not state.ahead:
                state.since.setdefault(waiting[0], self._starts[self._counted(segment, partition)])

    def _runs_no_more(self, segment: Segment, row: Row) -> str | None:
        """Record the end of a handler. Return its lane, or None if it has no lane or its start is unknown."""
        lane = lane_of(segment.rules, row)
        running = None if lane is None else self._running.get((segment, whole(row.partition), lane))
        if lane is None or running is None or (row.assignment, row.position) not in running:
            return None
        running.remove((row.assignment, row.position))
        if not running:
            del self._running[segment, whole(row.partition), lane]
        return lane

    @on("dlq_confirmed")
    def _finished(self, segment: Segment, row: Row) -> None:
        state = self._state(segment, row)
        if state is not None:
            self._leave(segment, row, state)

    def _leave(self, segment: Segment, row: Row, state: _Ready) -> None:
        """Make the next message of the lane the head."""
        state.since.pop(row.position, None)
        lane = lane_of(segment.rules, row)
        waiting = None if lane is None else state.lanes.get(lane)
        if lane is None or not waiting:
            return
        if waiting[0] != row.position:
            if row.position in waiting:
                waiting.remove(row.position)
            return
        waiting.popleft()
        if not waiting:
            del state.lanes[lane]
        elif not state.ahead and not self._behind(segment, row, lane):
            state.since[waiting[0]] = self._starts[self._counted(segment, row.partition)]

    @on("ahead_reached")
    def _ahead(self, segment: Segment, row: Row) -> None:
        state = self._state(segment, row)
        if state is not None:
            # No row shows which messages wait for max_ahead.
            state.ahead = True
            state.since.clear()

    @on("ahead_left")
    def _not_ahead(self, segment: Segment, row: Row) -> None:
        state = self._state(segment, row)
        if state is not None:
            state.ahead = False

    @on("abandoned")
    def _stop(self, segment: Segment, row: Row) -> None:
        state = self._state(segment, row)
        if state is not None:
            state.measured = False

    @on("gap")
    def _gap(self, segment: Segment, row: Row) -> None:
        self._assignments.gap(segment)
        self._forget(segment)

    def _forget(self, segment: Segment) -> None:
        for one in [one for one in self._running if one[0] is segment]:
            del self._running[one]

    @on("over")
    def _end(self, segment: Segment, row: Row) -> None:
        bound = self._bounds[segment]
        for last, state in self._assignments.ending(segment, row):
            if bound is not None and state.measured:
                self._judge_end(segment, last, state, bound)
        self._assignments.drop(segment)
        self._forget(segment)


class LaneProgress(_ReadyHeads):
    """A lane whose head can start starts its head after at most ``max_in_flight`` other starts (30).

    Other lanes and other partitions do not delay a head (29, 35). With batches the bound is ``max_in_flight`` calls,
    of ``batch`` messages each. With bounds per partition, only the starts of the head's own partition count, and
    ``PartitionTurns`` judges the others. If a handler of an earlier assignment still runs in the lane, the head can
    start when this handler has ended. The checker does not measure heads that are held for a retry or blocked, wait for
    ``max_ahead``, were redelivered, or belong to drained partitions. A message that an earlier owner gave up is blocked
    or written to the dead letters when its turn comes, without another start. If keys share lanes, the checker measures
    no head, because a history does not show which keys share a lane.

    Args:
        timeline: History to judge.
    """

    @staticmethod
    def _bound(segment: Segment) -> int | None:
        rules = segment.rules
        unsaid = None in (rules.order, rules.keyless, rules.lanes, rules.batch)
        if segment.max_in_flight is None or unsaid or rules.lanes:
            return None
        return segment.max_in_flight * max(1, rules.batch or 1)

    @on("blocked", "dlq_sent")
    def _given_up(self, segment: Segment, row: Row) -> None:
        state = self._state(segment, row)
        if state is not None:
            state.since.pop(row.position, None)

    def _judge_start(self, segment: Segment, row: Row, since: int | None, bound: int) -> None:
        if since is None:
            return
        self._findings.checked += 1
        between = self._starts[self._counted(segment, row.partition)] - since - 1
        if between > bound:
            self._findings.violation(segment, row, f"{between} others started before it, the bound is {bound}")

    def _judge_end(self, segment: Segment, last: Row, state: _Ready, bound: int) -> None:
        starts = self._starts[self._counted(segment, last.partition)]
        for position, since in state.since.items():
            if starts - since > bound:
                head = last._replace(position=position)
                what = f"{starts - since} others started and it never did, the bound is {bound}"
                self._findings.violation(segment, head, what)


class PartitionTurns(_ReadyHeads):
    """With bounds per partition, a ready partition waits for at most two calls of each other partition (64).

    A partition is ready if the head of one of its lanes can start, and fewer than ``concurrency_per_partition`` of its
    handlers run. The engine takes the partitions in turn, so each other partition has at most one call before the
    waiting partition. The checker allows two calls, because a message whose lease expires uses a turn and has no row.
    The partitions of a physical queue count together, as one, and the pieces of a partition also count as one. Each
    partition of a queue waits for at most two calls of each other partition of the queue. With batches the checker also
    allows a batch for each running call, because rows of the later messages of a lane follow the call. With a store of
    attempts the checker measures nothing, because a formerly given-up message also uses a turn and has no row.

    Args:
        timeline: History to judge.
    """

    def __init__(self, timeline: Timeline) -> None:
        super().__init__(timeline)
        self._budgets = Budgets()
        # For each budget that can start a message: the starts of the other budgets since its last start.
        self._passed: dict[tuple[Segment, str], Counter[str]] = {}
        # For each partition of a queue that can start a message: the starts of the other partitions of its queue.
        self._passed_within: dict[tuple[Segment, str], Counter[str]] = {}
        # (segment, budget) -> running handlers, as (partition, assignment, position)
        self._handlers: dict[tuple[Segment, str], set[tuple[str, int, int]]] = defaultdict(set)
        self._incomplete: set[Segment] = set()

    @on("assigned")
    def _assigned(self, segment: Segment, row: Row) -> None:
        self._budgets.assigned(segment, row)

    @staticmethod
    def _bound(segment: Segment) -> int | None:
        rules = segment.rules
        if not has_budgets(segment) or rules.lanes or rules.attempts_kept:
            return None
        calls = rules.concurrency_per_partition or segment.concurrency or 1
        return (_TURNS + calls) * rules.batch if rules.batch else _TURNS

    def _judge_start(self, segment: Segment, row: Row, since: int | None, bound: int) -> None:
        started = self._budgets.of(segment, row.partition)
        self._handlers[segment, started].add((row.partition, row.assignment, row.position))
        heads: dict[str, set[str]] = defaultdict(set)  # the partitions with a head that can start, by budget
        for (one, partition, _), state in self._assignments.states.items():
            budget = self._budgets.of(segment, partition)
            # A gap may hide handlers of other partitions of a queue.
            known = budget == whole(partition) or segment not in self._incomplete
            if one is segment and state.since and state.measured and known:
                heads[budget].add(partition)
        waiting = {budget for budget in heads if self._free(segment, budget)}
        self._pass_by(self._passed, segment, row, (started, waiting - {started}), bound)
        # This start may have used the last free call of its queue.
        within = {each for each in heads[started] if whole(each) != whole(row.partition)}
        self._pass_by(self._passed_within, segment, row, (row.partition, within), bound)
        for name in [name for name in self._passed if name[0] is segment and name[1] not in waiting]:
            del self._passed[name]
        for name in [name for name in self._passed_within if name[0] is segment]:
            if name[1] not in heads[self._budgets.of(segment, name[1])]:
                del self._passed_within[name]

    def _pass_by(
        self,
        counts: dict[tuple[Segment, str], Counter[str]],
        segment: Segment,
        row: Row,
        names: tuple[str, Collection[str]],
        bound: int,
    ) -> None:
        """Count a start of one name for each waiting name. The count for the started name restarts at 0."""
        started, others = names
        counts.pop((segment, started), None)
        for waits in sorted(others):
            self._findings.checked += 1
            passed = counts.setdefault((segment, waits), Counter())
            passed[started] += 1
            if passed[started] == bound + 1:
                what = f"{bound + 1} starts of its partition while {printable(waits)} waits, the bound is {bound}"
                self._findings.violation(segment, row, what)

    def _free(self, segment: Segment, budget: str) -> bool:
        limit = segment.rules.concurrency_per_partition
        return not limit or len(self._handlers[segment, budget]) < limit

    def _runs_no_more(self, segment: Segment, row: Row) -> str | None:
        handlers = self._handlers[segment, self._budgets.of(segment, row.partition)]
        handlers.discard((row.partition, row.assignment, row.position))
        return super()._runs_no_more(segment, row)

    @on("gap")
    def _gap(self, segment: Segment, row: Row) -> None:
        super()._gap(segment, row)
        self._incomplete.add(segment)

    def _forget(self, segment: Segment) -> None:
        super()._forget(segment)
        each: dict[tuple[Segment, str], Any]
        for each in (self._handlers, self._passed, self._passed_within):
            for name in [name for name in each if name[0] is segment]:
                del each[name]
