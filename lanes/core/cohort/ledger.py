"""What of a cohort partition is done, kept by its complement: small, however far a stuck key falls behind.

It says what the next owner has to handle, and is the source's. Which messages are in flight here, and which delivery of
each settles it, is another question: that of the engine's ``AckLedger``, which forgets a message once it is settled.

A member that takes a partition over gets a ``Done`` from whoever had it. Everything it was delivered and has not
finished is outstanding, at most ``max_in_flight`` messages; everything else up to the highest delivery is done. That
holds as long as no delivery is missed: whoever feeds a ``DeliveryLedger`` sees to it that first deliveries come in
the order of the stream and without a gap, and takes the partition over from itself where one is missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

__all__ = ["NOTHING", "DeliveryLedger", "Done", "decode_done", "encode_done"]

HIGHEST_SEQUENCE: Final = 2**63 - 1
"""No stream gets there; a record that says so was not made by ``lanes``."""

_SHOWN: Final = 40


class Done(NamedTuple):
    """Which sequences of a partition are done: all up to ``highest``, except ``outstanding`` (rising)."""

    highest: int
    outstanding: tuple[int, ...]

    @property
    def floor(self) -> int:
        """The highest sequence up to which nothing is outstanding; 0 or more."""
        return self.outstanding[0] - 1 if self.outstanding else self.highest

    def union(self, other: Done) -> Done:
        """What is done according to one of them, or to both."""
        mine, theirs = set(self.outstanding), set(other.outstanding)
        both = mine & theirs
        both.update(sequence for sequence in mine if sequence > other.highest)
        both.update(sequence for sequence in theirs if sequence > self.highest)
        return Done(max(self.highest, other.highest), tuple(sorted(both)))

    def merged_with_prefix(self, floor: int) -> Done:
        """And everything up to ``floor``: what a consumer says is acknowledged."""
        return self.union(Done(floor, ()))


NOTHING: Final = Done(0, ())
"""Nothing is done: sequences begin at 1."""


class _Open:
    """An outstanding sequence between its neighbours. ``gap``: how many were settled and not saved, up to the next."""

    __slots__ = ("after", "before", "gap", "sequence")

    def __init__(self, sequence: int, before: _Open | None) -> None:
        self.sequence = sequence
        self.before = before
        self.after: _Open | None = None
        self.gap = 0


class DeliveryLedger:
    """The ledger of one ownership: it begins with what was handed over. Every call is O(1), but for the snapshots.

    A new consumer brings what is outstanding before anything else, in the order of the stream. So what was handed over
    as outstanding, and is passed over, has left the stream (a limit, a purge, a time to live): nobody can finish it,
    and it counts as done.

    ``highest``: the highest sequence delivered. ``since_saved``: how many messages were settled above the floor and
    after the last ``save``: so many a crash repeats at most, where the consumer's own floor survives it.
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
        self._ahead: _Open | None = self._first  # the lowest outstanding one that no consumer has come to

    def delivered(self, sequence: int) -> bool:
        """Enter a delivery. Whether it is outstanding: take it in; else it is done, and to be acknowledged again.

        First deliveries rise and none is missing: one that is passed over counts as done.
        """
        if self._ahead is not None:
            self._pass_over(self._ahead, sequence)
        if sequence > self.highest:
            self.highest = sequence
            self._append(sequence)
            return True
        return sequence in self._open

    def settled(self, sequence: int) -> bool:
        """It is finished; True the first time. Idempotent. ``ValueError`` for one that was never delivered."""
        known = self._open.pop(sequence, None)
        if known is None:
            if sequence > self.highest:
                raise ValueError(
                    f"sequence {sequence} is settled, but the highest delivered is {self.highest}: "
                    "enter the delivery first"
                )
            return False
        before, after = known.before, known.after
        if before is None:
            self._first = after
            self.since_saved -= known.gap  # the floor passes them
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
        """The highest sequence up to which nothing is outstanding; 0 or more."""
        return self.highest if self._first is None else self._first.sequence - 1

    def __len__(self) -> int:
        """How many are outstanding."""
        return len(self._open)

    def snapshot(self) -> Done:
        """The whole ledger. O(outstanding)."""
        return Done(self.highest, tuple(known.sequence for known in self._rising()))

    def save(self) -> Done:
        """The whole ledger, for a write that is tried until it succeeds or the ownership ends; ``since_saved`` = 0."""
        for known in self._rising():
            known.gap = 0
        self.since_saved = 0
        return self.snapshot()

    def _pass_over(self, ahead: _Open | None, sequence: int) -> None:
        """A consumer has come to ``sequence``: what is below it and never came has left the stream."""
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
    """Small numbers: ``highest``, then from the highest outstanding one downwards the distance to the one above."""
    encoded = [done.highest]
    above = done.highest
    for sequence in reversed(done.outstanding):
        encoded.append(above - sequence)
        above = sequence
    return encoded


def decode_done(encoded: object) -> Done:
    """The inverse of ``encode_done``. ``ValueError`` for everything that it does not make."""
    if not isinstance(encoded, list) or not encoded:
        raise ValueError(f"a ledger is a list of whole numbers, got {_short(encoded)}")
    for number in encoded:
        if type(number) is not int or not 0 <= number <= HIGHEST_SEQUENCE:
            raise ValueError(f"a ledger holds whole numbers of 0 to {HIGHEST_SEQUENCE}, got {_short(number)}")
    highest = above = encoded[0]
    falling = []
    for number, distance in enumerate(encoded[1:]):
        above -= distance
        if above < 1 or (distance == 0 and number > 0):
            raise ValueError(f"a ledger's outstanding sequences fall from {highest} to 1, got {_short(encoded)}")
        falling.append(above)
    return Done(highest, tuple(reversed(falling)))


def _short(value: object) -> str:
    shown = repr(value[:_SHOWN] if isinstance(value, list | str) else value)
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"
