"""Conversion between journals (Parquet files) and the JSON lines that ``memsource.history.reader`` reads.

``lines_of`` reads the files of one run in the order of their rows, from any folder and under any name. If a file has
copies, ``open_journals`` returns one copy.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from blake3 import blake3

from lanes.errors import ConfigError, LanesError
from lanes.history.columns import RUN, SCHEMA_VERSION, UNREADABLE, VERSION, RowTables, row_tables
from lanes.history.parquet import ParquetFile, reason_of

BEGIN: Final = '{"n":1,"event":"begin"'
"""Start of the first row of a segment."""

_BATCH_ROWS: Final = 16_384
_CONVERTED_ROWS: Final = 8_192


class JournalError(LanesError):
    """A file is not a journal or history, has another schema or cannot be read or written; or pyarrow is missing."""


class Line(NamedTuple):
    """A row of a journal as a line of a history, with the name of its file and its number in the file."""

    file: str
    number: int
    text: str


@dataclass(frozen=True, slots=True)
class JournalFile:
    """One file of a run. ``first`` is the number of its first row in the run; None = unknown."""

    path: Path
    run: str
    first: int | None
    rows: int


def open_journals(paths: Iterable[Path]) -> list[list[JournalFile]]:
    """Group the files by run, in the order of their rows. Blocks. Raises ``JournalError``."""
    runs: dict[str, dict[tuple[int | None, int], JournalFile]] = {}
    for path in paths:
        found = _looked_at(path)
        runs.setdefault(found.run, {}).setdefault((found.first, found.rows), found)
    return [sorted(files.values(), key=lambda file: file.first or 0) for files in runs.values()]


def lines_of(files: Sequence[JournalFile]) -> Iterator[Line]:
    """Yield the rows of one run as lines.

    Blocks, and keeps one part of a file in memory at a time. Raises ``JournalError``.
    """
    tables = _tables()
    for file in files:
        number = 0
        with closing(_Opened(file.path)) as opened:
            for batch in opened.batches():
                for text in _guarded(file.path, tables.lines(batch)):
                    number += 1
                    yield Line(str(file.path), number, text)


def convert(paths: Iterable[str | os.PathLike[str]], directory: str | os.PathLike[str]) -> list[Path]:
    """Convert histories of JSON lines to Parquet files in ``directory``, and return the new files.

    Each new file has the rows and the gaps of its history. A second conversion of a history writes the same file. The
    function blocks, and creates a missing directory. Raises ``JournalError`` if a file is unreadable, unwritable or
    without a history, or if pyarrow is missing.
    """
    if isinstance(paths, str):
        raise TypeError(f"paths={paths!r} is one str; pass several paths: [{paths!r}]")
    tables = _tables()
    made = []
    for path in map(Path, paths):
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
            with path.open("rb") as stream:
                made.append(_converted(tables, stream, Path(directory), path.stem))
        except OSError as error:
            raise JournalError(f"{error.filename or path}: {error.strerror or error}") from error
    return made


def _tables() -> RowTables:
    try:
        return row_tables()
    except ConfigError as error:
        raise JournalError(str(error)) from error


class _Opened:
    """An open Parquet file."""

    def __init__(self, path: Path) -> None:
        tables, arrow = _tables(), import_module("pyarrow")
        self._path = path
        try:
            self._file: Any = import_module("pyarrow.parquet").ParquetFile(path, page_checksum_verification=True)
        except (OSError, ValueError, arrow.ArrowException) as error:
            raise _unreadable(path, error) from error
        self.schema = self._file.schema_arrow
        self.metadata: dict[bytes, bytes] = self.schema.metadata or {}
        self._wanted = tables.schema("")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def check(self) -> str:
        """Return the id of the run. Raises ``JournalError`` unless the file is a journal of this schema."""
        version = self.metadata.get(VERSION)
        if version is None or RUN not in self.metadata or not version.isdigit():
            raise JournalError(f"{self._path}: not a journal of lanes; pass a journal file exactly as lanes wrote it")
        if int(version) > SCHEMA_VERSION:
            raise JournalError(
                f"{self._path}: its schema is {int(version)}, but this version of lanes reads schemas up to "
                f"{SCHEMA_VERSION}; upgrade lanes-runtime"
            )
        if int(version) < SCHEMA_VERSION:
            raise JournalError(
                f"{self._path}: its schema {int(version)} is too old for this version of lanes; check the file "
                "with the version of lanes that wrote the file, or omit the file"
            )
        for field in self._wanted:
            at = self.schema.get_field_index(field.name)
            if at < 0 or self.schema.field(at).type != field.type:
                raise JournalError(
                    f"{self._path}: not a journal, because the file has no column {field.name} of type {field.type}; "
                    "pass a journal file exactly as lanes wrote it"
                )
        return self.metadata[RUN].decode(errors="replace")

    @property
    def rows(self) -> int:
        """Number of rows."""
        return int(self._file.metadata.num_rows)

    def batches(self) -> Iterator[Any]:
        """Read all rows, in parts."""
        yield from _guarded(self._path, self._file.iter_batches(batch_size=_BATCH_ROWS, use_threads=False))


def _looked_at(path: Path) -> JournalFile:
    with closing(_Opened(path)) as opened:
        run, first = opened.check(), None
        for batch in opened.batches():
            numbers = [number for number in batch.column("n").to_pylist() if number is not None]
            if numbers:
                first = numbers[0]
                break
        return JournalFile(path, run, first, opened.rows)


def _guarded(path: Path, items: Iterable[Any]) -> Iterator[Any]:
    """Yield the items, and turn errors of the file into ``JournalError``."""
    arrow = import_module("pyarrow")
    try:
        yield from items
    except (OSError, ValueError, arrow.ArrowException) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> JournalError:
    return JournalError(
        f"{path}: cannot be read as Parquet: {reason_of(error)}; the file was damaged or copied in part, because "
        "lanes names only complete files: copy the file again, or leave out the file"
    )


def _converted(tables: RowTables, stream: BinaryIO, directory: Path, stem: str) -> Path:
    file: ParquetFile | None = None
    run = ""
    lines: list[str] = []

    def flush(file: ParquetFile) -> None:
        if lines:
            file.add(tables.table(lines, run, checked=True))
            lines.clear()

    try:
        for line in _whole_lines(stream):
            begins = line.startswith(BEGIN)
            if file is None or begins:
                if file is not None:
                    flush(file)
                # A segment gets the same id in each conversion.
                run = blake3(line.encode("utf-8", "surrogateescape")).hexdigest(length=16)
            if file is None:
                file = ParquetFile(directory / f"{stem}-{run}-000001.parquet", tables.schema(run), overwrite=True)
            lines.append(line)
            if len(lines) >= _CONVERTED_ROWS:
                flush(file)
        if file is None:
            raise JournalError(f"{stream.name}: the file has no history; pass files of lanes.History")
        flush(file)
        file.publish()
    except BaseException:
        if file is not None:
            file.abandon()
        raise
    return file.path


def _whole_lines(stream: BinaryIO) -> Iterator[str]:
    """Yield the lines without an incomplete last line. Split a line that joins two files."""
    for data in stream:
        line = data.decode("utf-8", "surrogateescape")
        if line.isspace():
            continue
        if not line.endswith("\n"):
            if not _is_json(line):
                return
            line += "\n"
        begin = line.rfind(BEGIN)
        if begin > 0 and not _is_json(line):
            yield UNREADABLE
            line = line[begin:]
        yield line


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True
