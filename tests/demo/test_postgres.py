"""The whole demo on a real PostgreSQL: members of a subscription join, leave, die and freeze."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from demo import DemoConfig, run
from demo.brokers.postgres import PostgresBroker, application_name
from demo.brokers.ranges import RangedBroker
from demo.errors import DemoError, NoAnswer
from demo.events import Event
from demo.group.members import Members
from lanes.clock import monotonic
from lanes.history.recorder import Recorder
from tests.components import PostgresServer
from tests.conftest import PostgresFactory

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("anyio_backend", ["asyncio"]),
    pytest.mark.timeout(180),
]

LEASE = 5.0
"""Seconds; a busy machine must not stand still for half of it."""


def config(server: PostgresServer, **changes: Any) -> DemoConfig:
    settings = {"events": 1_000, "concurrency": 100, "max_in_flight": 200, "serial_seconds": 0.0, "lease": LEASE}
    return DemoConfig(**{"broker": "postgres", "server": server.url, **settings, **changes})


def schemas(server: PostgresServer) -> set[str]:
    with psycopg.connect(server.url) as connection:
        rows = connection.execute("SELECT nspname FROM pg_namespace WHERE nspname LIKE 'declarations-%'").fetchall()
    return {name for (name,) in rows}


async def kills_and_stops(group: Members) -> None:
    """Kill a member while the others have messages, and stop a member."""
    await group.until(group.settled)
    count = await group.feed(0.6)
    await group.handled(count // 2)
    group.kill(group.busiest())
    await group.handled(count)
    await group.until(group.settled)
    count = await group.feed(1.0)
    await group.stop(group.running[-1])
    await group.handled(count)


@asynccontextmanager
async def opened(server: PostgresServer, name: str, partitions: int = 2) -> AsyncIterator[PostgresBroker]:
    broker = PostgresBroker(server.url, name, partitions)
    await broker.open()
    try:
        yield broker
    finally:
        assert await broker.close() == []


async def test_a_subscription_loses_a_member_and_repeats_only_its_messages(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    report = await run(config(postgres, latency=0.03, name="kills", script=kills_and_stops, keep=tmp_path / "kept"))
    assert report.broken == []
    assert (report.done, report.kills, report.workers) == (1_000, 1, 3)
    group = report.group
    assert group is not None and group.moves is None, "a subscription has no plan"
    assert set(group.recovery) == {"kill", "stop"} and group.rebalances >= 1
    assert group.duplicates["kill"] == sum(group.duplicates.values()) > 0
    assert group.overlaps == group.overlaps_at_loss == 0
    assert "declarations-kills" not in schemas(postgres)


async def test_a_serial_loop_reads_a_log(postgres: PostgresServer) -> None:
    async def handle_all(group: Members) -> None:
        await group.handled(await group.feed(1.0))

    report = await run(config(postgres, events=300, members=2, serial_seconds=0.5, script=handle_all))
    assert report.broken == []
    assert report.done == 300 and report.serial_rate > 0.0


async def test_events_are_published_once_although_an_answer_is_lost(postgres: PostgresServer, tmp_path: Path) -> None:
    events = [Event(f"case-{number % 5}", number, b'{"case": "c", "step": %d}' % number) for number in range(20)]
    history = Recorder(tmp_path, member="publisher")
    history.open(source="x", concurrency=1, max_in_flight=1, max_in_flight_bytes=1, now=monotonic())

    async def published(count: int) -> None:
        assert count == len(events)

    async with opened(postgres, "once") as broker:
        # The COMMIT of the first transaction takes effect, and its answer is lost.
        await broker._append(1, events)
        await broker.publish(events, history, published)
        left = await broker._tables.ends(broker._idle[0])
        assert sum(left) == len(events) == sum(broker._ends)
        assert await broker.left() is None, "no member has claimed a partition"
    history.close("stopped", monotonic())


async def test_the_parent_sees_members_by_the_sessions_of_their_locks(postgres: PostgresServer) -> None:
    async with opened(postgres, "seen", partitions=3) as broker:
        assert (await broker.group()).members == {}
        keys = {number: key for key, number in broker._numbers.items()}
        names = [application_name(broker.stream, member) for member in ("m-1", "m-2")]
        async with (
            await psycopg.AsyncConnection.connect(postgres.url, application_name=names[0], autocommit=True) as one,
            await psycopg.AsyncConnection.connect(postgres.url, application_name=names[1], autocommit=True) as two,
        ):
            for number, session in ((0, one), (1, one), (2, one)):
                await session.execute("SELECT pg_try_advisory_lock(%s::bigint)", (keys[number],))
            seen = await broker.group()
            assert seen.owners == dict.fromkeys(((broker.stream, number) for number in range(3)), "m-1")
            assert set(seen.members) == {"m-1", "m-2"} and not seen.stable, "m-1 has more than its share"
            await one.execute("SELECT pg_advisory_unlock(%s::bigint)", (keys[2],))
            assert not (await broker.group()).stable, "partition 2 has no owner"
            await two.execute("SELECT pg_try_advisory_lock(%s::bigint)", (keys[2],))
            assert (await broker.group()).stable


async def test_an_existing_schema_is_not_used(postgres: PostgresServer) -> None:
    async with opened(postgres, "taken"):
        other = PostgresBroker(postgres.url, "taken", 1)
        with pytest.raises(DemoError, match=r"^the schema declarations-taken exists: drop the schema, or choose"):
            await other.open()
        assert await other.close() == []
        assert "declarations-taken" in schemas(postgres)


async def test_a_missing_server_is_one_line_without_a_password() -> None:
    with pytest.raises(DemoError, match="start a server, correct the address") as refused:
        await PostgresBroker("postgresql://bob:s3cret@127.0.0.1:1/x", "gone", 1).open()
    assert "s3cret" not in str(refused.value) and "\n" not in str(refused.value)


async def test_a_killed_server_does_not_answer(fresh_postgres: PostgresFactory) -> None:
    server = fresh_postgres()
    broker = PostgresBroker(server.url, "killed", 1)
    await broker.open()
    server.kill()
    with pytest.raises(NoAnswer):
        await broker.group()
    assert not broker.connected
    assert await broker.close() == ["declarations-killed"]


@pytest.mark.slow
async def test_a_subscription_keeps_every_promise_under_all_faults(postgres: PostgresServer) -> None:
    report = await run(config(postgres, members=4, events=10_000, concurrency=300, max_in_flight=600))
    assert report.broken == []
    assert (report.done, report.kills, report.workers) == (10_000, 1, 5)
    group = report.group
    assert group is not None
    assert set(group.recovery) == {"kill", "join", "freeze", "stop"}
    assert group.duplicates["clean"] == group.overlaps == 0
    assert group.duplicates["kill"] and group.duplicates["freeze"]


@pytest.mark.slow
async def test_the_demo_waits_for_a_killed_server(fresh_postgres: PostgresFactory) -> None:
    server = fresh_postgres()

    async def outage(group: Members) -> None:
        await group.until(group.settled)
        begun = monotonic()
        await asyncio.to_thread(server.kill)
        late = await group.join()
        await group.until(lambda: late.child.status is not None)
        await asyncio.to_thread(server.start)
        group.note("broker", begun=begun)
        await group.until(group.settled)
        await group.handled(await group.feed(1.0))

    report = await run(config(server, script=outage))
    assert report.broken == []
    # The member that did not find a server ended, and a replacement joined.
    assert (report.done, report.kills, report.workers) == (1_000, 0, 5)
    assert report.group is not None and set(report.group.recovery) == {"join"}


@pytest.mark.slow  # six faults, one of which waits for a lease
async def test_ranges_move_and_split_and_lose_their_owners(postgres: PostgresServer, tmp_path: Path) -> None:
    report = await run(config(postgres, name="ranges", ranges=True, partitions=4, keep=tmp_path / "kept"))
    assert report.broken == []
    assert (report.done, report.kills, report.workers) == (1_000, 1, 4)
    group = report.group
    assert group is not None and group.overlaps == group.duplicates["clean"] == 0
    assert "declarations-ranges" not in schemas(postgres)


async def test_a_ranged_group_is_stable_when_each_piece_has_the_member_of_the_map(postgres: PostgresServer) -> None:
    broker = RangedBroker(postgres.url, "pieces", 2, 3)
    await broker.open()
    try:
        assert [(each.consumer, len(each.range)) for each in await broker.owned()][:4] == [
            ("member-1", 5_461),
            ("member-2", 5_461),
            ("member-3", 5_462),
            ("member-1", 5_461),
        ]
        await broker.give_part("member-3", "member-1")
        await broker.give_away("member-2", ["member-3", "member-4"])
        names = [each.consumer for each in await broker.owned()]
        assert (names[:4], names.count("member-2")) == (["member-1", "member-3", "member-3", "member-1"], 0)
        assert await broker.left() is None
        assert not (await broker.group()).stable
    finally:
        assert await broker.close() == []


@pytest.mark.parametrize("broker", ["kafka", "jetstream"])
async def test_ranges_need_a_log(broker: Any) -> None:
    server = {"kafka": "127.0.0.1:9092", "jetstream": "nats://127.0.0.1:4222"}[broker]
    with pytest.raises(DemoError, match=f"ranges=True with broker='{broker}': only a log has ranges"):
        DemoConfig(broker=broker, server=server, ranges=True)
