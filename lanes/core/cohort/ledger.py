"""The ledger of a cohort partition: the messages that the next owner must handle.

The ledger stores the sequences that are not done. The ledger therefore stays small, even if the handler of one message
runs for a long time. The source owns this ledger. The engine's ``AckLedger`` stores the messages in flight in this
process.

A new owner reads a ``Done`` of the former owner. Deliveries that the former owner did not finish are outstanding, at
most ``max_in_flight`` of them. Every other sequence up to the highest delivery is done. This is correct only if no
delivery is missing. The source therefore enters first deliveries in the order of the stream. When a delivery is
missing, the source starts a takeover of its own partition.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

HIGHEST_SEQUENCE: Final = 2**63 - 1
"""Bound on sequences. No stream reaches this number, so ``lanes`` never writes a higher number."""

SHOWN: Final = 60


class Done(NamedTuple):
    """The done sequences of a partition.

    Attributes:
        highest: Highest delivered sequence; 0 = none.
        outstanding: The sequences up to ``highest`` that are not done, in ascending order.
    """

    highest: int
    outstanding: tuple[int, ...]

    @property
    def floor(self) -> int:
        """The highest sequence up to which no sequence is outstanding; 0 or more."""
        return self.outstanding[0] - 1 if self.outstanding else self.highest

    def union(self, other: Done) -> Done:
        """Return the sequences that are done in either ledger."""
        mine, theirs = set(self.outstanding), set(other.outstanding)
        both = mine & theirs
        both.update(sequence for sequence in mine if sequence > other.highest)
        both.update(sequence for sequence in theirs if sequence > self.highest)
        return Done(max(self.highest, other.highest), tuple(sorted(both)))


NOTHING: Final = Done(0, ())
"""No sequence is done; sequences begin at 1."""


@dataclass(slots=True, eq=False)
class _Open:
    """An outstanding sequence of the ledger.

    Attributes:
        sequence: The sequence.
        before: The next lower outstanding sequence; None = no lower sequence.
        after: The next higher outstanding sequence; None = no higher sequence.
        gap: Number of sequences up to the next outstanding sequence that are settled and not saved.
    """

    sequence: int
    before: _Open | None
    after: _Open | None = None
    gap: int = 0


class DeliveryLedger:
    """The ledger of one ownership. Calls are O(1) amortised, except for ``snapshot`` and ``save``.

    A new consumer delivers the outstanding sequences first, in the order of the stream. If the consumer skips a
    sequence, the server has removed its message from the stream, for example after a purge. The ledger records the
    sequence of a removed message as done, because no owner can finish that message.

    Args:
        done: The ``Done`` of the former owner.

    Attributes:
        highest: Highest sequence delivered.
        since_saved: Number of messages settled above the floor since the last ``save``. After a crash, at most this
            number of finished messages run again, if the server keeps the floor of the consumer.
    """

    __slots__ = ("_ahead", "_first", "_last", "_open", "highest", "since_saved")

    def __init__(self, done: Done = NOTHING) -> None:
        self.highest = done.highest
        self.since_saved = 0
        self._open: dict[int, _Open] = {}
        self._first: _Open | None = None
        self._last: _Open | None = None
        for sequence in done.outstanding:
            self._append(sequence)
        self._ahead: _Open | None = self._first  # the lowest outstanding sequence that no consumer has delivered

    def delivered(self, sequence: int) -> bool:
        """Enter a delivery, and return whether its sequence is outstanding.

        If the sequence is done, the caller acknowledges it again. The sequences of first deliveries must increase, and
        no delivery may be missing. The ledger records an outstanding sequence that a consumer skips as done.
        """
        if self._ahead is not None:
            self._pass_over(self._ahead, sequence)
        if sequence > self.highest:
            self.highest = sequence
            self._append(sequence)
            return True
        return sequence in self._open

    def settled(self, sequence: int) -> bool:
        """Record a sequence as done, and return whether it was outstanding.

        Raises ``ValueError`` for a sequence above ``highest``.
        """
        known = self._open.pop(sequence, None)
        if known is None:
            if sequence > self.highest:
                raise ValueError(
                    f"sequence {sequence} is settled, but the highest delivered is {self.highest}; "
                    "enter the delivery first"
                )
            return False
        before, after = known.before, known.after
        if before is None:
            self._first = after
            self.since_saved -= known.gap  # the sequences of the gap are now below the floor
        else:
            before.after = after
            before.gap += known.gap + 1
            self.since_saved += 1
        if after is None:
            self._last = before
        else:
            after.before = before
        return True

    @property
    def floor(self) -> int:
        """The highest sequence up to which no sequence is outstanding; 0 or more."""
        return self.highest if self._first is None else self._first.sequence - 1

    def __len__(self) -> int:
        """The number of outstanding sequences."""
        return len(self._open)

    def snapshot(self) -> Done:
        """Return the whole ledger. O(outstanding)."""
        return Done(self.highest, tuple(known.sequence for known in self._rising()))

    def save(self) -> Done:
        """Return the whole ledger, for a write that the caller repeats until it succeeds or the ownership ends."""
        for known in self._rising():
            known.gap = 0
        self.since_saved = 0
        return self.snapshot()

    def _pass_over(self, ahead: _Open | None, sequence: int) -> None:
        """Settle the skipped sequences below ``sequence``, whose messages the stream has removed."""
        while ahead is not None and ahead.sequence <= sequence:
            passed, ahead = ahead, ahead.after
            if passed.sequence < sequence:
                self.settled(passed.sequence)
        self._ahead = ahead

    def _append(self, sequence: int) -> None:
        last = self._last
        known = self._open[sequence] = self._last = _Open(sequence, last)
        if last is None:
            self._first = known
        else:
            last.after = known

    def _rising(self) -> Iterator[_Open]:
        known = self._first
        while known is not None:
            yield known
            known = known.after

    def __repr__(self) -> str:
        return f"<DeliveryLedger floor {self.floor}, highest {self.highest}, {len(self._open)} outstanding>"


def encode_done(done: Done) -> list[int]:
    """Encode a ledger as small numbers: ``highest``, then the distance of each sequence from the next higher number."""
    encoded = [done.highest]
    above = done.highest
    for sequence in reversed(done.outstanding):
        encoded.append(above - sequence)
        above = sequence
    return encoded


def decode_done(encoded: object) -> Done:
    """Decode a result of ``encode_done``. Raises ``ValueError`` for any other value."""
    if not isinstance(encoded, list) or not encoded:
        raise ValueError(f"a ledger is a list of whole numbers, got {shown(encoded)}")
    for number in encoded:
        if type(number) is not int or not 0 <= number <= HIGHEST_SEQUENCE:
            raise ValueError(f"a ledger holds whole numbers of 0 to {HIGHEST_SEQUENCE}, got {shown(number)}")
    highest = above = encoded[0]
    falling = []
    for number, distance in enumerate(encoded[1:]):
        above -= distance
        if above < 1 or (distance == 0 and number > 0):
            raise ValueError(f"a ledger's outstanding sequences must fall from {highest} to 1, got {shown(encoded)}")
        falling.append(above)
    return Done(highest, tuple(reversed(falling)))


def shown(value: object) -> str:
    """Return a value as text for an error, cut at 60 characters."""
    text = repr(value[: SHOWN + 1] if isinstance(value, str | bytes | list) else value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
