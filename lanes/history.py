"""The history of a run: what happened to every message, written so that it survives ``kill -9``.

One process writes one *segment*: a file of JSON lines that begins with a ``begin`` row and, unless the
process crashed, ends with an ``end`` row. ``memsource`` reads segments and checks the promises over them.

Every row has ``n`` (1, 2, 3 … in this segment), ``event``, ``member``, ``mono`` (seconds of the engine's
clock) and ``wall`` (seconds since the epoch, sampled once a millisecond). A row of a message adds
``partition``, ``epoch``, ``position``, ``key`` (16 hex digits of blake3, null without a key) and ``attempt``.
Neither payload nor key is ever written.

Rows are buffered; ``flush`` hands all of them to the kernel by one ``write(2)``, without an fsync: they
survive the death of the process, not of the machine. The runtime flushes before it calls the handlers of a
time slice and before a settlement leaves. So what a file holds is always a prefix of what happened, and a
segment that just stops is a crash, not a gap.

A full disk must not stop a consumer. Rows that cannot be written are given up and counted; their numbers are
missing, and when writing works again a ``dropped`` row says how many. Until then the last field of the
``begin`` row, ``incomplete``, is 1, overwritten in place (which needs no space on most file systems), so that
a process that dies meanwhile does not pass for one whose history is whole.

Not thread-safe, and unusable in a child after ``fork``: both would number rows alike. One event loop owns it.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Final

from blake3 import blake3

from lanes.core.types import Message, Partition, PartitionId
from lanes.errors import ConfigError, ContractError
from lanes.segment import HEAD_END, SegmentFile

__all__ = ["BUFFER_BYTES", "BUFFER_ROWS", "FORMAT", "History"]

FORMAT: Final = 1
"""The number of the format, in every ``begin`` row; a reader refuses a higher one."""

BUFFER_ROWS: Final = 4_096
"""Rows buffered at most: the row that reaches it flushes."""

BUFFER_BYTES: Final = 1 << 20
"""Bytes buffered at most, give or take one row: the row that reaches it flushes."""

KEY_DIGITS: Final = 16
"""Hex digits of a key's hash."""

ERROR_NAME_LIMIT: Final = 200
"""Characters of an exception's type name that a row keeps."""

MEMBER: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

_CACHED_KEYS: Final = 32_768
_CACHED_KEY_BYTES: Final = 256
_CACHED_PARTITIONS: Final = 1_024

# Rendering a float costs half as much as the rest of a row. Beyond 999: floats are inexact.
_THREE_DIGITS: Final = [f"{min(number, 999):03d}" for number in range(1024)]


class History:
    """Writes one segment into a directory, which is created. Opens nothing before ``open``.

    ``member`` names this process in every row and in the file's name: 1 to 64 of ``A-Z a-z 0-9 . _ -``,
    beginning with a letter or digit; None makes up ``m-`` and 8 hex digits. Raises ``ConfigError`` for any
    other name and for a directory that cannot be made.

    After ``open`` no method raises for what the disk does or waits for more than one ``write(2)``. ``now`` is
    always the engine's clock: seconds, 0 or more. Rows before ``open`` and after ``close`` are given up.

    ``written`` is the highest row number that is in the file, or was given up: a handler may start once it
    has reached the number that ``started`` returned. ``dropped`` counts the rows given up.
    """

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
        "dropped",
        "member",
        "path",
        "written",
    )

    def __init__(self, directory: str | os.PathLike[str], *, member: str | None = None) -> None:
        if member is None:
            member = f"m-{os.urandom(4).hex()}"
        elif not MEMBER.fullmatch(member):
            raise ConfigError(
                f"member={member!r}: must be 1 to 64 of A-Z a-z 0-9 . _ - and begin with a letter or digit, "
                "because it names a file; choose another, or leave it out"
            )
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
        self._rows: list[str] = []
        self._size = 0
        self._before = self._after = ""
        self._step_from = self._step_until = 0.0
        self._latest = 0.0
        self._origins: dict[Partition, tuple[int, str]] = {}
        self._hashes: dict[bytes | None, str] = {None: "null"}
        self._unreported = 0
        self._marker = 0

    def __repr__(self) -> str:
        state = "closed" if self._file is None else "open"
        buffered = len(self._rows)
        return f"<History {self.member} {state}: {self._n} rows, {buffered} buffered, {self.dropped} dropped>"

    def open(self, *, source: str, concurrency: int, max_in_flight: int, max_in_flight_bytes: int, now: float) -> None:
        """Create the file and write the ``begin`` row.

        Raises ``ConfigError`` when the file cannot be created, ``ContractError`` when called twice.
        """
        if self.path is not None:
            raise ContractError(f"the history of {self.member} was opened before: use one History per run")
        pid, boot = self._process()
        path = self._directory / f"{self.member}-{pid}-{time.time_ns()}.jsonl"
        begin = (
            f'{{"n":1,"event":"begin"{self._stamp(now)},"format":{FORMAT},"version":"{version("lanes-runtime")}",'
            f'"pid":{pid},"boot":"{boot}","source":{json.dumps(source)},"concurrency":{concurrency},'
            f'"max_in_flight":{max_in_flight},"max_in_flight_bytes":{max_in_flight_bytes},"incomplete":{HEAD_END}'
        )
        try:
            self._file = self._segment(path, begin)
        except OSError as error:
            raise ConfigError(
                f"history file {str(path)!r}: {error.strerror}; choose a directory that can be written"
            ) from error
        self.path = path
        self._n = 1
        self._rows.clear()
        self.dropped = 0
        self.flush()

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

    # Messages

    def produced(self, partition: PartitionId, position: int, key: bytes | None, now: float) -> None:
        """A producer published it."""
        origin = f',"partition":{json.dumps(str(partition))},"position":{position}'
        self._row("produced", f'{origin},"key":{self._hashes.get(key) or self._hash(key)}', now)

    def delivered(self, run: Sequence[Message], now: float) -> None:
        """A run was received; one row for every message of it, fresh or not."""
        stamp = self._stamp(now)
        for message in run:
            self._message("delivered", message, stamp, f',"size":{message.size}')

    def redelivered(self, message: Message, cause: str, now: float) -> None:
        """A message of the run just ``delivered`` was not new; to be called before the next run's rows.

        ``held``: still in flight here, only its token was swapped. ``settled``: it had finished before and is
        acknowledged again, not run. ``late``: unknown, but below what was delivered before.
        """
        self._message("redelivered", message, self._stamp(now), f',"cause":"{cause}"')

    def started(self, message: Message, now: float) -> int:
        """Its handler is about to be called, once ``written`` has reached the number returned."""
        # ``_message`` spelled out: a handler waits for this one.
        if not self._step_from <= now < self._step_until:
            self._tick(now)
        digits = _THREE_DIGITS[int((now - self._step_from) * 1e6 + 0.5)]
        partition = message.partition
        origin = self._origins.get(partition)
        if origin is None or origin[0] != partition.epoch:
            origin = self._origin(partition)
        key = self._hashes.get(message.key) or self._hash(message.key)
        n = self._n = self._n + 1
        row = (
            f'{{"n":{n},"event":"started"{self._before}{digits}{self._after}{origin[1]}{message.position},'
            f'"key":{key},"attempt":{message.attempt}}}\n'
        )
        rows = self._rows
        rows.append(row)
        self._size += len(row)
        if self._size >= BUFFER_BYTES or len(rows) >= BUFFER_ROWS:
            self.flush()
        return n

    def ended(self, message: Message, result: str, now: float, error: BaseException | None = None) -> None:
        """Its handler ended: ok, error or cancelled. Of ``error`` only the type's name is kept."""
        more = f',"result":"{result}"'
        if error is not None:
            more += f',"error":{_error_name(error)}'
        self._message("ended", message, self._stamp(now), more)

    def retry(self, message: Message, delay: float, now: float) -> None:
        """It is held and runs again after ``delay`` seconds."""
        self._message("retry", message, self._stamp(now), f',"delay":{delay:.6f}')

    def dlq_sent(self, message: Message, now: float) -> None:
        """Its dead letter is about to be written."""
        self._message("dlq_sent", message, self._stamp(now))

    def dlq_confirmed(self, message: Message, now: float) -> None:
        """The broker confirmed its dead letter."""
        self._message("dlq_confirmed", message, self._stamp(now))

    def archived(self, message: Message, now: float) -> None:
        """The broker confirmed its dead letter, and it stays unfinished: its lane is blocked."""
        self._message("archived", message, self._stamp(now))

    def acks(self, messages: Sequence[Message], now: float) -> None:
        """They are finished and about to be settled. The caller flushes before the settlement leaves."""
        stamp = self._stamp(now)
        for message in messages:
            self._message("ack", message, stamp)

    def abandoned(self, messages: Sequence[Message], now: float) -> None:
        """They were given up without being settled, and run again elsewhere or later."""
        stamp = self._stamp(now)
        for message in messages:
            self._message("abandoned", message, stamp)

    def zombie(self, message: Message, now: float) -> None:
        """Its result came after its assignment was fenced, and changed nothing."""
        self._message("zombie", message, self._stamp(now))

    # Ownership and flow

    def assigned(self, partition: Partition, now: float) -> None:
        """This process owns the partition from now on; a row with a floor where the source commits."""
        more = f'{self._owned(partition)},"incarnation":{json.dumps(partition.incarnation)}'
        self._row("assigned", more if partition.floor is None else f'{more},"floor":{partition.floor}', now)

    def revoking(self, partition: Partition, now: float) -> None:
        """The partition is to be handed over; its drain begins."""
        self._row("revoking", self._owned(partition), now)

    def drained(self, partition: Partition, now: float) -> None:
        """Nothing of the partition runs any more."""
        self._row("drained", self._owned(partition), now)

    def revoked(self, partition: Partition, now: float) -> None:
        """The partition was handed over."""
        self._row("revoked", self._owned(partition), now)

    def lost(self, partition: Partition, now: float) -> None:
        """The partition is owned no more, without having been handed over."""
        self._row("lost", self._owned(partition), now)

    def commit_sent(self, partition: Partition, floor: int, completed: int, now: float) -> None:
        """``floor`` and ``completed`` runs above it are about to be committed. The caller flushes before they leave."""
        self._row("commit_sent", f'{self._owned(partition)},"floor":{floor},"completed":{completed}', now)

    def commit_ok(self, partition: Partition, floor: int, now: float) -> None:
        """The broker confirmed the commit of ``floor``."""
        self._row("commit_ok", f'{self._owned(partition)},"floor":{floor}', now)

    def commit_failed(self, partition: Partition, floor: int, now: float) -> None:
        """The commit of ``floor`` was refused, or its result is unknown."""
        self._row("commit_failed", f'{self._owned(partition)},"floor":{floor}', now)

    def paused(self, in_flight: int, size: int, now: float) -> None:
        """Intake stopped with so many messages and bytes in flight."""
        self._row("paused", f',"in_flight":{in_flight},"bytes":{size}', now)

    def resumed(self, in_flight: int, size: int, now: float) -> None:
        """Intake went on with so many messages and bytes in flight."""
        self._row("resumed", f',"in_flight":{in_flight},"bytes":{size}', now)

    # Rows

    def _message(self, event: str, message: Message, stamp: str, more: str = "") -> None:
        partition = message.partition
        origin = self._origins.get(partition)
        if origin is None or origin[0] != partition.epoch:
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
        return f"{self._before}{_THREE_DIGITS[int((now - self._step_from) * 1e6 + 0.5)]}{self._after}"

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
        return f',"partition":{json.dumps(str(partition.id))},"epoch":{partition.epoch}'

    def _origin(self, partition: Partition) -> tuple[int, str]:
        if len(self._origins) >= _CACHED_PARTITIONS:
            self._origins.clear()
        origin = (partition.epoch, f'{self._owned(partition)},"position":')
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


def _boot() -> str:
    """Identifies this start of this machine, within which ``mono`` can be compared; empty if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def key_hash(key: bytes | None) -> str:
    """How rows, logs and spans name a key: 16 hex digits of its blake3, ``-`` for none."""
    return "-" if key is None else blake3(key).hexdigest(length=KEY_DIGITS // 2)


def _error_name(error: BaseException) -> str:
    try:
        return json.dumps(type(error).__name__[:ERROR_NAME_LIMIT])
    except Exception:
        # A metaclass may answer for __name__ with anything; the row matters more than the name.
        return '"?"'
