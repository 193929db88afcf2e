"""The budgets of messages and bytes in flight, with a high and a low water mark.

*In flight* means delivered and not settled. Taking stops at the high mark, which is the bound. It starts again when
both budgets are at or below their low marks, so a crossing costs two transitions, however fast messages come and go.
The low mark of bytes is half the bound. The low mark of messages is halfway between ``concurrency`` and the bound: with
fewer than ``concurrency`` in flight, some handlers would have nothing to do.
"""

from __future__ import annotations

from typing import Final

from lanes.core.types import NEVER, Room

PAUSE_AFTER: Final = 1.0
"""Seconds at a bound until the clients are paused: a pause costs more than a short wait."""


class Flow:
    """The budgets of one consumer.

    ``taking``: the source may deliver. ``paused``: the user stopped that. ``pausing``: a bound lasted until
    ``pause_at``, ``PAUSE_AFTER`` seconds, so the clients are paused. ``peak`` and ``peak_bytes`` are the highest values
    so far. ``peak`` never exceeds ``max_in_flight`` while the source keeps to ``room()``. ``peak_bytes`` may exceed the
    bound by one received batch, because a size is known only on arrival.
    """

    __slots__ = (
        "bytes",
        "in_flight",
        "low",
        "max_bytes",
        "max_in_flight",
        "pause_at",
        "paused",
        "pausing",
        "peak",
        "peak_bytes",
        "taking",
    )

    def __init__(self, max_in_flight: int, max_bytes: int, *, concurrency: int = 0) -> None:
        self.max_in_flight = max_in_flight
        self.low = (max_in_flight + concurrency) // 2
        self.max_bytes = max_bytes
        self.in_flight: int = 0
        self.bytes: int = 0
        self.peak: int = 0
        self.peak_bytes: int = 0
        self.taking: bool = True
        self.paused: bool = False
        self.pausing: bool = False
        self.pause_at: float = NEVER

    def admit(self, count: int, size: int, now: float) -> bool:
        """Add messages; True when that crossed the high mark."""
        self.in_flight += count
        self.bytes += size
        if self.in_flight > self.peak:
            self.peak = self.in_flight
        if self.bytes > self.peak_bytes:
            self.peak_bytes = self.bytes
        if self.taking and (self.in_flight >= self.max_in_flight or self.bytes >= self.max_bytes):
            self.taking = False
            self.pause_at = now + PAUSE_AFTER
            return True
        return False

    def release(self, count: int, size: int) -> bool:
        """Remove messages; True when that crossed the low mark."""
        self.in_flight -= count
        self.bytes -= size
        if not self.taking and self.in_flight <= self.low and self.bytes <= self.max_bytes // 2:
            self.taking = True
            self.pausing = False
            self.pause_at = NEVER
            return True
        return False

    def due(self, now: float) -> bool:
        """Start pausing the clients; True when that is due now."""
        if self.pause_at > now:
            return False
        self.pause_at = NEVER
        self.pausing = True
        return True

    def room(self) -> Room:
        """The bounds of the next delivery; 0 while not taking."""
        if self.paused or not self.taking:
            return Room(0, 0)
        return Room(self.max_in_flight - self.in_flight, self.max_bytes - self.bytes)

    def __repr__(self) -> str:
        return f"<Flow {self.in_flight} of {self.max_in_flight} in flight, {self.bytes} of {self.max_bytes} bytes>"
