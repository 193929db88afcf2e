"""A partitioned queue as the topics of a source: two members read all its topics, each key in order."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import anyio
import pytest
from confluent_kafka import Producer

from lanes import ConfigError, Consumer, Message, PartitionedQueue, Settings
from lanes.source import Destination
from lanes_kafka import KafkaSource
from tests.kafka.conftest import MakeTopic
from tests.kafka.members import PROTOCOLS
from tests.kafka.workload import QUIET, Topic, produce, until

CONFIG = {"bootstrap.servers": "127.0.0.1:9", "group.id": "g"}
QUEUE = PartitionedQueue("updates", partitions=2)


@pytest.mark.parametrize(
    ("topics", "name", "read"),
    [
        (QUEUE, "updates (2 partitions)", ("updates", "updates__p1")),
        ([QUEUE], "updates (2 partitions)", ("updates", "updates__p1")),
        (["orders", QUEUE], "orders,updates (2 partitions)", ("orders", "updates", "updates__p1")),
        (PartitionedQueue("updates"), "updates", ("updates",)),
        (PartitionedQueue.of("updates", ["eu"]), "eu", ("eu",)),
        (PartitionedQueue.of("updates", ["eu", "us"]), "updates (2 partitions)", ("eu", "us")),
        (PartitionedQueue("many", 20), "many (20 partitions)", ("many", *(f"many__p{n}" for n in range(1, 20)))),
    ],
)
def test_a_queue_stands_for_the_topics_of_its_partitions(topics: Any, name: str, read: tuple[str, ...]) -> None:
    source = KafkaSource(CONFIG, topics=topics)
    assert all(source.reads(Destination("kafka", topic)) for topic in read)
    assert repr(source) == f"<KafkaSource kafka g/{name}: 0 partitions>"


@pytest.mark.parametrize(
    ("topics", "name"),
    [
        (["b", "a"], "b,a"),
        (["b", "a", "c"], "b,a and 1 more"),
        ([f"t{number}" for number in range(500)], "t0,t1 and 498 more"),
        (["t", PartitionedQueue("many", 20), "u", QUEUE], "t,many (20 partitions) and 2 more"),
    ],
)
def test_the_name_of_a_source_has_two_topics_or_queues_at_most(topics: Any, name: str) -> None:
    assert KafkaSource(CONFIG, topics=topics).declared().name == f"kafka g/{name}"


@pytest.mark.parametrize(
    "topics",
    [
        [QUEUE, QUEUE],
        [QUEUE, "updates__p1"],
        [PartitionedQueue("updates", 4), PartitionedQueue.of("other", ["eu", "updates__p1"])],
    ],
)
def test_a_partition_that_is_named_twice_is_refused_by_its_name(topics: Any) -> None:
    with pytest.raises(ConfigError, match=r"topic\(s\) \[.*'updates__p1'\] are named twice; name each topic"):
        KafkaSource(CONFIG, topics=topics)


def test_a_queue_name_that_is_no_name_of_a_topic_is_refused() -> None:
    with pytest.raises(ConfigError, match="patterns are not supported"):
        KafkaSource(CONFIG, topics=PartitionedQueue("^updates"))


@pytest.mark.parametrize("name", ["a b", "käse", ".", "..", "x" * 246])
def test_a_name_that_no_topic_can_have_is_refused_before_the_start(name: str) -> None:
    with pytest.raises(ConfigError, match="no topic can have this name; use 1 to 249 letters, digits"):
        KafkaSource(CONFIG, topics=PartitionedQueue(name, 2))


def test_two_queues_of_one_name_are_refused() -> None:
    queues = [QUEUE, PartitionedQueue.of("updates", physical_names=["eu"])]
    with pytest.raises(ConfigError, match=r"several queues have the name\(s\) \['updates'\]; give each logical queue"):
        KafkaSource(CONFIG, topics=queues)


# --- on a real broker


@pytest.fixture
def topics(topic: MakeTopic) -> Iterator[list[Topic]]:
    """The topics of a queue of four partitions, of which the last one does not exist yet."""
    first = topic()
    queue = PartitionedQueue(first.name, partitions=4)
    others = [Topic(first.url, name, 1) for name in queue.names[1:]]
    for one in others[:-1]:
        one.create()
    yield [first, *others]
    for one in others:
        if one.exists():
            one.delete()


@pytest.mark.anyio
async def test_a_missing_partition_ends_the_start_by_its_name(
    topics: list[Topic], caplog: pytest.LogCaptureFixture
) -> None:
    queue = PartitionedQueue(topics[0].name, partitions=4)
    source = KafkaSource(topics[0].config(), topics=queue)
    with anyio.fail_after(30), pytest.raises(ConfigError, match=f"topic '{queue.names[3]}' does not exist"):
        await source.open()
    await source.aclose()
    # The assignor is the default of the client.
    (line,) = [record.getMessage() for record in caplog.records if record.name == "lanes.kafka"]
    assert line.startswith(
        f"kafka g-{queue.name}/{queue.name} (4 partitions): partition.assignment.strategy=range gives partition 0 of "
        f"all 4 topics of queue '{queue.name}' to one member"
    )


@pytest.mark.anyio
@pytest.mark.parametrize("protocol", ["cooperative", "848"])
async def test_two_members_read_all_partitions_each_key_in_order(
    topics: list[Topic], protocol: str, caplog: pytest.LogCaptureFixture
) -> None:
    topics[-1].create()
    queue = PartitionedQueue(topics[0].name, partitions=4)
    seen: defaultdict[bytes | None, list[int]] = defaultdict(list)

    async def note(message: Message) -> None:
        seen[message.key].append(int(message.value))

    config = topics[0].config(**PROTOCOLS[protocol], **{"auto.offset.reset": "earliest"})
    settings = Settings(concurrency=20, concurrency_per_partition=4)
    with anyio.fail_after(50):
        async with (
            Consumer(KafkaSource(config, topics=queue), note, settings=settings) as one,
            Consumer(KafkaSource(config, topics=queue), note, settings=settings) as other,
        ):

            def assigned() -> list[int]:
                return [len(each.status().queues[queue.name].assigned) for each in (one, other)]

            await until(lambda: assigned() == [2, 2])
            producer = Producer({**QUIET, "bootstrap.servers": topics[0].url})
            for number in range(400):
                route = queue.route_by_key(f"customer-{number % 40}")
                producer.produce(route.name, value=str(number), key=route.key)
            # A producer that knows the logical name only.
            for number in range(400, 410):
                producer.produce(queue.name, value=str(number), key="unaware")
            assert await anyio.to_thread.run_sync(producer.flush, 30) == 0
            await until(lambda: sum(map(len, seen.values())) == 410)
            await until(lambda: all(each.status().queues[queue.name].lag == 0 for each in (one, other)))
            statuses = [each.status().queues[queue.name] for each in (one, other)]
    assert "assignment.strategy" not in caplog.text
    assert sorted(number for each in statuses for number in each.assigned) == [0, 1, 2, 3]
    assert [(each.partitions, each.capacity.concurrency) for each in statuses] == [(4, 8), (4, 8)]
    assert [(each.in_flight, each.oldest) for each in statuses] == [(0, None), (0, None)]
    assert len(seen) == 41
    assert all(numbers == sorted(set(numbers)) for numbers in seen.values())


@pytest.mark.anyio
async def test_workers_with_fewer_partitions_than_the_producers_name_the_stranded_topics_within_ten_seconds(
    topics: list[Topic], caplog: pytest.LogCaptureFixture
) -> None:
    """The producers use four partitions, and the workers two. The alarm ends once a worker with four has read all."""
    topics[-1].create()
    narrow, wide = (PartitionedQueue(topics[0].name, partitions=number) for number in (2, 4))
    producer = Producer({**QUIET, "bootstrap.servers": topics[0].url})

    async def ignore(message: Message) -> None: ...

    config = topics[0].config(**PROTOCOLS["cooperative"], **{"auto.offset.reset": "earliest"})
    with anyio.fail_after(60):
        async with Consumer(KafkaSource(config, topics=narrow), ignore) as worker:

            def stranded() -> list[tuple[str, int]]:
                return [(each.name, each.messages) for each in worker.status().queues[narrow.name].stranded]

            await until(lambda: len(worker.status().partitions) == 2)
            for number in range(8):
                route = wide.route_by_index(number)
                producer.produce(route.name, value=str(number), key=b"k")
            assert await anyio.to_thread.run_sync(producer.flush, 30) == 0
            published = time.time()
            await until(lambda: len(stranded()) == 2)
            assert sorted(stranded()) == [(name, 2) for name in wide.names[2:]]
            health = worker.health()
            assert health.ok and len(health.findings) == 1
            async with Consumer(KafkaSource(config, topics=wide), ignore):
                await until(lambda: stranded() == [])
    (warning,) = [each for each in caplog.records if each.levelname == "WARNING"]
    assert warning.created - published < 10
    line = warning.getMessage()
    assert line == (
        f"kafka g-{narrow.name}/{narrow.name} (2 partitions): queue {narrow.name!r}: no consumer of group "
        f"'g-{narrow.name}' reads the messages in {wide.names[2]!r} (2), {wide.names[3]!r} (2). The producers use "
        "another number of partitions; start the consumers with that number"
    )
    assert line.endswith(health.findings[0])


@pytest.mark.anyio
@pytest.mark.parametrize("protocol", ["cooperative", "848"])
async def test_the_bounds_per_partition_bound_a_topic_with_all_its_kafka_partitions(
    topic: MakeTopic, protocol: str
) -> None:
    hanging, other = topic(3), topic(2)
    queue = PartitionedQueue.of(f"of-{hanging.name}", [hanging.name, other.name])
    produce(hanging, 300, keys=[b"%d" % number for number in range(100)])
    produce(other, 300, keys=[b"%d" % number for number in range(100)])
    ended: Counter[str] = Counter()
    released = anyio.Event()
    most: Counter[str] = Counter()

    async def handle(message: Message) -> None:
        name = message.partition.id.source
        if name == hanging.name:
            now = [each for key, each in consumer.status().partitions.items() if key.startswith(f"{name}/")]
            most["running"] = max(most["running"], sum(each.running for each in now))
            most["in flight"] = max(most["in flight"], sum(each.in_flight for each in now))
            await released.wait()
        ended[name] += 1

    config = hanging.config(**PROTOCOLS[protocol], **{"auto.offset.reset": "earliest"})
    settings = Settings(concurrency=6, concurrency_per_partition=4, max_in_flight_per_partition=40)
    with anyio.fail_after(50):
        async with Consumer(KafkaSource(config, topics=queue), handle, settings=settings) as consumer:
            await until(lambda: len(consumer.status().partitions) == 5 and ended[other.name] == 300)
            found = consumer.status().queues[queue.name]
            assert (found.assigned, found.running, ended[hanging.name]) == ((0, 1), 4, 0)
            assert (found.capacity.concurrency, found.capacity.max_in_flight) == (6, 80)
            assert consumer.status().capacity == found.capacity
            assert found.in_flight <= 40
            full = {key: each.full for key, each in consumer.status().partitions.items()}
            assert full == {key: key.startswith(f"{hanging.name}/") for key in full}
            released.set()
            await until(lambda: ended[hanging.name] == 300)
    assert (most["running"], most["in flight"] <= 40) == (4, True)
