"""The confirmation of the partitions after a freeze. Handlers start only after each partition is confirmed or lost."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import anyio

from lanes.core.types import Partition
from lanes.loops import ThreadSafeCall
from lanes.source import Confirming
from lanes.workers.context import RunContext, Workers
from lanes.workers.freezes import PULSE, FreezeWatch

log = logging.getLogger("lanes")

_PAUSE: Final = 0.05
"""Seconds before the next ``confirm`` for partitions that the source has neither confirmed nor reported lost."""


class Confirmation:
    """The confirmation of one run.

    Args:
        context: The run.
        source: Source that confirms partitions.
        workers: Function that returns the workers of the run.

    Attributes:
        watch: The check that detects a freeze.
    """

    def __init__(self, context: RunContext, source: Confirming, workers: Callable[[], Workers]) -> None:
        self._context = context
        self._source = source
        self._workers = workers
        self._begun = False
        self._told = ThreadSafeCall(self._begin, lambda: context.look_for_due())
        self.watch = FreezeWatch(context.clock, source.freeze_limit, self._noticed)

    def serve(self) -> None:
        """Begin a confirmation that another thread has requested.

        The caller must call this method in a task of the loop.
        """
        self._told.serve()

    async def look(self) -> None:
        """Check for freezes until cancelled, in a run without a thread that watches the event loop."""
        while True:
            self.watch.look(self._context.clock())
            await anyio.sleep(PULSE)

    def _noticed(self) -> None:
        """Stop new handlers, and request a confirmation of the partitions.

        The thread that detected a freeze makes the call.
        """
        self._workers().hold()
        self._told()

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            self._context.start_soon(self._confirm)

    def _left(self, confirmed: set[Partition]) -> list[Partition]:
        return [each for each in self._context.engine.partitions.values() if each not in confirmed]

    async def _confirm(self) -> None:
        """Wait until each partition is confirmed or lost, and then allow handlers to start."""
        context, watch = self._context, self.watch
        since = context.clock()
        while True:
            number = watch.number
            log.warning(
                "%s: no thread of this process ran for %.1f s, so the broker may have taken its partitions away; no "
                "handler starts until the broker has confirmed them",
                context.name,
                watch.seconds,
            )
            # The source is asked even without a partition, because an assignment from before the freeze may be on its
            # way.
            confirmed = set(await self._source.confirm(self._left(set())))
            while number == watch.number and (left := self._left(confirmed)):
                confirmed |= set(await self._source.confirm(left))
                if self._left(confirmed):
                    await anyio.sleep(_PAUSE)
            if watch.open(number, context.clock()):
                break
        log.info("%s: handlers start again %.2f s after the freeze", context.name, context.clock() - since)
        self._begun = False
        self._workers().wake()
