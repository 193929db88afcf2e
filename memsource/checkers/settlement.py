"""What must come before a settlement."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from memsource.checkers.verdict import Findings, Handler, Verdict
from memsource.history.reader import Segment
from memsource.history.rows import Row
from memsource.history.timeline import Timeline

__all__ = ["DeadLetterBeforeSettle", "NoSettleBeforeEnd"]

_Delivery = tuple[str, int, int]
"""(partition, assignment, position): a message within one assignment."""


def _delivery(row: Row) -> _Delivery:
    return row.partition, row.assignment, row.position


class DeadLetterBeforeSettle:
    """A message that is given up is settled only after its dead letter was confirmed."""

    name = "DeadLetterBeforeSettle"

    def __init__(self, timeline: Timeline) -> None:
        self._findings = Findings(self.name, timeline)
        self._unconfirmed: dict[Segment, set[_Delivery]] = defaultdict(set)

    def handlers(self) -> Mapping[str, Handler]:
        return {
            "dlq_sent": self._sent,
            "dlq_confirmed": self._confirmed,
            "archived": self._confirmed,
            "ack": self._ack,
            "passed": self._ack,
            "gap": self._gap,
        }

    def verdict(self) -> Verdict:
        return self._findings.verdict()

    def _sent(self, segment: Segment, row: Row) -> None:
        self._unconfirmed[segment].add(_delivery(row))

    def _confirmed(self, segment: Segment, row: Row) -> None:
        self._findings.checked += 1
        self._unconfirmed[segment].discard(_delivery(row))

    def _ack(self, segment: Segment, row: Row) -> None:
        if _delivery(row) in self._unconfirmed[segment]:
            self._findings.violation(segment, row, "settled while its dead letter was not confirmed")

    def _gap(self, segment: Segment, row: Row) -> None:
        # They may have been confirmed unseen.
        self._unconfirmed[segment].clear()


class NoSettleBeforeEnd:
    """A message is settled only after it ended well in the same assignment, or was given up there.

    A commit settles what its floor passes; what a predecessor had completed was settled there.
    Settling it again because the broker forgot (``redelivered``, cause ``settled``) is no new settlement. Whether
    a message that was given up was settled too early is for ``DeadLetterBeforeSettle`` to say.
    """

    name = "NoSettleBeforeEnd"

    def __init__(self, timeline: Timeline) -> None:
        self._findings = Findings(self.name, timeline)
        self._may_settle: dict[Segment, set[_Delivery]] = defaultdict(set)
        # Of segments with a gap behind: what had certainly not been handled when the gap was over.
        self._certain: dict[Segment, set[_Delivery]] = {}

    def handlers(self) -> Mapping[str, Handler]:
        return {
            "delivered": self._delivered,
            "redelivered": self._redelivered,
            "ended": self._ended,
            "dlq_sent": self._given_up,
            "dlq_confirmed": self._given_up,
            "archived": self._blocked,
            "ack": self._ack,
            "passed": self._ack,
            "gap": self._gap,
        }

    def verdict(self) -> Verdict:
        return self._findings.verdict()

    def _delivered(self, segment: Segment, row: Row) -> None:
        if segment in self._certain:
            self._certain[segment].add(_delivery(row))

    def _redelivered(self, segment: Segment, row: Row) -> None:
        if row.text == "settled":
            self._may_settle[segment].add(_delivery(row))
        elif row.text == "late":
            self._may_settle[segment].discard(_delivery(row))
        elif segment in self._certain:
            # Still held, but perhaps only because it was not settled yet: it may have ended in the gap.
            self._certain[segment].discard(_delivery(row))

    def _ended(self, segment: Segment, row: Row) -> None:
        if row.text == "ok":
            self._may_settle[segment].add(_delivery(row))

    def _given_up(self, segment: Segment, row: Row) -> None:
        self._may_settle[segment].add(_delivery(row))

    def _blocked(self, segment: Segment, row: Row) -> None:
        self._may_settle[segment].discard(_delivery(row))

    def _ack(self, segment: Segment, row: Row) -> None:
        self._findings.checked += 1
        delivery = _delivery(row)
        if delivery in self._may_settle[segment]:
            return
        certain = self._certain.get(segment)
        if certain is None or delivery in certain:
            self._findings.violation(segment, row, "settled before it had ended")

    def _gap(self, segment: Segment, row: Row) -> None:
        self._certain[segment] = set()
