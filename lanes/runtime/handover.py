"""The hand-over of partitions. One task for each partition performs the steps that ``lanes.core.drain`` decides."""

from __future__ import annotations

import logging
from typing import Final, NamedTuple

import anyio

from lanes.config import RELEASE_WITHIN, SETTLE_WITHIN
from lanes.core import drain as phases
from lanes.core.drain import Limits, PartitionDrain
from lanes.core.types import NEVER, Message, Partition
from lanes.errors import SourceError
from lanes.observe.ownership import DrainCost, OwnershipLog
from lanes.runtime.attempts import AttemptKeeper
from lanes.runtime.settle import Settler
from lanes.source import Source
from lanes.workers.context import RunContext, Workers

log = logging.getLogger("lanes")

_SETTLE_LIMIT: Final = 30.0
"""Seconds for the last settlement of a drain without a limit. The next owner waits for the release anyway."""

_NAMED_LIMIT: Final = 10
"""Maximum number of positions in one log line."""


class _Begun(NamedTuple):
    """A drain that has begun.

    Attributes:
        drain: The drain.
        ended: Event that is set when the last handler has ended, or the partition is lost.
        wait: Cancel scope of the wait for running handlers.
        cost: The cost of the drain in messages, for the log.
    """

    drain: PartitionDrain
    ended: anyio.Event
    wait: anyio.CancelScope
    cost: DrainCost


class Handover:
    """The drains of one consumer.

    Args:
        context: The run.
        source: Source that releases the partitions.
        workers: Workers that cancel the handlers.
        settler: Settler of the finished messages.
        attempts: Attempts to store before a release.
        ownership: The log lines about partitions.
        grace: Seconds that cancelled handlers get to end.
        close_prefix: See ``Ownership.drain``.
    """

    def __init__(
        self,
        context: RunContext,
        source: Source,
        workers: Workers,
        settler: Settler,
        attempts: AttemptKeeper,
        ownership: OwnershipLog,
        grace: float,
        *,
        close_prefix: bool,
    ) -> None:
        self._engine = context.engine
        self._source = source
        self._workers = workers
        self._settler = settler
        self._context = context
        self._attempts = attempts
        self._ownership = ownership
        self._clock = context.clock
        self._tap = context.tap
        self._grace = grace
        self._name = context.name
        self._close_prefix = close_prefix
        self._drains: dict[Partition, _Begun] = {}

    def begin(self, partition: Partition, timeout: float) -> bool:
        """Start no more messages of a partition. Does not block.

        Args:
            partition: The assignment.
            timeout: Seconds that running handlers get to end.

        Returns:
            Whether the drain has begun, so that the caller must call ``drain``. False = the partition drains already.
        """
        if partition in self._drains:
            return False
        waiting = [lane.head.position for lane in self._engine.stopped_lanes() if lane.head.partition is partition]
        limits = Limits(self._grace, SETTLE_WITHIN, _SETTLE_LIMIT)
        drain = PartitionDrain(self._engine, partition, limits, close_prefix=self._close_prefix)
        cost = DrainCost(partition)
        drain.begin(anyio.current_time(), timeout)
        cost.abandoned(drain.abandoned)
        self._ownership.revoked(partition, timeout, self._clock(), first=not self._drains)
        self._drains[partition] = _Begun(drain, anyio.Event(), anyio.CancelScope(deadline=drain.until), cost)
        if waiting:
            log.info(
                "%s: %s is given up; its next owner runs %d messages again that waited for a retry, an unblock or "
                "their dead letter. Positions: %s",
                self._name,
                partition.id,
                len(waiting),
                _named(waiting),
            )
        self._tap.revoking(partition, timeout)
        self._tap.abandoned(drain.abandoned)
        return True

    def ended(self, partition: Partition) -> None:
        """End the wait for the handlers of a partition, because the last handler has ended."""
        if partition in self._drains:
            self._drains[partition].ended.set()

    def lost(self, partition: Partition) -> None:
        """End the drain of a partition that the engine has lost. Idempotent."""
        if partition in self._drains:
            drain, ended, _, _ = self._drains[partition]
            drain.tell("lost", anyio.current_time())
            ended.set()

    def hasten(self, partition: Partition, timeout: float) -> None:
        """Shorten the time of a drain's handlers to ``timeout`` seconds, if they have more time left."""
        self._tap.hastened(partition, timeout)
        drain, _, wait, _ = self._drains[partition]
        drain.hasten(anyio.current_time(), timeout)
        wait.deadline = drain.until  # no effect in a later phase, which has left this scope

    async def drain(self, partition: Partition) -> None:
        """Wait for the handlers of a partition after ``begin``, settle it and release it.

        Handlers get the timeout to end. After their cancellation they get the grace. The last settlement gets
        ``SETTLE_WITHIN``, or the unused part of the timeout if that is longer. The release gets ``RELEASE_WITHIN``, or
        the remaining time of the lease if that is longer. ``Settings.longest_drain`` is the maximum for a partition
        without a lease.

        The drain ends early, without a release, when the partition is lost. Only the end of the run cancels the drain.
        """
        drain, ended, wait, cost = self._drains[partition]
        self._context.after()
        while drain.phase not in phases.OVER:
            if drain.phase == phases.ENDING:
                await self._end(drain, ended, wait)
            elif drain.phase == phases.CANCELLING:
                self._tap.abandoned(drain.abandoned)
                cost.abandoned(drain.abandoned)
                self._workers.cancel(partition)
                self._context.after()
                await self._end(drain, ended, anyio.CancelScope(deadline=drain.until))
            elif drain.phase == phases.SETTLING:
                self._report_unfinished(partition, drain.zombies)
                self._tap.drained(partition)
                await self._settle(drain, cost)
            else:
                self._settler.give_up(partition)
                drain.tell("released" if await self.release(partition) else "refused", anyio.current_time())
        if drain.phase == phases.HANDED_OVER:
            self._tap.revoked(partition)
            self._ownership.drained(partition, cost)
        elif drain.phase == phases.UNRELEASED and not self._context.overdue(partition):
            # A hand-over needs the confirmation of the source.
            self._context.lose(partition, "the source did not confirm its release")
        self._settler.unsettled.settled(partition)
        self._attempts.forget(partition)
        del self._drains[partition]
        if not self._drains:
            self._ownership.tell_drained(self._clock())
        self._context.after()

    async def _end(self, drain: PartitionDrain, ended: anyio.Event, wait: anyio.CancelScope) -> None:
        with wait:
            await ended.wait()
        drain.tell("ended" if ended.is_set() else "late", anyio.current_time())

    async def _settle(self, drain: PartitionDrain, cost: DrainCost) -> None:
        """Settle the finished messages of a fenced partition and store its attempts.

        Log a warning if the time is too short.
        """
        partition, within = drain.partition, drain.until - anyio.current_time()
        with anyio.CancelScope(deadline=drain.until):
            await self._settler.settle_all(partition)
            drain.tell("settled", anyio.current_time())
            await self._attempts.flush(partition)
            drain.tell("kept", anyio.current_time())
        if drain.phase not in (phases.SETTLING, phases.KEEPING):
            return
        if drain.left:
            cost.unsettled = drain.unsettled
            error = self._settler.unsettled.error(partition)
            log.warning(
                "%s: %s is given up with %d finished message(s) that were not settled within %.1f s; they run again%s",
                self._name,
                partition.id,
                cost.unsettled,
                within,
                f" ({error})" if error else "",
            )
        elif drain.phase == phases.KEEPING:
            log.warning(
                "%s: %s is given up with attempts that were not stored within %.1f s; their messages may be tried once "
                "more",
                self._name,
                partition.id,
                within,
            )
        drain.tell("late", anyio.current_time())

    async def release(self, partition: Partition) -> bool:
        """Release a partition to the source. Call this method after the partition was fenced.

        The source gets ``RELEASE_WITHIN`` seconds, or the remaining time of the lease if that is longer.

        Args:
            partition: The assignment.

        Returns:
            Whether the source has confirmed the release.
        """
        lease = 0.0 if partition.deadline == NEVER else partition.deadline - self._clock()
        within = max(RELEASE_WITHIN, lease)
        with anyio.move_on_after(within) as scope:
            try:
                await self._source.release(partition)
                return True
            except SourceError as error:
                why = str(error)
            except Exception as error:
                self._context.stop_because(error)
                return False
        if scope.cancelled_caught:
            why = f"no answer within {within:.1f} s"
        log.warning(
            "%s: the source did not confirm the release of %s, so its next owner may run finished messages again (%s)",
            self._name,
            partition.id,
            why,
        )
        return False

    def _report_unfinished(self, partition: Partition, zombies: list[Message]) -> None:
        if not zombies:
            return
        log.warning(
            "%s: %s is given up; %d handlers did not end within drain_timeout and grace, and their messages run again. "
            "Raise drain_timeout, or have handlers end sooner. Positions: %s",
            self._name,
            partition.id,
            len(zombies),
            _named([m.position for m in zombies]),
        )


def _named(positions: list[int]) -> str:
    more = ", …" if len(positions) > _NAMED_LIMIT else ""
    return ", ".join(str(position) for position in positions[:_NAMED_LIMIT]) + more
