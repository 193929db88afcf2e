"""The calls of a source concern the present assignments of its member only."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from lanes import ConfigError, SourceError
from lanes.core.types import Partition, Room, Settlement
from lanes.ownership import State, StateChange, StateKey
from lanes.source import Backlog, Delivered, Lost
from lanes_postgres import Log, PostgresSource, RangeMap
from lanes_postgres.subscription.owned import Owned
from tests.postgres.log.test_visitor import Stand, message

pytestmark = pytest.mark.anyio


class Calls:
    """A source whose member owns partitions, and the changes of states that the source has stored."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
        self.stand = Stand(monkeypatch, *numbers)
        self.source = PostgresSource("postgresql://host/base", Log("orders"), subscription="billing")
        self.source._visitor = self.stand.visitor
        self.source._visiting = None  # type: ignore[assignment]
        self.source._arrived = asyncio.Event()
        self.source._store = self._store
        self.stored: list[StateChange] = []
        self.refused: set[StateKey] = set()

    async def _store(self, changes: Sequence[StateChange]) -> list[bool]:
        self.stored += changes
        return [change.key not in self.refused for change in changes]

    def owned(self, number: int = 0) -> Owned:
        return self.stand.visitor.owned[number]

    def former(self, number: int = 0) -> Partition:
        """An earlier assignment of a partition that the member owns again."""
        owned = self.owned(number)
        return Partition(owned.partition.id, owned.partition.reader, "i", floor=5)


async def test_positions_are_stored_with_the_epoch_of_their_ownership(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch, 0, 1)
    partitions = [calls.owned(number).partition for number in (0, 1)]
    calls.owned(1).epoch = 3
    await calls.source.settle([Settlement(partitions[0], [], 12, [(14, 15)]), Settlement(partitions[1], [], 11, [])])
    assert [(each.key.partition, each.state) for each in calls.stored] == [
        (partitions[0].id, State(1, 12, [(14, 15)])),
        (partitions[1].id, State(3, 11, [])),
    ]
    assert [calls.owned(number).floor for number in (0, 1)] == [12, 11]
    assert calls.owned(0).settled


async def test_nothing_is_stored_for_a_partition_that_the_member_may_not_own(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch, 0, 1, 2)
    calls.owned(1).held.lose("the connection ended")  # type: ignore[attr-defined]
    without_floor = Settlement(calls.owned(2).partition, [])
    await calls.source.settle(
        [Settlement(calls.former(), [], 12, []), Settlement(calls.owned(1).partition, [], 12, []), without_floor]
    )
    assert calls.stored == []
    await calls.source.settle([without_floor, Settlement(calls.owned(0).partition, [], 12, [])])
    assert [each.key.partition.number for each in calls.stored] == [0]


async def test_a_refused_position_loses_its_partition_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch, 0, 1)
    lost = calls.owned(0)
    calls.refused = {lost.key}
    await calls.source.settle([Settlement(calls.owned(number).partition, [], 12, []) for number in (0, 1)])
    assert calls.stand.visitor.events() == [Lost(lost.partition, "another process owns the partition")]
    assert (list(calls.stand.visitor.owned), lost.floor, calls.owned(1).floor) == ([1], 10, 12)


async def test_a_release_of_a_former_assignment_releases_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch, 0)
    owned = calls.owned()
    await calls.source.release(calls.former())
    await calls.source.hand_over(calls.former(), [])
    assert (calls.stand.freed, list(calls.stand.visitor.owned)) == ([], [0])
    await calls.source.release(owned.partition)
    assert (calls.stand.freed, list(calls.stand.visitor.owned), owned.over) == (["0"], [], True)
    assert calls.stand.visitor._cool == {0: calls.stand.now + 1.0}, "another member may acquire it first"


async def test_lag_and_backlog_belong_to_the_present_assignment(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch, 0)
    owned = calls.owned()
    owned.floor, owned.read, owned.end = 11, 13, 20
    owned.waiting.extend([message(11), message(12)])
    assert (calls.source.lag(owned.partition), calls.source.backlog(owned.partition)) == (9, Backlog(9))
    owned.end = 5
    assert (calls.source.lag(owned.partition), calls.source.backlog(owned.partition)) == (0, Backlog(2))
    assert (calls.source.lag(calls.former()), calls.source.backlog(calls.former())) == (None, Backlog(None))
    assert calls.source.unowned() is None


async def test_the_partitions_of_the_last_visits_fill_the_room_first(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch, 0, 1, 2, 3, 4)
    for number in range(5):
        calls.owned(number).waiting.extend(message(position) for position in (10, 11))
    calls.owned(1).revoked = True
    calls.owned(2).over = True
    calls.stand.visitor._order = [4, 0]
    room = Room(3, 1_000, frozenset({calls.owned(3).partition}))
    events = await calls.source.receive(room)
    assert calls.stand.visitor.room is room and calls.stand.visitor._kicked.is_set()
    found = [each for each in events if isinstance(each, Delivered)]
    assert [(each.partition.id.number, len(each.run), each.size) for each in found] == [(4, 2, 16), (0, 1, 8)]
    (rest,) = await calls.source.receive(Room(9, 1, frozenset({calls.owned(3).partition})))
    assert isinstance(rest, Delivered) and rest.partition.id.number == 0


@pytest.mark.parametrize("other", [Log("other"), Log("orders", schema="x")])
async def test_ranges_of_another_log_are_refused(other: Log) -> None:
    ranges = RangeMap(other, group="billing").member("a")
    with pytest.raises(ConfigError, match=r"^ranges is a map of .*; pass one log to both$"):
        PostgresSource("postgresql://host/base", Log("orders"), subscription="billing", ranges=ranges)


async def test_the_partitions_of_a_call_share_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch, 0, 1)
    for number in (0, 1):
        calls.owned(number).waiting.extend(message(position) for position in (10, 11))
    found = [each for each in await calls.source.receive(Room(9, 20)) if isinstance(each, Delivered)]
    assert [(each.partition.id.number, each.size) for each in found] == [(0, 16), (1, 8)]


async def test_an_ended_task_or_a_failure_ends_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ended(error: Exception | None) -> None:
        if error is not None:
            raise error

    for place in ("_locking", "_visiting"):
        calls = Calls(monkeypatch, 0)
        for error in (None, SourceError("no answer")):
            task: Any = asyncio.create_task(ended(error))
            await asyncio.wait([task])
            setattr(calls.source, place, task)
            calls.owned().waiting.append(message(10))
            if error is None:
                assert len(await calls.source.receive(Room(9, 100))) == 1
            else:
                with pytest.raises(SourceError, match="no answer"):
                    await calls.source.receive(Room(9, 100))
    calls = Calls(monkeypatch, 0)
    calls.stand.visitor.failure = SourceError("a trim deleted its messages")
    with pytest.raises(SourceError, match="a trim"):
        await calls.source.receive(Room(9, 100))


async def test_a_receive_waits_for_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch, 0)
    receiving = asyncio.create_task(calls.source.receive(Room(9, 100)))
    await asyncio.sleep(0)
    calls.source._arrived.set()
    await asyncio.sleep(0)
    assert not receiving.done(), "it was woken for nothing"
    calls.owned().waiting.append(message(10))
    calls.source._arrived.set()
    assert len(await receiving) == 1
