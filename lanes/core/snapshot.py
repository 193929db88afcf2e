"""Snapshots of an engine: its state as a value, and an engine made from that value. The explorer uses snapshots.

A snapshot contains exactly the state that determines the engine's next steps. A snapshot omits counters, peaks,
performed effects and ledger entries below the floor. Engines with equal snapshots make the same decisions.

A snapshot identifies a message by the number of its assignment and its position. Times are seconds of the engine's
clock. A snapshot contains references to the objects that the engine does not change: the policy, readers, failures, and
``raw``, ``token``, ``data`` and ``broken`` of each message. A snapshot is hashable if these objects are hashable.

This module reads private attributes of the other modules. No other module of ``lanes`` depends on this module.
``tests/core/test_snapshot_machine.py`` lists the slots of the other modules' classes, and fails for a new slot.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify
from operator import attrgetter
from typing import Any, Final, NamedTuple

from lanes.core.commits import PartitionCommits
from lanes.core.engine import Engine
from lanes.core.fair_queue import in_order
from lanes.core.lane import HELD, PUBLISH_HELD, StoppedLane
from lanes.core.ledgers import AckLedger, OffsetLedger
from lanes.core.partition_budgets import PartitionBudgetEngine, make_engine
from lanes.core.policy import Policy
from lanes.core.publishing import Produced
from lanes.core.types import (
    BudgetId,
    CommitProgress,
    Failure,
    LaneId,
    Ledger,
    Message,
    Outcome,
    Partition,
    PartitionId,
    Reader,
    Settlement,
)
from lanes.errors import MessageError

_NO_DATA: Final = object()
_WAITING: Final = (HELD, PUBLISH_HELD)


class MessageId(NamedTuple):
    """The identity of a delivery.

    Attributes:
        assignment: Number of the assignment.
        position: Position of the message.
    """

    assignment: int
    position: int


class MessageState(NamedTuple):
    """The state of one message. ``data`` is empty if the message is not decoded."""

    position: int
    key: bytes | None
    lane: LaneId
    size: int
    raw: Any
    token: Any
    broken: MessageError | None
    attempt: int
    state: int
    ordinal: int
    received: float
    data: tuple[object, ...]
    next: MessageId | None


_copied: Final = attrgetter(*MessageState._fields[:-2])
"""Reads the attributes of a message that its state repeats: every one but ``data`` and ``next``."""


class AckLedgerState(NamedTuple):
    """The state of an ``AckLedger``, without the messages."""

    highest: int
    settled: tuple[tuple[int, int], ...]
    loose: tuple[int, ...]


class OffsetLedgerState(NamedTuple):
    """The entries of an ``OffsetLedger`` at and above its floor.

    Attributes:
        entries: Offset of each delivery, whether the delivery is unfinished, and whether the ledger has the message.
    """

    highest: int
    floor: int
    trailing: int
    delivered: int
    seeded: tuple[tuple[int, int], ...]
    first_ordinal: int
    entries: tuple[tuple[int, bool, bool], ...]


class CommitsState(NamedTuple):
    """The commits of an assignment.

    Attributes:
        sending: Floor, completed set and ordinal of the commit in transit.
    """

    not_before: float
    changes: int
    since: float
    confirmed: int
    confirmed_ordinal: int
    sending: tuple[int, tuple[tuple[int, int], ...], int] | None
    over: bool


class AssignmentState(NamedTuple):
    """One assignment that the process owns, or that ended while its handlers still run.

    Attributes:
        in_flight: The messages of the assignment's ledger, in order of delivery.
        fenced: The running messages of a fenced assignment.
    """

    id: PartitionId
    assignment: int
    reader: Reader
    incarnation: str
    floor: int | None
    completed: tuple[tuple[int, int], ...]
    recalled: tuple[tuple[int, int], ...]
    owned: bool
    live: bool
    draining: bool
    unended: int
    ledger: AckLedgerState | OffsetLedgerState
    commits: CommitsState | None
    ahead: bool
    in_flight: tuple[MessageState, ...]
    fenced: tuple[MessageState, ...]
    waiting: tuple[MessageState, ...]
    finished: tuple[MessageId, ...]
    resettle: tuple[MessageState, ...]


class FlowState(NamedTuple):
    """The state of the bounds of messages and bytes in flight. The bounds themselves are in the policy."""

    in_flight: int
    bytes: int
    taking: bool
    paused: bool
    pausing: bool
    pause_at: float
    look_at: float


class BudgetState(NamedTuple):
    """The state of the budgets per partition. The order of the turns is the order of ``EngineState.ready``.

    Attributes:
        running: Number of running calls of each budget.
        full: The full budgets, whose partitions deliver no message.
    """

    running: tuple[tuple[BudgetId, int], ...]
    full: tuple[BudgetId, ...]


class EngineState(NamedTuple):
    """The state of an engine.

    Attributes:
        assignments: The owned assignments in the order of their assignment, then the fenced assignments by number.
        lanes: The stopped heads, each with its failure, the end of its hold, and whether the store has the failure.
        holds: The held heads by the ends of their holds. Equal ends are in the order of the holds.
        budgets: The budgets per partition. ``None`` = the policy has no budgets.
        starts_held: Whether the engine hands out no message, after ``Engine.hold_starts``.
        produced: The messages with unconfirmed outputs, their outputs, and their numbers of failed sends.
        handled: The messages of batches whose outcome waits, their outcomes, and the times of the outcomes.
        outputs_full: Whether the engine hands out no message because of the size of the outputs.
    """

    policy: Policy
    latest_assignment: int
    running_handlers: int
    halted: bool
    flow: FlowState
    assignments: tuple[AssignmentState, ...]
    ready: tuple[MessageId, ...]
    tails: frozenset[tuple[PartitionId, LaneId, MessageId]]
    lanes: tuple[tuple[MessageId, Failure, float, bool], ...]
    holds: tuple[tuple[float, MessageId], ...]
    dirty: tuple[int, ...]
    budgets: BudgetState | None = None
    starts_held: bool = False
    produced: tuple[tuple[MessageId, Produced, int], ...] = ()
    handled: tuple[tuple[MessageId, Outcome, float], ...] = ()
    outputs_full: bool = False


def message_id(message: Message) -> MessageId:
    """Return the identity of a message in snapshots."""
    return MessageId(message.partition.assignment, message.position)


# --- from an engine


def snapshot(engine: Engine) -> EngineState:
    """Take a snapshot of an engine, which stays unchanged. The call is O(messages of the engine).

    The call raises ``ValueError`` while unperformed effects exist, because a snapshot cannot contain effects.
    """
    if engine.effects:
        raise ValueError(
            f"{engine!r} has {len(engine.effects)} effects that are not performed; perform them, and empty the list, "
            "before a snapshot"
        )
    chains, stopped, flow = engine.chains, engine.stopped, engine.flow
    # The heap may still contain abandoned or parked heads, which their state shows.
    holds = sorted((until, order, message_id(m)) for until, order, m in stopped._heap if m.state in _WAITING)
    return EngineState(
        policy=engine.policy,
        latest_assignment=engine.latest_assignment,
        running_handlers=engine.running_handlers,
        halted=engine.halted,
        flow=FlowState(flow.in_flight, flow.bytes, flow.taking, flow.paused, flow.pausing, flow.pause_at, flow.look_at),
        assignments=tuple(_assignment_state(engine, partition) for partition in _assignments(engine)),
        ready=tuple(message_id(message) for message in chains.ready),
        tails=frozenset(
            (partition_id, lane, message_id(tail))
            for partition_id, tails in chains.tails.items()
            for lane, tail in tails.items()
        ),
        lanes=tuple((message_id(head), lane.failure, lane.until, lane.kept) for head, lane in stopped.by_head.items()),
        holds=tuple((until, held) for until, _, held in holds),
        dirty=tuple(partition.assignment for partition in engine.dirty),
        budgets=_budget_state(engine),
        starts_held=engine._starts_held,
        produced=tuple((message_id(m), *each) for m, each in engine.publishing.produced.items()),
        handled=tuple((message_id(m), *each) for m, each in engine.publishing.handled.items()),
        outputs_full=engine._outputs_full,
    )


def _budget_state(engine: Engine) -> BudgetState | None:
    if not isinstance(engine, PartitionBudgetEngine):
        return None
    running = tuple((budget, engine.fair.running[budget]) for budget in in_order(engine.fair.running))
    return BudgetState(running, tuple(in_order(engine.full)))


def _assignments(engine: Engine) -> list[Partition]:
    owned = list(engine.partitions.values())
    given_up = {m.partition.assignment: m.partition for m in engine.chains.fenced if m.partition not in owned}
    return owned + [given_up[number] for number in sorted(given_up)]


def _assignment_state(engine: Engine, partition: Partition) -> AssignmentState:
    owned = engine.owns(partition)
    # Of an assignment that was given up, only running handlers are left.
    ledger = partition.ledger if owned else _empty(partition)
    fenced = sorted((m for m in engine.chains.fenced if m.partition is partition), key=message_id)
    return AssignmentState(
        id=partition.id,
        assignment=partition.assignment,
        reader=partition.reader,
        incarnation=partition.incarnation,
        floor=partition.floor,
        completed=tuple(partition.completed) if owned else (),
        recalled=tuple(sorted(partition.recalled.items())),
        owned=owned,
        live=partition.live,
        draining=partition.draining and owned,
        unended=partition.unended if owned else 0,
        ledger=_ledger_state(ledger),
        commits=_commits_state(partition.commits) if owned else None,
        ahead=partition in engine.committer.ahead,
        in_flight=_messages(ledger.in_flight()),
        fenced=_messages(fenced),
        waiting=_messages(ledger.waiting) if isinstance(ledger, OffsetLedger) else (),
        finished=tuple(message_id(message) for message in partition.finished),
        resettle=_messages(partition.resettle),
    )


def _empty(partition: Partition) -> Ledger:
    return AckLedger() if partition.floor is None else OffsetLedger(partition.floor)


def _messages(messages: Iterable[Message]) -> tuple[MessageState, ...]:
    return tuple(_message_state(message) for message in messages)


def _message_state(message: Message) -> MessageState:
    data = getattr(message, "data", _NO_DATA)
    following = None if message.next is None else message_id(message.next)
    return MessageState._make((*_copied(message), () if data is _NO_DATA else (data,), following))


def _ledger_state(ledger: Ledger) -> AckLedgerState | OffsetLedgerState:
    if isinstance(ledger, OffsetLedger):
        return _offset_state(ledger)
    assert isinstance(ledger, AckLedger), f"no snapshot of a {type(ledger).__name__} is known"
    settled = tuple(zip(ledger._starts, ledger._ends, strict=True))
    return AckLedgerState(ledger.highest, settled, tuple(sorted(ledger._loose)))


def _offset_state(ledger: OffsetLedger) -> OffsetLedgerState:
    floor = ledger.floor()  # This call updates ``_first``. Entries below the floor decide nothing.
    first = ledger._first
    return OffsetLedgerState(
        highest=ledger.highest,
        floor=floor,
        trailing=ledger._trailing if ledger._trailing > floor else -1,
        delivered=ledger._delivered,
        seeded=tuple(ledger._seeded),
        first_ordinal=ledger.floor_ordinal,
        entries=tuple(
            (ledger._offsets[index], ledger._open[index] == 1, ledger._messages[index] is not None)
            for index in range(first, len(ledger._open))
        ),
    )


def _commits_state(commits: CommitProgress | None) -> CommitsState | None:
    if commits is None:
        return None
    assert isinstance(commits, PartitionCommits), f"no snapshot of a {type(commits).__name__} is known"
    sending = commits.sending
    return CommitsState(
        not_before=commits.not_before,
        changes=commits.changes,
        since=commits.since if commits.changes or sending is not None else 0.0,
        confirmed=commits.confirmed,
        confirmed_ordinal=commits.confirmed_ordinal,
        sending=None if sending is None else (sending.floor or 0, tuple(sending.completed), sending.ordinal),
        over=commits.over,
    )


# --- to an engine


def restore(state: EngineState) -> Engine:
    """Make an engine from its state, with new partitions, messages, counters and peaks.

    ``snapshot(restore(state)) == state``. A driver finds the messages in the ledgers of ``partitions`` and in
    ``chains.fenced``, and the settlements in ``PartitionCommits.sending``.
    """
    engine = make_engine(state.policy)
    engine.latest_assignment = state.latest_assignment
    engine.running_handlers, engine.halted = state.running_handlers, state.halted
    flow = engine.flow
    flow.in_flight, flow.bytes, flow.taking, flow.paused, flow.pausing, flow.pause_at, flow.look_at = state.flow
    messages: dict[MessageId, Message] = {}
    partitions = {each.assignment: _restore_assignment(engine, each, messages) for each in state.assignments}
    for each in state.assignments:
        for one in each.in_flight + each.fenced:
            if one.next is not None:
                messages[MessageId(each.assignment, one.position)].next = messages[one.next]
    if state.budgets is not None and isinstance(engine, PartitionBudgetEngine):
        engine.fair.running.update(state.budgets.running)
        engine.full.update(state.budgets.full)
    engine.chains.ready.extend(messages[one] for one in state.ready)
    for partition_id, lane, tail in state.tails:
        assert lane is not None, "a message in no lane is no tail"
        engine.chains.tails.setdefault(partition_id, {})[lane] = messages[tail]
    for partition in partitions.values():
        # All assignments of a partition share the tails, and fenced assignments too.
        partition.tails = engine.chains.tails.get(partition.id.whole, partition.tails)
    stopped = engine.stopped
    for head, failure, until, kept in state.lanes:
        stopped.by_head[messages[head]] = StoppedLane(messages[head], failure, until, kept)
    stopped._heap = [(until, order, messages[head]) for order, (until, head) in enumerate(state.holds, 1)]
    stopped._order = len(stopped._heap)
    heapify(stopped._heap)
    engine.dirty.extend(partitions[number] for number in state.dirty)
    for partition in engine.dirty:
        partition.dirty = True
    for head, produced, sends in state.produced:
        engine.publishing.begin(messages[head], produced)
        engine.publishing.produced[messages[head]] = produced, sends
    for handled, outcome, at in state.handled:
        engine.publishing.defer(messages[handled], outcome, at)
    engine._outputs_full = state.outputs_full
    if state.starts_held:
        engine.hold_starts()
    else:
        engine.resume_starts()
    return engine


def _restore_assignment(engine: Engine, state: AssignmentState, messages: dict[MessageId, Message]) -> Partition:
    partition = Partition(state.id, state.reader, state.incarnation, floor=state.floor, completed=list(state.completed))
    partition.recalled = dict(state.recalled)
    partition.assignment, partition.live = state.assignment, state.live
    partition.draining, partition.unended = state.draining, state.unended
    partition.steady = state.live and not state.draining
    in_flight = _restored(partition, state.in_flight)
    fenced = _restored(partition, state.fenced)
    for message in in_flight + fenced:
        messages[message_id(message)] = message
    engine.chains.fenced.update(fenced)
    if isinstance(state.ledger, OffsetLedgerState):
        ledger = _restore_offsets(state.ledger, in_flight)
        ledger.waiting = _restored(partition, state.waiting)
        partition.ledger = ledger
        _restore_commits(engine, partition, state.commits)
        if state.owned:
            engine.committer.partitions[partition] = ledger
    else:
        partition.ledger = _restore_acks(state.ledger, in_flight, engine.policy)
    if state.ahead:
        engine.committer.ahead.add(partition)
    if isinstance(engine, PartitionBudgetEngine):
        if state.owned:
            engine.enter(partition)
        partition.budget = engine.policy.budget_of(partition.id)
    if state.owned:
        engine.partitions[partition.id] = partition
        partition.tails = engine.chains.tails.setdefault(partition.id.whole, {})
    partition.finished = [messages[one] for one in state.finished]
    partition.resettle = _restored(partition, state.resettle)
    return partition


def _restored(partition: Partition, states: Iterable[MessageState]) -> list[Message]:
    return [_restore_message(partition, state) for state in states]


def _restore_message(partition: Partition, state: MessageState) -> Message:
    message = Message(partition, state.position, state.key, state.size, state.raw, state.token)
    message.lane, message.broken, message.attempt = state.lane, state.broken, state.attempt
    message.state, message.ordinal, message.received = state.state, state.ordinal, state.received
    if state.data:
        message.data = state.data[0]
    return message


def _restore_acks(state: AckLedgerState, in_flight: list[Message], policy: Policy) -> AckLedger:
    ledger = AckLedger(knows_settled=policy.knows_settled)
    ledger.highest = state.highest
    ledger._starts.extend(start for start, _ in state.settled)
    ledger._ends.extend(end for _, end in state.settled)
    ledger._loose.update(state.loose)
    ledger.unsettled.update((message.position, message) for message in in_flight)
    return ledger


def _restore_offsets(state: OffsetLedgerState, in_flight: list[Message]) -> OffsetLedger:
    ledger = OffsetLedger(state.floor, state.seeded)
    ledger.highest, ledger._trailing, ledger._delivered = state.highest, state.trailing, state.delivered
    ledger._base = state.first_ordinal
    following = iter(in_flight)
    for offset, unfinished, is_held in state.entries:
        ledger._open.append(unfinished)
        ledger._offsets.append(offset)
        ledger._messages.append(next(following) if is_held else None)
    return ledger


def _restore_commits(engine: Engine, partition: Partition, state: CommitsState | None) -> None:
    if state is None:
        return
    commits = PartitionCommits(state.confirmed, engine.policy.commit_count)
    commits.not_before, commits.changes, commits.since = state.not_before, state.changes, state.since
    commits.confirmed_ordinal, commits.over = state.confirmed_ordinal, state.over
    if state.sending is not None:
        floor, completed, ordinal = state.sending
        commits.sending = Settlement(partition, [], floor, list(completed))
        commits.sending.ordinal = ordinal
    partition.commits = commits
