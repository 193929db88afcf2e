"""The budgets of what is in flight: messages and bytes, with a high and a low water mark.

*In flight* is everything delivered and not settled. Taking stops at the high mark (a bound is reached) and
starts again only when both budgets are at or below their low mark: two transitions a crossing, however fast messages
come and go. The low mark is half of the bound; of messages, the handlers that run and half of what is beyond, because
with less than that in flight some of them would have nothing to do.
"""

from __future__ import annotations

from typing import Final

from lanes.core.types import NEVER, Room

PAUSE_AFTER: Final = 1.0
"""Seconds for which a bound is reached before the clients are paused: that costs more than a short wait."""


class Flow:
    """The budgets of one consumer; ``concurrency`` of the messages in flight run.

    ``taking`` says whether a source may deliver, ``paused`` whether the user stopped that. ``peak`` and
    ``peak_bytes`` are the highest values seen: ``peak`` never exceeds ``max_in_flight`` while sources keep to
    ``room()``; ``peak_bytes`` may exceed the bound by one received batch, because a size is known only on arrival.
    A bound that is reached for ``PAUSE_AFTER`` seconds is worth pausing the clients for: ``pausing``, from
    ``pause_at`` on.
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
        """Count messages in; True when this crossed the high mark."""
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
        """Count messages out; True when this crossed the low mark."""
        self.in_flight -= count
        self.bytes -= size
        if not self.taking and self.in_flight <= self.low and self.bytes <= self.max_bytes // 2:
            self.taking = True
            self.pausing = False
            self.pause_at = NEVER
            return True
        return False

    def due(self, now: float) -> bool:
        """Whether the clients should be paused from now on, and were not before."""
        if self.pause_at > now:
            return False
        self.pause_at = NEVER
        self.pausing = True
        return True

    def room(self) -> Room:
        """How much more may be delivered now; nothing while not taking."""
        if self.paused or not self.taking:
            return Room(0, 0)
        return Room(self.max_in_flight - self.in_flight, self.max_bytes - self.bytes)

    def __repr__(self) -> str:
        return f"<Flow {self.in_flight} of {self.max_in_flight} in flight, {self.bytes} of {self.max_bytes} bytes>"
