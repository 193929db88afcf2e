"""A thread of an adapter runs as a task of the simulator, in virtual time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty

import anyio
import anyio.lowlevel
import pytest

from memsource.adapters.threads import Ended, SteppedQueue, SteppedThread, monotonic, pause, replaced, sleep, wait
from memsource.sim.loop.choosers import Fifo
from memsource.sim.loop.event_loop import GROUP, current
from memsource.sim.loop.tasks import in_group
from memsource.sim.loop.virtual import run


def run_thread(target: Callable[[], None], after: float = 100.0) -> SteppedThread:
    """Run a thread for some virtual seconds."""
    made: list[SteppedThread] = []

    async def main() -> None:
        made.append(SteppedThread(target=target))
        made[0].start()
        await anyio.sleep(after)

    run(main, chooser=Fifo())
    return made[0]


def test_a_thread_sleeps_in_virtual_time() -> None:
    times: list[float] = []

    def target() -> None:
        sleep(2.0)
        times.append(monotonic())

    assert not run_thread(target).is_alive()
    assert times == [2.0]


def test_the_steps_of_a_thread_and_of_tasks_take_turns() -> None:
    seen: list[str] = []

    async def main() -> None:
        def target() -> None:
            for number in range(3):
                seen.append(f"thread {number}")
                pause()

        SteppedThread(target=target).start()
        for number in range(3):
            seen.append(f"task {number}")
            await anyio.lowlevel.checkpoint()

    run(main, chooser=Fifo())
    assert [each for each in seen if each.startswith("thread")] == [f"thread {number}" for number in range(3)]
    assert seen.index("thread 0") < seen.index("task 2") < seen.index("thread 2")


def test_a_queue_wakes_the_thread_that_waits_for_it() -> None:
    got: list[object] = []

    async def main() -> None:
        queue: SteppedQueue[int] = SteppedQueue()

        def target() -> None:
            got.append((queue.get(timeout=5.0), monotonic()))
            with pytest.raises(Empty):
                queue.get(timeout=5.0)
            got.append(monotonic())
            with pytest.raises(Empty):
                queue.get_nowait()

        SteppedThread(target=target).start()
        await anyio.sleep(1.0)
        queue.put(7)
        assert not queue.empty()
        await anyio.sleep(10.0)

    run(main, chooser=Fifo())
    assert got == [(7, 1.0), 6.0]


def test_a_thread_waits_for_futures() -> None:
    times: list[float] = []

    async def main() -> None:
        future: Future[int] = Future()

        def target() -> None:
            wait([future], 0.5)
            times.append(monotonic())
            wait([future])
            times.append(monotonic())

        SteppedThread(target=target).start()
        await anyio.sleep(2.0)
        future.set_result(1)
        await anyio.sleep(2.0)

    run(main, chooser=Fifo())
    assert times == [0.5, 2.0]


def test_a_frozen_group_stops_its_thread() -> None:
    times: list[float] = []

    async def main() -> None:
        def target() -> None:
            assert GROUP.get() == "a"
            while True:
                sleep(1.0)
                times.append(monotonic())

        with in_group("a"):
            SteppedThread(target=target).start()
        await anyio.sleep(2.5)
        current().freeze("a", 7.5)
        await anyio.sleep(6.0)

    run(main, chooser=Fifo())
    assert times == [1.0, 2.0, 7.5, 8.5]


def test_the_end_of_a_run_ends_a_thread_that_catches_everything() -> None:
    caught: list[BaseException] = []

    def target() -> None:
        for _ in range(2):
            try:
                sleep(1_000.0)
            except BaseException as error:
                caught.append(error)

    assert not run_thread(target, after=1.0).is_alive()
    assert [type(error) for error in caught] == [Ended, Ended]


def test_a_thread_that_is_ended_before_its_first_step_still_answers() -> None:
    answered: list[str] = []

    def target() -> None:
        try:
            sleep(1.0)
        except Ended:
            answered.append("ended")

    async def main() -> None:
        thread = SteppedThread(target=target)
        thread.start()
        thread.end()
        assert not thread.is_alive()

    run(main, chooser=Fifo())
    assert answered == ["ended"]


def test_a_thread_may_call_the_loop() -> None:
    called: list[str] = []

    async def main() -> None:
        call = current().call_soon_threadsafe
        SteppedThread(target=lambda: call(called.append, threading.current_thread().name), name="its thread").start()
        await anyio.sleep(1.0)

    run(main, chooser=Fifo())
    assert called == ["its thread"]


def test_an_error_of_a_thread_ends_the_run() -> None:
    def target() -> None:
        raise ValueError("no")

    async def main() -> None:
        thread = SteppedThread(target=target)
        thread.start()
        await thread.ended()

    with pytest.raises(ValueError, match="no"):
        run(main, chooser=Fifo())


def test_replaced_attributes_are_restored_after_the_run() -> None:
    class Module:
        one, two = 1, 2

    with replaced((Module, "one", 3), (Module, "two", 4)):
        inside = Module.one, Module.two
    assert (inside, (Module.one, Module.two)) == ((3, 4), (1, 2))
