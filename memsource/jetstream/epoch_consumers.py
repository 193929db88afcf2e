"""The durables of a cohort as data: one stream, with one pull consumer for each epoch of a cohort partition.

``EpochStream`` acts only during calls of its methods, which take the time as an argument. The rules are those of
nats-server, confirmed by measurements:

- Retention ``limits`` keeps all messages.
- Retention ``workqueue`` deletes an acknowledged message. A partition has one durable at a time.
- Retention ``interest`` keeps a message until each existing durable that delivers the message has acknowledged it.
  If the partition of a message has no durable, the stream deletes the message on arrival.
- A deleted durable answers neither pulls nor acknowledgements.
- Each durable counts its deliveries separately. ``memsource.jetstream.pull_consumer`` has the rules of a pull consumer.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from lanes.cohort.leases import ConsumerExists, EpochConsumer
from memsource.jetstream.link import Link
from memsource.jetstream.pull_consumer import ConsumerSettings, PullConsumer
from memsource.memory.broker import Delivery
from memsource.memory.topic import Log, Record, WatchedTopic

Retention = Literal["limits", "workqueue", "interest"]

EPOCH_MS: Final = 1_700_000_000_000
"""The server's clock when a stream begins, in milliseconds since 1970."""


class Durable(NamedTuple):
    """The name of a durable: cohort partition, epoch and sub-number."""

    partition: int
    epoch: int
    sub: int


@dataclass(eq=False, slots=True)
class _Made:
    """A durable of a cohort partition.

    Attributes:
        nonce: Nonce of the creation.
        begin: First sequence that the durable delivers.
        log: All messages of the durable, acknowledged or not.
        consumer: The pull consumer.
        lease: Lease time in seconds of the member that created the durable; 0 = unknown.
    """

    nonce: str
    begin: int
    log: Log
    consumer: PullConsumer
    lease: int

    @property
    def floor(self) -> int:
        unfinished = self.consumer.unfinished
        if unfinished:
            return unfinished[0] - 1
        return max(self.begin - 1, self.log.positions[-1] if self.log.positions else 0)


class EpochStream(WatchedTopic):
    """A stream in cohort partitions. Sequences count the messages of all partitions, from 1.

    No method blocks. Not thread-safe. ``now`` never falls.

    Args:
        partitions: Number of partitions, 1 or more. Partition numbers begin at 0.
        retention: Retention of the stream.
        name: Name of the stream.
        settings: Settings of all durables; None = defaults.

    Attributes:
        created: Time and name of each created durable, in order.
        deleted: Time and name of each deleted durable, in order.
        stale: Number of pulls and acknowledgements for missing durables.
        set_back: Seconds by which a test has set the server's clock back.
        marked: Longest lease in seconds of the cohorts that have used the stream; None = no cohort has used the stream.
    """

    def __init__(
        self,
        partitions: int,
        *,
        retention: Retention = "limits",
        name: str = "memory",
        settings: ConsumerSettings | None = None,
    ) -> None:
        super().__init__(partitions, name)
        self.retention = retention
        self.settings = settings or ConsumerSettings()
        self.created: list[tuple[float, Durable]] = []
        self.deleted: list[tuple[float, Durable]] = []
        self.stale = 0
        self.set_back = 0.0
        self.marked: int | None = None
        self._made: dict[Durable, _Made] = {}
        self._gone: set[tuple[int, int]] = set()
        self._end(1)

    # --- producers

    def _appended(self, record: Record) -> None:
        self._end(record.position + 1)
        durables = self._of(record.partition)
        for made in durables:
            made.log.append(record)
        if self.retention == "interest" and not durables:
            self._gone.add((record.partition, record.position))

    def skip(self, count: int, *, partition: int = 0) -> None:
        """Leave a gap of ``count`` sequences in all partitions, as deleted messages do."""
        if count < 0:
            raise ValueError(f"count={count}: must be 0 or more, because sequences only rise")
        self._end(self.topic.logs[partition].end + count)

    # --- administrators

    def found(self, partition: int) -> list[EpochConsumer]:
        """Describe the durables of a partition, by rising epoch and sub-number."""
        return [
            EpochConsumer(name.partition, name.epoch, name.sub, made.nonce, made.floor, made.lease)
            for name, made in sorted(self._made.items())
            if name.partition == partition
        ]

    def server_ms(self, now: float) -> int:
        """Return the time of the server's clock, in milliseconds since 1970."""
        return EPOCH_MS + int((now - self.set_back) * 1000)

    def create(self, name: Durable, now: float, *, nonce: str, start: int | None, lease: int = 0) -> None:
        """Create a durable; see ``lanes.cohort.leases.EpochConsumers.create``."""
        log = self.topic.log(name.partition)
        there = self._made.get(name)
        if there is not None:
            raise ConsumerExists(f"{name} exists", nonce=there.nonce)
        if self.retention == "workqueue":
            if self._of(name.partition):
                raise ConsumerExists(f"another durable of partition {name.partition} exists", nonce=None)
            if start is not None:
                raise ValueError(f"start={start} of {name}: a durable of a work queue has no start; pass None")
        begin = start or 1
        own = Log()
        own.end = log.end
        for sequence in log.positions[bisect_left(log.positions, begin) :]:
            if (name.partition, sequence) not in self._gone:
                own.append(log.records[sequence])
        self._made[name] = _Made(nonce, begin, own, PullConsumer(own, self.settings, self._changed), lease)
        self.created.append((now, name))
        self._changed()

    def mark(self, lease: int = 0) -> None:
        """Mark the stream as used by a cohort; see ``lanes.cohort.leases.EpochConsumers.mark``."""
        self.marked = max(lease, self.marked or 0)

    def delete(self, name: Durable, now: float) -> None:
        """Delete a durable. Idempotent."""
        made = self._made.pop(name, None)
        if made is None:
            return
        self.deleted.append((now, name))
        if self.retention == "interest":
            for sequence in made.log.positions:
                self._settle(name.partition, sequence)
        self._changed()

    # --- consumers

    def exists(self, name: Durable) -> bool:
        """Return whether the durable exists."""
        return name in self._made

    def pull(self, name: Durable, messages: int, size: int, now: float) -> list[Delivery] | None:
        """Deliver the next messages; None = the durable does not exist. See ``PullConsumer.pull``."""
        made = self._made.get(name)
        if made is None:
            self.stale += 1
            return None
        return made.consumer.pull(messages, size, now)

    def ack(self, name: Durable, sequence: int, now: float) -> bool:
        """Acknowledge a message; False = the durable does not exist."""
        made = self._made.get(name)
        if made is None:
            self.stale += 1
            return False
        made.consumer.ack(sequence, now)
        if sequence not in made.consumer.unfinished:
            self._settle(name.partition, sequence)
        return True

    def extend(self, name: Durable, sequence: int, now: float) -> None:
        """Restart the ``ack_wait`` of a message, if the durable exists."""
        made = self._made.get(name)
        if made is not None:
            made.consumer.extend(sequence, now)

    def consumer(self, name: Durable) -> PullConsumer:
        """Return one durable. Raises ``KeyError`` for a missing durable."""
        return self._made[name].consumer

    def names(self, partition: int) -> list[Durable]:
        """List the names of the durables of a partition, rising."""
        return sorted(name for name in self._made if name.partition == partition)

    def left(self, partition: int) -> list[Record]:
        """Return the unacknowledged messages of the newest durable; without a durable, all stored messages."""
        names = self.names(partition)
        log = self.topic.log(partition)
        if not names:
            return [log.records[each] for each in log.positions if (partition, each) not in self._gone]
        return [log.records[sequence] for sequence in self._made[names[-1]].consumer.unfinished]

    def kill(self, now: float) -> None:
        """Kill and restart the only server. The durables forget their changes of the last 0.1 s."""
        for made in self._made.values():
            made.consumer.kill(now)

    # --- time and watchers

    def next_at(self) -> float:
        """Return the time when the next ``ack_wait`` expires; infinity = no ``ack_wait`` runs."""
        return min((made.consumer.next_at() for made in self._made.values()), default=math.inf)

    def advance(self, now: float) -> None:
        """Queue every message whose ``ack_wait`` has expired for redelivery."""
        for made in self._made.values():
            made.consumer.advance(now)

    # --- inside

    def _of(self, partition: int) -> list[_Made]:
        return [made for name, made in self._made.items() if name.partition == partition]

    def _settle(self, partition: int, sequence: int) -> None:
        """Delete an acknowledged message, unless the retention or another durable keeps the message."""
        if self.retention == "limits":
            return
        waited = any(sequence in made.consumer.unfinished for made in self._of(partition))
        if not waited:
            self._gone.add((partition, sequence))

    def _end(self, end: int) -> None:
        for log in self.topic.logs:
            log.end = max(log.end, end)


class MemoryEpochConsumers:
    """The ``lanes.cohort.leases.EpochConsumers`` of a member, over its link to a stream. For asyncio and trio.

    Args:
        stream: The stream.
        link: The link of the member.
        lease: Lease time of the member in seconds, which its durables record; 0 = unknown.
    """

    def __init__(self, stream: EpochStream, link: Link, lease: int = 0) -> None:
        self.stream = stream
        self.link = link
        self.lease = lease

    async def found(self, partition: int) -> tuple[Sequence[EpochConsumer], int]:
        """See ``lanes.cohort.leases.EpochConsumers.found``."""
        return await self.link.read(lambda now: (self.stream.found(partition), self.stream.server_ms(now)))

    async def marked(self) -> int | None:
        """See ``lanes.cohort.leases.EpochConsumers.marked``."""
        return await self.link.read(lambda now: self.stream.marked)

    async def mark(self) -> None:
        """See ``lanes.cohort.leases.EpochConsumers.mark``."""
        await self.link.write(lambda now: self.stream.mark(self.lease))

    async def names(self) -> Sequence[tuple[int, int, int]]:
        """See ``lanes.cohort.leases.EpochConsumers.names``."""
        return await self.link.read(
            lambda now: [name for partition in self.stream.topic.partitions for name in self.stream.names(partition)]
        )

    async def create(self, partition: int, epoch: int, sub: int, *, nonce: str, start: int | None) -> None:
        """See ``lanes.cohort.leases.EpochConsumers.create``."""
        name = Durable(partition, epoch, sub)
        await self.link.write(lambda now: self.stream.create(name, now, nonce=nonce, start=start, lease=self.lease))

    async def delete(self, partition: int, epoch: int, sub: int) -> None:
        """See ``lanes.cohort.leases.EpochConsumers.delete``."""
        await self.link.write(lambda now: self.stream.delete(Durable(partition, epoch, sub), now))
