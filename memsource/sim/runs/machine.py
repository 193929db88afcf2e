"""A state machine whose rules are what a broker does: for users' own stateful property tests.

Each step takes the simulation so much further, and nothing happens between two steps. Needs the extra ``testing``.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final, TypeVar

import anyio
import anyio.lowlevel

from lanes.handlers import Handler
from memsource.personality import PersonalityName
from memsource.sim.errors import SimulationFailed
from memsource.sim.loop.event_loop import SimLoop, Threads
from memsource.sim.loop.guards import installed
from memsource.sim.loop.watch import watching
from memsource.sim.plans.faults import AMOUNTS
from memsource.sim.plans.plan import IMPOSSIBLE_FAULTS, Fault, FaultKind, Plan, Schedule
from memsource.sim.runs.run import Conditions, broker_of, judged
from memsource.sim.world.worker import App
from memsource.sim.world.world import World

try:
    from hypothesis import strategies as st
    from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
except ImportError as error:
    raise ImportError(
        "memsource.sim.runs.machine needs hypothesis, which is not installed: pip install 'lanes-runtime[testing]'"
    ) from error

__all__ = ["SimulationMachine"]

T = TypeVar("T")

_STEP_LIMIT: Final = 10.0
_THREAD_TIME: Final = 0.001
_TURNS_LIMIT: Final = 100_000


class SimulationMachine(RuleBasedStateMachine):
    """Workers around the user's handler; Hypothesis decides what is published, what fails, and when.

    Derive from it, say in ``app`` what the workers run, and add rules of your own: ``world`` is there for them, and
    ``drive`` for what is to be awaited. A rule of this class is left out by ``crash = None``. A new machine is made
    for every example, so what the handler writes to belongs on ``self``, made in ``app``::

        class Orders(SimulationMachine):
            def app(self):
                self.totals = Counter()
                return App(handler=self.add)

            async def add(self, message): ...

            def at_rest(self):
                assert self.totals == expected

        TestOrders = Orders.TestCase

    At the end of an example there are no more faults, everything must be caught up (``World.settled``), ``at_rest``
    holds, the workers are stopped in order, and all checkers judge the history. What they find is raised as
    ``SimulationFailed``, and Hypothesis prints the steps that lead there, as few as it can.
    """

    personality: ClassVar[PersonalityName] = "kafka"
    partitions: ClassVar[int] = 4
    members: ClassVar[int] = 2
    """Workers at the beginning; 1 or more."""
    topic: ClassVar[str] = "orders"
    threads: ClassVar[Threads] = "refuse"
    """``"inline"`` runs plain handlers, and what goes to a thread, on the loop."""

    def __init__(self) -> None:
        super().__init__()
        # An example may be run while an error is handled: only what comes on top of it has ended this one.
        self._handled = sys.exc_info()[1]
        self._chooser = _Deviating()
        self._loop = SimLoop(
            self._chooser,
            thread_time=(lambda: _THREAD_TIME) if self.threads == "inline" else None,
            turns_limit=_TURNS_LIMIT,
        )
        self._shared: App | Handler | None = None
        self._plan = Plan(self.personality)
        self._conditions = Conditions(test=_no_test, partitions=self.partitions, threads=self.threads)
        self._over = False
        self._opened = contextlib.ExitStack()
        self._opened.enter_context(installed(SimLoop))
        self._runner = asyncio.Runner(loop_factory=lambda: self._loop)
        self._life: asyncio.Task[None] | None = None
        self._scope: anyio.CancelScope | None = None
        try:
            self.world = self.drive(self._begin())
            self.call(lambda: self.world.workers(self.members, make=self.process))
        except BaseException:
            self._close()
            raise

    def __repr__(self) -> str:
        return f"<{type(self).__name__} on {self.personality}>"

    # --- for users

    def app(self) -> App | Handler:
        """What the workers run, one object that all of them share: what it remembers outlives a crash, as a database
        does. Called once for an example, before its first step."""
        raise NotImplementedError(f"{type(self).__name__}.app: return the handler, or an App of it and its settings")

    def process(self) -> App | Handler:
        """What one worker runs, asked for whenever one starts, after a crash too. Override it instead of ``app`` with
        what makes a new handler each time, where a process shall forget what it remembered."""
        if self._shared is None:
            self._shared = self.app()
        return self._shared

    def at_rest(self) -> None:
        """What holds when all is caught up and the workers still run; nothing unless it is overridden."""

    def drive(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the simulation's loop, and everything else there while it lasts; returns what it does.

        Blocks, while virtual time passes. Raises what the coroutine raises, and ``Deadlock``, ``Livelock`` and
        ``Refused``: after one of these every further call raises it again.
        """
        if self._loop.failure is not None:
            coroutine.close()
            raise self._loop.failure
        with watching(self._loop, _STEP_LIMIT):
            result = self._runner.run(coroutine)
        if self._life is not None and self._life.done() and not self._over:
            self._life.result()
        return result

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Call a plain function where the loop runs, as ``World.workers`` and ``World.publish`` want it."""

        async def called() -> T:
            return function(*args)

        return self.drive(called())

    # --- rules

    @rule(
        n=st.integers(1, 10),
        keys=st.integers(1, 5),
        keyless=st.sampled_from([0.0, 0.3]),
        gaps=st.sampled_from([0.0, 0.3]),
    )
    def produce(self, n: int, keys: int, keyless: float, gaps: float) -> None:
        """Messages are published."""
        self.call(lambda: self.world.produce(self.topic, n, keys=keys, keyless=keyless, gaps=gaps))

    @rule(seconds=st.sampled_from([0.0, 0.001, 0.01, 0.1, 1.0, 10.0, 60.0]))
    def advance(self, seconds: float) -> None:
        """Time passes."""
        self.drive(anyio.sleep(seconds))

    @rule(turns=st.integers(1, 40), index=st.integers(0, 5))
    def deviate(self, turns: int, index: int) -> None:
        """So many turns from now it is another task's turn; with index 0, time jumps to the next timer."""
        self._chooser.at(self._loop.turns + turns, index)

    @rule(worker=st.integers(0, 3), after=st.sampled_from(AMOUNTS["crash"]))
    def crash(self, worker: int, after: float) -> None:
        """A worker is gone without a word, and a new one comes after so many seconds."""
        self._perform("crash", worker, after)

    @rule()
    def rebalance(self) -> None:
        """The coordinator plans anew."""
        self._perform("rebalance")

    @rule(partition=st.integers(0, 3))
    def lost(self, partition: int) -> None:
        """A partition is taken away without asking."""
        self._perform("lost", partition)

    @precondition(lambda self: "redeliver" not in IMPOSSIBLE_FAULTS[self.personality])
    @rule(partition=st.integers(0, 3))
    def redeliver(self, partition: int) -> None:
        """Something of a partition is delivered again."""
        self._perform("redeliver", partition)

    @invariant()
    def nothing_is_found(self) -> None:
        """The world's own checks have found nothing yet."""
        _raise(self.personality, self.world.findings, self.world.causes)

    def teardown(self) -> None:
        try:
            if sys.exc_info()[1] is self._handled:
                self._end()
        finally:
            self._close()

    # --- inside

    def _perform(self, kind: FaultKind, target: int = 0, amount: float = 0.0) -> None:
        world = self.world
        self.call(world.perform, Fault(world.boundaries, kind, target, amount), world.members[0])

    async def _begin(self) -> World:
        made: asyncio.Future[World] = self._loop.create_future()
        self._life = self._loop.create_task(self._live(made), name="world")
        return await made

    async def _live(self, made: asyncio.Future[World]) -> None:
        async with anyio.create_task_group() as tasks:
            broker = broker_of(self._plan, self._conditions)
            world = World(self._plan, broker, self._loop, tasks, threads=self.threads)
            tasks.start_soon(world.turn_time)
            self._scope = tasks.cancel_scope
            made.set_result(world)

    def _end(self) -> None:
        self.drive(self.world.settled())
        self.at_rest()
        self.drive(self.world.stop())
        self.call(self.world.end)
        # Who was told to let time pass is late, and no deadline is judged.
        plan = replace(self._plan, schedule=Schedule(jumps=self._chooser.jumps))
        run = judged(plan, self._conditions, self.world, self._loop.turns, self._loop.time())
        _raise(self.personality, run.findings, run.causes)

    def _close(self) -> None:
        self._over = True
        with self._opened, contextlib.closing(self._loop):
            try:
                with watching(self._loop, _STEP_LIMIT), contextlib.closing(self._runner):
                    if self._loop.failure is not None:
                        # The run that failed has left its stop behind, and this one takes it.
                        with contextlib.suppress(RuntimeError):
                            self._runner.run(anyio.lowlevel.checkpoint())
                    if self._scope is not None:
                        self._runner.run(self._cancelled(self._scope))
            except Exception:
                # What made the loop fail was raised by the step it failed in.
                self._loop.abandon()
                if self._loop.failure is None:
                    raise

    async def _cancelled(self, scope: anyio.CancelScope) -> None:
        """All workers and the broker's timers, ended."""
        assert self._life is not None
        self.world.end()
        self._loop.end()
        scope.cancel()
        await asyncio.wait([self._life])


class _Deviating:
    """First in, first out, except where it was told otherwise; see ``Chooser``."""

    def __init__(self) -> None:
        self._told: dict[int, int] = {}
        self._jumped: list[int] = []

    def at(self, turn: int, index: int) -> None:
        """In this turn the task at ``index``; 0 = time jumps."""
        self._told[turn] = index

    @property
    def jumps(self) -> tuple[int, ...]:
        """The turns in which time has jumped, rising."""
        return tuple(sorted(set(self._jumped)))

    def choose(self, turn: int, tasks: Sequence[int]) -> int:
        index = self._told.get(turn, 0)
        return index if index < len(tasks) else 0

    def jump(self, turn: int) -> bool:
        told = self._told.get(turn) == 0
        if told:
            self._jumped.append(turn)
        return told


async def _no_test(world: World) -> None:
    """The rules are the test."""


def _raise(personality: PersonalityName, findings: dict[str, str], causes: list[BaseException]) -> None:
    if findings:
        found = "\n".join(f"  {name}: {what}" for name, what in findings.items())
        raise SimulationFailed(f"{len(findings)} found, on {personality}:\n{found}") from next(iter(causes), None)
