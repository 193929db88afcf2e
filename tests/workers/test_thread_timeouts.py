"""Handlers in threads that exceed their timeout are reported, and keep lane and thread."""

from __future__ import annotations

import logging

import pytest

from lanes import Consumer, HandlerHalted, Message, Nak, Settings
from lanes.workers.threads import ThreadWorkers
from memsource.memory.source import MemorySource
from tests.fakes.support import consumer_of, published, started, until
from tests.fakes.threaded import Gates, Options, threads


class HandClock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.anyio
async def test_a_handler_over_its_timeout_is_reported_once_and_keeps_its_lane(
    workers: tuple[Options, list[ThreadWorkers]], caplog: pytest.LogCaptureFixture
) -> None:
    options, made = workers
    options["timeout"] = 0.01
    clock = HandClock()
    broker = published("a", "a")
    handler = Gates()

    def reports() -> list[str]:
        return [record.message for record in caplog.records if "longer than timeout=" in record.message]

    async with started(consumer_of(MemorySource(broker), handler, clock=clock, concurrency=3)) as run:
        await until(lambda: handler.running == 1)
        clock.now += 90
        await until(lambda: len(reports()) == 1)
        broker.publish(key="b")
        await until(lambda: handler.running == 2)
        clock.now += 30
        # By now, the watch has checked the first handler again.
        await until(lambda: len(reports()) == 2)
        assert [message.position for message in made[0].stuck(clock.now, 120.0)] == [0]
        assert handler.started == [0, 2]
        assert len(threads()) == 2
        handler.let(0, 1, 2)
        await until(lambda: broker.unfinished == 0)
        assert made[0].stuck(clock.now, 0.0) == []
        assert await run.stop() is None
    assert "memory/0 position 0 attempt 1: the handler has been running for 90.0 s" in reports()[0]
    assert "memory/0 position 2 attempt 1: the handler has been running for 30.0 s" in reports()[1]
    assert {record.levelno for record in caplog.records if "longer than timeout=" in record.message} == {logging.ERROR}


@pytest.mark.anyio
async def test_a_later_attempt_over_its_timeout_is_reported_too(
    workers: tuple[Options, list[ThreadWorkers]], caplog: pytest.LogCaptureFixture
) -> None:
    workers[0]["timeout"] = 0.01
    clock = HandClock()
    broker = published("a")
    gates = Gates()

    def handler(message: Message) -> None:
        gates(message)
        raise Nak(delay=0.0)

    async with started(consumer_of(MemorySource(broker), handler, clock=clock, attempts=2)) as run:
        await until(lambda: gates.running == 1)
        clock.now += 1
        await until(lambda: "attempt 1: the handler" in caplog.text)
        gates.let(0)
        await until(lambda: gates.ended == [0])
        gates.shut(0)
        await until(lambda: len(gates.started) == 2)
        clock.now += 1
        await until(lambda: "attempt 2: the handler" in caplog.text)
        gates.let(0)
        assert isinstance(await run.end(), HandlerHalted)


@pytest.mark.anyio
async def test_a_consumer_whose_threads_are_all_stuck_is_unhealthy() -> None:
    clock = HandClock()
    broker = published("a")
    handler = Gates()
    settings = Settings(concurrency=2, timeout=60.0, unhealthy_after=3600.0)
    async with started(Consumer(MemorySource(broker), handler, settings=settings, clock=clock)) as run:
        await until(lambda: handler.running == 1)
        clock.now += 60
        assert run.consumer.healthy
        broker.publish(key="b")
        await until(lambda: handler.running == 2)
        assert run.consumer.healthy
        clock.now += 59.9
        assert run.consumer.healthy
        clock.now += 0.1
        (reason,) = run.consumer.health().reasons
        assert reason.startswith("all 2 thread(s) are stuck, the first: memory/0 position 0")
        handler.let(0)
        await until(lambda: broker.acked() == [0])
        assert run.consumer.healthy
        handler.let(1)
        assert await run.stop() is None
