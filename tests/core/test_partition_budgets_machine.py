"""With budgets per partition, the engine bounds each partition, or each physical queue, and takes them in turn."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, run_state_machine_as_test

from lanes.core.engine import Engine
from lanes.core.partition_budgets import PartitionBudgetEngine, make_engine
from lanes.core.policy import Keyless, Order, Poison, Policy, RetryPolicy
from lanes.core.types import BudgetId, Message, Partition, PartitionId
from tests.core.builders import READER, new_policy
from tests.core.naive import NaiveEngine
from tests.core.test_engine_machine import ATTEMPTS, CONCURRENCY, EngineMachine
from tests.core.test_engine_modes_machine import ModesMachine
from tests.effort import runs

BUDGETS = st.sampled_from([(1, 0), (2, 0), (0, 3), (1, 1), (2, 5), (3, 8), (1, 12)])
"""Calls and messages in flight of a partition. 0 = no bound."""


PLACES = (PartitionId("S", 0), PartitionId("S", 1), PartitionId("T", 0))
QUEUES = st.sampled_from([frozenset[str](), frozenset({"S"}), frozenset({"S", "T"})])
"""The sources whose partitions share a budget."""


def budget_of(policy: Policy, partition: PartitionId) -> BudgetId:
    """The budget of a partition, told independently of the engine."""
    return partition.source if partition.source in policy.queues else partition


def made(policy: Policy, calls: int, messages: int, queues: frozenset[str] = frozenset()) -> PartitionBudgetEngine:
    engine = make_engine(
        policy._replace(concurrency_per_partition=calls, max_in_flight_per_partition=messages, queues=queues)
    )
    assert isinstance(engine, PartitionBudgetEngine)
    return engine


def the_room_keeps_the_bound(engine: PartitionBudgetEngine, messages: Counter[Partition]) -> None:
    """No budget has more than its bound, even if the next delivery has messages of one partition alone.

    A partition that is assigned during the delivery has no message in ``messages``, and may deliver too.
    """
    bound = engine.policy.max_in_flight_per_partition
    room = engine.room()
    if not bound:
        assert not engine.full
        return
    assert room.messages <= bound
    assert room.messages > 0 or not engine.flow.taking or engine.flow.paused
    owned = engine.partitions.values()
    used = Counter[BudgetId]()
    for partition in owned:
        assert budget_of(engine.policy, partition.id) == partition.budget
        # Of a fenced partition, the messages whose handlers run have left the budget.
        used[partition.budget] += messages[partition] if partition.live else engine.in_flight_of(partition)
    for partition in owned:
        if partition.live:
            assert engine.in_flight_of(partition) == messages[partition]
        count = used[partition.budget]
        assert count <= bound
        assert (partition.budget in engine.full) <= (count > engine.low)
        if partition.steady:
            assert (partition.budget in engine.full) >= (bound - count < engine.reserve)
            assert room.closed_to(partition) or count + room.messages <= bound
            assert room.closed_to(partition) == (partition in room.paused), "an adapter may look at either"
    for place in PLACES:
        count = used[budget_of(engine.policy, place)]
        if place not in engine.partitions:
            assert room.closed_to(Partition(place, READER)) or count + room.messages <= bound


class BudgetMachine(EngineMachine):
    """The machine of redeliveries, with budgets per partition."""

    engine: PartitionBudgetEngine
    places = PLACES

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        # For each budget that could start a message: the calls of the other budgets since its last call. For each
        # partition that could: the calls of the other partitions of its queue.
        self.passed: dict[BudgetId, Counter[BudgetId]] = {}
        self.passed_within: dict[PartitionId, Counter[PartitionId]] = {}

    @initialize(dead_letters=st.booleans(), keeps=st.booleans(), budgets=BUDGETS, queues=QUEUES)
    def start(
        self,
        dead_letters: bool,
        keeps: bool,
        budgets: tuple[int, int] = (1, 0),
        queues: frozenset[str] = frozenset(),
    ) -> None:
        self.calls = budgets[0]
        self.naive = NaiveEngine(CONCURRENCY, ATTEMPTS, "dead_lettering" if dead_letters else "stuck", keeps=keeps)
        self.begin(made(self.policy(dead_letters, keeps), *budgets, queues))

    def budget(self, message: Message) -> BudgetId:
        return budget_of(self.engine.policy, message.partition.id)

    def could_start(self) -> list[Message]:
        running = Counter(map(self.budget, self.running()))
        return [m for m in self.naive.heads() if not self.calls or running[self.budget(m)] < self.calls]

    def take(self) -> None:
        self.look()
        at_the_cap = self.naive.full or len(self.running()) >= CONCURRENCY
        startable = [] if at_the_cap else self.could_start()
        message = self.engine.take()
        assert (message is None) == (not startable)
        if message is None:
            return
        assert message in startable
        self.naive.state[message] = "running"
        assert message.attempt == self.naive.attempt[message]
        name = self.budget(message)
        for other in self.passed.keys() - {name}:
            self.passed[other][name] += 1
            self.no_partition_waits_for_two_calls_of_another(self.passed[other])
        self.passed.pop(name, None)
        for partition in self.passed_within.keys() - {message.partition.id}:
            if budget_of(self.engine.policy, partition) == name:
                self.passed_within[partition][message.partition.id] += 1
                self.no_partition_of_a_queue_waits_for_two_calls_of_another(self.passed_within[partition])
        self.passed_within.pop(message.partition.id, None)
        self.look()

    def no_partition_waits_for_two_calls_of_another(self, passed: Counter[BudgetId]) -> None:
        assert max(passed.values()) == 1

    def no_partition_of_a_queue_waits_for_two_calls_of_another(self, passed: Counter[PartitionId]) -> None:
        assert max(passed.values()) == 1

    def look(self) -> None:
        could = self.could_start()
        self.passed = {name: self.passed.get(name, Counter()) for name in map(self.budget, could)}
        waiting = {m.partition.id for m in could}
        self.passed_within = {name: self.passed_within.get(name, Counter()) for name in waiting}

    @invariant()
    def everything_holds(self) -> None:
        super().everything_holds()
        self.look()
        running = Counter(map(self.budget, self.running()))
        assert not self.calls or max(running.values(), default=0) <= self.calls
        assert self.engine.fair.running == running
        # Exactly the heads that could start now are counted, so a worker is never woken in vain.
        free = Counter(map(self.budget, self.could_start()))
        assert self.engine.ready == sum(
            min(heads, self.calls - running[name] if self.calls else heads) for name, heads in free.items()
        )
        the_room_keeps_the_bound(self.engine, Counter(m.partition for m in self.naive.state))

    def could_use(self, partition: Partition) -> bool:
        budget = budget_of(self.engine.policy, partition.id)
        running = Counter(map(self.budget, self.running()))[budget]
        return partition.steady and budget not in self.engine.full and (not self.calls or running < self.calls)

    def low_mark(self) -> int:
        # The mark is above the messages of the partitions that were full at the last settlement.
        assert super().low_mark() <= self.engine.flow.low <= self.engine.flow.max_in_flight
        return self.engine.flow.low

    def teardown(self) -> None:
        super().teardown()
        assert not any((self.engine.fair.running, self.engine.fair.turns(), self.engine.full))


class BudgetModesMachine(ModesMachine):
    """The machine of all modes, with batches and sources that commit, and with budgets per partition."""

    engine: PartitionBudgetEngine
    sources = ("S", "S", "T")

    @initialize(
        order=st.sampled_from(["key", "key", "key", "partition", "serial", "none"]),
        keyless=st.sampled_from(["any", "one_lane"]),
        lanes=st.sampled_from([0, 0, 2]),
        poison=st.sampled_from(["skip", "block", "block_and_dlq", "exit"]),
        commits=st.sampled_from([(True, True), (True, False), (False, True)]),
        keeps=st.booleans(),
        budgets=BUDGETS,
        queues=QUEUES,
    )
    def start(
        self,
        order: Order,
        keyless: Keyless,
        lanes: int,
        poison: Poison,
        commits: tuple[bool, bool],
        keeps: bool,
        budgets: tuple[int, int] = (1, 0),
        queues: frozenset[str] = frozenset(),
    ) -> None:
        self.budgets, self.queues = budgets, queues
        self.begin(self.policy(order, keyless, lanes, poison, keeps=keeps), commits)

    def make(self, policy: Policy) -> Engine:
        return made(policy, *self.budgets, self.queues)

    def full(self) -> frozenset[Partition]:
        return frozenset(p for p in self.engine.partitions.values() if p.budget in self.engine.full)

    def calls(self) -> Counter[BudgetId]:
        """The number of calls with a message of each budget."""
        policy = self.engine.policy
        return Counter(name for batch in self.batches for name in {budget_of(policy, m.partition.id) for m in batch})

    def may_start(self, m: Message) -> bool:
        return not self.budgets[0] or self.calls()[budget_of(self.engine.policy, m.partition.id)] < self.budgets[0]

    @invariant()
    def everything_holds(self) -> None:
        super().everything_holds()
        assert self.engine.fair.running == self.calls()
        assert not self.budgets[0] or max(self.calls().values(), default=0) <= self.budgets[0]
        the_room_keeps_the_bound(self.engine, Counter(m.partition for m in self.naive.state))

    def teardown(self) -> None:
        super().teardown()
        assert not any((self.engine.fair.running, self.engine.fair.turns(), self.engine.full))


@pytest.mark.long
@pytest.mark.sliced
@pytest.mark.timeout(400)  # shrinking a failing example may take minutes; a passing test takes seconds
@pytest.mark.parametrize("machine", [BudgetMachine, BudgetModesMachine])
def test_any_calls_of_an_engine_with_partition_budgets_agree_with_a_naive_model(
    machine: type[EngineMachine | ModesMachine],
) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=runs(80), stateful_step_count=40, deadline=None))


@pytest.mark.parametrize(
    ("calls", "messages", "reserve", "low"), [(4, 20, 4, 12), (0, 20, 2, 15), (3, 3, 1, 2), (1, 100, 24, 50)]
)
def test_the_low_mark_of_a_partition_lies_between_its_concurrency_and_its_bound(
    calls: int, messages: int, reserve: int, low: int
) -> None:
    policy = new_policy(concurrency=10, max_in_flight=1_000, max_bytes=1_000, retry=RetryPolicy(1, 0.0, 0.0))
    engine = made(policy, calls, messages)
    assert (engine.reserve, engine.low) == (reserve, low)
