"""Computes the progress of a replay or a stream from finished batches and from reports of running tasks."""

from __future__ import annotations

import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from lanes.dead_letter import error_text
from lanes.errors import LanesError
from lanes_spark.positions import Islands, Span, wanted_count
from lanes_spark.task.progress import Address
from lanes_spark.task.results import COUNTS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger("lanes")

EVERY: Final = 1.0
"""Seconds between two calls of ``progress=`` by the thread of a ``Pulse``."""

_DATAGRAM: Final = 2_048

_ENDS_WITHIN: Final = 1.0
"""Maximum time in seconds that ``close`` waits for the listening thread."""


@dataclass(frozen=True, kw_only=True)
class OldestMessage:
    """The unfinished message with the earliest delivery.

    Attributes:
        partition: Topic and number, as ``orders/3``.
        position: Position in the partition.
        attempt: Number of the handler's attempt, from 1.
        age: Seconds since the delivery of the message.
        key: 16 hex digits of the key's hash, as in a journal; None = no key.
    """

    partition: str
    position: int
    attempt: int
    age: float
    key: str | None


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress of a replay or a stream.

    The counts include the finished batches, and the last report of the newest attempt of each task in the current
    batch.

    Attributes:
        batches: Number of finished batches.
        delivered: Number of delivered rows, as in ``Report``.
        finished: Number of delivered rows with a handled or dead-lettered message.
        dead_lettered: Number of delivered rows with a dead-lettered message.
        positions: Number of positions that ``partitions``, ``from_`` and ``to`` select, including positions that
            earlier runs on this checkpoint handled. With ``only``, the number includes each gap of fewer than 200,000
            positions between selected positions. For a stream, the selection ends at the end of the topic at the latest
            check.
        left: Number of selected positions that no run has handled. For a stream, this number is the lag. Until the
            first batch of a continued replay begins, the number includes positions that earlier runs have handled.
        seconds: Seconds since this run began.
        running: Number of tasks of the current batch that have reported and have not ended.
        oldest: The oldest unfinished message of the running tasks; None without an unfinished message.
    """

    batches: int
    delivered: int
    finished: int
    dead_lettered: int
    positions: int
    left: int
    seconds: float
    running: int = 0
    oldest: OldestMessage | None = None

    @property
    def rate(self) -> float:
        """Delivered rows per second of this run."""
        return self.delivered / self.seconds if self.seconds else 0.0


@dataclass
class Counts:
    """Sums over the finished batches.

    Attributes:
        batches: Number of batches.
        missing: Number of positions that a journal selects and the source lacks.
        by_name: Counts of rows, by the names of ``COUNTS``.
    """

    batches: int = 0
    missing: int = 0
    by_name: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))


class RunningTasks(NamedTuple):
    """Sums over the latest reports of the current batch's tasks."""

    tasks: int = 0
    delivered: int = 0
    finished: int = 0
    dead_lettered: int = 0
    oldest: OldestMessage | None = None


class ProgressTracker:
    """Counts the progress of one run, and calls ``tell`` about once a second and after each batch.

    The caller closes the tracker.

    Args:
        spark: Session of the run.
        tell: Function that receives the progress. Without a function, tasks send no reports.

    Attributes:
        started: Time at which the run began, in seconds of ``time.monotonic``.
        counts: Sums over the finished batches.
        raised: The exception of ``tell`` that stopped the run; None = no exception.
    """

    def __init__(self, spark: SparkSession, tell: Callable[[Progress], object] | None) -> None:
        self.started = time.monotonic()
        self.counts = Counts()
        self.raised: BaseException | None = None
        self._reports = None if tell is None else TaskReports(spark)
        self._lock = threading.Lock()
        self._spans: Mapping[int, Span] = {}
        self._islands: Islands = {}
        self._at: dict[int, int] = {}
        self._batches = 0
        self._done: Mapping[str, int] = dict(self.counts.by_name)
        self._pulse = None if tell is None else Pulse(lambda: tell(self.progress()))

    def begin(self, spans: Mapping[int, Span], islands: Islands) -> None:
        """Begin to call ``tell``.

        Args:
            spans: Ranges to handle, by partition.
            islands: Ranges to handle, for partitions whose messages the run handles only in part.
        """
        self._spans, self._islands = spans, islands
        if self._pulse is not None:
            self._pulse.start()

    def begin_batch(self) -> Address | None:
        """Discard the reports of earlier batches.

        Returns:
            The address for reports of tasks; None if the driver receives no reports.
        """
        if self._reports is None:
            return None
        self._reports.begin(self.counts.batches)
        return self._reports.address

    def look(self, spans: Mapping[int, Span], at: Mapping[int, int]) -> None:
        """Set new ranges to handle, and new positions below which the run has handled all messages.

        Args:
            spans: Ranges to handle, by partition.
            at: Position by partition below which the run has handled all messages.
        """
        with self._lock:
            self._spans = spans
            self._at = dict(at)

    def reach(self, at: Mapping[int, int]) -> None:
        """Record that this run or earlier runs have handled all messages below the positions ``at``."""
        with self._lock:
            self._at |= at

    def done(self, ranges: Mapping[int, Span]) -> None:
        """Record the end of a batch.

        Raises ``LanesError`` if this call or an earlier call of ``tell`` raised an error.
        """
        with self._lock:
            self._batches, self._done = self.counts.batches, dict(self.counts.by_name)
            self._at |= {partition: end for partition, (_, end) in ranges.items()}
            # Replace the reports of the batch's tasks by the sums of the batch.
            self.begin_batch()
        if self._pulse is not None:
            try:
                self._pulse.now()
            except BaseException as error:
                self.raised = error
                # Only an ``Exception`` reliably ends Spark's own thread.
                raise LanesError(f"progress= raised {type(error).__name__}") from error

    def check(self) -> None:
        """Raise the exception of ``tell`` that stopped the run, unchanged."""
        if self.raised is not None:
            raise self.raised

    def progress(self) -> Progress:
        """Return the current progress."""
        with self._lock:
            running = RunningTasks() if self._reports is None else self._reports.running()
            left = {
                number: (max(first, self._at.get(number, first)), end) for number, (first, end) in self._spans.items()
            }
            return Progress(
                batches=self._batches,
                delivered=self._done["delivered"] + running.delivered,
                finished=self._done["finished"] + running.finished,
                dead_lettered=self._done["dead_lettered"] + running.dead_lettered,
                positions=wanted_count(self._spans, self._islands),
                left=max(0, wanted_count(left, self._islands) - running.finished),
                seconds=time.monotonic() - self.started,
                running=running.tasks,
                oldest=running.oldest,
            )

    def close(self) -> None:
        """Stop calling ``tell``. Idempotent."""
        if self._pulse is not None:
            self._pulse.stop()
            if (error := self._pulse.error) is not None and self.raised is None:
                log.warning(
                    "progress= raised %s (%s) and is not called again; correct the function",
                    type(error).__name__,
                    error_text(error),
                )
        if self._reports is not None:
            self._reports.close()


class TaskReports:
    """Receives the reports of tasks. The caller closes the object.

    Each task sends a datagram about once a second. A lost datagram only delays the progress.

    Args:
        spark: Session whose tasks report.

    Attributes:
        address: Address for the workers; None if workers cannot reach the driver, for example on Spark Connect.
    """

    def __init__(self, spark: SparkSession) -> None:
        self._batch = -1
        self._tasks: dict[int, tuple[int, dict[str, Any]]] = {}
        self._lock = threading.Lock()
        self._secret = secrets.token_hex(16)
        self._socket = _bound(spark)
        self.address: Address | None = None
        if self._socket is not None:
            host = spark.conf.get("spark.driver.host", None)
            self.address = (str(host), self._socket.getsockname()[1], self._secret)
            self._thread = threading.Thread(
                target=self._listen, args=(self._socket,), name="lanes-progress", daemon=True
            )
            self._thread.start()

    def begin(self, batch: int) -> None:
        """Discard the reports of earlier batches."""
        with self._lock:
            self._batch = batch
            self._tasks.clear()

    def running(self) -> RunningTasks:
        """Add up the latest reports of the batch's tasks."""
        with self._lock:
            told = [of_task for _, of_task in self._tasks.values()]
        oldest = [OldestMessage(**one["oldest"]) for one in told if one["oldest"] is not None]
        return RunningTasks(
            tasks=sum(not one["ended"] for one in told),
            **{name: sum(one[name] for one in told) for name in COUNTS},
            oldest=max(oldest, key=lambda one: one.age, default=None),
        )

    def close(self) -> None:
        """Stop listening. Idempotent. Blocks until the thread has ended, for a second at most."""
        found, self._socket = self._socket, None
        if found is None:
            return
        try:
            # A datagram wakes the thread, but the close of the socket does not.
            found.sendto(b"", found.getsockname())
        except OSError as error:
            # Ignore a failure of the datagram, because progress must not fail a replay. A report may have woken the
            # thread already.
            log.debug("cannot close the socket for progress: %s", error)
        self._thread.join(_ENDS_WITHIN)

    def _listen(self, heard: socket.socket) -> None:
        with heard:
            while True:
                data = heard.recv(_DATAGRAM)
                if self._socket is None:
                    return
                try:
                    self._take(json.loads(data))
                except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                    # Any program may send a datagram to this port.
                    continue

    def _take(self, told: dict[str, Any]) -> None:
        if not secrets.compare_digest(str(told["secret"]), self._secret):
            return
        if told["oldest"] is not None:
            OldestMessage(**told["oldest"])
        with self._lock:
            task, attempt = told["task"], told["attempt"]
            # An attempt that Spark has replaced may still run, so keep only the reports of the newest attempt.
            if told["batch"] == self._batch and attempt >= self._tasks.get(task, (attempt, told))[0]:
                self._tasks[task] = (attempt, told)


class Pulse:
    """A thread that calls a function at an interval, from ``start`` to ``stop``. Calls never overlap.

    Args:
        tell: Function to call.
        every: Seconds between two calls.

    Attributes:
        error: The exception of ``tell``, which ends the calls; None = no exception.
    """

    def __init__(self, tell: Callable[[], object], every: float = EVERY) -> None:
        self._tell = tell
        self._every = every
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._beat, name="lanes-progress-pulse", daemon=True)

    def start(self) -> None:
        """Begin the calls."""
        self._thread.start()

    def now(self) -> None:
        """Call ``tell`` once, in the caller's thread. Raises the exception of this call or of an earlier call."""
        with self._lock:
            if self.error is None:
                self._call()
            if self.error is not None:
                raise self.error

    def stop(self) -> None:
        """End the calls, and wait for the current call. Idempotent. Raises no exception."""
        self._stop.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def _beat(self) -> None:
        while not self._stop.wait(self._every):
            with self._lock:
                if self.error is not None:
                    return
                self._call()

    def _call(self) -> None:
        try:
            self._tell()
        except BaseException as error:
            self.error = error


def _bound(spark: SparkSession) -> socket.socket | None:
    """Open a socket that workers reach by the driver's host name; None = the driver can bind no such name."""
    if getattr(spark, "_jvm", None) is None:
        # With Spark Connect, the driver runs on another machine.
        return None
    for name in ("spark.driver.bindAddress", "spark.driver.host"):
        host = spark.conf.get(name, None)
        if not host:
            continue
        found = None
        try:
            family, kind, _, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
            found = socket.socket(family, kind)
            found.bind(where)
        except OSError as error:
            log.debug("no progress within a batch: %s: %s", host, error)
            if found is not None:
                found.close()
            continue
        return found
    return None
