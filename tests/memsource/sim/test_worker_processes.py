"""``World.workers``: the memory of a process ends with it, and shared memory does not."""

from __future__ import annotations

from typing import Any

import pytest

from lanes import Message, Settings
from memsource.sim.errors import ImpossiblePlan, Refused
from memsource.sim.plans.faults import faults
from memsource.sim.plans.plan import Fault, Plan
from memsource.sim.runs.run import Conditions, run_plan
from memsource.sim.runs.simulate import Simulation, simulate
from memsource.sim.world.worker import App
from memsource.sim.world.world import World


class Booking:
    """A handler that keeps its bookings in memory, and loses them in a crash."""

    def __init__(self, world: World, rows: dict[Any, int]) -> None:
        self.world = world
        self.rows = rows
        self.seen: set[tuple[int, int]] = set()

    async def handle(self, message: Message) -> None:
        place = message.partition.id.number, message.position
        if place not in self.seen:
            await self.world.io("write", 0.01)
            self.rows[message.key] = self.rows.get(message.key, 0) + 1
            self.seen.add(place)
            await self.world.io("commit", 0.01)


def booking(*, shared: bool) -> Simulation:
    @simulate(runs=60, faults=faults(crash=2))
    async def test(world: World) -> None:
        rows: dict[Any, int] = {}
        world.produce("orders", n=30, keys=5)
        if shared:
            world.workers(1, Booking(world, rows).handle)
        else:
            world.workers(1, make=lambda: Booking(world, rows).handle)
        await world.settled()
        world.check(state=lambda: rows)

    return test


@pytest.mark.long
def test_a_handler_from_a_factory_loses_its_memory_with_its_process() -> None:
    failure = booking(shared=False).campaign().failure
    assert failure is not None
    assert list(failure.run.findings) == ["FaultDifferential"]
    assert [fault.kind for fault in failure.run.plan.faults] == ["crash"]


@pytest.mark.long
def test_a_passed_handler_is_shared_by_all_processes() -> None:
    assert booking(shared=True).campaign().failure is None


def test_each_start_makes_a_handler_in_its_own_process() -> None:
    made: list[list[int]] = []

    async def test(world: World) -> None:
        def make() -> App:
            handled: list[int] = []
            made.append(handled)

            async def handle(message: Message) -> None:
                handled.append(message.position)
                await world.io("write", 0.5)

            return App(handler=handle, settings=Settings(concurrency=3))

        world.produce("orders", n=12, keys=12)
        workers = world.workers(2, make=make)
        assert [worker.app.settings for worker in workers] == [Settings(concurrency=3)] * 2
        assert len(made) == 2
        await world.settled()

    run = run_plan(Plan(faults=(Fault(20, "crash", 0, 1.0),)), Conditions(test=test))
    assert (run.findings, run.crashes, len(made)) == ({}, 1, 3)
    assert made[2]


def test_a_factory_that_fails_when_a_process_starts_again_is_a_finding() -> None:
    async def test(world: World) -> None:
        async def handle(message: Message) -> None:
            await world.io("write", 0.5)

        def make() -> Any:
            if world.crashes:
                raise OSError("no configuration")
            return handle

        world.produce("orders", n=5)
        world.workers(1, make=make)
        await world.settled()

    run = run_plan(Plan(faults=(Fault(10, "crash", 0, 1.0),)), Conditions(test=test))
    assert run.findings["OSError"] == "w-2 could not start again: no configuration"


@pytest.mark.parametrize("later", [False, True])
def test_a_factory_must_make_a_handler(later: bool) -> None:
    def of(other: Any) -> Conditions:
        async def test(world: World) -> None:
            async def handle(message: Message) -> None:
                await world.io("write", 0.5)

            world.produce("orders", n=5)
            world.workers(1, make=lambda: handle if later and not world.crashes else other)
            await world.settled()

        return Conditions(test=test)

    async def factory() -> None:
        """A factory that must be awaited."""

    plan = Plan(faults=(Fault(10, "crash", 0, 1.0),))
    name = "w-2" if later else "w-1"
    said = f"^make= of {name}: 3 is neither a handler nor an App; pass a handler or an App"
    with pytest.raises(ImpossiblePlan, match=said):
        run_plan(plan, of(3))
    with pytest.raises(ImpossiblePlan, match=r"coroutine object .* is neither a handler nor an App"):
        run_plan(plan, of(factory()))
    with pytest.raises(Refused, match="is a plain function, which runs in threads"):
        run_plan(plan, of(lambda message: None))


def test_handler_and_factory_exclude_each_other() -> None:
    async def handle(message: Message) -> None:
        """Never called."""

    async def test(world: World) -> None:
        with pytest.raises(ImpossiblePlan, match=r"workers\(2\) with neither of handler and make=: pass "):
            world.workers(2)
        with pytest.raises(ImpossiblePlan, match=r"workers\(2\) with both of handler and make=: pass "):
            world.workers(2, handle, make=lambda: handle)
        with pytest.raises(
            ImpossiblePlan, match=r"workers\(app\): 'handle' is neither a handler nor an App; pass a handler or an App"
        ):
            world.workers(2, "handle")  # type: ignore[arg-type]
        assert world.members == []

    assert run_plan(Plan(), Conditions(test=test)).findings == {}
