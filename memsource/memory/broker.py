"""A broker as data: partitions of messages, what was delivered of them, and what was acknowledged.

It acts only when it is called, and time is an argument, so the same broker serves a test on a real event loop
and a simulation. Its rules are those of a broker with individual acknowledgements, in their strictest reading:

- Positions of a partition rise and may have gaps.
- Every delivery has a token of its own. Only the token of the newest delivery acknowledges a message; any other
  is ignored and counted in ``stale``, so whoever settles with an old one sees the message again.
- A message that is not acknowledged within ``ack_wait`` seconds is due again: ``expire(now)`` requeues it.
- What is requeued is delivered before anything new, in the order in which it was requeued.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

from lanes.core.types import PartitionKey
from memsource.memory.dead_letters import KeepsDeadLetters
from memsource.memory.topic import Record, Topic
from memsource.memory.watchers import Watched

__all__ = ["Delivery", "MemoryBroker"]


@dataclass(frozen=True, slots=True)
class Delivery:
    """One delivery of a record: the ``count``-th, under its own ``token``; ``deadline`` is when it is due again."""

    record: Record
    token: int
    count: int
    deadline: float


class _Log:
    """One partition: which of its records are where on their way."""

    __slots__ = ("acked", "again", "counts", "fresh", "records", "unacked")

    def __init__(self, records: dict[int, Record]) -> None:
        self.records = records
        self.fresh: deque[int] = deque()
        self.again: dict[int, None] = {}  # an ordered set
        self.unacked: dict[int, Delivery] = {}
        self.acked: set[int] = set()
        self.counts: Counter[int] = Counter()


class MemoryBroker(Watched, KeepsDeadLetters):
    """``partitions`` numbered from 0 of one topic called ``name``.

    ``ack_wait``: seconds a delivery may stay unacknowledged. ``max_unacked``: how many messages of all partitions
    together may be, None = any number. ``stale`` counts acknowledgements by tokens that did not count any more.
    Nothing blocks. Not thread-safe. Everything is kept, so it is for tests, not for hours of traffic.
    """

    def __init__(
        self, partitions: int = 1, *, name: str = "memory", ack_wait: float = 30.0, max_unacked: int | None = None
    ) -> None:
        super().__init__()
        if not ack_wait > 0:
            raise ValueError(f"ack_wait={ack_wait}: must be more than 0 seconds")
        if max_unacked is not None and max_unacked < 1:
            raise ValueError(f"max_unacked={max_unacked}: must be 1 or more, or None")
        self.name = name
        self.ack_wait = ack_wait
        self.max_unacked = max_unacked
        self.stale = 0
        self._topic = Topic(partitions, name)
        self._logs = [_Log(log.records) for log in self._topic.logs]
        self._tokens: dict[int, Record] = {}

    def __repr__(self) -> str:
        return f"<MemoryBroker {self.name}: {len(self._logs)} partitions, {self._topic.published} messages>"

    # --- producers

    def publish(
        self,
        value: bytes | str = b"",
        *,
        key: PartitionKey | None = None,
        headers: Iterable[tuple[str, bytes]] = (),
        subject: str | None = None,
        partition: int | None = None,
    ) -> Record:
        """Append one message and return it.

        Without ``partition`` a key always goes to the same one, and keyless messages go round. ``subject`` is the
        broker's name unless given. Raises ``IndexError`` for a partition that does not exist, ``ValueError`` or
        ``TypeError`` for what can be no key.
        """
        record = self._topic.publish(value, key=key, headers=headers, subject=subject, partition=partition)
        self._logs[record.partition].fresh.append(record.position)
        self._changed()
        return record

    def skip(self, count: int, *, partition: int = 0) -> None:
        """Leave a gap of ``count`` positions, as compaction and transaction markers do."""
        self._topic.skip(count, partition=partition)

    # --- consumers

    @property
    def partitions(self) -> range:
        """The numbers of the partitions."""
        return self._topic.partitions

    def deliver(self, partition: int, messages: int, size: int, now: float) -> list[Delivery]:
        """Deliver what is next: at most ``messages``, and the last one is that which reaches ``size`` bytes."""
        log = self._log(partition)
        deliveries: list[Delivery] = []
        while len(deliveries) < messages and size > 0:
            if log.again:
                position = next(iter(log.again))
                del log.again[position]
            elif log.fresh and self._may_grow():
                position = log.fresh.popleft()
            else:
                break
            record = log.records[position]
            log.counts[position] += 1
            token = len(self._tokens) + 1
            self._tokens[token] = record
            delivery = Delivery(record, token, log.counts[position], now + self.ack_wait)
            log.unacked[position] = delivery
            deliveries.append(delivery)
            size -= record.size
        return deliveries

    def ack(self, token: int) -> None:
        """Acknowledge a delivery. Idempotent. Raises ``KeyError`` for a token that was never given out."""
        record = self._tokens[token]
        log = self._logs[record.partition]
        if self._newest(token) is not None:
            del log.unacked[record.position]
            log.acked.add(record.position)
            if self.max_unacked is not None:
                self._changed()
        elif record.position not in log.acked:
            # An acknowledgement that comes twice is no mistake; one of an old delivery is.
            self.stale += 1

    def extend(self, token: int, now: float) -> None:
        """Start the ``ack_wait`` of a delivery anew. Raises ``KeyError`` for a token that was never given out."""
        delivery = self._newest(token)
        if delivery is not None:
            record = delivery.record
            later = Delivery(record, token, delivery.count, now + self.ack_wait)
            self._logs[record.partition].unacked[record.position] = later

    def redeliver(self, positions: Iterable[int], *, partition: int = 0) -> None:
        """Requeue messages that were delivered before, in this order, as if their ``ack_wait`` was over.

        For an acknowledged one it is as if its acknowledgement had been lost on the way. Raises ``ValueError``
        for a position that was never delivered.
        """
        log = self._log(partition)
        for position in positions:
            if not log.counts[position]:
                raise ValueError(f"position {position} of partition {partition} was never delivered")
            log.acked.discard(position)
            # The tokens given out so far are void from now on.
            log.unacked.pop(position, None)
            # Out first: what waits already takes its place anew.
            log.again.pop(position, None)
            log.again[position] = None
        self._changed()

    def requeue(self, partition: int) -> None:
        """Requeue everything unacknowledged by position: the partition has a new owner."""
        self.redeliver(self.unacked(partition), partition=partition)

    def expire(self, now: float) -> int:
        """Requeue by position every delivery whose ``ack_wait`` is over at ``now``; returns how many."""
        expired = 0
        for number, log in enumerate(self._logs):
            due = sorted(p for p, delivery in log.unacked.items() if delivery.deadline <= now)
            if due:
                self.redeliver(due, partition=number)
            expired += len(due)
        return expired

    # --- questions

    def unacked(self, partition: int = 0) -> list[int]:
        """Positions that were delivered and not acknowledged, rising; those that wait for a redelivery included."""
        log = self._log(partition)
        return sorted({*log.unacked, *log.again})

    def acked(self, partition: int = 0) -> list[int]:
        """Positions that were acknowledged, rising."""
        return sorted(self._log(partition).acked)

    def waiting(self, partition: int = 0) -> int:
        """How many messages would be delivered next, if there were room."""
        log = self._log(partition)
        return len(log.again) + len(log.fresh)

    def deliveries(self, position: int, partition: int = 0) -> int:
        """How often a position was delivered."""
        return self._log(partition).counts[position]

    @property
    def unfinished(self) -> int:
        """How many messages of all partitions are not acknowledged, delivered or not."""
        return sum(len(log.records) - len(log.acked) for log in self._logs)

    def _newest(self, token: int) -> Delivery | None:
        """The delivery of this token while it counts."""
        record = self._tokens[token]
        delivery = self._logs[record.partition].unacked.get(record.position)
        return delivery if delivery is not None and delivery.token == token else None

    def _may_grow(self) -> bool:
        if self.max_unacked is None:
            return True
        return sum(len(log.unacked) + len(log.again) for log in self._logs) < self.max_unacked

    def _log(self, partition: int) -> _Log:
        self._topic.log(partition)  # raises for one that does not exist
        return self._logs[partition]
