"""Selects positions by a journal: positions of dead-lettered, abandoned or unfinished messages.

A journal contains positions, but no messages. A replay therefore joins the positions with the messages of the source. A
replay with a checkpoint does not read the messages between two distant positions.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Final, Literal, get_args

from blake3 import blake3

from lanes.errors import ConfigError, SourceError
from lanes_spark.checkpoint import literal, query_of
from lanes_spark.positions import Islands, Span, clipped, islands_of, wanted_count
from lanes_spark.tables.table import within

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger("lanes")

Of = Literal["dead_lettered", "abandoned", "unfinished"]
"""State of the selected messages, see ``JournalSelection``."""

GAP: Final = 200_000
"""Smallest gap between two ranges, in positions. The selection merges ranges with a smaller gap into one range."""

SMALL: Final = 1_000_000
"""Maximum number of selected positions of a batch that an executor keeps in memory."""

_TERMS: Final = 256
"""Maximum number of ranges of positions in one filter condition."""


@dataclass(frozen=True, kw_only=True)
class JournalFacts:
    """Facts about the positions that a journal selects. Other selections do not change these facts.

    Attributes:
        of: Selected state, see ``JournalSelection``.
        topic: Topic name in the journal.
        runs: Number of runs in the journal that read the topic.
        positions: Number of selected positions.
        doubts: One sentence for each reason why the journal may be incomplete; empty = the journal is complete.
    """

    of: Of
    topic: str
    runs: int
    positions: int
    doubts: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class JournalSelection:
    """A selection of positions by a journal. ``replay(only=…)`` handles only these positions.

    The selection combines all runs in the folders, so the folders should belong to one consumer. A journal does not
    contain undelivered messages.

    Args:
        path: Folder that ``lanes.run(journal=…)`` has written, or several such folders.
        of: State of the selected messages. ``"dead_lettered"``: a run recorded the confirmation of the message's dead
            letter. ``"unfinished"``: a run has received the message, but no run has handled or acknowledged it,
            confirmed its dead letter, or committed a higher position. Work after the end of an assignment has no
            effect. ``"abandoned"``: the message is unfinished, and a run abandoned it because of a blocked key, the end
            of a drain, or the loss of the partition. A message of a killed process is unfinished, but not abandoned.
        topic: Topic name in the journal. Default: the topic name of the source.

    Raises:
        ConfigError: An argument has a wrong value.
    """

    path: str | Sequence[str]
    of: Of
    topic: str | None = None

    def __post_init__(self) -> None:
        if self.of not in get_args(Of):
            raise ConfigError(f"of={self.of!r} is unknown: use {', '.join(map(repr, get_args(Of)))}")
        if not self.paths or not all(isinstance(path, str) and path for path in self.paths):
            raise ConfigError(
                f"path={self.path!r} names no folder: give the folder to which lanes.run(journal=…) has written"
            )
        if self.topic == "":
            raise ConfigError("topic is empty: give the topic name in the journal, or leave out topic")

    @property
    def paths(self) -> list[str]:
        """Folders of the journal."""
        return [self.path] if isinstance(self.path, str) else list(self.path)

    def choose(self, spark: SparkSession, topic: str, checkpoint: str | None, incarnation: str = "") -> Chosen:
        """Read the selected positions. Later rows of the journal do not change the result. Blocks.

        Args:
            spark: Session that reads the journal.
            topic: Topic name of the source.
            checkpoint: Folder that stores the positions for a continued replay. Without a checkpoint, Spark
                caches the positions until ``Chosen.close``.
            incarnation: Id of the topic; "" = unknown.

        Returns:
            The selected positions.

        Raises:
            ConfigError: The folder has no journal, or the journal has no rows of this topic.
            SourceError: The checkpoint has another selection or has lost its selection, or a user recreated the topic
                during the runs of the journal.
        """
        # By naming the topic, the caller confirms that both topics have the same messages.
        incarnation, topic = "" if self.topic else incarnation, self.topic or topic
        digest = blake3(repr((sorted(self.paths), self.of, topic)).encode()).hexdigest(length=8)
        if checkpoint is None:
            facts, positions = self._read(spark, topic, incarnation)
        else:
            kept = _Kept(spark, f"{checkpoint.rstrip('/')}/selected")
            found = kept.facts(digest, topic)
            if found is None:
                kept.check_new(checkpoint, topic)
                found, positions = self._read(spark, topic, incarnation)
                kept.keep(found, positions, digest)
                positions.unpersist()
            facts, positions = found, kept.positions()
        for doubt in facts.doubts:
            log.warning("%s: the journal may be incomplete (%s); to replay all messages, leave out only=", topic, doubt)
        islands, count = _islands(positions)
        if checkpoint is not None and count != facts.positions:
            raise SourceError(
                f"{topic}: the checkpoint has {count:,} of its {facts.positions:,} selected positions: restore its "
                "folder `selected`, or begin again with another checkpoint"
            )
        return Chosen(positions=positions, islands=islands, facts=facts, digest=digest)

    def _read(self, spark: SparkSession, topic: str, incarnation: str) -> tuple[JournalFacts, DataFrame]:
        from lanes_spark.tables.journal import check_journal, doubts_of, selected_positions, unfinished_files

        hidden = unfinished_files(spark, self.paths)
        table = check_journal(spark, self.paths, hidden)
        runs, doubts = doubts_of(table, topic, self.paths, hidden, incarnation)
        positions = selected_positions(table, topic, self.of).persist()
        return JournalFacts(of=self.of, topic=topic, runs=runs, positions=positions.count(), doubts=doubts), positions


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Positions that a journal selects.

    Attributes:
        positions: Rows of partition and offset, without repeats.
        islands: Ranges around the positions, by partition.
        facts: Facts about the selection.
        digest: Hash of the selection.
    """

    positions: DataFrame = field(repr=False)
    islands: Islands
    facts: JournalFacts
    digest: str

    def small(self, cap: int | None) -> bool:
        """Return whether the selected positions of a batch of ``cap`` positions fit into an executor's memory."""
        return self.facts.positions <= SMALL or (cap is not None and cap <= SMALL)

    def near(self, rows: DataFrame, ranges: dict[int, Span]) -> DataFrame:
        """Filter the rows by the islands inside these ranges, so that Spark skips other files.

        If the filter would be too long, or would select whole ranges, the call returns ``rows`` unchanged. The call
        reads no row yet.
        """
        parts = [
            (partition, (max(first, one), min(end, other)))
            for partition, (first, end) in ranges.items()
            for one, other in self.islands.get(partition, ())
            if one < end and other > first
        ]
        if len(ranges) < len(parts) <= _TERMS:
            rows = rows.where(within(parts))
        return rows

    def join(self, rows: DataFrame, ranges: dict[int, Span]) -> DataFrame:
        """Return the rows at selected positions. The call reads no row yet.

        The result keeps the order of ``rows`` only if the positions are ``small``. Otherwise Spark may shuffle the
        rows.

        Args:
            rows: Rows of the source.
            ranges: Ranges that contain all of these rows, by partition.

        Returns:
            The rows.
        """
        from pyspark.sql import functions as F  # noqa: N812

        positions = self.positions.where(within(ranges))
        if self.small(wanted_count(ranges, self.islands)):
            # A broadcast join needs no shuffle and keeps the order of the rows.
            positions = F.broadcast(positions)
        return rows.join(positions, ["partition", "offset"], "left_semi")

    def count(self, ranges: dict[int, Span]) -> int:
        """Count the selected positions in these ranges. Blocks."""
        wanted = clipped(ranges, self.islands)
        return self.positions.where(within(wanted)).count() if wanted else 0

    def close(self) -> None:
        """Free the memory of the positions. Idempotent."""
        self.positions.unpersist()


class _Kept:
    """Stores the selection in a checkpoint, in two tables."""

    def __init__(self, spark: SparkSession, folder: str) -> None:
        self._spark = spark
        self._positions, self._facts = f"{folder}/positions", f"{folder}/facts"

    def facts(self, digest: str, topic: str) -> JournalFacts | None:
        """Read the facts; None = missing or incomplete facts. Raises ``SourceError`` for another selection."""
        from pyspark.errors import AnalysisException

        try:
            row = self._spark.read.parquet(literal(self._facts)).first()
        except AnalysisException as error:
            # After an error of another kind, a stored selection may exist. A new selection must not replace a stored
            # one.
            if error.getCondition() not in ("PATH_NOT_FOUND", "UNABLE_TO_INFER_SCHEMA"):
                raise
            return None
        if row is None:
            return None
        found = json.loads(row["facts"])
        if found.pop("digest") != digest:
            raise SourceError(
                f"{topic}: the checkpoint belongs to another replay (begun with another only=…); give this replay a "
                "checkpoint of its own"
            )
        return JournalFacts(**{**found, "doubts": tuple(found["doubts"])})

    def check_new(self, checkpoint: str, topic: str) -> None:
        """Raise ``SourceError`` if the checkpoint began without a selection, or has lost its selection.

        With a new selection, the replay would continue in its middle, and would never handle its first messages.
        """
        if query_of(self._spark, checkpoint) is not None:
            raise SourceError(
                f"{topic}: the checkpoint {checkpoint} belongs to another replay (begun without only=…), or has lost "
                f"its selection: restore {self._facts}, or give this replay a checkpoint of its own"
            )

    def keep(self, facts: JournalFacts, positions: DataFrame, digest: str) -> None:
        from pyspark.sql import functions as F  # noqa: N812

        positions.write.mode("overwrite").parquet(self._positions)
        # Write the facts last, because they mark the table of positions as complete.
        text = json.dumps({**asdict(facts), "digest": digest})
        self._spark.range(1, numPartitions=1).select(F.lit(text).alias("facts")).write.mode("overwrite").parquet(
            self._facts
        )

    def positions(self) -> DataFrame:
        return self._spark.read.parquet(literal(self._positions))


def _islands(positions: DataFrame) -> tuple[dict[int, list[Span]], int]:
    """Return the ranges around positions, and the number of positions."""
    from pyspark.sql import functions as F  # noqa: N812

    parts = (
        positions.groupBy("partition", F.floor(F.col("offset") / F.lit(GAP)).alias("part"))
        .agg(F.min("offset").alias("first"), F.max("offset").alias("last"), F.count("*").alias("rows"))
        .collect()
    )
    islands = islands_of(((row["partition"], row["first"], row["last"]) for row in parts), GAP)
    return islands, sum(row["rows"] for row in parts)
