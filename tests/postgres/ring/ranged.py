"""Members with ranges, and keys of chosen slots."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio

from lanes import Consumer, Message
from lanes.ring import SLOTS, Range, slot
from lanes_postgres import PostgresSource, RangeMap, Record
from tests.postgres.log.logs import Logs

HALF = SLOTS // 2
LOW, HIGH = Range(0, HALF - 1), Range(HALF, SLOTS - 1)


def keys_in(wanted: Range) -> Iterator[str]:
    """Keys whose slots are in a range."""
    return (key for number in itertools.count() if slot(key := f"key {number}") in wanted)


def some(wanted: Range, count: int) -> list[str]:
    return list(itertools.islice(keys_in(wanted), count))


class Ring:
    """The map of the group ``billing`` of a log, and its consumers."""

    def __init__(self, logs: Logs, group: str = "billing") -> None:
        self.logs = logs
        self.group = group
        self.map = RangeMap(logs.log, group=group)

    def assign(self, range_: Range, consumer: str) -> bool:
        with self.logs.connect() as connection:
            return self.map.assign(connection, range_.lo, range_.hi, consumer)

    def append(self, *keys: str | None) -> None:
        """One message of each key, in one transaction; its value is the key."""
        with self.logs.connect() as connection:
            self.logs.log.append(connection, [Record(key or "", key) for key in keys])

    def source(self, consumer: str, **arguments: Any) -> PostgresSource:
        arguments = {"poll_interval": 0.1, **arguments}
        ranges = self.map.member(consumer)
        return PostgresSource(self.logs.url, self.logs.log, subscription=self.group, ranges=ranges, **arguments)

    @asynccontextmanager
    async def member(self, consumer: str, **arguments: Any) -> AsyncIterator[Member]:
        """A running consumer."""
        member = Member()
        source = member.source = self.source(consumer)
        running = Consumer(source, member.handle, **arguments)
        member.consumer = running
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(running.run)
            try:
                yield member
            finally:
                member.gate.set()
                running.stop()

    def pieces(self) -> list[tuple[str | None, str | None, int | None]]:
        """Slots, consumer and drain of each piece."""
        return self.logs.execute("SELECT slots::text, consumer, parent FROM {}.lanes_ring_pieces ORDER BY id")


class Member:
    """The handler of a consumer: it waits at the gate."""

    def __init__(self) -> None:
        self.gate = anyio.Event()
        self.gate.set()
        self.consumer: Consumer
        self.source: PostgresSource
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.attempts: list[int] = []
        self.fails = False

    async def handle(self, message: Message) -> None:
        value = message.value.decode()
        self.begun.append(value)
        self.attempts.append(message.attempt)
        await self.gate.wait()
        if self.fails:
            raise ValueError("fails")
        self.ended.append(value)

    def findings(self) -> Sequence[str]:
        return self.source.findings()

    def close(self) -> None:
        """Let handlers wait from now on."""
        self.gate = anyio.Event()
