"""A world: a broker, workers around the user's handler, and what a plan lets happen to them.

A crash is what ``kill -9`` is: not one more step of the worker's tasks is taken, so no ``finally`` and no ``except``
of a handler runs, and nothing of it reaches the broker. What a dead handler held in memory, such as a lock around a
fake that all workers share, it holds for ever, as a process that shares nothing with the others cannot.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal, NamedTuple

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from lanes.config import Settings
from lanes.core.types import PartitionKey, Settlement
from lanes.dead_letter import DeadLetter
from lanes.handlers import Handler
from lanes.status import Status
from memsource.sim.errors import ImpossiblePlan
from memsource.sim.loop import GROUP, SimLoop
from memsource.sim.personality import Personality
from memsource.sim.plan import Fault, Plan
from memsource.sim.traffic import Traffic
from memsource.sim.waiting import until
from memsource.sim.worker import App, Worker
from memsource.topic import Record

__all__ = ["InjectedFailure", "Moment", "World"]

EPOCH: Final = 1_700_000_000.0
"""Seconds since the epoch at which the wall clock of a world begins."""

TAIL: Final = 3_600.0
"""Virtual seconds without a fault within which everything has to be caught up."""

_STEP: Final = 1e-6
_OF_WORKER: Final = frozenset({"crash", "freeze", "slow", "commit_fails"})
_OF_PARTITION: Final = frozenset({"lost", "redeliver"})
_TICK: Final = 1.0
_SLOW_FOR: Final = 10


class InjectedFailure(OSError):
    """A call of ``World.io`` fails because the plan says so."""


class Moment(NamedTuple):
    """A fault that was performed: when, on the clock of the histories, and whom it met: a worker, a partition or ""."""

    at: float
    fault: Fault
    whom: str


class World:
    """What a simulated test is given. ``plan`` is what happens; ``broker`` the personality, for a look at it.

    ``findings``: check → the first thing it found, of the checks that are the world's own.
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
        self.performed: list[Fault] = []
        self.moments: list[Moment] = []
        self.letter_failures = 0
        self.settles = False
        self._loop = loop
        self._tasks = tasks
        self._faults: dict[int, list[Fault]] = {}
        for fault in plan.faults:
            self._faults.setdefault(fault.at, []).append(fault)
        self._faulty = True
        self._over = False
        self._latest = 0.0
        self._wall_offset = 0.0
        self._io_failures = 0
        self._topic: str | None = None
        self._drawn = 0
        self._committed: dict[int, tuple[int, Sequence[tuple[int, int]]]] = {}

    def __repr__(self) -> str:
        return f"<World of {self.broker.name}: {len(self.members)} workers, {self.boundaries} boundaries>"

    # --- for tests

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
        """Publish ``n`` messages, or as many as the plan allows; returns them. Does not block.

        Keys and their order are drawn from the plan's seed: see ``Traffic`` for ``keys``, ``skew``, ``hot``,
        ``keyless`` and ``gaps``. ``value`` makes the payload from the number of the message and its key; the default
        is ``topic`` and number. A world has one topic.
        """
        if self._topic not in (None, topic):
            raise ImpossiblePlan(f"topic {topic!r}: this world has {self._topic!r} already, and a world has one topic")
        self._topic = topic
        if self.plan.limit is not None:
            n = min(n, self.plan.limit)
        drawn = Traffic(n=n, keys=keys, skew=skew, hot=hot, keyless=keyless, gaps=gaps)
        records = []
        for item in drawn.items(self.plan.seed + self._drawn, len(self.broker.partitions)):
            key = item.key.encode() if isinstance(item.key, str) else item.key
            payload = (
                f"{topic} {item.index}" if value is None else value(item.index, key if key is None else bytes(key))
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
        """Publish one message and return it. Does not block."""
        data = value.encode() if isinstance(value, str) else value
        return self.broker.publish(data, key=key, headers=tuple((headers or {}).items()), partition=partition)

    def workers(self, count: int, app: App | Handler) -> list[Worker]:
        """Start ``count`` more workers, each a process of its own in the eyes of the broker. Does not block.

        Raises ``Refused`` for a handler that would run in threads, ``ConfigError`` for settings that contradict each
        other.
        """
        if type(count) is not int or count < 1:
            raise ImpossiblePlan(f"workers({count!r}): start 1 or more")
        app = app if isinstance(app, App) else App(handler=app)
        return [self._start(app) for _ in range(count)]

    async def settled(self, timeout: float = TAIL) -> None:
        """Let the faults of the plan happen, then nothing but good weather until everything is caught up.

        A lane that a poison policy has blocked is as far as it gets. What is not caught up after ``timeout`` virtual
        seconds is the finding ``CaughtUp``. Cancel-safe; may be called again after more was produced.
        """
        self.settles = True
        await until(lambda: len(self.performed) == len(self.plan.faults) or self._caught_up(), timeout)
        self._calm()
        if not await until(self._caught_up, timeout):
            left = [record for record in self.broker.unfinished if not self._was_committed(record)]
            self.find(
                "CaughtUp", f"{len(left)} messages are unfinished after {timeout:g} s without a fault: {_few(left)}"
            )

    async def io(self, name: str = "io", seconds: float = 0.0) -> None:
        """A call of a user's own fake of a database or an API: takes ``seconds`` of virtual time, is a point at which
        a worker may crash, and raises ``InjectedFailure`` when the plan says so, before it has done anything."""
        worker = self._current()
        if worker is not None:
            await worker.reach()
        if self._io_failures:
            self._io_failures -= 1
            raise InjectedFailure(f"injected: {name} failed")
        await anyio.sleep(seconds)
        if worker is not None:
            await worker.reach()

    def check(self, *, state: Callable[[], object] | None = None) -> None:
        """Note the user's final ``state``: at the end it is compared with that of the run without any fault.

        All checkers judge the run when the test has ended, with or without this. Does not block.
        """
        if state is not None:
            self.states.append(copy.deepcopy(state()))

    @property
    def letters(self) -> list[DeadLetter]:
        """The dead letters, in order."""
        return self.broker.letters

    @property
    def now(self) -> float:
        """Virtual seconds since the world began."""
        return self._loop.time()

    # --- for workers

    def clock(self) -> float:
        """The clock of all consumers. Rises with every look, so that all their rows are in one order."""
        self._latest = max(self._loop.time(), self._latest + _STEP)
        return self._latest

    def wall(self) -> float:
        """Seconds since the epoch, as the wall clock shows them."""
        return EPOCH + self._loop.time() + self._wall_offset

    def find(self, check: str, what: str, cause: BaseException | None = None) -> None:
        """Note what a check has found; the first finding of each counts."""
        if check not in self.findings:
            self.findings[check] = what
            if cause is not None:
                self.causes.append(cause)

    def boundary(self, worker: Worker) -> None:
        """A worker is at the boundary to the broker: what the plan has for this moment happens."""
        if self._over:
            return
        number = self.boundaries
        self.boundaries += 1
        for fault in self._faults.get(number, ()):
            # A process may die in good weather, too, and while it stops: whoever goes on behind it loses nothing.
            if self._faulty or fault.kind == "crash":
                self.perform(fault, worker)

    def note_commits(self, settlements: Sequence[Settlement]) -> None:
        """The broker has them."""
        for settlement in settlements:
            number, floor = settlement.partition.id.number, settlement.floor
            if floor is not None:
                furthest = self._committed.get(number)
                if furthest is None or floor >= furthest[0]:
                    self._committed[number] = floor, settlement.completed

    # --- for the run

    async def turn_time(self) -> None:
        """Have the broker's timers act when they are due; until cancelled."""
        while True:
            # What changes meanwhile may be due earlier than what was known.
            await anyio.sleep(min(max(self.broker.next_at() - self.now, _STEP), _TICK))
            self.broker.advance(self.now)

    async def stop(self) -> None:
        """Stop all workers in order; whatever does not end is the finding ``StopEnds``. Some may crash meanwhile."""
        self._calm()
        left = [worker for worker in self.members if not worker.gone]
        for worker in left:
            worker.stopped = True
            with worker.acting():
                worker.consumer.stop()
        limit = max((self._stop_limit(worker) for worker in left), default=0.0)
        with anyio.move_on_after(limit):
            for worker in left:
                await worker.ended.wait()
        for worker in left:
            if not worker.ended.is_set():
                self.find("StopEnds", f"{worker.name} has not stopped {limit:g} s after it was told to")

    def end(self) -> None:
        """The run is over: what is cleaned up from here on is not seen."""
        self._over = True
        for worker in self.members:
            worker.history.cut()
            # It has to wake to be cleaned up.
            self._loop.freeze(worker.name, self.now)

    # --- inside

    def _start(self, app: App) -> Worker:
        number = len(self.members) + 1
        worker = Worker(self, f"w-{number}", number, app)
        self.members.append(worker)
        with worker.acting():
            self._tasks.start_soon(worker.run)
        return worker

    def _calm(self) -> None:
        """From here on nothing is injected, nor what was and has not struck yet. Who is frozen wakes in time."""
        self._faulty = False
        self.letter_failures = self._io_failures = 0
        for worker in self.members:
            worker.slow_until, worker.failing = 0.0, None

    def _current(self) -> Worker | None:
        name = GROUP.get()
        return next((worker for worker in self.members if worker.name == name), None)

    def _alive(self) -> list[Worker]:
        return [worker for worker in self.members if not worker.gone and not worker.ended.is_set()]

    def _caught_up(self) -> bool:
        alive = self._alive()
        if self._faulty and not alive:
            return False
        # A commit that comes late may set a position back: what was finished once is run again at worst.
        left = Counter(record.partition for record in self.broker.unfinished if not self._was_committed(record))
        if not left:
            return True
        statuses = [worker.consumer.status() for worker in alive if worker.consumer.ready]
        if not any(status.blocked for status in statuses):
            return False
        if any(status.running or status.ready or status.held or status.parking for status in statuses):
            return False
        return all(_stands_still(partition, count, statuses) for partition, count in left.items())

    def _was_committed(self, record: Record) -> bool:
        floor, completed = self._committed.get(record.partition, (0, ()))
        return record.position < floor or any(start <= record.position < end for start, end in completed)

    def _stop_limit(self, worker: Worker) -> float:
        settings = worker.app.settings or Settings()
        # A drain and its three graces, and the three things that are closed, 5 s each at most. Twice, to be sure.
        return (
            2 * (settings.drain_timeout + 3 * settings.grace + 15.0)
            + worker.slow
            + max(0.0, worker.frozen_until - self.now)
        )

    # --- faults

    def perform(self, fault: Fault, caller: Worker) -> None:
        """Have a fault happen now; ``caller``: the worker that its target is counted from. Does not block."""
        alive = self._alive()
        # The one whose call it is, then those after it.
        at = alive.index(caller) if caller in alive else 0
        worker = alive[(at + fault.target) % len(alive)] if alive else caller
        partition = fault.target % len(self.broker.partitions)
        self.performed.append(fault)
        whom = f"partition {partition}" if fault.kind in _OF_PARTITION else ""
        whom = worker.name if fault.kind in _OF_WORKER else whom
        # In front of the next row.
        self.moments.append(Moment(max(self.now, self._latest) + _STEP / 2, fault, whom))
        if worker.gone and fault.kind in _OF_WORKER:
            return
        now = self.now
        if fault.kind == "crash":
            self._crash(worker, fault.amount)
        elif fault.kind == "freeze":
            worker.frozen_until = now + fault.amount
            self._loop.freeze(worker.name, now + fault.amount)
            self.broker.freeze(worker.name, now + fault.amount)
        elif fault.kind == "rebalance":
            self.broker.rebalance(now)
        elif fault.kind == "lost":
            self.broker.lose(partition, now)
        elif fault.kind == "redeliver":
            self.broker.redeliver(partition, now)
        elif fault.kind == "slow":
            worker.slow, worker.slow_until = fault.amount, now + _SLOW_FOR * fault.amount
        elif fault.kind == "commit_fails":
            worker.failing = "after" if fault.amount >= 1 else "before"
        elif fault.kind == "letter_fails":
            self.letter_failures += 1
        elif fault.kind == "io_fails":
            self._io_failures += 1
        elif fault.kind == "clock_jump":
            self._wall_offset += fault.amount

    def _crash(self, worker: Worker, after: float) -> None:
        if worker.gone:
            return
        self.crashes += 1
        worker.gone = True
        worker.ended.set()
        worker.history.cut()
        self.broker.crash(worker.name, self.now)
        self._loop.freeze(worker.name, math.inf)
        if worker.stopped:
            # Nobody starts it again.
            return
        # It is called in a task of the worker, and what is started there would be gone with it.
        token = GROUP.set(None)
        try:
            self._tasks.start_soon(self._replace, worker.app, after)
        finally:
            GROUP.reset(token)

    async def _replace(self, app: App, after: float) -> None:
        await anyio.sleep(after)
        self._start(app)


def _stands_still(partition: int, left: int, statuses: Sequence[Status]) -> bool:
    """Whether all that is left of a partition is delivered, or has no room, where nobody is at work: blocked, behind
    what is, or finished above it."""
    owners = [
        (status, owned)
        for status in statuses
        for name, owned in status.partitions.items()
        if name.rpartition("/")[2] == str(partition)
    ]
    full = any(owned.ahead_reached or not status.taking for status, owned in owners)
    return full or left <= sum(max(owned.holes, owned.ahead or 0) for _, owned in owners)


def _few(records: list[Record]) -> str:
    shown = ", ".join(f"partition {r.partition} position {r.position}" for r in records[:5])
    return shown + (", …" if len(records) > 5 else "")
