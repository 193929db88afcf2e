"""Represents the slots of a piece, which PostgreSQL stores as a multirange of integers. Pure."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from lanes.core.ring import slot
from lanes.core.ring_map import Range
from lanes.core.types import Message

_RUN: Final = re.compile(r"\[(\d+),(\d+)\)")


@dataclass(frozen=True, slots=True)
class Slots:
    """A set of slots, as half-open intervals that rise and are not adjacent. Immutable.

    Attributes:
        runs: The half-open intervals of slots.
    """

    runs: tuple[tuple[int, int], ...] = ()
    _starts: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_starts", tuple(start for start, _ in self.runs))

    @classmethod
    def of(cls, ranges: Iterable[Range]) -> Slots:
        """Return the slots of ranges that rise and are not adjacent."""
        return cls(tuple((each.lo, each.hi + 1) for each in ranges))

    @classmethod
    def parse(cls, text: str) -> Slots:
        """Read the text of a multirange, such as ``{[0,100),[200,65536)}``."""
        return cls(tuple((int(start), int(end)) for start, end in _RUN.findall(text)))

    def __str__(self) -> str:
        return "{" + ",".join(f"[{start},{end})" for start, end in self.runs) + "}"

    def __bool__(self) -> bool:
        return bool(self.runs)

    def __contains__(self, number: object) -> bool:
        assert isinstance(number, int), "a slot is an int"
        index = bisect_right(self._starts, number) - 1
        return index >= 0 and number < self.runs[index][1]

    def minus(self, other: Slots) -> Slots:
        """Return the slots that are not in ``other``."""
        left: list[tuple[int, int]] = []
        for start, end in self.runs:
            for taken, after in other.runs:
                if after <= start or end <= taken:
                    continue
                if start < taken:
                    left.append((start, taken))
                start = max(start, after)
            if start < end:
                left.append((start, end))
        return Slots(tuple(left))


@dataclass(frozen=True, eq=False)
class MovedSlots:
    """The slots that a piece has passed to other pieces; see ``lanes.core.types.Part``.

    Attributes:
        slots: The slots.
        below: Position below which the former owner has delivered every message of the slots. The former owner has
            delivered no later message of the slots.
    """

    slots: Slots
    below: int

    def __call__(self, message: Message) -> bool:
        """Return whether the slot of a message's key is one of these slots."""
        return message.key is not None and slot(message.key) in self.slots
