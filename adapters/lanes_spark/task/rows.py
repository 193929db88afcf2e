"""Converts rows of Arrow batches to messages of ``lanes``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, repeat
from typing import Any, Final, TypeAlias

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from lanes.dead_letter import Details
from lanes.errors import SourceError

__all__ = ["COLUMNS", "ERA", "NEEDED", "OFFSET", "PARTITION", "Row", "RowReader", "Window", "headers_size", "windows"]

COLUMNS: Final = ("key", "partition", "offset", "value", "timestamp", "headers", "era")
"""The columns of a task's input, in the order of a ``Row``."""

NEEDED: Final = ("key", "partition", "offset", "value")
"""Required columns. A missing optional column is null in all rows."""

_WINDOW: Final = 1_024
"""Maximum number of rows that the task converts to Python objects in advance."""

_CASTS: Final = {
    "key": "binary",
    "partition": "int",
    "offset": "bigint",
    "value": "binary",
    "timestamp": "timestamp",
    "headers": "array<struct<key:string,value:binary>>",
    "era": "int",
}
"""SQL types to which a user can cast a column of another type."""

_HEADER: Final = pa.struct([("key", pa.string()), ("value", pa.binary())])
"""Type of a header in the rows of the Kafka connector."""

Row: TypeAlias = tuple[Any, ...]
"""One row, see ``COLUMNS``. The timestamp is in microseconds since the epoch."""

KEY, PARTITION, OFFSET, VALUE, TIMESTAMP, HEADERS, ERA = range(len(COLUMNS))


class Window:
    """Some rows as Python objects. If the rows have a single era, the object groups the rows by partition, in order.

    Args:
        columns: Arrow columns in the order of ``COLUMNS``; None for a missing column.
        sizes: Bytes of key and value of each row.

    Attributes:
        rows: The rows.
        keys: Key of each row.
        offsets: Offset of each row.
        sizes: Bytes of key, value and headers of each row.
        runs: Partition, era and end index of each group of adjacent rows with one partition and era.
    """

    __slots__ = ("keys", "offsets", "rows", "runs", "sizes")

    def __init__(self, columns: Sequence[Any], sizes: Any) -> None:
        partitions, eras = columns[PARTITION], columns[ERA]
        mixed = eras is not None and _several(eras)
        if _several(partitions) and not mixed:
            # Arrow's sort is stable. Do not sort rows of several eras, because the source checks their order.
            order = pc.sort_indices(partitions)
            columns = [None if column is None else column.take(order) for column in columns]
            sizes = sizes.take(order)
        lists: list[Any] = [None if column is None else column.to_pylist() for column in columns]
        # zip is not strict, because an endless repeat of None replaces a missing column.
        self.rows: list[Row] = list(zip(*[repeat(None) if each is None else each for each in lists], strict=False))
        self.keys: list[bytes | None] = lists[KEY]
        self.offsets: list[Any] = lists[OFFSET]
        self.sizes: list[int] = sizes.to_pylist()
        if lists[HEADERS] is not None:
            self.sizes = [
                size + headers_size(headers) if headers else size
                for size, headers in zip(self.sizes, lists[HEADERS], strict=True)
            ]
        era = None if lists[ERA] is None else lists[ERA][0]
        self.runs: list[tuple[int | None, int | None, int]] = []
        if mixed:
            whose = zip(lists[PARTITION], lists[ERA], strict=True)
            counted = [(number, era, len(list(run))) for (number, era), run in groupby(whose)]
        else:
            numbers = pc.value_counts(columns[PARTITION]).to_pylist()
            counted = [(each["values"], era, each["counts"]) for each in numbers]
        end = 0
        for number, era, count in counted:
            end += count
            self.runs.append((number, era, end))


def _several(column: Any) -> bool:
    """Return whether the values differ."""
    return bool(pc.count_distinct(column, mode="all").as_py() > 1)


def windows(batch: Any) -> Iterator[Window]:
    """Yield the rows of an Arrow batch in windows. Raises ``SourceError`` for a missing or invalid column."""
    # Check the columns outside the generator, so that this call raises the error.
    columns = [_column(batch, name) for name in COLUMNS]
    return _windows(columns, pc.add(_length(columns[KEY]), _length(columns[VALUE])))


def _windows(columns: list[Any], sizes: Any) -> Iterator[Window]:
    for start in range(0, len(sizes), _WINDOW):
        parts = [None if column is None else column.slice(start, _WINDOW) for column in columns]
        yield Window(parts, sizes.slice(start, _WINDOW))


def _length(column: Any) -> Any:
    """Return the number of bytes of each value."""
    return pc.fill_null(pc.binary_length(column).cast(pa.int64()), 0)


def _column(batch: Any, name: str) -> Any:
    index = batch.schema.get_field_index(name)
    if index < 0:
        if name in NEEDED:
            raise SourceError(
                f"the rows have no column {name!r}, only {', '.join(batch.schema.names)}: rename a column to {name!r}"
            )
        return None
    column, kind = batch.column(index), batch.schema.field(index).type
    if pa.types.is_null(kind) and name not in NEEDED:
        return None
    if name in ("key", "value"):
        if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            return column.cast(pa.large_binary() if pa.types.is_large_string(kind) else pa.binary())
        if pa.types.is_null(kind):
            return column.cast(pa.binary())
        fits = pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
    elif name == "timestamp":
        if pa.types.is_timestamp(kind):
            return column.cast(pa.timestamp("us", tz=kind.tz), safe=False).cast(pa.int64())
        fits = False
    elif name == "headers":
        fits = (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and kind.value_type == _HEADER
    else:
        fits = pa.types.is_integer(kind)
    if not fits:
        raise SourceError(
            f"the column {name!r} of the rows is {kind}, which a message cannot have: cast it to {_CASTS[name]}"
        )
    return column


class RowReader:
    """Reads the rows of one topic; see ``lanes.core.types.Reader`` and ``lanes.dead_letter.DetailedReader``."""

    def __init__(self, topic: str) -> None:
        self._topic = topic

    def value(self, raw: Any) -> bytes:
        """Return the payload; empty bytes for a tombstone."""
        value: bytes | None = raw[VALUE]
        return b"" if value is None else value

    def headers(self, raw: Any) -> list[tuple[str, bytes]]:
        """Return the headers in the order of the row. A null value becomes empty bytes."""
        return [(header["key"] or "", header["value"] or b"") for header in raw[HEADERS] or () if header is not None]

    def subject(self, raw: object) -> str:
        """Return the topic."""
        return self._topic

    def details(self, raw: Any) -> Details:
        """Return the details of a row that its dead letter needs and its message does not contain."""
        headers = [header for header in raw[HEADERS] or () if header is not None]
        timestamp = raw[TIMESTAMP]
        return Details(
            record_key=raw[KEY],
            tombstone=raw[VALUE] is None,
            null_headers=tuple(number for number, header in enumerate(headers) if header["value"] is None),
            timestamp=None if timestamp is None else timestamp / 1e6,
        )


def headers_size(headers: Sequence[Mapping[str, Any] | None]) -> int:
    """Return the number of bytes of all names, in UTF-8, and of all values."""
    size = 0
    for one in headers:
        if one is not None:
            name, value = one["key"], one["value"]
            if name:
                size += len(name) if name.isascii() else len(name.encode())
            if value:
                size += len(value)
    return size
