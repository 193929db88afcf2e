"""What every task of a replay runs, and what outlives a task in a worker process that Spark uses again."""

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

__all__ = ["Hook", "TaskJob", "begin"]

log = logging.getLogger("lanes")

Hook = Callable[[], object]
"""A function without arguments, async or plain."""


@dataclass(frozen=True, kw_only=True)
class TaskJob:
    """A handler, and all it needs, as the tasks of Spark run it.

    ``topic``: what the rows are of. ``handler``, ``settings`` and ``decode``: see ``lanes.Consumer``. ``results``: the
    pyarrow schema of the rows that the handler returns, None = what it returns is ignored. ``dead_letters``: makes the
    place of dead letters, once a task, on its event loop. ``journal``: the folder in which every attempt of a task
    writes a journal of its own; all workers have it mounted. A task waits for its journal rather than drop rows.

    ``setup`` and ``teardown`` make and close what the handler uses, in variables of its module. Plain functions run
    once in a worker process: before its first task, and when it ends in order or begins another replay; Spark also
    ends processes without a word. Async ones run in every task, on its event loop, because a client of an event loop
    does not outlive it: before the first message, and behind the last one, also after an error.

    ``name`` tells the jobs of a process apart: those of one name are the same.

    Raises ``ConfigError`` for what cannot work in a task.
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
                f'poison="{self.settings.poison}" on Spark: nobody can unblock a key in a task, which would never end; '
                'use "skip" with dead letters, or "exit"'
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
                "of setup and teardown one is async and the other is plain: plain ones belong to the worker process, "
                "async ones to a task; make both of one kind"
            )


@dataclass
class _Begun:
    """The job that this process has begun last."""

    job: TaskJob | None = None
    hooked: bool = False


_BEGUN: Final = _Begun()


def begin(name: str, load: Callable[[], TaskJob]) -> TaskJob:
    """The job of that name, in this process: loaded and set up by its first task, the same object for the next ones.

    Whatever a plain ``setup`` leaves in the variables of a module is there in every task. A job of another name is torn
    down first. Raises what ``load`` and ``setup`` raise; the next task then tries again. To be called by one thread.
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
        # Not raised: what it belonged to has ended, and the next job has nothing to do with it.
        kind = type(error).__qualname__
        log.warning("%s on Spark: teardown failed, and is not called again: %s: %s", job.topic, kind, error)
