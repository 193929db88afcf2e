"""One member of a group: the real engine, and what its shell knows, as a value; and what may happen to it.

The shell does what `lanes` does around the engine, without waiting: it drains what is asked for, fences it when
nothing runs any more, commits until nothing is left to commit, and releases it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, ParamSpec, TypeAlias

from lanes.core import effects as fx
from lanes.core.engine import Engine
from lanes.core.lane import PARKING, RUNNING
from lanes.core.policy import SKIP, Policy
from lanes.core.retry import RetryPolicy
from lanes.core.snapshot import EngineState, MessageId, restore, snapshot
from lanes.core.types import ABANDON, ACK, Failure, Message, Outcome, Partition, PartitionId, Settlement
from memsource.explorer import invariants
from memsource.explorer.invariants import Commit, running_of
from memsource.explorer.search import Broken
from memsource.topic import RecordReader

__all__ = ["Actor", "Event", "Member", "Output", "Scope", "events"]

P = ParamSpec("P")

Event: TypeAlias = tuple[object, ...]
"""What happens to a member: a word, and what it is about."""

Output: TypeAlias = tuple[object, ...]
"""What the others see of it: a word, and what it is about."""

Positions: TypeAlias = dict[int, tuple[int, ...]]
"""What was published, by partition."""

_READER: Final = RecordReader()
_FAILED: Final = Failure(ValueError("the handler failed"), delay=1.0)
_GIVEN_UP: Final = Failure(ValueError("the handler gave up"), terminal=True)
_OUTCOMES: Final[dict[object, Outcome]] = {
    "ends well": ACK,
    "fails": _FAILED,
    "gives up": _GIVEN_UP,
    "is cancelled": ABANDON,
}
_NOTES: Final[dict[type[fx.Effect], str]] = {
    fx.Held: "held for a retry",
    fx.DeadLetterDue: "given to the dead letters",
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


@dataclass(frozen=True, kw_only=True)
class Scope:
    """What is explored.

    ``messages``: a (partition, key) each, in the order of their publication. ``gap``: one position is left out behind
    the first and behind the last. ``members``: how many there are; the first is there from the beginning. ``joins``:
    how often one comes, or comes again. ``faults``: how many losses, expired sessions, crashes and missed deadlines
    there are in all. ``failures``: how many handlers fail. ``unknown``: how many commits are left without an answer.
    ``rotate``: everything goes to the member that came last; else partitions are shared evenly. ``hands_over``:
    commits keep what is completed above the floor; ``close_prefix``: drains run what would be repeated without that.
    ``invariants``: check these alone, None = all.
    """

    messages: tuple[tuple[int, str], ...]
    gap: bool = True
    partitions: int = 1
    members: int = 2
    joins: int = 1
    faults: int = 1
    failures: int = 0
    unknown: int = 1
    rotate: bool = True
    cooperative: bool = False
    hands_over: bool = True
    close_prefix: bool = False
    concurrency: int = 2
    max_in_flight: int = 10
    max_ahead: int = 10
    batch: int = 1
    invariants: frozenset[Callable[..., None]] | None = None

    def policy(self) -> Policy:
        """What the engines go by."""
        return Policy(
            concurrency=self.concurrency,
            max_in_flight=self.max_in_flight,
            max_bytes=1 << 20,
            retry=RetryPolicy(2, 1.0, 1.0),
            poison=SKIP,
            max_ahead=self.max_ahead,
        )


class OnWay(NamedTuple):
    """A commit that was sent: whether the broker has made it, and nobody knows."""

    commit: Commit
    made: bool = False


class Assignment(NamedTuple):
    """What the shell knows of an assignment.

    ``started``: the last position that started, by key. ``sent``: the last commit. ``confirmed``: the floor the broker
    confirmed. ``late``: its drain has missed its deadline. ``over``: it was lost or released.
    """

    number: int
    confirmed: int
    started: tuple[tuple[bytes | None, int], ...] = ()
    sent: Commit | None = None
    on_way: OnWay | None = None
    late: bool = False
    drained: bool = False
    over: bool = False


class Member(NamedTuple):
    """A member: its engine, what its shell knows of each assignment by epoch, and whether it is being stopped."""

    engine: EngineState
    assignments: tuple[tuple[int, Assignment], ...] = ()
    stopping: bool = False


def events(member: Member) -> list[Event]:
    """What may happen to a member by itself."""
    engine, known = restore(member.engine), dict(member.assignments)
    found: list[Event] = []
    if engine.ready and engine.running < engine.concurrency:
        found.append(("takes",))
    for state in member.engine.assignments:
        shell = known.get(state.epoch)
        for position in running_of(state):
            ways = ["ends well"]
            if shell is not None and not shell.over and state.live:
                ways += ["is cancelled"] if shell.late else ["fails", "gives up"]
            found += [("handler", state.epoch, position, way) for way in ways]
        found += [("parked", state.epoch, m.position) for m in state.held if m.state == PARKING]
    if engine.next_due() is not None:
        found.append(("time passes",))
    if engine.dirty:
        found.append(("settles",))
    if engine.dirty or any(p.commits is not None and p.commits.pending for p in engine.partitions.values()):
        found.append(("commits",))
    for epoch, shell in known.items():
        partition = engine.partitions.get(PartitionId("memory", shell.number))
        owned = partition is not None and partition.epoch == epoch
        if shell.on_way is not None:
            found += [("made", epoch), ("unanswered", epoch)] if not shell.on_way.made else [("confirmed", epoch)]
            found += [("unanswered", epoch)] if shell.on_way.made else []
        elif partition is not None and owned and shell.drained and not partition.finished:
            assert partition.commits is not None
            if not partition.commits.changes:
                found.append(("releases", epoch))
        if partition is not None and owned and partition.draining and not shell.drained:
            found.append(("fences", epoch) if shell.late else ("deadline", epoch))
    if not member.stopping:
        found.append(("stops",))
    elif not engine.partitions:
        found.append(("leaves",))
    return found


class Actor:
    """A member on which something happens. ``outputs``: what the others see of it."""

    def __init__(self, scope: Scope, positions: Positions, member: Member) -> None:
        self._scope = scope
        self._positions = positions
        self._before = member.engine
        self._known = dict(member.assignments)
        self._stopping = member.stopping
        self.engine: Engine = restore(member.engine)
        self.outputs: list[Output] = []

    def state(self) -> Member:
        """The member as it is now. Raises ``Broken`` when what must hold after every event does not."""
        engine = snapshot(self.engine)
        self._check(invariants.in_flight_bounded, engine)
        self._check(invariants.only_its_lane_waits, engine)
        running = [(a.id, m.lane) for a in engine.assignments for m in a.held + a.fenced if m.state == RUNNING]
        self._check(invariants.one_handler_a_key, running)
        if len({one[0] for one in running}) < len(running):
            self.outputs.append(("note", "two lanes of a partition ran at once"))
        return Member(engine, tuple(sorted(self._known.items())), self._stopping)

    def happen(self, event: Event) -> None:
        """Let it happen. Raises ``Broken``."""
        word, *about = event
        getattr(self, "_" + str(word).replace(" ", "_"))(*about)
        self._perform()
        now = snapshot(self.engine)
        kept = {(a.epoch, m.position) for a in now.assignments for m in a.held if m.state != RUNNING}
        gone = {one for one in self._before.ready if one not in kept}
        self._check(invariants.keeps_its_turn, self._before.ready, now.ready, gone)

    def _check(self, invariant: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        wanted = self._scope.invariants
        if wanted is None or invariant in wanted:
            invariant(*args, **kwargs)

    # --- what the engine asks for

    def _perform(self) -> None:
        while self.engine.effects:
            effect = self.engine.effects.pop(0)
            self.outputs.append(("note", _NOTES[type(effect)]))
            if isinstance(effect, fx.Drained):
                self._drained(effect.partition)

    def _drained(self, partition: Partition) -> None:
        running = [m.position for m in partition.ledger.unfinished() if m.state == RUNNING]
        self._check(invariants.drained_when_nothing_runs, running)
        self.outputs.append(("drained", partition.id.number))
        self.engine.fence(partition)
        self._know(partition.epoch, drained=True)

    # --- messages

    def _fetches(self, number: int, run: Sequence[tuple[int, str]], upto: int) -> None:
        partition = self._partition(number)
        messages = [Message(partition, position, key.encode(), 1, None, None) for position, key in run]
        self.engine.receive(partition, messages, len(messages), 0.0)
        if not run or upto > run[-1][0] + 1:
            self.engine.progressed(partition, upto, 0.0)

    def _takes(self) -> None:
        message = self.engine.take()
        assert message is not None, "it was ready"
        partition, position = message.partition, message.position
        shell = self._known[partition.epoch]
        self._check(invariants.first_come_first_taken, MessageId(partition.epoch, position), self._before.ready)
        started = dict(shell.started)
        self._check(invariants.starts_in_order, message, started.get(message.key))
        highest = max(started.values(), default=-1)
        closing = self._scope.close_prefix
        self._check(
            invariants.drain_starts_nothing_above, position, highest, draining=partition.draining, closing=closing
        )
        self._check(invariants.replay_from_the_committed, message)
        positions, bound = self._positions[shell.number], self._scope.max_ahead
        self._check(invariants.ahead_bounded, position, shell.confirmed, positions, bound)
        started[message.key] = position
        self._know(partition.epoch, started=tuple(sorted(started.items(), key=str)))
        self.outputs.append(("started", shell.number, position))
        if partition.draining:
            self.outputs.append(("note", "started to close the prefix"))

    def _handler(self, epoch: int, position: int, way: str) -> None:
        message = self._running(epoch, position)
        partition, shell = message.partition, self._known.get(epoch)
        fenced = shell is None or shell.over or message in self.engine.chains.fenced
        draining = partition.draining
        self.engine.finish(message, _OUTCOMES[way], 0.0)
        if fenced:
            self._check(invariants.zombie_changes_nothing, self._before, self._now())
            follower = any(m.epoch != epoch for m in self._now().ready)
            self.outputs += [("note", "waited behind a fenced handler")] if follower else []
        elif way == "ends well":
            self.outputs.append(("done", partition.id.number, position))
        elif draining:
            self._excuse()

    def _parked(self, epoch: int, position: int) -> None:
        message = next(m for m in self.engine.waiting.lanes if (m.partition.epoch, m.position) == (epoch, position))
        self.engine.parked(message)
        self.outputs.append(("done", message.partition.id.number, position))

    def _time_passes(self) -> None:
        at = self.engine.next_due()
        assert at is not None, "something is held"
        self.engine.due(at)

    # --- commits

    def _settles(self) -> None:
        self._collect(everything=False)

    def _commits(self) -> None:
        self._collect(everything=True)

    def _collect(self, *, everything: bool) -> None:
        for settlement in self.engine.collect(0.0, everything=everything):
            partition = settlement.partition
            shell = self._known.get(partition.epoch)
            owned = shell is not None and not shell.over
            assert settlement.floor is not None, "this source commits"
            commit = (settlement.floor, tuple(settlement.completed))
            self._check(invariants.commit_names_what_is_assigned, commit, owned=owned)
            if shell is None:
                continue
            self._check(invariants.one_commit_under_way, commit, shell.on_way and shell.on_way.commit)
            self._check(invariants.commits_rise, commit, shell.sent, self._positions[shell.number])
            self._know(partition.epoch, sent=commit, on_way=OnWay(commit))
            self.outputs.append(("sent", shell.number, commit))

    def _made(self, epoch: int) -> None:
        on_way = self._known[epoch].on_way
        assert on_way is not None, "a commit is under way"
        self._know(epoch, on_way=on_way._replace(made=True))
        commit = on_way.commit if self._scope.hands_over else (on_way.commit[0], ())
        self.outputs.append(("made", self._known[epoch].number, commit))

    def _confirmed(self, epoch: int) -> None:
        on_way = self._known[epoch].on_way
        assert on_way is not None, "a commit is under way"
        self.engine.settled([self._settlement(epoch)])
        self._know(epoch, confirmed=on_way.commit[0])
        self._answered(epoch)

    def _unanswered(self, epoch: int) -> None:
        self.engine.unsettled([self._settlement(epoch)])
        self._answered(epoch)

    def _answered(self, epoch: int) -> None:
        if self._known[epoch].over:
            self.outputs.append(("note", "a commit was answered behind the end of its assignment"))
            del self._known[epoch]
        else:
            self._know(epoch, on_way=None)

    def _settlement(self, epoch: int) -> Settlement:
        shell = self._known[epoch]
        assert shell.on_way is not None, "a commit is under way"
        partition = self.engine.partitions.get(PartitionId("memory", shell.number))
        if partition is not None and partition.epoch == epoch:
            assert partition.commits is not None and partition.commits.sending is not None, "a commit is under way"
            return partition.commits.sending
        floor, completed = shell.on_way.commit
        gone = Partition(PartitionId("memory", shell.number), _READER, floor=floor)
        return Settlement(gone, [], floor, completed)

    # --- ownership

    def _polls(self, notices: Sequence[tuple[str, int, Commit]]) -> None:
        for kind, number, (floor, completed) in notices:
            owned = self.engine.partitions.get(PartitionId("memory", number))
            if kind == "assigned" and not self._stopping:
                partition = Partition(PartitionId("memory", number), _READER, floor=floor, completed=completed)
                self.engine.assign(partition)
                self._known[partition.epoch] = Assignment(number, floor)
            elif kind == "revoking" and owned is not None:
                self._drain(owned)
            elif kind == "revoking":
                # It was never begun: this member is being stopped.
                self.outputs.append(("released", number))
            elif kind == "lost" and owned is not None:
                self._lose(owned)
            self._perform()
        self._check(invariants.other_partitions_untouched, self._before, self._now(), {n for _, n, _ in notices})

    def _expelled(self) -> None:
        for partition in list(self.engine.partitions.values()):
            self.engine.lose(partition)
        # What the old session has sent is refused.
        self._known.clear()

    def _lose(self, partition: Partition) -> None:
        self.engine.lose(partition)
        self._over(partition.epoch)

    def _drain(self, partition: Partition) -> None:
        if partition.draining:
            return
        if any(head.partition is partition for head in self.engine.waiting.lanes):
            self._excuse()
        if self.engine.drain(partition, close_prefix=self._scope.close_prefix):
            self.outputs.append(("note", "abandoned by a drain"))

    def _excuse(self) -> None:
        """Waiting heads and failed handlers are not awaited by a drain; only a completed set keeps what is above."""
        if not self._scope.hands_over:
            self.outputs.append(("excused",))

    def _deadline(self, epoch: int) -> None:
        self._know(epoch, late=True)

    def _fences(self, epoch: int) -> None:
        partition = self._partition(self._known[epoch].number)
        if self.engine.fence(partition):
            self.outputs.append(("note", "fenced while handlers ran"))
        self._know(epoch, drained=True)

    def _releases(self, epoch: int) -> None:
        partition = self._partition(self._known[epoch].number)
        self.engine.release(partition)
        self._over(epoch)
        number = partition.id.number
        self.outputs.append(("released", number))
        self._check(invariants.other_partitions_untouched, self._before, self._now(), {number})

    def _stops(self) -> None:
        self._stopping = True
        for partition in list(self.engine.partitions.values()):
            self._drain(partition)

    def _over(self, epoch: int) -> None:
        if self._known[epoch].on_way is None:
            del self._known[epoch]
        else:
            self._know(epoch, over=True)

    # --- looking things up

    def _now(self) -> EngineState:
        kept = self.engine.effects[:]
        self.engine.effects.clear()
        state = snapshot(self.engine)
        self.engine.effects.extend(kept)
        return state

    def _know(self, epoch: int, **changes: object) -> None:
        self._known[epoch] = self._known[epoch]._replace(**changes)  # type: ignore[arg-type]

    def _partition(self, number: int) -> Partition:
        return self.engine.partitions[PartitionId("memory", number)]

    def _running(self, epoch: int, position: int) -> Message:
        everything = [m for p in self.engine.partitions.values() for m in p.ledger.unfinished()]
        everything += self.engine.chains.fenced
        return next(m for m in everything if (m.partition.epoch, m.position, m.state) == (epoch, position, RUNNING))


def act(scope: Scope, positions: Positions, member: Member, event: Event) -> tuple[Member, list[Output]]:
    """What becomes of a member, and what the others see of it. Pure. Raises ``Broken``."""
    actor = Actor(scope, positions, member)
    try:
        actor.happen(event)
        return actor.state(), actor.outputs
    except Broken:
        raise
    except Exception as error:
        raise Broken("nothing_raises", f"{type(error).__name__}: {error}") from error
