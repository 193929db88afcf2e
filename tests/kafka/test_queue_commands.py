"""`lanes queue`: the runbook of another number of partitions on a real broker, and the state of a queue."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from time import monotonic
from typing import Any

import anyio
import confluent_kafka
import pytest
from confluent_kafka import KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import ConfigResource, ListConsumerGroupsResult, ResourceType

from lanes import ConfigError, Consumer, Message, PartitionedQueue, Settings, SourceError
from lanes.cli import queue as commands
from lanes.cli.kit import Misuse
from lanes_kafka import KafkaSource
from lanes_kafka.cli.queue_survey import Cluster, queue_broker
from tests.kafka.conftest import MakeTopic
from tests.kafka.members import PROTOCOLS
from tests.kafka.mock_cluster import OFFSET_FETCH, MockCluster
from tests.kafka.workload import QUIET, Topic, until

NOWHERE = ("--server", "127.0.0.1:9")
Command = Callable[..., tuple[int, str]]


@pytest.fixture
def lanes_queue(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs a command, and returns its status and its output on both streams."""
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.setattr(commands, "_ARRIVALS", 0.2)

    def run(*arguments: str) -> tuple[int, str]:
        status: Any
        try:
            status = commands.queue(args=list(arguments), standalone_mode=False, prog_name="lanes queue")
        except SystemExit as ended:
            status = ended.code
        said = capsys.readouterr()
        # A command that waits for a slow broker says so beside its JSON.
        return status or 0, said.out if "--json" in arguments else said.out + said.err

    return run


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["grow", "--from", "4", "--to", "2"],
            "has --from 4 --to 2, but --to must be larger; to remove partitions, use `lanes queue shr",
        ),
        (
            ["shrink", "--from", "2", "--to", "2"],
            "has --from 2 --to 2, but --to must be smaller; to add partitions, use `lanes queue g",
        ),
    ],
)
def test_a_number_in_the_wrong_direction_names_the_other_command(
    lanes_queue: Command, arguments: list[str], words: str
) -> None:
    with pytest.raises(Misuse, match=words):
        lanes_queue(*arguments, "q", *NOWHERE)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--server", "nats://127.0.0.1:9"],
            "needs --stream NAME, because --server is the URL of a NATS server",
        ),
        (["--stream", "S"], "needs --server ADDRESS of a NATS server, such as nats://127.0.0.1:4222"),
        (["--stream", "S", "--server", "a:1", "-X", "b=c"], "has --stream with --config or -X, which are for Ka"),
        ([], "needs --server HOST:PORT of a Kafka broker, or bootstrap.servers in --config FILE or by -X"),
    ],
)
def test_the_options_choose_one_broker(lanes_queue: Command, arguments: list[str], words: str) -> None:
    with pytest.raises(Misuse, match=words):
        lanes_queue("status", "q", "--partitions", "2", *arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["q", "--partitions", "0"], "lanes: --partitions 0: must be a whole number, 1 or more\n"),
        (["", "--partitions", "2"], "lanes: QUEUE '': must not be empty\n"),
        (
            ["a\nb", "--partitions", "2"],
            "lanes: QUEUE 'a\\nb': contains U+000A, but a name is one line of text; remove this character\n",
        ),
    ],
)
def test_an_impossible_queue_is_refused_before_a_broker_is_asked(
    lanes_queue: Command, arguments: list[str], words: str
) -> None:
    assert lanes_queue("status", *arguments, *NOWHERE) == (64, words)


def test_a_broker_that_does_not_answer_is_one_line(lanes_queue: Command) -> None:
    status, said = lanes_queue("status", "q", "--partitions", "2", *NOWHERE)
    assert status == 3
    assert said.splitlines()[-1].startswith("lanes: queue 'q': no Kafka broker answers at 127.0.0.1:9 within ")


# --- on a real broker


@pytest.fixture
def topics(topic: MakeTopic) -> Iterator[list[Topic]]:
    """The topics of a queue of two partitions, of which the last one does not exist yet."""
    first = topic(2, config={"retention.ms": "7200000"})
    second = Topic(first.url, f"{first.name}__p1", 2)
    yield [first, second]
    if second.exists():
        second.delete()


async def ignore(message: Message) -> None: ...


@pytest.mark.anyio
async def test_a_queue_grows_and_shrinks_by_the_runbook(topics: list[Topic], lanes_queue: Command) -> None:
    first, second = topics
    narrow, wide = (PartitionedQueue(first.name, number) for number in (1, 2))
    group = f"g-{first.name}"
    server = ("--server", first.url, "--group", group)
    config = first.config(**PROTOCOLS["cooperative"], **{"auto.offset.reset": "earliest"})
    prompt = Settings(commit_interval=0.1)

    async def run(*arguments: str) -> tuple[int, Any]:
        status, said = await anyio.to_thread.run_sync(lambda: lanes_queue(*arguments, "--json"))
        return status, json.loads(said)

    async def steps(*arguments: str) -> tuple[int, list[str], list[str]]:
        status, found = await run(*arguments)
        return status, [step["progress"] for step in found["steps"]], found["faults"]

    async def reaches(expected: tuple[int, list[str], list[str]], *arguments: str) -> None:
        """Wait until the broker has noticed that members came or left."""
        while (found := await steps(*arguments)) != expected:
            print(found)
            await anyio.sleep(0.1)

    async def state() -> tuple[int, Any]:
        return await run("status", first.name, "--partitions", "1", *server[:2])

    async def produce(name: str, count: int) -> None:
        producer = Producer({**QUIET, "bootstrap.servers": first.url})
        for _ in range(count):
            producer.produce(name, value=b"v", key=b"k")
        assert await anyio.to_thread.run_sync(producer.flush, 30) == 0

    grow = ("grow", first.name, "--from", "1", "--to", "2", *server)
    shrink = ("shrink", first.name, "--from", "2", "--to", "1", *server)
    with anyio.fail_after(120):
        async with Consumer(KafkaSource(config, topics=narrow), ignore, settings=prompt) as worker:
            await until(lambda: worker.active)
            assert await steps(*grow) == (0, ["due", "due", "unknown"], [])
            status, found = await run(*grow, "--apply")
            assert (status, found["done"]) == (0, [f"created topic {second.name!r} with 2 partition(s)"])
            assert second.exists()
            resource = ConfigResource(ResourceType.TOPIC, second.name)
            settings = first.admin.describe_configs([resource])[resource].result(10)
            assert settings["retention.ms"].value == "7200000"
            assert await steps(*grow) == (0, ["done", "due", "unknown"], [])
            # The producers come too early.
            await produce(second.name, 3)
            early = (
                f"3 messages wait in {second.name!r}, and no consumer of group {group!r} reads them; producers already "
                "use more than 1 partitions, so start the workers with 2 now"
            )
            assert await steps(*grow) == (3, ["done", "due", "unknown"], [early])
            # Without --group, the group of the queue counts in the added topic too.
            status, found = await state()
            assert (status, found["stranded"]) == (3, [{"topic": second.name, "group": group, "messages": 3}])
        async with Consumer(KafkaSource(config, topics=wide), ignore, settings=prompt) as worker:
            await until(lambda: worker.status().settled == 3)
            await reaches((0, ["done", "done", "unknown"], []), *grow)
            status, found = await run(*shrink, "--apply")
            assert (status, second.exists()) == (3, True)
            assert f"not removed: group {group!r} still reads {second.name!r}" in found["faults"]
        # The workers end before the queue is finished.
        await produce(second.name, 5)
        fault = (
            f"group {group!r} has not finished 5 messages of {second.name!r}, and none of its consumers reads it; "
            "start a worker with partitions=2 again"
        )
        await reaches((3, ["unknown", "due", "done", "due"], [fault]), *shrink)
        refused = f"not removed: group {group!r} has not finished 5 messages of {second.name!r}"
        assert (await steps(*shrink, "--apply"))[2] == [fault, refused] and second.exists()
        assert (await state())[1]["stranded"] == [{"topic": second.name, "group": group, "messages": 5}]
        async with Consumer(KafkaSource(config, topics=wide), ignore, settings=prompt) as worker:
            await until(lambda: worker.status().settled == 5)
        await reaches((0, ["unknown", "done", "done", "due"], []), *shrink)
        status, found = await run(*shrink, "--apply")
        assert (status, found["done"]) == (0, [f"removed topic {second.name!r}"])
        assert [step["progress"] for step in found["steps"]] == ["unknown", "done", "done", "done"]
        assert (await state())[0] == 0
    status, said = await anyio.to_thread.run_sync(lambda: lanes_queue(*grow))
    assert status == 0 and "create the physical queues" in said and f"missing: {second.name!r}" in said
    status, said = await anyio.to_thread.run_sync(
        lambda: lanes_queue("status", first.name, "--partitions", "2", *server[:2])
    )
    assert status == 3 and "missing" in said and os.linesep in said


@pytest.mark.anyio
async def test_a_group_with_a_smaller_number_keeps_the_topics_that_it_has_not_read(
    topics: list[Topic], lanes_queue: Command
) -> None:
    first, second = topics
    second.create()
    producer = Producer({**QUIET, "bootstrap.servers": first.url})
    for each in topics:
        producer.produce(each.name, value=b"v", key=b"k")
    assert await anyio.to_thread.run_sync(producer.flush, 30) == 0

    def worker(width: int, group: str) -> Consumer:
        config = first.config(**PROTOCOLS["cooperative"], **{"auto.offset.reset": "earliest", "group.id": group})
        source = KafkaSource(config, topics=PartitionedQueue(first.name, width))
        return Consumer(source, ignore, settings=Settings(commit_interval=0.1))

    wide, stale = f"wide-{first.name}", f"stale-{first.name}"
    with anyio.fail_after(120):
        async with worker(2, wide) as all_topics, worker(1, stale) as one_topic:
            await until(lambda: (all_topics.status().settled, one_topic.status().settled) == (2, 1))

        async def shrink(*arguments: str) -> tuple[int, Any]:
            shrink = ("shrink", first.name, "--from", "2", "--to", "1", "--apply", "--json", "--server", first.url)
            status, said = await anyio.to_thread.run_sync(lambda: lanes_queue(*shrink, *arguments))
            return status, json.loads(said)

        refused = f"not removed: group {stale!r} has not finished 1 messages of {second.name!r}"
        while refused not in (found := await shrink())[1]["faults"]:
            assert second.exists(), found
        # A named group leaves the choice of the groups to the operator.
        while (found := await shrink("--group", wide))[0] != 0:
            print(found)
        assert not second.exists()


def test_a_coordinator_that_starts_is_asked_again(topics: list[Topic], monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = topics
    cluster = Cluster({**QUIET, "bootstrap.servers": first.url}, first.name)
    answers: dict[str, list[Any]] = {
        "list_consumer_groups": [ListConsumerGroupsResult([], [failure(KafkaError.COORDINATOR_LOAD_IN_PROGRESS)])],
        "describe_consumer_groups": [failure(KafkaError.NOT_COORDINATOR)],
    }

    def answered(name: str) -> Callable[..., Any]:
        ask = getattr(cluster._admin, name)

        def asked(*arguments: Any, **options: Any) -> Any:
            made = ask(*arguments, **options)
            if not answers[name]:
                return made
            answer = answers[name].pop()
            future: Future[Any] = Future()
            if isinstance(answer, Exception):
                future.set_exception(answer)
                return dict.fromkeys(made, future)
            future.set_result(answer)
            return future

        return asked

    for name in answers:
        monkeypatch.setattr(cluster._admin, name, answered(name))
    found = cluster.survey([first.name], ["g"])
    assert found.groups == ("g",) and not any(answers.values())


def test_a_coordinator_that_has_moved_is_asked_for_positions_again(cluster: MockCluster, name: str) -> None:
    """librdkafka 2.16 ends the process if an ``AdminClient`` asks for positions then."""
    cluster.create(name, 1)
    place = TopicPartition(name, 0, 3)
    settings = {**QUIET, "bootstrap.servers": cluster.url}
    consumer = confluent_kafka.Consumer({**settings, "group.id": "g"})
    consumer.commit(offsets=[place], asynchronous=False)
    consumer.close()
    cluster.fail(OFFSET_FETCH, [KafkaError.NOT_COORDINATOR, KafkaError.COORDINATOR_NOT_AVAILABLE])
    # A setting that only a consumer refuses does not matter here.
    cluster_client = Cluster({**settings, "session.timeout.ms": 400_000}, name)
    found = cluster_client._positions(["g", "new"], [place], monotonic() + 20)
    assert {group: [each.offset for each in places] for group, places in found.items()} == {"g": [3], "new": [-1001]}


@pytest.mark.parametrize("verb", ["grow", "shrink"])
def test_an_empty_group_is_refused(lanes_queue: Command, verb: str) -> None:
    with pytest.raises(Misuse, match="--group is empty; name a group, durable or cohort, or leave --group out"):
        lanes_queue(verb, "q", "--from", "2", "--to", "4", "--group", "", *NOWHERE)


def test_the_questions_for_positions_end_soon_after_an_interrupt() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        cluster = Cluster({**QUIET, "bootstrap.servers": address}, "q")
        cluster._asking = False
        begin = monotonic()
        with pytest.raises(KafkaException):
            cluster._positions_of("g", [TopicPartition("q", 0)], begin + 60)
        # One question takes 1 s, and a busy machine some more.
        assert monotonic() - begin < 20


def test_a_list_of_groups_with_a_gap_is_an_error(topics: list[Topic], monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that is missing in the list may have messages to finish."""
    first, _ = topics
    cluster = Cluster({**QUIET, "bootstrap.servers": first.url}, first.name)
    future: Future[Any] = Future()
    future.set_result(ListConsumerGroupsResult([], [failure(KafkaError.CLUSTER_AUTHORIZATION_FAILED)]))
    monkeypatch.setattr(cluster._admin, "list_consumer_groups", lambda **_: future)
    with pytest.raises(SourceError, match="the list of groups: the broker refuses the request"):
        cluster.survey([first.name])


def test_changes_that_another_process_has_made_are_no_error(topics: list[Topic]) -> None:
    first, second = topics
    cluster = Cluster({**QUIET, "bootstrap.servers": first.url}, first.name)
    created = f"created topic {second.name!r} with 2 partition(s)"
    assert cluster.create({second.name: 2}, first.name) == [created]
    assert cluster.create({second.name: 2}, first.name) == []
    assert cluster.remove([second.name]) == [f"removed topic {second.name!r}"]
    assert cluster.remove([second.name]) == []


@pytest.mark.parametrize("name", ["a b", "..", "x" * 250])
def test_a_name_that_no_topic_can_have_is_refused_before_the_broker_is_asked(name: str) -> None:
    with pytest.raises(ConfigError, match="no topic can have this name; use 1 to 249 letters"):
        queue_broker(PartitionedQueue(name), "127.0.0.1:9", None, [])
    cluster = Cluster({**QUIET, "bootstrap.servers": "127.0.0.1:9"}, "q")
    with pytest.raises(ConfigError, match="no topic can have this name"):
        cluster.create({name: 1}, "q")


def failure(code: int) -> KafkaException:
    return KafkaException(KafkaError(code))


def test_the_state_has_topics_of_any_former_number_unless_the_topics_are_named(
    topic: MakeTopic, lanes_queue: Command
) -> None:
    first = topic(1)
    retired = Topic(first.url, f"{first.name}__p15", 1)
    retired.create()
    try:
        producer = Producer({**QUIET, "bootstrap.servers": first.url})
        producer.produce(retired.name, value=b"v")
        assert producer.flush(30) == 0
        status, said = lanes_queue("status", first.name, "--partitions", "1", "--json", "--server", first.url)
        assert (status, json.loads(said)["stranded"]) == (3, [{"topic": retired.name, "group": None, "messages": 1}])
        status, said = lanes_queue("status", first.name, "--partition", first.name, "--server", first.url)
        assert (status, retired.name in said) == (0, False)
        assert said.splitlines()[-1] == "only the physical queues named by --partition were read"
    finally:
        retired.delete()


@pytest.mark.anyio
async def test_a_queue_whose_topics_have_names_of_their_own_grows_and_shrinks(
    topic: MakeTopic, lanes_queue: Command
) -> None:
    first = topic(2)
    second = Topic(first.url, f"{first.name}-us", 2)
    queue = PartitionedQueue.of(f"of-{first.name}", [first.name, second.name])
    named = ("--partition", first.name, "--partition", second.name)
    config = first.config(**PROTOCOLS["cooperative"], **{"auto.offset.reset": "earliest"})
    where = (queue.name, "--server", first.url, "--json")

    async def run(*arguments: str) -> tuple[int, Any]:
        status, said = await anyio.to_thread.run_sync(lambda: lanes_queue(*arguments, *where))
        return status, json.loads(said)

    async def reaches(progress: list[str], *arguments: str) -> Any:
        """Wait until the broker has noticed that members came or left."""
        while True:
            _, found = await run(*arguments)
            if [step["progress"] for step in found["steps"]] == progress:
                return found
            await anyio.sleep(0.1)

    grow = ("grow", "--from", "1", "--to", "2", *named, "--group", f"g-{first.name}")
    shrink = ("shrink", "--from", "2", "--to", "1", *named, "--group", f"g-{first.name}")
    with anyio.fail_after(50):
        assert (await run("status", *named[:2]))[0] == 0
        status, found = await run("status", *named)
        assert (status, found["partitions"], found["missing"]) == (3, 2, [second.name])
        status, found = await run(*grow, "--apply")
        assert (status, len(found["done"])) == (0, 1)
        async with Consumer(KafkaSource(config, topics=queue), ignore):
            found = await reaches(["done", "done", "unknown"], *grow)
        assert [step["action"] for step in found["steps"][1:]] == [
            f"start all {each} with physical_names={[*queue.names]}" for each in ("workers", "producers")
        ]
        found = await reaches(["unknown", "done", "done", "due"], *shrink)
        status, found = await run(*shrink, "--apply")
        assert (status, len(found["done"]), second.exists()) == (0, 1, False)
