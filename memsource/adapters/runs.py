"""One run of whole consumers over a real adapter, which a seed or a list of decisions determines."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from random import Random
from typing import Any, Final, Literal, Protocol, runtime_checkable

import anyio

from lanes import Message, Nak, Retry, Settings, Term
from memsource.adapters.choices import Choice, Chooser, Decision, Drawn, Given, Kind, Phase, Sought
from memsource.adapters.pairs import Impossible, Pair, Pairs
from memsource.adapters.world import AdapterBroker, AdapterWorld
from memsource.checkers import (
    CHECKERS,
    TIMED,
    AtLeastOnce,
    Checker,
    MakeChecker,
    NoOverlap,
    OrderAcrossAssignments,
    PerKeyOrder,
)
from memsource.history.timeline import Timeline
from memsource.memory.attempts import MemoryAttempts
from memsource.personality import Personality
from memsource.sim.loop.choosers import Fifo, mixed
from memsource.sim.loop.event_loop import GROUP
from memsource.sim.plans.plan import Fault, Plan
from memsource.sim.runs.run import Conditions, Run, run_plan
from memsource.sim.world.worker import App
from memsource.sim.world.world import World

TOPIC: Final = "orders"

CHECKED: Final[tuple[MakeChecker, ...]] = tuple(
    partial(NoOverlap, late=True) if make is NoOverlap else make for make in CHECKERS if make not in TIMED
)
"""The checkers of a run. A freeze or a slow request excuses what is late."""

_OF_STORED: Final = (AtLeastOnce, PerKeyOrder, OrderAcrossAssignments)
"""The checkers that require a handler call for every delivered message, unless the broker deletes the message."""

_QUICK, SLOW, _FAILS_ONCE, POISON, STUCK = range(5)
_OUTCOMES: Final = (_QUICK, _QUICK, _QUICK, SLOW, _FAILS_ONCE, POISON)
_SECONDS: Final = {SLOW: 2.0, STUCK: 7.0}
"""Duration of a handler by the outcome of its message, longer than every drain for the last one."""


@dataclass(frozen=True)
class AdapterSchedule:
    """A run to make.

    Attributes:
        adapter: Name of the adapter.
        seed: Seed of the traffic, the settings, the order of steps and, without ``decisions``, the faults.
        decisions: Faults of the run; None = the seed decides.
        limit: Maximum number of messages; None = no limit.
        calm: Whether tasks take their steps first in, first out; otherwise the seed decides.
        ends: Whether the faults are over after the last of ``decisions``. Other runs wait for faults.
        seeks: Pair of faults to reach; None = the seed decides. The decisions of the run replay it without this value.
    """

    adapter: str
    seed: int
    decisions: tuple[Decision, ...] | None = None
    limit: int | None = None
    calm: bool = False
    ends: bool = True
    seeks: Pair | None = None

    def token(self) -> str:
        """Return the text from which ``schedule_of`` makes the schedule again."""
        faults = None if self.decisions is None else [[number, *choice] for number, choice in self.decisions]
        return json.dumps([self.adapter, self.seed, faults, self.limit, self.calm, self.ends], separators=(",", ":"))


def schedule_of(token: str) -> AdapterSchedule:
    """Return the schedule of a token."""
    adapter, seed, faults, limit, calm, ends = json.loads(token)
    decisions = None if faults is None else tuple(Decision(number, Choice(*choice)) for number, *choice in faults)
    return AdapterSchedule(adapter, seed, decisions, limit, calm, ends)


class Adapter(Protocol):
    """The parts that an adapter supplies to a run.

    ``broker`` makes the broker of a run, with settings drawn from ``rng``. ``seams`` replaces functions of the system,
    such as threads and the clock, for one run of the adapter.
    """

    name: str

    def broker(self, rng: Random) -> AdapterBroker: ...

    def seams(self) -> AbstractContextManager[object]: ...


@runtime_checkable
class Shaping(Protocol):
    """An adapter that changes the drawn scenario of a run, before it makes the broker of the run."""

    def scenario(self, drawn: Scenario, rng: Random) -> Scenario: ...


@runtime_checkable
class Judging(Protocol):
    """An adapter that adds its own checkers to the checkers of every run."""

    def checkers(self) -> Sequence[MakeChecker]: ...


@dataclass(frozen=True)
class Scenario:
    """The traffic and the consumers of a run.

    Attributes:
        workers: Number of members at the start.
        waves: Number of messages of each wave, and the seconds before the wave.
        spread: Seconds between two messages of a wave.
        joins: Whether another member joins between the waves.
        leaves: Whether a member stops between the waves.
        pauses: Whether a member pauses from the second wave to the last one.
        rebalances: Whether the group rebalances during each wave.
        keys: Number of keys.
        outcomes: Outcome of each message.
        settings: Settings of the consumers.
        gaps: Share of messages after a gap.
        others: Further settings. Successive processes use all settings in turn, as in a deployment that changes the
            settings.
        ends: Whether a gap follows the last message of a wave in each partition, like the marker of a transaction.
        deploys: How a member ends between the waves while another member starts, as in a rolling deployment; empty = no
            member ends.
        keyless: Share of messages without a key.
        keeps_attempts: Whether the processes share a store of attempts.
        flickers: Seconds after which a user pauses or resumes the first member again until the last wave; 0 = never.
    """

    workers: int
    waves: tuple[tuple[float, int], ...]
    spread: float
    joins: bool
    leaves: bool
    pauses: bool
    rebalances: bool
    keys: int
    outcomes: tuple[int, ...]
    settings: Settings
    gaps: float
    ends: bool
    others: tuple[Settings, ...] = ()
    deploys: Literal["", "stop", "kill"] = ""
    keyless: float = 0.0
    keeps_attempts: bool = False
    flickers: float = 0.0


def scenario_of(rng: Random) -> Scenario:
    """Draw a scenario."""
    concurrency = rng.randint(1, 5)
    in_flight = concurrency + rng.choice([0, 1, 2, 4, 8])
    poison: Any = rng.choice(["skip", "skip", "block_and_dlq"])
    waves = tuple((rng.choice([0.0, 0.5, 2.0, 6.0, 11.0]), rng.randint(2, 10)) for _ in range(rng.randint(2, 5)))
    outcomes = _OUTCOMES if rng.random() < 0.8 else (*_OUTCOMES, STUCK)
    return Scenario(
        workers=rng.randint(1, 3),
        waves=waves,
        spread=rng.choice([0.0, 0.0, 0.1, 0.4]),
        joins=rng.random() < 0.5,
        leaves=rng.random() < 0.4,
        pauses=rng.random() < 0.3,
        rebalances=rng.random() < 0.5,
        keys=rng.choice([1, 3, 6, 12]),
        outcomes=tuple(rng.choice(outcomes) for _ in range(sum(count for _, count in waves))),
        settings=Settings(
            concurrency=concurrency,
            max_in_flight=in_flight,
            max_in_flight_per_partition=rng.choice([None, None, concurrency, in_flight]),
            max_ahead=rng.choice([3, 6, 50]),
            order=rng.choice(["key", "key", "key", "partition"]),
            retry=Retry(attempts=rng.choice([1, 2, 3]), backoff=rng.choice([0.1, 1.0])),
            poison=poison,
            commit_interval=rng.choice([0.0, 4.0, 20.0]),
            drain_timeout=rng.choice([0.5, 2.0, 4.0]),
            grace=0.5,
        ),
        gaps=rng.choice([0.0, 0.0, 0.3]),
        ends=rng.random() < 0.4,
    )


@dataclass(frozen=True)
class AdapterRun:
    """The result of a run.

    Attributes:
        schedule: The schedule, with its decisions.
        run: The judged run.
        pairs: Coverage of the run.
        phases: Phases of the adapter.
        kinds: Faults of the broker.
        impossible: Faults that cannot happen in some phase, with the reason.
    """

    schedule: AdapterSchedule
    run: Run
    pairs: Pairs
    phases: tuple[Phase, ...]
    kinds: frozenset[Kind]
    impossible: Impossible


def run_schedule(schedule: AdapterSchedule, adapter: Adapter, checkers: Sequence[MakeChecker] = CHECKED) -> AdapterRun:
    """Make one run. Blocks.

    Args:
        schedule: The run to make.
        adapter: The simulated broker and client of the adapter.
        checkers: Checkers that judge the history.

    Returns:
        The result.
    """
    seed = f"{schedule.adapter}/{schedule.seed}"
    scenario = scenario_of(Random(f"{seed}/scenario"))
    if isinstance(adapter, Shaping):
        scenario = adapter.scenario(scenario, Random(f"{seed}/shape"))
    worlds: list[AdapterWorld] = []

    def broker(plan: Plan) -> Personality:
        return adapter.broker(Random(f"{seed}/broker"))

    def judge(make: Callable[..., Checker], timeline: Timeline) -> Checker:
        # Only some brokers delete messages by themselves.
        return make(timeline, deleted=getattr(worlds[0].adapter, "deleted", ()))

    def world(plan: Plan, broker: Any, *args: Any, **options: Any) -> World:
        chooser: Chooser
        if schedule.decisions is None and schedule.seeks is not None:
            chooser = Sought(f"{seed}/{schedule.seeks}", *schedule.seeks)
        elif schedule.decisions is None:
            # If the broker names no requests, the run concentrates on no request.
            calls, reactions = getattr(broker, "calls", ()), getattr(broker, "reactions", {})
            waits, interruptions = getattr(broker, "waits", False), getattr(broker, "interruptions", ())
            chooser = Drawn(
                f"{seed}/faults",
                broker.kinds,
                broker.deadlines,
                broker.phases,
                calls,
                reactions,
                waits=waits,
                interruptions=interruptions,
            )
        else:
            chooser = Given(schedule.decisions, ends=schedule.ends)
        worlds.append(AdapterWorld(chooser, plan, broker, *args, **options))
        return worlds[0]

    async def test(world: World) -> None:
        await _Application(world, scenario).run()

    judges = [partial(judge, make) if make in _OF_STORED else make for make in checkers]
    if isinstance(adapter, Judging):
        judges += adapter.checkers()
    conditions = Conditions(test=test, broker=broker, world=world, checkers=judges, settles=True)
    with adapter.seams():
        plan = Plan("kafka", schedule.seed, limit=schedule.limit)
        run = run_plan(plan, conditions, Fifo() if schedule.calm else mixed(schedule.seed))
    made = worlds[0]
    return AdapterRun(
        replace(schedule, decisions=tuple(made.decisions), ends=made.spent),
        run,
        made.pairs,
        made.adapter.phases,
        made.adapter.kinds,
        made.adapter.impossible,
    )


class _Application:
    """The consumers and the traffic of a run."""

    def __init__(self, world: World, scenario: Scenario) -> None:
        self._world = world
        self._scenario = scenario
        self._published = 0
        self._stopping: set[str] = set()
        self._settings = cycle((scenario.settings, *scenario.others))
        self._attempts = MemoryAttempts() if scenario.keeps_attempts else None

    async def run(self) -> None:
        world = self._world
        world.workers(self._scenario.workers, make=self._make)
        if self._scenario.flickers:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._flicker)
                await self._waves()
                tasks.cancel_scope.cancel()
        else:
            await self._waves()
        self._resume()
        await world.settled()
        while self._unblock():
            await world.settled()

    async def _waves(self) -> None:
        world, scenario = self._world, self._scenario
        for number, (pause, count) in enumerate(scenario.waves):
            if number and scenario.deploys:
                await anyio.sleep(pause / 2)
                self._replace_one()
                pause /= 2
            await anyio.sleep(pause)
            if number == 1 and scenario.joins:
                world.workers(1, make=self._make)
            if number == 2 and scenario.leaves:
                self._stop_one()
            if scenario.pauses and number == 1:
                self._pause()
            await self._publish(count)
            if scenario.rebalances:
                await anyio.sleep(0.3)
                world.broker.rebalance(world.now)

    async def _flicker(self) -> None:
        """Pause and resume the first ready member, so that each call of its source is cancelled at some step."""
        while True:
            await anyio.sleep(self._scenario.flickers)
            self._pause()
            await anyio.sleep(self._scenario.flickers)
            self._resume()

    def _make(self) -> App:
        settings = next(self._settings)
        return App(handler=self._handle, settings=settings, dead_letters=True, attempts=self._attempts)

    async def _publish(self, count: int) -> None:
        spread = self._scenario.spread
        for number in range(count if spread else 1):
            if number:
                await anyio.sleep(spread)
            self._publish_at_once(1 if spread else count)
        if self._scenario.ends:
            for partition in self._world.broker.partitions:
                self._world.broker.skip(1, partition=partition)

    def _publish_at_once(self, count: int) -> None:
        limit = self._world.plan.limit
        if limit is not None:
            count = max(0, min(count, limit - self._published))
        outcomes = self._scenario.outcomes[self._published :]
        value: Callable[[int, bytes | None], bytes] = lambda index, _: bytes([outcomes[index]])  # noqa: E731
        if count:
            scenario = self._scenario
            shares = {"gaps": scenario.gaps, "keyless": scenario.keyless}
            self._world.produce(TOPIC, count, keys=scenario.keys, **shares, value=value)
        self._published += count

    def _stop_one(self) -> None:
        staying = [one for one in self._world.members if not one.gone and not one.ended.is_set()]
        if len(staying) > 1:
            with staying[0].acting():
                staying[0].consumer.stop()

    def _replace_one(self) -> None:
        staying = [one for one in self._world.members if not one.gone and not one.ended.is_set()]
        staying = [one for one in staying if one.name not in self._stopping]
        if not staying:
            return
        if self._scenario.deploys == "kill":
            # The world starts another process in its place.
            self._world.perform(Fault(0, "crash", 0, 0.0), staying[0])
            return
        self._stopping.add(staying[0].name)
        with staying[0].acting():
            staying[0].consumer.stop()
        self._world.workers(1, make=self._make)

    def _pause(self) -> None:
        worker = next((one for one in self._world.members if not one.gone and one.consumer.ready), None)
        if worker is not None:
            with worker.acting():
                worker.consumer.pause()

    def _resume(self) -> None:
        for worker in self._world.members:
            if not worker.gone and not worker.ended.is_set():
                with worker.acting():
                    worker.consumer.resume()

    def _unblock(self) -> bool:
        """Write the dead letters of all blocked lanes. Return whether any lane was blocked."""
        found = 0
        for worker in self._world.members:
            if (
                worker.gone
                or worker.ended.is_set()
                or not worker.consumer.ready
                or not worker.consumer.status().blocked
            ):
                continue
            with worker.acting():
                for record in self._world.broker.records:
                    if record.key is not None:
                        found += worker.consumer.park(record.key)
        return found > 0

    async def _handle(self, message: Message) -> None:
        if isinstance(self._world, AdapterWorld):
            self._world.adapter.on_started(GROUP.get() or "", message)
        outcome = message.value[0]
        await anyio.sleep(_SECONDS.get(outcome, 0.05))
        if outcome == _FAILS_ONCE and message.attempt == 1:
            raise Nak(delay=0.5)
        if outcome == POISON:
            raise Term("never")
