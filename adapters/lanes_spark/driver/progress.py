"""How far a replay is, while it runs: what is done, and what running tasks have told meanwhile."""

from __future__ import annotations

import json
import logging
import secrets
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from lanes_spark.task.progress import Address

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["NOTHING_RUNS", "OldestMessage", "Progress", "Pulse", "Running", "TaskReports"]

log = logging.getLogger("lanes")

EVERY: Final = 1.0
"""Seconds between two calls while a batch is under way."""

_DATAGRAM: Final = 2_048

_ENDS_WITHIN: Final = 1.0
"""Seconds that the thread which hears the tasks is waited for at the end."""


@dataclass(frozen=True, kw_only=True)
class OldestMessage:
    """What a task has had for longest and not finished. ``age``: seconds since it was delivered. ``key``: 16 hex digits
    of its hash, as in a journal, None without a key."""

    partition: str
    position: int
    attempt: int
    age: float
    key: str | None


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a replay is. ``batches`` that are done. ``delivered``, ``finished``, ``dead_lettered``: as in ``Report``,
    so far, with what running tasks have told, so an attempt that fails takes its own back. ``positions``: of all that
    is selected by partition and position, by any run on this checkpoint; of a stream, all of the topic. ``left``: of
    these what has not been handled, which is the lag of a stream. ``seconds``: since this run began. ``running``: tasks
    that have told of themselves and have not ended. ``oldest``: of what they have."""

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
        """Rows that were delivered, per second of this run."""
        return self.delivered / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, kw_only=True)
class Running:
    """What the tasks of the batch under way have told: sums over them."""

    tasks: int = 0
    delivered: int = 0
    finished: int = 0
    dead_lettered: int = 0
    oldest: OldestMessage | None = None


NOTHING_RUNS: Final = Running()


class TaskReports:
    """Hears what tasks tell, about once a second each, by datagrams: what is lost costs nothing but news.

    ``address`` is where, for workers; None where they cannot be heard, as on Spark Connect. To be closed.
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
        """What was told before is of other batches."""
        with self._lock:
            self._batch = batch
            self._tasks.clear()

    def running(self) -> Running:
        """The sums, now."""
        with self._lock:
            told = [of_task for _, of_task in self._tasks.values()]
        sums = {name: sum(one[name] for one in told) for name in ("delivered", "finished", "dead_lettered")}
        oldest = [OldestMessage(**one["oldest"]) for one in told if one["oldest"] is not None]
        return Running(
            tasks=sum(not one["ended"] for one in told),
            **sums,
            oldest=max(oldest, key=lambda one: one.age, default=None),
        )

    def close(self) -> None:
        """Hear no more. Idempotent. Blocks until the thread has ended, a second at most."""
        found, self._socket = self._socket, None
        if found is None:
            return
        try:
            # It wakes the thread, which a close alone does not.
            found.sendto(b"", found.getsockname())
        except OSError as error:
            # It has ended by itself, for what a task told has just woken it; or it is left waiting: news is no reason
            # for a replay to fail.
            log.debug("the socket of the progress is not closed: %s", error)
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
                    # Anybody may send here; what is no report of ours says nothing.
                    continue

    def _take(self, told: dict[str, Any]) -> None:
        if not secrets.compare_digest(str(told["secret"]), self._secret):
            return
        if told["oldest"] is not None:
            OldestMessage(**told["oldest"])
        with self._lock:
            task, attempt = told["task"], told["attempt"]
            # Attempts that Spark has given up may go on; what the next one tells is what counts.
            if told["batch"] == self._batch and attempt >= self._tasks.get(task, (attempt, told))[0]:
                self._tasks[task] = (attempt, told)


class Pulse:
    """Calls ``tell`` again and again in a thread of its own, from ``start`` to ``stop``, and by ``now``; never twice
    at once. What it raises ends the calls, and ``now`` raises it; ``error`` is what. ``every``: in seconds."""

    def __init__(self, tell: Callable[[], object], every: float = EVERY) -> None:
        self._tell = tell
        self._every = every
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._beat, name="lanes-progress-pulse", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def now(self) -> None:
        """One call. Raises what a call raised before."""
        with self._lock:
            if self.error is None:
                self._call()
            if self.error is not None:
                raise self.error

    def stop(self) -> None:
        """No more calls; the one under way is waited for. Idempotent. Raises nothing."""
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
    """A socket that the workers reach by the driver's name, None where there is none."""
    if getattr(spark, "_jvm", None) is None:
        # Connect: the driver is another process, elsewhere.
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
