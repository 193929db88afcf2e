"""Conversion of history rows to Arrow tables, and of tables back to the same JSON lines, byte for byte.

Each field that SQL queries need has its own column. If a row has another field, or a value that does not fit its
column, the column ``detail`` contains the text of the row. The JSON lines contain neither the column ``run`` nor the
column ``slot``, which is computed from the key's hash.

Arrow parses the lines in C++ without the interpreter's lock, so the event loop continues during the parse.
"""

from __future__ import annotations

import functools
import itertools
import json
from array import array
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, Final

from lanes.errors import ConfigError

SCHEMA_VERSION: Final = 2
"""Number of the schema in every file; a reader refuses a file with another number."""

VERSION: Final = b"lanes.journal"
"""Key of the schema's number in the metadata of a file."""

RUN: Final = b"lanes.run"
"""Key of the run's id in the metadata of a file."""

UNREADABLE: Final = "?\n"
"""Line that replaces a table row without an event, because the original line was no row."""

_TEXT, _WHOLE, _REAL = "string", "int64", "double"

# Column → its type and the format of its value, in the order of the fields of a row.
_FIELDS: Final[dict[str, tuple[str, str]]] = {
    "n": (_WHOLE, "d"),
    "event": (_TEXT, ""),
    "member": (_TEXT, ""),
    "mono": (_REAL, ".6f"),
    "wall": (_REAL, ".3f"),
    "partition": (_TEXT, ""),
    "assignment": (_WHOLE, "d"),
    "epoch": (_WHOLE, "d"),
    "position": (_WHOLE, "d"),
    "key": (_TEXT, ""),
    "attempt": (_WHOLE, "d"),
    "size": (_WHOLE, "d"),
    "cause": (_TEXT, ""),
    "result": (_TEXT, ""),
    "error": (_TEXT, ""),
    "delay": (_REAL, ".6f"),
    "asked": (_WHOLE, "d"),
    "incarnation": (_TEXT, ""),
    "floor": (_WHOLE, "d"),
    "completed": (_WHOLE, "d"),
    "deadline": (_REAL, ".6f"),
    "timeout": (_REAL, ".6f"),
    "in_flight": (_WHOLE, "d"),
    "bytes": (_WHOLE, "d"),
    "reason": (_TEXT, ""),
    "count": (_WHOLE, "d"),
}
_ALWAYS: Final = ("n", "event", "member", "mono", "wall")
_WHOLE_LIMIT: Final = 1 << 63


class RowTables:
    """The converter between rows and tables, made by ``row_tables``. Thread-safe."""

    def __init__(self) -> None:
        # Import here, because only a journal needs pyarrow. The modules have no types.
        self._pa: Any = import_module("pyarrow")
        self._compute: Any = import_module("pyarrow.compute")
        self._json: Any = import_module("pyarrow.json")
        kinds = {name: self._pa.type_for_alias(kind) for name, (kind, _) in _FIELDS.items()}
        self._parsed = self._pa.schema(list(kinds.items()))
        columns = [("run", self._pa.string()), *kinds.items()]
        columns.insert(1 + list(kinds).index("key") + 1, ("slot", self._pa.int32()))
        columns.append(("detail", self._pa.string()))
        self._schema = self._pa.schema(columns)
        self._pairs = self._texts([f"{number:02x}" for number in range(256)])
        self._byte = self._pa.Int32Array.from_buffers(
            self._pa.int32(), 1, [None, self._pa.py_buffer(array("i", [256]))]
        )

    def __repr__(self) -> str:
        return f"<RowTables of {len(self._schema)} columns>"

    def schema(self, run: str) -> Any:
        """Return the ``pyarrow.Schema`` of a file of this run."""
        return self._schema.with_metadata({VERSION: str(SCHEMA_VERSION).encode(), RUN: run.encode()})

    def table(self, lines: Sequence[str], run: str, *, checked: bool = False) -> Any:
        """Make the ``pyarrow.Table`` of lines that end in newlines. The call raises no error, even for broken lines.

        With ``checked`` the call converts each row back, and stores a line that differs from the original in
        ``detail``. Lines from other programs than ``lanes.history.recorder`` need ``checked``.
        """
        parts = [self._completed(part, at, run) for at, part in self._parts(lines)]
        table = self._pa.concat_tables(parts).combine_chunks() if parts else self._schema.empty_table()
        if checked:
            odd = {at for at, made in enumerate(self.lines(table)) if made != lines[at]}
            if odd:
                table = self._with_detail(table, {at: lines[at] for at in odd})
        return table.replace_schema_metadata(self.schema(run).metadata)

    def dropped(self, table: Any) -> int:
        """Count the ``dropped`` rows of a table."""
        found = self._compute.sum(self._compute.equal(table.column("event"), "dropped"))
        return int(found.as_py() or 0)

    def lines(self, table: Any) -> Iterator[str]:
        """Yield the lines of a table or a record batch, each with its newline."""
        columns = [table.column(name).to_pylist() for name in _FIELDS]
        formats = [(f',"{name}":', form) for name, (_, form) in _FIELDS.items()]
        event_at, position_at = _at("event"), _at("position")
        key_at = _at("key")
        for detail, *values in zip(table.column("detail").to_pylist(), *columns, strict=True):
            if detail is not None:
                yield f"{detail}\n"
            elif values[event_at] is None:
                yield UNREADABLE
            else:
                fields = [
                    f"{label}{format(value, form) if form else _quoted(value)}"
                    for (label, form), value in zip(formats, values, strict=True)
                    if value is not None
                ]
                if values[key_at] is None and (values[position_at] is not None or values[event_at] == "unblocked"):
                    # The key comes after n, event, member, mono, wall, partition, assignment and position.
                    before_key = sum(value is not None for value in values[:key_at])
                    fields.insert(before_key, ',"key":null')
                yield f"{{{''.join(fields)[1:]}}}\n"

    def _parts(self, lines: Sequence[str]) -> Iterator[tuple[Sequence[str], Any]]:
        """Yield consecutive lines with their parsed table.

        Yield a line that the parser cannot read separately, with None.
        """
        if not lines:
            return
        try:
            data = "".join(lines).encode()
            table = self._json.read_json(
                self._pa.BufferReader(data),
                # Use one block, because no line may be longer than a block.
                read_options=self._json.ReadOptions(use_threads=False, block_size=len(data) + 1),
                parse_options=self._json.ParseOptions(explicit_schema=self._parsed, unexpected_field_behavior="infer"),
            )
        except (self._pa.ArrowException, UnicodeEncodeError):
            table = None
        if table is not None and table.num_rows == len(lines):
            yield lines, table
        elif len(lines) > 1:
            # Few lines are broken, so halving finds the broken lines soon.
            yield from self._parts(lines[: len(lines) // 2])
            yield from self._parts(lines[len(lines) // 2 :])
        else:
            yield lines, None

    def _completed(self, parsed: Any, lines: Sequence[str], run: str) -> Any:
        """Add the other columns of the schema. ``parsed`` is None for a single line that the parser cannot read."""
        detail: list[str | None] | None = None
        if parsed is None:
            known, text = _known(lines[0])
            parsed = self._pa.Table.from_pylist([known], schema=self._parsed)
            detail = [text]
        elif len(parsed.column_names) > len(_FIELDS):
            extra = [name for name in parsed.column_names if name not in _FIELDS]
            has_more = functools.reduce(
                self._compute.or_, [self._compute.is_valid(parsed.column(name)) for name in extra]
            )
            detail = [line[:-1] if more else None for line, more in zip(lines, has_more.to_pylist(), strict=True)]
        rows = len(lines)
        columns = [parsed.column(name) for name in _FIELDS]
        key = parsed.column("key")
        slot = self._slot(key)
        columns.insert(_at("key") + 1, slot)
        columns.insert(0, self._pa.repeat(self._texts([run])[0], rows))
        columns.append(self._pa.nulls(rows, self._pa.string()) if detail is None else self._texts(detail))
        return self._pa.Table.from_arrays(columns, schema=self._schema)

    def _slot(self, key: Any) -> Any:
        """Make the slots: the first two bytes of the hash, little-endian, as in ``lanes.core.ring``."""
        low, high = (
            self._compute.index_in(self._compute.utf8_slice_codeunits(key, at, at + 2), value_set=self._pairs)
            for at in (0, 2)
        )
        return self._compute.add(low, self._compute.multiply(high, self._byte[0]))

    def _with_detail(self, table: Any, kept: dict[int, str]) -> Any:
        """Store lines in the column ``detail``, by row. If the line is not a JSON object, the row has no event."""
        texts = table.column("detail").to_pylist()
        events = table.column("event").to_pylist()
        for at, line in kept.items():
            _, texts[at] = _known(line)
            if texts[at] is None:
                events[at] = None
        for name, values in (("detail", texts), ("event", events)):
            table = table.set_column(table.column_names.index(name), name, self._texts(values))
        return table

    def _texts(self, values: Sequence[str | None]) -> Any:
        """Make an array of texts from buffers.

        ``pyarrow.array`` and ``pyarrow.scalar`` would import an installed pandas, which takes a third of a second.
        """
        encoded = [b"" if value is None else value.encode() for value in values]
        ends = array("i", [0, *itertools.accumulate(map(len, encoded))])
        there = int("0" + "".join("01"[value is not None] for value in reversed(values)), base=2)
        buffers = (bytes(ends), b"".join(encoded), there.to_bytes(len(values) // 8 + 1, "little"))
        return self._pa.StringArray.from_buffers(len(values), *map(self._pa.py_buffer, buffers))


@functools.cache
def row_tables() -> RowTables:
    """Return the converter of this process. Raises ``ConfigError`` when pyarrow is missing."""
    try:
        return RowTables()
    except ImportError as error:
        raise ConfigError(
            "a journal needs pyarrow, which is not installed here: pip install '.[journal]' in the checkout of "
            "lanes, or leave journal=… out"
        ) from error


def _at(name: str) -> int:
    return list(_FIELDS).index(name)


@functools.lru_cache(maxsize=4_096)
def _quoted(text: str) -> str:
    return json.dumps(text)


def _known(line: str) -> tuple[dict[str, object], str | None]:
    """Return the fields of an unusual line that fit the columns, and the line itself if it is a JSON object."""
    text = line.removesuffix("\n")
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return {}, None
    # Text that Parquet cannot hold is no row for any reader either.
    if not isinstance(fields, dict) or not _encodable(text):
        return {}, None
    return {name: fields.get(name) for name in _ALWAYS if _fits(name, fields.get(name))}, text


def _fits(name: str, value: object) -> bool:
    kind, _ = _FIELDS[name]
    if kind == _TEXT:
        return isinstance(value, str) and _encodable(value)
    if kind == _WHOLE:
        return type(value) is int and -_WHOLE_LIMIT <= value < _WHOLE_LIMIT
    return type(value) is float


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
