"""One handler object has the same final state in memory, on JetStream, on Kafka, on PostgreSQL and on Spark."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit, urlunsplit

import nats
import psycopg
import pyarrow as pa  # type: ignore[import-untyped]
import pytest
from confluent_kafka import Producer

import lanes
from demo.events import Event, generate
from examples.everywhere import declarations
from lanes.source import Source
from lanes_jetstream import JetStreamSource, subject_token
from lanes_kafka import KafkaSource
from lanes_postgres import Log, PostgresSource, Record, migrate
from lanes_spark import TaskJob, replay, run_task
from memsource import MemoryBroker, MemorySource
from tests.components import KafkaServer, NatsServer, PostgresServer
from tests.kafka.workload import Topic
from tests.project.test_examples import run
from tests.spark.conftest import session
from tests.spark.tables import write_table

EVENTS, HOT, PARTITIONS = 250, 60, 3
SETTINGS = lanes.Settings(concurrency=8)
FIRST_STEPS = range(0, 2 * HOT, 2)

_numbers = itertools.count(1)

State = dict[str, tuple[list[int], str, int]]
"""Declaration -> its steps in the order in which they were booked, the last one's name, and the sum."""


def event_log() -> list[Event]:
    """Interleaved declarations, one of which has many steps and so a hot key."""
    chance = generate(EVENTS, seed=7)
    hot = [
        Event("hot", step, json.dumps({"case": "hot", "step": step, "activity": f"hot {step}", "amount": 1}).encode())
        for step in range(HOT)
    ]
    found = []
    for number, event in enumerate(chance):
        if number in FIRST_STEPS:
            found.append(hot[number // 2])
        found.append(event)
    return found


LOG = event_log()


def by_a_plain_loop() -> State:
    state: State = {}
    for event in LOG:
        fields = json.loads(event.payload)
        steps, _, amount = state.get(event.case, ([], "", 0))
        state[event.case] = [*steps, event.step], fields["activity"], amount + round(100 * fields["amount"])
    return state


class Books(NamedTuple):
    """A database for one of the runs."""

    url: str

    def state(self) -> State:
        with psycopg.connect(self.url) as connection:
            rows = connection.execute(
                f"SELECT id, steps, last, amount FROM {declarations.SCHEMA}.declarations"
            ).fetchall()
        return {name: (steps, last, round(100 * amount)) for name, steps, last, amount in rows}


@pytest.fixture
def books(postgres: PostgresServer) -> Iterator[Callable[[], Books]]:
    """Makes databases with the example's tables."""
    made = []

    def make() -> Books:
        name = f"places{os.getpid()}x{next(_numbers)}"
        with psycopg.connect(postgres.url, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        made.append(name)
        url = urlunsplit(urlsplit(postgres.url)._replace(path=f"/{name}"))
        declarations.make_tables(url)
        return Books(url)

    yield make
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        for name in made:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


async def live(source: Source, where: Books) -> None:
    """Run the handler until all of the log is settled."""
    await declarations.begin(where.url)
    try:
        async with lanes.Consumer(source, declarations.book, settings=SETTINGS) as consumer:
            async with asyncio.timeout(90):
                while consumer.status().settled < len(LOG):  # noqa: ASYNC110 (a service would not end)
                    await asyncio.sleep(0.02)
    finally:
        await declarations.end()


async def in_memory(where: Books) -> None:
    broker = MemoryBroker(PARTITIONS)
    for event in LOG:
        broker.publish(event.payload, key=event.case)
    await live(MemorySource(broker), where)


async def on_jetstream(server: NatsServer, where: Books) -> None:
    name = f"PLACES{os.getpid()}x{next(_numbers)}"
    client = await nats.connect(server.url)
    stream = client.jetstream()
    try:
        await stream.add_stream(name=name, subjects=[f"{name}.*"])
        for event in LOG:
            await stream.publish_async(f"{name}.{event.case}", event.payload)
        await stream.publish_async_completed()
        await live(JetStreamSource(server.url, stream=name, durable="books", key=subject_token(1)), where)
    finally:
        await stream.delete_stream(name)
        await client.close()


async def on_kafka(server: KafkaServer, where: Books) -> None:
    topic = Topic(server.admin_url, f"places{os.getpid()}x{next(_numbers)}", PARTITIONS)
    await asyncio.to_thread(topic.create)
    try:
        producer = Producer({"bootstrap.servers": server.url, "enable.idempotence": True})
        for event in LOG:
            producer.produce(topic.name, key=event.case, value=event.payload)
        assert await asyncio.to_thread(producer.flush, 20) == 0
        config = {"bootstrap.servers": server.url, "group.id": topic.name, "auto.offset.reset": "earliest"}
        await live(KafkaSource(config, topics=topic.name), where)
    finally:
        await asyncio.to_thread(topic.delete)


async def on_postgresql(where: Books) -> None:
    """The log is in the database of the effects."""
    log = Log("declarations", partitions=PARTITIONS)
    async with await psycopg.AsyncConnection.connect(where.url) as connection:
        await migrate(connection)
        await log.create(connection)
        for start in range(0, len(LOG), 50):
            await log.append(connection, [Record(event.payload, key=event.case) for event in LOG[start : start + 50]])
            await connection.commit()
    await live(PostgresSource(where.url, log, subscription="books"), where)


def rows() -> list[dict[str, Any]]:
    """The log as the rows of a topic."""
    ends = [0] * PARTITIONS
    found = []
    for event in LOG:
        partition = sum(event.case.encode()) % PARTITIONS
        found.append(
            {"key": event.case.encode(), "partition": partition, "offset": ends[partition], "value": event.payload}
        )
        ends[partition] += 1
    return found


def in_a_task_of_spark(where: Books) -> None:
    """Without Spark: what a task of it runs."""
    job = TaskJob(
        topic="declarations",
        handler=declarations.book,
        name="places",
        settings=SETTINGS,
        setup=partial(declarations.begin, where.url),
        teardown=declarations.end,
    )
    list(run_task((pa.RecordBatch.from_pylist(rows()[at : at + 64]) for at in range(0, len(LOG), 64)), job))


def on_spark(folder: Path, where: Books) -> None:
    everything = rows()
    # The files have no order, so Spark must sort the rows.
    table = write_table(folder / "declarations", [everything[number::4][::-1] for number in range(4)])
    with session("local[2]") as spark:
        report = replay(
            spark,
            table,
            declarations.book,
            settings=SETTINGS,
            setup=partial(declarations.begin, where.url),
            teardown=declarations.end,
            effects="fenced",
            checkpoint=str(folder / "checkpoint"),
            rows_per_batch=300,
        )
    assert report.finished == len(LOG)
    assert report.batches > 1


def assert_the_same(found: dict[str, State]) -> None:
    expected = by_a_plain_loop()
    for place, state in found.items():
        for name, (steps, _, _) in state.items():
            assert steps == list(range(len(expected[name][0]))), f"{place}: {name} out of order"
        assert state == expected, place


def live_places(nats_server: NatsServer, kafka: KafkaServer, books: Callable[[], Books]) -> dict[str, State]:
    places: dict[str, Callable[[Books], Awaitable[None]]] = {
        "memory": in_memory,
        "jetstream": partial(on_jetstream, nats_server),
        "kafka": partial(on_kafka, kafka),
        "postgresql": on_postgresql,
    }
    found = {}
    for name, place in places.items():
        where = books()
        asyncio.run(place(where))  # type: ignore[arg-type]
        found[name] = where.state()
    return found


def test_the_log_of_the_example_has_one_hot_key_and_many_others() -> None:
    state = by_a_plain_loop()
    assert len(state) > 30
    assert len(state["hot"][0]) == HOT == max(len(steps) for steps, _, _ in state.values())
    assert {sum(name.encode()) % PARTITIONS for name in state} == set(range(PARTITIONS))


@pytest.mark.timeout(300)  # five runs with a transaction for each message, and a minute on a busy machine
def test_one_handler_gives_equal_results_on_kafka_jetstream_postgres_and_spark(
    nats_server: NatsServer, kafka: KafkaServer, books: Callable[[], Books]
) -> None:
    found = live_places(nats_server, kafka, books)
    where = books()
    in_a_task_of_spark(where)
    assert_the_same({**found, "a task of Spark": where.state()})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning")
@pytest.mark.timeout(300)
def test_one_handler_in_five_places_with_a_cluster(
    nats_server: NatsServer, kafka: KafkaServer, books: Callable[[], Books], tmp_path: Path
) -> None:
    found = live_places(nats_server, kafka, books)
    where = books()
    on_spark(tmp_path, where)
    assert_the_same({**found, "Spark": where.state()})


def test_the_example_of_five_places_runs_and_keeps_the_tables_of_others(
    books: Callable[[], Books], tmp_path: Path
) -> None:
    url = books().url
    with psycopg.connect(url) as connection:
        migrate(connection)
        Log("precious").create(connection)
        connection.execute("CREATE TABLE declarations (note text)")
    run(Path(declarations.__file__), tmp_path, POSTGRES_URL=url)
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT count(*) FROM lanes.lanes_logs").fetchone() == (1,)
        assert connection.execute("SELECT count(*) FROM declarations").fetchone() == (0,)
