"""Ranges on a real server: each key has one owner, and a range moves with a mandatory drain."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.to_thread
import psycopg
import pytest

from lanes import Consumer, Retry, Settings
from lanes.errors import ConfigError
from lanes.ring import SLOTS, Range
from lanes_postgres import Log, PostgresAttempts, PostgresDeadLetters, PostgresSource
from lanes_postgres.cli.retention import trim
from lanes_postgres.cli.subscriptions import drop_subscription, list_subscriptions
from lanes_postgres.ring import pieces, unowned
from lanes_postgres.subscription import piece_visitor, visitor
from memsource import MemoryStates
from tests.components import PostgresServer
from tests.postgres.log.logs import Logs
from tests.postgres.log.test_subscriptions import consuming, member, until
from tests.postgres.ring.ranged import HALF, HIGH, LOW, Ring, some

pytestmark = pytest.mark.anyio

SETTLED = 0.7
"""Seconds in which a member that may handle a message would have begun."""


@pytest.fixture
def ring(logs: Logs) -> Ring:
    ring = Ring(logs)
    ring.assign(LOW, "a")
    ring.assign(HIGH, "b")
    return ring


async def test_each_member_gets_the_keys_of_its_ranges_alone(ring: Ring) -> None:
    low, high = some(LOW, 20), some(HIGH, 20)
    ring.append(*[key for pair in zip(low, high, strict=True) for key in pair])
    async with ring.member("a") as a, ring.member("b") as b:
        await until(lambda: len(a.ended) == 20 and len(b.ended) == 20)
    assert (a.ended, b.ended) == (low, high)


async def test_ranges_move_in_a_schema_with_any_name(postgres: PostgresServer, schema: str) -> None:
    ring = Ring(Logs.make(postgres, f"{schema} 5%'s"))
    ring.assign(LOW, "a")
    ring.assign(HIGH, "b")
    (low,), (high,) = some(LOW, 1), some(HIGH, 1)
    async with ring.member("a") as a, ring.member("b") as b:
        ring.append(low, high)
        await until(lambda: a.ended == [low] and b.ended == [high])
        ring.assign(LOW, "b")
        ring.append(low)
        await until(lambda: b.ended == [high, low])


async def test_sticky_range_reassign_drains_before_new_owner_consumes(ring: Ring) -> None:
    """Three messages run in A: B gets nothing of the range until the third one has ended."""
    first, second, third, later = some(LOW, 4)
    async with ring.member("a") as a, ring.member("b") as b:
        a.close()
        ring.append(first, second, third)
        await until(lambda: len(a.begun) == 3)
        gates = a.gate
        ring.assign(LOW, "b")
        # An owner may begin messages of a range until it has looked at the map again.
        await until(lambda: any(each.draining for each in a.consumer.status().partitions.values()))
        ring.append(later)
        elsewhere = some(HIGH, 1)
        ring.append(*elsewhere)
        await until(lambda: b.ended == elsewhere)
        await anyio.sleep(SETTLED)
        assert b.begun == elsewhere
        assert a.begun == [first, second, third]
        gates.set()
        await until(lambda: later in b.ended)
    assert sorted(a.ended) == sorted([first, second, third])
    assert b.ended == [*elsewhere, later]


async def test_split_range_drains_only_the_moved_part(ring: Ring) -> None:
    """The upper part of the range of A goes to B while A runs one message of it; the lower part never pauses."""
    at = HALF // 2
    lower, upper = some(Range(0, at - 1), 3), some(Range(at, HALF - 1), 3)
    async with ring.member("a", settings=Settings(concurrency=1)) as a, ring.member("b") as b:
        a.close()
        ring.append(upper[0])
        await until(lambda: a.begun == [upper[0]])
        ring.append(upper[1], lower[0], upper[2])
        await anyio.sleep(0.3)
        with ring.logs.connect() as connection:
            ring.map.split(connection, at, "b")
        await anyio.sleep(SETTLED)
        assert b.begun == []
        a.gate.set()
        await until(lambda: b.ended == upper[1:])
        await until(lambda: lower[0] in a.ended)
        ring.append(lower[1], upper[0])
        await until(lambda: lower[1] in a.ended and upper[0] in b.ended)
    assert a.ended == [upper[0], lower[0], lower[1]]
    assert b.ended == [upper[1], upper[2], upper[0]]
    assert [parent for _, _, parent in ring.pieces()] == [None] * len(ring.pieces())


async def test_a_range_that_comes_back_is_owned_again_at_once(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    """The map decides about a range, so its former owner does not leave it to others for a time."""
    monkeypatch.setattr(visitor, "_COOL", 3_600.0)
    first, second = some(LOW, 2)
    async with ring.member("a") as a, ring.member("b") as b:
        a.close()
        ring.append(first)
        await until(lambda: a.begun == [first])
        ring.assign(LOW, "b")
        a.gate.set()
        ring.append(first)
        await until(lambda: b.ended == [first])
        ring.assign(LOW, "a")
        ring.append(second)
        await until(lambda: a.ended == [first, second])


async def test_a_moved_part_does_not_wait_for_the_handler_of_another(ring: Ring) -> None:
    at = HALF // 2
    (kept,), (one,), (other,) = (
        some(Range(0, at - 1), 1),
        some(Range(at, at + 999), 1),
        some(Range(at + 1_000, HALF - 1), 1),
    )
    async with ring.member("a") as a, ring.member("b") as b:
        a.close()
        stuck = a.gate
        ring.append(one)
        await until(lambda: a.begun == [one])
        a.close()
        ring.append(other)
        await until(lambda: a.begun == [one, other])
        ring.assign(Range(at, at + 999), "b")
        ring.assign(Range(at + 1_000, HALF - 1), "b")
        ring.append(one, other, kept)
        await until(lambda: len(a.begun) == 3)
        a.gate.set()
        await until(lambda: b.ended == [other])
        assert a.ended == [other, kept]
        stuck.set()
        await until(lambda: b.ended == [other, one])


async def test_the_half_that_stays_goes_on_while_a_handler_of_the_other_half_runs(ring: Ring) -> None:
    at = HALF // 2
    lower, (upper,) = some(Range(0, at - 1), 5), some(Range(at, HALF - 1), 1)
    async with ring.member("a") as a, ring.member("b") as b:
        a.close()
        stuck = a.gate
        ring.append(upper)
        await until(lambda: a.begun == [upper])
        with ring.logs.connect() as connection:
            ring.map.split(connection, at, "b")
        a.gate = anyio.Event()
        a.gate.set()
        ring.append(*lower, upper)
        await until(lambda: a.ended == lower)
        await anyio.sleep(SETTLED)
        assert b.begun == []
        stuck.set()
        await until(lambda: b.ended == [upper])
    assert a.ended == [*lower, upper]


async def test_sticky_range_reassign_drains_by_nack(ring: Ring) -> None:
    """A failed message of the range is not tried again by A. B tries it."""
    (key,) = some(LOW, 1)
    settings = Settings(retry=Retry(attempts=100, backoff=0.01, max_backoff=0.01))
    async with ring.member("a", settings=settings) as a, ring.member("b") as b:
        a.close()
        a.fails = True
        ring.append(key)
        await until(lambda: a.begun == [key])
        ring.assign(LOW, "b")
        await anyio.sleep(SETTLED)
        assert b.begun == []
        a.gate.set()
        await until(lambda: b.ended == [key])
        assert a.begun == [key]


async def test_slots_without_an_owner_are_never_fed(logs: Logs) -> None:
    ring = Ring(logs)
    ring.assign(LOW, "a")
    (mine,), (nobodys,) = some(LOW, 1), some(HIGH, 1)
    async with ring.member("a") as a, ring.member("b") as b:
        ring.append(nobodys, mine)
        await until(lambda: a.ended == [mine])
        await anyio.sleep(SETTLED)
        assert (a.begun, b.begun) == ([mine], [])
        ring.assign(HIGH, "b")
        await until(lambda: b.ended == [nobodys])


async def test_messages_without_a_key_go_to_one_member_at_a_time(ring: Ring) -> None:
    async with ring.member("a") as a, ring.member("b") as b:
        ring.append(*[None] * 20)
        await until(lambda: len(a.ended) + len(b.ended) == 20)
        assert [] in (a.ended, b.ended)


async def test_same_consumer_id_in_two_groups_is_two_identities(ring: Ring) -> None:
    other = Ring(ring.logs, group="shipping")
    other.assign(HIGH, "a")
    low, high = some(LOW, 5), some(HIGH, 5)
    ring.append(*low, *high)
    async with ring.member("a") as billing, other.member("a") as shipping:
        await until(lambda: len(billing.ended) == 5 and len(shipping.ended) == 5)
        await anyio.sleep(SETTLED)
    assert (sorted(billing.ended), sorted(shipping.ended)) == (sorted(low), sorted(high))


async def test_attempts_and_blocks_move_with_the_range(ring: Ring) -> None:
    """A blocks the head of a key after two attempts. B has it blocked too, and ``unblock`` makes the third attempt."""

    @asynccontextmanager
    async def connect() -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        async with await psycopg.AsyncConnection.connect(ring.logs.url) as connection:
            yield connection

    def stored() -> dict[str, Any]:
        settings = Settings(poison="block", retry=Retry(attempts=2, backoff=0.01, max_backoff=0.01))
        return {
            "attempts": PostgresAttempts(connect, ring.group, schema=ring.logs.schema),
            "settings": settings,
        }

    at = HALF // 2
    (key,), (other,) = some(Range(at, HALF - 1), 1), some(Range(0, at - 1), 1)
    async with ring.member("a", **stored()) as a, ring.member("b", **stored()) as b:
        a.fails = True
        ring.append(key, key)
        await until(lambda: a.consumer.status().blocked == 1)
        assert a.attempts == [1, 2]
        a.fails = False
        with ring.logs.connect() as connection:
            ring.map.split(connection, at, "b")
        await until(lambda: b.consumer.status().blocked == 1)
        assert (a.consumer.status().blocked, b.begun) == (0, [])
        ring.append(other)
        await until(lambda: a.ended == [other])
        assert b.consumer.unblock(key) == 1
        await until(lambda: b.ended == [key, key])
    assert b.attempts == [3, 1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"settings": Settings(order="serial")}, 'order="serial": .* owns ranges of keys'),
        ({"settings": Settings(order="partition")}, 'order="partition": .* leave out ranges='),
        ({"settings": Settings(lanes=4)}, "lanes=4: the keys of a lane of .* leave out lanes="),
    ],
    ids=["serial", "partition", "lanes"],
)
def test_an_order_of_several_keys_is_refused(ring: Ring, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Consumer(ring.source("a"), print, **arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"ranges": "a"}, r"ranges is a str; pass RangeMap\(log, group='billing'\)\.member\('a'\)"),
        ({"subscription": "shipping"}, "subscription='shipping' and ranges of the group 'billing': .* use one name"),
        ({"log": Log("invoices")}, "and the source reads <Log 'invoices'.* pass one log to both"),
        ({"states": MemoryStates()}, "states= with ranges=: .* leave out states="),
    ],
    ids=["no member", "another group", "another log", "states"],
)
def test_wrong_ranges_are_refused(ring: Ring, arguments: dict[str, Any], said: str) -> None:
    arguments = {
        "log": ring.logs.log,
        "subscription": ring.group,
        "ranges": ring.map.member("a"),
        **arguments,
    }
    with pytest.raises(ConfigError, match=said):
        PostgresSource(ring.logs.url, **arguments)
    with pytest.raises(ConfigError, match="consumer='': must be a str of 1 to 200 characters"):
        ring.map.member("")


@pytest.mark.parametrize("first", [True, False], ids=["with ranges first", "without ranges first"])
async def test_a_subscription_is_used_with_ranges_or_without(ring: Ring, first: bool) -> None:
    """Otherwise a partition and its pieces would have different owners."""
    plain = member(ring.logs)
    ranged = ring.source("a")
    begins, refused = (ranged, plain) if first else (plain, ranged)
    await begins.open()
    await begins.aclose()
    with pytest.raises(ConfigError, match=f"has begun {'with' if first else 'without'} ranges"):
        await refused.open()
    await refused.aclose()


async def test_trim_and_the_lag_follow_the_pieces(ring: Ring) -> None:
    """Messages that a slot without an owner waits for are not trimmed, and they are counted."""
    logs = ring.logs
    other = Ring(logs, group="shipping")
    other.assign(LOW, "a")
    (mine,), (nobodys,) = some(LOW, 1), some(HIGH, 1)
    ring.append(nobodys)
    ring.append(*[mine] * 5)
    async with other.member("a") as a:
        await until(lambda: len(a.ended) == 5)
        async with await psycopg.AsyncConnection.connect(logs.url, autocommit=True) as connection:
            assert await trim(connection, logs.schema, "orders", age=0.0, force=False) == 0
            (view,) = await list_subscriptions(connection, logs.schema)
        assert (view.name, view.lag) == ("shipping", 6)
        await until(lambda: any("1 messages or more wait in slots without an owner" in text for text in a.findings()))
        assert a.consumer.status().unowned == 1
        other.assign(HIGH, "a")
        await until(lambda: nobodys in a.ended)
    async with await psycopg.AsyncConnection.connect(logs.url, autocommit=True) as connection:
        await drop_subscription(connection, logs.schema, "orders", "shipping", force=True)
    assert ring.pieces() == []


async def test_slots_without_an_owner_and_without_messages_keep_nothing(
    logs: Logs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look passes a bounded number of positions, and the next look continues after these positions."""
    monkeypatch.setattr(piece_visitor, "_COUNT_EVERY", 0.0)
    monkeypatch.setattr(unowned, "LOOK", 2)
    ring = Ring(logs)
    ring.assign(LOW, "a")
    (mine,), (nobodys,) = some(LOW, 1), some(HIGH, 1)
    ring.append(*[mine] * 5)
    ring.append(nobodys)
    ring.append(*[mine] * 3)

    def floor() -> int:
        ((found,),) = logs.execute(
            "SELECT floor FROM {}.lanes_ring_pieces WHERE consumer IS NULL AND slots IS NOT NULL"
        )
        return int(found)

    async with ring.member("a") as a:
        await until(lambda: len(a.ended) == 8)
        await until(lambda: floor() == 5 and a.consumer.status().unowned == 1)
        async with await psycopg.AsyncConnection.connect(logs.url, autocommit=True) as connection:
            assert await trim(connection, logs.schema, "orders", age=0.0, force=False) == 5
            assert await unowned.count_unowned(connection, logs.schema, 1, ring.group) == 1
        ring.assign(HIGH, "a")
        await until(lambda: nobodys in a.ended)
        await until(lambda: a.consumer.status().unowned == 0)
    assert a.ended == [*[mine] * 8, nobodys]


async def test_a_member_without_ranges_counts_no_message_without_an_owner(logs: Logs) -> None:
    async with consuming(member(logs), print) as consumer:
        assert consumer.status().unowned is None


async def test_a_member_that_stops_releases_hundreds_of_pieces_over_few_connections(
    postgres: PostgresServer, schema: str
) -> None:
    ring = Ring(Logs.make(postgres, schema, partitions=32))
    for number in range(8):
        ring.assign(Range(8_192 * number, 8_192 * number + 8_191), "a")

    def connections() -> int:
        count: int = ring.logs.execute("SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'")[
            0
        ][0]
        return count

    most = connections()
    async with ring.member("a") as a:
        await until(lambda: len(a.consumer.status().partitions) == 32 * 9)
        a.consumer.stop()
        while a.consumer.status().partitions:
            most = max(most, await anyio.to_thread.run_sync(connections))
            await anyio.sleep(0.005)
    assert most < 20
    assert ring.logs.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted") == [(0,)]


def waiting(logs: Logs) -> int:
    """The number of sessions that wait for a lock of a table of the log."""
    found: int = logs.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'relation' AND NOT granted")[0][0]
    return found


def of_psycopg(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("psycopg")]


async def test_a_member_that_ends_during_its_acquisitions_logs_no_line_of_the_client(
    four: Logs, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "_CLAIMS", pieces.BOUNDED)  # a claim that waits for its row without a limit
    ring = Ring(four)
    ring.assign(Range(0, SLOTS - 1), "a")
    before = ring.source("a")
    await before.open()
    await before.aclose()
    source = ring.source("a")
    with four.connect() as owner:
        owner.execute(four.query("LOCK TABLE {}.lanes_ring_pieces IN EXCLUSIVE MODE"))
        await source.open()
        await until(lambda: waiting(four) >= 4)
        await source.aclose()
    assert of_psycopg(caplog) == []


@pytest.mark.parametrize("kind", ["source", "dead letters"])
async def test_a_start_that_is_cancelled_logs_no_line_of_the_client(
    kind: str, four: Logs, caplog: pytest.LogCaptureFixture
) -> None:
    ring = Ring(four)
    opening = ring.source("a") if kind == "source" else PostgresDeadLetters(four.url, "dead", schema=four.schema)
    with four.connect() as owner:
        owner.execute(four.query("LOCK TABLE {}.lanes_migrations IN ACCESS EXCLUSIVE MODE"))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(opening.open)
            await until(lambda: waiting(four))
            tasks.cancel_scope.cancel()
    await opening.aclose()
    assert of_psycopg(caplog) == []
