"""Fakes for tests of batch handlers."""

from __future__ import annotations

from typing import Any

import anyio.lowlevel

from lanes import Consumer, Message, Retry
from memsource import MemoryBroker, MemorySource
from tests.fakes.support import consumer_of

AT_ONCE = Retry(attempts=3, backoff=0.0)


class Batches:
    """A handler of batches that ends on demand and returns ``returns``.

    ``calls`` has the positions of each call, and ``cancelled`` the positions of each cancelled call.
    """

    def __init__(self, *, gated: bool = False) -> None:
        self.calls: list[list[int]] = []
        self.cancelled: list[list[int]] = []
        self.returns: object = None
        self.gate = anyio.Event()
        if not gated:
            self.gate.set()

    async def __call__(self, batch: list[Message]) -> object:
        positions = [message.position for message in batch]
        self.calls.append(positions)
        try:
            await self.gate.wait()
        except BaseException:
            self.cancelled.append(positions)
            raise
        return self.returns


def batching(source: Any, handler: Any, **arguments: Any) -> Consumer:
    """A consumer of batches of up to 4 messages, by default without retries."""
    return consumer_of(source, handler, **{"concurrency": 2, "batch": 4, **arguments})


def finite(broker: MemoryBroker) -> MemorySource:
    """A source whose messages end."""
    source = MemorySource(broker)
    source.finish()
    return source
