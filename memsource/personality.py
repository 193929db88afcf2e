"""The Protocol of a simulated broker, an object without a clock of its own.

A call that needs the present time receives it as an argument, or reads the clock of a member. No method blocks, sleeps
or uses an event loop. The world calls ``advance`` at the time of ``next_at``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal, Protocol, get_args

from lanes.clock import Clock
from lanes.core.types import Partition, PartitionKey
from lanes.dead_letter import DeadLetter
from lanes.source import Source
from memsource.memory.topic import Record

PersonalityName = Literal["kafka", "jetstream"]
PERSONALITIES: Final[tuple[PersonalityName, ...]] = get_args(PersonalityName)


class Personality(Protocol):
    """A broker with one topic, the coordinator of its members, and their progress. Times are in seconds."""

    name: PersonalityName
    takes_in_at_once: bool
    """Whether ``settle`` and ``release`` of the broker's sources read their arguments before their first await."""

    def publish(
        self, value: bytes, *, key: PartitionKey | None, headers: Iterable[tuple[str, bytes]], partition: int | None
    ) -> Record:
        """Append one message and return it."""

    def skip(self, count: int, *, partition: int) -> None:
        """Skip ``count`` positions of a partition."""

    @property
    def partitions(self) -> range:
        """The numbers of the partitions."""

    @property
    def records(self) -> list[Record]:
        """All published records, by partition and position."""

    @property
    def taken(self) -> list[tuple[str, Partition]]:
        """The assignments that the broker took from members, in order. A member may not have noticed the loss yet.

        The list omits an assignment that the member never received or already released. The broker takes an assignment,
        for example, when a session or lease expires, when the release is late, or by ``lose``.
        """

    @property
    def unfinished(self) -> list[Record]:
        """The records that the broker's own data shows as unfinished."""

    def source(self, member: str, clock: Clock) -> Source:
        """Make the source of a new member. Until the member crashes, the source's calls act on the broker."""

    def crash(self, member: str, now: float) -> None:
        """End a member's process. The broker notices the end only by its own timers."""

    def freeze(self, member: str, until: float) -> None:
        """Suspend a member's process until a time, as under SIGSTOP. The crashed process makes no further call."""

    def rebalance(self, now: float) -> bool:
        """Make a new assignment plan, as after a change of members. Return whether the broker revokes a partition."""

    def lose(self, partition: int, now: float) -> bool:
        """Take a partition from its owner without a revocation. Return False if the partition has no owner."""

    def redeliver(self, partition: int, now: float) -> bool:
        """Redeliver a message. Return False if the broker never redelivers, or has no message to redeliver."""

    def restart(self, now: float) -> bool:
        """Kill the only server, and restart it without unwritten data. Return False if the broker never loses data."""

    def advance(self, now: float) -> None:
        """Act on every timer that is due, such as sessions, leases and waits for acknowledgements."""

    def next_at(self) -> float:
        """Return the time of the next timer; infinity = no timer."""

    def write_dead_letter(self, dead_letter: DeadLetter) -> None:
        """Store a dead letter, unless the broker already has a dead letter with the same id."""

    @property
    def dead_letters(self) -> list[DeadLetter]:
        """The dead letters, in order."""
