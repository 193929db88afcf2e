"""The checks of a simulated source for stranded messages, with the functions of the real sources."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, Protocol

from lanes.clock import Clock
from lanes.queues.partitioned import PartitionedQueue
from lanes.queues.stranded import CONFIRMED_AFTER, LOOK_EVERY, QueueFacts, Stranded, names_beyond, stranded_in

GROUP: Final = "g"
"""Name of the group."""


class QueueBroker(Protocol):
    """The physical queues of a simulated broker."""

    @property
    def known_names(self) -> Collection[str]:
        """Names of the physical queues that the group has read at any time."""

    def facts(self, names: Sequence[str]) -> Mapping[str, QueueFacts]:
        """Return the facts of the physical queues with these names."""


class StrandedLooks:
    """The checks of one source. Like a real source, this source reports stranded messages only after a second check.

    Args:
        queue: The queue as the member knows it.
        broker: The broker.
        clock: Clock of the process, in seconds.
        wake_at: Function that receives the time of the next check, at which the caller must call ``look_if_due``.

    Attributes:
        found: Stranded messages of the last check.
    """

    def __init__(
        self, queue: PartitionedQueue, broker: QueueBroker, clock: Clock, wake_at: Callable[[float], None]
    ) -> None:
        self.found: tuple[Stranded, ...] = ()
        self._queue = queue
        self._broker = broker
        self._clock = clock
        self._wake_at = wake_at
        self._doubted: frozenset[str] = frozenset()
        self._next = 0.0

    def look_after(self, seconds: float = LOOK_EVERY) -> None:
        """Plan the next check."""
        self._next = self._clock() + seconds
        self._wake_at(self._next)

    def look_if_due(self) -> None:
        """Check for stranded messages if the next check is due."""
        if self._clock() < self._next:
            return
        names = names_beyond(self._queue, self._broker.known_names)
        found = {each.name: each for each in stranded_in(self._queue, self._broker.facts(names), GROUP)}
        before = {each.name for each in self.found}
        self.found = tuple(each for name, each in found.items() if name in before or name in self._doubted)
        self._doubted = frozenset(found)
        self.look_after(LOOK_EVERY if len(found) == len(self.found) else CONFIRMED_AFTER)
