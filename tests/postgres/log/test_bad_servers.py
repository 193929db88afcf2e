"""A log on a server that is wrong, full or without free connections: a clear error, or a consumer that continues."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import anyio
import psycopg
import pytest
from psycopg import sql

from lanes import Consumer, Message
from lanes.errors import ConfigError, SourceError
from lanes_postgres import AdvisoryLocks, Log, PostgresDeadLetters, PostgresSource, Record, migrate, migrations
from tests.components import PostgresServer, wait_until
from tests.conftest import PostgresFactory
from tests.postgres.log.logs import Logs
from tests.postgres.log.test_subscriptions import Seen, consuming, member, until

pytestmark = pytest.mark.anyio

PASSWORD = "canary-password-5e1f"


async def ignore(message: Message) -> None: ...


async def refused(url: str, schema: str, kind: type[Exception], words: str, *, retryable: bool | None = None) -> None:
    """A consumer ends at its start with this error, and so does each other user of the address."""
    source = PostgresSource(url, Log("orders", schema=schema), subscription="billing")
    with pytest.raises(kind, match=words) as found:
        with anyio.fail_after(20):
            await Consumer(source, ignore).run()
    letters = PostgresDeadLetters(url, "billing", schema=schema)
    with pytest.raises(kind, match=words) as second:
        await letters.open()
    for each in (found.value, second.value):
        assert PASSWORD not in str(each) and "\n" not in str(each)
        if retryable is not None:
            assert isinstance(each, SourceError) and each.retryable is retryable


# --- wrong addresses


@pytest.mark.parametrize(
    "dsn",
    [
        f"postgresql://me:{PASSWORD}%zz@host/x",
        f"host=h port='{PASSWORD}'",
        f"host=h port='1\"{PASSWORD}\"'",
        f"host=h password='{PASSWORD}",
    ],
)
def test_an_address_that_cannot_be_read_is_refused_without_its_values(dsn: str) -> None:
    for make in (lambda: AdvisoryLocks(dsn), lambda: PostgresSource(dsn, Log("orders"), subscription="billing")):
        with pytest.raises(ConfigError) as found:
            make()
        assert PASSWORD not in str(found.value)


@pytest.mark.parametrize(
    ("dsn", "fault"),
    [
        (
            f"postgresql://me:{PASSWORD}@h/db?conect_timeout=3",
            'the option "conect_timeout" is unknown (did you mean "connect_timeout"?)',
        ),
        (f"host=h prot=5432 password={PASSWORD}", 'the option "prot" is unknown (did you mean "port"?)'),
        (f"host=h password=my {PASSWORD}=x", "an option is unknown, and its name may be a part of a password"),
        (f"postgresql://me:12/{PASSWORD}@host/x", "an @ follows the first / of the address"),
        (f"postgresql://me:1@{PASSWORD}@host/x", "two @ precede the first / of the address"),
        (f"postgresql://me:1@{PASSWORD}:5@host/x", "two @ precede the first / of the address"),
        (f"postgresql://me:1@h,{PASSWORD}:7@host/x", "two @ precede the first / of the address"),
        (
            f"postgresql+psycopg://me:{PASSWORD}@host/x?a=b",
            ("the scheme postgresql+psycopg:// is not a scheme of PostgreSQL"),
        ),
        ("postgresql:/host/x", "two slashes must follow the scheme, as in postgresql://"),
    ],
)
def test_an_unreadable_address_is_refused_with_its_fault(dsn: str, fault: str) -> None:
    for make in (
        lambda: AdvisoryLocks(dsn),
        lambda: PostgresSource(dsn, Log("orders"), subscription="billing"),
        lambda: PostgresDeadLetters(dsn, "billing"),
    ):
        with pytest.raises(ConfigError) as found:
            make()
        assert f": {fault}" in str(found.value)
        assert "; correct the connection string, such as postgresql://user@host/database" in str(found.value)
        assert PASSWORD not in str(found.value)


SHOP = "host 127.0.0.1, port 9, database shop, user me"


@pytest.mark.parametrize(
    ("dsn", "place"),
    [
        (f"postgresql://me:{PASSWORD}@127.0.0.1:9/shop", SHOP),
        (f"host=127.0.0.1 port=9 dbname=shop user=me password={PASSWORD}", SHOP),
        (f"hostaddr=127.0.0.1 port=9 dbname=shop user=me password='{PASSWORD} x'", SHOP),
        (
            f"host=127.0.0.1 port=9 dbname='{PASSWORD} x' user='me:{PASSWORD}'",
            "host 127.0.0.1, port 9, database …, user …",
        ),
    ],
)
async def test_a_connection_that_fails_names_server_database_and_user_without_the_password(
    dsn: str, place: str
) -> None:
    for using in (
        AdvisoryLocks(dsn),
        PostgresSource(dsn, Log("orders"), subscription="billing"),
        PostgresDeadLetters(dsn, "billing"),
    ):
        with pytest.raises(SourceError) as found:
            await using.open()
        assert f" at {place}: " in str(found.value)
        assert PASSWORD not in str(found.value)
        await using.aclose()


@pytest.mark.parametrize("setting", ["connect_timeout", "keepalives", "sslmode", "target_session_attrs", "port"])
async def test_a_value_that_the_client_quotes_is_masked(setting: str) -> None:
    """A misplaced password is the value of another setting, and the client's error quotes it."""
    dsn = f"host=127.0.0.1 {setting}='{PASSWORD}'"
    with pytest.raises((ConfigError, SourceError)) as found:
        await AdvisoryLocks(dsn).open()
    assert PASSWORD not in str(found.value)
    with pytest.raises((ConfigError, SourceError)) as found:
        await PostgresDeadLetters(dsn, "billing").open()
    assert PASSWORD not in str(found.value)


async def test_a_server_that_does_not_answer_may_answer_later() -> None:
    await refused("postgresql://127.0.0.1:9/x", "lanes", SourceError, "[Cc]onnection refused", retryable=True)


async def test_a_wrong_password_ends_the_start(fresh_postgres: PostgresFactory, schema: str) -> None:
    server = fresh_postgres()
    Logs.make(server, schema)
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("CREATE ROLE clerk LOGIN PASSWORD 'right'")
        ((file,),) = connection.execute("SHOW hba_file").fetchall()
        lines = Path(file).read_text()
        Path(file).write_text(f"host all clerk 127.0.0.1/32 scram-sha-256\n{lines}")
        connection.execute("SELECT pg_reload_conf()")
    url = server.url.replace("lanes@", f"clerk:{PASSWORD}@")

    def says_no() -> bool:
        with contextlib.suppress(psycopg.OperationalError), psycopg.connect(url):
            return False
        return True

    wait_until(says_no, "the server to ask for the password")
    remedy = "password authentication failed .*; correct the connection string, or the users and rights of the server"
    await refused(url, schema, SourceError, remedy, retryable=False)
    locks = AdvisoryLocks(url)
    with pytest.raises(SourceError, match=remedy) as found:
        await locks.open()
    assert not found.value.retryable and PASSWORD not in str(found.value)
    with pytest.raises(SourceError, match='database "absent" does not exist; correct the connection string'):
        await AdvisoryLocks(server.url_of("absent")).open()


# --- wrong schemas and rights


async def test_a_missing_and_an_older_schema_name_migrate(
    postgres: PostgresServer, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await refused(postgres.url, schema, ConfigError, r"no tables of lanes; run lanes_postgres\.migrate")
    known = migrations.migrations()
    monkeypatch.setattr(migrations, "migrations", lambda: known[:4])
    with psycopg.connect(postgres.url) as connection:
        migrate(connection, schema=schema)
    monkeypatch.undo()
    await refused(postgres.url, schema, ConfigError, r"have version 4, and .*; run lanes_postgres\.migrate")


async def test_a_user_without_rights_is_told_the_rights(logs: Logs) -> None:
    name = f"u{logs.schema}"
    with logs.connect(autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(name)))
    try:
        url = logs.url.replace("lanes@", f"{name}@")
        await refused(url, logs.schema, ConfigError, "42501 .*; grant this user USAGE on the schema")
        with psycopg.connect(url) as connection, pytest.raises(ConfigError, match="42501"):
            logs.log.append(connection, [Record("1", "k")])
    finally:
        with logs.connect(autocommit=True) as connection:
            connection.execute(sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(sql.Identifier(name)))


async def test_a_read_only_database_is_refused(logs: Logs) -> None:
    url = f"{logs.url}?options=-c%20default_transaction_read_only%3Don"
    source = PostgresSource(url, logs.log, subscription="billing")
    with pytest.raises(ConfigError, match=r"25006 .*; connect to the primary"):
        with anyio.fail_after(20):
            await Consumer(source, ignore).run()
    with psycopg.connect(url) as connection, pytest.raises(ConfigError, match="25006"):
        logs.append(connection, "1")


# --- sessions without triggers


@pytest.mark.parametrize("raw", [False, True])
def test_an_append_without_triggers_is_refused(logs: Logs, raw: bool) -> None:
    """Its messages would have no ticket, and so never a position."""
    with logs.connect() as connection:
        connection.execute("SET session_replication_role = replica")
        connection.commit()
        if raw:
            copied = logs.query(
                "INSERT INTO {}.lanes_log_messages (batch, index, log, partition, run, time, subject, value) "
                "VALUES (1, 0, 1, 0, 1, now(), 's', '')"
            )
            with pytest.raises(psycopg.Error, match="would never be read"):
                connection.execute(copied)
        else:
            with pytest.raises(
                ConfigError, match=r"LN001 .*; append in a session with session_replication_role=origin"
            ):
                logs.append(connection, "1")
        connection.rollback()
        connection.execute("SET session_replication_role = local")
        connection.commit()
        logs.append(connection, "2")
    assert logs.values() == ["2"]


async def test_a_disabled_trigger_ends_the_start(logs: Logs) -> None:
    logs.execute("ALTER TABLE {}.lanes_log_messages DISABLE TRIGGER lanes_log_ticket")
    remedy = "ENABLE TRIGGER lanes_log_ticket"
    source = PostgresSource(logs.url, logs.log, subscription="billing")
    with pytest.raises(ConfigError, match=remedy):
        await Consumer(source, ignore).run()


# --- the clock


async def test_a_clock_that_was_set_back_keeps_no_dead_member_alive(four: Logs) -> None:
    """The row of a member that has gone is in the future then. All partitions nevertheless have an owner soon."""
    seen = Seen()
    for number in range(8):
        four.commit(str(number), key=str(number))
    async with consuming(member(four), seen) as consumer:
        await until(lambda: len(consumer.status().floors) == 4)
        four.execute(
            "INSERT INTO {}.lanes_subscription_members (log, subscription, member, owned, waits, seen) "
            "SELECT id, 'billing', 'gone', 2, true, clock_timestamp() + interval '1 hour' FROM {}.lanes_logs".replace(
                "{}", "{0}"
            )
        )
        await anyio.sleep(0.5)
        assert len(consumer.status().floors) == 4
    async with consuming(member(four), seen) as consumer:
        await until(lambda: len(consumer.status().floors) == 4)


# --- no free connection, no free space


async def test_a_start_without_a_free_connection_names_the_setting(
    fresh_postgres: PostgresFactory, schema: str
) -> None:
    server = fresh_postgres(settings=("max_connections=4", "superuser_reserved_connections=0", "max_wal_senders=0"))
    Logs.make(server, schema)
    with contextlib.ExitStack() as opened:
        for _ in range(4):
            opened.enter_context(psycopg.connect(server.url))
        remedy = "too many clients already; raise max_connections, or start fewer processes"
        await refused(server.url, schema, SourceError, remedy, retryable=True)


async def test_a_consumer_survives_a_time_without_a_free_connection(
    fresh_postgres: PostgresFactory, schema: str
) -> None:
    server = fresh_postgres(settings=("max_connections=6", "superuser_reserved_connections=0", "max_wal_senders=0"))
    logs = Logs.make(server, schema)
    logs.commit("1")
    seen = Seen()
    async with consuming(member(logs), seen):
        await until(lambda: seen.values == ["1"])
        with psycopg.connect(server.url, autocommit=True) as thief, contextlib.ExitStack() as stolen:
            for _ in range(20):
                thief.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type = 'client backend' "
                    "AND pid <> pg_backend_pid() AND application_name <> 'stolen'"
                )
                with contextlib.suppress(psycopg.OperationalError):
                    while True:
                        stolen.enter_context(psycopg.connect(server.url, application_name="stolen"))
                await anyio.sleep(0.02)
            with thief.transaction():
                logs.append(thief, "2")
            await anyio.sleep(1)
            assert seen.values == ["1"]
        await until(lambda: "2" in seen.values)
    assert list(dict.fromkeys(seen.values)) == ["1", "2"]


@pytest.fixture
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty file system of 12 MiB. Where none may be mounted, the test that fills one table shows the same error."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount a small file system")
    folder = Path(subprocess.check_output(["mktemp", "-d", "/tmp/lanes-small-disk-XXXXXX"], text=True).strip())
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "none", folder], check=False)
    if mounted.returncode != 0:
        folder.rmdir()
        pytest.skip("this machine permits no mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
        folder.rmdir()


def append_large(logs: Logs, number: int, committed: list[str]) -> None:
    """Append a message that the server cannot compress, and so stores in the second file of its table."""
    value = f"{number:06d}" + os.urandom(10_000).hex()
    with logs.connect() as connection:
        logs.append(connection, value)
    committed.append(value)


async def test_a_full_disk_refuses_appends_and_a_consumer_goes_on_later(
    fresh_postgres: PostgresFactory, schema: str, small_disk: Path
) -> None:
    server = fresh_postgres()
    with psycopg.connect(server.url, autocommit=True) as connection:
        ((data,),) = connection.execute("SHOW data_directory").fetchall()
        owner = Path(data).stat()
        os.chown(small_disk, owner.st_uid, owner.st_gid)
        connection.execute(sql.SQL("CREATE TABLESPACE small LOCATION {}").format(str(small_disk)))
        connection.execute("ALTER DATABASE postgres SET default_tablespace = small")
    logs = Logs.make(server, schema)
    committed: list[str] = []
    seen = Seen()

    async with consuming(member(logs), seen):
        append_large(logs, 0, committed)
        await until(lambda: seen.values == committed)
        filler = small_disk / "filler"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"x" * 4_096)

        def append_until_full() -> None:
            for number in range(1, 1_000):
                append_large(logs, number, committed)

        with pytest.raises(SourceError, match=r"53100 .*[Nn]o space left") as full:
            append_until_full()
        assert full.value.retryable
        await anyio.sleep(2)
        filler.unlink()
        append_large(logs, 1_000, committed)
        await until(lambda: set(committed) <= set(seen.values))
    assert list(dict.fromkeys(seen.values)) == committed


async def test_an_append_that_finds_no_space_is_refused_and_may_be_repeated(
    fresh_postgres: PostgresFactory, schema: str
) -> None:
    """On each machine: the kernel refuses every write to ``/dev/full`` as it does on a full disk."""
    server = fresh_postgres()
    logs = Logs.make(server, schema)
    with logs.connect() as connection:
        ((data, large),) = connection.execute(
            "SELECT current_setting('data_directory'), pg_relation_filepath(reltoastrelid) FROM pg_class "
            "WHERE pg_class.oid = %s::regclass",
            (f"{schema}.lanes_log_messages",),
        ).fetchall()
    file = Path(data) / large
    assert file.stat().st_size == 0
    owner = file.stat()
    file.unlink()
    file.symlink_to("/dev/full")
    committed: list[str] = []
    seen = Seen()
    async with consuming(member(logs), seen):
        for number in range(3):
            with pytest.raises(SourceError, match=r"53100 .*[Nn]o space left") as full:
                append_large(logs, number, committed)
            assert full.value.retryable
            logs.commit(f"small {number}")
        await until(lambda: seen.values == [f"small {number}" for number in range(3)])
        file.unlink()
        file.touch(owner.st_mode & 0o777)
        os.chown(file, owner.st_uid, owner.st_gid)
        append_large(logs, 3, committed)
        await until(lambda: seen.values[3:] == committed)
