"""A partitioned queue in one stream: one process on durables, or two members of a cohort, each key in order."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from demo.events import GENERATED_EVENTS, Event, load
from lanes import Capacity, ConfigError, Consumer, Message, PartitionedQueue, PartitionStatus, Settings, Term
from lanes.dead_letters.box import StoredDeadLetter
from lanes_jetstream import Cohort, CohortStream, JetStreamDeadLetters, JetStreamSource, header
from lanes_jetstream.dead_letters.box import JetStreamDeadLetterBox
from tests.components import NatsServer
from tests.jetstream.cohort_workload import LASTING
from tests.jetstream.workload import unique, until

URL = "nats://127.0.0.1:9"
QUEUE = PartitionedQueue("updates", partitions=2)


def source_of(**arguments: Any) -> JetStreamSource:
    arguments = {"stream": "S", "queue": QUEUE, "key": header("customer"), **arguments}
    return JetStreamSource(URL, **arguments)


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ({"queue": "updates"}, r"queue='updates': must be a PartitionedQueue, such as PartitionedQueue\(\"orders\""),
        (
            {"queue": PartitionedQueue("a b")},
            "the physical queue 'a b' is not a valid subject; use names without blanks",
        ),
        ({"queue": PartitionedQueue("up.*")}, r"the physical queue 'up\.\*' is not a valid subject"),
        ({"queue": PartitionedQueue("$JS.API")}, r"the physical queue '\$JS\.API' is not a valid subject"),
        (
            {"queue": PartitionedQueue.of("up", ["up.eu.west", "us", "up.eu"])},
            r"the physical queue 'up\.eu\.west' is below 'up\.eu', so both would receive its messages; choose",
        ),
        (
            {"filter_subject": "updates"},
            r"filter_subject='updates' exclude each other, .* physical queues 'updates', 'updates__p1'; omit filter_",
        ),
        ({"shared": True}, r"queue='updates' and shared=True exclude each other; omit shared=True, and pass cohort=…"),
        (
            {"queue": PartitionedQueue("up", 257)},
            "needs 257 durables, one for each partition; more than 256 durables slow",
        ),
        (
            {"durable": None, "cohort": Cohort(partitions=4)},
            r"queue='updates' has 2 partitions, but Cohort\(partitions=4\) has another number",
        ),
        (
            {"durable": None, "cohort": Cohort(create=CohortStream(subject="updates.*"))},
            r"queue='updates' and Cohort\(create=…\) exclude each other, because a transform would change the subjects",
        ),
    ],
)
def test_an_argument_that_contradicts_the_queue_is_refused(arguments: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        source_of(**{"durable": "work", **arguments})


@pytest.mark.parametrize("cohort", ["c", Cohort("c", partitions=2), Cohort("c")])
def test_a_cohort_may_repeat_the_number_of_partitions(cohort: Any) -> None:
    assert source_of(cohort=cohort).declared().partitions == 2


# --- on a real server


@pytest.fixture
async def queue(nats_server: NatsServer, client: Client) -> AsyncIterator[PartitionedQueue]:
    """A queue of four partitions, in a stream of the same name."""
    made = PartitionedQueue(unique("Q"), partitions=4)
    subjects = [subject for name in made.names for subject in (name, f"{name}.>")]
    stream = client.jetstream()
    await stream.add_stream(name=made.name, subjects=subjects, storage="memory")
    yield made
    await stream.delete_stream(made.name)
    if f"KV_lanes_{made.name}_lanes" in [each.config.name for each in await stream.streams_info()]:
        await stream.delete_key_value(f"lanes_{made.name}_lanes")


def case_of(message: Msg) -> str:
    """The key in a header, or in the last token of the subject."""
    return (message.headers or {}).get("case") or message.subject.rpartition(".")[2]


async def publish(client: Client, queue: PartitionedQueue, events: list[Event]) -> None:
    """Publish events by their case: every other one to the bare name, with the case in a header."""
    for number, event in enumerate(events):
        name = queue.route_by_key(event.case).name
        if number % 2:
            await client.publish(f"{name}.{event.case}", event.payload)
        else:
            await client.publish(name, event.payload, headers={"case": event.case})
    await client.flush()


class Handled:
    """A handler that checks the order of the events of each case."""

    def __init__(self, events: list[Event]) -> None:
        self.expected: dict[bytes, list[bytes]] = {}
        for event in events:
            self.expected.setdefault(event.case.encode(), []).append(event.payload)
        self.seen: dict[bytes, list[bytes]] = {}
        self.members: set[str] = set()
        self.count = 0

    def by(self, member: str) -> Any:
        async def handle(message: Message) -> None:
            assert message.key is not None
            await anyio.lowlevel.checkpoint()
            self.seen.setdefault(message.key, []).append(message.value)
            self.members.add(member)
            self.count += 1

        return handle

    @property
    def violations(self) -> list[bytes]:
        """The cases whose events did not come once each and in order."""
        return [case for case, payloads in self.expected.items() if self.seen.get(case) != payloads]


@pytest.mark.anyio
@pytest.mark.usefixtures("frequent_checks")
async def test_one_process_reads_all_partitions_each_key_in_order(
    nats_server: NatsServer, client: Client, queue: PartitionedQueue
) -> None:
    events = load(None, 400, 1)
    handled = Handled(events)
    settings = Settings(concurrency=20, concurrency_per_partition=4, max_in_flight=100, max_in_flight_per_partition=10)
    source = JetStreamSource(nats_server.url, stream=queue.name, durable="work", key=case_of, queue=queue)
    with anyio.fail_after(50):
        async with Consumer(source, handled.by("one"), settings=settings) as consumer:
            await publish(client, queue, events)
            await until(lambda: consumer.status().settled == 400)
            await until(lambda: consumer.status().queues[queue.name].lag == 0)
            status = consumer.status()
    found = status.queues[queue.name]
    assert (found.partitions, found.assigned, found.capacity) == (
        4,
        (0, 1, 2, 3),
        Capacity(concurrency=16, max_in_flight=40),
    )
    assert (found.in_flight, found.running, found.oldest) == (0, 0, None)
    assert {name: (each.queue, each.queue_partition) for name, each in status.partitions.items()} == {
        f"{name}/{number}": (queue.name, number) for number, name in enumerate(queue.names)
    }
    assert handled.violations == []


@pytest.mark.anyio
@pytest.mark.parametrize("how", [{"durable": "work"}, {"cohort": Cohort("updates", lease=LASTING)}])
async def test_a_partition_whose_handlers_hang_keeps_to_its_own_bounds(
    nats_server: NatsServer, client: Client, queue: PartitionedQueue, how: dict[str, Any]
) -> None:
    stuck, free = queue.names[1:3]
    continues = anyio.Event()
    done: list[str] = []
    running = most = 0

    async def handle(message: Message) -> None:
        nonlocal running, most
        if message.partition.id.source == stuck:
            running += 1
            most = max(most, running)
            await continues.wait()
            running -= 1
        done.append(message.partition.id.source)

    settings = Settings(concurrency=8, concurrency_per_partition=2, max_in_flight=60, max_in_flight_per_partition=20)
    source = JetStreamSource(nats_server.url, stream=queue.name, key=case_of, queue=queue, **how)
    with anyio.fail_after(50):
        async with Consumer(source, handle, settings=settings) as consumer:

            def part() -> PartitionStatus:
                return consumer.status().partitions[f"{stuck}/1"]

            for number in range(60):
                await client.publish(f"{stuck}.{number}", b"x")
            await client.flush()
            await until(lambda: f"{stuck}/1" in consumer.status().partitions and part().full)
            for number in range(60):
                await client.publish(f"{free}.{number}", b"x")
            await client.flush()
            await until(lambda: done.count(free) == 60)
            await until(lambda: part().running == 2)
            assert part().in_flight <= 20
            assert stuck not in done
            continues.set()
    assert most == 2


@pytest.mark.anyio
async def test_a_dead_letter_names_the_queue_and_goes_back_to_its_partition(
    nats_server: NatsServer, client: Client, queue: PartitionedQueue
) -> None:
    name, dead = queue.names[3], f"{queue.name}dead"
    await client.jetstream().add_stream(name=dead, subjects=[dead], storage="memory")
    values: list[bytes] = []

    async def handle(message: Message) -> None:
        values.append(message.value)
        if len(values) <= 2:
            raise Term("no such customer")

    source = JetStreamSource(nats_server.url, stream=queue.name, durable="work", key=case_of, queue=queue)
    letters = JetStreamDeadLetters(nats_server.url, dead)
    box = JetStreamDeadLetterBox(client, dead)
    with anyio.fail_after(50):
        async with Consumer(source, handle, dead_letters=letters) as consumer:
            await client.publish(f"{name}.ann", b"token")
            await client.publish(name, b"bare", headers={"case": "bob"})
            await until(lambda: consumer.status().settled == 2)
            await box.open()
            found = [each for each in (await box.find(await box.ids())).values() if isinstance(each, StoredDeadLetter)]
            of = {each.dead_letter.value: each.dead_letter for each in found}
            assert {(each.source, each.queue, each.queue_partition) for each in of.values()} == {(name, queue.name, 3)}
            assert {each.subject: each.key for each in of.values()} == {f"{name}.ann": b"ann", name: b"bob"}
            for each in found:
                await box.publish(each)
            await until(lambda: consumer.status().settled == 4)
            await box.aclose()
    assert sorted(values) == [b"bare", b"bare", b"token", b"token"]
    await client.jetstream().delete_stream(dead)


@pytest.mark.anyio
@pytest.mark.parametrize("how", [{"durable": "work"}, {"cohort": Cohort("work", lease=LASTING)}])
async def test_workers_with_fewer_partitions_than_the_producers_name_the_stranded_subjects_within_ten_seconds(
    nats_server: NatsServer,
    client: Client,
    queue: PartitionedQueue,
    how: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The producers use four partitions, and the workers two. The alarm ends once the messages are gone."""
    narrow = PartitionedQueue(queue.name, partitions=2)
    stream = client.jetstream()

    async def ignore(message: Message) -> None: ...

    source = JetStreamSource(nats_server.url, stream=queue.name, key=case_of, queue=narrow, **how)
    with anyio.fail_after(50):
        async with Consumer(source, ignore) as worker:

            def stranded() -> dict[str, int]:
                return {each.name: each.messages for each in worker.status().queues[queue.name].stranded}

            await until(lambda: len(worker.status().partitions) == 2)
            for number in range(40):
                await stream.publish(
                    f"{queue.names[number % 4]}.{number}" if number % 8 < 4 else queue.names[number % 4]
                )
            published = time.time()
            await until(lambda: len(stranded()) == 2)
            assert stranded() == dict.fromkeys(queue.names[2:], 10)
            health = worker.health()
            assert health.ok and len(health.findings) == 1
            for name in queue.names[2:]:
                await stream.purge_stream(queue.name, subject=name)
                await stream.purge_stream(queue.name, subject=f"{name}.>")
            await until(lambda: stranded() == {})
    (line,) = [each for each in caplog.records if each.levelname == "WARNING"]
    assert line.created - published < 10
    assert line.getMessage().endswith(
        f": queue {queue.name!r}: no consumer of {next(iter(how))} 'work' reads the messages in {queue.names[2]!r} "
        f"(10), {queue.names[3]!r} (10). The producers use another number of partitions; start the consumers with "
        "that number"
    )
    assert line.getMessage().endswith(health.findings[0])


@pytest.mark.anyio
@pytest.mark.parametrize("count", [1_000, pytest.param(GENERATED_EVENTS, marks=pytest.mark.slow)])
async def test_two_members_read_all_partitions_each_key_in_order(
    nats_server: NatsServer, client: Client, queue: PartitionedQueue, count: int
) -> None:
    events = load(None, count, 1)
    handled = Handled(events)
    half = len(events) // 2

    def member(name: str) -> Consumer:
        cohort = Cohort("updates", member=name, lease=LASTING)
        source = JetStreamSource(nats_server.url, stream=queue.name, cohort=cohort, key=case_of, queue=queue)
        return Consumer(source, handled.by(name), settings=Settings(concurrency=20, concurrency_per_partition=8))

    with anyio.fail_after(30 + len(events) / 100):
        await publish(client, queue, events[:half])
        async with member("one") as one, member("other") as other:

            def assigned() -> list[tuple[int, ...]]:
                return [each.status().queues[queue.name].assigned for each in (one, other)]

            await until(lambda: list(map(len, assigned())) == [2, 2])
            assert sorted(number for each in assigned() for number in each) == [0, 1, 2, 3]
            assert [each.status().queues[queue.name].capacity.concurrency for each in (one, other)] == [16, 16]
            await publish(client, queue, events[half:])
            await until(lambda: handled.count >= len(events))
            await until(lambda: all(each.status().queues[queue.name].lag == 0 for each in (one, other)))
    assert handled.violations == []
    assert handled.count == len(events)
    assert handled.members == {"one", "other"}
