"""The bounds of the messages and of the bytes in flight, each with a high-water and a low-water mark.

*In flight* means delivered and not settled. The engine stops deliveries at a high-water mark, which is the bound.
Deliveries start again when messages and bytes are at or below their low-water marks. With two marks, deliveries do not
stop and start at every message.

The low-water mark of bytes is half the bound. The low-water mark of messages is halfway between ``concurrency`` and the
bound, because with fewer than ``concurrency`` messages in flight some handlers would be idle.

Messages that wait for a slow message may keep the counts above a low-water mark for long. Deliveries therefore also
start again below the bounds, if they have been stopped for ``LOOK_EVERY`` seconds and a handler is idle.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from typing import Final

from lanes.core.types import NEVER, Room

PAUSE_AFTER: Final = 1.0
"""Seconds at a bound after which the source pauses its clients. A pause costs more than a short wait."""

LOOK_EVERY: Final = PAUSE_AFTER / 2
"""Seconds at a bound after which intake may start again above the low-water marks, which avoids a pause of the clients.
"""


@dataclass(slots=True, eq=False)
class Flow:
    """The counts and bounds of the messages in flight of one consumer.

    Attributes:
        max_in_flight: Maximum number of messages in flight, the high-water mark.
        max_bytes: Maximum number of bytes in flight, the high-water mark.
        low: Low-water mark of messages.
        in_flight: Number of messages in flight.
        bytes: Number of bytes in flight.
        peak: Highest number of messages in flight since the start. The number stays within the bound while the source
            respects ``room()``.
        peak_bytes: Highest number of bytes in flight since the start. The number may exceed the bound, because the
            engine learns the size of a message only at its delivery.
        taking: Whether the source may deliver: False from a high-water mark until both counts are at or below their
            low-water marks.
        paused: Whether the user paused the consumer.
        pausing: Whether the source pauses its clients, because a bound lasted for ``PAUSE_AFTER`` seconds.
        pause_at: Time from which the source pauses its clients. ``NEVER`` = deliveries continue, or the clients are
            already paused.
        look_at: Time of the next check for an idle handler. ``NEVER`` = deliveries continue, or the source already
            pauses its clients.
    """

    max_in_flight: int
    max_bytes: int
    concurrency: InitVar[int] = 0
    low: int = field(init=False)
    in_flight: int = 0
    bytes: int = 0
    peak: int = 0
    peak_bytes: int = 0
    taking: bool = True
    paused: bool = False
    pausing: bool = False
    pause_at: float = NEVER
    look_at: float = NEVER

    def __post_init__(self, concurrency: int) -> None:
        self.low = (self.max_in_flight + concurrency) // 2

    def admit(self, count: int, size: int, now: float) -> bool:
        """Add messages, and return whether deliveries stop because a count has reached its high-water mark."""
        self.in_flight += count
        self.bytes += size
        if self.in_flight > self.peak:
            self.peak = self.in_flight
        if self.bytes > self.peak_bytes:
            self.peak_bytes = self.bytes
        if self.taking and (self.in_flight >= self.max_in_flight or self.bytes >= self.max_bytes):
            self.taking = False
            self.pause_at = now + PAUSE_AFTER
            self.look_at = now + LOOK_EVERY
            return True
        return False

    def release(self, count: int, size: int) -> bool:
        """Remove messages, and return whether deliveries start again at the low-water marks."""
        self.in_flight -= count
        self.bytes -= size
        if not self.taking and self.in_flight <= self.low and self.bytes <= self.max_bytes // 2:
            self.resume()
            return True
        return False

    @property
    def stopped_early(self) -> bool:
        """Whether deliveries are stopped although both counts are below their bounds."""
        return not self.taking and self.in_flight < self.max_in_flight and self.bytes < self.max_bytes

    def resume(self) -> None:
        """Start the deliveries again."""
        self.taking = True
        self.pausing = False
        self.pause_at = self.look_at = NEVER

    def due(self, now: float) -> bool:
        """Pause the clients if deliveries have been stopped for ``PAUSE_AFTER`` seconds.

        Return whether the pause starts now.
        """
        if self.pause_at > now:
            return False
        self.pause_at = NEVER
        self.pausing = True
        return True

    def looked(self, now: float) -> None:
        """Plan the next check for an idle handler, after a check that found no idle handler."""
        self.look_at = now + LOOK_EVERY if self.stopped_early or not self.pausing else NEVER

    def room(self) -> Room:
        """Return the bounds of messages and bytes for the next delivery.

        Both are 0 while the user or a bound stops deliveries.
        """
        if self.paused or not self.taking:
            return Room(0, 0)
        return Room(self.max_in_flight - self.in_flight, self.max_bytes - self.bytes)

    def __repr__(self) -> str:
        return f"<Flow {self.in_flight} of {self.max_in_flight} in flight, {self.bytes} of {self.max_bytes} bytes>"
