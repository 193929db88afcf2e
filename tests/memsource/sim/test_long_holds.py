"""A key that waits for hours delays no other key, and a stop or a crash meanwhile repeats no more than usual."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from lanes import Message, Nak, Settings
from lanes.core.offset_map import decode
from memsource import MemoryAttempts
from memsource.kafka.source import KafkaPersonality
from memsource.personality import PERSONALITIES, PersonalityName
from memsource.sim.plans.plan import Fault, Plan
from memsource.sim.runs.run import Conditions, Run, run_plan
from memsource.sim.world.worker import App, Worker
from memsource.sim.world.world import World

HOUR = 3_600.0
HELD = b"held"
PARTITIONS = 4
SECONDS = 0.05
"""Duration of a handler."""

on_both = pytest.mark.parametrize("personality", PERSONALITIES)


def simulated(test: Callable[[World], Awaitable[None]], personality: PersonalityName) -> Run:
    run = run_plan(Plan(personality, 1, ()), Conditions(test=test, partitions=PARTITIONS))
    assert run.findings == {}
    return run


class Shop:
    """A handler whose first attempt of each message of the held key asks for a pause of 10 hours."""

    def __init__(self, world: World, **settings: Any) -> None:
        self.world = world
        self.settings = Settings(unhealthy_after=12 * HOUR, **settings)
        self.store: MemoryAttempts | None = None
        self.pause = 10 * HOUR
        self.published: dict[tuple[int, int], float] = {}
        self.calls: Counter[tuple[int, int]] = Counter()
        self.done: defaultdict[bytes | None, list[int]] = defaultdict(list)
        self.attempts: list[tuple[float, int, int]] = []
        self.longest = 0.0
        self.number = 0

    def app(self) -> App:
        return App(handler=self.handle, settings=self.settings, attempts=self.store)

    def publish(self, count: int, *, partition: int | None = None) -> None:
        """Publish messages of 40 keys, to each partition in turn."""
        for _ in range(count):
            number = self.number % PARTITIONS if partition is None else partition
            record = self.world.publish("v", key=f"key {self.number % 40}", partition=number)
            self.published[record.partition, record.position] = self.world.now
            self.number += 1

    def hold(self, count: int = 1) -> None:
        """Publish messages of the held key, to partition 0."""
        for _ in range(count):
            self.world.publish("v", key=HELD, partition=0)

    async def traffic(self, hours: float) -> None:
        """Publish five messages a minute."""
        for _ in range(round(hours * 60)):
            self.publish(5)
            await anyio.sleep(60.0)

    async def handle(self, message: Message) -> None:
        place = message.partition.id.number, message.position
        self.calls[place] += 1
        if message.key == HELD:
            self.attempts.append((self.world.now, message.position, message.attempt))
            if message.attempt == 1 and not self.done[HELD] and self.pause:
                raise Nak("the warehouse is closed", delay=self.pause)
        await anyio.sleep(SECONDS)
        self.done[message.key].append(message.position)
        if message.key != HELD:
            self.longest = max(self.longest, self.world.now - self.published[place])

    def repeated(self) -> list[tuple[int, int]]:
        """The messages of other keys whose handler was called twice."""
        return [place for place, calls in self.calls.items() if calls > 1 and place in self.published]


async def stopped(worker: Worker) -> None:
    with worker.acting():
        worker.stopped = True
        worker.consumer.stop()
    await worker.ended.wait()


@pytest.mark.long
@on_both
def test_a_key_held_for_ten_hours_delays_no_other_key(personality: PersonalityName) -> None:
    """The traffic of the ten hours is 3,000 messages, 750 of them in the partition of the held key."""

    async def test(world: World) -> None:
        shop = Shop(world, max_ahead=1_000, max_in_flight=200)
        (worker,) = world.workers(1, shop.app())
        shop.hold(20)
        await shop.traffic(10)
        status = worker.consumer.status()
        # One held message and its 19 successors, and no other message, are in flight.
        assert (status.in_flight, status.held, status.settled) == (20, 1, 3_000)
        assert worker.consumer.health().ok
        partition = status.partitions["memory/0"]
        assert partition.holes == 20
        if isinstance(world.broker, KafkaPersonality):
            commit = world.broker.committed(0)
            assert commit is not None and commit.offset == partition.floor == 0
            # One run, which takes the same room for any number of messages.
            assert decode(commit.metadata, 0, 1 << 32) == [(20, 770)]
            assert len(commit.metadata) < 20
            assert (partition.ahead, partition.ahead_reached) == (770, False)
        await world.settled()
        assert shop.longest < 1.0
        assert shop.repeated() == []
        first, second, *_ = shop.attempts
        assert second[0] - first[0] == pytest.approx(10 * HOUR, abs=1.0)
        assert shop.done[HELD] == sorted(shop.done[HELD])
        assert len(shop.done[HELD]) == 20

    run = simulated(test, personality)
    assert run.seconds > 10 * HOUR
    # The source extends the message, so the broker never delivers it again.
    assert run.happened["redelivered"] == 0
    assert run.happened["delivered"] == 3_020


@on_both
@pytest.mark.parametrize("stores", [False, True], ids=["without a store", "with a store"])
def test_a_stop_ends_the_pause_and_repeats_no_finished_message(personality: PersonalityName, stores: bool) -> None:
    async def test(world: World) -> None:
        shop = Shop(world)
        shop.store = MemoryAttempts(world.io) if stores else None
        (first,) = world.workers(1, shop.app())
        shop.hold()
        await shop.traffic(1)
        await stopped(first)
        shop.pause = 60.0
        world.workers(1, shop.app())
        await shop.traffic(0.1)
        await world.settled()
        assert shop.repeated() == []
        assert [attempt for _, _, attempt in shop.attempts] == ([1, 2] if stores else [1, 1, 2])
        # The next owner makes the next attempt at once, and does not wait for the rest of the pause.
        assert shop.attempts[1][0] - shop.attempts[0][0] == pytest.approx(HOUR, abs=60.0)

    simulated(test, personality)


@on_both
def test_a_crash_during_a_pause_repeats_only_unconfirmed_messages(personality: PersonalityName) -> None:
    async def test(world: World) -> None:
        # A commit is due after a twentieth of the interval.
        shop = Shop(world, commit_interval=20.0)
        (worker,) = world.workers(1, shop.app())
        shop.hold()
        await shop.traffic(1)
        shop.publish(12)
        await anyio.sleep(3 * SECONDS)
        # These messages are finished. On Kafka their commit is due a second later.
        unconfirmed = list(shop.published)[-12:] if world.broker.name == "kafka" else []
        assert all(shop.calls[place] == 1 for place in shop.published)
        world.perform(Fault(0, "crash", amount=1.0), worker)
        shop.pause = 0.0
        await world.settled()
        assert sorted(shop.repeated()) == sorted(unconfirmed)

    simulated(test, personality)


def test_max_ahead_stops_only_the_partition_of_the_held_key() -> None:
    async def test(world: World) -> None:
        shop = Shop(world, max_ahead=100)
        (worker,) = world.workers(1, shop.app())
        shop.hold()
        shop.publish(150, partition=0)
        shop.publish(150, partition=1)
        await anyio.sleep(HOUR)
        partitions = worker.consumer.status().partitions
        assert (partitions["memory/0"].ahead, partitions["memory/0"].ahead_reached) == (100, True)
        assert (partitions["memory/1"].floor, partitions["memory/1"].ahead_reached) == (150, False)
        assert "has reached max_ahead=100" in worker.consumer.health().reasons[0]
        await anyio.sleep(9 * HOUR)
        await world.settled()
        assert not worker.consumer.status().partitions["memory/0"].ahead_reached

    simulated(test, "kafka")


@on_both
def test_the_successors_of_a_held_message_fill_max_in_flight(personality: PersonalityName) -> None:
    async def test(world: World) -> None:
        shop = Shop(world, concurrency=5, max_in_flight=10)
        (worker,) = world.workers(1, shop.app())
        shop.hold(10)
        await anyio.sleep(10.0)
        shop.publish(20, partition=1)
        await anyio.sleep(HOUR)
        assert (worker.consumer.status().in_flight, shop.calls.total()) == (10, 1)
        await anyio.sleep(9 * HOUR)
        await world.settled()
        assert shop.done[HELD] == sorted(shop.done[HELD])

    simulated(test, personality)
