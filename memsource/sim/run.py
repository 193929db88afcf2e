"""One run of a test under one plan, and everything that can be said about it afterwards."""

from __future__ import annotations

import gc
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Literal

import anyio
from blake3 import blake3

from memsource.checkers import (
    CHECKERS,
    CommitsInTime,
    DrainInTime,
    DrainWaitsForRunning,
    KeptAlive,
    MakeChecker,
    UnknownCommitRepeated,
    check,
)
from memsource.history import Segment, read_bytes
from memsource.jetstream import JetStreamBroker
from memsource.kafka import KafkaBroker
from memsource.sim.choosers import Chooser, Recording, Sparse
from memsource.sim.errors import Deadlock, ImpossiblePlan, Livelock, NeverYields, Refused, SimulationError
from memsource.sim.loop import current
from memsource.sim.personality import Personality
from memsource.sim.plan import Plan
from memsource.sim.virtual import run
from memsource.sim.world import Moment, World

__all__ = ["Run", "Test", "run_plan"]

Test = Callable[[World], Awaitable[None]]
"""A simulated test: it gets a new world for every run."""


_STAND_STILL: Final = frozenset({"freeze", "slow"})
_LATE: Final[tuple[MakeChecker, ...]] = (
    CommitsInTime,
    UnknownCommitRepeated,
    KeptAlive,
    DrainInTime,
    DrainWaitsForRunning,
)


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What is the same in all runs of a campaign. ``setup`` is called before each; ``partitions``: how many there are.

    ``threads``: ``"refuse"`` or ``"inline"``, see ``memsource.sim.virtual.run``. ``checkers`` judge the history.
    ``broker`` makes the broker of a run; None = one with the defaults of its personality.
    """

    test: Test
    partitions: int = 4
    threads: Literal["refuse", "inline"] = "refuse"
    setup: Callable[[], object] | None = None
    checkers: Sequence[MakeChecker] = CHECKERS
    broker: Callable[[Plan], Personality] | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one run was. ``findings``: check → the first thing it found; ``causes``: exceptions behind them.

    ``states``: what the test noted with ``World.check``. ``digest`` says whether two runs were the same.
    ``boundaries``: how many there were for a fault to be at. ``happened``: event → how often, of the history, with what
    was performed
    of the plan as ``fault: kind``; ``moments``: when that was.
    """

    plan: Plan
    findings: dict[str, str]
    causes: list[BaseException] = field(repr=False)
    states: list[object] = field(repr=False)
    segments: list[Segment] = field(repr=False)
    digest: str
    boundaries: int
    turns: int
    seconds: float
    crashes: int
    happened: Counter[str] = field(repr=False)
    history: bytes = field(repr=False)
    moments: list[Moment] = field(default_factory=list, repr=False)


def run_plan(plan: Plan, conditions: Conditions, chooser: Chooser | None = None) -> Run:
    """Run a test under a plan. Blocks; calls the test with a new world, on a new loop in virtual time.

    ``chooser`` decides instead of the plan's schedule; the plan of the result then has the schedule that repeats it.
    Raises ``Refused`` for what has no virtual time, ``NeverYields`` for a step that does not end, ``ImpossiblePlan``
    for what the test asks of its world and cannot have.
    """
    recording = None if chooser is None else Recording(chooser)
    world: World | None = None
    unexpected: list[tuple[str, BaseException]] = []
    bad_use: list[SimulationError] = []
    if conditions.setup is not None:
        conditions.setup()
    state = random.getstate()
    random.seed(plan.seed)

    async def main() -> None:
        nonlocal world
        loop = current()
        async with anyio.create_task_group() as tasks:
            world = World(plan, broker_of(plan, conditions), loop, tasks, threads=conditions.threads)
            tasks.start_soon(world.turn_time)
            try:
                await conditions.test(world)
            except (Refused, ImpossiblePlan) as error:
                bad_use.append(error)
            except Exception as error:
                world.find(type(error).__name__, f"the test raised it: {error}", error)
            await world.stop()
            world.end()
            tasks.cancel_scope.cancel()

    turns, seconds = 0, 0.0
    try:
        with _quiet():
            outcome = run(main, chooser=recording or Sparse(plan.schedule), threads=conditions.threads)
        turns, seconds = outcome.turns, outcome.time
    except NeverYields:
        # Each further run would take as long as this one.
        raise
    except (Deadlock, Livelock) as error:
        if world is None:
            raise
        unexpected.append((type(error).__name__, error))
    finally:
        random.setstate(state)
    if bad_use:
        raise bad_use[0]
    assert world is not None, "the loop ran main"
    for name, cause in unexpected:
        world.find(name, str(cause), cause)
    if recording is not None:
        plan = Plan(plan.personality, plan.seed, plan.faults, recording.schedule, plan.limit)
    return judged(plan, conditions, world, turns, seconds)


@contextmanager
def _quiet() -> Iterator[None]:
    """What the consumers log of faults is no news while hundreds of runs have them; the view of a run shows it."""
    log = logging.getLogger("lanes")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(level)


def broker_of(plan: Plan, conditions: Conditions) -> Personality:
    """The broker of a run, new and empty."""
    if conditions.broker is not None:
        return conditions.broker(plan)
    if plan.personality == "kafka":
        return KafkaBroker(conditions.partitions)
    return JetStreamBroker(conditions.partitions)


def _checkers(plan: Plan, conditions: Conditions) -> Sequence[MakeChecker]:
    """Those that can say something of such a run: who stood still was late."""
    late = bool(plan.schedule.jumps) or any(fault.kind in _STAND_STILL for fault in plan.faults)
    return [make for make in conditions.checkers if not (late and make in _LATE)]


def judged(plan: Plan, conditions: Conditions, world: World, turns: int, seconds: float) -> Run:
    """What a world was whose run is over, with what the checkers find in its histories."""
    histories = [data for worker in world.members if (data := worker.history.data)]
    segments = [segment for number, data in enumerate(histories, 1) for segment in read_bytes(data, f"w-{number}")]
    happened: Counter[str] = Counter(row.event for segment in segments for row in segment.rows)
    happened.update(f"fault: {fault.kind}" for fault in world.performed)
    # What was taken before its Assigned was handled has no epoch, and no row.
    taken = {(name, str(partition.id), partition.epoch) for name, partition in world.broker.taken if partition.epoch}
    if segments:
        for verdict in check(segments, _checkers(plan, conditions), taken=taken):
            if verdict.status == "violated":
                world.find(verdict.name, "; ".join(verdict.witnesses))
    if world.settles:
        _nothing_lost(world, segments)
    history = b"".join(histories)
    return Run(
        plan=plan,
        findings=world.findings,
        causes=world.causes,
        states=world.states,
        segments=segments,
        digest=blake3(history + repr((turns, world.boundaries)).encode()).hexdigest(length=16),
        boundaries=world.boundaries,
        turns=turns,
        seconds=seconds,
        crashes=world.crashes,
        happened=happened,
        history=history,
        moments=world.moments,
    )


def _nothing_lost(world: World, segments: Sequence[Segment]) -> None:
    """What the broker holds as finished was handled well, or its dead letter is there."""
    left = {(record.partition, record.position) for record in world.broker.unfinished}
    done = {
        (row.partition, row.position)
        for segment in segments
        for row in segment.rows
        if row.event == "ended" and row.text == "ok"
    }
    numbers = {partition: int(partition.rpartition("/")[2]) for partition, _ in done}
    handled = {(numbers[partition], position) for partition, position in done}
    parked = {(letter.partition, letter.position) for letter in world.broker.letters}
    lost = [
        record
        for record in world.broker.records
        if (place := (record.partition, record.position)) not in left and place not in handled and place not in parked
    ]
    if lost:
        shown = ", ".join(f"partition {record.partition} position {record.position}" for record in lost[:5])
        world.find(
            "NothingLost", f"{len(lost)} messages count as finished, and were neither handled nor parked: {shown}"
        )


def collect_garbage() -> None:
    """At a known point, between runs: while one goes on, nothing is collected."""
    gc.collect()
