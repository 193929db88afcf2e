"""Positions that a journal selects: messages that were dead-lettered, given up, or never finished.

A journal has positions and no messages, so its positions are joined to the source. Where they are far apart, messages
between them are not read.
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
"""Gap of positions that costs less to read than another batch."""

SMALL: Final = 1_000_000
"""Most positions that every executor holds in memory."""

_TERMS: Final = 256
"""Most ranges of one condition."""


@dataclass(frozen=True, kw_only=True)
class JournalFacts:
    """Facts about the positions that a journal selects, before other selections.

    Attributes:
        of: Selected state, see ``JournalSelection``.
        topic: Topic name in the journal.
        runs: Number of runs in the journal that read the topic.
        positions: Number of selected positions.
        doubts: One sentence for each reason why the journal may be incomplete; empty for a whole one.
    """

    of: Of
    topic: str
    runs: int
    positions: int
    doubts: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class JournalSelection:
    """Positions that a journal names; ``replay(only=…)`` handles no others.

    All runs in the folders count together, so the folders should belong to one consumer. A message that was never
    delivered is in no journal.

    Args:
        path: Folder that ``lanes.run(journal=…)`` has written, or several.
        of: State of the selected messages. ``"dead_lettered"``: its dead letter was confirmed, in any run.
            ``"unfinished"``: it was delivered, and no run handled it, dead-lettered it, acknowledged it or committed
            past it. Work that finished after its assignment ended does not count. ``"abandoned"``: a run gave the
            unfinished message up in order: behind a blocked key, at the end of a drain, or with a lost partition. A
            message of a killed process is only unfinished.
        topic: Topic name in the journal. Default: that of the source.

    Raises:
        ConfigError: An argument is not one of these.
    """

    path: str | Sequence[str]
    of: Of
    topic: str | None = None

    def __post_init__(self) -> None:
        if self.of not in get_args(Of):
            raise ConfigError(f"of={self.of!r} is unknown: use {', '.join(map(repr, get_args(Of)))}")
        if not self.paths or not all(isinstance(path, str) and path for path in self.paths):
            raise ConfigError(f"path={self.path!r}: give the folder that lanes.run(journal=…) has written to")
        if self.topic == "":
            raise ConfigError("topic is empty: name it as the journal does, or leave it out")

    @property
    def paths(self) -> list[str]:
        """Folders of the journal."""
        return [self.path] if isinstance(self.path, str) else list(self.path)

    def choose(self, spark: SparkSession, topic: str, checkpoint: str | None, incarnation: str = "") -> Chosen:
        """Read the selected positions once; later rows of the journal do not change them. Blocks.

        Args:
            spark: Session that reads the journal.
            topic: Topic name of the source.
            checkpoint: Folder in which the positions are kept for a continued replay. Without one they stay in
                memory until ``Chosen.close``.
            incarnation: Id of the topic; "" if it is unknown.

        Returns:
            The selected positions.

        Raises:
            ConfigError: The folder has no journal, or none of this topic.
            SourceError: The checkpoint has another selection or has lost its own, or the topic was recreated within
                the journal.
        """
        # A caller that names the topic vouches that it is the same.
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
            log.warning("%s: the journal may be incomplete (%s); to be sure, leave out only=…", topic, doubt)
        islands, count = _islands(positions)
        if checkpoint is not None and count != facts.positions:
            raise SourceError(
                f"{topic}: {facts.positions:,} positions were selected, and {count:,} of them are there: restore the "
                "folder selected of the checkpoint, or begin again with another one"
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
        positions: Rows of partition and offset, each once.
        islands: Ranges around them.
        facts: Facts about the selection.
        digest: Digest that differs between selections.
    """

    positions: DataFrame = field(repr=False)
    islands: Islands
    facts: JournalFacts
    digest: str

    def small(self, cap: int | None) -> bool:
        """Return whether the positions of a batch of at most ``cap`` fit into every executor's memory."""
        return self.facts.positions <= SMALL or (cap is not None and cap <= SMALL)

    def near(self, rows: DataFrame, ranges: dict[int, Span]) -> DataFrame:
        """Return the rows of islands in these ranges, so that files can skip the others. Reads nothing yet."""
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
        """Return the chosen ones of these rows, in their order; all lie in ``ranges``. Reads nothing yet."""
        from pyspark.sql import functions as F  # noqa: N812

        positions = self.positions.where(within(ranges))
        if self.small(wanted_count(ranges, self.islands)):
            # No shuffle: the rows stay where they are, and in their order.
            positions = F.broadcast(positions)
        return rows.join(positions, ["partition", "offset"], "left_semi")

    def count(self, ranges: dict[int, Span]) -> int:
        """Count the chosen positions in these ranges. Blocks."""
        wanted = clipped(ranges, self.islands)
        return self.positions.where(within(wanted)).count() if wanted else 0

    def close(self) -> None:
        """Free the memory of the positions. Idempotent."""
        self.positions.unpersist()


class _Kept:
    """The selection of a replay's beginning, in two tables of its checkpoint."""

    def __init__(self, spark: SparkSession, folder: str) -> None:
        self._spark = spark
        self._positions, self._facts = f"{folder}/positions", f"{folder}/facts"

    def facts(self, digest: str, topic: str) -> JournalFacts | None:
        """Read the facts; None without complete ones. Raises ``SourceError`` for another selection."""
        from pyspark.errors import AnalysisException

        try:
            row = self._spark.read.parquet(literal(self._facts)).first()
        except AnalysisException as error:
            # Only these: an existing selection must not be repeated, because part of it is handled.
            if error.getCondition() not in ("PATH_NOT_FOUND", "UNABLE_TO_INFER_SCHEMA"):
                raise
            return None
        if row is None:
            return None
        found = json.loads(row["facts"])
        if found.pop("digest") != digest:
            raise SourceError(
                f"{topic}: the checkpoint is of another replay (begun with another only=…); give this one a "
                "checkpoint of its own"
            )
        return JournalFacts(**{**found, "doubts": tuple(found["doubts"])})

    def check_new(self, checkpoint: str, topic: str) -> None:
        """Raise ``SourceError`` if the checkpoint was begun without a selection.

        The replay would continue in the middle of the new one and never handle the messages before.
        """
        if query_of(self._spark, checkpoint) is not None:
            raise SourceError(
                f"{topic}: the checkpoint {checkpoint} is of another replay (begun without only=…), or has lost its "
                f"selection: restore {self._facts}, or give this one a checkpoint of its own"
            )

    def keep(self, facts: JournalFacts, positions: DataFrame, digest: str) -> None:
        from pyspark.sql import functions as F  # noqa: N812

        positions.write.mode("overwrite").parquet(self._positions)
        # Last: it marks the other table as complete.
        text = json.dumps({**asdict(facts), "digest": digest})
        self._spark.range(1, numPartitions=1).select(F.lit(text).alias("facts")).write.mode("overwrite").parquet(
            self._facts
        )

    def positions(self) -> DataFrame:
        return self._spark.read.parquet(literal(self._positions))


def _islands(positions: DataFrame) -> tuple[dict[int, list[Span]], int]:
    """Return the ranges around positions, and their number."""
    from pyspark.sql import functions as F  # noqa: N812

    parts = (
        positions.groupBy("partition", F.floor(F.col("offset") / F.lit(GAP)).alias("part"))
        .agg(F.min("offset").alias("first"), F.max("offset").alias("last"), F.count("*").alias("rows"))
        .collect()
    )
    islands = islands_of(((row["partition"], row["first"], row["last"]) for row in parts), GAP)
    return islands, sum(row["rows"] for row in parts)
