"""Ensures that each folder of results belongs to one checkpoint, and each checkpoint has only one folder.

A checkpoint numbers its batches, and each batch writes its own folder of results. A second checkpoint would use the
same numbers for other rows, and its batches would replace only some of the results. With two small files, called notes,
a replay detects and refuses a second checkpoint:

- The note in the results folder contains the id of the checkpoint's query. A replay writes this note before its first
  results.
- The note in the checkpoint contains an id of the results folder. A moved folder keeps its id. In a different folder,
  the results of finished batches would be missing.

A replay that was killed between the two notes has written no results, and may continue with the same folder or a new
folder.

Two replays may find the same folder empty at the same time. At most one of these replays acquires the folder, except
with Spark Connect. To acquire the folder, each replay creates a file with the name of its query, and then lists the
files of all replays. The later replay finds both files and stops. The file system need not support exclusive creation,
but a listing must show all written files.
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
    """The folder ``results_to`` of a replay with a checkpoint. ``folder`` is None for a replay without results."""

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

        A checkpoint of an earlier version of ``lanes`` has no note. Such a checkpoint continues without results, or
        with a folder whose note names the checkpoint. After its first finished batch, the checkpoint accepts no other
        folder.

        Raises:
            ConfigError: The folder has other files, belongs to another checkpoint, contains the checkpoint or has lost
                its note; or the checkpoint began with another folder or without a folder.
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
                    f"{was}: the folder has lost the results of the checkpoint {self._checkpoint}: restore the folder, "
                    "with its _lanes, or give this replay its own checkpoint"
                )
            raise self._other(f"with {was}", was)
        if note is not None:
            self._check_query(note)
            self._taken = bound is not None
        elif self._has_checkpoint():
            raise ConfigError(
                f"results_to={self._folder!r}: the checkpoint {self._checkpoint} is inside this folder, and readers of "
                "the table would read its files; name a checkpoint outside the folder, and a new folder for results"
            )
        elif (found := self._found(self._folder)) is not None:
            raise self._refused(f"the folder has files that this checkpoint has not written, such as {found}")
        elif self._found(f"{self._checkpoint}/commits") is not None:
            raise self._other("without results_to, or with another folder", "the folder of the first batch")

    def take(self) -> None:
        """Claim the folder for this checkpoint. Call ``take`` after the query has begun. Blocks. Idempotent.

        Raises:
            ConfigError: The folder has a fault, see ``check``; or another replay claims the folder at the same time.
            SourceError: The checkpoint contains no readable id of its query.
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
                    "which names the query, is missing; restore that file, or name another folder for the checkpoint"
                )
            self._claim(query)
            note = {"query": query, "checkpoint": self._checkpoint, "folder": uuid.uuid4().hex}
            self._write(self._path, note)
        else:
            # Another replay may have written the note after the check.
            self._check_query(note)
        # Write the note in the checkpoint last. If the folder is not writable, the user can still name another folder.
        if self._bound() is None:
            self._write(self._bound_path, {"results_to": str(self._folder), "folder": note["folder"]})
        self._taken = True

    def _check_query(self, note: Mapping[str, str]) -> None:
        if note["query"] != query_of(self._spark, self._checkpoint):
            raise self._refused(
                f"the folder is for the results of another checkpoint, begun at {note['checkpoint']}",
                ", or continue with that checkpoint",
            )

    def _claim(self, query: str) -> None:
        """Claim the folder, and raise ``ConfigError`` if another query also claims the folder. Idempotent.

        With Spark Connect the method does not check, because Spark Connect cannot list files.
        """
        jvm: Any = getattr(self._spark, "_jvm", None)
        if jvm is None:
            return
        session: Any = self._spark
        folder = f"{self._inside}/claims"
        claims = jvm.org.apache.hadoop.fs.Path(folder)
        # Spark writes the results with the session's settings for file systems.
        system = claims.getFileSystem(session._jsparkSession.sessionState().newHadoopConf())
        mine = jvm.org.apache.hadoop.fs.Path(claims, query)
        system.create(mine, True).close()
        others = sorted(name for one in system.listStatus(claims) if (name := str(one.getPath().getName())) != query)
        if others:
            # A refused replay removes its own file. The accepted replay keeps its file, for later replays.
            system.delete(mine, False)
            raise self._refused(
                f"another replay takes the folder at the same time, as {folder}/{others[0]} shows (remove that file if "
                "the replay was killed and its checkpoint is gone)",
            )

    def _write(self, path: str, note: Mapping[str, str]) -> None:
        from pyspark.sql import functions as F  # noqa: N812

        # A reader ignores an incomplete note.
        row = self._spark.range(1, numPartitions=1).select(F.lit(json.dumps(note)))
        row.write.mode("overwrite").text(path)

    def _note(self) -> Mapping[str, str] | None:
        try:
            # Notes of early versions have no id of the folder.
            return read_note(self._spark, self._path, "query", "checkpoint", folder="")
        except SourceError:
            raise self._refused(f"the folder's owner is unknown, because {self._path} is damaged") from None

    def _bound(self) -> Mapping[str, str] | None:
        return read_note(self._spark, self._bound_path, "results_to", "folder")

    def _found(self, folder: str) -> str | None:
        """Return the path of a complete file that a reader of the table would read; None without such a file."""
        files = self._spark.read.format("binaryFile").option("recursiveFileLookup", "true")
        return first_value(lambda path: files.load(path).select("path"), folder)

    def _has_checkpoint(self) -> bool:
        """Return whether the checkpoint is inside the folder, so that readers of the table find its files."""
        folder, checkpoint = (
            qualified(self._spark, path) or ("", path) for path in (str(self._folder), self._checkpoint)
        )
        inner, outer = PurePosixPath(checkpoint[1]), PurePosixPath(folder[1])
        if folder[0] != checkpoint[0] or not inner.is_relative_to(outer):
            return False
        return not any(part.startswith(("_", ".")) for part in inner.relative_to(outer).parts)

    def _refused(self, why: str, also: str = "") -> ConfigError:
        return ConfigError(
            f"results_to={self._folder!r}: {why}, and one table would mix the rows of two replays; name a new "
            f"folder{also}"
        )

    def _other(self, begun: str, remedy: str) -> ConfigError:
        return ConfigError(
            f"results_to={self._folder!r}: the checkpoint {self._checkpoint} was begun {begun}, so no table would "
            f"have all rows; continue with {remedy}, or give this replay a checkpoint of its own"
        )
