"""The record of one assignment: its messages in flight and its settled positions.

``AckLedger`` serves sources that settle each message individually. For a redelivered position the ledger returns
whether the position is in flight, settled or unknown. The ledger stores messages in flight in a dict by position. The
ledger stores settled positions as sorted runs of consecutive positions, so a long run takes two numbers. Above
``RUNS_LIMIT`` runs the ledger deletes the lowest runs. If the ledger has deleted a position, the engine handles a
redelivery of this position again, and loses no message. If a source never redelivers settled positions, the ledger does
not store them. On a sparse partition each settled position would be a separate run.

``OffsetLedger`` serves sources that commit one position for all messages below it. The index of a message in the ledger
is its *ordinal*, the number of its delivery. Gaps in the offsets, which compaction and transaction markers leave,
therefore take no memory. One byte for each message marks unfinished messages. The first marked byte is the floor. The
ledger stores the index of the first marked byte and removes the bytes below this index, so the floor takes O(1)
amortised time.

A third ledger, ``lanes.core.cohort.ledger``, stores the messages that the next owner of a cohort partition must handle.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from typing import Final

from lanes.core.lane import ABANDONED, FINISHED, SETTLED
from lanes.core.types import Message, Runs

RUNS_LIMIT: Final = 65_536
"""Maximum number of runs of settled positions for one partition. The runs take at most 9 MB."""


LOOSE_LIMIT: Final = 65_536
"""Maximum number of settled positions that wait to enter the runs together. The waiting positions take at most 5 MB.

Entering each position separately would cost a search for each position.
"""

_NEVER: Final = -1


class AckLedger:
    """The ledger of an assignment whose source settles each message individually.

    Args:
        knows_settled: Whether the ledger stores settled positions.

    Attributes:
        unsettled: The messages delivered and not settled, by position, in order of delivery.
        highest: Highest delivered position; -1 before the first delivery.
    """

    __slots__ = ("_ends", "_knows_settled", "_loose", "_loose_limit", "_runs_limit", "_starts", "highest", "unsettled")

    def __init__(self, *, knows_settled: bool = True) -> None:
        self.unsettled: dict[int, Message] = {}
        self.highest: int = -1
        self._starts: list[int] = []
        self._ends: list[int] = []  # the position after the last one of the run
        self._loose: set[int] = set()  # settled, and in no run yet
        self._runs_limit = RUNS_LIMIT
        self._loose_limit = LOOSE_LIMIT
        self._knows_settled = knows_settled

    def is_settled(self, position: int) -> bool:
        """Return whether the ledger stores the position as settled in this assignment."""
        if position in self._loose:
            return True
        run = bisect_right(self._starts, position) - 1
        return run >= 0 and position < self._ends[run]

    def settle(self, messages: Iterable[Message]) -> tuple[int, int]:
        """Move messages to the settled runs, and return their number and bytes.

        The call is idempotent. It skips messages that are no longer in flight, or whose position has a newer delivery.
        """
        unsettled = self.unsettled
        take_out = unsettled.pop
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
                unsettled[position] = known
        count = len(positions)
        if not self._knows_settled:
            return count, size
        positions.sort()
        if count and positions[-1] - positions[0] == count - 1:
            # The usual case: positions without a gap are one run.
            self._add(positions[0], positions[-1] + 1)
            return count, size
        self._loose.update(positions)
        if len(self._loose) > self._loose_limit:
            self._tidy()
        return count, size

    def _tidy(self) -> None:
        """Move the waiting positions into the runs, in one iteration over positions and runs."""
        loose = sorted(self._loose)
        if not loose:
            return
        self._loose.clear()
        starts, ends = self._starts, self._ends
        # The last run below the positions may touch the lowest position.
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
        """Remove an unfinished message, which the broker redelivers later."""
        del self.unsettled[message.position]

    def in_flight(self) -> list[Message]:
        """Return the unsettled messages, finished messages included, in order of delivery."""
        return list(self.unsettled.values())

    def unfinished(self) -> list[Message]:
        """Return the messages in flight that are not finished."""
        return [message for message in self.in_flight() if message.state != FINISHED]

    def oldest(self) -> Message | None:
        """Return the unfinished message with the earliest delivery, or None.

        The call is slow, because the ledger reads every unsettled message.
        """
        return next((message for message in self.in_flight() if message.state != FINISHED), None)

    def holes(self) -> int:
        """Return the number of delivered, unsettled messages."""
        return len(self.unsettled)

    def floor(self) -> int:
        """Return the position below which every delivered message is settled.

        The call is slow, so callers use it only for the status.
        """
        return min(self.unsettled) if self.unsettled else self.highest + 1

    def _add(self, start: int, end: int) -> None:
        """Add the unsettled positions ``start`` … ``end`` − 1 to the settled positions."""
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
                # An eighth of the runs is forgotten at a time, so forgetting costs O(1) amortised.
                forget = max(1, self._runs_limit // 8)
                del starts[:forget], ends[:forget]

    def __repr__(self) -> str:
        loose = f" and {len(self._loose)} positions" if self._loose else ""
        runs = f"{len(self._starts)} settled runs{loose}"
        return f"<AckLedger {len(self.unsettled)} unsettled, {runs}, highest {self.highest}>"


_TRIM: Final = 1_024
"""Minimum number of entries below the floor that the ledger removes together, so that the removal costs O(1) amortised.
"""


class PositionFell(ValueError):
    """Error for a source that commits and delivered a position at or below the previous position."""


class OffsetLedger:
    """The ledger of an assignment whose source commits one position.

    Args:
        floor: The first offset that the source reads.
        completed: Runs of offsets above ``floor`` that a former owner finished. The engine marks the messages of these
            runs as finished when the source delivers them.

    Attributes:
        highest: Highest offset admitted; ``floor`` - 1 before the first message.
        waiting: The delivered messages that wait for admission, all above ``highest``.
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
        self._floor = floor  # the last result of ``floor()``, which never falls
        self._trailing = floor
        self._delivered = floor - 1  # the highest offset delivered or reported as read
        self._seeded: Runs = list(completed)
        self._open = bytearray()  # 1 = unfinished
        self._offsets: list[int] = []
        self._messages: list[Message | None] = []
        self._base: int = 0  # the ordinal of the first entry
        self._first: int = 0  # no entry before this one is unfinished

    def deliver(self, run: list[Message], now: float) -> None:
        """Number the messages of a run and set their time of delivery. ``admit`` adds the messages at once or later.

        Args:
            run: The messages.
            now: Current time, in seconds of the engine's clock.

        Raises:
            PositionFell: An offset is not above the previous offset. In this case the ledger does not change.
        """
        delivered = self._delivered
        ordinal = self._base + len(self._open) + len(self.waiting)
        for message in run:
            if message.position <= delivered:
                raise PositionFell(
                    f"{message.partition.id} delivered position {message.position} after {delivered}, but positions "
                    "of an assignment must rise; please report this bug of the source"
                )
            delivered = message.position
            message.ordinal = ordinal
            message.received = now
            ordinal += 1
        self._delivered = delivered

    def admit(self, run: list[Message]) -> list[Message]:
        """Add messages in order of delivery, and return the messages that a former owner finished."""
        if run:
            self.highest = run[-1].position
            self._open.extend(b"\x01" * len(run))
            self._offsets.extend([message.position for message in run])
            self._messages.extend(run)
        return self._seed(run) if self._seeded else []

    def pass_over(self, messages: Collection[Message]) -> None:
        """Allow the floor to move past dropped messages, which another process handles.

        The ledger also removes dropped messages that wait for admission. Abandoned messages of another part may also
        wait, and the floor stays below them.
        """
        for message in messages:
            # A former owner may have finished the message, so that the floor has passed it already.
            index = message.ordinal - self._base
            if 0 <= index < len(self._open):
                self._open[index] = 0
                self._messages[index] = None
        passed = set(messages)
        self.waiting = [m for m in self.waiting if m not in passed]
        for ordinal, message in enumerate(self.waiting, start=self.next_ordinal):
            message.ordinal = ordinal

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
        """Mark messages in flight as finished, and return their number and bytes."""
        opened, entries, base = self._open, self._messages, self._base
        count = size = 0
        for message in messages:
            index = message.ordinal - base
            opened[index] = 0
            entries[index] = None
            message.state = SETTLED
            count += 1
            size += message.size
        return count, size

    def drop(self, message: Message) -> None:
        """Remove an unfinished message.

        The floor stays below the message, and the broker redelivers the message later.
        """
        self._messages[message.ordinal - self._base] = None

    def drop_waiting(self) -> list[Message]:
        """Remove the waiting messages.

        The floor stays below these messages, even if the source has read beyond them.
        """
        waiting = self.waiting
        if waiting:
            self.waiting = []
            self._trailing = -1
        return [m for m in waiting if m.state != ABANDONED]

    def progressed(self, offset: int) -> None:
        """Record that the source has read up to ``offset``, and delivers no further message below ``offset``."""
        self._trailing = max(self._trailing, offset)
        self._delivered = max(self._delivered, offset - 1)

    def floor(self) -> int:
        """Return the next offset to read.

        Every message below the floor is finished or never existed. The floor never decreases.
        """
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
        """Return the result of ``floor()`` without a change of the ledger.

        Any thread may call this method. The call may raise ``IndexError`` while the thread of the ledger removes
        entries.
        """
        first = self._open.find(1, self._first)
        if first < 0:
            return max(self._floor, self.highest + 1, -1 if self.waiting else self._trailing)
        return max(self._floor, self._offsets[first])

    @property
    def floor_ordinal(self) -> int:
        """The ordinal at the floor at the last call of ``floor()``."""
        return self._base + self._first

    @property
    def next_ordinal(self) -> int:
        """The number of messages admitted in this assignment."""
        return self._base + len(self._open)

    def completed(self) -> Runs:
        """Return the runs of finished positions above the result of the last call of ``floor()``.

        A run includes the gaps between its deliveries, in which no message exists.
        """
        opened, offsets = self._open, self._offsets
        runs: Runs = []
        end = self._first
        while (start := opened.find(0, end)) >= 0:
            end = opened.find(1, start)
            if end < 0:
                end = len(opened)
            runs.append((offsets[start], offsets[end - 1] + 1))
        # The source may have read beyond its deliveries. Waiting messages are not admitted.
        above = max(self.highest + 1, self._floor, -1 if self.waiting else self._trailing)
        runs += [(max(start, above), end) for start, end in self._seeded if end > above]
        return runs

    def in_flight(self) -> list[Message]:
        """Return the admitted, unsettled messages in order of delivery.

        The call is O(messages delivered above the floor).
        """
        return [message for message in self._messages[self._first :] if message is not None]

    def unfinished(self) -> list[Message]:
        """Return the messages in flight that are not finished. The call is O(messages delivered above the floor)."""
        return [message for message in self.in_flight() if message.state != FINISHED]

    def oldest(self) -> Message | None:
        """Return the unfinished message with the earliest delivery, or None.

        The call is O(messages that finished after the last call of ``floor``), even far above the floor.
        """
        above = islice(self._messages, self._first, None)
        return next((message for message in above if message is not None and message.state != FINISHED), None)

    def holes(self) -> int:
        """Return the number of unfinished deliveries above the floor.

        The call is O(messages delivered above the floor).
        """
        return self._open.count(1, self._first)

    def last_finished(self) -> int:
        """Return the highest finished offset, which is below the floor if no message above the floor is finished."""
        index = self._open.rfind(0)
        return self._offsets[index] if index >= 0 else self._floor - 1

    def __repr__(self) -> str:
        return (
            f"<OffsetLedger floor {self._floor}, {self.holes()} unfinished of "
            f"{len(self._open) - self._first} above it, highest {self.highest}>"
        )
