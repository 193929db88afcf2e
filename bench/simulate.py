"""The simulator for a user: runs of whole worlds a second, and a campaign from its first run to its last.

Crash sweep: each run has 40 messages, two workers of 4 or 100 handlers, and a crash at the next boundary. The baseline
of the sweep is as many runs without a crash, each with another seed. The campaign has 500 runs of 200 messages and two
workers, with the faults of the example in memsource/README.md.
"""

from __future__ import annotations

import time
from collections import defaultdict
from functools import partial
from itertools import islice
from typing import Final

import anyio

from bench.figures import Effort, Figure, cost, interleaved, rate
from lanes import Message, Settings
from memsource.sim.plans.faults import crash_sweep, faults
from memsource.sim.plans.plan import Plan
from memsource.sim.runs.run import Conditions, run_plan
from memsource.sim.runs.simulate import simulate
from memsource.sim.world.worker import App
from memsource.sim.world.world import World

RUNS_GOAL: Final = 100
SECONDS_GOAL: Final = 20
SWEEP, CAMPAIGN = 100, 500
FEW, MANY = 4, 100
"""Number of handlers of a worker that may run at once: a low number, and the default."""


def figures(effort: Effort) -> list[Figure]:
    """Measure the cases, each with its baseline."""
    runs = max(1, effort.messages(SWEEP * 1_000) // 1_000)
    clean, swept, default, many = interleaved(
        [
            partial(_clean, runs, FEW),
            partial(_swept, runs, FEW),
            partial(_clean, runs, MANY),
            partial(_swept, runs, MANY),
        ],
        effort.repeats,
    )
    # The campaign never waits, so on a quiet machine its CPU time is the user's waiting time. One measurement is
    # enough, because a campaign has many runs.
    campaign = max(3, effort.messages(CAMPAIGN * 1_000) // 1_000)
    seconds = _campaign(campaign)
    return [
        rate("simloop crash sweep", "runs/s of CPU", swept, clean).at_least(RUNS_GOAL),
        rate("simloop crash sweep, 100 handlers", "runs/s of CPU", many, default).at_least(RUNS_GOAL),
        cost("simloop simulate(500)", "s of CPU", seconds * CAMPAIGN / campaign, CAMPAIGN / default, SECONDS_GOAL),
    ]


async def _test(world: World, n: int, concurrency: int) -> None:
    booked: dict[bytes | None, set[int]] = defaultdict(set)

    async def handle(message: Message) -> None:
        await anyio.sleep(0.01)
        booked[message.key].add(message.position)

    world.produce("orders", n, keys=max(1, n // 10))
    world.workers(2, App(handler=handle, settings=Settings(concurrency=concurrency)))
    await world.settled()
    world.check(state=lambda: {str(key): sorted(positions) for key, positions in booked.items()})


def _clean(runs: int, concurrency: int) -> float:
    conditions = _conditions(concurrency)
    begin = time.thread_time()
    for seed in range(runs):
        _run(Plan(seed=seed), conditions)
    return runs / (time.thread_time() - begin)


def _swept(runs: int, concurrency: int) -> float:
    conditions = _conditions(concurrency)
    boundaries = run_plan(Plan(), conditions).boundaries
    begin = time.thread_time()
    for crash in islice(crash_sweep(boundaries), runs):
        _run(Plan(faults=crash), conditions)
    return min(runs, boundaries) / (time.thread_time() - begin)


def _conditions(concurrency: int) -> Conditions:
    return Conditions(test=lambda world: _test(world, 40, concurrency))


def _run(plan: Plan, conditions: Conditions) -> None:
    run = run_plan(plan, conditions)
    assert not run.findings, run.findings


def _campaign(runs: int) -> float:
    made = simulate(runs=runs, faults=faults(crash=1, rebalance=2, redeliver=2))(_example)
    begin = time.thread_time()
    report = made.campaign()
    assert report.failure is None, report.failure
    return time.thread_time() - begin


async def _example(world: World) -> None:
    await _test(world, 200, MANY)
