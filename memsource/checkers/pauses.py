"""When intake stops, and when it goes on."""

from __future__ import annotations

from collections.abc import Mapping

from memsource.checkers.verdict import Findings, Handler, Verdict
from memsource.history.reader import Segment
from memsource.history.rows import Row
from memsource.history.timeline import Timeline

__all__ = ["PauseAtBounds"]


class PauseAtBounds:
    """Intake stops when a bound is reached and not sooner, and goes on below the low water marks and not before: two
    transitions a crossing (31).

    The low mark is half-way from ``max_in_flight`` to ``concurrency``, and half of ``max_in_flight_bytes``. What a
    predecessor had completed counts when it comes, and leaves at once.
    """

    name = "PauseAtBounds"

    def __init__(self, timeline: Timeline) -> None:
        self._findings = Findings(self.name, timeline)
        self._paused: dict[Segment, Row | None] = dict.fromkeys(timeline.segments)
        self._early: dict[Segment, Row] = {}
        self._completed: dict[Segment, int] = {}
        self._gaps: set[Segment] = set()

    def handlers(self) -> Mapping[str, Handler]:
        return {
            "paused": self._pause,
            "resumed": self._resume,
            "redelivered": self._redelivered,
            "gap": self._gap,
            "over": self._over,
        }

    def verdict(self) -> Verdict:
        return self._findings.verdict()

    def _redelivered(self, segment: Segment, row: Row) -> None:
        if row.text == "settled":
            self._completed[segment] = row.n

    def _pause(self, segment: Segment, row: Row) -> None:
        self._findings.checked += 1
        if self._paused[segment] is not None:
            self._findings.violation(segment, row, "stopped again before it had gone on")
        self._paused[segment] = row
        bound, size = segment.max_in_flight, segment.max_in_flight_bytes
        if bound is None or size is None or row.number >= bound or row.bytes >= size or segment in self._gaps:
            return
        # The rows of what was completed, and that max_ahead was reached, stand between their run and this one.
        if row.n - self._completed.get(segment, -3) > 2:
            self._early[segment] = row

    def _resume(self, segment: Segment, row: Row) -> None:
        self._findings.checked += 1
        paused = self._paused[segment]
        if paused is None and segment not in self._gaps:
            self._findings.violation(segment, row, "went on without having stopped")
        self._paused[segment] = None
        self._gaps.discard(segment)
        early = self._early.pop(segment, None)
        if early is not None and row.n != early.n + 1:
            self._violation(segment, early)
        bound, running, size = segment.max_in_flight, segment.concurrency, segment.max_in_flight_bytes
        if bound is None or running is None or size is None:
            return
        if row.number > (bound + running) // 2 or row.bytes > size // 2:
            what = f"went on with {row.number:g} of {bound} messages and {row.bytes:g} of {size} bytes in flight"
            self._findings.violation(segment, row, what)

    def _violation(self, segment: Segment, row: Row) -> None:
        bound, size = segment.max_in_flight, segment.max_in_flight_bytes
        what = f"stopped with {row.number:g} of {bound} messages and {row.bytes:g} of {size} bytes in flight"
        self._findings.violation(segment, row, what)

    def _gap(self, segment: Segment, row: Row) -> None:
        self._gaps.add(segment)
        self._paused[segment] = None
        self._early.pop(segment, None)

    def _over(self, segment: Segment, row: Row) -> None:
        early = self._early.pop(segment, None)
        if early is not None and not (segment.crashed and row.n == early.n):
            self._violation(segment, early)
