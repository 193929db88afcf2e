"""A member of an exclusive cohort as a source: the cohort partitions that the plan gives it, each on its own durable.

``lanes.membership`` owns and gives up; this file pulls what is owned, and acknowledges it. Whatever shakes a delivery
(a reconnect, a missing one, a pull that nobody answers) makes it take the partition over from itself: the next consumer
delivers in order. What is lost is dropped at once, and nothing of it is sent any more.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Final

import nats.errors

from lanes.clock import monotonic
from lanes.core.types import Message, Partition, Room, Settlement
from lanes.errors import SourceError
from lanes.membership import Membership
from lanes.source import SourceEvent, SourceTraits
from lanes_jetstream.acks import ACK, keep_alive, send_all, sending
from lanes_jetstream.cohort import Cohort, bucket_name
from lanes_jetstream.cohort_pulls import ConsumerPulls, Inbox, Turns
from lanes_jetstream.cohort_setup import find_place
from lanes_jetstream.cohort_watch import CohortWatch
from lanes_jetstream.connection import Connection, Denials
from lanes_jetstream.epoch_consumers import JetStreamEpochConsumers
from lanes_jetstream.holdings import Holdings
from lanes_jetstream.keys import KeyFunction
from lanes_jetstream.lease_store import JetStreamLeaseStore
from lanes_jetstream.partitioning import KeyWatch
from lanes_jetstream.start import Start
from lanes_jetstream.tenancy import Tenancy
from lanes_jetstream.watch import OutOfRange

__all__ = ["CohortSource"]

log = logging.getLogger("lanes.jetstream")

_LOOK: Final = 0.25
"""Seconds between two looks at the connection while nothing arrives."""

_BUSY: Final = 1.0
"""Seconds since its last message for which a partition counts as busy."""

_CONFIRM: Final = 0.5
"""Seconds between two acknowledgements of a partition whose confirmation is asked for, so that one that nobody reads
is noticed."""

_FLUSH: Final = 1.0
"""Seconds a release waits for its acknowledgements to be read: what is not is in the ledger all the same."""

_LEAVING: Final = 4.0
"""Seconds the last requests of a member that leaves may take."""

_JOINING: Final = 10.0
"""Seconds beyond a lease in which a member has joined, or the bucket does not answer."""


class CohortSource:
    """See ``JetStreamSource``, which checks the arguments. asyncio only."""

    def __init__(
        self,
        connection: Connection,
        stream: str,
        cohort: Cohort,
        *,
        key: KeyFunction | None,
        start: Start,
        ack_wait: float,
        max_ack_pending: int,
        out_of_range: OutOfRange = "fail",
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._cohort = cohort
        self._key = key
        self._start: Start = start
        self._ack_wait = ack_wait
        self._max_ack_pending = max_ack_pending
        self._out_of_range: OutOfRange = out_of_range
        self._name = f"jetstream {stream}/{cohort.namespace}, member {cohort.member_id}"
        self._watch: KeyWatch | None = None
        self._store: JetStreamLeaseStore
        self._consumers: JetStreamEpochConsumers
        self._membership: Membership
        self._inbox: Inbox
        self._running: asyncio.Task[None] | None = None
        self._opened = AsyncExitStack()
        self._bucket = bucket_name(stream, cohort.namespace)
        self._holdings: Holdings
        self._turns: Turns
        self._looks: CohortWatch
        self._denials: Denials
        self._checkpoints = False
        self._most = 1

    def __repr__(self) -> str:
        return f"<CohortSource {self._name}>"

    # --- lanes.source.Source

    async def open(self) -> SourceTraits:
        """Connect, find the stream, and join the cohort; see ``lanes.source.Source.open``."""
        connection, stream, cohort = self._connection, self._stream, self._cohort
        await connection.open()
        found = await find_place(connection, stream, cohort, key=self._key, start=self._start)
        client = connection.client
        self._watch = KeyWatch() if found.watched else None
        self._turns = Turns(self._name, found.partitioning.partitions)
        self._checkpoints = found.config.retention != "workqueue"
        self._inbox = Inbox(client)
        self._denials = Denials(client, self._is_needed)
        self._opened.push_async_callback(self._closed, self._inbox.close)
        await self._inbox.open()
        self._store = found.store
        self._opened.push_async_callback(self._closed, self._store.aclose)
        self._consumers = JetStreamEpochConsumers(
            connection,
            stream,
            cohort.namespace,
            incarnation=found.config.incarnation,
            filters=found.partitioning.filters,
            highest=lambda: self._holdings.highest,
            check=partial(found.partitioning.check_unchanged, stream, found.config.retention),
            lease=cohort.lease,
            ack_wait=self._ack_wait,
            max_ack_pending=self._max_ack_pending,
        )
        self._holdings = Holdings(
            stream,
            found.config.incarnation,
            pulls=self._pulls_of,
            check_end=self._consumers.check_end,
            timeout=cohort.drain_within if cohort.overdue == "force" else math.inf,
            wake=self._inbox.wake.set,
        )
        self._membership = Membership(
            self._store,
            self._consumers,
            found.config,
            member=cohort.member_id,
            settings=cohort.settings,
            start=found.start,
            changed=lambda: self._holdings.changed(self._membership),
        )
        self._looks = CohortWatch(
            connection,
            stream,
            self._name,
            holdings=self._holdings,
            membership=self._membership,
            out_of_range=self._out_of_range,
            wake=self._inbox.wake.set,
        )
        await self._store.watch(self._membership.hint)
        self._opened.push_async_callback(self._looks.stop)
        self._running = asyncio.create_task(self._membership.run())
        self._opened.push_async_callback(self._end, self._running)
        self._running.add_done_callback(lambda _: self._inbox.wake.set())
        await self._until_joined()
        self._looks.start()
        return SourceTraits(
            name=self._name,
            system="nats",
            extend_interval=self._ack_wait / 3,
            max_in_flight=self._max_ack_pending,
            remembers=True,
            partitions=found.partitioning.partitions,
            plans=True,
        )

    async def receive(self, room: Room) -> Sequence[SourceEvent]:
        """Wait for messages and for what becomes of partitions; see ``lanes.source.Source.receive``."""
        self._most = max(self._most, room.messages)
        for number in self._holdings.heard():
            # Its zombies hold their lanes there.
            self._membership.ended(number)
        while True:
            self._raise_failure()
            self._inbox.wake.clear()
            for tenancy in list(self._holdings.tenancies.values()):
                self._look(tenancy)
            events = self._holdings.next_events() or self._take(room)
            if events:
                return events
            try:
                await self._acknowledge_again()
                await self._pull(room)
            except (nats.errors.Error, OSError) as error:
                log.debug("%s: nothing requested: %s", self._name, type(error).__name__)
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK):
                    await self._inbox.wake.wait()

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        """Acknowledge messages of what is owned; see ``lanes.source.Source.settle``.

        Of what is not owned any more nothing is sent. What cannot be sent now is acknowledged when it comes again.
        """
        client, now = self._connection.client, monotonic()
        tokens: list[str] = []
        confirmed: list[tuple[str, str]] = []
        for settlement in settlements:
            tenancy = self._holdings.of(settlement.partition)
            if tenancy is None or now >= settlement.partition.deadline:
                continue
            settled = tenancy.ledger.settled
            for message in settlement.messages:
                settled(message.position)
            self._save(tenancy)
            tokens += [str(message.token) for message in settlement.messages]
            if tenancy.pulls is not None and now >= tenancy.confirm_at and tenancy.pulls.brought(tokens[-1]):
                tenancy.confirm_at = now + _CONFIRM
                confirmed.append((tokens.pop(), tenancy.pulls.confirmation))
        if not client.is_connected:
            return
        with sending(self._name):
            await send_all(client, tokens, ACK)
            for token, reply in confirmed:
                await client.publish(token, ACK, reply=reply)

    async def extend(self, messages: Sequence[Message]) -> None:
        """Tell the server that these are still in progress. Best effort."""
        now = monotonic()
        tokens = [
            str(message.token)
            for message in messages
            if self._holdings.of(message.partition) is not None and now < message.partition.deadline
        ]
        await keep_alive(self._connection.client, tokens, self._name)

    async def release(self, partition: Partition) -> None:
        """Write down what is done of a drained partition, and give up its lease. Goes on when it is cancelled.

        Where something of it still runs, the lease is left to run out, and nobody waits for that here.
        """
        tenancy = self._holdings.of(partition)
        if tenancy is None:
            self._holdings.raise_lost(partition)
            return
        number = tenancy.number
        tenancy.releasing = True
        tenancy.rest()
        if not tenancy.revoked:
            # Not because of the plan: the consumer stops, and its member leaves.
            self._membership.stop()
        self._holdings.release(number)
        ended = not partition.unended
        try:
            try:
                with suppress(SourceError):
                    await self._connection.flush(_FLUSH)
            finally:
                # However that ended: nobody else would ever give it up.
                self._membership.drained(number, tenancy.ledger.snapshot(), ended=ended)
            if ended:
                await tenancy.over.wait()
            self._holdings.raise_lost(partition)
        finally:
            self._holdings.released(number)

    async def aclose(self) -> None:
        """Leave the cohort and close what was opened here. Idempotent.

        With messages that are neither settled nor released it does not leave: its leases run out, as after a crash.
        """
        try:
            await self._opened.aclose()
        finally:
            await self._connection.close()

    def lag(self, partition: Partition) -> int | None:
        """See ``lanes.source.Lagging``: what was delivered and not finished, and what was not delivered yet."""
        tenancy = self._holdings.of(partition)
        return None if tenancy is None else tenancy.lag

    # --- membership

    async def _closed(self, close: Callable[[], Awaitable[None]]) -> None:
        # The user's own client may have been closed, or be away: there is nothing to end then.
        with suppress(nats.errors.Error, OSError):
            await close()

    async def _end(self, running: asyncio.Task[None]) -> None:
        """Leave, or be gone as after a crash."""
        self._membership.stop()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LEAVING):
                    await self._leave(running)
        finally:
            # However that ended: nobody else would ever end it, and its leases would be renewed for nobody.
            running.cancel()
        await asyncio.wait([running])

    async def _leave(self, running: asyncio.Task[None]) -> None:
        """Wait until everything is given up, unless something of it may still run."""
        while not running.done():
            self._inbox.wake.clear()
            for number in self._holdings.unread_losses():
                self._membership.ended(number)
            for tenancy in list(self._holdings.tenancies.values()):
                if tenancy.announced and not tenancy.releasing and len(tenancy.ledger):
                    return
                if not tenancy.releasing:
                    # Everything that was delivered of it is settled: nothing of it runs.
                    tenancy.releasing = True
                    self._membership.drained(tenancy.number, tenancy.ledger.snapshot())
            await self._inbox.wake.wait()

    async def _until_joined(self) -> None:
        running, joined = self._running, asyncio.ensure_future(self._membership.joined.wait())
        assert running is not None, "it joins once it runs"
        await asyncio.wait(
            [running, joined], timeout=self._cohort.lease + _JOINING, return_when=asyncio.FIRST_COMPLETED
        )
        joined.cancel()
        self._raise_failure()
        if not self._membership.joined.is_set():
            raise SourceError(
                f"{self._name}: not joined within {self._cohort.lease + _JOINING:g} s: {self._connection.servers} "
                f"does not answer for the bucket {self._bucket!r}; see that it has a leader, and that this "
                f'client may publish to "$KV.{self._bucket}.>" and "$JS.API.>"',
                retryable=True,
            )

    def _raise_failure(self) -> None:
        running = self._running
        if running is not None and running.done() and not running.cancelled():
            error = running.exception()
            if error is not None:
                raise error
        failure = self._holdings.failure or self._looks.failure
        if failure is not None:
            raise failure
        denied = self._denials.new()
        if denied is not None:
            raise SourceError(f"{self._name}: {denied}, then start again")
        if self._connection.client.is_closed:
            raise SourceError(f"{self._name}: the connection is closed and does not come back: start again")

    def _is_needed(self, subject: str) -> bool:
        needed = (self._connection.next_subject(self._stream, ""), f"$JS.ACK.{self._stream}.", self._inbox.subject)
        return subject.startswith(tuple(each.casefold() for each in needed))

    def _pulls_of(self, number: int, epoch: int, sub: int) -> ConsumerPulls:
        consumer = self._consumers.name(number, epoch, sub)
        return ConsumerPulls(self._inbox, self._connection, self._stream, consumer, self._name)

    # --- messages

    def _look(self, tenancy: Tenancy) -> None:
        """Take a partition over from oneself when its deliveries were shaken; give it up when its durable is gone."""
        pulls = tenancy.pulls
        if pulls is None:
            return
        if pulls.failure is not None:
            if not pulls.deleted:
                raise pulls.failure
            self._membership.gone(tenancy.number, f"its consumer {pulls.consumer} was deleted")
            return
        broken = pulls.check()
        if broken is None or not self._connection.client.is_connected:
            return
        tenancy.rest()
        if broken.kind == "unanswered":
            # No leader now, or no consumer any more: the server knows.
            self._looks.ask_for(tenancy, pulls.consumer)
            return
        log.info("%s: partition %d goes on with a new consumer: %s", self._name, tenancy.number, broken)
        self._membership.takeover(tenancy.number, tenancy.ledger.snapshot())

    def _take(self, room: Room) -> list[SourceEvent]:
        """What has arrived and is not paused.

        Nothing is awaited before it is returned: a cancelled ``receive`` has taken nothing.
        """
        events: list[SourceEvent] = []
        for tenancy in self._holdings.tenancies.values():
            if tenancy.partition not in room.paused:
                delivered = tenancy.take(self._key, self._watch)
                if delivered is not None:
                    events.append(delivered)
        return events

    async def _acknowledge_again(self) -> None:
        """Of what is owned, as ``settle`` does."""
        client = self._connection.client
        for tenancy in list(self._holdings.tenancies.values()):
            # The one before may have taken its time.
            if tenancy.again and client.is_connected and monotonic() < tenancy.partition.deadline:
                tokens, tenancy.again = tenancy.again, []
                await send_all(client, tokens, ACK)

    async def _pull(self, room: Room) -> None:
        """Request what there is room for, in turns; a busy partition gets what idle ones leave."""
        now = monotonic()
        since = now - _BUSY
        pulling: list[ConsumerPulls] = []
        busy: set[ConsumerPulls] = set()
        for tenancy in self._holdings.tenancies.values():
            if tenancy.announced and tenancy.pulls is not None and tenancy.partition not in room.paused:
                pulling.append(tenancy.pulls)
                if tenancy.seen > since:
                    busy.add(tenancy.pulls)
        if pulling and room.messages > 0:
            await self._turns.pull(pulling, busy, room, now)

    def _save(self, tenancy: Tenancy) -> None:
        """Have what is done written down, before a crash would repeat more than could be in flight."""
        ledger = tenancy.ledger
        if self._checkpoints and ledger.since_saved > self._most:
            self._membership.checkpoint(tenancy.number, ledger.save())
