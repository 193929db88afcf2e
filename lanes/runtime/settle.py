"""The settler, which reports finished messages to the broker, and restarts its timers of unfinished messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import anyio
import anyio.lowlevel

from lanes.core.types import NEVER, Partition, Settlement
from lanes.errors import is_retryable
from lanes.loops import Doorbell
from lanes.observe.health import Unsettled
from lanes.runtime.attempts import AttemptKeeper
from lanes.source import SettlementError, Source
from lanes.workers.context import RunContext

SETTLE_RETRY: Final = (0.05, 1.0)
"""Seconds before the repetition of a failed settlement: the first time, and the maximum."""


class Settler:
    """The settlements of one consumer. At most one settlement of a partition is in transit.

    For a source that settles each message individually, the settler makes the next call only after the previous call
    has ended. For a source that commits, finished messages enter the ledger at once, and the settler sends due commits
    concurrently.

    Args:
        context: The run.
        source: Source that settles.
        attempts: Attempts in the store; the settler drops the attempts of settled messages.
        commits: Whether the source commits positions.

    Attributes:
        idle: Whether a finished message requires a call of ``wake``.
        unsettled: The partitions whose settlements fail.
    """

    def __init__(self, context: RunContext, source: Source, attempts: AttemptKeeper, *, commits: bool) -> None:
        self.unsettled = Unsettled(context.name)
        self._engine = context.engine
        self._source = source
        self._context = context
        self._attempts = attempts
        self._clock = context.clock
        self._tap = context.tap
        self._commits = commits
        self.idle = False
        self._failed = False
        self._under_way = 0
        self._sends: dict[anyio.CancelScope, list[Settlement]] = {}
        self._left = anyio.Event()
        self._bell = Doorbell()
        self._lock = anyio.Lock(fast_acquire=True)

    async def run(self) -> None:
        """Settle finished messages in batches, until a cancellation or a permanent failure of the source."""
        async with anyio.create_task_group() as tasks:
            while not self._failed:
                await self._wait()
                if self._commits:
                    # A cancelled commit is due again at once. During a cancellation no commit may start.
                    await anyio.lowlevel.checkpoint_if_cancelled()
                    settlements = self._collect(everything=False)
                    if settlements:
                        tasks.start_soon(self._commit, settlements)
                else:
                    await self.settle_all()
            await anyio.sleep_forever()

    async def _wait(self) -> None:
        engine = self._engine
        if engine.dirty:
            return
        self.idle = True
        await self._bell.wait(engine.commit_at() - self._clock())
        self.idle = False

    def wake(self) -> None:
        """Schedule the settlement of a finished message.

        While the settler is not idle, the call takes almost no time.
        """
        if self.idle:
            self.idle = False
            self._bell.ring()

    async def settle_all(self, partition: Partition | None = None) -> None:
        """Settle every finished message, and wait for concurrent commits.

        The call repeats failed settlements until a permanent failure of the source.

        Args:
            partition: The assignment whose commits to wait for. ``None`` = all assignments.
        """
        pause = SETTLE_RETRY[0]
        alone = partition is not None and partition.commits is not None
        while not self._failed:
            failed = await self.settle()
            # A failure of another partition delays no drain.
            if partition in failed if alone else failed:
                await anyio.sleep(pause)
                pause = min(pause * 2, SETTLE_RETRY[1])
            elif self._sending(partition):
                if self._left.is_set():
                    # Several calls may wait for one event, so only an event that is set is replaced.
                    self._left = anyio.Event()
                await self._left.wait()
            elif not self._pending(partition):
                return

    async def settle_finished(self, partition: Partition) -> bool:
        """Settle the messages of a partition that have finished before the call.

        The call does not wait for messages that finish later, so it also ends for a busy partition. The call repeats
        failed settlements until the partition drains or is lost, or the source fails permanently.

        Args:
            partition: An assignment of a source that commits.

        Returns:
            Whether the messages are settled.
        """
        pause = SETTLE_RETRY[0]
        while not self._failed and self._engine.owns(partition) and not partition.draining:
            async with self._lock:
                # A commit in transit was collected earlier, so only one that begins here covers all messages.
                sending = self._sending(partition)
                if not sending and partition not in await self._send(self._collect(everything=True)):
                    return True
            if not sending:
                await anyio.sleep(pause)
                pause = min(pause * 2, SETTLE_RETRY[1])
                continue
            if self._left.is_set():
                self._left = anyio.Event()
            await self._left.wait()
        return False

    def _sending(self, partition: Partition | None) -> bool:
        if partition is None or partition.commits is None:
            return self._under_way > 0
        return self._engine.owns(partition) and partition.commits.sending is not None

    def _pending(self, partition: Partition | None) -> bool:
        if partition is None or partition.commits is None:
            return False
        return self._engine.owns(partition) and partition.commits.pending

    async def settle(self) -> Sequence[Partition]:
        """Settle every finished message, and return the partitions whose settlements have failed. Idempotent."""
        async with self._lock:
            settlements = self._collect(everything=True)
            return await self._send(settlements) if settlements else ()

    def _collect(self, *, everything: bool) -> list[Settlement]:
        if self._commits:
            for partition in self._engine.dirty:
                self._tap.completed(partition, len(partition.finished))
        settlements = self._engine.collect(self._clock(), everything=everything)
        if self._commits:
            # Finished messages have left the bounds, so the source may have room now.
            self._context.after()
            self._context.floors_moved()
        return settlements

    async def _commit(self, settlements: list[Settlement]) -> None:
        """Send commits that are due; a failed commit is due again after ``SETTLE_RETRY[1]`` seconds."""
        self._under_way += 1
        try:
            await self._send(settlements)
        finally:
            self._under_way -= 1
            self._left.set()

    def give_up(self, partition: Partition) -> None:
        """Cancel a running commit of a partition, because the commit could replace a commit of the next owner.

        The settler repeats the commits of other partitions in the same call. The call does not block. Idempotent.
        """
        for scope, settlements in self._sends.items():
            if any(settlement.partition is partition for settlement in settlements):
                scope.cancel()

    async def _send(self, settlements: list[Settlement]) -> Sequence[Partition]:
        """Send settlements, and return the partitions whose settlements have failed."""
        if not self._commits:
            return await self._try_to_send(settlements)
        settlements = self._still_ours(settlements)
        if not settlements:
            return ()
        with anyio.CancelScope() as scope:
            self._sends[scope] = settlements
            try:
                return await self._try_to_send(settlements)
            finally:
                del self._sends[scope]
                # Messages that finished meanwhile had to wait for this commit.
                self.wake()
        return [settlement.partition for settlement in settlements]

    def _still_ours(self, settlements: list[Settlement]) -> list[Settlement]:
        """Return the settlements whose partition the consumer has not given up since their collection."""
        gone = []
        for settlement in settlements:
            commits = settlement.partition.commits
            if not self._engine.owns(settlement.partition) or (commits is not None and commits.over):
                gone.append(settlement)
        if not gone:
            return settlements
        self._engine.unsettled(gone)
        return [settlement for settlement in settlements if settlement not in gone]

    async def _try_to_send(self, settlements: list[Settlement]) -> Sequence[Partition]:
        engine, tap, now = self._engine, self._tap, self._clock()
        late = [settlement for settlement in settlements if now >= settlement.partition.deadline]
        if late:
            for settlement in late:
                self._context.overdue(settlement.partition)
            settlements = [settlement for settlement in settlements if settlement not in late]
            if not settlements:
                return ()
        tap.settling(settlements, now)
        failed: list[Settlement] = []
        try:
            await self._source.settle(settlements)
        except SettlementError as error:
            # An error that names no partition of this call may concern any of them.
            named = [settlement for settlement in settlements if settlement.partition in error.partitions]
            failed = named or settlements
            settlements = [settlement for settlement in settlements if settlement not in failed]
            self._fail(failed, error)
        except Exception as error:
            self._fail(settlements, error)
            return [settlement.partition for settlement in settlements]
        except BaseException:
            tap.unsettled(settlements)
            engine.unsettled(settlements)
            raise
        tap.settled(settlements)
        engine.settled(settlements)
        self._attempts.settled(settlements)
        if self.unsettled.partitions:
            for settlement in settlements:
                self.unsettled.settled(settlement.partition)
        if self._commits:
            self._context.floors_moved()
        self._context.after()
        return [settlement.partition for settlement in failed]

    def _fail(self, settlements: list[Settlement], error: Exception) -> None:
        """Schedule the repetition of failed settlements, or stop the run."""
        self._tap.unsettled(settlements)
        self._engine.unsettled(settlements, again_at=self._clock() + SETTLE_RETRY[1])
        if is_retryable(error, unknown=False):
            owned = [each.partition for each in settlements if self._engine.owns(each.partition)]
            self.unsettled.failed(owned, error, self._clock())
        else:
            self._failed = True
            self._context.stop_because(error)

    async def keep_alive(self, interval: float) -> None:
        """Extend each unsettled message at least every ``interval`` seconds, until cancelled."""
        # Every half interval, messages older than half an interval are extended. Younger messages cost nothing.
        period = interval / 2
        while True:
            await anyio.sleep(period)
            for partition in list(self._engine.partitions.values()):
                if partition.deadline != NEVER:
                    self._context.overdue(partition)
            messages = self._engine.in_flight_since(self._clock() - period)
            if messages:
                await self._source.extend(messages)
                self._tap.extended(messages)
