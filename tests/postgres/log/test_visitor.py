"""A member decides, without a server, which partitions to read, to skip, to lose and to leave for later."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest

from lanes import ConfigError, PartitionId, SourceError
from lanes.core.types import Partition, Room
from lanes.errors import LanesError
from lanes.ownership import HeldLock, StateKey, StateLocked
from lanes.source import Assigned, BrokerContact, Lost, Progressed, Revoking
from lanes_postgres.log.reading import READER, StoredMessage, Wanted
from lanes_postgres.subscription.owned import Owned
from lanes_postgres.subscription.visitor import Visitor

pytestmark = pytest.mark.anyio

NAME = "postgres orders"


class Tables:
    """The tables of a log, whose answers the test gives; ``asked`` has the calls."""

    def __init__(self, *, own: bool = True) -> None:
        self.own = own
        self.schema = "lanes"
        self.asked: list[Any] = []
        self.first: list[int] = [0] * 4
        self.times: dict[int, float] = {}
        self.stored: dict[int, list[StoredMessage]] = {}

    async def oldest(self, connection: Any, reads: Mapping[int, int]) -> dict[int, float]:
        self.asked.append(("oldest", dict(reads)))
        return self.times

    async def firsts(self, connection: Any) -> list[int]:
        self.asked.append("firsts")
        return self.first

    async def fetch(self, connection: Any, wanted: Sequence[Wanted]) -> dict[int, list[StoredMessage]]:
        self.asked += wanted
        return self.stored


class Stand:
    """A visitor over stub tables, at a time that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *numbers: int, own: bool = True) -> None:
        self.now = 100.0
        for module in ("visitor", "owned"):
            monkeypatch.setattr(f"lanes_postgres.subscription.{module}.monotonic", lambda: self.now)
        self.tables = Tables(own=own)
        self.wakes = 0
        self.freed: list[str] = []
        nothing = cast(Any, None)
        self.visitor = Visitor(
            connections=nothing,
            tables=cast(Any, self.tables),
            log_name="orders",
            incarnation="i",
            subscription="billing",
            member="m",
            starts=[0] * 4,
            locks=nothing,
            states=nothing,
            visit="name",
            time_budget=5.0,
            poll_interval=0.5,
            out_of_range="earliest",
            name=NAME,
            kept=nothing,
            wake=self._wake,
            room=Room(50, 1_000),
            contact=BrokerContact(lambda: self.now),
        )
        for number in numbers:
            self.own(number)
        self.visitor._events.clear()

    def own(self, number: int) -> Owned:
        """Begin an ownership of a partition whose messages 10 to 19 are unread."""
        one = PartitionId("orders", number)

        async def free(held: HeldLock) -> None:
            self.freed.append(held.name)

        owned = Owned(
            number=number,
            partition=Partition(one, READER, "i", floor=10, deadline=self.now + 60.0),
            held=HeldLock(str(number), lambda: None, free, deadline=self.now + 60.0),
            key=StateKey("billing", one, "i"),
            epoch=1,
            floor=10,
            read=10,
            since=self.now,
            end=20,
        )
        self.visitor.own(owned)
        return owned

    def _wake(self) -> None:
        self.wakes += 1

    async def take(self, number: int, *positions: int, start: int = 10) -> None:
        """Take the answer to a read from a position."""
        found = {number: [message(position) for position in positions]} if positions else {}
        wanted = [Wanted(number, start, 10)]
        await self.visitor._take(cast(Any, None), wanted, found, dict(self.visitor.owned))


def message(position: int, value: bytes = b"value") -> StoredMessage:
    return StoredMessage(position, b"key", "s", None, value, 0.0)


def waiting(owned: Owned) -> list[int]:
    return [each.position for each in owned.waiting]


# --- reads


async def test_only_partitions_that_the_consumer_takes_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(monkeypatch, 0, 1, 2, 3)
    owned = stand.visitor.owned
    owned[0].revoked = True
    owned[1].over = True
    stand.visitor.room = Room(50, 1, frozenset({owned[2].partition}))
    owned[3].waiting.append(message(10))
    owned[2].waiting.append(message(10))
    assert stand.visitor._reading() == ({3: owned[3]}, 49)
    for full in (Room(1, 1_000), Room(50, 0)):
        stand.visitor.room = full
        assert stand.visitor._reading() == ({}, 0)


async def test_a_read_asks_for_as_many_messages_as_have_the_average_size(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(monkeypatch, 0)
    stand.visitor.room = Room(9_999, 1_000)
    assert stand.visitor._reading()[1] == 100, "the first read"
    await stand.take(0, 10, 11)
    stand.visitor.room = Room(9_999, 80)
    assert stand.visitor._reading()[1] == 10, "each message has 8 bytes"
    stand.visitor.room = Room(9_999, 1)
    assert stand.visitor._reading()[1] == 1
    stand.visitor.room = Room(9_999, 1 << 30)
    assert stand.visitor._reading()[1] == 2_000


@pytest.mark.parametrize(
    ("visit", "ordered", "expected", "asked"),
    [
        ("name", False, [2, 0, 1], []),
        ("name", True, [0, 1, 2], []),
        ("backlog", True, [1, 0, 2], []),
        ("oldest", True, [2, 1, 0], [("oldest", {0: 10, 1: 5, 2: 19})]),
    ],
)
async def test_partitions_with_messages_are_visited_in_the_order_of_the_source(
    visit: Any, ordered: bool, expected: list[int], asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand = Stand(monkeypatch)
    stand.visitor.visit, stand.visitor._ends = visit, [20, 20, 20, 20]
    stand.tables.times = {1: 2.0, 2: 1.0}
    reads = {2: 19, 0: 10, 3: 20, 1: 5}
    works = await stand.visitor._works(cast(Any, None), reads, ordered=ordered)
    assert [each.partition for each in works] == expected
    assert {each.partition: each.messages for each in works} == {0: 10, 1: 15, 2: 1}
    assert stand.tables.asked == asked


async def test_one_partition_needs_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(monkeypatch)
    stand.visitor.visit, stand.visitor._ends = "oldest", [20]
    works = await stand.visitor._works(cast(Any, None), {0: 10}, ordered=True)
    assert ([each.partition for each in works], stand.tables.asked) == ([0], [])


async def test_a_read_divides_the_room_among_the_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(monkeypatch, 2, 1, 0)
    stand.visitor._ends = [20, 20, 20]
    stand.visitor.room = Room(15, 1_000)
    await stand.visitor._read(cast(Any, None))
    assert stand.tables.asked[:2] == [Wanted(0, 10, 10), Wanted(1, 10, 5)]
    assert stand.visitor._order == [0, 1]
    stand = Stand(monkeypatch, 0)
    stand.visitor.owned[0].end = 10
    await stand.visitor._read(cast(Any, None))
    assert stand.tables.asked == []


async def test_read_messages_wait_for_their_delivery(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(monkeypatch, 0)
    owned = stand.visitor.owned[0]
    await stand.take(0, 10, 11)
    assert (waiting(owned), owned.read, stand.wakes) == ([10, 11], 12, 1)
    await stand.take(0, 12, start=12)
    assert (waiting(owned), owned.read, stand.wakes) == ([10, 11, 12], 13, 2)
    await stand.take(0, 12, 13, start=12)
    assert (waiting(owned), owned.read, stand.wakes) == ([10, 11, 12], 13, 2), "another read was faster"


@pytest.mark.parametrize("state", ["over", "revoked", "late"])
async def test_messages_of_a_partition_that_is_given_up_are_dropped(
    state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand = Stand(monkeypatch, 0)
    owned = stand.visitor.owned[0]
    if state == "late":
        stand.now += 60.0
    else:
        setattr(owned, state, True)
    wakes = stand.wakes
    await stand.take(0, 10, 11)
    assert (waiting(owned), owned.read) == ([], 10)
    assert (stand.wakes == wakes) is (state != "late"), "a loss wakes the source"


# --- gaps


async def test_messages_above_a_gap_do_not_overtake_waiting_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(monkeypatch, 0)
    owned = stand.visitor.owned[0]
    owned.waiting.append(message(9))
    await stand.take(0, 12)
    assert (waiting(owned), owned.read, stand.tables.asked) == ([9], 10, [])


@pytest.mark.parametrize(
    ("policy", "stored", "read"), [("earliest", [14], 14), ("latest", [14], 20), ("earliest", [], 20)]
)
async def test_a_trim_of_unread_messages_is_skipped_by_the_policy(
    policy: Any, stored: list[int], read: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stand = Stand(monkeypatch, 0)
    owned = stand.visitor.owned[0]
    stand.visitor.out_of_range = policy
    stand.tables.first, stand.tables.stored = [13], {0: [message(each) for each in stored]}
    await stand.take(0)
    assert (owned.read, waiting(owned), stand.visitor.failure) == (read, [], None)
    assert stand.visitor.events() == [Progressed(owned.partition, read)]
    assert stand.tables.asked == ["firsts", Wanted(0, 10, 1)]
    said = f"{NAME}: partition 0 continues at position 10, and a trim deleted its messages below {max(stored or [20])}"
    assert caplog.messages == [f'{said}; its first stored position is 13, out_of_range="{policy}"']


async def test_a_trim_of_unread_messages_ends_a_source_that_may_not_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(monkeypatch, 0)
    stand.visitor.out_of_range, stand.tables.stored = "fail", {0: [message(14)]}
    await stand.take(0)
    assert isinstance(stand.visitor.failure, SourceError)
    assert "a trim deleted its messages below 14; set out_of_range to" in str(stand.visitor.failure)
    assert (stand.visitor.owned[0].read, stand.wakes, stand.visitor.events()) == (10, 1, [])


async def test_a_read_without_an_answer_below_the_end_skips_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The messages are there, and a later read finds them."""
    stand = Stand(monkeypatch, 0)
    stand.tables.stored = {0: [message(10)]}
    await stand.take(0)
    assert (stand.visitor.owned[0].read, stand.visitor.events()) == (10, [])


async def test_a_table_of_the_user_has_gaps_that_are_no_trim(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(monkeypatch, 0, own=False)
    owned = stand.visitor.owned[0]
    await stand.take(0, 12, 15)
    assert (waiting(owned), owned.read, stand.tables.asked) == ([12, 15], 16, ["firsts"])
    owned.waiting.clear()
    await stand.take(0, start=16)
    assert owned.read == 20, "the user has deleted the rows up to the end"
    assert stand.visitor.events() == [Progressed(owned.partition, 20)]
    stand = Stand(monkeypatch, 0, own=False)
    stand.tables.first, stand.tables.stored = [11], {0: [message(12)]}
    await stand.take(0, 12)
    assert stand.visitor.events() == [Progressed(stand.visitor.owned[0].partition, 12)]


# --- ownership


async def test_the_last_visits_decide_the_order_of_deliveries(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(monkeypatch, 0, 1, 2)
    stand.visitor._order = [2, 9, 0, 2]
    assert [each.number for each in stand.visitor.delivery_order()] == [2, 0, 1]


async def test_the_assignments_of_one_look_come_together(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(monkeypatch)
    stand.visitor._acquiring = True
    partitions = [stand.own(number).partition for number in (0, 1)]
    assert stand.visitor.events() == []
    stand.visitor._acquiring = False
    assert stand.visitor.events() == [Assigned(each) for each in partitions]
    assert stand.visitor.events() == []


async def test_a_revoked_partition_keeps_its_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(monkeypatch, 0)
    owned = stand.visitor.owned[0]
    await stand.take(0, 10, 11)
    stand.visitor.revoke(owned)
    assert (owned.revoked, waiting(owned), owned.read, stand.wakes) == (True, [], 10, 2)
    assert stand.visitor.events() == [Revoking(owned.partition, math.inf)]
    assert (stand.visitor.owned, stand.freed) == ({0: owned}, [])


@pytest.mark.parametrize("told", [True, False])
async def test_a_lost_partition_is_free_at_once_and_left_to_the_others(
    told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The runtime warns about all lost partitions in one line, so the member does not."""
    caplog.set_level(logging.INFO)
    stand = Stand(monkeypatch)
    owned = stand.own(1)
    if told:
        stand.visitor.events()
    stand.now += 1.0
    stand.visitor._looked_at = stand.now
    for _ in range(2):
        stand.visitor.lose(owned, "why")
    await asyncio.sleep(0)
    assert (owned.over, owned.partition.deadline, stand.visitor.owned) == (True, stand.now, {})
    assert stand.visitor.events() == [Lost(owned.partition, "why")] * told
    assert (stand.freed, stand.visitor._cool, stand.wakes) == (["1"], {1: stand.now + 1.0}, 1)
    assert stand.visitor._kicked.is_set() and stand.visitor._looked_at == -math.inf
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("error", "connected", "ends"),
    [
        (SourceError("no answer", retryable=True), False, False),
        (SourceError("no answer", retryable=True), True, False),
        (SourceError("the login was refused"), False, False),
        (SourceError("the table was dropped"), True, True),
        (ConfigError("the address is wrong"), False, True),
    ],
)
async def test_a_failure_of_the_server_ends_the_source_only_if_no_later_call_can_succeed(
    error: LanesError, connected: bool, ends: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    stand = Stand(monkeypatch)
    for _ in range(2):
        stand.visitor._failed(error, stand.now, connected)
        stand.now += 5.0
    assert stand.visitor.failure is (error if ends else None)
    assert (stand.visitor.contact.outage() is None) is ends
    assert len(caplog.messages) == (not ends)


async def test_an_outage_is_reported_after_3_s_once_a_minute_and_at_its_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    stand = Stand(monkeypatch)
    visitor = stand.visitor
    begun = stand.now
    visitor.contact = BrokerContact(lambda: stand.now)
    told: list[tuple[float, int]] = []
    while stand.now < begun + 130.0:
        visitor._failed(SourceError("refused", retryable=True), stand.now, False)
        told += [(stand.now - begun, each.levelno) for each in caplog.records[len(told) :]]
        stand.now += 0.25
    assert told == [(3.0, logging.WARNING), (63.0, logging.WARNING), (123.0, logging.WARNING)]
    assert caplog.messages[1] == (
        f"{NAME}: no PostgreSQL server has answered for 63 s (refused). Until one answers, no message arrives and no "
        "position is stored. Start the PostgreSQL server, or correct the network and the credentials"
    )
    visitor._answered()
    visitor._answered()
    assert caplog.messages[3:] == [f"{NAME}: a PostgreSQL server answers again after 130 s"]
    for _ in range(20):
        visitor._failed(SourceError("down; start it", retryable=True), stand.now, False)
        stand.now += 0.25
    (later,) = caplog.messages[4:]
    assert later == (
        f"{NAME}: no PostgreSQL server has answered for 3 s (down; start it). Until one answers, no message arrives "
        "and no position is stored"
    ), "the error has its own remedy"


async def test_a_locked_state_is_left_for_longer_each_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A former owner may be frozen in a transaction for hours."""
    caplog.set_level(logging.WARNING)
    stand = Stand(monkeypatch)
    pauses = []
    for _ in range(6):
        stand.visitor._leave_for_later(2, StateLocked("a transaction holds the row"))
        pauses.append(stand.visitor._cool[2] - stand.now)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    (line,) = caplog.messages
    assert line.startswith(f"{NAME}: partition 2 has no owner, because a former owner is frozen in a transaction: a tr")


@pytest.mark.parametrize(("backend", "notified"), [(7, False), (8, True)])
async def test_only_notifications_of_other_sessions_begin_a_look(
    backend: int, notified: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The own session has read its messages already."""
    stand = Stand(monkeypatch)
    stand.visitor._backend, stand.visitor._active_until = 7, 105.0
    stand.visitor._told(backend, "")
    assert (stand.visitor._notified, stand.visitor._active_until) == (notified, -math.inf if notified else 105.0)
