"""The same plan must give the same run: the same history, states and findings."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest

from lanes import Message
from memsource.sim.errors import Nondeterministic, SimulationFailed
from memsource.sim.plans.faults import faults
from memsource.sim.runs.simulate import simulate
from memsource.sim.world.world import World


async def handle(message: Message) -> None:
    await anyio.sleep(0.01)


async def caught_up(world: World) -> None:
    world.produce("orders", n=3)
    world.workers(1, handle)
    await world.settled()


def test_states_that_differ_under_equal_histories_are_nondeterministic() -> None:
    calls: list[int] = []

    @simulate(runs=3)
    async def test(world: World) -> None:
        calls.append(1)
        await caught_up(world)
        world.check(state=lambda: "always the same")
        world.check(state=lambda: {"calls": len(calls)})

    said = r"their histories are equal, but their final states differ: 'calls' is 2, expected 1\nLook for a clock"
    with pytest.raises(Nondeterministic, match=said):
        test()


def test_a_different_number_of_states_under_equal_histories_is_nondeterministic() -> None:
    calls: list[int] = []

    @simulate(runs=3)
    async def test(world: World) -> None:
        calls.append(1)
        await caught_up(world)
        for _ in calls:
            world.check(state=lambda: "always the same")

    said = "their histories are equal, but the numbers of their final states are 1 and then 2"
    with pytest.raises(Nondeterministic, match=said):
        test()


def test_findings_that_differ_under_equal_histories_are_nondeterministic() -> None:
    calls: list[int] = []

    @simulate(runs=3)
    async def test(world: World) -> None:
        calls.append(1)
        await caught_up(world)
        assert len(calls) == 1

    said = "their histories are equal, but their findings differ: nothing and then AssertionError"
    with pytest.raises(Nondeterministic, match=said):
        test()


def test_a_failure_that_does_not_repeat_is_reported_as_nondeterministic() -> None:
    calls: list[int] = []

    @simulate(runs=3)
    async def test(world: World) -> None:
        calls.append(1)
        await caught_up(world)
        # Run 0 runs twice. Run 1 fails, and its repetition passes.
        assert len(calls) != 3

    with pytest.raises(Nondeterministic, match="their findings differ: AssertionError and then nothing"):
        test()


@pytest.mark.parametrize(
    ("times", "said"),
    [(lambda crashes: 1 + crashes, "2 times, and 1"), (lambda crashes: 1 - crashes, "0 times, and 1")],
)
def test_a_different_number_of_states_without_faults_is_a_finding(times: Callable[[int], int], said: str) -> None:
    @simulate(runs=60, faults=faults(crash=1))
    async def test(world: World) -> None:
        await caught_up(world)
        for _ in range(times(world.crashes)):
            world.check(state=lambda: 1)

    with pytest.raises(
        SimulationFailed, match=rf"FaultDifferential: World\.check\(state=…\) was called {said} without f"
    ):
        test()


def test_a_test_that_fails_before_it_has_noted_its_state_has_one_finding() -> None:
    @simulate(runs=60, faults=faults(crash=1))
    async def test(world: World) -> None:
        await caught_up(world)
        assert not world.crashes
        world.check(state=lambda: 1)

    failure = test.campaign().failure
    assert failure is not None
    assert list(failure.run.findings) == ["AssertionError"]
