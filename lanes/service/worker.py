"""A worker process of ``lanes run``: ``python -m lanes.service.worker``, with its job as a line on stdin.

The worker connects to the supervisor over loopback, and performs its requests. Each request is a line with one JSON
object. If the connection ends, the supervisor has ended. The worker then drains, so that no process continues without a
supervisor.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, Self

import anyio

from lanes.config import Settings
from lanes.consumer import Consumer
from lanes.loops import backend_arguments
from lanes.process import EXIT_DRAINED, EXIT_FAILED, EXIT_USAGE, SAME_REQUEST, exit_status, serve_alone
from lanes.service.logs import LogFormat, open_log
from lanes.service.target import TargetError, consumer_of
from lanes.web.board import Board
from lanes.web.values import reason_not_live, status_of, written

if TYPE_CHECKING:
    from lanes.web.metrics import Metrics

log = logging.getLogger("lanes.run")

HOST: Final = "127.0.0.1"
"""Address of the supervisor."""

_ANSWER_WITHIN: Final = 0.5
"""Seconds that the event loop gets to make a snapshot."""

ENDED_WITHIN: Final = 5.0
"""Seconds beyond the longest drain of its consumer after which a worker that still drains is ended at once."""

DEFAULT_DRAIN: Final = Settings().longest_drain

_CONNECTED_WITHIN: Final = 30.0
"""Seconds that the supervisor gets to answer."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """The job of a worker, which its supervisor writes on stdin.

    Attributes:
        target: The consumer, such as ``app:consumer``.
        number: Number of the worker, from 1.
        port: Port of the supervisor on loopback.
        token: Secret by which the supervisor recognizes the worker.
        backend: Name of the event loop's library.
        log: Format of the log.
        web: Whether the supervisor serves the status and the metrics of the worker.
    """

    target: str
    number: int
    port: int
    token: str
    backend: str
    log: LogFormat
    web: bool

    def __repr__(self) -> str:
        return f"<Job {self.target} of worker {self.number}>"

    def line(self) -> bytes:
        """Return the job as a line."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def of(cls, line: bytes) -> Self:
        """Return the job in a line."""
        return cls(**json.loads(line))


class Link:
    """The connection of a worker to its supervisor. A thread answers the requests.

    Args:
        job: The job of the worker.
    """

    def __init__(self, job: Job) -> None:
        self._socket = socket.create_connection((HOST, job.port), _CONNECTED_WITHIN)
        self._socket.settimeout(None)
        self._lock = threading.Lock()
        self._board: Board | None = None
        self._metrics: Metrics | None = None
        self._longest_drain = DEFAULT_DRAIN
        self._socket.sendall(job.token.encode())
        threading.Thread(target=self._obey, name="lanes-link", daemon=True).start()

    def accept(self, consumer: Consumer) -> None:
        """Tell the supervisor that the target names this consumer."""
        self._longest_drain = consumer._settings.longest_drain
        self.tell(accepted=True, longest_drain=self._longest_drain)

    def show(self, consumer: Consumer) -> None:
        """From now on, answer the supervisor's requests about this consumer."""
        # Here, because a worker without a port does not need the extra.
        from lanes.web.metrics import Metrics

        self._metrics = Metrics(consumer._life.name)
        self._metrics.provide()
        self._board = Board(consumer)

    def tell(self, **fields: Any) -> None:
        """Send an object to the supervisor. The call blocks until the operating system has accepted the object."""
        try:
            with self._lock:
                self._socket.sendall(json.dumps(fields).encode() + b"\n")
        except OSError:
            log.debug("the supervisor is gone")

    # --- in the thread

    def _obey(self) -> None:
        try:
            with self._socket, self._socket.makefile("rb") as requests:
                for line in requests:
                    self._answer(json.loads(line))
        except OSError:
            pass
        log.warning("the supervisor is gone; the worker stops")
        _stop()
        time.sleep(self._longest_drain + ENDED_WITHIN)
        log.error("the worker still drains, and is ended at once; look for a handler that blocks the event loop")
        _stop()

    def _answer(self, request: dict[str, Any]) -> None:
        if request["do"] == "stop":
            _stop()
        elif request["do"] == "stop at once":
            _stop()
            # The first of two signals within this time may belong to the request before.
            time.sleep(SAME_REQUEST + 0.05)
            _stop()
        elif request["do"] == "answer":
            self.tell(answer=request["id"], **self._content(request["metrics"]))

    def _content(self, metrics: bool) -> dict[str, Any]:
        if self._board is None or self._metrics is None:
            return {"live": True, "ready": False, "reason": "the consumer starts"}
        if metrics:
            found = self._metrics.exposition("text/plain")
            return {"metrics": "" if found is None else found[0].decode()}
        board, made = self._board, threading.Event()
        board.ask(made.set)
        # Without an answer the status below shows the former snapshot and its age.
        made.wait(_ANSWER_WITHIN)
        not_live = reason_not_live(board)
        reason = not_live
        if reason is None and not board.ready:
            reason = "the consumer drains" if board.draining else "the group has not answered the consumer yet"
        return {
            "live": not_live is None,
            "ready": reason is None,
            "reason": reason,
            "status": json.loads(written(status_of(board, show_keys=False))),
        }


def _stop() -> None:
    """Make this process receive SIGTERM, even on a system on which no process can send this signal."""
    signal.raise_signal(signal.SIGTERM)


async def _run(job: Job, link: Link) -> int:
    try:
        consumer: Consumer = await consumer_of(job.target)
    except TargetError as error:
        link.tell(refused=str(error))
        return EXIT_USAGE
    link.accept(consumer)
    if job.web:
        link.show(consumer)
    status = await serve_alone(consumer)
    if status == EXIT_DRAINED and not consumer._stopping:
        link.tell(finished=True)
    return status


def main() -> int:
    """Run the job on stdin, and return the exit status."""
    line = sys.stdin.buffer.readline()
    if not line:
        # The supervisor has died.
        return EXIT_FAILED
    job = Job.of(line)
    # The handlers of the user find an empty stdin.
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    open_log(job.log, f"worker {job.number}")
    try:
        return anyio.run(_run, job, Link(job), **backend_arguments(job.backend))
    except SystemExit as leaving:
        return exit_status(leaving)
    except Exception:
        log.exception("the worker ends after an error")
        return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
