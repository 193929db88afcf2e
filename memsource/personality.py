"""What a world needs of a broker: data that acts when it is called, and whose time is an argument.

Nothing here blocks, sleeps or knows a loop. The world calls ``advance`` whenever ``next_at`` has come.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal, Protocol, get_args

from lanes.clock import Clock
from lanes.core.types import Partition, PartitionKey
from lanes.dead_letter import DeadLetter
from lanes.source import Source
from memsource.memory.topic import Record

__all__ = ["PERSONALITIES", "Personality", "PersonalityName"]

PersonalityName = Literal["kafka", "jetstream"]
PERSONALITIES: Final[tuple[PersonalityName, ...]] = get_args(PersonalityName)


class Personality(Protocol):
    """A broker with one topic, a coordinator of its members, and the members' progress. Times are in seconds."""

    name: PersonalityName
    takes_in_at_once: bool
    """Whether its sources take in what is finished or given up before they suspend, however slow the way is."""

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
        """Which assignments were taken from which members, in order: those they had heard of and had not released when
        their session or lease expired, their time to give them back was over, or ``lose`` was called. Whether they have
        heard of it by now or not."""

    @property
    def unfinished(self) -> list[Record]:
        """What the broker holds as not finished, whoever works on it."""

    def source(self, member: str, clock: Clock) -> Source:
        """A source for a new member of this name. Its calls act on the broker until the member crashes."""

    def crash(self, member: str, now: float) -> None:
        """A member's process is gone. The broker does not know yet: its own timers tell it."""

    def freeze(self, member: str, until: float) -> None:
        """A member's process does not run until then, as under SIGSTOP: nothing of it reaches the broker."""

    def rebalance(self, now: float) -> bool:
        """Plan anew as if somebody had come or gone; whether anything is asked back."""

    def lose(self, partition: int, now: float) -> bool:
        """Take a partition from its owner without asking; False when nobody owns it."""

    def redeliver(self, partition: int, now: float) -> bool:
        """Deliver something again that was delivered; False where this broker never does, or there is nothing."""

    def restart(self, now: float) -> bool:
        """Have the only server killed and back at once, without what it had not written down; False where this broker
        never forgets."""

    def advance(self, now: float) -> None:
        """Act on every timer that is due: sessions, leases, waits for acknowledgements."""

    def next_at(self) -> float:
        """When the next timer is due; infinity = there is none."""

    def write_dead_letter(self, dead_letter: DeadLetter) -> None:
        """Keep a dead letter; one whose id is known already is dropped."""

    @property
    def dead_letters(self) -> list[DeadLetter]:
        """The dead letters, in order."""
