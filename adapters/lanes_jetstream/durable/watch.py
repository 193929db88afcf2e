"""Checks the stream and the consumer every few seconds for faults that no delivery shows.

The checks find a replaced or purged stream, and lost messages of a stream, while the connection holds. The checks find
a deleted or changed consumer, and another process on a consumer that keeps an order. The checks also measure the lag.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import nats.errors

from lanes.clock import monotonic
from lanes.errors import SourceError
from lanes_jetstream.durable.consumer import (
    ConsumerSnapshot,
    ConsumerState,
    DurableConsumer,
    filtered,
)
from lanes_jetstream.wire.answers import ApiError
from lanes_jetstream.wire.connection import Connection, Denials, NoAnswer, NotPermitted
from lanes_jetstream.wire.pull_requests import PULL_EXPIRES
from lanes_jetstream.wire.retention import StreamRetention
from lanes_jetstream.wire.stream import OutOfRange, StreamState

log = logging.getLogger("lanes.jetstream")

CHECK_INTERVAL: Final = 2.0
"""Seconds between two checks."""

SUSPICION: Final = PULL_EXPIRES + 1.0
"""Seconds after which unexpected waiting requests count as requests of another process. Requests of a dead connection
end earlier.
"""


SHRUNK_AGAIN_WITHIN: Final = 60.0
"""Seconds within which a second shrunk ack_wait proves that another process runs. After this time, a second shrunk
ack_wait may come from another dead process.
"""


class ReadState(NamedTuple):
    """The progress of a source at one time.

    Attributes:
        active: Whether the newest takeover is complete.
        takeovers: Number of takeovers that have begun.
        highest: Highest received sequence.
        delivery: Last received delivery number; None = no delivery since the takeover.
        outstanding: Sum of two numbers: messages that open pull requests may still deliver, and arrived messages that
            wait for ``receive``.
        open_requests: Largest number of pull requests that may be open.
    """

    active: bool
    takeovers: int
    highest: int
    delivery: int | None
    outstanding: int
    open_requests: int


@dataclass(eq=False, repr=False, kw_only=True)
class DurableWatch:
    """Runs the checks of one source. Needs asyncio.

    Attributes:
        connection: Connection to the server.
        durable: The consumer.
        name: Name of the source, for errors and the log.
        out_of_range: Policy for messages that the stream dropped; see ``JetStreamSource``.
        alone: Whether no other process may pull the consumer.
        failure: Error that stops the source; None = no such error.
        lag: Number of unacknowledged and undelivered messages; None = unknown.
        waiting: Sum of undelivered messages, missing deliveries, and unacknowledged messages during a takeover; None =
            unknown. The value is 0 while an operator pauses the consumer.
        limit_reached: Reason why the server delivers no message to a shared consumer: a reached limit of unacknowledged
            messages; "" = the limit is not reached.
        retention: Retention of the stream.
    """

    connection: Connection
    durable: DurableConsumer
    name: str
    out_of_range: OutOfRange
    alone: bool
    failure: SourceError | None = field(default=None, init=False)
    lag: int | None = field(default=None, init=False)
    waiting: int | None = field(default=None, init=False)
    limit_reached: str = field(default="", init=False)
    retention: StreamRetention = field(default_factory=StreamRetention, init=False)

    def __post_init__(self) -> None:
        self._suspected: float | None = None
        self._interrupt: Callable[[str], None]
        # Number of takeovers when a check first found a shrunk ack_wait, and the time of this check.
        self._shrunk_after: int | None = None
        self._shrunk_at = 0.0
        self._before: ConsumerState | None = None
        self._takeovers = -1
        self._base = 0
        # Highest sequence that the server had delivered to earlier processes when this process started.
        self._delivered_before = 0
        self._denials: Denials
        self._skipped = 0
        self._task: asyncio.Task[None] | None = None

    def start(
        self, read: Callable[[], ReadState], ours: Callable[[str], bool], interrupt: Callable[[str], None]
    ) -> None:
        """Start the checks. The call does not block.

        Args:
            read: Function that returns the progress of the source.
            ours: Function that returns whether the source needs a subject that the server denied.
            interrupt: Function that takes a reason, and makes the source take over again.
        """
        self._interrupt = interrupt
        self._denials = Denials(self.connection.client, ours)
        self._task = asyncio.create_task(self._run(read))

    async def stop(self) -> None:
        """Stop checking. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def check_dropped(self, stream: StreamState, state: ConsumerState, highest: int) -> None:
        """Report messages that the stream dropped before their delivery: raise ``SourceError`` or log a warning.

        Only a takeover may call this method, because during a takeover no message above ``highest`` is in transit.
        """
        self._base = state.deliveries
        if not highest:
            self._delivered_before = max(self._delivered_before, state.highest)
        self._check_first(stream, state, highest)

    def _check_first(self, stream: StreamState, state: ConsumerState, highest: int) -> None:
        # A purge moves the server's delivery position past the dropped messages, but not this process's highest
        # sequence.
        known = self.alone and highest > 0
        if not known and stream.retention != "limits":
            # After a kill, the server may have an older delivery position. Missing messages after this position were
            # acknowledged.
            return
        reached = highest if known else state.highest
        if stream.retention != "limits":
            # The stream has removed messages that an earlier process acknowledged above the first unfinished message.
            reached = max(reached, self._delivered_before)
        if stream.first > reached + 1 and not stream.drops_single_messages and not filtered(self.durable.config):
            self._report_dropped(f"sequences {reached + 1} to {stream.first - 1}", stream.first)

    async def _run(self, read: Callable[[], ReadState]) -> None:
        while self.failure is None:
            await asyncio.sleep(CHECK_INTERVAL)
            denied = self._denials.new()
            if denied is not None:
                self.failure = SourceError(f"{self.name}: {denied}, then start again")
            before = read()
            if not before.active:
                await self._measure_takeover(before)
                continue
            try:
                snapshot = await self.durable.inspect(before.highest)
                now = read()
                self._measure(snapshot, now)
                if now.active and now.takeovers == before.takeovers:
                    # If no takeover has begun since the start of the check, the snapshot shows no change by a takeover.
                    self._check(snapshot, before, now)
            except NotPermitted as error:
                self.failure = SourceError(f"{self.name}: {error}, then start again")
            except ApiError as error:
                if not error.temporary:
                    self.failure = SourceError(self.durable.failure_text(error))
            except SourceError as error:
                if not error.retryable:
                    self.failure = error
            except (NoAnswer, nats.errors.Error, OSError) as error:
                # The pull requests detect a broken connection.
                log.debug("%s: not checked: %s", self.name, error)

    async def _measure_takeover(self, before: ReadState) -> None:
        """Measure the backlog while a takeover runs. The takeover reports errors."""
        try:
            self._measure(await self.durable.inspect(before.highest), before)
        except (ApiError, SourceError, NoAnswer, nats.errors.Error, OSError) as error:
            log.debug("%s: not measured: %s", self.name, error)

    def _measure(self, snapshot: ConsumerSnapshot, now: ReadState) -> None:
        stream, state = snapshot.stream, snapshot.state
        self.retention.note(stream.limits, stream.first, stream.last)
        waiting = state.undelivered
        if not now.active:
            # The takeover collects these messages before it delivers any message.
            waiting += state.unacknowledged
        elif self.alone:
            # The server may deliver a message several times without its arrival.
            missing = state.deliveries - (self._base if now.delivery is None else now.delivery)
            waiting += min(max(0, missing), state.unacknowledged)
        self.waiting = 0 if state.paused else waiting
        limit = int(snapshot.config.get("max_ack_pending", -1))
        self.limit_reached = ""
        if not self.alone and 0 < limit <= state.unacknowledged:
            self.limit_reached = (
                f"consumer {self.durable} has reached max_ack_pending={limit}: its processes have not acknowledged "
                f"{state.unacknowledged} messages; wait for their handlers, or raise max_ack_pending to the sum of "
                "max_in_flight of all processes"
            )

    def _check(self, snapshot: ConsumerSnapshot, before: ReadState, now: ReadState) -> None:
        state = snapshot.state
        if self.alone and snapshot.in_takeover:
            self._check_shrunk(now.takeovers)
            return
        if self.alone and self._is_shared(snapshot, before, now):
            raise SourceError(self.durable.second_puller)
        wrong = "" if snapshot.in_takeover else self.durable.misfits(snapshot.config)
        if wrong:
            raise SourceError(f"consumer {self.durable} was changed during the run and no longer fits: {wrong}")
        if state.deliveries == (self._base if now.delivery is None else now.delivery):
            self._check_first(snapshot.stream, state, now.highest)
        self._check_backlog(snapshot, before.takeovers)
        self.lag = state.unacknowledged + state.undelivered

    def _check_shrunk(self, takeovers: int) -> None:
        """Make the source restore ack_wait by a takeover, or raise ``SourceError`` for a running second process.

        The server may process the request of a dead process late, after this process has restored ack_wait. A shrunk
        ack_wait after a further takeover, within ``SHRUNK_AGAIN_WITHIN`` seconds, comes from a running process.
        """
        now = monotonic()
        again = self._shrunk_after is not None and takeovers > self._shrunk_after
        if self._shrunk_after is None or (again and now - self._shrunk_at > SHRUNK_AGAIN_WITHIN):
            self._shrunk_after, self._shrunk_at = takeovers, now
            self._interrupt("ack_wait is shrunk by a late request of an earlier process, or by another process")
        elif again:
            raise SourceError(self.durable.second_puller)

    def _is_shared(self, snapshot: ConsumerSnapshot, before: ReadState, now: ReadState) -> bool:
        """Return whether another process pulls messages from the consumer, or will soon pull."""
        quiet = not before.outstanding and not now.outstanding and before.delivery == now.delivery
        if quiet and now.delivery is not None and snapshot.state.deliveries > now.delivery:
            return True
        ours = max(before.open_requests, now.open_requests)
        if snapshot.state.waiting_pulls <= ours or now.takeovers != self._takeovers:
            self._suspected = None
            return False
        if self._suspected is None:
            self._suspected = monotonic()
        return monotonic() - self._suspected > SUSPICION

    def _check_backlog(self, snapshot: ConsumerSnapshot, takeovers: int) -> None:
        """Report messages that left the backlog without a delivery since the last check.

        The check works for filtered consumers too.
        """
        before, self._before = self._before, snapshot.state
        same, self._takeovers = takeovers == self._takeovers, takeovers
        if before is None or not same or snapshot.stream.drops_single_messages:
            # A takeover may have restarted the delivery numbers.
            return
        lost = before.undelivered - snapshot.state.undelivered - (snapshot.state.deliveries - before.deliveries)
        if lost > 0 and snapshot.stream.first > before.highest + 1:
            self._report_dropped(f"{lost} messages", snapshot.stream.first)

    def _report_dropped(self, what: str, first: int) -> None:
        fault = (
            f"stream {self.durable.stream!r} begins at sequence {first}, so {what} were dropped before they were "
            "delivered, because the stream was purged or its limits are below the backlog"
        )
        if self.out_of_range == "fail":
            raise SourceError(
                f'{fault}. Raise its limits, and set out_of_range="earliest" to continue with the remaining messages'
            )
        if first > self._skipped:
            self._skipped = first
            log.warning("%s: %s; continuing with the remaining messages", self.name, fault)
