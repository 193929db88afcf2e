"""Checks a member's durables every few seconds for faults that no delivery shows.

The checks find messages that the stream dropped before their delivery, and deleted durables.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Final

import nats.errors

from lanes.clock import monotonic
from lanes.cohort.owned import OwnedPartitions
from lanes.core.types import Message
from lanes.errors import LanesError, SourceError
from lanes.source import Retention
from lanes_jetstream.cohort.owned_partition import PulledPartition
from lanes_jetstream.wire import codes
from lanes_jetstream.wire.answers import ApiError
from lanes_jetstream.wire.connection import Connection, NoAnswer
from lanes_jetstream.wire.retention import StreamRetention
from lanes_jetstream.wire.stream import OutOfRange, read_stream

log = logging.getLogger("lanes.jetstream")

CHECK_INTERVAL: Final = 2.0
"""Seconds between two checks."""

_WANTED_FOR: Final = 5.0
"""Seconds after a call of ``retention_of`` during which the checks read the limits of the stream."""

_RETRY_DELAY: Final = 0.25
"""Seconds between two requests to a durable without a leader."""


@dataclass(eq=False, repr=False, kw_only=True)
class CohortWatch:
    """Runs the checks of the partitions of one member. Needs asyncio.

    Attributes:
        connection: Connection to the server.
        stream: Name of the stream.
        name: Name of the source, for the log.
        partitions: Partitions that the member owns.
        out_of_range: Policy for messages that the stream dropped; see ``JetStreamSource``.
        wake: Function that wakes the source, so that the source raises ``failure``.
        failure: Error that stops the source; None = no such error.
    """

    connection: Connection
    stream: str
    name: str
    partitions: OwnedPartitions[PulledPartition]
    out_of_range: OutOfRange
    wake: Callable[[], None]
    failure: SourceError | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._seen: dict[int, tuple[str, int]] = {}  # consumer and last delivery at the previous check
        self._tasks: set[asyncio.Task[None]] = set()
        self._retention = StreamRetention()
        self._retention_asked = -_WANTED_FOR

    def start(self) -> None:
        """Start the checks. The call does not block."""
        self._spawn(self._run())

    async def stop(self) -> None:
        """Stop all checks and requests. Idempotent."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def retention_of(self, message: Message) -> Retention | None:
        """Return the retention of a message by the last check. The next check reads the limits again.

        The call does not block.
        """
        self._retention_asked = monotonic()
        return self._retention.of(message)

    def resolve(self, owned: PulledPartition, consumer: str) -> None:
        """Release or take over a partition if no server answers for its consumer. The call does not block."""
        self._spawn(self._resolve(owned, consumer))

    # --- dropped messages

    async def _run(self) -> None:
        while self.failure is None:
            await asyncio.sleep(CHECK_INTERVAL)
            try:
                await self._check()
            except (LanesError, NoAnswer, nats.errors.Error, OSError, KeyError, TypeError, ValueError) as error:
                # The membership detects a missing stream, missing permissions and malformed answers.
                log.debug("%s: not checked: %s", self.name, error)

    async def _check(self) -> None:
        for owned in list(self.partitions.by_number.values()):
            try:
                await self._check_partition(owned)
            except ApiError as error:
                # A client has deleted this durable, or the durable has no leader. Continue with the other durables.
                log.debug("%s: partition %d not checked: %s", self.name, owned.number, error)
        if monotonic() - self._retention_asked < _WANTED_FOR:
            state = await read_stream(self.connection, self.stream)
            self._retention.note(state.limits, state.first, state.last)
        missed = [owned for owned in self.partitions.by_number.values() if owned.backlog.missed]
        if missed:
            await self._check_dropped(missed)

    async def _check_partition(self, owned: PulledPartition) -> None:
        """Ask the server for a durable's backlog if no recent delivery has reported the backlog."""
        pulls, backlog = owned.pulls, owned.backlog
        if pulls is None:
            return
        known = pulls.consumer, backlog.delivery
        before, self._seen[owned.number] = self._seen.get(owned.number), known
        # A durable with an open request delivers new messages at once, so an empty backlog needs no check.
        if before != known or (backlog.left == 0 and pulls.reserved and not backlog.doubted):
            return
        highest = owned.ledger.highest
        info = await self.connection.api(f"CONSUMER.INFO.{self.stream}.{pulls.consumer}")
        if owned.pulls is pulls:
            backlog.asked(int(info["delivered"]["consumer_seq"]), int(info["num_pending"]), highest)

    async def _check_dropped(self, missed_partitions: list[PulledPartition]) -> None:
        """Log messages that the stream removed undelivered, and set ``failure`` if ``out_of_range`` requires it."""
        state = await read_stream(self.connection, self.stream)
        for owned in missed_partitions:
            missed, owned.backlog.missed = owned.backlog.missed, 0
            if state.drops_single_messages:
                continue
            what = f"{missed} messages of cohort partition {owned.number} were"
            if state.first <= owned.backlog.reached + 1:
                log.warning(
                    "%s: %s deleted one by one or by subject before they were delivered; continuing",
                    self.name,
                    what,
                )
                continue
            fault = (
                f"stream {self.stream!r} begins at sequence {state.first}, so {what} dropped before they were "
                "delivered, because the stream was purged or its limits are below the backlog"
            )
            if self.out_of_range == "fail" and self.failure is None:
                self.failure = SourceError(
                    f"{fault}. Raise its limits, and start again with the remaining messages, or set "
                    'out_of_range="earliest" to continue always'
                )
                self.wake()
            log.warning("%s: %s", self.name, fault)

    # --- no answer

    async def _resolve(self, owned: PulledPartition, consumer: str) -> None:
        while self.partitions.by_number.get(owned.number) is owned:
            try:
                await self.connection.api(f"CONSUMER.INFO.{self.stream}.{consumer}")
            except (ApiError, NoAnswer) as error:
                if isinstance(error, NoAnswer) or error.temporary:
                    await asyncio.sleep(_RETRY_DELAY)
                    continue
                if error.err_code == codes.CONSUMER_NOT_FOUND:
                    self.partitions.lose(owned, f"consumer {consumer}: {error}")
                    return
            except SourceError as error:
                log.debug("%s: consumer %s: %s", self.name, consumer, error)
            # The takeover detects and reports any other fault.
            self.partitions.take_over(owned)
            return

    def _spawn(self, looking: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(looking)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
