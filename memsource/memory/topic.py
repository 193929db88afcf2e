"""Published messages in partitions. Positions rise and may have gaps."""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lanes.core.types import PartitionKey, key_bytes


@dataclass(frozen=True, slots=True, repr=False)
class Record:
    """One message as it was published. ``size`` counts the bytes of its value, key and headers."""

    partition: int
    position: int
    key: bytes | None
    value: bytes
    headers: tuple[tuple[str, bytes], ...]
    subject: str

    @property
    def size(self) -> int:
        size = len(self.value) + len(self.key or b"")
        return size + sum(len(name) + len(value) for name, value in self.headers)

    def __repr__(self) -> str:
        return f"<Record {self.partition} position {self.position}, {self.size} bytes>"


class RecordReader:
    """Reads records; see ``lanes.core.types.Reader``."""

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
    """A topic as a value: the partition of the next message without a key, and the end and records of each."""

    keyless: int
    logs: tuple[tuple[int, tuple[Record, ...]], ...]


class Log:
    """One partition. ``records`` by position; ``positions`` are theirs, rising; ``end`` is the next one."""

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
        """Read at most ``messages`` records from ``position`` on. The one that reaches ``size`` bytes is the last."""
        found: list[Record] = []
        at = bisect_left(self.positions, position)
        while at < len(self.positions) and len(found) < messages and size > 0:
            record = self.records[self.positions[at]]
            found.append(record)
            size -= record.size
            at += 1
        return found


class Topic:
    """A topic with some partitions, numbered from 0. It keeps everything. No method blocks."""

    def __init__(self, partitions: int, name: str) -> None:
        if partitions < 1:
            raise ValueError(f"partitions={partitions}: a broker has 1 or more")
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
        """Append one message and return it.

        Without ``partition`` a key always maps to the same one, and messages without a key take turns. The default of
        ``subject`` is the name of the topic. Raises ``IndexError`` for an unknown partition, ``ValueError`` or
        ``TypeError`` for an invalid key.
        """
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
        """Leave a gap of ``count`` positions, as compaction and transaction markers do."""
        if count < 0:
            raise ValueError(f"skip({count}): positions only rise")
        self.log(partition).end += count

    def log(self, partition: int) -> Log:
        """One partition. Raises ``IndexError`` for one that does not exist."""
        if not 0 <= partition < len(self.logs):
            raise IndexError(f"{self.name} has partitions 0 to {len(self.logs) - 1}, not {partition}")
        return self.logs[partition]

    def snapshot(self) -> TopicState:
        """The state as a value. O(messages)."""
        return TopicState(self._keyless, tuple((log.end, tuple(log.records.values())) for log in self.logs))

    def restore(self, state: TopicState) -> None:
        """Return to a state that ``snapshot`` returned, of a topic with the same number of partitions."""
        self._keyless = state.keyless
        for log, (end, records) in zip(self.logs, state.logs, strict=True):
            log.end = end
            log.records = {record.position: record for record in records}
            log.positions = list(log.records)
