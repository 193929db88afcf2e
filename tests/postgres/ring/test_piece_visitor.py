"""A member with ranges decides, without a server, which pieces to lose, to try and to read."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lanes.clock import monotonic
from lanes.core.types import Room
from lanes.errors import SourceError
from lanes.ownership import HeldLock, StateLocked
from lanes.ring import SLOTS, slot
from lanes_postgres.log.reading import StoredMessage
from lanes_postgres.ring.finished_attempts import BEGINNING, Place
from lanes_postgres.ring.pieces import PieceError, PieceRow
from lanes_postgres.ring.reading import FoundSlots, WantedSlots
from lanes_postgres.ring.slots import Slots
from lanes_postgres.subscription import piece_visitor
from lanes_postgres.subscription.owned_piece import OwnedPiece
from lanes_postgres.subscription.piece_visitor import PieceVisitor
from lanes_postgres.subscription.visitor import TRIES
from lanes_postgres.subscription.visits import Member
from tests.postgres.ring.test_owners import KEYS, piece_of


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
    with pytest.raises(StateLocked) if locked else nullcontext():
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


@pytest.mark.anyio
async def test_a_read_that_finds_little_widens_the_next_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most positions may have messages of other members, and then a read examines more positions."""
    piece = piece_of(1, Slots(((0, SLOTS),)))
    piece.end = len(KEYS) + 100_000
    visitor, asked = reading_visitor(monkeypatch, piece)
    visitor.room = Room(50, 1_000)
    shares = []
    for _ in range(3):
        await visitor._read(cast(Any, None))
        shares.append(visitor._found)
    assert shares == [0.5, 0.25, 0.125]
    for _ in range(12):
        await visitor._read(cast(Any, None))
    assert visitor._found == 1 / 5_000
    assert {end - start for _, start, end in asked} == {5_000}


# --- faults of a piece


def test_the_pause_of_a_piece_with_a_fault_doubles(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(piece_visitor, "monotonic", lambda: 100.0)
    visitor = PieceVisitor.__new__(PieceVisitor)
    visitor.name, visitor._faults = "postgres orders/billing", {}

    def pauses(piece: int, count: int, longest: float | None = None) -> list[float]:
        found = []
        for _ in range(count):
            visitor._skip(piece, 0, SourceError("refused"), longest)
            fault = visitor._faults[piece]
            assert fault.until == 100.0 + fault.pause
            found.append(fault.pause)
        return found

    assert pauses(7, 8) == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert pauses(8, 4, 3.0) == [1.0, 2.0, 3.0, 3.0]
    assert caplog.messages == [
        f"postgres orders/billing: the messages of piece {piece} of partition 0 wait: refused; correct its row in "
        "lanes_ring_pieces"
        for piece in (7, 8)
    ]


@pytest.mark.anyio
@pytest.mark.parametrize(("retryable", "calls"), [(True, 41), (False, 1)])
async def test_a_release_repeats_a_hand_over_while_a_transaction_holds_a_row(
    retryable: bool, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, made = 100.0, 0

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    async def hand_over() -> None:
        nonlocal made
        made += 1
        raise PieceError("locked", retryable=retryable)

    monkeypatch.setattr(piece_visitor, "monotonic", lambda: round(now, 6))
    monkeypatch.setattr(asyncio, "sleep", sleep)
    visitor = PieceVisitor.__new__(PieceVisitor)
    visitor.name, visitor._faults = "x", {}
    await visitor._confined(piece_of(1, Slots(((0, SLOTS),))), hand_over, 104.0)
    assert made == calls
    assert list(visitor._faults) == [1]


# --- messages of a read


def stored(position: int, key: bytes | None) -> StoredMessage:
    return StoredMessage(position, key, "s", None, b"value", 0.0)


@pytest.mark.anyio
async def test_messages_of_a_read_go_to_the_pieces_that_were_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece that has moved on, or is given up, gets none of them."""
    half = Slots(((0, SLOTS // 2),)), Slots(((SLOTS // 2, SLOTS),))
    low, high, keyless = piece_of(1, half[0]), piece_of(2, half[1]), piece_of(3, None)
    visitor, _ = reading_visitor(monkeypatch, low, high, keyless)
    wanted = WantedSlots(0, len(KEYS), len(KEYS) + 50, 9, Slots(((0, SLOTS),)), keyless=True)
    keys = {number: next(key for key in KEYS if slot(key) in slots) for number, slots in enumerate(half)}
    found = FoundSlots(0, [stored(200, keys[0]), stored(201, keys[1]), stored(203, None)], 204)
    await visitor._deal(cast(Any, None), wanted, found, [low, high, keyless])
    assert [[each.position for each in piece.waiting] for piece in (low, high, keyless)] == [[200], [201], [203]]
    assert [piece.read for piece in (low, high, keyless)] == [204] * 3
    assert visitor._bytes_each == (2 * (5 + len(keys[0])) + 5) / 3
    low.over, high.revoked = True, True
    wanted = wanted._replace(start=204)
    await visitor._deal(
        cast(Any, None), wanted, FoundSlots(0, [stored(204, keys[0]), stored(205, None)], 206), [low, high, keyless]
    )
    assert [len(piece.waiting) for piece in (low, high, keyless)] == [1, 1, 2]
    assert [piece.read for piece in (low, high, keyless)] == [204, 204, 206]
    await visitor._deal(cast(Any, None), wanted, FoundSlots(0, [stored(204, None)], 205), [keyless])
    assert (len(keyless.waiting), keyless.read) == (2, 206), "another read was faster"


@pytest.mark.anyio
@pytest.mark.parametrize("waits", [True, False])
async def test_a_trim_below_a_piece_is_skipped_after_its_waiting_messages(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    piece = piece_of(1, Slots(((0, SLOTS),)))
    visitor, _ = reading_visitor(monkeypatch, piece)
    trimmed: list[Any] = []

    async def trim(self: PieceVisitor, connection: Any, owned: Any) -> None:
        trimmed.append(owned)

    monkeypatch.setattr(PieceVisitor, "_trimmed", trim)
    if waits:
        piece.waiting.append(stored(150, KEYS[0]))
    wanted = WantedSlots(0, len(KEYS), len(KEYS) + 50, 9, Slots(((0, SLOTS),)), keyless=False)
    await visitor._deal(cast(Any, None), wanted, FoundSlots(len(KEYS) + 1, [stored(210, KEYS[0])], 211), [piece])
    assert (trimmed, piece.read, len(piece.waiting)) == ([] if waits else [piece], len(KEYS), waits)


# --- pieces without an owner


def rows_of(*numbers: int) -> list[PieceRow]:
    return [PieceRow(number, 0, None, None, 0, None, 0) for number in numbers]


def test_a_member_tries_some_free_pieces_in_turn_while_the_others_report_to_own_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The account of a member that was killed is wrong for some seconds."""
    visitor, _ = reading_visitor(monkeypatch, piece_of(1, None), piece_of(30, Slots(((0, 9),))))
    visitor.tables = cast(Any, SimpleNamespace(partitions=20))
    visitor._tried = 0
    rows = [*rows_of(*range(1, 21)), PieceRow(31, 0, Slots(((9, 12),)), "a", 0, None, 0)]
    visitor._others = [Member(18, waits=False)]
    assert [row.id for row in visitor._free(rows)] == [*range(2, 21)]
    visitor._others = [Member(10, waits=False), Member(9, waits=False)]
    tried = [row.id for _ in range(3) for row in visitor._free(rows)]
    assert len(tried) == 3 * TRIES and set(tried) == set(range(2, 21))


@pytest.mark.anyio
async def test_messages_without_an_owner_are_counted_every_ten_seconds_and_logged_when_they_come(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now, counts, asked = 100.0, [0, 5, 7, 0, 1_234], []
    dropped: list[Any] = []

    async def look(connection: Any, schema: str, log: int, group: str, ends: Sequence[int]) -> tuple[int, str]:
        asked.append((now, schema, log, group, list(ends)))
        return counts.pop(0), ""

    async def drop(
        connection: Any, schema: str, log: int, name: str, incarnation: str, group: str, after: Place
    ) -> Place:
        dropped.append((schema, log, name, incarnation, group, after))
        return Place(0, len(dropped))

    monkeypatch.setattr(piece_visitor, "look_at_unowned", look)
    monkeypatch.setattr(piece_visitor, "drop_finished", drop)
    monkeypatch.setattr(piece_visitor, "monotonic", lambda: now)
    visitor, _ = reading_visitor(monkeypatch)
    visitor.tables = cast(Any, SimpleNamespace(schema="lanes", log=3))
    visitor.name, visitor.log_name, visitor.subscription, visitor._ends = "postgres orders", "orders", "billing", [7]
    visitor._counted_at, visitor.unowned = -math.inf, None
    visitor.incarnation, visitor._attempts_after = "i", BEGINNING
    assert visitor.finding() == ""
    findings: list[int | None] = []
    for _ in range(9):
        await visitor._count(cast(Any, None))
        findings.append(visitor.unowned)
        now += 5.0
    assert findings == [0, 0, 5, 5, 7, 7, 0, 0, 1_234]
    assert asked == [(time, "lanes", 3, "billing", [7]) for time in (100.0, 110.0, 120.0, 130.0, 140.0)]
    places = [BEGINNING, *(Place(0, number) for number in range(1, 5))]
    assert dropped == [("lanes", 3, "orders", "i", "billing", place) for place in places]
    text = "messages or more wait in slots without an owner; see `lanes ring status --log 'orders' --group 'billing'`"
    assert [line.partition(", and assign")[0] for line in caplog.messages] == [
        f"postgres orders: 5 {text}",
        f"postgres orders: 1,234 {text}",
    ]
