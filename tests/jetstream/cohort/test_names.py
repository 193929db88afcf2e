"""No two cohorts share a bucket or durable name, and no foreign name is parsed as a name of a cohort."""

from __future__ import annotations

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.aio.client import Client

import lanes
from lanes.core.cohort.records import CONFIG_KEY, CohortConfig, decode, encode
from lanes_jetstream.cohort.epoch_consumers import EpochName, JetStreamEpochConsumers
from lanes_jetstream.cohort.lease_store import JetStreamLeaseStore, bucket_name, namespace_of
from lanes_jetstream.cohort.view import CohortView, read_namespaces
from lanes_jetstream.wire.connection import Connection
from tests.components import NatsServer
from tests.jetstream.cohort_workload import FAST, LASTING, CohortStream, Log, members, settled
from tests.jetstream.conftest import MakeCohortStream

pytestmark = pytest.mark.anyio


PARTS = st.lists(st.sampled_from(["a", "b", "1", "2", "a-1", "", "lanes"]), min_size=2, max_size=6)


@given(PARTS)
def test_no_two_cohorts_have_the_same_bucket(parts: list[str]) -> None:
    """The names differ for each division of a text into a stream and a namespace."""
    pairs = [("_".join(parts[:at]), "_".join(parts[at:])) for at in range(1, len(parts))]
    pairs = [(stream, namespace) for stream, namespace in pairs if stream and namespace]
    buckets = [bucket_name(stream, namespace) for stream, namespace in pairs]
    assert len(set(buckets)) == len(pairs)
    for stream, namespace in pairs:
        found = [namespace_of(bucket, stream) for bucket in buckets]
        assert [name for name in found if name is not None] == [namespace]


def test_bucket_names_are_stable() -> None:
    assert bucket_name("ORDERS", "lanes") == "lanes_ORDERS_lanes"
    assert bucket_name("MY_ORDERS", "eu-west") == "lanes_MY_ORDERS_eu-west"
    assert bucket_name("ORDERS", "eu_west") == "lanes-7_ORDERS_eu_west"


async def test_cohorts_with_similar_names_are_separate(
    nats_server: NatsServer, client: Client, make_cohort_stream: MakeCohortStream
) -> None:
    one = await make_cohort_stream()
    other = CohortStream(nats_server.url, client, f"{one.name}_b", 4)
    await other.create()
    logs = [Log(), Log()]
    try:
        first = lanes.Consumer(one.source("a", namespace="b_c"), logs[0].handler("a"), settings=FAST)
        second = lanes.Consumer(other.source("a", namespace="c"), logs[1].handler("a"), settings=FAST)
        async with members() as running:
            running.join(first, second)
            await settled(first, partitions=4)
            await settled(second, partitions=4)
            connection = Connection(client)
            assert await read_namespaces(connection, one.name) == ["b_c"]
            assert await read_namespaces(connection, other.name) == ["c"]
            for stream, log in zip((one, other), logs, strict=True):
                await stream.publish(*stream.a_key_each())
                await log.handled(4)
    finally:
        await other.delete()


async def test_a_bucket_of_another_cohort_is_refused(cohort_stream: CohortStream, client: Client) -> None:
    stream, log = cohort_stream, Log()
    a = lanes.Consumer(stream.source("a"), log.handler("a"), settings=FAST)
    async with members() as running:
        running.join(a)
        await settled(a, partitions=4)
    store = JetStreamLeaseStore(Connection(client), bucket_name(stream.name, "lanes"))
    entry = await store.read(CONFIG_KEY)
    own = decode(CohortConfig, CONFIG_KEY, entry.value or b"")
    assert (own.stream, own.namespace, own.lease) == (stream.name, "lanes", LASTING)
    foreign = encode(own).replace(f'"{stream.name}"'.encode(), b'"OTHER"')
    await store.write(CONFIG_KEY, foreign, revision=entry.revision)
    with anyio.fail_after(20):
        with pytest.raises(lanes.ConfigError, match=r"belongs to another cohort.*stream is 'OTHER'.*another namespace"):
            await lanes.run(stream.source("b"), log.handler("b"), settings=FAST)
        with pytest.raises(lanes.ConfigError, match="on stream 'OTHER' in namespace 'lanes', not on"):
            await CohortView(Connection(client), stream.name, "lanes").status()


async def test_a_durable_records_the_lease_and_an_impossible_epoch_is_ignored(
    cohort_stream: CohortStream, client: Client
) -> None:
    stream = cohort_stream
    incarnation = (await stream.api(f"STREAM.INFO.{stream.name}"))["created"]

    def of(lease: float) -> JetStreamEpochConsumers:
        return JetStreamEpochConsumers(
            Connection(client),
            stream.name,
            "lanes",
            incarnation=incarnation,
            filters=lambda partition: [f"{stream.name}.{partition}.*"],
            lease=lease,
        )

    await of(30.0).create(1, 5, 0, nonce="n", start=None)
    await of(0).create(1, 2**53, 0, nonce="n", start=None)
    for name, lease in ((f"lanes-p1-e{2**53 + 1}", "10"), ("lanes-p1-e7", "soon")):
        config = {"name": name, "durable_name": name, "ack_policy": "explicit", "metadata": {"lanes-lease": lease}}
        await stream.api(f"CONSUMER.CREATE.{stream.name}.{name}", {"stream_name": stream.name, "config": config})
    found, _ = await of(10).found(1)
    assert [(each.epoch, each.lease) for each in found] == [(5, 30), (7, 0), (2**53, 0)]
    assert await of(10).names() == [(1, 5, 0), (1, 7, 0), (1, 2**53, 0)]
    # The view from outside has the same durables.
    durables = await CohortView(Connection(client), stream.name, "lanes").durables()
    assert {number: found.epoch for number, found in durables.items()} == {1: 2**53}


@pytest.mark.parametrize(
    "name",
    [
        "lanes-p07-e5",
        "lanes-p7-e05",
        "lanes-p7-e5-0",
        "lanes-p7-e5-01",
        f"lanes-p7-e{2**53 + 1}",
        "lanes-p7-e9999999999999999999",
        "lanes-p7-e5-1-1",
        "other-p7-e5",
        "lanes-p7",
        None,
    ],
)
def test_the_name_of_a_foreign_durable_is_not_parsed(name: object) -> None:
    assert EpochName.parse("lanes", name) is None


@pytest.mark.parametrize("name", [EpochName(0, 1, 0), EpochName(7, 5, 3), EpochName(99999, 2**53, 999_999_999)])
def test_a_durable_name_is_parsed_as_it_was_written(name: EpochName) -> None:
    for namespace in ("lanes", "eu-west", "lanes-p7-e5"):
        assert EpochName.parse(namespace, name.durable(namespace)) == name
