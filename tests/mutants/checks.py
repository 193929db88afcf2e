"""What the campaigns look for in a history beside the promises: rules of the engine that it shows too."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping

from memsource.checkers.verdict import Findings, Handler, Verdict
from memsource.history import Segment
from memsource.rows import Row
from memsource.timeline import Assignment, Timeline

MAX_AHEAD = 8
"""What every campaign sets ``max_ahead`` to: a history does not say."""

AT_ONCE = 0.5
"""Seconds of virtual time in which nothing was waited for."""


class MaxAhead:
    """No handler starts at a message that is more than ``MAX_AHEAD`` deliveries above the confirmed floor."""

    name = "MaxAhead"

    def __init__(self, timeline: Timeline) -> None:
        self._findings = Findings(self.name, timeline)
        self._confirmed: dict[Assignment, int] = {}
        self._delivered: dict[Assignment, list[int]] = defaultdict(list)

    def handlers(self) -> Mapping[str, Handler]:
        return {
            "assigned": self._floor,
            "commit_ok": self._floor,
            "delivered": self._deliver,
            "started": self._started,
        }

    def verdict(self) -> Verdict:
        return self._findings.verdict()

    def _floor(self, segment: Segment, row: Row) -> None:
        if row.floor >= 0:
            self._confirmed[segment, row.partition, row.epoch] = row.floor

    def _deliver(self, segment: Segment, row: Row) -> None:
        self._delivered[segment, row.partition, row.epoch].append(row.position)

    def _started(self, segment: Segment, row: Row) -> None:
        assignment = segment, row.partition, row.epoch
        if assignment not in self._confirmed:
            return
        self._findings.checked += 1
        delivered = self._delivered[assignment]
        ahead = bisect_left(delivered, row.position + 1) - bisect_left(delivered, self._confirmed[assignment])
        if ahead > MAX_AHEAD:
            self._findings.violation(segment, row, f"started {ahead} deliveries above the confirmed floor")


class ResumeAtLowWater:
    """Intake goes on half-way from ``max_in_flight`` to ``concurrency``, not before: two transitions a crossing."""

    name = "ResumeAtLowWater"

    def __init__(self, timeline: Timeline) -> None:
        self._findings = Findings(self.name, timeline)

    def handlers(self) -> Mapping[str, Handler]:
        return {"resumed": self._resumed}

    def verdict(self) -> Verdict:
        return self._findings.verdict()

    def _resumed(self, segment: Segment, row: Row) -> None:
        self._findings.checked += 1
        bound, running = segment.max_in_flight, segment.concurrency
        if bound is not None and running is not None and row.number > (bound + running) // 2:
            self._findings.violation(segment, row, f"intake went on with {row.number} of {bound} in flight")


class DrainWaitsForRunning:
    """A drain ends when the last running handler does: it waits for nothing that is held, blocked or parking."""

    name = "DrainWaitsForRunning"

    def __init__(self, timeline: Timeline) -> None:
        self._findings = Findings(self.name, timeline)
        self._running: dict[Assignment, int] = defaultdict(int)
        self._since: dict[Assignment, float] = {}

    def handlers(self) -> Mapping[str, Handler]:
        return {
            "started": self._started,
            "ended": self._ended,
            "revoking": self._moved,
            "drained": self._drained,
        }

    def verdict(self) -> Verdict:
        return self._findings.verdict()

    def _started(self, segment: Segment, row: Row) -> None:
        self._running[segment, row.partition, row.epoch] += 1

    def _ended(self, segment: Segment, row: Row) -> None:
        self._running[segment, row.partition, row.epoch] -= 1
        self._moved(segment, row)

    def _moved(self, segment: Segment, row: Row) -> None:
        self._since[segment, row.partition, row.epoch] = row.mono

    def _drained(self, segment: Segment, row: Row) -> None:
        assignment = segment, row.partition, row.epoch
        if self._running[assignment]:
            return
        self._findings.checked += 1
        waited = row.mono - self._since.get(assignment, row.mono)
        if waited > AT_ONCE:
            self._findings.violation(segment, row, f"drained {waited:.1f} s after its last handler had ended")
