"""As many workers are woken as there is work: all that are needed for handlers that suspend, few for others."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from lanes import Message
from lanes.workers.tasks import TaskWorkers
from lanes.workers.wake_limit import ALONE, FEW, SURE, TIME_SLICE, WAKE_SLICE, WakeLimit
from memsource import MemorySource
from tests.fakes.support import Run, consumer_of, published, started, turns, until

KEYS = 1_000

TURNS = 60
"""Turns of the loop in which all handlers start. Each step of the limit takes two turns, because a task that starts
yields once. With eight workers woken in a turn, fewer than half of the handlers would start."""


def workers_of(run: Run) -> TaskWorkers:
    """The workers of a consumer that has started."""
    life_run = run.consumer._life.run
    assert life_run is not None
    workers = life_run.workers
    assert isinstance(workers, TaskWorkers)
    return workers


class Clock:
    """A clock that handlers advance."""

    def __init__(self, step: float = 0.0) -> None:
        self.now = 0.0
        self.step = step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def test_one_worker_is_woken_before_a_handler_has_suspended_and_few_afterwards() -> None:
    limit = WakeLimit(KEYS)
    assert [limit(ready) for ready in (0, 1, FEW, KEYS)] == [ALONE] * 4
    limit.suspended()
    assert [limit(ready) for ready in (0, 1, FEW)] == [FEW] * 3


def test_a_worker_is_woken_for_each_ready_lane_while_all_handlers_suspend() -> None:
    limit = WakeLimit(KEYS)
    while limit.share < SURE:
        limit.suspended()
    while limit.fits < KEYS:
        limit.started(limit.fits, 0.0)
    assert limit(KEYS) >= SURE * KEYS


def test_the_limit_of_woken_workers_follows_the_share_of_handlers_that_suspend() -> None:
    limit = WakeLimit(KEYS, grouped=True)
    for _ in range(200):
        limit.suspended()
        limit.returned(1)
    assert 0.4 * KEYS < limit(KEYS) < 0.6 * KEYS
    limit.returned(200)
    assert (limit.share, limit(KEYS)) == (0.0, ALONE)


def test_the_limit_of_woken_workers_is_what_fits_into_a_slice() -> None:
    limit = WakeLimit(KEYS, grouped=True)
    assert limit(KEYS) == KEYS
    limit.started(KEYS, WAKE_SLICE * KEYS / 300)
    assert limit(KEYS) == 300
    limit.started(299, 0.0)
    limit.started(300, WAKE_SLICE / 2)
    assert limit(KEYS) == 300
    limit.started(300, 0.0)
    assert limit(KEYS) == 600
    limit.started(600, 1_000 * WAKE_SLICE)
    assert limit(KEYS) == FEW


@pytest.mark.anyio
async def test_all_handlers_that_wait_start_within_few_turns_of_the_loop() -> None:
    broker = published(*range(KEYS))
    running = 0
    ended = anyio.Event()

    async def handler(message: Message) -> None:
        nonlocal running
        running += 1
        await ended.wait()

    consumer = consumer_of(MemorySource(broker), handler, concurrency=KEYS, max_in_flight=KEYS, clock=Clock())
    async with started(consumer) as run:
        await until(lambda: running)
        await turns(TURNS)
        assert running == KEYS
        ended.set()
        await until(lambda: broker.unfinished == 0)
        assert await run.stop() is None


@pytest.mark.anyio
async def test_a_burst_wakes_a_worker_for_each_message_after_handlers_have_suspended() -> None:
    broker = published(*range(KEYS))
    gates = [anyio.Event(), anyio.Event()]
    running = 0

    async def handler(message: Message) -> None:
        nonlocal running
        running += 1
        await gates[message.position >= KEYS].wait()
        running -= 1

    consumer = consumer_of(MemorySource(broker), handler, concurrency=KEYS, max_in_flight=KEYS, clock=Clock())
    async with started(consumer) as run:
        await until(lambda: running == KEYS)
        gates[0].set()
        await until(lambda: broker.unfinished == 0 and len(workers_of(run)._idle) == KEYS)
        for key in range(KEYS):
            broker.publish(str(key), key=key)
        await until(lambda: running)
        # The source delivers 100 messages in a turn.
        await turns(2 * KEYS // 100)
        assert running == KEYS
        gates[1].set()
        await until(lambda: broker.unfinished == 0)
        assert await run.stop() is None


@pytest.mark.anyio
async def test_handlers_that_never_suspend_wake_few_workers() -> None:
    broker = published(*range(KEYS))

    async def handler(message: Message) -> None:
        clock.now += TIME_SLICE / 4

    clock = Clock()
    consumer = consumer_of(MemorySource(broker), handler, concurrency=KEYS, max_in_flight=KEYS, clock=clock)
    async with started(consumer) as run:
        await until(lambda: broker.unfinished == 0)
        # The handlers use up 250 slices, and each slice gives the other worker a turn.
        assert len(workers_of(run)._workers) <= 2
        assert await run.stop() is None


@pytest.mark.anyio
@pytest.mark.parametrize("starts", [4, 50])
async def test_the_starts_of_many_handlers_leave_the_loop_a_turn_in_each_slice(starts: int) -> None:
    broker = published(*range(KEYS))
    running = 0
    ended = anyio.Event()

    async def handler(message: Message) -> None:
        nonlocal running
        running += 1
        clock.now += WAKE_SLICE / starts
        await ended.wait()

    clock = Clock()
    consumer = consumer_of(MemorySource(broker), handler, concurrency=KEYS, max_in_flight=KEYS, clock=clock)
    most = before = 0
    async with started(consumer) as run:
        while running < KEYS:
            await anyio.lowlevel.checkpoint()
            most, before = max(most, running - before), running
        # Eight workers may always be woken, although their starts take more than a slice.
        assert most <= max(FEW, starts)
        ended.set()
        await until(lambda: broker.unfinished == 0)
        assert await run.stop() is None
