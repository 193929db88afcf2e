"""Whose a folder of results is: of one checkpoint, whose batches have a folder each there.

Batches are numbered by their checkpoint. Under another one the same numbers are of other rows, which would replace some
of those that are there and stand beside the rest. So in front of the first results a note is left with them that names
the query of the checkpoint, as Spark has named it for good; whoever is killed behind that goes on with both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from lanes.errors import ConfigError
from lanes_spark.checkpoint import first_value, query_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["ResultsFolder"]

_NOTE: Final = "_lanes/checkpoint"
"""Where the note is. Whoever reads the table passes over folders whose names begin so."""


class ResultsFolder:
    """The ``folder`` of ``results_to`` for a replay on this ``checkpoint``; None = there is no such folder."""

    def __init__(self, spark: SparkSession, folder: str | None, checkpoint: str) -> None:
        self._spark = spark
        self._folder = folder
        self._checkpoint = checkpoint
        self._ours = folder is None

    def check(self) -> None:
        """Raise ``ConfigError`` where it has the results of anything else than this checkpoint. Blocks."""
        if self._ours:
            return
        note = self._note()
        if note is not None:
            self._ours = note["query"] == query_of(self._spark, self._checkpoint)
            if not self._ours:
                raise self._refused(
                    f"it is for the results of another checkpoint, begun at {note['checkpoint']}",
                    ", or go on with that checkpoint",
                )
        elif (found := self._found()) is not None:
            raise self._refused(f"there is something in it already that this checkpoint has not written, as {found}")

    def take(self) -> None:
        """Make it the folder of this checkpoint, whose query has begun; to be called in front of its first results.
        Raises as ``check``. Blocks. Idempotent."""
        self.check()
        if self._ours:
            return
        from pyspark.sql import functions as F  # noqa: N812

        note = json.dumps({"query": query_of(self._spark, self._checkpoint), "checkpoint": self._checkpoint})
        # One that was not written to the end is none.
        row = self._spark.range(1, numPartitions=1).select(F.lit(note))
        row.write.mode("overwrite").text(self._path)
        self._ours = True

    @property
    def _path(self) -> str:
        return f"{str(self._folder).rstrip('/')}/{_NOTE}"

    def _note(self) -> Mapping[str, str] | None:
        text = first_value(self._spark.read.text, self._path)
        if text is None:
            return None
        try:
            note = json.loads(text)
            return {name: str(note[name]) for name in ("query", "checkpoint")}
        except (ValueError, KeyError, TypeError):
            raise self._refused(f"nobody can tell whose it is: {self._path} is not as it was written") from None

    def _found(self) -> str | None:
        """Any file there that is read with the table, and what is still to be written to the end is not."""
        files = self._spark.read.format("binaryFile").option("recursiveFileLookup", "true")
        return first_value(lambda path: files.load(path).select("path"), str(self._folder))

    def _refused(self, why: str, also: str = "") -> ConfigError:
        return ConfigError(
            f"results_to={self._folder!r}: {why}: rows of both would be in one table; name a folder that is not there "
            f"yet{also}"
        )
