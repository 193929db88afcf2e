"""Published messages in partitions. Positions increase and may have gaps."""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lanes.arguments import check_text, check_whole, kind_of
from lanes.core.types import PartitionKey, key_bytes
from memsource.memory.watchers import Watched


@dataclass(frozen=True, slots=True, repr=False)
class Record:
    """A published message. ``size`` is the number of bytes of value, key and headers, whose names are UTF-8."""

    partition: int
    position: int
    key: bytes | None
    value: bytes
    headers: tuple[tuple[str, bytes], ...]
    subject: str

    @property
    def size(self) -> int:
        size = len(self.value) + len(self.key or b"")
        return size + sum(len(name.encode(errors="replace")) + len(value) for name, value in self.headers)

    def __repr__(self) -> str:
        return f"<Record {self.partition} position {self.position}, {self.size} bytes>"


class RecordReader:
    """A reader of records; see ``lanes.core.types.Reader``."""

    def value(self, raw: object) -> bytes:
        return _record(raw).value

    def headers(self, raw: object) -> Sequence[tuple[str, bytes]]:
        return _record(raw).headers

    def subject(self, raw: object) -> str:
        return _record(raw).subject


def _record(raw: object) -> Record:
    assert isinstance(raw, Record)
    return raw


class TopicState(NamedTuple):
    """The state of a topic as a value.

    Attributes:
        keyless: Partition of the next message without a key.
        logs: Position of the next record, and the records, of each partition.
    """

    keyless: int
    logs: tuple[tuple[int, tuple[Record, ...]], ...]


class Log:
    """The records of one partition.

    Attributes:
        end: Position of the next record.
        positions: Positions of the records, in ascending order.
        records: The records by position.
    """

    __slots__ = ("end", "positions", "records")

    def __init__(self) -> None:
        self.end = 0
        self.positions: list[int] = []
        self.records: dict[int, Record] = {}

    def append(self, record: Record) -> None:
        """Append a record at ``end`` or above."""
        self.records[record.position] = record
        self.positions.append(record.position)
        self.end = record.position + 1

    def trim(self, before: int) -> None:
        """Delete every record below ``before``. Idempotent."""
        del self.positions[: bisect_left(self.positions, before)]
        self.records = {position: self.records[position] for position in self.positions}

    def read(self, position: int, messages: int, size: int) -> list[Record]:
        """Read at most ``messages`` records from ``position`` on.

        The record that reaches ``size`` bytes is the last record.
        """
        found: list[Record] = []
        at = bisect_left(self.positions, position)
        while at < len(self.positions) and len(found) < messages and size > 0:
            record = self.records[self.positions[at]]
            found.append(record)
            size -= record.size
            at += 1
        return found


class Topic:
    """A topic with partitions from 0. Only ``Log.trim`` and ``restore`` delete messages. No method blocks."""

    def __init__(self, partitions: int, name: str) -> None:
        check_whole("partitions", partitions, 1)
        check_text("name", name)
        self.name = name
        self.logs = [Log() for _ in range(partitions)]
        self._keyless = 0

    def __repr__(self) -> str:
        return f"<Topic {self.name}: {len(self.logs)} partitions, {self.published} messages>"

    @property
    def partitions(self) -> range:
        """The numbers of the partitions."""
        return range(len(self.logs))

    @property
    def published(self) -> int:
        """Number of messages."""
        return sum(len(log.records) for log in self.logs)

    def publish(
        self,
        value: bytes | str = b"",
        *,
        key: PartitionKey | None = None,
        headers: Iterable[tuple[str, bytes]] = (),
        subject: str | None = None,
        partition: int | None = None,
    ) -> Record:
        """Append one message and return it; see ``WatchedTopic.publish``."""
        if not isinstance(value, bytes | str):
            raise TypeError(f"value is {kind_of(value)}: a broker takes bytes; pass bytes, a str, or json.dumps(…)")
        encoded = None if key is None else key_bytes(key)
        if partition is None:
            if encoded is None:
                partition = self._keyless
                self._keyless = (partition + 1) % len(self.logs)
            else:
                partition = zlib.crc32(encoded) % len(self.logs)
        log = self.log(partition)
        payload = value.encode() if isinstance(value, str) else value
        record = Record(partition, log.end, encoded, payload, tuple(headers), subject or self.name)
        log.append(record)
        return record

    def skip(self, count: int, *, partition: int = 0) -> None:
        """Leave a gap of ``count`` positions; see ``WatchedTopic.skip``."""
        if count < 0:
            raise ValueError(f"count={count}: must be 0 or more, because positions only rise")
        self.log(partition).end += count

    def log(self, partition: int) -> Log:
        """Return the log of a partition. Raises ``IndexError`` for an unknown partition."""
        if not 0 <= partition < len(self.logs):
            raise IndexError(f"partition={partition}: {self.name} has only the partitions 0 to {len(self.logs) - 1}")
        return self.logs[partition]

    def snapshot(self) -> TopicState:
        """Return the state as a value. Takes O(messages) time."""
        return TopicState(self._keyless, tuple((log.end, tuple(log.records.values())) for log in self.logs))

    def restore(self, state: TopicState) -> None:
        """Return to a state that ``snapshot`` returned, for a topic with the same number of partitions."""
        self._keyless = state.keyless
        for log, (end, records) in zip(self.logs, state.logs, strict=True):
            log.end = end
            log.records = {record.position: record for record in records}
            log.positions = list(log.records)


class WatchedTopic(Watched):
    """A topic that calls its watchers after each message and gap: the base of the brokers and groups in memory."""

    def __init__(self, partitions: int, name: str) -> None:
        super().__init__()
        self.topic = Topic(partitions, name)

    def publish(
        self,
        value: bytes | str = b"",
        *,
        key: PartitionKey | None = None,
        headers: Iterable[tuple[str, bytes]] = (),
        subject: str | None = None,
        partition: int | None = None,
    ) -> Record:
        """Append one message.

        Args:
            value: The payload. The topic encodes a str as UTF-8.
            key: The key; None = a message without a key.
            headers: The headers, in order.
            subject: The subject; None = the name of the topic.
            partition: Number of the partition; None = the hash of the key selects the partition, and messages without a
                key use all partitions in turn.

        Returns:
            The message, with its partition and position.

        Raises:
            IndexError: The partition does not exist.
            ValueError: The key has an invalid value.
            TypeError: The value or the key has an invalid type.
        """
        record = self.topic.publish(value, key=key, headers=headers, subject=subject, partition=partition)
        self._appended(record)
        self._changed()
        return record

    def _appended(self, record: Record) -> None:
        """Record a new message. The topic calls this method before the watchers."""

    def skip(self, count: int, *, partition: int = 0) -> None:
        """Leave a gap of positions, as compaction and transaction markers do.

        Args:
            count: Number of positions, 0 or more.
            partition: Number of the partition.

        Raises:
            ValueError: ``count`` is below 0.
            IndexError: The partition does not exist.
        """
        self.topic.skip(count, partition=partition)
        self._changed()
