"""What becomes of a message within one assignment."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from heapq import heappop, heappush
from typing import Final

from memsource.checkers.assignments import Assignments, LatestRun
from memsource.checkers.verdict import Findings, Handler, Verdict
from memsource.history.reader import Segment
from memsource.history.rows import Row
from memsource.history.timeline import Assignment, Timeline

__all__ = ["DeliveredThenStarted", "OneTerminalOutcome", "ZombiesDoNotCount"]

_WAITS: Final = 0
_BEGUN: Final = 1
_FINISHED: Final = 2


class _Held:
    """Of one assignment: position -> what has become of it, while it is held."""

    __slots__ = ("latest", "states")

    def __init__(self) -> None:
        self.states: dict[int, int] = {}
        self.latest = LatestRun()


class OneTerminalOutcome:
    """Every message has one outcome in an assignment (61): it is finished, or given up.

    *Finished*: its handler returned, or its dead letter was confirmed; once. *Given up*: abandoned, interrupted, or
    behind a fence; and never what has finished. What was delivered and never begun is abandoned when its partition is
    handed over, unless it was in a batch. What the broker delivers anew may have another.
    """

    name = "OneTerminalOutcome"

    def __init__(self, timeline: Timeline) -> None:
        self._findings = Findings(self.name, timeline)
        self._committing = timeline.committing
        self._assignments = Assignments(_Held)

    def handlers(self) -> Mapping[str, Handler]:
        return {
            "delivered": self._delivered,
            "redelivered": self._redelivered,
            "started": self._started,
            "ended": self._ended,
            "dlq_confirmed": self._confirmed,
            "ack": self._ack,
            "abandoned": self._abandoned,
            "zombie": self._zombie,
            "revoked": self._revoked,
            "lost": self._lost,
            "gap": self._gap,
        }

    def verdict(self) -> Verdict:
        return self._findings.verdict()

    def _delivered(self, segment: Segment, row: Row) -> None:
        state = self._assignments.of(segment, row)
        if state is None:
            return
        new = row.position not in state.states
        state.latest.delivered(row, new=new)
        if new:
            state.states[row.position] = _WAITS

    def _redelivered(self, segment: Segment, row: Row) -> None:
        state = self._assignments.of(segment, row)
        if state is not None and state.latest.not_held(row):
            # Nothing becomes of this delivery.
            state.states.pop(row.position, None)

    def _started(self, segment: Segment, row: Row) -> None:
        state = self._assignments.of(segment, row)
        if state is not None and state.states.get(row.position) == _WAITS:
            state.states[row.position] = _BEGUN

    def _ended(self, segment: Segment, row: Row) -> None:
        if row.text == "ok":
            self._finish(segment, row)

    def _confirmed(self, segment: Segment, row: Row) -> None:
        state = self._assignments.of(segment, row)
        # A letter may be confirmed when its message was abandoned meanwhile: it runs again, and is parked again.
        if state is not None and row.position in state.states:
            self._finish(segment, row)

    def _finish(self, segment: Segment, row: Row) -> None:
        state = self._assignments.of(segment, row)
        if state is None:
            return
        self._findings.checked += 1
        before = state.states.get(row.position, _FINISHED)
        if before == _FINISHED:
            self._findings.violation(segment, row, "finished though it had finished, was given up, or never delivered")
        elif (segment, row.partition, row.assignment) in self._committing:
            del state.states[row.position]
        else:
            state.states[row.position] = _FINISHED

    def _ack(self, segment: Segment, row: Row) -> None:
        # Again where the settlement before may not have reached the broker. Too early is for NoSettleBeforeEnd to say.
        state = self._assignments.of(segment, row)
        if state is not None:
            state.states.pop(row.position, None)

    def _abandoned(self, segment: Segment, row: Row) -> None:
        state = self._assignments.of(segment, row)
        if state is None:
            return
        self._findings.checked += 1
        if state.states.pop(row.position, _FINISHED) == _FINISHED:
            self._findings.violation(segment, row, "given up though it had finished, was given up, or never delivered")

    def _zombie(self, segment: Segment, row: Row) -> None:
        state = self._assignments.known(segment, row)
        if state is not None:
            state.states.pop(row.position, None)

    def _revoked(self, segment: Segment, row: Row) -> None:
        state = self._assignments.end(segment, row)
        # What was in a call that went on has no row.
        if state is None or segment.rules.batch != 0:
            return
        for position, outcome in state.states.items():
            if outcome == _WAITS:
                what = "handed over with its partition: neither handled nor abandoned"
                self._findings.violation(segment, row._replace(position=position), what)

    def _lost(self, segment: Segment, row: Row) -> None:
        self._assignments.end(segment, row)

    def _gap(self, segment: Segment, row: Row) -> None:
        self._assignments.gap(segment)


class ZombiesDoNotCount:
    """A handler that ends behind the fence of its assignment is counted as a zombie, and changes nothing (40, 53): its
    message is neither acknowledged nor committed under that assignment."""

    name = "ZombiesDoNotCount"

    def __init__(self, timeline: Timeline) -> None:
        self._findings = Findings(self.name, timeline)
        self._uncounted: dict[Segment, dict[tuple[str, int, int], Row]] = defaultdict(dict)
        self._zombies: dict[Assignment, set[int]] = defaultdict(set)

    def handlers(self) -> Mapping[str, Handler]:
        return {
            "zombie": self._zombie,
            "ack": self._ack,
            "commit_sent": self._commit,
            "gap": self._gap,
            "over": self._over,
        }

    def verdict(self) -> Verdict:
        return self._findings.verdict()

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

    def _ack(self, segment: Segment, row: Row) -> None:
        if self._zombies and row.position in self._zombies.get((segment, row.partition, row.assignment), ()):
            self._findings.violation(segment, row, "acknowledged, though its handler ended behind the fence")

    def _commit(self, segment: Segment, row: Row) -> None:
        for position in self._zombies.get((segment, row.partition, row.assignment), ()):
            if position < row.floor:
                what = f"{row.floor} was committed above it, though its handler ended behind the fence"
                self._findings.violation(segment, row._replace(position=position), what)

    def _gap(self, segment: Segment, row: Row) -> None:
        self._uncounted.pop(segment, None)

    def _over(self, segment: Segment, row: Row) -> None:
        for zombie in self._uncounted.pop(segment, {}).values():
            if not segment.crashed:
                self._findings.violation(segment, zombie, "ended behind the fence, and was not counted as a zombie")


class _Line:
    """Of one assignment: what is held, and the unfinished positions of each lane that is more than a key."""

    __slots__ = ("held", "lanes", "latest")

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.latest = LatestRun()
        self.lanes: dict[str, list[int]] = {}


class DeliveredThenStarted:
    """A handler starts at what was delivered in its assignment and is not finished; and where a lane is more than a
    key, in the order of its delivery (5).

    Such lanes are the partition (``order="partition"`` or ``"serial"``), and all messages without a key
    (``keyless="one_lane"``); without a lane messages have no order. The order of keys is for ``PerKeyOrder`` to say.
    What the broker delivers too late has no place any more.
    """

    name = "DeliveredThenStarted"

    def __init__(self, timeline: Timeline) -> None:
        self._findings = Findings(self.name, timeline)
        self._assignments = Assignments(_Line)

    def handlers(self) -> Mapping[str, Handler]:
        return {
            "delivered": self._delivered,
            "redelivered": self._redelivered,
            "started": self._started,
            "ended": self._ended,
            "dlq_confirmed": self._finished,
            "abandoned": self._finished,
            "revoked": self._over,
            "lost": self._over,
            "gap": self._gap,
        }

    def verdict(self) -> Verdict:
        return self._findings.verdict()

    def _delivered(self, segment: Segment, row: Row) -> None:
        state = self._assignments.of(segment, row)
        if state is None:
            return
        new = row.position not in state.held
        state.latest.delivered(row, new=new)
        if new:
            state.held.add(row.position)
            lane = self._lane(segment, row)
            if lane is not None:
                heappush(state.lanes.setdefault(lane, []), row.position)

    def _redelivered(self, segment: Segment, row: Row) -> None:
        state = self._assignments.of(segment, row)
        if state is None:
            return
        if state.latest.not_held(row):
            state.held.discard(row.position)
        elif row.text == "late":
            lane = self._lane(segment, row)
            if lane is not None:
                state.lanes[lane] = sorted(one for one in state.lanes.get(lane, ()) if one != row.position)

    def _started(self, segment: Segment, row: Row) -> None:
        state = self._assignments.of(segment, row)
        if state is None:
            return
        self._findings.checked += 1
        if row.position not in state.held:
            self._findings.violation(
                segment, row, "started though it is not held: never delivered, finished or given up"
            )
            return
        lane = self._lane(segment, row)
        if lane is None:
            return
        waiting = state.lanes.get(lane, [])
        while waiting and waiting[0] not in state.held:
            heappop(waiting)
        if waiting and waiting[0] < row.position:
            what = f"started before position {waiting[0]} of its lane ({lane}) had ended finally"
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

    def _ended(self, segment: Segment, row: Row) -> None:
        if row.text == "ok":
            self._finished(segment, row)

    def _finished(self, segment: Segment, row: Row) -> None:
        state = self._assignments.of(segment, row)
        if state is not None:
            state.held.discard(row.position)

    def _over(self, segment: Segment, row: Row) -> None:
        self._assignments.end(segment, row)

    def _gap(self, segment: Segment, row: Row) -> None:
        self._assignments.gap(segment)
