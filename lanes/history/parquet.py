"""The thread of a journal, which takes rows from the buffer and writes whole Parquet files.

The thread writes a file under a hidden name, closes the file, forces it to the disk, and only then renames it. The
thread closes a file when its size or the age of its first row reaches a limit, or at the end of the run. The rows of a
file under a hidden name are lost when the process dies.

A full, read-only or missing disk does not stop the consumer. The writer drops the rows of a failed file. The next file
contains a ``dropped`` row with the number of these rows.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from lanes.errors import ConfigError
from lanes.history.buffer import RowBuffer, dropped_row, number_of
from lanes.history.columns import RowTables

COMPRESSION: Final = "zstd"
GROUP_ROWS: Final = 65_536
"""Number of rows that completes a row group; the last rows from the buffer may exceed this number."""

_LOOK_SECONDS: Final = 0.2

_log = logging.getLogger("lanes.journal")


class ParquetFile:
    """One file with a hidden name, which the thread renames when the file is complete.

    Raises ``OSError`` if the file cannot be created or written. With ``overwrite`` the new file replaces the hidden
    file of an interrupted attempt. Without ``overwrite``, an existing hidden file also raises ``OSError``.
    """

    def __init__(self, path: Path, schema: Any, *, overwrite: bool = False) -> None:
        arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
        self.path = path
        self.rows = 0
        self._hidden = path.with_name(f".{path.name}.tmp")
        self._schema = schema
        self._concat: Any = arrow.concat_tables
        self._pending: list[Any] = []
        self._pending_rows = 0
        # Only the owner may read the file, because the hash of a guessable key can be matched against guesses.
        os.close(os.open(self._hidden, os.O_WRONLY | os.O_CREAT | (0 if overwrite else os.O_EXCL), 0o600))
        self._sink: Any = arrow.OSFile(str(self._hidden), "wb")
        self._writer: Any = parquet.ParquetWriter(self._sink, schema, compression=COMPRESSION, write_page_checksum=True)

    @property
    def size(self) -> int:
        """Number of bytes in the open file."""
        return int(self._sink.tell())

    def add(self, table: Any) -> None:
        """Write the rows of a table, now or together with later rows."""
        self.rows += table.num_rows
        self._pending.append(table)
        self._pending_rows += table.num_rows
        if self._pending_rows >= GROUP_ROWS:
            self._write()

    def publish(self) -> None:
        """Close the file and rename it."""
        self._write()
        self._writer.close()
        self._sink.close()
        with self._hidden.open("rb") as written:
            # Force the data to the disk before the rename, so that a stopped machine leaves no incomplete file of that
            # name.
            os.fsync(written.fileno())
        self._hidden.rename(self.path)

    def abandon(self) -> None:
        """Close the file under its hidden name, and try to remove the file. The call raises no exception."""
        self._pending.clear()
        for step in (self._writer.close, self._sink.close, self._hidden.unlink):
            try:
                step()
            except Exception as error:
                _log.debug("journal %s: %s", self._hidden, error)

    def _write(self) -> None:
        tables, self._pending, self._pending_rows = self._pending, [], 0
        if tables:
            self._writer.write_table(self._concat(tables))


class JournalWriter:
    """The writer of the rows of a buffer, from ``start`` until ``finish``.

    Args:
        directory: Folder of the files.
        name: Beginning of the names of the files.
        run: Id of the run.
        tables: Converter of the rows.
        buffer: Buffer of the rows.
        rotate_after: Maximum age of an open file in seconds, from its first row; None = no limit.
        rotate_bytes: Size at which the thread closes a file, in bytes.

    Attributes:
        files: Number of complete files.
        lost: Number of rows whose write failed.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        run: str,
        tables: RowTables,
        buffer: RowBuffer,
        *,
        rotate_after: float | None,
        rotate_bytes: int,
    ) -> None:
        self.files = 0
        self.lost = 0
        self._directory = directory
        self._name = name
        self._run = run
        self._tables = tables
        self._schema = tables.schema(run)
        self._buffer = buffer
        self._rotate_after = math.inf if rotate_after is None else rotate_after
        self._rotate_bytes = rotate_bytes
        self._begin = ""
        self._file: ParquetFile | None = None
        self._number = 0
        self._due = math.inf
        # The last line of the unfinished file, and the number of rows that would be lost with the file.
        self._last = ""
        self._rows = 0
        # The number of the last row in a complete file, and the last row that a ``dropped`` row has to count.
        self._told = 0
        self._lost_last = ""
        self._failing = False
        self._finishing = False
        self._thread = threading.Thread(target=self._work, name=f"lanes-journal-{name}", daemon=True)

    def start(self, begin: str) -> None:
        """Create the first file and start the thread.

        The row ``begin`` is the first row, and the writer never drops it.

        Raises ``ConfigError`` when the file cannot be created.
        """
        self._begin = begin
        try:
            self._open()
        except OSError as error:
            raise ConfigError(
                f"journal directory {str(self._directory)!r}: {reason_of(error)}; choose a directory that can be "
                "written"
            ) from error
        self._thread.start()

    def finish(self) -> None:
        """Make the thread write the remaining rows and then end. The call does not block. Idempotent."""
        self._finishing = True
        self._buffer.wake.set()

    def join(self, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds, and return whether the thread has ended. Blocks. Idempotent."""
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    # In the thread

    def _work(self) -> None:
        finishing = False
        while not finishing:
            self._buffer.wake.wait(_LOOK_SECONDS)
            self._buffer.wake.clear()
            # Read the flag before the last take, so that the take sees every row that was added before ``finish``.
            finishing = self._finishing
            while lines := self._buffer.take():
                self._write(lines)
            if self._file is not None and (finishing or time.monotonic() >= self._due):
                self._publish()
        if self._lost_last:
            # No later file can count the lost rows, so write a last file that has only a ``dropped`` row.
            try:
                self._open()
            except Exception as error:
                self._fail(error, self._lost_last, 0)
            else:
                self._publish()

    def _write(self, lines: Sequence[str]) -> None:
        table = self._tables.table(lines, self._run)
        rows = table.num_rows - self._tables.dropped(table)
        try:
            if self._file is None:
                self._open()
            file = self._file
            assert file is not None, "it was opened"
            file.add(table)
        except Exception as error:
            self._fail(error, lines[-1], rows)
            return
        self._last = lines[-1]
        self._rows += rows
        if file.size >= self._rotate_bytes:
            self._publish()

    def _open(self) -> None:
        """Open a file. The first file begins with the row ``begin``. If rows are missing, a row ``dropped`` follows."""
        self._number += 1
        path = self._directory / f"{self._name}-{self._number:06d}.parquet"
        file = ParquetFile(path, self._schema)
        lines = [] if self._told else [self._begin]
        if self._lost_last:
            missing = number_of(self._lost_last) - max(self._told, 1)
            if missing > 0:
                lines.append(dropped_row(self._lost_last, missing))
        if lines:
            try:
                file.add(self._tables.table(lines, self._run))
            except BaseException:
                file.abandon()
                raise
            self._last = lines[-1]
        self._file = file
        self._due = time.monotonic() + self._rotate_after

    def _publish(self) -> None:
        file = self._file
        assert file is not None, "there is something to publish"
        try:
            file.publish()
        except Exception as error:
            self._fail(error, self._last, 0)
            return
        self.files += 1
        self._file, self._rows = None, 0
        self._told = number_of(self._last)
        self._lost_last = ""
        if self._failing:
            self._failing = False
            _log.warning("journal %s: writing works again; a `dropped` row has the number of missing rows", file.path)

    def _fail(self, error: Exception, last: str, rows: int) -> None:
        """Drop the open file, if a file is open, and ``rows`` more rows up to ``last``."""
        self.lost += self._rows + rows
        self._lost_last = last
        file, self._file, self._rows = self._file, None, 0
        if file is not None:
            file.abandon()
        if not self._failing:
            self._failing = True
            _log.warning(
                "journal %s in %s: writing failed (%s); check the disk. The run continues, and drops and "
                "counts rows until the disk accepts rows again",
                self._name,
                self._directory,
                reason_of(error),
            )


def reason_of(error: Exception) -> str:
    """Return the text of an error. For an error of the operating system, the text contains no path."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
