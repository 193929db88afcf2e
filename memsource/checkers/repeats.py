"""What is run again by a later assignment, and what must not be."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from lanes.config import SETTLE_WITHIN
from memsource.checkers.assignments import Assignments, closes_prefix
from memsource.checkers.deadlines import Drain, timeout_of, well_nigh
from memsource.checkers.verdict import Findings, Handler, Verdict, at
from memsource.history.reader import Segment
from memsource.history.rows import Row
from memsource.history.timeline import Assignment, Timeline

__all__ = ["NoDuplicateCleanly", "OrderAcrossAssignments"]


class _Line:
    """Of one key: what was delivered, in order, and how many of it were started when rewinds are taken out; ``taken``:
    how many at most in an assignment that the broker has taken."""

    __slots__ = ("by", "delivered", "started", "taken")

    def __init__(self) -> None:
        self.delivered: list[int] = []
        self.started = 0
        self.taken = 0
        self.by: tuple[Segment, int] | None = None  # the assignment of the latest start


class OrderAcrossAssignments:
    """What was started of a key is, when rewinds to a committed position are taken out, what was delivered of it, in
    its order and without a hole (4).

    An assignment begins at a position that somebody had committed, or where the first one in this history began, and
    runs nothing below it; within an assignment nothing goes back but to repeat its own last message. What the broker
    has taken goes on beside its next owner until it hears of that, and is not judged by its holes and rewinds. Only
    where positions are committed; of the others ``PerKeyOrder`` says what there is to say.
    """

    name = "OrderAcrossAssignments"

    def __init__(self, timeline: Timeline) -> None:
        self._findings = Findings(self.name, timeline)
        self._incomparable = timeline.incomparable
        self._committing = timeline.committing
        self._taken = timeline.taken
        self._stopped = False
        self._lines: dict[tuple[str, str], _Line] = {}
        self._committed: dict[str, set[int]] = {}
        self._floors: dict[Assignment, int] = {}

    def handlers(self) -> Mapping[str, Handler]:
        return {
            "assigned": self._assigned,
            "delivered": self._delivered,
            "redelivered": self._redelivered,
            "started": self._started,
            "blocked": self._given_up,
            "dlq_sent": self._given_up,
            "commit_sent": self._commit,
            "gap": self._gap,
        }

    def verdict(self) -> Verdict:
        findings = self._findings
        # Of rows of several processes at the same moment nobody knows which came first.
        strange = sum(floor not in self._committed[name] for (_, name, _), floor in self._floors.items())
        return findings.verdict(
            across=True, doubts={"assignments began at a position that nobody in this history had committed": strange}
        )

    def _assigned(self, segment: Segment, row: Row) -> None:
        if row.floor < 0 or self._stopped or row.partition in self._incomparable:
            return
        self._floors[segment, row.partition, row.assignment] = row.floor
        self._committed.setdefault(row.partition, {row.floor})

    def _commit(self, segment: Segment, row: Row) -> None:
        self._committed.setdefault(row.partition, set()).add(row.floor)

    def _line(self, segment: Segment, row: Row) -> _Line | None:
        if row.key is None or self._stopped or (segment, row.partition, row.assignment) not in self._committing:
            return None
        if segment.rules.order == "none" or row.partition in self._incomparable:
            return None
        if segment.rules.order is None:
            self._findings.unsaid(segment, "order")
            return None
        line = self._lines.get((row.partition, row.key))
        if line is None:
            line = self._lines[row.partition, row.key] = _Line()
        return line

    def _delivered(self, segment: Segment, row: Row) -> None:
        line = self._line(segment, row)
        if line is None:
            return
        delivered = line.delivered
        if not delivered or delivered[-1] < row.position:
            delivered.append(row.position)
            return
        index = bisect_left(delivered, row.position)
        if delivered[index] != row.position:
            # Whoever had it before left it out, or is not in this history.
            delivered.insert(index, row.position)
            line.started += index < line.started
            line.taken += index < line.taken

    def _redelivered(self, segment: Segment, row: Row) -> None:
        line = self._line(segment, row) if row.text == "settled" else None
        if line is not None:
            # A predecessor had completed it, and with it everything before it of its key.
            line.started = max(line.started, bisect_left(line.delivered, row.position) + 1)

    def _started(self, segment: Segment, row: Row) -> None:
        line = self._line(segment, row)
        if line is None:
            return
        self._findings.checked += 1
        index = bisect_left(line.delivered, row.position)
        if index == len(line.delivered) or line.delivered[index] != row.position:
            # That it was never delivered is for DeliveredThenStarted to say.
            return
        floor = self._floors.get((segment, row.partition, row.assignment), 0)
        if row.position < floor:
            self._findings.violation(segment, row, f"started below {floor}, where its assignment began")
        if (segment, row.partition, row.assignment) in self._taken:
            # Beside it the next owner may have gone back: whoever is next goes on from where either of them was.
            line.started, line.by = max(line.started, index + 1), None
            line.taken = max(line.taken, index + 1)
            return
        by = segment, row.assignment
        # What was taken may have been committed when the next owner had gone back already.
        started = max(line.started, min(line.taken, bisect_left(line.delivered, floor)))
        if index > started:
            what = f"started, and position {line.delivered[started]} of its key never was"
            self._findings.violation(segment, row, what)
        elif index < line.started - 1 and line.by == by:
            what = f"went back in its assignment from position {line.delivered[line.started - 1]} of its key"
            self._findings.violation(segment, row, what)
        line.started, line.by = index + 1, by

    def _given_up(self, segment: Segment, row: Row) -> None:
        """Where attempts are kept, what an earlier owner gave up has its turn without a start."""
        line = self._line(segment, row) if segment.rules.attempts_kept else None
        if line is not None and row.position in line.delivered[line.started : line.started + 1]:
            line.started += 1

    def _gap(self, segment: Segment, row: Row) -> None:
        # What was started in it, by whomever, is unknown.
        self._stopped = True


class _Work:
    """Of one assignment: what has finished and is not settled for good, what has begun and has not finished, what was
    given up, all of it and when there was no more time, and which commits took effect."""

    __slots__ = (
        "abandoned",
        "began",
        "confirmed",
        "drain",
        "drained",
        "finished",
        "floor",
        "sent",
        "too_late",
        "unsure",
    )

    def __init__(self) -> None:
        self.finished: dict[int, int] = {}  # position -> number of its row
        self.began: set[int] = set()
        self.abandoned: set[int] = set()
        self.too_late: set[int] = set()
        self.drain = Drain()
        self.floor = -1
        self.sent: Row | None = None
        self.confirmed = -1  # number of the latest commit that was
        self.unsure = False
        self.drained: float | None = None


class _Done(NamedTuple):
    """Finished in an assignment that was handed over cleanly, at ``floor``."""

    segment: Segment
    row: Row
    floor: int


class NoDuplicateCleanly:
    """A clean hand-over repeats nothing that had finished (44), and leaves nothing finished uncommitted (54).

    Clean is: drained and handed over, with every commit confirmed, in less than settling may take, and not after the
    broker had taken it. Where the completed set cannot be handed over, what lies above the committed floor is repeated
    when a message below it waited or ran on, could not start in the time there was for it, or because a handler of an
    earlier assignment was still running. What is below it nobody delivers again, as ``OrderAcrossAssignments`` says. An
    acknowledged message that comes again was forgotten by its broker, which is no fault of the hand-over.
    """

    name = "NoDuplicateCleanly"

    def __init__(self, timeline: Timeline) -> None:
        self._findings = Findings(self.name, timeline)
        self._committing = timeline.committing
        self._incomparable = timeline.incomparable
        self._taken = timeline.taken
        self._newest: dict[str, Assignment] = {}
        self._assignments = Assignments(_Work)
        self._done: dict[str, dict[int, _Done]] = defaultdict(dict)
        self._floors: dict[Assignment, int] = {}
        self._disturbed: set[str] = set()
        # Where handlers of an assignment that is over may still hold their lanes.
        self._fenced: set[tuple[Segment, str]] = set()
        self._stopped = False

    def handlers(self) -> Mapping[str, Handler]:
        return {
            "assigned": self._assigned,
            "redelivered": self._redelivered,
            "started": self._started,
            "ended": self._ended,
            "dlq_confirmed": self._letter,
            "abandoned": self._abandoned,
            "ack": self._ack,
            "commit_sent": self._sent,
            "commit_ok": self._confirmed,
            "commit_failed": self._failed,
            "revoking": self._revoking,
            "hastened": self._revoking,
            "drained": self._drained,
            "revoked": self._revoked,
            "lost": self._lost,
            "gap": self._gap,
            "over": self._over,
        }

    def verdict(self) -> Verdict:
        return self._findings.verdict(across=True)

    def _assigned(self, segment: Segment, row: Row) -> None:
        self._assignments.begin(segment, row).floor = row.floor
        self._floors[segment, row.partition, row.assignment] = row.floor
        if not self._taken:
            return
        self._newest[row.partition] = segment, row.partition, row.assignment
        for assignment, state in self._assignments.states.items():
            if assignment[1] == row.partition and assignment in self._taken and state.sent is not None:
                self._disturb(row.partition)

    def _comes_late(self, segment: Segment, row: Row) -> None:
        """A commit of what the broker has taken lands on top of what the next owner has committed."""
        assignment = segment, row.partition, row.assignment
        if assignment in self._taken and self._newest.get(row.partition) != assignment:
            self._disturb(row.partition)

    def _redelivered(self, segment: Segment, row: Row) -> None:
        if row.text == "settled" and (segment, row.partition, row.assignment) in self._committing:
            self._finished(segment, row)

    def _started(self, segment: Segment, row: Row) -> None:
        state = self._assignments.of(segment, row)
        if state is not None:
            state.began.add(row.position)
        if not self._done:
            return
        done = self._done[row.partition].pop(row.position, None)
        if done is None or row.partition in self._disturbed or row.partition in self._incomparable or self._stopped:
            return
        if self._floors.get((segment, row.partition, row.assignment), -1) >= done.floor:
            # Else somebody had committed a lower position since then.
            what = f"started again after it had finished and was handed over cleanly ({at(done.segment, done.row)})"
            self._findings.violation(segment, row, what)

    def _ended(self, segment: Segment, row: Row) -> None:
        if row.text == "ok":
            self._finished(segment, row)

    def _finished(self, segment: Segment, row: Row) -> None:
        state = self._assignments.of(segment, row)
        if state is not None:
            state.began.discard(row.position)
            state.finished[row.position] = row.n

    def _letter(self, segment: Segment, row: Row) -> None:
        state = self._assignments.of(segment, row)
        # One that is confirmed when its message was given up changes nothing: it runs again.
        if state is not None and row.position not in state.abandoned:
            self._finished(segment, row)

    def _abandoned(self, segment: Segment, row: Row) -> None:
        state = self._assignments.of(segment, row)
        if state is None:
            return
        state.abandoned.add(row.position)
        if state.drain.since is not None and well_nigh(row.mono - state.drain.since, state.drain.timeout):
            state.too_late.add(row.position)

    def _ack(self, segment: Segment, row: Row) -> None:
        state = self._assignments.of(segment, row)
        if state is not None:
            state.finished.pop(row.position, None)

    def _sent(self, segment: Segment, row: Row) -> None:
        state = self._assignments.of(segment, row)
        if state is not None:
            state.sent = row
            self._comes_late(segment, row)

    def _confirmed(self, segment: Segment, row: Row) -> None:
        state = self._assignments.of(segment, row)
        if state is None or state.sent is None:
            return
        self._comes_late(segment, row)
        state.confirmed, state.floor = state.sent.n, state.sent.floor
        state.sent, state.unsure = None, False
        floor, n = state.floor, state.confirmed
        state.finished = {p: row for p, row in state.finished.items() if p >= floor or row > n}

    def _failed(self, segment: Segment, row: Row) -> None:
        state = self._assignments.of(segment, row)
        if state is not None:
            state.sent, state.unsure = None, True
            self._comes_late(segment, row)

    def _revoking(self, segment: Segment, row: Row) -> None:
        state, timeout = self._assignments.of(segment, row), timeout_of(segment, row)
        if state is not None and timeout is not None:
            state.drain.begin(row.mono, timeout)

    def _drained(self, segment: Segment, row: Row) -> None:
        state = self._assignments.of(segment, row)
        if state is not None:
            state.drained = row.mono

    def _revoked(self, segment: Segment, row: Row) -> None:
        if (segment, row.partition, row.assignment) in self._taken:
            self._lost(segment, row)
            return
        state = self._assignments.end(segment, row)
        if state is None:
            return
        fenced = (segment, row.partition) in self._fenced
        if state.began:
            self._fenced.add((segment, row.partition))
        if state.unsure or state.sent is not None:
            self._disturb(row.partition)
            return
        if state.drain.since is None:
            self._findings.unsaid(segment, "drain_timeout")
            return
        if state.drained is None or well_nigh(row.mono - state.drained, SETTLE_WITHIN):
            return
        self._findings.checked += 1
        if (segment, row.partition, row.assignment) in self._committing:
            self._handed_over(segment, row, state, fenced=fenced)
        else:
            for position in state.finished:
                what = "finished, and not settled when its partition was handed over"
                self._findings.violation(segment, row._replace(position=position), what)

    def _handed_over(self, segment: Segment, row: Row, state: _Work, *, fenced: bool) -> None:
        closes = closes_prefix(segment.rules)
        if closes is None:
            self._findings.unsaid(segment, "whether the completed set is handed over")
            return
        lowest = min(state.began | state.too_late, default=None)
        done = self._done[row.partition]
        for position, n in state.finished.items():
            if n > state.confirmed:
                what = "finished, and not committed when its partition was handed over"
                self._findings.violation(segment, row._replace(position=position), what)
            if not closes or (not fenced and (lowest is None or position < lowest)):
                done[position] = _Done(segment, row, state.floor)

    def _disturb(self, partition: str) -> None:
        """A commit of an assignment that is over may still arrive, and undo what others have committed."""
        self._disturbed.add(partition)
        self._done.pop(partition, None)

    def _lost(self, segment: Segment, row: Row) -> None:
        state = self._assignments.end(segment, row)
        if state is None:
            return
        if state.began:
            self._fenced.add((segment, row.partition))
        if state.unsure or state.sent is not None:
            self._disturb(row.partition)

    def _gap(self, segment: Segment, row: Row) -> None:
        # Whatever disturbs a partition may be in it.
        self._assignments.gap(segment)
        self._done.clear()
        self._stopped = True

    def _over(self, segment: Segment, row: Row) -> None:
        for (one, partition, _), state in self._assignments.states.items():
            if one is segment and (state.unsure or state.sent is not None):
                self._disturb(partition)
        self._assignments.drop(segment)
