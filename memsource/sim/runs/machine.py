"""A Hypothesis state machine whose rules are actions and faults of a broker, for a user's own stateful tests.

Each step advances the simulation, which stands still between two steps. Needs the extra ``testing``.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, ClassVar, Final, TypeVar

import anyio
import anyio.lowlevel

from lanes.handlers import Handler
from memsource.personality import PersonalityName
from memsource.sim.errors import SimulationFailed, cause_of
from memsource.sim.loop.choosers import Recording, Sparse
from memsource.sim.loop.event_loop import SimLoop, Threads
from memsource.sim.loop.guards import installed
from memsource.sim.loop.watch import watching
from memsource.sim.plans.faults import AMOUNTS
from memsource.sim.plans.plan import IMPOSSIBLE_FAULTS, Fault, FaultKind, Plan, Schedule
from memsource.sim.runs.run import Conditions, Run, broker_of, found, judged
from memsource.sim.world.worker import App
from memsource.sim.world.world import World

try:
    from hypothesis import strategies as st
    from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
except ImportError as error:
    raise ImportError(
        "memsource.sim.runs.machine needs hypothesis, which is not installed: pip install '.[testing]' in the "
        "checkout of lanes"
    ) from error

__all__ = ["SimulationMachine"]

T = TypeVar("T")

_STEP_LIMIT: Final = 10.0
_THREAD_TIME: Final = 0.001
_TURNS_LIMIT: Final = 100_000


class SimulationMachine(RuleBasedStateMachine):
    """Runs workers with the user's handler. Hypothesis draws the messages, the faults and their order.

    Derive a class, return the handler from ``app``, and add your own rules. A rule uses ``world``, and passes
    coroutines to ``drive``. To omit a rule of this class, set its name to None, such as ``crash = None``. Each example
    uses a new machine. ``app`` therefore makes the state of the handler and keeps the state on ``self``::

        class Orders(SimulationMachine):
            def app(self):
                self.totals = Counter()
                return App(handler=self.add)

            async def add(self, message): ...

            def at_rest(self):
                assert self.totals == expected

        TestOrders = Orders.TestCase

    At the end of an example no more faults happen, and the workers must finish all messages (``World.settled``). After
    the last step ``at_rest`` must succeed, the workers stop, and the checkers judge the history. A finding raises
    ``SimulationFailed``, and Hypothesis prints the fewest steps that lead to the finding.
    """

    personality: ClassVar[PersonalityName] = "kafka"
    partitions: ClassVar[int] = 4
    members: ClassVar[int] = 2
    """Number of workers at the beginning, 1 or more."""
    topic: ClassVar[str] = "orders"
    threads: ClassVar[Threads] = "refuse"
    """``"inline"`` runs plain handlers, and functions for a thread, on the loop; ``"refuse"`` refuses threads."""

    def __init__(self) -> None:
        super().__init__()
        # An example may begin while an earlier error is handled. Only a different error can have ended this example.
        self._handled = sys.exc_info()[1]
        self._deviations = Sparse(Schedule())
        self._chooser = Recording(self._deviations)
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
        """Make the handler that all workers share. The state of the handler outlives a crash, like a database.

        Each example calls ``app`` once, before its first step.

        Returns:
            The handler, or an ``App`` of the handler and its settings.
        """
        raise NotImplementedError(
            f"{type(self).__name__}.app: return the handler, or an App with the handler and its settings"
        )

    def process(self) -> App | Handler:
        """Return the handler of one worker. Called at each start of a worker, also after a crash.

        To lose the memory of a process in a crash, override ``process`` instead of ``app``, and return a new handler
        at each call.

        Returns:
            The handler, or an ``App`` of the handler and its settings; the shared handler of ``app`` by default.
        """
        if self._shared is None:
            self._shared = self.app()
        return self._shared

    def at_rest(self) -> None:
        """Assert conditions while the workers still run, after the end of all messages. Default: do nothing."""

    def drive(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the simulation's loop, together with the workers. Blocks while virtual time passes.

        Args:
            coroutine: The coroutine to run.

        Returns:
            The result of the coroutine.

        Raises:
            Deadlock: Every task waits for another task. Each further call raises the same error again.
            Livelock: The call takes no virtual time. Each further call raises the same error again.
            Refused: The code used something without virtual time. Each further call raises the same error again.
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
        """Call a plain function on the loop. Use ``call`` for ``World.workers`` and ``World.publish``.

        Args:
            function: The function.
            *args: Arguments of the function.

        Returns:
            The result of the function.
        """

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
        """Publish messages.

        Args:
            n: Number of messages.
            keys: Number of keys.
            keyless: Share of messages without a key.
            gaps: Share of messages after a gap.
        """
        self.call(lambda: self.world.produce(self.topic, n, keys=keys, keyless=keyless, gaps=gaps))

    @rule(seconds=st.sampled_from([0.0, 0.001, 0.01, 0.1, 1.0, 10.0, 60.0]))
    def advance(self, seconds: float) -> None:
        """Let time pass.

        Args:
            seconds: Virtual seconds.
        """
        self.drive(anyio.sleep(seconds))

    @rule(turns=st.integers(1, 40), index=st.integers(0, 5))
    def deviate(self, turns: int, index: int) -> None:
        """Plan a deviation: another task takes a step, or time jumps to the next timer.

        Args:
            turns: Number of turns until the deviation.
            index: Index of the task; 0 = time jumps.
        """
        self._deviations.at(self._loop.turns + turns, index)

    @rule(worker=st.integers(0, 3), after=st.sampled_from(AMOUNTS["crash"]))
    def crash(self, worker: int, after: float) -> None:
        """Kill a worker as by ``kill -9``, and start a new worker later.

        Args:
            worker: Number of the worker.
            after: Seconds until a new worker starts.
        """
        self._perform("crash", worker, after)

    @rule()
    def rebalance(self) -> None:
        """Make the coordinator plan a new assignment of partitions."""
        self._perform("rebalance")

    @rule(partition=st.integers(0, 3))
    def lost(self, partition: int) -> None:
        """Take a partition from its owner without a revocation.

        Args:
            partition: Number of the partition.
        """
        self._perform("lost", partition)

    @precondition(lambda self: "redeliver" not in IMPOSSIBLE_FAULTS[self.personality])
    @rule(partition=st.integers(0, 3))
    def redeliver(self, partition: int) -> None:
        """Deliver a message of a partition again.

        Args:
            partition: Number of the partition.
        """
        self._perform("redeliver", partition)

    @invariant()
    def nothing_is_found(self) -> None:
        """Assert that the world's own checks have no finding yet."""
        _raise(self.world)

    def teardown(self) -> None:
        """End the example: finish all messages, stop the workers, and let the checkers judge the history."""
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
        # The plan tells ``judged`` of jumps of time, after which no checker judges a deadline.
        plan = replace(self._plan, schedule=self._chooser.schedule)
        _raise(judged(plan, self._conditions, self.world, self._loop.turns, self._loop.time()))

    def _close(self) -> None:
        self._over = True
        with self._opened, contextlib.closing(self._loop):
            try:
                with watching(self._loop, _STEP_LIMIT), contextlib.closing(self._runner):
                    if self._loop.failure is not None:
                        # The failed run has left a pending stop of the loop, which this call consumes.
                        with contextlib.suppress(RuntimeError):
                            self._runner.run(anyio.lowlevel.checkpoint())
                    if self._scope is not None:
                        self._runner.run(self._cancelled(self._scope))
            except Exception:
                # If the loop has failed, an earlier step has raised the error.
                self._loop.abandon()
                if self._loop.failure is None:
                    raise

    async def _cancelled(self, scope: anyio.CancelScope) -> None:
        """End all workers and the broker's timers."""
        assert self._life is not None
        self.world.end()
        self._loop.end()
        scope.cancel()
        await asyncio.wait([self._life])


async def _no_test(world: World) -> None:
    """Do nothing, because the rules are the test."""


def _raise(of: World | Run) -> None:
    if of.findings:
        raise SimulationFailed(found(of.findings, of.plan.personality)) from cause_of(of.causes)
