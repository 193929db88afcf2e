"""The checkers of settlements: each message is handled or dead-lettered, and settled only afterwards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Final

from memsource.checkers.checker import PromiseChecker, on
from memsource.checkers.verdict import Findings, Verdict
from memsource.history.reader import Segment
from memsource.history.rows import Row, is_piece, whole
from memsource.history.timeline import Assignment, Timeline

_Span = tuple[int, Segment, Row]
"""The first position that a commit settles, and the row of the commit with its segment."""

_Delivery = tuple[str, int, int]
"""A message within one assignment, as (partition, assignment, position)."""

_KNOWN: Final = 1
_FINAL: Final = 3  # includes _KNOWN


class AtLeastOnce(PromiseChecker):
    """Each delivered or produced message is handled at least once, or its dead letter is confirmed.

    The checker reports a settled message without a handler call as lost. The broker still has a message that is neither
    settled nor handled. An unsettled and unhandled message is no violation, but the history does not prove that a
    process will handle the message. A committed floor settles each position below it from the first position of its
    assignment on, even without a delivery. A later owner that skips a completed message also settles this message.

    Args:
        timeline: History to judge.
        deleted: Messages that the broker has deleted, by the name of the partition and the position. A later owner
            cannot handle a deleted message.
    """

    def __init__(self, timeline: Timeline, *, deleted: Collection[tuple[str, int]] = ()) -> None:
        super().__init__(timeline)
        self._deleted = deleted
        self._states: dict[str, dict[int, int]] = defaultdict(dict)
        # The first settlement of each message, if the message had not been handled before.
        self._settled: dict[tuple[str, int], tuple[Segment, Row]] = {}
        # The first position of each assignment that commits, and its highest commit.
        self._begun: dict[Assignment, int] = {}
        self._commits: dict[Assignment, tuple[Segment, Row]] = {}

    def verdict(self) -> Verdict:
        """The judgement after the last row. Changes nothing."""
        findings = Findings(self.name, self._timeline)
        # A gap of any segment may hide that a message was handled.
        complete = not any(segment.gaps for segment in self._timeline.segments)
        committed = self._committed()
        for partition, states in self._states.items():
            findings.checked += len(states)
            for position, state in states.items():
                if state == _FINAL or (partition, position) in self._deleted:
                    continue
                settled = self._settled.get((partition, position)) or _covering(committed[partition], position)
                if settled is None:
                    findings.doubt("messages were left at the broker: neither settled nor handled")
                elif complete:
                    findings.violation(*settled, "settled, and never handled")
                else:
                    findings.doubt("messages were settled, and handled at most in a gap")
        if self._timeline.recreated:
            # After a recreation a position means two messages, and a handled first message proves nothing about the
            # second.
            findings.doubt(
                "partitions were recreated, so positions do not tell messages apart", len(self._timeline.recreated)
            )
        return findings.verdict()

    def _mark(self, state: int, row: Row) -> None:
        states = self._states[whole(row.partition)]
        states[row.position] = states.get(row.position, 0) | state

    @on("produced", "delivered", "started")
    def _seen(self, segment: Segment, row: Row) -> None:
        self._mark(_KNOWN, row)

    @on("ended ok", "dlq_confirmed")
    def _finished(self, segment: Segment, row: Row) -> None:
        self._mark(_FINAL, row)

    @on("ack", "passed")
    def _ack(self, segment: Segment, row: Row) -> None:
        self._mark(_KNOWN, row)
        place = whole(row.partition), row.position
        if self._states[place[0]][place[1]] != _FINAL:
            self._settled.setdefault(place, (segment, row))

    @on("redelivered")
    def _redelivered(self, segment: Segment, row: Row) -> None:
        if row.text == "settled" and (segment, row.partition, row.assignment) in self._committing:
            self._ack(segment, row)

    @on("assigned")
    def _assigned(self, segment: Segment, row: Row) -> None:
        if row.floor >= 0:
            self._begun[segment, row.partition, row.assignment] = row.floor

    @on("commit_sent")
    def _commit(self, segment: Segment, row: Row) -> None:
        known = self._commits.setdefault((segment, row.partition, row.assignment), (segment, row))
        if row.floor > known[1].floor:
            self._commits[segment, row.partition, row.assignment] = segment, row

    def _committed(self) -> dict[str, list[_Span]]:
        spans: dict[str, list[_Span]] = defaultdict(list)
        for assignment, (segment, row) in self._commits.items():
            if is_piece(row.partition):
                continue  # The positions of other pieces are below the floor too.
            # After a gap the first position is unknown, so only messages with rows count.
            spans[row.partition].append((self._begun.get(assignment, row.floor), segment, row))
        return spans


def _covering(spans: list[_Span], position: int) -> tuple[Segment, Row] | None:
    """Return the highest commit of the first assignment whose commits settled this position; None = not settled."""
    for begun, segment, row in spans:
        if begun <= position < row.floor:
            return segment, row._replace(position=position)
    return None


def _delivery(row: Row) -> _Delivery:
    return row.partition, row.assignment, row.position


class DeadLetterBeforeSettle(PromiseChecker):
    """A process settles a message that it gives up only after the confirmation of the dead letter (48).

    After the confirmation of a blocked message's dead letter, the assignment writes no second dead letter of the
    message.

    Args:
        timeline: History to judge.
    """

    def __init__(self, timeline: Timeline) -> None:
        super().__init__(timeline)
        self._unconfirmed: dict[Segment, set[_Delivery]] = defaultdict(set)
        self._archived: dict[Segment, set[_Delivery]] = defaultdict(set)

    @on("dlq_sent")
    def _sent(self, segment: Segment, row: Row) -> None:
        if _delivery(row) in self._archived[segment]:
            self._findings.violation(segment, row, "has a second dead letter in the same assignment")
        self._unconfirmed[segment].add(_delivery(row))

    @on("dlq_confirmed", "archived")
    def _confirmed(self, segment: Segment, row: Row) -> None:
        self._findings.checked += 1
        self._unconfirmed[segment].discard(_delivery(row))
        if row.event == "archived":
            self._archived[segment].add(_delivery(row))
        else:
            self._archived[segment].discard(_delivery(row))

    @on("ended ok", "abandoned")
    def _left(self, segment: Segment, row: Row) -> None:
        self._archived[segment].discard(_delivery(row))

    @on("ack", "passed")
    def _ack(self, segment: Segment, row: Row) -> None:
        if _delivery(row) in self._unconfirmed[segment]:
            self._findings.violation(segment, row, "settled while its dead letter was not confirmed")

    @on("gap")
    def _gap(self, segment: Segment, row: Row) -> None:
        # The dead letters may have been confirmed in the gap, and the messages may have been abandoned.
        self._unconfirmed[segment].clear()
        self._archived.pop(segment, None)

    @on("over")
    def _over(self, segment: Segment, row: Row) -> None:
        self._archived.pop(segment, None)


class NoSettleBeforeEnd(PromiseChecker):
    """An assignment settles a message only after it handled the message or gave the message up (19).

    A commit settles all messages below its floor, except messages that a former owner had settled. A second
    settlement of a message that the broker forgot (``redelivered``, cause ``settled``) is no new settlement.
    ``DeadLetterBeforeSettle`` judges messages that an assignment gave up.

    Args:
        timeline: History to judge.
    """

    def __init__(self, timeline: Timeline) -> None:
        super().__init__(timeline)
        self._may_settle: dict[Segment, set[_Delivery]] = defaultdict(set)
        # Segment with a gap -> messages that were certainly unhandled at the end of the gap.
        self._certain: dict[Segment, set[_Delivery]] = {}

    @on("delivered")
    def _delivered(self, segment: Segment, row: Row) -> None:
        if segment in self._certain:
            self._certain[segment].add(_delivery(row))

    @on("redelivered")
    def _redelivered(self, segment: Segment, row: Row) -> None:
        if row.text == "settled":
            self._may_settle[segment].add(_delivery(row))
        elif row.text == "late":
            self._may_settle[segment].discard(_delivery(row))
        elif segment in self._certain:
            # The message is held. The message may have ended in the gap and wait for its settlement.
            self._certain[segment].discard(_delivery(row))

    @on("ended ok", "dlq_sent", "dlq_confirmed")
    def _ended(self, segment: Segment, row: Row) -> None:
        self._may_settle[segment].add(_delivery(row))

    @on("archived")
    def _blocked(self, segment: Segment, row: Row) -> None:
        self._may_settle[segment].discard(_delivery(row))

    @on("ack", "passed")
    def _ack(self, segment: Segment, row: Row) -> None:
        self._findings.checked += 1
        delivery = _delivery(row)
        if delivery in self._may_settle[segment]:
            return
        certain = self._certain.get(segment)
        if certain is None or delivery in certain:
            self._findings.violation(segment, row, "settled before it was handled or given up")

    @on("gap")
    def _gap(self, segment: Segment, row: Row) -> None:
        self._certain[segment] = set()
