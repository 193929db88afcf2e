"""The history of a run: one row for every event of a message. The rows remain after ``kill -9``.

Each run of a consumer writes one *segment*, a file of JSON lines. The segment begins with a ``begin`` row. The segment
ends with an ``end`` row, unless the process crashed. ``memsource`` reads segments and checks the promises.

Every row has ``n`` (1, 2, 3 … in this segment), ``event``, ``member`` and two times. The field ``mono`` has seconds of
the engine's clock. The field ``wall`` has seconds since 1970, sampled once a millisecond. A row of a message adds
``partition``, ``assignment`` (1, 2, 3 … of this segment), ``position``, ``key`` (16 hex digits of blake3, null without
a key) and ``attempt``. The row ``assigned`` contains the ``epoch`` of an assignment, as do spans, dead letters, events
and the status. The history never contains payloads or keys.

The recorder buffers rows. ``flush`` passes all buffered rows to the kernel by one ``write(2)`` without an fsync. The
rows remain after a crash of the process, but not after a crash of the machine. The runtime flushes before it calls the
handlers of a time slice and before it sends a settlement. While the disk accepts rows, a file therefore contains a
prefix of the run. A segment without an ``end`` row indicates a crash. A full disk does not stop a consumer. The
recorder drops and counts rows that it cannot write. The numbers of these rows are missing. When writes succeed again,
the recorder writes a ``dropped`` row with the number of missing rows. Until then ``incomplete``, the last field of the
``begin`` row, is 1. The recorder overwrites the field in the file, which needs no space on most file systems. A reader
therefore sees that rows are missing, even if the process ends before it can write the ``dropped`` row.

A history is not thread-safe: only one event loop may use it. After ``fork`` the child process must not use the history,
because both processes would write rows with the same numbers.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from lanes.arguments import names_unknown_options
from lanes.core.types import NEVER, Message, Partition, PartitionId
from lanes.history.writer import BUFFER_BYTES, BUFFER_ROWS, THREE_DIGITS, RowWriter

_ENDLESS: Final = 1e9
"""Seconds that mean a drain without a limit, because JSON has no infinity."""

ERROR_NAME_LIMIT: Final = 200
"""Maximum number of characters of an exception's type name in a row."""


@names_unknown_options("lanes.History")
class History:
    """The history of one run: a file in ``directory``. Pass the object to one consumer.

    The consumer creates the file when its source opens. After that, a disk fault raises no error: the history drops and
    counts rows that it cannot write.

    Args:
        directory: Folder of the file; the history creates a missing folder.
        member: Name of this process in every row and in the file's name; None = ``m-`` and 8 random hex digits. A name
            has 1 to 64 of ``A-Z a-z 0-9 . _ -`` and begins with a letter or digit.

    Raises:
        ConfigError: The name is invalid, or the directory cannot be created.
    """

    __slots__ = ("_recorder",)

    def __init__(self, directory: str | os.PathLike[str], *, member: str | None = None) -> None:
        self._recorder = Recorder(directory, member=member)

    def __repr__(self) -> str:
        return repr(self._recorder)

    @property
    def member(self) -> str:
        """The name of this process in the history."""
        return self._recorder.member

    @property
    def path(self) -> Path | None:
        """The file; None before the consumer's source is open."""
        return self._recorder.path

    @property
    def dropped(self) -> int:
        """The number of dropped rows."""
        return self._recorder.dropped


def recorder_of(history: History) -> Recorder:
    """Return the recorder of a history, for the runtime."""
    return history._recorder


def history_of(recorder: Recorder) -> History:
    """Make a history that uses a recorder."""
    history = History.__new__(History)
    history._recorder = recorder
    return history


class Recorder(RowWriter):
    """The part of ``History`` that the runtime calls to make the rows of one segment.

    After ``open`` no method raises an error for a disk fault, or waits for more than one ``write(2)``. ``now`` is
    always a time of the engine's clock in seconds, 0 or more. The recorder drops rows before ``open`` and after
    ``close``. ``written`` is the highest number of a written or dropped row. A handler may start when ``written`` has
    reached the number that ``started`` returned. ``dropped`` counts the dropped rows.
    """

    __slots__ = ()

    # Messages

    def produced(self, partition: PartitionId, position: int, key: bytes | None, now: float) -> None:
        """Record that a producer published a message."""
        origin = f',"partition":{json.dumps(str(partition))},"position":{position}'
        self._row("produced", f'{origin},"key":{self._hashes.get(key) or self._hash(key)}', now)

    def delivered(self, run: Sequence[Message], now: float) -> None:
        """Record consecutive received messages, new or redelivered, with one row for each message."""
        head = f',"event":"delivered"{self._stamp(now)}'
        hashes, begin, partition, origin = self._hashes, 0, None, ""
        while begin < len(run):
            n, piece, rows = self._n, run[begin : begin + self._piece()], []
            for message in piece:
                n += 1
                if message.partition is not partition:
                    partition = message.partition
                    origin = self._origin_of(partition)[1]
                key = hashes.get(message.key) or self._hash(message.key)
                row = message.row = f'{origin}{message.position},"key":{key},"attempt":'
                rows.append(f'{{"n":{n}{head}{row}{message.attempt},"size":{message.size}}}\n')
            self._n = n
            self._extend(rows)
            begin += len(piece)

    def redelivered(self, message: Message, cause: str, now: float) -> None:
        """Record that a message of the last delivered run is in flight, settled or late.

        Call this method before the next run.

        Args:
            message: The message.
            cause: ``held`` = the message is still in flight in this process, and the engine replaced its token.
                ``settled`` = the message had finished, and the source acknowledges it again. ``late`` = the message is
                unknown, and its position is below an earlier delivery.
            now: Time of the engine's clock, in seconds.
        """
        self._message("redelivered", message, self._stamp(now), f',"cause":"{cause}"')

    def started(self, message: Message, now: float) -> int:
        """Record the start of a handler.

        The consumer calls the handler after ``written`` has reached the returned number.

        Under a lease, the call first writes a ``leased`` row with the deadline if the deadline has changed.
        """
        partition = message.partition
        if partition.deadline != NEVER:
            origin = self._origins.get(partition)
            if origin is None or origin[0] != partition.assignment or origin[2] != partition.deadline:
                self._leased(partition, now)
        # This is ``_message`` inlined, because a handler waits for this row.
        if not self._step_from <= now < self._step_until:
            self._tick(now)
        digits = THREE_DIGITS[int((now - self._step_from) * 1e6 + 0.5)]
        n = self._n = self._n + 1
        row = (
            f'{{"n":{n},"event":"started"{self._before}{digits}{self._after}{message.row or self._name(message)}'
            f"{message.attempt}}}\n"
        )
        rows = self._rows
        rows.append(row)
        self._size += len(row)
        if self._size >= BUFFER_BYTES or len(rows) >= BUFFER_ROWS:
            self.flush()
        return n

    def ended(self, message: Message, result: str, now: float, error: BaseException | None = None) -> None:
        """Record the end of a handler: ok, outputs, error or cancelled. The row has only the type name of ``error``.

        After the result ``outputs``, the message is not finished until ``published``.
        """
        if error is not None:
            more = f',"result":"{result}","error":{_error_name(error)}'
            self._message("ended", message, self._stamp(now), more)
            return
        # This is ``_message`` inlined, because nearly every message has such a row.
        if not self._step_from <= now < self._step_until:
            self._tick(now)
        digits = THREE_DIGITS[int((now - self._step_from) * 1e6 + 0.5)]
        self._n = n = self._n + 1
        row = (
            f'{{"n":{n},"event":"ended"{self._before}{digits}{self._after}{message.row or self._name(message)}'
            f'{message.attempt},"result":"{result}"}}\n'
        )
        rows = self._rows
        rows.append(row)
        self._size += len(row)
        if self._size >= BUFFER_BYTES or len(rows) >= BUFFER_ROWS:
            self.flush()

    def retry(self, message: Message, delay: float, now: float, *, asked: bool = False) -> None:
        """Record that the message runs again after ``delay`` seconds; ``asked`` = the handler chose the delay."""
        self._message("retry", message, self._stamp(now), f',"delay":{delay:.6f}' + (',"asked":1' if asked else ""))

    def blocked(self, message: Message, now: float) -> None:
        """Record that a message has no further attempt, and its lane is blocked."""
        self._message("blocked", message, self._stamp(now))

    def unblocked(self, key: bytes | None, count: int, now: float) -> None:
        """Record that ``count`` blocked lanes of a key continue."""
        self._row("unblocked", f',"key":{self._hashes.get(key) or self._hash(key)},"count":{count}', now)

    def publishing(self, message: Message, count: int, now: float) -> None:
        """Record that the consumer is about to send the outputs of a handler, or its unconfirmed outputs."""
        self._message("publishing", message, self._stamp(now), f',"count":{count}')

    def published(self, message: Message, now: float) -> None:
        """Record that the broker has confirmed all outputs of a message."""
        self._message("published", message, self._stamp(now))

    def publish_failed(self, message: Message, error: BaseException, now: float) -> None:
        """Record that a send of outputs failed. The row has only the type name of ``error``."""
        self._message("publish_failed", message, self._stamp(now), f',"error":{_error_name(error)}')

    def dlq_sent(self, message: Message, now: float) -> None:
        """Record that the consumer is about to write the dead letter of a message."""
        self._message("dlq_sent", message, self._stamp(now))

    def dlq_confirmed(self, message: Message, now: float) -> None:
        """Record that the broker confirmed the dead letter of a message."""
        self._message("dlq_confirmed", message, self._stamp(now))

    def archived(self, message: Message, now: float) -> None:
        """Record that the broker confirmed the dead letter of a message that stays unfinished and blocks its lane."""
        self._message("archived", message, self._stamp(now))

    def acks(self, messages: Sequence[Message], now: float) -> None:
        """Record that the source is about to settle finished messages.

        The caller flushes before it sends the settlement.

        Under a lease, the call may first write a ``leased`` row, like ``started``.
        """
        for partition in {message.partition: None for message in messages}:
            told = self._origins.get(partition)
            if partition.deadline != (NEVER if told is None else told[2]):
                self._leased(partition, now)
        head, begin = f',"event":"ack"{self._stamp(now)}', 0
        while begin < len(messages):
            n, piece, rows = self._n, messages[begin : begin + self._piece()], []
            for message in piece:
                n += 1
                rows.append(f'{{"n":{n}{head}{message.row or self._name(message)}{message.attempt}}}\n')
            self._n = n
            self._extend(rows)
            begin += len(piece)

    def abandoned(self, messages: Sequence[Message], now: float) -> None:
        """Record that this process abandoned unsettled messages, which this or another process handles later."""
        stamp = self._stamp(now)
        for message in messages:
            self._message("abandoned", message, stamp)

    def extended(self, messages: Sequence[Message], now: float) -> None:
        """Record, by one row for each partition, that the source extended unsettled messages at the broker."""
        held: dict[Partition, list[int]] = {}
        for message in messages:
            held.setdefault(message.partition, []).append(message.position)
        for partition, positions in held.items():
            self._row("extended", f'{self._owned(partition)},"runs":{json.dumps(runs_of(positions))}', now)

    def zombie(self, message: Message, now: float) -> None:
        """Record an ignored result, which arrived after the fence of its assignment."""
        self._message("zombie", message, self._stamp(now))

    # Ownership and flow

    def _leased(self, partition: Partition, now: float) -> tuple[int, str, float]:
        """Write the deadline of the lease, if the partition has a lease."""
        if partition.deadline != NEVER:
            self._row("leased", f"{self._owned(partition)}{_deadline(partition)}", now)
        return self._origin(partition, partition.deadline)

    def assigned(self, partition: Partition, now: float) -> None:
        """Record that this process has acquired the partition.

        The row has a floor if the source commits, and the queue's name if the partition belongs to a partitioned queue.
        """
        more = f'{self._owned(partition)},"epoch":{partition.epoch},"incarnation":{json.dumps(partition.incarnation)}'
        if partition.floor is not None:
            more += f',"floor":{partition.floor}'
        place = self._queue_partitions.get(partition.id.source)
        if place is not None:
            more += f',"queue":{json.dumps(place.queue)},"queue_partition":{place.number}'
        self._row("assigned", more, now)

    def revoking(self, partition: Partition, now: float, timeout: float | None = None) -> None:
        """Record that the drain of a partition begins and may take ``timeout`` seconds; None = no limit is known."""
        more = self._owned(partition)
        timeout = None if timeout is None else min(timeout, _ENDLESS)
        self._row("revoking", more if timeout is None else f'{more},"timeout":{timeout:.6f}', now)

    def hastened(self, partition: Partition, now: float, timeout: float) -> None:
        """Record that a running drain may take at most ``timeout`` more seconds."""
        self._row("hastened", f'{self._owned(partition)},"timeout":{timeout:.6f}', now)

    def drained(self, partition: Partition, now: float) -> None:
        """Record that a drain has fenced the partition, after its handlers or the drain timeout have ended."""
        self._row("drained", self._owned(partition), now)

    def revoked(self, partition: Partition, now: float) -> None:
        """Record the handover of the partition."""
        self._row("revoked", self._owned(partition), now)

    def lost(self, partition: Partition, now: float) -> None:
        """Record the loss of the partition without a handover."""
        self._row("lost", f"{self._owned(partition)}{_deadline(partition)}", now)

    def commit_sent(self, partition: Partition, floor: int, completed: int, now: float) -> None:
        """Flush, and record that the source is about to commit ``floor`` with the ``completed`` runs above it.

        Under a lease, the call may first write a ``leased`` row, like ``started``.
        """
        told = self._origins.get(partition)
        if partition.deadline != (NEVER if told is None else told[2]):
            self._leased(partition, now)
        self._row("commit_sent", f'{self._owned(partition)},"floor":{floor},"completed":{completed}', now)

    def commit_ok(self, partition: Partition, floor: int, now: float) -> None:
        """Record that the broker confirmed the commit of ``floor``."""
        self._row("commit_ok", f'{self._owned(partition)},"floor":{floor}', now)

    def commit_failed(self, partition: Partition, floor: int, now: float) -> None:
        """Record that the broker refused the commit of ``floor``, or that the result is unknown."""
        self._row("commit_failed", f'{self._owned(partition)},"floor":{floor}', now)

    def ahead_reached(self, partition: Partition, oldest: Message | None, now: float) -> None:
        """Record that ``max_ahead`` stops a partition; ``oldest`` = the unfinished message at its floor, if any."""
        if oldest is None:
            self._row("ahead_reached", self._owned(partition), now)
        else:
            self._message("ahead_reached", oldest, self._stamp(now))

    def ahead_left(self, partition: Partition, now: float) -> None:
        """Record that the partition receives messages again."""
        self._row("ahead_left", self._owned(partition), now)

    def paused(self, in_flight: int, size: int, now: float) -> None:
        """Record that deliveries stopped at ``in_flight`` messages, with ``size`` bytes in total."""
        self._row("paused", f',"in_flight":{in_flight},"bytes":{size}', now)

    def resumed(self, in_flight: int, size: int, now: float) -> None:
        """Record that deliveries resumed at ``in_flight`` messages, with ``size`` bytes in total."""
        self._row("resumed", f',"in_flight":{in_flight},"bytes":{size}', now)


def runs_of(positions: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first and last position of each consecutive run, in order."""
    runs: list[tuple[int, int]] = []
    for position in sorted(positions):
        if runs and runs[-1][1] >= position - 1:
            runs[-1] = (runs[-1][0], position)
        else:
            runs.append((position, position))
    return runs


def _deadline(partition: Partition) -> str:
    """Return a deadline in microseconds as text, rounded up above the time of any earlier row.

    Rows round times to the nearest microsecond, so the rounded time of an earlier row may exceed the deadline itself.
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
        # A metaclass may break __name__; the row matters more than the name.
        return '"?"'
