"""Defines the job of every task, with the handler's resources. A worker process keeps the job between its tasks."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from lanes.config import Settings
from lanes.errors import ConfigError
from lanes.handlers import Decode, Handler, check_handler, is_async
from lanes.source import DeadLetters
from lanes_spark.task.journal import checked_folder
from lanes_spark.task.results import check_results

log = logging.getLogger("lanes")

Hook = Callable[[], object]
"""Function without arguments, async or plain."""


@dataclass(frozen=True, kw_only=True)
class TaskJob:
    """A handler and its resources for the tasks of Spark.

    ``setup`` and ``teardown`` open and close clients in variables of the handler's module. A plain ``setup`` runs once
    in a worker process, before the first task of the job. A plain ``teardown`` runs when the process exits or begins
    another job, but not when Spark kills the process. Async functions run in every task, on the event loop of the task.
    An async ``setup`` runs before the first message, and an async ``teardown`` runs after the last message or an error.

    Args:
        topic: Topic of the rows.
        handler: Handler of one message or of a batch, see ``lanes.Consumer``.
        name: Name of the job. A process treats jobs with the same name as one job.
        settings: Order, retries, poison policy and limits, see ``lanes.Consumer``. The limits apply to each task
            separately.
        results: pyarrow schema of the rows that the handler returns; None = the task ignores returned rows.
        decode: Function that converts a message to the handler's argument, see ``lanes.Consumer``.
        dead_letters: Function that creates the dead letter store of a task, on the task's event loop.
        setup: Function that opens resources of the handler.
        teardown: Function that closes resources of the handler.
        journal: Folder in which every attempt of a task writes its own journal. All workers must have mounted the
            folder. If the journal is slow, a task waits for up to 30 s before the journal may drop rows.

    Raises:
        ConfigError: An argument cannot work in a task.
    """

    topic: str
    handler: Handler
    name: str
    settings: Settings = field(default_factory=Settings)
    results: Any = None
    decode: Decode | None = None
    dead_letters: Callable[[], DeadLetters] | None = None
    setup: Hook | None = None
    teardown: Hook | None = None
    journal: str | None = None

    def __post_init__(self) -> None:
        check_handler(self.handler, self.decode, self.settings)
        check_results(self.results)
        object.__setattr__(self, "journal", checked_folder(self.journal))
        if self.settings.sync_handlers == "processes":
            raise ConfigError(
                'sync_handlers="processes" on Spark: each task is a process already; leave sync_handlers and processes '
                "out, and let Spark run more tasks"
            )
        if self.settings.poison in ("block", "block_and_dlq"):
            raise ConfigError(
                f'poison="{self.settings.poison}" on Spark: a task cannot unblock a blocked key, and would never end; '
                'use "skip" with dead letters, or "exit"'
            )
        if self.dead_letters is not None and not callable(self.dead_letters):
            raise ConfigError(
                f"dead_letters={type(self.dead_letters).__name__} on Spark: every task needs its own clients; pass "
                "a function that creates the dead letter store"
            )
        self.settings.poison_policy(has_dead_letters=self.dead_letters is not None)
        for name, hook in (("setup", self.setup), ("teardown", self.teardown)):
            if hook is not None and not callable(hook):
                raise ConfigError(f"{name}={hook!r} is not callable: pass a function without arguments, async or plain")
        if self.setup is not None and self.teardown is not None and is_async(self.setup) != is_async(self.teardown):
            raise ConfigError(
                "only one of setup and teardown is async. Make both plain, to be called once in a worker process; or "
                "make both async, to be called in each task"
            )


@dataclass
class _Begun:
    """The latest job of this process.

    Attributes:
        job: The job; None = no job has begun, or the latest job failed to begin.
        hooked: Whether the process calls ``teardown`` at its exit.
    """

    job: TaskJob | None = None
    hooked: bool = False


_BEGUN: Final = _Begun()


def begin(name: str, load: Callable[[], TaskJob]) -> TaskJob:
    """Return the job with this name. The first task of a job in a process loads the job and calls a plain ``setup``.

    If the latest job has another name, the function first calls the plain ``teardown`` of the latest job. Only one
    thread may call this function.

    Args:
        name: Name of the job.
        load: Function that loads the job.

    Returns:
        The job.

    Raises:
        Exception: An exception of ``load`` or ``setup``, unchanged. The next task tries again.
    """
    job = _BEGUN.job
    if job is not None and job.name == name:
        return job
    _end()
    job = load()
    if job.setup is not None and not is_async(job.setup):
        job.setup()
    _BEGUN.job = job
    if not _BEGUN.hooked:
        _BEGUN.hooked = True
        atexit.register(_end)
    return job


def _end() -> None:
    job, _BEGUN.job = _BEGUN.job, None
    if job is None or job.teardown is None or is_async(job.teardown):
        return
    try:
        job.teardown()
    except Exception as error:
        # Log this error, because the old job has ended, and its teardown must not fail the next job.
        kind = type(error).__qualname__
        log.warning(
            "%s on Spark: teardown failed and is not called again: %s (%s); correct the function",
            job.topic,
            kind,
            error,
        )
