"""One harness for the retry loops of the runtime: an operation fails pass after pass, and an event arrives at one pass.

A ``RetryLoop`` names the operation, and makes a consumer whose loop repeats it. The operation fails for partition 0.
The event strikes during a pass or in the pause after it. The harness checks the contract of the loop: whether further
passes begin, whether the other partition continues, and whether the consumer stops in time. The clock is virtual.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import anyio
import anyio.lowlevel

from lanes import Attempt, Consumer, Message, Nak, Partition, Retry, Settings, SourceError
from lanes.config import RELEASE_WITHIN, SETTLE_WITHIN
from lanes.core.types import Settlement
from lanes.dead_letter import DeadLetter
from memsource import Group, GroupSource, MemoryAttempts, MemoryBroker, MemoryDeadLetters, MemorySource
from memsource.sim.loop.choosers import Chooser, Fifo, RandomWalk
from memsource.sim.loop.virtual import run

Event = Literal["loss", "lease end", "drain", "stop", "freeze"]
Moment = Literal["call", "pause", "answer"]

MOMENTS: Final[tuple[Moment, ...]] = ("call", "pause")
"""The moments of an event in a pass that fails."""

ORDERS: Final = 4
"""Random orders of steps for an event that arrives together with the answer of a successful pass."""

PASSES: Final = (1, 2, 5)

LONG: Final = 80.0
"""Seconds in which a loop that goes on begins further passes: more than twice the longest pause."""

_CALL: Final = 0.01
_FREEZE: Final = 30.0
_FREEZE_LIMIT: Final = 10.0
_EXTEND: Final = 20.0
_LOOK: Final = _EXTEND / 2
"""Seconds between two looks for expired leases by the task that extends messages."""


@dataclass(frozen=True)
class RetryLoop:
    """A retry loop of the runtime.

    Attributes:
        name: Name of the loop.
        place: The function with the loop, as in ``tests.retries.table``.
        operation: The operation that the loop repeats: a method of ``Failing``.
        commits: Whether the source commits.
        draining: Whether the partition drains before the operation fails.
        seconds_after: Seconds after an event in which passes may still begin; an event that is absent ends no loop. A
            drain and a stop end the loop by their limits.
    """

    name: str
    place: str
    operation: Literal["settle", "put", "load", "keep", "drop"]
    commits: bool = False
    draining: bool = False
    seconds_after: dict[Event, float] = field(default_factory=dict)


LOOPS: Final = (
    RetryLoop(
        "acknowledgements",
        "lanes.runtime.settle:Settler.settle_all",
        "settle",
        seconds_after={"loss": 0.0, "lease end": 0.0, "drain": SETTLE_WITHIN, "stop": SETTLE_WITHIN},
    ),
    RetryLoop(
        "commits",
        "lanes.runtime.settle:Settler._fail",
        "settle",
        commits=True,
        seconds_after={"loss": 0.0, "lease end": 0.0, "drain": SETTLE_WITHIN, "stop": SETTLE_WITHIN},
    ),
    RetryLoop(
        "commits of a drain",
        "lanes.runtime.settle:Settler.settle_all",
        "settle",
        commits=True,
        draining=True,
        seconds_after={"loss": 0.0, "lease end": 0.0, "stop": SETTLE_WITHIN},
    ),
    RetryLoop(
        "dead letters",
        "lanes.runtime.dead_lettering:DeadLetterWriter.write",
        "put",
        seconds_after={"loss": 0.0, "lease end": 0.0, "drain": 0.0, "stop": 0.0, "freeze": 0.0},
    ),
    RetryLoop(
        "attempts to load",
        "lanes.runtime.attempts:AttemptKeeper._loaded",
        "load",
        seconds_after={"loss": 0.0, "lease end": _LOOK, "drain": 0.0, "stop": 0.0},
    ),
    RetryLoop(
        "attempts to keep",
        "lanes.runtime.attempts:AttemptKeeper._write",
        "keep",
        seconds_after={"loss": 0.0, "lease end": _LOOK, "drain": SETTLE_WITHIN, "stop": SETTLE_WITHIN, "freeze": 0.0},
    ),
    RetryLoop(
        "attempts to drop",
        "lanes.runtime.attempts:AttemptKeeper._write",
        "drop",
        seconds_after={"loss": 0.0, "lease end": _LOOK, "drain": SETTLE_WITHIN, "stop": SETTLE_WITHIN, "freeze": 0.0},
    ),
)


class Operation:
    """The operation of a loop. Its calls for the first assignment of partition 0 fail while ``fails``.

    ``begun`` are the times at which these calls began. ``strike`` is called at the call number ``at``.
    """

    def __init__(self, at: int, moment: Moment, strike: Callable[[], None]) -> None:
        self.at, self.moment, self.strike = at, moment, strike
        self.target: Partition | None = None
        self.begun: list[float] = []
        self.reached, self.struck = anyio.Event(), anyio.Event()
        self.fails = True

    async def reach(self, partitions: Sequence[Partition]) -> None:
        """Begin one call for these partitions."""
        if self.target is None:
            self.target = next((each for each in partitions if each.id.number == 0), None)
        if self.target is None or self.target not in partitions:
            await anyio.sleep(_CALL)
            return
        self.begun.append(anyio.current_time())
        number = len(self.begun)
        self.reached.set()
        await anyio.sleep(_CALL)
        if number == self.at and self.moment == "call":
            self._strike()
            await anyio.sleep(_CALL)
        if number == self.at and self.moment == "answer":
            # The event and the answer arrive in the same turn of the loop.
            self.fails, answer = False, anyio.Event()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._answer, answer)
                await answer.wait()
        elif self.fails:
            if number == self.at and self.moment == "pause":
                self._strike()
            raise SourceError("injected: no answer", retryable=True)

    async def _answer(self, answer: anyio.Event) -> None:
        self._strike()
        await anyio.lowlevel.checkpoint()
        answer.set()

    def _strike(self) -> None:
        self.strike()
        self.struck.set()

    def after(self, time: float) -> list[float]:
        """The calls that began after a time."""
        return [each for each in self.begun if each > time]


class FailingSource(MemorySource):
    """A source whose settlements fail, and that confirms its partitions on demand."""

    operation: Operation | None = None
    confirms = True
    first: Partition

    def assign(self, partition: int, **arguments: Any) -> None:
        super().assign(partition, **arguments)
        if partition == 0:
            self.first = self._owned[0]

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        if self.operation is not None:
            await self.operation.reach([each.partition for each in settlements])
        await super().settle(settlements)

    def freeze_limit(self) -> float:
        return _FREEZE_LIMIT

    async def confirm(self, partitions: Sequence[Partition]) -> Sequence[Partition]:
        await anyio.sleep(_CALL)
        return partitions if self.confirms else []


class FailingGroupSource(GroupSource):
    """A source whose commits fail."""

    operation: Operation | None = None

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        if self.operation is not None:
            await self.operation.reach([each.partition for each in settlements])
        await super().settle(settlements)


class FailingLetters(MemoryDeadLetters):
    """A writer of dead letters whose writes fail."""

    operation: Operation | None = None
    source: FailingSource | None = None

    async def put(self, dead_letter: DeadLetter) -> None:
        if self.operation is not None and self.source is not None:
            await self.operation.reach([self.source.first])
        await super().put(dead_letter)


class FailingStore(MemoryAttempts):
    """A store of attempts, one of whose calls fails."""

    def __init__(self, operation: Operation, name: str) -> None:
        super().__init__()
        self._operation, self._name = operation, name

    async def load(self, partition: Partition) -> Any:
        await self._fail("load", partition)
        return await super().load(partition)

    async def keep(self, message: Message, attempt: Attempt) -> None:
        await self._fail("keep", message.partition)
        await super().keep(message, attempt)

    async def drop(self, partition: Partition, positions: Sequence[int]) -> None:
        await self._fail("drop", partition)
        await super().drop(partition, positions)

    async def _fail(self, name: str, partition: Partition) -> None:
        if name == self._name:
            await self._operation.reach([partition])


class Scene:
    """One run of a loop: a consumer with two partitions, and one event at one pass. Found faults are in ``faults``."""

    def __init__(self, loop: RetryLoop, event: Event | None, at: int, moment: Moment) -> None:
        self.loop, self.event = loop, event
        self.operation = Operation(at, moment, self.strike)
        self.faults: list[str] = []
        self.struck_at = 0.0
        self.jump = 0.0  # seconds by which the clock of the consumer is ahead, after a freeze
        self.handled: list[tuple[int, int]] = []
        self.ended = anyio.Event()
        self.settings = Settings(
            concurrency=4,
            retry=Retry(attempts=2 if loop.operation in ("keep", "drop") else 1, backoff=0.1),
            commit_interval=0.0,
            drain_timeout=1.0,
            grace=1.0,
            on_cancel="stop",
        )

    def clock(self) -> float:
        return anyio.current_time() + self.jump

    async def handle(self, message: Message) -> None:
        number = message.partition.id.number
        if number == 0 and self.loop.operation == "put":
            raise ValueError("poison")
        if number == 0 and self.loop.operation in ("keep", "drop") and message.attempt == 1:
            raise Nak(delay=0.1)
        self.handled.append((number, message.position))

    async def play(self) -> list[str]:
        async with anyio.create_task_group() as tasks:
            self.make()
            tasks.start_soon(self.consume)
            await self.script()
            self.consumer.stop(at_once=True)
            await self.ended.wait()
        return self.faults

    def make(self) -> None:
        self.source: FailingSource | FailingGroupSource
        letters = None
        store = FailingStore(self.operation, self.loop.operation)
        if self.loop.commits:
            self.broker: Any = Group(2, cooperative=True)
            self.source = FailingGroupSource(self.broker, "a")
        else:
            self.broker = MemoryBroker(2)
            self.source = FailingSource(self.broker, extend_interval=_EXTEND, clock=self.clock)
        if self.loop.operation == "settle":
            self.source.operation = self.operation
        if self.loop.operation == "put":
            letters = FailingLetters(self.broker)
            assert isinstance(self.source, FailingSource)
            letters.operation, letters.source = self.operation, self.source
        self.consumer = Consumer(
            self.source,
            self.handle,
            settings=self.settings,
            clock=self.clock,
            dead_letters=letters,
            attempts=store if self.loop.operation in ("load", "keep", "drop") else None,
        )
        self.broker.publish("first", key="a", partition=0)

    async def consume(self) -> None:
        try:
            await self.consumer.run()
        except Exception as error:
            self.faults.append(f"the consumer raised {error!r}")
        finally:
            self.ended.set()

    # --- the script

    async def script(self) -> None:
        operation = self.operation
        if self.loop.draining:
            # The drain begins before the first commit.
            self.broker.publish("second", key="b", partition=0)
        with anyio.move_on_after(LONG) as scope:
            await self.reach_first_pass()
            await operation.struck.wait()
        if scope.cancelled_caught:
            self.faults.append(f"pass {operation.at} never began: {operation.begun}")
            return
        if operation.moment == "answer":
            await self.goes_on_without_the_partition()
            return
        if self.event is None:
            await self.goes_on_and_ends()
            return
        await self.contract(self.event)

    async def reach_first_pass(self) -> None:
        await self.operation.reached.wait()
        if self.loop.draining:
            self.revoke()

    def revoke(self) -> None:
        if isinstance(self.source, FailingSource):
            self.source.revoke(0)
        else:
            self.broker.revoke(0)

    def strike(self) -> None:
        self.struck_at = anyio.current_time()
        source, event = self.source, self.event
        if event == "loss":
            if isinstance(source, FailingSource):
                source.lose(0)
            else:
                self.broker.lose("a", 0)
        elif event == "lease end":
            # The lease ends while the loop is at work.
            source._owned[0].deadline = self.clock()
        elif event == "drain":
            self.revoke()
        elif event == "stop":
            self.consumer.stop()
        elif event == "freeze":
            assert isinstance(source, FailingSource)
            source.confirms = False
            self.jump += _FREEZE

    async def goes_on_and_ends(self) -> None:
        """Without an event, a loop continues until its operation succeeds, and then ends."""
        operation = self.operation
        await anyio.sleep(LONG)
        if not self.loop.draining and not operation.after(self.struck_at):
            self.faults.append(f"no pass began after pass {operation.at}")
        operation.fails = False
        await anyio.sleep(LONG)
        before = len(operation.begun)
        await anyio.sleep(LONG)
        if len(operation.begun) != before:
            self.faults.append("passes began after the success")
        await self.the_other_partition_continues()

    async def goes_on_without_the_partition(self) -> None:
        """An event that arrives together with the answer ends the loop, and disturbs nothing else."""
        if isinstance(self.source, FailingSource):
            self.source.confirms = True
        await anyio.sleep(LONG)
        if self.event == "stop":
            if not self.ended.is_set():
                self.faults.append(f"the consumer has not stopped {LONG:g} s after the stop")
        else:
            await self.the_other_partition_continues()

    async def contract(self, event: Event) -> None:
        """Check the passes after an event, with an operation that still fails and then with one that succeeds."""
        operation, limit = self.operation, self.loop.seconds_after.get(event)
        began = anyio.current_time()
        await anyio.sleep(LONG)
        if event == "freeze":
            self.no_pass_after(limit, "before the confirmation")
            assert isinstance(self.source, FailingSource)
            operation.fails = False
            self.source.confirms = True
            before = len(operation.begun)
            await anyio.sleep(LONG)
            if len(operation.begun) != before + 1:
                self.faults.append(f"{len(operation.begun) - before} passes after the confirmation, not 1")
            await self.the_other_partition_continues()
            return
        if event == "stop":
            if not self.ended.is_set():
                self.faults.append(f"the consumer has not stopped {LONG:g} s after the stop")
            self.no_pass_after(self.longest(limit), "after the stop")
            return
        self.no_pass_after(self.longest(limit) if event == "drain" else limit, f"after the {event}")
        left = self.source._owned.values() if event == "drain" else self.consumer.status().partitions
        if (operation.target if event == "drain" else f"{self.broker.name}/0") in left:
            self.faults.append(f"partition 0 is still owned {anyio.current_time() - began:g} s after the {event}")
        await self.the_other_partition_continues()
        operation.fails = False
        await anyio.sleep(LONG)
        self.no_pass_after(self.longest(limit) if event == "drain" else limit, f"after the {event} and the recovery")

    def longest(self, limit: float | None) -> float | None:
        """The limit with the times in which handlers may end and the source may release."""
        return None if limit is None else limit + (RELEASE_WITHIN if limit else 0.0)

    def no_pass_after(self, limit: float | None, what: str) -> None:
        if limit is None:
            return
        # The event reaches the consumer some steps later.
        late = self.operation.after(self.struck_at + limit + 3 * _CALL)
        if late:
            shown = ", ".join(f"{time - self.struck_at:.3f}" for time in late[:3])
            self.faults.append(f"{len(late)} passes began {what}, after {shown} s")

    async def the_other_partition_continues(self) -> None:
        position = self.broker.publish("other", key="z", partition=1).position
        await anyio.sleep(LONG)
        if (1, position) not in self.handled:
            self.faults.append("the other partition does not continue")


def play(loop: RetryLoop, event: Event | None, at: int, moment: Moment, chooser: Chooser) -> list[str]:
    """Run one scene in virtual time, and return its faults. Blocks."""
    return run(Scene(loop, event, at, moment).play, chooser=chooser).result


def scenes(loop: RetryLoop) -> list[tuple[Event | None, int, Moment, Chooser]]:
    """The scenes of a loop: each event at each pass and moment, and one without an event."""
    made: list[tuple[Event | None, int, Moment, Chooser]] = [(None, PASSES[-1], "call", Fifo())]
    for event in loop.seconds_after:
        made += [(event, at, moment, Fifo()) for at in PASSES for moment in MOMENTS]
        made += [(event, at, "answer", RandomWalk(seed)) for at in PASSES[:2] for seed in range(ORDERS)]
    return made


def faults_of(loop: RetryLoop) -> list[str]:
    """Play all scenes of a loop, and return their faults, each with its scene. Blocks."""
    return [
        f"{loop.name}, {event or 'no event'} at the {moment} of pass {at}: {fault}"
        for event, at, moment, chooser in scenes(loop)
        for fault in play(loop, event, at, moment, chooser)
    ]
