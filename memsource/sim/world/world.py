"""A world: a broker, workers with the user's handler, and the faults of a plan.

A crash is like ``kill -9``. The worker's tasks take no further step, so no ``finally`` and no ``except`` of a handler
runs, and the broker receives no notice. If all workers share a fake with a lock, a dead handler never releases the
lock. Real processes share no memory, and therefore no such lock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Final, Literal

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from lanes.arguments import kind_of, names_wrong_calls
from lanes.core.types import PartitionKey, key_bytes
from lanes.dead_letter import DeadLetter
from lanes.handlers import Handler
from lanes.history.writer import key_hash
from lanes.outputs.publisher import Output
from lanes.source import DeadLetters
from memsource.history.outputs import VisibleOutput
from memsource.memory.topic import Record
from memsource.personality import Personality
from memsource.sim.errors import ImpossiblePlan, SimulationError
from memsource.sim.loop.event_loop import SimLoop
from memsource.sim.loop.tasks import GROUP, in_group
from memsource.sim.loop.virtual import until
from memsource.sim.plans.plan import Fault, FaultKind, Plan
from memsource.sim.plans.traffic import Traffic
from memsource.sim.world.injection import InjectedFailure, Injection
from memsource.sim.world.progress import WorldProgress, listed
from memsource.sim.world.state import copied
from memsource.sim.world.worker import App, Worker, checked_app

EPOCH: Final = 1_700_000_000.0
"""Seconds since 1970 at which the wall clock of a world begins."""

TAIL: Final = 3_600.0
"""Default of ``World.settled``: virtual seconds within which the workers must finish all messages."""

_OF_AN_APP: Final = {
    each.name: f"write world.workers(count, App(handler=…, {each.name}=…))"
    for each in fields(App)
    if each.name != "handler"
}
"""Remedies for the options of an ``App`` that a test passes to ``World.workers``."""

_STEP: Final = 1e-6
_OF_WORKER: Final = frozenset({"crash", "freeze", "slow", "commit_fails"})
_ARMED: Final = frozenset({"commit_fails", "letter_fails", "io_fails", "publish_fails"})
_OF_PARTITION: Final = frozenset({"lost", "redeliver"})
_TICK: Final = 1.0
_SLOW_FOR: Final = 10


class World:
    """The argument of a simulated test.

    Args:
        plan: The plan of the run.
        broker: The broker of the run.
        loop: The loop of the run.
        tasks: Task group of the workers.
        threads: ``"inline"`` runs plain handlers on the loop; ``"refuse"`` refuses handlers that need threads.

    Attributes:
        findings: First finding of each check, by the name of the check.
        interrupted: Error, other than a finding, that ended the run; None = no such error.
        progress: The finished messages.
        injection: The faults.
        settles: Whether the test has called ``settled``.
        outputs: The visible outputs, for the checkers.
        unsettled: Number of messages that the test has published since its last call of ``settled``.
    """

    def __init__(
        self,
        plan: Plan,
        broker: Personality,
        loop: SimLoop,
        tasks: TaskGroup,
        *,
        threads: Literal["refuse", "inline"] = "refuse",
    ) -> None:
        self.plan = plan
        self.broker = broker
        self.threads = threads
        self.findings: dict[str, str] = {}
        self.causes: list[BaseException] = []
        self.members: list[Worker] = []
        self.states: list[object] = []
        self.boundaries = 0
        self.crashes = 0
        self.progress = WorldProgress(broker)
        self.injection = Injection(plan.faults)
        self.settles = False
        self.unsettled = 0
        self.interrupted: BaseException | None = None
        self.outputs: list[VisibleOutput] = []
        self._published: list[Output] = []
        self._loop = loop
        self._tasks = tasks
        self._faulty = True
        self._settling = False
        self._over = False
        self._latest = 0.0
        self._wall_offset = 0.0
        self._topic: str | None = None
        self._drawn = 0

    def __repr__(self) -> str:
        return f"<World of {self.broker.name}: {len(self.members)} workers, {self.boundaries} boundaries>"

    # --- for tests

    @names_wrong_calls("world.produce", ImpossiblePlan, method=True)
    def produce(
        self,
        topic: str,
        n: int,
        *,
        keys: int | list[PartitionKey] = 20,
        skew: float = 1.0,
        hot: float = 0.0,
        keyless: float = 0.0,
        gaps: float = 0.0,
        value: Callable[[int, bytes | None], bytes | str] | None = None,
    ) -> list[Record]:
        """Publish ``n`` messages, or fewer if the plan limits their number. Does not block.

        The plan's seed decides the keys and their order; see ``Traffic``.

        Args:
            topic: Topic of the world, which the first call names.
            n: Number of messages, 0 or more.
            keys: Number of keys, or the keys themselves.
            skew: Exponent of Zipf's law, 0 … 10: the share of the key of rank r is proportional to 1/rˢᵏᵉʷ; 0 = equal
                shares.
            hot: Share of the first key; 0 = no hot key.
            keyless: Share of messages without a key.
            gaps: Share of messages after a gap.
            value: Makes the payload of a message from its number and key; None = a text of topic and number.

        Returns:
            The published records.

        Raises:
            ImpossiblePlan: A number is out of its range, ``value`` is no function or returns no payload, or the world
                already has another topic.
        """
        if self._topic not in (None, topic):
            raise ImpossiblePlan(
                f"topic {topic!r}: this world has the topic {self._topic!r} already; publish to one topic only"
            )
        if value is not None and not callable(value):
            raise ImpossiblePlan(
                f"value={value!r:.200}: must be a function of the message's number and key; write "
                "value=lambda number, key: payload"
            )
        self._topic = topic
        if self.plan.limit is not None:
            n = min(n, self.plan.limit)
        drawn = Traffic(n=n, keys=keys, skew=skew, hot=hot, keyless=keyless, gaps=gaps)
        records = []
        for item in drawn.items(self.plan.seed + self._drawn, len(self.broker.partitions)):
            key = None if item.key is None else key_bytes(item.key)
            payload = f"{topic} {item.index}" if value is None else value(item.index, key)
            if not isinstance(payload, bytes | str):
                raise ImpossiblePlan(
                    f"value= returned {kind_of(payload)} for message {item.index}: must return bytes or a text, such "
                    "as json.dumps(…)"
                )
            if item.gap:
                self.broker.skip(item.gap, partition=item.partition)
            records.append(self.publish(payload, key=item.key, partition=item.partition))
        self._drawn += 1
        return records

    def publish(
        self,
        value: bytes | str,
        *,
        key: PartitionKey | None = None,
        headers: Mapping[str, bytes] | None = None,
        partition: int | None = None,
    ) -> Record:
        """Publish one message. Does not block.

        From this call on, the faults that ``settled`` has stopped happen again. The exceptions are a call by a handler,
        and a call while ``settled`` runs.

        Args:
            value: Payload; the world encodes a text as UTF-8.
            key: Key; None = a message without a key.
            headers: Headers by name; None = no headers.
            partition: Number of the partition; None = the partition of the key.

        Returns:
            The published record.
        """
        # If a handler publishes a message, stopped faults do not happen again.
        if not self._settling and self._current() is None:
            self._faulty = True
            self.unsettled += 1
        data = value.encode() if isinstance(value, str) else value
        return self.broker.publish(data, key=key, headers=tuple((headers or {}).items()), partition=partition)

    @names_wrong_calls("world.workers", ImpossiblePlan, method=True, homes=_OF_AN_APP)
    def workers(
        self, count: int, app: App | Handler | None = None, *, make: Callable[[], App | Handler] | None = None
    ) -> list[Worker]:
        """Start more workers. For the broker each worker is a separate process. Does not block.

        Pass either ``app`` or ``make``.

        Args:
            count: Number of workers, 1 or more.
            app: Handler or ``App`` that all workers share. The handler's state outlives a crash, like a database.
            make: Makes the handler or ``App`` of each process at its start, also after a crash. The state of a
                handler ends with its process.

        Returns:
            The new workers.

        Raises:
            ImpossiblePlan: An argument is out of its range.
            Refused: The handler would run in threads.
            ConfigError: The settings contradict each other.
        """
        if type(count) is not int or count < 1:
            given = "a function" if callable(count) else repr(count)
            raise ImpossiblePlan(f"workers({given}): must start 1 or more workers; pass their number first")
        if (app is None) == (make is None):
            given = "neither" if app is None else "both"
            raise ImpossiblePlan(
                f"workers({count}) with {given} of handler and make=: pass either a handler that all workers share, or "
                "make=, a function that makes a handler for each process"
            )
        if make is None:
            one = checked_app(app, "workers(app)")
            return [self._start(lambda: one) for _ in range(count)]
        return [self._start(make) for _ in range(count)]

    async def settled(self, timeout: float = TAIL) -> None:
        """Wait for the faults of the plan while messages are unfinished, then wait until all messages are finished.

        Cancel-safe. During the second wait, no fault except a crash happens. A lane that a poison policy has blocked
        counts as finished. Messages that are unfinished after ``timeout`` are the finding ``CaughtUp``. After you
        publish more messages, faults can happen again. Call ``settled`` again in this case.

        Args:
            timeout: Maximum virtual seconds to wait for the faults, and again for the messages.
        """
        self.settles = self._settling = True
        self.unsettled = 0
        try:
            await until(lambda: self.injection.over or self._caught_up(), timeout)
            self._calm()
            caught_up = await until(self._caught_up, timeout)
        finally:
            self._settling = False
        if not caught_up:
            left = self.progress.left()
            what = f"{len(left)} message(s) unfinished after {timeout:g} s without a fault: {listed(left)}"
            self.find("CaughtUp", "\n".join([what, *self._hindrances()]))

    async def io(self, name: str = "io", seconds: float = 0.0) -> None:
        """Simulate a call to a database or an API, inside the user's fake of the database or API.

        A worker may crash before and after the call.

        Args:
            name: Name for the error.
            seconds: Virtual seconds that the call takes.

        Raises:
            InjectedFailure: The call fails by a fault of the plan, without an effect.
        """
        worker = self._current()
        if worker is not None:
            await worker.reach()
        if self.strikes("io_fails", "" if worker is None else worker.name):
            raise InjectedFailure(f"injected: {name} failed")
        await anyio.sleep(seconds)
        if worker is not None:
            await worker.reach()

    @names_wrong_calls("world.check", ImpossiblePlan, method=True)
    def check(self, *, state: Callable[[], object] | None = None) -> None:
        """Record the user's final state, to compare it with the state of the run without faults. Does not block.

        The checkers judge the run after the test, even without a call of ``check``.

        Args:
            state: Plain function that returns the state to copy; None = no state.

        Raises:
            ImpossiblePlan: ``state`` is async, its value cannot be copied and compared, or the test has not called
                ``settled`` since its last message.
        """
        if state is None:
            return
        if self._faulty:
            raise ImpossiblePlan(
                "check(state=…) while faults happen: the state is not final; call check() after await world.settled(), "
                "and call world.settled() again after each later produce()"
            )
        self.states.append(copied(state))

    def dead_letter_writer(self, member: str) -> DeadLetters | None:
        """Make the writer through which a member writes dead letters to the broker.

        Args:
            member: Name of the member.

        Returns:
            The writer; None = no further writer.
        """
        return None

    @property
    def dead_letters(self) -> list[DeadLetter]:
        """The dead letters that the workers have written, in the order of their first writes.

        A worker writes dead letters with ``App(dead_letters=True)``. Each message has at most one dead letter in the
        simulation, because a second write has no effect. The list is final after ``settled``. The property returns a
        new list at each call.
        """
        return self.broker.dead_letters

    def published(self, target: str) -> list[Output]:
        """Return the outputs to a target that readers see, in the order of their writes.

        A worker publishes outputs with ``App(publisher=True)``. After a fault, an output of a message may be there
        several times, because the simulated broker does not deduplicate. The list is final after ``settled``.

        Args:
            target: Target of ``Message.publish_soon``.

        Returns:
            A new list.
        """
        return [output for output in self._published if output.target == target]

    @property
    def histories(self) -> list[bytes]:
        """The histories of all processes that have opened, in the order of their starts."""
        return [data for worker in self.members if (data := worker.history.data)]

    @property
    def now(self) -> float:
        """Virtual seconds since the world began."""
        return self._loop.time()

    # --- for workers

    def clock(self) -> float:
        """Return the time on the clock of all consumers.

        The time increases with every call, so all rows have one order.
        """
        self._latest = max(self._loop.time(), self._latest + _STEP)
        return self._latest

    def wall(self) -> float:
        """Return the seconds since 1970, on the wall clock."""
        return EPOCH + self._loop.time() + self._wall_offset

    def find(self, check: str, what: str, cause: BaseException | None = None) -> None:
        """Record a finding, unless its check already has one.

        Args:
            check: Name of the check.
            what: Text of the finding.
            cause: The exception that led to the finding; None without an exception.
        """
        if check not in self.findings:
            self.findings[check] = what
            if cause is not None:
                self.causes.append(cause)

    def boundary(self, worker: Worker) -> None:
        """Perform the faults that the plan has for the boundary that a worker reaches now.

        Args:
            worker: The worker at the boundary.
        """
        if self._over:
            return
        number = self.boundaries
        self.boundaries += 1
        for fault in self.injection.at(number):
            # A crash may also happen after the other faults or during a stop, because no message is lost.
            if self._faulty or fault.kind == "crash":
                self.perform(fault, worker)

    def strikes(self, kind: FaultKind, who: str) -> Fault | None:
        """Disarm and return the fault that acts now.

        Args:
            kind: Kind of fault, armed for any worker.
            who: Name of the affected worker, for the view of the run.

        Returns:
            The fault; None if no fault of this kind is armed.
        """
        fault = self.injection.take(kind)
        if fault is not None:
            self.happens(fault, who)
        return fault

    def happens(self, fault: Fault, whom: str) -> None:
        """Record a fault that acts now.

        Args:
            fault: The fault.
            whom: Name of the affected worker or partition; "" = neither.
        """
        # The time of the fault is before the next row of a history.
        self.injection.note(max(self.now, self._latest) + _STEP / 2, fault, whom)

    def show(self, outputs: Sequence[Output]) -> None:
        """Store outputs of a worker, which readers see from now on. Does not block.

        Args:
            outputs: The outputs, in the order of their writes.
        """
        for output in outputs:
            self._published.append(output)
            key = None if output.key is None else key_hash(output.key)
            message_key = None if output.message_key is None else key_hash(output.message_key)
            # Half a step before the next row of a history.
            at = max(self.now, self._latest) + _STEP / 2
            place = str(output.source), output.position, message_key, output.attempt, output.number
            self.outputs.append(VisibleOutput(at, output.target, key, *place))

    def interrupt(self, error: BaseException) -> None:
        """End the run at once with an error that is no finding. The run raises the first error of this kind.

        Args:
            error: The error to raise to the caller of the run.
        """
        if self.interrupted is None:
            self.interrupted = error
        self._tasks.cancel_scope.cancel()

    # --- for the run

    async def turn_time(self) -> None:
        """Call ``advance`` of the broker whenever one of its timers is due. Runs until a cancellation."""
        while True:
            # A later call may set an earlier timer.
            await anyio.sleep(min(max(self.broker.next_at() - self.now, _STEP), _TICK))
            self.broker.advance(self.now)

    async def stop(self) -> None:
        """Stop all workers. A worker that does not end in time causes the finding ``StopEnds``."""
        self._calm()
        left = [worker for worker in self.members if not worker.gone]
        for worker in left:
            worker.stopped = True
            with worker.acting():
                worker.consumer.stop()
        limit = max((worker.stop_limit() for worker in left), default=0.0)
        with anyio.move_on_after(limit):
            for worker in left:
                await worker.ended.wait()
        for worker in left:
            if not worker.ended.is_set():
                self.find("StopEnds", f"{worker.name} has not stopped {limit:g} s after the order to stop")

    def end(self) -> None:
        """End all workers before the cleanup, so that no history records the cleanup."""
        self._over = True
        for worker in self.members:
            worker.history.cut()
            # A frozen worker must wake so that its tasks can be cancelled.
            self._loop.freeze(worker.name, self.now)

    # --- inside

    def _start(self, make: Callable[[], App | Handler]) -> Worker:
        number = len(self.members) + 1
        name = f"w-{number}"
        with in_group(name):
            app = checked_app(make(), f"make= of {name}")
        worker = Worker(self, name, number, app, make)
        self.members.append(worker)
        with worker.acting():
            self._tasks.start_soon(worker.run)
        return worker

    def _calm(self) -> None:
        """Stop all faults except crashes, and disarm armed faults. A frozen worker wakes when its freeze ends."""
        self._faulty = False
        self.injection.disarm()
        for worker in self.members:
            worker.slow_until = 0.0

    def _current(self) -> Worker | None:
        name = GROUP.get()
        return next((worker for worker in self.members if worker.name == name), None)

    def _hindrances(self) -> list[str]:
        """Return lines with the possible reasons why messages stay unfinished."""
        alive = {worker.name for worker in self._alive()}
        return self._loop.waiting(alive) if alive else ["  no worker runs: none was started, or all have ended"]

    def _alive(self) -> list[Worker]:
        return [worker for worker in self.members if not worker.gone and not worker.ended.is_set()]

    def _caught_up(self) -> bool:
        alive = self._alive()
        if self._faulty and not alive:
            return False
        # A status is expensive to make, and matters only if a lane can be blocked.
        asked = alive if any(worker.blocks for worker in alive) else []
        return self.progress.caught_up(lambda: [worker.consumer.status() for worker in asked if worker.consumer.ready])

    # --- faults

    def perform(self, fault: Fault, caller: Worker) -> None:
        """Perform a fault now. Does not block.

        Args:
            fault: The fault.
            caller: The worker from which the fault's target number counts.
        """
        alive = self._alive()
        # Targets count from the calling worker.
        at = alive.index(caller) if caller in alive else 0
        worker = alive[(at + fault.target) % len(alive)] if alive else caller
        self.injection.performed.append(fault)
        if worker.gone and fault.kind in _OF_WORKER:
            return
        if fault.kind in _ARMED:
            self.injection.arm(fault, worker.name if fault.kind in _OF_WORKER else "")
            return
        partition = fault.target % len(self.broker.partitions)
        whom = f"partition {partition}" if fault.kind in _OF_PARTITION else ""
        if self._struck(fault, worker, partition):
            self.happens(fault, worker.name if fault.kind in _OF_WORKER else whom)

    def _struck(self, fault: Fault, worker: Worker, partition: int) -> bool:
        """Apply a fault. Return False if the fault has no effect."""
        now, amount = self.now, fault.amount
        if fault.kind == "crash":
            self._crash(worker, amount)
            return True
        if fault.kind == "rebalance":
            return self.broker.rebalance(now)
        if fault.kind == "lost":
            return self.broker.lose(partition, now)
        if fault.kind == "redeliver":
            return self.broker.redeliver(partition, now)
        if fault.kind == "restart":
            return self.broker.restart(now)
        if fault.kind == "freeze":
            # A second freeze never wakes a worker earlier.
            worker.frozen_until = max(worker.frozen_until, now + amount)
            self._loop.freeze(worker.name, worker.frozen_until)
            self.broker.freeze(worker.name, worker.frozen_until)
        elif fault.kind == "slow":
            worker.slow, worker.slow_until = amount, now + _SLOW_FOR * amount
        else:
            self._wall_offset += amount
        return amount != 0

    def _crash(self, worker: Worker, after: float) -> None:
        if worker.gone:
            return
        self.crashes += 1
        worker.gone = True
        worker.ended.set()
        worker.history.cut()
        self.injection.disarm(worker.name)
        self.broker.crash(worker.name, self.now)
        self._loop.freeze(worker.name, math.inf)
        if worker.stopped:
            # A stopped worker is not replaced.
            return
        # The current task belongs to the worker's group, and a task that it starts would end with the worker.
        with in_group(None):
            self._tasks.start_soon(self._replace, worker.make, after)

    async def _replace(self, make: Callable[[], App | Handler], after: float) -> None:
        await anyio.sleep(after)
        try:
            self._start(make)
        except SimulationError as error:
            self.interrupt(error)
        except Exception as error:
            self.find(type(error).__name__, f"w-{len(self.members) + 1} could not start again: {error}", error)
