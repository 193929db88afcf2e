"""A broker with individual acknowledgements, as a data structure of partitions, deliveries and acknowledgements.

The broker acts only during calls of its methods, which take the time as an argument. The same broker therefore serves a
test on a real event loop and a simulation. The broker follows the strictest rules of real brokers:

- Positions of a partition increase and may have gaps.
- Every delivery has its own token. Only the token of the newest delivery acknowledges a message. The broker counts an
  earlier token of an unacknowledged message in ``stale``, and the message stays unacknowledged.
- A message without an acknowledgement within ``ack_wait`` seconds is due again, and ``expire(now)`` requeues the
  message.
- The broker delivers requeued messages before new messages, in the order of their requeues.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

from lanes.arguments import check_positive, check_whole
from lanes.dead_letter import DeadLetter
from memsource.memory.topic import Record, WatchedTopic


@dataclass(frozen=True, slots=True)
class Delivery:
    """One delivery of a record.

    Attributes:
        record: The delivered record.
        token: Number that identifies the delivery.
        count: Number of this delivery among the deliveries of the record, from 1.
        deadline: Time at which the record is due again, in seconds of the caller's clock.
    """

    record: Record
    token: int
    count: int
    deadline: float


class KeepsDeadLetters:
    """Base of a broker that stores dead letters by their id, in the order of arrival."""

    def __init__(self) -> None:
        super().__init__()
        self._dead_letters: dict[str, DeadLetter] = {}

    def write_dead_letter(self, dead_letter: DeadLetter) -> None:
        """Store a dead letter, unless the broker already has a dead letter with the same id.

        Args:
            dead_letter: The dead letter.
        """
        self._dead_letters.setdefault(dead_letter.id, dead_letter)

    @property
    def dead_letters(self) -> list[DeadLetter]:
        """The dead letters, in the order of their first writes."""
        return list(self._dead_letters.values())


class _Log:
    """The state of the records of one partition."""

    __slots__ = ("acked", "again", "counts", "fresh", "records", "unacked")

    def __init__(self, records: dict[int, Record]) -> None:
        self.records = records
        self.fresh: deque[int] = deque()
        self.again: dict[int, None] = {}  # an ordered set
        self.unacked: dict[int, Delivery] = {}
        self.acked: set[int] = set()
        self.counts: Counter[int] = Counter()


class MemoryBroker(WatchedTopic, KeepsDeadLetters):
    """A topic with individual acknowledgements.

    No method blocks. Not thread-safe. The broker keeps every message, so its memory grows with each published message.

    Args:
        partitions: Number of partitions, 1 or more. Partition numbers begin at 0.
        name: Name of the topic.
        ack_wait: Seconds after which an unacknowledged delivery is due again, more than 0.
        max_unacked: Maximum number of unacknowledged messages of all partitions, 1 or more; None = no bound.

    Attributes:
        stale: Number of acknowledgements of unacknowledged messages with an outdated token.

    Raises:
        ConfigError: An argument is of a wrong type or out of its range.
    """

    def __init__(
        self, partitions: int = 1, *, name: str = "memory", ack_wait: float = 30.0, max_unacked: int | None = None
    ) -> None:
        super().__init__(partitions, name)
        self.name = name
        check_positive("ack_wait", ack_wait)
        if max_unacked is not None:
            check_whole("max_unacked", max_unacked, 1)
        self.ack_wait = ack_wait
        self.max_unacked = max_unacked
        self.stale = 0
        self._logs = [_Log(log.records) for log in self.topic.logs]
        self._tokens: dict[int, Record] = {}

    def __repr__(self) -> str:
        return f"<MemoryBroker {self.name}: {len(self._logs)} partitions, {self.topic.published} messages>"

    # --- consumers

    @property
    def partitions(self) -> range:
        """The numbers of the partitions."""
        return self.topic.partitions

    def deliver(self, partition: int, messages: int, size: int, now: float) -> list[Delivery]:
        """Deliver the next messages of a partition.

        Args:
            partition: Number of the partition.
            messages: Maximum number of messages.
            size: Bytes at which the delivery stops. The message that reaches ``size`` is the last message.
            now: The time, in seconds.

        Returns:
            The deliveries in order; empty if no message waits. At ``max_unacked``, the broker delivers only requeued
            messages.
        """
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
        """Acknowledge a delivery. Idempotent.

        Args:
            token: Token of the delivery. An outdated token acknowledges nothing; see ``stale``.

        Raises:
            KeyError: The broker never issued the token.
        """
        record = self._tokens[token]
        log = self._logs[record.partition]
        if self._newest(token) is not None:
            del log.unacked[record.position]
            log.acked.add(record.position)
            if self.max_unacked is not None:
                self._changed()
        elif record.position not in log.acked:
            # Only the acknowledgement of an old delivery is stale; a repeated acknowledgement is not.
            self.stale += 1

    def extend(self, token: int, now: float) -> None:
        """Restart the ``ack_wait`` of a delivery. An outdated token changes nothing.

        Args:
            token: Token of the delivery.
            now: The time, in seconds.

        Raises:
            KeyError: The broker never issued the token.
        """
        delivery = self._newest(token)
        if delivery is not None:
            record = delivery.record
            later = Delivery(record, token, delivery.count, now + self.ack_wait)
            self._logs[record.partition].unacked[record.position] = later

    def redeliver(self, positions: Iterable[int], *, partition: int = 0) -> None:
        """Requeue delivered messages in the order of ``positions``, as after the end of their ``ack_wait``.

        The broker requeues an acknowledged message too, as after a lost acknowledgement.

        Args:
            positions: Positions of the messages.
            partition: Number of the partition.

        Raises:
            ValueError: The broker never delivered a position.
        """
        log = self._log(partition)
        for position in positions:
            if not log.counts[position]:
                raise ValueError(f"position {position} of partition {partition} was never delivered; deliver it first")
            log.acked.discard(position)
            # All issued tokens become outdated.
            log.unacked.pop(position, None)
            # A message that waits already moves to the end of the queue.
            log.again.pop(position, None)
            log.again[position] = None
        self._changed()

    def requeue(self, partition: int) -> None:
        """Requeue all unacknowledged messages by position, for a new owner of the partition.

        Args:
            partition: Number of the partition.
        """
        self.redeliver(self.unacked(partition), partition=partition)

    def expire(self, now: float) -> int:
        """Requeue every delivery whose ``ack_wait`` is over, by partition and position.

        Args:
            now: The time, in seconds.

        Returns:
            The number of requeued deliveries, 0 or more.
        """
        expired = 0
        for number, log in enumerate(self._logs):
            due = sorted(p for p, delivery in log.unacked.items() if delivery.deadline <= now)
            if due:
                self.redeliver(due, partition=number)
            expired += len(due)
        return expired

    def _appended(self, record: Record) -> None:
        self._logs[record.partition].fresh.append(record.position)

    # --- questions

    def unacked(self, partition: int = 0) -> list[int]:
        """Return the delivered and unacknowledged positions, which include positions that wait for redelivery.

        Args:
            partition: Number of the partition.

        Returns:
            The positions, in ascending order.
        """
        log = self._log(partition)
        return sorted({*log.unacked, *log.again})

    def acked(self, partition: int = 0) -> list[int]:
        """Return the acknowledged positions.

        Args:
            partition: Number of the partition.

        Returns:
            The positions, in ascending order.
        """
        return sorted(self._log(partition).acked)

    def waiting(self, partition: int = 0) -> int:
        """Return the number of messages that wait for delivery or redelivery.

        Args:
            partition: Number of the partition.

        Returns:
            The number of messages, 0 or more.
        """
        log = self._log(partition)
        return len(log.again) + len(log.fresh)

    def deliveries(self, position: int, partition: int = 0) -> int:
        """Return the number of deliveries of a position.

        Args:
            position: Position of the message.
            partition: Number of the partition.

        Returns:
            The number of deliveries, 0 or more.
        """
        return self._log(partition).counts[position]

    @property
    def unfinished(self) -> int:
        """The number of unacknowledged messages of all partitions, delivered or not."""
        return sum(len(log.records) - len(log.acked) for log in self._logs)

    def _newest(self, token: int) -> Delivery | None:
        """Return the delivery of a token, or None for an outdated token."""
        record = self._tokens[token]
        delivery = self._logs[record.partition].unacked.get(record.position)
        return delivery if delivery is not None and delivery.token == token else None

    def _may_grow(self) -> bool:
        if self.max_unacked is None:
            return True
        return sum(len(log.unacked) + len(log.again) for log in self._logs) < self.max_unacked

    def _log(self, partition: int) -> _Log:
        self.topic.log(partition)  # raises IndexError for an unknown partition
        return self._logs[partition]
