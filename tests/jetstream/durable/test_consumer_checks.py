"""A consumer that does not fit is refused before the first message, with the setting, the value and the remedy."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from nats.aio.client import Client
from nats.js.api import AckPolicy, ConsumerConfig, StreamConfig, SubjectTransform
from nats.js.errors import ServerError

import lanes
from lanes_jetstream import JetStreamSource, subject_token
from lanes_jetstream.durable.consumer import ORIGINAL_ACK_WAIT, ORIGINAL_BACKOFF
from tests.components import NatsServer
from tests.jetstream.conftest import FreshStream
from tests.jetstream.workload import DURABLE, Recorder, Stream, never_called, running, unique

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"ack_policy": "none"}, ["ack_policy", "'none'", "cannot change; use another durable, or delete", "start=…"]),
        ({"ack_policy": "all"}, ["ack_policy", "'all'", "cannot change; use another durable, or delete", "start=…"]),
        ({"max_deliver": 5}, ["max_deliver", "5", "-1"]),
        ({"backoff": [1_000_000_000, 5_000_000_000], "max_deliver": 5}, ["backoff", "remove it", "max_deliver"]),
        ({"ack_wait": 500_000_000}, ["ack_wait", "0.5 s", "1 s or more"]),
        ({"deliver_subject": "somewhere"}, ["push", "another durable"]),
        ({"priority_groups": ["g"], "priority_policy": "overflow"}, ["priority_groups", "without"]),
    ],
)
async def test_a_consumer_that_does_not_fit_is_refused(
    stream: Stream, config: dict[str, Any], words: list[str]
) -> None:
    await stream.add_consumer(**config)
    with pytest.raises(lanes.ConfigError) as refused:
        await lanes.run(stream.source(), never_called)
    for word in [stream.name, DURABLE, *words]:
        assert word in str(refused.value)


async def test_a_consumer_without_acknowledgements_gets_no_advice_about_their_deadline(stream: Stream) -> None:
    await stream.add_consumer(ack_policy="none")
    with pytest.raises(lanes.ConfigError, match="ack_policy is 'none'") as refused:
        await lanes.run(stream.source(), never_called)
    assert "ack_wait" not in str(refused.value)


async def test_the_remedy_for_another_ack_policy_is_one_that_the_server_permits(stream: Stream) -> None:
    await stream.add_consumer(ack_policy="none")
    await stream.publish(3)
    wanted = ConsumerConfig(name=DURABLE, durable_name=DURABLE, ack_policy=AckPolicy.EXPLICIT)
    with pytest.raises(ServerError, match="ack policy can not be updated"):
        await stream.client.jetstream().add_consumer(stream.name, wanted)
    await stream.client.jetstream().delete_consumer(stream.name, DURABLE)
    recorder = Recorder()
    async with running(lanes.Consumer(stream.source(), recorder)):
        with anyio.fail_after(10):
            await recorder.reached(3)


async def test_a_consumer_with_another_filter_is_refused(stream: Stream) -> None:
    await stream.add_consumer(filter_subject=f"{stream.name}.1")
    with pytest.raises(lanes.ConfigError, match="filters"):
        await lanes.run(stream.source(filter_subject=f"{stream.name}.2", key=None), never_called)


async def test_a_filter_that_matches_no_subject_of_the_stream_is_refused_and_creates_no_consumer(
    stream: Stream,
) -> None:
    wanted = f"{stream.name}x.*"
    with pytest.raises(lanes.ConfigError) as refused, anyio.fail_after(10):
        await lanes.run(stream.source(filter_subject=wanted), never_called)
    assert f"filter_subject={wanted!r}: matches no subject of stream {stream.name!r} ({stream.name}.>)" in str(
        refused.value
    )
    assert await stream.client.jetstream().consumers_info(stream.name) == []


async def test_a_filter_of_messages_that_remain_from_former_subjects_is_accepted(stream: Stream) -> None:
    await stream.publish(3)
    await stream.client.jetstream().update_stream(name=stream.name, subjects=[f"{stream.name}-new.>"])
    recorder = Recorder()
    async with running(lanes.Consumer(stream.source(filter_subject=f"{stream.name}.>"), recorder)):
        with anyio.fail_after(10):
            await recorder.reached(3)


def divided(name: str) -> StreamConfig:
    """A stream whose server divides it into two partitions."""
    transform = SubjectTransform(src=f"{name}.*", dest=f"{name}.{{{{partition(2,1)}}}}.{{{{wildcard(1)}}}}")
    return StreamConfig(name, subjects=[f"{name}.*"], subject_transform=transform)


async def test_a_key_that_is_the_number_of_a_partition_is_refused_and_creates_no_consumer(
    nats_server: NatsServer, client: Client
) -> None:
    stream = Stream(nats_server.url, client, unique("T"))
    await client.jetstream().add_stream(divided(stream.name))
    for key, said in (
        (subject_token(1), rf"transform to '{stream.name}\..*Use subject_token\(2\), which partition\(\) hashes"),
        (subject_token(0), rf"is '{stream.name}' for every subject .*Use another token, such as subject_token\(2\)"),
    ):
        with pytest.raises(lanes.ConfigError, match=said), anyio.fail_after(10):
            await lanes.run(stream.source(key=key), never_called)
    assert await client.jetstream().consumers_info(stream.name) == []
    # The token that holds the key: keys of one partition run side by side.
    await stream.publish(10, keys=8)
    recorder = Recorder(lambda message: 0.2)
    async with running(lanes.Consumer(stream.source(key=subject_token(2)), recorder)):
        with anyio.fail_after(10):
            await recorder.reached(10)
    assert recorder.violations == [] and recorder.most_running > 2


async def test_a_filter_by_the_subject_before_a_transform_is_refused(nats_server: NatsServer, client: Client) -> None:
    stream = Stream(nats_server.url, client, unique("T"))
    await client.jetstream().add_stream(divided(stream.name))
    wanted = rf"matches no subject of stream '{stream.name}' \({stream.name}\.\*\.\*\)"
    with pytest.raises(lanes.ConfigError, match=wanted), anyio.fail_after(10):
        await lanes.run(stream.source(filter_subject=f"{stream.name}.*", key=None), never_called)
    assert await client.jetstream().consumers_info(stream.name) == []


async def test_max_in_flight_above_max_ack_pending_is_refused(stream: Stream) -> None:
    await stream.add_consumer(max_ack_pending=500)
    with pytest.raises(lanes.ConfigError, match=r"max_in_flight=501 is above the 500 .*max_ack_pending"):
        await lanes.run(stream.source(), never_called, settings=lanes.Settings(max_in_flight=501))


async def test_the_default_max_in_flight_follows_max_ack_pending(stream: Stream) -> None:
    await stream.add_consumer(max_ack_pending=500)
    await stream.publish(10)
    recorder = Recorder()
    consumer = lanes.Consumer(stream.source(), recorder)
    async with running(consumer):
        with anyio.fail_after(10):
            await recorder.reached(10)
        assert consumer.status().max_in_flight == 500


async def test_an_adopted_consumer_is_not_changed(stream: Stream) -> None:
    await stream.add_consumer(description="ours", ack_wait=7_000_000_000)
    await stream.publish(10)
    recorder = Recorder()
    async with running(lanes.Consumer(stream.source(ack_wait=60), recorder)):
        with anyio.fail_after(10):
            await recorder.reached(10)
    config = (await stream.consumer_info()).config
    assert (config.description, config.ack_wait) == ("ours", 7.0)


async def test_a_missing_stream_is_refused(stream: Stream) -> None:
    source = JetStreamSource(stream.url, stream="NOWHERE", durable="d", key=None)
    with pytest.raises(lanes.ConfigError, match=r"'NOWHERE' does not exist.*create it.*stream=…$"):
        await lanes.run(source, never_called)
    for misspelt in (f"{stream.name}S", stream.name.swapcase()):
        source = JetStreamSource(stream.url, stream=misspelt, durable="d", key=None)
        with pytest.raises(lanes.ConfigError, match=rf"correct stream=… \(did you mean '{stream.name}'\?\)$"):
            await lanes.run(source, never_called)


async def test_an_account_at_its_consumer_limit_is_refused(fresh_stream: FreshStream) -> None:
    accounts = "accounts { A { jetstream: { max_consumers: 1 }, users: [{user: a, password: b}] } }\nno_auth_user: a"
    _, stream = await fresh_stream(config=accounts)
    first = stream.source(durable="first")
    await first.open()
    await first.aclose()
    with pytest.raises(lanes.ConfigError, match=r"cannot be created: maximum consumers limit reached"):
        await lanes.run(stream.source(), Recorder())


@pytest.mark.parametrize("metadata", ["soon", "[1]"])
async def test_unreadable_metadata_is_refused(stream: Stream, metadata: str) -> None:
    kept = {ORIGINAL_ACK_WAIT: metadata if metadata == "soon" else "1", ORIGINAL_BACKOFF: '{"a": []}'}
    await stream.add_consumer(metadata=kept, max_ack_pending=1_000)
    with pytest.raises(lanes.ConfigError, match=r"lanes-original.* is unreadable; set ack_wait"):
        await lanes.run(stream.source(), Recorder())
