"""The ledger of a partition whose source commits one position for everything below it.

Entries are by *ordinal*, the number of the delivery, with the offsets beside them: gaps in the offsets, from
compaction or transaction markers, cost nothing. One byte a delivered message says whether it is unfinished, so the
floor is one scan of bytes for the first 1, remembered and trimmed: O(1) amortised.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from lanes.core.lane import FINISHED, SETTLED
from lanes.core.types import Message, Runs

_TRIM: Final = 1_024
"""Entries below the floor that are kept at least, so that trimming costs O(1) amortised."""


class PositionFell(ValueError):
    """A source that commits delivered a position that is not above the one before."""


class OffsetLedger:
    """What was delivered at or above ``floor``, and how far it is.

    ``completed``: what a predecessor finished above ``floor``, as sorted disjoint half-open runs; whatever of it is
    delivered is finished on arrival. ``highest``: the highest offset admitted, ``floor`` - 1 before the first.
    ``waiting``: what was delivered behind it and is not admitted yet.
    """

    __slots__ = (
        "_base",
        "_delivered",
        "_first",
        "_floor",
        "_messages",
        "_offsets",
        "_open",
        "_seeded",
        "_trailing",
        "highest",
        "waiting",
    )

    def __init__(self, floor: int, completed: Sequence[tuple[int, int]] = ()) -> None:
        self.highest: int = floor - 1
        self.waiting: list[Message] = []
        self._floor = floor  # what ``floor()`` answered last: it never falls
        self._trailing = floor
        self._delivered = floor - 1  # the highest offset delivered, or said to have been read
        self._seeded: Runs = list(completed)
        self._open = bytearray()  # 1 = unfinished
        self._offsets: list[int] = []
        self._messages: list[Message | None] = []
        self._base: int = 0  # the ordinal of the first entry
        self._first: int = 0  # no entry before this one is unfinished

    def deliver(self, run: list[Message], now: float) -> None:
        """Number the messages of a run and note when it came; ``admit`` enters them, at once or later.

        Raises ``PositionFell`` for an offset that does not rise: within one assignment a source goes only onwards. The
        ledger is then as it was.
        """
        delivered = self._delivered
        ordinal = self._base + len(self._open) + len(self.waiting)
        for message in run:
            if message.position <= delivered:
                raise PositionFell(
                    f"{message.partition.id} delivered position {message.position} after {delivered}: a source that "
                    "commits goes only onwards within one assignment: a bug of the source, please report it"
                )
            delivered = message.position
            message.ordinal = ordinal
            message.received = now
            ordinal += 1
        self._delivered = delivered

    def admit(self, run: list[Message]) -> list[Message]:
        """Enter messages in the order of their delivery; returns those a predecessor had finished: not to be run."""
        if run:
            self.highest = run[-1].position
            self._open.extend(b"\x01" * len(run))
            self._offsets.extend([message.position for message in run])
            self._messages.extend(run)
        return self._seed(run) if self._seeded else []

    def _seed(self, run: list[Message]) -> list[Message]:
        found = []
        seeded = self._seeded
        passed = index = 0
        for message in run:
            while index < len(seeded) and seeded[index][1] <= message.position:
                index += 1
            if index == len(seeded):
                break
            if seeded[index][0] <= message.position:
                found.append(message)
        while passed < len(seeded) and seeded[passed][1] <= self.highest + 1:
            passed += 1
        del seeded[:passed]
        self.settle(found)
        return found

    def settle(self, messages: Iterable[Message]) -> tuple[int, int]:
        """These are finished; returns their count and their bytes. Each must be held."""
        opened, held, base = self._open, self._messages, self._base
        count = size = 0
        for message in messages:
            index = message.ordinal - base
            opened[index] = 0
            held[index] = None
            message.state = SETTLED
            count += 1
            size += message.size
        return count, size

    def drop(self, message: Message) -> None:
        """Hold it no more although it is unfinished: the floor stays below it, and it is delivered again later."""
        self._messages[message.ordinal - self._base] = None

    def drop_waiting(self) -> list[Message]:
        """Hold no more what waits: the floor stays below it, whatever the source's own position is."""
        waiting = self.waiting
        if waiting:
            self.waiting = []
            self._trailing = -1
        return waiting

    def progressed(self, offset: int) -> None:
        """Everything below ``offset`` was delivered or never will be: a position of the source's own."""
        self._trailing = max(self._trailing, offset)
        self._delivered = max(self._delivered, offset - 1)

    def floor(self) -> int:
        """Next to read: everything below it is finished or was never there. Never falls."""
        first = self._open.find(1, self._first)
        if first < 0:
            first = len(self._open)
            self._floor = max(self._floor, self.highest + 1, -1 if self.waiting else self._trailing)
        else:
            self._floor = max(self._floor, self._offsets[first])
        self._first = first
        if first > _TRIM and first * 2 > len(self._open):
            self._base += first
            self._first = 0
            del self._open[:first], self._offsets[:first], self._messages[:first]
        return self._floor

    def peek(self) -> int:
        """What ``floor()`` would answer; changes nothing.

        For another thread than the ledger's own: raises ``IndexError`` when that one trims just now.
        """
        first = self._open.find(1, self._first)
        if first < 0:
            return max(self._floor, self.highest + 1, -1 if self.waiting else self._trailing)
        return max(self._floor, self._offsets[first])

    @property
    def floor_ordinal(self) -> int:
        """The ordinal at the floor, as of the last ``floor()``."""
        return self._base + self._first

    @property
    def next_ordinal(self) -> int:
        """How many messages were admitted in this assignment."""
        return self._base + len(self._open)

    def completed(self) -> Runs:
        """What is finished above the floor, of the same snapshot as the last ``floor()``: sorted half-open runs.

        A run spans the gaps between the deliveries it is made of: nothing was there, and nothing ever will be.
        """
        opened, offsets = self._open, self._offsets
        runs: Runs = []
        end = self._first
        while (start := opened.find(0, end)) >= 0:
            end = opened.find(1, start)
            if end < 0:
                end = len(opened)
            runs.append((offsets[start], offsets[end - 1] + 1))
        # The source may have read beyond what it delivered, but not what waits.
        above = max(self.highest + 1, self._floor, -1 if self.waiting else self._trailing)
        runs += [(max(start, above), end) for start, end in self._seeded if end > above]
        return runs

    def in_flight(self) -> list[Message]:
        """The messages held, those included that are finished and not entered as that, in order of delivery.

        O(delivered above the floor).
        """
        return [message for message in self._messages[self._first :] if message is not None]

    def unfinished(self) -> list[Message]:
        """Those of them that are not finished. O(delivered above the floor)."""
        return [message for message in self.in_flight() if message.state != FINISHED]

    def oldest(self) -> Message | None:
        """The unfinished message that was delivered first. O(delivered above the floor)."""
        return next((message for message in self.in_flight() if message.state != FINISHED), None)

    def holes(self) -> int:
        """How many deliveries above the floor are not finished. O(delivered above the floor)."""
        return self._open.count(1, self._first)

    def last_finished(self) -> int:
        """The highest offset that is finished, below the floor if nothing above it is."""
        index = self._open.rfind(0)
        return self._offsets[index] if index >= 0 else self._floor - 1

    def __repr__(self) -> str:
        return (
            f"<OffsetLedger floor {self._floor}, {self.holes()} unfinished of "
            f"{len(self._open) - self._first} above it, highest {self.highest}>"
        )
