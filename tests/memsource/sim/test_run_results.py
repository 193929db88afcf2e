"""A failure of the test is a finding of its run, and every other error reaches the caller."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from lanes import Message
from memsource.sim.errors import ImpossiblePlan, SimulationFailed
from memsource.sim.plans.faults import faults
from memsource.sim.plans.plan import Fault, Plan
from memsource.sim.runs.run import TIME_LIMIT, Conditions, Run, run_plan
from memsource.sim.runs.simulate import simulate
from memsource.sim.world.world import World

CRASH = (Fault(12, "crash", 0, 1.0),)


def raising(error: BaseException) -> Callable[[], None]:
    def raises() -> None:
        raise error

    return raises


def behind_a_crash(body: Callable[[], Any]) -> Run:
    """A run whose test calls ``body`` while one worker is frozen, after a crash in the middle of its handlers."""

    async def test(world: World) -> None:
        async def handle(message: Message) -> None:
            await anyio.sleep(1.0)

        world.produce("orders", n=10, keys=5)
        world.workers(2, handle)
        await anyio.sleep(0.5)
        assert world.crashes == 1
        body()

    return run_plan(Plan(faults=CRASH), Conditions(test=test))


def in_a_handler(body: Callable[[], Any]) -> Run:
    async def test(world: World) -> None:
        async def handle(message: Message) -> None:
            await anyio.sleep(0.01)
            body()

        world.produce("orders", n=3)
        world.workers(2, handle)
        await world.settled()

    return run_plan(Plan(), Conditions(test=test))


def in_a_handler_beside_a_crash(body: Callable[[], Any]) -> Run:
    async def test(world: World) -> None:
        async def handle(message: Message) -> None:
            await anyio.sleep(1.0)
            assert world.crashes == 1
            body()

        world.produce("orders", n=10, keys=5)
        world.workers(2, handle)
        await world.settled()

    return run_plan(Plan(faults=CRASH), Conditions(test=test))


@pytest.mark.parametrize("where", [behind_a_crash, in_a_handler, in_a_handler_beside_a_crash])
@pytest.mark.parametrize(
    "kind", [KeyboardInterrupt, SystemExit, GeneratorExit, pytest.skip.Exception, pytest.xfail.Exception]
)
def test_an_error_outside_of_the_test_reaches_the_caller(
    where: Callable[[Callable[[], Any]], Run], kind: type[BaseException]
) -> None:
    error = kind("enough")
    with pytest.raises(BaseException) as raised:  # noqa: PT011
        where(raising(error))
    assert raised.value is error


@pytest.mark.parametrize("where", [behind_a_crash, in_a_handler])
def test_a_failure_raised_by_pytest_is_a_finding(where: Callable[[Callable[[], Any]], Run]) -> None:
    run = where(lambda: pytest.fail("the total is wrong"))
    assert run.findings["Failed"].endswith(": the total is wrong")
    assert any(isinstance(cause, pytest.fail.Exception) for cause in run.causes)


@pytest.mark.long
def test_a_failure_raised_by_pytest_is_shrunk() -> None:
    @simulate(runs=40, faults=faults(crash=2, rebalance=1))
    async def test(world: World) -> None:
        async def handle(message: Message) -> None:
            await anyio.sleep(0.01)

        world.produce("orders", n=10)
        world.workers(1, handle)
        await world.settled()
        if world.crashes:
            pytest.fail("the worker has crashed")

    failure = test.campaign().failure
    assert failure is not None
    assert failure.run.findings == {"Failed": "the test raised an exception: the worker has crashed"}
    assert [fault.kind for fault in failure.run.plan.faults] == ["crash"]
    with pytest.raises(SimulationFailed, match="the worker has crashed"):
        test()


def test_an_exception_group_of_a_test_is_searched() -> None:
    async def test(world: World) -> None:
        async def waits_wrongly() -> None:
            world.workers(0, lambda message: None)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.sleep, 5.0)
            tasks.start_soon(waits_wrongly)

    with pytest.raises(ImpossiblePlan, match=r"workers\(0\)"):
        run_plan(Plan(), Conditions(test=test))


def test_a_cancellation_that_the_test_itself_raises_is_a_finding() -> None:
    async def test(world: World) -> None:
        task = asyncio.create_task(asyncio.sleep(5.0))
        await asyncio.sleep(0)
        task.cancel()
        await task

    assert list(run_plan(Plan(faults=CRASH), Conditions(test=test)).findings) == ["CancelledError"]


def test_ctrl_c_while_a_worker_is_frozen_ends_the_run() -> None:
    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    went_on: list[str] = []

    async def test(world: World) -> None:
        async def handle(message: Message) -> None:
            await anyio.sleep(1.0)
            went_on.append("a handler")

        world.produce("orders", n=10, keys=5)
        world.workers(2, handle)
        await anyio.sleep(0.5)
        interrupt()
        await anyio.sleep(1_000.0)
        went_on.append("behind it")

    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_plan(Plan(faults=CRASH), Conditions(test=test))
    finally:
        signal.signal(signal.SIGINT, before)
    assert went_on == []


def forever() -> Callable[[World], Any]:
    async def test(world: World) -> None:
        async def handle(message: Message) -> None:
            await anyio.sleep(0.01)

        world.produce("orders", n=5)
        world.workers(1, handle)
        await anyio.Event().wait()

    return test


def test_an_endless_wait_is_a_finding_that_names_its_place() -> None:
    run = run_plan(Plan(), Conditions(test=forever(), time_limit=600.0))
    found = run.findings["Overtime"]
    assert "has not ended in 600 virtual seconds (time_limit=): it waits at " in found
    assert f"{__file__}:" in found.splitlines()[0]
    assert found.splitlines()[0].endswith(" in test, and the other tasks")
    assert "of 'w-1' waits at " in found
    assert run.seconds == 600.0


@pytest.mark.long
def test_the_default_time_limit_is_a_day() -> None:
    assert inspect.signature(simulate).parameters["time_limit"].default == TIME_LIMIT == 86_400.0
    run = run_plan(Plan(), Conditions(test=forever()))
    assert "the test has not ended in 86400 virtual seconds" in run.findings["Overtime"]
    assert run.seconds == 86_400.0
    with pytest.raises(SimulationFailed, match="Overtime: the test has not ended in 60 virtual seconds"):
        simulate(runs=2, time_limit=60.0)(forever())()


def test_the_time_limit_ends_with_the_test() -> None:
    async def test(world: World) -> None:
        async def handle(message: Message) -> None:
            await anyio.sleep(20.0)

        world.produce("orders", n=1)
        world.workers(1, handle)
        await anyio.sleep(9.0)

    run = run_plan(Plan(), Conditions(test=test, time_limit=10.0))
    assert run.findings == {}
    assert run.seconds > 15.0
