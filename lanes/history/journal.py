"""The journal of a run: its history as Parquet files, for SQL and for Spark.

The journal has the rows of ``lanes.history.recorder``, but handlers and settlements never wait for its writes. A thread
writes whole files, so a killed process loses the rows after its last complete file. The journal of a killed process has
no ``end`` row, so a reader sees that rows are missing. The journal never contains payloads or keys.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread

from lanes.arguments import check_positive, check_whole, names_unknown_options
from lanes.errors import ConfigError
from lanes.history.buffer import DROPPED, END, RowBuffer, number_of
from lanes.history.columns import row_tables
from lanes.history.parquet import JournalWriter
from lanes.history.recorder import History, Recorder, recorder_of
from lanes.history.writer import BUFFER_BYTES, HEAD_END, NOTHING_LOST, GivenUp, SegmentFile, made_directory, member_name

log = logging.getLogger("lanes.journal")

ROTATE_AFTER: Final = 30.0
ROTATE_BYTES: Final = 64 * 1024 * 1024
BUFFER_LIMIT: Final = 1 << 17
"""Maximum number of rows that wait for the thread. The journal drops and counts a row that does not fit."""
BUFFER_LIMIT_BYTES: Final = 32 * 1024 * 1024
"""Maximum number of bytes of the waiting rows, plus one MiB."""


@names_unknown_options("lanes.Journal")
class Journal:
    """The journal of one run, for one consumer: Parquet files in ``directory``. The class needs the extra ``journal``.

    The names of the files contain the random id ``run``, so two runs never use the same file name, even on different
    machines. An unfinished file has a hidden name that ends in ``.tmp``. Only a killed process or a failing disk leaves
    a hidden file.

    After the start of the consumer, a disk fault raises no error, and handlers continue. The journal drops rows that it
    cannot write. A ``dropped`` row replaces them, and contains their number.

    Args:
        directory: Folder of the files; the journal creates a missing folder.
        member: Name of this process in every row and file name, as in ``History``; None = the history's name, or
            ``m-`` and 8 random hex digits without a history.
        rotate_after: Maximum age of an open file in seconds, from its first row, more than 0. With None the journal
            closes a file only at its maximum size or at the end of the run.
        rotate_bytes: Size at which the journal closes a file, in bytes, 1 or more.

    Raises:
        ConfigError: A name or number is invalid, the directory cannot be created, or pyarrow is missing.
    """

    __slots__ = ("_buffer", "_directory", "_member", "_rotate_after", "_rotate_bytes", "_run", "_tables", "_writer")

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        member: str | None = None,
        rotate_after: float | None = ROTATE_AFTER,
        rotate_bytes: int = ROTATE_BYTES,
    ) -> None:
        self._tables = row_tables()
        self._member = None if member is None else member_name(member)
        if rotate_after is not None:
            check_positive("Journal.rotate_after", rotate_after)
        check_whole("Journal.rotate_bytes", rotate_bytes, 1)
        self._directory = made_directory(directory, "journal")
        self._rotate_after = rotate_after
        self._rotate_bytes = rotate_bytes
        self._run = uuid.uuid4().hex
        self._buffer = RowBuffer(BUFFER_LIMIT, BUFFER_LIMIT_BYTES)
        self._writer: JournalWriter | None = None

    def __repr__(self) -> str:
        state = "new" if self._writer is None else "opened"
        return f"<Journal {self.member or '-'} {state}: {self.files} files, {self.dropped} rows dropped>"

    @property
    def directory(self) -> Path:
        """The folder of the files."""
        return self._directory

    @property
    def member(self) -> str | None:
        """The name of this process in the journal; None = the journal is not open and no name was given."""
        return self._member

    @property
    def run(self) -> str:
        """The id of the run in the names of its files: 32 random hex digits."""
        return self._run

    @property
    def dropped(self) -> int:
        """Number of rows that did not fit into the buffer, or whose write failed."""
        return self._buffer.dropped + (0 if self._writer is None else self._writer.lost)

    @property
    def files(self) -> int:
        """Number of complete, renamed files."""
        return 0 if self._writer is None else self._writer.files

    def join(self, timeout: float) -> bool:
        """Wait until the files have all rows of an ended run. Blocks.

        Args:
            timeout: Maximum time to wait, in seconds.

        Returns:
            True = the thread has ended, or the journal was never opened. False = rows may still be missing in the
            files.
        """
        return self._writer is None or self._writer.join(timeout)

    def _open(self, member: str, begin: str) -> None:
        """Create the first file with the row ``begin``, and start the thread.

        Raises ``ConfigError`` when the file cannot be created, or at a second call.
        """
        if self._writer is not None:
            raise ConfigError(f"the journal of {member} was opened before; use one Journal per run")
        self._member = member
        self._writer = JournalWriter(
            self._directory,
            f"{member}-{self._run}",
            self._run,
            self._tables,
            self._buffer,
            rotate_after=self._rotate_after,
            rotate_bytes=self._rotate_bytes,
        )
        # A journal is always marked incomplete, because without an end row no reader can count the missing rows.
        self._writer.start(begin.removesuffix(HEAD_END) + "1" + HEAD_END[1:])

    def _finish(self) -> None:
        """Make the thread write the remaining rows and then end. The call does not block. Idempotent."""
        if self._writer is not None:
            self._writer.finish()


def buffer_of(journal: Journal) -> RowBuffer:
    """Return the buffer of a journal, for a task that waits until the buffer has room."""
    return journal._buffer


async def close_journal(journal: Journal, name: str, timeout: float) -> None:
    """Wait for the end of a journal without blocking the loop. Log a warning for consumer ``name`` after a timeout."""
    if journal._writer is not None and not await anyio.to_thread.run_sync(journal.join, timeout):
        log.warning(
            "%s: the journal in %s was not written within %g s, so its last rows may be missing; check the disk",
            name,
            journal.directory,
            timeout,
        )


def journal_of(journal: Journal | str | os.PathLike[str] | None) -> Journal | None:
    """Return the journal, or make one in a folder. Raises ``ConfigError`` as ``Journal`` does."""
    return journal if journal is None or isinstance(journal, Journal) else Journal(journal)


def recorder(history: History | None, journal: Journal | None) -> Recorder | None:
    """Return a recorder that writes the history, the journal or both; None = the consumer has neither.

    Raises ``ConfigError`` when history and journal have different names for this process.
    """
    rows = None if history is None else recorder_of(history)
    if journal is None:
        return rows
    if rows is None:
        return _JournalRecorder(journal)
    if journal.member not in (None, rows.member):
        raise ConfigError(
            f"Journal.member={journal.member!r} is not History.member={rows.member!r}, but one process has one name; "
            "leave out member= of the journal"
        )
    member = rows.member
    rows.wrap(lambda file, head: _CopiedFile(file, journal, member, head))
    return rows


class _NoFile(SegmentFile):
    """A substitute for a history's file, in memory, for a run with only a journal."""

    def __init__(self, path: Path, journal: Journal) -> None:
        self.path = path
        self._journal = journal

    @property
    def whole(self) -> bool:
        return True

    def append(self, rows: Sequence[str], marker: str = "") -> GivenUp:
        return NOTHING_LOST

    def close(self) -> None:
        self._journal._finish()


class _JournalRecorder(Recorder):
    """A recorder that writes its rows only to a journal. No handler waits for ``flush``."""

    group_commit = False

    def __init__(self, journal: Journal) -> None:
        super().__init__(journal.directory, member=journal.member)
        self._into = journal
        self._ending = False
        # The part of ``_size`` that the buffer has counted already.
        self._kept = 0
        self._rows = journal._buffer.rows

    def _segment(self, path: Path, head: str) -> SegmentFile:
        self._into._open(self.member, head)
        return _NoFile(path, self._into)

    def flush(self) -> None:
        """Report the appended rows to the buffer, which drops the rows that do not fit.

        The call never raises an exception or waits.
        """
        if self._file is None:
            self._rows.clear()
            self._size = self._kept = 0
            return
        buffer = self._into._buffer
        fits = buffer.added(self._size - self._kept, whole=self._ending)
        # Without room, make the next row flush, so that each row is checked.
        self._size = self._kept = 0 if fits else BUFFER_BYTES
        self.written = self._n

    def close(self, reason: str, now: float) -> None:
        if self._file is None:
            return
        self._ending = True
        super().close(reason, now)
        # The thread still empties the buffer, and later rows are given up.
        self._rows = []


class _CopiedFile(SegmentFile):
    """The file of a history, which copies every row into a journal, including rows that the file itself drops."""

    def __init__(self, file: SegmentFile, journal: Journal, member: str, head: str) -> None:
        self.path = file.path
        self._file = file
        self._into = journal
        self._marker = 0
        try:
            journal._open(member, head)
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
            # The journal has the rows that the file lacks, so the journal names this row ``history_dropped``.
            self._marker = number_of(marker)
            lines.insert(0, marker.replace(DROPPED, ',"event":"history_dropped",', 1))
        if lines:
            self._into._buffer.put(lines, whole=END in lines[-1])
        return lost

    def close(self) -> None:
        self._file.close()
        self._into._finish()
