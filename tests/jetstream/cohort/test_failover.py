"""If members die, are cut off or lose their durables, owners never overlap and no message is lost."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable

import anyio
import nats.errors
import pytest

import lanes
from lanes.cohort.leases import UnknownResult
from lanes.errors import Term
from tests.components import NatsServer
from tests.jetstream.cohort_workload import (
    FAST,
    LEASE,
    CohortStream,
    Deadlines,
    Gate,
    Log,
    draining,
    members,
    owned,
    settled,
)
from tests.jetstream.conftest import MakeCohortStream, connect
from tests.jetstream.proxy import Proxy
from tests.jetstream.workload import until

pytestmark = pytest.mark.anyio


def of_a(log: Log) -> list[str]:
    """Outcomes of the handlers of member a."""
    return [outcome for run, outcome, _ in log.ended if run.member == "a"]


def epochs_of(events: list[lanes.GroupEvent]) -> dict[int, int]:
    """The newest epoch of each partition."""
    return {e.partition.number: e.epoch or 0 for e in events if e.name == "assigned" and e.partition is not None}


async def test_a_member_that_is_cut_off_ends_before_the_next_owner_starts(cohort_stream: CohortStream) -> None:
    """A member that is cut off holds three messages: none starts elsewhere before the deadline."""
    stream, log = cohort_stream, Log()
    stream.lease = LEASE
    held = [stream.key(partition, number) for partition in range(4) for number in range(3)]
    gate = Gate(*held)
    deadlines = Deadlines(gate)
    async with Proxy(stream.url).open() as wire:
        a = lanes.Consumer(stream.source("a", where=wire.url), log.handler("a", deadlines), settings=FAST)
        b = lanes.Consumer(stream.source("b"), log.handler("b"), settings=FAST)
        async with members() as running:
            await running.hold(a, stream, gate, *held)
            wire.silence()
            running.join(b)
            await log.handled(12)
            assert owned(b) == {0, 1, 2, 3}
            for run in log.of("b"):
                assert run.started >= deadlines.partitions[run.partition].deadline
            assert of_a(log) == ["cancelled"] * 12
            wire.resume()
            await settled(a, b, partitions=4)
    assert log.violations == []
    assert log.repeats == []
    tokens: defaultdict[int, set[int]] = defaultdict(set)
    for run in log.runs:
        tokens[run.partition].add(run.epoch)
    assert all(len(epochs) == 2 for epochs in tokens.values())


async def test_failed_messages_of_a_moving_partition_run_again_at_the_next_owner(cohort_stream: CohortStream) -> None:
    """Three messages exhaust their retries during a move: they run again at the next owner, and not earlier."""
    stream, log = cohort_stream, Log()
    stream.lease = LEASE
    held = [stream.key(partition, number) for partition in range(4) for number in range(3)]
    gate = Gate(*held)

    async def give_up(message: lanes.Message) -> None:
        await gate(message)
        raise Term("never")

    a = lanes.Consumer(stream.source("a"), log.handler("a", give_up), settings=FAST)
    b = lanes.Consumer(stream.source("b"), log.handler("b"), settings=FAST)
    async with members() as running:
        await running.hold(a, stream, gate, *held)
        running.join(b)
        moving = await draining(a, 2)
        moved = {key.encode() for key in held if stream.partition(key) in moving}
        for count in range(1, 7):
            gate.let_one_through(moved)
            await until(lambda count=count: len(of_a(log)) == count)  # type: ignore[misc]
            still = {run.partition for runs in log.running.values() for run in runs if run.member == "a"}
            assert not still & {run.partition for run in log.of("b")}
        await log.handled(6)
        assert {run.key for run in log.of("b")} == moved
        assert owned(b) == moving
        await running.crash(a)
    for run in log.of("b"):
        failed = [ended for each, _, ended in log.ended if each.member == "a" and each.partition == run.partition]
        assert run.started > max(failed)
    assert log.violations == []


async def test_a_dead_owner_does_not_block_a_partition(cohort_stream: CohortStream) -> None:
    stream, log = cohort_stream, Log()
    stream.lease = LEASE
    gate = Gate(*stream.a_key_each())
    a = lanes.Consumer(stream.source("a"), log.handler("a", gate), settings=FAST)
    b = lanes.Consumer(stream.source("b"), log.handler("b"), settings=FAST)
    async with members() as running:
        running.join(a)
        await settled(a, partitions=4)
        running.join(b)
        await settled(a, b, partitions=4)
        await stream.publish(*stream.a_key_each(), times=5)
        await until(lambda: gate.waiting == 2)
        await running.crash(a)
        await log.handled(stream.published)
        await settled(b, partitions=4)
    assert log.violations == []
    assert log.repeats == []


async def test_a_former_owner_cannot_acknowledge(cohort_stream: CohortStream) -> None:
    """Acknowledgements of a former owner have no effect, its pulls are refused, and the next owner handles its
    messages."""
    stream, log = cohort_stream, Log()
    stream.lease = LEASE
    gate = Gate(*stream.a_key_each())
    deadlines = Deadlines(gate)
    async with Proxy(stream.url).open() as wire:
        a = lanes.Consumer(stream.source("a", where=wire.url), log.handler("a", deadlines), settings=FAST)
        b = lanes.Consumer(stream.source("b"), log.handler("b", gate), settings=FAST)
        async with members() as running:
            await running.hold(a, stream, gate, *stream.a_key_each())
            old = await stream.durables()
            wire.silence()
            running.join(b)
            await settled(b, partitions=4)
            await until(lambda: len(log.of("b")) == 4)
            # Durables of lower epochs are deleted before the first pull from a higher one.
            assert not set(old) & set(await stream.durables())
            for token in deadlines.tokens:
                with pytest.raises(nats.errors.NoRespondersError):
                    await stream.client.request(token, b"+ACK", timeout=5)
            for durable in old:
                with pytest.raises(nats.errors.NoRespondersError):
                    await stream.client.request(
                        f"$JS.API.CONSUMER.MSG.NEXT.{stream.name}.{durable}", b'{"batch": 1}', timeout=5
                    )
            gate.open()
            await log.handled(4)
            wire.resume()
    assert {run.member for run, outcome, _ in log.ended if outcome == "done"} == {"b"}
    assert log.repeats == []


async def test_a_reconnect_keeps_the_partitions(cohort_stream: CohortStream) -> None:
    """Within the lease the ownership continues, running messages settle once, and new messages are handled."""
    stream, log = cohort_stream, Log()
    keys = stream.a_key_each()
    gate = Gate(*keys)
    events: list[lanes.GroupEvent] = []
    async with Proxy(stream.url).open() as wire:
        a = lanes.Consumer(
            stream.source("a", where=wire.url), log.handler("a", gate), settings=FAST, on_event=events.append
        )
        async with members() as running:
            await running.hold(a, stream, gate, *keys, times=3)
            before, seen = a.status().partitions, len(events)
            durables = await stream.durables()
            wire.drop()
            await stream.publish(*keys, times=3)
            others = [stream.key(partition, 1) for partition in range(4)]
            await stream.publish(*others)
            await log.handled(4)
            gate.open()
            await log.handled(stream.published)
            assert {name: part.epoch for name, part in a.status().partitions.items()} == {
                name: part.epoch for name, part in before.items()
            }
            assert [event.name for event in events[seen:]] == []
            # Each partition continued with a new consumer under the same epoch.
            assert await stream.durables() == [f"{name}-1" for name in durables]
    assert log.violations == []
    assert log.repeats == []
    assert len(log.runs) == stream.published


async def test_a_bucket_outage_does_not_overlap_owners(
    cohort_stream: CohortStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No member reaches the bucket for longer than a lease: all give up their partitions, and none acquires one."""
    stream, log = cohort_stream, Log()
    stream.lease = LEASE
    gate = Gate(*stream.a_key_each())
    events: list[lanes.GroupEvent] = []
    asked: list[object] = []
    a, b = (
        lanes.Consumer(stream.source(name), log.handler(name, gate), settings=FAST, on_event=events.append)
        for name in "ab"
    )
    async with members() as running:
        running.join(a, b)
        await settled(a, b, partitions=4)
        await stream.publish(*stream.a_key_each(), times=2)
        await until(lambda: gate.waiting == 4)
        with monkeypatch.context() as patch:

            async def dark(*question: object, **_: object) -> None:
                asked.append(question)
                await anyio.sleep(0.05)
                raise UnknownResult("the bucket does not answer")

            patch.setattr("lanes_jetstream.cohort.lease_store.JetStreamLeaseStore._ask", dark)
            await until(lambda: [event.name for event in events].count("lost") == 4)
            # The same step cancels the handlers of a lost partition, which end in the next turns of the event loop.
            await until(lambda: gate.waiting == 0)
            started, seen = len(log.runs), len(asked)
            # A member that trusted its old lease would start these messages.
            await until(lambda: len(asked) >= seen + 10)
            assert len(log.runs) == started
        gate.open()
        await log.handled(stream.published)
        await settled(a, b, partitions=4)
    assert log.violations == []
    assert log.repeats == []


async def test_epochs_rise_after_the_bucket_is_lost(cohort_stream: CohortStream) -> None:
    """Messages that are published while there is no owner are handled later, each partition under a higher epoch."""
    stream, log = cohort_stream, Log()
    stream.lease = LEASE
    events: list[lanes.GroupEvent] = []
    a, b = (
        lanes.Consumer(stream.source(name), log.handler(name), settings=FAST, on_event=events.append) for name in "ab"
    )
    async with members() as running:
        running.join(a, b)
        await settled(a, b, partitions=4)
        await stream.publish(*stream.a_key_each(), times=3)
        await log.handled(stream.published)
        (bucket,) = await stream.buckets()
        owners, told = epochs_of(events), len(events)
        await stream.api(f"STREAM.DELETE.{bucket}")
        await until(lambda: [event.name for event in events[told:]].count("lost") == 4)
        await stream.publish(*stream.a_key_each(), times=3)
        await log.handled(stream.published)
        await settled(a, b, partitions=4)
        await stream.publish(*stream.a_key_each(), times=3)
        await log.handled(stream.published)
    assert log.violations == []
    assert log.repeats == []
    assert json.dumps(await stream.read("config")) != "null"
    epochs: defaultdict[int, list[int]] = defaultdict(list)
    for run in log.runs:
        epochs[run.partition].append(run.epoch)
    for partition, of_partition in epochs.items():
        assert of_partition == sorted(of_partition)
        assert of_partition[:3] == [owners[partition]] * 3
        assert of_partition[3] > owners[partition]


async def test_unblock_resumes_the_head_with_its_attempts(cohort_stream: CohortStream) -> None:
    """A head that exhausts its retries blocks only its key, and after ``unblock`` has one more attempt."""
    stream, log = cohort_stream, Log()
    attempts: list[tuple[int, int]] = []
    failing = True

    async def fail(message: lanes.Message) -> None:
        attempts.append((message.position, message.attempt))
        if failing and message.position == 1:
            raise ValueError("no")

    settings = lanes.Settings(poison="block", retry=lanes.Retry(attempts=3, backoff=0.01))
    key, other = stream.key(0), stream.key(0, 1)
    a = lanes.Consumer(stream.source("a"), log.handler("a", fail), settings=settings)
    async with members() as running:
        running.join(a)
        await settled(a, partitions=4)
        await stream.publish(key, key, other)
        await until(lambda: bool(a.status().blocked) and log.done == {3})
        assert [each for each in attempts if each[0] != 3] == [(1, 1), (1, 2), (1, 3)]
        failing = False
        assert a.unblock(key) == 1
        await log.handled(3)
        assert a.unblock(key) == 0
    assert [each for each in attempts if each[0] != 3] == [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1)]
    assert len({run.epoch for run in log.runs}) == 1
    assert log.violations == []
    assert log.repeats == []


async def test_a_deleted_durable_loses_its_partition_only(cohort_stream: CohortStream) -> None:
    """If a foreign client deletes a durable, its partition is lost and acquired again, and no message is missed."""
    stream, log = cohort_stream, Log()
    stream.lease = LEASE
    gate = Gate(*stream.a_key_each())
    a = lanes.Consumer(stream.source("a"), log.handler("a", gate), settings=FAST)
    async with members() as running:
        await running.hold(a, stream, gate, *stream.a_key_each(), times=3)
        gone = (await stream.durables())[0]
        await stream.api(f"CONSUMER.DELETE.{stream.name}.{gone}")
        await until(lambda: gate.waiting == 3)
        gate.open()
        await settled(a, partitions=4)
        await stream.publish(*stream.a_key_each())
        await log.handled(stream.published)
    assert log.violations == []
    assert log.repeats == []


@pytest.mark.slow
async def test_a_deleted_stream_stops_the_members(make_cohort_stream: MakeCohortStream) -> None:
    stream, log = await make_cohort_stream(), Log()
    a = lanes.Consumer(stream.source("a"), log.handler("a"), settings=FAST)
    stopped = anyio.Event()

    async def run() -> None:
        with pytest.raises(lanes.SourceError, match=f"stream '{stream.name}' was deleted"):
            await a.run()
        stopped.set()

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            await until(lambda: a.ready and len(owned(a)) == 4)
            await stream.api(f"STREAM.DELETE.{stream.name}")
            await stopped.wait()
    await stream.create()


async def test_a_server_restart_within_the_lease_keeps_the_partitions(fresh_nats: Callable[..., NatsServer]) -> None:
    """After kill -9 members continue, and messages that were acknowledged long ago are not handled again."""
    server = fresh_nats()
    client = await connect(server.url)
    stream, log = CohortStream(server.url, client, "S"), Log()
    await stream.create()
    a, b = (lanes.Consumer(stream.source(name, lease=10), log.handler(name), settings=FAST) for name in "ab")
    async with members() as running:
        running.join(a, b)
        await settled(a, b, partitions=4)
        await stream.publish(*stream.a_key_each(), times=20)
        await log.handled(stream.published)
        await client.close()
        server.kill()
        server.start()
        client = stream.client = await connect(server.url)
        await stream.publish(*stream.a_key_each(), times=20)
        await log.handled(stream.published)
        assert len(owned(a)) == len(owned(b)) == 2
    await client.close()
    assert log.violations == []
    assert log.repeats == []
