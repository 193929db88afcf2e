"""Ownership of a folder of results: one checkpoint has one folder, and a folder has one checkpoint.

Batches have numbers, which their checkpoint counts, and one folder each. Another checkpoint uses the same numbers for
other rows: it would replace some of the existing rows and stand beside the rest. So before the first results a note is
written into the folder, with the id that Spark gave the checkpoint's query. A note in the checkpoint names the folder
by an id of its own, so that the folder may be moved: another folder would lack the finished batches.

A replay that was killed after the first note continues with both notes. Without the second note nothing was written,
and another folder is as good.

Two replays may find a folder empty at the same instant; at most one takes it. Before the first note each creates a file
with the name of its query and then lists such files: the later one sees both. A file system need not offer exclusive
creation, which many do not; it is enough that a listing shows written files.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from lanes.errors import ConfigError, SourceError
from lanes_spark.checkpoint import first_value, qualified, query_of, read_note

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class ResultsFolder:
    """The folder of ``results_to`` for a replay on this checkpoint; ``folder`` is None without results."""

    def __init__(self, spark: SparkSession, folder: str | None, checkpoint: str) -> None:
        self._spark = spark
        self._folder = folder
        self._checkpoint = checkpoint.rstrip("/") or checkpoint
        self._inside = f"{str(folder).rstrip('/')}/_lanes"
        self._path = f"{self._inside}/checkpoint"
        self._bound_path = f"{self._checkpoint}/results"
        self._taken = False

    def check(self) -> None:
        """Check that the folder belongs to this checkpoint. Blocks.

        A checkpoint of an earlier version has no note. It continues with a folder that names it, or without results;
        with a finished batch it refuses any other folder. Raises ``ConfigError`` for the results of another checkpoint,
        and for a checkpoint that was begun with another folder or without one.
        """
        if self._taken:
            return
        bound = self._bound()
        was = "" if bound is None else f"results_to={bound['results_to']!r}"
        if self._folder is None:
            if bound is not None:
                raise self._other(f"with {was}", was)
            self._taken = True
            return
        note = self._note()
        if bound is not None and (note is None or note["folder"] != bound["folder"]):
            if bound["results_to"] == self._folder:
                raise ConfigError(
                    f"{was}: the results of the checkpoint {self._checkpoint} are gone from it: restore the folder, "
                    "with its _lanes, or give this replay a checkpoint of its own"
                )
            raise self._other(f"with {was}", was)
        if note is not None:
            self._check_query(note)
            self._taken = bound is not None
        elif self._has_checkpoint():
            raise ConfigError(
                f"results_to={self._folder!r}: the checkpoint {self._checkpoint} lies in it, and its files would be "
                "read with the table; name a checkpoint outside of it, and a new folder for results"
            )
        elif (found := self._found(self._folder)) is not None:
            raise self._refused(f"it has files that this checkpoint has not written, such as {found}")
        elif self._found(f"{self._checkpoint}/commits") is not None:
            raise self._other("without it, or with another one", "what it was begun with")

    def take(self) -> None:
        """Take the folder for this checkpoint, whose query has begun, before its first results. Blocks. Idempotent.

        Raises as ``check``, ``SourceError`` if the query's id cannot be read, and ``ConfigError`` if another replay
        takes the folder at the same time.
        """
        self.check()
        if self._taken:
            return
        note = self._note()
        if note is None:
            query = query_of(self._spark, self._checkpoint)
            if query is None:
                raise SourceError(
                    f"checkpoint={self._checkpoint!r}: Spark has begun a query there, but {self._checkpoint}/metadata, "
                    "which names it, is missing; restore it, or name another folder for the checkpoint"
                )
            self._claim(query)
            note = {"query": query, "checkpoint": self._checkpoint, "folder": uuid.uuid4().hex}
            self._write(self._path, note)
        else:
            # The note may be newer than the check.
            self._check_query(note)
        # Last: if the folder cannot be written to, the user can name another one.
        if self._bound() is None:
            self._write(self._bound_path, {"results_to": str(self._folder), "folder": note["folder"]})
        self._taken = True

    def _check_query(self, note: Mapping[str, str]) -> None:
        if note["query"] != query_of(self._spark, self._checkpoint):
            raise self._refused(
                f"it is for the results of another checkpoint, begun at {note['checkpoint']}",
                ", or go on with that checkpoint",
            )

    def _claim(self, query: str) -> None:
        """Raise ``ConfigError`` if another query takes the folder too. Idempotent.

        Spark Connect lists no files, so nothing is checked there.
        """
        jvm: Any = getattr(self._spark, "_jvm", None)
        if jvm is None:
            return
        session: Any = self._spark
        folder = f"{self._inside}/claims"
        claims = jvm.org.apache.hadoop.fs.Path(folder)
        # With the session's settings of file systems, as Spark itself writes there.
        system = claims.getFileSystem(session._jsparkSession.sessionState().newHadoopConf())
        mine = jvm.org.apache.hadoop.fs.Path(claims, query)
        system.create(mine, True).close()
        others = sorted(name for one in system.listStatus(claims) if (name := str(one.getPath().getName())) != query)
        if others:
            # A refused replay removes its file; the winner's stays for ever, for later replays.
            system.delete(mine, False)
            raise self._refused(
                f"another replay takes it at the same time, as {folder}/{others[0]} says (remove that file if the "
                "replay was killed and its checkpoint is gone)",
            )

    def _write(self, path: str, note: Mapping[str, str]) -> None:
        from pyspark.sql import functions as F  # noqa: N812

        # An incomplete note does not count.
        row = self._spark.range(1, numPartitions=1).select(F.lit(json.dumps(note)))
        row.write.mode("overwrite").text(path)

    def _note(self) -> Mapping[str, str] | None:
        try:
            # Notes of early versions have no id of the folder.
            return read_note(self._spark, self._path, "query", "checkpoint", folder="")
        except SourceError:
            raise self._refused(f"its owner is unknown: {self._path} is damaged") from None

    def _bound(self) -> Mapping[str, str] | None:
        return read_note(self._spark, self._bound_path, "results_to", "folder")

    def _found(self, folder: str) -> str | None:
        """Return any complete file that a reader of the table would read; None without one."""
        files = self._spark.read.format("binaryFile").option("recursiveFileLookup", "true")
        return first_value(lambda path: files.load(path).select("path"), folder)

    def _has_checkpoint(self) -> bool:
        """Return whether the checkpoint lies in the folder, where readers of the table find its files."""
        folder, checkpoint = (
            qualified(self._spark, path) or ("", path) for path in (str(self._folder), self._checkpoint)
        )
        inner, outer = PurePosixPath(checkpoint[1]), PurePosixPath(folder[1])
        if folder[0] != checkpoint[0] or not inner.is_relative_to(outer):
            return False
        return not any(part.startswith(("_", ".")) for part in inner.relative_to(outer).parts)

    def _refused(self, why: str, also: str = "") -> ConfigError:
        return ConfigError(
            f"results_to={self._folder!r}: {why}, so rows of both would be in one table; name a new folder{also}"
        )

    def _other(self, begun: str, remedy: str) -> ConfigError:
        return ConfigError(
            f"results_to={self._folder!r}: the checkpoint {self._checkpoint} was begun {begun}, so no table would "
            f"have all rows; go on with {remedy}, or give this replay a checkpoint of its own"
        )
