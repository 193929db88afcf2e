"""The checkers of ranges: one owner of each slot at a time, a drain before each move, and slots without an owner.

A piece of a partition, such as ``"orders/0#17"``, contains the messages of some slots, or the messages without a key.
The digest of a key in a row begins with the bytes of its slot.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import NamedTuple

from lanes.config import SETTLE_WITHIN
from memsource.checkers.checker import PromiseChecker, on
from memsource.checkers.deadlines import well_nigh
from memsource.checkers.verdict import at
from memsource.history.reader import Segment
from memsource.history.rows import Row, is_piece, whole
from memsource.history.timeline import Assignment, Timeline

_Unit = tuple[str, int | None]
"""A partition and a slot of it; ``None`` = its messages without a key."""


def slot_of(key: str | None) -> int | None:
    """Return the slot of a digest of a key; ``None`` = no key."""
    return None if key is None else int.from_bytes(bytes.fromhex(key[:4]), "little")


class SlotOwner(NamedTuple):
    """An assignment of a range.

    Attributes:
        time: Time at which the assignment begins, in seconds of ``mono``.
        lo: First slot.
        hi: Last slot.
        consumer: Name of the owner.
    """

    time: float
    lo: int
    hi: int
    consumer: str


class _SlotChecker(PromiseChecker):
    """A checker of two assignments that have messages of one slot."""

    _needs_order = True

    def __init__(self, timeline: Timeline) -> None:
        super().__init__(timeline)
        self._deadlines = timeline.deadlines
        # (position, assignment) -> the row that counts, by the slot of the message
        self._open: dict[_Unit, dict[tuple[Assignment, int], Row]] = defaultdict(dict)

    def _set(self, segment: Segment, row: Row) -> None:
        self._open[_unit(row)][(segment, row.partition, row.assignment), row.position] = row

    def _remove(self, segment: Segment, row: Row) -> Row | None:
        unit = _unit(row)
        known = self._open.get(unit)
        if known is None:
            return None
        found = known.pop(((segment, row.partition, row.assignment), row.position), None)
        if not known:
            del self._open[unit]
        return found

    def _rival(self, segment: Segment, row: Row) -> tuple[Segment, Row] | None:
        """Return an open row of another assignment that must not share the slot of a message; None = no rival."""
        mine = segment, row.partition, row.assignment
        if self._unaware(segment, row):
            return None
        for (assignment, _), other in self._open.get(_unit(row), {}).items():
            if assignment != mine and self._counts(assignment, other, row):
                return assignment[0], other
        return None

    def _counts(self, assignment: Assignment, other: Row, row: Row) -> bool:
        if assignment[1] in self._incomparable or assignment[0].gaps or self._unaware(assignment[0], other):
            return False
        return row.mono < self._deadlines.get(assignment, inf)

    @on("revoked", "lost")
    def _given_up(self, segment: Segment, row: Row) -> None:
        self._forget((segment, row.partition, row.assignment))

    @on("gap", "over")
    def _gone(self, segment: Segment, row: Row) -> None:
        """Forget a process that has ended. A gap may hide the ends of its messages."""
        self._forget((segment,))

    def _forget(self, owner: tuple[object, ...]) -> None:
        self._keep(lambda each, _: each[: len(owner)] != owner)

    def _keep(self, keeps: Callable[[Assignment, Row], bool]) -> None:
        for unit in list(self._open):
            known = {each: row for each, row in self._open[unit].items() if keeps(each[0], row)}
            if known:
                self._open[unit] = known
            else:
                del self._open[unit]


class ExclusiveSlot(_SlotChecker):
    """At most one assignment has messages of a slot in flight at any time (65).

    A message is in flight from its delivery until its handler succeeds, its dead letter is confirmed, or its process
    gives the message up. The messages of a partition without a key count as one slot. Two assignments may both have
    messages in these cases only:

    - The first assignment was lost, its process has ended, or the deadline of its lease has passed.
    - The broker had revoked one of the two assignments, and its process has not noticed the loss.

    The checker judges only sources that own ranges.

    Args:
        timeline: History to judge.
    """

    @on("delivered")
    def _delivered(self, segment: Segment, row: Row) -> None:
        if not is_piece(row.partition):
            return
        self._findings.checked += 1
        rival = self._rival(segment, row)
        if rival is not None:
            what = f"delivered while position {rival[1].position} of its slot was in flight"
            self._findings.violation(segment, row, f"{what} ({rival[1].partition}, {at(*rival)})")
        self._set(segment, row)

    @on("ended ok", "dlq_confirmed", "abandoned", "redelivered settled", "zombie")
    def _ended(self, segment: Segment, row: Row) -> None:
        self._remove(segment, row)

    @on("drained")
    def _drained(self, segment: Segment, row: Row) -> None:
        # All handlers have ended, or the timeout of the drain has passed. The source now gives the piece up.
        self._given_up(segment, row)


class DrainBeforeFeed(_SlotChecker):
    """A new owner of a slot receives no message before the former owner's last running message is settled (66).

    A message counts from the start of its handler until the broker confirms a commit sent after the message's end. A
    failed message counts until the process gives the message up. The exceptions are those of ``ExclusiveSlot``,
    handlers that outlast the timeout of a drain, and settlements that fail or have no answer in the time for them.

    Args:
        timeline: History to judge.
    """

    def __init__(self, timeline: Timeline) -> None:
        super().__init__(timeline)
        self._sent: dict[Assignment, int] = {}
        self._drained_at: dict[Assignment, float] = {}
        # The messages whose dead letter may be confirmed although the process has given them up.
        self._given_back: set[tuple[Assignment, int]] = set()

    def _counts(self, assignment: Assignment, other: Row, row: Row) -> bool:
        drained = self._drained_at.get(assignment)
        if drained is not None and well_nigh(row.mono - drained, SETTLE_WITHIN):
            return False
        return super()._counts(assignment, other, row)

    @on("drained")
    def _drained(self, segment: Segment, row: Row) -> None:
        assignment = segment, row.partition, row.assignment
        self._drained_at[assignment] = row.mono
        self._keep(lambda each, begun: each != assignment or begun.event != "started")

    @on("commit_failed")
    def _unknown(self, segment: Segment, row: Row) -> None:
        if (segment, row.partition, row.assignment) in self._drained_at:
            self._given_up(segment, row)

    @on("delivered")
    def _delivered(self, segment: Segment, row: Row) -> None:
        if not is_piece(row.partition):
            return
        self._findings.checked += 1
        rival = self._rival(segment, row)
        if rival is None:
            return
        state = "was running" if rival[1].event == "started" else "was not settled"
        what = f"delivered while position {rival[1].position} of its slot {state} at the former owner"
        self._findings.violation(segment, row, f"{what} ({rival[1].partition}, {at(*rival)})")

    @on("started")
    def _started(self, segment: Segment, row: Row) -> None:
        if is_piece(row.partition):
            self._set(segment, row)
            self._given_back.discard(((segment, row.partition, row.assignment), row.position))

    @on("ended ok", "dlq_confirmed")
    def _finished(self, segment: Segment, row: Row) -> None:
        message = (segment, row.partition, row.assignment), row.position
        if is_piece(row.partition) and message not in self._given_back:
            self._set(segment, row)

    @on("abandoned", "zombie")
    def _left(self, segment: Segment, row: Row) -> None:
        self._remove(segment, row)
        self._given_back.add(((segment, row.partition, row.assignment), row.position))

    @on("retry", "blocked", "dlq_sent")
    def _waits(self, segment: Segment, row: Row) -> None:
        """Forget the attempt of a failed message.

        When a slot moves, its owner gives a failed message back at once.
        """
        self._remove(segment, row)

    @on("commit_sent")
    def _commit(self, segment: Segment, row: Row) -> None:
        self._sent[segment, row.partition, row.assignment] = row.n

    @on("commit_ok")
    def _committed(self, segment: Segment, row: Row) -> None:
        assignment = segment, row.partition, row.assignment
        sent = self._sent.get(assignment, 0)
        self._keep(lambda each, ended: each != assignment or ended.event == "started" or ended.n > sent)


class UnownedNeverFed(PromiseChecker):
    """A member receives only messages in slots that the map has given to the member's consumer.

    A former owner of a slot may receive messages until it looks at the map again, in the assignment under which it
    owned the slot. In a later assignment it receives no message of the slot. No member receives a message in a slot
    without an owner.

    A history does not show the map, so ``CHECKERS`` leaves this checker out.

    Args:
        timeline: History to judge.
        owners: The assignments of the map, in their order. A slot always has an owner after its first assignment.
        consumers: Consumer of each member in the map. Any owner counts for a missing member.
        claims: Time of each claim, in seconds of ``mono``, by the name of the piece and the epoch. An assignment may
            begin long after its claim, because the assignments of one look come together.
    """

    _needs_order = True

    def __init__(
        self,
        timeline: Timeline,
        *,
        owners: Sequence[SlotOwner],
        consumers: Mapping[str, str],
        claims: Mapping[tuple[str, int], float],
    ) -> None:
        super().__init__(timeline)
        self._owners = owners
        self._consumers = consumers
        self._claims = claims
        self._claimed: dict[Assignment, float] = {}

    @on("assigned")
    def _assigned(self, segment: Segment, row: Row) -> None:
        time = self._claims.get((row.partition, int(row.number)), row.mono)
        self._claimed[segment, row.partition, row.assignment] = time

    @on("delivered")
    def _delivered(self, segment: Segment, row: Row) -> None:
        slot = slot_of(row.key)
        if slot is None or not is_piece(row.partition):
            return
        self._findings.checked += 1
        owners = [each for each in self._owners if each.time <= row.mono and each.lo <= slot <= each.hi]
        if not owners:
            self._findings.violation(segment, row, f"delivered, and nobody owned its slot {slot}")
            return
        claimed = self._claimed.get((segment, row.partition, row.assignment), -inf)
        ends = [*(each.time for each in owners[1:]), inf]
        mine = self._consumers.get(segment.member)
        if mine is None or any(
            each.consumer == mine and end >= claimed for each, end in zip(owners, ends, strict=True)
        ):
            return
        what = f"delivered to the consumer {mine}, and its slot {slot} belonged to {owners[-1].consumer}"
        self._findings.violation(segment, row, what)


def _unit(row: Row) -> _Unit:
    return whole(row.partition), slot_of(row.key)
