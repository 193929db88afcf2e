"""The checkers of the outcome of a message within one assignment."""

from __future__ import annotations

from collections import defaultdict
from heapq import heappop, heappush
from typing import Final

from memsource.checkers.assignments import AssignmentChecker, LatestRun, with_state
from memsource.checkers.checker import PromiseChecker, on
from memsource.history.reader import Segment
from memsource.history.rows import Row
from memsource.history.timeline import Assignment, Timeline

_WAITS: Final = 0
_BEGUN: Final = 1
_FINISHED: Final = 2


class _Outcomes:
    """The messages in flight of one assignment, as position → state."""

    __slots__ = ("latest", "states")

    def __init__(self) -> None:
        self.states: dict[int, int] = {}
        self.latest = LatestRun()


class OneTerminalOutcome(AssignmentChecker[_Outcomes]):
    """Each message has one outcome in an assignment (61): the process finishes the message once, or gives it up once.

    A message finishes when its handler returns or its dead letter is confirmed. A process gives up an unfinished
    message by abandoning, interrupting or fencing the message. Without batches, the process abandons each unstarted
    message at the handover of the partition. A later delivery may have another outcome.
    """

    _state_class = _Outcomes

    @with_state("delivered")
    def _delivered(self, segment: Segment, row: Row, state: _Outcomes) -> None:
        new = row.position not in state.states
        state.latest.delivered(row, new=new)
        if new:
            state.states[row.position] = _WAITS

    @with_state("redelivered")
    def _redelivered(self, segment: Segment, row: Row, state: _Outcomes) -> None:
        if state.latest.not_held(row):
            # The message was settled before, so this delivery has no outcome.
            state.states.pop(row.position, None)

    @with_state("started")
    def _started(self, segment: Segment, row: Row, state: _Outcomes) -> None:
        if state.states.get(row.position) == _WAITS:
            state.states[row.position] = _BEGUN

    @with_state("dlq_confirmed")
    def _confirmed(self, segment: Segment, row: Row, state: _Outcomes) -> None:
        # A dead letter may be confirmed after its message was abandoned. The message then runs and is parked again.
        if row.position in state.states:
            self._finish(segment, row)

    @with_state("ended ok")
    def _finish(self, segment: Segment, row: Row, state: _Outcomes) -> None:
        self._findings.checked += 1
        before = state.states.get(row.position, _FINISHED)
        if before == _FINISHED:
            self._findings.violation(
                segment, row, "finished, although it had finished before, was given up, or was never delivered"
            )
        elif (segment, row.partition, row.assignment) in self._committing:
            del state.states[row.position]
        else:
            state.states[row.position] = _FINISHED

    @with_state("ack")
    def _ack(self, segment: Segment, row: Row, state: _Outcomes) -> None:
        # The settlement may repeat an earlier settlement that the broker did not receive. NoSettleBeforeEnd judges
        # early settlements.
        state.states.pop(row.position, None)

    @with_state("abandoned")
    def _abandoned(self, segment: Segment, row: Row, state: _Outcomes) -> None:
        self._findings.checked += 1
        if state.states.pop(row.position, _FINISHED) == _FINISHED:
            self._findings.violation(
                segment, row, "given up, although it had finished, was given up before, or was never delivered"
            )

    @with_state("zombie", find="known")
    def _zombie(self, segment: Segment, row: Row, state: _Outcomes) -> None:
        state.states.pop(row.position, None)

    @on("revoked")
    def _revoked(self, segment: Segment, row: Row) -> None:
        state = self._assignments.end(segment, row)
        # If the call of a batch still ran, its messages have no row of their end.
        if state is None or segment.rules.batch != 0:
            return
        for position, outcome in state.states.items():
            if outcome == _WAITS:
                what = "handed over with its partition: neither handled nor abandoned"
                self._findings.violation(segment, row._replace(position=position), what)


class ZombiesDoNotCount(PromiseChecker):
    """A handler that ends after the fence of its assignment counts as a zombie and settles no message (40, 53).

    The message of a zombie is neither acknowledged nor committed in the fenced assignment.

    Args:
        timeline: History to judge.
    """

    def __init__(self, timeline: Timeline) -> None:
        super().__init__(timeline)
        self._uncounted: dict[Segment, dict[tuple[str, int, int], Row]] = defaultdict(dict)
        self._zombies: dict[Assignment, set[int]] = defaultdict(set)

    @on("zombie")
    def _zombie(self, segment: Segment, row: Row) -> None:
        if row.event == "dlq_confirmed":
            return
        name = row.partition, row.assignment, row.position
        self._zombies[segment, row.partition, row.assignment].add(row.position)
        if row.event == "ended":
            self._findings.checked += 1
            self._uncounted[segment][name] = row
        else:
            self._uncounted[segment].pop(name, None)

    @on("ack")
    def _ack(self, segment: Segment, row: Row) -> None:
        if self._zombies and row.position in self._zombies.get((segment, row.partition, row.assignment), ()):
            self._findings.violation(segment, row, "acknowledged, though its handler ended after the fence")

    @on("commit_sent")
    def _commit(self, segment: Segment, row: Row) -> None:
        for position in self._zombies.get((segment, row.partition, row.assignment), ()):
            if position < row.floor:
                what = f"{row.floor} was committed past this message, although its handler ended after the fence"
                self._findings.violation(segment, row._replace(position=position), what)

    @on("gap")
    def _gap(self, segment: Segment, row: Row) -> None:
        self._uncounted.pop(segment, None)

    @on("over")
    def _over(self, segment: Segment, row: Row) -> None:
        for zombie in self._uncounted.pop(segment, {}).values():
            if not segment.crashed:
                self._findings.violation(segment, zombie, "ended after the fence and was not counted as a zombie")


class _Line:
    """The unfinished messages of one assignment, and their positions in each lane without a key."""

    __slots__ = ("held", "lanes", "latest")

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.latest = LatestRun()
        self.lanes: dict[str, list[int]] = {}


class DeliveredThenStarted(AssignmentChecker[_Line]):
    """A handler starts only for an unfinished message of its assignment; lanes without a key keep their order (5).

    Lanes without a key are whole partitions (``order="partition"`` or ``"serial"``), and all messages without a key
    (``keyless="one_lane"``). Messages of these lanes start in the order of their positions, except for messages that
    the source delivers late. ``PerKeyOrder`` judges the order of keys.
    """

    _state_class = _Line
    _ends_at = ("revoked",)

    @with_state("delivered")
    def _delivered(self, segment: Segment, row: Row, state: _Line) -> None:
        new = row.position not in state.held
        state.latest.delivered(row, new=new)
        if new:
            state.held.add(row.position)
            lane = self._lane(segment, row)
            if lane is not None:
                heappush(state.lanes.setdefault(lane, []), row.position)

    @with_state("redelivered")
    def _redelivered(self, segment: Segment, row: Row, state: _Line) -> None:
        if state.latest.not_held(row):
            state.held.discard(row.position)
        elif row.text == "late":
            lane = self._lane(segment, row)
            if lane is not None:
                state.lanes[lane] = sorted(one for one in state.lanes.get(lane, ()) if one != row.position)

    @with_state("started")
    def _started(self, segment: Segment, row: Row, state: _Line) -> None:
        self._findings.checked += 1
        if row.position not in state.held:
            self._findings.violation(
                segment, row, "started, although it was never delivered, had finished or was given up"
            )
            return
        lane = self._lane(segment, row)
        if lane is None:
            return
        waiting = state.lanes.get(lane, [])
        while waiting and waiting[0] not in state.held:
            heappop(waiting)
        if waiting and waiting[0] < row.position:
            what = f"started before position {waiting[0]} of its lane ({lane}) had ended for good"
            self._findings.violation(segment, row, what)

    def _lane(self, segment: Segment, row: Row) -> str | None:
        rules = segment.rules
        if rules.order is None or rules.keyless is None:
            self._findings.unsaid(segment, "order and keyless")
        elif rules.order in ("partition", "serial"):
            return "partition"
        elif rules.order == "key" and row.key is None and rules.keyless == "one_lane":
            return "keyless"
        return None

    @with_state("ended ok", "dlq_confirmed", "abandoned")
    def _finished(self, segment: Segment, row: Row, state: _Line) -> None:
        state.held.discard(row.position)
