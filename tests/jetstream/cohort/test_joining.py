"""Joining a cohort: the members that may join, and the refusals before the first message."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest

import lanes
from lanes_jetstream import CohortStream as Create
from lanes_jetstream import JetStreamSource, subject_token, whole_subject
from lanes_jetstream.cohort.lease_store import bucket_name
from tests.components import NatsServer
from tests.jetstream.cohort_workload import FAST, LEASE, CohortStream, Gate, Log, members, owned, refused, settled
from tests.jetstream.conftest import MakeCohortStream, connect
from tests.jetstream.workload import until

pytestmark = pytest.mark.anyio


async def test_a_member_id_in_two_namespaces_is_two_members(cohort_stream: CohortStream) -> None:
    """The cohort of each namespace handles every message, under any member ids."""
    stream, logs = cohort_stream, [Log(), Log()]
    both = [
        lanes.Consumer(stream.source("a", namespace=namespace), log.handler("a"), settings=FAST)
        for namespace, log in zip(("one", "two"), logs, strict=True)
    ]
    async with members() as running:
        running.join(*both)
        for consumer in both:
            await settled(consumer, partitions=4)
        await stream.publish(*stream.a_key_each(), times=5)
        for log in logs:
            await log.handled(20)
        await running.leave(both[0])
        await stream.publish(*stream.a_key_each(), times=5)
        await logs[1].handled(40)
        assert owned(both[1]) == {0, 1, 2, 3}
    for log in logs:
        assert log.violations == []
        assert log.repeats == []
    assert len(logs[0].done) == 20


async def test_a_second_cohort_in_a_namespace_is_refused(cohort_stream: CohortStream) -> None:
    """A second cohort on the same stream and namespace is refused, and the first cohort continues."""
    stream, log = cohort_stream, Log()
    a = lanes.Consumer(stream.source("a"), log.handler("a"), settings=FAST)
    async with members() as running:
        running.join(a)
        await settled(a, partitions=4)
        await refused(stream.source("b", cohort="billing"), "'orders'", "'billing'", "namespace")
        await refused(stream.source("b", key=whole_subject), "key subject_token(2,)", "key whole_subject")
        await refused(stream.source("b", lease=4), "lease is 30, this member has 4", "delete the key 'config'")
        await stream.publish(*stream.a_key_each())
        await log.handled(4)
    # Also without a running member of the first cohort.
    await refused(stream.source("b", cohort="billing"), "'orders'", "'billing'", "namespace")


async def test_a_member_without_a_name_joins_the_cohort_of_its_stream(cohort_stream: CohortStream) -> None:
    stream, log = cohort_stream, Log()
    a = lanes.Consumer(stream.source("a", cohort="billing"), log.handler("a"), settings=FAST)
    b = lanes.Consumer(stream.source("b", cohort=None), log.handler("b"), settings=FAST)
    async with members() as running:
        running.join(a)
        await settled(a, partitions=4)
        running.join(b)
        await settled(a, partitions=2)
        await settled(b, partitions=2)
        await stream.publish(*stream.a_key_each())
        await log.handled(4)
        await refused(stream.source("c"), "'billing'", "'orders'", "namespace")
    config = await stream.read("config")
    assert config is not None and config["cohort"] == "billing"


async def test_a_cohort_without_a_name_is_called_default(cohort_stream: CohortStream) -> None:
    stream, log = cohort_stream, Log()
    a = lanes.Consumer(stream.source("a", cohort=None), log.handler("a"), settings=FAST)
    async with members() as running:
        running.join(a)
        await settled(a, partitions=4)
        await refused(stream.source("b"), "'default'", "'orders'", "namespace")
    config = await stream.read("config")
    assert config is not None and config["cohort"] == "default"


async def test_the_lease_time_can_be_changed_as_the_error_says(cohort_stream: CohortStream) -> None:
    """Finished messages stay stored, even above unfinished messages."""
    stream, log = cohort_stream, Log()
    keys = stream.a_key_each()
    gate = Gate(*keys)
    a = lanes.Consumer(stream.source("a"), log.handler("a", gate), settings=lanes.Settings(drain_timeout=0.1))
    async with members() as running:
        running.join(a)
        await settled(a, partitions=4)
        await stream.publish(*keys, *(stream.key(partition, 1) for partition in range(4)))
        await until(lambda: gate.waiting == 4 and len(log.done) == 4)
    bucket = await stream.client.jetstream().key_value(bucket_name(stream.name, "lanes"))
    await bucket.delete("config")
    b = lanes.Consumer(stream.source("b", lease=4), log.handler("b"), settings=FAST)
    async with members() as running:
        running.join(b)
        await log.handled(8)
    assert sorted(run.key.decode() for run in log.of("b")) == sorted(keys)
    config = await stream.read("config")
    assert config is not None and config["lease"] == 4


async def test_a_member_id_in_use_is_refused(cohort_stream: CohortStream) -> None:
    stream, log = cohort_stream, Log()
    # The second member waits for a third of a lease.
    stream.lease = 9.0
    a = lanes.Consumer(stream.source("a"), log.handler("a"), settings=FAST)
    async with members() as running:
        running.join(a)
        await settled(a, partitions=4)
        await refused(stream.source("a"), "'a'", "used by another live process", "its own member id")
        await stream.publish(*stream.a_key_each())
        await log.handled(4)
        assert owned(a) == {0, 1, 2, 3}


@pytest.mark.slow
async def test_a_dead_member_joins_again_under_its_id(cohort_stream: CohortStream) -> None:
    stream, log = cohort_stream, Log()
    stream.lease = LEASE
    first, again = (lanes.Consumer(stream.source("a"), log.handler("a"), settings=FAST) for _ in range(2))
    async with members() as running:
        running.join(first)
        await settled(first, partitions=4)
        await running.crash(first)
        running.join(again)
        await settled(again, partitions=4)
        await stream.publish(*stream.a_key_each())
        await log.handled(4)
    assert log.violations == []


async def test_a_changed_partition_count_is_refused(cohort_stream: CohortStream) -> None:
    """Stored messages keep their old partitions, so two messages of a key could run at once."""
    stream, log = cohort_stream, Log()
    a = lanes.Consumer(stream.source("a"), log.handler("a"), settings=FAST)
    async with members() as running:
        running.join(a)
        await settled(a, partitions=4)
    config = (await stream.api(f"STREAM.INFO.{stream.name}"))["config"]
    config["subject_transform"]["dest"] = config["subject_transform"]["dest"].replace("partition(4", "partition(8")
    await stream.api(f"STREAM.UPDATE.{stream.name}", config)
    await refused(
        stream.source("b"), "partitions is 4", "has 8", "namespace", f"'{stream.name}'", "divide it as before"
    )
    await refused(stream.source("b", partitions=4), "partitions=4", "divided into 8")


async def test_a_recreated_stream_is_refused(cohort_stream: CohortStream) -> None:
    stream, log = cohort_stream, Log()
    a = lanes.Consumer(stream.source("a"), log.handler("a"), settings=FAST)
    async with members() as running:
        running.join(a)
        await settled(a, partitions=4)
    await stream.api(f"STREAM.DELETE.{stream.name}")
    await stream.create()
    await refused(
        stream.source("a"), "incarnation", f"'{stream.name}'", "deleted and created again", "delete the cohort's bucket"
    )


async def test_a_member_creates_the_stream(make_cohort_stream: MakeCohortStream) -> None:
    """Another cohort creates a stream that sources it."""
    origin = await make_cohort_stream(partitions=1)
    log = Log()
    sourced = CohortStream(origin.url, origin.client, f"{origin.name}S", 8)
    create = Create(subject=f"{origin.name}.0.*", tokens=(2,), origin=origin.name)
    key = subject_token(3)
    a, b = (
        lanes.Consumer(sourced.source(name, create=create, partitions=8, key=key), log.handler(name), settings=FAST)
        for name in "ab"
    )
    try:
        async with members() as running:
            running.join(a, b)
            await settled(a, b, partitions=8)
            await origin.publish(*[origin.key(0, number) for number in range(30)], times=3)
            await log.handled(90)
    finally:
        await sourced.delete()
    assert log.violations == []
    assert log.repeats == []
    assert {run.member for run in log.runs} == {"a", "b"}


async def test_too_many_partitions_are_refused(make_cohort_stream: MakeCohortStream) -> None:
    stream = await make_cohort_stream(partitions=300)
    await refused(stream.source("a"), "300", "many_partitions=True")


async def test_a_missing_stream_or_permission_is_refused(
    fresh_nats: Callable[..., NatsServer], cohort_stream: CohortStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing stream, wrong credentials, no JetStream for the account, no permission."""
    monkeypatch.setattr("lanes_jetstream.wire.connection.CONNECT_TIMEOUT", 3.0)
    url = cohort_stream.url
    missing = JetStreamSource(url, stream="MISSING", cohort="c", key=whole_subject)
    await refused(missing, "'MISSING'", "does not exist", "create=CohortStream")
    server = fresh_nats(
        config="""
        accounts {
            A { jetstream: enabled, users: [
                {user: a, password: a},
                {user: b, password: b, permissions: {publish: {deny: ["$KV.>"]}}}
            ] },
            N { users: [{user: n, password: n}] },
        }
        no_auth_user: a
        """
    )
    client = await connect(server.url)
    stream = CohortStream(server.url, client, "S")
    await stream.create()
    login = server.url.replace("nats://", "nats://{}@")
    await refused(stream.source("a", where=login.format("a:wrong")), "credentials", error=lanes.SourceError)
    await refused(
        stream.source("a", where=login.format("n:n")), "'S' at nats://", "enable JetStream", error=lanes.SourceError
    )
    await refused(
        stream.source("a", where=login.format("b:b")), "$kv.", "grant this permission", error=lanes.SourceError
    )
    await client.close()


async def test_a_consumer_limit_below_the_partitions_is_refused(make_cohort_stream: MakeCohortStream) -> None:
    stream = await make_cohort_stream(max_consumers=4)
    await refused(stream.source("a"), "max_consumers=4", "4 partitions")


async def test_messages_stored_before_the_transform_are_refused(make_cohort_stream: MakeCohortStream) -> None:
    stream = await make_cohort_stream()
    config = (await stream.api(f"STREAM.INFO.{stream.name}"))["config"]
    await stream.api(f"STREAM.UPDATE.{stream.name}", config | {"subject_transform": None})
    await stream.publish("early")
    await stream.api(f"STREAM.UPDATE.{stream.name}", config)
    await refused(stream.source("a"), "sequence 1", "before the transform")


async def test_a_start_within_a_work_queue_is_refused(make_cohort_stream: MakeCohortStream) -> None:
    stream = await make_cohort_stream(retention="workqueue")
    await refused(stream.source("a", start="next"), "start='next'", "beginning")


async def test_a_foreign_consumer_on_a_work_queue_is_named(make_cohort_stream: MakeCohortStream) -> None:
    stream = await make_cohort_stream(retention="workqueue")
    config = {"durable_name": "mine", "ack_policy": "explicit"}
    await stream.api(f"CONSUMER.CREATE.{stream.name}.mine", {"stream_name": stream.name, "config": config})
    with anyio.fail_after(20):
        with pytest.raises(
            lanes.ConfigError, match=r"another durable is in the way .*foreign consumers are 'mine'\); delete"
        ):
            await lanes.run(stream.source("a"), Log().handler("a"), settings=FAST)
    # No durable is left over, which would retain messages.
    assert await stream.durables() == ["mine"]
