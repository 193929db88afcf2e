"""The bound on what is in flight."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from memsource.checkers.verdict import Findings, Handler, Verdict
from memsource.history import Segment
from memsource.rows import Row
from memsource.timeline import Timeline

_Assignment = tuple[str, int]


class _Flight:
    """What one member has in flight."""

    __slots__ = ("above", "draining", "held", "latest", "peak", "size", "tentative")

    def __init__(self) -> None:
        self.held: dict[_Assignment, set[int]] = defaultdict(set)
        self.size = 0
        # How often it was delivered of late, where not yet known to be fresh: the rows that say how many of
        # these deliveries were not follow those of the whole run.
        self.tentative: dict[tuple[str, int, int], int] = {}
        self.latest: Row | None = None
        self.draining: set[_Assignment] = set()
        self.peak = 0
        self.above = False


class BoundedInFlight:
    """A member never has more than ``max_in_flight`` messages in flight: delivered and not yet settled.

    A message that comes again while it is held counts once. It leaves when it is settled (where the source commits:
    when it has finished), abandoned, interrupted, or failed while its partition is drained, or when its assignment
    ends. The note says how high it went.
    """

    name = "BoundedInFlight"

    def __init__(self, timeline: Timeline) -> None:
        self._findings = Findings(self.name, timeline)
        self._committing = timeline.committing
        self._flights: dict[Segment, _Flight] = {segment: _Flight() for segment in timeline.segments}

    @property
    def peak(self) -> int:
        """The most that any member had in flight."""
        return max((flight.peak for flight in self._flights.values()), default=0)

    def handlers(self) -> Mapping[str, Handler]:
        return {
            "delivered": self._delivered,
            "redelivered": self._redelivered,
            "started": self._started,
            "ended": self._ended,
            "dlq_confirmed": self._finished,
            "ack": self._left,
            "passed": self._left,
            "abandoned": self._left,
            "revoking": self._revoking,
            "revoked": self._given_up,
            "lost": self._given_up,
            "gap": self._gap,
            "over": self._over,
        }

    def verdict(self) -> Verdict:
        peak, bound = max(
            ((flight.peak, segment.max_in_flight or 0) for segment, flight in self._flights.items()), default=(0, 0)
        )
        return self._findings.verdict(note=f"peak {peak} of {bound or '?'}")

    def _delivered(self, segment: Segment, row: Row) -> None:
        self._findings.checked += 1
        flight = self._flights[segment]
        flight.latest = row
        held = flight.held[row.partition, row.epoch]
        name = (row.partition, row.epoch, row.position)
        if row.position not in held:
            held.add(row.position)
            flight.size += 1
            flight.tentative[name] = 1
        elif name in flight.tentative:
            flight.tentative[name] += 1

    def _redelivered(self, segment: Segment, row: Row) -> None:
        flight = self._flights[segment]
        name = (row.partition, row.epoch, row.position)
        if row.text == "settled" and (segment, row.partition, row.epoch) in self._committing:
            # It was in flight until it was known that a predecessor had finished it.
            self._left(segment, row)
            return
        # ``held`` as well: its settlement may be under way, or it came in front of a gap.
        if row.text == "late" or name not in flight.tentative:
            return
        flight.tentative[name] -= 1
        if not flight.tentative[name]:
            del flight.tentative[name]
            self._remove(flight, row)

    def _started(self, segment: Segment, row: Row) -> None:
        flight = self._flights[segment]
        if flight.tentative:
            self._measure(segment, flight)

    def _ended(self, segment: Segment, row: Row) -> None:
        draining = (row.partition, row.epoch) in self._flights[segment].draining
        if row.text == "cancelled" or (row.text != "ok" and draining):
            self._left(segment, row)
        elif row.text == "ok":
            self._finished(segment, row)

    def _finished(self, segment: Segment, row: Row) -> None:
        if (segment, row.partition, row.epoch) in self._committing:
            self._left(segment, row)

    def _left(self, segment: Segment, row: Row) -> None:
        flight = self._flights[segment]
        self._measure(segment, flight)
        self._remove(flight, row)

    def _revoking(self, segment: Segment, row: Row) -> None:
        self._flights[segment].draining.add((row.partition, row.epoch))

    def _given_up(self, segment: Segment, row: Row) -> None:
        flight = self._flights[segment]
        self._measure(segment, flight)
        flight.size -= len(flight.held.pop((row.partition, row.epoch), ()))

    def _gap(self, segment: Segment, row: Row) -> None:
        flight = self._flights[segment]
        self._measure_certain(segment, flight)
        # All of it may have left in the gap, so what is counted from here on is the least it can be.
        flight.held.clear()
        flight.size = 0

    def _over(self, segment: Segment, row: Row) -> None:
        flight = self._flights[segment]
        if segment.crashed:
            self._measure_certain(segment, flight)
        else:
            self._measure(segment, flight)
        if segment.max_in_flight is None:
            self._findings.doubt("segments without a begin row: their max_in_flight is unknown")

    def _measure_certain(self, segment: Segment, flight: _Flight) -> None:
        """Measure where the rows that say which of the last run were fresh may be missing."""
        for partition, epoch, position in flight.tentative:
            flight.held[partition, epoch].discard(position)
        flight.size -= len(flight.tentative)
        self._measure(segment, flight)

    def _measure(self, segment: Segment, flight: _Flight) -> None:
        """Take the size before it falls, at a moment when it is known which messages are fresh."""
        flight.tentative.clear()
        flight.peak = max(flight.peak, flight.size)
        bound = segment.max_in_flight
        if bound is None:
            return
        above = flight.size > bound
        # One violation for each time the bound is crossed, not for each message above it.
        if above and not flight.above and flight.latest is not None:
            self._findings.violation(segment, flight.latest, f"{flight.size} in flight, max_in_flight is {bound}")
        flight.above = above

    @staticmethod
    def _remove(flight: _Flight, row: Row) -> None:
        held = flight.held[row.partition, row.epoch]
        if row.position in held:
            held.discard(row.position)
            flight.size -= 1
