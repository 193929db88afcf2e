"""Performs concurrent calls in one transaction. Needs asyncio."""

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
    """Lets one call do the work of all waiting calls.

    If the common work fails, the working call then does only its own work. One call therefore never causes the failure
    of another call. After the cancellation of a call, no other call does its work.

    Args:
        turn: Lock that lets only one call work at a time.
        perform: Function that does the work of several calls. Its argument has one entry for each call, the oldest call
            first.
    """

    def __init__(self, turn: asyncio.Lock, perform: Callable[[list[Content]], Awaitable[None]]) -> None:
        self._turn = turn
        self._perform = perform
        self._calls: list[_Call[Content]] = []

    async def __call__(self, content: Content) -> None:
        """Do the work that ``content`` describes, or wait for a call that does it. Raises the errors of ``perform``."""
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
