"""What the broker was not told although it was tried: of which partitions, since when, and why."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

from lanes.core.types import Partition
from lanes.dead_letter import error_text

log = logging.getLogger("lanes")

LASTS_AFTER: Final = 1.0
"""Seconds after which a settlement that fails again is worth a warning: a rebalance refuses one now and then."""

SAID_EVERY: Final = 30.0
"""Seconds between two warnings about the same partition."""

_NAMED_LIMIT: Final = 5
"""Partitions that one log line names at most."""


class Failing:
    """The settlements of one partition fail ``since`` then, in seconds of the engine's clock, last with ``error``.

    ``say_at``: when that is said again.
    """

    __slots__ = ("error", "say_at", "since")

    def __init__(self, since: float) -> None:
        self.since = since
        self.say_at = since
        self.error = ""

    def __repr__(self) -> str:
        return f"<Failing since {self.since:.1f}: {self.error}>"


class Unsettled:
    """The partitions of one consumer whose settlements fail, named ``name`` in the log: the first failure is said
    there, and from one second on a warning, every 30 s.

    ``partitions``: those that fail now. Nothing blocks.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.partitions: dict[Partition, Failing] = {}

    def __repr__(self) -> str:
        return f"<Unsettled {len(self.partitions)} partitions>"

    def failed(self, partitions: Iterable[Partition], error: Exception, now: float) -> None:
        """What has finished of these was not settled, and is tried again."""
        due: list[Partition] = []
        for partition in partitions:
            failing = self.partitions.setdefault(partition, Failing(now))
            failing.error = error_text(error)
            if now >= failing.say_at:
                due.append(partition)
                lasts = failing.since + LASTS_AFTER
                failing.say_at = lasts if now < lasts else now + SAID_EVERY
        if not due:
            return
        lasted = now - min(self.partitions[partition].since for partition in due)
        log.log(
            logging.WARNING if lasted >= LASTS_AFTER else logging.INFO,
            "%s: what has finished is not settled%s and is tried again, of %s: %s",
            self._name,
            f" for {lasted:.1f} s" if lasted else "",
            _named(due),
            error_text(error),
        )

    def settled(self, partition: Partition) -> None:
        """It was, or is not tried any more. Idempotent."""
        self.partitions.pop(partition, None)

    def error(self, partition: Partition) -> str:
        """Why it is not, as far as is known; "" where nothing has failed."""
        failing = self.partitions.get(partition)
        return "" if failing is None else failing.error


def _named(partitions: list[Partition]) -> str:
    more = len(partitions) - _NAMED_LIMIT
    names = ", ".join(str(partition.id) for partition in partitions[:_NAMED_LIMIT])
    return f"{names} and {more} more" if more > 0 else names
