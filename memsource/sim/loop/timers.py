"""The timers of a ``SimLoop``: by time, and those of one time in the order they were set."""

from __future__ import annotations

import asyncio
import heapq
import math
from typing import Any, Final

__all__ = ["Timers"]

_CANCELLED: Final = 100
"""Cancelled timers that may wait for their time, beside as many that are not cancelled."""


class Timers:
    """A heap of handles. A cancelled one is dropped when its time comes, or earlier when they are many."""

    __slots__ = ("_heap", "_pushed", "cancelled")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Any]] = []
        self._pushed = 0
        self.cancelled = 0

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, when: float, timer: asyncio.TimerHandle) -> None:
        """Add a timer. O(log n)."""
        # asyncio's mark of a handle that is in a heap: it reports the cancellation of those alone.
        timer._scheduled = True  # type: ignore[attr-defined]
        self._pushed += 1
        heapq.heappush(self._heap, (when, self._pushed, timer))

    def on_cancel(self, timer: Any) -> None:
        """A timer is about to be cancelled. O(1), amortized."""
        if timer._scheduled:
            self.cancelled += 1
            if self.cancelled > max(_CANCELLED, len(self._heap) // 2):
                self._heap = [one for one in self._heap if not one[2]._cancelled and one[2] is not timer]
                heapq.heapify(self._heap)
                self.cancelled = 0

    def next_at(self) -> float:
        """When the next one is due; infinity = there is none, or it waits for ever."""
        heap = self._heap
        while heap and heap[0][2]._cancelled:
            self.cancelled -= 1
            heapq.heappop(heap)[2]._scheduled = False
        return heap[0][0] if heap else math.inf

    def due(self, now: float) -> list[asyncio.Handle]:
        """Take out those whose time has come by ``now``, in order."""
        heap = self._heap
        taken: list[asyncio.Handle] = []
        while heap and heap[0][0] <= now:
            timer = heapq.heappop(heap)[2]
            timer._scheduled = False
            if timer._cancelled:
                self.cancelled -= 1
            else:
                taken.append(timer)
        return taken

    def clear(self) -> None:
        """Drop all. Idempotent."""
        self._heap.clear()
        self.cancelled = 0
