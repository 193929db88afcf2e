"""A source with transactions commits outputs and positions together, on a real broker."""

from __future__ import annotations

import logging
from typing import Any

import anyio
import pytest
from anyio.to_thread import run_sync
from confluent_kafka import Producer

import lanes
from lanes_kafka import KafkaPublisher, KafkaSource, KafkaTransactions
from tests.fakes.support import started
from tests.kafka.conftest import MakeTopic
from tests.kafka.members import PROTOCOLS
from tests.kafka.transactions.judge import fill, judged
from tests.kafka.workload import QUIET, Topic


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Member:
    """A member that publishes the value of each message.

    ``handled`` has the values of the messages whose handlers have ended.
    """

    def __init__(self, source: Topic, target: Topic, name: str, *, pause: float = 0.002, **more: Any) -> None:
        self.handled: list[int] = []
        self.pause = pause
        self._target = target.name
        transactions = KafkaTransactions(f"{source.name}-{name}", **more.pop("transactions", {}))
        settings = more.pop("settings", {})
        self.source = KafkaSource(source.config(**more), topics=source.name, transactions=transactions)
        publisher = KafkaPublisher({**QUIET, "bootstrap.servers": source.url})
        self.consumer = lanes.Consumer(
            self.source, self.handle, publisher=publisher, settings=lanes.Settings(concurrency=50, **settings)
        )

    async def handle(self, message: lanes.Message) -> None:
        await anyio.sleep(self.pause)
        await message.publish(self._target, message.value, key=message.key)
        self.handled.append(int(message.value))


async def until(condition: Any, seconds: float = 60.0) -> None:
    with anyio.fail_after(seconds):
        while not condition():
            await anyio.sleep(0.02)


@pytest.fixture
def topics(topic: MakeTopic) -> tuple[Topic, Topic]:
    return topic(partitions=3), topic(partitions=3)


@pytest.mark.anyio
@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_outputs_are_visible_with_their_positions(topics: tuple[Topic, Topic], protocol: str) -> None:
    source, target = topics
    await run_sync(fill, source, 2_000, 100)
    member = Member(source, target, "one", **PROTOCOLS[protocol])
    async with started(member.consumer) as run:
        await until(lambda: member.source.transaction_counts.outputs == 2_000)
        assert await run.stop() is None
    assert await run_sync(judged, target, range(2_000)) == ([], {}, [])
    assert await run_sync(source.committed, f"g-{source.name}") == await run_sync(source.ends)
    counts = member.source.transaction_counts
    assert counts.committed >= 1 and counts.outputs == 2_000 and counts.unknown == counts.restarts == 0


@pytest.mark.anyio
async def test_a_failed_attempt_publishes_nothing(topics: tuple[Topic, Topic]) -> None:
    source, target = topics
    await run_sync(fill, source, 100, 10)
    member = Member(source, target, "one", settings={"retry": lanes.Retry(attempts=3, backoff=0.01)})
    failed: set[int] = set()
    ended: list[int] = []

    async def handle(message: lanes.Message) -> None:
        value = int(message.value)
        await message.publish(target.name, message.value, key=message.key)
        if value % 3 == 0 and value not in failed:
            failed.add(value)
            raise RuntimeError("once")
        ended.append(value)

    publisher = KafkaPublisher({**QUIET, "bootstrap.servers": source.url})
    consumer = lanes.Consumer(
        member.source, handle, publisher=publisher, settings=lanes.Settings(retry=lanes.Retry(attempts=3, backoff=0.01))
    )
    async with started(consumer) as run:
        await until(lambda: len(ended) == 100)
        assert await run.stop() is None
    assert len(failed) == 34
    assert await run_sync(judged, target, range(100)) == ([], {}, [])


@pytest.mark.anyio
@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_members_that_come_and_go_repeat_nothing(topics: tuple[Topic, Topic], protocol: str) -> None:
    source, target = topics
    await run_sync(fill, source, 3_000, 100)
    members = [Member(source, target, str(number), pause=0.02, **PROTOCOLS[protocol]) for number in range(4)]

    def outputs() -> int:
        return sum(member.source.transaction_counts.outputs for member in members)

    async with started(members[0].consumer) as first:
        await until(lambda: outputs() > 100)
        for member in members[1:]:
            async with started(member.consumer) as run:
                before = outputs()
                await until(lambda member=member: member.handled or outputs() >= 3_000)
                await until(lambda before=before: outputs() > min(before + 200, 2_999))
                assert await run.stop() is None
        await until(lambda: outputs() >= 3_000)
        assert await first.stop() is None
    assert await run_sync(judged, target, range(3_000)) == ([], {}, [])


@pytest.mark.anyio
async def test_a_producer_with_the_same_id_costs_a_restart_and_no_output(
    topics: tuple[Topic, Topic], caplog: pytest.LogCaptureFixture
) -> None:
    source, target = topics
    await run_sync(fill, source, 2_000, 100)
    member = Member(source, target, "one", pause=0.02)
    counts = member.source.transaction_counts
    with caplog.at_level(logging.WARNING, "lanes.kafka"):
        async with started(member.consumer) as run:
            await until(lambda: member.source.transaction_counts.outputs > 200)
            thief = Producer({**QUIET, "bootstrap.servers": source.url, "transactional.id": f"{source.name}-one"})
            await run_sync(thief.init_transactions, 30)
            await run_sync(fill, source, 500, 100, 2_000)
            await until(lambda: member.source.transaction_counts.outputs == 2_500)
            counts = member.source.transaction_counts
            assert await run.stop() is None
    assert counts.restarts >= 1
    assert "another process may use transactional.id=" in caplog.text
    assert await run_sync(judged, target, range(2_500)) == ([], {}, [])


@pytest.mark.anyio
async def test_an_output_that_the_topic_refuses_stops_the_consumer(topic: MakeTopic) -> None:
    source, target = topic(), topic(config={"max.message.bytes": "10000"})
    await run_sync(fill, source, 10, 1)
    made = Member(source, target, "one")

    async def handle(message: lanes.Message) -> None:
        await message.publish(target.name, bytes(20_000))

    consumer = lanes.Consumer(made.source, handle, publisher=KafkaPublisher({**QUIET, "bootstrap.servers": source.url}))
    with anyio.fail_after(60), pytest.raises(lanes.SourceError, match=r"refused output 1 of .*MSG_SIZE_TOO_LARGE"):
        await consumer.run()
    assert (await run_sync(source.committed, f"g-{source.name}"))[0] in (None, 0)


@pytest.mark.anyio
async def test_an_output_above_the_limit_of_the_publisher_fails_alone(topics: tuple[Topic, Topic]) -> None:
    source, target = topics
    await run_sync(fill, source, 30, 30)
    made = Member(source, target, "one")
    ended: list[int] = []

    async def handle(message: lanes.Message) -> None:
        value = int(message.value)
        await message.publish(target.name, message.value, key=message.key)
        if value == 7:
            await message.publish(target.name, bytes(2_000_000))
        ended.append(value)

    consumer = lanes.Consumer(
        made.source,
        handle,
        publisher=KafkaPublisher({**QUIET, "bootstrap.servers": source.url}),
        settings=lanes.Settings(poison="block"),
    )
    async with started(consumer) as run:
        await until(lambda: made.source.transaction_counts.outputs == 29)
        assert await run.stop() is None
    # The whole message is refused, so its other output is not visible either.
    assert await run_sync(judged, target, range(30)) == ([7], {}, [])
