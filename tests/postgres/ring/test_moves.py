"""Random moves and splits while messages arrive: each message is handled once, in the order of its key."""

from __future__ import annotations

import random
from collections import defaultdict
from contextlib import AsyncExitStack
from functools import partial

import anyio
import psycopg
import pytest

from lanes import Consumer, Message, Settings
from lanes.errors import ConfigError
from lanes.ring import SLOTS, Range, slot
from lanes_postgres import Record
from tests.components import PostgresServer
from tests.postgres.log.logs import Logs
from tests.postgres.log.test_subscriptions import until
from tests.postgres.ring.ranged import Ring

pytestmark = pytest.mark.anyio

MEMBERS = "abc"
MESSAGES = 1_500
MOVES = 30
KEYS = [f"key {number}" for number in range(40)]
NO_KEY = "none"


class Traffic:
    """Messages of few keys, whose values count from 0 within each key, and what the handlers did with them."""

    def __init__(self, ring: Ring, seed: int) -> None:
        self.ring = ring
        self.draw = random.Random(seed)
        self.sent: dict[str, int] = defaultdict(int)
        self.running: dict[str, str] = {}
        self.finished: dict[str, list[int]] = defaultdict(list)
        self.overlaps: list[str] = []

    async def handle(self, name: str, message: Message) -> None:
        key, number = message.value.decode().rsplit(" ", 1)
        if key != NO_KEY:
            if key in self.running:
                self.overlaps.append(f"{key} in {self.running[key]} and in {name}")
            self.running[key] = name
        await anyio.sleep(self.draw.choice([0, 0.001, 0.02, 0.1]))
        self.running.pop(key, None)
        self.finished[key].append(int(number))

    async def produce(self) -> None:
        async with await psycopg.AsyncConnection.connect(self.ring.logs.url, autocommit=True) as connection:
            while sum(self.sent.values()) < MESSAGES:
                keys = [self.draw.choice([*KEYS, NO_KEY]) for _ in range(self.draw.randint(1, 12))]
                records = []
                for key in keys:
                    records.append(Record(f"{key} {self.sent[key]}", None if key == NO_KEY else key))
                    self.sent[key] += 1
                async with connection.transaction():
                    await self.ring.logs.log.append(connection, records)
                await anyio.sleep(0.01)

    async def move(self) -> None:
        """Assign ranges that begin and end at used slots, and split ranges that cannot be assigned as a whole."""
        ring = self.ring.map
        async with await psycopg.AsyncConnection.connect(self.ring.logs.url, autocommit=True) as connection:
            for _ in range(MOVES):
                await anyio.sleep(self.draw.random() * 0.2)
                lo, hi = sorted(slot(key) for key in self.draw.sample(KEYS, 2))
                consumer = self.draw.choice(MEMBERS)
                try:
                    await ring.assign(connection, lo, hi, consumer)
                except ConfigError:
                    (whole,) = [each.range for each in await ring.ranges(connection) if lo in each.range]
                    await ring.assign(connection, lo, whole.hi, consumer)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("seed", range(3))
async def test_moves_and_splits_lose_and_repeat_nothing(postgres: PostgresServer, schema: str, seed: int) -> None:
    ring = Ring(Logs.make(postgres, schema, partitions=2))
    ring.assign(Range(0, 30_000), "a")
    ring.assign(Range(30_001, SLOTS - 1), "b")
    traffic = Traffic(ring, seed)
    async with AsyncExitStack() as stack:
        tasks = await stack.enter_async_context(anyio.create_task_group())
        for name in MEMBERS:
            consumer = Consumer(ring.source(name), partial(traffic.handle, name), settings=Settings(concurrency=8))
            tasks.start_soon(consumer.run)
            stack.callback(consumer.stop)
        async with anyio.create_task_group() as work:
            work.start_soon(traffic.produce)
            work.start_soon(traffic.move)
        sent = sum(traffic.sent.values())
        await until(lambda: sum(map(len, traffic.finished.values())) >= sent)
        await anyio.sleep(0.5)
    assert traffic.overlaps == []
    for key, count in traffic.sent.items():
        handled = traffic.finished[key]
        assert (sorted(handled) if key == NO_KEY else handled) == list(range(count)), key
