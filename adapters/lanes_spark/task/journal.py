"""Journals of tasks: each attempt of a task writes its own, into a folder that all workers share.

A failed attempt has written its rows and its end. A killed one leaves a hidden ``.tmp`` file, and earlier files if it
had grown large. A repeated batch has journals of new attempts beside the old ones.
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
"""Most seconds that a task waits for its journal."""

_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")
_HOST_LIMIT: Final = 24
_LOOK_SECONDS: Final = 0.005


def checked_folder(journal: object) -> str | None:
    """Return the folder as an absolute path, None for none.

    Raises ``ConfigError`` for an address outside the file system, such as an object store's, and without pyarrow.
    """
    if journal is None:
        return None
    if not isinstance(journal, str | os.PathLike):
        raise ConfigError(
            f"journal={type(journal).__name__} on Spark: pass a folder, in which every attempt of a task writes its "
            "own journal"
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
    """Create the folder and, during the block, a hidden file that proves it to workers of the replay ``name``.

    Blocks. Raises ``ConfigError`` if the folder cannot be written to.
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
        # The file or its folder may have been removed.
        sign.unlink(missing_ok=True)


def check_reached(folder: str | None, name: str) -> None:
    """Raise ``ConfigError`` if this process does not see the driver's folder of the replay ``name``."""
    if folder is not None and not _sign(folder, name).exists():
        raise ConfigError(
            f"journal={folder!r}: the worker on {socket.gethostname()} does not see the driver's folder: choose one "
            "that all workers have mounted under this path"
        )


def task_journal(folder: str | None, member: str | None) -> Journal | None:
    """Open the journal of one attempt; ``member`` None makes up a name, see ``member_of_attempt``."""
    if folder is None:
        return None
    # One file an attempt unless it grows large, because there are many attempts.
    return Journal(folder, member=member or f"{_host()}-{uuid.uuid4().hex[:8]}", rotate_after=None)


class Pace:
    """Slows a task down to the speed of its journal, which drops rows otherwise."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._hurried = True

    async def wait(self) -> None:
        """Wait until at most half of the journal's buffer is full. Cancel-safe.

        If the disk stands still it waits ``PATIENCE`` seconds once, and not again.
        """
        buffer = buffer_of(self._journal)
        if not (self._hurried and buffer.half_full):
            return
        with anyio.move_on_after(PATIENCE):
            # Polling: the thread that takes the rows sends no event.
            while buffer.half_full:
                buffer.wake.set()
                await anyio.sleep(_LOOK_SECONDS)
        if buffer.half_full:
            self._hurried = False
            log.warning(
                "%r was not written for %g s: the task continues and rows are dropped; check the disk",
                self._journal,
                PATIENCE,
            )


def member_of_attempt() -> str | None:
    """Return host, partition, attempt and Spark's id of the attempt as a name; None outside of a task."""
    from pyspark import TaskContext

    task = TaskContext.get()
    if task is None:
        return None
    return f"{_host()}-p{task.partitionId()}-a{task.attemptNumber()}-t{task.taskAttemptId()}"


def _host() -> str:
    """Return the host's name, with characters that a member's name allows."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:_HOST_LIMIT].lstrip("._-")
    return name or "host"


def _sign(folder: str, name: str) -> Path:
    return Path(folder) / f".replay-{name}"
