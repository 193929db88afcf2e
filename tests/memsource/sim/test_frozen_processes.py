"""A handler that ends after its grace is reported, unless its process was frozen during the grace."""

from __future__ import annotations

import anyio

from lanes import Message, Settings
from memsource.checkers import NoOverlap, check
from memsource.kafka.broker import KafkaSettings
from memsource.kafka.source import KafkaPersonality
from memsource.sim.loop.choosers import Fifo
from memsource.sim.loop.event_loop import current
from memsource.sim.plans.plan import Plan
from memsource.sim.runs.run import Conditions, Run, run_plan
from memsource.sim.world.worker import App
from memsource.sim.world.world import World

DEADLINE = 2.0
"""Virtual seconds of the deadline of the first worker's drain."""


class Jumps(Fifo):
    """Time jumps once, at the chosen opportunity after the deadline of the drain."""

    def __init__(self, at: int) -> None:
        self.left = at

    def jump(self, turn: int) -> bool:
        self.left -= current().time() >= DEADLINE
        return self.left == -1


def handed_over(*, cleanup: float, at: int) -> Run:
    """A message whose handler takes ``cleanup`` seconds when it is cancelled, and whose grace is 0.5 s."""

    async def handle(message: Message) -> None:
        try:
            await anyio.sleep(60.0)
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True):
                await anyio.sleep(cleanup)
            raise

    async def test(world: World) -> None:
        for partition in world.broker.partitions:
            world.publish("order", key="k", partition=partition)
        app = App(handler=handle, settings=Settings(drain_timeout=1.0, grace=0.5))
        world.workers(1, app)
        await anyio.sleep(DEADLINE - 1.0)
        # The second worker owns one of the two partitions from here on.
        world.workers(1, app)
        await world.settled()

    def made(_: Plan) -> KafkaPersonality:
        return KafkaPersonality(2, settings=KafkaSettings(protocol="848", heartbeat_interval=0.0))

    return run_plan(Plan("kafka", 0), Conditions(test=test, broker=made), Jumps(at))


def overlaps(run: Run) -> bool:
    (verdict,) = check(run.segments, [NoOverlap])
    return verdict.status == "violated"


def test_a_handler_that_is_cancelled_late_may_end_late() -> None:
    runs = [handed_over(cleanup=0.25, at=at) for at in range(12)]
    assert any(overlaps(run) for run in runs)
    assert [run.findings for run in runs] == [{}] * len(runs)


def test_a_handler_that_outlives_its_grace_is_reported() -> None:
    run = handed_over(cleanup=1.0, at=-2)
    assert not run.plan.schedule.jumps
    assert list(run.findings) == ["NoOverlap"]
