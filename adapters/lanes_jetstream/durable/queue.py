"""The source that reads a partitioned queue in one stream. Each physical queue has a durable, and is one partition.

The durables share one connection and the room of the consumer. A durable in a takeover, or without deliveries, does not
stop the other durables.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from itertools import groupby
from typing import Any, Final

import nats.errors

from lanes.clock import monotonic
from lanes.core.types import Message, Partition, Room, Settlement
from lanes.queues.partitioned import PartitionedQueue
from lanes.queues.stranded import partition_number
from lanes.source import Assigned, Backlog, Delivered, Destination, Outage, Retention, SourceEvent, SourceTraits
from lanes_jetstream.durable.pulls import DurablePulls
from lanes_jetstream.durable.source import DurableSource
from lanes_jetstream.durable.takeover import POLL_INTERVAL
from lanes_jetstream.wire import codes
from lanes_jetstream.wire.acks import keep_alive
from lanes_jetstream.wire.connection import Connection
from lanes_jetstream.wire.messages import sequences
from lanes_jetstream.wire.pull_requests import PULL_EXPIRES
from lanes_jetstream.wire.queue_watch import QueueWatch, reads_only

_BUSY: Final = 1.0
"""Seconds after the last message for which a partition counts as busy."""

_BUSY_EXPIRES: Final = 1.0
"""Seconds until an unfilled request of a busy partition ends. Another partition can then use the room."""


def durable_name(durable: str, partition: int) -> str:
    """Return the name of the durable of a partition. The durable of partition 0 has no suffix."""
    return f"{durable}__p{partition}" if partition else durable


class QueuePart(DurableSource):
    """The durable of one partition. ``QueueSource`` requests the takeovers and the messages of the durable."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.seen = 0.0
        self.released = False
        self._task: asyncio.Task[None] | None = None

    @property
    def partition(self) -> Partition:
        """The assignment of the partition."""
        assert self._partition is not None, "open() comes first"
        return self._partition

    @property
    def pulls(self) -> DurablePulls:
        """The pull requests of the durable."""
        return self._pulls

    @property
    def collected(self) -> int:
        """Number of messages from a takeover that wait for ``take``."""
        return len(self._collected)

    @property
    def ready(self) -> bool:
        """Whether the source may request new messages of the durable."""
        return self._task is None and self._taken_over and not self._collected and not self.released

    async def check(self) -> None:
        """Raise the error that stops the source, if the durable or its stream has such an error."""
        if self._watch.failure is not None or self._pulls.failure is not None:
            raise await self._failure()
        self._takeover.check_connection()
        if self._task is not None and self._task.done():
            task, self._task = self._task, None
            task.result()

    def begin_takeover(self, room: Room) -> None:
        """Start a takeover if the durable needs one and none runs. The call does not block."""
        if self._task is None and not self.released and (not self._taken_over or self._pulls.check() is not None):
            self._task = asyncio.create_task(self._take_over(room))
            self._task.add_done_callback(lambda _: self.wake.set())

    async def _take_over(self, room: Room) -> None:
        # Empty the list first. After a cancellation, the next takeover collects these messages again.
        self._taken_over = False
        self._expected = None
        self._collected.clear()
        collected = await self._takeover.run(room, self._highest)
        if collected:
            # The highest delivery number belongs to the last delivery.
            self._expected = max(sequences(raw.reply)[1] for raw in collected) + 1
        self._collected = collected
        self._taken_over = True

    def take(self, limit: int) -> Delivered | None:
        """Return at most ``limit`` arrived messages as one event; None = no message has arrived."""
        if limit <= 0 or self._task is not None:
            return None
        in_turn = not self._collected
        if in_turn:
            arrived = self._pulls.take(limit)
        else:
            arrived, self._collected = self._collected[:limit], self._collected[limit:]
        events = self._delivered(self.partition, arrived, in_turn=in_turn) if arrived else []
        if not events:
            return None
        self.seen = monotonic()
        (event,) = events
        assert isinstance(event, Delivered), "a run"
        return event

    async def keep_alive(self) -> None:
        """Tell the server that the messages that wait for room are in progress. Best effort."""
        waiting = [raw.reply for raw in [*self._collected, *self._pulls.arrived]]
        now = monotonic()
        if waiting and now >= self._extend_at and self._task is None:
            shortest, _ = self.durable.ack_waits
            self._extend_at = now + shortest / 3
            await keep_alive(self.connection.client, waiting, self._name)

    async def end(self) -> None:
        """End the takeover, and close the inboxes. The connection stays open. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.exception()
        await self._opened.aclose()


class QueueSource:
    """The source that reads the durables of a partitioned queue; see ``JetStreamSource``, which checks the arguments.

    Args:
        connection: Connection to the server, which all ``parts`` share.
        stream: Name of the stream.
        durable: Name of the durable of partition 0.
        queue: The queue.
        parts: The durable of each partition, in order.
        wake: Event that all ``parts`` share, and that wakes the source.

    Attributes:
        queue_watch: Finds messages in physical queues that have no durable of this source.
    """

    def __init__(
        self,
        connection: Connection,
        stream: str,
        durable: str,
        queue: PartitionedQueue,
        parts: Sequence[QueuePart],
        wake: asyncio.Event,
    ) -> None:
        self.connection = connection
        self.parts = list(parts)
        self._name = f"jetstream {stream}/{durable}"
        connection.serve(self._name)
        self._stream = stream
        self._durable = durable
        self._queue = queue
        self.queue_watch = QueueWatch(connection, stream, queue, f"durable {durable!r}", self._consumers_of, self._name)
        self._wake = wake
        self._by_partition: dict[Partition, QueuePart] = {}
        self._assigned = False
        self._first = 0

    def __repr__(self) -> str:
        return f"<QueueSource {self._name} of {self._queue!r}>"

    # --- lanes.source.Source

    async def open(self) -> SourceTraits:
        """Connect, check the stream, and find or create each durable; see ``lanes.source.Source.open``."""
        traits = [await part.open() for part in self.parts]
        self._by_partition = {part.partition: part for part in self.parts}
        self.queue_watch.start()
        return dataclasses.replace(
            self.declared(),
            extend_interval=min((each.extend_interval for each in traits if each.extend_interval), default=None),
            max_in_flight=min((each.max_in_flight for each in traits if each.max_in_flight), default=None),
        )

    def declared(self) -> SourceTraits:
        """Return the traits that do not depend on the durables; see ``lanes.source.Declaring.declared``."""
        return SourceTraits(name=self._name, system="nats", partitions=self._queue.partitions, queues=(self._queue,))

    async def receive(self, room: Room) -> Sequence[SourceEvent]:
        """Wait for messages; see ``lanes.source.Source.receive``."""
        if not self._assigned:
            self._assigned = True
            return [Assigned(part.partition) for part in self.parts]
        while True:
            self._wake.clear()
            for part in self.parts:
                await part.check()
            events = self._take_arrived(room)
            if events:
                return events
            for part in self.parts:
                if part.partition not in room.paused:
                    part.begin_takeover(room)
                await part.keep_alive()
            await self._pull(room)
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_INTERVAL):
                    await self._wake.wait()

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        """Acknowledge messages; see ``lanes.source.Source.settle``."""
        for settlement in settlements:
            await self._by_partition[settlement.partition].settle([settlement])

    async def extend(self, messages: Sequence[Message]) -> None:
        """Tell the server that these messages are still in progress. Best effort."""
        for partition, group in groupby(messages, lambda message: message.partition):
            await self._by_partition[partition].extend(list(group))

    async def release(self, partition: Partition) -> None:
        """Stop pulling a partition, and wait for its acknowledgements; see ``JetStreamSource``."""
        part = self._by_partition[partition]
        part.released = True
        await part.release(partition)

    async def aclose(self) -> None:
        """Close the inboxes, and a connection that the source opened. Idempotent."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.connection.close)
            for part in self.parts:
                stack.push_async_callback(part.end)
            stack.push_async_callback(self.queue_watch.stop)

    def lag(self, partition: Partition) -> int | None:
        """Return the number of unacknowledged and undelivered messages; see ``lanes.source.Lagging``."""
        return self._by_partition[partition].lag(partition)

    def backlog(self, partition: Partition) -> Backlog:
        """Return the messages that wait for their delivery; see ``lanes.source.Backlogged``."""
        return self._by_partition[partition].backlog(partition)

    def outage(self) -> Outage | None:
        """Return the time since a server answered; see ``lanes.source.Connected``."""
        outages = [part.outage() for part in self.parts]
        return min((each for each in outages if each is not None), default=None) if all(outages) else None

    def retention(self, message: Message) -> Retention | None:
        """Return the time until the server may delete a message; see ``lanes.source.Retaining``."""
        return self._by_partition[message.partition].retention(message)

    def reads(self, destination: Destination) -> bool:
        """Return whether a durable delivers the messages of this destination."""
        return any(part.reads(destination) for part in self.parts)

    # --- messages that no consumer reads

    async def _consumers_of(self, names: Sequence[str]) -> Mapping[str, Mapping[str, Any]]:
        """Find the durables of physical queues, including a former number of partitions; see ``QueueWatch``."""
        found = {}
        for name in names:
            durable = durable_name(self._durable, partition_number(self._queue.name, name))
            info = await self.connection.find(f"CONSUMER.INFO.{self._stream}.{durable}", codes.CONSUMER_NOT_FOUND)
            if info is not None and reads_only(info, name):
                found[name] = info
        return found

    # --- messages

    def _take_arrived(self, room: Room) -> list[SourceEvent]:
        """Return the arrived messages of unpaused partitions, at most as many as fit into ``room``.

        Successive calls begin with different partitions. The method does not suspend, so a cancelled ``receive`` loses
        no message.
        """
        events: list[SourceEvent] = []
        left = room.messages if room.bytes > 0 else 0
        self._first = (self._first + 1) % len(self.parts)
        for part in [*self.parts[self._first :], *self.parts[: self._first]]:
            if part.partition not in room.paused and (run := part.take(left)) is not None:
                events.append(run)
                left -= len(run.run)
        return events

    async def _pull(self, room: Room) -> None:
        """Request messages within the room, plus one message for each partition.

        Each partition always has an open request for one message, so an idle partition delivers its next message
        immediately. If this message exceeds the room, it waits in the source. Busy partitions share the room evenly.
        While other partitions are idle, the busy partitions share three quarters of the room.
        """
        now = monotonic()
        # Messages of a paused partition use no room, because the partition's own bound limits them.
        active = [part for part in self.parts if part.partition not in room.paused]
        pulling = [part for part in active if part.ready]
        left = room.messages - sum(part.collected + max(0, part.pulls.reserved - 1) for part in active)
        if not pulling or room.messages <= 0 or room.bytes <= 0:
            return
        busy = [part for part in pulling if part.seen > now - _BUSY]
        shared = room.messages if len(busy) == len(pulling) else room.messages - room.messages // 4
        size = max(1, room.bytes // len(pulling))
        try:
            for part in pulling:
                pulls, taken = part.pulls, part.pulls.reserved
                share = min(shared // len(busy), taken + max(0, left)) if part in busy else 1
                pulls.expires = _BUSY_EXPIRES if share > 1 else PULL_EXPIRES
                await pulls.pull(Room(max(1, share), size))
                left -= pulls.reserved - taken
        except (nats.errors.Error, OSError) as error:
            # Count the failed request as open, because the error does not show which request failed.
            for part in pulling:
                part.pulls.interrupt("unsent", f"pull not sent ({type(error).__name__})")
