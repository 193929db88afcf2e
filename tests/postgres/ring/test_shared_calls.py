"""Calls that wait for one another share a transaction, and each call is performed until it succeeds."""

from __future__ import annotations

import asyncio

import pytest

from lanes_postgres.ring.shared_calls import SharedCalls

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]


class Store:
    """Performs contents, each after an event, and fails at one of them.

    Args:
        failing: Number of the performance that fails, from 1; 0 = none fails.
    """

    def __init__(self, failing: int = 0) -> None:
        self.performed: list[list[int]] = []
        self.answers = [asyncio.Event() for _ in range(4)]
        self._failing = failing

    async def perform(self, contents: list[int]) -> None:
        self.performed.append(contents)
        number = len(self.performed)
        await self.answers[number - 1].wait()
        if number == self._failing:
            raise OSError("no answer")

    def answer(self) -> None:
        for each in self.answers:
            each.set()


async def begun(calls: SharedCalls[int], *contents: int) -> list[asyncio.Task[None]]:
    """Calls that have begun, in this order."""
    tasks = [asyncio.create_task(calls(content)) for content in contents]
    for _ in range(3):
        await asyncio.sleep(0)
    return tasks


async def test_calls_that_wait_share_one_transaction() -> None:
    store = Store()
    calls = SharedCalls(asyncio.Lock(), store.perform)
    tasks = await begun(calls, 1, 2, 3)
    store.answer()
    await asyncio.gather(*tasks)
    assert store.performed == [[1], [2, 3]]


async def test_each_call_performs_its_own_content_after_a_shared_failure() -> None:
    store = Store(failing=2)
    calls = SharedCalls(asyncio.Lock(), store.perform)
    tasks = await begun(calls, 1, 2, 3)
    store.answer()
    await asyncio.gather(*tasks)
    assert store.performed == [[1], [2, 3], [2], [3]]


async def test_a_content_that_fails_does_not_fail_its_companions() -> None:
    held = asyncio.Event()

    async def perform(contents: list[int]) -> None:
        await held.wait()
        if 3 in contents:
            raise OSError("row is locked")

    tasks = await begun(SharedCalls(asyncio.Lock(), perform), 1, 2, 3)
    held.set()
    first, second, third = await asyncio.gather(*tasks, return_exceptions=True)
    assert (first, second) == (None, None)
    assert isinstance(third, OSError)


async def test_a_cancelled_call_is_not_performed() -> None:
    store = Store()
    calls = SharedCalls(asyncio.Lock(), store.perform)
    first, cancelled, last = await begun(calls, 1, 2, 3)
    cancelled.cancel()
    await asyncio.wait({cancelled})
    store.answer()
    await asyncio.gather(first, last)
    assert store.performed == [[1], [3]]


async def test_a_call_that_is_cancelled_while_another_performs_it_is_not_repeated() -> None:
    store = Store(failing=2)
    calls = SharedCalls(asyncio.Lock(), store.perform)
    first, second, cancelled = await begun(calls, 1, 2, 3)
    store.answers[0].set()
    await first
    while len(store.performed) < 2:
        await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.wait({cancelled})
    store.answer()
    await second
    await calls(4)
    assert store.performed == [[1], [2, 3], [2], [4]]
