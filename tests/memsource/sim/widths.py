"""Changes of the width of a partitioned queue, drawn from the seed of a plan, under load, faults and rebalances.

A run grows or shrinks a queue once or several times, by the runbook or in the wrong order. After a wrong order, the
alarm must name the physical queues without a reader. The producers also have a history, from which ``NothingStranded``
judges a run. On Kafka the physical queues are topics, some with several Kafka partitions. On JetStream they are the
partitions of a cohort, whose members all have the same number.
"""

from __future__ import annotations

import gc
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, Final, Literal

import anyio

from lanes import Message, PartitionedQueue, Retry, Settings
from lanes.core.ring import lane
from memsource.checkers import CHECKERS, NothingStranded
from memsource.jetstream.queue import JetStreamQueuePersonality
from memsource.kafka.broker import KafkaSettings
from memsource.kafka.queue import QueuePersonality
from memsource.personality import PERSONALITIES, PersonalityName
from memsource.sim.loop.virtual import until
from memsource.sim.plans.faults import faults
from memsource.sim.plans.plan import Plan
from memsource.sim.runs.campaign import Campaign
from memsource.sim.runs.run import Conditions
from memsource.sim.world.worker import App, MemoryRecorder, Worker
from memsource.sim.world.world import World
from tests.effort import spread
from tests.memsource.sim.slices import PROCESSES, Tally

QUEUE: Final = "updates"
LANES: Final = 4
WIDTHS: Final = (1, 2, 4, 8)

RUNS_A_SEED: Final = 10
_RUNS_A_SLICE: Final = 5 * RUNS_A_SEED

ALARM_WITHIN: Final = 10.0
"""Seconds within which the alarm names the topics, if nothing disturbs the members."""

_PATIENCE: Final = 4_000.0
"""Seconds after which a wait has failed, whatever faults there were: all faults of a run together end earlier."""

_FEW_KEYS: Final = 12
"""Keys in a partition that would all have one lane of four by chance in less than one of a million cases."""

_LOAD: Final = 60
"""Largest number of messages that the producers publish beside a change."""

Order = Literal["runbook", "reversed"]

ON_KAFKA: Final = faults(crash=2, freeze=1, rebalance=2, lost=1, slow=1, commit_fails=1)
BUDGET: Final = faults(crash=2, freeze=1, rebalance=2, lost=1, redeliver=1, slow=1, commit_fails=1, restart=1)


@dataclass(frozen=True)
class Change:
    """A change of the number of partitions.

    Attributes:
        width: The new number of partitions.
        order: Whether workers and producers change in the order of the runbook, or the other way round.
    """

    width: int
    order: Order


@dataclass(frozen=True)
class Case:
    """The case of a seed. ``split``: number of Kafka partitions of each topic."""

    personality: PersonalityName
    width: int
    changes: tuple[Change, ...]
    members: int
    keys: int
    settings: Settings
    kafka: KafkaSettings
    split: int


def case_of(seed: int) -> Case:
    """The case of a seed. The personalities take turns."""
    rng = random.Random(f"widths {seed}")
    width = now = rng.choice(WIDTHS)
    changes = []
    for _ in range(rng.choice([1, 1, 2])):
        now = rng.choice([each for each in WIDTHS if each != now])
        changes.append(Change(now, rng.choice(["runbook", "runbook", "reversed"])))
    concurrency = rng.randint(2, 8)
    settings = Settings(
        concurrency=concurrency,
        max_in_flight=rng.choice([16, 64]),
        concurrency_per_partition=rng.choice([None, 1, 2]),
        max_in_flight_per_partition=rng.choice([None, 4, 8]),
        lanes=rng.choice([LANES, LANES, None]),
        retry=Retry(attempts=3, backoff=0.1),
        commit_interval=rng.choice([0.0, 4.0, 20.0]),
        drain_timeout=10.0,
    )
    kafka = KafkaSettings(protocol=rng.choice(["eager", "cooperative", "848"]), prefetch=rng.choice([3, 100]))
    members, keys, split = rng.randint(1, 3), rng.choice([40, 80]), rng.choice([1, 1, 2, 3])
    personality = PERSONALITIES[seed % len(PERSONALITIES)]
    return Case(personality, width, tuple(changes), members, keys, settings, kafka, split)


SOMETIMES: Final = (
    *(
        f"{name} {what}"
        for name in PERSONALITIES
        for what in (
            *(f"{change}: {order}" for change in ("grow", "shrink") for order in ("runbook", "reversed")),
            "alarm",
        )
    ),
    *(f"fault: {kind}" for kind in BUDGET.kinds("jetstream")),
)
"""What a campaign must have met; otherwise it proves little."""


class KafkaWidthBroker(QueuePersonality):
    """The broker of a case on Kafka.

    Attributes:
        happened: Number of changes, by direction and order, and of alarms.
    """

    def __init__(self, case: Case) -> None:
        super().__init__(QUEUE, most=max(WIDTHS), width=case.width, split=case.split, settings=case.kafka)
        self.happened: Counter[str] = Counter()


class JetStreamWidthBroker(JetStreamQueuePersonality):
    """The broker of a case on JetStream; see ``KafkaWidthBroker``."""

    def __init__(self, case: Case) -> None:
        super().__init__(QUEUE, most=max(WIDTHS), width=case.width)
        self.happened: Counter[str] = Counter()


WidthBroker = KafkaWidthBroker | JetStreamWidthBroker


def broker(plan: Plan) -> WidthBroker:
    """The broker of a plan's case."""
    case = case_of(plan.seed)
    return KafkaWidthBroker(case) if case.personality == "kafka" else JetStreamWidthBroker(case)


class WidthWorld(World):
    """A world whose producers route by a queue, and record their messages."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        assert isinstance(self.broker, WidthBroker)
        self.topics: Final[WidthBroker] = self.broker
        self._produced = MemoryRecorder("producer", 0, self.wall)
        self._produced.open(source=QUEUE, concurrency=1, max_in_flight=1, max_in_flight_bytes=1, now=self.clock())

    def produce_key(self, key: bytes, value: str) -> None:
        """Publish a message to the physical queue of its key."""
        route = self.topics.producers.route_by_key(key)
        record = self.publish(value, key=route.key, partition=self.topics.partition_for(route))
        self._produced.produced(self.topics.place(record.partition), record.position, record.key, self.clock())

    @property
    def histories(self) -> list[bytes]:
        self._produced.flush()
        return [*super().histories, self._produced.data]


class Widths:
    """The changes of one run.

    Args:
        world: The world.
    """

    def __init__(self, world: WidthWorld) -> None:
        self._world = world
        self._topics = world.topics
        self._case = case_of(world.plan.seed)
        self._rng = random.Random(f"load {world.plan.seed}")
        self._keys = [f"key-{number}".encode() for number in range(self._case.keys)]
        self._app = App(handler=self._handle, settings=self._case.settings)
        self._epoch = self._published = 0
        # The epoch and number of each message at its first start, by key.
        self._first: defaultdict[bytes, dict[tuple[int, int], None]] = defaultdict(dict)
        self._lanes: defaultdict[str, set[int]] = defaultdict(set)
        self._in: defaultdict[str, set[bytes]] = defaultdict(set)

    async def run(self) -> None:
        """Make all changes during a load, wait for all messages, and judge the run."""
        self._world.workers(self._case.members, self._app)
        self._publish_each_key()
        async with anyio.create_task_group() as load:
            load.start_soon(self._load)
            for change in self._case.changes:
                await self._change(change)
            load.cancel_scope.cancel()
        self._publish_each_key()
        await self._world.settled()
        self._judge()

    # --- the messages

    async def _handle(self, message: Message) -> None:
        epoch, number = map(int, message.value.split())
        assert message.key is not None
        self._first[message.key].setdefault((epoch, number))
        name = message.partition.id.source
        self._lanes[name].add(lane(message.key, LANES))
        self._in[name].add(message.key)
        await anyio.sleep(0.05 * (number % 4))

    def _publish(self, key: bytes) -> None:
        self._published += 1
        self._world.produce_key(key, f"{self._epoch} {self._published}")

    def _publish_each_key(self) -> None:
        for key in self._keys:
            self._publish(key)

    async def _load(self) -> None:
        for _ in range(_LOAD):
            self._publish(self._rng.choice(self._keys))
            await anyio.sleep(self._rng.choice([0.01, 0.1, 0.5, 2.0]))

    # --- the changes

    async def _change(self, change: Change) -> None:
        before, after = self._topics.producers, PartitionedQueue(QUEUE, change.width)
        grows = after.partitions > before.partitions
        self._happens(f"{'grow' if grows else 'shrink'}: {change.order}")
        if grows == (change.order == "runbook"):
            await self._start_workers(after)
            if not grows:
                await self._alarm()
                # The mend: workers of the former width, and then the order of the runbook.
                await self._start_workers(before)
                self._start_producers(after)
                await self._finished(after)
                await self._start_workers(after)
            else:
                self._start_producers(after)
        else:
            self._start_producers(after)
            if grows:
                await self._alarm()
            else:
                await self._finished(after)
            await self._start_workers(after)
        await self._wait("AlarmEnds", lambda: not self._named(), "an alarm names topics that all workers read")

    def _happens(self, what: str) -> None:
        self._topics.happened[f"{self._case.personality} {what}"] += 1

    async def _start_workers(self, queue: PartitionedQueue) -> None:
        """Replace the workers of another width: one after the other, or all of a cohort at once."""
        if isinstance(self._topics, JetStreamWidthBroker):
            await self._start_cohort(self._topics, queue)
            return
        world = self._world
        self._topics.workers = queue
        for worker in [each for each in world.members if not self._over(each)]:
            if self._over(worker) or self._topics.width_of(worker.name) == queue.partitions:
                continue
            await self._stop(worker)
            world.workers(1, self._app)

    async def _start_cohort(self, topics: JetStreamWidthBroker, queue: PartitionedQueue) -> None:
        """Stop all members, wait for their leases to end, delete the stored number, and start the members."""
        world = self._world
        if queue.partitions == topics.workers.partitions:
            return
        # A worker that replaces a crashed one may start meanwhile.
        while not (all(map(self._over, world.members)) and topics.forget_width()):
            for worker in [each for each in world.members if not self._over(each)]:
                await self._stop(worker)
            await anyio.sleep(1.0)
        topics.workers = queue
        world.workers(self._case.members, self._app)

    async def _stop(self, worker: Worker) -> None:
        worker.stopped = True
        with worker.acting():
            worker.consumer.stop()
        await self._wait("StopEnds", worker.ended.is_set, f"{worker.name} has not stopped")

    def _start_producers(self, queue: PartitionedQueue) -> None:
        before, self._topics.producers = self._topics.producers, queue
        if isinstance(self._topics, JetStreamWidthBroker):
            self._topics.finished_from = None
        self._epoch += 1
        least = min(before.partitions, queue.partitions)
        for key in self._keys:
            old, new = before.route_by_key(key).partition, queue.route_by_key(key).partition
            if old != new and max(old, new) < least:
                self._world.find(
                    "OnlyMovedKeys", f"{key!r} moves from partition {old} to {new}, which both widths have"
                )
        self._publish_each_key()

    async def _finished(self, queue: PartitionedQueue) -> None:
        """Wait until the group has finished the topics that ``queue`` does not have."""
        removed = set(self._topics.names[queue.partitions :])
        await self._wait("RemovedEnd", lambda: not removed & self._left(), "a removed topic is not finished")
        if isinstance(self._topics, JetStreamWidthBroker):
            self._topics.finished_from = queue.partitions

    # --- the alarm

    async def _alarm(self) -> None:
        """Wait until the alarm of some worker names each topic with messages that no worker reads."""
        queue = self._topics.workers
        looked_at = {*self._topics.names[: 2 * queue.partitions], *self._topics.known_names}
        wanted = (self._left() - set(queue.names)) & looked_at
        if not wanted:
            return
        self._happens("alarm")
        undisturbed = not self._world.injection.moments and not self._world.plan.schedule.jumps
        if await until(lambda: wanted <= self._named(), ALARM_WITHIN):
            return
        if undisturbed and not self._world.injection.moments:
            what = f"after {ALARM_WITHIN:g} s, the alarm names {sorted(self._named())} of {sorted(wanted)}"
            self._world.find("AlarmNames", what)
        else:
            await self._wait("AlarmNames", lambda: wanted <= self._named(), f"no alarm names all of {sorted(wanted)}")

    def _named(self) -> set[str]:
        """The topics that the alarms of the present workers name."""
        alive = [each for each in self._world.members if not self._over(each) and each.consumer.ready]
        return {found.name for each in alive for found in each.consumer.status().queues[QUEUE].stranded}

    def _left(self) -> set[str]:
        """The topics with messages that the group has not finished."""
        return {self._topics.name_of(record.partition) for record in self._topics.unfinished}

    # --- the judgement

    def _judge(self) -> None:
        # A restarted server without replicas may reorder messages. The checkers know which ones.
        reorders = any(fault.kind == "restart" for fault in self._world.injection.performed)
        for key, started in self._first.items() if not reorders else ():
            order = list(started)
            for epoch in range(self._epoch + 1):
                numbers = [number for each, number in order if each == epoch]
                if numbers != sorted(numbers):
                    self._world.find(
                        "OrderWithinWidth", f"the messages of {key!r} in epoch {epoch} started as {numbers}"
                    )
        for name, keys in self._in.items():
            if len(keys) >= _FEW_KEYS and len(self._lanes[name]) < 2:
                self._world.find("EveryLane", f"{len(keys)} keys of {name} all have the lane {self._lanes[name]}")

    async def _wait(self, check: str, condition: Callable[[], bool], what: str) -> None:
        if not await until(condition, _PATIENCE):
            self._world.find(check, f"{what} after {_PATIENCE:g} s")

    def _over(self, worker: Worker) -> bool:
        return worker.gone or worker.ended.is_set()


async def widths(world: World) -> None:
    """Change the width of a queue as the case of the seed says."""
    assert isinstance(world, WidthWorld)
    await Widths(world).run()


CONDITIONS: Final = Conditions(
    test=widths, broker=broker, world=WidthWorld, checkers=(*CHECKERS, NothingStranded), settles=True
)


def campaign(seed: int, conditions: Conditions = CONDITIONS, *, runs: int = RUNS_A_SEED) -> Campaign:
    """The campaign of one seed: one case, without faults and with drawn faults."""
    personality = case_of(seed).personality
    budget = BUDGET if personality == "jetstream" else ON_KAFKA
    return Campaign(conditions, runs=runs, budget=budget, personalities=(personality,), seed=seed)


@dataclass(frozen=True)
class _Slice:
    """Some of the runs of a campaign: the runs with the numbers ``begin`` to ``end - 1``."""

    begin: int
    end: int


def slice_of(job: _Slice) -> Tally:
    """Make the runs of a slice, which begins with the first run of a seed. One run of a seed is repeated."""
    result = Tally()
    gc.collect()
    for first in range(job.begin, job.end, RUNS_A_SEED):
        gc.collect()
        brokers: list[WidthBroker] = []
        made = campaign(first // RUNS_A_SEED, replace(CONDITIONS, broker=partial(_kept, brokers)))
        for number, run in enumerate(islice(made.each(), job.end - first)):
            result.add(run)
            if number == first // RUNS_A_SEED % RUNS_A_SEED:
                made.recheck(run)
        result.happened += sum((each.happened for each in brokers), Counter[str]())
    return result


def tally(schedules: int, *, processes: int = PROCESSES) -> Tally:
    """Make this number of runs, 1 or more. Blocks."""
    jobs = [_Slice(begin, min(begin + _RUNS_A_SLICE, schedules)) for begin in range(0, schedules, _RUNS_A_SLICE)]
    result = Tally()
    for part in spread(slice_of, jobs, processes):
        result += part
    return result


def _kept(brokers: list[WidthBroker], plan: Plan) -> WidthBroker:
    brokers.append(broker(plan))
    return brokers[-1]
