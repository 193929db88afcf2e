"""A stage for scenes with a cohort: real members in virtual time, whose handlers the scene stops and releases."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple

import anyio

from lanes import Message, Retry, Settings
from memsource.jetstream.cohort_source import CohortMemberSource, CohortPersonality
from memsource.sim.loop.event_loop import GROUP
from memsource.sim.loop.virtual import until
from memsource.sim.plans.plan import Plan
from memsource.sim.runs.run import Conditions, Run, run_plan
from memsource.sim.world.worker import App, Worker
from memsource.sim.world.world import World

__all__ = ["PATIENT", "Stage", "staged"]

PATIENT: Final = Settings(concurrency=8, drain_timeout=600.0, retry=Retry(attempts=3, backoff=0.1), poison="block")
"""Drains that cancel no handler while a scene stops it."""

LONG: Final = 200.0


class Handled(NamedTuple):
    """The begin or the end of a handler call, with its member, message, token and attempt."""

    what: str
    member: str
    partition: int
    position: int
    epoch: int
    attempt: int


class Stage:
    """The stage of a scene. ``log`` has the calls of handlers. Handlers of positions in ``closed`` wait.

    Handlers of positions in ``failing`` fail, and those in ``deaf`` ignore a cancellation. Other cancelled handlers
    take ``cleanup`` seconds to end.
    """

    def __init__(self, world: World, settings: Settings) -> None:
        assert isinstance(world.broker, CohortPersonality)
        self.world = world
        self.broker = world.broker
        self.log: list[Handled] = []
        self.closed: set[int] = set()
        self.failing: set[int] = set()
        self.deaf: set[int] = set()
        self.cleanup = 0.0
        self._settings = settings

    async def handle(self, message: Message) -> None:
        """The handler of all members."""
        about = (GROUP.get() or "", message.partition.id.number, message.position, message.epoch, message.attempt)
        self.log.append(Handled("start", *about))
        try:
            with anyio.CancelScope(shield=message.position in self.deaf):
                await until(lambda: message.position not in self.closed, LONG * 10)
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True):
                await anyio.sleep(self.cleanup)
            raise
        if message.position in self.failing:
            raise ValueError("no")
        self.log.append(Handled("end", *about))

    def join(self, settings: Settings | None = None) -> tuple[Worker, CohortMemberSource]:
        """Start one more member."""
        (worker,) = self.world.workers(1, App(handler=self.handle, settings=settings or self._settings))
        return worker, self.broker.members[-1]

    def publish(self, *partitions: int, key: str | None = None) -> list[int]:
        """Publish a message to each of these partitions, with separate keys unless `key` is given."""
        return [
            self.world.publish("x", key=key or f"key {number}", partition=partition).position
            for number, partition in enumerate(partitions, len(self.broker.records))
        ]

    async def hold(self, *partitions: int) -> list[int]:
        """Publish a message to each of these partitions, and wait until their handlers, and no others, wait."""
        began = len(self.starts())
        held = self.publish(*partitions)
        self.closed.update(held)
        await self.wait(lambda: sorted(self.starts()[began:]) == held, f"{held} are held")
        return held

    async def wait(self, condition: Callable[[], object], what: str) -> None:
        """Wait for an event that has to happen."""
        assert await until(lambda: bool(condition()), LONG), f"{LONG:g} virtual seconds, and not: {what}"

    async def owns(self, source: CohortMemberSource, *partitions: int) -> None:
        """Wait until a member owns exactly these."""
        await self.wait(lambda: sorted(source.owned) == sorted(partitions), f"{source} owns {partitions}")

    async def pass_time(self, seconds: float) -> None:
        """Let time pass, in which a wrong event could happen."""
        await anyio.sleep(seconds)

    def stop(self, worker: Worker) -> None:
        """Stop a member in order."""
        with worker.acting():
            worker.consumer.stop()

    def crash(self, worker: Worker) -> None:
        """Kill a member without a replacement."""
        worker.stopped = True
        self.world._crash(worker, 0.0)

    def freeze(self, worker: Worker, seconds: float) -> None:
        """Freeze a member."""
        worker.frozen_until = self.world.now + seconds
        self.world._loop.freeze(worker.name, worker.frozen_until)

    def starts(self, member: str | None = None) -> list[int]:
        """The positions that this member started."""
        return [each.position for each in self.log if each.what == "start" and member in (None, each.member)]

    def ends(self) -> list[int]:
        """The positions that ended well."""
        return [each.position for each in self.log if each.what == "end"]


def staged(
    scene: Callable[[Stage], Awaitable[None]], *, partitions: int = 1, settings: Settings = PATIENT, **broker: Any
) -> Run:
    """Play a scene on a new cohort, judge it by all checkers, and return the run. A finding fails the test."""

    async def test(world: World) -> None:
        await scene(Stage(world, settings))

    run = run_plan(
        Plan("jetstream", 1), Conditions(test=test, broker=lambda plan: CohortPersonality(partitions, seed=1, **broker))
    )
    if run.causes:
        raise run.causes[0]
    assert run.findings == {}, run.findings
    return run
