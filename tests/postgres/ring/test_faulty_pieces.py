"""A fault of one piece on a real server: its row, its position or its hand-over. All other pieces continue."""

from __future__ import annotations

from typing import Any, cast

import psycopg
import pytest
from psycopg import sql

from lanes.errors import SourceError
from lanes.ring import Range
from lanes_postgres.advisory_locks import AdvisoryLocks
from lanes_postgres.lock_session import LockSession, SessionMaker
from lanes_postgres.steps import perform
from lanes_postgres.subscription import piece_visitor
from lanes_postgres.subscription.connections import Connections
from lanes_postgres.subscription.owned_piece import OwnedPiece
from tests.postgres.log.logs import Logs
from tests.postgres.log.test_subscriptions import until
from tests.postgres.ring.ranged import HALF, HIGH, LOW, Ring, some

pytestmark = pytest.mark.anyio

REFUSALS = {"a permanent refusal": "P0001", "a refusal that may pass": "40001"}
MIDDLE = HALF // 2


@pytest.fixture
def ring(logs: Logs, monkeypatch: pytest.MonkeyPatch) -> Ring:
    """A consumer with two ranges. A piece with a fault is tried again soon."""
    monkeypatch.setattr(piece_visitor, "LONGEST_PAUSE", 1.0)
    ring = Ring(logs)
    ring.assign(LOW, "a")
    ring.assign(HIGH, "a")
    return ring


@pytest.fixture
def piece(ring: Ring) -> int:
    """The number of the piece of ``LOW``, which exists before a member acquires it."""
    with ring.logs.connect(autocommit=True) as connection, connection.transaction():
        perform(connection, ring.map.beginning([0]), "test")
    return number_of(ring, LOW)


def number_of(ring: Ring, wanted: Range) -> int:
    ((number,),) = ring.logs.execute(
        f"SELECT id FROM {{}}.lanes_ring_pieces WHERE slots @> {wanted.lo} AND slots IS NOT NULL"
    )
    return int(number)


def refuse(ring: Ring, piece: int, column: str, state: str) -> None:
    """Let the server refuse each change of a column of one piece."""
    with ring.logs.connect(autocommit=True) as connection:
        schema = sql.Identifier(ring.logs.schema)
        connection.execute(
            sql.SQL(
                "CREATE OR REPLACE FUNCTION {}.refuse() RETURNS trigger LANGUAGE plpgsql AS "
                "$$ BEGIN RAISE EXCEPTION 'refused by the test' USING ERRCODE = {}; END $$"
            ).format(schema, sql.Literal(state))
        )
        connection.execute(
            sql.SQL(
                "CREATE TRIGGER refuse BEFORE UPDATE ON {}.lanes_ring_pieces FOR EACH ROW "
                "WHEN (OLD.id = {} AND OLD.{} IS DISTINCT FROM NEW.{}) EXECUTE FUNCTION {}.refuse()"
            ).format(schema, sql.Literal(piece), sql.Identifier(column), sql.Identifier(column), schema)
        )


def admit(ring: Ring) -> None:
    ring.logs.execute("DROP TRIGGER refuse ON {}.lanes_ring_pieces")


def lock(operator: psycopg.Connection[Any], ring: Ring, piece: int) -> None:
    """Lock the row of a piece, as a person does in psql."""
    operator.execute(
        sql.SQL("SELECT FROM {}.lanes_ring_pieces WHERE id = {} FOR UPDATE").format(
            sql.Identifier(ring.logs.schema), sql.Literal(piece)
        )
    )


def floor_of(ring: Ring, piece: int) -> int:
    ((floor,),) = ring.logs.execute(f"SELECT floor FROM {{}}.lanes_ring_pieces WHERE id = {piece}")
    return int(floor)


def epoch_of(ring: Ring, piece: int) -> int:
    ((epoch,),) = ring.logs.execute(f"SELECT epoch FROM {{}}.lanes_ring_pieces WHERE id = {piece}")
    return int(epoch)


@pytest.mark.parametrize("state", REFUSALS.values(), ids=REFUSALS)
async def test_a_piece_that_cannot_be_acquired_delays_no_other_piece(ring: Ring, piece: int, state: str) -> None:
    refuse(ring, piece, "epoch", state)
    low, high = some(LOW, 3), some(HIGH, 3)
    async with ring.member("a") as a:
        for count, each in enumerate(high, start=1):
            ring.append(low[0], each)
            await until(lambda count=count: len(a.ended) == count)  # type: ignore[misc]
        assert a.ended == high
        await until(lambda: any(f"piece {piece}" in text for text in a.findings()))
        (finding,) = a.findings()
        assert "refused by the test" in finding and "partition 0" in finding
        admit(ring)
        await until(lambda: a.ended == [*high, *[low[0]] * 3])
        await until(lambda: a.findings() == [])


async def test_a_piece_with_unreadable_finished_positions_delays_no_other_piece(ring: Ring, piece: int) -> None:
    ring.logs.execute(f"UPDATE {{}}.lanes_ring_pieces SET completed = ARRAY[5,6,7] WHERE id = {piece}")
    low, high = some(LOW, 1), some(HIGH, 1)
    ring.append(*low, *high)
    async with ring.member("a") as a:
        await until(lambda: a.ended == high)
        await until(lambda: any("{5,6,7}" in text for text in a.findings()))
        ring.logs.execute(f"UPDATE {{}}.lanes_ring_pieces SET completed = ARRAY[]::bigint[] WHERE id = {piece}")
        await until(lambda: a.ended == [*high, *low])


@pytest.mark.parametrize("state", REFUSALS.values(), ids=REFUSALS)
async def test_a_position_that_cannot_be_stored_delays_no_other_position_and_repeats_nothing(
    ring: Ring, piece: int, state: str
) -> None:
    refuse(ring, piece, "floor", state)
    other = number_of(ring, HIGH)
    low, high = some(LOW, 2), some(HIGH, 2)
    ring.append(low[0], high[0])
    async with ring.member("a") as a:
        await until(lambda: floor_of(ring, other) == 2)
        await until(a.findings)
        (finding,) = a.findings()
        assert f"piece {piece} of partition 0" in finding and "refused by the test" in finding
        ring.append(low[1], high[1])
        await until(lambda: floor_of(ring, other) == 4)
        await until(lambda: len(a.ended) == 4)
        before = epoch_of(ring, piece)
        admit(ring)
        await until(lambda: floor_of(ring, piece) == 4)
        await until(lambda: a.findings() == [])
        assert epoch_of(ring, piece) == before, "the member has kept the piece"
    assert sorted(a.begun) == sorted([*low, *high])


async def test_a_locked_row_of_a_piece_delays_no_position_of_another(ring: Ring, piece: int) -> None:
    other = number_of(ring, HIGH)
    low, high = some(LOW, 1), some(HIGH, 2)
    async with ring.member("a") as a:
        ring.append(high[0])
        await until(lambda: floor_of(ring, other) == 1 and len(a.consumer.status().partitions) == 3)
        with ring.logs.connect() as operator:
            lock(operator, ring, piece)
            ring.append(low[0], high[1])
            await until(lambda: floor_of(ring, other) == 3)
            operator.rollback()
        await until(lambda: floor_of(ring, piece) == 3)
    assert a.ended == [high[0], low[0], high[1]]


async def test_a_part_that_cannot_be_handed_over_stays_with_its_owner(ring: Ring, piece: int) -> None:
    low, high = some(Range(0, MIDDLE - 1), 2), some(HIGH, 2)
    (upper,) = some(Range(MIDDLE, HALF - 1), 1)
    async with ring.member("a") as a, ring.member("b") as b:
        a.close()
        ring.append(upper)
        await until(lambda: a.begun == [upper])
        with ring.logs.connect() as connection:
            ring.map.split(connection, MIDDLE, "b")
        refuse(ring, number_of(ring, Range(MIDDLE, MIDDLE)), "parent", "P0001")
        a.gate.set()
        await until(lambda: any("a part of piece" in text for text in a.findings()))
        ring.append(low[0], high[0], upper)
        await until(lambda: {low[0], high[0]} <= set(a.ended))
        assert b.begun == []
        admit(ring)
        await until(lambda: b.ended == [upper])
        await until(lambda: a.findings() == [])
        ring.append(low[1], high[1])
        await until(lambda: {low[1], high[1]} <= set(a.ended))
    assert a.ended.count(upper) == 1, "the finished message does not run again"


async def test_a_locked_part_delays_neither_another_hand_over_nor_the_map(ring: Ring, piece: int) -> None:
    held, free = Range(MIDDLE, MIDDLE + 9_999), Range(MIDDLE + 10_000, HALF - 1)
    (of_held,), (of_free,) = some(held, 1), some(free, 1)
    async with ring.member("a") as a, ring.member("b") as b:
        a.close()
        ring.append(of_held, of_free)
        await until(lambda: len(a.begun) == 2)
        ring.assign(held, "b")
        ring.assign(free, "b")
        with ring.logs.connect() as operator:
            lock(operator, ring, number_of(ring, held))
            a.gate.set()
            await until(lambda: any("a part of piece" in text for text in a.findings()))
            ring.append(of_held, of_free)
            await until(lambda: b.ended == [of_free])
            assert ring.assign(Range(0, 99), "b")
            operator.rollback()
        await until(lambda: b.ended == [of_free, of_held])
    assert sorted(a.ended) == sorted([of_held, of_free])


async def test_a_locked_table_makes_no_member_give_a_piece_up(ring: Ring, piece: int) -> None:
    low, high = some(LOW, 2), some(HIGH, 2)
    async with ring.member("a") as a:
        ring.append(low[0], high[0])
        await until(lambda: floor_of(ring, piece) == 2)
        before = epoch_of(ring, piece)
        a.close()
        ring.append(low[1], high[1])
        await until(lambda: len(a.begun) == 4)
        failing = a.consumer._life.last_run("test").settler.unsettled
        with ring.logs.connect() as operator:
            operator.execute(
                sql.SQL("LOCK TABLE {}.lanes_ring_pieces IN ACCESS EXCLUSIVE MODE").format(
                    sql.Identifier(ring.logs.schema)
                )
            )
            a.gate.set()
            await until(lambda: failing.partitions)
            (error,) = {each.error for each in failing.partitions.values()}
            assert "a transaction locks the table lanes_ring_pieces, and no position is stored" in error
            operator.rollback()
        await until(lambda: floor_of(ring, piece) == 4)
        assert epoch_of(ring, piece) == before
    assert sorted(a.begun) == sorted([*low, *high])


async def test_a_piece_without_an_owner_whose_row_is_locked_is_reported(
    ring: Ring, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(piece_visitor, "TOLD", 0.3)
    low, high = some(LOW, 1), some(HIGH, 1)
    ring.append(*low, *high)
    with ring.logs.connect() as operator:
        lock(operator, ring, piece)
        async with ring.member("a") as a:
            await until(lambda: a.ended == high)
            await until(a.findings)
            (finding,) = a.findings()
            assert f"the messages of piece {piece} of partition 0 wait" in finding
            assert finding.endswith(f"a transaction holds the row of piece {piece}; end that transaction")
            operator.rollback()
            await until(lambda: a.ended == [*high, *low])
            await until(lambda: a.findings() == [])


async def test_a_piece_of_a_dead_owner_whose_row_is_locked_is_reported(
    ring: Ring, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next owner cannot end the drain of its part."""
    monkeypatch.setattr(piece_visitor, "TOLD", 0.3)
    upper = Range(MIDDLE, HALF - 1)
    (key,) = some(upper, 1)
    async with ring.member("a") as a:
        await until(lambda: epoch_of(ring, piece) > 0 and a.consumer.status().partitions)
    ring.assign(upper, "b")
    part = number_of(ring, upper)
    ring.append(key)
    with ring.logs.connect() as operator:
        lock(operator, ring, part)
        async with ring.member("b") as b:
            await until(lambda: b.consumer.status().partitions)
            await until(b.findings)
            (finding,) = b.findings()
            assert f"a transaction holds the row of piece {part}; end that transaction" in finding
            operator.rollback()
            await until(lambda: b.ended == [key])
            await until(lambda: b.findings() == [])


async def test_a_refused_position_of_slots_without_an_owner_stops_no_member(
    logs: Logs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The count of these slots raises their positions."""
    monkeypatch.setattr(piece_visitor, "_COUNT_EVERY", 0.1)
    ring = Ring(logs)
    ring.assign(HIGH, "a")
    with ring.logs.connect(autocommit=True) as connection, connection.transaction():
        perform(connection, ring.map.beginning([0]), "test")
    ring.assign(Range(MIDDLE, MIDDLE), "a")  # Two pieces have no owner now.
    free = number_of(ring, Range(0, 0))
    refuse(ring, free, "floor", "P0001")
    high = some(HIGH, 2)
    async with ring.member("a") as a:
        ring.append(high[0])
        await until(lambda: a.ended == high[:1])
        await until(lambda: any(f"piece {free}: " in text for text in a.findings()))
        ring.append(high[1])
        await until(lambda: a.ended == high)
        admit(ring)
        await until(lambda: floor_of(ring, free) == 2)
        await until(lambda: a.findings() == [])


async def test_a_member_without_a_connection_for_a_claim_reads_its_other_pieces(
    ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has no connection left. The connection that reads the messages is older."""
    (middle,) = some(Range(MIDDLE, HALF - 1), 1)
    high = some(HIGH, 2)
    with ring.logs.connect() as connection:
        ring.map.split(connection, MIDDLE, "b")
    async with ring.member("a") as a:
        ring.append(high[0])
        await until(lambda: a.ended == high[:1] and a.consumer.status().partitions)
        opened = Connections._open

        async def refused(connections: Connections) -> psycopg.AsyncConnection[Any]:
            raise SourceError("too many clients already; raise max_connections", retryable=True)

        monkeypatch.setattr(Connections, "_open", refused)
        idle = a.source._connections._idle
        while idle:
            await idle.pop().close()
        ring.assign(Range(MIDDLE, HALF - 1), "a")
        await until(lambda: any("too many clients" in text for text in a.findings()))
        for _ in range(3):
            ring.append(high[1])
        ring.append(middle)
        await until(lambda: a.ended == [high[0], *[high[1]] * 3])
        monkeypatch.setattr(Connections, "_open", opened)
        await until(lambda: middle in a.ended)
        await until(lambda: a.findings() == [])


async def test_a_release_hands_the_healthy_parts_over_beside_a_part_with_a_fault(ring: Ring, piece: int) -> None:
    """The finished messages of the healthy part do not run again."""
    bad, healthy = Range(MIDDLE, MIDDLE + 9_999), Range(MIDDLE + 10_000, HALF - 1)
    (one,), others = some(bad, 1), some(healthy, 5)
    async with ring.member("b") as b:
        async with ring.member("a") as a:
            a.close()
            ring.append(*others, one)
            await until(lambda: len(a.begun) == 6)
            ring.assign(bad, "b")
            refuse(ring, number_of(ring, bad), "parent", "40001")
            ring.assign(healthy, "b")
            visitor = a.source._visitor
            await until(lambda: len(cast(OwnedPiece, visitor.owned[piece]).moved) == 2)
            a.consumer.stop()
            a.gate.set()
        admit(ring)
        await until(lambda: one in b.ended)
        ring.append(others[0])
        await until(lambda: others[0] in b.ended)
    assert b.ended == [one, others[0]]


async def test_a_piece_whose_position_is_refused_is_drained_before_its_next_owner_begins(
    ring: Ring, piece: int
) -> None:
    mine = Range(HALF, HALF + MIDDLE)
    ring.assign(mine, "b")
    (first, second), (marker,) = some(LOW, 2), some(mine, 1)
    async with ring.member("a") as a, ring.member("b") as b:
        ring.append(first)
        await until(lambda: floor_of(ring, piece) == 1)
        refuse(ring, piece, "completed", "P0001")
        a.close()
        ring.append(second)
        await until(lambda: a.begun == [first, second])
        # Another message of the piece ends while the second one runs, and the server refuses its position.
        closed = a.gate
        a.close()
        a.gate.set()
        ring.append(first)
        await until(a.findings)
        ring.assign(LOW, "b")
        for count in range(1, 4):
            ring.append(marker)
            await until(lambda count=count: b.ended == [marker] * count)  # type: ignore[misc]
        assert second not in a.ended
        admit(ring)
        closed.set()
        await until(lambda: second in a.ended)
        await until(lambda: floor_of(ring, piece) >= 3)
        await until(lambda: len(b.ended) == 3 and floor_of(ring, piece) >= 6)
    assert first not in b.begun and second not in b.begun, "the drain has stored the finished messages"


async def test_a_lost_session_of_the_locks_is_an_outage(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    (key,) = some(LOW, 1)
    async with ring.member("a") as a:
        ring.append(key)
        await until(lambda: a.ended == [key])
        assert a.source.outage() is None
        connect = SessionMaker.connect

        async def refused(maker: SessionMaker) -> LockSession:
            raise SourceError("advisory locks: no session is left", retryable=True)

        monkeypatch.setattr(SessionMaker, "connect", refused)
        locks = a.source._locks
        assert isinstance(locks, AdvisoryLocks) and locks._session is not None
        ring.logs.execute(f"SELECT pg_terminate_backend({locks._session.pid})")
        await until(a.source.outage)
        outage = a.source.outage()
        assert outage is not None and outage.error == "advisory locks: no session is left"
        monkeypatch.setattr(SessionMaker, "connect", connect)
        await until(lambda: a.source.outage() is None)
        ring.append(key)
        await until(lambda: a.ended.count(key) >= 2)


async def test_a_consumer_without_slots_is_named_once(ring: Ring, caplog: pytest.LogCaptureFixture) -> None:
    (key,) = some(LOW, 1)

    def warnings() -> list[str]:
        return [line for line in caplog.messages if "gives consumer" in line]

    async with ring.member("aa") as misspelt, ring.member("a") as a:
        await until(warnings)
        ring.append(key, None)
        await until(lambda: len(a.ended) + len(misspelt.ended) == 2)
        (warning,) = warnings()
        assert "the map gives consumer 'aa' no slots, so it handles only messages without a key; correct" in warning
