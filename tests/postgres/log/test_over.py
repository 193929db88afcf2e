"""``Log.over`` reads a table of the user in the order of the commits, and only with its trigger."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import anyio
import psycopg
import pytest

from lanes import Consumer, Message
from lanes.cli import app as cli
from lanes.core.types import Room
from lanes.errors import ConfigError
from lanes.ownership import LocalLocks
from lanes.source import Assigned, Delivered, Progressed, SourceEvent
from lanes_postgres import Columns, Log, PostgresSource, Record, migrate
from lanes_postgres.cli.retention import trim
from tests.components import PostgresServer
from tests.postgres.log.test_subscriptions import Seen, consuming, until

pytestmark = pytest.mark.anyio

COLUMNS = Columns(key="customer", value="payload", time="created", subject="kind", headers="extra")


class Outbox:
    """A table of the user, and a log over it."""

    def __init__(self, server: PostgresServer, schema: str) -> None:
        self.url, self.schema, self.table = server.url, schema, f"{schema}.outbox"
        with psycopg.connect(self.url) as connection:
            migrate(connection, schema=schema)
        self.execute(
            f"CREATE TABLE {self.table} (id bigserial PRIMARY KEY, customer text, payload jsonb, kind text, "
            "extra jsonb, created timestamptz NOT NULL DEFAULT now())"
        )
        self.log = self.over()

    def over(self, **arguments: Any) -> Log:
        given: dict[str, Any] = {
            "columns": COLUMNS,
            "name": "outbox",
            "partitions": 4,
            "schema": self.schema,
        } | arguments
        return Log.over(self.table, **given)

    def create(self) -> None:
        with psycopg.connect(self.url) as connection:
            self.log.create(connection)

    def execute(self, text: str, *parameters: object) -> list[Any]:
        with psycopg.connect(self.url) as connection:
            cursor = connection.execute(text, parameters or None)
            return cursor.fetchall() if cursor.description else []

    def insert(self, connection: psycopg.Connection[Any], customer: str | None, number: int) -> None:
        connection.execute(
            f"INSERT INTO {self.table} (customer, payload) VALUES (%s, %s::jsonb)", (customer, str(number))
        )

    def commit(self, customer: str | None, number: int) -> None:
        with psycopg.connect(self.url) as connection:
            self.insert(connection, customer, number)

    def source(self, **arguments: Any) -> PostgresSource:
        return PostgresSource(self.url, self.log, subscription="billing", poll_interval=0.05, **arguments)


@pytest.fixture
def outbox(postgres: PostgresServer, schema: str) -> Outbox:
    return Outbox(postgres, schema)


async def ignore(message: Message) -> None: ...


async def test_rows_are_read_in_the_order_of_the_commits_of_their_key(outbox: Outbox) -> None:
    outbox.commit("ann", -1)  # before the trigger, so no message
    outbox.create()
    outbox.create()  # idempotent
    with psycopg.connect(outbox.url) as late:
        outbox.insert(late, "ann", 1)
        outbox.commit("ann", 0)
        late.commit()
    outbox.commit("bob", 0)
    outbox.commit(None, 7)
    with psycopg.connect(outbox.url) as undone:
        outbox.insert(undone, "ann", 99)
        undone.rollback()
    outbox.execute(
        f"INSERT INTO {outbox.table} (customer, payload, kind, extra, created) VALUES ('ann', '2', 'sold', "
        '\'{"trace": "x", "none": null}\', \'2026-01-01T00:00:00Z\')'
    )
    seen: list[Message] = []

    async def handler(message: Message) -> None:
        seen.append(message)

    async with consuming(outbox.source(), handler):
        await until(lambda: len(seen) == 5)
    assert [message.value for message in seen if message.key == b"ann"] == [b"0", b"1", b"2"]
    assert {message.key for message in seen} == {b"ann", b"bob", None}
    assert len({message.partition.id.number for message in seen if message.key == b"ann"}) == 1
    (last,) = [message for message in seen if message.value == b"2"]
    assert last.subject == "sold" and sorted(last.headers) == [("none", b""), ("trace", b"x")]
    assert {message.subject for message in seen} == {"sold", "outbox"}


async def test_a_table_without_the_trigger_is_refused_with_the_remedy(outbox: Outbox) -> None:
    with pytest.raises(ConfigError, match=r"has no log 'outbox' over the table .*; call Log\.over\(…\)\.create"):
        await Consumer(outbox.source(), ignore).run()
    outbox.execute(outbox.log.migration())
    with pytest.raises(ConfigError, match=r"'outbx' over the table \S+ \(did you mean 'outbox'\?\); call"):
        await Consumer(PostgresSource(outbox.url, outbox.over(name="outbx"), subscription="billing"), ignore).run()
    outbox.commit("ann", 1)
    seen = Seen()
    async with consuming(outbox.source(), seen):
        await until(lambda: seen.values == ["1"])
    for statement, remedy in (
        ("DISABLE TRIGGER lanes_log_ticket", r"ENABLE TRIGGER lanes_log_ticket"),
        ("ENABLE REPLICA TRIGGER lanes_log_ticket", r"ENABLE TRIGGER lanes_log_ticket"),
    ):
        outbox.execute(f"ALTER TABLE {outbox.table} {statement}")
        with pytest.raises(ConfigError, match=remedy):
            await Consumer(outbox.source(), ignore).run()
    outbox.execute(f"DROP TRIGGER lanes_log_ticket ON {outbox.table}")
    with pytest.raises(ConfigError, match=r"is missing on .*; execute the statement of Log\.over\(…\)\.migration"):
        await Consumer(outbox.source(), ignore).run()
    outbox.execute(outbox.log.migration().replace("%", "%%"))
    outbox.commit("ann", 2)
    async with consuming(outbox.source(), seen):
        await until(lambda: seen.values == ["1", "2"])


def test_the_doctor_looks_at_the_trigger_of_each_table(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outbox.create()
    outbox.execute(f"ALTER TABLE {outbox.table} DISABLE TRIGGER lanes_log_ticket")
    monkeypatch.setattr(
        "sys.argv", ["lanes", "doctor", "postgres", "--dsn", outbox.url, "--schema", outbox.schema, "--json"]
    )
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 3
    (check,) = [each for each in json.loads(capsys.readouterr().out)["checks"] if each["name"] == "trigger"]
    assert check["ok"] is False and outbox.table in check["detail"] and "ENABLE TRIGGER" in check["remedy"]


async def test_deleted_rows_are_not_delivered(outbox: Outbox) -> None:
    outbox.create()
    for number in range(9):
        outbox.commit("ann", number)
    outbox.execute(f"DELETE FROM {outbox.table} WHERE payload IN ('0', '1', '4', '8')")
    seen = Seen()
    async with consuming(outbox.source(), seen) as consumer:
        await until(lambda: len(seen.values) == 5)
        await until(lambda: 9 in consumer.status().floors.values())
        outbox.commit("ann", 9)
        await until(lambda: len(seen.values) == 6)
    assert seen.values == ["2", "3", "5", "6", "7", "9"]


async def test_messages_before_deleted_rows_are_delivered_before_the_position_beyond_them(outbox: Outbox) -> None:
    outbox.create()
    for number in range(10):
        outbox.commit("ann", number)
    outbox.execute(f"DELETE FROM {outbox.table} WHERE payload IN ('7', '8', '9')")
    events: list[SourceEvent] = []

    def delivered() -> list[int]:
        return [message.position for event in events if isinstance(event, Delivered) for message in event.run]

    source = outbox.source(locks=LocalLocks(outbox.schema))
    await source.open()
    try:
        with anyio.fail_after(20):
            while not any(isinstance(event, Assigned) for event in events):
                events += await source.receive(Room(7, 1_000_000))
            await anyio.sleep(0.5)
            while len(delivered()) < 5:
                events += await source.receive(Room(5, 1_000_000))
            # Two messages wait, and there is room to read the three deleted ones.
            await anyio.sleep(0.5)
            while not any(isinstance(event, Progressed) for event in events):
                events += await source.receive(Room(5, 1_000_000))
    finally:
        await source.aclose()
    assert delivered() == list(range(7))
    last = max(number for number, event in enumerate(events) if isinstance(event, Delivered))
    assert next(number for number, event in enumerate(events) if isinstance(event, Progressed)) > last


async def test_a_trim_leaves_the_rows_of_the_user(outbox: Outbox) -> None:
    outbox.create()
    for number in range(5):
        outbox.commit("ann", number)
    seen = Seen()
    async with consuming(outbox.source(), seen):
        await until(lambda: len(seen.values) == 5)
    async with await psycopg.AsyncConnection.connect(outbox.url, autocommit=True) as connection:
        assert await trim(connection, outbox.schema, "outbox", age=3600.0, force=False) == 0
        assert await trim(connection, outbox.schema, "outbox", age=0.0, force=False) == 4
    assert outbox.execute(f"SELECT count(*) FROM {outbox.table}") == [(5,)]


def test_another_user_may_insert_without_a_right_in_the_schema(outbox: Outbox) -> None:
    outbox.create()
    name = f"clerk_{outbox.schema}"
    outbox.execute(f"CREATE ROLE {name} LOGIN")
    outbox.execute(f"GRANT USAGE ON SCHEMA {outbox.schema} TO {name}")
    outbox.execute(f"GRANT INSERT ON {outbox.table} TO {name}")
    outbox.execute(f"GRANT USAGE ON SEQUENCE {outbox.table}_id_seq TO {name}")
    try:
        with psycopg.connect(outbox.url.replace("lanes@", f"{name}@")) as connection:
            outbox.insert(connection, "ann", 1)
        assert outbox.execute(f"SELECT count(*) FROM {outbox.schema}.lanes_log_pending") == [(1,)]
    finally:
        outbox.execute(f"DROP OWNED BY {name}; DROP ROLE {name}")


def test_an_insert_without_triggers_and_an_append_are_refused(outbox: Outbox) -> None:
    outbox.create()
    with psycopg.connect(outbox.url) as connection:
        connection.execute("SET session_replication_role = replica")
        with pytest.raises(psycopg.Error, match="would never be read"):
            outbox.insert(connection, "ann", 1)
    with psycopg.connect(outbox.url) as connection, pytest.raises(ConfigError, match="insert rows there instead"):
        outbox.log.append(connection, [Record("1", "ann")])


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (lambda box: box.over(columns=COLUMNS._replace(key="nobody")), "has no column nobody; name its columns"),
        (
            lambda box: box.over(columns=COLUMNS._replace(id="customer")),
            "customer of table .* is no unique number",
        ),
        (lambda box: box.over(columns=COLUMNS._replace(time="kind")), "kind of table .* is no timestamptz"),
        (
            lambda box: Log.over("absent", schema=box.schema),
            "42P01 .*; create the table, or correct the name given to Log.over$",
        ),
    ],
)
def test_a_table_that_does_not_fit_is_refused(outbox: Outbox, make: Callable[[Outbox], Log], fault: str) -> None:
    with psycopg.connect(outbox.url) as connection, pytest.raises(ConfigError, match=fault):
        make(outbox).create(connection)


def test_a_second_log_and_another_shape_are_refused(outbox: Outbox) -> None:
    outbox.create()
    with psycopg.connect(outbox.url) as connection:
        with pytest.raises(ConfigError, match="is read by another log already"):
            outbox.over(name="other").create(connection)
        with pytest.raises(ConfigError, match=r"exists with 4 partitions over .*; use another name"):
            outbox.over(partitions=5).create(connection)
        Log("own", schema=outbox.schema).create(connection)
        with pytest.raises(ConfigError, match=r"exists with 64 partitions over no table"):
            outbox.over(name="own", partitions=64).create(connection)
    with pytest.raises(ConfigError, match="is not over a table, so it has no migration"):
        Log("own").migration()
    for wrong in ("", "a\0", 3):
        with pytest.raises(ConfigError, match="is not the name of a table"):
            Log.over(wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"pass lanes_postgres\.Columns"):
        Log.over("outbox", columns=("id",))  # type: ignore[arg-type]


def test_the_statement_quotes_its_names() -> None:
    log = Log.over("a'b", columns=Columns(key='k"1', value="v%"), name="it's", schema='s"')
    assert log.migration() == (
        "SELECT \"s\"\"\".\"lanes_log_over\"('it''s', 'a''b'::regclass, 64, 'id', 'k\"1', 'v%', 'time', NULL, NULL)"
    )
