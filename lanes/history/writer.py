"""The file of a history, whose rows have a number, a member and a time.

The writer buffers rows, and passes them to the kernel together.

``RowWriter`` numbers and buffers the rows. ``SegmentFile`` writes the rows to a disk that may be full.
``lanes.history.recorder`` describes the rows, and the failures after which they remain.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import time
from collections.abc import Callable, MutableSequence, Sequence
from pathlib import Path
from typing import ClassVar, Final, NamedTuple

try:
    import fcntl
except ImportError:
    _IS_POSIX = False
else:
    _IS_POSIX = True

from blake3 import blake3

from lanes.arguments import check_folder, shown_value
from lanes.core.types import NEVER, Message, Partition
from lanes.errors import ConfigError
from lanes.history.rules import Rules
from lanes.queues.partitioned import PartitionedQueue
from lanes.queues.registered import QueuePartition, queue_partitions

FORMAT: Final = 2
"""Number of the format, in every ``begin`` row; a reader refuses any other number."""

BUFFER_ROWS: Final = 4_096
"""Maximum number of buffered rows. The row that reaches this number flushes the buffer."""

BUFFER_BYTES: Final = 1 << 20
"""Maximum number of buffered bytes, plus 64 rows. The row that reaches this number flushes the buffer."""

_BINARY: Final[int] = getattr(os, "O_BINARY", 0)
"""Flag without which Windows writes two bytes for the end of a line."""

_PIECE: Final = 64
"""Maximum number of rows that one call adds."""

KEY_DIGITS: Final = 16
"""Number of hex digits of a key's hash."""

HEAD_END: Final = "0}\n"
"""End of a ``begin`` row: the digit ``incomplete``, which the writer can overwrite in place."""

MEMBER: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

_log = logging.getLogger("lanes.history")

_CACHED_KEYS: Final = 32_768
_CACHED_KEY_BYTES: Final = 256
_CACHED_PARTITIONS: Final = 1_024

# Rendering a float costs half as much as the rest of a row. The list goes beyond 999 because floats are inexact.
THREE_DIGITS: Final = [f"{min(number, 999):03d}" for number in range(1024)]


class GivenUp(NamedTuple):
    """The result of one ``append``: the dropped rows.

    Attributes:
        rows: Number of dropped rows.
        marker: Whether the writer also dropped the ``dropped`` row before the rows.
    """

    rows: int
    marker: bool


NOTHING_LOST: Final = GivenUp(0, False)


class SegmentFile:
    """An append-only file of ASCII lines that begins with ``head``.

    A line is *torn* when only a part of it is in the file. The next write begins with the remaining part, so a failed
    write damages no other line. Before the first write the head is torn, and the file never drops the head. The last
    digit of the head is 1 while a line is torn, or while a ``dropped`` row for dropped rows is missing.

    Raises ``OSError`` when the file exists or cannot be created. No other method raises an error or waits for more
    than one ``write(2)``.
    """

    def __init__(self, path: Path, head: str) -> None:
        # Only the owner may read the file, because the hash of a guessable key can be matched against guesses.
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | _BINARY, 0o600)
        self.path = path
        self._torn = head
        self._flag_at = len(head) - len(HEAD_END)
        self._size = 0
        self._failing = False

    @property
    def whole(self) -> bool:
        """Whether no line is torn."""
        return not self._torn

    def append(self, rows: Sequence[str], marker: str = "") -> GivenUp:
        """Write the missing part of a torn line, then ``marker``, then ``rows``, by one ``write(2)``."""
        lines = [line for line in (self._torn, marker) if line]
        before_rows = len(lines)
        lines += rows
        data = "".join(lines).encode("ascii")
        error: OSError | None = None
        try:
            count = os.write(self._fd, data)
        except OSError as failure:
            count, error = 0, failure
        self._size += count
        if count == len(data):
            self._torn = ""
            if self._failing:
                self._failing = False
                self._flag("0")
                _log.warning(
                    "history %s: writing works again; a `dropped` row has the number of missing rows", self.path
                )
            return NOTHING_LOST
        first_lost = self._tear(lines, count)
        if not self._failing:
            self._failing = True
            reason = "short write" if error is None else error.strerror
            _log.warning(
                "history %s: writing failed (%s); check the disk. The run continues, and drops and counts rows "
                "until the disk accepts rows again",
                self.path,
                reason,
            )
        self._flag("1")
        return GivenUp(len(lines) - max(first_lost, before_rows), bool(marker) and first_lost < before_rows)

    def close(self) -> None:
        """Close the file. A torn line stays incomplete. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        try:
            os.close(fd)
        except OSError as error:
            _log.warning(
                "history %s: closing failed (%s); the last rows may be missing, so check the disk",
                self.path,
                error.strerror,
            )

    def _tear(self, lines: list[str], count: int) -> int:
        """Store the missing part of a line torn at byte ``count``, and return the index of the first lost line."""
        cut, end = 0, len(lines[0])
        while end <= count:
            cut += 1
            end += len(lines[cut])
        taken = count - (end - len(lines[cut]))
        # A line that was torn before stays torn, even when no byte of its rest was written now.
        if taken or (cut == 0 and self._torn):
            self._torn = lines[cut][taken:]
            return cut + 1
        self._torn = ""
        return cut

    def _flag(self, digit: str) -> None:
        if self._size <= self._flag_at:
            # The digit is not in the file yet, but in the rest of the head.
            self._torn = self._torn[: -len(HEAD_END)] + digit + HEAD_END[1:]
            return
        try:
            self._overwrite(digit.encode())
        except OSError as error:
            _log.warning(
                "history %s: cannot be marked as incomplete (%s); `lanes check` may not notice the missing rows",
                self.path,
                error.strerror,
            )

    def _overwrite(self, digit: bytes) -> None:
        """Write the digit over the flag in the file. Raises ``OSError``."""
        if not _IS_POSIX:
            with self.path.open("r+b", buffering=0) as file:
                file.seek(self._flag_at)
                file.write(digit)
            return
        # This descriptor works even when the process has no free descriptor. Linux appends even a pwrite while O_APPEND
        # is set. No other code uses this descriptor meanwhile.
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_APPEND)
        try:
            os.pwrite(self._fd, digit, self._flag_at)
        finally:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags)


class RowWriter:
    """Numbers, buffers and writes the rows of one segment. ``lanes.history.recorder.Recorder`` makes the rows."""

    __slots__ = (
        "_after",
        "_before",
        "_directory",
        "_file",
        "_hashes",
        "_latest",
        "_marker",
        "_member",
        "_n",
        "_origins",
        "_queue_partitions",
        "_rows",
        "_size",
        "_step_from",
        "_step_until",
        "_unreported",
        "_wrapper",
        "dropped",
        "member",
        "path",
        "written",
    )

    group_commit: ClassVar[bool] = True
    """Whether a handler has to wait until ``written`` reaches the number of its row."""

    def __init__(self, directory: str | os.PathLike[str], *, member: str | None = None) -> None:
        member = f"m-{os.urandom(4).hex()}" if member is None else member_name(member)
        self._directory = made_directory(directory, "history")
        self.member = member
        self.path: Path | None = None
        self.written = 0
        self.dropped = 0
        self._member = f',"member":{json.dumps(member)},"mono":'
        self._file: SegmentFile | None = None
        self._n = 0
        self._rows: MutableSequence[str] = []
        self._size = 0
        self._wrapper: Callable[[SegmentFile, str], SegmentFile] | None = None
        self._before = self._after = ""
        self._step_from = self._step_until = 0.0
        self._latest = 0.0
        # By partition: the assignment, the beginning of its rows, and the deadline in the last ``leased`` row.
        self._origins: dict[Partition, tuple[int, str, float]] = {}
        self._hashes: dict[bytes | None, str] = {None: "null"}
        self._queue_partitions: dict[str, QueuePartition] = {}
        self._unreported = 0
        self._marker = 0

    def __repr__(self) -> str:
        state = "closed" if self._file is None else "open"
        buffered = len(self._rows)
        return f"<History {self.member} {state}: {self._n} rows, {buffered} buffered, {self.dropped} dropped>"

    def open(
        self,
        *,
        source: str,
        concurrency: int,
        max_in_flight: int,
        max_in_flight_bytes: int,
        now: float,
        rules: Rules | None = None,
        queues: Sequence[PartitionedQueue] = (),
    ) -> None:
        """Create the file and write the ``begin`` row, with the ``rules`` that checkers need.

        The rows ``assigned`` contain the names of the ``queues`` of their partitions.

        Raises ``ConfigError`` when the file cannot be created, or at a second call.
        """
        if self.path is not None:
            raise ConfigError(f"the history of {self.member} was opened before; use one History per run")
        # Import here, because only a history needs the module, and its import takes long.
        from importlib.metadata import version

        pid, boot = self._process()
        path = self._directory / f"{self.member}-{pid}-{time.time_ns()}.jsonl"
        begin = (
            f'{{"n":1,"event":"begin"{self._stamp(now)},"format":{FORMAT},"version":"{version("lanes-runtime")}",'
            f'"pid":{pid},"boot":"{boot}","source":{json.dumps(source)},"concurrency":{concurrency},'
            f'"max_in_flight":{max_in_flight},"max_in_flight_bytes":{max_in_flight_bytes}'
            f'{(rules or Rules()).fields()},"incomplete":{HEAD_END}'
        )
        try:
            self._file = self._segment(path, begin)
        except OSError as error:
            raise ConfigError(
                f"history file {str(path)!r}: {error.strerror}; choose a directory that can be written"
            ) from error
        if self._wrapper is not None:
            self._file = self._wrapper(self._file, begin)
        self.path = path
        self._queue_partitions = queue_partitions(queues)
        self._n = 1
        self._rows.clear()
        self.dropped = 0
        self.flush()

    def wrap(self, wrapper: Callable[[SegmentFile, str], SegmentFile]) -> None:
        """Make ``open`` use the result of ``wrapper`` for the file and its head. Call this method before ``open``."""
        self._wrapper = wrapper

    def close(self, reason: str, now: float) -> None:
        """Write the ``end`` row with ``reason`` (drained, stopped or failed), and close the file. Idempotent."""
        if self._file is None:
            return
        self._row("end", f',"reason":"{reason}"', now)
        self.flush()
        self._file.close()
        self._file = None

    # A simulation overrides these

    def _process(self) -> tuple[int, str]:
        """Return the process id and the boot id. ``mono`` is comparable only between rows of one boot."""
        return os.getpid(), _boot()

    def _wall(self) -> float:
        """Return the wall-clock time in seconds since the epoch."""
        return time.time()

    def _segment(self, path: Path, head: str) -> SegmentFile:
        """Create the file. Raises ``OSError`` when the file cannot be created."""
        return SegmentFile(path, head)

    # Rows

    def _message(self, event: str, message: Message, stamp: str, more: str = "") -> None:
        self._n += 1
        row = message.row or self._name(message)
        self._append(f'{{"n":{self._n},"event":"{event}"{stamp}{row}{message.attempt}{more}}}\n')

    def _name(self, message: Message) -> str:
        """Make the part of a row that names a message, for all rows of the message."""
        key = self._hashes.get(message.key) or self._hash(message.key)
        message.row = f'{self._origin_of(message.partition)[1]}{message.position},"key":{key},"attempt":'
        return message.row

    def _row(self, event: str, more: str, now: float) -> None:
        self._n += 1
        self._append(f'{{"n":{self._n},"event":"{event}"{self._stamp(now)}{more}}}\n')

    def _piece(self) -> int:
        """Return the number of rows that one call of ``_extend`` may add."""
        if self._size >= BUFFER_BYTES:
            return 1
        return max(1, min(_PIECE, BUFFER_ROWS - len(self._rows)))

    def _extend(self, made: list[str]) -> None:
        """Append rows, at most as many as ``_piece`` has returned."""
        rows = self._rows
        rows.extend(made)
        self._size += sum(map(len, made))
        if self._size >= BUFFER_BYTES or len(rows) >= BUFFER_ROWS:
            self.flush()

    def _append(self, row: str) -> None:
        rows = self._rows
        rows.append(row)
        # One character is one byte, because json.dumps makes ASCII of every name.
        self._size += len(row)
        if self._size >= BUFFER_BYTES or len(rows) >= BUFFER_ROWS:
            self.flush()

    def _stamp(self, now: float) -> str:
        if not self._step_from <= now < self._step_until:
            self._tick(now)
        return f"{self._before}{THREE_DIGITS[int((now - self._step_from) * 1e6 + 0.5)]}{self._after}"

    def _tick(self, now: float) -> None:
        """Return the time of the rows of one millisecond as text, without the last three digits.

        A time that rounds up to the next millisecond belongs to the next millisecond, so the digits are 000 … 999.
        """
        step = math.floor(now * 1e3 + 0.0005)
        self._step_from = step / 1e3
        self._step_until = self._step_from + 0.0009995
        self._latest = now
        self._before = f"{self._member}{step // 1000}.{step % 1000:03d}"
        self._after = f',"wall":{self._wall():.3f}'

    def _owned(self, partition: Partition) -> str:
        return f',"partition":{json.dumps(str(partition.id))},"assignment":{partition.assignment}'

    def _origin_of(self, partition: Partition) -> tuple[int, str, float]:
        origin = self._origins.get(partition)
        if origin is None or origin[0] != partition.assignment:
            origin = self._origin(partition)
        return origin

    def _origin(self, partition: Partition, told: float = NEVER) -> tuple[int, str, float]:
        if len(self._origins) >= _CACHED_PARTITIONS:
            self._origins.clear()
        origin = (partition.assignment, f'{self._owned(partition)},"position":', told)
        self._origins[partition] = origin
        return origin

    def _hash(self, key: bytes | None) -> str:
        if key is None:
            return "null"
        digits = f'"{blake3(key).hexdigest(length=KEY_DIGITS // 2)}"'
        # Long keys are hashed every time, so that a producer cannot choose how much memory the cache takes.
        if len(key) <= _CACHED_KEY_BYTES:
            if len(self._hashes) >= _CACHED_KEYS:
                self._hashes.clear()
                self._hashes[None] = "null"
            self._hashes[key] = digits
        return digits

    def flush(self) -> None:
        """Pass every buffered row to the kernel by one ``write(2)``. The call never raises an exception.

        The writer drops rows that it cannot write. The next write begins with the missing part of a torn line and a
        ``dropped`` row.
        """
        rows, file = self._rows, self._file
        if file is None:
            self.dropped += len(rows)
        elif rows or self._unreported or not file.whole:
            lost = file.append(rows, self._dropped_row() if self._unreported else "")
            if not lost.marker:
                self._unreported = 0
            if lost.rows:
                # The marker has a number too, which is missing when the marker is given up with the rows after it.
                count = lost.rows + lost.marker
                self.dropped += count
                self._unreported += count
        self.written = self._n
        if self._unreported and rows:
            # The number has to lie between the rows that were given up and the next row.
            self._n += 1
            self._marker = self._n
        rows.clear()
        self._size = 0
        self._step_until = 0.0

    def _dropped_row(self) -> str:
        stamp = self._stamp(self._latest)
        return f'{{"n":{self._marker},"event":"dropped"{stamp},"count":{self._unreported}}}\n'


def made_directory(directory: str | os.PathLike[str], kind: str) -> Path:
    """Create a directory for files of this kind, unless it exists. Raises ``ConfigError`` after a failure."""
    check_folder(f"{kind} directory", directory)
    path = Path(directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{kind} directory {str(path)!r}: {error.strerror}; choose a directory that can be created"
        ) from error
    return path


def member_name(member: str) -> str:
    """Return the name of a process. Raises ``ConfigError`` for a name that is invalid in rows or file names."""
    if not isinstance(member, str) or not MEMBER.fullmatch(member):
        raise ConfigError(
            f"member={shown_value(member)}: must be 1 to 64 of A-Z a-z 0-9 . _ - and begin with a letter or digit; "
            "choose another name"
        )
    return member


def _boot() -> str:
    """Return the boot id of the machine; empty if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def key_hash(key: bytes | None) -> str:
    """Return the name of a key in rows, logs and spans: 16 hex digits of its blake3, ``-`` for no key."""
    return "-" if key is None else blake3(key).hexdigest(length=KEY_DIGITS // 2)
