"""Ranges of the ring, and the map of their owners. A map depends only on its assignments and their order.

A range is a run of slots that includes both ends. Each slot has at most one owner. An assignment moves either slots of
one owner or slots without an owner. No assignment moves slots of two owners.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from lanes.core.ring import SLOTS
from lanes.errors import ConfigError


@dataclass(frozen=True, slots=True, order=True)
class Range:
    """A range of slots. Immutable, and ordered by its first slot.

    Args:
        lo: First slot, 0 … 65,535.
        hi: Last slot, ``lo`` … 65,535. The slot belongs to the range.

    Attributes:
        lo: First slot.
        hi: Last slot.

    Raises:
        ConfigError: ``lo`` or ``hi`` is not a slot, or ``hi`` is below ``lo``.
    """

    lo: int
    hi: int

    def __post_init__(self) -> None:
        for name, value in (("lo", self.lo), ("hi", self.hi)):
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < SLOTS:
                raise ConfigError(f"{name}={_shown(value)}: must be a slot, a whole number in 0 … {SLOTS - 1}")
        if self.hi < self.lo:
            raise ConfigError(f"lo={self.lo}, hi={self.hi}: a range ends at or above its first slot; exchange the ends")

    def __contains__(self, slot: object) -> bool:
        return isinstance(slot, int) and self.lo <= slot <= self.hi

    def __len__(self) -> int:
        return self.hi - self.lo + 1

    def __str__(self) -> str:
        return f"{self.lo}-{self.hi}"


WHOLE: Final = Range(0, SLOTS - 1)
"""All slots."""


class Assignment(NamedTuple):
    """A range and the consumer that owns it.

    Attributes:
        range: The slots.
        consumer: Name of the consumer in its group.
    """

    range: Range
    consumer: str


@dataclass(frozen=True, slots=True)
class RingMap:
    """The owners of all slots. Immutable.

    Attributes:
        owned: The ranges with their owners, in ascending order. Two adjacent ranges of one owner stay separate. A range
            changes only when a later assignment divides it.
    """

    owned: tuple[Assignment, ...] = ()
    _firsts: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_firsts", tuple(each.range.lo for each in self.owned))

    @classmethod
    def replay(cls, history: Iterable[Assignment]) -> RingMap:
        """Return the map after the assignments of a history. Raises ``ConfigError`` like ``assign``."""
        ring = cls()
        for assignment in history:
            ring = ring.assign(assignment)
        return ring

    def find(self, slot: int) -> Assignment | None:
        """Return the range of a slot with its owner; None = the slot has no owner."""
        index = bisect_right(self._firsts, slot) - 1
        if index < 0 or slot not in self.owned[index].range:
            return None
        return self.owned[index]

    def unowned(self) -> list[Range]:
        """Return the longest ranges without an owner, in ascending order."""
        return list(_gaps(WHOLE, [each.range for each in self.owned]))

    def assign(self, assignment: Assignment) -> RingMap:
        """Return the map after an assignment. If the consumer already owns all the slots, return the same map.

        Args:
            assignment: The slots and their new owner.

        Returns:
            The map.

        Raises:
            ConfigError: The range has slots of two owners, or both owned and free slots.
        """
        wanted, consumer = assignment
        met = [each for each in self.owned if each.range.lo <= wanted.hi and wanted.lo <= each.range.hi]
        gaps = list(_gaps(wanted, [each.range for each in met]))
        owners = {each.consumer for each in met}
        if len(owners) + bool(gaps) > 1:
            parts = [(_common(each.range, wanted), repr(each.consumer)) for each in met]
            parts += [(gap, "nobody") for gap in gaps]
            shown = ", ".join(f"{part} of {owner}" for part, owner in sorted(parts))
            raise ConfigError(f"the range {wanted} has slots of several owners ({shown}); assign each part by itself")
        if owners == {consumer}:
            return self
        left = [
            Assignment(Range(each.range.lo, wanted.lo - 1), each.consumer) for each in met if each.range.lo < wanted.lo
        ]
        right = [
            Assignment(Range(wanted.hi + 1, each.range.hi), each.consumer) for each in met if wanted.hi < each.range.hi
        ]
        kept = [each for each in self.owned if each not in met]
        return RingMap(tuple(sorted([*kept, *left, assignment, *right])))

    def split(self, slot: int, consumer: str) -> Assignment:
        """Return the assignment that moves the slots from ``slot`` to the end of its range to a consumer.

        Args:
            slot: First slot to move.
            consumer: Name of the consumer.

        Returns:
            The assignment, which changes nothing until ``assign``.

        Raises:
            ConfigError: The slot has no owner, or is the first slot of its range.
        """
        found = self.find(slot)
        if found is None:
            raise ConfigError(f"nobody owns slot {slot}, so there is no range to split; assign a range")
        if found.range.lo == slot:
            raise ConfigError(
                f"slot {slot} is the first one of the range {found.range} of {found.consumer!r}, so nothing would be "
                "left of it; assign the whole range"
            )
        return Assignment(Range(slot, found.range.hi), consumer)


def _common(one: Range, other: Range) -> Range:
    return Range(max(one.lo, other.lo), min(one.hi, other.hi))


def _gaps(whole: Range, taken: Iterable[Range]) -> Iterator[Range]:
    """Return the parts of a range that are in no range of an ascending sequence."""
    after = whole.lo
    for each in taken:
        if after < each.lo:
            yield Range(after, each.lo - 1)
        after = max(after, each.hi + 1)
    if after <= whole.hi:
        yield Range(after, whole.hi)


def _shown(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a number of {value.bit_length()} bits"  # Python refuses to write thousands of digits.
    return ascii(value)[:40]
