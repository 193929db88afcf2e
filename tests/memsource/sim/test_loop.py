"""The loop in virtual time: tasks run in a fixed order, time passes when all tasks wait, and freezes stop a process."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import anyio
import pytest

from memsource.sim.errors import SimulationError
from memsource.sim.loop.choosers import Chooser, Fifo, Sparse
from memsource.sim.loop.event_loop import GROUP, current
from memsource.sim.loop.virtual import run
from memsource.sim.plans.plan import Schedule

# --- turns


def order(chooser: Chooser) -> list[str]:
    """Run three tasks of two steps each; returns the names in the order of the steps."""
    log: list[str] = []

    async def steps(name: str) -> None:
        log.append(name)
        await asyncio.sleep(0)
        log.append(name)

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            for name in "abc":
                tasks.create_task(steps(name))

    run(main, chooser=chooser)
    return log


def test_tasks_run_first_in_first_out_by_default() -> None:
    assert order(Fifo()) == list("abcabc")


def test_a_deviation_is_one_step_of_another_task() -> None:
    class FirstChoice(Fifo):
        def __init__(self) -> None:
            self.asked: list[tuple[int, list[int]]] = []

        def choose(self, turn: int, tasks: Any) -> int:
            self.asked.append((turn, list(tasks)))
            return 0

    asked = FirstChoice()
    order(asked)
    (turn, tasks), *_ = asked.asked
    assert tasks == [2, 3, 4]
    assert order(Sparse(Schedule(((turn, 2),)))) == list("cabcab")


def test_tasks_that_wake_at_once_queue_by_number() -> None:
    log: list[int] = []

    async def main() -> None:
        futures = [asyncio.get_running_loop().create_future() for _ in range(5)]

        async def wait(number: int) -> None:
            await futures[number]
            log.append(number)

        async with asyncio.TaskGroup() as tasks:
            for number in range(5):
                tasks.create_task(wait(number))
            await asyncio.sleep(1)
            for number in (3, 0, 4, 1, 2):
                futures[number].set_result(None)

    run(main, chooser=Fifo())
    assert log == [0, 1, 2, 3, 4]


def test_a_chooser_outside_of_its_range_is_named() -> None:
    class Wrong(Fifo):
        asked = 0

        def choose(self, turn: int, tasks: Any) -> int:
            self.asked += 1
            return len(tasks)

    wrong = Wrong()
    with pytest.raises(SimulationError, match="chose task 3 of 3 in turn 2: must be 0 to 2"):
        order(wrong)
    # The remaining tasks end without a choice.
    assert wrong.asked == 1


def test_a_callback_that_schedules_a_task_is_no_step_of_the_task() -> None:
    class Asked(Fifo):
        def choose(self, turn: int, tasks: Any) -> int:
            assert len(set(tasks)) == len(tasks)
            return 0

    async def main() -> None:
        task = asyncio.create_task(asyncio.sleep(0))
        asyncio.get_running_loop().call_soon(task.set_name, "other")
        await asyncio.sleep(0)
        assert task.get_name() == "other"
        await task

    run(main, chooser=Asked())


# --- time


def test_time_begins_at_zero_and_passes_only_when_no_task_is_ready() -> None:
    async def main() -> list[float]:
        times = [anyio.current_time()]
        await anyio.sleep(3600)
        times.append(anyio.current_time())
        for _ in range(10):
            await anyio.lowlevel.checkpoint()
        return [*times, anyio.current_time()]

    outcome = run(main, chooser=Fifo())
    assert (outcome.result, outcome.time) == ([0, 3600, 3600], 3600)


def test_timers_of_one_time_run_in_the_order_of_their_creation() -> None:
    log: list[int] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for number in range(20):
            loop.call_at(5 + number % 2, log.append, number)
        await asyncio.sleep(7)

    run(main, chooser=Fifo())
    assert log == [*range(0, 20, 2), *range(1, 20, 2)]


def test_cancelled_timers_are_removed_and_the_others_run() -> None:
    async def main() -> tuple[int, int]:
        loop = current()
        came: list[int] = []
        for number in range(5_000):
            loop.call_later(100 + number, came.append, number).cancel()
            if number % 10 == 0:
                loop.call_later(50, came.append, number)
        pending = len(loop._timers)
        await asyncio.sleep(10_000)
        assert came == list(range(0, 5_000, 10))
        return pending, loop._timers.cancelled

    pending, cancelled = run(main, chooser=Fifo()).result
    assert pending < 1_200
    assert cancelled == 0


def test_time_may_jump_while_tasks_are_ready() -> None:
    async def main(seconds: float) -> bool:
        with anyio.move_on_after(seconds) as scope:
            for _ in range(20):
                await asyncio.sleep(0)
        return scope.cancelled_caught

    assert not run(main, 1, chooser=Fifo()).result
    assert run(main, 1, chooser=Sparse(Schedule((), (5,)))).result
    # A jump never makes ready tasks later than a second.
    assert not run(main, 1.1, chooser=Sparse(Schedule((), (5,)))).result


def test_the_loop_tells_how_long_a_slow_processor_has_delayed_ready_tasks() -> None:
    async def main() -> tuple[float, float, float]:
        loop = current()
        await asyncio.sleep(2)
        loop.call_later(0.8, int)
        for _ in range(20):
            await asyncio.sleep(0)
        return loop.slow_since(0), loop.slow_since(2.5), loop.slow_since(loop.time())

    assert run(main, chooser=Fifo()).result == (0, 0, 0)
    assert run(main, chooser=Sparse(Schedule((), (5,)))).result == pytest.approx((0.8, 0.3, 0))


def test_no_jump_is_chosen_without_a_timer_or_a_ready_task() -> None:
    turns: list[int] = []

    class Asked(Fifo):
        def jump(self, turn: int) -> bool:
            turns.append(turn)
            return False

    async def main() -> None:
        for _ in range(5):
            await asyncio.sleep(0)
        asyncio.get_running_loop().call_at(math.inf, print)
        await asyncio.sleep(0)
        await asyncio.sleep(1)

    run(main, chooser=Asked())
    assert turns == []


def test_callbacks_that_schedule_each_other_do_not_stop_time() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()

        def again() -> None:
            if loop.time() < 2:
                loop.call_soon(again)

        again()
        await asyncio.sleep(2)

    assert run(main, chooser=Fifo()).time == 2


# --- groups


def test_a_frozen_process_takes_no_step_and_its_timers_are_due_afterwards() -> None:
    log: list[tuple[str, float]] = []

    async def works(name: str) -> None:
        for _ in range(4):
            await anyio.sleep(1)
            log.append((name, anyio.current_time()))

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            for name in "ab":
                token = GROUP.set(name)
                tasks.start_soon(works, name)
                GROUP.reset(token)
            await anyio.sleep(1.5)
            current().freeze("a", 10.25)

    run(main, chooser=Fifo())
    assert [at for name, at in log if name == "a"] == [1, 10.25, 11.25, 12.25]
    assert [at for name, at in log if name == "b"] == [1, 2, 3, 4]


def test_ready_tasks_and_child_tasks_are_frozen_with_their_group() -> None:
    log: list[float] = []

    async def child() -> None:
        log.append(anyio.current_time())

    async def parent() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(child)
            await asyncio.sleep(0)
            current().freeze("a", 5)

    async def main() -> None:
        GROUP.set("a")
        task = asyncio.create_task(parent())
        GROUP.set(None)
        await task

    run(main, chooser=Sparse(Schedule(tuple((turn, 1) for turn in range(2, 4)))))
    assert run(main, chooser=Fifo()).time == 5
    assert log[-1] in (0, 5)


def test_tasks_queue_by_number_after_a_freeze() -> None:
    log: list[int] = []

    async def main() -> None:
        futures = [asyncio.get_running_loop().create_future() for _ in range(4)]

        async def wait(number: int) -> None:
            await futures[number]
            log.append(number)

        tasks = [asyncio.create_task(wait(number)) for number in range(4)]
        await asyncio.sleep(0)
        token = GROUP.set("a")
        tasks += [asyncio.create_task(asyncio.sleep(0)) for _ in range(4)]
        GROUP.reset(token)
        await asyncio.sleep(0)
        current().freeze("a", 1)
        for number in (2, 3, 1, 0):
            futures[number].set_result(None)
        await asyncio.wait(tasks)

    run(main, chooser=Fifo())
    assert log == [0, 1, 2, 3]


def test_a_later_freeze_replaces_an_earlier_one() -> None:
    async def main(*until: float) -> float:
        async def sleeps() -> float:
            await anyio.sleep(1)
            return anyio.current_time()

        GROUP.set("a")
        task = asyncio.create_task(sleeps())
        GROUP.set(None)
        for one in until:
            current().freeze("a", one)
            await anyio.sleep(0.5)
        return await task

    assert run(main, 8, 3, chooser=Fifo()).result == 4
    assert run(main, 3, 8, chooser=Fifo()).result == 9
    assert run(main, math.inf, 0, chooser=Fifo()).result == 1.5


def test_a_cancellation_waits_for_a_frozen_task() -> None:
    async def main() -> float:
        async with anyio.create_task_group() as tasks:
            token = GROUP.set("a")
            tasks.start_soon(anyio.sleep, 100)
            GROUP.reset(token)
            await anyio.sleep(1)
            current().freeze("a", 30)
            tasks.cancel_scope.cancel()
        return anyio.current_time()

    assert run(main, chooser=Fifo()).result == 30


def test_a_task_frozen_for_ever_ends_with_the_run() -> None:
    async def main() -> None:
        GROUP.set("a")
        task = asyncio.create_task(asyncio.sleep(1))
        task.add_done_callback(lambda task: log.append(task.cancelled()))
        GROUP.set(None)
        current().freeze("a", math.inf)
        await asyncio.sleep(5)

    log: list[bool] = []
    run(main, chooser=Fifo())
    assert log == [True]
