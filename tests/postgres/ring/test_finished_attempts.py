"""Attempts that a killed owner of a piece has left: they disappear when the floor of the piece has passed them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import psycopg
import pytest
from psycopg import sql

from lanes.attempts import Attempt
from lanes_postgres import PostgresAttempts
from lanes_postgres.cli.retention import trim
from lanes_postgres.ring import finished_attempts
from lanes_postgres.subscription import piece_visitor
from lanes_postgres.subscription.piece_visitor import PieceVisitor
from tests.postgres.log.logs import Logs
from tests.postgres.log.test_subscriptions import until
from tests.postgres.ring.ranged import HIGH, LOW, Ring, some
from tests.postgres.tables import message, partition

pytestmark = pytest.mark.anyio


@pytest.fixture
def ring(logs: Logs, monkeypatch: pytest.MonkeyPatch) -> Ring:
    """A range of ``a``, and one of ``b``, who does not run. Each look deletes attempts, and reads two of them."""
    monkeypatch.setattr(piece_visitor, "_COUNT_EVERY", 0.0)
    monkeypatch.setattr(finished_attempts, "LOOK", 2)
    ring = Ring(logs)
    ring.assign(LOW, "a")
    ring.assign(HIGH, "b")
    return ring


def store(ring: Ring, subscription: str) -> PostgresAttempts:
    @asynccontextmanager
    async def connect() -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        async with await psycopg.AsyncConnection.connect(ring.logs.url, autocommit=True) as connection:
            yield connection

    return PostgresAttempts(connect, subscription, schema=ring.logs.schema)


async def leave(ring: Ring, *positions: int, subscription: str = "billing") -> None:
    """Store attempts of messages, as an owner that was killed has left them."""
    ((incarnation,),) = ring.logs.execute("SELECT incarnation FROM {}.lanes_logs")
    of = partition(incarnation=incarnation)
    for position in positions:
        await store(ring, subscription).keep(message(position, b"k", of), Attempt(1, "held", "ValueError"))


def left(ring: Ring, subscription: str = "billing") -> list[int]:
    rows = ring.logs.execute(
        "SELECT position FROM {0}.lanes_attempts JOIN {0}.lanes_topics AS of ON lanes_attempts.topic = of.id "
        f"WHERE subscription = '{subscription}' ORDER BY position"
    )
    return [position for (position,) in rows]


async def test_attempts_below_the_floor_of_their_piece_are_deleted(ring: Ring) -> None:
    """Attempts of another piece stay, also below the floor of this piece.

    The attempts of another subscription also stay.
    """
    (low,), (high,) = some(LOW, 1), some(HIGH, 1)
    ring.append(high, high, high, low, low, None, high, low)
    everything = list(range(8))
    async with ring.member("a") as a:
        await until(lambda: len(a.ended) == 4)
        await leave(ring, *everything)
        await leave(ring, *everything, subscription="shipping")
        await until(lambda: left(ring) == [0, 1, 2, 6])
        async with ring.member("b", attempts=store(ring, "billing")) as b:
            await until(lambda: len(b.ended) == 4)
            assert b.attempts == [2, 2, 2, 2]
            await until(lambda: left(ring) == [])
    assert left(ring, "shipping") == everything


async def test_attempts_of_trimmed_messages_are_deleted(ring: Ring) -> None:
    (low,), (high,) = some(LOW, 1), some(HIGH, 1)
    for key in (high, low, low):
        ring.append(key)
    async with ring.member("a") as a:
        await until(lambda: len(a.ended) == 2)
        async with await psycopg.AsyncConnection.connect(ring.logs.url, autocommit=True) as connection:
            assert await trim(connection, ring.logs.schema, "orders", age=0.0, force=True) == 2
        await leave(ring, 0)
        await until(lambda: left(ring) == [])


async def test_a_lock_on_the_table_of_attempts_delays_no_message(ring: Ring) -> None:
    (low,) = some(LOW, 1)
    async with ring.member("a") as a:
        ring.append(low)
        await until(lambda: a.ended == [low])
        with ring.logs.connect() as operator:
            operator.execute(
                sql.SQL("LOCK TABLE {}.lanes_attempts IN ACCESS EXCLUSIVE MODE").format(
                    sql.Identifier(ring.logs.schema)
                )
            )
            visitor = cast(PieceVisitor, a.source._visitor)
            counted = visitor._counted_at
            await until(lambda: visitor._counted_at > counted)
            ring.append(low)
            await until(lambda: a.ended == [low, low])
            operator.rollback()
