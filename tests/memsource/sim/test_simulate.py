"""``simulate`` convicts wrong handlers, passes right ones, and prints a token that repeats the failure."""

from __future__ import annotations

import re
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable

import anyio
import anyio.lowlevel
import pytest

from lanes import Message, Retry, Settings
from memsource.sim.errors import ImpossiblePlan, Nondeterministic, SimulationFailed, TokenRefused
from memsource.sim.plans.faults import FaultBudget, faults
from memsource.sim.runs.campaign import ORDERS
from memsource.sim.runs.simulate import simulate
from memsource.sim.world.worker import App
from memsource.sim.world.world import World
from tests.effort import runs

ALL = faults(crash=1, rebalance=2, redeliver=2, io_fails=1)


class Accounts:
    """A fake database: a balance for each key, and the bookings made so far."""

    def __init__(self) -> None:
        self.balances: dict[str, int] = defaultdict(int)
        self.booked: set[str] = set()
        self.total = 0

    def snapshot(self) -> dict[str, int]:
        return {**self.balances, "total": self.total}


@pytest.mark.long
@pytest.mark.sliced
def test_a_right_handler_passes() -> None:
    happened: Counter[str] = Counter()
    count = runs(120, least=40)

    @simulate(runs=count, faults=ALL, sometimes=("fault: crash", "fault: rebalance", "fault: redeliver"))
    async def right(world: World) -> None:
        accounts = Accounts()

        async def handle(message: Message) -> None:
            await world.io("book", 0.01)
            name = f"{message.partition.id} {message.position}"
            if name not in accounts.booked:
                accounts.booked.add(name)
                accounts.balances[str(message.key)] += 1

        world.produce("orders", n=30, keys=5)
        world.workers(2, handle)
        await world.settled()
        world.check(state=accounts.snapshot)

    report = right.campaign()
    assert right.report is report
    assert report.failure is None
    happened = report.happened
    assert (report.runs, report.rechecked) == (count, count // 40)
    assert happened["fault: crash"] > count // 6
    right()


def not_idempotent(accounts: Accounts, world: World) -> Callable[[Message], object]:
    async def handle(message: Message) -> None:
        await world.io("book", 0.01)
        accounts.balances[str(message.key)] += 1

    return handle


def reads_before_an_await(accounts: Accounts, world: World) -> Callable[[Message], object]:
    async def handle(message: Message) -> None:
        name = f"{message.partition.id} {message.position}"
        if name in accounts.booked:
            return
        total = accounts.total
        await anyio.lowlevel.checkpoint()
        accounts.booked.add(name)
        accounts.total = total + 1

    return handle


def swallows_exceptions(accounts: Accounts, world: World) -> Callable[[Message], object]:
    async def handle(message: Message) -> None:
        name = f"{message.partition.id} {message.position}"
        if name in accounts.booked:
            return
        try:
            await world.io("book", 0.01)
        except Exception:
            return
        accounts.booked.add(name)
        accounts.balances[str(message.key)] += 1

    return handle


@pytest.mark.long
@pytest.mark.parametrize("wrong", [not_idempotent, reads_before_an_await, swallows_exceptions])
def test_a_wrong_handler_is_convicted_by_a_small_plan_and_a_token(
    wrong: Callable[[Accounts, World], Callable[[Message], object]],
) -> None:
    @simulate(runs=300, faults=ALL)
    async def test(world: World) -> None:
        accounts = Accounts()
        world.produce("orders", n=30, keys=5)
        world.workers(2, App(handler=wrong(accounts, world), settings=Settings(retry=Retry(attempts=3, backoff=0.1))))
        await world.settled()
        world.check(state=accounts.snapshot)

    failure = test.campaign().failure
    assert failure is not None
    assert set(failure.run.findings) == {"FaultDifferential"}
    plan = failure.run.plan
    assert len(plan.faults) + len(plan.schedule) <= 5
    assert len(plan.faults) + len(plan.schedule) >= 1
    again = test.replay(failure.token)
    assert (again.findings, again.digest) == (failure.run.findings, failure.run.digest)
    with pytest.raises(SimulationFailed, match="FaultDifferential: the final state differs") as raised:
        test()
    token = re.search(r"--lanes-replay (\S+)", str(raised.value))
    assert token is not None
    assert token[1] == failure.token


@pytest.mark.parametrize(
    ("budget", "seed"), [(None, 0), (faults(crash=1), 1), (faults(freeze=1), 0)], ids=["no fault", "crash", "freeze"]
)
def test_a_race_blames_no_fault_and_calls_neither_state_right(budget: FaultBudget | None, seed: int) -> None:
    """The first failing run of the second and third campaign has a fault, which the race does not need."""

    @simulate(runs=100, faults=budget, seed=seed)
    async def test(world: World) -> None:
        total = 0

        async def handle(message: Message) -> None:
            nonlocal total
            now = total
            await world.io("database", 0.01)
            total = now + 1

        world.produce("orders", n=10, keys=5)
        world.workers(1, handle)
        await world.settled()
        world.check(state=lambda: {"sum": total})

    failure = test.campaign().failure
    assert failure is not None
    assert not failure.run.plan.faults
    assert failure.orders == 0
    assert re.fullmatch(
        r"the final state differs from the state after another order of steps, both without faults, so either state "
        r"may be wrong: 'sum' is \d, the other order has \d",
        failure.run.findings["FaultDifferential"],
    )


def test_a_failure_that_needs_its_fault_says_so_and_calls_the_other_state_no_expected_one() -> None:
    @simulate(runs=50, faults=faults(crash=1), personalities=["kafka"])
    async def test(world: World) -> None:
        total = 0

        async def handle(message: Message) -> None:
            nonlocal total
            total += 1
            await anyio.sleep(1.0)

        world.produce("orders", n=5, keys=5)
        world.workers(1, handle)
        await world.settled()
        world.check(state=lambda: {"sum": total})

    with pytest.raises(SimulationFailed) as raised:
        test()
    failure = test.report and test.report.failure
    assert failure
    assert [fault.kind for fault in failure.run.plan.faults] == ["crash"]
    assert failure.orders == ORDERS
    assert str(raised.value).endswith(
        f"\n\nWithout faults, {ORDERS} other orders of the steps did not have this failure."
    )
    assert re.fullmatch(
        r"the final state differs from the state without faults: 'sum' is \d, the run without faults has \d",
        failure.run.findings["FaultDifferential"],
    )


@pytest.mark.long
def test_a_failed_assertion_of_the_test_is_shrunk() -> None:
    @simulate(runs=50, faults=faults(crash=2))
    async def test(world: World) -> None:
        calls: Counter[int] = Counter()

        async def handle(message: Message) -> None:
            calls[message.position] += 1
            await anyio.sleep(1.0)

        world.produce("orders", n=20, keys=20)
        world.workers(1, handle)
        await world.settled()
        assert not [position for position, count in calls.items() if count > 4], "repeated"

    failure = test.campaign().failure
    assert failure is not None
    assert "repeated" in failure.run.findings["AssertionError"]
    assert failure.run.plan.limit is not None
    assert failure.run.plan.limit <= 20


def test_state_that_outlives_a_run_is_found() -> None:
    seen: list[int] = []

    @simulate(runs=10)
    async def test(world: World) -> None:
        async def handle(message: Message) -> None:
            seen.append(1)
            await anyio.sleep(0.001 * len(seen))

        world.produce("orders", n=5)
        world.workers(1, handle)
        await world.settled()

    with pytest.raises(Nondeterministic, match="the same plan gave two different runs"):
        test()


def test_setup_is_called_before_each_run() -> None:
    seen: list[int] = []

    @simulate(runs=10, setup=seen.clear)
    async def test(world: World) -> None:
        async def handle(message: Message) -> None:
            seen.append(1)
            await anyio.sleep(0.001 * len(seen))

        world.produce("orders", n=5)
        world.workers(1, handle)
        await world.settled()
        world.check(state=lambda: len(seen))

    test()


def test_fixtures_are_passed_to_the_test() -> None:
    got: list[str] = []

    @simulate(runs=2)
    async def test(world: World, name: str) -> None:
        got.append(name)

    test("a fixture")
    assert got == ["a fixture"] * len(got)
    assert str(test.__signature__) == "(name: 'str')"  # type: ignore[attr-defined]


def test_simulate_refuses_impossible_arguments() -> None:
    async def test(world: World) -> None:
        pass

    with pytest.raises(ImpossiblePlan, match="must be an async function of a world"):
        simulate(lambda world: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(ImpossiblePlan, match="runs=0: must be a whole number, 1 or more"):
        simulate(runs=0)(test)()
    with pytest.raises(ImpossiblePlan, match="redeliver=1: never happens on kafka"):
        simulate(faults=FaultBudget(redeliver=1), personalities=("kafka",))(test)()
    with pytest.raises(ImpossiblePlan, match="fault: lost: never happened in 3 runs, although sometimes="):
        simulate(runs=3, sometimes=("fault: lost",))(test)()
    with pytest.raises(TokenRefused):
        simulate(test).replay("nonsense")


@pytest.mark.long
def test_shrinking_does_not_end_at_another_failure() -> None:
    @simulate(runs=60, faults=faults(crash=2))
    async def test(world: World) -> None:
        accounts = Accounts()
        world.produce("orders", n=30, keys=5)
        world.workers(1, not_idempotent(accounts, world))
        await world.settled()
        # With fewer messages this assertion fails without a fault.
        assert sum(accounts.balances.values()) == 30

    failure = test.campaign().failure
    assert failure is not None
    assert failure.run.plan.limit is None or failure.run.plan.limit >= 30
    assert [fault.kind for fault in failure.run.plan.faults] == ["crash"] * len(failure.run.plan.faults)
    assert failure.run.plan.faults


def test_the_cause_of_a_failure_shows_only_the_frames_of_the_user() -> None:
    @simulate(runs=2)
    async def test(world: World) -> None:
        async def handle(message: Message) -> None:
            raise KeyError("no such account")

        world.produce("orders", n=3)
        world.workers(1, App(handler=handle, settings=Settings(retry=Retry(attempts=1))))
        await world.settled()

    with pytest.raises(SimulationFailed) as failed:
        test()
    waiting, files, types = [failed.value.__cause__], set(), set()
    while waiting:
        error = waiting.pop()
        if error is not None:
            types.add(type(error))
            files |= {frame.filename for frame in traceback.extract_tb(error.__traceback__)}
            waiting += [error.__cause__, error.__context__]
    assert KeyError in types
    assert files == {__file__}
