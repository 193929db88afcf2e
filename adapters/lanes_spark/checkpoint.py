"""Checkpoints: one replay at a time, and their files.

Two replays on one checkpoint would run the same batch side by side, and Spark notices only when both have ended it. On
a file system of this machine a lock of the operating system keeps the second one out, and ends with its process. An
object store has no such lock.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import socket
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lanes.errors import ConfigError, SourceError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger("lanes")

LOCK: Final = "lanes.lock"
_TAKEOVER: Final = "spark.sql.streaming.stopActiveRunOnRestart"
_HOLDER_LIMIT: Final = 500  # bytes


class CheckpointLock:
    """Lock on a checkpoint, held until ``release`` or the end of the process."""

    def __init__(self, descriptor: int) -> None:
        self._close = weakref.finalize(self, os.close, descriptor)

    def release(self) -> None:
        """Release the lock. Idempotent."""
        self._close()


def lock_checkpoint(spark: SparkSession, topic: str, checkpoint: str) -> CheckpointLock | None:
    """Lock the checkpoint for this process. Does not block.

    Returns None outside this machine's file systems, and on one without locks. Raises ``SourceError`` if another replay
    has it, ``ConfigError`` for a folder that cannot be written to, as on a full disk.
    """
    folder = local_folder(spark, checkpoint)
    return None if folder is None else _locked(topic, folder)


def _locked(topic: str, folder: Path) -> CheckpointLock | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Not inherited: child processes must not keep the lock.
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise _unwritable(folder, error) from error
    lock = CheckpointLock(descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = _holder(descriptor)
        lock.release()
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise SourceError(
                f"{topic}: another replay uses the checkpoint {folder}{holder}, and two would handle the same messages "
                "twice; wait until it has ended, or stop it"
            ) from None
        why = error.strerror
        log.warning("%s: the checkpoint %s cannot be locked (%s); start no other replay on it", topic, folder, why)
        return None
    who = {"process": os.getpid(), "host": socket.gethostname(), "since": datetime.now(UTC).isoformat("T", "seconds")}
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(who).encode(), 0)
    except OSError as error:
        # Spark could not write there either.
        lock.release()
        raise _unwritable(folder, error) from error
    return lock


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = (
        "free some space, or name a folder on another disk" if full else "name a folder that this user may write to"
    )
    return ConfigError(f"checkpoint={str(folder)!r}: nothing can be written there ({error.strerror}): {remedy}")


def _holder(descriptor: int) -> str:
    try:
        who: Any = json.loads(os.pread(descriptor, _HOLDER_LIMIT, 0))
        return f" (process {int(who['process'])} on {str(who['host'])!a}, since {str(who['since'])!a})"
    except (OSError, ValueError, KeyError, TypeError):
        # The other process has locked the file and not written it yet.
        return ""


def query_of(spark: SparkSession, checkpoint: str) -> str | None:
    """Read the permanent id that Spark gave the query of the checkpoint; None if no query was begun there.

    Blocks. Raises ``SourceError`` for a damaged file.
    """
    note = read_note(spark, f"{checkpoint.rstrip('/')}/metadata", "id")
    return None if note is None else note["id"]


def read_note(spark: SparkSession, path: str, *names: str, **defaults: str) -> dict[str, str] | None:
    """Read these fields of a JSON file of a checkpoint; None without a file. Blocks.

    Args:
        spark: Session that reads the file.
        path: Path of the file.
        names: Fields that the file must have.
        defaults: Fields that the file may lack, with the values that replace them.

    Returns:
        The fields as text.

    Raises:
        SourceError: The file is damaged.
    """
    text = first_value(spark.read.text, path)
    if text is None:
        return None
    try:
        note = {**defaults, **json.loads(text)}
        return {name: str(note[name]) for name in (*names, *defaults)}
    except (ValueError, KeyError, TypeError):
        raise SourceError(
            f"the checkpoint is damaged: {path} is not as it was written; restore it, or begin another one with "
            "from_= after the last handled message"
        ) from None


def literal(path: str) -> str:
    """Escape a path for a reader of Spark, which takes it as a pattern; a writer does not."""
    return re.sub(r"[\\{}\[\]*?]", r"\\\g<0>", path)


def first_value(read: Callable[[str], DataFrame], path: str) -> str | None:
    """Read the first column of the first row; None without a row, or without the file. Blocks.

    ``read`` gets the ``literal`` path.
    """
    from pyspark.errors import AnalysisException

    try:
        row = read(literal(path)).first()
    except AnalysisException as error:
        # Only this one: an unreadable file is not a missing one.
        if error.getCondition() != "PATH_NOT_FOUND":
            raise
        return None
    return None if row is None else str(row[0])


def local_folder(spark: SparkSession, path: str) -> Path | None:
    """Return the local folder that Spark's driver would use for that path; None if it is elsewhere or unknown."""
    place = qualified(spark, path)
    return Path(place[1]) if place is not None and place[0] == "file" else None


def qualified(spark: SparkSession, path: str) -> tuple[str, str] | None:
    """Return the file system that Spark's driver would use for that path, and the full path there.

    The file system is its scheme, followed by ``://`` and its name if it has one. Returns None if it is unknown.
    """
    jvm: Any = getattr(spark, "_jvm", None)
    if jvm is None:
        return None
    try:
        named = jvm.org.apache.hadoop.fs.Path(path)
        system = named.getFileSystem(spark._jsc.hadoopConfiguration())
        place = system.makeQualified(named).toUri()
    except Exception:
        # Spark does not know this file system, and will say so itself.
        return None
    name = place.getAuthority()
    return f"{place.getScheme()}://{name}" if name else str(place.getScheme()), str(place.getPath())


@contextmanager
def without_takeover(spark: SparkSession) -> Iterator[None]:
    """Let a second query of this application on the same checkpoint fail if it begins in the block.

    By default Spark stops the first query instead, as if that one had come to its end.
    """
    before = spark.conf.get(_TAKEOVER, None)
    spark.conf.set(_TAKEOVER, "false")
    try:
        yield
    finally:
        if before is None:
            spark.conf.unset(_TAKEOVER)
        else:
            spark.conf.set(_TAKEOVER, before)
