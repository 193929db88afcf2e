"""The spans in which an event loop was late, which each process of a group measures for itself.

On a full machine, a process waits for a processor, and sends its heartbeats and renewals too late. The broker then
takes its partitions away. The spans are the evidence that the process was late, because the measurement shares no code
with the renewals.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Final, NamedTuple

from lanes.clock import monotonic

TICK: Final = 0.05
"""Seconds between two turns that the measurement asks of the loop."""

LEAST: Final = 0.1
"""Shortest recorded lateness, in seconds. A busy loop on an idle machine is late by less."""


class Delay(NamedTuple):
    """A span in which a loop was late, in seconds of the engine's clock."""

    begun: float
    ended: float


class Lateness:
    """The measurement of one event loop. Runs on asyncio only.

    Args:
        starved: Whether to count only the seconds in which the process computed nothing. A process that computes for
            long is late by its own fault, and a process without a processor is not.

    Attributes:
        spans: The measured spans, in order.
    """

    def __init__(self, *, starved: bool) -> None:
        self._starved = starved
        self.spans: list[Delay] = []

    def take(self) -> list[Delay]:
        """Remove all spans from ``spans``, and return them."""
        spans, self.spans = self.spans, []
        return spans

    async def measure(self) -> None:
        """Measure until cancelled."""
        while True:
            due, computed = monotonic() + TICK, time.process_time()
            await asyncio.sleep(TICK)
            self.note(due, monotonic(), time.process_time() - computed)

    def note(self, due: float, now: float, computed: float) -> None:
        """Record a turn of the loop.

        Args:
            due: Time at which the turn was due.
            now: Time of the turn.
            computed: Processor seconds of the process in the span from the request for the turn to the turn.
        """
        late = now - due - (computed if self._starved else 0.0)
        if late >= LEAST:
            self.spans.append(Delay(now - late, now))


def covered(spans: Iterable[tuple[float, float]], begin: float, end: float) -> float:
    """Return the seconds between two times that at least one span covers. Pure."""
    seconds, until = 0.0, begin
    for begun, ended in sorted(spans):
        if ended > until:
            seconds += max(0.0, min(ended, end) - max(begun, until))
            until = min(ended, end)
    return seconds
