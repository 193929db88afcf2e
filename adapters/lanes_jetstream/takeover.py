"""Takeover: make what is unacknowledged come before anything new, at a start and after every shake.

The server redelivers in the order in which messages expired, and gives new ones out while older ones have not
expired yet. Either would break a key's order.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final, Literal

import nats.errors
from nats.aio.msg import Msg

from lanes.core.types import Room
from lanes.errors import SourceError
from lanes_jetstream.connection import ApiError, Connection, NoAnswer
from lanes_jetstream.durable import Durable
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
    """The takeovers of one consumer. ``mode``: see ``JetStreamSource``."""

    def __init__(self, connection: Connection, durable: Durable, pulls: Pulls, mode: Mode, name: str) -> None:
        self._connection = connection
        self._durable = durable
        self._pulls = pulls
        self._mode = mode
        self._name = name
        self._again = False

    async def run(self, room: Room) -> list[Msg]:
        """Start on a fresh inbox so that what is unacknowledged comes before anything new.

        Returns the orphans themselves when they had to be collected. Waits for the connection and the server for
        as long as it takes; raises ``SourceError`` only when they cannot come back.
        """
        reason = self._pulls.broken
        if self._again:
            log.warning("%s: pulling again from a fresh inbox: %s", self._name, reason)
        while True:
            try:
                await self._until_connected()
                await self._pulls.renew()
                # Nothing of the old inbox may arrive at the server after what follows.
                await self._connection.flush()
                await self._durable.check_stream()
                pending = await self._durable.refresh()
                await self._durable.restore()
                orphans = await self._requeue(pending.count, room) if pending.count else []
            except (NoAnswer, nats.errors.Error, OSError) as error:
                log.info("%s: takeover not finished (%s), again in %g s", self._name, error, _RETRY)
            except SourceError as error:
                if not error.retryable:
                    raise
                log.info("%s: takeover not finished (%s), again in %g s", self._name, error, _RETRY)
            except ApiError as error:
                raise SourceError(f"consumer {self._durable}: {error}") from None
            else:
                if self._pulls.check() is None:
                    self._again = True
                    return orphans
            await asyncio.sleep(_RETRY)

    async def _requeue(self, pending: int, room: Room) -> list[Msg]:
        """Have the unacknowledged messages delivered before anything new; at the start, all of them at once.

        Messages expire in batches, and the server queues batch behind batch: what an earlier process left is in
        order only after sorting all of it. Later, what this process holds needs no order, and deliveries that
        were lost on the way expire in the order in which they were made.
        """
        if not await self._shrink(pending):
            await self._hold_back()
        if self._again:
            return []
        collected: dict[int, Msg] = {}
        while True:
            count = (await self._durable.refresh()).count
            # Everything collected is unacknowledged itself, so equal counts mean that nothing is missing.
            if count <= len(collected):
                return [collected[position] for position in sorted(collected)]
            if count > room.messages:
                await self._requeue_in_one_batch(count, room)
                return []
            # When not all of them came, some had not expired: once more, for what is missing.
            if not await self._collect(count, collected) and not await self._shrink(count):
                await self._hold_back()

    async def _requeue_in_one_batch(self, count: int, room: Room) -> None:
        """More orphans than may be held here: have all of them delivered, drop them, and shrink once more.

        Now they expire together, in one batch, which the server sorts.
        """
        dropped: dict[int, Msg] = {}
        came = 0
        while came < count and await self._collect(min(room.messages, count - came), dropped):
            came += len(dropped)
            dropped.clear()
        if not await self._shrink(count):
            raise SourceError(
                f"{self._name}: an earlier run left {count} messages unacknowledged and max_in_flight is "
                f"{room.messages}: without changing the consumer they can be put in order only together; raise "
                'max_in_flight to that once, or permit takeover="modify"'
            )

    async def _collect(self, count: int, collected: dict[int, Msg]) -> bool:
        """Pull until ``count`` messages are collected; False when they stop coming before that."""
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
