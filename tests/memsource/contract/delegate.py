"""A source that delegates to another one, for tests that break it, and the names of checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from lanes.core.types import Message, Partition, Room, Settlement
from lanes.source import Source, SourceEvent, SourceTraits
from memsource.contract.source import Check

_Inner = TypeVar("_Inner", bound=Source)


class Delegate(Generic[_Inner]):
    """A source that passes everything on; each subclass breaks one promise."""

    def __init__(self, source: _Inner) -> None:
        self.inner = source

    async def open(self) -> SourceTraits:
        return await self.inner.open()

    async def receive(self, room: Room) -> Sequence[SourceEvent]:
        return await self.inner.receive(room)

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        await self.inner.settle(settlements)

    async def extend(self, messages: Sequence[Message]) -> None:
        await self.inner.extend(messages)

    async def release(self, partition: Partition) -> None:
        await self.inner.release(partition)

    async def aclose(self) -> None:
        await self.inner.aclose()


def name_of(check: Check) -> str:
    return check.__name__.removeprefix("check_")
