"""A look at the stream and the consumer every few seconds, beside the messages: what no message tells.

It finds a stream that was made anew, purged, or lost its end while the connection held; a consumer that was deleted or
changed; and another process on a consumer that keeps an order. It also knows the lag.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Final, NamedTuple

import nats.errors

from lanes.clock import monotonic
from lanes.errors import SourceError
from lanes_jetstream.durable.consumer import (
    ORIGINAL_ACK_WAIT,
    ConsumerSnapshot,
    ConsumerState,
    DurableConsumer,
    filtered,
)
from lanes_jetstream.wire.connection import ApiError, Connection, Denials, NoAnswer, NotPermitted
from lanes_jetstream.wire.pull_requests import PULL_EXPIRES
from lanes_jetstream.wire.stream import OutOfRange, StreamState

log = logging.getLogger("lanes.jetstream")

CHECK_INTERVAL: Final = 2.0
"""Seconds between two looks."""

SUSPICION: Final = PULL_EXPIRES + 1.0
"""Seconds for which requests beyond ours wait before they are somebody else's: those of a connection whose end the
server has not noticed yet are over by then."""


class ReadState(NamedTuple):
    """What the source knows of its own reading at one moment.

    ``active``: no takeover is under way. ``takeovers``: how many have begun. ``highest``: the highest sequence it got.
    ``delivery``: the last delivery number it got, or None. ``outstanding``, ``open_requests``: what is asked for.
    """

    active: bool
    takeovers: int
    highest: int
    delivery: int | None
    outstanding: int
    open_requests: int


class DurableWatch:
    """The looks of one source. ``alone``: it has the consumer to itself. asyncio only.

    ``failure``: why the source cannot go on. ``lag``: what is not acknowledged or not delivered yet; None = not known.
    """

    def __init__(
        self, connection: Connection, durable: DurableConsumer, name: str, *, out_of_range: OutOfRange, alone: bool
    ) -> None:
        self._connection = connection
        self._durable = durable
        self._name = name
        self._out_of_range = out_of_range
        self._alone = alone
        self._suspected: float | None = None
        self._before: ConsumerState | None = None
        self._takeovers = -1
        self._base = 0
        self._denials: Denials
        self._skipped = 0
        self._task: asyncio.Task[None] | None = None
        self.failure: SourceError | None = None
        self.lag: int | None = None

    def start(self, read: Callable[[], ReadState], ours: Callable[[str], bool]) -> None:
        """Begin to look; ``read`` is asked at each. ``ours``: of a subject that is denied, whether nothing goes on
        without it. Does not block."""
        self._denials = Denials(self._connection.client, ours)
        self._task = asyncio.create_task(self._run(read))

    async def stop(self) -> None:
        """Look no more. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def check_dropped(self, state: StreamState, pending: ConsumerState, highest: int) -> None:
        """Raise ``SourceError`` for a stream that has dropped messages before they were delivered, or say so.

        For a takeover: of what was delivered and is not among ``highest`` and below, nothing is on its way.
        """
        self._base = pending.deliveries
        self._check_first(state, pending, highest)

    def _check_first(self, state: StreamState, pending: ConsumerState, highest: int) -> None:
        # A purge moves the server's own cursor behind what it has dropped; what came here it does not move.
        known = self._alone and highest > 0
        if not known and state.retention != "limits":
            # A server that was killed may have a cursor of before; what is gone behind that was acknowledged.
            return
        reached = highest if known else pending.highest
        if state.first > reached + 1 and not state.drops_single_messages and not filtered(self._durable.config):
            self._report_dropped(f"sequences {reached + 1} to {state.first - 1}", state.first)

    async def _run(self, read: Callable[[], ReadState]) -> None:
        while self.failure is None:
            await asyncio.sleep(CHECK_INTERVAL)
            denied = self._denials.new()
            if denied is not None:
                self.failure = SourceError(f"{self._name}: {denied}, then start again")
            before = read()
            if not before.active:
                continue
            try:
                look = await self._durable.inspect(before.highest)
                now = read()
                if now.active and now.takeovers == before.takeovers:
                    # Else what was seen may be what the takeover was doing.
                    self._check(look, before, now)
            except NotPermitted as error:
                self.failure = SourceError(f"{self._name}: {error}, then start again")
            except ApiError as error:
                if not error.temporary:
                    self.failure = SourceError(self._durable.failure_text(error))
            except SourceError as error:
                if not error.retryable:
                    self.failure = error
            except (NoAnswer, nats.errors.Error, OSError) as error:
                # Whether the connection still works is for the pulls to find out.
                log.debug("%s: not looked at: %s", self._name, error)

    def _check(self, look: ConsumerSnapshot, before: ReadState, now: ReadState) -> None:
        pending = look.pending
        if self._alone and self._is_shared(look, before, now):
            raise SourceError(
                f"consumer {self._durable} is pulled by another process: two cannot keep a key's order; stop the other "
                "one, or use a durable of its own"
            )
        wrong = self._durable.misfits(look.config) if ORIGINAL_ACK_WAIT not in _metadata(look) else ""
        if wrong:
            raise SourceError(f"consumer {self._durable} was changed while it was read and does not fit now: {wrong}")
        if pending.deliveries == (self._base if now.delivery is None else now.delivery):
            self._check_first(look.stream, pending, now.highest)
        self._check_backlog(look, before.takeovers)
        self.lag = pending.count + pending.left

    def _is_shared(self, look: ConsumerSnapshot, before: ReadState, now: ReadState) -> bool:
        """Whether somebody else takes from the consumer, or is about to."""
        if ORIGINAL_ACK_WAIT in _metadata(look):
            # Somebody's takeover, and none of ours.
            return True
        quiet = not before.outstanding and not now.outstanding and before.delivery == now.delivery
        if quiet and now.delivery is not None and look.pending.deliveries > now.delivery:
            return True
        ours = max(before.open_requests, now.open_requests)
        if look.pending.waiting_pulls <= ours or now.takeovers != self._takeovers:
            self._suspected = None
            return False
        if self._suspected is None:
            self._suspected = monotonic()
        return monotonic() - self._suspected > SUSPICION

    def _check_backlog(self, look: ConsumerSnapshot, takeovers: int) -> None:
        """Whether fewer messages are left than were delivered since the last look, of a filtered consumer too."""
        before, self._before = self._before, look.pending
        same, self._takeovers = takeovers == self._takeovers, takeovers
        if before is None or not same or look.stream.drops_single_messages:
            # Of another consumer's life: a takeover may have begun the numbers of deliveries anew.
            return
        lost = before.left - look.pending.left - (look.pending.deliveries - before.deliveries)
        if lost > 0 and look.stream.first > before.highest + 1:
            self._report_dropped(f"{lost} messages", look.stream.first)

    def _report_dropped(self, what: str, first: int) -> None:
        where = f"stream {self._durable} begins at sequence {first}: {what} were dropped before they were delivered"
        why = "it was purged, or its limits are below what is left to do"
        if self._out_of_range == "fail":
            raise SourceError(
                f'{where}: {why}; raise its limits, and set out_of_range="earliest" to go on with what there is'
            )
        if first > self._skipped:
            self._skipped = first
            log.warning("%s: %s: %s; going on with what there is", self._name, where, why)


def _metadata(look: ConsumerSnapshot) -> dict[str, str]:
    return look.config.get("metadata") or {}
