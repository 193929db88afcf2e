"""A batch over several partitions of a queue is stored as a whole in one stream, and is refused over two streams."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from nats.aio.client import Client

from lanes import PartitionedQueue, Route
from tests.components import NatsServer
from tests.jetstream.conftest import connect
from tests.jetstream.workload import unique

pytestmark = pytest.mark.anyio

Create = Callable[[list[str]], Awaitable[str]]

KEYS = ["customer-42", "a", "käse", "customer-1"]


@pytest.fixture
async def create(client: Client) -> Any:
    """Creates a stream of memory that allows atomic batches."""
    names = []

    async def create(subjects: list[str]) -> str:
        name = unique("B")
        config = {"name": name, "storage": "memory", "subjects": subjects, "allow_atomic": True}
        answer = await client.request(f"$JS.API.STREAM.CREATE.{name}", json.dumps(config).encode())
        names.append(name)
        assert json.loads(answer.data)["config"]["allow_atomic"]
        return name

    yield create
    for name in names:
        await client.jetstream().delete_stream(name)


async def publish(client: Client, batch: str, routes: list[Route], *, commit: bool = True) -> dict[str, Any]:
    """Publish one message to each route in one atomic batch, and return the last answer."""
    answer = b"{}"
    for number, route in enumerate(routes, 1):
        headers = {"Nats-Batch-Id": batch, "Nats-Batch-Sequence": str(number)}
        if commit and number == len(routes):
            headers["Nats-Batch-Commit"] = "1"
        answer = (await client.request(route.name, b"x", headers=headers)).data
    found: dict[str, Any] = json.loads(answer or b"{}")
    return found


async def count(client: Client, stream: str) -> int:
    return (await client.jetstream().stream_info(stream)).state.messages


def mixed(queue: PartitionedQueue) -> list[Route]:
    routes = [queue.route_by_key(key) for key in KEYS]
    assert {route.partition for route in routes} == {0, 1}
    return routes


async def test_one_stream_stores_the_whole_batch_or_nothing(
    client: Client, create: Create, nats_server: NatsServer
) -> None:
    queue = PartitionedQueue(unique("q"), partitions=2)
    stream = await create(list(queue.names))
    killed = await connect(nats_server.url)
    await publish(killed, "first", mixed(queue), commit=False)
    await killed.close()
    assert await count(client, stream) == 0
    assert (await publish(client, "second", mixed(queue)))["count"] == len(KEYS)
    assert await count(client, stream) == len(KEYS)


async def test_a_batch_over_two_streams_is_refused_by_the_server(client: Client, create: Create) -> None:
    queue = PartitionedQueue(unique("q"), partitions=2)
    streams = [await create([name]) for name in queue.names]
    answer = await publish(client, "mixed", mixed(queue))
    assert answer["error"]["err_code"] == 10176
    assert answer["error"]["description"] == "atomic publish batch is incomplete"
    assert [await count(client, stream) for stream in streams] == [0, 0]
