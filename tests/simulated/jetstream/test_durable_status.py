"""A source over one durable shows its lag, limits and outages, and reports dropped messages by its policy."""

from __future__ import annotations

import asyncio

import pytest

from lanes import SourceError
from lanes.core.types import Room
from lanes.source import Destination
from lanes_jetstream.wire.connection import Connection
from memsource.sim.loop.virtual import until
from tests.simulated.jetstream.server.server import Fate
from tests.simulated.jetstream.stage import Stage, played
from tests.simulated.jetstream.test_durable_source import (
    ROOM,
    all_received,
    closed,
    lines,
    opened,
    partition_of,
    received,
    settle,
)


def test_a_status_shows_lag_backlog_and_outages() -> None:
    async def scene(stage: Stage) -> None:
        source = await opened(stage)
        partition = partition_of(source)
        assert source.lag(partition) is None
        assert source.backlog(partition)[1] == "not started"
        await stage.publish(*["S.a"] * 4)
        assert len(await received(source, Room(1, 9999))) == 1
        receiving = asyncio.create_task(source.receive(Room(1, 9999, frozenset({partition}))))
        assert await until(lambda: source.lag(partition) == 4, 10.0)
        assert source.backlog(partition)[0] == 3
        assert source.outage() is None
        source._pulls.interrupt("ended", "409 Server Shutdown")
        assert source.backlog(partition)[:2] == (3, "409 Server Shutdown")
        receiving.cancel()
        await asyncio.wait([receiving])
        assert source.reads(Destination("nats", "S", "S.a"))
        assert not source.reads(Destination("nats", "S", "T.a"))
        assert not source.reads(Destination("nats", "T", "S.a"))
        await closed(source)

    played(scene)


def test_a_status_of_a_shared_consumer_names_its_limit() -> None:
    async def scene(stage: Stage) -> None:
        source = await opened(stage, shared=True, max_ack_pending=2)
        partition = partition_of(source)
        await stage.publish(*["S.a"] * 4)
        assert await all_received(source, 2) == [1, 2]
        receiving = asyncio.create_task(source.receive(ROOM))
        assert await until(lambda: bool(source.backlog(partition).cause), 10.0)
        assert source.backlog(partition).cause.startswith("consumer S/work has reached max_ack_pending=2: ")
        receiving.cancel()
        await asyncio.wait([receiving])
        await closed(source)

    played(scene)


@pytest.mark.parametrize("policy", ["fail", "earliest"])
def test_dropped_messages_follow_the_policy_of_the_source(policy: str, caplog: pytest.LogCaptureFixture) -> None:
    async def scene(stage: Stage) -> None:
        source = await opened(stage, out_of_range=policy)
        if policy == "fail":
            with pytest.raises(SourceError, match="3 messages were dropped before they were delivered"):
                source._watch._report_dropped("3 messages", 9)
        else:
            source._watch._report_dropped("3 messages", 9)
            assert lines(caplog)[-1].endswith("; continuing with the remaining messages")
        await closed(source)

    played(scene)


def test_a_server_that_delivers_has_no_long_outage() -> None:
    """A busy server may briefly answer no requests, and still deliver."""

    async def scene(stage: Stage) -> None:
        source = await opened(stage)
        receiving = asyncio.create_task(source.receive(ROOM))
        await asyncio.sleep(1.0)
        stage.meet("$JS.API.STREAM.INFO.S", *[Fate("drop_request")] * 99)
        assert await until(lambda: source.outage() is not None, 60.0)
        outage = source.outage()
        assert outage is not None
        # The server sends a heartbeat every two seconds.
        assert outage.seconds <= 2.5
        contact: Connection = source.connection
        whole = contact.outage()
        assert whole is not None
        assert whole.seconds > 5.0
        receiving.cancel()
        await asyncio.wait([receiving])
        await closed(source)

    played(scene)


@pytest.mark.parametrize("version", ["2.12.1", "2.14.0"])
def test_a_message_that_an_earlier_process_acknowledged_counts_as_delivered(version: str) -> None:
    """On a work queue, the stream then begins above the messages that this process has read."""

    async def scene(stage: Stage) -> None:
        await stage.stream("S", retention="workqueue")
        await stage.publish(*["S.a"] * 4)
        first = await opened(stage)
        await settle(first, (await received(first, Room(3, 1_000_000)))[2:])
        await closed(first)
        second = await opened(stage)
        for room, positions in ((Room(2, 1_000_000), [1, 2]), (ROOM, [4])):
            messages = await received(second, room)
            assert [message.position for message in messages] == positions
            await settle(second, messages)
            # Meanwhile the source requests nothing, and its watch checks the stream.
            await asyncio.sleep(10.0)
        await closed(second)

    played(scene, version=version)
