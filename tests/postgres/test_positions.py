"""Positions: a message has its effect once, by key or by message, on any kind of connection."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import psycopg
import pytest
from psycopg.rows import dict_row

from lanes.errors import ConfigError, MessageError, SourceError
from lanes_postgres import Positions, migrate
from lanes_postgres.names import SCHEMA
from tests.components import PostgresServer
from tests.postgres.tables import Effects, handle, message, partition

Connection = psycopg.Connection


AsyncConnection = psycopg.AsyncConnection


def fail_after(effect: Callable[[], None], block: AbstractContextManager[object]) -> None:
    with pytest.raises(ZeroDivisionError), block:  # noqa: PT012 (the block is what is looked at)
        effect()
        raise ZeroDivisionError


def give_up() -> None:
    raise psycopg.Rollback


def test_a_message_has_its_effect_once(connection: Connection, effects: Effects) -> None:
    positions = Positions("books", schema=effects.schema)
    assert handle(positions, connection, effects, message(5), message(5), message(4), message(9), message(5)) == [
        *(True, False, False, True, False)
    ]
    assert effects.all() == [5, 9]
    assert effects.kept() == {"lanes_topics": 1, "lanes_positions": 1, "lanes_letters": 0, "lanes_attempts": 0}


def test_keys_partitions_topics_and_subscriptions_are_independent(connection: Connection, effects: Effects) -> None:
    books, mails = Positions("books", schema=effects.schema), Positions("mails", schema=effects.schema)
    assert handle(books, connection, effects, message(7)) == [True]
    assert handle(mails, connection, effects, message(3), message(7), message(3)) == [True, True, False]
    others = [message(1, b"other"), message(1, b"k", partition(1)), message(1, b"k", partition(0, topic="refunds"))]
    assert handle(books, connection, effects, *others) == [True, True, True]
    assert handle(books, connection, effects, message(1), message(8)) == [False, True]


def test_a_rollback_removes_effect_and_position(connection: Connection, effects: Effects) -> None:
    positions = Positions("books", schema=effects.schema)
    effect = partial(effects.add, connection, 5)
    fail_after(effect, positions.once(connection, message(5)))
    assert (effects.all(), effects.kept()["lanes_positions"], effects.kept()["lanes_topics"]) == ([], 0, 0)
    with positions.once(connection, message(5)):
        effect()
        give_up()
    assert (effects.all(), effects.kept()["lanes_positions"]) == ([], 0)
    assert handle(positions, connection, effects, message(5)) == [True]


def test_a_failure_never_rewinds_the_position(connection: Connection, effects: Effects) -> None:
    positions = Positions("books", schema=effects.schema)
    assert handle(positions, connection, effects, message(5)) == [True]
    for failing in (message(6), message(5), message(0)):
        with pytest.raises(ZeroDivisionError), positions.once(connection, failing):
            raise ZeroDivisionError
        with pytest.raises(ZeroDivisionError), positions.once_all(connection, [failing, message(9)]):
            raise ZeroDivisionError
        assert effects.fetch("SELECT position FROM {}", "lanes_positions") == [(5,)]
    assert handle(positions, connection, effects, message(5), message(6)) == [False, True]


@pytest.mark.parametrize(
    "key", [b"", b"\x00", b"\xff\xfe", bytes(range(256)), b"'; DROP TABLE x; --%s %(a)s", b"k" * 5_000_000], ids=len
)
def test_a_key_may_be_any_bytes(key: bytes, connection: Connection, effects: Effects) -> None:
    positions = Positions("books", schema=effects.schema)
    alike = [message(1, key), message(1, key + b"\x00"), message(1, key[:-1] + b"!")]
    assert handle(positions, connection, effects, *alike, *alike) == [True, True, True, False, False, False]
    assert effects.fetch("SELECT DISTINCT length(key) FROM {}", "lanes_positions") == [(32,)]


def test_a_position_has_64_bits(connection: Connection, effects: Effects) -> None:
    positions = Positions("books", schema=effects.schema)
    least, most = -(1 << 63), (1 << 63) - 1
    assert handle(positions, connection, effects, message(least), message(most), message(most)) == [True, True, False]
    for beyond in (least - 1, most + 1):
        with pytest.raises(MessageError, match=r"the position -?\d+ is beyond 64 bits"):
            positions.once(connection, message(beyond))
    with pytest.raises(MessageError, match=r"the fencing token \d+ is beyond"):
        positions.once(connection, message(1, b"k", partition(epoch=most + 1)))


def test_a_message_without_a_key_has_its_own_row(connection: Connection, effects: Effects) -> None:
    positions = Positions("books", schema=effects.schema)
    keyless = [message(9, None), message(3, None), message(3, b"k"), message(9, None), message(3, None)]
    assert handle(positions, connection, effects, *keyless) == [True, True, True, False, False]
    # A key of eight bytes does not collide with the position of a message without a key.
    assert handle(positions, connection, effects, message(9, (9).to_bytes(8, "big"))) == [True]


def test_by_message_needs_no_order(connection: Connection, effects: Effects) -> None:
    positions = Positions("books", schema=effects.schema, by="message")
    assert handle(positions, connection, effects, message(9), message(3), message(9), message(3)) == [
        *(True, True, False, False)
    ]
    unordered = message(4)
    unordered.lane = None
    assert handle(positions, connection, effects, unordered, unordered) == [True, False]
    with pytest.raises(ConfigError, match=r'order="none".*by="message"'):
        Positions("books", schema=effects.schema).once(connection, unordered)


def test_a_batch_has_its_effects_once(connection: Connection, effects: Effects) -> None:
    positions = Positions("books", schema=effects.schema)
    batch = [message(3, b"b"), message(1), message(2), message(4), message(4), message(5, None), message(5, None)]
    with positions.once_all(connection, batch) as fresh:
        assert fresh == [batch[index] for index in (0, 1, 2, 3, 5)]
    with positions.once_all(connection, [*batch, message(6), message(9, None)]) as fresh:
        assert [each.position for each in fresh] == [6, 9]
    alike = [message(4), message(1, b"k", partition(1)), message(1, b"z", partition(1, topic="refunds"))]
    for expected in (alike[1:], []):
        with positions.once_all(connection, alike) as fresh:
            assert fresh == expected
    with positions.once_all(connection, []) as fresh:
        assert fresh == []
    with (
        pytest.raises(SourceError, match="epoch 2"),
        positions.once_all(connection, [message(7, b"b", partition(epoch=2)), message(8, b"b", partition(epoch=1))]),
    ):
        pytest.fail("one message is refused")
    assert handle(positions, connection, effects, message(4, b"b")) == [True], (
        "the transaction keeps no effect of the batch"
    )


def test_any_connection_settings_work(postgres: PostgresServer, effects: Effects) -> None:
    positions = Positions("books", schema=effects.schema)
    of_pool = {"row_factory": dict_row, "cursor_factory": psycopg.RawCursor, "autocommit": True, "prepare_threshold": 0}
    with psycopg.connect(postgres.url, **of_pool) as connection:  # type: ignore[arg-type]
        for number in range(3):
            with positions.once(connection, message(number)) as fresh:
                assert fresh
            with positions.once_all(connection, [message(number), message(number, b"b")]) as found:
                assert len(found) == 1


@pytest.mark.parametrize("call", ["once", "claim"])
def test_arguments_in_the_wrong_place_are_refused(connection: Connection, effects: Effects, call: str) -> None:
    function = getattr(Positions("books", schema=effects.schema), call)
    for arguments, kind in (((message(5), connection), "a Connection"), ((connection, [message(5)]), "a list")):
        with pytest.raises(ConfigError, match=f"the second argument is {kind}: pass the connection first, .* once_all"):
            function(*arguments)


@pytest.mark.anyio
async def test_a_block_as_a_condition_is_refused(
    connection: Connection, aconnection: AsyncConnection, effects: Effects
) -> None:
    """Without ``with``, the block is no answer: the message would always count as new, and nothing would be stored."""
    positions = Positions("books", schema=effects.schema)
    for block in (positions.once(connection, message(5)), positions.once_all(connection, [message(5)])):
        with pytest.raises(ConfigError, match=r"as a condition before its transaction has begun; write `with … as "):
            bool(block)
    for awaited in (positions.once(aconnection, message(5)), positions.once_all(aconnection, [message(5)])):
        with pytest.raises(ConfigError, match=r"its transaction has begun; write `async with … as fresh:`, and test "):
            bool(awaited)


@pytest.mark.anyio
async def test_an_asynchronous_connection_works(aconnection: AsyncConnection, effects: Effects) -> None:
    positions = Positions("books", schema=effects.schema)
    for expected in (True, False):
        async with positions.once(aconnection, message(5)) as fresh:
            assert fresh is expected
            if fresh:
                await effects.add_async(aconnection, 5)

    async def failing() -> None:
        async with positions.once(aconnection, message(6)):
            await effects.add_async(aconnection, 6)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await failing()
    async with aconnection.transaction():
        assert await positions.claim(aconnection, message(6))
        assert [each.position for each in await positions.claim_all(aconnection, [message(6), message(7)])] == [7]
        await effects.add_async(aconnection, 7)
    async with positions.once_all(aconnection, [message(7), message(8)]) as found:
        assert [each.position for each in found] == [8]
    assert effects.all() == [5, 7]
    async with aconnection.transaction():
        assert await positions.unfence(aconnection, "orders") == 0
        assert await positions.forget(aconnection, "orders") == 1


@pytest.mark.anyio
async def test_a_cancelled_block_removes_effect_and_position(aconnection: AsyncConnection, effects: Effects) -> None:
    positions = Positions("books", schema=effects.schema)
    inside = asyncio.Event()

    async def handler() -> None:
        async with positions.once(aconnection, message(5)):
            await effects.add_async(aconnection, 5)
            inside.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(handler())
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert effects.all() == []
    async with positions.once(aconnection, message(5)) as fresh:
        assert fresh


def test_a_claim_joins_the_callers_transaction(connection: Connection, effects: Effects) -> None:
    positions = Positions("books", schema=effects.schema)
    assert positions.claim(connection, message(1))
    effects.add(connection, 1)
    connection.rollback()
    assert positions.claim(connection, message(1))
    connection.commit()
    with connection.transaction():
        assert positions.claim_all(connection, [message(1), message(2)])[0].position == 2
    assert not positions.claim(connection, message(2))


def test_invalid_names_are_refused() -> None:
    for name in ("", "x" * 201, "a\0b", "\ud800", b"books", None):
        with pytest.raises(ConfigError, match="subscription="):
            Positions(name)  # type: ignore[arg-type]
    for name in ("", "x" * 64, "a\0b", None):
        with pytest.raises(ConfigError, match="schema="):
            Positions("books", schema=name)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match='use "key", "message" or "partition"'):
        Positions("books", by="row")  # type: ignore[arg-type]


def test_a_name_may_have_any_characters(postgres: PostgresServer, connection: Connection) -> None:
    name = 'Odd "name" %s {schema} ; ü'
    migrate(connection, schema=name)
    try:
        positions = Positions(name, schema=name)
        odd = message(1, b"k", partition(0, topic=name))
        for expected in (True, False):
            with positions.once(connection, odd) as fresh:
                assert fresh is expected
    finally:
        connection.execute(psycopg.sql.SQL("DROP SCHEMA {} CASCADE").format(psycopg.sql.Identifier(name)))


def test_positions_have_a_repr_and_can_be_pickled(connection: Connection, effects: Effects) -> None:
    positions = pickle.loads(pickle.dumps(Positions("books", schema=effects.schema)))
    assert repr(positions) == f"<Positions of 'books' by key in the schema {effects.schema!r}>"
    assert handle(positions, connection, effects, message(1)) == [True]
    assert SCHEMA in repr(Positions("books"))
