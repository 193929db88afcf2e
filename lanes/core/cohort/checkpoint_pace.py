"""The intervals at which a member stores the ledgers of its partitions.

After a crash, the finished messages above the floor that are not in the stored ledgers run again. Each ledger needs a
separate write. The interval therefore depends on the number of partitions with such messages.
"""

from __future__ import annotations

from typing import Final

DEFAULT_INTERVAL: Final = 1.0
"""Default of ``CheckpointPace.interval``, in seconds."""

PROMPT: Final = 1 / 20
"""Share of the interval after which a write is due, unless the writes of the member would cost too much."""

WRITE_PACE: Final = 20e-3
"""Seconds between two writes of a partition for each partition that waits for a write. A write costs about 0.6 ms of
CPU, so all writes cost about 3 % of a CPU, unless the interval makes the pace shorter."""

MESSAGE_PACE: Final = 60e-6
"""Seconds that each outstanding message of the ledgers adds to the interval between two writes, because a write lists
these messages.
"""


class CheckpointPace:
    """Decides how long the finished messages of a partition wait for the write of the ledger. No method blocks.

    Args:
        interval: Maximum number of seconds from a finished message to its write, 0 or more.

    Attributes:
        interval: The current maximum; a change applies to later writes.
    """

    __slots__ = ("_outstanding", "_waiting", "interval")

    def __init__(self, interval: float = DEFAULT_INTERVAL) -> None:
        self.interval = interval
        self._waiting: dict[int, int] = {}
        self._outstanding = 0  # the sum of ``_waiting``

    def begin(self, partition: int, outstanding: int) -> float:
        """Record that a partition waits for a write, and return the seconds until this write is due.

        Args:
            partition: Number of the cohort partition.
            outstanding: Number of outstanding messages of its ledger.

        Returns:
            The seconds, from a twentieth of the interval up to the interval.
        """
        self.end(partition)
        self._waiting[partition] = outstanding
        self._outstanding += outstanding
        cost = len(self._waiting) * WRITE_PACE + self._outstanding * MESSAGE_PACE
        return min(self.interval, max(self.interval * PROMPT, cost))

    def end(self, partition: int) -> None:
        """Record that a partition no longer waits, because its write begins or its ownership has ended. Idempotent."""
        self._outstanding -= self._waiting.pop(partition, 0)

    def __repr__(self) -> str:
        return f"<CheckpointPace of {self.interval:g} s: {len(self._waiting)} partitions wait>"
