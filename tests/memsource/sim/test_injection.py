"""A fault counts when it strikes, not when it is armed, and faults go on when more messages are produced."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import anyio
import pytest

from lanes import Message, Retry, Settings
from memsource.personality import PERSONALITIES, PersonalityName
from memsource.sim.errors import ImpossiblePlan
from memsource.sim.loop.virtual import until
from memsource.sim.plans.faults import faults
from memsource.sim.plans.plan import IMPOSSIBLE_FAULTS, Fault, Plan
from memsource.sim.runs.run import Conditions, Run, run_plan
from memsource.sim.runs.simulate import simulate
from memsource.sim.world.injection import Injection
from memsource.sim.world.worker import App
from memsource.sim.world.world import World

both = pytest.mark.parametrize("personality", PERSONALITIES)
RETRY = Settings(retry=Retry(attempts=3, backoff=0.1))


def run_with(*found: Fault, io: bool = False, poison: bool = False, personality: PersonalityName = "kafka") -> Run:
    """A run of 10 messages, with calls of ``World.io`` and dead letters or without."""

    async def test(world: World) -> None:
        async def handle(message: Message) -> None:
            if io:
                await world.io("the table", 0.01)
            await anyio.sleep(0.01)
            if poison:
                raise ValueError("never")

        world.produce("orders", n=10, keys=3)
        world.workers(2, App(handler=handle, settings=RETRY, dead_letters=True))
        await world.settled()

    return run_plan(Plan(personality, faults=tuple(sorted(found))), Conditions(test=test))


@both
@pytest.mark.parametrize("kind", ["io_fails", "letter_fails"])
def test_an_armed_fault_that_never_strikes_has_not_happened(personality: PersonalityName, kind: Any) -> None:
    run = run_with(Fault(5, kind), personality=personality)
    assert (run.findings, run.happened[f"fault: {kind}"], run.moments) == ({}, 0, [])


@both
@pytest.mark.parametrize(
    ("kind", "event"), [("io_fails", "retry"), ("letter_fails", ""), ("commit_fails", "commit_failed")]
)
def test_a_fault_counts_when_it_strikes(personality: PersonalityName, kind: Any, event: str) -> None:
    run = run_with(Fault(0, kind), io=True, poison=kind == "letter_fails", personality=personality)
    assert (run.findings, run.happened[f"fault: {kind}"]) == ({}, 1)
    (moment,) = run.moments
    # The fault was armed before the first message.
    assert moment.at > min(row.mono for segment in run.segments for row in segment.rows if row.event == "started")
    assert moment.whom in ("w-1", "w-2")
    if event and (personality, kind) != ("jetstream", "commit_fails"):
        assert run.happened[event] >= 1


@pytest.mark.parametrize(("amount", "left"), [(0.0, 10), (1.0, 0)])
def test_a_failed_commit_may_have_been_made(amount: float, left: int) -> None:
    found: list[int] = []

    async def test(world: World) -> None:
        async def handle(message: Message) -> None:
            await anyio.sleep(0.01)

        world.produce("orders", n=10, keys=3)
        world.workers(1, handle)
        for _ in range(10_000):
            if not world.injection.moments:
                await anyio.sleep(0.001)
        found.append(len(world.broker.unfinished))
        await world.settled()

    run = run_plan(Plan(faults=(Fault(0, "commit_fails", 0, amount),)), Conditions(test=test))
    assert (run.findings, found) == ({}, [left])


def test_two_armed_faults_strike_one_after_the_other() -> None:
    run = run_with(
        Fault(0, "io_fails"), Fault(1, "io_fails"), Fault(2, "commit_fails"), Fault(3, "commit_fails"), io=True
    )
    assert run.findings == {}
    assert run.happened["fault: io_fails"] == 2


@pytest.mark.long
def test_the_last_fault_of_a_plan_has_its_chance_to_strike() -> None:
    boundaries = run_with(poison=True).boundaries
    struck = [run_with(Fault(at, "letter_fails"), poison=True).happened["fault: letter_fails"] for at in range(30)]
    assert boundaries > 30
    assert struck == [1] * 30


def test_an_armed_fault_ends_with_its_worker() -> None:
    injection = Injection([Fault(0, "commit_fails"), Fault(0, "io_fails")])
    first, second = Fault(0, "commit_fails"), Fault(1, "commit_fails")
    injection.performed += [first, second]
    injection.arm(first, "w-1")
    injection.arm(second, "w-2")
    assert (injection.over, repr(injection)) == (False, "<Injection: 2 of 2 faults, 2 armed>")
    injection.disarm("w-1")
    assert (injection.take("commit_fails", "w-1"), injection.take("commit_fails", "w-2")) == (None, second)
    assert injection.over


def test_the_campaign_names_faults_that_never_struck() -> None:
    @simulate(runs=30, faults=faults(io_fails=2), sometimes=["fault: io_fails"])
    async def test(world: World) -> None:
        async def handle(message: Message) -> None:
            await anyio.sleep(0.01)

        world.produce("orders", n=5)
        world.workers(1, handle)
        await world.settled()

    with pytest.raises(ImpossiblePlan, match="fault: io_fails: never happened in 30 runs, although sometimes="):
        test()


@both
def test_faults_continue_when_more_messages_are_produced(personality: PersonalityName) -> None:
    at: list[tuple[int, float]] = []

    async def test(world: World) -> None:
        async def handle(message: Message) -> None:
            await world.io("the table", 0.01)

        world.produce("orders", n=10, keys=3)
        world.workers(2, App(handler=handle, settings=RETRY))
        await world.settled()
        at.append((world.boundaries, world.now))
        if world.plan.seed == 0:
            world.produce("orders", n=30, keys=3)
        await world.settled()
        at.append((world.boundaries, world.now))

    run_plan(Plan(personality), Conditions(test=test))
    (first, since), (second, _) = at
    assert second > first + 30
    middle = Fault((first + second) // 2, "rebalance")
    for seed, happened in ((0, 1), (1, 0)):
        run = run_plan(Plan(personality, seed, faults=(middle,)), Conditions(test=test))
        assert (run.findings, run.happened["fault: rebalance"]) == ({}, happened)
        assert [moment.at > since for moment in run.moments] == [True] * happened


@pytest.mark.long
def test_a_handler_that_is_wrong_only_in_the_second_phase_is_convicted() -> None:
    @simulate(runs=100, faults=faults(crash=2, rebalance=2))
    async def test(world: World) -> None:
        totals: Counter[str] = Counter()
        later = False

        async def handle(message: Message) -> None:
            await world.io("read", 0.01)
            if later:
                totals[str(message.key)] += 1
            await world.io("write", 0.01)

        world.produce("orders", n=20, keys=5)
        world.workers(2, handle)
        await world.settled()
        later = True
        world.produce("orders", n=40, keys=5)
        await world.settled()
        world.check(state=lambda: totals)

    failure = test.campaign().failure
    assert failure is not None
    assert list(failure.run.findings) == ["FaultDifferential"]


def test_an_armed_fault_of_a_dead_process_is_not_awaited() -> None:
    ended: list[float] = []

    async def test(world: World) -> None:
        async def handle(message: Message) -> None:
            await anyio.sleep_forever()

        world.produce("orders", n=5)
        world.workers(1, handle)
        await world.settled(timeout=600.0)
        ended.append(world.now)

    plan = Plan(faults=(Fault(3, "commit_fails"), Fault(5, "crash", 0, 1.0)))
    run = run_plan(plan, Conditions(test=test))
    assert list(run.findings) == ["CaughtUp"]
    assert 600.0 < ended[0] < 700.0


@pytest.mark.parametrize("who", ["a worker", "the test"])
def test_only_messages_of_the_test_bring_new_faults(who: str) -> None:
    async def test(world: World) -> None:
        async def again(message: Message | None) -> None:
            await anyio.sleep(10.0)
            world.publish(b"again", key=b"a")

        async def handle(message: Message) -> None:
            await anyio.sleep(30.0)
            if who == "a worker" and message.value != b"again":
                keep.add(asyncio.create_task(again(message)))

        keep: set[asyncio.Task[None]] = set()
        world.produce("orders", n=1)
        world.workers(1, handle)
        if who == "the test":
            keep.add(asyncio.create_task(again(None)))
        await world.settled()
        await anyio.sleep(60.0)
        assert len(world.broker.records) == 2
        world.check(state=lambda: 1)
        assert not world.broker.unfinished

    assert run_plan(Plan(), Conditions(test=test)).findings == {}


@both
def test_a_restarted_server_forgets_and_nothing_is_lost(personality: PersonalityName) -> None:
    handled: Counter[tuple[int, int]] = Counter()

    async def test(world: World) -> None:
        async def handle(message: Message) -> None:
            await anyio.sleep(0.01)
            handled[message.partition.id.number, message.position] += 1

        world.produce("orders", n=40, keys=4)
        world.workers(1, handle)
        await world.settled()

    if personality == "kafka":
        with pytest.raises(ImpossiblePlan, match="'restart' never happens on 'kafka'"):
            Plan("kafka", faults=(Fault(1, "restart"),))
        return
    run = run_plan(Plan(personality), Conditions(test=test))
    assert set(handled.values()) == {1}
    for at in range(0, run.boundaries, 7):
        handled.clear()
        run = run_plan(Plan(personality, faults=(Fault(at, "restart"),)), Conditions(test=test))
        assert (run.findings, len(handled)) == ({}, 40)


@both
@pytest.mark.parametrize("kind", ["rebalance", "lost", "redeliver", "restart", "freeze", "slow", "clock_jump"])
def test_a_fault_without_a_target_has_not_happened(personality: PersonalityName, kind: Any) -> None:
    if kind in IMPOSSIBLE_FAULTS[personality]:
        return
    # No partition is owned yet, nothing was delivered, or the fault takes no time. Only a restart needs no target.
    run = run_with(Fault(0, kind), personality=personality)
    assert (run.findings, run.happened[f"fault: {kind}"], len(run.moments)) == ({}, *[int(kind == "restart")] * 2)
    amount = 1.0 if kind in ("freeze", "slow", "clock_jump") else 0.0
    met = [run_with(Fault(at, kind, 0, amount), personality=personality) for at in range(8, 40, 4)]
    assert all(run.findings == {} for run in met)
    assert any(run.happened[f"fault: {kind}"] == 1 for run in met)


@both
def test_a_shorter_freeze_wakes_a_worker_no_earlier(personality: PersonalityName) -> None:
    woke: list[float] = []

    async def test(world: World) -> None:
        async def handle(message: Message) -> None:
            await anyio.sleep(1.0)
            woke.append(world.now)

        world.produce("orders", n=1)
        world.workers(1, handle)
        await until(lambda: world.members[0].consumer.ready and world.members[0].consumer.status().running > 0, 60.0)
        for seconds in (40.0, 2.0):
            world.perform(Fault(0, "freeze", 0, seconds), world.members[0])
        await world.settled()

    run = run_plan(Plan(personality), Conditions(test=test))
    assert run.findings == {}
    assert woke[0] >= 40.0
