"""The owner of a message among the pieces of a read, and the parts that a piece loses."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanes.clock import monotonic
from lanes.core.types import Partition, PieceId, Room
from lanes.ownership import HeldLock, StateLocked
from lanes.ring import SLOTS, Range, slot
from lanes_postgres.log.reading import READER, StoredMessage
from lanes_postgres.ring.pieces import PieceRow
from lanes_postgres.ring.reading import FoundSlots, WantedSlots
from lanes_postgres.ring.slots import Slots
from lanes_postgres.subscription import piece_visitor
from lanes_postgres.subscription.owned_piece import OwnedPiece, Owners
from lanes_postgres.subscription.piece_visitor import PieceVisitor

KEYS = [b"key %d" % number for number in range(200)]


def piece_of(number: int, slots: Slots | None, partition_number: int = 0) -> OwnedPiece:
    partition = Partition(PieceId("orders", partition_number, number), READER, floor=0)
    return OwnedPiece(
        number=partition_number,
        partition=partition,
        held=cast(Any, None),
        key=cast(Any, None),
        epoch=1,
        floor=0,
        read=len(KEYS),
        since=0.0,
        slots=slots,
    )


@st.composite
def divided(draw: st.DrawFn) -> list[Slots]:
    """Sets of slots that do not overlap, and together have all slots."""
    ends = sorted(draw(st.sets(st.sampled_from([slot(key) for key in KEYS]), min_size=1, max_size=8)) - {0})
    bounds = [0, *ends, SLOTS]
    ranges = [Range(lo, after - 1) for lo, after in pairwise(bounds)]
    sets = [draw(st.integers(0, 3)) for _ in ranges]
    found = [Slots.of([each for each, number in zip(ranges, sets, strict=True) if number == one]) for one in range(4)]
    return [each for each in found if each]


@given(divided(), st.booleans())
def test_each_message_of_a_read_has_the_piece_of_its_slot(parts: list[Slots], keyless: bool) -> None:
    pieces = [piece_of(number, slots) for number, slots in enumerate(parts[1:], start=1)]
    pieces += [piece_of(9, None)] if keyless else []
    owners = Owners(pieces)
    for key in [*KEYS, None]:
        assert [each for each in pieces if each.has(key)] == [each for each in [owners.of(key)] if each is not None]


@given(divided())
def test_a_piece_loses_a_part_for_each_next_owner(parts: list[Slots]) -> None:
    """A part of an unknown owner goes with the rest. Each part begins at its first message that was not delivered."""
    piece = piece_of(1, Slots(((0, SLOTS),)))
    waiting = [StoredMessage(number, key, "s", None, b"", 0.0) for number, key in enumerate(KEYS)]
    piece.waiting.extend(waiting[50:])
    stays, *known = parts
    moved = piece.cut(stays, known[:2])
    first = moved[: len(known[:2])]
    assert [[key for key in KEYS if slot(key) in each.slots] for each in first] == [
        [key for key in KEYS if slot(key) in each] for each in known[:2]
    ]
    assert all((sum(slot(key) in each.slots for each in moved) == 1) == (slot(key) not in stays) for key in KEYS)
    for each in moved:
        positions = [message.position for message in waiting[50:] if slot(message.key or b"") in each.slots]
        assert each.below == min(positions, default=len(KEYS))
    assert all(slot(message.key or b"") in stays for message in piece.waiting)
    assert (piece.moved, piece.slots) == (moved, stays)
    assert piece.cut(stays, known) == []


def test_a_piece_that_another_process_has_acquired_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row without the epoch of the ownership decides, although this member has not seen the end of its lock."""
    slots = Slots(((0, SLOTS),))
    kept, taken, ended = (piece_of(number, slots) for number in (1, 2, 3))
    ended.over = True
    lost = []
    monkeypatch.setattr(PieceVisitor, "lose", lambda self, owned, reason: lost.append((owned, reason)))
    visitor = PieceVisitor.__new__(PieceVisitor)
    visitor.owned, visitor.consumer = {1: kept, 2: taken, 3: ended}, "a"
    visitor._follow([PieceRow(each, 0, slots, "a", 1 + (each > 1), None, 0) for each in (1, 2, 3, 4)])
    assert lost == [(taken, "another process owns the piece")]


class Former:
    """Locks whose one lock belonged to the former owner of a piece, and the drains that its holder ends."""

    def __init__(self, *, lost: str, lease: float, locked: bool) -> None:
        self.ended: list[tuple[int, int]] = []
        self.freed: list[HeldLock] = []
        self._locked = locked
        self._lost = lost
        self._lease = lease

    async def try_acquire(self, name: str, changed: Callable[[], None]) -> HeldLock:
        assert name == "lanes/orders/billing/0/7"

        async def free(held: HeldLock) -> None:
            self.freed.append(held)

        held = HeldLock(name, changed, free, deadline=monotonic() + self._lease)
        if self._lost:
            held.lose(self._lost)
        elif self._lease > 0:
            held.renewed(held.deadline + 1.0)
        return held

    async def end_drain(self, piece: int, parent: int) -> None:
        self.ended.append((piece, parent))
        if self._locked:
            raise StateLocked("a transaction holds the row")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("lost", "lease", "locked", "ended"),
    [
        ("", 60.0, False, [(8, 7)]),
        ("", 60.0, True, [(8, 7)]),
        ("", -2.0, False, []),
        ("the connection ended", 60.0, False, []),
    ],
)
async def test_a_drain_is_ended_only_while_the_lock_of_the_former_owner_is_held(
    lost: str, lease: float, locked: bool, ended: list[tuple[int, int]]
) -> None:
    former = Former(lost=lost, lease=lease, locked=locked)
    visitor = PieceVisitor.__new__(PieceVisitor)
    visitor.tables = cast(Any, SimpleNamespace(schema="lanes"))
    visitor.log_name, visitor.subscription = "orders", "billing"
    visitor.locks = visitor.pieces = cast(Any, former)
    await visitor._end_drain(PieceRow(8, 0, Slots(((0, 9),)), "a", 0, 7, 0), 7)
    assert former.ended == ended
    assert len(former.freed) == 1


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("room", "reads"),
    [
        (Room(51, 1), [(0, 200, 250)]),
        (Room(50, 1), []),
        (Room(0, 1_000), []),
        (Room(51, 0), []),
    ],
)
async def test_a_member_with_ranges_reads_only_for_the_space_of_its_consumer(
    room: Room, reads: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages that wait for their delivery take space too."""
    piece = piece_of(1, Slots(((0, SLOTS),)))
    piece.waiting.extend(StoredMessage(number, b"k", "s", None, b"", 0.0) for number in range(150, len(KEYS)))
    piece.end = len(KEYS) + 50
    visitor, asked = reading_visitor(monkeypatch, piece)
    visitor.room = room
    await visitor._read(cast(Any, None))
    assert asked == reads
    assert piece.read == (piece.end if reads else len(KEYS))


@pytest.mark.anyio
async def test_a_member_with_ranges_reads_every_partition_if_all_messages_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of the partitions then does not matter, and needs no request."""
    pieces = [piece_of(number, Slots(((0, SLOTS),)), number - 1) for number in (1, 2)]
    pieces[0].end, pieces[1].end = len(KEYS) + 99, len(KEYS) + 1
    visitor, asked = reading_visitor(monkeypatch, *pieces)
    visitor.visit, visitor.room = "oldest", Room(100, 1_000)
    await visitor._read(cast(Any, None))
    assert asked == [(0, 200, 299), (1, 200, 201)]


def reading_visitor(
    monkeypatch: pytest.MonkeyPatch, *pieces: OwnedPiece
) -> tuple[PieceVisitor, list[tuple[int, int, int]]]:
    """A member with pieces, and the partitions, starts and ends of its reads, which find nothing."""
    asked: list[tuple[int, int, int]] = []

    async def fetch(connection: Any, tables: Any, wanted: list[WantedSlots]) -> list[FoundSlots]:
        asked.extend((each.partition, each.start, each.end) for each in wanted)
        return [FoundSlots(0, [], each.end) for each in wanted]

    monkeypatch.setattr(piece_visitor, "fetch", fetch)
    visitor = PieceVisitor.__new__(PieceVisitor)
    visitor.owned = {piece.unit: piece for piece in pieces}
    visitor.visit, visitor.wake, visitor.tables = "name", lambda: None, cast(Any, None)
    visitor._bytes_each, visitor._found, visitor._earliest = 0.0, 1.0, math.inf
    visitor._ends = [piece.end for piece in pieces]
    return visitor, asked
