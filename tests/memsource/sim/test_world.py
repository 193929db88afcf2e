"""A user's test drives a world: the test starts workers, produces messages, and reads states under every fault."""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict
from typing import Any, Literal

import anyio
import pytest

from lanes import Message, Retry, Settings, Term
from memsource.personality import PERSONALITIES, PersonalityName
from memsource.sim.errors import ImpossiblePlan, Refused
from memsource.sim.loop.choosers import RandomWalk
from memsource.sim.plans.plan import IMPOSSIBLE_FAULTS, Fault, Plan
from memsource.sim.runs.run import Conditions, Run, run_plan
from memsource.sim.world.injection import InjectedFailure
from memsource.sim.world.worker import App
from memsource.sim.world.world import World

both = pytest.mark.parametrize("personality", PERSONALITIES)


class Ledger:
    """The table of a correct handler: the progress of each key. A repetition changes nothing."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[int, int]] = Counter()
        self.keys: dict[str, list[int]] = defaultdict(list)

    async def handle(self, message: Message) -> None:
        place = message.partition.id.number, message.position
        self.calls[place] += 1
        await anyio.sleep(0.01)
        if message.position not in self.keys[str(message.key)]:
            self.keys[str(message.key)].append(message.position)

    def snapshot(self) -> dict[str, list[int]]:
        return dict(sorted(self.keys.items()))


def handled(run: Run) -> int:
    """Number of messages in the ledger."""
    (state,) = run.states
    assert isinstance(state, dict)
    return sum(len(positions) for positions in state.values())


def world_of(*faults: Fault, personality: PersonalityName, seed: int = 0, n: int = 40, **settings: Any) -> Run:
    """A run of 40 messages and two workers that keep a ledger."""

    async def test(world: World) -> None:
        ledger = Ledger()
        world.produce("orders", n, keys=5)
        world.workers(2, App(handler=ledger.handle, settings=Settings(**settings)))
        await world.settled()
        world.check(state=ledger.snapshot)

    return run_plan(Plan(personality, seed, tuple(sorted(faults))), Conditions(test=test))


@both
def test_a_world_without_faults_handles_every_message_and_keeps_the_promises(personality: PersonalityName) -> None:
    run = world_of(personality=personality)
    assert run.findings == {}
    assert run.happened["delivered"] == run.happened["ended"] == 40
    assert handled(run) == 40
    assert len(run.segments) == 2
    assert [segment.reason for segment in run.segments] == ["drained", "drained"]


@both
def test_a_plan_always_gives_the_same_run(personality: PersonalityName) -> None:
    faults = (Fault(30, "crash", 0, 1.0), Fault(60, "rebalance"))
    assert len({world_of(*faults, personality=personality).digest for _ in range(5)}) == 1


@both
def test_a_recorded_schedule_gives_the_same_run(personality: PersonalityName) -> None:
    async def test(world: World) -> None:
        ledger = Ledger()
        world.produce("orders", 20, keys=5)
        world.workers(2, ledger.handle)
        await world.settled()

    conditions = Conditions(test=test)
    first = run_plan(Plan(personality, 3), conditions, RandomWalk(7))
    assert len(first.plan.schedule) > 10
    again = run_plan(first.plan, conditions)
    assert again.digest == first.digest
    assert again.history == first.history


@both
@pytest.mark.parametrize("at", [0, 3, 7, 12, 16, 20])
def test_a_crash_loses_nothing(personality: PersonalityName, at: int) -> None:
    run = world_of(Fault(at, "crash", 0, 2.0), personality=personality)
    assert (run.findings, run.crashes) == ({}, 1)
    assert handled(run) == 40
    assert sum(segment.crashed for segment in run.segments) <= 1


@both
def test_no_step_is_taken_after_a_crash(personality: PersonalityName) -> None:
    steps: list[str] = []

    async def handler(message: Message) -> None:
        try:
            steps.append("began")
            await anyio.sleep(5.0)
            steps.append("ended")
        finally:
            steps.append("finally")

    async def test(world: World) -> None:
        world.produce("orders", 1)
        world.workers(1, handler)
        await anyio.sleep(1.0)
        assert steps == ["began"]
        world._crash(world.members[0], 1_000.0)
        await anyio.sleep(100.0)
        assert steps == ["began"]

    run = run_plan(Plan(personality), Conditions(test=test))
    assert run.findings == {}


@pytest.mark.parametrize(
    ("personality", "kind"),
    [
        (personality, kind)
        for personality in PERSONALITIES
        for kind in ("freeze", "rebalance", "lost", "slow", "commit_fails", "redeliver", "clock_jump")
        if kind not in IMPOSSIBLE_FAULTS[personality]
    ],
)
@pytest.mark.parametrize("at", [5, 20])
def test_other_faults_lose_nothing(personality: PersonalityName, kind: Any, at: int) -> None:
    run = world_of(Fault(at, kind, 1, 20.0), personality=personality)
    assert (run.findings, handled(run)) == ({}, 40)
    # Before the fifth boundary no message is delivered, so none is redelivered.
    assert run.happened[f"fault: {kind}"] == ((kind, at) != ("redeliver", 5))


@both
def test_a_simulated_io_call_fails_as_planned(personality: PersonalityName) -> None:
    failed: list[str] = []

    async def test(world: World) -> None:
        async def handler(message: Message) -> None:
            try:
                await world.io("the ledger", 0.1)
            except InjectedFailure as error:
                failed.append(str(error))
                raise

        world.produce("orders", 10)
        world.workers(1, App(handler=handler, settings=Settings(retry=Retry(attempts=2, backoff=0.1))))
        await world.settled()

    run = run_plan(Plan(personality, faults=(Fault(12, "io_fails"),)), Conditions(test=test))
    assert (run.findings, run.happened["retry"]) == ({}, 1)
    assert failed == ["injected: the ledger failed"]


@both
@pytest.mark.parametrize("poison", [None, "exit"])
def test_a_message_given_up_names_the_dead_letters_of_the_world(
    personality: PersonalityName, poison: Literal["exit"] | None
) -> None:
    remedy = "In a simulated test, pass App(…, dead_letters=True), and read world.dead_letters"

    async def handler(message: Message) -> None:
        raise Term("no address")

    async def test(world: World) -> None:
        world.produce("orders", 1)
        world.workers(1, App(handler=handler, settings=Settings(poison=poison), dead_letters=poison is not None))
        await world.settled()

    found = run_plan(Plan(personality), Conditions(test=test)).findings["HandlerHalted"]
    assert found.startswith("w-1 ended with an exception: ")
    # An app with dead letters has halted for another reason.
    assert found.endswith(remedy) == (poison is None)


@both
def test_a_dead_letter_that_fails_is_written_later(personality: PersonalityName) -> None:
    async def handler(message: Message) -> None:
        raise ValueError("never")

    async def test(world: World) -> None:
        world.produce("orders", 3)
        world.workers(1, App(handler=handler, settings=Settings(retry=Retry(attempts=1)), dead_letters=True))
        await world.settled()
        assert len(world.dead_letters) == 3

    run = run_plan(Plan(personality, faults=(Fault(5, "letter_fails"),)), Conditions(test=test))
    assert (run.findings, run.happened["dlq_confirmed"]) == ({}, 3)


@both
def test_an_error_of_the_test_is_a_finding(personality: PersonalityName) -> None:
    async def test(world: World) -> None:
        raise AssertionError("one is not two")

    run = run_plan(Plan(personality), Conditions(test=test))
    assert run.findings == {"AssertionError": "the test raised an exception: one is not two"}
    assert [str(cause) for cause in run.causes] == ["one is not two"]


@both
def test_a_handler_that_never_ends_fails_the_settled_wait(personality: PersonalityName) -> None:
    async def handler(message: Message) -> None:
        await anyio.sleep_forever()

    async def test(world: World) -> None:
        world.produce("orders", 2)
        world.workers(1, handler)
        await world.settled(timeout=600.0)

    run = run_plan(Plan(personality), Conditions(test=test))
    said, *waits = run.findings["CaughtUp"].splitlines()
    assert said.startswith("2 message(s) unfinished after 600 s without a fault: partition ")
    # The error lists the handlers and no other task of the worker.
    line = handler.__code__.co_firstlineno + 1
    assert len(waits) == 2
    assert all(
        re.fullmatch(rf"  task \d+ .* of 'w-1' waits at .*test_world\.py:{line} in handler", one) for one in waits
    )


def test_a_world_without_workers_is_reported() -> None:
    async def test(world: World) -> None:
        world.produce("orders", 2)
        await world.settled(timeout=600.0)

    said = run_plan(Plan(), Conditions(test=test)).findings["CaughtUp"]
    assert said.endswith("\n  no worker runs: none was started, or all have ended")


@both
def test_a_halted_worker_is_a_finding(personality: PersonalityName) -> None:
    async def handler(message: Message) -> None:
        raise ValueError("no")

    async def test(world: World) -> None:
        world.produce("orders", 1)
        world.workers(1, App(handler=handler, settings=Settings(retry=Retry(attempts=1))))
        await world.settled(timeout=60.0)

    run = run_plan(Plan(personality), Conditions(test=test))
    assert "ValueError: no" in run.findings["HandlerHalted"]


def test_the_limit_of_a_plan_bounds_each_call_of_produce() -> None:
    async def test(world: World) -> None:
        first = world.produce("orders", 10, keys=3)
        assert len(first) == len(world.broker.records) == 4
        world.produce("orders", 2, keys=["a"])
        assert len(world.broker.records) == 6

    assert run_plan(Plan(limit=4), Conditions(test=test)).findings == {}


def test_fewer_messages_are_the_beginning_of_more() -> None:
    found: list[list[Any]] = []

    async def test(world: World) -> None:
        found.append(world.produce("orders", 30, keys=5, hot=0.4, keyless=0.2, gaps=0.2))

    for limit in (None, 7):
        run_plan(Plan(limit=limit, seed=5), Conditions(test=test))
    assert found[0][:7] == found[1]


def test_a_world_refuses_impossible_arguments() -> None:
    def plain(message: Message) -> None:
        pass

    async def two_topics(world: World) -> None:
        world.produce("a", 1)
        with pytest.raises(ImpossiblePlan, match="this world has the topic 'a' already"):
            world.produce("b", 1)
        with pytest.raises(ImpossiblePlan, match=r"workers\(0\): must start 1 or more workers; pass their number"):
            world.workers(0, plain)
        with pytest.raises(ImpossiblePlan, match=r"workers\(a function\): must start 1 or more workers; pass their"):
            world.workers(plain, 1)  # type: ignore[arg-type]
        with pytest.raises(Refused, match=r'is a plain function, which runs in threads.*pass threads="inline"'):
            world.workers(1, plain)

    assert run_plan(Plan(), Conditions(test=two_topics)).findings == {}


def test_a_plain_handler_runs_inline_on_request() -> None:
    handled: list[int] = []

    async def test(world: World) -> None:
        world.produce("orders", 5)
        world.workers(1, lambda message: handled.append(message.position))
        await world.settled()

    assert run_plan(Plan(), Conditions(test=test, threads="inline")).findings == {}
    assert len(handled) == 5


def test_the_global_random_follows_the_plan_and_is_restored() -> None:
    drawn: list[float] = []

    async def test(world: World) -> None:
        drawn.append(random.random())

    random.seed(1)
    expected = random.Random(1).random()
    for _ in range(2):
        run_plan(Plan(seed=9), Conditions(test=test))
    assert drawn[0] == drawn[1]
    assert random.random() == expected


@pytest.mark.process
@both
def test_a_worker_may_crash_while_it_stops(personality: PersonalityName) -> None:
    boundaries = world_of(personality=personality).boundaries
    runs = [world_of(Fault(at, "crash"), personality=personality) for at in range(boundaries)]
    assert [(run.findings, run.crashes, handled(run)) for run in runs] == [({}, 1, 40)] * boundaries
    # Stopped workers are not replaced.
    assert {len(run.segments) for run in runs} == {2, 3}
