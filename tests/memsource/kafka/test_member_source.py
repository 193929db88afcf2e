"""``KafkaMemberSource`` turns the behaviour of Kafka into the contract of ``lanes.source``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from lanes.core.types import Partition, Room, Settlement
from lanes.errors import ConfigError, ContractError, SourceError
from lanes.source import (
    Assigned,
    Backlog,
    Backlogged,
    Confirming,
    Delivered,
    Exhausted,
    Lost,
    Progressed,
    Retaining,
    Retention,
    Revoking,
    SourceEvent,
)
from memsource.kafka.client import Commit
from memsource.kafka.source import KafkaMemberSource
from tests.fakes.cut_short import cut_short
from tests.memsource.kafka.stand import Stand

ROOM = Room(1_000, 1 << 20)
PROTOCOLS = ("eager", "cooperative", "848")
pytestmark = pytest.mark.anyio


def positions(events: Sequence[SourceEvent]) -> list[int]:
    return [message.position for event in events if isinstance(event, Delivered) for message in event.run]


async def opened(stand: Stand, name: str = "one", **arguments: Any) -> tuple[KafkaMemberSource, list[Partition]]:
    """A source and its assigned partitions."""
    source = KafkaMemberSource(stand.broker, name, lambda: stand.now, **arguments)
    await source.open()
    events = await source.receive(Room(0, 0))
    return source, [event.partition for event in events if isinstance(event, Assigned)]


async def settle_later(source: KafkaMemberSource, settlement: Settlement, told: list[str]) -> None:
    try:
        await source.settle([settlement])
    except SourceError as error:
        told.append(f"retryable={error.retryable}: {error}")
    else:
        told.append("made")


async def settled() -> None:
    """Let every ready task run."""
    for _ in range(5):
        await anyio.lowlevel.checkpoint()


async def test_only_a_partition_assigned_as_paused_is_resumed() -> None:
    stand = Stand(2, 3)
    source, (zero, one) = await opened(stand)
    await cut_short(source.receive, Room(10, 1 << 20, frozenset({zero, one})))
    assert source.client.paused == {0, 1}
    stand.broker.group.revoke(0)
    stand.to(0.5)
    assert await source.receive(Room(0, 0, frozenset({zero, one}))) == [Revoking(zero, 48.0)]
    await source.release(zero)
    stand.to(1.0)
    (event,) = await source.receive(Room(0, 0, frozenset({one})))
    assert isinstance(event, Assigned)
    (delivered,) = await source.receive(Room(10, 1 << 20, frozenset({one})))
    assert isinstance(delivered, Delivered) and delivered.partition is event.partition
    assert source.client.paused == {1}


async def test_completed_positions_are_handed_over_with_the_floor() -> None:
    stand = Stand(1, 10)
    source, (partition,) = await opened(stand)
    await source.settle([Settlement(partition, [], 3, [(4, 6), (8, 9)])])
    await source.aclose()
    source, (again,) = await opened(stand, "two")
    assert (again.floor, list(again.completed)) == (3, [(4, 6), (8, 9)])
    # Foreign metadata is ignored.
    stand.commit(source.client, 3, "written by another client")
    await source.aclose()
    source, (foreign,) = await opened(stand, "three")
    assert (foreign.floor, foreign.completed) == (3, ())
    assert source.degraded == 0


async def test_without_hand_over_the_floor_alone_is_committed() -> None:
    stand = Stand(1, 10)
    stand.broker.hands_over = False
    source = KafkaMemberSource(stand.broker, "one", lambda: stand.now)
    traits = await source.open()
    assert (traits.hands_over, traits.settles) == (False, "cumulative")
    (event,) = await source.receive(Room(0, 0))
    assert isinstance(event, Assigned)
    await source.settle([Settlement(event.partition, [], 3, [(4, 6)])])
    assert stand.broker.committed(0) == Commit(3)
    with pytest.raises(ContractError, match="partition 0 has no floor"):
        await source.settle([Settlement(event.partition, [])])


async def test_the_backlog_ends_at_an_open_transaction() -> None:
    stand = Stand(1, 2, backlogs=True)
    source, (partition,) = await opened(stand)
    assert isinstance(source, Backlogged)
    assert source.backlog(partition) == Backlog(2)
    assert positions(await source.receive(ROOM)) == [0, 1]
    stand.broker.open_transaction(0, stand.now)
    stand.publish(3)
    assert source.backlog(partition) == Backlog(0)
    stand.broker.end_transaction(0, stand.now)
    assert source.backlog(partition) == Backlog(3)
    assert positions(await source.receive(ROOM)) == [2, 3, 4]


async def test_a_limit_of_size_tells_the_retention_of_a_message() -> None:
    stand = Stand(1, retention_bytes=1_000)
    source, (partition,) = await opened(stand)
    assert isinstance(source, Retaining)
    stand.publish(1)
    (event,) = await source.receive(ROOM)
    assert isinstance(event, Delivered)
    (message,) = event.run
    # Nothing was written yet.
    assert source.retention(message) is None
    for second in range(1, 10):
        stand.to(float(second))
        stand.broker.skip(1, size=100)
        assert source.retention(message) == Retention((1_000 - 100 * second) / 100, 10.0, "retention.bytes=1000")
    stand.broker.skip(1, size=100)
    assert source.retention(message) == Retention(0.0, 1.0, "its retention, because the log begins at offset 1")
    await source.release(partition)
    assert source.retention(message) is None
    assert not isinstance(KafkaMemberSource(Stand().broker, "one"), Retaining | Backlogged)


async def test_a_completed_set_above_the_metadata_limit_loses_its_highest_offsets() -> None:
    # Runs of 200 offsets, far apart: too wide for a bitmap, and two bytes or more each.
    completed = [(start, start + 1) for start in range(1, 1_000_000, 211)]
    stand = Stand(1)
    stand.broker.skip(2_000_000)
    source, (partition,) = await opened(stand)
    await source.settle([Settlement(partition, [], 0, completed)])
    assert source.degraded == 1
    await source.aclose()
    _, (again,) = await opened(stand, "two")
    kept = list(again.completed)
    assert 0 < len(kept) < len(completed)
    assert kept == completed[: len(kept)]


async def test_a_lower_metadata_limit_of_the_broker_is_kept() -> None:
    stand = Stand(1, 200, metadata_limit=20)
    source, (partition,) = await opened(stand)
    completed = [(start, start + 1) for start in range(1, 200, 3)]
    await source.settle([Settlement(partition, [], 0, completed)])
    commit = stand.broker.committed(0)
    assert commit is not None and 1 < commit.units() <= 20
    assert source.degraded >= 1
    await source.settle([Settlement(partition, [], 5)])
    assert stand.broker.committed(0) == Commit(5)


async def test_a_broker_without_metadata_gets_floors() -> None:
    stand = Stand(1, 10, metadata_limit=1)
    source, (partition,) = await opened(stand)
    await source.settle([Settlement(partition, [], 2, [(3, 4)])])
    assert stand.broker.committed(0) == Commit(2)


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_with_the_broker_down_a_commit_blocks_or_fails_after_seconds(protocol: str) -> None:
    stand = Stand(1, 3, protocol=protocol)
    source, (partition,) = await opened(stand)
    told: list[str] = []
    stand.broker.stop_broker(1.0)
    stand.to(1.0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(settle_later, source, Settlement(partition, [], 3), told)
        await settled()
        stand.to(6.9)
        await settled()
        assert told == []
        stand.to(7.0)
        await settled()
        stand.to(24.0)
        stand.broker.start_broker(24.0)
    if protocol == "848":
        assert (told, stand.broker.committed(0)) == (["made"], Commit(3))
    else:
        assert told == ["retryable=True: T/one: the broker is down, so nothing was committed; start the broker"]
        assert stand.broker.committed(0) is None


async def test_a_cancelled_commit_is_never_sent() -> None:
    stand = Stand(1, 3, protocol="848")
    source, (partition,) = await opened(stand)
    stand.broker.stop_broker(0.0)
    await cut_short(source.settle, [Settlement(partition, [], 3)])
    stand.broker.start_broker(1.0)
    await settled()
    assert stand.broker.committed(0) is None


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_frozen_process_does_nothing_and_wakes_as_a_zombie(protocol: str) -> None:
    stand = Stand(1, 3, protocol=protocol)
    source, (partition,) = await opened(stand)
    stand.broker.freeze("one", 9.0)
    told: list[str] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(settle_later, source, Settlement(partition, [], 3), told)
        await cut_short(source.receive, ROOM)
        other = KafkaMemberSource(stand.broker, "two", lambda: stand.now)
        await other.open()
        stand.to(6.0)
        assert [type(event) for event in await other.receive(Room(0, 0))] == [Assigned]
        assert told == []
        stand.to(9.0)
    assert "retryable=True" in told[0] and "UNKNOWN_MEMBER_ID" in told[0]
    (event,) = await source.receive(ROOM)
    assert isinstance(event, Lost) and event.partition is partition
    assert source.owned == []


async def test_a_crashed_process_changes_nothing() -> None:
    stand = Stand(1, 3)
    source, (partition,) = await opened(stand)
    stand.broker.crash("one", 0.0)
    for call in (
        source.receive(ROOM),
        source.settle([Settlement(partition, [], 3)]),
        source.extend([]),
        source.release(partition),
        source.open(),
    ):
        with pytest.raises(SourceError, match="its process has crashed") as caught:
            await call
        assert not caught.value.retryable
    await source.aclose()
    # The session continues.
    assert (stand.owners(), stand.broker.committed(0)) == (["one"], None)


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_partition_that_is_not_released_in_time_is_lost(protocol: str) -> None:
    stand = Stand(1, 3, protocol=protocol, max_poll_interval=10.0)
    source, (partition,) = await opened(stand)
    stand.broker.group.revoke(0)
    stand.to(0.5)
    assert await source.receive(Room(0, 0)) == [Revoking(partition, 8.0)]
    told: list[SourceEvent] = []

    async def receive() -> None:
        told.extend(await source.receive(ROOM))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(receive)
        await settled()
        stand.to(8.4)
        await settled()
        assert told == []
        stand.to(8.5)
    assert told == [Lost(partition, "the partition was not released in time")]
    await source.release(partition)
    stand.to(9.0)
    assert [type(event) for event in await source.receive(ROOM)] == [Assigned]


async def test_a_member_that_hangs_in_a_revoke_loses_all_partitions() -> None:
    stand = Stand(2, 3, protocol="848", max_poll_interval=10.0)
    source, partitions = await opened(stand)
    other = KafkaMemberSource(stand.broker, "two", lambda: stand.now)
    await other.open()
    stand.to(0.5)
    (event,) = await source.receive(Room(0, 0))
    assert isinstance(event, Revoking)
    source.client.polling = True  # heartbeats continue, and no receive checks the deadline
    stand.to(10.5)
    assert stand.owners() == ["two", "two"]
    overdue, lost = (await source.receive(Room(0, 0)), await source.receive(Room(0, 0)))
    assert [each.partition for each in (*overdue, *lost) if isinstance(each, Lost)] == partitions[::-1]
    stand.to(11.0)
    assert len(await other.receive(Room(0, 0))) == 2


async def test_a_fenced_member_loses_its_revoked_partitions_too() -> None:
    stand = Stand(2, 3)
    source, partitions = await opened(stand)
    stand.broker.group.revoke(1)
    stand.to(0.5)
    assert [type(event) for event in await source.receive(Room(0, 0))] == [Revoking]
    stand.broker.freeze("one", 9.0)
    stand.to(9.0)
    # Kafka itself runs no callback for a partition that is being revoked.
    lost = await source.receive(Room(0, 0))
    assert [event.partition for event in lost if isinstance(event, Lost)] == partitions


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_recreated_topic_stops_the_source(protocol: str) -> None:
    stand = Stand(1, 100, protocol=protocol)
    source, (partition,) = await opened(stand)
    await source.receive(ROOM)
    stand.broker.delete_topic(0.0)
    stand.broker.create_topic(0.2)
    stand.publish(150)
    stand.to(1.0)
    with pytest.raises(SourceError, match="topic T was deleted and created again: its id is T-2, not T-1") as caught:
        await source.receive(ROOM)
    assert not caught.value.retryable
    with pytest.raises(SourceError, match="The source commits nothing more"):
        await source.settle([Settlement(partition, [], 100)])
    assert stand.broker.committed(0) is None


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_deleted_topic_is_lost_and_a_new_one_has_another_incarnation(protocol: str) -> None:
    stand = Stand(1, 5, protocol=protocol)
    source, (partition,) = await opened(stand)
    assert positions(await source.receive(ROOM)) == [0, 1, 2, 3, 4]
    stand.broker.delete_topic(0.0)
    with pytest.raises(SourceError, match="UNKNOWN_TOPIC_OR_PART") as caught:
        await source.settle([Settlement(partition, [], 5)])
    assert caught.value.retryable
    stand.to(1.0)
    (event,) = await source.receive(ROOM)
    assert isinstance(event, Lost) and event.partition is partition
    await cut_short(source.receive, ROOM)
    stand.broker.create_topic(2.0)
    stand.publish(2)
    stand.to(3.0)
    (event,) = await source.receive(ROOM)
    assert isinstance(event, Assigned)
    assert (event.partition.floor, event.partition.incarnation) == (0, "T-2")
    assert positions(await source.receive(ROOM)) == [0, 1]


async def test_a_position_the_log_does_not_reach_is_an_error_that_names_the_remedy() -> None:
    stand = Stand(1, 5, offset_reset="error")
    source, _ = await opened(stand)
    with pytest.raises(SourceError, match=r"_AUTO_OFFSET_RESET: partition 0 of T has no position 0.*set offset_reset"):
        await source.receive(ROOM)


async def test_a_reset_position_has_no_completed_positions() -> None:
    stand = Stand(1, 10)
    source, (partition,) = await opened(stand)
    await source.settle([Settlement(partition, [], 2, [(4, 9)])])
    await source.aclose()
    stand.broker.delete_records(0, 3, 0.0)
    source, (again,) = await opened(stand, "two")
    assert (again.floor, again.completed) == (3, ())
    assert positions(await source.receive(ROOM)) == [3, 4, 5, 6, 7, 8, 9]


async def test_a_static_member_that_is_fenced_loses_all_and_fails_for_good() -> None:
    stand = Stand(1, 5)
    source, (partition,) = await opened(stand, instance="static")
    await opened(stand, "two", instance="static")
    (event,) = await source.receive(ROOM)
    assert isinstance(event, Lost) and event.partition is partition
    with pytest.raises(SourceError, match="static member 'static' was fenced") as caught:
        await source.receive(ROOM)
    assert not caught.value.retryable
    with pytest.raises(SourceError, match="_FATAL") as caught:
        await source.settle([Settlement(partition, [], 1)])
    assert not caught.value.retryable


async def test_gaps_at_the_end_are_progress_and_the_end_comes_once() -> None:
    stand = Stand(1, 2)
    stand.broker.skip(3)
    source, (partition,) = await opened(stand)
    assert positions(await source.receive(Room(1, 100))) == [0]
    events = await source.receive(Room(1, 100))
    assert (positions(events), events[1:]) == ([1], [Progressed(partition, 5)])
    source.finish()
    assert [type(event) for event in await source.receive(ROOM)] == [Exhausted]
    await cut_short(source.receive, ROOM)


async def test_the_client_does_not_poll_between_two_receives() -> None:
    stand = Stand(1, 2, max_poll_interval=6.0)
    source, (partition,) = await opened(stand)
    await cut_short(source.receive, Room(0, 0))
    stand.to(6.0)
    assert stand.owners() == [None]
    (event,) = await source.receive(Room(0, 0))
    assert isinstance(event, Lost) and event.partition is partition
    assert [type(event) for event in await source.receive(Room(0, 0))] == [Assigned]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(source.receive, Room(0, 0))
        await settled()
        # A waiting member polls continually.
        stand.to(60.0)
        assert stand.owners() == ["one"]
        tasks.cancel_scope.cancel()


async def test_heartbeats_stop_while_a_close_hangs() -> None:
    stand = Stand(1, 2)
    source, _ = await opened(stand)
    source.block("aclose")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(source.aclose)
        await settled()
        stand.to(6.0)
        assert stand.owners() == [None]
        source.unblock("aclose")
    assert (len(source.called("aclose")), source.owned) == (1, [])


async def test_open_fails_while_the_broker_is_down() -> None:
    stand = Stand(1)
    stand.broker.stop_broker(0.0)
    source = KafkaMemberSource(stand.broker, "one", lambda: stand.now)
    with pytest.raises(SourceError, match="T/one cannot join: _WAIT_COORD") as caught:
        await source.open()
    assert caught.value.retryable
    assert repr(source) == "<KafkaMemberSource one of T: 0 partitions>"
    with pytest.raises(ConfigError, match="batch"):
        KafkaMemberSource(stand.broker, "two", batch=0)


async def test_an_injected_failure_fails_a_commit_once() -> None:
    stand = Stand(1, 5)
    source, (partition,) = await opened(stand)
    source.fail("settle", SourceError("unknown", retryable=True), done=True)
    with pytest.raises(SourceError, match="unknown"):
        await source.settle([Settlement(partition, [], 3)])
    assert stand.broker.committed(0) == Commit(3)


async def test_a_commit_that_waits_while_its_partition_is_lost_is_not_made() -> None:
    stand = Stand(1, 9)
    source, (partition,) = await opened(stand)
    told: list[str] = []
    source.block("settle")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(settle_later, source, Settlement(partition, [], 5), told)
        await settled()
        stand.broker.lose(0, stand.now)
        stand.to(3.0)
        (lost,) = await source.receive(Room(0, 0))
        assert isinstance(lost, Lost) and lost.partition is partition
        # The task continues before its cancellation.
        source.unblock("settle")
    assert told == ["retryable=True: T/one: partition 0 was released or lost, so the source commits it no more"]
    assert stand.broker.committed(0) is None


@pytest.mark.parametrize(("asleep", "confirmed"), [(5.0, True), (7.0, False)], ids=["within the session", "past it"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_process_that_wakes_is_confirmed_while_it_is_a_member(
    protocol: str, asleep: float, confirmed: bool
) -> None:
    stand = Stand(2, 3, protocol=protocol, confirms=True, heartbeat_interval=0.5)
    source, partitions = await opened(stand)
    assert isinstance(source, Confirming)
    assert source.freeze_limit() == 4.5
    stand.broker.freeze("one", asleep)
    answers: list[Sequence[Partition]] = []

    async def confirm(source: Confirming) -> None:
        answers.append(await source.confirm(partitions))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(confirm, source)
        await settled()
        assert answers == []
        stand.to(asleep)
    assert answers == [partitions if confirmed else []]


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_removed_client_that_hears_nothing_loses_its_partitions_by_the_list(protocol: str) -> None:
    stand = Stand(1, 3, protocol=protocol, confirms=True, heartbeat_interval=0.5, deaf=20.0)
    source, partitions = await opened(stand)
    assert isinstance(source, Confirming)
    stand.broker.freeze("one", 7.0)
    stand.to(7.0)
    assert await source.confirm(partitions) == []
    (lost,) = await source.receive(Room(0, 0))
    assert isinstance(lost, Lost) and lost.partition is partitions[0]
    assert list(source.client.partitions) == [0], "the client still believes in it"
    stand.to(26.9)
    with anyio.move_on_after(0.05) as scope:
        await source.receive(Room(0, 0))
    assert scope.cancelled_caught
    stand.to(27.0)
    (again,) = await source.receive(Room(0, 0))
    assert isinstance(again, Assigned)


async def test_without_an_answer_of_the_broker_nothing_is_confirmed() -> None:
    stand = Stand(1, 3, confirms=True)
    source, partitions = await opened(stand)
    assert isinstance(source, Confirming)
    stand.broker.stop_broker(0.0)
    with anyio.move_on_after(0.05) as scope:
        await source.confirm(partitions)
    assert scope.cancelled_caught
    stand.broker.start_broker(1.0)
    assert await source.confirm(partitions) == partitions


async def test_without_the_setting_a_source_confirms_nothing() -> None:
    source, _ = await opened(Stand(1, 3))
    assert not isinstance(source, Confirming)
