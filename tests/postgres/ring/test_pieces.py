"""A hand-over of a part of a piece: what the next owner finds, and a split at the same moment."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import psycopg
import pytest
from psycopg.sql import SQL, Identifier

from lanes.core.types import PieceId
from lanes.ownership import State, StateChange, StateKey, StateLocked
from lanes.ring import Range
from lanes_postgres.ring.pieces import _HAND_OVER, Pieces, assigning, locking
from lanes_postgres.ring.slots import MovedSlots, Slots
from lanes_postgres.steps import perform
from tests.postgres.log.logs import Logs
from tests.postgres.log.test_subscriptions import until
from tests.postgres.ring.ranged import HALF, LOW, Ring

pytestmark = pytest.mark.anyio

EPOCH = 7
MIDDLE = HALF // 2
UPPER = Range(MIDDLE, HALF - 1)


@pytest.fixture
async def ring(logs: Logs) -> Ring:
    """A map of one range, whose pieces a member has made and left."""
    ring = Ring(logs)
    ring.assign(LOW, "a")
    async with ring.member("a"):
        await until(lambda: any(consumer == "a" for _, consumer, _ in ring.pieces()))
    return ring


def own(ring: Ring, floor: int, completed: list[int]) -> int:
    """Let ``a`` own its piece at a position; return the number of the piece."""
    ((piece,),) = ring.logs.execute(
        f"UPDATE {{}}.lanes_ring_pieces SET epoch = {EPOCH}, floor = {floor}, completed = ARRAY{completed}::bigint[] "
        "WHERE consumer = 'a' RETURNING id"
    )
    return int(piece)


def part(ring: Ring) -> tuple[int, list[int], int | None]:
    """Position, completed runs and drain of the part of ``b``."""
    ((floor, completed, parent),) = ring.logs.execute(
        "SELECT floor, completed, parent FROM {}.lanes_ring_pieces WHERE consumer = 'b'"
    )
    return floor, completed, parent


def pieces_of(ring: Ring, options: str = "") -> Pieces:
    ((log,),) = ring.logs.execute("SELECT id FROM {}.lanes_logs")

    @asynccontextmanager
    async def connect() -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        async with await psycopg.AsyncConnection.connect(ring.logs.url, options=options) as connection:
            yield connection

    return Pieces(connect, ring.logs.schema, log, ring.group, "a", "test")


@pytest.mark.parametrize(
    ("finished", "below", "expected"),
    [
        ([101, 1000], 150, [101, 1000]),
        ([101, 1000], 100, [101, 1000]),
        ([101, 120, 130, 140], 150, [101, 120, 130, 140, 150, 1000]),
        ([101, 120, 130, 170], 150, [101, 120, 130, 1000]),
        ([], 2000, []),
    ],
)
async def test_the_next_owner_keeps_the_messages_that_an_earlier_one_finished(
    ring: Ring, finished: list[int], below: int, expected: list[int]
) -> None:
    """The owner between them has not read up to these messages."""
    piece = own(ring, 100, [101, 1000])
    with ring.logs.connect() as connection:
        ring.map.split(connection, MIDDLE, "b")
    assert part(ring) == (100, [101, 1000], piece)
    own(ring, 100, finished)
    await pieces_of(ring).hand_over(piece, EPOCH, MovedSlots(Slots.of([UPPER]), below))
    assert part(ring) == (100, expected, None)


async def test_positions_are_stored_in_the_order_in_which_an_assignment_locks_them(ring: Ring) -> None:
    """A store that waits for one row of an assignment has no later row, which the assignment would wait for."""
    with ring.logs.connect() as connection:
        ring.map.split(connection, MIDDLE, "a2")
    rows = ring.logs.execute("SELECT id, partition FROM {}.lanes_ring_pieces WHERE slots IS NOT NULL ORDER BY id")
    first, last = rows[0], rows[-1]
    # The first row lies behind the others in the table, and the plan of the server may read the table in its order.
    in_table_order = "-c enable_nestloop=off -c enable_mergejoin=off"
    ring.logs.execute(f"UPDATE {{}}.lanes_ring_pieces SET epoch = {EPOCH}")
    ring.logs.execute(f"UPDATE {{}}.lanes_ring_pieces SET floor = 0 WHERE id = {first[0]}")
    changes = [
        StateChange(StateKey(ring.group, PieceId("orders", number, piece), "x"), State(EPOCH, 7, []))
        for piece, number in (last, first)
    ]
    lock = SQL("SELECT FROM {}.lanes_ring_pieces WHERE id = %s FOR UPDATE NOWAIT").format(Identifier(ring.logs.schema))
    with psycopg.connect(ring.logs.url) as assigning_:
        assigning_.execute(lock, (first[0],))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pieces_of(ring, in_table_order).store, changes)
            await until(lambda: ring.logs.execute("SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock'"))
            assigning_.execute(lock, (last[0],))
            assigning_.commit()
    floors = ring.logs.execute(f"SELECT floor FROM {{}}.lanes_ring_pieces WHERE id IN ({first[0]}, {last[0]})")
    assert floors == [(7,), (7,)]


async def test_a_part_that_is_split_during_its_hand_over_is_handed_over_whole(ring: Ring) -> None:
    """Also if the database begins transactions with one snapshot for all their statements."""
    piece = own(ring, 100, [])
    with ring.logs.connect() as connection:
        ring.map.split(connection, MIDDLE, "b")
    pieces = pieces_of(ring, "-c default_transaction_isolation=repeatable\\ read")
    place = ring.logs.schema, pieces._place[0], ring.group
    with psycopg.connect(ring.logs.url) as other:
        perform(other, locking(*place), "test")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pieces.hand_over, piece, EPOCH, MovedSlots(Slots.of([UPPER]), 150))
            waits = "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
            await until(lambda: ring.logs.execute(waits))
            perform(other, assigning(*place, Range(MIDDLE, MIDDLE + 99), "c"), "test")
            other.commit()
    assert [parent for _, _, parent in ring.pieces()] == [None] * len(ring.pieces())


async def test_a_drain_is_not_ended_while_a_frozen_owner_holds_the_row(ring: Ring) -> None:
    """The member would otherwise wait, and read none of its pieces."""
    piece = own(ring, 100, [])
    with ring.logs.connect() as connection:
        ring.map.split(connection, MIDDLE, "b")
    ((moved,),) = ring.logs.execute("SELECT id FROM {}.lanes_ring_pieces WHERE consumer = 'b'")
    pieces = pieces_of(ring)
    place = {"id": piece, "epoch": EPOCH, "slots": str(Slots.of([UPPER])), "below": 150}
    with psycopg.connect(ring.logs.url) as frozen:
        perform(frozen, pieces._handing_over(_HAND_OVER, [place]), "test")
        with anyio.fail_after(10), pytest.raises(StateLocked, match=f"a transaction holds the row of piece {moved}"):
            await pieces.end_drain(moved, piece)
        frozen.rollback()
    await pieces.end_drain(moved, piece)
    assert part(ring) == (100, [], None)


async def test_a_transaction_that_holds_the_map_ends_soon_after_a_freeze(ring: Ring) -> None:
    pieces = pieces_of(ring)
    place = {"id": 1, "epoch": EPOCH, "slots": str(Slots.of([UPPER])), "below": 150}
    for steps in (pieces._handing_over(_HAND_OVER, [place]), ring.map._locking()):
        with psycopg.connect(ring.logs.url) as connection:
            perform(connection, steps, "test")
            limit = connection.execute("SHOW idle_in_transaction_session_timeout").fetchall()
            assert limit == [("5s",)]
