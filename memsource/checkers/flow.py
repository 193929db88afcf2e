"""The bounds on what is in flight."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from memsource.checkers.verdict import Findings, Handler, Verdict
from memsource.history.reader import Segment
from memsource.history.rows import Row
from memsource.history.timeline import Timeline

__all__ = ["BoundedBytes", "BoundedInFlight"]

_Assignment = tuple[str, int]


class _Flight:
    """What one member has in flight."""

    __slots__ = ("above", "bytes", "draining", "held", "latest", "peak", "receiving", "size", "tentative")

    def __init__(self) -> None:
        self.held: dict[_Assignment, dict[int, float]] = defaultdict(dict)  # position -> its bytes
        self.size = 0
        self.bytes = 0.0
        # Nothing else has happened since the latest message was delivered: the batch may go on.
        self.receiving = False
        # How often it was delivered of late, where not yet known to be fresh: the rows that say how many of
        # these deliveries were not follow those of the whole run.
        self.tentative: dict[tuple[str, int, int], int] = {}
        self.latest: Row | None = None
        self.draining: set[_Assignment] = set()
        self.peak: float = 0
        self.above = False


class _Bound:
    """Follows what each member has in flight.

    A message that comes again while it is held counts once. It leaves when it is settled (where the source commits:
    when it has finished), abandoned, interrupted, or failed while its partition is drained, or when its assignment
    ends.
    """

    name = ""

    def __init__(self, timeline: Timeline) -> None:
        self._findings = Findings(self.name, timeline)
        self._committing = timeline.committing
        self._flights: dict[Segment, _Flight] = {segment: _Flight() for segment in timeline.segments}

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
            ((flight.peak, self._limit(segment) or 0) for segment, flight in self._flights.items()), default=(0, 0)
        )
        return self._findings.verdict(note=f"peak {peak:g} of {bound or '?'}")

    def _limit(self, segment: Segment) -> int | None:
        """The bound; None where there is no begin row."""
        raise NotImplementedError

    def _begin_batch(self, segment: Segment, row: Row, flight: _Flight) -> None:
        """The first message of a batch is delivered, and not counted yet."""

    def _take(self, segment: Segment, flight: _Flight) -> None:
        """Take the measure, at a moment when it is known which messages are fresh and before anything leaves."""
        raise NotImplementedError

    def _delivered(self, segment: Segment, row: Row) -> None:
        self._findings.checked += 1
        flight = self._flights[segment]
        if not flight.receiving:
            self._begin_batch(segment, row, flight)
            flight.receiving = True
        flight.latest = row
        held = flight.held[row.partition, row.assignment]
        name = (row.partition, row.assignment, row.position)
        if row.position not in held:
            held[row.position] = row.number
            flight.size += 1
            flight.bytes += row.number
            flight.tentative[name] = 1
        elif name in flight.tentative:
            flight.tentative[name] += 1

    def _redelivered(self, segment: Segment, row: Row) -> None:
        flight = self._flights[segment]
        name = (row.partition, row.assignment, row.position)
        if row.text == "settled" and (segment, row.partition, row.assignment) in self._committing:
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
        flight.receiving = False
        if flight.tentative:
            self._measure(segment, flight)

    def _ended(self, segment: Segment, row: Row) -> None:
        self._flights[segment].receiving = False
        draining = (row.partition, row.assignment) in self._flights[segment].draining
        if row.text == "cancelled" or (row.text != "ok" and draining):
            self._left(segment, row)
        elif row.text == "ok":
            self._finished(segment, row)

    def _finished(self, segment: Segment, row: Row) -> None:
        if (segment, row.partition, row.assignment) in self._committing:
            self._left(segment, row)

    def _left(self, segment: Segment, row: Row) -> None:
        flight = self._flights[segment]
        self._measure(segment, flight)
        self._remove(flight, row)

    def _revoking(self, segment: Segment, row: Row) -> None:
        self._flights[segment].draining.add((row.partition, row.assignment))

    def _given_up(self, segment: Segment, row: Row) -> None:
        flight = self._flights[segment]
        self._measure(segment, flight)
        left = flight.held.pop((row.partition, row.assignment), {})
        flight.size -= len(left)
        flight.bytes -= sum(left.values())

    def _gap(self, segment: Segment, row: Row) -> None:
        flight = self._flights[segment]
        self._measure_certain(segment, flight)
        # All of it may have left in the gap, so what is counted from here on is the least it can be.
        flight.held.clear()
        flight.size = 0
        flight.bytes = 0.0

    def _over(self, segment: Segment, row: Row) -> None:
        flight = self._flights[segment]
        if segment.crashed:
            self._measure_certain(segment, flight)
        else:
            self._measure(segment, flight)
        if self._limit(segment) is None:
            self._findings.doubt("segments without a begin row: their bounds are unknown")

    def _measure_certain(self, segment: Segment, flight: _Flight) -> None:
        """Measure where the rows that say which of the last run were fresh may be missing."""
        for partition, assignment, position in flight.tentative:
            flight.bytes -= flight.held[partition, assignment].pop(position, 0.0)
        flight.size -= len(flight.tentative)
        self._measure(segment, flight)

    def _measure(self, segment: Segment, flight: _Flight) -> None:
        flight.tentative.clear()
        self._take(segment, flight)

    @staticmethod
    def _remove(flight: _Flight, row: Row) -> None:
        size = flight.held[row.partition, row.assignment].pop(row.position, None)
        if size is not None:
            flight.size -= 1
            flight.bytes -= size


class BoundedInFlight(_Bound):
    """A member never has more than ``max_in_flight`` messages in flight (25): delivered and not yet settled.

    Without what the client has prefetched. The note says how high it went.
    """

    name = "BoundedInFlight"

    @property
    def peak(self) -> int:
        """The most that any member had in flight."""
        return int(max((flight.peak for flight in self._flights.values()), default=0))

    def _limit(self, segment: Segment) -> int | None:
        return segment.max_in_flight

    def _take(self, segment: Segment, flight: _Flight) -> None:
        if flight.size > flight.peak:
            flight.peak = flight.size
        bound = segment.max_in_flight
        if bound is None:
            return
        above = flight.size > bound
        # One violation for each time the bound is crossed, not for each message above it.
        if above and not flight.above and flight.latest is not None:
            self._findings.violation(segment, flight.latest, f"{flight.size} in flight, max_in_flight is {bound}")
        flight.above = above


class BoundedBytes(_Bound):
    """Nothing is received while ``max_in_flight_bytes`` or more are in flight (26): one received batch may overshoot
    the bound, and one message above it comes alone.

    A batch ends where a handler starts or ends. The note says how high it went.
    """

    name = "BoundedBytes"

    def _limit(self, segment: Segment) -> int | None:
        return segment.max_in_flight_bytes

    def _take(self, segment: Segment, flight: _Flight) -> None:
        if flight.bytes > flight.peak:
            flight.peak = flight.bytes

    def _begin_batch(self, segment: Segment, row: Row, flight: _Flight) -> None:
        self._measure(segment, flight)
        bound = segment.max_in_flight_bytes
        if bound is not None and flight.size and flight.bytes >= bound:
            what = f"received while {flight.bytes:g} bytes were in flight, max_in_flight_bytes is {bound}"
            self._findings.violation(segment, row, what)
