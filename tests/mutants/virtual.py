"""Virtual time: a run waits for nothing, and the same plan gives the same run."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable
from typing import Any, Final

import anyio
import trio.testing

TURNS_LIMIT: Final = 100_000
"""Turns of the loop in which no time passes, at most: something spins."""


class _Jump(selectors.DefaultSelector):
    """Does not wait: where a loop would, its time jumps."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self._turns = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("every task waits for another one, and none for a time")
        self._turns = 0 if timeout > 0 else self._turns + 1
        if self._turns > TURNS_LIMIT:
            raise RuntimeError(f"no time has passed in {TURNS_LIMIT} turns of the loop: something spins")
        self.now += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop of asyncio whose time begins at 0 and passes only where nothing else can happen."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now


def run(main: Callable[[], Awaitable[None]], backend: str = "asyncio") -> None:
    """Run ``main`` in virtual time. Threads and sockets have none."""
    options: dict[str, Any] = {"loop_factory": VirtualLoop}
    if backend == "trio":
        options = {"clock": trio.testing.MockClock(autojump_threshold=0)}
    anyio.run(main, backend=backend, backend_options=options)
