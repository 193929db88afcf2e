"""Deliveries of thousands of messages enter the engine in slices, between which other tasks run."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from lanes import Message
from lanes.runtime.deliveries import PIECE, pieces
from lanes.source import Delivered, Progressed
from lanes.workers.wake_limit import TIME_SLICE
from memsource import MemorySource
from tests.core.builders import new_partition
from tests.fakes.support import consumer_of, published, started

MESSAGES = 5 * PIECE


def test_a_long_run_is_cut_and_keeps_its_order_and_size() -> None:
    partition = new_partition()
    run = [Message(partition, position, None, position, None, None) for position in range(2 * PIECE + 1)]
    size = sum(message.size for message in run) + 7
    short = Delivered(partition, run[:PIECE], 5)
    end = Progressed(partition, len(run))
    first, *cut, last = pieces([short, Delivered(partition, run, size), end])
    assert first is short and last is end
    assert [len(piece.run) for piece in cut if isinstance(piece, Delivered)] == [PIECE, PIECE, 1]
    assert [message for piece in cut if isinstance(piece, Delivered) for message in piece.run] == run
    assert sum(piece.size for piece in cut if isinstance(piece, Delivered)) == size


@pytest.mark.anyio
async def test_a_delivery_of_thousands_leaves_the_loop_a_turn_in_each_slice() -> None:
    broker = published(*[None] * MESSAGES)
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += TIME_SLICE / 2
        return now

    async def handler(message: Message) -> None:
        await anyio.sleep_forever()

    source = MemorySource(broker, batch=MESSAGES)
    consumer = consumer_of(source, handler, max_in_flight=MESSAGES, keyless="any", clock=clock)
    async with started(consumer) as run:
        await run.consumer.opened()
        most = before = 0
        while before < MESSAGES:
            await anyio.lowlevel.checkpoint()
            in_flight = run.consumer.status().in_flight
            most, before = max(most, in_flight - before), in_flight
        # Two slices may be between two looks: trio runs the tasks of a turn in random order.
        assert most <= 2 * PIECE
