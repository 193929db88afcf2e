"""Fixtures of JetStream tests: clients, streams, clusters and private servers. JetStream needs asyncio."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import nats
import pytest
from nats.aio.client import Client

from tests.components import MissingComponent, NatsServer
from tests.components.nats_cluster import NatsCluster
from tests.conftest import skip_or_fail
from tests.jetstream.cohort_workload import CohortStream
from tests.jetstream.workload import Stream, unique

FreshStream = Callable[..., Awaitable[tuple[NatsServer, Stream]]]
MakeCohortStream = Callable[..., Awaitable[CohortStream]]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


async def _quiet(error: Exception) -> None:
    """Replace the client's default callback, which prints a traceback for each failed reconnect."""


async def connect(url: str) -> Client:
    return await nats.connect(url, error_cb=_quiet, max_reconnect_attempts=-1, reconnect_time_wait=1)


@pytest.fixture
async def client(nats_server: NatsServer) -> AsyncIterator[Client]:
    client = await connect(nats_server.url)
    yield client
    await client.close()


@pytest.fixture
async def stream(nats_server: NatsServer, client: Client) -> AsyncIterator[Stream]:
    """A stream of this test on the shared server."""
    stream = Stream(nats_server.url, client, unique("T"))
    await stream.create()
    yield stream
    await client.jetstream().delete_stream(stream.name)


@pytest.fixture
async def make_cohort_stream(nats_server: NatsServer, client: Client) -> AsyncIterator[MakeCohortStream]:
    """A factory of streams that are divided into cohort partitions, on the shared server."""
    made: list[CohortStream] = []

    async def make(*, partitions: int = 4, **config: object) -> CohortStream:
        stream = CohortStream(nats_server.url, client, unique("C"), partitions)
        await stream.create(**config)
        made.append(stream)
        return stream

    yield make
    for stream in made:
        await stream.delete()


@pytest.fixture
async def cohort_stream(make_cohort_stream: MakeCohortStream) -> CohortStream:
    """A stream of four cohort partitions on the shared server."""
    return await make_cohort_stream()


@pytest.fixture(scope="module")
def cluster() -> Iterator[NatsCluster]:
    """Three servers for the tests of one file."""
    cluster = NatsCluster()
    try:
        cluster.start()
        yield cluster
    except MissingComponent as missing:
        skip_or_fail(missing)
    finally:
        cluster.stop()


@pytest.fixture
async def fresh_stream(fresh_nats: Callable[..., NatsServer]) -> AsyncIterator[Callable[..., object]]:
    """A factory of (server, stream) pairs on private servers, which a test may kill."""
    clients: list[Client] = []

    async def make(**arguments: object) -> tuple[NatsServer, Stream]:
        server = fresh_nats(**arguments)
        client = await connect(server.url)
        clients.append(client)
        stream = Stream(server.url, client, unique("T"))
        await stream.create()
        return server, stream

    yield make
    for client in clients:
        await client.close()


@pytest.fixture
def frequent_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check streams and consumers every 0.1 s, which finds the same faults as every 2 s."""
    monkeypatch.setattr("lanes_jetstream.durable.watch.CHECK_INTERVAL", 0.1)
    monkeypatch.setattr("lanes_jetstream.cohort.watch.CHECK_INTERVAL", 0.1)
