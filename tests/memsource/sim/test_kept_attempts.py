"""Attempts in a store, through crashes, rebalances, outages, unblocks and parks, are bounded and never lost."""

from __future__ import annotations

from typing import Any

import pytest

from memsource import World, faults, simulate
from memsource.sim.plans.faults import FaultBudget
from memsource.sim.plans.plan import FAULT_KINDS
from tests.effort import is_full, runs
from tests.memsource.sim.kept_attempts import ATTEMPTS, MOVES, OUTAGE, POISONED, Job

ALL = faults(**{kind: 2 if kind in ("crash", "rebalance", "redeliver", "io_fails") else 1 for kind in FAULT_KINDS})
CRASHES = faults(crash=3, rebalance=2, commit_fails=1, letter_fails=1, slow=1)


@pytest.mark.long
@pytest.mark.parametrize("poison", ["skip", "block", "block_and_dlq"])
def test_no_checker_finds_a_violation_with_stored_attempts(poison: Any) -> None:
    @simulate(runs=8, faults=ALL, seed=500, partitions=3)
    async def test(world: World) -> None:
        await Job(world, poison).run()

    test()


@pytest.mark.long
@pytest.mark.parametrize("budget", [OUTAGE, MOVES], ids=["outage", "moves"])
@pytest.mark.parametrize("poison", ["skip", "block", "block_and_dlq"])
def test_attempts_continue_through_outages_of_the_dead_letters(poison: Any, budget: FaultBudget) -> None:
    @simulate(runs=6, faults=budget, seed=900, partitions=3)
    async def test(world: World) -> None:
        await Job(world, poison).run()

    test()


@pytest.mark.long
@pytest.mark.sliced
@pytest.mark.parametrize("personality", ["kafka", "jetstream"])
def test_a_message_has_its_attempts_once_and_one_more_for_each_crash(personality: Any) -> None:
    crashed = went_on = 0

    @simulate(runs=runs(24, least=8), faults=CRASHES, seed=70, partitions=3, personalities=[personality])
    async def test(world: World) -> None:
        nonlocal crashed, went_on
        job = Job(world, "skip")
        world.produce("orders", n=30, keys=6)
        world.workers(2, make=job)
        await world.settled()
        crashes = world.injection.happened["fault: crash"]
        crashed += crashes
        for attempts in job.calls.values():
            assert attempts == sorted(attempts), "attempts never fall"
            assert attempts[-1] <= ATTEMPTS
            assert len(attempts) <= ATTEMPTS + crashes
            went_on += len(attempts) > len(set(attempts))
        given_up = {letter.position for letter in world.dead_letters}
        assert all(position % POISONED == 0 for position in given_up), "a success at the last attempt is kept"
        world.check(state=lambda: sorted({(letter.partition, letter.position) for letter in world.dead_letters}))

    test()
    assert crashed > (8 if is_full() else 2)
    assert went_on > 0
