"""A doorbell wakes its waiting task at a ring or after a time, and keeps its timer for later waits."""

from __future__ import annotations

import asyncio
import math

import anyio
import pytest

from lanes.loops import Doorbell, turn_of_loop

LONG = 3_600.0


@pytest.mark.anyio
async def test_a_ring_of_the_doorbell_ends_the_wait() -> None:
    bell = Doorbell()
    for seconds in (math.inf, LONG):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(bell.wait, seconds)
            await anyio.wait_all_tasks_blocked()
            bell.ring()
            bell.ring()
    assert repr(bell) == "<Doorbell>"


@pytest.mark.anyio
async def test_the_wait_for_the_doorbell_ends_at_its_time() -> None:
    bell = Doorbell()
    for seconds in (-1.0, 0.0, 0.01):
        await bell.wait(seconds)


@pytest.mark.anyio
async def test_a_ring_while_no_task_waits_has_no_effect() -> None:
    bell = Doorbell()
    bell.ring()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bell.wait)
        await anyio.wait_all_tasks_blocked()
        assert repr(bell) == "<Doorbell, waiting>"
        bell.ring()


@pytest.mark.anyio
async def test_a_wait_can_be_cancelled_and_repeated() -> None:
    bell = Doorbell()
    for _ in range(3):
        with anyio.move_on_after(0) as scope:
            await bell.wait()
        assert scope.cancelled_caught
    await bell.wait(0.01)


class Timers:
    """The timers of an event loop, whose time a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop = asyncio.get_running_loop()
        self.now = 0.0
        self.set: list[float] = []
        self.handles: list[asyncio.TimerHandle] = []
        monkeypatch.setattr(self.loop, "time", lambda: self.now)
        call_at = self.loop.call_at

        def noted(when: float, *arguments: object, **named: object) -> asyncio.TimerHandle:
            self.set.append(when)
            self.handles.append(call_at(when, *arguments, **named))  # type: ignore[arg-type]
            return self.handles[-1]

        monkeypatch.setattr(self.loop, "call_at", noted)

    async def turns(self) -> None:
        """Give every task its turn."""
        for _ in range(5):
            await asyncio.sleep(0)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_timer_stays_for_later_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    timers, bell, ends = Timers(monkeypatch), Doorbell(), list[float]()

    async def wait(seconds: float) -> None:
        await bell.wait(seconds)
        ends.append(timers.now)

    for timers.now in (0.0, 1.0, 2.0):
        task = asyncio.create_task(wait(10))
        await timers.turns()
        bell.ring()
        await task
    assert timers.set == [10.0], "one timer for three waits"
    task = asyncio.create_task(wait(10))
    await timers.turns()
    timers.now = 10.0
    await timers.turns()
    assert not task.done() and timers.set == [10.0, 12.0], "the timer starts again for the rest of the time"
    timers.now = 12.0
    await task
    task = asyncio.create_task(wait(100))
    await timers.turns()
    bell.ring()
    await task
    task = asyncio.create_task(wait(5))
    await timers.turns()
    timers.now = 17.0
    await task
    assert timers.set == [10.0, 12.0, 112.0, 17.0], "a wait that ends sooner sets its own timer"
    assert ends == [0.0, 1.0, 2.0, 12.0, 12.0, 17.0]


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_cancelled_wait_leaves_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    timers, bell = Timers(monkeypatch), Doorbell()
    task = asyncio.create_task(bell.wait(LONG))
    await timers.turns()
    task.cancel()
    await asyncio.wait([task])
    (timer,) = timers.handles
    assert timer.cancelled(), "a timer would keep the source of an ended run alive"


@pytest.mark.anyio
async def test_a_turn_of_the_loop_lets_the_other_tasks_run_and_can_be_cancelled() -> None:
    turn, ran = turn_of_loop(), list[int]()

    async def other(number: int) -> None:
        ran.append(number)

    async with anyio.create_task_group() as tasks:
        for number in range(3):
            tasks.start_soon(other, number)
        assert ran == []
        await turn()
        await turn()  # trio may run this task before others of the same turn
        assert sorted(ran) == [0, 1, 2]
    with anyio.CancelScope() as scope:
        scope.cancel()
        # On asyncio the cancellation may arrive one turn after the call.
        for _ in range(3):
            await turn()
        raise AssertionError("a cancelled task goes on")
    assert scope.cancelled_caught
