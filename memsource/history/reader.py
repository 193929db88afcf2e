"""The reader of histories: reads JSON lines of ``lanes.history.recorder``, and returns segments of rows.

The reader also reads journals, because ``memsource.history.journal`` turns the rows of a journal into lines.

The reader reports unreadable lines and missing row numbers as *gaps*. A gap is a row with the event ``gap`` in
place of the missing rows. ``Segment.gaps`` has file and line of each gap. An incomplete last line after a crash is no
gap, because a file contains a prefix of the events.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from lanes.errors import LanesError
from lanes.history.parquet import reason_of
from lanes.history.rules import Rules
from lanes.history.writer import FORMAT
from memsource.history.rows import Fields, Row, RowParser, rules_of, whole_number

LINE_LIMIT: Final = 1 << 20
"""Maximum number of bytes of a row; a longer line is no row."""

JOURNAL_SUFFIX: Final = ".parquet"

_BEGIN: Final = b'{"n":1,"event":"begin"'


class HistoryError(LanesError):
    """A path is unreadable or has no history, the reader does not support a format, or pyarrow is missing."""


class Gap(NamedTuple):
    """Rows that are missing or unreadable.

    Attributes:
        file: Name of the file.
        line: Number of the line, from 1.
        why: The reason.
    """

    file: str
    line: int
    why: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.why}"


@dataclass(slots=True, eq=False, kw_only=True)
class Segment:
    """The rows of one run of one process, in order. Two different segments are never equal.

    Attributes:
        file: Name of the file.
        member: Name of the member.
        pid: Process id; 0 = unknown.
        boot: Id of the boot of the machine; empty = unknown.
        version: Version of lanes.
        source: Name of the source.
        concurrency: Value in the settings of the run; None = the ``begin`` row is missing.
        max_in_flight: Value in the settings of the run; None = the ``begin`` row is missing.
        max_in_flight_bytes: Value in the settings of the run; None = the ``begin`` row is missing.
        rules: Settings and traits of the run, for the checkers; empty if the ``begin`` row is missing.
        reason: Reason for the end of the run; None = the ``end`` row is missing, as after a crash.
        mono_first: Monotonic time of the first row, in seconds.
        wall_first: Earliest wall time, in seconds since 1970.
        wall_last: Latest wall time, in seconds since 1970.
        rows: The rows, at least one, with a row ``gap`` wherever rows are missing.
        gaps: The gaps, in order.
    """

    file: str
    member: str
    pid: int = 0
    boot: str = ""
    version: str = ""
    source: str = ""
    concurrency: int | None = None
    max_in_flight: int | None = None
    max_in_flight_bytes: int | None = None
    rules: Rules = field(default_factory=Rules)
    reason: str | None = None
    mono_first: float = 0.0
    wall_first: float = 0.0
    wall_last: float = 0.0
    rows: list[Row] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)

    @property
    def crashed(self) -> bool:
        """Whether the segment has no ``end`` row."""
        return self.reason is None

    @property
    def label(self) -> str:
        """Name of the segment in a verdict."""
        return f"{self.member} pid {self.pid}"

    def __repr__(self) -> str:
        ending = self.reason or "crashed"
        return f"<Segment {self.label}: {len(self.rows)} rows, {len(self.gaps)} gaps, {ending}>"


def read(paths: Iterable[str | os.PathLike[str]]) -> list[Segment]:
    """Read the segments of histories (``*.jsonl``) and journals (``*.parquet``).

    Blocks during the read, and keeps all rows in memory. Ignores further copies of a segment. If a run has a history
    and a journal, the segment with fewer gaps counts. Journals need pyarrow.

    Args:
        paths: Files, and directories with such files.

    Returns:
        The segments of the histories in the order of the files, then the segments of the journals.

    Raises:
        HistoryError: A path is unreadable, no file has a row, the reader does not support a format, or pyarrow is
            missing.
        TypeError: ``paths`` is one str instead of several paths.
    """
    if isinstance(paths, str):
        raise TypeError(f"paths={paths!r} is one str; pass several paths: [{paths!r}]")
    segments: list[Segment] = []
    files = _files(paths)
    journals = [file for file in files if file.suffix == JOURNAL_SUFFIX]
    for file in files:
        if file.suffix == JOURNAL_SUFFIX:
            continue
        try:
            stream = file.open("rb")
        except (OSError, ValueError) as error:
            raise HistoryError(f"{file}: cannot be opened: {reason_of(error)}") from error
        with stream:
            try:
                segments += _segments(str(file), stream)
            except OSError as error:
                raise HistoryError(f"{file}: cannot be read: {reason_of(error)}") from error
    segments += _journals(journals)
    if not segments:
        names = ", ".join(map(str, files)) or "no file"
        raise HistoryError(f"{names}: no history found; pass files or directories of lanes.History")
    return _once(segments)


def read_bytes(data: bytes, file: str = "history") -> list[Segment]:
    """Read the segments of a history in memory.

    Args:
        data: The content of a file. No content of a file raises an error other than ``HistoryError``.
        file: Name that the gaps show as their file.

    Returns:
        The segments, in order.

    Raises:
        HistoryError: The data has no row, or has a format that the reader does not support.
    """
    segments = _segments(file, io.BytesIO(data))
    if not segments:
        raise HistoryError(f"{file}: the data has no history; pass the bytes of a file of lanes.History")
    return _once(segments)


def _files(paths: Iterable[str | os.PathLike[str]]) -> list[Path]:
    files: dict[Path, Path] = {}
    for path in map(Path, paths):
        try:
            found = sorted([*path.glob("*.jsonl"), *path.glob(f"*{JOURNAL_SUFFIX}")]) if path.is_dir() else [path]
        except OSError as error:
            raise HistoryError(f"{path}: cannot be listed: {reason_of(error)}") from error
        if not found:
            raise HistoryError(
                f"{path}: the directory has no *.jsonl and no *.parquet file; pass a directory of lanes.History"
            )
        for file in found:
            files.setdefault(file.absolute(), file)
    return list(files.values())


def _journals(files: list[Path]) -> list[Segment]:
    """Read the segments of these journals."""
    if not files:
        return []
    # Imported here, because only journals need pyarrow.
    from memsource.history.journal import JournalError, lines_of, open_journals

    segments: list[Segment] = []
    try:
        for run in open_journals(files):
            reader = _Reader(str(run[0].path))
            for file, number, line in lines_of(run):
                reader.file = file
                reader.line(number, line.encode(errors="surrogatepass")[:LINE_LIMIT])
            reader.end()
            segments += reader.segments
    except JournalError as error:
        raise HistoryError(str(error)) from error
    return segments


def _once(segments: list[Segment]) -> list[Segment]:
    """Remove copies of a segment, because a segment in two files must not count as two processes."""
    runs: dict[tuple[str, int, str, float], list[Segment]] = {}
    for segment in segments:
        runs.setdefault((segment.member, segment.pid, segment.boot, segment.mono_first), []).append(segment)
    chosen = {segment for told in runs.values() for segment in _told_once(told)}
    return [segment for segment in segments if segment in chosen]


def _told_once(told: list[Segment]) -> list[Segment]:
    """Return the segments of one run of one process, without copies."""
    files = {segment.file for segment in told}
    if len(files) > 1 and any(file.endswith(JOURNAL_SUFFIX) for file in files):
        # The run has a history and a journal, and either file may lack the last rows.
        best = min(told, key=lambda segment: (len(segment.gaps), -len(segment.rows)))
        return [segment for segment in told if segment.file == best.file]
    kept: list[Segment] = []
    for segment in sorted(told, key=lambda segment: -len(segment.rows)):
        if not any(segment.rows == other.rows[: len(segment.rows)] for other in kept):
            kept.append(segment)
    return kept


def _segments(file: str, stream: BinaryIO) -> list[Segment]:
    reader = _Reader(file)
    for number, line in enumerate(_lines(stream), start=1):
        reader.line(number, line)
    reader.end()
    return reader.segments


def _lines(stream: BinaryIO) -> Iterator[bytes]:
    """Yield lines with their newlines. The function truncates a line that is too long, and omits its newline."""
    for line in iter(partial(stream.readline, LINE_LIMIT), b""):
        yield line
        rest = line
        while len(rest) == LINE_LIMIT and not rest.endswith(b"\n"):
            rest = stream.readline(LINE_LIMIT)


class _Reader:
    """A reader that turns lines into segments. The caller may set ``file`` to the next file between two lines."""

    def __init__(self, file: str) -> None:
        self.segments: list[Segment] = []
        self.file = file
        self._parser = RowParser()
        self._segment: Segment | None = None
        self._n = 0  # number of the last row of the segment
        self._incomplete = False
        self._bad: Gap | None = None  # first bad line since the last row
        self._bad_count = 0
        self._torn = False  # whether the only bad line since the last row is malformed
        self._torn_with_newline = False
        self._number = 0  # number of the last line

    def line(self, number: int, line: bytes) -> None:
        """Read the next line. Raises ``HistoryError`` only for a ``begin`` row of an unsupported format."""
        self._number = number
        try:
            text = line.decode()
            if self._usual(text):
                return
            fields = json.loads(text)
        except (ValueError, RecursionError):
            if not line.isspace():
                self._malformed(number, line)
            return
        try:
            self._row(number, fields)
        except (ValueError, TypeError, LookupError):
            self._no_row(number)

    def end(self) -> None:
        """Finish the last segment at the end of the file."""
        if self._torn and not self._torn_with_newline:
            self._forgive_torn()
        self._close()

    def _malformed(self, number: int, line: bytes) -> None:
        self._no_row(number)
        # The line may be the last line, and is the only bad line since the last row.
        self._torn = self._bad_count == 1
        self._torn_with_newline = line.endswith(b"\n")
        begin = line.rfind(_BEGIN)
        if begin > 0:
            # Two files were joined, and the first file ends with this torn line.
            self.line(number, line[begin:])

    def _forgive_torn(self) -> None:
        """Ignore the incomplete last line of a segment, because the process died during the write."""
        self._bad, self._bad_count, self._torn = None, 0, False

    def _no_row(self, number: int) -> None:
        self._bad_count += 1
        self._torn = False
        if self._bad is None:
            self._bad = Gap(self.file, number, "no row")

    def _usual(self, line: str) -> bool:
        """Read a line of the usual form that directly follows the last row. Returns False for any other line."""
        segment = self._segment
        if segment is None or segment.reason is not None or self._bad is not None:
            return False
        found = self._parser.usual(line, self._n + 1, segment.member)
        if found is None:
            return False
        row, wall = found
        self._n += 1
        self._pass_time(segment, wall)
        segment.rows.append(row)
        return True

    @staticmethod
    def _pass_time(segment: Segment, wall: float) -> None:
        if wall > segment.wall_last:
            segment.wall_last = wall
        elif wall < segment.wall_first:
            segment.wall_first = wall

    def _row(self, number: int, fields: Fields) -> None:
        """Add one row.

        Raises ``ValueError``, ``TypeError`` or ``LookupError`` for an invalid row, before any change.
        """
        n, event = whole_number(fields["n"]), fields["event"]
        mono, wall = self._parser.times(fields)
        if type(event) is not str:
            raise ValueError("event")
        if event == "begin":
            self._begin(n, mono, wall, fields)
            return
        row = self._parser.parse(n, event, mono, fields)
        segment = self._segment
        if segment is None:
            member = self._parser.member(fields)
            segment = Segment(file=self.file, member=member, mono_first=mono, wall_first=wall, wall_last=wall)
            self._segment, self._n = segment, n
            self._no_row(number)
            self._gap(f"no begin row before row {n}")
        elif fields["member"] != segment.member or n <= self._n or segment.reason is not None:
            raise ValueError("a row of another segment")
        elif n > self._n + 1:
            self._no_row(number)
            self._gap(f"rows {self._n + 1}…{n - 1} are missing")
        elif self._bad is not None:
            self._gap(f"lines that are no rows: {self._bad_count}")
        elif event == "dropped" and self._incomplete:
            # In a journal this row has the number of a missing row, and may be the only sign of the missing row.
            self._no_row(number)
            self._gap("rows are missing")
        self._n = n
        self._pass_time(segment, wall)
        if row is not None:
            segment.rows.append(row)
            if event == "end":
                segment.reason = row.text

    def _begin(self, n: int, mono: float, wall: float, fields: Fields) -> None:
        version = whole_number(fields["format"])
        if version > FORMAT:
            raise HistoryError(
                f"{self.file}: its format is {version}, but this version of lanes reads formats up to {FORMAT}; "
                "upgrade lanes-runtime"
            )
        if version < FORMAT:
            raise HistoryError(
                f"{self.file}: its format {version} is too old for this version of lanes; check the file with the "
                "version of lanes that wrote the file, or omit the file"
            )
        parser = self._parser
        segment = Segment(
            file=self.file,
            member=parser.member(fields),
            pid=whole_number(fields["pid"]),
            boot=parser.text(fields["boot"]),
            version=parser.text(fields["version"]),
            source=parser.text(fields["source"]),
            concurrency=whole_number(fields["concurrency"]),
            max_in_flight=whole_number(fields["max_in_flight"]),
            max_in_flight_bytes=whole_number(fields["max_in_flight_bytes"]),
            rules=rules_of(fields),
            mono_first=mono,
            wall_first=wall,
            wall_last=wall,
        )
        if self._torn and self._segment is not None:
            self._forgive_torn()
        # Bad lines between two segments may belong to either segment, or to a third segment.
        bad, bad_count = self._bad, self._bad_count
        self._close()
        self._segment, self._n, self._incomplete = segment, n, fields.get("incomplete") == 1
        if bad is not None:
            self._bad = bad
            self._gap(f"lines that are no rows: {bad_count}")
        segment.rows.append(Row(n, "begin", mono))

    def _gap(self, why: str) -> None:
        """Record a gap. The events of the missing rows may have happened at any time since the last row."""
        segment = self._segment
        assert segment is not None
        assert self._bad is not None
        segment.gaps.append(self._bad._replace(why=why))
        segment.rows.append(Row(self._n, "gap", segment.rows[-1].mono if segment.rows else segment.mono_first))
        self._bad, self._bad_count, self._torn = None, 0, False

    def _close(self) -> None:
        segment = self._segment
        if segment is None:
            return
        if self._bad is not None:
            self._gap(f"lines that are no rows: {self._bad_count}")
            # The bad lines may be rows of another process, of any time. So a gap precedes the first row too.
            segment.rows.insert(0, Row(0, "gap", segment.mono_first))
        if self._incomplete and segment.crashed:
            self._no_row(self._number)
            self._gap("the last rows are missing: the process died, or could not write them")
        self._segment, self._incomplete = None, False
        self.segments.append(segment)
