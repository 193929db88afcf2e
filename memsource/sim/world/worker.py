"""One worker of a world. The worker simulates one process of the user, from its start to its end or crash."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, TypeVar

import anyio
import anyio.lowlevel

from lanes.arguments import kind_of, names_unknown_options, shown_value
from lanes.attempts import Attempts
from lanes.clock import Clock
from lanes.config import Settings
from lanes.consumer import Consumer
from lanes.core.types import Message, Part, Partition, Room, Settlement
from lanes.dead_letter import DeadLetter
from lanes.errors import HandlerHalted, SourceError
from lanes.handlers import Decode, Handler, handler_name, is_async
from lanes.history.recorder import Recorder, history_of
from lanes.history.writer import GivenUp, SegmentFile
from lanes.outputs.publisher import Output, Report
from lanes.source import (
    Backlogged,
    Checkpointing,
    Confirming,
    DeadLetters,
    Dividing,
    Retaining,
    Source,
    SourceEvent,
    SourceTraits,
    Stranding,
)
from memsource.personality import Personality
from memsource.sim.errors import ImpossiblePlan, Refused, is_finding, notable
from memsource.sim.loop.tasks import Threads, in_group
from memsource.sim.plans.plan import Fault, FaultKind
from memsource.sim.world.injection import Injection
from memsource.sim.world.progress import WorldProgress

T = TypeVar("T")

_BLOCKING: Final = ("block", "block_and_dlq")

_KEPT: Final = GivenUp(0, False)

_SIMULATED_TARGET: Final = ". In a simulated test, pass App(…, dead_letters=True), and read world.dead_letters"
"""The remedy of ``HandlerHalted`` in a simulation."""


class _MemorySegment(SegmentFile):
    """A segment in memory that keeps every line until its process crashes."""

    __slots__ = ("chunks", "cut")

    def __init__(self, path: Path, head: str) -> None:
        self.path = path
        self.chunks = [head]
        self.cut = False

    @property
    def whole(self) -> bool:
        return True

    def append(self, rows: Sequence[str], marker: str = "") -> GivenUp:
        if not self.cut:
            self.chunks += rows
        return _KEPT

    def close(self) -> None:
        """Do nothing, because no file is open."""


class MemoryRecorder(Recorder):
    """Records the history of one worker in memory, with the same rows as a file.

    Args:
        member: Name of the worker.
        number: Number of the process in the history.
        wall: Wall clock of the worker.
    """

    __slots__ = ("_kept", "_number", "_wall_clock")

    def __init__(self, member: str, number: int, wall: Clock) -> None:
        super().__init__(".", member=member)
        self._number = number
        self._wall_clock = wall
        self._kept: _MemorySegment | None = None

    def cut(self) -> None:
        """Drop all later rows, because a crashed process writes none. Idempotent."""
        if self._kept is not None:
            self._kept.cut = True

    @property
    def data(self) -> bytes:
        """The bytes of the history; empty before the consumer has opened."""
        return b"" if self._kept is None else "".join(self._kept.chunks).encode("ascii")

    def _process(self) -> tuple[int, str]:
        return self._number, "simulation"

    def _wall(self) -> float:
        return self._wall_clock()

    def _segment(self, path: Path, head: str) -> SegmentFile:
        self._kept = _MemorySegment(path, head)
        return self._kept


@names_unknown_options("memsource.App", ImpossiblePlan)
@dataclass(frozen=True, kw_only=True)
class App:
    """The consumer of each worker: the user's ``handler`` with the user's ``settings``.

    A worker checks settings that need a clock or threads when it starts.

    Attributes:
        handler: The user's handler.
        settings: Settings of the consumer; None = the defaults.
        decode: See ``lanes.Consumer``.
        dead_letters: Whether the consumer writes dead letters. All workers write dead letters to the simulated broker,
            and the test reads ``World.dead_letters``. An ``App`` refuses a real target, such as ``KafkaDeadLetters``.
        publisher: Whether handlers may publish outputs. All workers publish to the simulated broker, and the test reads
            ``World.published``. An ``App`` refuses a real publisher, such as ``KafkaPublisher``.
        attempts: Store of attempts, such as a ``MemoryAttempts``. All apps must share one store; None = no store.

    Raises:
        ImpossiblePlan: ``settings`` is no ``Settings``, ``dead_letters`` or ``publisher`` is no bool, or an option
            is unknown.
    """

    handler: Handler
    settings: Settings | None = None
    decode: Decode | None = None
    dead_letters: bool = False
    publisher: bool = False
    attempts: Attempts | None = None

    def __post_init__(self) -> None:
        settings: object = self.settings
        if settings is not None and not isinstance(settings, Settings):
            raise ImpossiblePlan(f"App: settings is {kind_of(settings)}: pass a lanes.Settings(…), or None")
        if not isinstance(self.dead_letters, bool):
            raise ImpossiblePlan(
                f"App: dead_letters={shown_value(self.dead_letters)}: must be True or False. A simulation replaces the "
                "target of the dead letters: pass dead_letters=True, and read world.dead_letters"
            )
        if not isinstance(self.publisher, bool):
            raise ImpossiblePlan(
                f"App: publisher={shown_value(self.publisher)}: must be True or False. A simulation replaces the "
                "publisher: pass publisher=True, and read world.published(…)"
            )


def checked_app(app: object, what: str) -> App:
    """Return ``app`` if it is an ``App``; make an ``App`` of a handler.

    Args:
        app: An ``App`` or a handler.
        what: Name of the argument, for the error.

    Returns:
        The ``App``.

    Raises:
        ImpossiblePlan: ``app`` is neither an ``App`` nor a handler.
    """
    if isinstance(app, App):
        return app
    if inspect.iscoroutine(app):
        app.close()
    if not callable(app):
        raise ImpossiblePlan(f"{what}: {app!r:.200} is neither a handler nor an App; pass a handler or an App")
    return App(handler=app)


def _settings_of(app: App, threads: Threads) -> Settings:
    """Return the settings of an app, which lets the end of a world cancel its workers at once.

    With ``threads="inline"`` the settings let a plain handler run on the loop. A handler for processes always runs on
    the loop, at most ``processes`` at once, and takes no virtual time, so its timeout never passes.
    """
    settings = dataclasses.replace(app.settings or Settings(), on_cancel="stop")
    if settings.sync_handlers == "processes":
        return dataclasses.replace(
            settings,
            sync_handlers="inline",
            concurrency=settings.running_limit,
            concurrency_per_partition=None
            if settings.concurrency_per_partition is None
            else min(settings.concurrency_per_partition, settings.running_limit),
            processes=None,
            process_setup=None,
            timeout=None,
        )
    if is_async(app.handler) or settings.sync_handlers == "inline":
        return settings
    if threads != "inline":
        raise Refused(
            f"the handler {handler_name(app.handler)} is a plain function, which runs in threads, and threads have no "
            'virtual time: pass threads="inline", or sync_handlers="inline" in its settings'
        )
    return dataclasses.replace(settings, sync_handlers="inline")


class WorkerHost(Protocol):
    """The part of a ``World`` that its workers use."""

    broker: Personality
    threads: Threads
    injection: Injection
    progress: WorldProgress

    @property
    def now(self) -> float:
        """Virtual seconds since the world began."""

    def clock(self) -> float:
        """Return the time on the clock of all consumers, in seconds."""

    def wall(self) -> float:
        """Return the seconds since 1970, on the wall clock."""

    def find(self, check: str, what: str, cause: BaseException | None = None) -> None:
        """Record a finding."""

    def interrupt(self, error: BaseException) -> None:
        """End the run at once with an error that is no finding."""

    def dead_letter_writer(self, member: str) -> DeadLetters | None:
        """Make the writer through which a member writes dead letters to the broker.

        Args:
            member: Name of the member.

        Returns:
            The writer; None = no further writer.
        """

    def show(self, outputs: Sequence[Output]) -> None:
        """Store outputs of a worker, which readers see from now on."""

    def boundary(self, worker: Worker) -> None:
        """Perform the faults that the plan has for the boundary that a worker reaches now."""

    def strikes(self, kind: FaultKind, who: str) -> Fault | None:
        """Disarm and return the armed fault of a kind; None = no armed fault."""

    def happens(self, fault: Fault, whom: str) -> None:
        """Record that a fault acts now."""


class Worker:
    """One worker of a world.

    Args:
        world: The world of the worker.
        name: Name of the member, and group of its tasks.
        number: Number of the process.
        app: The consumer to run.
        make: Makes the app of the next process, which replaces the worker after a crash.
    """

    def __init__(self, world: WorkerHost, name: str, number: int, app: App, make: Callable[[], App | Handler]) -> None:
        self.world = world
        self.name = name
        self.app = app
        self._settings = _settings_of(app, world.threads)
        if app.settings is not None and app.settings.process_setup is not None:
            # The processes of this worker are part of the simulated process.
            app.settings.process_setup()
        self.blocks = self._settings.poison in _BLOCKING
        self.make = make
        self.gone = False
        self.slow = 0.0
        self.slow_until = 0.0
        self.frozen_until = 0.0
        self.ended = anyio.Event()
        self.stopped = False
        self.history = MemoryRecorder(name, number, world.wall)
        self.source = _Link(self, world.broker.source(name, world.clock))
        self.consumer = Consumer(
            self.source,
            app.handler,
            settings=self._settings,
            decode=app.decode,
            dead_letters=_WorkerDeadLetters(self) if app.dead_letters else None,
            publisher=_WorkerPublisher(self) if app.publisher else None,
            attempts=app.attempts,
            history=history_of(self.history),
            clock=world.clock,
        )

    def __repr__(self) -> str:
        return f"<Worker {self.name}{' crashed' if self.gone else ''}>"

    def acting(self) -> AbstractContextManager[None]:
        """Run a ``with`` block as part of the worker's process.

        Tasks that the block starts end and freeze with the process.
        """
        return in_group(self.name)

    async def run(self) -> None:
        """Consume until a stop of the worker. An error of the consumer is a finding, or ends the run."""
        try:
            await self.consumer.run()
        except (anyio.get_cancelled_exc_class(), GeneratorExit, Refused):
            raise
        except BaseException as error:
            cause = notable(error)
            if self.gone:
                return
            if is_finding(cause):
                what = f"{self.name} ended with an exception: {cause}"
                if isinstance(cause, HandlerHalted) and cause.place and not self.app.dead_letters:
                    what += _SIMULATED_TARGET
                self.world.find(type(cause).__name__, what, cause)
            else:
                self.world.interrupt(cause)
        finally:
            if not self.gone:
                # If the worker could not leave the group in time, the broker's timers end its membership.
                self.world.broker.crash(self.name, self.world.now)
            self.world.injection.disarm(self.name)
            self.ended.set()

    def stop_limit(self) -> float:
        """Return the longest duration of a stop that begins now, in virtual seconds."""
        # Twice the longest drain, plus twice 5 s each for three closes.
        waits = 2 * (self._settings.longest_drain + 15.0)
        return waits + self.slow + max(0.0, self.frozen_until - self.world.now)

    async def reach(self) -> None:
        """Perform the faults of the next boundary. The call never returns to a crashed worker."""
        self.world.boundary(self)
        if self.gone:
            await anyio.sleep_forever()


class _Link:
    """The source of a worker, which delegates to the broker's source; see ``lanes.source.Source``.

    Each call can be slow or end by a crash. A call of ``settle`` can also fail.
    """

    def __init__(self, worker: Worker, inner: Source) -> None:
        self._worker = worker
        self._inner = inner
        reporting: object = inner
        if isinstance(reporting, Backlogged):
            self.backlog = reporting.backlog
        if isinstance(reporting, Checkpointing):
            self.checkpoint_within = reporting.checkpoint_within
        if isinstance(reporting, Confirming):
            self._confirming = reporting
            self.freeze_limit, self.confirm = reporting.freeze_limit, self._confirm
        if isinstance(reporting, Dividing):
            self._dividing = reporting
            self.hand_over = self._hand_over
        if isinstance(reporting, Retaining):
            self.retention = reporting.retention
        if isinstance(reporting, Stranding):
            self.stranded = reporting.stranded

    async def _begin(self, *, at_once: bool = False) -> None:
        """Begin a call.

        Args:
            at_once: Whether the source reads its arguments before its first await. The fault ``slow`` does not delay
                the start of such a call.
        """
        await self._worker.reach()
        if self._worker.slow_until > anyio.current_time() and not at_once:
            await anyio.sleep(self._worker.slow)

    async def _call(self, call: Callable[..., Awaitable[T]], *args: object, at_once: bool = False) -> T:
        await self._begin(at_once=at_once)
        result = await call(*args)
        # While the process lives, no await after the call suspends, so a cancellation loses no received event.
        await self._worker.reach()
        return result

    async def open(self) -> SourceTraits:
        return await self._call(self._inner.open)

    async def receive(self, room: Room) -> Sequence[SourceEvent]:
        return await self._call(self._inner.receive, room)

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        worker = self._worker
        await self._begin(at_once=worker.world.broker.takes_in_at_once)
        failing = worker.world.injection.take("commit_fails", worker.name)
        if failing is None or failing.amount >= 1:
            await self._inner.settle(settlements)
            worker.world.progress.note(settlements)
        await worker.reach()
        if failing is not None:
            worker.world.happens(failing, worker.name)
            raise SourceError(f"injected: the settlement of {worker.name} was not confirmed", retryable=True)

    async def extend(self, messages: Sequence[Message]) -> None:
        await self._call(self._inner.extend, messages)

    async def _confirm(self, partitions: Sequence[Partition]) -> Sequence[Partition]:
        return await self._call(self._confirming.confirm, partitions)

    async def _hand_over(self, partition: Partition, parts: Sequence[Part]) -> None:
        await self._call(self._dividing.hand_over, partition, parts)

    async def release(self, partition: Partition) -> None:
        await self._call(self._inner.release, partition, at_once=self._worker.world.broker.takes_in_at_once)

    async def aclose(self) -> None:
        await self._call(self._inner.aclose)


class _WorkerDeadLetters:
    """A worker's dead-letter destination in the world's broker; see ``lanes.source.DeadLetters``."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._writer = worker.world.dead_letter_writer(worker.name)

    async def open(self) -> None:
        await self._worker.reach()
        if self._writer is not None:
            await self._writer.open()

    async def put(self, dead_letter: DeadLetter) -> None:
        world = self._worker.world
        await self._worker.reach()
        await anyio.lowlevel.checkpoint()
        if world.strikes("letter_fails", self._worker.name):
            raise OSError("injected: the dead letter was not confirmed")
        if self._writer is not None:
            await self._writer.put(dead_letter)
        world.broker.write_dead_letter(dead_letter)
        await self._worker.reach()

    async def aclose(self) -> None:
        if self._writer is not None:
            await self._writer.aclose()
        await self._worker.reach()


class _WorkerPublisher:
    """A worker's publisher to the world's broker; see ``lanes.outputs.publisher.Publisher``.

    The outputs of a call become visible one by one, in turns of the loop that the schedule chooses.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def open(self) -> None:
        await self._worker.reach()

    async def publish(self, outputs: Sequence[Output], report: Report) -> None:
        worker = self._worker
        await worker.reach()
        if worker.slow_until > anyio.current_time():
            await anyio.sleep(worker.slow)
        failing = worker.world.strikes("publish_fails", worker.name)
        if failing is None or failing.amount >= 1:
            for output in outputs:
                await anyio.lowlevel.checkpoint()
                worker.world.show([output])
                if failing is None:
                    report(output, None)
        await worker.reach()
        if failing is not None:
            raise SourceError(f"injected: the outputs of {worker.name} were not confirmed", retryable=True)

    async def aclose(self) -> None:
        await self._worker.reach()
