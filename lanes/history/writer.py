"""The file behind a history: numbered rows with a member and a time, buffered, and handed to the kernel together.

``lanes.history.recorder`` says what rows mean, and what survives what.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable, MutableSequence
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar, Final

from blake3 import blake3

from lanes.core.types import NEVER, Message, Partition
from lanes.errors import ConfigError
from lanes.history.rules import Rules
from lanes.history.segment import HEAD_END, SegmentFile

__all__ = [
    "BUFFER_BYTES",
    "BUFFER_ROWS",
    "FORMAT",
    "KEY_DIGITS",
    "MEMBER",
    "THREE_DIGITS",
    "RowWriter",
    "key_hash",
    "member_name",
]

FORMAT: Final = 2
"""The number of the format, in every ``begin`` row; a reader refuses any other."""

BUFFER_ROWS: Final = 4_096
"""Rows buffered at most: the row that reaches it flushes."""

BUFFER_BYTES: Final = 1 << 20
"""Bytes buffered at most, give or take one row: the row that reaches it flushes."""

KEY_DIGITS: Final = 16
"""Hex digits of a key's hash."""

MEMBER: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

_VERSION: Final = version("lanes-runtime")
_CACHED_KEYS: Final = 32_768
_CACHED_KEY_BYTES: Final = 256
_CACHED_PARTITIONS: Final = 1_024

# Rendering a float costs half as much as the rest of a row. Beyond 999: floats are inexact.
THREE_DIGITS: Final = [f"{min(number, 999):03d}" for number in range(1024)]


class RowWriter:
    """Writes one segment; ``lanes.history.recorder.Recorder`` says which rows."""

    group_commit: ClassVar[bool] = True
    """Whether a handler has to wait until ``written`` has reached the number of its row."""

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

    def __init__(self, directory: str | os.PathLike[str], *, member: str | None = None) -> None:
        member = f"m-{os.urandom(4).hex()}" if member is None else member_name(member)
        self._directory = Path(directory)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"history directory {str(self._directory)!r}: {error.strerror}; choose one that can be made"
            ) from error
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
        # By partition: its assignment, how its rows begin, and the deadline that a row has told.
        self._origins: dict[Partition, tuple[int, str, float]] = {}
        self._hashes: dict[bytes | None, str] = {None: "null"}
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
    ) -> None:
        """Create the file and write the ``begin`` row. ``rules``: what else is to be kept, for who reads it.

        Raises ``ConfigError`` when the file cannot be created, or when called twice.
        """
        if self.path is not None:
            raise ConfigError(f"the history of {self.member} was opened before: use one History per run")
        pid, boot = self._process()
        path = self._directory / f"{self.member}-{pid}-{time.time_ns()}.jsonl"
        begin = (
            f'{{"n":1,"event":"begin"{self._stamp(now)},"format":{FORMAT},"version":"{_VERSION}",'
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
        self._n = 1
        self._rows.clear()
        self.dropped = 0
        self.flush()

    def wrap(self, wrapper: Callable[[SegmentFile, str], SegmentFile]) -> None:
        """Let ``open`` make of the file, and of its head, the file to be used. To be called before ``open``."""
        self._wrapper = wrapper

    def close(self, reason: str, now: float) -> None:
        """Write the ``end`` row (``reason``: drained, stopped or failed) and close the file. Idempotent."""
        if self._file is None:
            return
        self._row("end", f',"reason":"{reason}"', now)
        self.flush()
        self._file.close()
        self._file = None

    # What a simulation has its own of

    def _process(self) -> tuple[int, str]:
        """The number of this process, and what identifies this start of the machine, within which ``mono`` counts."""
        return os.getpid(), _boot()

    def _wall(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    def _segment(self, path: Path, head: str) -> SegmentFile:
        """Where rows go. Raises ``OSError`` when it cannot be created."""
        return SegmentFile(path, head)

    # Rows

    def _message(self, event: str, message: Message, stamp: str, more: str = "") -> None:
        partition = message.partition
        origin = self._origins.get(partition)
        if origin is None or origin[0] != partition.assignment:
            origin = self._origin(partition)
        key = self._hashes.get(message.key) or self._hash(message.key)
        self._n += 1
        self._append(
            f'{{"n":{self._n},"event":"{event}"{stamp}{origin[1]}{message.position},"key":{key},'
            f'"attempt":{message.attempt}{more}}}\n'
        )

    def _row(self, event: str, more: str, now: float) -> None:
        self._n += 1
        self._append(f'{{"n":{self._n},"event":"{event}"{self._stamp(now)}{more}}}\n')

    def _append(self, row: str) -> None:
        rows = self._rows
        rows.append(row)
        # Characters are bytes: every name went through json.dumps, which leaves ASCII only.
        self._size += len(row)
        if self._size >= BUFFER_BYTES or len(rows) >= BUFFER_ROWS:
            self.flush()

    def _stamp(self, now: float) -> str:
        if not self._step_from <= now < self._step_until:
            self._tick(now)
        return f"{self._before}{THREE_DIGITS[int((now - self._step_from) * 1e6 + 0.5)]}{self._after}"

    def _tick(self, now: float) -> None:
        """Render the time of a row but for its last three digits, for the rows of one millisecond.

        Those that would round up to the next millisecond belong to it: the remainder is then 0 … 999.
        """
        step = math.floor(now * 1e3 + 0.0005)
        self._step_from = step / 1e3
        self._step_until = self._step_from + 0.0009995
        self._latest = now
        self._before = f"{self._member}{step // 1000}.{step % 1000:03d}"
        self._after = f',"wall":{self._wall():.3f}'

    def _owned(self, partition: Partition) -> str:
        return f',"partition":{json.dumps(str(partition.id))},"assignment":{partition.assignment}'

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
        # Long keys are hashed every time: caching them would make the memory the producer's choice.
        if len(key) <= _CACHED_KEY_BYTES:
            if len(self._hashes) >= _CACHED_KEYS:
                self._hashes.clear()
                self._hashes[None] = "null"
            self._hashes[key] = digits
        return digits

    def flush(self) -> None:
        """Hand every buffered row to the kernel by one ``write(2)``. Never raises.

        What cannot be written is given up, except a line of which a part is in the file: its rest goes first
        the next time, then a ``dropped`` row, then new rows.
        """
        rows, file = self._rows, self._file
        if file is None:
            self.dropped += len(rows)
        elif rows or self._unreported or not file.whole:
            lost = file.append(rows, self._dropped_row() if self._unreported else "")
            if not lost.marker:
                self._unreported = 0
            if lost.rows:
                # A marker has a number of its own, missing too when rows behind it are given up with it.
                count = lost.rows + lost.marker
                self.dropped += count
                self._unreported += count
        self.written = self._n
        if self._unreported and rows:
            # The number must lie between the rows given up and the next one, so it is taken now.
            self._n += 1
            self._marker = self._n
        rows.clear()
        self._size = 0
        self._step_until = 0.0

    def _dropped_row(self) -> str:
        stamp = self._stamp(self._latest)
        return f'{{"n":{self._marker},"event":"dropped"{stamp},"count":{self._unreported}}}\n'


def member_name(member: str) -> str:
    """The same. Raises ``ConfigError`` for what cannot name a process in rows and files."""
    if not MEMBER.fullmatch(member):
        raise ConfigError(
            f"member={member!r}: must be 1 to 64 of A-Z a-z 0-9 . _ - and begin with a letter or digit, "
            "because it names a file; choose another, or leave it out"
        )
    return member


def _boot() -> str:
    """Identifies this start of this machine, within which ``mono`` can be compared; empty if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def key_hash(key: bytes | None) -> str:
    """How rows, logs and spans name a key: 16 hex digits of its blake3, ``-`` for none."""
    return "-" if key is None else blake3(key).hexdigest(length=KEY_DIGITS // 2)
