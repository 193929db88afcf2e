"""A process that is late in virtual time is convicted, even without rows, because only a fault suspends a process."""

from __future__ import annotations

import anyio
import pytest

from lanes import Consumer, Message, Settings
from lanes.core.policy import Policy
from memsource.sim.plans.plan import Fault, Plan
from memsource.sim.runs.run import Conditions, Run, run_plan
from memsource.sim.world.worker import App
from memsource.sim.world.world import World


async def quiet(world: World) -> None:
    async def handle(message: Message) -> None:
        await anyio.sleep(0.01)

    world.produce("orders", n=3)
    world.workers(1, App(handler=handle, settings=Settings(commit_interval=1.0)))
    await world.settled()


def late(monkeypatch: pytest.MonkeyPatch, *faults: Fault) -> Run:
    """A run of a consumer that promises a commit within a second, and commits after a minute."""
    policy = Consumer._policy

    def slower(consumer: Consumer, max_in_flight: int, *, knows_settled: bool = True) -> Policy:
        return policy(consumer, max_in_flight, knows_settled=knows_settled)._replace(commit_interval=60.0)

    with monkeypatch.context() as patched:
        patched.setattr(Consumer, "_policy", slower)
        return run_plan(Plan(faults=faults), Conditions(test=quiet))


def test_a_silent_late_commit_is_convicted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_plan(Plan(), Conditions(test=quiet)).findings == {}
    found = late(monkeypatch).findings
    assert found.keys() == {"CommitsInTime"}
    assert "deadlines passed while the process wrote nothing" in found["CommitsInTime"]


def test_a_frozen_process_may_be_late(monkeypatch: pytest.MonkeyPatch) -> None:
    assert late(monkeypatch, Fault(3, "freeze", 0, 0.1)).findings == {}
