"""The journal of a run: its history as Parquet files, for SQL and for Spark.

It has the rows of ``lanes.history.recorder``, but not their guarantee: no handler and no settlement waits for them. A
thread writes them into files that are whole or not there, so a process that is killed loses the rows that are in no
file yet: those of the last ``rotate_after`` seconds. Such a run has no ``end`` row, and a reader takes it that rows
are missing there. Neither payload nor key is ever written.
"""

from __future__ import annotations

import logging
import math
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread

from lanes.errors import ConfigError
from lanes.history.buffer import DROPPED, END, RowBuffer, number_of
from lanes.history.columns import RowTables, row_tables
from lanes.history.parquet import JournalWriter
from lanes.history.recorder import History, Recorder, recorder_of
from lanes.history.segment import HEAD_END, GivenUp, SegmentFile
from lanes.history.writer import BUFFER_BYTES, member_name

__all__ = [
    "BUFFER_LIMIT",
    "BUFFER_LIMIT_BYTES",
    "ROTATE_AFTER",
    "ROTATE_BYTES",
    "Journal",
    "JournalFiles",
    "files_of",
    "journal_of",
    "recorder",
]

log = logging.getLogger("lanes.journal")

ROTATE_AFTER: Final = 30.0
ROTATE_BYTES: Final = 64 * 1024 * 1024
BUFFER_LIMIT: Final = 1 << 17
"""Rows that wait to be written, at most; a row that does not fit is dropped, and counted in its place."""
BUFFER_LIMIT_BYTES: Final = 32 * 1024 * 1024
"""Bytes of them, at most, give or take one MiB."""

_KEPT: Final = GivenUp(0, False)


class Journal:
    """Where the journal of one run goes: Parquet files in ``directory``, which is created. Needs the extra ``journal``.

    ``member`` names this process in every row and in the files' names, as ``History`` has it; None = the history's,
    where there is one, else ``m-`` and 8 hex digits. ``rotate_after``: seconds after which a row is in a file, more
    than 0; None = only when the file is large enough, or at the end. ``rotate_bytes``: how large that is, 1 or more.

    No two runs share a name of a file, on whatever machines they are: ``run`` is random and in all of them. What is
    being written has a hidden name, which ends in ``.tmp``; only a process that was killed leaves one behind.

    Raises ``ConfigError`` for a name or a number that cannot be, for a directory that cannot be made, and where pyarrow
    is missing. After the consumer has started nothing raises, and nothing waits for the disk: rows that cannot be
    written are dropped, and a row in their place says how many. ``dropped`` counts them; ``files`` those written.
    """

    __slots__ = ("_files",)

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        member: str | None = None,
        rotate_after: float | None = ROTATE_AFTER,
        rotate_bytes: int = ROTATE_BYTES,
    ) -> None:
        tables = row_tables()
        member = None if member is None else member_name(member)
        if rotate_after is not None and not (_is_number(rotate_after) and 0 < rotate_after < math.inf):
            raise ConfigError(
                f"Journal.rotate_after={rotate_after!r}: must be a finite number of seconds, more than 0, or None"
            )
        if type(rotate_bytes) is not int or rotate_bytes < 1:
            raise ConfigError(f"Journal.rotate_bytes={rotate_bytes!r}: must be a whole number, 1 or more")
        path = Path(directory)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"journal directory {str(path)!r}: {error.strerror}; choose one that can be made"
            ) from error
        self._files = JournalFiles(path, member, tables, rotate_after, rotate_bytes)

    def __repr__(self) -> str:
        state = "opened" if self._files.opened else "new"
        return f"<Journal {self.member or '-'} {state}: {self.files} files, {self.dropped} rows dropped>"

    @property
    def directory(self) -> Path:
        """Where the files are."""
        return self._files.directory

    @property
    def member(self) -> str | None:
        """The name of this process in it; None as long as nobody has given it one."""
        return self._files.member

    @property
    def run(self) -> str:
        """What no other run has in the names of its files: 32 hex digits."""
        return self._files.run

    @property
    def dropped(self) -> int:
        """Rows that did not fit into the buffer, or could not be written."""
        return self._files.dropped

    @property
    def files(self) -> int:
        """Files that are whole and have their name."""
        return self._files.count

    def join(self, timeout: float) -> bool:
        """Wait ``timeout`` seconds at most until a run that has ended is in the files; whether it is. Blocks."""
        return self._files.join(timeout)


class JournalFiles:
    """The files of one journal, and the buffer in front of them: what ``Journal`` is for its user, this is for the
    runtime.

    ``buffer``: where rows go. ``member``: None until ``open``, where the user gave it no name.
    """

    def __init__(
        self, directory: Path, member: str | None, tables: RowTables, rotate_after: float | None, rotate_bytes: int
    ) -> None:
        self.directory = directory
        self.member = member
        self.run = uuid.uuid4().hex
        self.buffer = RowBuffer(BUFFER_LIMIT, BUFFER_LIMIT_BYTES)
        self._tables = tables
        self._rotate_after = rotate_after
        self._rotate_bytes = rotate_bytes
        self._writer: JournalWriter | None = None

    @property
    def opened(self) -> bool:
        """Whether ``open`` was called."""
        return self._writer is not None

    @property
    def dropped(self) -> int:
        """Rows that did not fit into the buffer, or could not be written."""
        return self.buffer.dropped + (0 if self._writer is None else self._writer.lost)

    @property
    def count(self) -> int:
        """How many are whole and have their name."""
        return 0 if self._writer is None else self._writer.files

    def open(self, member: str, begin: str) -> None:
        """Create the first file, with the row ``begin``, and start the thread.

        Raises ``ConfigError`` when the file cannot be created, or when called twice.
        """
        if self._writer is not None:
            raise ConfigError(f"the journal of {member} was opened before: use one Journal per run")
        self.member = member
        self._writer = JournalWriter(
            self.directory,
            f"{member}-{self.run}",
            self.run,
            self._tables,
            self.buffer,
            rotate_after=self._rotate_after,
            rotate_bytes=self._rotate_bytes,
        )
        # Always: where the end is missing nobody knows how many rows are missing with it.
        self._writer.start(begin.removesuffix(HEAD_END) + "1" + HEAD_END[1:])

    def finish(self) -> None:
        """Write what is left, and end. Does not block. Idempotent."""
        if self._writer is not None:
            self._writer.finish()

    def join(self, timeout: float) -> bool:
        """Wait until everything is written, ``timeout`` seconds at most; whether it is. Blocks. Idempotent."""
        return self._writer is None or self._writer.join(timeout)

    async def aclose(self, name: str, timeout: float) -> None:
        """``join`` without blocking the loop; says so for the consumer ``name`` when that is too short."""
        if self._writer is not None and not await anyio.to_thread.run_sync(self.join, timeout):
            log.warning(
                "%s: the journal in %s was not written within %g s: its last rows are missing; look at its disk",
                name,
                self.directory,
                timeout,
            )


def files_of(journal: Journal) -> JournalFiles:
    """What its rows go into. For whoever runs a consumer, not for its user."""
    return journal._files


def journal_of(journal: Journal | str | os.PathLike[str] | None) -> Journal | None:
    """The journal, where it is not just named by its folder. Raises ``ConfigError`` for what ``Journal`` refuses."""
    return journal if journal is None or isinstance(journal, Journal) else Journal(journal)


def recorder(history: History | None, journal: Journal | None) -> Recorder | None:
    """What records a run for both, either or none of them.

    Raises ``ConfigError`` for two names of one member.
    """
    rows = None if history is None else recorder_of(history)
    if journal is None:
        return rows
    into = files_of(journal)
    if rows is None:
        return _JournalRecorder(into)
    if journal.member not in (None, rows.member):
        raise ConfigError(
            f"Journal.member={journal.member!r} is not History.member={rows.member!r}: one process has one name; "
            "leave the journal's out"
        )
    member = rows.member
    rows.wrap(lambda file, head: _CopiedFile(file, into, member, head))
    return rows


class _NoFile(SegmentFile):
    """The file of a history that has none but a journal."""

    __slots__ = ("_journal",)

    def __init__(self, path: Path, journal: JournalFiles) -> None:
        self.path = path
        self._journal = journal

    @property
    def whole(self) -> bool:
        return True

    def append(self, rows: Sequence[str], marker: str = "") -> GivenUp:
        return _KEPT

    def close(self) -> None:
        self._journal.finish()


class _JournalRecorder(Recorder):
    """The rows of a history straight into a journal: what ``flush`` does for the disk there, nobody has to wait for."""

    __slots__ = ("_ending", "_into", "_kept")

    group_commit = False

    def __init__(self, journal: JournalFiles) -> None:
        super().__init__(journal.directory, member=journal.member)
        self._into = journal
        self._ending = False
        # Of ``_size``, what the buffer knows already.
        self._kept = 0
        self._rows = journal.buffer.rows

    def _segment(self, path: Path, head: str) -> SegmentFile:
        self._into.open(self.member, head)
        return _NoFile(path, self._into)

    def flush(self) -> None:
        """Let the buffer count what was appended to it; what does not fit is dropped there. Never raises or waits."""
        if self._file is None:
            self._rows.clear()
            self._size = self._kept = 0
            return
        buffer = self._into.buffer
        fits = buffer.added(self._size - self._kept, whole=self._ending)
        # Where there is no room each row is looked at, not each thousandth.
        self._size = self._kept = 0 if fits else BUFFER_BYTES
        self.written = self._n

    def close(self, reason: str, now: float) -> None:
        if self._file is None:
            return
        self._ending = True
        super().close(reason, now)
        # The thread goes on with the buffer; what is said from here on is given up.
        self._rows = []


class _CopiedFile(SegmentFile):
    """The file of a history whose rows all go into a journal too, whatever becomes of them in the file."""

    __slots__ = ("_file", "_into", "_marker")

    def __init__(self, file: SegmentFile, journal: JournalFiles, member: str, head: str) -> None:
        self.path = file.path
        self._file = file
        self._into = journal
        self._marker = 0
        try:
            journal.open(member, head)
        except BaseException:
            file.close()
            raise

    @property
    def whole(self) -> bool:
        return self._file.whole

    def append(self, rows: Sequence[str], marker: str = "") -> GivenUp:
        lost = self._file.append(rows, marker)
        lines = list(rows)
        if marker and number_of(marker) != self._marker:
            # The file lacks rows that the journal has: for the journal this number stands for nothing.
            self._marker = number_of(marker)
            lines.insert(0, marker.replace(DROPPED, ',"event":"history_dropped",', 1))
        if lines:
            self._into.buffer.put(lines, whole=END in lines[-1])
        return lost

    def close(self) -> None:
        self._file.close()
        self._into.finish()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
