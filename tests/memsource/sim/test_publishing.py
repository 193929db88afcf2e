"""Outputs are published in order and at least once, through crashes, losses and failed sends."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from memsource import World, simulate
from memsource.sim.plans.plan import Fault, Plan
from memsource.sim.runs.run import Conditions, run_plan
from tests.effort import runs
from tests.memsource.sim.publishing import FAULTS, TARGET, copied, copied_in_batches


@pytest.mark.long
@pytest.mark.sliced
@pytest.mark.parametrize("personality", ["kafka", "jetstream"])
@pytest.mark.parametrize("test", [copied, copied_in_batches])
def test_no_output_is_lost_or_overtakes_another(test: Any, personality: Any) -> None:
    happened: Counter[str] = Counter()

    async def watched(world: World) -> None:
        await test(world)
        happened.update(world.injection.happened)

    simulate(runs=runs(60, least=20), faults=FAULTS, seed=11, partitions=2, personalities=[personality])(watched)()
    assert happened["fault: publish_fails"] > 5
    assert happened["fault: crash"] > 5


def test_a_test_reads_the_outputs_of_its_handler() -> None:
    @simulate(runs=3, partitions=2)
    async def test(world: World) -> None:
        await copied(world)
        first = world.published(TARGET)
        assert first and first is not world.published(TARGET)
        assert world.published("elsewhere") == []

    test()


@pytest.mark.parametrize("amount", [0.0, 1.0])
def test_a_failed_send_happens_before_or_after_the_write(amount: float) -> None:
    found: list[list[Any]] = []

    async def test(world: World) -> None:
        await copied(world)
        found.append([(output.position, output.number) for output in world.published(TARGET)])

    fault = Fault(40, "publish_fails", amount=amount)
    run = run_plan(Plan("jetstream", faults=(fault,)), Conditions(test=test))
    assert run.findings == {}
    assert run.happened["publish_failed"] >= 1
    repeated = [place for place, count in Counter(found[0]).items() if count > 1]
    assert bool(repeated) == (amount >= 1)
