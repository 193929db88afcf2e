"""Concurrent calls that share one transaction. Needs asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

Content = TypeVar("Content")


@dataclass(eq=False, slots=True)
class _Call(Generic[Content]):
    """A call that waits or runs."""

    content: Content
    performed: bool = False


class SharedCalls(Generic[Content]):
    """Lets one call perform the content of all waiting calls.

    If the content of several calls fails, the performing call performs its own content alone. The content of one call
    therefore fails no other call. No other call performs the content of a cancelled call.

    Args:
        turn: Lock that serializes the performing calls.
        perform: Function that performs the content of several calls, the oldest call first.
    """

    def __init__(self, turn: asyncio.Lock, perform: Callable[[list[Content]], Awaitable[None]]) -> None:
        self._turn = turn
        self._perform = perform
        self._calls: list[_Call[Content]] = []

    async def __call__(self, content: Content) -> None:
        """Perform the content, or wait until another call has performed it. Raises the errors of ``perform``."""
        call = _Call(content)
        self._calls.append(call)
        try:
            async with self._turn:
                if not call.performed:
                    taken = [each for each in self._calls if not each.performed]
                    try:
                        await self._perform([each.content for each in taken])
                    except Exception:
                        if len(taken) == 1:
                            raise
                        taken = [call]
                        await self._perform([content])
                    for each in taken:
                        each.performed = True
        finally:
            self._calls.remove(call)
