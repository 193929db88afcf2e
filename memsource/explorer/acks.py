"""One engine over a broker with individual acknowledgements, in every order of events.

The broker delivers in order. The broker may redeliver an unacknowledged message at any time, under a new token, and
accepts only the newest token. After a loss and a new assignment, the broker delivers unacknowledged messages before new
messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from lanes.core import effects as fx
from lanes.core.engine import Engine
from lanes.core.lane import FINISHED, RUNNING, SETTLED
from lanes.core.ledgers import AckLedger
from lanes.core.snapshot import EngineState, MessageId, message_id, restore, snapshot
from lanes.core.types import ACK, NEVER, Message, Partition, PartitionId, Settlement
from memsource.explorer import invariants
from memsource.explorer.member import FAILED, READER, SOURCE
from memsource.explorer.scope import Scope
from memsource.explorer.search import Broken


class Sent(NamedTuple):
    """An unanswered acknowledgement. ``again`` says whether an earlier acknowledgement had settled its message."""

    message: MessageId
    token: int
    again: bool


class AckState(NamedTuple):
    """The state of the engine, and the state of one partition at the broker.

    Attributes:
        engine: State of the engine.
        tokens: Newest token of each message; 0 = never delivered.
        acked: Acknowledged messages.
        first: Messages to redeliver before the delivery of new messages.
        done: Messages that the assignment has handled.
        sent: Unanswered acknowledgements.
        redeliveries: Number of early redeliveries since the first state.
        failures: Number of failures of handlers since the first state.
        losses: Number of losses of the partition since the first state.
        lost_acks: Number of lost acknowledgements since the first state.
    """

    engine: EngineState
    tokens: tuple[int, ...]
    acked: frozenset[int]
    first: tuple[int, ...] = ()
    done: frozenset[int] = frozenset()
    sent: tuple[Sent, ...] = ()
    redeliveries: int = 0
    failures: int = 0
    losses: int = 0
    lost_acks: int = 0


class AckWorld:
    """One member whose source has individual acknowledgements, in every order of events.

    Args:
        scope: The scope, with one member. ``faults`` bounds the losses of the partition, and ``unknown`` the lost
            acknowledgements.
        redeliveries: Maximum number of redeliveries before the wait for an acknowledgement ends.
    """

    def __init__(self, scope: Scope, redeliveries: int) -> None:
        self.reached: Counter[str] = Counter()
        self._scope = scope
        self._redeliveries = redeliveries
        self._keys = [key.encode() for _, key in scope.messages]

    def start(self) -> AckState:
        """Return the first state: the member owns the partition, and the broker has delivered no message."""
        engine = Engine(self._scope.policy())
        engine.assign(Partition(PartitionId(SOURCE, 0), READER))
        return AckState(snapshot(engine), (0,) * len(self._keys), frozenset())

    def steps(self, state: AckState) -> Iterator[tuple[Callable[[], str], AckState]]:
        """Yield every possible event of a state. Pure.

        Args:
            state: The state.

        Yields:
            A function that returns the text of the event, and the next state.

        Raises:
            Broken: The event or the state breaks an invariant.
        """
        moving = False
        events = list(self._events(state))
        if all(may_stay_away for _, may_stay_away, _ in events):
            # No other event is certain to happen, so the broker's wait for an acknowledgement ends.
            events += [
                (f"delivered again: {position}", False, partial(self._delivered, state, position))
                for position, token in enumerate(state.tokens)
                if token and position not in state.acked
            ]
        for text, may_stay_away, step in events:
            moving = moving or not may_stay_away
            self.reached[text.split(":")[0]] += 1
            try:
                following = step()
            except Broken as broken:
                raise Broken(broken.invariant, broken.text, text) from broken
            except Exception as error:
                raise Broken("nothing_raises", f"{type(error).__name__}: {error}", text) from error
            yield partial(str, text), following
        if not moving:
            self.reached["no further event"] += 1
            invariants.nothing_stands_still(set(range(len(self._keys))) - state.acked)

    def _events(self, state: AckState) -> Iterator[tuple[str, bool, Callable[[], AckState]]]:
        """Yield each possible event: its text, whether it may never happen, and a function making the next state."""
        engine = restore(state.engine)
        if engine.room().messages and state.first:
            position, *rest = state.first
            delivered = partial(self._delivered, state._replace(first=tuple(rest)), position)
            yield f"redelivered after the loss: {position}", False, delivered
        elif engine.room().messages and 0 in state.tokens:
            position = state.tokens.index(0)
            yield f"delivered: {position}", False, partial(self._delivered, state, position)
        for position, token in enumerate(state.tokens):
            waits = position in state.first or position in state.acked
            if token and not waits and state.redeliveries < self._redeliveries:
                more = state._replace(redeliveries=state.redeliveries + 1)
                yield f"delivered again: {position}", True, partial(self._delivered, more, position)
        if engine.ready and engine.running_handlers < engine.concurrency:
            yield "starts a handler", False, partial(self._take, state)
        for running in _running(engine):
            name = message_id(running)
            yield f"ends well: {name.position}", False, partial(self._ends, state, name)
            if running.partition.live and state.failures < self._scope.failures:
                yield f"fails: {name.position}", True, partial(self._fails, state, name)
        if engine.next_due() != NEVER:
            yield "time passes", False, partial(self._due, state)
        if state.sent:
            yield "acknowledged", False, partial(self._answered, state, arrived=True, known=True)
            if state.lost_acks < self._scope.unknown:
                less = state._replace(lost_acks=state.lost_acks + 1)
                yield "acknowledgements get lost", True, partial(self._answered, less, arrived=False, known=True)
                yield "sending fails", True, partial(self._answered, less, arrived=False, known=False)
                yield "sent, and not known", True, partial(self._answered, less, arrived=True, known=False)
        elif engine.dirty:
            yield "settles", False, partial(self._settle, state)
        if state.losses < self._scope.faults:
            yield "lost and assigned again", True, partial(self._lose, state)

    # --- the effects of events

    def _delivered(self, state: AckState, position: int) -> AckState:
        engine = restore(state.engine)
        tokens = list(state.tokens)
        tokens[position] += 1
        partition = _owned(engine)
        message = Message(partition, position, self._keys[position], 1, None, tokens[position])
        engine.receive(partition, [message], 1, 0.0)
        causes = [effect.cause for effect in engine.effects if isinstance(effect, fx.Redelivered)]
        self.reached.update(f"{cause} when it came again" for cause in causes)
        following = self._after(state._replace(tokens=tuple(tokens)), engine)
        invariants.redelivery_joins_the_held(state.engine, following.engine, position)
        invariants.settled_runs_no_more(following.engine, position, done=position in state.done)
        return following

    def _take(self, state: AckState) -> AckState:
        engine = restore(state.engine)
        message = engine.take()
        assert message is not None, "a message was ready"
        key = message.key
        before = [p for p in range(message.position) if self._keys[p] == key and state.tokens[p]]
        unfinished = set(before) - state.done - state.acked
        invariants.former_ended_first(message.position, unfinished)
        return self._after(state, engine)

    def _ends(self, state: AckState, name: MessageId) -> AckState:
        engine = restore(state.engine)
        message = next(m for m in _running(engine) if message_id(m) == name)
        live = message.partition.live
        engine.finish(message, ACK, 0.0)
        following = self._after(state, engine)
        if live:
            return following._replace(done=state.done | {name.position})
        self.reached["a fenced handler ended"] += 1
        invariants.zombie_changes_nothing(state.engine, following.engine)
        return following

    def _fails(self, state: AckState, name: MessageId) -> AckState:
        engine = restore(state.engine)
        engine.finish(next(m for m in _running(engine) if message_id(m) == name), FAILED, 0.0)
        return self._after(state._replace(failures=state.failures + 1), engine)

    def _due(self, state: AckState) -> AckState:
        engine = restore(state.engine)
        engine.due(engine.next_due())
        return self._after(state, engine)

    def _settle(self, state: AckState) -> AckState:
        engine = restore(state.engine)
        sent = []
        for settlement in engine.collect(0.0):
            for message in settlement.messages:
                invariants.ack_only_what_is_done(message, state.done, owned=message.partition is _owned(engine))
                assert isinstance(message.token, int)
                sent.append(Sent(message_id(message), message.token, message.state == SETTLED))
        return self._after(state._replace(sent=tuple(sent)), engine)

    def _answered(self, state: AckState, *, arrived: bool, known: bool) -> AckState:
        """Answer the sent acknowledgements.

        The broker receives the acknowledgements if ``arrived``, and the engine receives the answer if ``known``.
        """
        engine = restore(state.engine)
        newest = {one.message.position for one in state.sent if one.token == state.tokens[one.message.position]}
        acked = newest - set(state.first)
        settlement = _settlement(engine, state.sent)
        if known:
            engine.settled([settlement])
        else:
            engine.unsettled([settlement])
        state = state._replace(sent=(), acked=state.acked | acked if arrived else state.acked)
        return self._after(state, engine)

    def _lose(self, state: AckState) -> AckState:
        engine = restore(state.engine)
        engine.lose(_owned(engine))
        engine.assign(Partition(PartitionId(SOURCE, 0), READER))
        # The tokens of these messages are void until the messages are redelivered.
        first = tuple(p for p, token in enumerate(state.tokens) if token and p not in state.acked)
        return self._after(state._replace(losses=state.losses + 1, done=frozenset(), first=first), engine)

    def _after(self, state: AckState, engine: Engine) -> AckState:
        self.reached.update("held for a retry" for effect in engine.effects if isinstance(effect, fx.Held))
        engine.effects.clear()
        invariants.given_up_is_forgotten(engine)
        now = snapshot(engine)
        running = [(m.partition.id, m.lane) for m in _running(engine)]
        invariants.one_handler_a_key(running)
        invariants.only_its_lane_waits(now)
        return state._replace(engine=now)


def _owned(engine: Engine) -> Partition:
    return engine.partitions[PartitionId(SOURCE, 0)]


def _running(engine: Engine) -> list[Message]:
    held = [m for m in _owned(engine).ledger.in_flight() if m.state == RUNNING]
    return held + sorted(engine.chains.fenced, key=message_id)


def _settlement(engine: Engine, sent: tuple[Sent, ...]) -> Settlement:
    """Return the settlement of sent acknowledgements: messages in flight, and repeated settlements."""
    partition = _owned(engine)
    if any(one.message.assignment != partition.assignment for one in sent):
        # The assignment of the acknowledgements is lost.
        partition = Partition(partition.id, READER)
        partition.ledger = AckLedger()
    held = {} if partition.assignment == 0 else {m.position: m for m in partition.ledger.in_flight()}
    messages = []
    for one in sent:
        message = held.get(one.message.position)
        if message is None or one.again or message.state != FINISHED:
            message = Message(partition, one.message.position, None, 1, None, one.token)
            message.state = SETTLED
        messages.append(message)
    return Settlement(partition, messages)
