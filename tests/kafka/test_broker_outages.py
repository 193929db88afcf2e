"""A broker that restarts, is absent or has a full disk: order is kept and nothing is lost."""

from __future__ import annotations

import resource
import threading
from collections import Counter
from typing import Any

import anyio
import pytest
from anyio.to_thread import run_sync

import lanes
from lanes_kafka import KafkaSource
from lanes_kafka.client.commits import Commit, TopicIdCheck
from tests.conftest import KafkaFactory
from tests.kafka.conftest import MakeTopic
from tests.kafka.members import Story, Work, group
from tests.kafka.workload import produce, until

pytestmark = pytest.mark.anyio

OUTAGE = {"reconnect_backoff_ms": 50, "reconnect_backoff_max_ms": 200}


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("protocol", ["cooperative", "848"])
async def test_a_restart_of_the_broker_keeps_the_order(
    protocol: str, fresh_kafka: KafkaFactory, topic: MakeTopic
) -> None:
    server = fresh_kafka(warm=True)
    events = topic(4, on=server)
    produce(events, 2_000, keys=50)
    story = Story()
    work = Work(story, lambda message: 0.02)
    async with group(events, protocol, work, **OUTAGE) as members:
        one = members.start("one", settings=lanes.Settings(concurrency=10, max_in_flight=100, max_ahead=100))
        for ended in (200, 1_000):
            await until(lambda: len(work.ended) >= ended)  # noqa: B023
            members.look()
            await run_sync(server.kill)
            await one.polled(20)
            await run_sync(server.start)
        await run_sync(produce, events, 500)
        await until(lambda: len(work.ended) == 2_500)
        await until(lambda: sum(max(c.position for c in story.of("commit", None, n)) for n in range(4)) == 2_500)
    assert work.violations == []
    # Messages are repeated only after the end of a session, and only uncommitted messages.
    assert sum(work.ended.values()) - 2_500 <= 100 * len(story.of("lost"))
    assert events.committed(members.id) == events.ends()


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("protocol", ["cooperative", "848"])
async def test_an_outage_of_the_broker_never_blocks_the_event_loop(
    protocol: str, fresh_kafka: KafkaFactory, topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    due: list[Commit] = []
    commit = TopicIdCheck.commit

    def noted(self: TopicIdCheck, client: Any, asked: Commit, *, until: float | None) -> None:
        due.append(asked)
        commit(self, client, asked, until=until)

    monkeypatch.setattr(TopicIdCheck, "commit", noted)
    server = fresh_kafka(warm=True)
    events = topic(2, on=server)
    produce(events, 200, keys=20)
    story = Story()
    work = Work(story)
    work.hold(*[b"%d" % number for number in range(20)])
    async with group(events, protocol, work, **OUTAGE) as members:
        one = members.start("one", settings=lanes.Settings(commit_interval=0.0))
        await until(lambda: len(work.running) == 20)
        # The broker hangs, so every question waits.
        server.pause()
        before = len(due)
        work.let_go(*[b"%d" % number for number in range(20)])
        await until(lambda: len(work.ended) == 200 and len(due) > before)
        # While a commit waits, the client is polled and the loop turns.
        await one.polled(50)
        assert one.client.inside in (None, "consume") and one.consumer.status().in_flight == 0
        one.consumer.pause()
        await one.polled(50)
        one.consumer.resume()
        server.resume()
        await until(lambda: sum(max(c.position for c in story.of("commit", None, n)) for n in range(2)) == 200)
    # Only the client's thread has called the client.
    assert one.client.strangers == set() and one.client.thread != threading.get_ident()
    assert work.violations == []
    assert members.committed() == events.ends()
    assert Counter(work.ended.values()) == {1: 200}


async def never_called(message: lanes.Message) -> None:
    raise AssertionError("no message was produced")


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("how", ["killed", "hangs"])
async def test_an_idle_consumer_notices_a_lost_broker(
    how: str, fresh_kafka: KafkaFactory, topic: MakeTopic, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "lanes.kafka")
    server = fresh_kafka(warm=True)
    events = topic(2, on=server)
    config = {"bootstrap.servers": events.url, "group.id": "idle", "reconnect.backoff.max.ms": 500}
    settings = lanes.Settings(unhealthy_after=3.0)
    consumer = lanes.Consumer(KafkaSource(config, topics=events.name), never_called, settings=settings)
    async with consumer:
        with anyio.fail_after(60):
            await until(lambda: consumer.active)
            assert (consumer.health().reasons, consumer.status().outage) == ((), 0.0)
            await run_sync(server.kill if how == "killed" else server.pause)
            await until(lambda: not consumer.healthy)
        health = consumer.health()
        assert health.reasons[0].startswith("no broker answers for ")
        assert health.no_broker and consumer.ready
        assert (consumer.status().outage or 0.0) > 3.0
        with anyio.fail_after(60):
            await until(lambda: ": no broker has answered for " in caplog.text)
        await run_sync(server.start if how == "killed" else server.resume)
        with anyio.fail_after(60):
            await until(lambda: consumer.healthy)
        assert (consumer.health().no_broker, consumer.status().outage) == (False, 0.0)
        with anyio.fail_after(60):
            await until(lambda: ": a broker answers again after " in caplog.text)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="the limits of another process are set on Linux alone")
async def test_a_broker_whose_disk_is_full_loses_nothing(fresh_kafka: KafkaFactory, topic: MakeTopic) -> None:
    server = fresh_kafka(warm=True)
    events = topic(on=server)
    produce(events, 20, keys=20)
    work = Work(Story())
    work.hold(b"5")
    async with group(events, "848", work) as members:
        members.start("one", settings=lanes.Settings(commit_interval=0.0))
        await until(lambda: len(work.ended) == 19)
        # No file of the broker can grow from now on, which ends a broker with one disk.
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (1, 1))
        work.let_go(b"5")
        await until(lambda: len(work.ended) == 20)
        await until(lambda: not server.alive)
        members.look()
        await run_sync(server.start)
        produce(events, 20, keys=20)
        await until(lambda: len(work.ended) == 40)
        await until(lambda: members.committed() == [40])
    assert work.violations == []
