"""One member of a group: its state, and the next state after an event.

The state contains the engine and the facts of the shell. The *shell* is a model of the code of ``lanes`` around the
engine. The shell performs the steps of a drain without waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

from lanes.core import effects as fx
from lanes.core.drain import (
    CANCELLING,
    ENDING,
    HANDED_OVER,
    IDLE,
    RELEASING,
    SETTLING,
    UNRELEASED,
    Limits,
    PartitionDrain,
)
from lanes.core.engine import Engine
from lanes.core.lane import DEAD_LETTERING, RUNNING
from lanes.core.snapshot import EngineState, MessageId, restore, snapshot
from lanes.core.types import ABANDON, ACK, NEVER, Failure, Message, Outcome, Partition, PartitionId, Settlement
from memsource.explorer import invariants
from memsource.explorer.invariants import Commit, covered, running_of
from memsource.explorer.scope import Scope, check
from memsource.memory.topic import RecordReader

READER: Final = RecordReader()
_LIMITS: Final = Limits(grace=1.0, settle=1.0, last=1.0)
_TOLD: Final = {"deadline": "late", "fences": "late", "releases": "released", "is refused": "refused"}
FAILED: Final = Failure(ValueError("the handler failed"), delay=1.0)
_GIVEN_UP: Final = Failure(ValueError("the handler gave up"), terminal=True)
_OUTCOMES: Final[dict[object, Outcome]] = {
    "ends well": ACK,
    "fails": FAILED,
    "gives up": _GIVEN_UP,
    "is cancelled": ABANDON,
}
_NOTES: Final[dict[type[fx.Effect], str]] = {
    fx.Held: "held for a retry",
    fx.DeadLetterDue: "given to the dead letters",
    fx.Interrupted: "failed while it was drained",
    fx.Abandoned: "abandoned behind an interrupted handler",
    fx.Drained: "drained",
    fx.Redelivered: "finished on arrival",
    fx.Zombie: "a fenced handler ended",
    fx.Saturated: "a bound was reached",
    fx.Resumed: "below the low mark again",
    fx.AheadReached: "max_ahead was reached",
    fx.AheadLeft: "max_ahead was left",
    fx.PauseDue: "paused for long",
}

SOURCE: Final = "memory"
"""The source of all partitions."""

HANDLER: Final = frozenset({"ends well", "fails", "gives up", "is cancelled"})
"""Names of the events that end a handler."""

DRAINS: Final = {
    ENDING: ("deadline",),
    CANCELLING: ("fences",),
    SETTLING: ("settles late",),
    RELEASING: ("releases", "is refused"),
}
"""The events of a drain, by its phase."""

Published: TypeAlias = dict[int, dict[int, str]]
"""The published messages: partition -> position -> key."""


class Event(NamedTuple):
    """An event of a member. A field that the event does not use has its default.

    Attributes:
        word: Name of the event.
        number: Number of the partition.
        assignment: Number of the assignment.
        position: Position of the message.
        run: Position and key of each fetched message.
        notices: Kind, partition number and committed set of each assignment, revocation or loss.
    """

    word: str
    number: int = 0
    assignment: int = 0
    position: int = 0
    run: tuple[tuple[int, str], ...] = ()
    notices: tuple[tuple[str, int, Commit], ...] = ()


class Output(NamedTuple):
    """An effect of a member on other members, by name. A field that the effect does not use has its default."""

    word: str
    number: int = 0
    position: int = 0
    commit: Commit = (0, ())


class OnWay(NamedTuple):
    """An unanswered commit. ``made`` is True after the broker has stored the commit."""

    commit: Commit
    made: bool = False


class Assignment(NamedTuple):
    """The facts of the shell about one assignment.

    Attributes:
        number: Number of the partition.
        origin: Committed set at the start of the assignment.
        confirmed: Floor that the broker has confirmed.
        done: Positions that the assignment has handled or dead-lettered.
        started: Last started position of each key.
        sent: Last commit; None before the first commit.
        on_way: Unanswered commit; None = no commit waits for an answer.
        drain: Phase of the drain.
        over: Whether the assignment was lost or released.
    """

    number: int
    origin: Commit
    confirmed: int
    done: frozenset[int] = frozenset()
    started: tuple[tuple[bytes | None, int], ...] = ()
    sent: Commit | None = None
    on_way: OnWay | None = None
    drain: str = IDLE
    over: bool = False


class Member(NamedTuple):
    """A member: its engine, the facts of its shell by assignment, and whether the member is stopping."""

    engine: EngineState
    assignments: tuple[tuple[int, Assignment], ...] = ()
    stopping: bool = False


def events(scope: Scope, member: Member) -> list[Event]:
    """Return the possible events of a member that depend on no other member."""
    engine, known = restore(member.engine), dict(member.assignments)
    found: list[Event] = []
    if engine.ready and engine.running_handlers < engine.concurrency:
        found.append(Event("starts a handler"))
    for state in member.engine.assignments:
        shell = known.get(state.assignment)
        for position in running_of(state):
            ways = ["ends well"]
            if shell is not None and not shell.over and state.live:
                ways += ["is cancelled"] if shell.drain == CANCELLING else ["fails", "gives up"]
            found += [Event(way, state.id.number, state.assignment, position) for way in ways]
        found += [
            Event("parked", state.id.number, state.assignment, m.position)
            for m in state.in_flight
            if m.state == DEAD_LETTERING
        ]
    if engine.next_due() != NEVER:
        found.append(Event("time passes"))
    if engine.dirty and scope.settles:
        found.append(Event("settles"))
    if engine.dirty or any(p.commits is not None and p.commits.pending for p in engine.partitions.values()):
        found.append(Event("commits"))
    for assignment, shell in known.items():
        if shell.on_way is not None:
            words = ["confirmed", "unanswered"] if shell.on_way.made else ["confirmed", "unanswered", "made"]
            found += [Event(word, shell.number, assignment) for word in words]
        if not shell.over:
            found += [Event(word, shell.number, assignment) for word in DRAINS.get(shell.drain, ())]
    if not member.stopping:
        found.append(Event("stops"))
    elif not engine.partitions:
        found.append(Event("leaves"))
    return found


class _Actor:
    """A member during an event. ``outputs`` has the effects on other members, and ``notes`` has the rare branches."""

    def __init__(self, scope: Scope, topic: Published, member: Member) -> None:
        self._scope = scope
        self._topic = topic
        self._before = member.engine
        self._known = dict(member.assignments)
        self._stopping = member.stopping
        self.engine: Engine = restore(member.engine)
        self.outputs: list[Output] = []
        self.notes: list[str] = []

    def state(self) -> Member:
        """Return the current state of the member. Raises ``Broken`` if an invariant of every event does not hold."""
        check(self._scope, invariants.given_up_is_forgotten, self.engine)
        engine = snapshot(self.engine)
        check(self._scope, invariants.in_flight_bounded, engine)
        check(self._scope, invariants.only_its_lane_waits, engine)
        running = [(a.id, m.lane) for a in engine.assignments for m in a.in_flight + a.fenced if m.state == RUNNING]
        check(self._scope, invariants.one_handler_a_key, running)
        if len({one[0] for one in running}) < len(running):
            self._note("two lanes of a partition ran at once")
        return Member(engine, tuple(sorted(self._known.items())), self._stopping)

    def happen(self, event: Event) -> None:
        """Apply an event. Raises ``Broken`` if an invariant does not hold."""
        if event.word in HANDLER:
            self._ended(event.assignment, event.position, event.word)
        else:
            self._happen(event)
        self._perform()
        self._settled()
        now = snapshot(self.engine)
        kept = {(a.assignment, m.position) for a in now.assignments for m in a.in_flight if m.state != RUNNING}
        gone = {one for one in self._before.ready if one not in kept}
        check(self._scope, invariants.keeps_its_turn, self._before.ready, now.ready, gone)

    def _happen(self, event: Event) -> None:
        match event.word:
            case "hears":
                self._hears(event.notices)
            case "fetches":
                self._fetches(event)
            case "starts a handler":
                self._takes()
            case "parked":
                self._parked(event.assignment, event.position)
            case "time passes":
                self._time_passes()
            case "settles" | "commits":
                self._collect(everything=event.word == "commits")
            case "made":
                self._made(event.assignment)
            case "confirmed":
                self._confirmed(event.assignment)
            case "unanswered":
                self._unanswered(event.assignment)
            case "deadline" | "fences" | "releases" | "is refused":
                self._tell(event.assignment, _TOLD[event.word])
            case "settles late":
                self._settles_late(event.assignment)
            case "session expires":
                self._session_expires()
            case "stops":
                self._stops()
            case word:
                raise AssertionError(f"event {word!r} is unknown")

    def _note(self, note: str) -> None:
        self.notes.append(note)

    # --- the effects of the engine

    def _perform(self) -> None:
        while self.engine.effects:
            effect = self.engine.effects.pop(0)
            self._note(_NOTES[type(effect)])
            if isinstance(effect, fx.Drained):
                self._drained(effect.partition)

    def _drained(self, partition: Partition) -> None:
        running = [m.position for m in partition.ledger.in_flight() if m.state == RUNNING]
        check(self._scope, invariants.drained_when_nothing_runs, running)
        self.outputs.append(Output("drained", partition.id.number))
        self._tell(partition.assignment, "ended")

    # --- messages

    def _fetches(self, event: Event) -> None:
        partition = self._partition(event.number)
        messages = [Message(partition, position, key.encode(), 1, None, None) for position, key in event.run]
        self.engine.receive(partition, messages, len(messages), 0.0)
        if not messages or event.position > messages[-1].position + 1:
            self.engine.progressed(partition, event.position, 0.0)

    def _takes(self) -> None:
        message = self.engine.take()
        assert message is not None, "a message was ready"
        partition, position = message.partition, message.position
        shell = self._known[partition.assignment]
        check(
            self._scope,
            invariants.first_come_first_taken,
            MessageId(partition.assignment, position),
            self._before.ready,
        )
        started = dict(shell.started)
        check(self._scope, invariants.starts_in_order, message, started.get(message.key))
        unfinished = self._unfinished(shell)
        before = [p for p in unfinished if p < position and self._topic[shell.number][p].encode() == message.key]
        check(self._scope, invariants.former_ended_first, position, before)
        highest = max(started.values(), default=-1)
        closing = self._scope.close_prefix and shell.drain == ENDING
        check(
            self._scope,
            invariants.drain_starts_nothing_above,
            position,
            highest,
            draining=partition.draining,
            closing=closing,
        )
        check(self._scope, invariants.replay_from_the_committed, message)
        positions, bound = list(self._topic[shell.number]), self._scope.max_ahead
        check(self._scope, invariants.ahead_bounded, position, shell.confirmed, positions, bound)
        started[message.key] = position
        self._know(partition.assignment, started=tuple(sorted(started.items(), key=str)))
        self.outputs.append(Output("started", shell.number, position))
        if partition.draining:
            self._note("started to close the prefix")

    def _ended(self, assignment: int, position: int, way: str) -> None:
        message = self._running(assignment, position)
        partition, shell = message.partition, self._known.get(assignment)
        fenced = shell is None or shell.over or message in self.engine.chains.fenced
        draining = partition.draining
        self.engine.finish(message, _OUTCOMES[way], 0.0)
        if fenced:
            check(self._scope, invariants.zombie_changes_nothing, self._before, self._now())
            follower = any(m.assignment != assignment for m in self._now().ready)
            if follower:
                self._note("waited behind a fenced handler")
        elif way == "ends well":
            self._done(assignment, position)
        elif draining:
            self._excuse()

    def _parked(self, assignment: int, position: int) -> None:
        waiting = self.engine.stopped.by_head
        message = next(m for m in waiting if (m.partition.assignment, m.position) == (assignment, position))
        self.engine.dead_lettered(message)
        self._done(assignment, position)

    def _done(self, assignment: int, position: int) -> None:
        self._know(assignment, done=self._known[assignment].done | {position})
        self.outputs.append(Output("done", self._known[assignment].number, position))

    def _unfinished(self, shell: Assignment) -> set[int]:
        """Return the positions that no predecessor has committed and this assignment has not handled."""
        positions = set(self._topic[shell.number])
        return positions - covered(shell.origin, positions) - shell.done

    def _time_passes(self) -> None:
        at = self.engine.next_due()
        assert at != NEVER, "a message is held for a retry"
        self.engine.due(at)

    # --- commits

    def _collect(self, *, everything: bool) -> None:
        for settlement in self.engine.collect(0.0, everything=everything):
            partition = settlement.partition
            shell = self._known.get(partition.assignment)
            owned = shell is not None and not shell.over and shell.drain != RELEASING
            assert settlement.floor is not None, "this source commits"
            commit = (settlement.floor, tuple(settlement.completed))
            check(self._scope, invariants.commit_names_what_is_assigned, commit, owned=owned)
            if shell is None:
                continue
            check(self._scope, invariants.one_commit_under_way, commit, shell.on_way and shell.on_way.commit)
            check(self._scope, invariants.commits_rise, commit, shell.sent, list(self._topic[shell.number]))
            self._know(partition.assignment, sent=commit, on_way=OnWay(commit))
            check(self._scope, invariants.commit_only_what_is_done, commit, self._unfinished(shell))

    def _made(self, assignment: int) -> None:
        on_way = self._known[assignment].on_way
        assert on_way is not None, "a commit is under way"
        self._know(assignment, on_way=on_way._replace(made=True))
        commit = on_way.commit if self._scope.hands_over else (on_way.commit[0], ())
        self.outputs.append(Output("made", self._known[assignment].number, commit=commit))

    def _confirmed(self, assignment: int) -> None:
        on_way = self._known[assignment].on_way
        assert on_way is not None, "a commit is under way"
        if not on_way.made:
            self._made(assignment)
        self.engine.settled([self._settlement(assignment)])
        self._know(assignment, confirmed=on_way.commit[0])
        self._answered(assignment)

    def _unanswered(self, assignment: int) -> None:
        self.engine.unsettled([self._settlement(assignment)])
        self._answered(assignment)

    def _answered(self, assignment: int) -> None:
        if self._known[assignment].over:
            self._note("a commit was answered after the end of its assignment")
            del self._known[assignment]
        else:
            self._know(assignment, on_way=None)

    def _settlement(self, assignment: int) -> Settlement:
        shell = self._known[assignment]
        assert shell.on_way is not None, "a commit is under way"
        partition = self.engine.partitions.get(PartitionId(SOURCE, shell.number))
        if partition is not None and partition.assignment == assignment:
            assert partition.commits is not None and partition.commits.sending is not None, "a commit is under way"
            return partition.commits.sending
        floor, completed = shell.on_way.commit
        gone = Partition(PartitionId(SOURCE, shell.number), READER, floor=floor)
        return Settlement(gone, [], floor, completed)

    # --- ownership

    def _hears(self, notices: Sequence[tuple[str, int, Commit]]) -> None:
        for kind, number, (floor, completed) in notices:
            owned = self.engine.partitions.get(PartitionId(SOURCE, number))
            if kind == "assigned" and not self._stopping:
                partition = Partition(PartitionId(SOURCE, number), READER, floor=floor, completed=completed)
                self.engine.assign(partition)
                self._known[partition.assignment] = Assignment(number, (floor, completed), floor)
            elif kind == "revoking" and owned is not None:
                self._drain(owned)
            elif kind == "revoking":
                # The partition was never assigned here, because this member is being stopped.
                self.outputs.append(Output("released", number))
            elif kind == "lost" and owned is not None:
                self._lose(owned)
            self._perform()
        check(self._scope, invariants.other_partitions_untouched, self._before, self._now(), {n for _, n, _ in notices})

    def _session_expires(self) -> None:
        for partition in list(self.engine.partitions.values()):
            self.engine.lose(partition)
        # The broker refuses commits of the old session.
        self._known.clear()

    def _lose(self, partition: Partition) -> None:
        self.engine.lose(partition)
        self._over(partition.assignment)

    def _drain(self, partition: Partition) -> None:
        if self._known[partition.assignment].drain != IDLE:
            return
        if any(head.partition is partition for head in self.engine.stopped.by_head):
            self._excuse()
        drain = self._restored(partition.assignment)
        drain.begin(0.0, 1.0)
        self._know(partition.assignment, drain=drain.phase)
        if drain.abandoned:
            self._note("abandoned by a drain")

    def _excuse(self) -> None:
        """Record that a drain waits neither for a head before its next attempt nor for a failed handler.

        Without a completed set, messages above the head or the failed message may run again.
        """
        if not self._scope.hands_over:
            self.outputs.append(Output("excused"))

    def _restored(self, assignment: int) -> PartitionDrain:
        shell = self._known[assignment]
        partition = self._partition(shell.number)
        return PartitionDrain(self.engine, partition, _LIMITS, close_prefix=self._scope.close_prefix, phase=shell.drain)

    def _tell(self, assignment: int, event: str) -> None:
        """Report an event to a drain, and perform the next step of the drain."""
        drain = self._restored(assignment)
        partition, number = drain.partition, drain.partition.id.number
        drain.tell(event, 0.0)
        self._know(assignment, drain=drain.phase)
        if drain.abandoned:
            self._note("abandoned at the deadline of a drain")
        if drain.zombies:
            self._note("fenced while handlers ran")
        if drain.phase == HANDED_OVER:
            self._over(assignment)
            self.outputs.append(Output("released", number))
        elif drain.phase == UNRELEASED:
            self._lose(partition)
        if not self.engine.owns(partition):
            check(self._scope, invariants.other_partitions_untouched, self._before, self._now(), {number})

    def _settled(self) -> None:
        """Continue each drain that has no unsettled message."""
        for assignment, shell in list(self._known.items()):
            if shell.drain == SETTLING and not shell.over and not self._restored(assignment).left:
                self._tell(assignment, "settled")
                self._tell(assignment, "kept")

    def _settles_late(self, assignment: int) -> None:
        """End the wait of a drain for the settlement of finished messages, and cancel the unanswered commit."""
        self._tell(assignment, "late")
        if self._known[assignment].on_way is not None:
            self._unanswered(assignment)

    def _stops(self) -> None:
        self._stopping = True
        for partition in list(self.engine.partitions.values()):
            self._drain(partition)

    def _over(self, assignment: int) -> None:
        if self._known[assignment].on_way is None:
            del self._known[assignment]
        else:
            self._know(assignment, over=True)

    # --- queries

    def _now(self) -> EngineState:
        kept = self.engine.effects[:]
        self.engine.effects.clear()
        state = snapshot(self.engine)
        self.engine.effects.extend(kept)
        return state

    def _know(self, assignment: int, **changes: object) -> None:
        self._known[assignment] = self._known[assignment]._replace(**changes)  # type: ignore[arg-type]

    def _partition(self, number: int) -> Partition:
        return self.engine.partitions[PartitionId(SOURCE, number)]

    def _running(self, assignment: int, position: int) -> Message:
        everything = [m for p in self.engine.partitions.values() for m in p.ledger.in_flight()]
        everything += self.engine.chains.fenced
        wanted = assignment, position, RUNNING
        return next(m for m in everything if (m.partition.assignment, m.position, m.state) == wanted)


class Act(NamedTuple):
    """The result of an event: the member, its effects on other members, and the rare branches taken."""

    member: Member
    outputs: tuple[Output, ...]
    notes: tuple[str, ...]


def act(scope: Scope, topic: Published, member: Member, event: Event) -> Act:
    """Apply an event to a member. Pure. Raises ``Broken``, and any error of the engine."""
    actor = _Actor(scope, topic, member)
    actor.happen(event)
    return Act(actor.state(), tuple(actor.outputs), tuple(actor.notes))
