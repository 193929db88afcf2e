"""With shared=True, several processes compete for the messages of one durable, without order and without takeovers."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from typing import Any

import anyio
import pytest

import lanes
from lanes_jetstream import JetStreamSource, subject_token
from tests.jetstream.cohort_workload import FAST, CohortStream, Log, members
from tests.jetstream.conftest import connect
from tests.jetstream.proxy import Proxy
from tests.jetstream.sharing_process import DURABLE, SharingProcess
from tests.jetstream.workload import SECOND, Recorder, Stream, running, until

pytestmark = pytest.mark.anyio


SHARED = lanes.Settings(concurrency=20, order="none")


async def test_several_processes_share_a_durable(stream: Stream) -> None:
    await stream.publish(400)
    recorder = Recorder(lambda message: 0.005)
    few = lanes.Settings(concurrency=5, max_in_flight=10, order="none")
    consumers = [lanes.Consumer(stream.source(shared=True), recorder, settings=few) for _ in range(3)]
    finished: list[int] = []

    def count(message: lanes.Message) -> float:
        finished.append(message.position)
        return 0.005

    recorder._pause = count
    async with anyio.create_task_group() as tasks:
        for consumer in consumers:
            tasks.start_soon(consumer.run)
        with anyio.fail_after(20):
            await recorder.reached(400)
            await stream.acknowledged()
        for consumer in consumers:
            consumer.stop()
    assert sorted(finished) == list(range(1, 401))


async def test_a_start_takes_nothing_over_from_other_processes(stream: Stream) -> None:
    """A second process does not get the messages of the first process."""
    await stream.publish(40)
    release = anyio.Event()
    held: list[int] = []

    async def hold(message: lanes.Message) -> None:
        held.append(message.position)
        await release.wait()

    first = lanes.Consumer(
        stream.source(shared=True), hold, settings=lanes.Settings(concurrency=10, max_in_flight=10, order="none")
    )
    async with running(first):
        with anyio.fail_after(10):
            await until(lambda: len(held) == 10)
        other = Recorder()
        async with running(lanes.Consumer(stream.source(shared=True), other, settings=SHARED)):
            with anyio.fail_after(10):
                await other.reached(30)
        release.set()
    assert other.done.isdisjoint(held)


@pytest.mark.parametrize("order", ["key", "partition", "serial"])
async def test_a_shared_durable_refuses_every_order_but_none(stream: Stream, order: Any) -> None:
    with pytest.raises(
        lanes.ConfigError, match=rf'order="{order}": several processes .* no order can be kept; use order="none"'
    ):
        await lanes.run(stream.source(shared=True), Recorder(), settings=lanes.Settings(order=order))


async def shares(stream: Stream, count: int, *pauses: float) -> list[float]:
    """Let processes whose handlers take that long handle a backlog, and return the share of each process."""
    processes = [SharingProcess(stream.url, stream.name, pause, max_in_flight=20) for pause in pauses]
    try:
        with anyio.fail_after(40):
            for process in processes:
                await process.ready()
            while (await stream.consumer_info(DURABLE)).num_waiting != len(pauses):
                await anyio.sleep(0.01)
            await stream.publish(count)
            while (info := await stream.consumer_info(DURABLE)).num_pending or info.num_ack_pending:
                await anyio.sleep(0.02)
            handled = [await process.stop() for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert sorted(itertools.chain(*handled)) == list(range(1, count + 1)), "each message in exactly one process"
    return [len(positions) / count for positions in handled]


@pytest.mark.process
async def test_two_processes_of_equal_speed_get_equal_shares(stream: Stream) -> None:
    # Four seconds, so that a process that gets no processor for one second handles enough.
    share, other = await shares(stream, 1_500, 0.05, 0.05)
    assert 0.4 < share < 0.6, (share, other)


@pytest.mark.process
async def test_a_slow_process_gets_a_share_of_its_speed(stream: Stream) -> None:
    """The slow process has an eleventh of the speed, and at most a little more than an eleventh of the messages."""
    # Long handlers, so that a busy machine, or a second without a processor, slows neither process much.
    slow, fast = await shares(stream, 800, 0.6, 0.06)
    assert 0.03 < slow < 0.2, (slow, fast)


async def test_without_a_cohort_no_process_owns_a_key(cohort_stream: CohortStream) -> None:
    """Exclusivity is opt-in: a divided stream alone gives a shared durable no owners, and needs no bucket."""
    stream, key = cohort_stream, cohort_stream.key(0)
    settings = lanes.Settings(concurrency=2, max_in_flight=2, order="none")
    running_in: Counter[str] = Counter()
    release = anyio.Event()

    def consumer(name: str) -> lanes.Consumer:
        async def hold(message: lanes.Message) -> None:
            assert message.key == key.encode()
            running_in[name] += 1
            await release.wait()

        source = JetStreamSource(stream.url, stream=stream.name, durable="jobs", key=subject_token(2), shared=True)
        return lanes.Consumer(source, hold, settings=settings)

    async with running(consumer("a")), running(consumer("b")):
        await stream.publish(key, times=4)
        with anyio.fail_after(10):
            await until(lambda: running_in == {"a": 2, "b": 2})
        assert await stream.buckets() == []
        release.set()


async def test_a_shared_durable_beside_a_cohort_still_competes(cohort_stream: CohortStream) -> None:
    """The cohort divides the stream among its own members only; the shared durable gets each message once more."""
    stream, log, recorder = cohort_stream, Log(), Recorder()
    a, b = (lanes.Consumer(stream.source(name), log.handler(name), settings=FAST) for name in "ab")
    jobs = JetStreamSource(stream.url, stream=stream.name, durable="jobs", key=None, shared=True)
    async with members() as joined:
        joined.join(a, b)
        async with running(lanes.Consumer(jobs, recorder, settings=SHARED)):
            await stream.publish(*stream.a_key_each(), times=10)
            await log.handled(40)
            await recorder.reached(40)
    assert log.violations == []
    assert log.repeats == []
    assert recorder.repeats == 0


def competitor(stream: Stream, handler: Any) -> lanes.Consumer:
    """A process whose request for 20 messages waits at the server while no message arrives."""
    settings = lanes.Settings(concurrency=5, max_in_flight=20, order="none")
    return lanes.Consumer(stream.source(shared=True), handler, settings=settings)


@pytest.fixture
async def durable(stream: Stream) -> None:
    """A durable whose unacknowledged messages do not return during a test."""
    await stream.add_consumer(ack_wait=60 * SECOND)


async def waiting_requests(stream: Stream, least: int) -> None:
    """Wait until the server has so many open requests. A process may have several requests."""
    while ((await stream.consumer_info()).num_waiting or 0) < least:
        await anyio.sleep(0.01)


@pytest.mark.usefixtures("durable")
async def test_a_paused_process_takes_no_messages_from_the_others(stream: Stream) -> None:
    """Messages for the open request of the paused process go back. After the resume it gets messages again."""
    a, b = Recorder(), Recorder()
    paused = competitor(stream, a)
    with anyio.fail_after(20):
        async with running(paused):
            await waiting_requests(stream, 1)
            paused.pause()
            async with running(competitor(stream, b)):
                await stream.publish(40)
                await b.reached(40)
                assert a.done == set()
            paused.resume()
            await stream.publish(40)
            await a.reached(40)
            await stream.acknowledged()
    assert a.repeats == b.repeats == 0


@pytest.mark.usefixtures("durable")
async def test_a_draining_process_takes_no_messages_from_the_others(stream: Stream) -> None:
    """While its last handler runs, a process that stops asks for no message."""
    started, release, b = anyio.Event(), anyio.Event(), Recorder()

    async def hold(message: lanes.Message) -> None:
        started.set()
        await release.wait()

    a = competitor(stream, hold)
    with anyio.fail_after(20):
        async with running(a):
            await waiting_requests(stream, 1)
            await stream.publish(1)
            await started.wait()
            a.stop()
            async with running(competitor(stream, b)):
                await stream.publish(40)
                await b.reached(40)
            release.set()
        await stream.acknowledged()
    assert b.done == set(range(2, 42))


@pytest.mark.usefixtures("durable")
async def test_messages_that_arrive_at_the_pause_go_back_at_once(stream: Stream) -> None:
    """No message waits for the ack_wait of 60 s, at any moment of the pause."""
    recorder = Recorder()
    consumers = [competitor(stream, recorder) for _ in range(2)]
    with anyio.fail_after(30):
        async with running(consumers[0]), running(consumers[1]):
            for number in range(40):
                await waiting_requests(stream, 2)
                await stream.publish(20)
                consumers[0].pause()
                await anyio.sleep(number % 10 / 1_000)
                consumers[0].resume()
            await recorder.reached(800)
            await stream.acknowledged()
    assert recorder.repeats == 0


@pytest.mark.usefixtures("durable")
async def test_messages_that_arrive_at_the_stop_go_back_at_once(stream: Stream) -> None:
    """No message waits for the ack_wait of 60 s, at any moment of the stop."""
    recorder, rounds = Recorder(), 20
    with anyio.fail_after(40):
        async with running(competitor(stream, recorder)):
            for number in range(rounds):
                a = competitor(stream, recorder)
                async with running(a):
                    await waiting_requests(stream, 2)
                    a.pause()
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(stream.publish, 20)
                        await anyio.sleep(number % 10 / 2_000)
                        a.stop()
            await recorder.reached(20 * rounds)
            await stream.acknowledged()
    assert recorder.repeats == 0


async def test_a_client_survives_a_server_that_is_silent_during_the_release(stream: Stream) -> None:
    async with Proxy(stream.url).open() as proxy, await connect(proxy.url) as client:
        recorder = Recorder(lambda message: 0.0)
        source = JetStreamSource(client, stream=stream.name, durable=DURABLE, key=None, shared=True)
        await stream.publish(10)
        consumer = lanes.Consumer(source, recorder, settings=SHARED)
        async with anyio.create_task_group() as tasks:
            ended = anyio.Event()

            async def run() -> None:
                with contextlib.suppress(lanes.SourceError):
                    await consumer.run()
                ended.set()

            tasks.start_soon(run)
            with anyio.fail_after(20):
                await recorder.reached(10)
            proxy.silence()
            consumer.stop()
            with anyio.fail_after(30):
                await ended.wait()
        proxy.resume()
        # The late answer to the flush of the release must not end the read loop of the client.
        await client.flush(timeout=5)
        await client.flush(timeout=5)
