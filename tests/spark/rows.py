"""Rows of a topic as Arrow batches, and the recorded calls of a handler."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]

import lanes
from lanes_spark import TaskJob

SCHEMA = pa.schema(
    [
        ("key", pa.binary()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("value", pa.binary()),
        ("timestamp", pa.timestamp("us", tz="UTC")),
        ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
    ]
)


def row(number: int, *, partitions: int = 3, keys: int = 7) -> dict[str, Any]:
    """Return row ``number`` of a topic. Each key stays in one partition, and the positions have gaps."""
    partition = number % partitions
    return {
        "key": f"key-{partition}-{number // partitions % keys}".encode(),
        "partition": partition,
        "offset": number // partitions * 2,
        "value": f"value-{number}".encode(),
        "timestamp": datetime.fromtimestamp(1_700_000_000 + number, UTC),
        "headers": [{"key": "number", "value": str(number).encode()}],
    }


def rows(count: int, *, partitions: int = 3, keys: int = 7) -> list[dict[str, Any]]:
    return [row(number, partitions=partitions, keys=keys) for number in range(count)]


def batches(messages: Sequence[dict[str, Any]], size: int = 50, schema: Any = SCHEMA) -> Iterator[Any]:
    """Yield the rows as Arrow batches of ``size`` rows."""
    for start in range(0, len(messages), size):
        yield pa.RecordBatch.from_pylist(messages[start : start + size], schema=schema)


class Seen:
    """The recorded calls of a handler, from any thread."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, bytes | None]] = []
        self._lock = threading.Lock()

    def note(self, message: lanes.Message) -> None:
        with self._lock:
            self.calls.append((message.partition.id.number, message.position, message.key))

    @property
    def by_key(self) -> dict[tuple[int, bytes | None], list[int]]:
        """Positions in the order of the calls, by partition and key."""
        found = defaultdict(list)
        for partition, position, key in self.calls:
            found[partition, key].append(position)
        return found


def expected(messages: Sequence[dict[str, Any]]) -> dict[tuple[int, bytes | None], list[int]]:
    """Return the `by_key` of a handler that was called once for each row, in order."""
    found = defaultdict(list)
    for one in messages:
        found[one["partition"], one["key"]].append(one["offset"])
    return found


def job(handler: Any, **more: Any) -> TaskJob:
    return TaskJob(topic="orders", handler=handler, **{"name": "test", **more})


ONCE = lanes.Settings(retry=lanes.Retry(attempts=1))
