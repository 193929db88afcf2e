"""A map of ring ranges on a real server: assignments are appended, replayed and refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import psycopg
import pytest
from psycopg import AsyncConnection

from lanes.errors import ConfigError
from lanes.ring import SLOTS, Assignment, Range
from lanes_postgres import Log, RangeMap
from tests.postgres.log.logs import Logs

pytestmark = pytest.mark.anyio

LAST = SLOTS - 1


@pytest.fixture
def ring(logs: Logs) -> RangeMap:
    return RangeMap(logs.log, group="billing")


def owned(logs: Logs, ring: RangeMap) -> list[tuple[int, int, str]]:
    with logs.connect() as connection:
        return [(each.range.lo, each.range.hi, each.consumer) for each in ring.ranges(connection)]


def test_a_map_without_an_assignment_has_no_owner(logs: Logs, ring: RangeMap) -> None:
    assert owned(logs, ring) == []
    with logs.connect() as connection:
        assert ring.history(connection) == []


def test_an_assignment_is_seen_by_other_objects_of_the_group(logs: Logs, ring: RangeMap) -> None:
    with logs.connect() as connection:
        assert ring.assign(connection, 0, LAST, "a") is True
        assert ring.assign(connection, 100, 200, "b") is True
    assert owned(logs, RangeMap(Log("orders", schema=logs.schema), group="billing")) == [
        (0, 99, "a"),
        (100, 200, "b"),
        (201, LAST, "a"),
    ]


def test_an_exact_assignment_again_appends_nothing(logs: Logs, ring: RangeMap) -> None:
    with logs.connect() as connection:
        ring.assign(connection, 0, 99, "a")
        assert ring.assign(connection, 0, 99, "a") is False
        assert ring.assign(connection, 10, 20, "a") is False
        assert len(ring.history(connection)) == 1


def test_a_range_of_two_owners_is_refused_and_changes_nothing(logs: Logs, ring: RangeMap) -> None:
    with logs.connect() as connection:
        ring.assign(connection, 0, 99, "a")
        ring.assign(connection, 100, 199, "b")
        before = ring.history(connection)
        with pytest.raises(
            ConfigError, match=r"the range 50-150 has slots of several owners \(50-99 of 'a', 100-150 of 'b'\)"
        ):
            ring.assign(connection, 50, 150, "c")
        assert ring.history(connection) == before
    assert owned(logs, ring) == [(0, 99, "a"), (100, 199, "b")]


def test_the_same_consumer_id_in_two_groups_is_two_identities(logs: Logs, ring: RangeMap) -> None:
    other = RangeMap(logs.log, group="shipping")
    with logs.connect() as connection:
        ring.assign(connection, 0, 99, "a")
        other.assign(connection, 50, 150, "a")
    assert owned(logs, ring) == [(0, 99, "a")]
    assert owned(logs, other) == [(50, 150, "a")]


def test_two_logs_have_maps_of_their_own(logs: Logs, ring: RangeMap) -> None:
    second = Log("invoices", schema=logs.schema)
    with logs.connect() as connection:
        second.create(connection)
        ring.assign(connection, 0, 99, "a")
        assert RangeMap(second, group="billing").ranges(connection) == ()


def test_a_split_gives_the_upper_part_of_a_range_away(logs: Logs, ring: RangeMap) -> None:
    with logs.connect() as connection:
        ring.assign(connection, 0, 99, "a")
        assert ring.split(connection, 40, "b") is True
        with pytest.raises(ConfigError, match="slot 40 is the first one of the range 40-99 of 'b'"):
            ring.split(connection, 40, "a")
    assert owned(logs, ring) == [(0, 39, "a"), (40, 99, "b")]


def test_the_history_tells_who_assigned_what_and_when(logs: Logs, ring: RangeMap) -> None:
    with logs.connect() as connection:
        ring.assign(connection, 0, 99, "a")
        ring.split(connection, 50, "b")
        first, second = ring.history(connection)
    assert (first.number, first.range, first.consumer, first.login) == (1, Range(0, 99), "a", "lanes")
    assert (second.number, second.range, second.consumer) == (2, Range(50, 99), "b")
    assert first.time <= second.time
    assert abs(datetime.now(UTC) - second.time) < timedelta(minutes=5)


def test_two_assignments_at_once_take_effect_one_after_the_other(logs: Logs, ring: RangeMap) -> None:
    """The second one waits for the first, and is then judged by its result."""
    with logs.connect() as connection:
        ring.assign(connection, 0, LAST, "a")
    refused: list[str] = []
    started = threading.Barrier(8)

    def assign(number: int) -> None:
        with logs.connect() as connection:
            started.wait()
            try:
                # Each range meets the next one, so only every second one can be accepted.
                ring.assign(connection, 100 * number, 100 * number + 150, f"c{number}")
            except ConfigError as error:
                refused.append(str(error))

    threads = [threading.Thread(target=assign, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with logs.connect() as connection:
        events = ring.history(connection)
    assert [event.number for event in events] == list(range(1, len(events) + 1))
    assert len(events) - 1 + len(refused) == 8
    taken = [event.range for event in events[1:]]
    assert len({at for each in taken for at in range(each.lo, each.hi + 1)}) == sum(map(len, taken))


async def test_a_map_works_over_an_asynchronous_connection(logs: Logs, ring: RangeMap) -> None:
    async with await AsyncConnection.connect(logs.url) as connection:
        assert await ring.assign(connection, 0, 99, "a") is True
        assert await ring.split(connection, 50, "b") is True
        assert await ring.ranges(connection) == (Assignment(Range(0, 49), "a"), Assignment(Range(50, 99), "b"))
        assert len(await ring.history(connection)) == 2


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda ring, connection: ring.assign(connection, 0, 99, "a"), "RangeMap.assign"),
        (lambda ring, connection: ring.split(connection, 50, "b"), "RangeMap.split"),
        (lambda ring, connection: ring.ranges(connection), "RangeMap.ranges"),
        (lambda ring, connection: ring.history(connection), "RangeMap.history"),
    ],
)
async def test_a_call_without_await_is_named_in_the_warning_of_python(
    logs: Logs, ring: RangeMap, call: Callable[[RangeMap, Any], Any], name: str
) -> None:
    async with await AsyncConnection.connect(logs.url) as connection:
        forgotten = call(ring, connection)
        assert forgotten.__qualname__ == name
        forgotten.close()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda log: RangeMap(cast(Any, "orders"), group="billing"), "log is a str; pass lanes_postgres.Log"),
        (
            lambda log: RangeMap(log, group=""),
            "group='': must be a str of 1 to 200 characters.*; name the purpose of its",
        ),
        (lambda log: RangeMap(log, group="b").member(""), "consumer='': must be a str of 1 to 200.*; name the process"),
        (lambda log: RangeMap(log, group="x" * 201), "must be a str of 1 to 200 characters"),
        (lambda log: RangeMap(log, group="a\0b"), "must be a str of 1 to 200 characters, without zero bytes"),
        (lambda log: cast(Any, RangeMap)(log), "group"),
        (lambda log: cast(Any, RangeMap)(log, groups="a"), "groups.*group"),
    ],
)
def test_an_invalid_map_is_refused(make: Callable[[Log], RangeMap], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make(Log("orders"))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda ring, connection: ring.assign(connection, 0, SLOTS, "a"), "hi=65536: must be a slot"),
        (lambda ring, connection: ring.assign(connection, -1, 4, "a"), "lo=-1: must be a slot"),
        (lambda ring, connection: ring.assign(connection, 5, 4, "a"), "lo=5, hi=4: a range ends at or above"),
        (
            lambda ring, connection: ring.assign(connection, 0, 4, ""),
            "consumer='': must be a str of 1 to 200.*; name the process",
        ),
        (
            lambda ring, connection: ring.split(connection, 5, ""),
            "consumer='': must be a str of 1 to 200.*; name the process",
        ),
        (lambda ring, connection: ring.assign(connection, 0, 4, None), "consumer=None: must be a str of 1 to 200"),
        (lambda ring, connection: ring.split(connection, 5, "a"), "nobody owns slot 5"),
        (lambda ring, connection: ring.split(connection, 5, "a"), "the group 'billing' of the log 'orders'.*slot 5"),
        (lambda ring, connection: ring.split(connection, "5", "a"), "slot='5': must be a whole number"),
        (lambda ring, connection: ring.split(connection, SLOTS, "a"), "slot=65536: must be a slot, a whole number in"),
        (lambda ring, connection: ring.assign("dsn", 0, 4, "a"), "a str is no connection"),
    ],
)
def test_a_wrong_call_is_refused(
    logs: Logs, ring: RangeMap, call: Callable[[RangeMap, Any], object], said: str
) -> None:
    with logs.connect() as connection, pytest.raises(ConfigError, match=said):
        call(ring, connection)
    assert owned(logs, ring) == []


def test_a_connection_in_a_transaction_is_refused(logs: Logs, ring: RangeMap) -> None:
    with logs.connect() as connection:
        connection.execute("SELECT 1")
        with pytest.raises(ConfigError, match="is in a transaction"):
            ring.assign(connection, 0, 4, "a")


def test_a_log_that_does_not_exist_is_named(logs: Logs) -> None:
    ring = RangeMap(Log("none", schema=logs.schema), group="billing")
    with logs.connect() as connection, pytest.raises(ConfigError, match="has no log 'none'; call Log"):
        ring.ranges(connection)


def test_the_database_refuses_a_row_that_is_no_range(logs: Logs) -> None:
    with pytest.raises(psycopg.errors.CheckViolation):
        logs.execute("INSERT INTO {}.lanes_ring_assignments VALUES (1, 'billing', 1, 5, 4, 'a')")
