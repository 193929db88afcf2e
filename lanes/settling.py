"""Telling the broker what is finished, and that the rest is still being worked on."""

from __future__ import annotations

from typing import Final, Protocol

import anyio

from lanes.clock import Clock
from lanes.core.engine import Engine
from lanes.errors import SourceError
from lanes.history import History
from lanes.source import Source

SETTLE_RETRY: Final = (0.05, 1.0)
"""Seconds before a settlement that may not have been sent is repeated: first, and at most."""


class Shell(Protocol):
    """What settling needs of the consumer around it."""

    def after(self, *, taking: int = 0) -> None:
        """Perform the engine's effects and wake whoever has something to do now."""

    def stop_because(self, error: BaseException) -> None:
        """Stop in order; ``error`` is raised when everything has been drained."""


class Settler:
    """The settle step of one consumer: at most one settlement is on its way at any time."""

    def __init__(self, engine: Engine, source: Source, shell: Shell, clock: Clock, history: History | None) -> None:
        self._engine = engine
        self._source = source
        self._shell = shell
        self._clock = clock
        self._history = history
        self._idle = False
        self._failed = False
        self._wake = anyio.Event()
        self._lock = anyio.Lock(fast_acquire=True)

    async def run(self) -> None:
        """Settle whatever finishes, in batches, until cancelled or the source has failed for good."""
        while not self._failed:
            if not self._engine.dirty:
                self._wake = anyio.Event()
                self._idle = True
                await self._wake.wait()
            await self.settle_all()

    def wake(self) -> None:
        """Something is finished. Cheap when it is known already."""
        if self._idle:
            self._idle = False
            self._wake.set()

    async def settle_all(self) -> None:
        """Settle everything that is finished, as often as it takes; what another call is sending included.

        Returns without having done so once the source has failed for good.
        """
        pause = SETTLE_RETRY[0]
        while True:
            if await self.settle() or self._failed:
                return
            await anyio.sleep(pause)
            pause = min(pause * 2, SETTLE_RETRY[1])

    async def settle(self) -> bool:
        """Settle everything that is finished; False when that has to be repeated. Idempotent."""
        engine = self._engine
        async with self._lock:
            settlements = engine.collect()
            if not settlements:
                return True
            if self._history is not None:
                # In the file before the broker hears of it: what was acknowledged can be proven after a crash.
                for settlement in settlements:
                    self._history.acks(settlement.messages, self._clock())
                self._history.flush()
            try:
                await self._source.settle(settlements)
            except Exception as error:
                engine.unsettled(settlements)
                if not (isinstance(error, SourceError) and error.retryable):
                    self._failed = True
                    self._shell.stop_because(error)
                return False
            except BaseException:
                engine.unsettled(settlements)
                raise
            engine.settled(settlements)
        self._shell.after()
        return True

    async def keep_alive(self, interval: float) -> None:
        """Extend every held message so that none gets older than ``interval`` seconds without; until cancelled."""
        # Every half interval, everything older than half an interval: what is finished sooner costs nothing.
        period = interval / 2
        while True:
            await anyio.sleep(period)
            messages = self._engine.held_since(self._clock() - period)
            if messages:
                await self._source.extend(messages)
