"""Giving partitions up: drain, fence, settle, release, one task a partition."""

from __future__ import annotations

import logging
from typing import Final, Protocol

import anyio

from lanes.clock import Clock
from lanes.config import RELEASE_WITHIN, SETTLE_WITHIN
from lanes.core.engine import Engine
from lanes.core.types import NEVER, Message, Partition
from lanes.errors import SourceError
from lanes.remembering import Remembering
from lanes.settling import Settler
from lanes.shell import Shell
from lanes.source import Source
from lanes.tap import Tap
from lanes.workers import Workforce

log = logging.getLogger("lanes")

_SETTLE_LIMIT: Final = 30.0
"""Seconds that the last settlement of a drain without a limit gets: nobody takes the partition before its release."""

_NAMED_LIMIT: Final = 10
"""Positions that one log line names at most."""


class Around(Shell, Protocol):
    """What giving up needs of the run around it."""

    def lose(self, partition: Partition, reason: str) -> None:
        """Nothing of a partition counts any more, from this call on. Idempotent."""


class Handover:
    """The drains of one consumer. ``grace``: seconds a cancelled handler gets to end."""

    def __init__(
        self,
        engine: Engine,
        source: Source,
        workers: Workforce,
        settler: Settler,
        shell: Around,
        remembering: Remembering,
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
        self._shell = shell
        self._remembering = remembering
        self._clock = clock
        self._tap = tap
        self._grace = grace
        self._name = name
        self._close_prefix = close_prefix
        self._drained: dict[Partition, anyio.Event] = {}
        self._waits: dict[Partition, anyio.CancelScope] = {}
        self._limits: dict[Partition, float] = {}

    def begin(self, partition: Partition, timeout: float) -> bool:
        """Start nothing more of a partition, from this call on; False when it drains already.

        ``timeout``: the seconds that ``drain`` will be given.

        Call ``drain`` when True. Does not block.
        """
        if partition in self._drained:
            return False
        self._drained[partition] = anyio.Event()
        interrupted = partition.draining
        waiting = [lane.head.position for lane in self._engine.lanes() if lane.head.partition is partition]
        abandoned = self._engine.drain(partition, close_prefix=self._close_prefix)
        if interrupted and not partition.unended:
            # A handler that was interrupted has drained it before, and Drained has come and gone.
            self._drained[partition].set()
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
        self._tap.abandoned(abandoned)
        return True

    def drained(self, partition: Partition) -> None:
        """Nothing of it runs any more."""
        if partition in self._drained:
            self._drained[partition].set()

    def hasten(self, partition: Partition, timeout: float) -> None:
        """Let handlers of a partition that drains already end within ``timeout`` seconds, if that is sooner."""
        self._tap.hastened(partition, timeout)
        wait = self._waits.get(partition)
        if wait is not None:
            wait.deadline = min(wait.deadline, anyio.current_time() + timeout)
        elif partition in self._drained:
            # Its drain has not run yet, or is past waiting.
            self._limits[partition] = min(self._limits.get(partition, timeout), timeout)

    async def drain(self, partition: Partition, timeout: float) -> None:
        """Let a partition end that ``begin`` was called for, settle it and release it.

        Takes at most, in seconds: ``timeout``, while handlers end; the grace, while they are cancelled;
        ``SETTLE_WITHIN``, or what is left of the timeout, for what has finished; ``RELEASE_WITHIN``, or what is left of
        the lease, for the source. ``Settings.longest_drain`` is the sum.

        Ends early, without a release, when the partition is lost meanwhile. Cancelled only with the whole run.
        """
        engine, drained = self._engine, self._drained[partition]
        released = False
        self._shell.after()
        with anyio.move_on_after(min(timeout, self._limits.pop(partition, timeout))) as wait:
            self._waits[partition] = wait
            await drained.wait()
        del self._waits[partition]
        if not drained.is_set():
            # Also of what was to close the prefix: nothing starts in the grace, where nobody would cancel it.
            self._tap.abandoned(engine.stop_closing(partition))
            self._workers.cancel(partition)
            self._shell.after()
            with anyio.move_on_after(self._grace):
                await drained.wait()
        if self._engine.owns(partition):
            self._report_unfinished(partition, engine.fence(partition))
            self._tap.drained(partition)
            left = wait.deadline - anyio.current_time()
            await self._settle(partition, max(SETTLE_WITHIN, left if left < NEVER else _SETTLE_LIMIT))
            # What could not be settled in time runs again; whoever waits for the partition waits no longer, and may
            # commit before the release has returned: no commit of ours may come after that one.
            if partition.commits is not None:
                partition.commits.over = True
                self._settler.give_up(partition)
            if self._engine.owns(partition):
                released = await self.release(partition)
        if self._engine.owns(partition):
            if released:
                engine.release(partition)
                self._tap.revoked(partition)
            elif not self._shell.overdue(partition):
                # Only the source's word makes it a hand-over.
                self._shell.lose(partition, "it was not released in order")
        self._settler.unsettled.settled(partition)
        self._remembering.forget(partition)
        del self._drained[partition]
        self._limits.pop(partition, None)
        self._shell.after()

    async def _settle(self, partition: Partition, within: float) -> None:
        """Settle what has finished of a fenced partition, and write what is kept of it, as far as that can be done in
        time; says what is left."""
        settled = False
        with anyio.move_on_after(within) as scope:
            await self._settler.settle_all(partition)
            settled = True
            await self._remembering.flush(partition)
        if not self._engine.owns(partition):
            return
        if scope.cancelled_caught and self._settler.left(partition):
            error = self._settler.unsettled.error(partition)
            log.warning(
                "%s: %s is given up, and not all that has finished of it could be settled within %.1f s: the rest runs "
                "again%s",
                self._name,
                partition.id,
                within,
                f" ({error})" if error else "",
            )
        elif settled and scope.cancelled_caught:
            log.warning(
                "%s: %s is given up, and not all attempts of it could be kept within %.1f s: those messages may be "
                "tried once more",
                self._name,
                partition.id,
                within,
            )

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
                self._shell.stop_because(error)
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
