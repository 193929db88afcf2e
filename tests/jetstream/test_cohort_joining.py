"""Who may join a cohort on a real server, and what is refused before the first message, with the remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from nats.aio.msg import Msg

import lanes
from lanes_jetstream import Cohort, JetStreamSource, header, subject_token, whole_subject
from lanes_jetstream import CohortStream as Create
from lanes_jetstream.cohort.lease_store import bucket_name
from tests.components import NatsServer
from tests.jetstream.cohort_workload import FAST, CohortStream, Gate, Log, members, owned, settled
from tests.jetstream.conftest import MakeCohortStream, connect
from tests.jetstream.workload import until

pytestmark = pytest.mark.anyio


async def handler(message: lanes.Message) -> None:
    """Never called here."""


async def refused(source: JetStreamSource, *words: str, error: type[Exception] = lanes.ConfigError) -> None:
    """It does not start, and says why with these words."""
    with anyio.fail_after(30):
        with pytest.raises(error) as stopped:
            await lanes.run(source, handler, settings=FAST)
    for word in words:
        assert word in str(stopped.value)


async def test_same_member_id_in_two_groups_is_two_identities(cohort_stream: CohortStream) -> None:
    """Each namespace has a cohort of its own, which handles everything, whoever is called what in the other one."""
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


async def test_second_cohort_is_refused(cohort_stream: CohortStream) -> None:
    """On one stream and namespace; the first one goes on."""
    stream, log = cohort_stream, Log()
    a = lanes.Consumer(stream.source("a"), log.handler("a"), settings=FAST)
    async with members() as running:
        running.join(a)
        await settled(a, partitions=4)
        await refused(stream.source("b", cohort="billing"), "'orders'", "'billing'", "namespace")
        await refused(stream.source("b", key=whole_subject), "key subject_token(2,)", "key whole_subject")
        await refused(stream.source("b", lease=4), "lease is 3, this member has 4", "delete the key 'config'")
        await stream.publish(*stream.a_key_each())
        await log.handled(4)
    # Also when nobody of the first one is there.
    await refused(stream.source("b", cohort="billing"), "'orders'", "'billing'", "namespace")


async def test_the_lease_of_all_members_is_changed_as_the_error_says(cohort_stream: CohortStream) -> None:
    """What is finished stays written down, above what was not as well."""
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


async def test_serial_two_racing_members_only_one_gets_work(make_cohort_stream: MakeCohortStream) -> None:
    """One at a time in the whole stream: one cohort partition, whose lease is the reservation."""
    stream, log = await make_cohort_stream(partitions=1), Log()
    settings = lanes.Settings(order="serial", poison="exit")
    keys = [stream.key(0, number) for number in range(5)]
    a, b = (lanes.Consumer(stream.source(name), log.handler(name), settings=settings) for name in "ab")
    async with members() as running:
        await stream.publish(*keys, times=4)
        running.join(a, b)
        await log.handled(20)
        await until(lambda: a.ready and b.ready)
        assert len({run.member for run in log.runs}) == 1
        winner, other = (a, b) if log.runs[0].member == "a" else (b, a)
        await stream.publish(*keys, times=4)
        await log.handled(40)
        assert len({run.member for run in log.runs}) == 1
        await running.leave(winner)
        await stream.publish(*keys)
        await log.handled(45)
        assert owned(other) == {0}
    assert log.violations == []
    assert [run.position for run in log.runs] == list(range(1, 46))


class NoLetters:
    """Dead letters of which nobody is to write one."""

    async def open(self) -> None:
        """Nothing to open."""

    async def put(self, letter: lanes.DeadLetter) -> None:
        raise AssertionError(f"{letter!r} was to be skipped")

    async def aclose(self) -> None:
        """Nothing to close."""


async def test_serial_refuses_skip(make_cohort_stream: MakeCohortStream) -> None:
    """By name; and what fails for good is not passed over where nothing is said either: the next owner begins there."""
    stream, log = await make_cohort_stream(partitions=1), Log()
    for poison in ("skip", "block_and_dlq"):
        with pytest.raises(lanes.ConfigError, match=f'order="serial" with poison="{poison}"'):
            lanes.Settings(order="serial", poison=poison)
    keys = [stream.key(0, number) for number in range(3)]
    await stream.publish(*keys)

    async def fail(message: lanes.Message) -> None:
        if message.position == 2:
            raise lanes.Term("never")

    settings = lanes.Settings(order="serial")
    a = lanes.Consumer(stream.source("a"), log.handler("a", fail), settings=settings, dead_letters=NoLetters())
    with anyio.fail_after(20):
        with pytest.raises(lanes.HandlerHalted):
            await a.run()
    b = lanes.Consumer(stream.source("b"), log.handler("b"), settings=settings, dead_letters=NoLetters())
    async with members() as running:
        running.join(b)
        await log.handled(3)
    assert [(run.member, run.position) for run in log.runs] == [("a", 1), ("a", 2), ("b", 2), ("b", 3)]
    assert log.violations == []


async def test_serial_refuses_more_than_one_partition(cohort_stream: CohortStream) -> None:
    consumer = lanes.Consumer(cohort_stream.source("a"), handler, settings=lanes.Settings(order="serial"))
    with pytest.raises(lanes.ConfigError, match=r"serial.*partition"):
        await consumer.run()


async def test_a_member_id_that_is_used_is_refused(cohort_stream: CohortStream) -> None:
    stream, log = cohort_stream, Log()
    a = lanes.Consumer(stream.source("a"), log.handler("a"), settings=FAST)
    async with members() as running:
        running.join(a)
        await settled(a, partitions=4)
        await refused(stream.source("a"), "'a'", "used by another live process", "its own member id")
        await stream.publish(*stream.a_key_each())
        await log.handled(4)
        assert owned(a) == {0, 1, 2, 3}


@pytest.mark.slow
async def test_a_member_that_died_joins_again_under_its_id(cohort_stream: CohortStream) -> None:
    stream, log = cohort_stream, Log()
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


async def test_a_partition_count_that_was_changed_is_refused(cohort_stream: CohortStream) -> None:
    """Messages that are stored already keep their old partitions: two of a key could run at once."""
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


async def test_a_stream_that_was_made_anew_is_refused(cohort_stream: CohortStream) -> None:
    stream, log = cohort_stream, Log()
    a = lanes.Consumer(stream.source("a"), log.handler("a"), settings=FAST)
    async with members() as running:
        running.join(a)
        await settled(a, partitions=4)
    await stream.api(f"STREAM.DELETE.{stream.name}")
    await stream.create()
    await refused(stream.source("a"), "incarnation", f"'{stream.name}'", "made anew", "delete the cohort's bucket")


async def test_keys_that_may_be_in_two_partitions_are_refused(cohort_stream: CohortStream) -> None:
    for key in (header("Key"), lambda message: message.data, subject_token(0)):
        await refused(cohort_stream.source("a", key=key), "key=", "partition()")


async def test_a_key_in_two_partitions_stops_loudly(cohort_stream: CohortStream) -> None:
    """The user has said that each key is in one partition; the first one that is not ends the run."""
    stream, seen = cohort_stream, 0

    def key(message: Msg) -> bytes:
        return b"the same"

    async def count(message: lanes.Message) -> None:
        nonlocal seen
        seen += 1

    await stream.publish(*stream.a_key_each())
    with anyio.fail_after(20):
        with pytest.raises(lanes.SourceError, match=r"cohort partitions \d and \d.*key_refines_partition"):
            await lanes.run(stream.source("a", key=key, key_refines_partition=True), count, settings=FAST)
    assert seen < 4


async def test_a_key_that_refines_its_partition(cohort_stream: CohortStream) -> None:
    stream, log = cohort_stream, Log()

    def key(message: Msg) -> str:
        return message.subject.rpartition(".")[2]

    a = lanes.Consumer(stream.source("a", key=key, key_refines_partition=True), log.handler("a"), settings=FAST)
    async with members() as running:
        running.join(a)
        await stream.publish(*stream.a_key_each(), times=3)
        await log.handled(12)
    assert {run.key for run in log.runs} == {each.encode() for each in stream.a_key_each()}


async def test_a_stream_that_lanes_creates(make_cohort_stream: MakeCohortStream) -> None:
    """And one that sources it, by another cohort."""
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


@pytest.mark.parametrize(
    "arguments",
    [
        {"name": "a b"},
        {"name": ""},
        {"name": "c", "namespace": "a.b"},
        {"name": "c", "member": "a b"},
        {"name": "c", "member": "a*"},
        {"name": "c", "lease": 2},
        {"name": "c", "lease": 3.5},
        {"name": "c", "weight": 0},
        {"name": "c", "target": 0},
        {"name": "c", "partitions": 0},
        {"name": "c", "drain_within": 0},
        {"name": "c", "overdue": "never"},
        {"name": "c", "create": "S"},
    ],
    ids=lambda arguments: "-".join(map(str, arguments)),
)
async def test_settings_that_cannot_be(arguments: dict[str, Any]) -> None:
    setting, value = list(arguments.items())[-1]
    named = "cohort" if setting == "name" else setting
    said = re.escape(f"{named}={value!r}") + "( is unknown)?: (must be|use|pass|.*use letters)"
    with pytest.raises(lanes.ConfigError, match=said):
        Cohort(**arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"durable": "d"},
        {"filter_subject": "a.>"},
        {"takeover": "modify"},
        {"acks": "confirmed"},
        {"shared": True},
        {"start_timeout": 5.0},
        {"ack_wait": 0.5},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
async def test_what_is_not_for_a_cohort_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(lanes.ConfigError, match=next(iter(arguments))):
        JetStreamSource("nats://127.0.0.1:1", stream="S", cohort="c", key=None, **arguments)


async def test_neither_a_durable_nor_a_cohort() -> None:
    with pytest.raises(lanes.ConfigError, match=r"durable=.*cohort="):
        JetStreamSource("nats://127.0.0.1:1", stream="S", key=None)


async def test_more_partitions_than_a_server_bears(make_cohort_stream: MakeCohortStream) -> None:
    stream = await make_cohort_stream(partitions=300)
    await refused(stream.source("a"), "300", "many_partitions=True")


async def test_nothing_to_join(
    fresh_nats: Callable[..., NatsServer], cohort_stream: CohortStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream that is not there, credentials that are wrong, no JetStream for the account, no permission."""
    monkeypatch.setattr("lanes_jetstream.wire.connection.CONNECT_TIMEOUT", 1.0)
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
    await refused(stream.source("a", where=login.format("b:b")), "$kv.", "permit it", error=lanes.SourceError)
    await client.close()


async def test_too_many_consumers(make_cohort_stream: MakeCohortStream) -> None:
    stream = await make_cohort_stream(max_consumers=4)
    await refused(stream.source("a"), "max_consumers=4", "4 partitions")


async def test_messages_from_before_the_transform_are_refused(make_cohort_stream: MakeCohortStream) -> None:
    stream = await make_cohort_stream()
    config = (await stream.api(f"STREAM.INFO.{stream.name}"))["config"]
    await stream.api(f"STREAM.UPDATE.{stream.name}", config | {"subject_transform": None})
    await stream.publish("early")
    await stream.api(f"STREAM.UPDATE.{stream.name}", config)
    await refused(stream.source("a"), "sequence 1", "before the transform")


async def test_a_work_queue_begins_with_what_is_there(make_cohort_stream: MakeCohortStream) -> None:
    stream = await make_cohort_stream(retention="workqueue")
    await refused(stream.source("a", start="next"), "start='next'", "beginning")
