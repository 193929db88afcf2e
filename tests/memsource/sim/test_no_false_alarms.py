"""Right handlers pass with all settings and under all kinds of faults: no checker raises a false alarm."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from lanes import Message, Retry, Settings
from memsource.sim.plans.faults import faults
from memsource.sim.plans.plan import FAULT_KINDS
from memsource.sim.runs.simulate import simulate
from memsource.sim.world.worker import App
from memsource.sim.world.world import World
from tests.effort import runs

ALL = faults(**{kind: 2 if kind in ("crash", "rebalance", "redeliver", "io_fails") else 1 for kind in FAULT_KINDS})

Table = dict[str, int]
Make = Callable[[World, Table], Callable[[Any], Any]]


def place(message: Message, part: int = 0) -> str:
    return f"{message.partition.id.number}/{message.position}/{part}"


def one(world: World, table: Table) -> Callable[[Message], Awaitable[None]]:
    async def handle(message: Message) -> None:
        await world.io("write", 0.01)
        table[place(message)] = 1
        await world.io("commit", 0.01)

    return handle


def batch(world: World, table: Table) -> Callable[[list[Message]], Awaitable[None]]:
    async def handle(messages: list[Message]) -> None:
        await world.io("write", 0.01)
        for message in messages:
            table[place(message)] = 1
        await world.io("commit", 0.01)

    return handle


def in_tasks(world: World, table: Table) -> Callable[[Message], Awaitable[None]]:
    async def handle(message: Message) -> None:
        async def write(part: int) -> None:
            await world.io("write", 0.01 * part)
            table[place(message, part)] = 1

        async with asyncio.TaskGroup() as tasks:
            for part in range(3):
                tasks.create_task(write(part))

    return handle


def in_scopes(world: World, table: Table) -> Callable[[Message], Awaitable[None]]:
    async def handle(message: Message) -> None:
        with anyio.move_on_after(0.005):
            await anyio.sleep(1.0)
        async with asyncio.timeout(20.0):
            await world.io("write", 0.01)
        table[place(message)] = 1

    return handle


def plain(world: World, table: Table) -> Callable[[Message], None]:
    def handle(message: Message) -> None:
        table[place(message)] = 1

    return handle


def poisoned(world: World, table: Table) -> Callable[[Message], Awaitable[None]]:
    async def handle(message: Message) -> None:
        await anyio.sleep(0.01)
        if message.position % 5 == 3:
            raise ValueError("poison")
        table[place(message)] = 1

    return handle


def slow(world: World, table: Table) -> Callable[[Message], Awaitable[None]]:
    async def handle(message: Message) -> None:
        await anyio.sleep(0.01 if message.position % 3 else 2.0)
        table[place(message)] = 1

    return handle


@pytest.mark.long
@pytest.mark.sliced
@pytest.mark.parametrize(
    ("make", "settings"),
    [
        pytest.param(make, settings, id="-".join((make.__name__, *settings)) or make.__name__)
        for make, settings in (
            (one, {}),
            (one, {"lanes": 3}),
            (one, {"order": "partition"}),
            (one, {"order": "serial"}),
            (one, {"order": "none"}),
            (one, {"keyless": "one_lane"}),
            (one, {"concurrency": 1, "max_in_flight": 1}),
            (one, {"max_ahead": 3}),
            (one, {"commit_interval": 0}),
            (one, {"commit_interval": 60}),
            (batch, {"batch": 7, "linger": 0.05}),
            (batch, {"batch": 3, "order": "partition"}),
            (batch, {"batch": 5, "order": "none"}),
            (in_tasks, {}),
            (in_scopes, {}),
            (plain, {}),
            (poisoned, {"poison": "skip"}),
            (poisoned, {"poison": "block"}),
            (poisoned, {"poison": "block_and_dlq", "lanes": 2}),
            (slow, {"timeout": 1.0}),
            (slow, {"drain_timeout": 0.1, "grace": 0}),
        )
    ],
)
def test_a_right_handler_is_not_convicted(make: Make, settings: dict[str, Any]) -> None:
    # The same messages are given up in every run, and are not in the table.
    gives_up = "poison" in settings or "timeout" in settings
    retry = Retry(attempts=2 if gives_up else 12)
    whole = Settings(**{"retry": retry, **settings})
    letters = settings.get("poison") in ("skip", "block_and_dlq") or "timeout" in settings

    @simulate(
        runs=runs(12, least=4), faults=ALL, threads="inline", seed=900, partitions=1 if whole.order == "serial" else 4
    )
    async def test(world: World) -> None:
        table: Table = {}
        world.produce("orders", n=40, keys=7, keyless=0.2, gaps=0.1)
        world.workers(2, App(handler=make(world, table), settings=whole, dead_letters=letters))
        await world.settled()
        if not str(whole.poison).startswith("block"):
            world.check(state=lambda: table)

    test()
