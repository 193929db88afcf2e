"""`lanes queue --stream`: the runbook of another number of partitions on a real server, and the state of a queue."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio
import pytest
from nats.aio.client import Client

from lanes import ConfigError, Consumer, Message, PartitionedQueue
from lanes.cli import queue as commands
from lanes.errors import SourceError
from lanes_jetstream import Cohort, JetStreamSource, header
from lanes_jetstream.queue_survey import StreamQueues
from tests.components import NatsServer
from tests.jetstream.cohort_workload import LASTING
from tests.jetstream.workload import unique, until

Command = Callable[..., Awaitable[Any]]

LEASE = 10.0
"""Seconds that the next number of partitions waits for the former members."""


@pytest.fixture
async def narrow(nats_server: NatsServer, client: Client) -> AsyncIterator[PartitionedQueue]:
    """A queue of two partitions, in a stream of the same name that stores a further subject."""
    made = PartitionedQueue(unique("Q"), partitions=2)
    subjects = [subject for name in made.names for subject in (name, f"{name}.>")]
    stream = client.jetstream()
    await stream.add_stream(name=made.name, subjects=[*subjects, f"{made.name}-other"], storage="memory")
    yield made
    await stream.delete_stream(made.name)
    for each in await stream.streams_info():
        if (each.config.name or "").startswith(f"KV_lanes_{made.name}_"):
            await stream.delete_stream(each.config.name or "")


@pytest.fixture
def lanes_queue(
    nats_server: NatsServer,
    narrow: PartitionedQueue,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Command:
    """Runs a command in a thread, and returns its status and its JSON."""
    monkeypatch.setattr(commands, "_ARRIVALS", 0.2)

    def run(*arguments: str) -> tuple[int, Any]:
        status: Any
        where = (narrow.name, "--stream", narrow.name, "--server", nats_server.url, "--json")
        try:
            status = commands.queue(args=[*arguments, *where], standalone_mode=False, prog_name="lanes queue")
        except SystemExit as ended:
            status = ended.code
        said = capsys.readouterr()
        assert said.out, said.err
        return status or 0, json.loads(said.out)

    async def command(*arguments: str) -> tuple[int, Any]:
        return await anyio.to_thread.run_sync(lambda: run(*arguments))

    return command


async def ignore(message: Message) -> None: ...


def shown(answer: tuple[int, Any]) -> tuple[int, list[str], list[str]]:
    status, found = answer
    return status, [step["progress"] for step in found["steps"]], found["faults"]


async def subjects_of_stream(client: Client, name: str) -> list[str]:
    return list((await client.jetstream().stream_info(name)).config.subjects or ())


@pytest.mark.anyio
@pytest.mark.timeout(250)
@pytest.mark.parametrize("kind", ["durable", "cohort"])
async def test_a_queue_grows_and_shrinks_by_the_runbook(
    nats_server: NatsServer, client: Client, narrow: PartitionedQueue, lanes_queue: Command, kind: str
) -> None:
    wide = PartitionedQueue(narrow.name, partitions=4)
    group = "work" if kind == "durable" else "lanes"
    stream, before = client.jetstream(), await subjects_of_stream(client, narrow.name)
    grow = ("grow", "--from", "2", "--to", "4", "--group", group)
    shrink = ("shrink", "--from", "4", "--to", "2", "--group", group)

    def worker(queue: PartitionedQueue) -> Consumer:
        how: Any = {"durable": "work"} if kind == "durable" else {"cohort": Cohort("work", member="m", lease=LEASE)}
        source = JetStreamSource(nats_server.url, stream=queue.name, key=header("k"), queue=queue, **how)
        return Consumer(source, ignore)

    async def reaches(expected: tuple[int, list[str], list[str]], *arguments: str) -> None:
        """Wait until the server has noticed that members came or left."""
        while (found := shown(await lanes_queue(*arguments))) != expected:
            print(found)
            await anyio.sleep(0.1)

    async def publish(name: str, count: int) -> None:
        for number in range(count):
            await stream.publish(name if number % 2 else f"{name}.x", b"v", headers={"k": "k"})

    with anyio.fail_after(100):
        async with worker(narrow) as running:
            await publish(narrow.name, 2)
            await until(lambda: running.status().settled == 2)
            assert shown(await lanes_queue(*grow)) == (0, ["due", "due", "unknown"], [])
            status, found = await lanes_queue(*grow, "--apply")
            added = [subject for name in wide.names[2:] for subject in (name, f"{name}.>")]
            assert (status, found["done"]) == (
                0,
                [f"added subject {each!r} to stream {narrow.name!r}" for each in added],
            )
            assert await subjects_of_stream(client, narrow.name) == [*before, *added]
            assert shown(await lanes_queue(*grow)) == (0, ["done", "due", "unknown"], [])
            # The producers come too early.
            await publish(wide.names[2], 3)
            early = (
                f"3 messages wait in {wide.names[2]!r}, and no consumer of group {group!r} reads them; producers "
                "already use more than 2 partitions, so start the workers with 4 now"
            )
            assert shown(await lanes_queue(*grow)) == (3, ["done", "due", "unknown"], [early])
            status, found = await lanes_queue("status", "--partitions", "2")
            # Without --group, the group of the queue counts in the added physical queue too.
            assert (status, found["stranded"]) == (3, [{"subject": wide.names[2], "group": group, "messages": 3}])
            # A cohort with a member keeps its number.
            assert (await lanes_queue(*grow, "--apply"))[1]["done"] == []
        status, found = await lanes_queue(*grow, "--apply")
        forgot = [f"cohort {group!r} has no live member, and forgot its {{}} partition(s)"] if kind == "cohort" else []
        assert found["done"] == [each.format(2) for each in forgot]
        async with worker(wide) as running:
            await until(lambda: running.status().settled == 3)
            await reaches((0, ["done", "done", "unknown"], []), *grow)
            await until(lambda: running.status().queues[narrow.name].lag == 0)
            status, found = await lanes_queue(*shrink, "--apply")
            assert status == 3 and found["done"] == []
            assert found["faults"] == [f"not removed: group {group!r} still reads {name!r}" for name in wide.names[2:]]
            # The number of the command is wrong.
            status, found = await lanes_queue("shrink", "--from", "2", "--to", "1", "--group", group)
            wider = f"group {group!r} reads {wide.names[2]!r}, {wide.names[3]!r}, so its workers have more than 2 part"
            assert (status, [each[: len(wider)] for each in found["faults"]]) == (3, [wider])
        # The workers end before the queue is finished.
        await publish(wide.names[3], 5)
        fault = (
            f"group {group!r} has not finished 5 messages of {wide.names[3]!r}, and none of its consumers reads it; "
            "start a worker with partitions=4 again"
        )
        workers = "done" if kind == "durable" else "due"
        await reaches((3, ["unknown", "due", workers, "due"], [fault]), *shrink)
        refused = f"not removed: group {group!r} has not finished 5 messages of {wide.names[3]!r}"
        assert shown(await lanes_queue(*shrink, "--apply"))[2] == [fault, refused]
        status, found = await lanes_queue("status", "--partitions", "2")
        assert (status, found["stranded"]) == (3, [{"subject": wide.names[3], "group": group, "messages": 5}])
        async with worker(wide) as running:
            await until(lambda: running.status().settled == 5)
        await reaches((0, ["unknown", "done", workers, "due"], []), *shrink)
        status, found = await lanes_queue(*shrink, "--apply")
        removed = [f"removed subject {each!r} from stream {narrow.name!r}" for each in added]
        assert (status, found["done"]) == (0, [*removed, *(each.format(4) for each in forgot)])
        assert await subjects_of_stream(client, narrow.name) == before
        assert [step["progress"] for step in found["steps"]] == ["unknown", "done", "done", "done"]
        assert (await lanes_queue("status", "--partitions", "2"))[0] == 0
        async with worker(narrow) as running:
            await publish(narrow.names[1], 4)
            await until(lambda: running.status().settled == 4)
        # After another growth, the positions are still there, and no finished message is repeated.
        assert (await lanes_queue(*grow, "--apply"))[0] == 0
        async with worker(wide) as running:
            await publish(wide.names[3], 1)
            await until(lambda: running.status().queues[narrow.name].lag == 0)
            assert running.status().settled == 1


@pytest.mark.anyio
async def test_a_message_that_arrives_during_the_removal_is_kept_and_named(
    nats_server: NatsServer, client: Client, narrow: PartitionedQueue
) -> None:
    stream = client.jetstream()
    source = JetStreamSource(nats_server.url, stream=narrow.name, key=header("k"), queue=narrow, durable="work")
    async with Consumer(source, ignore):
        pass
    before = await subjects_of_stream(client, narrow.name)
    await stream.publish(narrow.names[1], b"late")

    def remove() -> None:
        queues = StreamQueues(nats_server.url, narrow.name, narrow)
        try:
            queues.remove([narrow.names[1]])
        finally:
            queues.close()

    with pytest.raises(SourceError, match=rf"1 messages of '{narrow.names[1]}' arrived during the removal"):
        await anyio.to_thread.run_sync(remove)
    assert await subjects_of_stream(client, narrow.name) == before


@pytest.mark.anyio
async def test_a_consumer_of_further_subjects_counts_until_it_has_finished(
    client: Client, narrow: PartitionedQueue, lanes_queue: Command
) -> None:
    stream = client.jetstream()
    audit = await stream.pull_subscribe("", durable="audit", stream=narrow.name)
    await stream.publish(narrow.names[1], b"v")
    shrink = ("shrink", "--from", "2", "--to", "1")
    status, found = await lanes_queue(*shrink, "--apply")
    assert (status, found["done"]) == (3, [])
    assert found["faults"] == [f"not removed: group 'audit' has not finished 1 messages of {narrow.names[1]!r}"]
    (message,) = await audit.fetch(1)
    await message.ack_sync()
    await stream.publish(f"{narrow.name}-other", b"v")
    status, found = await lanes_queue(*shrink, "--apply")
    assert status == 0 and len(found["done"]) == 2


@pytest.mark.anyio
async def test_a_durable_with_a_smaller_number_keeps_the_physical_queues_that_it_has_not_read(
    nats_server: NatsServer, client: Client, narrow: PartitionedQueue, lanes_queue: Command
) -> None:
    def worker(queue: PartitionedQueue, durable: str) -> Consumer:
        source = JetStreamSource(nats_server.url, stream=narrow.name, key=header("k"), queue=queue, durable=durable)
        return Consumer(source, ignore)

    added = narrow.names[1]
    await client.jetstream().publish(added, b"v", headers={"k": "k"})
    async with worker(narrow, "wide") as wide, worker(PartitionedQueue(narrow.name), "stale"):
        await until(lambda: wide.status().settled == 1)
    shrink = ("shrink", "--from", "2", "--to", "1")
    status, found = await lanes_queue(*shrink, "--apply")
    assert (status, found["done"]) == (3, [])
    assert f"not removed: group 'stale' has not finished 1 messages of {added!r}" in found["faults"]
    status, found = await lanes_queue("status", "--partitions", "1")
    assert found["stranded"] == [{"subject": added, "group": "stale", "messages": 1}]
    # A named group leaves the choice of the groups to the operator.
    status, found = await lanes_queue(*shrink, "--apply", "--group", "wide")
    assert status == 0 and len(found["done"]) == 2


@pytest.mark.anyio
async def test_the_state_has_physical_queues_of_any_former_number(
    client: Client, narrow: PartitionedQueue, lanes_queue: Command
) -> None:
    stream = client.jetstream()
    retired = PartitionedQueue(narrow.name, partitions=16).names[15]
    config = (await stream.stream_info(narrow.name)).config
    config.subjects = [*(config.subjects or ()), retired]
    await stream.update_stream(config)
    await stream.publish(retired, b"v")
    status, found = await lanes_queue("status", "--partitions", "2")
    assert (status, found["stranded"]) == (3, [{"subject": retired, "group": None, "messages": 1}])


@pytest.mark.anyio
async def test_another_queue_of_the_stream_is_left_alone(
    nats_server: NatsServer, client: Client, narrow: PartitionedQueue, lanes_queue: Command
) -> None:
    """Each queue has a cohort, and this queue has a durable too."""
    other = PartitionedQueue(f"{narrow.name}-other", partitions=2)
    stream = client.jetstream()
    config = (await stream.stream_info(narrow.name)).config
    config.subjects = [subject for name in (*narrow.names, *other.names) for subject in (name, f"{name}.>")]
    await stream.update_stream(config)

    def worker(queue: PartitionedQueue, **how: Any) -> Consumer:
        source = JetStreamSource(nats_server.url, stream=narrow.name, key=header("k"), queue=queue, **how)
        return Consumer(source, ignore)

    mine = Cohort("mine", member="m", lease=LASTING)
    theirs = Cohort("theirs", member="m", namespace="theirs", lease=LASTING)
    async with (
        worker(narrow, cohort=mine) as first,
        worker(narrow, durable="work") as second,
        worker(other, cohort=theirs) as third,
    ):
        for name in (*narrow.names, *other.names):
            await stream.publish(name, b"v", headers={"k": "k"})
        await until(lambda: [each.status().settled for each in (first, second, third)] == [2, 2, 2])
    _, found = await lanes_queue("grow", "--from", "2", "--to", "3", "--apply")
    forgot = [each for each in found["done"] if "forgot" in each]
    assert forgot == ["cohort 'lanes' has no live member, and forgot its 2 partition(s)"]
    assert "theirs" not in json.dumps(found)
    assert "'work'" in found["steps"][1]["found"]
    # The other cohort still knows its number.
    with pytest.raises(ConfigError, match="partitions"):
        async with worker(PartitionedQueue(other.name), cohort=theirs):
            await anyio.sleep_forever()


@pytest.mark.anyio
async def test_a_stream_that_does_not_fit_is_refused(
    nats_server: NatsServer, client: Client, narrow: PartitionedQueue, lanes_queue: Command
) -> None:
    queues = StreamQueues(nats_server.url, f"{narrow.name}no", narrow)
    with pytest.raises(ConfigError, match=f"stream '{narrow.name}no' does not exist .* or correct --stream"):
        await anyio.to_thread.run_sync(queues.survey, narrow.names)
    await anyio.to_thread.run_sync(queues.close)
    stream = client.jetstream()
    config = (await stream.stream_info(narrow.name)).config
    config.subjects = ["*"]
    await stream.update_stream(config)
    with pytest.raises(ConfigError, match=r"by one subject, '\*', which also stores partitions"):
        await lanes_queue("status", "--partitions", "2")


@pytest.mark.anyio
@pytest.mark.timeout(150)
@pytest.mark.parametrize("kind", ["durable", "cohort"])
async def test_a_queue_whose_subjects_have_names_of_their_own_grows_and_shrinks(
    nats_server: NatsServer, client: Client, narrow: PartitionedQueue, lanes_queue: Command, kind: str
) -> None:
    names = [f"{narrow.name}-eu", f"{narrow.name}-us", f"{narrow.name}-ap"]
    stream = client.jetstream()
    config = (await stream.stream_info(narrow.name)).config
    config.subjects = [subject for name in names[:2] for subject in (name, f"{name}.>")]
    await stream.update_stream(config)
    old, new = (PartitionedQueue.of(narrow.name, names[:number]) for number in (2, 3))
    group = "work" if kind == "durable" else "lanes"
    named = [option for name in names for option in ("--partition", name)]
    grow = ("grow", "--from", "2", "--to", "3", "--group", group, *named)
    shrink = ("shrink", "--from", "3", "--to", "2", "--group", group, *named)

    def worker(queue: PartitionedQueue) -> Consumer:
        how: Any = {"durable": "work"} if kind == "durable" else {"cohort": Cohort("work", member="m", lease=LEASE)}
        return Consumer(
            JetStreamSource(nats_server.url, stream=narrow.name, key=header("k"), queue=queue, **how), ignore
        )

    async def reaches(progress: list[str], *arguments: str) -> None:
        """Wait until the server has noticed that members came or left."""
        while shown(found := await lanes_queue(*arguments)) != (0, progress, []):
            print(found)
            await anyio.sleep(0.1)

    with anyio.fail_after(100):
        async with worker(old):
            assert (await lanes_queue("status", *named[:4]))[0] == 0
            status, found = await lanes_queue(*grow, "--apply")
            assert (status, found["done"]) == (
                0,
                [f"added subject {each!r} to stream {narrow.name!r}" for each in (names[2], f"{names[2]}.>")],
            )
        await lanes_queue(*grow, "--apply")
        async with worker(new) as running:
            await stream.publish(names[2], b"v", headers={"k": "k"})
            await until(lambda: running.status().settled == 1)
            await reaches(["done", "done", "unknown"], *grow)
            await until(lambda: running.status().queues[narrow.name].lag == 0)
        await reaches(["unknown", "done", "done" if kind == "durable" else "due", "due"], *shrink)
        status, found = await lanes_queue(*shrink, "--apply")
        assert status == 0 and f"removed subject {names[2]!r} from stream {narrow.name!r}" in found["done"]
        assert await subjects_of_stream(client, narrow.name) == config.subjects
