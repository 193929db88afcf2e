"""With shared=True, several processes use one durable, without order and without takeovers."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

import lanes
from tests.jetstream.workload import Recorder, Stream, running, until

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
async def test_an_order_is_refused(stream: Stream, order: Any) -> None:
    with pytest.raises(
        lanes.ConfigError, match=rf'order="{order}": several processes .* no order can be kept; use order="none"'
    ):
        await lanes.run(stream.source(shared=True), Recorder(), settings=lanes.Settings(order=order))
