"""The start barrier: reset, ack_wait shrink or hold-back, as the server, the owner and the permissions allow."""

from __future__ import annotations

import json
import logging
from typing import Any

import anyio
import pytest

import lanes
from lanes_jetstream.durable.consumer import ORIGINAL_ACK_WAIT, ORIGINAL_BACKOFF
from tests.conftest import Spawn
from tests.jetstream.cohort_workload import FAST
from tests.jetstream.conftest import FreshStream
from tests.jetstream.workload import DURABLE, SECOND, Recorder, Stream, all_done, crashing, running, until

pytestmark = pytest.mark.anyio


async def config_of(stream: Stream) -> dict[str, Any]:
    """The server's configuration; the client's own types lack fields."""
    answer = await stream.client.request(f"$JS.API.CONSUMER.INFO.{stream.name}.{DURABLE}", b"", timeout=5)
    config: dict[str, Any] = json.loads(answer.data)["config"]
    return config


def barriers(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The start barriers in the log."""
    lines = [record.getMessage() for record in caplog.records]
    return [
        line.partition("early redelivery is ")[2].partition(";")[0] for line in lines if "early redelivery is " in line
    ]


async def test_a_backoff_survives_a_killed_takeover(stream: Stream, spawn: Spawn) -> None:
    """After a kill -9 of the process that shrank the timers, the metadata still has the original timers."""
    backoff = [20 * SECOND, 60 * SECOND]
    await stream.publish(60, keys=4)
    await stream.add_consumer(backoff=backoff, metadata={"team": "billing"}, max_ack_pending=1_000)
    await (await stream.pull_raw(40))[10].ack_sync()  # a reset would repeat the finished messages after the gap
    reader = spawn("-m", "tests.jetstream.reader_process", stream.url, stream.name, "modify")
    with anyio.fail_after(30):
        while (await config_of(stream))["ack_wait"] != 1_000_000:
            await anyio.sleep(0.01)
    reader.kill()
    reader.wait()
    shrunk = await config_of(stream)
    assert "backoff" not in shrunk
    assert shrunk["metadata"][ORIGINAL_ACK_WAIT] == str(backoff[0])
    assert json.loads(shrunk["metadata"][ORIGINAL_BACKOFF]) == backoff
    recorder = Recorder()
    async with running(lanes.Consumer(stream.source(takeover="modify"), recorder, settings=FAST)):
        with anyio.fail_after(20):
            await recorder.reached(59)
            await stream.acknowledged()
    assert recorder.violations == []
    restored = await config_of(stream)
    assert (restored["ack_wait"], restored["backoff"]) == (backoff[0], backoff)
    assert restored["metadata"]["team"] == "billing"
    assert not any(name.startswith("lanes-") for name in restored["metadata"])


async def test_keep_alives_follow_the_shortest_wait_of_a_backoff(stream: Stream) -> None:
    await stream.add_consumer(backoff=[3 * SECOND, 60 * SECOND], max_ack_pending=1_000)
    source = stream.source(takeover="modify")
    traits = await source.open()
    await source.aclose()
    assert traits.extend_interval == 1.0


async def test_a_consumer_is_reset_if_that_repeats_nothing(stream: Stream, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lanes")
    await stream.publish(30, keys=3)
    await stream.add_consumer(metadata={"lanes-managed": "1"}, max_ack_pending=1_000)
    await stream.pull_raw(20)
    recorder = Recorder()
    async with running(lanes.Consumer(stream.source(), recorder, settings=FAST)):
        await all_done(stream, recorder)
    assert barriers(caplog) == ["by RESET"]
    assert recorder.repeats == 0


async def test_a_consumer_is_not_reset_if_that_repeats_a_finished_message(
    stream: Stream, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lanes")
    await stream.publish(30, keys=3)
    await stream.add_consumer(metadata={"lanes-managed": "1"}, max_ack_pending=1_000)
    for message in (await stream.pull_raw(20))[5:10]:
        await message.ack_sync()
    recorder = Recorder()
    async with running(lanes.Consumer(stream.source(), recorder, settings=FAST)):
        with anyio.fail_after(20):
            await recorder.reached(25)
            await stream.acknowledged()
    assert barriers(caplog) == ["by a short ack_wait"]
    assert recorder.done.isdisjoint(range(6, 11))
    assert recorder.violations == []


async def test_a_foreign_consumer_is_not_changed(stream: Stream, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lanes")
    await stream.publish(30, keys=3)
    await stream.add_consumer(ack_wait=SECOND, max_ack_pending=1_000)
    before = await config_of(stream)
    await stream.pull_raw(20)
    recorder = Recorder()
    async with running(lanes.Consumer(stream.source(), recorder, settings=FAST)):
        await all_done(stream, recorder)
    assert barriers(caplog)[0] == "by hold-back"
    assert await config_of(stream) == before


async def test_a_paused_consumer_is_waited_for(stream: Stream, caplog: pytest.LogCaptureFixture) -> None:
    await stream.publish(10, keys=2)
    await stream.add_consumer(metadata={"lanes-managed": "1"}, max_ack_pending=1_000)
    await stream.pull_raw(5)
    pause = f"$JS.API.CONSUMER.PAUSE.{stream.name}.{DURABLE}"
    await stream.client.request(pause, b'{"pause_until": "2100-01-01T00:00:00Z"}', timeout=5)
    recorder = Recorder()
    async with running(lanes.Consumer(stream.source(), recorder, settings=FAST)):
        with anyio.fail_after(10):
            await until(lambda: "is paused; resume it" in caplog.text)
        assert not recorder.done
        await stream.client.request(pause, b"{}", timeout=5)
        await all_done(stream, recorder)


@pytest.mark.parametrize("retention", ["limits", "workqueue", "interest"])
async def test_a_crash_keeps_order_with_each_retention(stream: Stream, retention: str) -> None:
    await stream.client.jetstream().delete_stream(stream.name)
    await stream.create(retention=retention)
    first = stream.source()
    await first.open()  # so that there is interest before the first message
    await first.aclose()
    await stream.publish(300, keys=6)
    recorder = Recorder(lambda message: 0.002)
    async with crashing(lanes.Consumer(stream.source(), recorder, settings=FAST)):
        with anyio.fail_after(20):
            await recorder.reached(100)
    assert await stream.ack_pending() > 0
    await stream.publish(50, keys=6, seed=2)
    async with running(lanes.Consumer(stream.source(), recorder, settings=FAST)):
        await all_done(stream, recorder)
    if retention != "limits":
        with anyio.fail_after(10):
            while (await stream.client.jetstream().stream_info(stream.name)).state.messages:
                await anyio.sleep(0.02)


async def test_a_shrunk_consumer_that_may_not_be_changed_is_refused(fresh_stream: FreshStream) -> None:
    server, stream = await fresh_stream(
        config="""
        accounts { A { jetstream: enabled, users: [
            {user: admin, password: admin},
            {user: app, password: app, permissions: {publish: {deny: ["$JS.API.CONSUMER.CREATE.>"]}}}
        ]}}
        no_auth_user: admin
        """
    )
    await stream.add_consumer(
        ack_wait=1_000_000, metadata={"lanes-managed": "1", ORIGINAL_ACK_WAIT: str(30 * SECOND)}, max_ack_pending=1_000
    )
    url = server.url.replace("nats://", "nats://app:app@")
    with pytest.raises(lanes.SourceError, match=r"ack_wait of 1 ms.*permit the change, or set ack_wait to 30 s"):
        with anyio.fail_after(20):
            await lanes.run(stream.source(where=url), Recorder())
