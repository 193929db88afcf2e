"""The journals of tasks: each attempt of a task writes one of its own, into a folder that all workers share.

An attempt that failed has written what it did, and its end; of one that was killed there is nothing but a hidden
``.tmp`` file, or the beginning where it had grown large. A batch that is handled again is in the journals of new
attempts, beside the old ones.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import anyio

from lanes.errors import ConfigError
from lanes.history.columns import row_tables
from lanes.history.journal import Journal, buffer_of

__all__ = ["Pace", "check_reached", "checked_folder", "member_of_attempt", "shared", "task_journal"]

log = logging.getLogger("lanes")

PATIENCE: Final = 30.0
"""Seconds that a task waits for its journal, at most."""

_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")
_HOST_LIMIT: Final = 24
_LOOK_SECONDS: Final = 0.005


def checked_folder(journal: object) -> str | None:
    """The folder as an absolute path, None for none.

    Raises ``ConfigError`` for what is no folder of a file system, such as the address of an object store, and where
    pyarrow is missing.
    """
    if journal is None:
        return None
    if not isinstance(journal, str | os.PathLike):
        raise ConfigError(
            f"journal={type(journal).__name__} on Spark: pass the folder; every attempt of a task has a journal of its "
            "own there"
        )
    path = os.fsdecode(journal)
    scheme = _SCHEME.match(path)
    if scheme is not None:
        raise ConfigError(
            f"journal={path!r}: a journal is written to a folder that all workers have mounted under the same path, "
            f"not by {scheme[1]}:; give the path of such a folder, and copy it from there"
        )
    if not path:
        raise ConfigError("journal is empty: give the path of a folder that all workers have mounted")
    row_tables()
    return os.path.abspath(path)


@contextmanager
def shared(folder: str | None, name: str) -> Iterator[None]:
    """Make the folder, and while this lasts a hidden file in it, by which the workers of the replay ``name`` know it.

    Raises ``ConfigError`` where that cannot be. Blocks.
    """
    if folder is None:
        yield
        return
    sign = _sign(folder, name)
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        sign.touch(mode=0o644)
    except OSError as error:
        raise ConfigError(
            f"journal={folder!r}: {error.strerror}; choose a folder that the driver and all workers can write to"
        ) from error
    try:
        yield
    finally:
        # Whoever has removed it, or the folder, has no need of it.
        sign.unlink(missing_ok=True)


def check_reached(folder: str | None, name: str) -> None:
    """Raise ``ConfigError`` where this process does not see the folder that the driver of the replay ``name`` sees."""
    if folder is not None and not _sign(folder, name).exists():
        raise ConfigError(
            f"journal={folder!r}: the worker on {socket.gethostname()} does not see the folder that the driver has "
            "made there: choose one that all workers have mounted under this path"
        )


def task_journal(folder: str | None, member: str | None) -> Journal | None:
    """The journal of one attempt. ``member``: see ``member_of_attempt``; None = made up."""
    if folder is None:
        return None
    # One file an attempt, unless that grows large: there are many attempts.
    return Journal(folder, member=member or f"{_host()}-{uuid.uuid4().hex[:8]}", rotate_after=None)


class Pace:
    """Keeps a task from running away from its journal, which drops what does not fit: history can wait."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._hurried = True

    async def wait(self) -> None:
        """Until at most half of the journal's buffer is full; ``PATIENCE`` seconds, once, where the disk stands still.
        Cancel-safe."""
        buffer = buffer_of(self._journal)
        if not (self._hurried and buffer.half_full):
            return
        with anyio.move_on_after(PATIENCE):
            # Not an event: it is another thread that takes the rows, and it tells nobody.
            while buffer.half_full:
                buffer.wake.set()
                await anyio.sleep(_LOOK_SECONDS)
        if buffer.half_full:
            self._hurried = False
            log.warning("%r is not written for %g s: the task goes on, and rows are dropped", self._journal, PATIENCE)


def member_of_attempt() -> str | None:
    """Host, partition of the stage, attempt, and Spark's number of the attempt; None outside of a task of Spark."""
    from pyspark import TaskContext

    task = TaskContext.get()
    if task is None:
        return None
    return f"{_host()}-p{task.partitionId()}-a{task.attemptNumber()}-t{task.taskAttemptId()}"


def _host() -> str:
    """The host's name, as far as it can be part of a member's."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:_HOST_LIMIT].lstrip("._-")
    return name or "host"


def _sign(folder: str, name: str) -> Path:
    return Path(folder) / f".replay-{name}"
