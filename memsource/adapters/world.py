"""The world of a real adapter: one chooser decides, at every boundary of every member, what goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from contextvars import copy_context
from typing import Any, Final, Protocol, runtime_checkable

from lanes.core.types import Message, Settlement
from lanes.errors import LanesError, SourceError
from lanes.source import DeadLetters
from memsource.adapters.choices import DELIVER, OF_REQUESTS, Choice, Chooser, Decision, Kind, Phase, Place
from memsource.adapters.pairs import Impossible, Pairs
from memsource.memory.topic import Record
from memsource.personality import Personality
from memsource.sim.loop.tasks import in_group
from memsource.sim.loop.virtual import until
from memsource.sim.plans.plan import Fault
from memsource.sim.world.progress import WorldProgress
from memsource.sim.world.worker import Worker
from memsource.sim.world.world import World

FAULTS_FOR: Final = 12.0
"""Virtual seconds after the last message in which faults happen, even if all messages are finished."""

_RESTART_AFTER: Final = 1.0
"""Seconds after which a process starts again whose start has failed, as under a supervisor."""


class AdapterBroker(Personality, Protocol):
    """A broker as data whose members run a real adapter."""

    @property
    def kinds(self) -> frozenset[Kind]:
        """Faults that this broker can have."""

    deadlines: tuple[float, ...]
    """Durations of the deadlines of adapter and broker, such as session, drain and lease, in seconds."""

    phases: tuple[Phase, ...]
    """Phases in which its members can be."""

    impossible: Impossible
    """Faults that cannot happen in some phase, with the reason."""

    def bind(self, world: AdapterWorld) -> None:
        """Connect the broker to its world, before the first member starts."""

    def phase(self, member: str) -> Phase:
        """Return the present activity of a member."""

    def cut_off(self, member: str, until: float) -> bool:
        """Drop all requests and replies of a member until a time. Return whether the call had an effect."""

    def down(self, until: float) -> bool:
        """Stop the broker until a time. Return whether the call had an effect."""

    def callback(self, target: int) -> bool:
        """Make the client of some member call back. Return whether the call had an effect."""

    def on_started(self, member: str, message: Message) -> None:
        """Judge the start of a handler, by the broker's own data. ``World.find`` reports a violation."""

    def on_settled(self, settlements: Sequence[Settlement]) -> None:
        """Judge settlements that the adapter has confirmed, by the broker's own data."""

    def dead_letter_writer(self, member: str) -> DeadLetters | None:
        """Make the adapter's writer of dead letters for a member.

        Args:
            member: Name of the member.

        Returns:
            The writer; None = the run has no such writer.
        """

    @property
    def unjudged(self) -> tuple[str, ...]:
        """Names of the checks that do not apply after the faults of this run."""

    def excuses(self, member: str, error: LanesError) -> bool:
        """Return whether this error may end a member, because the broker has just refused a request of the member."""

    def end(self) -> None:
        """End everything that still runs for the members, at the end of the run."""


@runtime_checkable
class Pieced(Protocol):
    """A broker whose members own pieces of partitions."""

    def piece_of(self, record: Record) -> int:
        """Return the number of the piece that owns a message; 0 = the message has no piece yet."""


class _Progress(WorldProgress):
    def __init__(self, broker: AdapterBroker) -> None:
        super().__init__(broker)
        self._adapter = broker

    def note(self, settlements: Sequence[Settlement]) -> None:
        super().note(settlements)
        self._adapter.on_settled(settlements)

    def piece_of(self, record: Record) -> int:
        return self._adapter.piece_of(record) if isinstance(self._adapter, Pieced) else super().piece_of(record)


class AdapterWorld(World):
    """A world in which every boundary asks one chooser.

    Args:
        chooser: Decides what happens at each boundary.
        *args: Arguments of ``World``; its broker is an ``AdapterBroker``.
        **options: Further arguments of ``World``.

    Attributes:
        adapter: The broker of the run.
        decisions: The faults of the run.
        pairs: Coverage of the run.
    """

    def __init__(self, chooser: Chooser, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        adapter: AdapterBroker = self.broker  # type: ignore[assignment]
        self.adapter = adapter
        self.decisions: list[Decision] = []
        self.pairs = Pairs()
        self.progress = _Progress(adapter)
        self._chooser = chooser
        self._later = 0
        # The context of no member, because a fault belongs to no process.
        self._context = copy_context()
        adapter.bind(self)

    # --- boundaries

    def boundary(self, worker: Worker) -> None:
        self.step(worker.name, "source", self.adapter.phase(worker.name))

    def step(self, member: str, call: str, phase: Phase) -> None:
        """Pass a boundary without a request. Afterwards the member may be frozen or dead.

        Args:
            member: Name of the member.
            call: Name of the step.
            phase: Activity of the member.
        """
        self._choose(member, call, phase, frozenset())

    def exchange(self, member: str, call: str, phase: Phase) -> Choice:
        """Pass the boundary of one request. Afterwards the member may be frozen or dead.

        Args:
            member: Name of the member.
            call: Name of the request.
            phase: Activity of the member.

        Returns:
            The fate of the request: ``DELIVER``, or a fault of ``OF_REQUESTS``, which the caller carries out.
        """
        return self._choose(member, call, phase, OF_REQUESTS)

    def _choose(self, member: str, call: str, phase: Phase, fates: frozenset[Kind]) -> Choice:
        if self._over:
            return DELIVER
        number = self.boundaries
        self.boundaries += 1
        if not self._faulty:
            return DELIVER
        offers = self.adapter.kinds & fates if fates else self.adapter.kinds - OF_REQUESTS
        if fates:
            offers |= self.adapter.kinds - OF_REQUESTS
        choice = self._chooser.choose(number, Place(member, call, phase, offers))
        if choice.kind == "deliver":
            return choice
        self.decisions.append(Decision(number, choice))
        if choice.later:
            self._later += 1
            self._loop.call_at(self.now + choice.later, self._act_later, choice, member, number, context=self._context)
            return DELIVER
        if choice.kind not in OF_REQUESTS and not self._act(choice, member, number):
            return DELIVER
        self.pairs.note(self.now, choice.kind, phase)
        return choice if choice.kind in OF_REQUESTS else DELIVER

    def _act_later(self, choice: Choice, member: str, number: int) -> None:
        """Perform a fault between two boundaries."""
        self._later -= 1
        if self._over or not self._faulty:
            return
        try:
            phase = self.adapter.phase(member)
            if self._act(choice, member, number):
                self.pairs.note(self.now, choice.kind, phase)
        except Exception as error:
            # Otherwise the loop would only log the error.
            self._loop.fail(error)

    def _act(self, choice: Choice, member: str, number: int) -> bool:
        """Perform a fault that concerns no request. Return whether the fault had an effect."""
        worker = next((each for each in self._alive() if each.name == member), None)
        if choice.kind == "restart":
            return self.adapter.down(self.now + choice.amount)
        if choice.kind == "callback":
            return self.adapter.callback(choice.target)
        if worker is None:
            return False
        if choice.kind == "cut_off":
            return self.adapter.cut_off(member, self.now + choice.amount)
        self.perform(Fault(number, choice.kind, 0, choice.amount), worker)  # type: ignore[arg-type]
        return True

    def on_recreated(self) -> None:
        """Delete the settled positions, because the broker has other messages at the same positions. Idempotent."""
        self.progress.forget()

    def find(self, check: str, what: str, cause: BaseException | None = None) -> None:
        """Record a finding.

        If a fault ended the process with an error that a restart repairs, restart the process instead.
        """
        worker = self._current()
        if isinstance(cause, LanesError) and worker is not None and self._excused(worker.name, cause):
            with in_group(None):
                self._tasks.start_soon(self._replace, worker.make, _RESTART_AFTER)
        elif check not in self.adapter.unjudged:
            super().find(check, what, cause)

    def _excused(self, member: str, error: LanesError) -> bool:
        transient = isinstance(error, SourceError) and bool(self.decisions) and _is_transient(error)
        return transient or self.adapter.excuses(member, error)

    def start(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start a task that belongs to no process, and ends with the run at the latest. Does not block."""
        with in_group(None):
            self._tasks.start_soon(work)

    def dead_letter_writer(self, member: str) -> DeadLetters | None:
        return self.adapter.dead_letter_writer(member)

    @property
    def faulty(self) -> bool:
        """Whether faults still happen."""
        return self._faulty

    @property
    def spent(self) -> bool:
        """Whether the chooser had no further fault."""
        return self._chooser.over

    # --- the end of the faults

    async def settled(self, timeout: float = 600.0) -> None:
        """Wait for the faults, and then until all messages are finished; see ``World.settled``.

        The faults end when the chooser has no further fault, or ``FAULTS_FOR`` seconds after the call.
        """
        self.settles = self._settling = True
        await until(lambda: not self._faulty or (self._chooser.over and not self._later), FAULTS_FOR)
        self._calm()
        await super().settled(timeout)

    def end(self) -> None:
        super().end()
        self.adapter.end()


def _is_transient(error: SourceError) -> bool:
    """Return whether a new process may succeed: the error is retryable, or its remedy is another start."""
    return error.retryable or "; start again" in str(error)
