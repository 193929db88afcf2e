"""The job of every task, and resources of the handler that outlive a task in a reused worker process."""

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
    """A handler and its resources, as the tasks of Spark run it.

    ``setup`` and ``teardown`` open and close clients in variables of the handler's module. Plain ones run once in a
    worker process: before its first task, and when it ends in order or begins another replay. Spark also kills
    processes, and then ``teardown`` does not run. Async ones run in every task, on its event loop: before the first
    message and after the last one, also after an error.

    Args:
        topic: Topic of the rows.
        handler: Handler of one message or of a batch, see ``lanes.Consumer``.
        name: Name of the job. Within a process, jobs of one name are the same.
        settings: See ``lanes.Consumer``. The limits hold in each task.
        results: pyarrow schema of the rows that the handler returns. Without one they are ignored.
        decode: See ``lanes.Consumer``.
        dead_letters: Creates the dead letter store, once a task, on its event loop.
        setup: Opens resources of the handler.
        teardown: Closes them.
        journal: Folder, mounted on all workers, in which every attempt of a task writes its own journal. A task waits
            for its journal rather than drop rows.

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
        if self.settings.poison in ("block", "block_and_dlq"):
            raise ConfigError(
                f'poison="{self.settings.poison}" on Spark: a blocked key in a task could not be unblocked, '
                'so the task would never end; use "skip" with dead letters, or "exit"'
            )
        if self.dead_letters is not None and not callable(self.dead_letters):
            raise ConfigError(
                f"dead_letters={type(self.dead_letters).__name__} on Spark: pass a function that makes them, because "
                "every task needs clients of its own"
            )
        self.settings.poison_policy(has_dead_letters=self.dead_letters is not None)
        for name, hook in (("setup", self.setup), ("teardown", self.teardown)):
            if hook is not None and not callable(hook):
                raise ConfigError(f"{name}={hook!r} is not callable: pass a function without arguments, async or plain")
        if self.setup is not None and self.teardown is not None and is_async(self.setup) != is_async(self.teardown):
            raise ConfigError(
                "setup and teardown: one is async and one is plain; make both plain, for the worker process, or both "
                "async, for each task"
            )


@dataclass
class _Begun:
    """The latest job of this process."""

    job: TaskJob | None = None
    hooked: bool = False


_BEGUN: Final = _Begun()


def begin(name: str, load: Callable[[], TaskJob]) -> TaskJob:
    """Return the job of that name: its first task in this process loads and sets it up, later ones share it.

    A job of another name is torn down first. Raises exceptions of ``load`` and ``setup``; the next task then tries
    again. Only one thread may call it.
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
        # Not raised: its job has ended, and the next job is not concerned.
        kind = type(error).__qualname__
        log.warning("%s on Spark: teardown failed with %s and is not called again: %s", job.topic, kind, error)
