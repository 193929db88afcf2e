"""Runs worlds from several seeds on any Python: ``python repeats.py COUNT``.

Prints a JSON array: the number of different histories of one seed, and of COUNT seeds.
"""

from __future__ import annotations

import json
import random
import sys

import anyio

from lanes import Message, Retry, Settings
from memsource.personality import PERSONALITIES
from memsource.sim.loop.choosers import mixed
from memsource.sim.plans.faults import draw, faults
from memsource.sim.plans.plan import Plan
from memsource.sim.runs.run import Conditions, run_plan
from memsource.sim.world.worker import App
from memsource.sim.world.world import World

BUDGET = faults(crash=1, rebalance=1, lost=1, freeze=1)


async def job(world: World) -> None:
    async def handle(message: Message) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.sleep, 0.01)
            with anyio.move_on_after(0.005):
                await anyio.sleep(1.0)

    world.produce("jobs", 8, keys=3, keyless=0.2)
    world.workers(2, App(handler=handle, settings=Settings(concurrency=3, retry=Retry(attempts=2, backoff=0.1))))
    await world.settled()


def digest(seed: int) -> str:
    rng = random.Random(seed)
    personality = PERSONALITIES[seed % 2]
    plan = Plan(personality, seed, draw(BUDGET, personality, 40, rng))
    run = run_plan(plan, Conditions(test=job), mixed(seed))
    assert run.findings == {}, run.findings
    return run.digest


def main(count: int) -> None:
    one = {digest(7) for _ in range(count)}
    many = {digest(seed) for seed in range(count)}
    print(json.dumps([len(one), len(many)]))


if __name__ == "__main__":
    main(int(sys.argv[1]))
