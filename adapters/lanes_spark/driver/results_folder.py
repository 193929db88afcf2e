"""Whose a folder of results is: of one checkpoint, whose batches have a folder each there. And a checkpoint has one.

Batches are numbered by their checkpoint. Under another one the same numbers are of other rows, which would replace some
of those that are there and stand beside the rest. So in front of the first results a note is left with them that names
the query of the checkpoint, as Spark has named it for good. And one in the checkpoint names the folder, by an id of its
own, so that it may be moved: in another folder the batches that are done would be missing.

Whoever is killed behind the first note goes on with both; while there is no second one nothing was written, and another
folder is as good.

Of two that find a folder empty in the same instant one at most takes it. In front of the first note each leaves a file
that is called as its query, and looks then whose files are there: whoever looks last sees both. So no file system has
to make a file for one alone, which many do not; that what was written is listed, is enough.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Final

from lanes.errors import ConfigError, SourceError
from lanes_spark.checkpoint import first_value, qualified, query_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_NOTE: Final = "_lanes/checkpoint"
"""Where the note is. Whoever reads the table passes over folders whose names begin so."""

_CLAIMS: Final = "_lanes/claims"
"""Where the files are of those who take it."""

_BOUND: Final = "results"
"""Where the note of the checkpoint is."""


class ResultsFolder:
    """The ``folder`` of ``results_to`` for a replay on this ``checkpoint``; None = there is no such folder."""

    def __init__(self, spark: SparkSession, folder: str | None, checkpoint: str) -> None:
        self._spark = spark
        self._folder = folder
        self._checkpoint = checkpoint.rstrip("/") or checkpoint
        self._taken = False

    def check(self) -> None:
        """Raise ``ConfigError`` where it has the results of anything else than this checkpoint, or where that was begun
        with another folder, without one, or with one. Blocks.

        A checkpoint of a version that left no note in it is taken on with a folder that names it, and without one;
        where a batch of it is done, not with any other folder.
        """
        if self._taken:
            return
        bound = self._bound()
        if self._folder is None:
            if bound is not None:
                raise self._other(f"with results_to={bound['results_to']!r}", f"results_to={bound['results_to']!r}")
            self._taken = True
            return
        note = self._note()
        if bound is not None and (note is None or note["folder"] != bound["folder"]):
            was = bound["results_to"]
            if was == self._folder:
                raise ConfigError(
                    f"results_to={was!r}: the results of the checkpoint {self._checkpoint} are gone from it: restore "
                    "the folder, with what is in its _lanes, or give this replay a checkpoint of its own"
                )
            raise self._other(f"with results_to={was!r}", f"results_to={was!r}")
        if note is not None:
            self._check_query(note)
            self._taken = bound is not None
        elif self._has_checkpoint():
            raise ConfigError(
                f"results_to={self._folder!r}: the checkpoint {self._checkpoint} lies in it, and its files would be "
                "read with the table: name a checkpoint outside of it, and a folder that is not there yet"
            )
        elif (found := self._found(self._folder)) is not None:
            raise self._refused(f"there is something in it already that this checkpoint has not written, as {found}")
        elif self._found(f"{self._checkpoint}/commits") is not None:
            raise self._other("without it, or with another one", "what it was begun with")

    def take(self) -> None:
        """Make it the folder of this checkpoint, whose query has begun; to be called in front of its first results.
        Raises as ``check``, ``SourceError`` where that query cannot be told, and ``ConfigError`` where somebody else
        takes it at the same time. Blocks. Idempotent."""
        self.check()
        if self._taken:
            return
        note = self._note()
        if note is None:
            query = query_of(self._spark, self._checkpoint)
            if query is None:
                raise SourceError(
                    f"checkpoint={self._checkpoint!r}: Spark has begun a query there, and {self._checkpoint}/metadata, "
                    "which names it, is not found: restore it, or name another folder for the checkpoint"
                )
            self._claim(query)
            note = {"query": query, "checkpoint": self._checkpoint, "folder": uuid.uuid4().hex}
            self._write(self._path, note)
        else:
            # It may have come since the check.
            self._check_query(note)
        # Last: where the folder cannot be written to, another one can be named.
        if self._bound() is None:
            self._write(self._bound_path, {"results_to": str(self._folder), "folder": note["folder"]})
        self._taken = True

    @property
    def _path(self) -> str:
        return f"{str(self._folder).rstrip('/')}/{_NOTE}"

    @property
    def _bound_path(self) -> str:
        return f"{self._checkpoint}/{_BOUND}"

    def _check_query(self, note: Mapping[str, str]) -> None:
        if note["query"] != query_of(self._spark, self._checkpoint):
            raise self._refused(
                f"it is for the results of another checkpoint, begun at {note['checkpoint']}",
                ", or go on with that checkpoint",
            )

    def _claim(self, query: str) -> None:
        """Raise ``ConfigError`` where another query takes the folder, too; not on Spark Connect, which lists no files.
        Idempotent."""
        jvm: Any = getattr(self._spark, "_jvm", None)
        if jvm is None:
            return
        session: Any = self._spark
        claims = jvm.org.apache.hadoop.fs.Path(f"{str(self._folder).rstrip('/')}/{_CLAIMS}")
        # With what the session says of file systems: as Spark writes there.
        system = claims.getFileSystem(session._jsparkSession.sessionState().newHadoopConf())
        mine = jvm.org.apache.hadoop.fs.Path(claims, query)
        system.create(mine, True).close()
        others = sorted(name for one in system.listStatus(claims) if (name := str(one.getPath().getName())) != query)
        if others:
            # Who is refused is in nobody's way. Who takes it leaves the file for ever, for those who look later.
            system.delete(mine, False)
            raise self._refused(
                f"another replay takes it at the same time, as {self._folder}/{_CLAIMS}/{others[0]} says (if that was "
                "killed, and its checkpoint is gone, remove the file)",
            )

    def _write(self, path: str, note: Mapping[str, str]) -> None:
        from pyspark.sql import functions as F  # noqa: N812

        # One that was not written to the end is none.
        row = self._spark.range(1, numPartitions=1).select(F.lit(json.dumps(note)))
        row.write.mode("overwrite").text(path)

    def _note(self) -> Mapping[str, str] | None:
        text = first_value(self._spark.read.text, self._path)
        if text is None:
            return None
        try:
            note = json.loads(text)
            found = {name: str(note[name]) for name in ("query", "checkpoint")}
            # The first ones had no id.
            return {**found, "folder": str(note.get("folder", ""))}
        except (ValueError, KeyError, TypeError):
            raise self._refused(f"nobody can tell whose it is: {self._path} is not as it was written") from None

    def _bound(self) -> Mapping[str, str] | None:
        text = first_value(self._spark.read.text, self._bound_path)
        if text is None:
            return None
        try:
            note = json.loads(text)
            return {name: str(note[name]) for name in ("results_to", "folder")}
        except (ValueError, KeyError, TypeError):
            raise SourceError(
                f"the checkpoint is damaged: {self._bound_path} is not as it was written: restore it, or begin with "
                "another one, by from_= behind what was handled"
            ) from None

    def _found(self, folder: str) -> str | None:
        """Any file there that is read with a table, and what is still to be written to the end is not."""
        files = self._spark.read.format("binaryFile").option("recursiveFileLookup", "true")
        return first_value(lambda path: files.load(path).select("path"), folder)

    def _has_checkpoint(self) -> bool:
        """Whether the checkpoint is in the folder, where whoever reads the table finds its files."""
        folder, checkpoint = (
            qualified(self._spark, path) or ("", path) for path in (str(self._folder), self._checkpoint)
        )
        inner, outer = PurePosixPath(checkpoint[1]), PurePosixPath(folder[1])
        if folder[0] != checkpoint[0] or not inner.is_relative_to(outer):
            return False
        return not any(part.startswith(("_", ".")) for part in inner.relative_to(outer).parts)

    def _refused(self, why: str, also: str = "") -> ConfigError:
        return ConfigError(
            f"results_to={self._folder!r}: {why}: rows of both would be in one table; name a folder that is not there "
            f"yet{also}"
        )

    def _other(self, begun: str, remedy: str) -> ConfigError:
        return ConfigError(
            f"results_to={self._folder!r}: the checkpoint {self._checkpoint} was begun {begun}: no table would have "
            f"all rows; go on with {remedy}, or give this replay a checkpoint of its own"
        )
