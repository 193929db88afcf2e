"""One replay at a time on a checkpoint.

Two at once would run the same batch side by side, and Spark notices only when both have ended it. In a folder of this
machine's file systems a lock of the operating system keeps the second one out, and is gone with its process, however
that ends. Elsewhere, as in an object store, there is no such lock.
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
    """A checkpoint that this process has, until ``release`` or its end."""

    def __init__(self, descriptor: int) -> None:
        self.release = weakref.finalize(self, os.close, descriptor)
        """Let it go. Idempotent."""


def lock_checkpoint(spark: SparkSession, topic: str, checkpoint: str) -> CheckpointLock | None:
    """Take the checkpoint for this process; None where it is no folder of this machine's file systems, or of one that
    has no locks. Does not block.

    Raises ``SourceError`` when another replay has it, ``ConfigError`` for a folder that cannot be written to, as where
    the disk is full.
    """
    folder = local_folder(spark, checkpoint)
    return None if folder is None else _locked(topic, folder)


def _locked(topic: str, folder: Path) -> CheckpointLock | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Not inherited: no process that is started keeps it.
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
                f"{topic}: another replay is at the checkpoint {folder}{holder}: wait until it has ended, or stop it; "
                "two at once would handle the same messages twice"
            ) from None
        why = error.strerror
        log.warning("%s: the checkpoint %s cannot be locked (%s): let no other replay be at it", topic, folder, why)
        return None
    who = {"process": os.getpid(), "host": socket.gethostname(), "since": datetime.now(UTC).isoformat("T", "seconds")}
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(who).encode(), 0)
    except OSError as error:
        # What cannot be written here, Spark could not write either.
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
        # It has it, and has not said so yet.
        return ""


def query_of(spark: SparkSession, checkpoint: str) -> str | None:
    """The id that Spark has given the query of the checkpoint, for good, before its first batch; None = none was begun
    there. Blocks. Raises ``SourceError`` where that cannot be read."""
    path = f"{checkpoint.rstrip('/')}/metadata"
    text = first_value(spark.read.text, path)
    if text is None:
        return None
    try:
        return str(json.loads(text)["id"])
    except (ValueError, KeyError, TypeError):
        raise SourceError(
            f"the checkpoint is damaged: {path} is not as Spark has written it: restore it, or begin with another one, "
            "by from_= behind what was handled"
        ) from None


def literal(path: str) -> str:
    """The path as it is to be given to a reader of Spark, which takes it as a pattern where a writer does not."""
    return re.sub(r"[\\{}\[\]*?]", r"\\\g<0>", path)


def first_value(read: Callable[[str], DataFrame], path: str) -> str | None:
    """The first column of the first row that is there; None = there is none, or nothing at all. ``read`` is given the
    ``literal`` path. Blocks."""
    from pyspark.errors import AnalysisException

    try:
        row = read(literal(path)).first()
    except AnalysisException as error:
        # Nothing else: what cannot be read is not what is not there.
        if error.getCondition() != "PATH_NOT_FOUND":
            raise
        return None
    return None if row is None else str(row[0])


def local_folder(spark: SparkSession, path: str) -> Path | None:
    """The folder, where Spark's driver would use one of this machine for that path; None = it is elsewhere, or that
    cannot be told."""
    place = qualified(spark, path)
    return Path(place[1]) if place is not None and place[0] == "file" else None


def qualified(spark: SparkSession, path: str) -> tuple[str, str] | None:
    """The file system that Spark's driver would use for that path, as its scheme and, behind ``://``, its name where it
    has one; and the whole path there. None = that cannot be told."""
    jvm: Any = getattr(spark, "_jvm", None)
    if jvm is None:
        return None
    try:
        named = jvm.org.apache.hadoop.fs.Path(path)
        system = named.getFileSystem(spark._jsc.hadoopConfiguration())
        place = system.makeQualified(named).toUri()
    except Exception:
        # A file system that Spark does not know: it says so itself.
        return None
    name = place.getAuthority()
    return f"{place.getScheme()}://{name}" if name else str(place.getScheme()), str(place.getPath())


@contextmanager
def without_takeover(spark: SparkSession) -> Iterator[None]:
    """Of two queries of one application on one checkpoint the second fails when it begins in the block: as Spark is set
    it would stop the first one, which would look as if that had come to its end."""
    before = spark.conf.get(_TAKEOVER, None)
    spark.conf.set(_TAKEOVER, "false")
    try:
        yield
    finally:
        if before is None:
            spark.conf.unset(_TAKEOVER)
        else:
            spark.conf.set(_TAKEOVER, before)
