"""The checkers of repeats: messages whose handler runs in one assignment and again in a later one."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection
from typing import NamedTuple

from lanes.config import SETTLE_WITHIN
from memsource.checkers.assignments import AssignmentChecker, closes_prefix, with_state
from memsource.checkers.checker import PromiseChecker, on
from memsource.checkers.deadlines import Drain, froze_before, timeout_of, well_nigh
from memsource.checkers.verdict import at
from memsource.history.reader import Segment
from memsource.history.rows import Row, is_piece, whole
from memsource.history.timeline import Assignment, Timeline


class _Line:
    """The messages of one key.

    Attributes:
        delivered: Positions of the messages, in order.
        started: Number of messages up to and including the latest started message.
        taken: Number of messages up to the highest message that started in an assignment taken by the broker.
        by: The assignment of the latest start; None after a start in an assignment taken by the broker.
    """

    __slots__ = ("by", "delivered", "started", "taken")

    def __init__(self) -> None:
        self.delivered: list[int] = []
        self.started = 0
        self.taken = 0
        self.by: tuple[Segment, int] | None = None


class OrderAcrossAssignments(PromiseChecker):
    """Except for rewinds to a committed position, the messages of a key start in order and without a skip (4).

    An assignment begins at a committed position, or at the first position of this history, and starts no lower
    message. Within an assignment a start repeats at most the last message. If the broker has taken an
    assignment, its process runs concurrently with the next owner until it notices the loss. The checker does not
    judge skips and rewinds of this assignment. The checker judges only sources that commit positions; ``PerKeyOrder``
    also judges sources that do not commit.

    Args:
        timeline: History to judge.
        deleted: Messages that the broker has deleted, by the name of the partition and the position. A skip of a
            deleted message is no violation.
    """

    _needs_order = True

    def __init__(self, timeline: Timeline, *, deleted: Collection[tuple[str, int]] = ()) -> None:
        super().__init__(timeline)
        self._stopped = False
        self._deleted = deleted
        self._lines: dict[tuple[str, str], _Line] = {}
        self._committed: dict[str, set[int]] = {}
        self._floors: dict[Assignment, int] = {}

    def _doubts(self) -> dict[str, int]:
        # Rows of two processes with the same time have no order, so floors are compared at the end.
        # A part of a piece begins where the former owner stopped to read its slots.
        floors = [(name, floor) for (_, name, _), floor in self._floors.items() if not is_piece(name)]
        strange = sum(floor not in self._committed[name] for name, floor in floors)
        return {"assignments began at a position that is not committed in this history": strange}

    @on("assigned")
    def _assigned(self, segment: Segment, row: Row) -> None:
        if row.floor < 0 or self._stopped or row.partition in self._incomparable:
            return
        self._floors[segment, row.partition, row.assignment] = row.floor
        self._committed.setdefault(row.partition, {row.floor})

    @on("commit_sent")
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
        name = whole(row.partition), row.key
        line = self._lines.get(name)
        if line is None:
            line = self._lines[name] = _Line()
        return line

    @on("delivered")
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
            # An earlier owner skipped the message, or the history lacks the rows of that owner.
            delivered.insert(index, row.position)
            line.started += index < line.started
            line.taken += index < line.taken

    @on("redelivered")
    def _redelivered(self, segment: Segment, row: Row) -> None:
        line = self._line(segment, row) if row.text == "settled" else None
        if line is not None:
            # A former owner had completed the message and all earlier messages of its key.
            line.started = max(line.started, bisect_left(line.delivered, row.position) + 1)

    @on("started")
    def _started(self, segment: Segment, row: Row) -> None:
        line = self._line(segment, row)
        if line is None:
            return
        self._findings.checked += 1
        index = bisect_left(line.delivered, row.position)
        if index == len(line.delivered) or line.delivered[index] != row.position:
            # DeliveredThenStarted reports a start without a delivery.
            return
        floor = self._floors.get((segment, row.partition, row.assignment), 0)
        if row.position < floor:
            self._findings.violation(segment, row, f"started below {floor}, where its assignment began")
        if (segment, row.partition, row.assignment) in self._taken:
            # The next owner may have rewound meanwhile, and the following owner continues from either position.
            line.started, line.by = max(line.started, index + 1), None
            line.taken = max(line.taken, index + 1)
            return
        by = segment, row.assignment
        # The broker may have received the commit of a taken assignment after the next owner had rewound.
        started = max(line.started, min(line.taken, bisect_left(line.delivered, floor)))
        skipped = [each for each in line.delivered[started:index] if (row.partition, each) not in self._deleted]
        if skipped:
            what = f"started, but position {skipped[0]} of its key never started"
            self._findings.violation(segment, row, what)
        elif index < line.started - 1 and line.by == by:
            what = f"went back in its assignment from position {line.delivered[line.started - 1]} of its key"
            self._findings.violation(segment, row, what)
        line.started, line.by = index + 1, by

    @on("blocked", "dlq_sent")
    def _given_up(self, segment: Segment, row: Row) -> None:
        """Count a message that an earlier owner gave up.

        If a store keeps attempts, the next owner skips the message without a start.
        """
        line = self._line(segment, row) if segment.rules.attempts_kept else None
        if line is not None and row.position in line.delivered[line.started : line.started + 1]:
            line.started += 1

    @on("gap")
    def _gap(self, segment: Segment, row: Row) -> None:
        # Any process may have started messages during the gap.
        self._stopped = True


class _Work:
    """The work of one assignment.

    Attributes:
        finished: For each finished and unsettled position, the number of the row in which the message ended.
        began: Positions of started and unfinished messages.
        abandoned: Positions of abandoned messages.
        too_late: Positions of messages that the process abandoned at the end of the drain's time, or because a freeze
            preceded the drain.
        drain: The drain of the assignment.
        frozen: Whether the drain began after a freeze, and the process had started no message since.
        floor: Last confirmed floor; -1 = none.
        sent: The commit that waits for its answer; None = no commit.
        confirmed: Number of the row of the latest confirmed commit; -1 = none.
        unsure: Whether the last commit failed or has an unknown result.
        drained: Time at which the drain ended; None = the drain continues.
    """

    __slots__ = (
        "abandoned",
        "began",
        "confirmed",
        "drain",
        "drained",
        "finished",
        "floor",
        "frozen",
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
        self.frozen = False
        self.floor = -1
        self.sent: Row | None = None
        self.confirmed = -1
        self.unsure = False
        self.drained: float | None = None


class _Done(NamedTuple):
    """A finished message of an assignment with a clean handover. ``floor`` is the assignment's last confirmed floor."""

    segment: Segment
    row: Row
    floor: int


class NoDuplicateCleanly(AssignmentChecker[_Work]):
    """A clean handover repeats no finished message (44) and leaves no finished message uncommitted (54).

    A handover is clean if the process drained the partition, received the answers to all commits in time, and still
    owned the partition. If the source cannot hand the completed set over, messages above the committed floor may repeat
    in three cases. In the first case, a lower message was unfinished at the end of the drain. In the second case, a
    handler of an earlier assignment still ran. In the third case, the process wrote no row for a second, and started no
    message between this second and the drain. After a freeze, messages start only when the broker has confirmed the
    partition. ``OrderAcrossAssignments`` judges that the broker delivers no message below the floor again. If the
    broker delivers an acknowledged message again, the broker forgot the acknowledgement, which is no fault of the
    handover.

    Args:
        timeline: History to judge.
    """

    _state_class = _Work
    _needs_order = True

    def __init__(self, timeline: Timeline) -> None:
        super().__init__(timeline)
        self._newest: dict[str, Assignment] = {}
        self._done: dict[str, dict[int, _Done]] = defaultdict(dict)
        self._floors: dict[Assignment, int] = {}
        self._disturbed: set[str] = set()
        # Partitions where handlers of an ended assignment may still hold their lanes.
        self._fenced: set[tuple[Segment, str]] = set()
        self._stopped = False

    @on("assigned")
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
        """Record a commit of an assignment taken by the broker. The commit may overwrite the next owner's commit."""
        assignment = segment, row.partition, row.assignment
        if assignment in self._taken and self._newest.get(row.partition) != assignment:
            self._disturb(row.partition)

    @on("redelivered")
    def _redelivered(self, segment: Segment, row: Row) -> None:
        if row.text == "settled" and (segment, row.partition, row.assignment) in self._committing:
            self._finished(segment, row)

    @on("started")
    def _started(self, segment: Segment, row: Row) -> None:
        state = self._assignments.of(segment, row)
        if state is not None:
            state.began.add(row.position)
        if not self._done:
            return
        partition = whole(row.partition)
        done = self._done[partition].pop(row.position, None)
        if done is None or partition in self._disturbed or row.partition in self._incomparable or self._stopped:
            return
        if self._floors.get((segment, row.partition, row.assignment), -1) >= done.floor:
            # Otherwise a lower position was committed after the handover.
            what = f"started again after it had finished and was handed over cleanly ({at(done.segment, done.row)})"
            self._findings.violation(segment, row, what)

    @with_state("ended ok")
    def _finished(self, segment: Segment, row: Row, state: _Work) -> None:
        state.began.discard(row.position)
        state.finished[row.position] = row.n

    @with_state("dlq_confirmed")
    def _dead_letter_confirmed(self, segment: Segment, row: Row, state: _Work) -> None:
        # A dead letter that is confirmed after its message was given up changes nothing: the message runs again.
        if row.position not in state.abandoned:
            self._finished(segment, row)

    @with_state("abandoned")
    def _abandoned(self, segment: Segment, row: Row, state: _Work) -> None:
        state.abandoned.add(row.position)
        drain = state.drain
        if drain.since is not None and (state.frozen or well_nigh(row.mono - drain.since, drain.timeout)):
            state.too_late.add(row.position)

    @with_state("ack")
    def _ack(self, segment: Segment, row: Row, state: _Work) -> None:
        state.finished.pop(row.position, None)

    @with_state("commit_sent")
    def _sent(self, segment: Segment, row: Row, state: _Work) -> None:
        state.sent = row
        self._comes_late(segment, row)

    @on("commit_ok")
    def _confirmed(self, segment: Segment, row: Row) -> None:
        state = self._assignments.of(segment, row)
        if state is None or state.sent is None:
            return
        self._comes_late(segment, row)
        state.confirmed, state.floor = state.sent.n, state.sent.floor
        state.sent, state.unsure = None, False
        floor, n = state.floor, state.confirmed
        state.finished = {p: row for p, row in state.finished.items() if p >= floor or row > n}

    @with_state("commit_failed")
    def _failed(self, segment: Segment, row: Row, state: _Work) -> None:
        state.sent, state.unsure = None, True
        self._comes_late(segment, row)

    @on("revoking", "hastened")
    def _revoking(self, segment: Segment, row: Row) -> None:
        state, timeout = self._assignments.of(segment, row), timeout_of(segment, row)
        if state is not None and timeout is not None:
            state.frozen = state.frozen or (state.drain.since is None and froze_before(segment, row))
            state.drain.begin(row.mono, timeout)

    @with_state("drained")
    def _drained(self, segment: Segment, row: Row, state: _Work) -> None:
        state.drained = row.mono

    @on("revoked")
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
            self._findings.unsaid(segment, "settles and hands_over")
            return
        lowest = min(state.began | state.too_late, default=None)
        done = self._done[whole(row.partition)]
        for position, n in state.finished.items():
            if n > state.confirmed:
                what = "finished, and not committed when its partition was handed over"
                self._findings.violation(segment, row._replace(position=position), what)
            if not closes or (not fenced and (lowest is None or position < lowest)):
                done[position] = _Done(segment, row, state.floor)

    def _disturb(self, partition: str) -> None:
        """Record that the broker may still receive a commit of an ended assignment, which overwrites later commits."""
        self._disturbed.add(whole(partition))
        self._done.pop(whole(partition), None)

    @with_state("lost", find="end")
    def _lost(self, segment: Segment, row: Row, state: _Work) -> None:
        if state.began:
            self._fenced.add((segment, row.partition))
        if state.unsure or state.sent is not None:
            self._disturb(row.partition)

    @on("gap")
    def _gap(self, segment: Segment, row: Row) -> None:
        # The gap may hide a disturbed partition.
        self._assignments.gap(segment)
        self._done.clear()
        self._stopped = True

    @on("over")
    def _over(self, segment: Segment, row: Row) -> None:
        for (one, partition, _), state in self._assignments.states.items():
            if one is segment and (state.unsure or state.sent is not None):
                self._disturb(partition)
        self._assignments.drop(segment)


class BoundedRepeats(PromiseChecker):
    """A handover under a lease repeats a bounded number of finished messages (56).

    A clean handover repeats no message. After a crash or a loss, only messages that finished after the last write of
    the progress repeat. At most ``written_every`` plus ``max_in_flight`` messages repeat, because acknowledgements may
    be under way. A history does not show the data that the broker forgot, so ``CHECKERS`` leaves this checker out.

    Args:
        timeline: History to judge.
        written_every: Number of finished messages after which a member writes its progress; None = ``max_in_flight``,
            as in a cohort.
        excused: Assignments that the checker does not judge, as (member, partition, number). The broker has forgotten
            or not received a part of their progress.
    """

    _needs_order = True

    def __init__(
        self,
        timeline: Timeline,
        *,
        written_every: int | None = None,
        excused: Collection[tuple[str, str, int]] = (),
    ) -> None:
        super().__init__(timeline)
        self._leased = timeline.deadlines
        self._written_every = written_every
        self._excused = frozenset(excused)
        self._finished: dict[str, dict[int, Assignment]] = defaultdict(dict)
        self._abandoned: dict[Assignment, set[int]] = defaultdict(set)
        self._clean: set[Assignment] = set()
        self._repeated: Counter[Assignment] = Counter()
        self._stopped = False

    def _note(self) -> str:
        return f"at most {max(self._repeated.values(), default=0)} repeats of one assignment"

    @on("assigned")
    def _assigned(self, segment: Segment, row: Row) -> None:
        self._findings.checked += bool(self._finished[row.partition])

    @on("dlq_confirmed")
    def _dead_letter_confirmed(self, segment: Segment, row: Row) -> None:
        # A dead letter that is confirmed after its message was given up changes nothing: the message runs again.
        if row.position not in self._abandoned[segment, row.partition, row.assignment]:
            self._done(segment, row)

    @on("ended ok")
    def _done(self, segment: Segment, row: Row) -> None:
        assignment = segment, row.partition, row.assignment
        if assignment in self._leased:
            self._finished[row.partition][row.position] = assignment

    @on("abandoned")
    def _given_up(self, segment: Segment, row: Row) -> None:
        self._abandoned[segment, row.partition, row.assignment].add(row.position)

    @on("revoked")
    def _revoked(self, segment: Segment, row: Row) -> None:
        self._clean.add((segment, row.partition, row.assignment))

    @on("started")
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
            how = (
                "handed it over cleanly"
                if former in self._clean
                else f"may leave {bound} of its messages to be repeated"
            )
            self._findings.violation(
                segment,
                row,
                f"started again after it had finished at {owner.label} in assignment {assignment}, which {how}",
            )

    def _bound(self, assignment: Assignment) -> int | None:
        """Return the number of messages of an assignment that may repeat; None = unknown."""
        if assignment in self._clean:
            return 0
        flight = assignment[0].max_in_flight
        if flight is None:
            self._findings.unsaid(assignment[0], "max_in_flight")
            return None
        return flight + (flight if self._written_every is None else self._written_every)

    @on("gap")
    def _gap(self, segment: Segment, row: Row) -> None:
        # The gap may hide a handover or a start.
        self._stopped = True
        self._finished.clear()
