"""An engine that makes every call twice: on itself, and on an engine restored from a snapshot before the call."""

from __future__ import annotations

from typing import Any

from lanes.core.effects import Effect
from lanes.core.engine import Engine
from lanes.core.lane import StoppedLane
from lanes.core.ledgers import AckLedger, OffsetLedger
from lanes.core.partition_budgets import PartitionBudgetEngine
from lanes.core.policy import Policy
from lanes.core.snapshot import restore, snapshot
from lanes.core.types import Message, Partition, Room, Settlement

EVENTS = (
    "assign",
    "receive",
    "progressed",
    "take",
    "take_batch",
    "finish",
    "finish_batch",
    "kept",
    "published",
    "publish_failed",
    "dead_lettered",
    "unblock",
    "park",
    "due",
    "collect",
    "settled",
    "unsettled",
    "drain",
    "fence",
    "lose",
    "release",
)


class TwinEngine(Engine):
    """The call fails if the engines return different results, emit different effects, or have different states."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self._within = False
        self.compared = 0


class TwinBudgetEngine(PartitionBudgetEngine):
    """The same for an engine with budgets per partition."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self._within = False
        self.compared = 0


def _doubled(kind: type[Engine], name: str) -> Any:
    real = getattr(kind, name)

    def call(engine: TwinEngine | TwinBudgetEngine, *args: Any, **kwargs: Any) -> Any:
        if engine._within:
            return real(engine, *args, **kwargs)
        effects = engine.effects[:]
        engine.effects.clear()
        state = snapshot(engine)
        other = restore(state)
        assert snapshot(other) == state
        assert hash(snapshot(other)) == hash(state)
        others = [_Others(engine, other).of(argument, new=name == "receive") for argument in args]
        engine._within = True
        result = real(engine, *args, **kwargs)
        engine._within = False
        found = real(other, *others, **kwargs)
        assert seen(result) == seen(found), name
        assert [seen(effect) for effect in engine.effects] == [seen(effect) for effect in other.effects], name
        engine.effects[:], effects = [], effects + engine.effects
        other.effects.clear()
        assert snapshot(engine) == snapshot(other), name
        assert asked(engine) == asked(other), name
        engine.effects[:] = effects
        engine.compared += 1
        return result

    return call


for _name in EVENTS:
    setattr(TwinEngine, _name, _doubled(Engine, _name))
    setattr(TwinBudgetEngine, _name, _doubled(PartitionBudgetEngine, _name))


class _Others:
    """The correspondence between the objects of both engines."""

    def __init__(self, engine: Engine, other: Engine) -> None:
        self._partitions = dict(zip(_partitions(engine), _partitions(other), strict=True))
        self._messages = dict(zip(_messages(engine), _messages(other), strict=True))

    def of(self, argument: Any, *, new: bool = False) -> Any:
        """The object of the other engine, or a copy if the other engine has no such object."""
        match argument:
            case Partition():
                return self._partitions.get(argument) or self._partitions.setdefault(argument, _copy(argument))
            case Message():
                known = None if new else self._messages.get(argument)
                return known or self._copy(argument)
            case Settlement():
                commits = argument.partition.commits
                other = self.of(argument.partition)
                if commits is not None and commits.sending is argument and other.commits is not None:
                    return other.commits.sending or argument
                messages = [self.of(message) for message in argument.messages]
                settlement = Settlement(other, messages, argument.floor, argument.completed)
                settlement.ordinal = argument.ordinal
                return settlement
            case list():
                return [self.of(one, new=new) for one in argument]
        return argument

    def _copy(self, message: Message) -> Message:
        partition: Partition = self.of(message.partition)
        copy = Message(partition, message.position, message.key, message.size, message.raw, message.token)
        copy.state, copy.attempt, copy.received, copy.lane = (
            message.state,
            message.attempt,
            message.received,
            message.lane,
        )
        return copy


def _copy(partition: Partition) -> Partition:
    """A partition that is new, or that the engine has forgotten."""
    copy = Partition(
        partition.id,
        partition.reader,
        partition.incarnation,
        floor=partition.floor,
        completed=partition.completed,
    )
    copy.assignment, copy.recalled = partition.assignment, partition.recalled
    copy.ledger = AckLedger() if partition.floor is None else OffsetLedger(partition.floor)
    copy.commits = partition.commits
    return copy


def _partitions(engine: Engine) -> list[Partition]:
    owned = list(engine.partitions.values())
    given_up = {m.partition.assignment: m.partition for m in engine.chains.fenced if m.partition not in owned}
    return owned + [given_up[number] for number in sorted(given_up)]


def _messages(engine: Engine) -> list[Message]:
    found = sorted(engine.chains.fenced, key=lambda m: (m.partition.assignment, m.position))
    for partition in engine.partitions.values():
        found += partition.ledger.in_flight() + partition.resettle
        if isinstance(partition.ledger, OffsetLedger):
            found += partition.ledger.waiting
    return found


def seen(value: Any) -> Any:
    """A comparable form of a result or an effect of either engine."""
    match value:
        case Message():
            return value.partition.assignment, value.position, value.state, value.attempt, value.token
        case Partition():
            return value.assignment
        case Settlement():
            return seen(value.partition), seen(value.messages), value.floor, list(value.completed), value.ordinal
        case Room():
            return value.messages, value.bytes, sorted(map(seen, value.paused))
        case StoppedLane():
            return seen(value.head), value.failure, value.until, value.kept
        case Effect():
            names = [name for base in type(value).__mro__[:-1] for name in base.__slots__]  # type: ignore[attr-defined]
            return type(value), [seen(getattr(value, name)) for name in names]
        case list():
            return [seen(one) for one in value]
    return value


def asked(engine: Engine) -> list[Any]:
    """The result of every query of an engine."""
    answers: list[Any] = [engine.next_due(), engine.commit_at(), engine.room(), engine.ready, engine.available(9)]
    answers += [
        engine.stopped_lanes(),
        engine.in_flight_since(float("inf")),
        engine.oldest(),
        engine.running_handlers,
        engine.halted,
    ]
    return [seen(answer) for answer in answers]
