"""A state machine drives a world step by step: right handlers pass, and wrong handlers are convicted."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import rule, run_state_machine_as_test

from lanes import Message, Settings
from memsource.personality import PERSONALITIES, PersonalityName
from memsource.sim.errors import Livelock, Refused, SimulationFailed
from memsource.sim.runs import machine as module
from memsource.sim.runs.machine import SimulationMachine
from memsource.sim.world.worker import App

QUICK = settings(
    deadline=None,
    database=None,
    derandomize=True,
    max_examples=8,
    stateful_step_count=8,
    phases=(Phase.generate,),
    print_blob=False,
    suppress_health_check=list(HealthCheck),
)

both = pytest.mark.parametrize("personality", PERSONALITIES)


class Counted(SimulationMachine):
    """A handler that counts its calls."""

    wait = 0.01

    def app(self) -> App:
        self.calls: Counter[tuple[int, int]] = Counter()
        return App(handler=self.handle, settings=Settings(concurrency=3))

    async def handle(self, message: Message) -> None:
        await anyio.sleep(self.wait)
        self.calls[message.partition.id.number, message.position] += 1


class Orders(SimulationMachine):
    """A handler that ends at once."""

    def app(self) -> App:
        return App(handler=self.handle)

    async def handle(self, message: Message) -> None:
        pass


@pytest.fixture
def machine() -> Iterator[Counted]:
    made = Counted()
    yield made
    made.teardown()


def test_a_jump_of_time_makes_nothing_late() -> None:
    """A time jump between the notice of a drain and the abandonment of waiting messages."""
    machine = Orders()
    for index, turns in ((0, 24), (0, 10), (0, 32), (0, 33), (0, 8), (4, 8), (0, 24), (1, 36), (2, 37)):
        machine.deviate(index=index, turns=turns)
    machine.teardown()


@both
def test_a_handler_that_keeps_its_promises_passes(personality: PersonalityName) -> None:
    reached: Counter[str] = Counter()

    class Kept(Counted):
        def at_rest(self) -> None:
            published = {(record.partition, record.position) for record in self.world.broker.records}
            assert self.calls.keys() == published
            reached.update(fault.kind for fault in self.world.injection.performed)
            reached["published"] += len(published)

    Kept.personality = personality
    run_state_machine_as_test(Kept, settings=QUICK)
    expected = {"published", "crash", "rebalance", "lost"} | ({"redeliver"} - {*_never(personality)})
    assert reached.keys() == expected


def _never(personality: PersonalityName) -> tuple[str, ...]:
    return ("redeliver",) if personality == "kafka" else ()


def test_a_handler_that_counts_twice_is_convicted_when_all_is_handled() -> None:
    class Once(Counted):
        personality = "jetstream"

        def at_rest(self) -> None:
            assert set(self.calls.values()) <= {1}, "counted twice"

        @rule()
        def crash_at_work(self) -> None:
            self.world.publish(b"", key=b"a")
            self.advance(self.wait * 1.5)
            self.crash(0, 0.0)

    with pytest.raises(AssertionError, match="counted twice"):
        run_state_machine_as_test(Once, settings=settings(QUICK, max_examples=60, stateful_step_count=12))


def test_a_rule_advances_the_simulation(machine: Counted) -> None:
    machine.produce(n=6, keys=6, keyless=0.0, gaps=0.0)
    begin = machine.world.now
    assert not machine.calls
    machine.advance(60.0)
    assert machine.world.now == begin + 60.0
    assert sum(machine.calls.values()) == len(machine.world.broker.records) == 6


def test_a_fault_of_a_rule_is_performed_at_once(machine: Counted) -> None:
    machine.advance(1.0)
    machine.crash(worker=1, after=5.0)
    assert [worker.gone for worker in machine.world.members] == [False, True]
    machine.advance(10.0)
    assert len(machine.world.members) == 3
    machine.rebalance()
    machine.lost(partition=2)
    assert [fault.kind for fault in machine.world.injection.performed] == ["crash", "rebalance", "lost"]


def test_a_deviation_runs_another_task_first() -> None:
    def order(index: int) -> list[str]:
        found: list[str] = []

        async def step(name: str) -> None:
            for _ in range(3):
                await anyio.lowlevel.checkpoint()
                found.append(name)

        async def both_steps() -> None:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(step, "a")
                tasks.start_soon(step, "b")

        machine = Counted()
        machine.advance(0.5)
        for turns in range(1, 20):
            machine.deviate(turns=turns, index=index)
        machine.drive(both_steps())
        machine.teardown()
        return found

    assert order(5) == ["a", "b", "a", "b", "a", "b"]
    assert order(1) != order(5)


def test_time_may_jump_while_tasks_are_ready(machine: Counted) -> None:
    async def busy() -> float:
        for _ in range(5):
            await anyio.lowlevel.checkpoint()
        return machine.world.now

    begin = machine.world.now
    assert machine.drive(busy()) == begin
    machine.deviate(turns=3, index=0)
    assert machine.drive(busy()) > begin


def test_a_finding_of_the_world_is_raised() -> None:
    machine = Counted()
    machine.world.find("Planted", "a finding of the world's")
    with pytest.raises(SimulationFailed, match=r"findings on kafka \(1\):\n  Planted: a finding of the world's"):
        machine.nothing_is_found()
    with pytest.raises(SimulationFailed, match="Planted"):
        machine.teardown()


def test_a_world_that_never_catches_up_is_found() -> None:
    class Stuck(Counted):
        wait = 1e9

    machine = Stuck()
    machine.produce(n=2, keys=2, keyless=0.0, gaps=0.0)
    with pytest.raises(SimulationFailed, match=r"CaughtUp: 2 message\(s\) unfinished"):
        machine.teardown()


@contextmanager
def torn_down(machine: SimulationMachine) -> Iterator[None]:
    """Run rules as Hypothesis does."""
    try:
        yield
    finally:
        machine.teardown()


def test_after_an_error_the_machine_is_closed_and_not_judged() -> None:
    machine = Counted()
    machine.world.find("Planted", "not asked for")
    with pytest.raises(KeyError), torn_down(machine):
        raise KeyError("a rule failed")
    assert machine._loop.is_closed()


def test_an_error_of_a_world_that_ended_is_raised_in_the_rule() -> None:
    machine = Counted()

    async def fail() -> None:
        raise ZeroDivisionError

    async def into_the_world() -> None:
        machine.world._tasks.start_soon(fail)
        await anyio.sleep(1.0)

    with pytest.raises(ExceptionGroup) as caught, torn_down(machine):
        machine.drive(into_the_world())
    assert isinstance(caught.value.exceptions[0], ZeroDivisionError)


def test_a_refusal_closes_the_machine() -> None:
    machine = Counted()
    with pytest.raises(Refused, match=r"time\.sleep"):
        machine.call(time.sleep, 1.0)
    with pytest.raises(Refused, match=r"time\.sleep"), torn_down(machine):
        machine.advance(1.0)
    assert machine._loop.is_closed()


def test_a_refusal_is_raised_even_when_it_is_caught() -> None:
    async def swallow() -> None:
        try:
            time.sleep(1.0)  # noqa: ASYNC251 (is refused)
        except Refused as error:
            raise KeyError from error

    machine = Counted()
    with pytest.raises(Refused), torn_down(machine):
        machine.drive(swallow())


def test_a_step_without_an_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def forever() -> None:
        while True:
            pass

    monkeypatch.setattr(module, "_STEP_LIMIT", 0.2)
    machine = Counted()
    with pytest.raises(Livelock, match=r"does not yield: .* in forever"), torn_down(machine):
        machine.call(forever)
    assert machine._loop.is_closed()


def test_a_plain_handler_is_refused_or_run_on_the_loop() -> None:
    def plain(message: Message) -> None:
        """A plain handler, which would run in a thread."""

    class Threaded(SimulationMachine):
        def app(self) -> App:
            return App(handler=plain)

    with pytest.raises(Refused, match="is a plain function, which runs in threads"):
        Threaded()

    class Inline(Threaded):
        threads = "inline"

    machine = Inline()
    machine.produce(n=3, keys=1, keyless=0.0, gaps=0.0)
    machine.teardown()


class Forgetful(Counted):
    """Each process has a separate handler, which counts the messages of that process."""

    def process(self) -> App:
        seen: set[tuple[int, int]] = set()
        self.processes = [*getattr(self, "processes", []), seen]

        async def handle(message: Message) -> None:
            await anyio.sleep(self.wait)
            seen.add((message.partition.id.number, message.position))

        return App(handler=handle)


def test_a_handler_of_one_process_ends_with_the_process() -> None:
    machine = Forgetful()
    with torn_down(machine):
        machine.produce(n=10, keys=5, keyless=0.0, gaps=0.0)
        machine.advance(1.0)
        assert len(machine.processes) == machine.members
        before = [len(seen) for seen in machine.processes]
        assert sum(before) == 10
        machine.crash(worker=0, after=1.0)
        machine.advance(60.0)
        machine.produce(n=10, keys=5, keyless=0.0, gaps=0.0)
    assert len(machine.processes) == machine.members + 1
    # The new process counts only the messages that it has handled itself.
    assert 0 < len(machine.processes[-1]) <= 20


def test_a_machine_without_an_app_names_the_missing_method() -> None:
    said = r"SimulationMachine\.app: return the handler, or an App with the handler"
    with pytest.raises(NotImplementedError, match=said):
        SimulationMachine()
