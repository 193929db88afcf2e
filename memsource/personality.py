"""The Protocol of a simulated broker: data that acts when it is called, with the time as an argument.

Nothing here blocks, sleeps or knows a loop. The world calls ``advance`` when the time of ``next_at`` has come.
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
    """A broker with one topic, a coordinator of its members, and their progress. Times are in seconds."""

    name: PersonalityName
    takes_in_at_once: bool
    """Whether its sources take in settlements and releases before they suspend, even over a slow link."""

    def publish(
        self, value: bytes, *, key: PartitionKey | None, headers: Iterable[tuple[str, bytes]], partition: int | None
    ) -> Record:
        """Append one message and return it."""

    def skip(self, count: int, *, partition: int) -> None:
        """Leave a gap of ``count`` positions."""

    @property
    def partitions(self) -> range:
        """The numbers of the partitions."""

    @property
    def records(self) -> list[Record]:
        """Everything published, by partition and position."""

    @property
    def taken(self) -> list[tuple[str, Partition]]:
        """The assignments that the broker took from members, in order, whether or not the members know it.

        The members had heard of them and not released them. They were taken because a session or lease expired, the
        time to release them was over, or ``lose`` was called.
        """

    @property
    def unfinished(self) -> list[Record]:
        """The records that the broker holds as unfinished."""

    def source(self, member: str, clock: Clock) -> Source:
        """A source for a new member of this name. Its calls act on the broker until the member crashes."""

    def crash(self, member: str, now: float) -> None:
        """End a member's process. The broker learns of it by its own timers."""

    def freeze(self, member: str, until: float) -> None:
        """Suspend a member's process until then, as under SIGSTOP: its calls do not reach the broker."""

    def rebalance(self, now: float) -> bool:
        """Make a new plan, as after a change of members; returns whether a partition is revoked."""

    def lose(self, partition: int, now: float) -> bool:
        """Take a partition from its owner without asking; False when it has no owner."""

    def redeliver(self, partition: int, now: float) -> bool:
        """Redeliver a message; False where this broker never does, or there is none."""

    def restart(self, now: float) -> bool:
        """Kill the only server and start it at once, without unwritten data; False where this broker never forgets."""

    def advance(self, now: float) -> None:
        """Act on every timer that is due: sessions, leases, waits for acknowledgements."""

    def next_at(self) -> float:
        """When the next timer is due; infinity = never."""

    def write_dead_letter(self, dead_letter: DeadLetter) -> None:
        """Keep a dead letter; one whose id is known already is dropped."""

    @property
    def dead_letters(self) -> list[DeadLetter]:
        """The dead letters, in order."""
