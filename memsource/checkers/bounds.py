"""The checkers of bounds: messages and bytes in flight, bounds per partition, ``max_ahead``, and intake stops."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from heapq import heappop, heappush
from typing import Final

from memsource.checkers.assignments import AssignmentChecker, Budgets, begin_committing, has_budgets, with_state
from memsource.checkers.checker import PromiseChecker, on
from memsource.history.reader import Segment
from memsource.history.rows import Row
from memsource.history.timeline import Timeline

_Assignment = tuple[str, int]

_SOON: Final = 0.1
"""Seconds after a stop of the intake within which the intake restarts at its low water only."""


class _Flight:
    """The messages that one member has in flight."""

    __slots__ = ("above", "bytes", "draining", "latest", "messages", "peak", "receiving", "size", "tentative")

    def __init__(self) -> None:
        self.messages: dict[_Assignment, dict[int, float]] = defaultdict(dict)  # position -> bytes
        self.size = 0
        self.bytes = 0.0
        # No handler has started or ended since the latest delivery, so the next delivery may belong to the same batch.
        self.receiving = False
        # Latest deliveries that may be repeats. The rows ``redelivered`` follow after a whole series of deliveries.
        self.tentative: dict[tuple[str, int, int], int] = {}
        self.latest: Row | None = None
        self.draining: set[_Assignment] = set()
        self.peak: float = 0
        self.above = False


class _Bound(PromiseChecker):
    """A checker of one bound on the messages that each member has in flight.

    A message that the broker delivers again while the message is in flight counts once. The count of a message ends at
    its settlement, or at its finish if the source commits. The count also ends when the process abandons or cancels the
    message, after a failure during a drain, and at the end of the assignment.
    """

    def __init__(self, timeline: Timeline) -> None:
        super().__init__(timeline)
        self._flights: dict[Segment, _Flight] = {segment: _Flight() for segment in timeline.segments}

    def _note(self) -> str:
        peak, bound = max(
            ((flight.peak, self._limit(segment) or 0) for segment, flight in self._flights.items()), default=(0, 0)
        )
        return f"peak {peak:g} of {bound or '?'}"

    def _limit(self, segment: Segment) -> int | None:
        """Return the bound in a segment's ``begin`` row; None = the bound is unknown."""
        raise NotImplementedError

    def _begin_batch(self, segment: Segment, row: Row, flight: _Flight) -> None:
        """Judge the first message of a batch, before the checker counts the message."""

    def _take(self, segment: Segment, flight: _Flight) -> None:
        """Measure the messages in flight, after deliveries, before removals, at gaps and at the end of the segment."""
        raise NotImplementedError

    @on("delivered")
    def _delivered(self, segment: Segment, row: Row) -> None:
        self._findings.checked += 1
        flight = self._flights[segment]
        if not flight.receiving:
            self._begin_batch(segment, row, flight)
            flight.receiving = True
        flight.latest = row
        messages = flight.messages[row.partition, row.assignment]
        name = (row.partition, row.assignment, row.position)
        if row.position not in messages:
            messages[row.position] = row.number
            flight.size += 1
            flight.bytes += row.number
            flight.tentative[name] = 1
        elif name in flight.tentative:
            flight.tentative[name] += 1

    @on("redelivered")
    def _redelivered(self, segment: Segment, row: Row) -> None:
        flight = self._flights[segment]
        name = (row.partition, row.assignment, row.position)
        if row.text == "settled" and (segment, row.partition, row.assignment) in self._committing:
            # The message counted as in flight until this row, although a former owner had finished the message.
            self._left(segment, row)
            return
        # The settlement of a message with the cause ``held`` may be under way, or its delivery may be in a gap.
        if row.text == "late" or name not in flight.tentative:
            return
        flight.tentative[name] -= 1
        if not flight.tentative[name]:
            del flight.tentative[name]
            self._remove(flight, row)

    @on("started")
    def _started(self, segment: Segment, row: Row) -> None:
        flight = self._flights[segment]
        flight.receiving = False
        if flight.tentative:
            self._measure(segment, flight)

    @on("ended")
    def _ended(self, segment: Segment, row: Row) -> None:
        self._flights[segment].receiving = False
        draining = (row.partition, row.assignment) in self._flights[segment].draining
        if row.text == "cancelled" or (row.text not in ("ok", "outputs") and draining):
            self._left(segment, row)
        elif row.text == "ok":
            self._finished(segment, row)

    @on("dlq_confirmed", "published")
    def _finished(self, segment: Segment, row: Row) -> None:
        if (segment, row.partition, row.assignment) in self._committing:
            self._left(segment, row)

    @on("ack", "passed", "abandoned")
    def _left(self, segment: Segment, row: Row) -> None:
        flight = self._flights[segment]
        self._measure(segment, flight)
        self._remove(flight, row)

    @on("revoking")
    def _revoking(self, segment: Segment, row: Row) -> None:
        self._flights[segment].draining.add((row.partition, row.assignment))

    @on("revoked", "lost")
    def _given_up(self, segment: Segment, row: Row) -> None:
        flight = self._flights[segment]
        self._measure(segment, flight)
        left = flight.messages.pop((row.partition, row.assignment), {})
        flight.size -= len(left)
        flight.bytes -= sum(left.values())

    @on("gap")
    def _gap(self, segment: Segment, row: Row) -> None:
        flight = self._flights[segment]
        self._measure_certain(segment, flight)
        # All messages may have been settled in the gap, so the later count is a lower bound.
        flight.messages.clear()
        flight.size = 0
        flight.bytes = 0.0

    @on("over")
    def _over(self, segment: Segment, row: Row) -> None:
        flight = self._flights[segment]
        if segment.crashed:
            self._measure_certain(segment, flight)
        else:
            self._measure(segment, flight)
        if self._limit(segment) is None:
            self._findings.doubt("segments without a begin row: their bounds are unknown")

    def _measure_certain(self, segment: Segment, flight: _Flight) -> None:
        """Measure without possible redeliveries, because the rows that mark redeliveries may be missing."""
        for partition, assignment, position in flight.tentative:
            flight.bytes -= flight.messages[partition, assignment].pop(position, 0.0)
        flight.size -= len(flight.tentative)
        self._measure(segment, flight)

    def _measure(self, segment: Segment, flight: _Flight) -> None:
        flight.tentative.clear()
        self._take(segment, flight)

    @staticmethod
    def _remove(flight: _Flight, row: Row) -> None:
        size = flight.messages[row.partition, row.assignment].pop(row.position, None)
        if size is not None:
            flight.size -= 1
            flight.bytes -= size


class BoundedInFlight(_Bound):
    """A member never has more than ``max_in_flight`` messages in flight: delivered and not yet settled (25).

    Messages that the client has prefetched do not count. The verdict's note states the peak.
    """

    @property
    def peak(self) -> int:
        """The maximum number of messages in flight at one member."""
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
        # One violation for each crossing of the bound, not for each message above the bound.
        if above and not flight.above and flight.latest is not None:
            self._findings.violation(segment, flight.latest, f"{flight.size} in flight, max_in_flight is {bound}")
        flight.above = above


class PartitionBudgets(_Bound):
    """No partition exceeds ``max_in_flight_per_partition`` or ``concurrency_per_partition`` (63).

    The checker treats the partitions of a physical queue as one partition. The checker counts the messages in flight of
    one assignment of each partition. The checker counts the handlers of all assignments in one process, and counts a
    handler after the fence until its end. With batches the bound of handlers is ``concurrency_per_partition`` calls, of
    ``batch`` messages each. The verdict's note states the peak of the messages in flight.

    Args:
        timeline: History to judge.
    """

    def __init__(self, timeline: Timeline) -> None:
        super().__init__(timeline)
        self._budgets = Budgets()
        self._fenced: set[tuple[Segment, str, int]] = set()
        # (segment, budget) -> running handlers, as (partition, assignment, position)
        self._running: dict[tuple[Segment, str], set[tuple[str, int, int]]] = defaultdict(set)

    @on("assigned")
    def _assigned(self, segment: Segment, row: Row) -> None:
        self._budgets.assigned(segment, row)

    @on("drained")
    def _drained(self, segment: Segment, row: Row) -> None:
        # The messages whose handlers still run count for the bound of the whole consumer alone.
        self._fenced.add((segment, row.partition, row.assignment))

    def _limit(self, segment: Segment) -> int | None:
        # A history without the bounds per partition is from a version without these bounds.
        return segment.rules.max_in_flight_per_partition or 0

    def _note(self) -> str:
        return super()._note() if any(map(self._limit, self._flights)) else ""

    @on("delivered")
    def _delivered(self, segment: Segment, row: Row) -> None:
        if has_budgets(segment):
            super()._delivered(segment, row)

    def _take(self, segment: Segment, flight: _Flight) -> None:
        bound = self._limit(segment)
        if not bound:
            return
        counts: Counter[tuple[str, int]] = Counter()
        for (partition, assignment), messages in flight.messages.items():
            budget = self._budgets.of(segment, partition)
            if budget == partition:
                counts[budget, assignment] += len(messages)
            elif (segment, partition, assignment) not in self._fenced:
                counts[budget, 0] += len(messages)
        most = max(counts.values(), default=0)
        flight.peak = max(flight.peak, most)
        above = most > bound
        if above and not flight.above and flight.latest is not None:
            what = f"{most} of a partition in flight, max_in_flight_per_partition is {bound}"
            self._findings.violation(segment, flight.latest, what)
        flight.above = above

    @on("started")
    def _started(self, segment: Segment, row: Row) -> None:
        super()._started(segment, row)
        calls, batch = segment.rules.concurrency_per_partition, max(1, segment.rules.batch or 1)
        if not calls:
            return
        running = self._running[segment, self._budgets.of(segment, row.partition)]
        running.add((row.partition, row.assignment, row.position))
        if len(running) == calls * batch + 1:
            times = f", with batches of {batch}" if batch > 1 else ""
            what = f"{len(running)} handlers of its partition run, concurrency_per_partition is {calls}{times}"
            self._findings.violation(segment, row, what)

    @on("ended")
    def _ended(self, segment: Segment, row: Row) -> None:
        super()._ended(segment, row)
        self._runs_no_more(segment, row)

    @on("zombie")
    def _runs_no_more(self, segment: Segment, row: Row) -> None:
        running = self._running[segment, self._budgets.of(segment, row.partition)]
        running.discard((row.partition, row.assignment, row.position))

    @on("gap")
    def _gap(self, segment: Segment, row: Row) -> None:
        super()._gap(segment, row)
        self._forget(segment)

    @on("over")
    def _over(self, segment: Segment, row: Row) -> None:
        super()._over(segment, row)
        self._forget(segment)

    def _forget(self, segment: Segment) -> None:
        for running in [running for running in self._running if running[0] is segment]:
            del self._running[running]


class BoundedBytes(_Bound):
    """A member receives no message while ``max_in_flight_bytes`` or more bytes are in flight (26).

    One received batch may exceed the bound, for example by a message that is larger than the bound. A batch ends when
    a handler starts or ends. The verdict's note states the peak.
    """

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


class _Above:
    """The deliveries of one assignment from the confirmed floor on, in order, and its unfinished positions."""

    __slots__ = ("_heap", "ahead", "crossed", "delivered", "unfinished")

    def __init__(self) -> None:
        self.delivered: list[int] = []
        self.unfinished: set[int] = set()
        self._heap: list[int] = []
        self.ahead = False
        self.crossed: Row | None = None

    def confirm(self, floor: int) -> None:
        del self.delivered[: bisect_left(self.delivered, floor)]

    def deliver(self, position: int) -> None:
        self.delivered.append(position)
        self.unfinished.add(position)
        heappush(self._heap, position)

    def oldest(self) -> int:
        """Return the lowest unfinished position; -1 = none."""
        heap = self._heap
        while heap and heap[0] not in self.unfinished:
            heappop(heap)
        return heap[0] if heap else -1


class MaxAhead(AssignmentChecker[_Above]):
    """No handler starts a message more than ``max_ahead`` deliveries above the confirmed floor (27).

    The deliveries of a part that the assignment has given up do not count. The checker judges only sources that commit
    positions.
    """

    _state_class = _Above
    _ends_at = ("revoked",)

    @on("assigned")
    def _assigned(self, segment: Segment, row: Row) -> None:
        begin_committing(self._assignments, self._findings, segment, row, "max_ahead", segment.rules.max_ahead)

    @with_state("commit_ok", find="known")
    def _confirmed(self, segment: Segment, row: Row, state: _Above) -> None:
        state.confirm(row.floor)

    @with_state("delivered", find="known")
    def _delivered(self, segment: Segment, row: Row, state: _Above) -> None:
        state.delivered.append(row.position)

    @with_state("abandoned", find="known")
    def _abandoned(self, segment: Segment, row: Row, state: _Above) -> None:
        index = bisect_left(state.delivered, row.position)
        del state.delivered[index : bisect_left(state.delivered, row.position + 1)]

    @on("started")
    def _started(self, segment: Segment, row: Row) -> None:
        state, bound = self._assignments.known(segment, row), segment.rules.max_ahead
        if state is None or bound is None:
            return
        self._findings.checked += 1
        if len(state.delivered) <= bound:
            return
        ahead = bisect_left(state.delivered, row.position + 1)
        if ahead > bound:
            what = f"started {ahead} deliveries above the confirmed floor, max_ahead is {bound}"
            self._findings.violation(segment, row, what)


class StallNamed(AssignmentChecker[_Above]):
    """A row reports that a partition reached ``max_ahead``, and names the message that holds the floor (29).

    The row must precede the next start, finish or confirmed commit of the assignment. The lowest delivered and
    unfinished message holds the floor. If all messages have finished and only the confirmation is missing, no message
    holds the floor. ``LaneProgress`` judges that other keys continue up to ``max_ahead``. The checker judges no
    assignment that gives messages up, in a drain or for a part of its slots.
    """

    _state_class = _Above
    _ends_at = ("revoking", "abandoned")

    @on("assigned")
    def _assigned(self, segment: Segment, row: Row) -> None:
        begin_committing(self._assignments, self._findings, segment, row, "max_ahead", segment.rules.max_ahead)

    @with_state("commit_ok", find="known")
    def _confirmed(self, segment: Segment, row: Row, state: _Above) -> None:
        self._told(segment, state)
        state.confirm(row.floor)

    @on("delivered")
    def _delivered(self, segment: Segment, row: Row) -> None:
        state, bound = self._assignments.known(segment, row), segment.rules.max_ahead
        if state is None or bound is None:
            return
        state.deliver(row.position)
        if len(state.delivered) >= bound and not state.ahead and state.crossed is None:
            state.crossed = row

    @with_state("redelivered settled", find="known")
    def _redelivered(self, segment: Segment, row: Row, state: _Above) -> None:
        # A former owner had finished the message, so the message does not hold the floor.
        state.unfinished.discard(row.position)

    @with_state("started", find="known")
    def _started(self, segment: Segment, row: Row, state: _Above) -> None:
        if state.crossed is not None:
            self._told(segment, state)

    @with_state("ended ok", "dlq_confirmed", find="known")
    def _finished(self, segment: Segment, row: Row, state: _Above) -> None:
        self._told(segment, state)
        state.unfinished.discard(row.position)

    def _told(self, segment: Segment, state: _Above) -> None:
        if state.crossed is not None:
            self._findings.violation(segment, state.crossed, "its partition reached max_ahead, and no row reports it")
            state.crossed = None

    @with_state("ahead_reached", find="known")
    def _reached(self, segment: Segment, row: Row, state: _Above) -> None:
        self._findings.checked += 1
        state.ahead, state.crossed = True, None
        oldest, admitted = state.oldest(), state.delivered[: segment.rules.max_ahead]
        if oldest not in admitted:
            # A message that waits for max_ahead does not hold the floor.
            oldest = -1
        if row.position != oldest:
            named = "no message" if row.position < 0 else f"position {row.position}"
            holder = "none" if oldest < 0 else f"position {oldest}"
            self._findings.violation(segment, row, f"named {named} as the holder of the floor, it is {holder}")

    @with_state("ahead_left", find="known")
    def _left(self, segment: Segment, row: Row, state: _Above) -> None:
        state.ahead = False


class PauseAtBounds(PromiseChecker):
    """Intake stops only at a bound, and restarts at once only when no count is above its low water (31).

    The low water of messages is halfway between ``concurrency`` and ``max_in_flight``. The low water of bytes is half
    of ``max_in_flight_bytes``. When a handler has been idle for half a second, the intake may restart below the bounds.
    Without this rule, messages that wait for one slow message may keep a count above its low water. With bounds per
    partition, messages of full partitions raise the low water of messages. A message that a former owner had completed
    counts only at its delivery.

    Args:
        timeline: History to judge.
    """

    def __init__(self, timeline: Timeline) -> None:
        super().__init__(timeline)
        self._paused: dict[Segment, Row | None] = dict.fromkeys(timeline.segments)
        self._early: dict[Segment, Row] = {}
        self._completed: dict[Segment, int] = {}
        self._gaps: set[Segment] = set()

    @on("redelivered settled")
    def _redelivered(self, segment: Segment, row: Row) -> None:
        self._completed[segment] = row.n

    @on("paused")
    def _pause(self, segment: Segment, row: Row) -> None:
        self._findings.checked += 1
        if self._paused[segment] is not None:
            self._findings.violation(segment, row, "intake stopped a second time")
        self._paused[segment] = row
        bound, size = segment.max_in_flight, segment.max_in_flight_bytes
        if bound is None or size is None or row.number >= bound or row.bytes >= size or segment in self._gaps:
            return
        # Rows of completed messages and of max_ahead may separate the deliveries from this row.
        if row.n - self._completed.get(segment, -3) > 2:
            self._early[segment] = row

    @on("resumed")
    def _resume(self, segment: Segment, row: Row) -> None:
        self._findings.checked += 1
        paused = self._paused[segment]
        if paused is None and segment not in self._gaps:
            self._findings.violation(segment, row, "intake restarted without a stop")
        self._paused[segment] = None
        self._gaps.discard(segment)
        early = self._early.pop(segment, None)
        if early is not None and row.n != early.n + 1:
            self._violation(segment, early)
        bound, running, size = segment.max_in_flight, segment.concurrency, segment.max_in_flight_bytes
        if bound is None or running is None or size is None:
            return
        late = paused is None or row.mono - paused.mono >= _SOON  # None: a gap hides the stop
        if late and row.number < bound and row.bytes < size:
            return
        low = bound - 1 if segment.rules.max_in_flight_per_partition else (bound + running) // 2
        if row.number > low or row.bytes > size // 2:
            what = (
                f"intake restarted with {row.number:g} of {bound} messages and {row.bytes:g} of {size} bytes in flight"
            )
            self._findings.violation(segment, row, what)

    def _violation(self, segment: Segment, row: Row) -> None:
        bound, size = segment.max_in_flight, segment.max_in_flight_bytes
        what = f"intake stopped with {row.number:g} of {bound} messages and {row.bytes:g} of {size} bytes in flight"
        self._findings.violation(segment, row, what)

    @on("gap")
    def _gap(self, segment: Segment, row: Row) -> None:
        self._gaps.add(segment)
        self._paused[segment] = None
        self._early.pop(segment, None)

    @on("over")
    def _over(self, segment: Segment, row: Row) -> None:
        early = self._early.pop(segment, None)
        if early is not None and not (segment.crashed and row.n == early.n):
            self._violation(segment, early)
