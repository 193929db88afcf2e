"""A publisher may report its outputs from any thread and any callback, and the consumer goes on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

import pytest

from lanes import Message
from lanes.outputs.publisher import Output, Report
from memsource.memory.publisher import MemoryPublisher
from memsource.memory.source import MemorySource
from tests.fakes.support import consumer_of, publish, published, started, until

Later = Callable[[Callable[[], None]], object]
"""A function that calls a function later: in a callback of the loop, or in another thread."""


class Elsewhere(MemoryPublisher):
    """A publisher that reports its outputs in a call that ``later`` makes, as a client with callbacks does."""

    def __init__(self, later: Later) -> None:
        super().__init__()
        self._later = later

    async def publish(self, outputs: Sequence[Output], report: Report) -> None:
        left = list(outputs)

        def confirm() -> None:
            self.outputs += outputs
            while left:
                report(left.pop(0), None)

        self._later(confirm)
        await until(lambda: not left)


async def consume(later: Later) -> list[int]:
    """Consume three messages, and return the positions in the order of the ends of their handlers."""
    broker, ended = published("a", "a"), list[int]()

    async def handler(message: Message) -> None:
        if message.key == b"b":
            # The only worker runs while the publisher confirms the output, so the next message needs another worker.
            await until(lambda: 1 in ended)
        elif message.position == 0:
            publish(broker, ["b"])
            await message.publish("out", b"an output")
        ended.append(message.position)

    publisher = Elsewhere(later)
    async with started(consumer_of(MemorySource(broker), handler, publisher=publisher)) as run:
        await until(lambda: broker.unfinished == 0)
        assert await run.stop() is None
    assert len(publisher.outputs) == 1
    return ended


def test_a_report_in_a_callback_of_a_plain_loop_starts_a_further_worker() -> None:
    # Unlike ``anyio.run``, the run of asyncio gives callbacks of the loop no context by which anyio finds the loop.
    async def on_the_loop() -> list[int]:
        return await consume(lambda call: asyncio.get_running_loop().call_later(0.05, call))

    assert asyncio.run(on_the_loop()) == [0, 1, 2]


@pytest.mark.anyio
async def test_a_report_in_another_thread_starts_a_further_worker() -> None:
    assert await consume(lambda call: threading.Timer(0.05, call).start()) == [0, 1, 2]
