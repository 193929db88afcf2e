"""Which positions of a topic a journal selects: what was dead-lettered, given up, or never finished.

The journal says where a message was, not what it was. So its positions are joined to the source that has the messages;
where they are far from each other, what lies between is not read.
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

__all__ = ["SMALL", "Chosen", "JournalFacts", "JournalSelection", "Of"]

log = logging.getLogger("lanes")

Of = Literal["dead_lettered", "abandoned", "unfinished"]
"""What of a journal is selected; see ``JournalSelection``."""

GAP: Final = 200_000
"""Positions that are sooner read than left out by beginning another batch."""

SMALL: Final = 1_000_000
"""Positions that every executor can have in memory."""

_TERMS: Final = 256
"""Ranges that a condition names, at most."""


@dataclass(frozen=True, kw_only=True)
class JournalFacts:
    """What a journal has selected, before anything else selects. ``of`` and ``topic``: as asked. ``runs`` that speak of
    the topic. ``positions``: how many of it are selected. ``doubts``: a sentence for each reason why the journal may
    not say everything; empty when it is whole."""

    of: Of
    topic: str
    runs: int
    positions: int
    doubts: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class JournalSelection:
    """Positions that a journal names; ``replay(only=…)`` handles no others.

    ``path``: the folder that ``lanes.run(journal=…)`` has written, or several; all runs in it are taken together, so it
    should be of one consumer. ``topic``: what they call it there, None = as the source does. ``of``:

    - ``"dead_lettered"``: its dead letter was confirmed, in any run, whatever became of it later.
    - ``"unfinished"``: delivered, and in no run handled to the end, dead-lettered, acknowledged, or below a position
      that was committed. What an assignment finished after it had ended does not count.
    - ``"abandoned"``: the part of these that a run has given up in order: behind a blocked key, at the end of a drain,
      with a partition that it lost. What a process held that was killed is ``"unfinished"`` alone.

    What was published and never delivered to anybody is in no journal.

    Raises ``ConfigError`` for what is none of this.
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
        """The folders."""
        return [self.path] if isinstance(self.path, str) else list(self.path)

    def choose(self, spark: SparkSession, topic: str, checkpoint: str | None, incarnation: str = "") -> Chosen:
        """The positions, which stay as they are even if the journal goes on: in memory until ``Chosen.close``, or in
        the folder of a ``checkpoint``, where a replay that goes on finds them. ``incarnation``: of the source, "" = it
        cannot be told. Blocks while Spark reads the journal.

        Raises ``ConfigError`` for what is no journal, or none of this topic; ``SourceError`` for a checkpoint of
        another selection, or that has lost its own, and for a topic that was made anew within the journal.
        """
        # Who says what it is called there, says that it is the same.
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
            log.warning("%s: the journal may not say everything: %s; to be sure, leave out only=…", topic, doubt)
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
    """``positions``: the columns partition and offset, each once. ``islands``: where they are. ``digest``: tells
    selections apart."""

    positions: DataFrame = field(repr=False)
    islands: Islands
    facts: JournalFacts
    digest: str

    def small(self, cap: int | None) -> bool:
        """Whether the positions of a batch of at most ``cap`` fit into the memory of every executor."""
        return min(self.facts.positions, self.facts.positions if cap is None else cap) <= SMALL

    def of_batch(self, ranges: dict[int, Span]) -> DataFrame:
        """The positions in these ranges. Reads nothing yet."""
        return self.positions.where(within(ranges))

    def near(self, rows: DataFrame, ranges: dict[int, Span]) -> DataFrame:
        """The rows of the islands in these ranges, asked so that files can leave out the others; reads nothing yet."""
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
        """Those of the rows that are chosen, in their order; ``ranges``: where they are. Reads nothing yet."""
        from pyspark.sql import functions as F  # noqa: N812

        positions = self.of_batch(ranges)
        if self.small(wanted_count(ranges, self.islands)):
            # No shuffle: the rows stay where they are, and in their order.
            positions = F.broadcast(positions)
        return rows.join(positions, ["partition", "offset"], "left_semi")

    def count(self, ranges: dict[int, Span]) -> int:
        """How many positions are chosen in these ranges. Blocks."""
        wanted = clipped(ranges, self.islands)
        return self.of_batch(wanted).count() if wanted else 0

    def close(self) -> None:
        """Forget them. Idempotent."""
        self.positions.unpersist()


class _Kept:
    """What was selected, as a replay has found it when it began, in two tables of its checkpoint."""

    def __init__(self, spark: SparkSession, folder: str) -> None:
        self._spark = spark
        self._positions, self._facts = f"{folder}/positions", f"{folder}/facts"

    def facts(self, digest: str, topic: str) -> JournalFacts | None:
        """None where there is none, or where it was not written to the end. Raises ``SourceError`` for another one."""
        from pyspark.errors import AnalysisException

        try:
            row = self._spark.read.parquet(literal(self._facts)).first()
        except AnalysisException as error:
            # Nothing else: a choice that is there must not be made anew, for some of it is done.
            if error.getCondition() not in ("PATH_NOT_FOUND", "UNABLE_TO_INFER_SCHEMA"):
                raise
            return None
        if row is None:
            return None
        found = json.loads(row["facts"])
        if found.pop("digest") != digest:
            raise SourceError(
                f"{topic}: the checkpoint is of another replay (it was begun with another only=…): give this one a "
                "checkpoint of its own"
            )
        return JournalFacts(**{**found, "doubts": tuple(found["doubts"])})

    def check_new(self, checkpoint: str, topic: str) -> None:
        """Raise ``SourceError`` where the checkpoint is in use without a choice: with another one it would go on in the
        middle of that, and what lies in front would never be handled."""
        if query_of(self._spark, checkpoint) is not None:
            raise SourceError(
                f"{topic}: the checkpoint {checkpoint} is of another replay (it was begun without only=…), or what was "
                f"selected is gone from it: restore {self._facts}, or give this one a checkpoint of its own"
            )

    def keep(self, facts: JournalFacts, positions: DataFrame, digest: str) -> None:
        from pyspark.sql import functions as F  # noqa: N812

        positions.write.mode("overwrite").parquet(self._positions)
        # Last: it says that the other one is whole.
        text = json.dumps({**asdict(facts), "digest": digest})
        self._spark.range(1, numPartitions=1).select(F.lit(text).alias("facts")).write.mode("overwrite").parquet(
            self._facts
        )

    def positions(self) -> DataFrame:
        return self._spark.read.parquet(literal(self._positions))


def _islands(positions: DataFrame) -> tuple[dict[int, list[Span]], int]:
    """Where they are, and how many."""
    from pyspark.sql import functions as F  # noqa: N812

    parts = (
        positions.groupBy("partition", F.floor(F.col("offset") / F.lit(GAP)).alias("part"))
        .agg(F.min("offset").alias("first"), F.max("offset").alias("last"), F.count("*").alias("rows"))
        .collect()
    )
    islands = islands_of(((row["partition"], row["first"], row["last"]) for row in parts), GAP)
    return islands, sum(row["rows"] for row in parts)
