"""The main part of a run with one worker at a time: the demo kills a worker, and starts another worker."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from typing import Any, Final

import anyio

from demo.brokers.broker import Broker, Left
from demo.config import HOOK_EVERY, DemoConfig
from demo.errors import NoAnswer
from demo.ledger import Ledger
from demo.places import Places
from demo.progress import Kill, Progress
from demo.supervise import Child
from demo.workers.pace import Pace
from demo.workers.sample import worker_config
from demo.workers.service import Service
from lanes.process import EXIT_DRAINED, EXIT_FAILED

_POLL: Final = 0.25
"""Seconds between two requests to the server."""

_STOP_WITHIN: Final = 20.0
"""Most seconds that a worker may take to end after SIGTERM."""


class UnderLanes:
    """The runner of workers over the stream until the workers have handled all events.

    Args:
        config: Configuration of the run.
        broker: Broker that the workers read from.
        ledger: Ledger that stores the events of the handlers.
        places: Folders of the run.
        progress: State of the run, updated in place.

    Attributes:
        seconds: Seconds from the start of the first worker to the last finished event.
        kills: Number of workers killed.
        workers: Number of workers started.
        peak_in_flight: Highest number of messages in flight that a worker reported.
        rss_mb: Highest memory in MiB that a worker reported.
        failure: Reason why the run ended early; None = the run did not end early.
    """

    def __init__(self, config: DemoConfig, broker: Broker, ledger: Ledger, places: Places, progress: Progress) -> None:
        self._config = config
        self._broker = broker
        self._ledger = ledger
        self._places = places
        self._progress = progress
        self._token = secrets.token_hex(16)
        self._service = Service(
            ledger, latency=config.latency, token=self._token, on_status=self._on_status, on_commit=self._on_commit
        )
        self._worker: Child | None = None
        self._heard = False
        self._outage = False
        self._over = False
        self._retries = 0
        self._kill_at = deque(max(1, int(at * progress.events)) for at in config.kill_at)
        self._left: Left | None = None
        self._pace = Pace()
        self.kills = 0
        self.peak_in_flight = 0
        self.rss_mb = 0.0
        self.failure: str | None = None

    @property
    def seconds(self) -> float:
        """Seconds from the start of the first worker to the last finished event."""
        return self._pace.seconds

    @property
    def workers(self) -> int:
        """Number of started workers."""
        return self._progress.starts

    async def run(self) -> None:
        """Run until the workers have handled all events, or the run fails.

        Raises ``LanesError`` if the parent cannot continue.
        """
        await self._service.start(self._places.sockets)
        self._pace.begin()
        self._progress.phase = "starting a worker"
        poller = asyncio.create_task(self._poll())
        try:
            await self._start()
            while not self._finished():
                await self._tick(poller)
            if self.failure is None:
                await self._stop()
        finally:
            # asyncio.wait_for swallows a cancellation that arrives together with an answer. A flag ends the task too.
            self._over = True
            poller.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.gather(poller, return_exceptions=True)
                if self._worker is not None:
                    await self._worker.end()
                await self._service.close()
            self._progress.worker_pid = None
        if self.failure is None and self._kill_at:
            self.failure = f"{len(self._kill_at)} of {len(self._config.kill_at)} planned kills did not happen"

    async def _tick(self, poller: asyncio.Task[None]) -> None:
        progress, worker = self._progress, self._worker
        assert worker is not None
        progress.seconds = self._pace.elapsed
        if not self._broker.connected:
            # The flag changes at once, because an earlier question may wait longer than the outage.
            progress.answering = False
            self._outage = True
        if self._service.failure is not None:
            raise self._service.failure
        if poller.done():
            await poller
        if worker.status is not None:
            await self._ended(worker)
        if self._config.on_progress is not None:
            await self._config.on_progress(progress)
        await asyncio.sleep(HOOK_EVERY)

    # --- the worker

    async def _start(self) -> None:
        progress = self._progress
        progress.starts += 1
        told = worker_config(
            self._config,
            self._broker,
            self._places,
            self._service,
            self._token,
            member=f"worker-{progress.starts}",
        )
        self._heard = self._outage = False
        self._retries = progress.status.get("retries", self._retries)
        progress.status = {}
        self._worker = Child(self._config.worker_command, self._places.log, told.environment())
        await self._worker.start()
        progress.worker_pid = self._worker.pid

    async def _ended(self, worker: Child) -> None:
        status = await worker.wait()
        self._progress.worker_pid = None
        # A worker that ended at its start without a server is no failure of a promise.
        no_server = status == EXIT_FAILED and not self._heard and (self._outage or self._pace.slow)
        if not worker.killed and not no_server:
            self.failure = (
                f"worker {self.workers} ended unexpectedly with status {status}: {worker.last_words or 'no output'}"
            )
        elif self._broker.connected:
            await worker.end()
            await self._start()

    async def _stop(self) -> None:
        worker = self._worker
        assert worker is not None
        self._progress.phase = "draining"
        worker.terminate()
        status = await worker.wait(_STOP_WITHIN)
        if status is None:
            self.failure = f"the worker did not end within {_STOP_WITHIN:g} s of SIGTERM: {worker.last_words}"
        elif status != EXIT_DRAINED:
            self.failure = f"the worker ended with status {status} after SIGTERM: {worker.last_words}"

    # --- reports

    def _on_status(self, status: dict[str, Any]) -> None:
        worker = self._worker
        if not self._heard and worker is not None and not worker.killed:
            self._heard = True
            for kill in self._progress.kills:
                kill.over(f"worker-{self.workers}", self._pace.elapsed)
            self._progress.phase = "under lanes" if self.workers == 1 else "under lanes, started again"
        self.peak_in_flight = max(self.peak_in_flight, status["peak_in_flight"])
        self.rss_mb = max(self.rss_mb, status["rss_mb"])
        status["retries"] += self._retries
        # The floor of a new assignment begins at 0, and a released assignment has no floor. The server's floor never
        # falls.
        status["floor"] = max(status["floor"] or 0, self._left.floor if self._left is not None else 0)
        self._progress.status = status

    def _on_commit(self) -> None:
        """Count finished events after every commit, and kill the worker when the ledger has the share ``kill_at``."""
        ledger, progress = self._ledger, self._progress
        if ledger.stored != progress.stored:
            self._pace.done()
        progress.stored = ledger.stored
        progress.repeats = ledger.repeats
        progress.violations = ledger.violations
        worker = self._worker
        if self._kill_at and ledger.stored >= self._kill_at[0] and worker is not None and not worker.killed:
            self._kill_at.popleft()
            self.kills += 1
            worker.kill()
            progress.kills.append(Kill(f"worker-{progress.starts}", ledger.stored, self._pace.elapsed))
            progress.phase = "killed with -9, starting again"

    async def _poll(self) -> None:
        """Ask the server for its backlog, at an interval."""
        broker, progress = self._broker, self._progress
        while not self._over:
            answering = False
            self._pace.ask()
            if broker.connected:
                with contextlib.suppress(NoAnswer):
                    self._left = await broker.left()
                    letters = await broker.count_dead_letters()
                    if letters != progress.dead_letters:
                        self._pace.done()
                    progress.dead_letters = letters
                    answering = True
            progress.answering = answering
            self._outage = self._outage or not answering or self._pace.slow
            self._pace.answered()
            if self._left is not None:
                progress.pending, progress.unacknowledged = self._left.pending, self._left.unacknowledged
            await asyncio.sleep(_POLL)

    # --- the end

    def _finished(self) -> bool:
        if self.failure is not None:
            return True
        progress = self._progress
        seen = (
            progress.stored,
            progress.repeats,
            progress.violations,
            progress.dead_letters,
            progress.pending,
            progress.unacknowledged,
            progress.starts,
        )
        self._pace.look(seen, answering=progress.answering)
        nothing_left = self._left is not None and not (self._left.pending or self._left.unacknowledged)
        missing = progress.events - progress.stored - progress.dead_letters
        no_more = self._pace.no_more(missing, progress.status.get("in_flight", 0))
        if nothing_left and no_more and self._worker is not None and not self._worker.killed:
            return True
        if self._pace.quiet > self._config.stall_timeout:
            self.failure = (
                f"no progress for {self._config.stall_timeout:g} s: {missing} of {progress.events} events are missing, "
                f"the server has {progress.pending} pending and {progress.unacknowledged} unacknowledged messages, the "
                f"worker has {progress.status.get('in_flight', 0)} in flight and "
                f"{progress.status.get('running', 0)} running"
            )
            return True
        return False
