"""Fakes for tests of attempts in a store."""

from __future__ import annotations

from typing import Any

from lanes import Attempt, Consumer, Message, Nak
from lanes.core.types import PartitionId
from memsource import MemoryAttempts
from tests.fakes.support import consumer_of

HERE = PartitionId("memory", 0)


class Later(Nak):
    """A failure with a retry delay that is longer than the test."""

    def __init__(self, why: str) -> None:
        super().__init__(delay=3600.0)


class Failing:
    """A handler that fails with these positions; ``calls`` are positions and attempts, in order."""

    def __init__(self, *poison: int, error: type[Exception] = ValueError) -> None:
        self.poison = set(poison)
        self.error = error
        self.calls: list[tuple[int, int]] = []

    async def __call__(self, message: Message) -> None:
        self.calls.append((message.position, message.attempt))
        if message.position in self.poison:
            raise self.error("no")

    def attempts(self, position: int) -> list[int]:
        return [attempt for at, attempt in self.calls if at == position]


def place(store: MemoryAttempts) -> dict[int, Attempt]:
    """The entries of the only partition."""
    (rows,) = store.kept().values() or [{}]
    return rows


def keeping(source: Any, handler: Any, store: Any, **arguments: Any) -> Consumer:
    """A consumer with three attempts for each message, which a store keeps."""
    return consumer_of(source, handler, store=store, **{"attempts": 3, **arguments})
