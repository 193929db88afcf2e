"""The takeover of one partition: its owner delivers unacknowledged messages by sequence, and then new messages.

Without a takeover, the server would deliver new messages before older messages that have not expired yet. Like the
adapter, the owner briefly shrinks ``ack_wait``, so that all unacknowledged messages expire. The owner collects all
expired messages before it delivers the first of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from memsource.jetstream.pull_consumer import PullConsumer
from memsource.memory.broker import Delivery

SHRUNK: Final = 0.001
"""Seconds of ``ack_wait`` while it is shrunk."""

SHRINK_SECONDS: Final = 0.4
"""Seconds that ``ack_wait`` stays shrunk. The server runs its timer 0.1 s after the change."""

_UNBOUNDED: Final = 1 << 62


class Takeover:
    """One takeover of one partition.

    Args:
        consumer: The durable of the partition.
        wake_at: Function that schedules the next ``step`` at a time.

    Attributes:
        done: Whether the takeover has collected all unacknowledged messages.
        taken: The collected messages that the owner has not delivered yet.
    """

    def __init__(self, consumer: PullConsumer, wake_at: Callable[[float], None]) -> None:
        self.done = False
        self.taken: deque[Delivery] = deque()
        self._consumer = consumer
        self._wake_at = wake_at
        self._until: float | None = None

    def step(self, now: float) -> bool:
        """Run all steps that are due. Returns whether the takeover has ended."""
        while not self.done:
            if self._until is not None and now < self._until:
                return False
            # A former owner may have died with a shrunk ack_wait.
            self._consumer.restore(now)
            collected: dict[int, Delivery] = {}
            if self._until is not None:
                count = len(self._consumer.unacknowledged)
                collected = {each.record.position: each for each in self._consumer.pull(count, _UNBOUNDED, now)}
            if collected.keys() >= set(self._consumer.unacknowledged):
                self.taken.extend(collected[position] for position in sorted(collected))
                self.done = True
            else:
                # The takeover starts again if it lacks a message, such as a message that was just extended.
                self._consumer.shrink(SHRUNK, now)
                self._until = now + SHRINK_SECONDS
                self._wake_at(self._until)
        return True

    def cancel(self, now: float) -> None:
        """End the takeover early, and restore ``ack_wait``. Idempotent."""
        if not self.done and self._until is not None:
            self._consumer.restore(now)
