"""``Log.over`` refuses each table and session whose rows would be lost silently, or would lose their order."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import anyio
import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from lanes import Consumer, Message
from lanes.cli.doctor import Check
from lanes.errors import ConfigError
from lanes_postgres import Columns, Log, PostgresSource, migrate, migrations
from lanes_postgres.cli.doctor import examine
from tests.components import PostgresServer
from tests.conftest import PostgresFactory
from tests.postgres.log.test_over import COLUMNS, Outbox
from tests.postgres.log.test_subscriptions import Seen, consuming, until

pytestmark = pytest.mark.anyio


@pytest.fixture
def outbox(postgres: PostgresServer, schema: str) -> Outbox:
    return Outbox(postgres, schema)


@pytest.fixture
def clerk(outbox: Outbox) -> Iterator[str]:
    """A user who may use the schema, and has no other right in it."""
    name = f"clerk_{outbox.schema}"
    outbox.execute(f"CREATE ROLE {name} LOGIN")
    outbox.execute(f"GRANT USAGE ON SCHEMA {outbox.schema} TO {name}")
    yield name
    outbox.execute(f"DROP OWNED BY {name} CASCADE; DROP ROLE {name}")


async def ignore(message: Message) -> None: ...


def create(outbox: Outbox, log: Log) -> None:
    with psycopg.connect(outbox.url) as connection:
        log.create(connection)


def begin_at(outbox: Outbox, version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin with the tables of an older version, and no table of the user."""
    outbox.execute(f"DROP SCHEMA {outbox.schema} CASCADE; CREATE SCHEMA {outbox.schema}")
    known = migrations.migrations()
    monkeypatch.setattr(migrations, "migrations", lambda: known[:version])
    with psycopg.connect(outbox.url) as connection:
        migrate(connection, schema=outbox.schema)
    monkeypatch.undo()


def examined(outbox: Outbox) -> Check:
    """Return the doctor's result about the triggers."""
    checks = anyio.run(examine, outbox.url, outbox.schema)
    (found,) = [check for check in checks if check.name == "trigger"]
    return found


# --- columns


@pytest.mark.parametrize("kind", ["date", "timestamptz", "double precision", "real", "interval", "money", "text[]"])
def test_a_key_whose_text_depends_on_the_session_is_refused(outbox: Outbox, kind: str) -> None:
    """One key would be in two partitions."""
    outbox.execute(f"ALTER TABLE {outbox.table} ADD COLUMN other {kind}")
    with pytest.raises(ConfigError, match=r"column other of table .*, whose text depends on settings of the session"):
        create(outbox, outbox.over(columns=COLUMNS._replace(key="other")))


@pytest.mark.parametrize(
    ("kind", "value"),
    [("uuid", "gen_random_uuid()"), ("numeric", "1.50"), ("{}.mood", "'a'"), ("{}.digest", r"'\x00ff'")],
)
def test_a_key_of_another_type_is_in_one_partition(outbox: Outbox, kind: str, value: str) -> None:
    outbox.execute(f"CREATE TYPE {outbox.schema}.mood AS ENUM ('a'); CREATE DOMAIN {outbox.schema}.digest AS bytea")
    outbox.execute(f"ALTER TABLE {outbox.table} ADD COLUMN other {kind.format(outbox.schema)}")
    create(outbox, outbox.over(columns=COLUMNS._replace(key="other"), partitions=1_000))
    outbox.execute(f"INSERT INTO {outbox.table} (other) VALUES ({value})")
    outbox.execute(
        f"SET bytea_output = 'escape'; INSERT INTO {outbox.table} (other) SELECT other FROM {outbox.table} LIMIT 1"
    )
    ((count,),) = outbox.execute(f"SELECT count(DISTINCT partition) FROM {outbox.schema}.lanes_log_pending")
    assert count == 1


@pytest.mark.parametrize("kind", ["text", "json"])
def test_headers_of_another_type_than_jsonb_are_refused(outbox: Outbox, kind: str) -> None:
    """One row whose text is no JSON would stop every subscription at its partition."""
    outbox.execute(f"ALTER TABLE {outbox.table} ADD COLUMN other {kind}")
    with pytest.raises(ConfigError, match=rf"column other of table .* is a {kind}; headers need jsonb"):
        create(outbox, outbox.over(columns=COLUMNS._replace(headers="other")))


def test_an_id_that_may_be_null_is_refused(outbox: Outbox) -> None:
    outbox.execute(f"ALTER TABLE {outbox.table} ADD COLUMN other bigint UNIQUE")
    with pytest.raises(ConfigError, match=r"column other of table .* is no unique number that is NOT NULL"):
        create(outbox, outbox.over(columns=COLUMNS._replace(id="other")))


async def test_a_column_may_have_a_dollar_in_its_name(outbox: Outbox) -> None:
    outbox.execute(f'ALTER TABLE {outbox.table} RENAME customer TO "cu$t%"')
    outbox.execute(f'ALTER TABLE {outbox.table} RENAME payload TO "$1"')
    outbox.execute(f'ALTER TABLE {outbox.table} RENAME id TO "$body$"')
    outbox.log = outbox.over(columns=COLUMNS._replace(id="$body$", key="cu$t%", value="$1"))
    outbox.create()
    outbox.execute(f"INSERT INTO {outbox.table} (\"cu$t%\", \"$1\") VALUES ('ann', '1')")
    seen: list[Message] = []

    async def handler(message: Message) -> None:
        seen.append(message)

    async with consuming(outbox.source(), handler):
        await until(lambda: seen)
    assert (seen[0].key, seen[0].value) == (b"ann", b"1")


# --- two at once


def test_calls_of_create_at_once_wait_for_each_other(outbox: Outbox) -> None:
    with ThreadPoolExecutor(6) as threads:
        for _ in range(3):
            for each in [threads.submit(outbox.create) for _ in range(6)]:
                each.result()


@pytest.mark.parametrize("level", [psycopg.IsolationLevel.REPEATABLE_READ, psycopg.IsolationLevel.SERIALIZABLE])
def test_create_at_another_isolation_level_sees_a_log_that_was_just_made(
    outbox: Outbox, level: psycopg.IsolationLevel
) -> None:
    with psycopg.connect(outbox.url) as connection:
        connection.isolation_level = level
        outbox.log.create(connection)
        Log("own", schema=outbox.schema).create(connection)
        with pytest.raises(psycopg.Error, match="execute lanes_log_over in a transaction of READ COMMITTED"):
            connection.execute(outbox.log.migration())


async def test_the_name_of_a_log_over_another_table_is_refused(outbox: Outbox) -> None:
    outbox.create()
    outbox.execute(f"CREATE TABLE {outbox.table}2 (LIKE {outbox.table} INCLUDING ALL)")
    other = Log.over(f"{outbox.table}2", columns=COLUMNS, name="outbox", schema=outbox.schema)
    with pytest.raises(ConfigError, match=r"reads the table .*\.outbox, and not .*\.outbox2; use another name="):
        await Consumer(PostgresSource(outbox.url, other, subscription="billing"), ignore).run()


# --- rights


def test_no_user_forges_a_message_of_a_table(outbox: Outbox, clerk: str) -> None:
    """A trigger fires without a right on its function, and the function writes with the rights of its owner."""
    outbox.create()
    ((number,),) = outbox.execute(f"SELECT id FROM {outbox.schema}.lanes_logs")
    with psycopg.connect(outbox.url.replace("lanes@", f"{clerk}@")) as connection:
        connection.execute("CREATE TEMPORARY TABLE forged (id bigint, customer text)")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute(
                "CREATE TRIGGER forge AFTER INSERT ON forged FOR EACH ROW "
                f"EXECUTE FUNCTION {outbox.schema}.lanes_log_ticket_{number}()"
            )


def test_the_owner_of_a_partitioned_table_adds_partitions(
    outbox: Outbox, clerk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new partition copies the trigger, which needs a right of the user on its function."""
    begin_at(outbox, 8, monkeypatch)
    outbox.execute(
        f"CREATE TABLE {outbox.table} (id bigint PRIMARY KEY, customer text, payload jsonb, kind text, extra jsonb, "
        "created timestamptz NOT NULL DEFAULT now()) PARTITION BY RANGE (id)"
    )
    outbox.execute(f"GRANT ALL ON SCHEMA {outbox.schema} TO {clerk}; ALTER TABLE {outbox.table} OWNER TO {clerk}")
    outbox.create()
    with psycopg.connect(outbox.url.replace("lanes@", f"{clerk}@"), autocommit=True) as owner:
        for number, step in enumerate(("before", "migrate", "create")):
            if step == "migrate":
                with psycopg.connect(outbox.url) as connection:
                    assert migrate(connection, schema=outbox.schema)[:3] == [
                        "log_guards_over",
                        "ring",
                        "log_over_upkeep",
                    ]
            elif step == "create":
                outbox.create()
            owner.execute(
                f"CREATE TABLE {outbox.table}_{number} PARTITION OF {outbox.table} "
                f"FOR VALUES FROM ({number}) TO ({number + 1})"
            )
            owner.execute(f"INSERT INTO {outbox.table} (id, customer, payload) VALUES ({number}, 'ann', '1')")
    assert outbox.execute(f"SELECT batch FROM {outbox.schema}.lanes_log_pending ORDER BY 1") == [(0,), (1,), (2,)]


def test_owners_of_partitions_add_partitions_and_a_former_owner_forges_no_message(outbox: Outbox, clerk: str) -> None:
    """The right on the trigger's function follows the owners, and the doctor names the statement that mends it."""
    outbox.execute(f"DROP TABLE {outbox.table}")
    columns = "id bigint PRIMARY KEY, customer text, payload jsonb, kind text, extra jsonb, created timestamptz"
    outbox.execute(f"CREATE TABLE {outbox.table} ({columns}) PARTITION BY RANGE (id)")
    outbox.execute(
        f"CREATE TABLE {outbox.table}_low PARTITION OF {outbox.table} FOR VALUES FROM (0) TO (10) "
        "PARTITION BY RANGE (id)"
    )
    outbox.execute(f"GRANT ALL ON SCHEMA {outbox.schema} TO {clerk}")
    outbox.create()
    outbox.execute(f"ALTER TABLE {outbox.table}_low OWNER TO {clerk}")
    check = examined(outbox)
    assert check.ok is None and f"{clerk} cannot add a partition to {outbox.table}" in check.detail
    assert "Log.over(…).migration() again" in check.remedy
    outbox.create()
    assert examined(outbox).ok is True
    with psycopg.connect(outbox.url.replace("lanes@", f"{clerk}@"), autocommit=True) as owner:
        owner.execute(f"CREATE TABLE {outbox.table}_1 PARTITION OF {outbox.table}_low FOR VALUES FROM (1) TO (2)")
    outbox.execute(f"INSERT INTO {outbox.table} (id, customer, payload) VALUES (1, 'ann', '1')")
    assert outbox.execute(f"SELECT batch FROM {outbox.schema}.lanes_log_pending") == [(1,)]

    outbox.execute(f"ALTER TABLE {outbox.table}_low OWNER TO lanes")
    check = examined(outbox)
    assert check.ok is None and f"{clerk} may forge messages of {outbox.table}" in check.detail
    outbox.create()
    assert examined(outbox).ok is True
    ((number,),) = outbox.execute(f"SELECT id FROM {outbox.schema}.lanes_logs")
    function = f"{outbox.schema}.lanes_log_ticket_{number}()"
    assert outbox.execute(f"SELECT has_function_privilege('{clerk}', '{function}', 'EXECUTE')") == [(False,)]


@pytest.mark.parametrize("version", [8, 9])
@pytest.mark.parametrize("columns", [COLUMNS, Columns(key="customer", value="payload", time="created")])
async def test_an_upgrade_makes_the_trigger_and_the_view_of_each_log_anew(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch, version: int, columns: Columns
) -> None:
    begin_at(outbox, version, monkeypatch)
    columns = columns._replace(id="no", value='pay{TARGETENTRY "load')
    outbox.execute(
        f'CREATE TABLE {outbox.table} (gone int, extra jsonb, "pay{{TARGETENTRY ""load" jsonb, no bigserial UNIQUE, '
        "customer text, kind text, created timestamptz NOT NULL DEFAULT now())"
    )
    outbox.execute(f"ALTER TABLE {outbox.table} DROP gone")
    outbox.log = outbox.over(columns=columns)
    outbox.create()
    ((number,),) = outbox.execute(f"SELECT id FROM {outbox.schema}.lanes_logs")
    ((view,),) = outbox.execute(f"SELECT pg_get_viewdef('{outbox.schema}.lanes_log_over_{number}'::regclass)")
    with psycopg.connect(outbox.url) as connection:
        migrate(connection, schema=outbox.schema)
    assert outbox.execute(f"SELECT made FROM {outbox.schema}.lanes_logs") == [(11,)]
    ((body, updatable, same),) = outbox.execute(
        "SELECT prosrc, pg_relation_is_updatable(view, false), pg_get_viewdef(view) = %s FROM pg_proc, "
        f"(SELECT '{outbox.schema}.lanes_log_over_{number}'::regclass AS view) AS each "
        f"WHERE pg_proc.oid = '{outbox.schema}.lanes_log_ticket_{number}'::regproc",
        view,
    )
    assert "synchronous_commit" in body and updatable == 0 and same is (version == 9)
    outbox.execute(
        f'INSERT INTO {outbox.table} (customer, "pay{{TARGETENTRY ""load", kind, extra) '
        "VALUES ('ann', '1', 'sold', '{\"trace\": \"x\"}'), ('bob', '2', 'sold', '7')"
    )
    seen: list[Message] = []

    async def handler(message: Message) -> None:
        seen.append(message)

    async with consuming(outbox.source(), handler):
        await until(lambda: len(seen) == 2)
    subject, headers = ("sold", [("trace", b"x")]) if columns.subject else ("outbox", [])
    found = sorted((message.key, message.value, message.subject, list(message.headers)) for message in seen)
    assert found == [(b"ann", b"1", subject, headers), (b"bob", b"2", subject, [])]


async def test_a_log_that_an_upgrade_left_as_it_was_is_named_at_each_start(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its key is of a type that is refused today, so one key would be in two partitions."""
    begin_at(outbox, 8, monkeypatch)
    outbox.execute(
        f"CREATE TABLE {outbox.table} (id bigserial PRIMARY KEY, customer date, payload jsonb, kind text, extra jsonb, "
        "created timestamptz NOT NULL DEFAULT now())"
    )
    outbox.create()
    with psycopg.connect(outbox.url) as connection:
        assert "log_over_upkeep" in migrate(connection, schema=outbox.schema)
    outbox.commit("2026-01-01", 1)
    seen = Seen()
    async with consuming(outbox.source(), seen):
        await until(lambda: seen.values == ["1"])
    (said,) = [each.getMessage() for each in caplog.records if "those of an older lanes" in each.getMessage()]
    assert outbox.table in said and "Log.over(…).migration() again" in said
    check = await anyio.to_thread.run_sync(examined, outbox)
    assert check.ok is None and "those of an older lanes" in check.detail


def test_a_grant_on_all_tables_of_the_schema_gives_no_right_to_write_the_rows(outbox: Outbox, clerk: str) -> None:
    outbox.execute(f"ALTER TABLE {outbox.table} SET SCHEMA public")
    try:
        outbox.execute(f"ALTER TABLE public.outbox RENAME TO outbox_{outbox.schema}")
        outbox.table = f"public.outbox_{outbox.schema}"
        outbox.log = outbox.over()
        outbox.create()
        ((number,),) = outbox.execute(f"SELECT id FROM {outbox.schema}.lanes_logs")
        outbox.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA {outbox.schema} TO {clerk}")
        outbox.commit("ann", 1)
        view = f"{outbox.schema}.lanes_log_over_{number}"
        with psycopg.connect(outbox.url.replace("lanes@", f"{clerk}@"), autocommit=True) as connection:
            assert connection.execute(f"SELECT count(*) FROM {view}").fetchone() == (1,)
            with pytest.raises(psycopg.Error, match="cannot delete from view"):
                connection.execute(f"DELETE FROM {view}")
    finally:
        outbox.execute(f"DROP TABLE {outbox.table} CASCADE")


async def test_a_name_without_a_schema_means_the_table_of_the_log(outbox: Outbox) -> None:
    """Another session may have another search_path, on which the name is missing, or is another table."""
    over = partial(Log.over, "outbox", columns=COLUMNS, name="outbox", schema=outbox.schema)
    with psycopg.connect(outbox.url) as connection:
        connection.execute(f"SET search_path TO {outbox.schema}")
        connection.commit()
        over().create(connection)
    outbox.log, seen = over(), Seen()
    async with consuming(outbox.source(), seen):
        outbox.commit("ann", 1)
        await until(lambda: seen.values == ["1"])
    outbox.execute(f"CREATE SCHEMA {outbox.schema}_2; CREATE TABLE {outbox.schema}_2.outbox ()")
    outbox.log = over()
    outbox.url = make_conninfo(outbox.url, options=f"-csearch_path={outbox.schema}_2")
    with pytest.raises(ConfigError, match=r"reads the table .*\.outbox, and not outbox; use another name="):
        await Consumer(outbox.source(), ignore).run()


async def test_a_row_security_that_hides_rows_is_refused(outbox: Outbox, clerk: str) -> None:
    """The source would pass hidden rows like deleted rows."""
    outbox.create()
    ((number,),) = outbox.execute(f"SELECT id FROM {outbox.schema}.lanes_logs")
    outbox.execute(f"ALTER VIEW {outbox.schema}.lanes_log_over_{number} OWNER TO {clerk}")
    outbox.execute(f"GRANT SELECT ON {outbox.table} TO {clerk}")
    outbox.commit("ann", 1)
    seen = Seen()
    async with consuming(outbox.source(), seen):
        await until(lambda: seen.values == ["1"])
    outbox.execute(f"ALTER TABLE {outbox.table} ENABLE ROW LEVEL SECURITY")
    refused = rf"the row security of .*\.outbox may hide rows from {clerk}, the owner of the view"
    with pytest.raises(ConfigError, match=refused):
        await Consumer(outbox.source(), ignore).run()
    outbox.execute(f"GRANT CREATE ON SCHEMA {outbox.schema} TO {clerk}")
    outbox.execute(f"ALTER TABLE {outbox.table} OWNER TO {clerk}")
    async with consuming(outbox.source(), seen):
        outbox.commit("ann", 2)
        await until(lambda: seen.values == ["1", "2"])
    outbox.execute(f"ALTER TABLE {outbox.table} FORCE ROW LEVEL SECURITY")
    with pytest.raises(ConfigError, match=r"ALTER TABLE .*\.outbox NO FORCE ROW LEVEL SECURITY"):
        await Consumer(outbox.source(), ignore).run()


# --- sessions


def test_a_superuser_that_has_set_a_role_is_refused_without_triggers(outbox: Outbox, clerk: str) -> None:
    """The server hides the type of its process then."""
    outbox.create()
    outbox.execute(f"GRANT INSERT ON {outbox.table} TO {clerk}; GRANT USAGE ON {outbox.table}_id_seq TO {clerk}")
    with psycopg.connect(outbox.url) as connection:
        connection.execute("SET session_replication_role = replica")
        connection.execute(f"SET ROLE {clerk}")
        with pytest.raises(psycopg.Error, match="would never be read"):
            outbox.insert(connection, "ann", 1)


def test_a_message_is_on_the_disk_when_it_becomes_visible(outbox: Outbox) -> None:
    """Also for an appender that does not wait for its COMMIT, so that no crash undoes a message that was handled."""
    outbox.create()
    with psycopg.connect(outbox.url, autocommit=True) as connection:
        connection.execute("SET synchronous_commit = off")
        for _ in range(5):
            with connection.transaction():
                outbox.insert(connection, "ann", 1)
                written = connection.execute("SELECT pg_current_wal_insert_lsn()").fetchone()
            assert connection.execute("SELECT pg_current_wal_flush_lsn() >= %s", written).fetchone() == (True,)


async def test_rows_of_a_logical_replication_are_read_or_the_table_is_refused(
    fresh_postgres: PostgresFactory, schema: str
) -> None:
    """A worker fires only a trigger that is enabled always. It is the one session without triggers that may insert."""
    server = fresh_postgres(settings=("wal_level=logical",))
    outbox = Outbox(server, schema)
    outbox.create()
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("CREATE DATABASE origin")
    with psycopg.connect(server.url_of("origin"), autocommit=True) as origin:
        origin.execute(f"CREATE SCHEMA {schema}")
        origin.execute(
            f"CREATE TABLE {outbox.table} (id bigserial PRIMARY KEY, customer text, payload jsonb, kind text, "
            "extra jsonb, created timestamptz NOT NULL DEFAULT now())"
        )
        origin.execute(f"CREATE PUBLICATION rows FOR TABLE {outbox.table}")
        origin.execute("SELECT pg_create_logical_replication_slot('rows', 'pgoutput')")
        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute(
                f"CREATE SUBSCRIPTION rows CONNECTION '{server.url_of('origin')}' PUBLICATION rows "
                "WITH (create_slot = false, slot_name = 'rows')"
            )
        with pytest.raises(
            ConfigError, match=r"logical replication .*; ALTER TABLE .* ENABLE ALWAYS TRIGGER lanes_log"
        ):
            await Consumer(outbox.source(), ignore).run()
        outbox.execute(f"ALTER TABLE {outbox.table} ENABLE ALWAYS TRIGGER lanes_log_ticket")
        seen = Seen()
        async with consuming(outbox.source(), seen):
            origin.execute(f"INSERT INTO {outbox.table} (customer, payload) VALUES ('ann', '7')")
            await until(lambda: seen.values == ["7"])


async def test_rows_that_a_logical_replication_inserts_into_a_partition_are_read_or_the_table_is_refused(
    fresh_postgres: PostgresFactory, schema: str
) -> None:
    """The worker inserts into the partition by its own name, and never names the table of the log."""
    server = fresh_postgres(settings=("wal_level=logical",))
    outbox = Outbox(server, schema)
    columns = "id bigint PRIMARY KEY, customer text, payload jsonb, kind text, extra jsonb, created timestamptz"
    outbox.execute(f"DROP TABLE {outbox.table}; CREATE TABLE {outbox.table} ({columns}) PARTITION BY RANGE (id)")
    outbox.execute(f"CREATE TABLE {outbox.table}_1 PARTITION OF {outbox.table} FOR VALUES FROM (0) TO (100)")
    outbox.create()
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("CREATE DATABASE origin")
    with psycopg.connect(server.url_of("origin"), autocommit=True) as origin:
        origin.execute(f"CREATE SCHEMA {schema}; CREATE TABLE {outbox.table}_1 ({columns})")
        origin.execute(f"CREATE PUBLICATION rows FOR TABLE {outbox.table}_1")
        origin.execute("SELECT pg_create_logical_replication_slot('rows', 'pgoutput')")
        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute(
                f"CREATE SUBSCRIPTION rows CONNECTION '{server.url_of('origin')}' PUBLICATION rows "
                # A first copy would wait in the publisher, which is this server, for the ALTER that waits for the copy.
                "WITH (create_slot = false, slot_name = 'rows', copy_data = false)"
            )
        with pytest.raises(
            ConfigError, match=r"logical replication inserts into .*outbox_1.*; ALTER TABLE .*\.outbox ENABLE ALWAYS"
        ):
            await Consumer(outbox.source(), ignore).run()
        outbox.execute(f"ALTER TABLE {outbox.table} ENABLE ALWAYS TRIGGER lanes_log_ticket")
        seen = Seen()
        async with consuming(outbox.source(), seen):
            origin.execute(
                f"INSERT INTO {outbox.table}_1 (id, customer, payload, created) VALUES (1, 'ann', '7', now())"
            )
            await until(lambda: seen.values == ["7"])
