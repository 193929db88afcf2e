"""Takeover: make what is unacknowledged come before anything new, at a start and after every shake.

The server redelivers in the order in which messages expired, and gives new ones out while older ones have not
expired yet. Either would break a key's order.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, Literal

import nats.errors
from nats.aio.msg import Msg

from lanes.clock import monotonic
from lanes.core.types import Room
from lanes.errors import SourceError
from lanes_jetstream.durable.consumer import ConsumerState, DurableConsumer
from lanes_jetstream.durable.pulls import Pulls
from lanes_jetstream.wire.connection import ApiError, Connection, NoAnswer, NotPermitted
from lanes_jetstream.wire.messages import sequences
from lanes_jetstream.wire.pull_requests import PULL_EXPIRES
from lanes_jetstream.wire.stream import StreamState

log = logging.getLogger("lanes.jetstream")

TakeoverMode = Literal["auto", "modify", "hold-back"]

RESET_SINCE: Final = (2, 14)
"""The first nats-server that can have a consumer begin again."""

_POLL_INTERVAL: Final = 0.25
"""Seconds between two looks at a connection that is lost."""

_RETRY_DELAY: Final = 0.5
"""Seconds before a takeover that could not be finished is tried again."""

_UNANSWERED: Final = 3
"""Requests to change the consumer that find no answer, one after the other, before it counts as not permitted."""

_HOLD_BACK_MARGIN: Final = 1.0
"""Seconds on top of ack_wait, for the server's own timers."""


class Takeover:
    """The takeovers of one consumer, which has it alone; a ``shared`` one has no order to keep, and is left as it is.

    ``resend`` repeats acknowledgements that may have been lost with a connection. ``judge`` raises ``SourceError`` for
    a stream that has dropped what was not delivered yet. ``count``: how many takeovers have begun.
    """

    def __init__(
        self,
        connection: Connection,
        durable: DurableConsumer,
        pulls: Pulls,
        name: str,
        resend: Callable[[], Awaitable[None]],
        check_dropped: Callable[[StreamState, ConsumerState, int], None],
        *,
        shared: bool,
    ) -> None:
        self._connection = connection
        self._durable = durable
        self._pulls = pulls
        self._name = name
        self._resend = resend
        self._check_dropped = check_dropped
        self._shared = shared
        self.count = 0
        self._ran_before = False
        self._last_failure = ""
        self._unanswered = 0
        self._capacity = 0
        self._lost_at = -1
        self._interrupted_at = float("-inf")

    async def run(self, room: Room, highest: int) -> list[Msg]:
        """Start on a fresh inbox so that what is unacknowledged comes before anything new.

        Returns messages that had to be collected, by sequence. Waits for the connection and the server for as
        long as it takes; raises ``SourceError`` only when they cannot come back. ``highest``: the highest sequence
        handed over so far. To be called again from the start when it was cancelled.
        """
        reason = self._pulls.interruption
        kind = None if reason is None else reason.kind
        self.count += 1
        if self._ran_before and kind != "gap":
            self._interrupted_at = monotonic()
        if self._ran_before:
            why = reason or "the last takeover was not finished"
            log.warning("%s: pulling again from a fresh inbox: %s", self._name, why)
        if kind == "crowded":
            # The others that pull have to be given time, or this would be nothing but requests.
            await asyncio.sleep(_RETRY_DELAY)
        while True:
            try:
                await self._until_connected()
                await self._pulls.renew()
                await self._resend()
                # Nothing of the old inbox may arrive at the server after what follows.
                await self._connection.flush()
                state = await self._durable.check_stream(highest)
                pending = await self._durable.refresh()
                self._check_dropped(state, pending, highest)
                if kind == "gap" and self._is_shared(pending):
                    raise SourceError(
                        f"consumer {self._durable} is pulled by another process: two cannot keep a key's order; stop "
                        "the other one, or use a durable of its own"
                    )
                await self._restore()
                collected = await self._barrier(pending, room)
            except NotPermitted as error:
                raise SourceError(f"{self._name}: {error}, then start again") from None
            except (NoAnswer, nats.errors.Error, OSError) as error:
                self._unfinished(str(error))
            except SourceError as error:
                if not error.retryable:
                    raise
                self._unfinished(str(error))
            except ApiError as error:
                if not error.temporary:
                    raise SourceError(self._durable.failure_text(error)) from None
                self._unfinished(str(error))
            else:
                if self._pulls.check() is None:
                    self._ran_before = True
                    self._last_failure = ""
                    return collected
            await asyncio.sleep(_RETRY_DELAY)

    def _unfinished(self, why: str) -> None:
        # Once, not every half second of an outage.
        level = logging.WARNING if why != self._last_failure else logging.DEBUG
        log.log(level, "%s: takeover not finished (%s), again every %g s", self._name, why, _RETRY_DELAY)
        self._last_failure = why

    async def _restore(self) -> None:
        try:
            await self._durable.restore()
        except NotPermitted as error:
            shortest, _ = self._durable.ack_waits
            raise SourceError(
                f"consumer {self._durable} has an ack_wait of 1 ms, left by a process that died in its takeover, and "
                f"may not be changed ({error}): permit it, or set ack_wait to {shortest:g} s and remove the metadata "
                "that begins with lanes-original"
            ) from None

    async def _barrier(self, pending: ConsumerState, room: Room) -> list[Msg]:
        """Have what is unacknowledged delivered before anything new; returns what had to be collected."""
        if self._shared:
            self._log_barrier("none, several processes take from the consumer", pending.count)
        elif not pending.count:
            self._log_barrier("none needed", 0)
        elif pending.paused:
            raise NoAnswer(f"consumer {self._durable} is paused: resume it")
        elif not await self._reset(pending):
            return await self._requeue(pending, room)
        return []

    def _log_barrier(self, barrier: str, count: int) -> None:
        log.info("%s: start barrier: %s; %d unacknowledged messages", self._name, barrier, count)

    async def _reset(self, pending: ConsumerState) -> bool:
        """Have the server deliver in the order of the stream again, where that repeats nothing that is finished.

        At a start only: of what this process holds the old deliveries could not be acknowledged until it comes again.
        """
        repeats = pending.settled_above_floor and not self._durable.drops_acknowledged
        if self._ran_before or repeats or not self._durable.modifiable:
            return False
        if self._connection.server_version < RESET_SINCE:
            return False
        try:
            await self._durable.reset()
        except (ApiError, NotPermitted) as error:
            if isinstance(error, ApiError) and error.temporary:
                raise
            log.info("%s: the consumer cannot be reset (%s)", self._name, error)
            return False
        self._log_barrier("RESET", pending.count)
        return True

    def _is_shared(self, pending: ConsumerState) -> bool:
        """Whether a delivery that did not arrive went to another process.

        It did when requests wait although ours are gone with their inbox, or when it is the second one to get lost
        while the connection held: a connection loses nothing by itself. But as long as requests of an earlier
        connection may be open, whose end the server has not noticed, it may have gone there.
        """
        if monotonic() - self._interrupted_at <= PULL_EXPIRES:
            return False
        reconnects = self._pulls.reconnects
        again = reconnects == self._lost_at
        self._lost_at = reconnects
        return again or pending.waiting_pulls > 0

    async def _requeue(self, pending: ConsumerState, room: Room) -> list[Msg]:
        """Have the unacknowledged messages delivered before anything new, and put them in order.

        The server queues what expires batch behind batch, and keeps what an earlier takeover had queued in front:
        the messages are in order only after sorting all of them. What this process holds comes with them and is
        recognised.
        """
        self._capacity = max(self._capacity, room.messages)
        shrunk = await self._shrink(pending.count)
        if not shrunk:
            await self._hold_back()
        # Without a shrink what this process holds stays alive and does not come: new messages would instead.
        only_lost = self._ran_before and not shrunk
        wanted = min(pending.count, room.messages) if only_lost else pending.count
        collected: dict[int, Msg] = {}
        while wanted > len(collected):
            if wanted > self._capacity:
                await self._requeue_in_one_batch(wanted)
                return []
            if await self._collect(wanted, collected, pending.highest) or only_lost:
                break
            # They stopped coming: some were acknowledged meanwhile, or had not expired.
            wanted = (await self._durable.refresh()).count
            if wanted > len(collected) and not await self._shrink(wanted):
                await self._hold_back()
        return [collected[position] for position in sorted(collected)]

    async def _requeue_in_one_batch(self, count: int) -> None:
        """More than may be held here: have all of them delivered, drop them, and shrink once more.

        Now they expire together, in one batch, which the server sorts.
        """
        dropped: dict[int, Msg] = {}
        came = 0
        while came < count and await self._collect(min(self._capacity, count - came), dropped, None):
            came += len(dropped)
            dropped.clear()
        if not await self._shrink(count):
            raise SourceError(
                f"{self._name}: an earlier run left {count} messages unacknowledged and max_in_flight is "
                f"{self._capacity}: without changing the consumer they can be put in order only together; raise "
                'max_in_flight to that once, or permit takeover="modify"'
            )

    async def _collect(self, count: int, collected: dict[int, Msg], highest: int | None) -> bool:
        """Pull until ``count`` messages are collected; False when they stop coming before that.

        Also done when a message above ``highest`` comes: new ones come only after everything that was queued.
        """
        await self._pulls.request_exactly(count - len(collected))
        while len(collected) < count:
            await self._pulls.wait(_RETRY_DELAY)
            arrived = self._pulls.take()
            if self._pulls.check() is not None:
                raise NoAnswer(f"{self._name}: {self._pulls.interruption}")
            if not arrived:
                return False
            for raw in arrived:
                collected[sequences(raw.reply)[0]] = raw
            if highest is not None and max(collected) > highest:
                return True
        return True

    async def _shrink(self, pending: int) -> bool:
        """Requeue by ack_wait shrink, where that is permitted; False where it is not."""
        if not self._durable.modifiable:
            return False
        try:
            await self._durable.requeue_pending()
        except ApiError as error:
            if error.temporary:
                raise
            log.warning("%s: ack_wait cannot be changed (%s): holding back instead", self._name, error)
            return False
        except NoAnswer as error:
            self._unanswered += 1
            if not isinstance(error, NotPermitted) and self._unanswered < _UNANSWERED:
                raise
            # What is dropped on the way for want of a permission, by another account for one, is never answered.
            log.warning("%s: %s: holding back instead", self._name, error)
            return False
        self._unanswered = 0
        self._log_barrier("ack_wait shrink", pending)
        return True

    async def _hold_back(self) -> None:
        """Take nothing until ack_wait is over for everything that is unacknowledged."""
        loop = asyncio.get_running_loop()
        _, longest = self._durable.ack_waits
        wait = longest + _HOLD_BACK_MARGIN
        log.warning(
            "%s: start barrier: hold-back; taking nothing for %.1f s, until unacknowledged messages come back",
            self._name,
            wait,
        )
        deadline = loop.time() + wait
        while loop.time() < deadline:
            await asyncio.sleep(min(_RETRY_DELAY, max(0.0, deadline - loop.time())))
            if not (await self._durable.refresh()).count:
                return
            if self._pulls.check() is not None:
                raise NoAnswer(f"{self._name}: {self._pulls.interruption}")

    def check_connection(self) -> None:
        """Raise ``SourceError`` for a connection that is closed for good."""
        client = self._connection.client
        if client.is_closed:
            why = f" ({client.last_error})" if client.last_error is not None else ""
            raise SourceError(f"{self._name}: the connection is closed and does not come back{why}: start again")

    async def _until_connected(self) -> None:
        while not self._connection.client.is_connected:
            self.check_connection()
            await asyncio.sleep(_POLL_INTERVAL)
