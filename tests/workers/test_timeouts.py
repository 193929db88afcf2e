"""Async handlers that exceed their timeout are cancelled, awaited and failed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from lanes import Consumer, HandlerHalted, History, Message, Retry
from memsource import MemoryDeadLetters, MemorySource
from tests.fakes.grouped import HandClock
from tests.fakes.support import Gated, consumer_of, published, started, turns, until
from tests.fakes.threaded import assert_kept


def limited(source: MemorySource, handler: Any, **arguments: Any) -> Consumer:
    """A consumer with a short timeout that does not retry, unless told so."""
    return consumer_of(source, handler, **{"timeout": 0.01, **arguments})


async def over_its_time(handler: Gated, clock: HandClock, times: int) -> None:
    """Let the handler of position 0 exceed its timeout for the ``times``-th time."""
    await until(lambda: handler.started.count(0) == times)
    clock.now += 0.02
    await until(lambda: handler.cancelled == [0] * times)


@pytest.mark.anyio
async def test_a_handler_over_its_timeout_is_cancelled_and_fails(tmp_path: Path) -> None:
    broker = published("a", "a", "b")
    handler = Gated(free=[b"b"])
    dead_letters = MemoryDeadLetters(broker)
    clock = HandClock()
    retry = Retry(attempts=3, backoff=0.0)
    consumer = limited(
        MemorySource(broker), handler, clock=clock, retry=retry, dead_letters=dead_letters, history=History(tmp_path)
    )
    async with started(consumer) as run:
        for times in (1, 2, 3):
            await over_its_time(handler, clock, times)
        # The lane continues after the message has been given up.
        await until(lambda: handler.started[-1] == 1)
        handler.let(1)
        await until(lambda: broker.unfinished == 0)
        assert [
            (dead_letter.position, dead_letter.attempts, dead_letter.error_type) for dead_letter in broker.dead_letters
        ] == [(0, 3, "TimeoutError")]
        assert broker.dead_letters[0].error_text == "the handler did not end within timeout=0.01 s"
        assert consumer.status().retries == 2
        assert await run.stop() is None
    assert_kept(tmp_path)


@pytest.mark.anyio
async def test_a_timeout_under_exit_stops_in_order() -> None:
    broker = published("a", "b")
    handler = Gated(free=[b"b"])
    with pytest.raises(HandlerHalted, match=r"within timeout=0\.01 s") as caught:
        await limited(MemorySource(broker), handler).run()
    assert isinstance(caught.value.__cause__, TimeoutError)
    assert broker.acked() == [1]


@pytest.mark.anyio
async def test_a_lane_waits_for_the_end_of_a_cancelled_handler() -> None:
    broker = published("a", "a")
    steps: list[str] = []
    gate = anyio.Event()

    async def handler(message: Message) -> None:
        steps.append(f"begin {message.position}")
        if message.position == 0:
            try:
                await anyio.sleep_forever()
            finally:
                steps.append("cancelled")
                with anyio.CancelScope(shield=True):
                    await gate.wait()
                steps.append("end")

    consumer = limited(MemorySource(broker), handler, dead_letters=MemoryDeadLetters(broker), timeout=0.2)
    async with started(consumer) as run:
        await until(lambda: "cancelled" in steps)
        await turns()
        assert steps == ["begin 0", "cancelled"]
        gate.set()
        await until(lambda: broker.unfinished == 0)
        assert steps == ["begin 0", "cancelled", "end", "begin 1"]
        assert await run.stop() is None


@pytest.mark.anyio
async def test_a_handler_that_succeeds_despite_its_cancellation_is_acknowledged() -> None:
    broker = published("a", "a")
    swallowed: list[int] = []

    async def handler(message: Message) -> None:
        if message.position == 0:
            try:
                await anyio.sleep_forever()
            except anyio.get_cancelled_exc_class():
                swallowed.append(message.position)

    consumer = limited(MemorySource(broker), handler)
    async with started(consumer) as run:
        await until(lambda: broker.acked() == [0, 1])
        assert swallowed == [0]
        assert await run.stop() is None


@pytest.mark.anyio
async def test_a_cancelled_handler_that_raises_fails_with_its_own_error() -> None:
    broker = published("a")

    async def handler(message: Message) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            raise ValueError("of its own")

    consumer = limited(MemorySource(broker), handler, dead_letters=MemoryDeadLetters(broker))
    async with started(consumer) as run:
        await until(lambda: broker.unfinished == 0)
        assert [dead_letter.error_type for dead_letter in broker.dead_letters] == ["ValueError"]
        assert await run.stop() is None


@pytest.mark.anyio
async def test_only_handlers_over_their_timeout_are_cancelled() -> None:
    clock = HandClock()
    broker = published("a")
    handler = Gated()
    consumer = limited(
        MemorySource(broker), handler, clock=clock, concurrency=2, dead_letters=MemoryDeadLetters(broker)
    )
    async with started(consumer) as run:
        await until(lambda: handler.started == [0])
        clock.now += 0.006
        broker.publish(key="b")
        await until(lambda: handler.started == [0, 1])
        clock.now += 0.006
        await until(lambda: handler.cancelled == [0])
        # The consumer's clock decides about the timeout.
        await clock.asked_again()
        assert handler.cancelled == [0]
        handler.let(1)
        # Two workers run two handlers again.
        for key in "cd":
            broker.publish(key=key)
        await until(lambda: handler.running == 2)
        handler.let(2, 3)
        await until(lambda: broker.unfinished == 0)
        assert await run.stop() is None


@pytest.mark.anyio
async def test_a_drain_waits_for_a_handler_being_cancelled(tmp_path: Path) -> None:
    broker = published("a", "a")
    gate = anyio.Event()
    cancelled = 0

    async def handler(message: Message) -> None:
        nonlocal cancelled
        try:
            await anyio.sleep_forever()
        finally:
            cancelled += 1
            with anyio.CancelScope(shield=True):
                await gate.wait()

    dead_letters = MemoryDeadLetters(broker)
    consumer = limited(MemorySource(broker), handler, dead_letters=dead_letters, history=History(tmp_path))
    async with started(consumer) as run:
        await until(lambda: cancelled)
        run.consumer.stop()
        await turns()
        assert not run.ended.is_set()
        gate.set()
        assert await run.end() is None
    # The message is neither retried nor given up, but redelivered.
    assert (cancelled, broker.unacked(), broker.dead_letters) == (1, [0, 1], [])
    assert_kept(tmp_path, left=True)


@pytest.mark.anyio
async def test_a_cancellation_by_a_drain_is_no_failure(tmp_path: Path) -> None:
    broker = published("a")
    handler = Gated()
    dead_letters = MemoryDeadLetters(broker)
    consumer = limited(
        MemorySource(broker),
        handler,
        timeout=3600.0,
        drain_timeout=0.01,
        dead_letters=dead_letters,
        history=History(tmp_path),
    )
    async with started(consumer) as run:
        await until(lambda: handler.running == 1)
        assert await run.stop() is None
    assert (handler.cancelled, broker.unacked(), broker.dead_letters) == ([0], [0], [])
    assert_kept(tmp_path, left=True)


@pytest.mark.anyio
async def test_the_timer_does_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = HandClock()
    broker = published("a")
    handler = Gated()
    sleeps: list[float] = []
    sleep = anyio.sleep

    async def noted(seconds: float) -> None:
        sleeps.append(seconds)
        await sleep(seconds)

    monkeypatch.setattr("lanes.workers.tasks.anyio.sleep", noted)
    consumer = limited(MemorySource(broker), handler, clock=clock)
    async with started(consumer) as run:
        await until(lambda: handler.running == 1)
        # Rounding may leave a tiny remainder, for which the task sleeps.
        clock.now += 0.01 - 1e-9
        await until(lambda: len(sleeps) > 3)
        assert handler.cancelled == []
        assert min(sleeps) >= 0.001
        handler.let(0)
        await until(lambda: broker.unfinished == 0)
        assert await run.stop() is None
