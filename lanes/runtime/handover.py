"""Giving partitions up, one task a partition: ``lanes.core.drain`` decides, and what it asks for is performed here."""

from __future__ import annotations

import logging
from typing import Final, NamedTuple

import anyio

from lanes.clock import Clock
from lanes.config import RELEASE_WITHIN, SETTLE_WITHIN
from lanes.core import drain as phases
from lanes.core.drain import Limits, PartitionDrain
from lanes.core.engine import Engine
from lanes.core.types import NEVER, Message, Partition
from lanes.errors import SourceError
from lanes.observe.tap import Tap
from lanes.runtime.attempts import AttemptKeeper
from lanes.runtime.settle import Settler
from lanes.source import Source
from lanes.workers.context import RunContext, Workers

log = logging.getLogger("lanes")

_SETTLE_LIMIT: Final = 30.0
"""Seconds that the last settlement of a drain without a limit gets: nobody takes the partition before its release."""

_NAMED_LIMIT: Final = 10
"""Positions that one log line names at most."""


class _Begun(NamedTuple):
    """A drain that has begun. ``ended``: nothing of it runs any more, or it is lost; ``wait``: in which its handlers
    may end."""

    drain: PartitionDrain
    ended: anyio.Event
    wait: anyio.CancelScope


class Handover:
    """The drains of one consumer. ``grace``: seconds a cancelled handler gets to end."""

    def __init__(
        self,
        engine: Engine,
        source: Source,
        workers: Workers,
        settler: Settler,
        context: RunContext,
        attempts: AttemptKeeper,
        clock: Clock,
        tap: Tap,
        grace: float,
        name: str,
        *,
        close_prefix: bool,
    ) -> None:
        self._engine = engine
        self._source = source
        self._workers = workers
        self._settler = settler
        self._context = context
        self._attempts = attempts
        self._clock = clock
        self._tap = tap
        self._grace = grace
        self._name = name
        self._close_prefix = close_prefix
        self._drains: dict[Partition, _Begun] = {}

    def begin(self, partition: Partition, timeout: float) -> bool:
        """Start nothing more of a partition, from this call on; False when it drains already.

        ``timeout``: seconds that its handlers get to end.

        Call ``drain`` when True. Does not block.
        """
        if partition in self._drains:
            return False
        waiting = [lane.head.position for lane in self._engine.stopped_lanes() if lane.head.partition is partition]
        limits = Limits(self._grace, SETTLE_WITHIN, _SETTLE_LIMIT)
        drain = PartitionDrain(self._engine, partition, limits, close_prefix=self._close_prefix)
        drain.begin(anyio.current_time(), timeout)
        self._drains[partition] = _Begun(drain, anyio.Event(), anyio.CancelScope(deadline=drain.until))
        if waiting:
            log.info(
                "%s: %s: %d messages that waited for a retry, an unblock or their dead letter run again at the next "
                "owner. Positions: %s",
                self._name,
                partition.id,
                len(waiting),
                _named(waiting),
            )
        self._tap.revoking(partition, timeout)
        self._tap.abandoned(drain.abandoned)
        return True

    def ended(self, partition: Partition) -> None:
        """Nothing of it runs any more."""
        if partition in self._drains:
            self._drains[partition].ended.set()

    def lost(self, partition: Partition) -> None:
        """The engine has lost it: a drain of it has nothing more to wait for. Idempotent."""
        if partition in self._drains:
            drain, ended, _ = self._drains[partition]
            drain.tell("lost", anyio.current_time())
            ended.set()

    def hasten(self, partition: Partition, timeout: float) -> None:
        """Let handlers of a partition that drains already end within ``timeout`` seconds, if that is sooner."""
        self._tap.hastened(partition, timeout)
        drain, _, wait = self._drains[partition]
        drain.hasten(anyio.current_time(), timeout)
        wait.deadline = drain.until  # that of a later phase matters to nobody: this scope is left by then

    async def drain(self, partition: Partition) -> None:
        """Let a partition end that ``begin`` was called for, settle it and release it.

        Takes at most, in seconds: the timeout, while handlers end; the grace, while they are cancelled;
        ``SETTLE_WITHIN``, or what is left of the timeout, for what has finished; ``RELEASE_WITHIN``, or what is left of
        the lease, for the source. ``Settings.longest_drain`` is the sum.

        Ends early, without a release, when the partition is lost meanwhile. Cancelled only with the whole run.
        """
        drain, ended, wait = self._drains[partition]
        self._context.after()
        while drain.phase not in phases.OVER:
            if drain.phase == phases.ENDING:
                await self._end(drain, ended, wait)
            elif drain.phase == phases.CANCELLING:
                self._tap.abandoned(drain.abandoned)
                self._workers.cancel(partition)
                self._context.after()
                await self._end(drain, ended, anyio.CancelScope(deadline=drain.until))
            elif drain.phase == phases.SETTLING:
                self._report_unfinished(partition, drain.zombies)
                self._tap.drained(partition)
                await self._settle(drain)
            else:
                self._settler.give_up(partition)
                drain.tell("released" if await self.release(partition) else "refused", anyio.current_time())
        if drain.phase == phases.HANDED_OVER:
            self._tap.revoked(partition)
        elif drain.phase == phases.UNRELEASED and not self._context.overdue(partition):
            # Only the source's word makes it a hand-over.
            self._context.lose(partition, "it was not released in order")
        self._settler.unsettled.settled(partition)
        self._attempts.forget(partition)
        del self._drains[partition]
        self._context.after()

    async def _end(self, drain: PartitionDrain, ended: anyio.Event, wait: anyio.CancelScope) -> None:
        with wait:
            await ended.wait()
        drain.tell("ended" if ended.is_set() else "late", anyio.current_time())

    async def _settle(self, drain: PartitionDrain) -> None:
        """Settle what has finished of a fenced partition, and write what is kept of it, as far as that can be done in
        time; says what is left."""
        partition, within = drain.partition, drain.until - anyio.current_time()
        with anyio.CancelScope(deadline=drain.until):
            await self._settler.settle_all(partition)
            drain.tell("settled", anyio.current_time())
            await self._attempts.flush(partition)
            drain.tell("kept", anyio.current_time())
        if drain.phase not in (phases.SETTLING, phases.KEEPING):
            return
        if drain.left:
            error = self._settler.unsettled.error(partition)
            log.warning(
                "%s: %s is given up, and not all that has finished of it could be settled within %.1f s: the rest runs "
                "again%s",
                self._name,
                partition.id,
                within,
                f" ({error})" if error else "",
            )
        elif drain.phase == phases.KEEPING:
            log.warning(
                "%s: %s is given up, and not all attempts of it could be kept within %.1f s: those messages may be "
                "tried once more",
                self._name,
                partition.id,
                within,
            )
        drain.tell("late", anyio.current_time())

    async def release(self, partition: Partition) -> bool:
        """Hand a partition back to the source, within ``RELEASE_WITHIN`` seconds, or for as long as its lease holds;
        nothing of it is handled any more. Whether the source says that it is handed over."""
        lease = 0.0 if partition.deadline == NEVER else partition.deadline - self._clock()
        within = max(RELEASE_WITHIN, lease)
        with anyio.move_on_after(within) as scope:
            try:
                await self._source.release(partition)
                return True
            except SourceError as error:
                log.warning(
                    "%s: %s not released in order, what had finished may come again at its next owner: %s",
                    self._name,
                    partition.id,
                    error,
                )
            except Exception as error:
                self._context.stop_because(error)
        if scope.cancelled_caught:
            log.warning(
                "%s: %s not released in order, what had finished may come again at its next owner: the source did not "
                "release it within %.1f s",
                self._name,
                partition.id,
                within,
            )
        return False

    def _report_unfinished(self, partition: Partition, zombies: list[Message]) -> None:
        if not zombies:
            return
        log.warning(
            "%s: %s given up while %d handlers did not end within drain_timeout and grace; they will not count "
            "and run again: raise drain_timeout, or have handlers end sooner. Positions: %s",
            self._name,
            partition.id,
            len(zombies),
            _named([m.position for m in zombies]),
        )


def _named(positions: list[int]) -> str:
    more = ", …" if len(positions) > _NAMED_LIMIT else ""
    return ", ".join(str(position) for position in positions[:_NAMED_LIMIT]) + more
