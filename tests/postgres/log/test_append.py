"""``Log.create`` and ``Log.append``: the transaction of the caller, and errors that name the fault."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest

from lanes.core import ring
from lanes.errors import ConfigError
from lanes_postgres import Log, Record
from lanes_postgres.log.appending import headers_of, headers_text
from tests.components import PostgresServer
from tests.postgres.log.logs import Logs
from tests.postgres.tables import requests


def test_a_rollback_of_the_caller_takes_messages_and_effects_back(logs: Logs) -> None:
    logs.execute("CREATE TABLE {}.sold (id integer)")
    with contextlib.suppress(ZeroDivisionError), logs.connect() as connection:
        connection.execute(logs.query("INSERT INTO {}.sold VALUES (1)"))
        logs.append(connection, "1")
        raise ZeroDivisionError
    assert logs.values() == []
    assert logs.execute("SELECT count(*) FROM {}.sold") == [(0,)]


EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.anyio
async def test_an_asynchronous_append_is_awaited(logs: Logs) -> None:
    async with await psycopg.AsyncConnection.connect(logs.url) as connection:
        await logs.log.append(connection, [Record("1", "k"), Record("2", "k")])
        await logs.log.append(connection, [])
    assert logs.values() == ["1", "2"]


def test_messages_of_one_call_keep_their_order_in_each_partition(four: Logs) -> None:
    with four.connect() as connection:
        four.log.append(connection, [Record(str(number), str(number % 7)) for number in range(50)])
    found = four.read()
    for partition, values in found.items():
        expected = [str(number) for number in range(50) if ring.partition(str(number % 7), 4) == partition]
        assert values == expected
    assert sum(map(len, found.values())) == 50


def test_rows_have_slot_time_subject_and_headers(logs: Logs) -> None:
    time = datetime(2026, 1, 2, tzinfo=UTC)
    with logs.connect() as connection:
        logs.log.append(connection, [Record(b"\x00\xff", 42, "paid", (("kind", b"\xff"),), time), Record("x")])
    rows = logs.execute("SELECT slot, time, key, subject, headers, value FROM {}.lanes_log_messages ORDER BY index")
    assert rows[0][:4] == (ring.slot(42), time, (42).to_bytes(16, "little"), "paid")
    assert rows[0][5] == b"\x00\xff"
    assert rows[1][0] is None
    assert rows[1][2:4] == (None, "orders")


@pytest.mark.parametrize("value", [b"", b"text", "ä".encode(), b"\xff\x00", b"a\x00b"])
def test_headers_survive(value: bytes, logs: Logs) -> None:
    headers = [("trace", value), ("trace", b"again")]
    with logs.connect() as connection:
        logs.log.append(connection, [Record("1", "k", headers=headers)])
    ((stored,),) = logs.execute("SELECT headers FROM {}.lanes_log_messages")
    assert headers_of(stored) == headers
    assert headers_text((), "message") is None


def test_create_is_idempotent_and_refuses_another_number_of_partitions(four: Logs) -> None:
    with four.connect() as connection:
        again = four.log.create(connection)
        assert Log("orders", schema=four.schema).create(connection) == again
        with pytest.raises(ConfigError, match=r"has 4 partitions, but partitions=5 differs"):
            Log("orders", partitions=5, schema=four.schema).create(connection)


def test_a_missing_log_is_named(logs: Logs) -> None:
    with logs.connect() as connection, pytest.raises(ConfigError, match=r"has no log 'other'; call Log\('other'\)"):
        Log("other", schema=logs.schema).append(connection, [Record("1")])


def test_a_missing_log_is_named_with_a_similar_log(logs: Logs) -> None:
    said = r"has no log 'ordrs' \(did you mean 'orders'\?\); call Log\('ordrs'\)\.create"
    with logs.connect() as connection, pytest.raises(ConfigError, match=said):
        Log("ordrs", schema=logs.schema).append(connection, [Record("1")])


def test_a_missing_schema_names_migrate(postgres: PostgresServer, schema: str) -> None:
    with psycopg.connect(postgres.url) as connection, pytest.raises(ConfigError, match=r"lanes_postgres\.migrate"):
        Log("orders", schema=schema).append(connection, [Record("1")])


def test_a_missing_log_in_a_transaction_names_no_claim(logs: Logs) -> None:
    with logs.connect() as connection:
        connection.execute("SELECT 1")
        with pytest.raises(ConfigError, match=r"in a transaction or a pipeline already \(INTRANS\); end it first$"):
            Log("other", schema=logs.schema).create(connection)


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["append", "create", "notify"])
async def test_a_missing_await_names_the_call(logs: Logs, name: str) -> None:
    async with await psycopg.AsyncConnection.connect(logs.url) as connection:
        log = Log("orders", schema=logs.schema)
        calls: dict[str, Callable[[], object]] = {
            "append": lambda: log.append(connection, [Record("1")]),
            "create": lambda: log.create(connection),
            "notify": lambda: log.notify(connection),
        }
        with pytest.warns(RuntimeWarning, match=f"coroutine 'Log.{name}' was never awaited"):
            calls[name]()


def test_an_append_outside_a_transaction_is_refused(logs: Logs) -> None:
    with logs.connect(autocommit=True) as connection:
        with pytest.raises(ConfigError, match=r"and is in no transaction, so Log\.append would be") as refused:
            logs.append(connection, "1")
        # An append has no position, and no method with its own transaction.
        assert str(refused.value).endswith("Make the call inside `with connection.transaction():`")
        with connection.transaction():
            logs.append(connection, "1")
    assert logs.values() == ["1"]


@pytest.mark.parametrize("autocommit", [False, True])
def test_a_notification_inside_a_transaction_is_refused(logs: Logs, autocommit: bool) -> None:
    """At its COMMIT it would take a lock of the whole server."""
    with logs.connect(autocommit=autocommit) as connection:
        logs.log.notify(connection)
        with connection.transaction(), pytest.raises(ConfigError, match=r"call notify\(\) after the COMMIT"):
            logs.log.notify(connection)
        logs.log.notify(connection)


@pytest.mark.anyio
@pytest.mark.parametrize("autocommit", [False, True])
async def test_a_notification_is_one_request(logs: Logs, autocommit: bool) -> None:
    with logs.connect(autocommit=autocommit) as connection:
        with requests(connection) as sent:
            logs.log.notify(connection)
        assert len(sent) == 1 and connection.autocommit is autocommit
    async with await psycopg.AsyncConnection.connect(logs.url, autocommit=autocommit) as other:
        with requests(other) as sent:
            await logs.log.notify(other)
        assert len(sent) == 1 and other.autocommit is autocommit


@pytest.mark.parametrize(
    ("messages", "fault"),
    [
        (Record("1"), "messages is a single Record; pass a list"),
        ("text", "messages is a single str"),
        (["text"], r"message 0 is a str; pass lanes_postgres\.Record"),
        ([Record(1)], "message 0: the value is a int"),  # type: ignore[arg-type]
        ([Record("1"), Record("1", -1)], r"message 1: an int key must be in 0"),
        ([Record("1", time=EPOCH.replace(tzinfo=None))], "message 0: time=2026-01-01 00:00:00 has no time zone"),
        ([Record("1", time="now")], r"message 0: time='now' is not a datetime; use datetime\.now\(UTC\)"),  # type: ignore[arg-type]
        ([Record("1", subject="a\0")], "message 0: subject="),
        ([Record("1", headers=[("a", "text")])], "message 0: the header 'a' must have a str name and a bytes value"),  # type: ignore[list-item]
        ([Record("1", headers=["a"])], "message 0: a header must be a pair"),  # type: ignore[list-item]
    ],
)
def test_an_invalid_message_is_refused_before_a_statement(logs: Logs, messages: Any, fault: str) -> None:
    with logs.connect() as connection, pytest.raises(ConfigError, match=fault):
        logs.log.append(connection, messages)
    assert logs.values() == []


@pytest.mark.parametrize("name", ["", "a\0", 3, "x" * 201, "\ud800"])
def test_an_invalid_name_is_refused(name: Any) -> None:
    with pytest.raises(ConfigError, match=r"must be a str of 1 to 200 characters"):
        Log(name)


@pytest.mark.parametrize("partitions", [0, -1, 65_537, True, 1.5, "4"])
def test_an_invalid_number_of_partitions_is_refused(partitions: Any) -> None:
    with pytest.raises(ConfigError, match=r"must be a number in 1 … 65536"):
        Log("orders", partitions=partitions)


def test_a_schema_with_quotes_works(postgres: PostgresServer, schema: str) -> None:
    logs = Logs.make(postgres, f"{schema} \"a'b%")
    logs.commit("1", "2")
    with logs.connect() as connection:
        logs.log.notify(connection)
    assert logs.values() == ["1", "2"]


@pytest.mark.anyio
async def test_the_traceback_of_a_refused_message_ends_at_the_call(logs: Logs) -> None:
    for message in (Record("1", 1.5), Record(1, "k"), "text"):  # type: ignore[arg-type]
        with logs.connect() as connection, pytest.raises(ConfigError, match="message 0") as refused:
            logs.log.append(connection, [message])  # type: ignore[list-item]
        assert [each.name for each in refused.traceback[1:]] in (["append", "inside"], ["append", "_checked"])
        assert refused.value.__cause__ is None
        async with await psycopg.AsyncConnection.connect(logs.url) as opened:
            with pytest.raises(ConfigError, match="message 0") as refused:
                await logs.log.append(opened, [message])  # type: ignore[list-item]
        assert len(refused.traceback) <= 3 and refused.value.__cause__ is None
