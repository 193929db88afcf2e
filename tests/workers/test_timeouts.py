"""Async handlers that exceed their timeout are cancelled, awaited and failed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from lanes import Consumer, HandlerHalted, History, Message, Retry
from lanes.workers.overtime import AGAIN, PATIENCE
from memsource import MemoryDeadLetters, MemorySource
from tests.fakes.grouped import HandClock
from tests.fakes.support import TIMEOUT, Gated, consumer_of, published, started, turns, until
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
async def test_the_timer_of_timeouts_does_not_wake_up_without_need(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.anyio
@pytest.mark.parametrize("decode", [None, lambda message: None])
async def test_a_handler_that_ignores_its_cancellation_is_reported_once(
    decode: Any, caplog: pytest.LogCaptureFixture
) -> None:
    clock = HandClock()
    broker = published("a")
    cancelled: list[int] = []
    gate: list[bool] = []

    async def stubborn(message: Message) -> None:
        while not gate:
            try:
                await anyio.sleep_forever()
            except anyio.get_cancelled_exc_class():
                cancelled.append(message.position)

    def reports() -> list[str]:
        return [record.message for record in caplog.records if "after its cancellation" in record.message]

    consumer = limited(MemorySource(broker), stubborn, clock=clock, decode=decode, unhealthy_after=60.0)
    async with started(consumer) as run:
        await until(lambda: clock.asked > 3 and consumer.status().running)
        clock.now += 0.02
        await until(lambda: cancelled)
        clock.now += PATIENCE - 0.1
        await clock.asked_again()
        assert reports() == []
        clock.now += 7.1
        await until(lambda: reports())
        clock.now += 60
        await clock.asked_again()
        assert len(reports()) == 1
        assert reports()[0].startswith(
            "memory/0 position 0 attempt 1: the handler stubborn has not ended 12.0 s after its cancellation by "
            "timeout=0.01 s"
        )
        (reason,) = consumer.health().reasons
        assert "memory/0 position 0" in reason
        gate.append(True)
        # The handler is cancelled once more.
        clock.now += AGAIN
        await until(lambda: broker.unfinished == 0)
        assert await run.stop() is None


@pytest.mark.anyio
async def test_a_batch_handler_that_ignores_its_cancellation_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("lanes.workers.batches.PATIENCE", 0.02)
    clock = HandClock()
    broker = published("a")
    gate: list[bool] = []

    async def stubborn(messages: list[Message]) -> None:
        while not gate:
            try:
                await anyio.sleep_forever()
            except anyio.get_cancelled_exc_class():
                clock.now += 0.001

    consumer = limited(MemorySource(broker), stubborn, clock=clock, batch=2)
    async with started(consumer) as run:
        await until(lambda: "after its cancellation" in caplog.text)
        await anyio.sleep(0.06)
        assert caplog.text.count("position 0 attempt 1: the handler stubborn has not ended") == 1
        gate.append(True)
        await until(lambda: broker.unfinished == 0)
        assert await run.stop() is None


class Stubborn:
    """A handler that swallows each cancellation in a loop, until ``released``."""

    def __init__(self) -> None:
        self.cancellations = 0
        self.released = False

    async def __call__(self, messages: object) -> None:
        while not self.released:
            try:
                await anyio.sleep_forever()
            except anyio.get_cancelled_exc_class():
                self.cancellations += 1

    async def rests(self) -> None:
        """Wait until almost no cancellation arrives any more."""
        await until(lambda: self.cancellations)
        with anyio.fail_after(TIMEOUT):
            before = -1_000
            while self.cancellations - before > 20:
                before = self.cancellations
                await anyio.sleep(0.3)


@pytest.mark.anyio
@pytest.mark.parametrize("batch", [None, 2])
async def test_a_handler_that_swallows_its_cancellations_in_a_loop_is_cancelled_ever_more_rarely(
    batch: int | None,
) -> None:
    broker = published("a")
    handler = Stubborn()
    consumer = limited(MemorySource(broker), handler, batch=batch)
    async with started(consumer) as run:
        await handler.rests()
        # The cancellation goes on, at a low rate.
        before = handler.cancellations
        await until(lambda: handler.cancellations > before)
        handler.released = True
        await until(lambda: broker.unfinished == 0)
        # The worker handles further messages, and its next handler is cancelled too.
        handler.released = False
        before = handler.cancellations
        broker.publish(key="a")
        await until(lambda: handler.cancellations > before)
        handler.released = True
        await until(lambda: broker.unfinished == 0)
        assert await run.stop() is None


@pytest.mark.anyio
@pytest.mark.parametrize("batch", [None, 2])
async def test_a_stop_at_once_reaches_a_handler_that_is_seldom_cancelled(
    batch: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = Stubborn()
    consumer = limited(MemorySource(published("a")), handler, batch=batch)
    async with started(consumer) as run:
        await handler.rests()
        for workers in ("tasks", "batches"):
            monkeypatch.setattr(f"lanes.workers.{workers}.AGAIN", 3_600.0)
        # The watch sleeps for the new time after its next cancellation.
        before = handler.cancellations
        await until(lambda: handler.cancellations > before)
        handler.released = True
        consumer.stop(at_once=True)
        await run.end()
