"""The supervisor of ``lanes run``, which starts and drains the workers, and restarts a worker after a failure."""

from __future__ import annotations

import asyncio
import hmac
import itertools
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from lanes.process import (
    EXIT_AT_ONCE,
    EXIT_DRAINED,
    EXIT_FAILED,
    EXIT_HALTED,
    EXIT_USAGE,
    GRACE,
    StopSignals,
)
from lanes.service.changes import changes
from lanes.service.logs import LogFormat, complain
from lanes.service.worker import DEFAULT_DRAIN, ENDED_WITHIN, HOST, Job

log = logging.getLogger("lanes.run")

FIRST_DELAY: Final = 0.5
"""Seconds before the first restart of a worker. Each further failure doubles the delay."""

LONGEST_DELAY: Final = 30.0
"""Maximum number of seconds before a restart. A worker that ran so long starts again with ``FIRST_DELAY``."""

_KILLED_AFTER: Final = GRACE + 0.4
"""Seconds from a second signal until the supervisor kills the workers that are left."""

ANSWER_WITHIN: Final = 1.5
"""Seconds that a worker gets to answer a question."""

_numbers: Final = itertools.count(1)

_LINE_LIMIT: Final = 2**25
"""Maximum number of bytes of a line of a worker."""

_TOKEN: Final = 64
"""Number of characters of a token."""

State = Literal["starting", "running", "waiting", "finished", "refused", "stopped"]


@dataclass(frozen=True, kw_only=True)
class Service:
    """The arguments of ``lanes run``.

    Attributes:
        target: The consumer, such as ``app:consumer``.
        workers: Number of worker processes.
        backend: Name of the event loop's library in the workers.
        log: Format of the log.
        environment: Variables that the workers receive in addition to the environment of the supervisor.
        http: Address of the HTTP server with the probes; None = no HTTP server.
        reload: Folder whose changed Python files restart the workers; None = no restart.
    """

    target: str
    workers: int = 1
    backend: str = "asyncio"
    log: LogFormat = "text"
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    http: str | None = None
    reload: str | None = None


class Worker:
    """One worker, whose process the supervisor may replace.

    Args:
        number: Number of the worker, from 1.

    Attributes:
        number: Number of the worker, from 1.
        state: ``starting`` = the process has not connected yet. ``waiting`` = the worker waits for a restart.
            ``finished`` = its source has ended. ``refused`` = the target names no consumer. ``stopped`` = the
            supervisor has stopped it.
        restarts: Number of restarts after a failure.
        last_status: Exit status of the last process; None = the first process runs.
        longest_drain: Seconds that the consumer of the process may take for a drain.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.state: State = "waiting"
        self.restarts = 0
        self.failures = 0
        self.last_status: int | None = None
        self.restarts_at = 0.0
        self.longest_drain = DEFAULT_DRAIN
        self.process: asyncio.subprocess.Process | None = None
        self.token = ""
        self.link: asyncio.StreamWriter | None = None
        self.wake = asyncio.Event()
        self.unlinked = asyncio.Event()
        self.unlinked.set()
        self.idle = asyncio.Event()
        self.idle.set()
        self.questions: dict[int, asyncio.Future[dict[str, Any]]] = {}

    def __repr__(self) -> str:
        return f"<Worker {self.number} {self.state}>"

    @property
    def pid(self) -> int | None:
        """Number of the process; None = no process."""
        return None if self.process is None else self.process.pid

    def send(self, **request: Any) -> bool:
        """Send a request. Returns False if the process has not connected."""
        if self.link is None:
            return False
        self.link.write(json.dumps(request).encode() + b"\n")
        return True

    async def ask(self, *, metrics: bool = False) -> dict[str, Any] | None:
        """Return the status of the process, or its metrics; None = no answer within a second or two."""
        number = next(_numbers)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.questions[number] = answer
        try:
            if not self.send(do="answer", id=number, metrics=metrics):
                return None
            async with asyncio.timeout(ANSWER_WITHIN):
                return await answer
        except TimeoutError:
            return None
        finally:
            del self.questions[number]

    def stop(self) -> None:
        """Ask the process to drain."""
        if self.process is not None and not self.send(do="stop"):
            # Before its connection a worker has no consumer.
            with suppress(ProcessLookupError):
                self.process.terminate()

    def stop_at_once(self) -> None:
        """Ask the process to end at once."""
        if self.process is not None and not self.send(do="stop at once"):
            self.kill()

    def kill(self) -> None:
        """Kill the process."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                self.process.kill()


class Supervisor:
    """The supervisor of one service. Only its event loop calls it.

    Args:
        service: The service to run.

    Attributes:
        workers: The workers.
        stopping: Whether the service drains.
    """

    def __init__(self, service: Service) -> None:
        self.workers = [Worker(number + 1) for number in range(service.workers)]
        self.stopping = False
        self._service = service
        self._at_once = False
        self._refusal: str | None = None
        self._accepted = False
        self._port = 0
        self._reloads = 0
        self._may_start = asyncio.Event()
        self._may_start.set()

    def __repr__(self) -> str:
        return f"<Supervisor of {len(self.workers)} worker(s)>"

    async def run(self) -> int:
        """Run the service under SIGINT and SIGTERM, on the main thread. Returns the exit status."""
        loop = asyncio.get_running_loop()

        def drain() -> str:
            loop.call_soon_threadsafe(self._drain)
            return f"draining {len(self.workers)} worker(s)"

        server = await asyncio.start_server(self._serve_worker, HOST, 0, limit=_LINE_LIMIT)
        self._port = server.sockets[0].getsockname()[1]
        signals = StopSignals("lanes run", drain, self._stop_at_once, _KILLED_AFTER + 0.4)
        reloading = None
        try:
            async with self._port_open():
                log.info("%s: starting %d worker(s)", self._service.target, len(self.workers))
                if self._service.reload is not None:
                    reloading = asyncio.create_task(self._follow(self._service.reload))
                await asyncio.gather(*(self._keep(worker) for worker in self.workers))
        finally:
            for worker in self.workers:
                worker.kill()
            if reloading is not None:
                reloading.cancel()
                with suppress(asyncio.CancelledError):
                    await reloading
            server.close()
            signals.close(bounded=False)
        return self._status()

    def _port_open(self) -> AbstractAsyncContextManager[None]:
        if self._service.http is None:
            return nullcontext()
        # Here, because only a service with a port needs the extra.
        from lanes.service.port import open_port

        return open_port(self, self._service.http)

    def _status(self) -> int:
        if self._at_once:
            return EXIT_AT_ONCE
        if self._refusal is not None and not self._accepted and self._service.reload is None:
            complain(self._service.log, self._refusal)
            return EXIT_USAGE
        failed = [worker.last_status for worker in self.workers if not self._harmless(worker.last_status)]
        if not failed:
            return EXIT_DRAINED
        return EXIT_HALTED if set(failed) == {EXIT_HALTED} else EXIT_FAILED

    # --- signals

    def _drain(self) -> None:
        self.stopping = True
        self._may_start.set()
        for worker in self.workers:
            worker.wake.set()
            worker.stop()

    def _stop_at_once(self) -> None:
        self._at_once = self.stopping = True
        for worker in self.workers:
            worker.wake.set()
            worker.stop_at_once()
        asyncio.get_running_loop().call_later(_KILLED_AFTER, self._kill)

    def _kill(self) -> None:
        for worker in self.workers:
            worker.kill()

    # --- changed files

    async def _follow(self, folder: str) -> None:
        try:
            await self._reload(folder)
        except Exception as error:
            log.error("--reload: cannot watch %s (%s); the workers run on, without restarts", folder, error)
            self._may_start.set()

    async def _reload(self, folder: str) -> None:
        async for names in changes(folder):
            if self.stopping:
                return
            log.info("%s changed: draining the workers for a restart", ", ".join(names))
            self._reloads += 1
            self._refusal = None
            self._may_start.clear()
            for worker in self.workers:
                worker.failures = 0
                worker.wake.set()
                worker.stop()
            await asyncio.gather(*(self._await_drain(worker) for worker in self.workers))
            self._may_start.set()

    async def _await_drain(self, worker: Worker) -> None:
        """Wait for the end of a worker that drains for a restart. End a worker whose drain does not end."""
        allowed = worker.longest_drain + ENDED_WITHIN
        with suppress(TimeoutError):
            async with asyncio.timeout(allowed):
                await worker.idle.wait()
            return
        log.error(
            "worker %d still drains after %.1f s, so the restart ends it at once, and the broker delivers its "
            "unfinished messages again; look for a handler that blocks the event loop",
            worker.number,
            allowed,
        )
        worker.stop_at_once()
        with suppress(TimeoutError):
            async with asyncio.timeout(_KILLED_AFTER):
                await worker.idle.wait()
            return
        worker.kill()
        await worker.idle.wait()

    # --- one worker

    def _stops(self) -> bool:
        """Return whether the service drains. The answer may change during every ``await``."""
        return self.stopping

    async def _keep(self, worker: Worker) -> None:
        """Run processes of a worker until the service stops or the source of the worker ends."""
        while not self._stops():
            await self._may_start.wait()
            if self._stops():
                break
            worker.wake.clear()
            started, reloads = time.monotonic(), self._reloads
            worker.last_status = await self._run_process(worker)
            lived = time.monotonic() - started
            if self._stops():
                if self._harmless(worker.last_status):
                    worker.last_status = EXIT_DRAINED
                else:
                    log.error("worker %d %s during the drain", worker.number, _ended(worker.last_status))
                break
            if reloads != self._reloads:
                if not self._harmless(worker.last_status):
                    log.error("worker %d %s before its restart", worker.number, _ended(worker.last_status))
                continue
            if worker.state == "finished":
                log.info("worker %d has finished, because its source has ended", worker.number)
                if self._service.reload is None:
                    return
                await worker.wake.wait()
                continue
            if worker.state == "refused":
                if self._service.reload is not None:
                    log.error("worker %d: %s; a change of a file restarts it", worker.number, self._refusal)
                    await worker.wake.wait()
                    continue
                if not self._accepted:
                    self._drain()
                    break
                # The file has changed under a service that runs, so the other workers go on.
                log.error("worker %d: %s", worker.number, self._refusal)
            await self._wait_for_restart(worker, lived)
        worker.state = "stopped"

    async def _wait_for_restart(self, worker: Worker, lived: float) -> None:
        worker.state = "waiting"
        worker.failures = 1 if lived >= LONGEST_DELAY else worker.failures + 1
        delay = min(LONGEST_DELAY, FIRST_DELAY * 2.0 ** min(worker.failures - 1, 10))
        log.log(
            logging.WARNING if worker.failures == 1 else logging.ERROR,
            "worker %d %s after %.1f s, failure %d in a row; it restarts in %.1f s",
            worker.number,
            _ended(worker.last_status),
            lived,
            worker.failures,
            delay,
        )
        worker.restarts_at = time.monotonic() + delay
        with suppress(TimeoutError):
            await asyncio.wait_for(worker.wake.wait(), delay)
        if self.stopping:
            # The failure before is in the log, and the service has nothing to drain.
            worker.last_status = EXIT_DRAINED
        else:
            worker.restarts += 1

    async def _run_process(self, worker: Worker) -> int:
        """Run one process of a worker, and return its exit status."""
        worker.state = "starting"
        worker.longest_drain = DEFAULT_DRAIN
        worker.token = secrets.token_hex(_TOKEN // 2)
        # A Ctrl-C in a terminal reaches the supervisor alone, which forwards it.
        apart: dict[str, Any] = (
            {"creationflags": getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)}
            if sys.platform == "win32"
            else {"start_new_session": True}
        )
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "lanes.service.worker",
            stdin=subprocess.PIPE,
            env={**os.environ, **self._service.environment},
            **apart,
        )
        worker.process = process
        worker.idle.clear()
        job = Job(
            target=self._service.target,
            number=worker.number,
            port=self._port,
            token=worker.token,
            backend=self._service.backend,
            log=self._service.log,
            web=self._service.http is not None,
        )
        assert process.stdin is not None
        process.stdin.write(job.line())
        with suppress(ConnectionError):
            await process.stdin.drain()
        process.stdin.close()
        if self.stopping or not self._may_start.is_set():
            worker.stop()
        try:
            return await process.wait()
        finally:
            worker.process = None
            # The connection may still have the last words of the process.
            with suppress(TimeoutError):
                await asyncio.wait_for(worker.unlinked.wait(), 1.0)
            worker.link = None
            worker.idle.set()

    async def _serve_worker(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve the connection of a process that sends the token of a worker."""
        worker = None
        try:
            async with asyncio.timeout(5.0):
                token = await reader.readexactly(_TOKEN)
            for each in self.workers:
                if each.process is not None and hmac.compare_digest(each.token.encode(), token):
                    worker = each
            if worker is None:
                return
            worker.link, worker.state = writer, "running"
            worker.unlinked.clear()
            worker.token = ""
            if self.stopping:
                worker.stop()
            while line := await reader.readline():
                self._told(worker, json.loads(line))
        except (TimeoutError, OSError, ValueError, asyncio.IncompleteReadError):
            log.debug("a connection of a worker has ended", exc_info=True)
        finally:
            if worker is not None and worker.link is writer:
                worker.link = None
                worker.unlinked.set()
            writer.close()

    def _told(self, worker: Worker, fields: dict[str, Any]) -> None:
        if fields.get("finished"):
            worker.state = "finished"
        elif fields.get("accepted"):
            self._accepted = True
            worker.longest_drain = fields["longest_drain"]
        elif "answer" in fields:
            answer = worker.questions.get(fields["answer"])
            if answer is not None and not answer.done():
                answer.set_result(fields)
        elif "refused" in fields:
            worker.state = "refused"
            self._refusal = fields["refused"]

    def _harmless(self, status: int | None) -> bool:
        """Return whether an exit status after a request to stop means a drain, or an end before the start."""
        return status in (None, EXIT_DRAINED, EXIT_USAGE, -signal.SIGTERM)


def _ended(status: int | None) -> str:
    """Return a text that says how a process ended."""
    if status is not None and status < 0:
        with suppress(ValueError):
            return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"
