"""The takeover of one partition: everything unacknowledged comes first, by sequence, and only then what is new.

The server would give out new messages before older ones that have not expired yet. As the adapter does, the owner
shrinks ``ack_wait`` for a moment, so that everything unacknowledged expires, and collects all of it before it hands
over the first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from memsource.jetstream.pull_consumer import PullConsumer
from memsource.memory.broker import Delivery

__all__ = ["Takeover"]

SHRUNK: Final = 0.001
"""Seconds of ``ack_wait`` while it is shrunk."""

SHRINK_SECONDS: Final = 0.4
"""How long it stays so. The server looks at its timers 0.1 s after the change."""

_UNBOUNDED: Final = 1 << 62


class Takeover:
    """``wake_at`` has ``step`` called again at a time. ``taken``: what was collected, once it is ``done``."""

    def __init__(self, consumer: PullConsumer, wake_at: Callable[[float], None]) -> None:
        self.done = False
        self.taken: deque[Delivery] = deque()
        self._consumer = consumer
        self._wake_at = wake_at
        self._until: float | None = None

    def step(self, now: float) -> bool:
        """Go on as far as time allows; whether it is done."""
        while not self.done:
            if self._until is not None and now < self._until:
                return False
            # Also what an owner has left so that died in between.
            self._consumer.restore(now)
            collected: dict[int, Delivery] = {}
            if self._until is not None:
                count = len(self._consumer.unacknowledged)
                collected = {each.record.position: each for each in self._consumer.pull(count, _UNBOUNDED, now)}
            if collected.keys() >= set(self._consumer.unacknowledged):
                self.taken.extend(collected[position] for position in sorted(collected))
                self.done = True
            else:
                # Queued batch behind batch, and what was extended just now is missing: all of it once more.
                self._consumer.shrink(SHRUNK, now)
                self._until = now + SHRINK_SECONDS
                self._wake_at(self._until)
        return True

    def cancel(self, now: float) -> None:
        """The partition is to be given up, or taken over from the start: leave no shrunk ``ack_wait``. Idempotent."""
        if not self.done and self._until is not None:
            self._consumer.restore(now)
