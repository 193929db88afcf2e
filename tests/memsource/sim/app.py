"""An application that uses every feature, drawn from the seed of its plan. The project's own campaign runs it."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import anyio
import anyio.lowlevel

from lanes import Message, Nak, Retry, Settings, Term
from lanes.core.types import Partition
from memsource.jetstream.pull_consumer import ConsumerSettings
from memsource.jetstream.source import JetStreamPersonality
from memsource.kafka.broker import KafkaSettings
from memsource.kafka.source import KafkaPersonality
from memsource.personality import Personality, PersonalityName
from memsource.sim.loop.event_loop import GROUP
from memsource.sim.plans.plan import Plan
from memsource.sim.plans.traffic import Traffic
from memsource.sim.world.worker import App, Worker
from memsource.sim.world.world import TAIL, World
from tests.memsource.sim.intake import AFTER, IntakeOpinion
from tests.memsource.sim.retention import RetentionOpinion, SizeOpinion
from tests.memsource.sim.watched import Watching, watching

__all__ = ["Case", "app", "broker", "case_for", "case_of", "staying", "unfilled"]

QUICK, STEPS, SLOW, IO, FAILS_ONCE, TERMINAL, FAILS, VERY_SLOW, STUBBORN, HELD = range(10)
"""The outcomes of messages; the value of a message names its outcome."""

_USUAL: Final = (QUICK, QUICK, STEPS, STEPS, IO)
_CALM: Final = (*_USUAL, SLOW)
_TROUBLE: Final = (*_USUAL, *_USUAL, SLOW, FAILS_ONCE, FAILS_ONCE, TERMINAL, FAILS, VERY_SLOW, STUBBORN)
_UNSAID: Final = {"NewestToken": "slow"}
"""Checks that say nothing beside such a fault: on a slow way a message may come again while what settles it is under
way."""
_NARROW: Final = (8, 12)
"""UTF-16 units of commit metadata with the NUL: no map fits, or a map of about eight offsets."""
_ACTIONS: Final = ("pause", "resume", "unblock", "park", "stop", "join", "publish", "publish")


@dataclass(frozen=True, kw_only=True)
class Case:
    """The case of a seed. ``calm``: no event of the case makes a consumer repeat a message.

    ``tail``: number of positions skipped after the last message of each partition, as by transaction markers.
    ``hang``: begin and length of the time in which a Kafka broker answers no fetch; None = it always answers.
    ``span``: seconds after which the broker would delete a message; None = it keeps all messages.
    ``transaction``: begin and length of a time in which each partition of a Kafka broker has an open transaction.
    ``keeps``: bytes that a Kafka broker keeps of each partition; a case with this limit has one member that stays."""

    calm: bool
    partitions: int
    members: int
    settings: Settings
    dead_letters: bool
    n: int
    keys: int
    skew: float
    hot: float
    keyless: float
    gaps: float
    kinds: tuple[int, ...]
    actions: tuple[tuple[float, str, int], ...]
    kafka: KafkaSettings
    hands_over: bool
    jetstream: ConsumerSettings
    lease: float
    revoke_timeout: float
    tail: int
    hang: tuple[float, float] | None = None
    span: float | None = None
    transaction: tuple[float, float] | None = None
    keeps: int | None = None

    @property
    def degrades(self) -> bool:
        """Whether the metadata limit of a Kafka broker may cut a completed set, so finished work is repeated."""
        return self.hands_over and self.kafka.metadata_limit < KafkaSettings.metadata_limit


def case_of(seed: int) -> Case:
    """The case of a seed, of either personality."""
    rng = random.Random(f"case {seed}")
    calm = rng.random() < 0.3
    poison = rng.choice(["skip", "skip", "block", "block_and_dlq"])
    concurrency = rng.randint(1, 5)
    batch = rng.choice([None, None, None, 3])
    bound = concurrency + rng.randint(0, 8) + (batch or 0)
    order = rng.choice(["key", "key", "key", "partition"])
    slow = not calm and rng.random() < 0.3
    settings = Settings(
        concurrency=concurrency,
        max_in_flight=bound,
        max_ahead=rng.choice([4, 8, 8, 50]),
        order=order,  # type: ignore[arg-type]
        keyless=rng.choice(["any", "any", "one_lane"]),
        lanes=rng.choice([None, None, None, 2]) if order == "key" else None,
        batch=batch,
        linger=rng.choice([0.0, 0.2]) if batch else 0.0,
        timeout=6.0 if slow else None,
        retry=Retry(attempts=rng.choice([1, 2, 3]), backoff=rng.choice([0.1, 0.5, 2.0])),
        poison=poison,  # type: ignore[arg-type]
        commit_interval=rng.choice([0.0, 4.0, 20.0]),
        drain_timeout=30.0 if calm else rng.choice([1.0, 4.0, 10.0]),
        grace=rng.choice([0.5, 2.0]),
    )
    kinds = _CALM if calm else _TROUBLE
    n = rng.randint(8, 30)
    actions = tuple(
        (rng.choice([0.0, 0.01, 0.1, 0.5, 2.0, 7.0]), rng.choice(_ACTIONS), rng.randrange(8))
        for _ in range(rng.randint(0, 6))
    )
    case = Case(
        calm=calm,
        partitions=rng.randint(1, 4),
        members=rng.randint(1, 3),
        settings=settings,
        dead_letters=True,
        n=n,
        keys=rng.choice([1, 2, 3, 5, 12]),
        skew=rng.choice([0.0, 1.0]),
        hot=rng.choice([0.0, 0.0, 0.6]),
        keyless=rng.choice([0.0, 0.0, 0.2, 1.0]),
        gaps=rng.choice([0.0, 0.1, 0.3]),
        kinds=tuple(rng.choice(kinds) for _ in range(n)),
        actions=actions,
        kafka=KafkaSettings(
            protocol=rng.choice(["eager", "cooperative", "848"]),
            heartbeat_interval=rng.choice([0.0, 0.5, 3.0]),
            prefetch=rng.choice([0, 3, 100]),
        ),
        hands_over=rng.random() < 0.75,
        jetstream=ConsumerSettings(
            ack_wait=rng.choice([12.0, 30.0]), max_ack_pending=rng.choice([bound, bound + 5, 1000])
        ),
        lease=rng.choice([5.0, 10.0]),
        revoke_timeout=30.0 if calm else rng.choice([4.0, 30.0]),
        tail=rng.choice([0, 0, 1, 3]),
    )
    kafka = replace(case.kafka, metadata_limit=rng.choice([*[KafkaSettings.metadata_limit] * 6, *_NARROW]))
    if rng.random() < 0.1:
        settings = replace(settings, order="none", lanes=None)
    elif rng.random() > 0.9:
        policy = "block_and_dlq" if settings.poison == "skip" else settings.poison
        settings = replace(settings, order="serial", lanes=None, poison=policy)
        case = replace(case, partitions=1)
    if rng.random() < 0.1 and not calm:
        # One message waits for longer than each ack_wait.
        kinds_drawn = list(case.kinds)
        kinds_drawn[rng.randrange(n)] = HELD
        case = replace(case, kinds=tuple(kinds_drawn))
    if rng.random() < 0.2:
        calls, messages = rng.choice([(1, 0), (1, 2), (2, 4), (0, 3), (2, 0)])
        settings = replace(
            settings,
            concurrency_per_partition=min(calls, concurrency) or None,
            max_in_flight_per_partition=min(messages, bound) or None,
        )
    case = replace(case, kafka=kafka, settings=settings)
    if rng.random() < 0.2:
        hang = rng.choice([0.0, 0.5, 3.0]), rng.choice([2.0, 9.0, 20.0])
        settings, kafka = replace(settings, unhealthy_after=AFTER), replace(kafka, backlogs=True)
        # The messages that arrive in the hang precede other messages or follow them, so a gap at the end of each
        # publication would leave the positions to the schedule.
        case = replace(case, hang=hang, settings=settings, kafka=kafka, tail=0)
    if rng.random() < 0.2:
        case = replace(case, span=rng.choice([8.0, 25.0, 40.0]))
    if rng.random() < 0.3:
        case = replace(case, kafka=replace(case.kafka, confirms=True, deaf=20.0))
    if rng.random() < 0.15:
        case = replace(case, transaction=(rng.choice([0.0, 0.5, 3.0]), rng.choice([20.0, 60.0])))
    if rng.random() < 0.15:
        case = replace(case, keeps=rng.choice([3_200, 6_000]))
    return case


def case_for(personality: PersonalityName, seed: int) -> Case:
    """The case of a seed, for one personality."""
    case = case_of(seed)
    if personality != "kafka":
        return replace(case, transaction=None, keeps=None)
    if case.transaction is not None:
        # The messages that arrive in the transaction leave no gap to the schedule, as those in a hang.
        settings, kafka = replace(case.settings, unhealthy_after=AFTER), replace(case.kafka, backlogs=True)
        case = replace(case, settings=settings, kafka=kafka, tail=0)
    if case.keeps is not None:
        # The last message waits until the broker has deleted it. No other member needs it then.
        retry = replace(case.settings.retry, attempts=max(2, case.settings.retry.attempts))
        case = replace(
            case,
            members=1,
            actions=tuple(one for one in case.actions if one[1] not in ("stop", "join")),
            settings=replace(case.settings, retry=retry),
            kafka=replace(case.kafka, retention_bytes=case.keeps),
            kinds=(*case.kinds[:-1], HELD),
            span=None,
        )
    return case


def broker(plan: Plan) -> Personality:
    """The broker of a plan's case, with checks of its calls."""
    case = case_for(plan.personality, plan.seed)
    made: Personality
    if plan.personality == "kafka":
        made = KafkaPersonality(case.partitions, settings=case.kafka, hands_over=case.hands_over)
    else:
        made = JetStreamPersonality(
            case.partitions, settings=case.jetstream, lease=case.lease, revoke_timeout=case.revoke_timeout
        )
    return watching(made, {}, case.span)


async def app(world: World) -> None:
    """Run all actions concurrently; at the end every message is handled."""
    await _Application(world, case_for(world.plan.personality, world.plan.seed)).run()


async def unfilled(world: World) -> None:
    """Like ``app``, but no partition is filled: the boundaries of a run are then those of the same run with a crash."""
    await _Application(world, case_for(world.plan.personality, world.plan.seed), fills=False).run()


class _Application:
    def __init__(self, world: World, case: Case, *, fills: bool = True) -> None:
        self.world = world
        self.case = case
        self.fills = fills
        self.clean = not world.plan.faults and not len(world.plan.schedule)
        self.ended: set[tuple[str, Partition, int]] = set()
        self.handled: Counter[tuple[int, int]] = Counter()
        self.positions: dict[tuple[int, bytes], list[int]] = defaultdict(list)
        self.kinds: dict[tuple[int, int], int] = {}
        self.indices: dict[tuple[int, int], int] = {}
        self.leaving: set[str] = set()
        self.alone = case.members == 1 and all(action not in ("stop", "join") for _, action, _ in case.actions)
        self.published = 0
        self.transaction = anyio.Event()
        self.app = App(
            handler=self.handle if case.settings.batch is None else self.handle_batch,
            settings=case.settings,
            dead_letters=case.dead_letters,
        )
        limit = world.plan.limit
        n = case.n if limit is None else min(case.n, limit)
        traffic = Traffic(n=n, keys=case.keys, skew=case.skew, hot=case.hot, keyless=case.keyless, gaps=case.gaps)
        self.items = traffic.items(world.plan.seed, case.partitions)

    # --- the run

    async def run(self) -> None:
        world, case = self.world, self.case
        self.publish(max(1, len(self.items) * 2 // 3))
        world.workers(case.members, self.app)
        watching = world.broker
        assert isinstance(watching, Watching)
        hangs = case.hang is not None and watching.name == "kafka"
        if not hangs and case.span is None and case.transaction is None and case.keeps is None:
            # Other cases have no further tasks, so their schedules stay the same.
            await self.act_and_settle()
        else:
            async with anyio.create_task_group() as tasks:
                if hangs and case.hang is not None:
                    tasks.start_soon(self.hang, watching, *case.hang)
                if case.transaction is not None:
                    tasks.start_soon(self.transact, watching, *case.transaction)
                if hangs or case.transaction is not None:
                    tasks.start_soon(self.watch_intake, watching)
                if case.span is not None:
                    tasks.start_soon(self.watch_retention, watching)
                if case.keeps is not None and self.fills and self.items:
                    tasks.start_soon(self.fill, watching, case.keeps, self.items[-1].partition)
                await self.act_and_settle()
                tasks.cancel_scope.cancel()
        await self.nothing_in_flight()
        for check, what in watching.found.items():
            if _UNSAID.get(check) not in {fault.kind for fault in world.plan.faults}:
                world.find(check, what)
        world.check(state=self.state)

    async def act_and_settle(self) -> None:
        """Run all actions, and then handle every message."""
        world, case = self.world, self.case
        for delay, action, number in case.actions:
            await anyio.sleep(delay)
            self.act(action, number)
        if case.transaction is not None:
            # The other messages arrive in the transaction.
            await self.transaction.wait()
        self.publish(len(self.items))
        self.resume()
        await world.settled()
        for _ in range(len(self.items) + 1):
            if not self.unblock_all():
                break
            await world.settled()

    async def hang(self, broker: Watching, begin: float, length: float) -> None:
        """Let the broker answer no fetch for some time, in which messages arrive."""
        await anyio.sleep(begin)
        broker.hang(self.world.now, on=True)
        self.publish(3)
        await anyio.sleep(length)
        broker.hang(self.world.now, on=False)

    async def transact(self, broker: Watching, begin: float, length: float) -> None:
        """Open a transaction in each partition for some time, in which messages arrive."""
        await anyio.sleep(begin)
        for partition in broker.partitions:
            broker.open_transaction(partition, self.world.now)
        self.publish(3)
        self.transaction.set()
        await anyio.sleep(length)
        for partition in broker.partitions:
            broker.end_transaction(partition, self.world.now)

    async def fill(self, broker: Watching, keeps: int, partition: int) -> None:
        """Fill a partition until the broker has deleted its first messages, and compare the status.

        A member that loses the partition could not read them again, so a run with other faults than failing calls
        leaves the partition as it is.
        """
        if {fault.kind for fault in self.world.plan.faults} - {"commit_fails", "letter_fails", "io_fails"}:
            return
        opinion = SizeOpinion(self.world, broker.kafka, keeps, partition)
        while True:
            await opinion.compare(staying(self.world, self.leaving), broker.sources)

    @property
    def late(self) -> bool:
        """Whether a process does not run for a while, or waits for an answer, and so looks later than this test."""
        return bool({fault.kind for fault in self.world.plan.faults} & {"freeze", "slow"})

    async def watch_retention(self, broker: Watching) -> None:
        """Compare the status of the consumers with the times of the messages."""
        opinion = RetentionOpinion(self.world, broker)
        while not self.late:
            await opinion.compare(staying(self.world, self.leaving))

    async def watch_intake(self, broker: Watching) -> None:
        """Compare the health of the consumers with the positions of the broker."""
        opinion = IntakeOpinion(self.world, broker.kafka)
        while not self.late:
            await opinion.compare(staying(self.world, self.leaving), broker.sources)

    def publish(self, count: int) -> None:
        for item in self.items[self.published : self.published + count]:
            if item.gap:
                self.world.broker.skip(item.gap, partition=item.partition)
            kind = self.case.kinds[item.index]
            record = self.world.publish(bytes([kind]), key=item.key, partition=item.partition)
            self.kinds[record.partition, record.position] = kind
            self.indices[record.partition, record.position] = item.index
            if self.case.span is not None and isinstance(self.world.broker, Watching):
                self.world.broker.written[record.partition, record.position] = self.world.now
            if record.key is not None:
                self.positions[record.partition, record.key].append(record.position)
        self.published = min(len(self.items), self.published + count)
        if self.case.tail:
            for partition in self.world.broker.partitions:
                self.world.broker.skip(self.case.tail, partition=partition)

    def state(self) -> dict[str, Any]:
        """The finished work, without its owner and order."""
        parked = {(letter.partition, letter.position) for letter in self.world.dead_letters}
        done = parked | set(self.handled)
        found = {
            "done": done,
            "parked for good": {place for place in parked if self.kinds[place] in (TERMINAL, FAILS)},
            "never handled": {place for place in self.handled if self.kinds[place] in (TERMINAL, FAILS)},
        }
        if self.case.keeps is not None:
            # The positions depend on the time at which the partition is filled.
            return {what: sorted(self.indices[place] for place in places) for what, places in found.items()}
        return {what: sorted(places) for what, places in found.items()}

    # --- actions

    def act(self, action: str, number: int) -> None:
        workers = staying(self.world, self.leaving)
        worker = workers[number % len(workers)] if workers else None
        if action == "publish":
            self.publish(number)
        elif action == "join":
            if len(workers) < 4:
                self.world.workers(1, self.app)
        elif worker is None:
            return
        elif action == "stop":
            self.leaving.add(worker.name)
            with worker.acting():
                worker.consumer.stop()
            self.world.workers(1, self.app)
        elif action in ("pause", "resume"):
            self.pause(worker, paused=action == "pause")
        elif worker.consumer.ready:
            keys = [*dict.fromkeys(item.key for item in self.items)]
            with worker.acting():
                # The first partition from this number on with a blocked message or a message held for a retry.
                for key in keys[number % len(keys) :] + keys[: number % len(keys)]:
                    if getattr(worker.consumer, action)(key):
                        break

    def pause(self, worker: Worker, *, paused: bool) -> None:
        with worker.acting():
            (worker.consumer.pause if paused else worker.consumer.resume)()
        watching = self.world.broker
        assert isinstance(watching, Watching)
        watching.sources[worker.name].pause(paused=paused)

    def resume(self) -> None:
        for worker in staying(self.world, self.leaving):
            self.pause(worker, paused=False)

    def unblock_all(self) -> bool:
        """Unblock all blocked messages; returns whether there were any."""
        found = 0
        for worker in staying(self.world, self.leaving):
            if worker.consumer.ready and worker.consumer.status().blocked:
                with worker.acting():
                    for key in dict.fromkeys(item.key for item in self.items):
                        found += worker.consumer.park(key)
        return found > 0

    async def nothing_in_flight(self) -> None:
        """Assert that no message is in flight after the last one is handled, not even a zombie."""
        taken = self.taken()
        with anyio.move_on_after(TAIL):
            while any(taken.values()):
                await anyio.sleep(1.0)
                if self.case.keeps is not None:
                    # For the broker a deleted message is finished, although its lane may be blocked later.
                    self.unblock_all()
                taken = self.taken()
        for name, count in taken.items():
            if count:
                self.world.find("PlacesGivenBack", f"{count} messages in flight in {name}, and everything is done")

    def taken(self) -> dict[str, int]:
        """Number of messages in flight in each worker."""
        ready = (worker for worker in staying(self.world, self.leaving) if worker.consumer.ready)
        return {worker.name: worker.consumer.status().in_flight for worker in ready}

    # --- the handler

    def in_doubt(self, message: Message) -> None:
        """Assert that a handler starts only if no freeze has put the ownership of its partition in doubt."""
        watching = self.world.broker
        assert isinstance(watching, Watching)
        source = watching.sources.get(self.member)
        if source is not None and message.partition in source.doubtful:
            self.world.find(
                "NothingStartsInDoubt",
                f"position {message.position} of {message.partition.id} started after a freeze, unconfirmed",
            )

    async def handle(self, message: Message) -> None:
        self.in_doubt(message)
        await self.behave(message, [message])
        self.done(message)

    async def handle_batch(self, batch: Sequence[Message]) -> list[Exception | None]:
        outcomes: list[Exception | None] = []
        for message in batch:
            self.in_doubt(message)
        for message in batch:
            try:
                await self.behave(message, batch)
            except Exception as error:
                outcomes.append(error)
            else:
                outcomes.append(None)
        failed: set[object] = set()
        for message, outcome in zip(batch, outcomes, strict=True):
            lane = message if message.lane is None else (message.partition, message.lane)
            # After the first failure of a lane no outcome of the lane counts.
            if outcome is None and lane not in failed:
                self.done(message)
            elif outcome is not None:
                failed.add(lane)
        return outcomes

    async def behave(self, message: Message, call: Sequence[Message]) -> None:
        """Act as the value of the message requests. ``call``: the messages of the same call."""
        if (self.member, message.partition, message.position) in self.ended:
            self.world.find(
                "RunsOnce", f"position {message.position} runs again in the assignment in which it had ended"
            )
        kind = message.value[0]
        if kind == STEPS:
            for _ in range(message.position % 4):
                await anyio.lowlevel.checkpoint()
        elif kind == IO:
            await self.world.io("the database", 0.02)
        elif kind == SLOW:
            await anyio.sleep(1.0 if self.case.calm else 4.0)
        elif kind == VERY_SLOW:
            await anyio.sleep(15.0)
        elif kind == STUBBORN:
            await self.stubborn(call)
        elif kind == FAILS_ONCE and message.attempt == 1:
            raise Nak(delay=0.5)
        elif kind == HELD and message.attempt == 1:
            raise Nak(delay=40.0)
        elif kind == TERMINAL:
            raise Term("never")
        elif kind == FAILS:
            raise ValueError("no")

    async def stubborn(self, call: Sequence[Message]) -> None:
        """Ignore the cancellation, and succeed later."""
        try:
            await anyio.sleep(9.0)
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True):
                # After the grace the handler may run beside the next owner's handler. In one process its lanes wait.
                laned = all(message.lane is not None for message in call)
                await anyio.sleep(12.0 if self.alone and laned else self.case.settings.grace / 2)

    @property
    def member(self) -> str:
        return GROUP.get() or ""

    def done(self, message: Message) -> None:
        """Record that the handler has succeeded."""
        place = message.partition.id.number, message.position
        self.ended.add((self.member, message.partition, message.position))
        self.handled[place] += 1
        self.in_order(message)
        repeats = self.case.degrades and self.world.broker.name == "kafka"
        if self.clean and self.case.calm and not repeats and self.handled[place] > 1:
            self.world.find("RepeatsNothing", f"{place} was handled twice, and nothing had gone wrong")

    def in_order(self, message: Message) -> None:
        if message.key is None or self.case.settings.order == "none":
            return
        number = message.partition.id.number
        parked = {letter.position for letter in self.world.dead_letters if letter.partition == number}
        before = [
            position
            for position in self.positions[number, message.key]
            if position < message.position and not self.handled[number, position] and position not in parked
        ]
        if before:
            self.world.find(
                "CompletesInOrder", f"partition {number}: {message.position} ended before {before} of its key"
            )


def staying(world: World, leaving: Container[str]) -> list[Worker]:
    """The running workers without a stop request."""
    return [one for one in world.members if not (one.gone or one.ended.is_set() or one.name in leaving)]
