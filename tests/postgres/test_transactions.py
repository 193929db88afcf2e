"""Transactions: a connection that cannot hold position and effect together is refused, and concurrent claims wait."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

import psycopg
import pytest
from psycopg import IsolationLevel

from lanes.errors import ConfigError, SourceError
from lanes_postgres import Positions
from lanes_postgres.rows import row_of
from tests.components import PostgresServer, wait_until
from tests.postgres.tables import Effects, message, partition

Connection = psycopg.Connection


Arguments = ParamSpec("Arguments")


Result = TypeVar("Result")


@contextlib.contextmanager
def beside(
    holder: Connection, function: Callable[Arguments, Result], *arguments: Arguments.args, **named: Arguments.kwargs
) -> Iterator[Future[Result]]:
    """Call a function in a thread, where it waits for the holder's lock; the end of the block releases it."""
    with ThreadPoolExecutor(1) as threads:
        try:
            yield threads.submit(function, *arguments, **named)
        finally:
            holder.rollback()


@pytest.fixture
def other(postgres: PostgresServer) -> Iterator[Connection]:
    with psycopg.connect(postgres.url) as connection:
        yield connection


def enter(block: contextlib.AbstractContextManager[Any]) -> None:
    with block:
        pytest.fail("the block should not begin")


def claim(positions: Positions, connection: Connection, position: int = 1) -> bool:
    return positions.claim(connection, message(position))


def fail_quietly(positions: Positions, connection: Connection, effects: Effects) -> None:
    with positions.once(connection, message(1)):
        effects.add(connection, 1)
        with contextlib.suppress(psycopg.Error):
            connection.execute("SELECT 1 / 0")


def waits(effects: Effects, connection: Connection) -> bool:
    """Whether the server reports that this connection waits for a lock."""
    with psycopg.connect(effects.url) as asking:
        found = asking.execute(
            "SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = %s", (connection.info.backend_pid,)
        ).fetchone()
    return found is not None and bool(found[0])


def test_autocommit_without_a_transaction_is_refused(connection: Connection, effects: Effects) -> None:
    positions = Positions("books", schema=effects.schema)
    connection.autocommit = True
    refusing: list[tuple[Callable[[], object], str, str]] = [
        (lambda: positions.claim(connection, message(1)), "Positions.claim", ", or use once()"),
        (lambda: positions.claim_all(connection, [message(1)]), "Positions.claim_all", ", or use once_all()"),
        (lambda: positions.forget(connection, "orders"), "Positions.forget", ""),
        (lambda: positions.unfence(connection, "orders"), "Positions.unfence", ""),
    ]
    for call, name, otherwise in refusing:
        with pytest.raises(ConfigError, match="has autocommit and is in no transaction") as refused:
            call()
        assert str(refused.value).endswith(
            f"so {name} would be committed apart from your own statements. Make the call inside "
            f"`with connection.transaction():`{otherwise}"
        )
    with connection.transaction():
        assert positions.claim(connection, message(1))
    with positions.once(connection, message(1)) as fresh:
        assert not fresh


@pytest.mark.anyio
async def test_asynchronous_autocommit_is_refused(aconnection: Any, effects: Effects) -> None:
    await aconnection.set_autocommit(True)
    with pytest.raises(ConfigError, match=r"has autocommit.* `async with connection\.transaction\(\):`"):
        await Positions("books", schema=effects.schema).claim_all(aconnection, [message(1)])


def test_a_connection_in_a_transaction_or_pipeline_is_refused(connection: Connection, effects: Effects) -> None:
    positions = Positions("books", schema=effects.schema)
    connection.execute("SELECT 1")
    with pytest.raises(ConfigError, match=r"in a transaction or a pipeline already \(INTRANS\).*claim\(\)"):
        enter(positions.once(connection, message(1)))
    connection.rollback()
    with connection.pipeline():
        for refused in (lambda: enter(positions.once(connection, message(1))), lambda: claim(positions, connection)):
            with pytest.raises(ConfigError, match=r"in a.* pipeline"):
                refused()


@pytest.mark.parametrize("given", ["postgresql://me:canary@db/x", None, 5], ids=["url", "none", "int"])
def test_another_object_is_refused_without_its_value(given: Any) -> None:
    with pytest.raises(ConfigError, match="is no connection") as refused:
        Positions("books").claim(given, message(1))
    assert "canary" not in str(refused.value)


def test_a_suppressed_statement_error_is_no_commit(connection: Connection, effects: Effects) -> None:
    positions = Positions("books", schema=effects.schema)
    with pytest.raises(ConfigError, match="its exception did not leave the block"):
        fail_quietly(positions, connection, effects)
    assert effects.all() == []
    with positions.once(connection, message(1)) as fresh:
        assert fresh
        with contextlib.suppress(psycopg.Error), connection.transaction():
            connection.execute("SELECT 1 / 0")
        effects.add(connection, 1)
    assert effects.all() == [1]


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
def test_a_transaction_ended_inside_its_block_is_detected(end: str, connection: Connection, effects: Effects) -> None:
    def ending() -> None:
        with Positions("books", schema=effects.schema).once(connection, message(1)):
            connection.execute(end)

    with pytest.raises(ConfigError, match="ended the transaction inside its block"):
        ending()


def test_a_claim_in_a_failed_transaction_names_the_reason(connection: Connection, effects: Effects) -> None:
    with pytest.raises(psycopg.Error):
        connection.execute("SELECT 1 / 0")
    with pytest.raises(ConfigError, match=r"25P02.*an earlier statement"):
        claim(Positions("books", schema=effects.schema), connection)


def test_errors_of_the_users_statements_pass_unchanged(connection: Connection, effects: Effects) -> None:
    positions = Positions("books", schema=effects.schema)
    connection.execute(effects.query("ALTER TABLE {} ADD UNIQUE (position) DEFERRABLE INITIALLY DEFERRED"))
    connection.commit()

    def twice(*, at_once: bool) -> None:
        with positions.once(connection, message(1)):
            if at_once:
                connection.execute("SET CONSTRAINTS ALL IMMEDIATE")
            effects.add(connection, 1)
            effects.add(connection, 1)

    for at_once in (True, False):
        with pytest.raises(psycopg.errors.UniqueViolation):
            twice(at_once=at_once)
    assert effects.all() == []
    with positions.once(connection, message(1)) as fresh:
        assert fresh


@pytest.mark.parametrize("first_commits", [True, False])
def test_a_concurrent_claim_waits_for_the_outcome(
    first_commits: bool, connection: Connection, other: Connection, effects: Effects
) -> None:
    positions = Positions("books", schema=effects.schema)
    assert claim(positions, connection)
    with beside(connection, claim, positions, other) as second:
        wait_until(lambda: waits(effects, other), "the second claim to wait for the first")
        if first_commits:
            connection.commit()
        else:
            connection.rollback()
        assert second.result() is not first_commits


@pytest.mark.parametrize("level", [IsolationLevel.REPEATABLE_READ, IsolationLevel.SERIALIZABLE], ids=str)
@pytest.mark.parametrize("new", [True, False], ids=["new-key", "known-key"])
def test_a_serialization_failure_is_retryable(
    new: bool, level: IsolationLevel, connection: Connection, other: Connection, effects: Effects
) -> None:
    positions = Positions("books", schema=effects.schema)
    if not new:
        with positions.once(connection, message(1)):
            pass
    other.isolation_level = level
    other.execute(effects.query("SELECT count(*) FROM {}"))  # the query fixes the snapshot of this transaction
    with positions.once(connection, message(2)):
        pass
    with pytest.raises(SourceError, match="40001") as failed:
        claim(positions, other, 2)
    assert failed.value.retryable
    other.rollback()
    assert not claim(positions, other, 2)
    other.rollback()
    with positions.once(other, message(3)) as fresh:
        assert fresh


def test_batches_claim_their_keys_in_one_order(connection: Connection, other: Connection, effects: Effects) -> None:
    positions = Positions("books", schema=effects.schema)
    batch = [message(2, b"%d" % number) for number in range(30)]
    lowest, *rest = sorted(batch, key=lambda each: row_of(each, "key").key)
    with positions.once_all(connection, [message(1, each.key) for each in batch]):
        pass
    assert positions.claim(connection, lowest)
    with beside(connection, positions.claim_all, other, batch) as waiting:
        wait_until(lambda: waits(effects, other), "the batch to wait for the lowest key")
        # The waiting call has locked no other key yet, in spite of the order of its list.
        free = "SELECT count(*) FROM (SELECT 1 FROM {} FOR UPDATE SKIP LOCKED) AS free"
        assert effects.fetch(free, "lanes_positions") == [(len(rest),)]
        connection.commit()
        assert waiting.result() == [each for each in batch if each is not lowest]


def test_a_deadlock_with_the_users_locks_is_retryable(
    connection: Connection, other: Connection, effects: Effects
) -> None:
    positions = Positions("books", schema=effects.schema)
    # The second connection checks for deadlocks first, so the second connection fails.
    connection.execute("SET deadlock_timeout = '10s'")
    other.execute("SET deadlock_timeout = '10ms'")
    connection.commit()
    other.commit()
    for key in (b"a", b"b"):
        with positions.once(connection, message(0, key)):
            pass
    assert positions.claim(connection, message(1, b"a"))
    assert positions.claim(other, message(1, b"b"))
    with beside(other, positions.claim, connection, message(1, b"b")) as waiting:
        wait_until(lambda: waits(effects, connection), "the first claim to wait")
        with pytest.raises(SourceError, match="40P01") as failed:
            positions.claim(other, message(1, b"a"))
        assert failed.value.retryable
        other.rollback()
        assert waiting.result()


def test_a_former_owner_waits_for_the_new_one_and_is_refused(
    connection: Connection, other: Connection, effects: Effects
) -> None:
    positions = Positions("books", schema=effects.schema)
    with positions.once(connection, message(1, b"k", partition(epoch=1))):
        pass
    assert positions.claim(connection, message(2, b"k", partition(epoch=2)))
    with beside(connection, positions.claim, other, message(3, b"k", partition(epoch=1))) as zombie:
        wait_until(lambda: waits(effects, other), "the zombie to wait")
        connection.commit()
        with pytest.raises(SourceError, match="has epoch 1"):
            zombie.result()


def test_overlapping_owners_have_each_effect_once_in_order(postgres: PostgresServer, effects: Effects) -> None:
    positions = Positions("books", schema=effects.schema)
    owners, keys, count = 3, 2, 40
    barrier = threading.Barrier(owners)

    def own(epoch: int | None) -> int:
        owned, refused = partition(epoch=epoch), 0
        with psycopg.connect(postgres.url) as connection:
            barrier.wait(10)
            for number in range(count):
                each = message(number, b"%d" % (number % keys), owned)
                try:
                    with positions.once(connection, each) as fresh:
                        if fresh:
                            effects.add(connection, number, f"{number % keys}")
                except SourceError:
                    refused += 1
        return refused

    with ThreadPoolExecutor(owners) as threads:
        former, newest, unknown = [threads.submit(own, epoch) for epoch in (1, 2, None)]
    assert newest.result() == unknown.result() == 0
    assert former.result() <= count
    for key in range(keys):
        assert effects.all(f"{key}") == list(range(key, count, keys))
