"""The lanes whose head is out of the ordinary: held for a retry, blocked, or on its way to the dead letters."""

from __future__ import annotations

from heapq import heappop, heappush

from lanes.core.lane import BLOCKED, HELD, Lane, step
from lanes.core.types import NEVER, Failure, Message


class Waiting:
    """Those lanes of one engine, by their heads. ``keeps``: a hold does not end before ``kept`` is called for it."""

    __slots__ = ("_heap", "_keeps", "_order", "lanes")

    def __init__(self, *, keeps: bool = False) -> None:
        self._keeps = keeps
        self.lanes: dict[Message, Lane] = {}
        self._heap: list[tuple[float, int, Message]] = []
        self._order: int = 0

    def hold(self, message: Message, failure: Failure, until: float) -> None:
        """The head waits for its next attempt."""
        step(message, "retry")
        self.lanes[message] = Lane(message, failure, until, kept=not self._keeps)
        if not self._keeps:
            self._push(until, message)

    def kept(self, message: Message) -> None:
        """Its failed attempt is kept: its hold may end. Idempotent; ignored for one that is not held any more."""
        lane = self.lanes.get(message)
        if lane is not None and not lane.kept and message.state == HELD:
            lane.kept = True
            self._push(lane.until, message)

    def _push(self, until: float, message: Message) -> None:
        # The order number keeps the heap from comparing messages.
        self._order += 1
        heappush(self._heap, (until, self._order, message))

    def stop(self, message: Message, event: str, failure: Failure) -> None:
        """The head waits for somebody outside: ``event`` is ``block``, ``archive`` or ``give up``."""
        step(message, event)
        self.lanes[message] = Lane(message, failure, 0.0)

    def due(self, now: float) -> list[Message]:
        """Take out the heads whose hold is over; each begins its next attempt."""
        heap = self._heap
        over = []
        while heap and heap[0][0] <= now:
            message = heappop(heap)[2]
            # One that was abandoned or parked stays in the heap until it is its turn; its state tells.
            if message.state == HELD:
                step(message, "due")
                del self.lanes[message]
                message.attempt += 1
                over.append(message)
        return over

    def next_due(self) -> float:
        """When ``due`` is to be called next; ``NEVER`` when nothing is held."""
        heap = self._heap
        while heap and heap[0][2].state != HELD:
            heappop(heap)
        return heap[0][0] if heap else NEVER

    def unblock(self, key: bytes | None) -> list[Message]:
        """Take out the blocked heads of a key; each begins one more attempt, its attempts so far are kept."""
        over = [m for m in self.lanes if m.key == key and m.state == BLOCKED]
        for message in over:
            step(message, "unblock")
            del self.lanes[message]
            message.attempt += 1
        return over

    def park(self, key: bytes | None) -> list[Lane]:
        """The blocked and held heads of a key, on their way to the dead letters from now on."""
        parked = [lane for m, lane in self.lanes.items() if m.key == key and m.state in (BLOCKED, HELD)]
        for lane in parked:
            step(lane.head, "park")
        return parked

    def count(self, state: int) -> int:
        """How many heads are in this state."""
        return sum(1 for message in self.lanes if message.state == state)

    def __repr__(self) -> str:
        return f"<Waiting {len(self.lanes)} lanes held, blocked or parking>"
