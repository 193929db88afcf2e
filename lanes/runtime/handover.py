"""The hand-over of partitions. One task for each partition performs the steps that ``lanes.core.drain`` decides."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import anyio

from lanes.config import RELEASE_WITHIN, SETTLE_WITHIN
from lanes.core import drain as phases
from lanes.core.drain import Limits, PartitionDrain
from lanes.core.lane import PUBLISH_HELD
from lanes.core.types import NEVER, Message, Parting, Partition
from lanes.errors import SourceError
from lanes.observe.cut_off import CutOffLog, named, running
from lanes.observe.health import WARNED_EVERY
from lanes.observe.ownership import UNRELEASED, DrainCost, OwnershipLog
from lanes.runtime.attempts import AttemptKeeper
from lanes.runtime.settle import SETTLE_RETRY, Settler
from lanes.source import Dividing, Source
from lanes.workers.context import RunContext, Workers

log = logging.getLogger("lanes")

_SETTLE_LIMIT: Final = 30.0
"""Seconds for the last settlement of a drain without a limit. The next owner waits for the release anyway."""

_TOGETHER: Final = 1.0
"""Seconds between the limits of two drains whose late handlers share a log line."""


@dataclass(slots=True)
class _Begun:
    """A drain that has begun.

    Attributes:
        drain: The drain.
        ended: Event that is set when the last handler has ended, or the partition is lost.
        wait: Cancel scope of the wait for running handlers.
        cost: The messages that the drain affects, for the log.
        timeout: The shortest limit that a call has set for the running handlers, in seconds.
    """

    drain: PartitionDrain
    ended: anyio.Event
    wait: anyio.CancelScope
    cost: DrainCost
    timeout: float


class Handover:
    """The drains of one consumer.

    Args:
        context: The run.
        source: Source that releases the partitions.
        workers: Workers that cancel the handlers.
        settler: Settler of the finished messages.
        attempts: Attempts to store before a release.
        ownership: The log lines about partitions.
        cut_off: The log lines about handlers that a drain cancels.
        grace: Maximum number of seconds for cancelled handlers to end.
        close_prefix: See ``Ownership.drain``. A drain that begins during the confirmation after a freeze does not close
            the prefix, because messages of the prefix may not start.
    """

    def __init__(
        self,
        context: RunContext,
        source: Source,
        workers: Workers,
        settler: Settler,
        attempts: AttemptKeeper,
        ownership: OwnershipLog,
        cut_off: CutOffLog,
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
        self._cut_off = cut_off
        self._clock = context.clock
        self._tap = context.tap
        self._grace = grace
        self._name = context.name
        self._close_prefix = close_prefix
        self._drains: dict[Partition, _Begun] = {}
        # The costs of partitions whose handlers were interrupted before the drain.
        self._interrupted: dict[Partition, DrainCost] = {}
        self._releasing = 0

    def interrupting(self, partition: Partition) -> None:
        """Begin to count the messages that a drain affects, because a handler stops the run. Idempotent."""
        if partition.live and partition not in self._drains and partition not in self._interrupted:
            self._interrupted[partition] = DrainCost(partition)

    def abandoned(self, messages: Sequence[Message]) -> None:
        """Count messages of one partition that the engine abandoned, because a handler was interrupted."""
        partition = messages[0].partition
        begun = self._drains.get(partition)
        cost = self._interrupted.get(partition) if begun is None else begun.cost
        if cost is not None:
            cost.abandoned(messages)

    def begin(self, partition: Partition, timeout: float) -> bool:
        """Begin the drain of a partition. The call does not block.

        Args:
            partition: The assignment.
            timeout: Maximum number of seconds for running handlers to end.

        Returns:
            Whether the drain has begun, so that the caller must call ``drain``. False = the partition was already
            draining.
        """
        if partition in self._drains:
            return False
        # The drain sends unconfirmed outputs again, so their messages are not given up.
        stopped = [lane.head for lane in self._engine.stopped_lanes() if lane.head.state != PUBLISH_HELD]
        waiting = [head for head in stopped if head.partition is partition]
        limits = Limits(self._grace, SETTLE_WITHIN, _SETTLE_LIMIT)
        freezes = self._context.freezes
        held = freezes is not None and freezes.held
        drain = PartitionDrain(self._engine, partition, limits, close_prefix=self._close_prefix and not held)
        counted = self._interrupted.pop(partition, None)
        cost = DrainCost(partition) if counted is None else counted
        drain.begin(anyio.current_time(), timeout)
        cost.abandoned(drain.abandoned)
        self._ownership.revoked(partition, timeout, self._clock(), first=not self._drains)
        self._drains[partition] = _Begun(drain, anyio.Event(), anyio.CancelScope(deadline=drain.until), cost, timeout)
        if waiting:
            log.info(
                "%s: %s is given up; its next owner runs %d message(s) again that waited for a retry, an unblock or "
                "their dead letter. Positions: %s",
                self._name,
                partition.id,
                len(waiting),
                named(waiting),
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
        self._interrupted.pop(partition, None)
        if partition in self._drains:
            begun = self._drains[partition]
            begun.drain.tell("lost", anyio.current_time())
            begun.ended.set()

    def hasten(self, partition: Partition, timeout: float) -> None:
        """Reduce the remaining time of a drain's handlers to at most ``timeout`` seconds."""
        self._tap.hastened(partition, timeout)
        begun = self._drains[partition]
        if begun.drain.phase == phases.ENDING:
            begun.timeout = min(begun.timeout, timeout)
        begun.drain.hasten(anyio.current_time(), timeout)
        begun.wait.deadline = begun.drain.until  # no effect in a later phase, which has left this scope

    async def drain(self, partition: Partition) -> None:
        """Wait for the handlers of a partition after ``begin``, settle its messages, and release the partition.

        The drain first waits for the handlers until the timeout. The drain then cancels the handlers, and waits until
        the end of the grace. The last settlement may take ``SETTLE_WITHIN``, or the unused part of the timeout if that
        is longer. Without a timeout, the last settlement may take 30 s. The release may take ``RELEASE_WITHIN``, or the
        remaining time of the lease if that is longer. ``Settings.longest_drain`` is the maximum for a finite timeout
        and a partition without a lease.

        The drain ends early, without a release, when the partition is lost. Only the end of the run cancels the drain.
        """
        begun = self._drains[partition]
        drain, cost = begun.drain, begun.cost
        self._context.after()
        while drain.phase not in phases.OVER:
            if drain.phase == phases.ENDING:
                await self._end(begun, begun.wait)
            elif drain.phase == phases.CANCELLING:
                self._tap.abandoned(drain.abandoned)
                cost.abandoned(drain.abandoned)
                self._workers.cancel(partition)
                # The call has taken back the messages that waited for a thread.
                late = running(partition)
                self._context.after()
                await self._end(begun, anyio.CancelScope(deadline=drain.until))
                self._cut_off.note(late, drain.zombies, begun.timeout)
            elif drain.phase == phases.SETTLING:
                self._tell_cut_off()
                self._unpublished(drain, cost)
                self._tap.drained(partition)
                await self._settle(drain, cost)
            else:
                self._settler.give_up(partition)
                drain.tell("released" if await self._release(partition) else "refused", anyio.current_time())
        if drain.phase == phases.HANDED_OVER:
            self._tap.revoked(partition)
            self._ownership.drained(partition, cost)
        elif drain.phase == phases.UNRELEASED and not self._context.overdue(partition):
            # A hand-over needs the confirmation of the source.
            self._context.lose(partition, UNRELEASED)
        self._tell_unreleased()
        self._settler.unsettled.settled(partition)
        self._attempts.forget(partition)
        del self._drains[partition]
        self._tell_cut_off()
        if not self._drains:
            self._ownership.tell_drained(self._clock())
        self._context.after()

    def _unpublished(self, drain: PartitionDrain, cost: DrainCost) -> None:
        """Report the messages whose outputs were not confirmed before the fence."""
        if not drain.abandoned:
            return
        log.warning(
            "%s: the outputs of %d message(s) of %s were not confirmed before its hand-over; its next owner runs the "
            "messages again. Positions: %s",
            self._name,
            len(drain.abandoned),
            drain.partition.id,
            named(drain.abandoned),
        )
        self._tap.abandoned(drain.abandoned)
        cost.abandoned(drain.abandoned)

    async def _end(self, begun: _Begun, wait: anyio.CancelScope) -> None:
        with wait:
            await begun.ended.wait()
        begun.drain.tell("ended" if begun.ended.is_set() else "late", anyio.current_time())

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
                "%s: %s is handed over with %d finished message(s) that were not settled within %.1f s%s; the next "
                "owner runs these messages again",
                self._name,
                partition.id,
                cost.unsettled,
                within,
                f" ({error})" if error else "",
            )
        elif drain.phase == phases.KEEPING:
            log.warning(
                "%s: %s is handed over although attempts were not stored within %.1f s; their messages may be tried "
                "once more",
                self._name,
                partition.id,
                within,
            )
        drain.tell("late", anyio.current_time())

    async def hand_over(self, partition: Partition, parting: Parting) -> None:
        """Settle a partition, and hand over one part to its next owner; this consumer keeps the other parts.

        The task repeats a failed call until the partition drains or is lost.

        Args:
            partition: The assignment.
            parting: The part to hand over, which has no running handler.
        """
        dividing: object = self._source
        assert isinstance(dividing, Dividing), "only a source that divides partitions revokes a part"
        # The other messages of the partition go on, so a wait until nothing is left would not end.
        if not await self._settler.settle_finished(partition):
            return
        await self._attempts.flush(partition, [message.position for message in parting.given_up])
        # The floor passes these messages after the hand-over, and their entries belong to the next owner.
        self._attempts.part(partition, parting.given_up)
        pause, warn_at = SETTLE_RETRY[0], self._clock()
        while partition.live and not partition.draining:
            try:
                await dividing.hand_over(partition, [parting.part])
            except SourceError as error:
                if not error.retryable:
                    raise
                if self._clock() >= warn_at:
                    warn_at = self._clock() + WARNED_EVERY
                    log.warning("%s: a part of %s is not handed over (%s); retrying", self._name, partition.id, error)
                await anyio.sleep(pause)
                pause = min(pause * 2, SETTLE_RETRY[1])
                continue
            self._engine.parted(partition, parting, self._clock())
            self._settler.wake()
            self._context.after()
            return

    async def release(self, partition: Partition) -> None:
        """Release a partition that the engine does not know; see ``drain``.

        Args:
            partition: The assignment.
        """
        await self._release(partition)
        self._tell_unreleased()

    async def _release(self, partition: Partition) -> bool:
        """Release a partition to the source. The engine has fenced the partition, or does not know it.

        The source may take ``RELEASE_WITHIN`` seconds, or the remaining time of the lease if that is longer.

        Args:
            partition: The assignment.

        Returns:
            Whether the source has confirmed the release.
        """
        lease = 0.0 if partition.deadline == NEVER else partition.deadline - self._clock()
        within = max(RELEASE_WITHIN, lease)
        self._releasing += 1
        try:
            with anyio.move_on_after(within) as scope:
                try:
                    await self._source.release(partition)
                    return True
                except SourceError as error:
                    why = str(error)
                except Exception as error:
                    self._context.stop_because(error)
                    return False
        finally:
            self._releasing -= 1
        if scope.cancelled_caught:
            why = f"no answer within {within:.1f} s"
        self._ownership.unreleased(partition, why)
        return False

    def _tell_unreleased(self) -> None:
        """Log the releases that the source did not confirm.

        The caller makes this call when the last release has ended.
        """
        if not self._releasing:
            self._ownership.tell_unreleased()

    def _tell_cut_off(self) -> None:
        """Log the handlers that drains have cancelled, unless another drain cancels handlers now or soon."""
        soon = anyio.current_time() + _TOGETHER
        for drain in [begun.drain for begun in self._drains.values()]:
            if drain.phase == phases.CANCELLING or (drain.phase == phases.ENDING and drain.until <= soon):
                return
        self._cut_off.tell()
