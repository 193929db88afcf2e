"""Nothing is lost: each message is handled, and settled only after that."""

from __future__ import annotations

from collections import defaultdict
from typing import Final

from memsource.checkers.checker import PromiseChecker, on
from memsource.checkers.verdict import Findings, Verdict
from memsource.history.reader import Segment
from memsource.history.rows import Row
from memsource.history.timeline import Assignment, Timeline

_Span = tuple[int, Segment, Row]
"""From where on a commit settles, and the commit."""

_Delivery = tuple[str, int, int]
"""(partition, assignment, position): a message within one assignment."""

_KNOWN: Final = 1
_FINAL: Final = 3  # includes _KNOWN


class AtLeastOnce(PromiseChecker):
    """Each message that was delivered or produced is handled, or its dead letter confirmed, at least once.

    A message that was settled and never handled is lost. One that was neither settled nor handled is still at the
    broker: this is no violation, but the history does not prove that the message will be handled. A committed floor
    settles each position from where its assignment began to read, also those that were never delivered. A successor
    that skips a completed message settles it too.

    Args:
        timeline: History to judge.
    """

    def __init__(self, timeline: Timeline) -> None:
        super().__init__(timeline)
        self._states: dict[str, dict[int, int]] = defaultdict(dict)
        # The first settlement of each message that had not been handled by then.
        self._settled: dict[tuple[str, int], tuple[Segment, Row]] = {}
        # The first position of each assignment that commits, and its highest commit.
        self._begun: dict[Assignment, int] = {}
        self._commits: dict[Assignment, tuple[Segment, Row]] = {}

    def verdict(self) -> Verdict:
        """The judgement after the last row. Changes nothing."""
        findings = Findings(self.name, self._timeline)
        # The missing end may be a missing row of any segment.
        complete = not any(segment.gaps for segment in self._timeline.segments)
        committed = self._committed()
        for partition, states in self._states.items():
            findings.checked += len(states)
            for position, state in states.items():
                if state == _FINAL:
                    continue
                settled = self._settled.get((partition, position)) or _covering(committed[partition], position)
                if settled is None:
                    findings.doubt("messages were left at the broker: neither settled nor handled")
                elif complete:
                    findings.violation(*settled, "settled, and never handled")
                else:
                    findings.doubt("messages were settled, and handled at most in a gap")
        if self._timeline.recreated:
            # One position was two messages, and one handled message does not prove the other.
            findings.doubt(
                "partitions were recreated, so positions do not tell messages apart", len(self._timeline.recreated)
            )
        return findings.verdict()

    def _mark(self, state: int, row: Row) -> None:
        states = self._states[row.partition]
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
        if self._states[row.partition][row.position] != _FINAL:
            self._settled.setdefault((row.partition, row.position), (segment, row))

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
            # After a gap the first position is unknown, and only the rows count.
            spans[row.partition].append((self._begun.get(assignment, row.floor), segment, row))
        return spans


def _covering(spans: list[_Span], position: int) -> tuple[Segment, Row] | None:
    """The first commit that settled a position without a row."""
    for begun, segment, row in spans:
        if begun <= position < row.floor:
            return segment, row._replace(position=position)
    return None


def _delivery(row: Row) -> _Delivery:
    return row.partition, row.assignment, row.position


class DeadLetterBeforeSettle(PromiseChecker):
    """A message that is given up is settled only after its dead letter was confirmed (48).

    Args:
        timeline: History to judge.
    """

    def __init__(self, timeline: Timeline) -> None:
        super().__init__(timeline)
        self._unconfirmed: dict[Segment, set[_Delivery]] = defaultdict(set)

    @on("dlq_sent")
    def _sent(self, segment: Segment, row: Row) -> None:
        self._unconfirmed[segment].add(_delivery(row))

    @on("dlq_confirmed", "archived")
    def _confirmed(self, segment: Segment, row: Row) -> None:
        self._findings.checked += 1
        self._unconfirmed[segment].discard(_delivery(row))

    @on("ack", "passed")
    def _ack(self, segment: Segment, row: Row) -> None:
        if _delivery(row) in self._unconfirmed[segment]:
            self._findings.violation(segment, row, "settled while its dead letter was not confirmed")

    @on("gap")
    def _gap(self, segment: Segment, row: Row) -> None:
        # They may have been confirmed in the gap.
        self._unconfirmed[segment].clear()


class NoSettleBeforeEnd(PromiseChecker):
    """A message is settled only after it ended well, or was given up, in the same assignment (19).

    A commit settles all messages below its floor; those that a predecessor had completed were settled there. Settling a
    message again because the broker forgot it (``redelivered``, cause ``settled``) is no new settlement.
    ``DeadLetterBeforeSettle`` judges messages that were given up.

    Args:
        timeline: History to judge.
    """

    def __init__(self, timeline: Timeline) -> None:
        super().__init__(timeline)
        self._may_settle: dict[Segment, set[_Delivery]] = defaultdict(set)
        # Segments that had a gap -> messages that were certainly not handled at its end.
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
            # It is held, but perhaps only because it was not settled yet: it may have ended in the gap.
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
            self._findings.violation(segment, row, "settled before it had ended")

    @on("gap")
    def _gap(self, segment: Segment, row: Row) -> None:
        self._certain[segment] = set()
