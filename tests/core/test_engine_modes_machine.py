"""The engine agrees with a naive model in every mode: orders, lanes, poison policies, batches, commits, both drains.

The harness plays source, runtime, broker and store of attempts. Each partition has a log. A new assignment continues
from the committed position and completed set, or with every message that was not settled, and with the stored attempts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from lanes.core import effects as fx
from lanes.core.engine import Engine
from lanes.core.lane import STATE_NAMES
from lanes.core.policy import Keyless, Order, Poison, Policy, RetryPolicy
from lanes.core.publishing import Produced
from lanes.core.types import ABANDON, ACK, Failure, Message, Outcome, Partition, PartitionId, Settlement
from tests.core.builders import READER, new_policy
from tests.core.naive_broker import Broker, Entry
from tests.core.naive_modes import SENDING, NaiveModes
from tests.effort import runs

CONCURRENCY, MAX_IN_FLIGHT, MAX_BYTES, MAX_AHEAD, ATTEMPTS, DELAY = 3, 20, 400, 8, 2, 1.0
INTERVAL, COUNT = 1.0, 4

KEYS: list[bytes | None] = [b"hot", b"hot", b"hot", b"warm", b"", b"other", None]
NAMES = {"done": "finished", "waiting": "new"}
GIVING_UP = ["drain", "close", "close", "stop closing", "fence", "lose", "release"]
ANSWERS = ["made", "made", "made", "not made", "made, unknown", "on the way"]
GONE = ("waiting", "queued", "held", "dead_lettering", "dead_lettering_blocked", "blocked", "done", *SENDING)
HOW: dict[str, Outcome] = {
    "ack": ACK,
    "fail": Failure(ValueError("no"), delay=DELAY),
    "terminal": Failure(ValueError("no"), terminal=True),
    "abandon": ABANDON,
    "publish": Produced("outputs", 10),
    "publish much": Produced("outputs", MAX_BYTES // 2),
}
SENT: dict[str, Failure | None] = {"confirmed": None, "repeat": HOW["fail"], "refused": HOW["terminal"]}  # type: ignore[dict-item]
SENDS = ["confirmed"] * 5 + ["repeat"] * 2 + ["refused"]
# Weighted by repetition. Interruptions end whole partitions, so they are rare.
WAYS = ["ack"] * 30 + ["publish"] * 12 + ["publish much"] + ["fail"] * 6 + ["terminal", "abandon"]
WHAT = ["receive"] * 5 + ["take"] * 6 + ["finish"] * 7 + ["settle"] * 5
WHAT += ["time_passes", "time_passes", "parked", "parked", "progressed", "unblock", "park"]
WHAT += ["hand_over", "hand_over", "give_up", "pause_or_resume"]
WHAT += ["read_ahead", "read_ahead", "move", "move", "keep", "keep"] + ["send"] * 6


def steps_of(drawn: bytes) -> list[tuple[str, int]]:
    """The steps of these bytes, of which each step has three: one for its name, two for its seed."""
    rows = zip(*(drawn[begin::3] for begin in range(3)), strict=False)
    return [(WHAT[name % len(WHAT)], high << 8 | low) for name, high, low in rows]


# An example has many steps. A step has one seed, which decides all its details. Hypothesis draws all steps at once,
# because a draw for each name and each seed would take half of the test's time.
STEPS = st.binary(min_size=30, max_size=180).map(steps_of)


class ModesMachine(RuleBasedStateMachine):
    """One engine, one or two partitions, any number of assignments of each."""

    sources: tuple[str, ...] = ("S", "S")  # the source of each partition

    def __init__(self) -> None:
        super().__init__()
        self.engine: Engine
        self.naive: NaiveModes
        self.brokers: dict[int, Broker] = {}
        self.now = 0.0
        self.partitions: list[Partition] = []  # all assignments so far
        self.unread: dict[Partition, list[Entry]] = {}
        self.confirmed: dict[Partition, int] = {}
        self.finished: dict[Partition, set[int]] = {}  # entered into the ledger of a partition that commits
        self.delivered: dict[Partition, list[int]] = {}  # positions
        self.admitted: dict[Partition, list[int]] = {}  # rising positions
        self.batches: list[list[Message]] = []
        self.to_park: list[Message] = []
        self.on_the_way: list[Settlement] = []
        self.unreported: Counter[Partition] = Counter()  # finished, and in no confirmed commit
        self.reported: dict[Settlement, int] = {}
        self.stored: dict[tuple[int, int], int] = {}  # the next attempt of a message, by partition and position
        self.ahead: set[Partition] = set()
        self.drained: Counter[Partition] = Counter()
        self.expect_drained: set[Partition] = set()
        self.before: dict[Message, str] = {}
        self.expected: Counter[tuple[type[fx.Effect], Message]] = Counter()
        self.dropped: list[Message] = []
        self.halted = False

    @initialize(
        order=st.sampled_from(["key", "key", "key", "partition", "serial", "none"]),
        keyless=st.sampled_from(["any", "one_lane"]),
        lanes=st.sampled_from([0, 0, 2]),
        poison=st.sampled_from(["skip", "block", "block_and_dlq", "exit"]),
        commits=st.sampled_from([(True, True), (True, False), (False, True)]),
        keeps=st.booleans(),
    )
    def start(
        self, order: Order, keyless: Keyless, lanes: int, poison: Poison, commits: tuple[bool, bool], keeps: bool
    ) -> None:
        self.begin(self.policy(order, keyless, lanes, poison, keeps=keeps), commits)

    def policy(self, order: Order, keyless: Keyless, lanes: int, poison: Poison, *, keeps: bool) -> Policy:
        return new_policy(
            concurrency=CONCURRENCY,
            max_in_flight=MAX_IN_FLIGHT,
            max_bytes=MAX_BYTES,
            retry=RetryPolicy(ATTEMPTS, 1.0, 1.0),
            poison=poison,
            order=order,
            keyless=keyless,
            lanes=lanes,
            max_ahead=MAX_AHEAD,
            commit_interval=INTERVAL,
            commit_count=COUNT,
            keeps_attempts=keeps,
        )

    def begin(self, policy: Policy, commits: tuple[bool, bool]) -> None:
        self.engine, self.naive = self.make(policy), NaiveModes(policy)
        for number in range(1 if policy.order == "serial" else len(self.sources)):
            self.brokers[number] = Broker(commits[number % len(commits)])
            self.assign(number)

    def make(self, policy: Policy) -> Engine:
        return Engine(policy)

    def full(self) -> frozenset[Partition]:
        """The partitions that a budget of their own pauses."""
        return frozenset()

    def may_start(self, m: Message) -> bool:
        """Whether the partition of a message has a free call."""
        return True

    def owned(self) -> list[Partition]:
        return list(self.engine.partitions.values())

    def broker(self, partition: Partition) -> Broker:
        return self.brokers[partition.id.number]

    def mine(self, partition: Partition, *states: str) -> list[Message]:
        return [m for m, state in self.naive.state.items() if m.partition is partition and state in states]

    # --- the source

    def assign(self, number: int) -> None:
        broker = self.brokers[number]
        floor = broker.floor if broker.commits else None
        partition = Partition(
            PartitionId(self.sources[number], number), READER, floor=floor, completed=broker.completed
        )
        self.engine.assign(partition)
        partition.recalled = {position: at for (home, position), at in self.stored.items() if home == number}
        self.partitions.append(partition)
        self.unread[partition] = [e for e in broker.log if not (e[0] < broker.floor or e[0] in broker.settled)]
        self.confirmed[partition], self.finished[partition] = broker.floor, set()
        self.delivered[partition], self.admitted[partition] = [], []

    def hand_over(self, chance: Random) -> None:
        """Release drained partitions, and assign released and lost partitions again."""
        for partition in self.owned():
            if partition.draining or not partition.live:
                self.end(partition, "release")
        self.assign_all(chance)

    def assign_all(self, chance: Random) -> None:
        """Assign the free partitions. Another process, maybe with a larger ``max_ahead``, may have owned them."""
        for number, broker in self.brokers.items():
            if PartitionId(self.sources[number], number) in self.engine.partitions:
                continue
            if not chance.randrange(3):
                for _ in range(chance.randrange(MAX_AHEAD)):
                    broker.append(chance.choice([0, 0, 3]), chance.choice(KEYS), chance.randrange(30))
                broker.finish_elsewhere({position for position, _, _ in broker.log if chance.randrange(3)})
            self.assign(number)

    def move(self, chance: Random) -> None:
        """Hand a partition over in order: its handlers end, finished messages are settled, the next owner starts."""
        if not self.owned():
            return
        partition = chance.choice(self.owned())
        self.drain(partition, close=chance.random() < 0.3)
        self.everything_holds()
        for _ in range(MAX_IN_FLIGHT):
            while self.batches:
                self.finish(chance)
                self.everything_holds()
            while self.mine(partition, "publishing") and chance.random() < 0.9:
                self.send(chance, "confirmed")
                self.everything_holds()
            if not self.mine(partition, "queued"):
                break
            self.take(chance)
        self.end(partition, "fence")
        self.everything_holds()
        for _ in range(2):
            self.collect(everything=True)
            for settlement in [s for s in self.on_the_way if s.partition is partition]:
                self.answer(settlement, "made")
                self.everything_holds()
        self.end(partition, "release")
        self.everything_holds()
        self.assign_all(chance)

    @rule(steps=STEPS)
    def work(self, steps: list[tuple[str, int]]) -> None:
        """Do a random step. One rule has all steps, because Hypothesis leaves whole rules out of an example."""
        for name, seed in steps:
            getattr(self, name)(Random(seed))
            self.everything_holds()

    def receive(self, chance: Random) -> None:
        if not self.owned():
            return
        partition = chance.choice(self.owned())
        # A source may have fetched before it paused, in one run of three.
        self.fetch(partition, chance.randrange(7), chance, paused=not chance.randrange(3))

    def read_ahead(self, chance: Random) -> None:
        """Fetch more messages than ``max_ahead`` allows, and maybe read past them."""
        ahead = [p for p in self.owned() if self.broker(p).commits]
        if ahead:
            partition = chance.choice(ahead)
            self.fetch(partition, chance.randrange(MAX_AHEAD, 2 * MAX_AHEAD), chance, paused=True)
            if chance.randrange(2):
                self.everything_holds()
                self.read(partition, chance)

    def fetch(self, partition: Partition, count: int, chance: Random, *, paused: bool) -> None:
        """Publish messages, and deliver up to ``count`` messages; if ``paused``, in spite of a pause."""
        broker, unread, room = self.broker(partition), self.unread[partition], self.engine.room()
        for _ in range(count):
            unread.append(broker.append(chance.choice([0, 0, 3]), chance.choice(KEYS), chance.randrange(30)))
        if partition in self.full() or (partition in room.paused and not paused) or not partition.live:
            return
        entries = unread[: min(room.messages, count)]
        del unread[: len(entries)]
        messages = [Message(partition, *entry, None, None) for entry in entries]
        for message in messages:
            message.attempt = partition.recalled.get(message.position, 1)
        self.engine.receive(partition, messages, sum(m.size for m in messages), self.now)
        if partition not in self.naive.draining:
            self.delivered[partition] += [m.position for m in messages]
            self.naive.state |= dict.fromkeys(messages, "waiting")
            self.naive.attempt |= {message: message.attempt for message in messages}
            self.admit(partition)

    def admit(self, partition: Partition) -> None:
        """Admit waiting messages, as far as the confirmed floor allows."""
        for message in self.mine(partition, "waiting"):
            if self.broker(partition).commits and self.above(partition) >= MAX_AHEAD:
                return
            self.naive.state[message] = "queued"
            self.admitted[partition].append(message.position)
            if any(start <= message.position < end for start, end in partition.completed):
                self.expected[fx.Redelivered, message] += 1
                self.finished[partition].add(message.position)
                del self.naive.state[message]

    def above(self, partition: Partition) -> int:
        """The number of messages admitted above the confirmed floor."""
        positions = self.admitted[partition]
        return len(positions) - bisect_left(positions, self.confirmed[partition])

    def progressed(self, chance: Random) -> None:
        """Let the source read up to its next message, or past the end of the log."""
        self.read(chance.choice(self.partitions[-3:]), chance)

    def read(self, partition: Partition, chance: Random) -> None:
        broker, unread = self.broker(partition), self.unread[partition]
        if not unread:
            broker.end += chance.randrange(3)
        self.engine.progressed(partition, unread[0][0] if unread else broker.end, self.now)

    def pause_or_resume(self, chance: Random) -> None:
        self.engine.flow.paused = chance.random() < 0.2

    # --- the workers

    def take(self, chance: Random) -> None:
        engine, naive, limit = self.engine, self.naive, chance.choice([1, 1, 3, 6])
        reachable: list[Message] = []
        while not naive.full and (found := [m for m in naive.startable(reachable) if self.may_start(m)]):
            reachable += found
        assert engine.available(limit) == min(limit, len(reachable))
        single = limit == 1 and engine.take()
        batch = [single] if single else engine.take_batch(limit)
        assert len(batch) == (min(limit, len(reachable)) if len(self.batches) < CONCURRENCY else 0)
        for index, message in enumerate(batch):
            assert message in naive.startable(batch[:index])
            assert message.attempt == naive.attempt[message]
            # A message completed by the former owner does not run again.
            assert not any(start <= message.position < end for start, end in message.partition.completed)
        naive.state |= dict.fromkeys(batch, "running")
        if batch:
            self.batches.append(batch)

    def finish(self, chance: Random) -> None:
        if not self.batches:
            return
        batch = self.batches.pop(chance.randrange(len(self.batches)))
        outcomes = [HOW[how] for how in chance.choices(WAYS, k=len(batch))]
        self.dropped = self.naive.finish(batch, outcomes, self.now + DELAY)
        self.note_successes()
        if len(batch) == 1:
            self.engine.finish(batch[0], outcomes[0], self.now)
        else:
            self.engine.finish_batch(batch, outcomes, self.now)

    def note_successes(self) -> None:
        for message, state in self.naive.state.items():
            if state == "done":
                self.broker(message.partition).succeeded.add(message.position)

    def send(self, chance: Random, how: str = "") -> None:
        """End a send of a message's outputs: confirmed, to be repeated, or refused."""
        publishing = [m for m, state in self.naive.state.items() if state == "publishing"]
        if not publishing:
            return
        message, failure = chance.choice(publishing), SENT[how or chance.choice(SENDS)]
        self.dropped = self.naive.sent(message, failure, self.now + DELAY)
        self.note_successes()
        if failure is None:
            self.engine.published(message, self.now)
        else:
            self.engine.publish_failed(message, failure, self.now)

    def time_passes(self, chance: Random) -> None:
        self.now += chance.choice([0.0, 0.5, 1.0])
        due_at = self.engine.next_due()
        held = self.naive.waiting()
        assert due_at <= min((self.naive.until[m] for m in held), default=due_at)
        self.engine.due(self.now)
        self.again([m for m in held if self.naive.until[m] <= self.now])
        sending = [m for m, state in self.naive.state.items() if state == "publish_held"]
        self.naive.state |= {m: "publishing" for m in sending if self.naive.until[m] <= self.now}

    def keep(self, chance: Random) -> None:
        """Store a failed attempt, for any message that waits for the store."""
        if self.naive.unkept:
            message = self.naive.unkept.pop(chance.randrange(len(self.naive.unkept)))
            self.store(message, message.attempt + 1)
            self.engine.kept(message)

    def store(self, message: Message, attempt: int) -> None:
        if self.naive.policy.keeps_attempts and message.partition not in self.naive.fenced:
            self.stored[message.partition.id.number, message.position] = attempt

    def again(self, messages: list[Message]) -> None:
        for message in messages:
            self.naive.state[message] = "queued"
            self.naive.attempt[message] += 1

    def unblock(self, chance: Random) -> None:
        key = chance.choice(KEYS)
        blocked = [m for m, state in self.naive.state.items() if state == "blocked" and m.key == key]
        assert self.engine.unblock(key) == len(blocked)
        self.again(blocked)

    def park(self, chance: Random) -> None:
        key = chance.choice(KEYS)
        steady = [m for m, state in self.naive.state.items() if state == "publish_held"]
        steady = [m for m in steady if m.key == key and m.partition not in self.naive.draining]
        parked = [m for m, state in self.naive.state.items() if state in ("blocked", "held") and m.key == key]
        assert self.engine.park(key) == len(parked + steady)
        self.naive.state |= dict.fromkeys(parked + steady, "dead_lettering")
        for message in steady:
            del self.naive.outputs[message]
            self.naive.return_handled(message)

    def parked(self, chance: Random) -> None:
        if not self.to_park:
            return
        message = self.to_park.pop(chance.randrange(len(self.to_park)))
        self.engine.dead_lettered(message)
        state = self.naive.state.get(message)
        if state == "dead_lettering_blocked":
            self.naive.state[message] = "blocked"
        elif state == "dead_lettering":
            self.naive.state[message] = "done"
            self.broker(message.partition).succeeded.add(message.position)

    # --- the settle step

    def settle(self, chance: Random) -> None:
        self.collect(everything=chance.random() < 0.5)
        answer = chance.choice(ANSWERS)
        if answer != "on the way" and self.on_the_way:
            self.answer(chance.choice(self.on_the_way), answer, expired=chance.random() < 0.5)

    def answer(self, settlement: Settlement, answer: str, *, expired: bool = False) -> None:
        """Answer a settlement; if ``expired``, together with the settlements of partitions that were given up."""
        late = [s for s in self.on_the_way if not self.engine.owns(s.partition)] if expired else []
        answered = [*(s for s in late if s is not settlement), settlement]
        self.on_the_way = [s for s in self.on_the_way if s not in answered]
        partition = settlement.partition
        if self.engine.owns(partition) and answer != "not made":
            self.broker(partition).accept(settlement)
            if answer == "made":
                self.naive.drop(settlement.messages)
                self.confirmed[partition] = settlement.floor or 0
                self.unreported[partition] -= self.reported.get(settlement, 0)
        if answer == "made":
            self.engine.settled(answered)
            self.admit(partition)
        else:
            self.engine.unsettled(answered)

    def collect(self, *, everything: bool) -> None:
        done = {m for m, state in self.naive.state.items() if state == "done"}
        for message in [m for m in done if self.broker(m.partition).commits]:
            self.finished[message.partition].add(message.position)
            self.unreported[message.partition] += 1
            del self.naive.state[message]
        due = self.engine.collect(self.now, everything=everything)
        under_way = {m for s in self.on_the_way for m in s.messages}
        collected = [m for s in due for m in s.messages]
        assert Counter(collected) == Counter(m for m in done if m in self.naive.state and m not in under_way)
        sending = {s.partition for s in self.on_the_way if s.floor is not None}
        commits = {s.partition: s for s in due if s.floor is not None}
        assert not sending & commits.keys()
        for partition in [p for p in self.owned() if self.broker(p).commits and p not in sending]:
            if partition in commits:
                self.one_snapshot(partition, commits[partition])
            else:
                # Only changes that are not due yet stay uncommitted.
                assert not everything or all(self.broker(partition).done(p) for p in self.finished[partition])
        self.reported.update({s: self.unreported[s.partition] for s in commits.values()})
        self.on_the_way += due

    def one_snapshot(self, partition: Partition, commit: Settlement) -> None:
        """Expect floor and completed set to match the finished messages exactly."""
        floor, completed = commit.floor, {p for start, end in commit.completed for p in range(start, end)}
        assert floor is not None
        finished = self.finished[partition]
        unfinished = [position for position in self.delivered[partition] if position not in finished]
        unread = [position for position, _, _ in self.unread[partition]]
        assert self.confirmed[partition] <= floor <= min(unfinished + unread, default=floor)
        assert {p for p in finished if p >= floor} <= completed
        seeds = {p for start, end in partition.completed for p in range(start, end)}
        assert not completed & set(unfinished) - seeds
        assert completed & set(unread) <= seeds
        assert all(start >= floor for start, _ in commit.completed)
        # A higher floor would be wrong.
        assert not any(floor <= p < min(unfinished, default=p + 1) for p in finished)

    # --- ownership

    def give_up(self, chance: Random) -> None:
        partition, how = chance.choice(self.partitions[-2:]), chance.choice(GIVING_UP)
        if how in ("drain", "close"):
            self.drain(partition, close=how == "close")
        elif how == "stop closing":
            drains = partition in self.naive.draining and partition not in self.naive.fenced
            expected = self.naive.drain(partition, set()) if drains else []
            assert Counter(self.engine.stop_closing(partition)) == Counter(expected)
        else:
            self.end(partition, how)

    def drain(self, partition: Partition, *, close: bool) -> None:
        ours = partition not in self.naive.fenced | self.naive.draining
        close = close and partition.floor is not None
        keep = self.naive.kept(partition, self.finished[partition]) if ours and close else set()
        expected = self.naive.drain(partition, keep) if ours else []
        found = self.engine.drain(partition, close_prefix=close)
        assert Counter(found) == Counter(expected)

    def end(self, partition: Partition, how: str) -> None:
        ours = partition not in self.naive.fenced
        self.naive.fenced.add(partition)
        running = self.mine(partition, "running") if ours else []
        self.naive.drop(m for m in self.mine(partition, *GONE) if how != "fence" or self.naive.state[m] != "done")
        found = getattr(self.engine, how)(partition)
        assert how == "release" or set(found) == set(running)
        if how != "fence":
            self.ahead.discard(partition)

    # --- invariants after every step

    @invariant()
    def everything_holds(self) -> None:
        self.naive.look_at_outputs(MAX_BYTES)
        self.effects_say_what_happened()
        publishing = self.engine.publishing
        assert publishing.size == sum(self.naive.outputs.values())
        assert set(publishing.handled) == set(self.naive.deferred)
        engine, naive = self.engine, self.naive
        for message, state in naive.state.items():
            assert STATE_NAMES[message.state] == NAMES.get(state, state)
        assert (engine.flow.in_flight, engine.flow.bytes) == (len(naive.state), sum(m.size for m in naive.state))
        assert engine.flow.in_flight <= MAX_IN_FLIGHT
        assert engine.running_handlers == len(self.batches) <= CONCURRENCY
        assert engine.halted == self.halted
        room, stopped = engine.room(), engine.flow.paused or engine.flow.pausing
        assert not (stopped or not engine.flow.taking) or room.messages == 0
        assert room.paused == frozenset(self.owned() if stopped else self.ahead) | self.full()
        for partition in self.owned():
            if self.broker(partition).commits:
                assert (partition in self.ahead) == (self.above(partition) >= MAX_AHEAD)
                assert self.above(partition) <= MAX_AHEAD
                assert partition.commits is not None
                assert partition.commits.finished == self.unreported[partition]

    def effects_say_what_happened(self) -> None:
        """Expect one effect for each change that the runtime must know of, and no other."""
        expected, naive = self.expected, self.naive
        for message, old in self.before.items():
            new = naive.failed.get(message) or naive.state.get(message, "gone")
            if new == old:
                continue
            if new in ("held", "left"):
                expected[fx.Held if new == "held" else fx.Interrupted, message] += 1
                if new == "held" and naive.policy.keeps_attempts:
                    naive.unkept.append(message)
                elif message.attempt < ATTEMPTS:
                    # An interrupted message is stored before the hand-over.
                    self.store(message, message.attempt + 1)
            elif new in ("dead_lettering", "dead_lettering_blocked"):
                expected[fx.DeadLetterDue, message] += 1
                self.to_park.append(message)
                self.store(message, message.attempt)
            elif new == "blocked":
                halts = naive.policy.poison == "exit"
                self.halted |= halts
                expected[fx.Halted if halts else fx.Blocked, message] += 1
                self.store(message, message.attempt)
            elif new in ("publishing", "publish_held"):
                expected[fx.PublishDue if new == "publishing" else fx.PublishHeld, message] += 1
            elif old == "running" and new == "gone" and message.partition in naive.fenced:
                expected[fx.Zombie, message] += 1
        found: Counter[tuple[type[fx.Effect], Message]] = Counter()
        dropped: list[Message] = []
        for effect in self.engine.effects:
            if isinstance(effect, fx.Failed | fx.Zombie | fx.Redelivered | fx.PublishDue | fx.PublishHeld):
                found[type(effect), effect.message] += 1
            elif isinstance(effect, fx.Abandoned):
                dropped += effect.messages
            elif isinstance(effect, fx.Drained):
                self.drained[effect.partition] += 1
            elif isinstance(effect, fx.AheadReached):
                assert effect.partition not in self.ahead
                self.ahead.add(effect.partition)
            elif isinstance(effect, fx.AheadLeft):
                self.ahead.remove(effect.partition)
        assert found == expected
        assert Counter(dropped) == Counter(self.dropped)
        for partition in naive.draining - naive.fenced:
            if not self.mine(partition, "running", "queued", *SENDING):
                self.expect_drained.add(partition)
        assert self.drained == Counter(self.expect_drained)
        self.engine.effects.clear()  # as the runtime does
        self.before, self.expected, self.dropped, naive.failed = dict(naive.state), Counter(), [], {}

    def teardown(self) -> None:
        """Give up every partition: the engine must forget everything."""
        engine = self.engine
        for partition in self.owned():
            engine.lose(partition)
        for batch in self.batches:
            engine.finish_batch(batch, [ACK] * len(batch), self.now)
        chains = engine.chains
        assert not any((chains.tails, chains.fenced, chains.ready, engine.stopped.by_head, engine.dirty))
        assert not any((engine.committer.partitions, engine.committer.ahead))
        assert (engine.flow.in_flight, engine.flow.bytes, engine.running_handlers) == (0, 0, 0)
        assert (engine.publishing.size, engine.publishing.produced, engine.publishing.handled) == (0, {}, {})


@pytest.mark.long
@pytest.mark.sliced
@pytest.mark.timeout(400)  # shrinking a failing example may take minutes; a passing test takes seconds
def test_any_calls_of_the_engine_agree_with_a_naive_model_in_every_mode() -> None:
    effort = settings(max_examples=runs(100), stateful_step_count=30, deadline=None)
    run_state_machine_as_test(ModesMachine, settings=effort)
