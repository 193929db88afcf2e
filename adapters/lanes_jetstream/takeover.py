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

from lanes.core.types import Room
from lanes.errors import SourceError
from lanes_jetstream.connection import ApiError, Connection, NoAnswer
from lanes_jetstream.durable import Durable, Pending
from lanes_jetstream.transport import Pulls, sequences

log = logging.getLogger("lanes.jetstream")

Mode = Literal["auto", "modify", "hold-back"]

_LOOK: Final = 0.25
"""Seconds between two looks at a connection that is lost."""

_RETRY: Final = 0.5
"""Seconds before a takeover that could not be finished is tried again."""

_HOLD_BACK_MARGIN: Final = 1.0
"""Seconds on top of ack_wait, for the server's own timers."""


class Takeover:
    """The takeovers of one consumer. ``mode``: see ``JetStreamSource``.

    ``resend`` repeats acknowledgements that may have been lost with a connection.
    """

    def __init__(
        self,
        connection: Connection,
        durable: Durable,
        pulls: Pulls,
        mode: Mode,
        name: str,
        resend: Callable[[], Awaitable[None]],
    ) -> None:
        self._connection = connection
        self._durable = durable
        self._pulls = pulls
        self._mode = mode
        self._name = name
        self._resend = resend
        self._again = False
        self._capacity = 0
        self._lost_at = -1

    async def run(self, room: Room, highest: int) -> list[Msg]:
        """Start on a fresh inbox so that what is unacknowledged comes before anything new.

        Returns messages that had to be collected, by sequence. Waits for the connection and the server for as
        long as it takes; raises ``SourceError`` only when they cannot come back. ``highest``: the highest sequence
        handed over so far. To be called again from the start when it was cancelled.
        """
        reason = self._pulls.broken or "the last takeover was not finished"
        if self._again:
            log.warning("%s: pulling again from a fresh inbox: %s", self._name, reason)
        while True:
            try:
                await self._until_connected()
                await self._pulls.renew()
                await self._resend()
                # Nothing of the old inbox may arrive at the server after what follows.
                await self._connection.flush()
                await self._durable.check_stream(highest)
                pending = await self._durable.refresh()
                if reason.startswith("delivery") and self._is_shared(pending):
                    raise SourceError(
                        f"consumer {self._durable} is pulled by another process: two cannot keep a key's order; stop "
                        "the other one, or use a durable of its own"
                    )
                await self._durable.restore()
                collected = await self._requeue(pending, room) if pending.count else []
            except (NoAnswer, nats.errors.Error, OSError) as error:
                log.warning("%s: takeover not finished (%s), again in %g s", self._name, error, _RETRY)
            except SourceError as error:
                if not error.retryable:
                    raise
                log.warning("%s: takeover not finished (%s), again in %g s", self._name, error, _RETRY)
            except ApiError as error:
                raise SourceError(f"consumer {self._durable}: {error}") from None
            else:
                if self._pulls.check() is None:
                    self._again = True
                    return collected
            await asyncio.sleep(_RETRY)

    def _is_shared(self, pending: Pending) -> bool:
        """Whether a delivery that did not arrive went to another process.

        It did when requests wait although ours are gone with their inbox, or when it is the second one to get lost
        while the connection held: a connection loses nothing by itself.
        """
        reconnects = self._pulls.reconnects
        again = reconnects == self._lost_at
        self._lost_at = reconnects
        return again or pending.waiting_pulls > 0

    async def _requeue(self, pending: Pending, room: Room) -> list[Msg]:
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
        only_lost = self._again and not shrunk
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
        await self._pulls.ask_exactly(count - len(collected))
        while len(collected) < count:
            await self._pulls.wait(_RETRY)
            arrived = self._pulls.take()
            if self._pulls.check() is not None:
                raise NoAnswer(f"{self._name}: {self._pulls.broken}")
            if not arrived:
                return False
            for raw in arrived:
                collected[sequences(raw.reply)[0]] = raw
            if highest is not None and max(collected) > highest:
                return True
        return True

    async def _shrink(self, pending: int) -> bool:
        """Requeue by ack_wait shrink, where that is permitted; False where it is not."""
        if self._mode == "hold-back" or (self._mode == "auto" and not self._durable.managed):
            return False
        try:
            await self._durable.requeue_pending()
        except ApiError as error:
            log.warning("%s: ack_wait cannot be changed (%s): holding back instead", self._name, error)
            return False
        except NoAnswer as error:
            if self._pulls.check() is not None:
                raise
            # A request that permissions forbid is dropped by the server without an answer.
            log.warning("%s: %s: holding back instead", self._name, error)
            return False
        log.info("%s: %d unacknowledged messages come first (ack_wait shrink)", self._name, pending)
        return True

    async def _hold_back(self) -> None:
        """Take nothing until ack_wait is over for everything that is unacknowledged."""
        loop = asyncio.get_running_loop()
        wait = self._durable.ack_wait + _HOLD_BACK_MARGIN
        log.warning("%s: taking nothing for %.1f s, until unacknowledged messages come back", self._name, wait)
        deadline = loop.time() + wait
        while loop.time() < deadline:
            await asyncio.sleep(min(_RETRY, max(0.0, deadline - loop.time())))
            if not (await self._durable.refresh()).count:
                return
            if self._pulls.check() is not None:
                raise NoAnswer(f"{self._name}: {self._pulls.broken}")

    async def _until_connected(self) -> None:
        client = self._connection.client
        while not client.is_connected:
            if client.is_closed:
                raise SourceError(f"{self._name}: the connection is closed and does not come back")
            await asyncio.sleep(_LOOK)
