"""Nothing is lost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Final

from memsource.checkers.verdict import Findings, Handler, Verdict
from memsource.history.reader import Segment
from memsource.history.rows import Row
from memsource.history.timeline import Assignment, Timeline

__all__ = ["AtLeastOnce"]

_Span = tuple[int, Segment, Row]
"""From where on a commit settles, and the commit."""

_KNOWN: Final = 1
_FINAL: Final = 3  # whatever is final is known


class AtLeastOnce:
    """Every message that was delivered or produced was handled, or its dead letter confirmed, at least once.

    A message that was settled and never handled is lost. One that was neither settled nor handled is still at
    the broker: no violation, but this history does not prove that it will be handled. A committed floor settles
    everything from where its assignment began to read, also what was produced there and never delivered; and what
    a successor leaves out as completed was settled by whoever said so.
    """

    name = "AtLeastOnce"

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._states: dict[str, dict[int, int]] = defaultdict(dict)
        # The first settlement of what had not been handled by then.
        self._settled: dict[tuple[str, int], tuple[Segment, Row]] = {}
        # Where assignments that commit began to read, and the highest commit of each.
        self._begun: dict[Assignment, int] = {}
        self._commits: dict[Assignment, tuple[Segment, Row]] = {}

    def handlers(self) -> Mapping[str, Handler]:
        known = partial(self._note, _KNOWN)
        return {
            "produced": known,
            "delivered": known,
            "started": known,
            "ended": self._ended,
            "dlq_confirmed": partial(self._note, _FINAL),
            "ack": self._ack,
            "passed": self._ack,
            "redelivered": self._redelivered,
            "assigned": self._assigned,
            "commit_sent": self._commit,
        }

    def verdict(self) -> Verdict:
        findings = Findings(self.name, self._timeline)
        # The end that is missed may be one of the missing rows, of any segment.
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
            # One position was two messages: that the one was handled does not prove it of the other.
            findings.doubt(
                "partitions were recreated, so positions do not tell messages apart", len(self._timeline.recreated)
            )
        return findings.verdict()

    def _note(self, state: int, segment: Segment, row: Row) -> None:
        states = self._states[row.partition]
        states[row.position] = states.get(row.position, 0) | state

    def _ended(self, segment: Segment, row: Row) -> None:
        if row.text == "ok":
            self._note(_FINAL, segment, row)

    def _ack(self, segment: Segment, row: Row) -> None:
        self._note(_KNOWN, segment, row)
        if self._states[row.partition][row.position] != _FINAL:
            self._settled.setdefault((row.partition, row.position), (segment, row))

    def _redelivered(self, segment: Segment, row: Row) -> None:
        if row.text == "settled" and (segment, row.partition, row.assignment) in self._timeline.committing:
            self._ack(segment, row)

    def _assigned(self, segment: Segment, row: Row) -> None:
        if row.floor >= 0:
            self._begun[segment, row.partition, row.assignment] = row.floor

    def _commit(self, segment: Segment, row: Row) -> None:
        known = self._commits.setdefault((segment, row.partition, row.assignment), (segment, row))
        if row.floor > known[1].floor:
            self._commits[segment, row.partition, row.assignment] = segment, row

    def _committed(self) -> dict[str, list[_Span]]:
        spans: dict[str, list[_Span]] = defaultdict(list)
        for assignment, (segment, row) in self._commits.items():
            # In a gap in front of it the assignment may have begun anywhere: then only what is seen counts.
            spans[row.partition].append((self._begun.get(assignment, row.floor), segment, row))
        return spans


def _covering(spans: list[_Span], position: int) -> tuple[Segment, Row] | None:
    """The first commit that settled a position which nobody saw."""
    for begun, segment, row in spans:
        if begun <= position < row.floor:
            return segment, row._replace(position=position)
    return None
