"""Makes unacknowledged messages arrive before new messages, at the start and after interruptions.

Without a takeover, the server redelivers messages in the order in which their ack_wait expires. The server also
delivers new messages before the ack_wait of older messages has expired. Both faults break the order of a key.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import Final, Literal

import nats.errors
from nats.aio.msg import Msg

from lanes.clock import monotonic
from lanes.core.types import Room
from lanes.errors import SourceError
from lanes_jetstream.durable.consumer import ConsumerState, DurableConsumer
from lanes_jetstream.durable.pulls import DurablePulls
from lanes_jetstream.wire.answers import ApiError
from lanes_jetstream.wire.connection import CLOSED, Connection, NoAnswer, NotPermitted
from lanes_jetstream.wire.messages import sequences
from lanes_jetstream.wire.pull_requests import PULL_EXPIRES, Interruption
from lanes_jetstream.wire.stream import StreamState

log = logging.getLogger("lanes.jetstream")

TakeoverMode = Literal["auto", "modify", "hold-back"]
"""The changes of a consumer that a takeover may make; see ``JetStreamSource``."""

RESET_SINCE: Final = (2, 14)
"""The first nats-server that can reset a consumer."""

POLL_INTERVAL: Final = 0.25
"""Seconds between two checks of the connection while no message arrives."""

RETRY_DELAY: Final = 0.5
"""Seconds between two attempts of a takeover, or of a start that found no leader."""

_UNANSWERED: Final = 3
"""Number of consecutive unanswered requests after which a change of the consumer counts as forbidden."""

_CONTENDED: Final = 3
"""Number of consecutive incomplete passes, with open requests of another process, after which a takeover fails."""

_HOLD_BACK_MARGIN: Final = 1.0
"""Seconds added to ack_wait for the server's own timers."""


@dataclass(eq=False, repr=False, kw_only=True)
class Takeover:
    """Runs the takeovers of one consumer.

    Attributes:
        connection: Connection to the server.
        durable: The consumer.
        pulls: The pull requests of the consumer.
        name: Name of the source, for errors and the log.
        resend: Function that repeats the acknowledgements that a lost connection may have dropped.
        check_dropped: Function that reports undelivered messages that the stream dropped; see ``DurableWatch``.
        shared: Whether other processes pull the consumer. For a shared consumer, a takeover does not requeue messages,
            because the consumer keeps no order.
        count: Number of takeovers that have begun.
        next: Sequences of the next deliveries in order, if these messages exceed the room, so that the server sorted
            them.
    """

    connection: Connection
    durable: DurableConsumer
    pulls: DurablePulls
    name: str
    resend: Callable[[], Awaitable[None]]
    check_dropped: Callable[[StreamState, ConsumerState, int], None]
    shared: bool
    count: int = field(default=0, init=False)
    next: deque[int] = field(default_factory=deque, init=False)

    def __post_init__(self) -> None:
        self._ran_before = False
        self._last_failure = ""
        self._unanswered = 0
        # At an interruption the consumer may have no room, but each request must ask for at least one message.
        self._capacity = 1
        self._lost_at = -1
        self._interrupted_at = float("-inf")
        self._reason: Interruption | None = None
        self._again = False
        self._contended = 0

    async def run(self, room: Room, highest: int) -> list[Msg]:
        """Start pulling on a fresh inbox, where unacknowledged messages arrive before new messages.

        The call waits for the connection and the server without limit. A call after a cancelled call starts from the
        beginning.

        Args:
            room: Maximum number and bytes of messages that may arrive.
            highest: Highest delivered sequence.

        Returns:
            The collected messages in order of sequence; empty if the server itself delivers in order, or the consumer
            is shared.

        Raises:
            SourceError: The source cannot continue, for example because the connection is permanently closed.
        """
        reason = self.pulls.interruption
        kind = None if reason is None else reason.kind
        self.count += 1
        self._capacity = max(self._capacity, room.messages)
        # A message out of turn is no interruption of the connection, and must not hide a second process.
        if self._ran_before and kind not in ("gap", "unsorted"):
            self._interrupted_at = monotonic()
        if reason is not self._reason:
            # Count a missing delivery once, even if its takeover needs several passes and calls.
            self._reason, self._again = reason, kind == "gap" and self._is_lost_again()
        if self._ran_before:
            why = reason or "the last takeover was not finished"
            log.warning("%s: requesting the messages again, unacknowledged ones first (%s)", self.name, why)
        if kind == "crowded":
            # Without a pause, this loop would send requests without end while other processes pull.
            await asyncio.sleep(RETRY_DELAY)
        while True:
            self.next.clear()
            try:
                await self._until_connected()
                await self.pulls.renew()
                await self.resend()
                # All requests of the old inbox must reach the server before the next steps.
                await self.connection.flush()
                stream = await self.durable.check_stream(highest)
                state = await self.durable.refresh()
                self.check_dropped(stream, state, highest)
                if kind == "gap" and self._is_shared(state):
                    raise SourceError(self.durable.second_puller)
                await self._restore()
                collected = await self._barrier(state, room)
            except NotPermitted as error:
                raise SourceError(f"{self.name}: {error}, then start again") from None
            except (NoAnswer, nats.errors.Error, OSError) as error:
                self._unfinished(str(error))
            except SourceError as error:
                if not error.retryable:
                    raise
                self._unfinished(str(error))
            except ApiError as error:
                if not error.temporary:
                    raise SourceError(self.durable.failure_text(error)) from None
                self._unfinished(str(error))
            else:
                if self.pulls.check() is None:
                    self._ran_before = True
                    self._last_failure = ""
                    self._contended = 0
                    return collected
            await asyncio.sleep(RETRY_DELAY)

    def _unfinished(self, why: str) -> None:
        # Warn once instead of every half second of an outage.
        level = logging.WARNING if why != self._last_failure else logging.DEBUG
        log.log(level, "%s: takeover not finished (%s); retrying every %g s", self.name, why, RETRY_DELAY)
        self._last_failure = why

    async def _restore(self) -> None:
        try:
            await self.durable.restore()
        except NotPermitted as error:
            shortest, _ = self.durable.ack_waits
            raise SourceError(
                f"consumer {self.durable} has an ack_wait of 1 ms from a process that died in its takeover, and may "
                f"not be changed ({error}); permit the change, or set ack_wait to {shortest:g} s and remove the "
                "metadata that begins with lanes-original"
            ) from None

    async def _barrier(self, state: ConsumerState, room: Room) -> list[Msg]:
        """Make unacknowledged messages arrive before new messages.

        Returns the collected messages, in order of sequence.
        """
        if self.shared:
            self._log_barrier("off, because several processes share the consumer", state.unacknowledged)
        elif not state.unacknowledged:
            self._log_barrier("not needed", 0)
        elif state.paused:
            raise NoAnswer(f"consumer {self.durable} is paused; resume it")
        elif not await self._reset(state):
            return await self._requeue(state, room)
        return []

    def _log_barrier(self, barrier: str, count: int) -> None:
        if self._ran_before:
            # These messages may be in flight in this process.
            log.info(
                "%s: the server answers; the early redelivery is %s; %d unacknowledged message(s)",
                self.name,
                barrier,
                count,
            )
        else:
            log.info(
                "%s: the early redelivery is %s; %d unacknowledged message(s) of an earlier process",
                self.name,
                barrier,
                count,
            )

    async def _reset(self, state: ConsumerState) -> bool:
        """Reset the consumer, so that it delivers in stream order, unless the reset would repeat a finished message.

        Returns whether the call reset the consumer.

        The call resets only at a start. After a reset the server ignores acknowledgements of earlier deliveries, which
        a running process may still send.
        """
        repeats = state.settled_above_floor and not self.durable.drops_acknowledged
        if self._ran_before or repeats or not self.durable.modifiable:
            return False
        if self.connection.server_version < RESET_SINCE:
            return False
        try:
            await self.durable.reset()
        except (ApiError, NotPermitted) as error:
            if isinstance(error, ApiError) and error.temporary:
                raise
            log.info("%s: the consumer cannot be reset (%s)", self.name, error)
            return False
        self._log_barrier("by RESET", state.unacknowledged)
        return True

    def _is_lost_again(self) -> bool:
        """Record a missing delivery, and return whether it is the second missing delivery of an unbroken connection.

        A server may still deliver to requests of an earlier connection until it detects the end of that connection.
        """
        if self._may_deliver_elsewhere():
            return False
        reconnects = self.pulls.reconnects
        again = reconnects == self._lost_at
        self._lost_at = reconnects
        return again

    def _is_shared(self, state: ConsumerState) -> bool:
        """Return whether a missing delivery went to another process.

        Another process pulls if requests wait at the server after this process has closed its inbox. Another process
        also pulls if a second delivery is missing on an unbroken connection, because such a connection loses no
        message.
        """
        return not self._may_deliver_elsewhere() and (self._again or state.waiting_pulls > 0)

    def _may_deliver_elsewhere(self) -> bool:
        """Return whether the server may still deliver to requests of an earlier connection of this process."""
        return monotonic() - self._interrupted_at <= PULL_EXPIRES

    async def _requeue(self, state: ConsumerState, room: Room) -> list[Msg]:
        """Collect the unacknowledged messages before new messages, and sort them.

        The server queues expired messages in batches, and keeps the messages of an earlier takeover at the head of the
        queue. To restore the order, the call therefore collects and sorts all batches. The engine recognises messages
        in flight.
        """
        shrunk = await self._shrink(state.unacknowledged)
        if not shrunk:
            await self._hold_back()
        # Without a shrunk ack_wait, the server does not redeliver messages in this process, and delivers new messages
        # instead.
        only_lost = self._ran_before and not shrunk
        wanted = min(state.unacknowledged, room.messages) if only_lost else state.unacknowledged
        collected: dict[int, Msg] = {}
        while wanted > len(collected):
            if wanted > self._capacity:
                await self._requeue_in_one_batch(wanted)
                return []
            whole = await self._collect(wanted, collected, state.highest)
            if only_lost:
                self._check_numbers(collected.values())
            elif max(collected, default=0) > state.highest:
                await self._check_unexpired(collected)
            if whole or only_lost:
                break
            # No more messages arrive, because some messages were acknowledged meanwhile or their ack_wait had not
            # expired.
            wanted = (await self.durable.refresh()).unacknowledged
            if wanted > len(collected) and not await self._shrink(wanted):
                await self._hold_back()
        return [collected[position] for position in sorted(collected)]

    async def _check_unexpired(self, collected: dict[int, Msg]) -> None:
        """Raise ``NoAnswer`` if new messages arrived before an unacknowledged message, which another pass must collect.

        A late in-progress acknowledgement of a dead process may extend the ack_wait of a message beyond the hold-back.
        """
        state = await self.durable.refresh()
        while state.deliveries > max(sequences(raw.reply)[1] for raw in collected.values()):
            await self.pulls.wait(RETRY_DELAY)
            arrived = self.pulls.take()
            if not arrived or self.pulls.check() is not None:
                raise NoAnswer(f"{self.name}: a delivery up to {state.deliveries} is missing")
            collected.update((sequences(raw.reply)[0], raw) for raw in arrived)
        if state.unacknowledged > len(collected):
            if not self.durable.modifiable:
                # Without a shrunk ack_wait, the source keeps the surplus messages until it has room.
                self._capacity = max(self._capacity, state.unacknowledged)
            raise NoAnswer(f"{self.name}: new messages arrived before an unacknowledged message")

    async def _requeue_in_one_batch(self, count: int) -> None:
        """Requeue more messages than fit into the room: receive and drop all messages, and shrink ack_wait again.

        The ack_wait of all messages then expires at the same time, and the server sorts the messages in one batch. An
        in-progress acknowledgement while ack_wait is shrunk splits the batch, so the source compares the deliveries
        with ``next``.
        """
        dropped: dict[int, Msg] = {}
        every: set[int] = set()
        came = 0
        while came < count:
            whole = await self._collect(min(self._capacity, count - came), dropped, None)
            came += len(dropped)
            every |= dropped.keys()
            dropped.clear()
            if not whole:
                break
        # A message that the server has not sent would stay before the batch. Some messages may have been acknowledged.
        if came < count and came < (state := await self.durable.refresh()).unacknowledged:
            self._check_contended(state)
            raise NoAnswer(f"{self.name}: only {came} of {count} unacknowledged messages arrived")
        if not await self._shrink(count):
            raise SourceError(
                f"{self.name}: an earlier run left {count} messages unacknowledged, and max_in_flight="
                f"{self._capacity} is too small to sort them; raise max_in_flight to {count} once, or pass "
                'takeover="modify"'
            )
        self.next.extend(sorted(every))

    def _check_contended(self, state: ConsumerState) -> None:
        """Raise ``SourceError`` if another process takes some of the messages in several passes.

        The server fills the open requests of a dead process in the first pass.
        """
        self._contended = self._contended + 1 if state.waiting_pulls > self.pulls.open_requests else 0
        if self._contended >= _CONTENDED and not self._may_deliver_elsewhere():
            raise SourceError(self.durable.second_puller)

    async def _collect(self, count: int, collected: dict[int, Msg], highest: int | None) -> bool:
        """Pull and collect ``count`` messages. Returns False if the server delivers fewer messages.

        A message above ``highest`` also ends the collection, because the server delivers new messages after all queued
        messages. The server queues a message only after its ack_wait has expired.
        """
        await self.pulls.request_exactly(count - len(collected))
        while len(collected) < count:
            await self.pulls.wait(RETRY_DELAY)
            arrived = self.pulls.take()
            if self.pulls.check() is not None:
                raise NoAnswer(f"{self.name}: {self.pulls.interruption}")
            if not arrived:
                return False
            for raw in arrived:
                collected[sequences(raw.reply)[0]] = raw
            if highest is not None and max(collected) > highest:
                return True
        return True

    def _check_numbers(self, collected: Collection[Msg]) -> None:
        """Raise ``NoAnswer`` if a collected delivery is missing, so that another pass collects it."""
        numbers = sorted(sequences(raw.reply)[1] for raw in collected)
        if numbers and numbers[-1] - numbers[0] >= len(numbers):
            raise NoAnswer(f"{self.name}: a delivery between {numbers[0]} and {numbers[-1]} is missing")

    async def _shrink(self, count: int) -> bool:
        """Requeue all unacknowledged messages by a shrink of ack_wait.

        Returns False if the settings forbid the shrink, the server refuses the shrink, or no answer arrives.
        """
        if not self.durable.modifiable:
            return False
        try:
            await self.durable.requeue_pending()
        except ApiError as error:
            if error.temporary:
                raise
            log.warning("%s: ack_wait cannot be changed (%s); holding back instead", self.name, error)
            return False
        except NoAnswer as error:
            self._unanswered += 1
            if not isinstance(error, NotPermitted) and self._unanswered < _UNANSWERED:
                raise
            # Between accounts, a request without a permission may be dropped, and then has no answer.
            log.warning("%s: %s; holding back instead", self.name, error)
            return False
        self._unanswered = 0
        self._log_barrier("by a short ack_wait", count)
        return True

    async def _hold_back(self) -> None:
        """Send no request until ack_wait has passed for all unacknowledged messages."""
        _, longest = self.durable.ack_waits
        wait = longest + _HOLD_BACK_MARGIN
        log.warning(
            "%s: the early redelivery is by hold-back; requesting nothing for %.1f s, until unacknowledged messages "
            "return",
            self.name,
            wait,
        )
        deadline = monotonic() + wait
        while monotonic() < deadline:
            await asyncio.sleep(min(RETRY_DELAY, max(0.0, deadline - monotonic())))
            if not (await self.durable.refresh()).unacknowledged:
                return
            if self.pulls.check() is not None:
                raise NoAnswer(f"{self.name}: {self.pulls.interruption}")

    def check_connection(self) -> None:
        """Raise ``SourceError`` if the connection is permanently closed."""
        client = self.connection.client
        if client.is_closed:
            why = f" ({client.last_error})" if client.last_error is not None else ""
            raise SourceError(f"{self.name}{why}: {CLOSED}")

    async def _until_connected(self) -> None:
        while not self.connection.client.is_connected:
            self.check_connection()
            await asyncio.sleep(POLL_INTERVAL)
