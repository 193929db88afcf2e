"""One run of a test under one plan, and its result."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal, get_args

import anyio
from blake3 import blake3

from lanes.arguments import but_not
from memsource.checkers import CHECKERS, TIMED, MakeChecker, NoOverlap, check
from memsource.checkers.deadlines import SILENT
from memsource.checkers.outputs import OutputOrder
from memsource.history.reader import Segment, read_bytes
from memsource.history.rows import number_of
from memsource.jetstream.source import JetStreamPersonality
from memsource.kafka.source import KafkaPersonality
from memsource.personality import Personality, PersonalityName
from memsource.sim.errors import Deadlock, ImpossiblePlan, Livelock, NeverYields, Overtime, is_finding, notable
from memsource.sim.loop.choosers import Chooser, Recording, Sparse
from memsource.sim.loop.event_loop import SimLoop, Threads, current
from memsource.sim.loop.guards import installed
from memsource.sim.loop.places import place_of_task, waits
from memsource.sim.loop.virtual import run
from memsource.sim.plans.plan import Plan
from memsource.sim.world.injection import Moment
from memsource.sim.world.progress import listed
from memsource.sim.world.world import World

Test = Callable[[World], Awaitable[None]]
"""A simulated test, a coroutine function that receives a new world in every run."""

TIME_LIMIT: Final = 86_400.0
"""Default of ``time_limit``, the longest duration of a test in virtual seconds."""

_SETUP: Final = "must be a plain function; put async code into the test"
_MARGIN: Final = 1.0
"""Allowed delay of a process without a freeze, in virtual seconds. The limit covers the wait after a failure."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """The conditions of all runs of a campaign.

    Attributes:
        test: The simulated test.
        partitions: Number of partitions of the topic, 1 or more.
        threads: ``"refuse"`` or ``"inline"``; see ``memsource.sim.loop.virtual.run``.
        setup: Function to call before each run; None = no function.
        time_limit: Maximum duration of the test, in virtual seconds. A longer test is the finding ``Overtime``.
        checkers: Checkers that judge the history.
        settles: Whether a test that has published messages must have called ``World.settled``.
        broker: Makes the broker of a run; None = the default broker of the personality.
        world: Makes the world of a run, with the arguments of ``World``.

    Raises:
        ImpossiblePlan: A value is out of its range.
    """

    test: Test
    partitions: int = 4
    threads: Literal["refuse", "inline"] = "refuse"
    setup: Callable[[], object] | None = None
    time_limit: float = TIME_LIMIT
    checkers: Sequence[MakeChecker] = CHECKERS
    settles: bool = False
    broker: Callable[[Plan], Personality] | None = None
    world: Callable[..., World] = World

    def __post_init__(self) -> None:
        if type(self.partitions) is not int or self.partitions < 1:
            raise ImpossiblePlan(
                f"partitions={self.partitions!r}: must be a whole number, 1 or more{but_not(self.partitions)}"
            )
        if self.threads not in get_args(Threads):
            raise ImpossiblePlan(f"threads={self.threads!r}: use one of {', '.join(get_args(Threads))}")
        if self.setup is not None and (not callable(self.setup) or inspect.iscoroutinefunction(self.setup)):
            raise ImpossiblePlan(f"setup={self.setup!r}: {_SETUP}")
        limit = self.time_limit
        if isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit < math.inf:
            raise ImpossiblePlan(f"time_limit={limit!r}: must be a number of virtual seconds above 0")

    def set_up(self) -> None:
        """Call ``setup``."""
        done = None if self.setup is None else self.setup()
        if inspect.isawaitable(done):
            if inspect.iscoroutine(done):
                done.close()
            raise ImpossiblePlan(f"setup={self.setup!r}: returned {done!r}; {_SETUP}")


@dataclass(frozen=True, kw_only=True)
class Run:
    """The result of one run.

    Attributes:
        plan: The plan, with the schedule that repeats the run.
        findings: The first finding of each check, by its name.
        causes: Exceptions that led to findings.
        states: States that the test passed to ``World.check``.
        segments: The history, one segment for each process.
        digest: Hash of the run; equal runs have equal digests.
        boundaries: Number of boundaries at which a fault can happen.
        turns: Turns of the loop.
        seconds: Virtual seconds.
        crashes: Number of workers that crashed.
        happened: Number of occurrences, by event of the history and by ``fault: kind``.
        history: The rows of all histories as bytes.
        moments: Faults that had an effect, with their times.
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


@installed(SimLoop)  # no garbage collection before the judgement, because it would traverse the history repeatedly
def run_plan(plan: Plan, conditions: Conditions, chooser: Chooser | None = None) -> Run:
    """Run a test under a plan, with a new world on a new loop in virtual time. Blocks.

    Raises every error that is no finding, see ``memsource.sim.errors.is_finding``.

    Args:
        plan: The plan.
        conditions: The conditions of the run.
        chooser: Chooses the steps in place of the plan's schedule. The plan of the result has the schedule that
            repeats the run.

    Returns:
        The result of the run.

    Raises:
        NeverYields: A step does not end.
        Refused: The test used something without virtual time.
        ImpossiblePlan: The test passed an impossible argument to its world.
    """
    recording = None if chooser is None else Recording(chooser)
    worlds: list[World] = []
    loops: list[SimLoop] = []
    conditions.set_up()
    state = random.getstate()
    random.seed(plan.seed)

    async def main() -> None:
        loops.append(current())
        async with anyio.create_task_group() as tasks:
            world = conditions.world(plan, broker_of(plan, conditions), loops[0], tasks, threads=conditions.threads)
            worlds.append(world)
            tasks.start_soon(world.turn_time)
            try:
                await _tested(world, conditions, loops[0])
                if world.interrupted is None:
                    await world.stop()
            finally:
                # Otherwise the frozen workers could not be cancelled.
                world.end()
            tasks.cancel_scope.cancel()

    try:
        with _quiet():
            run(main, chooser=recording or Sparse(plan.schedule), threads=conditions.threads)
    except NeverYields:
        # Each further run would take as long as this run.
        raise
    except (Deadlock, Livelock, Overtime) as error:
        if not worlds:
            raise
        worlds[0].find(type(error).__name__, str(error), error)
    except BaseExceptionGroup as group:
        raise notable(group) from None
    finally:
        random.setstate(state)
    (world,), (loop,) = worlds, loops
    if world.interrupted is not None:
        raise world.interrupted
    if recording is not None:
        plan = Plan(plan.personality, plan.seed, plan.faults, recording.schedule, plan.limit)
    return judged(plan, conditions, world, loop.turns, loop.time())


async def _tested(world: World, conditions: Conditions, loop: SimLoop) -> None:
    """Run the test function, and record its error."""
    task = asyncio.current_task()
    assert task is not None, "the test runs on a loop of asyncio"

    def overdue() -> None:
        what = f"the test has not ended in {conditions.time_limit:g} virtual seconds (time_limit=): it waits"
        loop.fail(
            Overtime(
                "\n".join(
                    [f"{what} at {place_of_task(task)}, and the other tasks", *waits(asyncio.all_tasks(loop) - {task})]
                )
            )
        )

    late = loop.call_at(conditions.time_limit, overdue)
    try:
        await conditions.test(world)
    except BaseException as error:
        # A cancellation ends the run. The cancellation comes from Ctrl-C, the loop, or an error of another task.
        if isinstance(error, asyncio.CancelledError) and task.cancelling():
            raise
        cause = notable(error)
        if is_finding(cause) or isinstance(cause, asyncio.CancelledError):
            world.find(type(cause).__name__, f"the test raised an exception: {cause}", cause)
        else:
            world.interrupt(cause)
    else:
        # Without any call, the messages of handlers count too.
        published = world.unsettled if world.settles else len(world.broker.records)
        if conditions.settles and published:
            after = "after its last world.settled()" if world.settles else "and ended without world.settled()"
            world.interrupt(
                ImpossiblePlan(
                    f"the test published {published} messages {after}, so nothing waited for their handlers; write "
                    "await world.settled() after the last produce() or publish()"
                )
            )
    finally:
        late.cancel()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the log of ``lanes`` during a run, because hundreds of runs would repeat its warnings about faults."""
    log = logging.getLogger("lanes")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(level)


def broker_of(plan: Plan, conditions: Conditions) -> Personality:
    """Make the new, empty broker of a run."""
    if conditions.broker is not None:
        return conditions.broker(plan)
    if plan.personality == "kafka":
        return KafkaPersonality(conditions.partitions)
    return JetStreamPersonality(conditions.partitions)


def _checkers(plan: Plan, conditions: Conditions, world: World) -> Sequence[MakeChecker]:
    """Return the checkers that can judge a run. After ``freeze``, ``slow`` or a jump, no checker judges deadlines."""
    makes = (*conditions.checkers, OutputOrder) if world.outputs else conditions.checkers
    kinds = {fault.kind for fault in (*plan.faults, *world.injection.performed)}
    stood_still = bool(plan.schedule.jumps) or "freeze" in kinds
    if not stood_still and "slow" not in kinds:
        return [partial(make, margin=_MARGIN) if make in TIMED else make for make in makes]
    made = [make for make in makes if make not in TIMED]
    return [partial(NoOverlap, late=True) if stood_still and make is NoOverlap else make for make in made]


def judged(plan: Plan, conditions: Conditions, world: World, turns: int, seconds: float) -> Run:
    """Return the result of a finished run, with the findings of the checkers.

    Args:
        plan: The plan, with the schedule that repeats the run.
        conditions: The conditions of the run.
        world: The world.
        turns: Turns of the loop.
        seconds: Virtual seconds of the run.

    Returns:
        The result.
    """
    histories = world.histories
    segments = [segment for number, data in enumerate(histories, 1) for segment in read_bytes(data, f"w-{number}")]
    happened: Counter[str] = Counter(row.event for segment in segments for row in segment.rows)
    happened.update(world.injection.happened)
    # An assignment that the broker took before the worker received it has no number and no row.
    taken = {(name, str(of.id), of.assignment) for name, of in world.broker.taken if of.assignment}
    if segments:
        for verdict in check(segments, _checkers(plan, conditions, world), taken=taken, outputs=world.outputs):
            # Without a freeze, a silent process was late and not suspended, so its silence is a finding.
            silent = [reason for reason in verdict.reasons if SILENT in reason]
            if verdict.status == "violated" or silent:
                world.find(verdict.name, "; ".join([*verdict.witnesses, *silent]))
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
        moments=world.injection.moments,
    )


def found(findings: Mapping[str, str], personality: PersonalityName) -> str:
    """Return the findings of a run as text, one finding on each line.

    Args:
        findings: Findings by the name of their check.
        personality: Broker of the run.

    Returns:
        The text.
    """
    lines = "".join(f"\n  {name}: {what}" for name, what in findings.items())
    return f"findings on {personality} ({len(findings)}):{lines}"


def _nothing_lost(world: World, segments: Sequence[Segment]) -> None:
    """Check that each message that the broker's data shows as finished has a successful attempt or a dead letter."""
    left = {(record.partition, record.position) for record in world.broker.unfinished}
    handled = {
        (number_of(row.partition), row.position)
        for segment in segments
        for row in segment.rows
        if row.event == "published" or (row.event == "ended" and row.text == "ok")
    }
    parked = {(letter.partition, letter.position) for letter in world.broker.dead_letters}
    lost = [
        record
        for record in world.broker.records
        if (place := (record.partition, record.position)) not in left and place not in handled and place not in parked
    ]
    if lost:
        what = f"{len(lost)} messages count as finished, but were neither handled nor dead-lettered: {listed(lost)}"
        world.find("NothingLost", what)
