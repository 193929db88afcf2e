"""Subscriptions: independent names, start points, members that share partitions, and fences, on a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import psycopg
import psycopg_pool
import pytest
from psycopg.conninfo import make_conninfo

from lanes import Consumer, HandlerHalted, Message, Settings
from lanes.clock import monotonic
from lanes.core.types import Room
from lanes.errors import ConfigError, SourceError
from lanes.ownership import Held, LocalLocks
from lanes.source import Assigned, Lost
from lanes_postgres import AdvisoryLocks, Log, PostgresDeadLetters, PostgresSource, Record
from lanes_postgres.log.reading import LogTables
from lanes_postgres.subscription import visitor
from lanes_postgres.subscription.owned import lock_name
from tests.components import PostgresServer
from tests.fakes.grouped import ONCE
from tests.postgres.log.logs import Logs

pytestmark = pytest.mark.anyio

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


def member(logs: Logs, subscription: str = "billing", **arguments: Any) -> PostgresSource:
    arguments = {"poll_interval": 0.05, **arguments}
    return PostgresSource(logs.url, logs.log, subscription=subscription, **arguments)


@asynccontextmanager
async def consuming(
    source: PostgresSource, handler: Callable[[Any], Awaitable[None] | None], **arguments: Any
) -> AsyncIterator[Consumer]:
    consumer = Consumer(source, handler, **arguments)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(consumer.run)
        try:
            yield consumer
        finally:
            consumer.stop()


async def until(condition: Callable[[], object]) -> None:
    with anyio.fail_after(20):
        while not condition():
            await anyio.sleep(0.01)


class Seen:
    """The values that handlers have finished."""

    def __init__(self) -> None:
        self.values: list[str] = []

    async def __call__(self, message: Message) -> None:
        await anyio.lowlevel.checkpoint()
        self.values.append(message.value.decode())


async def suffix(logs: Logs, count: int, **arguments: Any) -> list[str]:
    """The first ``count`` values that a subscription reads, and all that follow within a moment."""
    seen = Seen()
    async with consuming(member(logs, **arguments), seen):
        await until(lambda: len(seen.values) >= count)
        await anyio.sleep(0.2)
    return seen.values


# --- names, restarts, failures


async def test_db_subscription_state(four: Logs) -> None:
    """A member that starts again continues after the stored positions, and repeats no finished message."""
    for number in range(20):
        four.commit(str(number), key=str(number))
    first = await suffix(four, 20)
    for number in range(20, 30):
        four.commit(str(number), key=str(number))
    assert sorted(first + await suffix(four, 10), key=int) == [str(number) for number in range(30)]


async def test_reraises_exception(logs: Logs) -> None:
    """By default a failed message ends the run. Its position stays, and its partition is free at once."""
    logs.commit("1", "2")

    async def broken(message: Message) -> None:
        raise ValueError(message.position)

    with pytest.raises(HandlerHalted) as halted:
        await Consumer(member(logs), broken, settings=Settings(retry=ONCE)).run()
    assert isinstance(halted.value.__cause__, ValueError)
    assert logs.execute("SELECT floor FROM {}.lanes_states") == [(0,)]
    with anyio.fail_after(10):
        assert await suffix(logs, 2) == ["1", "2"]


async def test_ignores_exception(logs: Logs) -> None:
    """With the policy skip, a failed message is kept as a dead letter and counted, and the next one follows."""
    logs.commit("1", "2")
    seen = Seen()

    async def broken(message: Message) -> None:
        await seen(message)
        if message.value == b"1":
            raise ValueError(message.position)

    letters = PostgresDeadLetters(logs.url, "billing", schema=logs.schema)
    settings = Settings(poison="skip", retry=ONCE)
    async with consuming(member(logs), broken, dead_letters=letters, settings=settings) as consumer:
        await until(lambda: logs.execute("SELECT floor FROM {}.lanes_states") == [(2,)])
        assert consumer.status().dead_lettered == 1
    assert seen.values == ["1", "2"]
    assert logs.execute("SELECT count(*) FROM {}.lanes_dead_letters") == [(1,)]


async def test_two_subscriptions_progress_independently(logs: Logs) -> None:
    logs.commit("1", "2", "3")
    assert await suffix(logs, 3, subscription="billing") == ["1", "2", "3"]
    logs.commit("4")
    assert await suffix(logs, 4, subscription="mail") == ["1", "2", "3", "4"]
    assert await suffix(logs, 1, subscription="billing") == ["4"]


async def test_first_message_failure_never_rewinds_position(logs: Logs) -> None:
    logs.commit("1", "2")
    assert await suffix(logs, 2) == ["1", "2"]
    logs.commit("3", "4")

    async def broken(message: Message) -> None:
        raise ValueError(message.position)

    consumer = Consumer(member(logs), broken, settings=Settings(poison="exit", retry=ONCE))
    with pytest.raises(HandlerHalted):
        await consumer.run()
    assert logs.execute("SELECT floor FROM {}.lanes_states") == [(2,)]
    assert await suffix(logs, 2) == ["3", "4"]


async def test_killed_connections_lose_no_message(logs: Logs) -> None:
    """A member whose sessions end connects and claims again. A repeated message follows its first completion."""
    seen = Seen()
    async with consuming(member(logs), seen):
        for number in range(4):
            logs.commit(str(2 * number), str(2 * number + 1))
            first = str(2 * number)
            await until(partial(seen.values.__contains__, first))
            logs.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename IS NOT NULL "
                "AND backend_type = 'client backend' AND pid <> pg_backend_pid()"
            )
        await until(lambda: "7" in seen.values)
    assert list(dict.fromkeys(seen.values)) == [str(number) for number in range(8)]


async def test_the_traits_follow_from_the_log(four: Logs) -> None:
    source = member(four)
    assert (source.declared().partitions, source.declared().exclusive, source.declared().divides) == (None, True, False)
    try:
        traits = await source.open()
        assert (traits.name, traits.partitions) == (source.declared().name, 4)
        assert (traits.system, traits.settles, traits.hands_over) == ("postgresql", "cumulative", True)
    finally:
        await source.aclose()


async def test_a_source_refuses_tables_of_another_version(logs: Logs) -> None:
    logs.execute("DELETE FROM {0}.lanes_migrations WHERE version = (SELECT max(version) FROM {0}.lanes_migrations)")
    source = member(logs)
    with pytest.raises(ConfigError, match="have version"):
        await source.open()
    await source.aclose()


async def test_a_lost_lock_ends_the_lease(logs: Logs) -> None:
    """The server frees the lock of an ended session at once, so the lease does not last until its deadline."""
    name = f"locks of {logs.schema}"
    source = member(logs, locks=AdvisoryLocks(make_conninfo(logs.url, application_name=name), lease=600.0))
    await source.open()
    try:
        with anyio.fail_after(20):
            (assigned,) = [event for event in await source.receive(Room(10, 1_000)) if isinstance(event, Assigned)]
            begun = monotonic()
            assert assigned.partition.deadline > begun + 300.0
            logs.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = '{name}'")
            (lost,) = [event for event in await source.receive(Room(10, 1_000)) if isinstance(event, Lost)]
        assert lost.partition is assigned.partition
        assert begun <= lost.partition.deadline <= monotonic()
    finally:
        await source.aclose()


@pytest.mark.parametrize("autocommit", [False, True])
async def test_a_notification_wakes_a_member_that_looks_seldom(logs: Logs, autocommit: bool) -> None:
    seen = Seen()
    async with consuming(member(logs, poll_interval=3600.0), seen) as consumer:
        await until(lambda: consumer.status().floors)
        # A member looks often for a second after its start.
        await anyio.sleep(1.5)
        async with await psycopg.AsyncConnection.connect(logs.url, autocommit=autocommit) as connection:
            async with connection.transaction():
                await logs.log.append(connection, [Record("1", "k")])
            await logs.log.notify(connection)
        await until(lambda: seen.values == ["1"])


async def test_a_member_looks_often_only_while_no_notification_announces_the_messages(
    logs: Logs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visitor, "_ACTIVE", 3600.0)
    seen = Seen()
    source = member(logs, poll_interval=0.05)
    async with consuming(source, seen) as consumer:
        await until(lambda: consumer.status().floors)
        logs.commit("1")
        await until(lambda: source._visitor._active_until > monotonic())
        logs.commit("2")
        with logs.connect(autocommit=True) as connection:
            logs.log.notify(connection)
        await until(lambda: source._visitor._active_until < monotonic() and seen.values == ["1", "2"])


async def test_a_notification_during_a_look_announces_the_messages_of_that_look(
    logs: Logs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visitor, "_ACTIVE", 3600.0)
    seen = Seen()
    source = member(logs, poll_interval=0.05)
    visit = LogTables.visit

    async def visit_and_hear(*arguments: Any) -> Any:
        found = await visit(*arguments)
        if found[0]:
            source._visitor._told(-1, "")
        return found

    monkeypatch.setattr(LogTables, "visit", visit_and_hear)
    async with consuming(source, seen) as consumer:
        await until(lambda: consumer.status().floors)
        logs.commit("1")
        await until(lambda: seen.values == ["1"])
        assert source._visitor._active_until < monotonic()


async def test_a_schema_with_quotes_is_read(postgres: PostgresServer, schema: str) -> None:
    logs = Logs.make(postgres, f"{schema} \"a'b%")
    logs.commit("1", "2")
    assert await suffix(logs, 2) == ["1", "2"]


class Refused(LocalLocks):
    """Locks whose service does not answer."""

    async def try_acquire(self, name: str, changed: Callable[[], None]) -> Held | None:
        raise SourceError("the locks do not answer", retryable=True)


async def test_a_member_that_can_acquire_no_lock_takes_no_share_from_the_others(four: Logs) -> None:
    seen = Seen()
    source, broken = member(four, time_budget=0.1), member(four, locks=Refused())
    async with consuming(source, seen) as consumer, consuming(broken, seen):
        await until(lambda: len(consumer.status().floors) == 4)
        await until(broken.outage)
        for number in range(40):
            four.commit(str(number), key=str(number))
        await until(lambda: len(seen.values) == 40)
        await until(lambda: len(source._visitor.owned) == 4)


# --- start points


async def test_default_beginning(logs: Logs) -> None:
    logs.commit("1", "2")
    assert await suffix(logs, 2) == ["1", "2"]


async def test_next_message(four: Logs) -> None:
    for number in range(8):
        four.commit(str(number), key=str(number))
    seen = Seen()
    async with consuming(member(four, start="next"), seen) as consumer:
        await until(lambda: len(consumer.status().floors) == 4)
        # Partitions that were empty are pinned too.
        for number in range(8):
            four.commit(f"new {number}", key=str(number))
        await until(lambda: len(seen.values) == 8)
    assert sorted(seen.values) == [f"new {number}" for number in range(8)]


@pytest.mark.parametrize("first", range(4))
async def test_point_in_time(logs: Logs, first: int) -> None:
    times = [EPOCH + timedelta(hours=number) for number in range(3)]
    with logs.connect() as connection:
        logs.log.append(connection, [Record(str(n), "k", time=time) for n, time in enumerate(times)])
    start = times[first] if first < 3 else times[-1] + timedelta(seconds=1)
    assert await suffix(logs, 3 - first, start=start) == [str(number) for number in range(first, 3)]


async def test_a_start_counts_only_for_a_new_subscription(logs: Logs) -> None:
    logs.commit("1", "2")
    assert await suffix(logs, 2) == ["1", "2"]
    logs.commit("3")
    assert await suffix(logs, 1, start="next") == ["3"]


async def test_members_that_start_at_once_decide_one_start(four: Logs) -> None:
    sources = [member(four, start=start) for start in ("beginning", "next", "beginning", "next")]
    for number in range(8):
        four.commit(str(number), key=str(number))
    async with anyio.create_task_group() as tasks:
        for source in sources:
            tasks.start_soon(source.open)
    starts = [list(source._visitor.starts) for source in sources]
    for source in sources:
        await source.aclose()
    assert starts == [starts[0]] * 4
    assert four.execute("SELECT count(*) FROM {}.lanes_subscriptions") == [(1,)]


async def test_a_naive_start_is_refused(logs: Logs) -> None:
    with pytest.raises(ConfigError, match="start"):
        member(logs, start=datetime(2026, 1, 1))  # noqa: DTZ001
    with pytest.raises(ConfigError, match=r'"beginning", "next" or a datetime.* \(did you mean "next"\?\)$'):
        member(logs, start="latest")
    with pytest.raises(ConfigError, match=r'"beginning", "next" or a datetime with a time zone$'):
        member(logs, start="first")


# --- members


async def test_subscription_in_parallel(postgres: PostgresServer, schema: str) -> None:
    logs = Logs.make(postgres, schema, partitions=6)
    by_key: dict[bytes | None, list[int]] = {}
    owners: dict[int, int] = {}

    def handler(number: int) -> Callable[[Message], Awaitable[None]]:
        async def handle(message: Message) -> None:
            await anyio.sleep(0.001)
            owners[number] = owners.get(number, 0) + 1
            by_key.setdefault(message.key, []).append(int(message.value))

        return handle

    async with (
        consuming(member(logs, time_budget=0.2), handler(0)) as first,
        consuming(member(logs, time_budget=0.2), handler(1)) as second,
        consuming(member(logs, time_budget=0.2), handler(2)) as third,
    ):
        members = (first, second, third)
        for number in range(300):
            logs.commit(str(number), key=str(number % 12))
            await anyio.sleep(0.002)
        await until(lambda: sum(map(len, by_key.values())) >= 300)
        await until(lambda: [len(each.status().floors) for each in members] == [2, 2, 2])
    assert all(values == sorted(values) for values in by_key.values())
    assert sorted(value for values in by_key.values() for value in values) == list(range(300))


@pytest.mark.parametrize("poll_interval", [0.5, 3600.0])
async def test_members_that_poll_seldom_share_the_partitions(
    postgres: PostgresServer, schema: str, poll_interval: float
) -> None:
    logs = Logs.make(postgres, schema, partitions=2)
    seldom: dict[str, Any] = {"poll_interval": poll_interval, "time_budget": 0.0}
    async with consuming(member(logs, **seldom), Seen()) as first:
        await until(lambda: len(first.status().floors) == 2)
        async with consuming(member(logs, **seldom), Seen()) as second:
            await until(lambda: len(first.status().floors) == len(second.status().floors) == 1)


async def test_subscription_runner_time_budget(logs: Logs) -> None:
    counts = [0, 0]

    def handler(number: int) -> Callable[[Message], Awaitable[None]]:
        async def handle(message: Message) -> None:
            counts[number] += 1
            await anyio.sleep(0.01)

        return handle

    async with (
        consuming(member(logs, time_budget=0.1), handler(0)),
        consuming(member(logs, time_budget=0.1), handler(1)),
    ):
        with anyio.fail_after(20):
            while not all(counts):
                logs.commit("x")
                await anyio.sleep(0.01)


@pytest.mark.parametrize("seconds", [0.0, 0.2])
async def test_members_that_take_turns_without_a_budget_get_on(logs: Logs, seconds: float) -> None:
    """A member gives its partition up after a message was settled, also if a handler outlasts the drain."""
    for number in range(4):
        logs.commit(str(number))
    handled: list[tuple[int, str]] = []

    def handler(number: int) -> Callable[[Message], Awaitable[None]]:
        async def handle(message: Message) -> None:
            await anyio.sleep(seconds)
            handled.append((number, message.value.decode()))

        return handle

    settings = Settings(concurrency=1, max_in_flight=1, drain_timeout=0.05)
    async with (
        consuming(member(logs, time_budget=0.0), handler(0), settings=settings),
        consuming(member(logs, time_budget=0.0), handler(1), settings=settings),
    ):
        await until(lambda: len(handled) >= 4)
    assert [value for _, value in handled] == ["0", "1", "2", "3"]


async def test_lost_lock_fences_late_store(logs: Logs) -> None:
    logs.commit("1", "2")
    gate, seen = anyio.Event(), Seen()
    events: list[str] = []

    async def handler(message: Message) -> None:
        await gate.wait()
        await seen(message)

    source = member(logs)
    async with consuming(source, handler, on_event=lambda event: events.append(event.name)) as consumer:
        await until(lambda: consumer.status().in_flight == 2)
        # Another process claims the partition, although this member has not noticed the loss of its lock.
        owned = source._visitor.owned[0]
        state = await source._states.claim(owned.key, 0)
        assert state.epoch > owned.epoch
        gate.set()
        await until(lambda: "lost" in events)
        assert logs.execute("SELECT floor FROM {}.lanes_states") == [(0,)]
        # The member acquires the partition anew, and repeats the messages.
        await until(lambda: logs.execute("SELECT floor FROM {}.lanes_states") == [(2,)])
    assert seen.values == ["1", "2", "1", "2"]


@asynccontextmanager
async def holding(logs: Logs, partition: int) -> AsyncIterator[None]:
    """The lock of a partition, held by another member."""
    locks, name = AdvisoryLocks(logs.url), lock_name(logs.schema, "orders", "billing", partition)
    await locks.open()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(locks.run)
        with anyio.fail_after(20):
            while await locks.try_acquire(name, lambda: None) is None:
                await anyio.sleep(0.01)
        yield
        tasks.cancel_scope.cancel()
    await locks.aclose()


async def test_a_frozen_transaction_holds_up_only_its_own_partition(
    four: Logs, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler that is frozen in its transaction has the row of its partition.

    Its successor continues with the rest.
    """
    for name, seconds in (("_COOL", 0.05), ("TOLD", 0.08), ("LONGEST_COOL", 0.1)):
        monkeypatch.setattr(visitor, name, seconds)
    for number in range(8):
        four.commit(str(number), key=str(number))
    await suffix(four, 8)
    partition, values = min(four.read().items())
    for number in range(8):
        four.commit(f"new {number}", key=str(number))
    others = {f"new {number}" for number in range(8)} - {f"new {value}" for value in values}
    seen = Seen()
    with four.connect() as frozen:
        lock = four.query("SELECT FROM {}.lanes_states WHERE partition = %s FOR NO KEY UPDATE")
        frozen.execute(lock, (partition,))
        source = member(four)
        async with consuming(source, seen) as consumer:
            await until(lambda: set(seen.values) == others)
            await until(lambda: caplog.text.count("a former owner is frozen in a transaction") == 1)
            assert partition in source._visitor._locked
            # While another member has the lock, this one does not know who holds the state.
            async with holding(four, partition):
                await until(lambda: partition not in source._visitor._locked)
            await until(lambda: caplog.text.count("a former owner is frozen in a transaction") == 2)
            assert f"orders/{partition}" not in consumer.status().floors
            frozen.rollback()
            await until(lambda: len(seen.values) == 8)


async def test_oldest_partition_is_visited_first(four: Logs) -> None:
    ages = {"0": 3, "1": 1, "2": 2, "3": 0, "4": 4, "5": 5}
    with four.connect() as connection:
        for key, age in ages.items():
            four.log.append(connection, [Record(key, key, time=EPOCH - timedelta(days=age))])
    order: list[datetime] = []

    async def handler(message: Message) -> None:
        order.append(EPOCH - timedelta(days=ages[message.value.decode()]))

    # Room for one message, so that the source chooses each time.
    settings = Settings(concurrency=1, max_in_flight=1)
    async with consuming(member(four), handler, settings=settings):
        await until(lambda: len(order) == 6)
    heads: dict[int, list[datetime]] = {}
    for partition, values in four.read().items():
        heads[partition] = [EPOCH - timedelta(days=ages[value]) for value in values]
    expected = []
    while any(heads.values()):
        oldest = min((values for values in heads.values() if values), key=lambda values: values[0])
        expected.append(oldest.pop(0))
    assert order == expected


# --- what an operator meets


async def test_a_forced_trim_is_an_error_or_is_passed_over(logs: Logs, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(4):
        logs.commit(str(number))
    assert await suffix(logs, 4, subscription="mail") == ["0", "1", "2", "3"]
    logs.execute(
        "DELETE FROM {0}.lanes_log_messages USING {0}.lanes_log_entries AS entry "
        "WHERE entry.batch = lanes_log_messages.batch AND position < 2"
    )
    logs.execute("DELETE FROM {}.lanes_log_entries WHERE position < 2")
    logs.execute(
        "INSERT INTO {0}.lanes_subscriptions (log, name, start, starts) "
        "SELECT id, 'gone', 'beginning', ARRAY[0] FROM {0}.lanes_logs"
    )
    consumer = Consumer(member(logs, subscription="gone"), Seen())
    with pytest.raises(SourceError, match=r"continues at position 0, and a trim deleted its messages below 2"):
        await consumer.run()
    assert await suffix(logs, 2, subscription="gone", out_of_range="earliest") == ["2", "3"]


async def test_a_missing_schema_or_log_is_refused_at_the_start(postgres: PostgresServer, logs: Logs) -> None:
    with pytest.raises(ConfigError, match=r"lanes_postgres\.migrate"):
        await Consumer(PostgresSource(postgres.url, Log("orders", schema="absent"), subscription="b"), Seen()).run()
    with pytest.raises(ConfigError, match="has no log 'absent'"):
        await Consumer(PostgresSource(postgres.url, Log("absent", schema=logs.schema), subscription="b"), Seen()).run()
    with pytest.raises(ConfigError, match=r"has no log 'ordrs' \(did you mean 'orders'\?\); call Log"):
        await Consumer(PostgresSource(postgres.url, Log("ordrs", schema=logs.schema), subscription="b"), Seen()).run()


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ({"subscription": ""}, "subscription"),
        ({"visit": "newest"}, "visit"),
        ({"time_budget": -1}, "time_budget"),
        ({"poll_interval": 0}, "poll_interval"),
        ({"out_of_range": "skip"}, "out_of_range"),
    ],
)
async def test_an_invalid_argument_is_refused(arguments: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        PostgresSource("postgresql://localhost/db", Log("orders"), **{"subscription": "b", **arguments})


async def test_a_wrong_address_shows_no_password() -> None:
    with pytest.raises(ConfigError) as refused:
        PostgresSource("postgresql://user:secret@host:port/db?x", Log("orders"), subscription="b")
    assert "secret" not in str(refused.value)
    with pytest.raises(ConfigError, match="pass an address"):
        PostgresSource(3, Log("orders"), subscription="b")  # type: ignore[arg-type]


async def test_a_connection_and_a_pool_of_blocking_connections_are_refused(logs: Logs) -> None:
    async with await psycopg.AsyncConnection.connect(logs.url) as connection:
        for wrong in (connection, psycopg_pool.ConnectionPool(logs.url, open=False)):
            with pytest.raises(
                ConfigError, match=f"dsn_or_pool is a {type(wrong).__name__}; pass an address, such as "
            ):
                PostgresSource(wrong, Log("orders"), subscription="b")  # type: ignore[arg-type]
    PostgresSource(psycopg_pool.AsyncConnectionPool(logs.url, open=False), Log("orders"), subscription="b")
