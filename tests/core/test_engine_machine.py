"""The engine agrees with a naive model after every call, for any order of calls.

The harness plays source and runtime: it keeps to ``room``, picks the outcomes of handlers, and settles.
"""

from __future__ import annotations

from collections import Counter
from operator import is_

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from lanes.core import effects as fx
from lanes.core.engine import Engine
from lanes.core.flow import LOOK_EVERY
from lanes.core.lane import BLOCKED, DEAD_LETTERING, HELD, PUBLISH_HELD, PUBLISHING, RUNNING, STATE_NAMES
from lanes.core.policy import Policy, RetryPolicy
from lanes.core.publishing import Produced
from lanes.core.types import ABANDON, ACK, Failure, Message, Outcome, Partition, PartitionId, Settlement
from tests.core.builders import READER, new_policy
from tests.core.naive import SENDING, NaiveEngine
from tests.effort import runs

CONCURRENCY, MAX_IN_FLIGHT, MAX_BYTES, ATTEMPTS, BACKOFF, MAX_BACKOFF = 4, 24, 900, 3, 1.0, 1.5

# Fewer keys than handlers, one of them hot.
KEYS: list[bytes | None] = [b"hot", b"hot", b"hot", b"hot", b"warm", b"", None]
SIZES = [*range(30), 1000]

# 0 = the next position, above 0 = after a gap, below 0 = so many positions back.
ONWARDS = [0, 0, 0, 1, 2, 3, -1, -2]
BACK = [*range(-12, 0), 0, 1]

EFFECTS = {
    fx.Held: "held",
    fx.DeadLetterDue: "dead_lettering",
    fx.Halted: "stuck",
    fx.Interrupted: "out",
    fx.Zombie: "zombie",
    fx.PublishDue: "publishing",
    fx.PublishHeld: "publish_held",
}
GIVING_UP = ["nothing"] * 6 + ["drain", "drain", "fence", "lose", "release"]
CAUSES = {"held": fx.STILL_IN_FLIGHT, "settled": fx.ALREADY_SETTLED, "late": fx.LATE}
NAMES = {"done": "finished", "stuck": "blocked"}

ANY = st.integers(0, 99)
SECONDS = st.sampled_from([0.0, 0.0, 0.3, 1.0])
STARTS = st.integers(0, CONCURRENCY)
Entry = tuple[int, bytes | None, int]


def entries(steps: list[int]) -> st.SearchStrategy[list[Entry]]:
    return st.lists(st.tuples(st.sampled_from(steps), st.sampled_from(KEYS), st.sampled_from(SIZES)), max_size=8)


FAILURES = st.builds(
    Failure,
    st.just(ValueError("no")),
    st.sampled_from([0.0, 0.5, 0.999]),
    st.sampled_from([None, None, 0.0, 2.5]),
    st.sampled_from([False, False, False, True]),
)
# Weighted by repetition. Interruptions end whole partitions, so they are rare.
WHAT = ["start"] * 20 + ["ack"] * 10 + ["publish"] * 10 + ["fail"] * 15 + ["abandon"]
OUTPUTS = st.sampled_from([0, 1, 100, MAX_BYTES // 2, MAX_BYTES])
SENDS = ["confirmed"] * 3 + ["repeat"] * 3 + ["refused"]
HANDLERS = st.lists(st.tuples(ANY, st.sampled_from(WHAT), FAILURES, OUTPUTS), min_size=1, max_size=12)


class EngineMachine(RuleBasedStateMachine):
    """One engine, two partitions, any number of assignments of each."""

    places: tuple[PartitionId, ...] = (PartitionId("S", 0), PartitionId("S", 1))

    def __init__(self) -> None:
        super().__init__()
        self.engine: Engine
        self.naive: NaiveEngine
        self.now = 0.0
        self.partitions: list[Partition] = []  # all assignments so far
        self.keys: dict[
            tuple[PartitionId, int], bytes | None
        ] = {}  # the key of each position, the same at every delivery
        self.admitted: list[Message] = []
        self.late: set[Message] = set()
        self.settled: set[Message] = set()
        self.succeeded: set[Message] = set()
        self.again: set[Message] = set()  # redelivered after they were settled, to be settled again
        self.interrupted: set[Message] = set()  # abandoned because a handler in front of them was interrupted
        self.to_park: list[Message] = []
        self.on_the_way: list[list[Settlement]] = []
        self.last_start: dict[tuple[Partition, bytes], int] = {}
        self.announced: Counter[str] = Counter()
        self.drained: Counter[Partition] = Counter()
        self.expect_drained: set[Partition] = set()
        self.naive_halted = False
        self.taking = True
        self.stopped_at = 0.0
        self.token = 0

    @initialize(dead_letters=st.booleans(), keeps=st.booleans())
    def start(self, dead_letters: bool, keeps: bool) -> None:
        self.naive = NaiveEngine(CONCURRENCY, ATTEMPTS, "dead_lettering" if dead_letters else "stuck", keeps=keeps)
        self.begin(Engine(self.policy(dead_letters, keeps)))

    def policy(self, dead_letters: bool, keeps: bool) -> Policy:
        return new_policy(
            concurrency=CONCURRENCY,
            max_in_flight=MAX_IN_FLIGHT,
            max_bytes=MAX_BYTES,
            retry=RetryPolicy(ATTEMPTS, BACKOFF, MAX_BACKOFF),
            poison="skip" if dead_letters else "exit",
            keeps_attempts=keeps,
        )

    def begin(self, engine: Engine) -> None:
        self.engine = engine
        self.shared = self.engine.dirty, self.engine.chains.ready, self.engine.effects
        for _ in self.places:
            self.assign(0)

    def owned(self) -> list[Partition]:
        return list(self.engine.partitions.values())

    # --- the source

    @precondition(lambda self: self.free())
    @rule(index=ANY)
    def assign(self, index: int) -> None:
        partition = Partition(self.free()[index % len(self.free())], READER)
        if self.naive.keeps:
            every = 2 + len(self.partitions) % 3
            partition.recalled = {at: 2 + at % ATTEMPTS for at in range(len(self.partitions) % 5, 200, every)}
        self.engine.assign(partition)
        self.partitions.append(partition)
        assert [p.assignment for p in self.partitions] == list(range(1, len(self.partitions) + 1))

    def free(self) -> list[PartitionId]:
        return [place for place in self.places if place not in self.engine.partitions]

    @precondition(lambda self: any(p.draining or not p.live for p in self.owned()))
    @rule()
    def hand_over(self) -> None:
        """Release drained partitions, and assign them again."""
        for partition in self.owned():
            if partition.draining or not partition.live:
                self.naive.release(partition)
                self.engine.release(partition)
                self.everything_holds()
                self.assign(0)

    @precondition(lambda self: self.owned())
    @rule(seconds=SECONDS, index=ANY, run=entries(ONWARDS), starts=STARTS)
    def receive(self, seconds: float, index: int, run: list[Entry], starts: int) -> None:
        """Deliver messages, and start the workers they wake."""
        if not self.engine.room().messages:
            self.catch_up()
        self.time_passes(seconds)
        self.deliver(self.owned()[index % len(self.owned())], run)
        self.everything_holds()
        for _ in range(starts):
            self.take()

    @rule(seconds=SECONDS, index=ANY, run=entries(BACK))
    def receive_again(self, seconds: float, index: int, run: list[Entry]) -> None:
        """Deliver earlier positions again, maybe of an earlier assignment."""
        self.time_passes(seconds)
        self.deliver(self.partitions[-1 - index % min(3, len(self.partitions))], run)

    def deliver(self, partition: Partition, entries: list[Entry]) -> None:
        engine, naive = self.engine, self.naive
        room = 0 if partition in engine.room().paused else engine.room().messages
        highest = partition.ledger.highest
        run: list[Message] = []
        causes: list[str] = []
        for step, key, size in entries:
            position = max(0, highest + 1 + step)
            known = self.keys.get((partition.id, position), key)
            self.token += 1
            message = Message(partition, position, known, size, None, self.token)
            message.attempt = partition.recalled.get(position, 1)
            sent_before = any(m.partition is partition and m.position == position for m in self.admitted)
            if not sent_before and partition.live and not partition.draining:
                if not room:
                    continue
                room -= 1
            self.keys[partition.id, position] = known
            cause = naive.receive(message, highest)
            causes.append(cause)
            run.append(message)
            if cause in ("new", "late"):
                self.admitted.append(message)
                if cause == "late":
                    self.late.add(message)
                highest = max(highest, position)
            elif cause == "settled":
                self.again.add(message)
        engine.receive(partition, run, sum(message.size for message in run), self.now)
        found = [(e.message, e.cause) for e in engine.effects if isinstance(e, fx.Redelivered)]
        assert found == [(m, CAUSES[c]) for m, c in zip(run, causes, strict=True) if c in CAUSES]
        newest = {m.position: m.token for m, c in zip(run, causes, strict=True) if c != "ignored"}
        for message in naive.state:
            if message.partition is partition and message.position in newest:
                assert message.token == newest[message.position]

    # --- the workers

    @rule(handlers=HANDLERS)
    def work(self, handlers: list[tuple[int, str, Failure, int]]) -> None:
        """Start handlers, and end running handlers."""
        for index, what, failure, size in handlers:
            if what == "start":
                self.take()
            elif self.running():
                outcomes = {"ack": ACK, "abandon": ABANDON, "publish": Produced(what, size)}
                self.finish(index, outcomes.get(what, failure))
            self.everything_holds()

    def take(self) -> None:
        startable = self.naive.startable()
        message = self.engine.take()
        if message is None:
            assert startable == []
            return
        assert message in startable
        self.naive.state[message] = "running"
        assert message.attempt == self.naive.attempt[message]
        first = message.partition.recalled.get(message.position, 1)
        assert message.attempt >= first
        if message.key is not None and message.attempt == first and message not in self.late:
            lane = (message.partition, message.key)
            assert message.position > self.last_start.get(lane, -1)
            self.last_start[lane] = message.position

    def running(self) -> list[Message]:
        return [m for m, state in self.naive.state.items() if state == "running"]

    def finish(self, index: int, outcome: Outcome) -> None:
        message = self.running()[index % len(self.running())]
        attempt, until = message.attempt, 0.0
        if isinstance(outcome, Failure):
            self.announced["out"] += message.partition in self.naive.draining - self.naive.fenced
            backoff = min(MAX_BACKOFF, BACKOFF * 2 ** (attempt - 1))
            until = self.now + (outcome.chance * backoff if outcome.delay is None else outcome.delay)
        if message.partition in self.naive.fenced:
            self.announced["zombie"] += 1
        elif outcome is ACK:
            self.succeeded.add(message)
        before = set(self.naive.state)
        self.naive.finish(message, outcome, until)
        self.interrupted = before - set(self.naive.state) - {message}
        ended = self.naive.state.get(message, "gone")
        self.announced[ended] += 1
        self.naive_halted |= ended == "stuck"
        self.engine.finish(message, outcome, self.now)

    def publishing(self) -> list[Message]:
        return [m for m, state in self.naive.state.items() if state == "publishing"]

    @precondition(lambda self: self.publishing())
    @rule(index=ANY, how=st.sampled_from(SENDS), failure=FAILURES)
    def send(self, index: int, how: str, failure: Failure) -> None:
        """End a send of a message's outputs: confirmed, to be repeated, or refused."""
        message = self.publishing()[index % len(self.publishing())]
        if how == "confirmed":
            self.naive.sent(message, None, 0.0)
            self.succeeded.add(message)
            self.engine.published(message, self.now)
            return
        failure.terminal = how == "refused"
        self.announced["out"] += failure.terminal and message.partition in self.naive.draining
        backoff = min(MAX_BACKOFF, BACKOFF * 2 ** self.naive.sends[message])
        wait = failure.chance * backoff if failure.delay is None else failure.delay
        before = set(self.naive.state)
        self.naive.sent(message, failure, self.now + wait)
        self.interrupted = before - set(self.naive.state) - {message}
        ended = self.naive.state.get(message, "gone")
        self.announced[ended] += 1
        self.naive_halted |= ended == "stuck"
        self.engine.publish_failed(message, failure, self.now)

    @precondition(lambda self: self.admitted)
    @rule(index=ANY, terminal=st.booleans())
    def send_late(self, index: int, terminal: bool) -> None:
        """End a send of a message that was given up meanwhile, which changes nothing."""
        gone = [m for m in self.admitted if STATE_NAMES[m.state] == "abandoned"]
        if gone:
            message = gone[index % len(gone)]
            self.engine.published(message, self.now)
            self.engine.publish_failed(message, Failure(ValueError("no"), terminal=terminal), self.now)

    @rule(seconds=SECONDS)
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        due_at = self.engine.next_due()
        held = [self.naive.until[m] for m in self.naive.waiting()]
        # The due time is never after the end of the first hold, and before that end only for an abandoned head.
        assert due_at <= min(held, default=due_at)
        looks = self.engine.flow.look_at <= self.now
        self.engine.due(self.now)
        sending = self.publishing()
        self.naive.due(self.now)
        self.announced["publishing"] += len(self.publishing()) - len(sending)
        if looks:
            engine, flow = self.engine, self.engine.flow
            busy = engine.running_handlers + engine.ready
            idle = not busy or (busy < CONCURRENCY and any(map(self.could_use, self.partitions)))
            assert flow.taking or not idle or flow.in_flight >= MAX_IN_FLIGHT or flow.bytes >= MAX_BYTES

    def could_use(self, partition: Partition) -> bool:
        """Whether a message of the partition that arrives now could start."""
        return partition.steady

    @precondition(lambda self: self.naive.unkept)
    @rule(index=ANY)
    def keep(self, index: int) -> None:
        """Report a kept attempt twice, for a message in any state."""
        message = self.naive.unkept[index % len(self.naive.unkept)]
        self.naive.keep(message)
        for _ in range(2):
            self.engine.kept(message)

    def catch_up(self) -> None:
        """Make room: end holds, confirm dead letters, let some handlers succeed, and settle."""
        while self.naive.unkept:
            self.keep(0)
        self.time_passes(MAX_BACKOFF)
        while self.to_park:
            self.park(0)
        while self.publishing():
            self.send(0, "confirmed", Failure(ValueError("no")))
            self.everything_holds()
        for _ in range(MAX_IN_FLIGHT // 2):
            self.take()
            if self.running():
                self.finish(0, ACK)
                self.everything_holds()
        self.settle(0, "sent")
        self.everything_holds()

    # --- the settle step and the dead letters

    @precondition(lambda self: self.to_park)
    @rule(index=ANY)
    def park(self, index: int) -> None:
        message = self.to_park.pop(index % len(self.to_park))
        if self.naive.state.get(message) == "dead_lettering":
            self.naive.state[message] = "done"
            self.succeeded.add(message)
        self.engine.dead_lettered(message)

    @rule(index=ANY, how=st.sampled_from(["sent", "sent", "not sent", "on the way", "on the way"]))
    def settle(self, index: int, how: str) -> None:
        self.collect()
        if how == "on the way" or not self.on_the_way:
            return
        settlements = self.on_the_way.pop(index % len(self.on_the_way))
        if how == "not sent":
            self.engine.unsettled(settlements)
            return
        messages = [m for s in settlements for m in s.messages]
        self.settled.update(m for m in messages if m in self.naive.state)
        self.again.difference_update(messages)
        self.naive.settle(messages)
        self.engine.settled(settlements)

    def collect(self) -> None:
        under_way = {m for settlements in self.on_the_way for s in settlements for m in s.messages}
        again = {m for m in self.again if self.engine.partitions.get(m.partition.id) is m.partition}
        done = {m for m, state in self.naive.state.items() if state == "done"}
        settlements = self.engine.collect(self.now)
        collected = [m for s in settlements for m in s.messages]
        assert all(m.partition is s.partition for s in settlements for m in s.messages)
        assert len({s.partition for s in settlements}) == len(settlements)
        assert len(set(collected)) == len(collected)
        assert set(collected) == (done | again) - under_way
        assert set(collected) <= self.succeeded | self.again
        if settlements:
            self.on_the_way.append(settlements)

    # --- ownership

    @rule(index=ANY, how=st.sampled_from(GIVING_UP))
    def give_up(self, index: int, how: str) -> None:
        partition = self.partitions[index % len(self.partitions)]
        ours = partition not in self.naive.fenced
        zombies = [m for m in self.running() if m.partition is partition and ours]
        found: list[Message] = []
        expected: list[Message] = []
        if how == "drain":
            expected = self.naive.drain(partition) if ours and partition not in self.naive.draining else []
            found = self.engine.drain(partition)
        elif how == "fence":
            self.naive.fence(partition)
            found, expected = self.engine.fence(partition), zombies
        elif how == "lose":
            self.naive.release(partition)
            found, expected = self.engine.lose(partition), zombies
        elif how == "release":
            self.naive.release(partition)
            self.engine.release(partition)
        assert len(found) == len(expected)
        assert set(found) == set(expected)

    # --- invariants after every step

    @invariant()
    def everything_holds(self) -> None:
        self.naive.look_at_outputs(MAX_BYTES)
        self.effects_say_what_happened()
        self.taking_changes_at_the_marks()
        self.engine.effects.clear()  # as the runtime does
        self.nothing_is_lost()
        self.one_message_of_a_key_is_on_its_way()
        seen = (one := self.engine).dirty, one.outbox.dirty, one._ready, one.chains.ready, one.effects
        shared = self.shared[0], self.shared[0], self.shared[1], self.shared[1], self.shared[2]
        assert all(map(is_, seen, shared)), "engine and runtime share these objects, so none may be replaced"

    def effects_say_what_happened(self) -> None:
        """Expect one effect for each held, given-up or fenced message, and one for each drained partition."""
        abandoned: list[Message] = []
        for effect in self.engine.effects:
            if isinstance(effect, fx.Drained):
                self.drained[effect.partition] += 1
            elif isinstance(effect, fx.Abandoned):
                abandoned += effect.messages
            elif isinstance(effect, fx.DeadLetterDue):
                self.to_park.append(effect.message)
            name = EFFECTS.get(type(effect))
            if name is not None:
                self.announced[name] -= 1
        assert not any(self.announced[name] for name in EFFECTS.values())
        assert len(abandoned) == len(self.interrupted)
        assert set(abandoned) == self.interrupted
        self.interrupted = set()
        assert self.engine.halted == self.naive_halted
        for partition in self.naive.draining - self.naive.fenced:
            unended = [m for m, state in self.naive.state.items() if state == "running" or state in SENDING]
            if not any(m.partition is partition for m in unended):
                self.expect_drained.add(partition)
        assert self.drained == Counter(self.expect_drained)

    def taking_changes_at_the_marks(self) -> None:
        turns = [type(effect) for effect in self.engine.effects if isinstance(effect, fx.Saturated | fx.Resumed)]
        count, size, before = len(self.naive.state), sum(m.size for m in self.naive.state), self.taking
        if count >= MAX_IN_FLIGHT or size >= MAX_BYTES:
            self.taking = False
            self.stopped_at = self.now if before else self.stopped_at
        elif count <= self.low_mark() and size <= MAX_BYTES // 2:
            self.taking = True
        elif not before:
            self.taking = fx.Resumed in turns
            assert not self.taking or self.now >= self.stopped_at + LOOK_EVERY
            # A stop below the bounds is looked at again and again.
            assert self.taking or self.engine.next_due() <= self.now + LOOK_EVERY
        assert turns == ([] if self.taking == before else [fx.Resumed if self.taking else fx.Saturated])
        flow = self.engine.flow
        assert (flow.in_flight, flow.bytes, flow.taking) == (count, size, self.taking)
        assert flow.peak <= MAX_IN_FLIGHT

    def low_mark(self) -> int:
        return (MAX_IN_FLIGHT + CONCURRENCY) // 2

    def nothing_is_lost(self) -> None:
        """Every message that was ever admitted is in flight, settled, or abandoned with its partition."""
        for message in self.admitted:
            state = self.naive.state.get(message, "settled" if message in self.settled else "abandoned")
            assert STATE_NAMES[message.state] == NAMES.get(state, state)
            assert state != "abandoned" or message.partition in self.naive.draining | self.naive.fenced
        assert self.engine.settled_count == len(self.settled)
        publishing = self.engine.publishing
        assert {m: each.size for m, (each, _) in publishing.produced.items()} == self.naive.outputs
        assert (publishing.size, publishing.handled) == (sum(self.naive.outputs.values()), {})

    def one_message_of_a_key_is_on_its_way(self) -> None:
        # Fenced handlers count too: no message starts while a zombie of its key runs.
        states = (RUNNING, HELD, DEAD_LETTERING, BLOCKED, PUBLISHING, PUBLISH_HELD)
        heads = [m for m in self.admitted if m.state in states and m.key is not None]
        assert len({(m.partition.id, m.key) for m in heads}) == len(heads)
        assert self.engine.running_handlers == len(self.running()) <= CONCURRENCY

    def teardown(self) -> None:
        """Give up every partition: the engine must forget everything."""
        engine = self.engine
        for partition in self.owned():
            engine.lose(partition)
        for message in self.running():
            engine.finish(message, ACK, self.now)
        chains = engine.chains
        assert not any((chains.tails, chains.fenced, chains.ready, engine.stopped.by_head, engine.dirty))
        assert (engine.flow.in_flight, engine.flow.bytes, engine.running_handlers) == (0, 0, 0)
        assert (engine.publishing.size, engine.publishing.produced) == (0, {})


@pytest.mark.long
@pytest.mark.sliced
@pytest.mark.timeout(400)  # shrinking a failing example may take minutes; a passing test takes seconds
def test_any_calls_of_the_engine_agree_with_a_naive_model() -> None:
    effort = settings(max_examples=runs(300), stateful_step_count=60, deadline=None)
    run_state_machine_as_test(EngineMachine, settings=effort)
