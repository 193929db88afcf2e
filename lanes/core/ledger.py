"""What is settled. ``AckLedger``: for sources that settle each message by itself.

It answers one question, for a position that comes again: is it still held here, was it settled, or is it
unknown? Held messages are a dict by position; settled positions are sorted runs, so that a long stretch of
finished work costs two numbers. The number of runs is bounded: beyond ``RUNS_LIMIT`` the lowest are forgotten,
and a forgotten position that comes again is handled again (at least once, never lost).
What the next owner of a partition has to handle is another question, for which a cohort's source keeps its
``DeliveryLedger``.

Where the source itself passes over what was settled, nothing of that is kept: its partitions may be sparse, such as
one of 64 on one stream, where no settled position has a neighbour and every one would be a run.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from typing import Final

from lanes.core.lane import FINISHED, SETTLED
from lanes.core.types import Message

RUNS_LIMIT: Final = 65_536
"""Runs of settled positions one partition remembers: about 9 MB at most, and 5 MB of positions not entered yet."""


LOOSE_LIMIT: Final = 65_536
"""Settled positions that wait to be entered into the runs together: one by one each would cost a search."""

_NEVER: Final = -1


class AckLedger:
    """The ledger of one assignment of a partition.

    ``held``: position -> message, for everything delivered and not settled, in order of delivery.
    ``highest``: the highest position delivered so far, -1 before the first. ``knows_settled``: whether settled
    positions are remembered.
    """

    __slots__ = ("_ends", "_knows_settled", "_loose", "_loose_limit", "_runs_limit", "_starts", "held", "highest")

    def __init__(self, *, knows_settled: bool = True) -> None:
        self.held: dict[int, Message] = {}
        self.highest: int = -1
        self._starts: list[int] = []
        self._ends: list[int] = []  # one behind the last of the run
        self._loose: set[int] = set()  # settled, and in no run yet
        self._runs_limit = RUNS_LIMIT
        self._loose_limit = LOOSE_LIMIT
        self._knows_settled = knows_settled

    def is_settled(self, position: int) -> bool:
        """Whether the position was settled in this assignment and is still remembered."""
        if position in self._loose:
            return True
        run = bisect_right(self._starts, position) - 1
        return run >= 0 and position < self._ends[run]

    def settle(self, messages: Iterable[Message]) -> tuple[int, int]:
        """Move held messages to the settled runs; returns their count and their bytes.

        Idempotent: a message that is not held any more, or is not *that* message, is skipped.
        """
        held = self.held
        take_out = held.pop
        positions = []
        size = 0
        for message in messages:
            position = message.position
            known = take_out(position, None)
            if known is message:
                message.state = SETTLED
                positions.append(position)
                size += message.size
            elif known is not None:
                held[position] = known
        count = len(positions)
        if not self._knows_settled:
            return count, size
        positions.sort()
        if count and positions[-1] - positions[0] == count - 1:
            # Different positions without a gap are one run: the usual case.
            self._add(positions[0], positions[-1] + 1)
            return count, size
        self._loose.update(positions)
        if len(self._loose) > self._loose_limit:
            self._tidy()
        return count, size

    def _tidy(self) -> None:
        """Enter the loose positions into the runs, by one pass over them and the runs they are among."""
        loose = sorted(self._loose)
        if not loose:
            return
        self._loose.clear()
        starts, ends = self._starts, self._ends
        # The last run that begins below all of them may be one of them's neighbour.
        first = max(0, bisect_right(starts, loose[0]) - 1)
        above = deque(zip(starts[first:], ends[first:], strict=True))
        del starts[first:], ends[first:]
        start = end = loose[0]
        for position in [*loose[1:], _NEVER]:
            end += 1
            if position == end:
                continue
            while above and above[0][0] < start:
                self._append(*above.popleft())
            self._append(start, end)
            start = end = position
        for run in above:
            self._append(*run)
        forget = max(0, len(starts) - self._runs_limit)
        del starts[:forget], ends[:forget]

    def _append(self, start: int, end: int) -> None:
        if self._ends and self._ends[-1] == start:
            self._ends[-1] = end
        else:
            self._starts.append(start)
            self._ends.append(end)

    def drop(self, message: Message) -> None:
        """Hold it no more although it is unfinished: it is delivered again later."""
        del self.held[message.position]

    def in_flight(self) -> list[Message]:
        """The messages held, those included that are finished and not settled, in order of delivery."""
        return list(self.held.values())

    def unfinished(self) -> list[Message]:
        """Those of them that are not finished."""
        return [message for message in self.in_flight() if message.state != FINISHED]

    def oldest(self) -> Message | None:
        """The unfinished message that was delivered first. O(held)."""
        return next((message for message in self.in_flight() if message.state != FINISHED), None)

    def holes(self) -> int:
        """How many deliveries are not settled."""
        return len(self.held)

    def floor(self) -> int:
        """Next to read: below it nothing that was delivered is unfinished. O(held), for status only."""
        return min(self.held) if self.held else self.highest + 1

    def _add(self, start: int, end: int) -> None:
        """Add start…end-1, none of which is in a run yet: each was held, and held and settled exclude each other."""
        starts, ends = self._starts, self._ends
        above = bisect_right(starts, start)
        joins_below = above > 0 and ends[above - 1] == start
        joins_above = above < len(starts) and starts[above] == end
        if joins_below and joins_above:
            ends[above - 1] = ends[above]
            del starts[above], ends[above]
        elif joins_below:
            ends[above - 1] = end
        elif joins_above:
            starts[above] = start
        else:
            starts.insert(above, start)
            ends.insert(above, end)
            if len(starts) > self._runs_limit:
                # An eighth at a time, so that forgetting costs O(1) amortised.
                forget = max(1, self._runs_limit // 8)
                del starts[:forget], ends[:forget]

    def __repr__(self) -> str:
        loose = f" and {len(self._loose)} positions" if self._loose else ""
        return f"<AckLedger {len(self.held)} held, {len(self._starts)} settled runs{loose}, highest {self.highest}>"
