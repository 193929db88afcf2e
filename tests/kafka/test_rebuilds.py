"""A client that has failed permanently is rebuilt after a pause, and a removed member joins again.

A mock cluster gives the errors, so it does not matter when a broker would give them.
"""

from __future__ import annotations

import anyio
import pytest
from confluent_kafka import KafkaError

import lanes
from lanes.core.types import Partition
from lanes.source import Lost
from lanes_kafka.client import rebuilds
from lanes_kafka.client.rebuilds import HEALTHY_AFTER, LONGEST_PAUSE, Rebuilds
from tests.kafka.members import PROTOCOLS
from tests.kafka.mock_cluster import MockCluster
from tests.kafka.reader import WITHIN, Reader, reading, topic_of
from tests.kafka.workload import produce, until

UNRELEASED_INSTANCE_ID = 111
HEARTBEATS = {"eager": 12, "cooperative": 12, "848": 68}
"""The request of each protocol that tells a member its state."""
CLASSIC = [protocol for protocol in PROTOCOLS if protocol != "848"]


def fence(cluster: MockCluster, protocol: str) -> None:
    """Fence the next member that sends this request."""
    cluster.fail(HEARTBEATS[protocol], [UNRELEASED_INSTANCE_ID if protocol == "848" else KafkaError.FENCED_INSTANCE_ID])


async def lost(reader: Reader, partition: Partition) -> str:
    """Wait for the loss of a partition; return its reason."""
    event = await reader.next_event()
    assert isinstance(event, Lost) and event.partition is partition
    return event.reason


# --- attempts and pauses


def test_pauses_grow_and_health_restores_attempts() -> None:
    now = 1_000.0
    attempts = Rebuilds(7, lambda: now)
    pauses = [1.0, 2.0, 4.0, 8.0, 16.0, LONGEST_PAUSE, LONGEST_PAUSE, None, None]
    assert [attempts.next_pause() for _ in pauses] == pauses
    now += HEALTHY_AFTER
    attempts.built()
    now += HEALTHY_AFTER - 1.0
    assert attempts.next_pause() is None
    now += HEALTHY_AFTER
    assert [attempts.next_pause() for _ in range(8)] == [1.0, 2.0, 4.0, 8.0, 16.0, LONGEST_PAUSE, LONGEST_PAUSE, None]


def test_two_clients_that_fence_each_other_use_up_their_attempts() -> None:
    now = 0.0
    both = [Rebuilds(100, lambda: now) for _ in range(2)]
    for turn in range(200):
        # Each client works while the other one pauses.
        pause = both[turn % 2].next_pause()
        assert pause is not None
        now += pause
        both[turn % 2].built()
    assert [each.next_pause() for each in both] == [None, None]


# --- rebuilt clients


@pytest.mark.anyio
@pytest.mark.parametrize("protocol", [*(pytest.param(one, marks=pytest.mark.slow) for one in CLASSIC), "848"])
async def test_a_fenced_client_is_rebuilt_until_its_attempts_end(
    protocol: str, cluster: MockCluster, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rebuilds, "FIRST_PAUSE", 0.01)
    produce(topic_of(cluster, name, 1), 3)
    async with reading(cluster, protocol, name, instance="twin", rebuilds=1) as reader:
        (partition,) = await reader.assigned()
        fence(cluster, protocol)
        # The reason of the loss begins with the remedy, and leaves the text of the client to the error of the run.
        why = "only one member may have group.instance.id='twin'; give each member its own"
        assert await lost(reader, partition) == why
        # A failed client does not leave its group, and the mock lets no twin replace it.
        await reader.removed(reader.clients[0])
        (again,) = await reader.assigned()
        assert len(reader.clients) == 2 and again is not partition
        assert [message.partition for message in await reader.take(3)] == [again] * 3
        fence(cluster, protocol)
        await lost(reader, again)
        with pytest.raises(lanes.SourceError, match=r"only one member may have.*failed permanently: "):
            await reader.receive()
        assert len(reader.clients) == 2


@pytest.mark.anyio
@pytest.mark.parametrize("protocol", ["eager", "848"])
async def test_commands_are_answered_in_a_pause_and_a_stop_ends_it(
    protocol: str, cluster: MockCluster, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rebuilds, "FIRST_PAUSE", 3_600.0)
    async with reading(cluster, protocol, name, instance="twin", rebuilds=100) as reader:
        (partition,) = await reader.assigned()
        fence(cluster, protocol)
        await lost(reader, partition)
        await until(lambda: "the client is rebuilt in 3600 s" in caplog.text)
        with pytest.raises(lanes.SourceError, match="no longer owns"):
            await reader.settle(partition, 0)
        with anyio.fail_after(WITHIN):
            await reader.source.release(partition)
            await reader.source.aclose()
        assert len(reader.clients) == 1


@pytest.mark.anyio
@pytest.mark.parametrize("protocol", [*(pytest.param(one, marks=pytest.mark.slow) for one in CLASSIC), "848"])
async def test_an_unknown_member_rejoins_with_the_same_client(protocol: str, cluster: MockCluster, name: str) -> None:
    produce(topic_of(cluster, name, 1), 3)
    async with reading(cluster, protocol, name) as reader:
        (partition,) = await reader.assigned()
        cluster.fail(HEARTBEATS[protocol], [KafkaError.UNKNOWN_MEMBER_ID])
        await lost(reader, partition)
        if protocol != "848":
            # The member joins with a new id, and the group would wait for the former one.
            await reader.removed()
        (again,) = await reader.assigned()
        assert again is not partition
        assert [message.partition for message in await reader.take(3)] == [again] * 3
        await reader.settle(again, 3)
        assert await reader.committed() == [3] and len(reader.clients) == 1
