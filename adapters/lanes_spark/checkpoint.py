"""Locks checkpoints, and reads the files of a checkpoint.

Two replays on one checkpoint would run the same batch concurrently, and Spark detects the conflict only at the end of
the batch. On a local file system, a lock of the operating system prevents a second replay. The lock ends with its
process. An object store has no locks.
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
    """Lock on a checkpoint. The lock ends with ``release``, with this object or with the process."""

    def __init__(self, descriptor: int) -> None:
        self._close = weakref.finalize(self, os.close, descriptor)

    def release(self) -> None:
        """Release the lock. Idempotent."""
        self._close()


def lock_checkpoint(spark: SparkSession, topic: str, checkpoint: str) -> CheckpointLock | None:
    """Lock the checkpoint for this process. Does not block.

    Args:
        spark: Spark session, whose settings select the file systems.
        topic: Topic name, for error texts.
        checkpoint: Folder of the checkpoint.

    Returns:
        The lock; None = the file system of the folder is remote, or has no locks.

    Raises:
        SourceError: Another replay uses the checkpoint.
        ConfigError: The folder is not writable, for example because the disk is full.
    """
    folder = local_folder(spark, checkpoint)
    return None if folder is None else _locked(topic, folder)


def _locked(topic: str, folder: Path) -> CheckpointLock | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Child processes must not inherit the lock.
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
                f"{topic}: another replay uses the checkpoint {folder}{holder}, and two replays would handle the same "
                "messages twice; wait until the other replay has ended, or stop it"
            ) from None
        why = error.strerror
        log.warning("%s: cannot lock the checkpoint %s (%s); start no other replay on it", topic, folder, why)
        return None
    who = {"process": os.getpid(), "host": socket.gethostname(), "since": datetime.now(UTC).isoformat("T", "seconds")}
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(who).encode(), 0)
    except OSError as error:
        # In this case Spark cannot write to the folder.
        lock.release()
        raise _unwritable(folder, error) from error
    return lock


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = (
        "free some space, or name a folder on another disk" if full else "name a folder that this user may write to"
    )
    return ConfigError(f"checkpoint={str(folder)!r}: the folder is not writable ({error.strerror}): {remedy}")


def _holder(descriptor: int) -> str:
    try:
        who: Any = json.loads(os.pread(descriptor, _HOLDER_LIMIT, 0))
        return f" (process {int(who['process'])} on {str(who['host'])!a}, since {str(who['since'])!a})"
    except (OSError, ValueError, KeyError, TypeError):
        # The other process has locked the file, but has not written its id yet.
        return ""


def query_of(spark: SparkSession, checkpoint: str) -> str | None:
    """Read the permanent id of the checkpoint's query; None = the checkpoint has no query yet.

    Blocks. Raises ``SourceError`` for a damaged file.
    """
    note = read_note(spark, f"{checkpoint.rstrip('/')}/metadata", "id")
    return None if note is None else note["id"]


def read_note(spark: SparkSession, path: str, *names: str, **defaults: str) -> dict[str, str] | None:
    """Read some fields of a JSON file of a checkpoint; None = no file. Blocks.

    Args:
        spark: Session that reads the file.
        path: Path of the file.
        *names: Fields that the file must have.
        **defaults: Fields that the file may lack, with the values that replace them.

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
            f"the checkpoint is damaged: {path} has an unexpected content; restore that file, or use a new checkpoint "
            "with from_= after the last finished batch"
        ) from None


def literal(path: str) -> str:
    """Escape a path for Spark's readers, which interpret a path as a pattern. Spark's writers need no escape."""
    return re.sub(r"[\\{}\[\]*?]", r"\\\g<0>", path)


def first_value(read: Callable[[str], DataFrame], path: str) -> str | None:
    """Read the first value of the first row; None = the file is missing or empty. Blocks.

    Args:
        read: Function that opens a path, already escaped by ``literal``.
        path: Path of the file or folder.

    Returns:
        The value as text.
    """
    from pyspark.errors import AnalysisException

    try:
        row = read(literal(path)).first()
    except AnalysisException as error:
        # An error with another condition means that the file exists, but is unreadable.
        if error.getCondition() != "PATH_NOT_FOUND":
            raise
        return None
    return None if row is None else str(row[0])


def local_folder(spark: SparkSession, path: str) -> Path | None:
    """Return the path as a local folder of Spark's driver; None if the file system is remote or unknown."""
    place = qualified(spark, path)
    return Path(place[1]) if place is not None and place[0] == "file" else None


def qualified(spark: SparkSession, path: str) -> tuple[str, str] | None:
    """Return the file system that Spark's driver uses for this path, and the full path on that file system.

    The file system is a text: its scheme, followed by ``://`` and its name if it has a name. Returns None for an
    unknown file system, and without a JVM (Spark Connect).
    """
    jvm: Any = getattr(spark, "_jvm", None)
    if jvm is None:
        return None
    try:
        named = jvm.org.apache.hadoop.fs.Path(path)
        system = named.getFileSystem(spark._jsc.hadoopConfiguration())
        place = system.makeQualified(named).toUri()
    except Exception:
        # Spark does not know this file system, and reports the error itself.
        return None
    name = place.getAuthority()
    return f"{place.getScheme()}://{name}" if name else str(place.getScheme()), str(place.getPath())


@contextmanager
def without_takeover(spark: SparkSession) -> Iterator[None]:
    """Within the block, a query fails to start if another query of this application uses the checkpoint.

    By default Spark would stop the earlier query, and this stop would look like a regular end.
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
