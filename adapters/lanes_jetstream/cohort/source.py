"""The source that reads as a member of an exclusive cohort. Each owned cohort partition has its own durable.

``lanes.cohort.membership`` acquires and gives up partitions, and ``lanes.cohort.owned`` reports these changes as source
events. This module pulls and acknowledges the messages of owned partitions. An interruption is a reconnect, a missing
delivery or an unanswered pull request. After an interruption, a takeover replaces the consumer of the partition by a
new consumer, which delivers in order.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import nats.errors

from lanes.clock import monotonic
from lanes.cohort.membership import HINTED, Membership
from lanes.cohort.owned import OwnedPartitions
from lanes.core.cohort.actions import LeaseOwned
from lanes.core.cohort.checkpoint_pace import DEFAULT_INTERVAL
from lanes.core.types import Message, Partition, Room, Settlement
from lanes.errors import SourceError
from lanes.queues.partitioned import PartitionedQueue
from lanes.queues.stranded import partition_number
from lanes.source import Backlog, Destination, Outage, Retention, SourceEvent, SourceTraits
from lanes_jetstream.cohort.epoch_consumers import JetStreamEpochConsumers
from lanes_jetstream.cohort.lease_store import bucket_name
from lanes_jetstream.cohort.owned_partition import PulledPartition
from lanes_jetstream.cohort.partitioning import KeyWatch
from lanes_jetstream.cohort.pulls import ConsumerPulls, Inbox
from lanes_jetstream.cohort.settings import Cohort
from lanes_jetstream.cohort.setup import find_cohort
from lanes_jetstream.cohort.watch import CohortWatch
from lanes_jetstream.wire.acks import ACK, OwnAcks, ack_errors, keep_alive, send_all
from lanes_jetstream.wire.connection import CLOSED, Connection, Denials
from lanes_jetstream.wire.intake import Intake
from lanes_jetstream.wire.keys import KeyFunction
from lanes_jetstream.wire.messages import READER
from lanes_jetstream.wire.queue_subjects import is_of
from lanes_jetstream.wire.queue_watch import QueueWatch, reads_only
from lanes_jetstream.wire.stream import OutOfRange, Start
from lanes_jetstream.wire.turns import Turns

log = logging.getLogger("lanes.jetstream")

_POLL_INTERVAL: Final = 0.25
"""Seconds between two checks of the connection while nothing arrives."""

_DEFAULT_NAMESPACE: Final = "lanes"
"""Default of ``Cohort.namespace``."""

_BUSY: Final = 1.0
"""Seconds after the last message for which a partition counts as busy."""

_CONFIRM: Final = 0.5
"""Seconds between two acknowledgements of a partition that request a confirmation, to detect a deleted consumer."""

_FLUSH: Final = 1.0
"""Seconds that a release waits until the server has read the acknowledgements. The lease tells the next owner about
finished messages whose acknowledgement the server has not read."""

_LEAVING: Final = 4.0
"""Seconds that a leaving member has for its last requests."""

_JOINING: Final = 10.0
"""Seconds, in addition to one lease time, within which a member must join."""


@dataclass(eq=False, repr=False, kw_only=True)
class CohortSource:
    """The source of a member; see ``JetStreamSource``, which checks the arguments. Needs asyncio.

    Attributes:
        connection: Connection to the server.
        stream: Name of the stream.
        cohort: Settings of the cohort.
        key: Function that returns the key of a message; None = no keys.
        start: First message that a new cohort reads.
        ack_wait: Seconds until the server redelivers a message, 1 or more.
        max_ack_pending: Limit of unacknowledged messages of each partition, 1 or more.
        out_of_range: Policy for messages that the stream dropped.
        queue: Queue whose physical queues are the cohort partitions; None = the stream's own partitioning.
        queue_watch: The check for messages that no member of the cohort reads.
    """

    connection: Connection
    stream: str
    cohort: Cohort
    key: KeyFunction | None
    start: Start
    ack_wait: float
    max_ack_pending: int
    out_of_range: OutOfRange = "fail"
    queue: PartitionedQueue | None = None

    def __post_init__(self) -> None:
        cohort = self.cohort
        self._name = f"jetstream {self.stream}/{_named(cohort)}, member {cohort.member_id}"
        self.connection.serve(self._name)
        self._own_acks = OwnAcks(self._name)
        self._key_watch: KeyWatch | None = None
        self._consumers: JetStreamEpochConsumers
        self._inbox: Inbox
        self._membership_task: asyncio.Task[None] | None = None
        self._checkpoint_within = DEFAULT_INTERVAL
        self._opened = AsyncExitStack()
        self._bucket = bucket_name(self.stream, cohort.namespace)
        self._partitions: OwnedPartitions[PulledPartition]
        self._turns: Turns
        self._cohort_watch: CohortWatch
        self._denials: Denials
        self._intake: Intake
        self.queue_watch = QueueWatch(
            self.connection, self.stream, self.queue, f"cohort {_named(cohort)!r}", self._consumers_of, self._name
        )

    def __repr__(self) -> str:
        return f"<CohortSource {self._name}>"

    def checkpoint_within(self, seconds: float) -> None:
        """Set the maximum time until the member stores a finished message; see ``lanes.source.Checkpointing``."""
        self._checkpoint_within = seconds

    # --- lanes.source.Source

    async def open(self) -> SourceTraits:
        """Connect, find the stream, and join the cohort; see ``lanes.source.Source.open``."""
        connection, stream, cohort = self.connection, self.stream, self.cohort
        await connection.open()
        found = await find_cohort(connection, stream, cohort, key=self.key, start=self.start, queue=self.queue)
        self._intake = found.intake
        client = connection.client
        self._key_watch = KeyWatch() if found.watch_keys else None
        self._turns = Turns(self._name, found.partitioning.partitions)
        self._inbox = Inbox(client)
        self._denials = Denials(client, self._is_needed)
        self._opened.push_async_callback(self._close, self._inbox.close)
        await self._inbox.open()
        self._opened.push_async_callback(self._close, found.store.aclose)
        self._consumers = JetStreamEpochConsumers(
            connection,
            stream,
            cohort.namespace,
            incarnation=found.config.incarnation,
            filters=found.partitioning.filters,
            highest=self._highest,
            check=partial(found.partitioning.check_unchanged, stream, found.config.retention),
            lease=cohort.lease,
            ack_wait=self.ack_wait,
            max_ack_pending=self.max_ack_pending,
        )
        self._partitions = OwnedPartitions(
            stream if self.queue is None else self.queue.names.__getitem__,
            READER,
            found.config.incarnation,
            membership=partial(
                Membership,
                found.store,
                self._consumers,
                found.config,
                member=cohort.member_id,
                settings=cohort.settings,
                start=found.start,
            ),
            make=PulledPartition,
            follow=self._follow,
            wake=self._inbox.wake.set,
        )
        self._cohort_watch = CohortWatch(
            connection=connection,
            stream=stream,
            name=self._name,
            partitions=self._partitions,
            out_of_range=self.out_of_range,
            wake=self._inbox.wake.set,
        )
        membership = self._partitions.membership
        membership.checkpoint_within(self._checkpoint_within)
        await found.store.watch(HINTED, membership.hint)
        self._opened.push_async_callback(self._cohort_watch.stop)
        self._membership_task = asyncio.create_task(membership.run())
        self._opened.push_async_callback(self._stop_membership, self._membership_task)
        self._membership_task.add_done_callback(lambda _: self._inbox.wake.set())
        await self._until_joined(membership)
        self._cohort_watch.start()
        self._opened.push_async_callback(self.queue_watch.stop)
        self.queue_watch.start()
        return dataclasses.replace(self.declared(), partitions=found.partitioning.partitions)

    def declared(self) -> SourceTraits:
        """Return the traits that do not depend on the stream; see ``lanes.source.Declaring.declared``."""
        return SourceTraits(
            name=self._name,
            system="nats",
            extend_interval=self.ack_wait / 3,
            max_in_flight=self.max_ack_pending,
            remembers=True,
            partitions=self.cohort.partitions if self.queue is None else self.queue.partitions,
            plans=True,
            consumer_target=self.cohort.consumer_target,
            queues=() if self.queue is None else (self.queue,),
        )

    async def receive(self, room: Room) -> Sequence[SourceEvent]:
        """Wait for messages and for partition events; see ``lanes.source.Source.receive``."""
        partitions = self._partitions
        partitions.in_flight = max(partitions.in_flight, room.messages)
        while True:
            self._raise_failure()
            self._inbox.wake.clear()
            partitions.step()
            for owned in list(partitions.by_number.values()):
                self._check(owned)
            events = partitions.next_events() or self._take_arrived(room)
            if events:
                return events
            try:
                await self._acknowledge_again()
                await self._pull(room)
            except (nats.errors.Error, OSError) as error:
                log.debug("%s: nothing requested: %s", self._name, type(error).__name__)
            with suppress(TimeoutError):
                async with asyncio.timeout(_POLL_INTERVAL):
                    await self._inbox.wake.wait()

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        """Acknowledge messages of owned partitions; see ``lanes.source.Source.settle``.

        The call sends no acknowledgement for a partition that the member no longer owns. Without a connection the call
        sends nothing, and the member acknowledges the messages at their redelivery.
        """
        client, now = self.connection.client, monotonic()
        tokens: list[str] = []
        confirmed: list[tuple[str, str]] = []
        for settlement in settlements:
            owned = self._partitions.settled(settlement)
            if owned is None:
                continue
            self._own_acks.look(settlement)
            tokens += [str(message.token) for message in settlement.messages]
            if owned.pulls is not None and now >= owned.confirm_at and owned.pulls.delivered_by(tokens[-1]):
                owned.confirm_at = now + _CONFIRM
                confirmed.append((tokens.pop(), owned.pulls.confirmation))
        if not client.is_connected:
            return
        with ack_errors(self._name):
            await send_all(client, tokens, ACK)
            for token, reply in confirmed:
                await client.publish(token, ACK, reply=reply)

    async def extend(self, messages: Sequence[Message]) -> None:
        """Tell the server that these messages are still in progress. Best effort."""
        leased = self._partitions.leased
        tokens = [str(message.token) for message in messages if leased(message.partition) is not None]
        await keep_alive(self.connection.client, tokens, self._name)

    async def release(self, partition: Partition) -> None:
        """Store the finished messages of a drained partition, and release its lease.

        A call after a cancelled call continues the release. If a handler of the partition still runs, the call does not
        release the lease, which then expires.
        """
        await self._partitions.release(partition, self._flush)

    async def aclose(self) -> None:
        """Leave the cohort, and close a connection that the source opened. Idempotent.

        If a partition is not released and has unsettled messages, the member does not leave, and its leases expire.
        """
        try:
            await self._opened.aclose()
        finally:
            await self.connection.close()

    def lag(self, partition: Partition) -> int | None:
        """Return the number of unfinished messages, including undelivered messages; see ``lanes.source.Lagging``."""
        owned = self._partitions.of(partition)
        return None if owned is None else owned.lag

    def backlog(self, partition: Partition) -> Backlog:
        """Return the messages that wait for their delivery; see ``lanes.source.Backlogged``."""
        owned = self._partitions.of(partition)
        if owned is None:
            return Backlog(None)
        interruption = None if owned.pulls is None else owned.pulls.interruption
        if interruption is not None:
            return Backlog(owned.waiting, interruption.text)
        return Backlog(owned.waiting, *self.connection.last_error())

    def outage(self) -> Outage | None:
        """Return the time since a server answered; see ``lanes.source.Connected``."""
        return self.connection.outage()

    def retention(self, message: Message) -> Retention | None:
        """Return the time until the server may delete a message; see ``lanes.source.Retaining``."""
        return self._cohort_watch.retention_of(message)

    def reads(self, destination: Destination) -> bool:
        """Return whether the cohort delivers messages for this destination; see ``lanes.source.Reading``."""
        return self._intake.stores(destination.name, destination.subject) and (
            self.queue is None or is_of(self.queue, destination.subject)
        )

    async def _consumers_of(self, names: Sequence[str]) -> Mapping[str, Mapping[str, Any]]:
        """Find the newest durables of physical queues, including a former number of partitions; see ``QueueWatch``."""
        assert self.queue is not None, "a watch without a queue does not look"
        numbers = {partition_number(self.queue.name, name): name for name in names}
        found = await self._consumers.newest(numbers)
        return {numbers[each]: info for each, info in found.items() if reads_only(info, numbers[each])}

    # --- membership

    def _highest(self) -> int:
        """Return the highest sequence that this process has read."""
        return self._partitions.highest

    def _follow(self, owned: PulledPartition, event: LeaseOwned) -> None:
        self._consumers.check_end(self._partitions.read_up_to(event.done.highest))
        consumer = self._consumers.name(owned.number, event.epoch, event.sub)
        owned.follow(ConsumerPulls(self._inbox, self.connection, self.stream, consumer, self._name))

    async def _flush(self) -> None:
        with suppress(SourceError):
            await self.connection.flush(_FLUSH)

    async def _close(self, close: Callable[[], Awaitable[None]]) -> None:
        # If the caller has closed or disconnected its client, the subscription has already ended.
        with suppress(nats.errors.Error, OSError):
            await close()

    async def _stop_membership(self, running: asyncio.Task[None]) -> None:
        """Leave the cohort. After ``_LEAVING`` seconds, end the membership like a crash."""
        self._partitions.membership.stop()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LEAVING):
                    await self._leave(running)
        finally:
            # Cancel the task in any case, because it would otherwise renew its leases forever.
            running.cancel()
        await asyncio.wait([running])

    async def _leave(self, running: asyncio.Task[None]) -> None:
        """Wait until the member has given up all partitions. The call returns at once if a handler may still run."""
        while not running.done():
            self._inbox.wake.clear()
            if not self._partitions.leave():
                return
            await self._inbox.wake.wait()

    async def _until_joined(self, membership: Membership) -> None:
        running, joined = self._membership_task, asyncio.ensure_future(membership.joined.wait())
        assert running is not None, "it joins once it runs"
        await asyncio.wait([running, joined], timeout=self.cohort.lease + _JOINING, return_when=asyncio.FIRST_COMPLETED)
        joined.cancel()
        self._raise_failure()
        if not membership.joined.is_set():
            raise SourceError(
                f"{self._name}: not joined within {self.cohort.lease + _JOINING:g} s, because "
                f"{self.connection.servers} does not answer for the bucket {self._bucket!r}. Check that the bucket "
                f'has a leader, and that this client may publish to "$KV.{self._bucket}.>" and "$JS.API.>"',
                retryable=True,
            )

    def _raise_failure(self) -> None:
        running = self._membership_task
        if running is not None and running.done() and not running.cancelled():
            error = running.exception()
            if error is not None:
                raise error
        failure = self._partitions.failure or self._cohort_watch.failure
        if failure is not None:
            raise failure
        denied = self._denials.new()
        if denied is not None:
            raise SourceError(f"{self._name}: {denied}, then start again")
        if self.connection.client.is_closed:
            raise SourceError(f"{self._name}: {CLOSED}")

    def _is_needed(self, subject: str) -> bool:
        needed = (self.connection.next_subject(self.stream, ""), f"$JS.ACK.{self.stream}.", self._inbox.subject)
        return subject.startswith(tuple(each.casefold() for each in needed))

    # --- messages

    def _check(self, owned: PulledPartition) -> None:
        """Take a partition over after an interruption. Give the partition up after a deletion of its durable."""
        pulls = owned.pulls
        if pulls is None:
            return
        if pulls.failure is not None:
            if not pulls.deleted:
                raise pulls.failure
            self._partitions.lose(owned, f"its consumer {pulls.consumer} was deleted")
            return
        interruption = pulls.check()
        if interruption is None or not self.connection.client.is_connected:
            return
        if interruption.kind == "unanswered":
            # The consumer has no leader at present, or a client has deleted it. The watch asks the server.
            owned.rest()
            self._cohort_watch.resolve(owned, pulls.consumer)
            return
        log.info("%s: partition %d continues with a new consumer (%s)", self._name, owned.number, interruption)
        self._partitions.take_over(owned)

    def _take_arrived(self, room: Room) -> list[SourceEvent]:
        """Return the arrived messages of unpaused partitions, at most as many as fit into ``room``.

        Messages of a paused partition use no room. When the partition is no longer paused, messages that exceed the
        room wait for the next call. This method does not suspend, so a cancelled ``receive`` loses no message.
        """
        events: list[SourceEvent] = []
        left = max(0, room.messages)
        for owned in self._partitions.by_number.values():
            if owned.partition not in room.paused:
                delivered = owned.take(self.key, self._key_watch, left)
                if delivered is not None:
                    events.append(delivered)
                    left -= len(delivered.run)
        return events

    async def _acknowledge_again(self) -> None:
        """Acknowledge finished messages that the server redelivered, for owned partitions only."""
        client = self.connection.client
        for owned in list(self._partitions.by_number.values()):
            # Check the ownership each time, because the acknowledgements of the previous partition may have taken long.
            if owned.again and client.is_connected and self._partitions.leased(owned.partition) is not None:
                tokens, owned.again = owned.again, []
                await send_all(client, tokens, ACK)

    async def _pull(self, room: Room) -> None:
        """Request messages for all partitions within the room; see ``Turns.pull``."""
        now = monotonic()
        since = now - _BUSY
        pulling: list[ConsumerPulls] = []
        busy: set[ConsumerPulls] = set()
        for owned in self._partitions.by_number.values():
            if owned.announced and owned.pulls is not None and owned.partition not in room.paused:
                pulling.append(owned.pulls)
                if owned.seen > since:
                    busy.add(owned.pulls)
        if pulling and room.messages > 0:
            await self._turns.pull(pulling, busy, room, now)


def _named(cohort: Cohort) -> str:
    """Return the name of a cohort for log lines and metrics. Without a name, the namespace identifies the cohort."""
    if cohort.name is None:
        return cohort.namespace
    # Cohorts in two namespaces of a stream may have the same name.
    return cohort.name if cohort.namespace == _DEFAULT_NAMESPACE else f"{cohort.namespace}/{cohort.name}"
