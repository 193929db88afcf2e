"""The history of a run: what happened to every message, written so that it survives ``kill -9``.

One process writes one *segment*: a file of JSON lines that begins with a ``begin`` row and, unless the
process crashed, ends with an ``end`` row. ``memsource`` reads segments and checks the promises over them.

Every row has ``n`` (1, 2, 3 … in this segment), ``event``, ``member``, ``mono`` (seconds of the engine's
clock) and ``wall`` (seconds since the epoch, sampled once a millisecond). A row of a message adds
``partition``, ``assignment`` (1, 2, 3 … of this process), ``position``, ``key`` (16 hex digits of blake3, null without
a key) and ``attempt``. The row ``assigned`` says which ``epoch`` the handlers of an assignment get, and its spans, dead
letters, events and status. Neither payload nor key is ever written.

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
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from lanes.core.types import NEVER, Message, Partition, PartitionId
from lanes.history.writer import (
    BUFFER_BYTES,
    BUFFER_ROWS,
    FORMAT,
    KEY_DIGITS,
    MEMBER,
    THREE_DIGITS,
    RowWriter,
    key_hash,
)

__all__ = [
    "BUFFER_BYTES",
    "BUFFER_ROWS",
    "FORMAT",
    "KEY_DIGITS",
    "MEMBER",
    "History",
    "Recorder",
    "history_of",
    "key_hash",
    "recorder_of",
]

_ENDLESS: Final = 1e9
"""Seconds a drain may take that has no limit: infinity is no JSON."""

ERROR_NAME_LIMIT: Final = 200
"""Characters of an exception's type name that a row keeps."""


class History:
    """The history of one run: a file in ``directory``, which is created. It is to be passed to one consumer.

    ``member`` names this process in every row and in the file's name: 1 to 64 of ``A-Z a-z 0-9 . _ -``,
    beginning with a letter or digit; None makes up ``m-`` and 8 hex digits. Raises ``ConfigError`` for any
    other name and for a directory that cannot be made.

    Nothing is opened before the consumer's source is. From then on nothing raises for what the disk does: rows that
    cannot be written are given up, and counted.
    """

    __slots__ = ("_recorder",)

    def __init__(self, directory: str | os.PathLike[str], *, member: str | None = None) -> None:
        self._recorder = Recorder(directory, member=member)

    def __repr__(self) -> str:
        return repr(self._recorder)

    @property
    def member(self) -> str:
        """The name of this process in it."""
        return self._recorder.member

    @property
    def path(self) -> Path | None:
        """Its file; None before the consumer's source is open."""
        return self._recorder.path

    @property
    def dropped(self) -> int:
        """Rows that were given up."""
        return self._recorder.dropped


def recorder_of(history: History) -> Recorder:
    """What writes its rows. For whoever runs a consumer, not for its user."""
    return history._recorder


def history_of(recorder: Recorder) -> History:
    """A history whose rows go where ``recorder`` takes them."""
    history = History.__new__(History)
    history._recorder = recorder
    return history


class Recorder(RowWriter):
    """Writes the rows of one segment: what ``History`` is for its user, this is for the runtime.

    After ``open`` no method raises for what the disk does or waits for more than one ``write(2)``. ``now`` is
    always the engine's clock: seconds, 0 or more. Rows before ``open`` and after ``close`` are given up.

    ``written`` is the highest row number that is in the file, or was given up: a handler may start once it
    has reached the number that ``started`` returned. ``dropped`` counts the rows given up.
    """

    __slots__ = ()

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
        """Its handler is about to be called, once ``written`` has reached the number returned.

        Where there is a lease, a ``leased`` row in front says until when, as often as that has changed.
        """
        # ``_message`` spelled out: a handler waits for this one.
        if not self._step_from <= now < self._step_until:
            self._tick(now)
        digits = THREE_DIGITS[int((now - self._step_from) * 1e6 + 0.5)]
        partition = message.partition
        origin = self._origins.get(partition)
        if origin is None or origin[0] != partition.assignment or origin[2] != partition.deadline:
            origin = self._leased(partition, now)
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

    def retry(self, message: Message, delay: float, now: float, *, asked: bool = False) -> None:
        """It is held and runs again after ``delay`` seconds; ``asked``: its handler said how many."""
        self._message("retry", message, self._stamp(now), f',"delay":{delay:.6f}' + (',"asked":1' if asked else ""))

    def blocked(self, message: Message, now: float) -> None:
        """Its attempts are used up, and its lane stands still."""
        self._message("blocked", message, self._stamp(now))

    def unblocked(self, key: bytes | None, count: int, now: float) -> None:
        """So many blocked lanes of a key go on."""
        self._row("unblocked", f',"key":{self._hashes.get(key) or self._hash(key)},"count":{count}', now)

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
        """They are finished and about to be settled. The caller flushes before the settlement leaves.

        Where there is a lease, a ``leased`` row in front says until when, as ``started`` does.
        """
        for partition in {message.partition: None for message in messages}:
            told = self._origins.get(partition)
            if partition.deadline != (NEVER if told is None else told[2]):
                self._leased(partition, now)
        stamp = self._stamp(now)
        for message in messages:
            self._message("ack", message, stamp)

    def abandoned(self, messages: Sequence[Message], now: float) -> None:
        """They were given up without being settled, and run again elsewhere or later."""
        stamp = self._stamp(now)
        for message in messages:
            self._message("abandoned", message, stamp)

    def extended(self, messages: Sequence[Message], now: float) -> None:
        """The broker was told that these are still being worked on. A row for each partition."""
        held: dict[Partition, list[int]] = {}
        for message in messages:
            held.setdefault(message.partition, []).append(message.position)
        for partition, positions in held.items():
            self._row("extended", f'{self._owned(partition)},"runs":{json.dumps(runs_of(positions))}', now)

    def zombie(self, message: Message, now: float) -> None:
        """Its result came after its assignment was fenced, and changed nothing."""
        self._message("zombie", message, self._stamp(now))

    # Ownership and flow

    def _leased(self, partition: Partition, now: float) -> tuple[int, str, float]:
        """Say until when the lease holds, if there is one."""
        if partition.deadline != NEVER:
            self._row("leased", f"{self._owned(partition)}{_deadline(partition)}", now)
        return self._origin(partition, partition.deadline)

    def assigned(self, partition: Partition, now: float) -> None:
        """This process owns the partition from now on; a row with a floor where the source commits."""
        more = f'{self._owned(partition)},"epoch":{partition.epoch},"incarnation":{json.dumps(partition.incarnation)}'
        self._row("assigned", more if partition.floor is None else f'{more},"floor":{partition.floor}', now)

    def revoking(self, partition: Partition, now: float, timeout: float | None = None) -> None:
        """The partition is to be handed over; its drain begins, and may take ``timeout`` seconds."""
        more = self._owned(partition)
        timeout = None if timeout is None else min(timeout, _ENDLESS)
        self._row("revoking", more if timeout is None else f'{more},"timeout":{timeout:.6f}', now)

    def hastened(self, partition: Partition, now: float, timeout: float) -> None:
        """Its drain, under way already, may take ``timeout`` seconds more at most."""
        self._row("hastened", f'{self._owned(partition)},"timeout":{timeout:.6f}', now)

    def drained(self, partition: Partition, now: float) -> None:
        """Nothing of the partition runs any more."""
        self._row("drained", self._owned(partition), now)

    def revoked(self, partition: Partition, now: float) -> None:
        """The partition was handed over."""
        self._row("revoked", self._owned(partition), now)

    def lost(self, partition: Partition, now: float) -> None:
        """The partition is owned no more, without having been handed over."""
        self._row("lost", f"{self._owned(partition)}{_deadline(partition)}", now)

    def commit_sent(self, partition: Partition, floor: int, completed: int, now: float) -> None:
        """``floor`` and ``completed`` runs above it are about to be committed. The caller flushes before they leave."""
        self._row("commit_sent", f'{self._owned(partition)},"floor":{floor},"completed":{completed}', now)

    def commit_ok(self, partition: Partition, floor: int, now: float) -> None:
        """The broker confirmed the commit of ``floor``."""
        self._row("commit_ok", f'{self._owned(partition)},"floor":{floor}', now)

    def commit_failed(self, partition: Partition, floor: int, now: float) -> None:
        """The commit of ``floor`` was refused, or its result is unknown."""
        self._row("commit_failed", f'{self._owned(partition)},"floor":{floor}', now)

    def ahead_reached(self, partition: Partition, oldest: Message | None, now: float) -> None:
        """``max_ahead`` is reached, and nothing more of the partition is taken; ``oldest`` holds the floor, if any."""
        if oldest is None:
            self._row("ahead_reached", self._owned(partition), now)
        else:
            self._message("ahead_reached", oldest, self._stamp(now))

    def ahead_left(self, partition: Partition, now: float) -> None:
        """The partition is taken from again."""
        self._row("ahead_left", self._owned(partition), now)

    def paused(self, in_flight: int, size: int, now: float) -> None:
        """Intake stopped with so many messages and bytes in flight."""
        self._row("paused", f',"in_flight":{in_flight},"bytes":{size}', now)

    def resumed(self, in_flight: int, size: int, now: float) -> None:
        """Intake went on with so many messages and bytes in flight."""
        self._row("resumed", f',"in_flight":{in_flight},"bytes":{size}', now)


def runs_of(positions: Sequence[int]) -> list[tuple[int, int]]:
    """First and last of each run of consecutive positions, in order."""
    runs: list[tuple[int, int]] = []
    for position in sorted(positions):
        if runs and runs[-1][1] >= position - 1:
            runs[-1] = (runs[-1][0], position)
        else:
            runs.append((position, position))
    return runs


def _deadline(partition: Partition) -> str:
    """A whole microsecond behind the deadline that no row of an earlier moment bears.

    The times of rows are rounded to the nearest one: just before the deadline, to that behind it.
    """
    deadline = partition.deadline
    if deadline == NEVER:
        return ""
    whole = math.ceil(deadline * 1e6) + 1 if deadline > 0 else 0
    return f',"deadline":{whole // 1_000_000}.{whole % 1_000_000:06d}'


def _error_name(error: BaseException) -> str:
    try:
        return json.dumps(type(error).__name__[:ERROR_NAME_LIMIT])
    except Exception:
        # A metaclass may answer for __name__ with anything; the row matters more than the name.
        return '"?"'
