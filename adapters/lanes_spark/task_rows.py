"""Rows of Arrow batches made messages of ``lanes``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any, Final, TypeAlias

import pyarrow as pa  # type: ignore[import-untyped]

from lanes.dead_letter import Details
from lanes.errors import SourceError

__all__ = ["COLUMNS", "NEEDED", "Row", "RowReader", "headers_size", "windows"]

COLUMNS: Final = ("key", "partition", "offset", "value", "timestamp", "headers", "era")
"""The columns of a task's input, in the order of a ``Row``."""

NEEDED: Final = ("key", "partition", "offset", "value")
"""The columns that must be there; what is left of the others is null in all rows."""

_WINDOW: Final = 1_024
"""Rows that are Python objects before there is room for them, at most."""

_HEADER: Final = pa.struct([("key", pa.string()), ("value", pa.binary())])
"""What the Kafka connector makes of a header."""

Row: TypeAlias = tuple[Any, ...]
"""One row: see ``COLUMNS``. The timestamp is in microseconds since the epoch."""

KEY, PARTITION, OFFSET, VALUE, TIMESTAMP, HEADERS, ERA = range(len(COLUMNS))


def windows(batch: Any) -> Iterator[list[Row]]:
    """The rows of an Arrow batch, a window at a time. Raises ``SourceError`` for a batch that lacks a column, or has
    one of another type."""
    # At once, so that it is the caller of this function who hears of a batch that is none.
    return _windows([_column(batch, name) for name in COLUMNS], batch.num_rows)


def _windows(columns: list[Any], count: int) -> Iterator[list[Row]]:
    for start in range(0, count, _WINDOW):
        parts = [repeat(None) if column is None else column.slice(start, _WINDOW).to_pylist() for column in columns]
        # Not strict: what a column lacks that is not there has no end.
        yield list(zip(*parts, strict=False))


def _column(batch: Any, name: str) -> Any:
    index = batch.schema.get_field_index(name)
    if index < 0:
        if name in NEEDED:
            raise SourceError(
                f"the rows have no column {name!r}, only {', '.join(batch.schema.names)}: name the column that holds it"
            )
        return None
    column, kind = batch.column(index), batch.schema.field(index).type
    if name in ("key", "value"):
        if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            return column.cast(pa.large_binary() if pa.types.is_large_string(kind) else pa.binary())
        fits = pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_null(kind)
    elif name == "timestamp":
        if pa.types.is_timestamp(kind):
            return column.cast(pa.timestamp("us", tz=kind.tz), safe=False).cast(pa.int64())
        fits = pa.types.is_null(kind)
    elif name == "headers":
        fits = pa.types.is_null(kind) or (
            (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and kind.value_type == _HEADER
        )
    else:
        fits = pa.types.is_integer(kind) or (name == "era" and pa.types.is_null(kind))
    if not fits:
        raise SourceError(f"the column {name!r} of the rows is {kind}, which is nothing a message is made of: cast it")
    return column


class RowReader:
    """Looks into the rows of one topic; see ``lanes.core.types.Reader`` and ``lanes.dead_letter.DetailedReader``."""

    def __init__(self, topic: str) -> None:
        self._topic = topic

    def value(self, raw: Any) -> bytes:
        """The payload; empty bytes for a tombstone."""
        value: bytes | None = raw[VALUE]
        return b"" if value is None else value

    def headers(self, raw: Any) -> list[tuple[str, bytes]]:
        """The headers in the order of the row; one without a value has empty bytes."""
        return [(header["key"] or "", header["value"] or b"") for header in raw[HEADERS] or () if header is not None]

    def subject(self, raw: object) -> str:
        """The topic."""
        return self._topic

    def details(self, raw: Any) -> Details:
        """What dead letters keep of a row beside what every message has."""
        headers = [header for header in raw[HEADERS] or () if header is not None]
        timestamp = raw[TIMESTAMP]
        return Details(
            record_key=raw[KEY],
            tombstone=raw[VALUE] is None,
            null_headers=tuple(number for number, header in enumerate(headers) if header["value"] is None),
            timestamp=None if timestamp is None else timestamp / 1e6,
        )


def headers_size(headers: Sequence[Mapping[str, Any] | None]) -> int:
    """The bytes of names and values."""
    return sum([len(one["key"] or "") + len(one["value"] or b"") for one in headers if one is not None])
