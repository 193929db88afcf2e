"""The main part on Spark: drivers, one after another, until the audit has ended, and kills of processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import anyio
from psycopg import AsyncConnection

from demo.config import HOOK_EVERY
from demo.places import Places
from demo.progress import Kill, Progress
from demo.spark import checkpoint
from demo.spark.config import ReplayConfig, SparkConfig
from demo.spark.tables import Tables
from demo.supervise import Child
from demo.workers.service import Service
from lanes.clock import monotonic

_SETTLE: Final = 0.2
"""Seconds after a freeze in which the earlier output of the process arrives."""


@dataclass
class _Seen:
    """A task's last report, and the number of its driver."""

    pid: int
    attempt: int
    driver: int
    ended: bool = False


@dataclass
class _Kill:
    """A planned kill, and its number of stored effects."""

    what: str
    at: int
    make: Callable[[], Awaitable[bool]]


class Drivers:
    """The runner of drivers on one checkpoint, until a driver has ended replay and audit. Runs on asyncio only.

    Args:
        config: Configuration of the run.
        tables: Tables that the handlers write to.
        where: Folders of the run.
        progress: State of the run, updated in place.
        told: Function that returns the configuration of a driver. The argument is the approval service after its start.
        token: Secret that opens the approval service.

    Attributes:
        seconds: Seconds from the start of the first driver to the end of the replay or of a failed run.
        workers_killed: Number of workers killed.
        drivers_killed: Number of drivers killed.
        tried_again: Number of task attempts after a failed attempt.
        interrupted: Numbers of the batches that the kill of a driver interrupted.
        told: Output of the drivers: the time of the end of the replay, its number of batches, and the audit.
        failure: Reason why the run ended early; None = the run did not end early.
    """

    def __init__(
        self,
        config: SparkConfig,
        tables: Tables,
        where: Places,
        progress: Progress,
        told: Callable[[Service], ReplayConfig],
        token: str,
    ) -> None:
        self._config = config
        self._tables = tables
        self._where = where
        self._progress = progress
        self._describe = told
        self._service = Service(
            None, latency=config.latency, token=token, on_status=self._on_status, on_commit=lambda: None
        )
        self._tasks: dict[str, _Seen] = {}
        self._driver: Child
        self._hearing: asyncio.Task[None] | None = None
        self._checkpoint: Path
        self._kills = [
            _Kill(what, max(1, int(at * progress.events)), make)
            for what, at, make in (
                ("a worker", config.kill_worker_at, self._kill_worker),
                ("the driver", config.kill_driver_at, self._kill_driver),
            )
            if at is not None
        ]
        self._kills.sort(key=lambda kill: kill.at)
        self._made: list[tuple[Kill, int]] = []  # with the number of the driver at the kill
        self._begun = self._changed = self._ended = 0.0
        self.workers_killed = 0
        self.drivers_killed = 0
        self.interrupted: set[int] = set()
        self.rss_mb = 0.0
        self._over = False
        self.told: dict[str, Any] = {}
        self.failure: str | None = None

    @property
    def seconds(self) -> float:
        """Seconds from the start of the first driver to the end of the replay or of a failed run."""
        return self._ended - self._begun

    @property
    def tried_again(self) -> int:
        """Number of task attempts after a failed attempt."""
        return sum(task.attempt > 0 for task in self._tasks.values())

    @property
    def missed(self) -> list[str]:
        """Planned kills that did not happen."""
        return [f"{kill.what} was not killed before the end of the run" for kill in self._kills]

    @property
    def done(self) -> set[int]:
        """Numbers of the finished batches."""
        return checkpoint.done(self._checkpoint)

    async def run(self) -> None:
        """Run until the audit has ended or the run fails. Raises ``LanesError`` if the parent cannot continue."""
        await self._service.start(self._where.sockets)
        told = self._describe(self._service)
        self._checkpoint = Path(told.checkpoint)
        # The driver gets its own environment, with another folder for temporary files.
        environment = told.environment()
        connection = await self._tables.connect()
        self._begun = self._changed = monotonic()
        try:
            await self._start(environment)
            while not self._over and self.failure is None:
                await self._look(connection, environment)
                await asyncio.sleep(HOOK_EVERY)
        finally:
            self._ended = self.told.get("replayed", monotonic())
            with anyio.CancelScope(shield=True):
                if hasattr(self, "_driver"):
                    await self._driver.end()
                if self._hearing is not None:
                    await self._hearing
                await self._service.close()
                await connection.close()

    async def _start(self, environment: dict[str, str]) -> None:
        progress = self._progress
        progress.starts += 1
        progress.phase = "starting Spark" if progress.starts == 1 else "killed with -9, starting Spark again"
        self._changed = monotonic()
        self._driver = Child(self._config.driver_command, self._where.log, environment)
        await self._driver.start()
        self._hearing = asyncio.create_task(self._hear(self._driver))

    async def _hear(self, driver: Child) -> None:
        """Read the output of a driver until it ends."""
        while line := await driver.line():
            # Other programs print lines to this stream that are no JSON objects.
            with contextlib.suppress(ValueError, TypeError):
                self.told |= json.loads(line)
                self._changed = monotonic()
                self._progress.phase = "auditing the journal"

    async def _look(self, connection: AsyncConnection[Any], environment: dict[str, str]) -> None:
        progress, driver = self._progress, self._driver
        if driver.status is not None:
            await driver.wait()
            if self._hearing is not None:
                await self._hearing
            await self._after(driver, environment)
            return
        stored = await self._tables.stored(connection)
        progress.seconds = monotonic() - self._begun
        if stored != progress.stored:
            progress.stored = stored
            self._changed = monotonic()
            progress.phase = "replaying" if progress.starts == 1 else "replaying, started again"
        due = bool(self._kills) and stored >= self._kills[0].at and "replayed" not in self.told
        if due and await self._kills[0].make():
            del self._kills[0]
            self._changed = monotonic()
        if monotonic() - self._changed > self._config.stall_timeout:
            left = progress.events - stored
            self.failure = (
                f"no progress for {self._config.stall_timeout:g} s: {left} of {progress.events} events are missing"
            )

    async def _after(self, driver: Child, environment: dict[str, str]) -> None:
        """Start the next driver, or end the run."""
        if driver.status == 0 and "audit" in self.told:
            self._over = True
            return
        if driver.killed:
            await driver.end()
            await self._start(environment)
            return
        words = driver.last_words or "nothing"
        self.failure = f"driver {self._progress.starts} ended unexpectedly with status {driver.status}: {words}"

    # --- kills

    async def _kill_worker(self) -> bool:
        """Kill a worker during a task, and return whether that was possible. Spark repeats the task."""
        for task in list(self._tasks.values()):
            if task.ended or task.driver != self._progress.starts:
                continue
            with contextlib.suppress(ProcessLookupError):
                if await self._kill_in_task(task):
                    self.workers_killed += 1
                    self._progress.phase = "a worker was killed with -9"
                    self._killed("a worker")
                    return True
        return False

    async def _kill_in_task(self, task: _Seen) -> bool:
        os.kill(task.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(_SETTLE)
        except BaseException:
            # A frozen process cannot react to the end of its peers.
            os.kill(task.pid, signal.SIGCONT)
            raise
        if task.ended:
            os.kill(task.pid, signal.SIGCONT)
            return False
        task.ended = True
        os.kill(task.pid, signal.SIGKILL)
        return True

    async def _kill_driver(self) -> bool:
        """Kill driver and JVM during a batch, and return whether that was possible."""
        self._driver.freeze()
        await asyncio.sleep(_SETTLE)
        under_way = checkpoint.begun(self._checkpoint) - checkpoint.done(self._checkpoint)
        running = any(not task.ended and task.driver == self._progress.starts for task in self._tasks.values())
        if not under_way or not running:
            self._driver.thaw()
            return False
        self._driver.kill()
        self.interrupted |= under_way
        self.drivers_killed += 1
        self._killed("the driver")
        return True

    def _killed(self, who: str) -> None:
        kill = Kill(who, self._progress.stored, monotonic() - self._begun)
        self._progress.kills.append(kill)
        self._made.append((kill, self._progress.starts))

    def _continues(self, task: _Seen) -> None:
        """Record the end of kills when a task begins: a repeated task, or a task of the next driver."""
        for kill, driver in self._made:
            if task.driver > driver:
                kill.over(f"driver {task.driver}", monotonic() - self._begun)
            elif task.attempt and kill.who == "a worker":
                kill.over("another worker", monotonic() - self._begun)

    def _on_status(self, status: dict[str, Any]) -> None:
        name = str(status["task"])
        seen = self._tasks.get(name)
        if seen is None:
            seen = self._tasks[name] = _Seen(int(status["pid"]), int(status["attempt"]), self._progress.starts)
            self._continues(seen)
        seen.ended = bool(status["ended"])
        self.rss_mb = max(self.rss_mb, float(status["rss_mb"]))
