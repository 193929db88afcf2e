"""Writes the journals of tasks. Each attempt of a task writes its own journal, in a folder that all workers share.

The journal of a failed attempt is complete. A killed attempt leaves a hidden ``.tmp`` file. If its journal was large,
the attempt also leaves complete earlier files. The attempts of a repeated batch add new journals, and the old journals
remain.
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

log = logging.getLogger("lanes")

PATIENCE: Final = 30.0
"""Maximum seconds of a task's wait for its journal."""

_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")
_HOST_LIMIT: Final = 24
_LOOK_SECONDS: Final = 0.005


def checked_folder(journal: object) -> str | None:
    """Return the folder as an absolute path; None = no journal.

    Raises ``ConfigError`` for an empty path, a path of a wrong type or an object store, and if pyarrow is missing.
    """
    if journal is None:
        return None
    if not isinstance(journal, str | os.PathLike):
        raise ConfigError(
            f"journal={type(journal).__name__} on Spark: pass the path of a folder, in which every attempt of a task "
            "writes its own journal"
        )
    path = os.fsdecode(journal)
    scheme = _SCHEME.match(path)
    if scheme is not None:
        raise ConfigError(
            f"journal={path!r}: tasks cannot write a journal by {scheme[1]}:; give the path of a folder that all "
            "workers have mounted under the same path, and copy the journal from that folder"
        )
    if not path:
        raise ConfigError("journal is empty: give the path of a folder that all workers have mounted")
    row_tables()
    return os.path.abspath(path)


@contextmanager
def shared(folder: str | None, name: str) -> Iterator[None]:
    """Create the folder, and during the block a hidden file in it. Workers recognize the folder by this file. Blocks.

    Args:
        folder: Folder of the journals; None = no journals.
        name: Name of the replay.

    Yields:
        None.

    Raises:
        ConfigError: The folder is not writable.
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
        # Another program may already have removed the file or its folder.
        sign.unlink(missing_ok=True)


def check_reached(folder: str | None, name: str) -> None:
    """Raise ``ConfigError`` if this process does not see the folder that the driver has created for the replay."""
    if folder is not None and not _sign(folder, name).exists():
        raise ConfigError(
            f"journal={folder!r}: the worker on {socket.gethostname()} does not see the driver's folder: choose a "
            "folder that all workers have mounted under the same path"
        )


def task_journal(folder: str | None, member: str | None) -> Journal | None:
    """Create the journal of an attempt; None = no folder. Without a ``member``, the journal has a random name."""
    if folder is None:
        return None
    # Many attempts write journals, so each attempt writes only one file, except for a large journal.
    return Journal(folder, member=member or f"{_host()}-{uuid.uuid4().hex[:8]}", rotate_after=None)


class Pace:
    """Delays a task while its journal is slow, so that the journal drops no rows."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._hurried = True

    async def wait(self) -> None:
        """Wait until at most half of the journal's buffer is full. Cancel-safe.

        If the buffer stays more than half full for ``PATIENCE`` seconds, later calls do not wait.
        """
        buffer = buffer_of(self._journal)
        if not (self._hurried and buffer.half_full):
            return
        with anyio.move_on_after(PATIENCE):
            # Poll the buffer, because the thread that writes the rows sends no event.
            while buffer.half_full:
                buffer.wake.set()
                await anyio.sleep(_LOOK_SECONDS)
        if buffer.half_full:
            self._hurried = False
            log.warning(
                "%r: for %g s the buffer was over half full; the task continues, and rows may be lost; check the disk",
                self._journal,
                PATIENCE,
            )


def member_of_attempt() -> str | None:
    """Return a name for this attempt, with host, partition, attempt and Spark's id; None outside a task."""
    from pyspark import TaskContext

    task = TaskContext.get()
    if task is None:
        return None
    return f"{_host()}-p{task.partitionId()}-a{task.attemptNumber()}-t{task.taskAttemptId()}"


def _host() -> str:
    """Return the host's name, limited to the characters of a member's name."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:_HOST_LIMIT].lstrip("._-")
    return name or "host"


def _sign(folder: str, name: str) -> Path:
    return Path(folder) / f".replay-{name}"
