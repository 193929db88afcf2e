"""The Spark query of a replay with a checkpoint and of a stream: batches of positions, one after another.

The query reads no messages: a row of its source is the range of positions that a batch takes of one partition. Spark
logs the ranges of a batch before it runs, and that it is done afterwards. A killed replay therefore continues with
exactly the ranges that were logged.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

from lanes.errors import SourceError
from lanes_spark.checkpoint import without_takeover
from lanes_spark.driver.offset_server import ask_offsets
from lanes_spark.driver.results_folder import ResultsFolder
from lanes_spark.driver.run import SparkRun
from lanes_spark.failures import crossing
from lanes_spark.plan import Eras
from lanes_spark.positions import Islands, Positions, Span, check_start, clipped, next_positions, next_wanted

NAME: Final = "lanes_batch_ranges"
"""Name under which Spark knows the source."""

_OPTION: Final = "lanes"


def begin_query(
    spark: SparkSession,
    run: SparkRun,
    checkpoint: str,
    *,
    done: Callable[[Mapping[int, Span]], None],
    live: str = "",
    interval: float = 0.0,
) -> StreamingQuery:
    """Begin the query. ``done`` is called after each batch with its ranges.

    ``live`` is the path of an ``OffsetServer`` that is asked every ``interval`` seconds; "" means that the query ends
    with the scope. Raises ``ConfigError`` if the folder for results belongs to another checkpoint.
    """
    scope = run.scope
    folder = ResultsFolder(spark, run.batches.results_to, checkpoint)
    folder.check()
    spark.dataSource.register(BatchRanges)
    options = RangeOptions(
        topic=scope.source.topic,
        replay=scope.identity,
        unnamed=scope.unnamed,
        spans=scope.places,
        starts=scope.starts,
        cap=run.rows_per_batch,
        eras=[dict(era) for era in scope.source.eras],
        islands=scope.islands,
        fixed=scope.fixed,
        live=live,
        begin=scope.selection.starts(scope.spans.by_partition),
    )

    def handle(ranges: DataFrame, batch: int) -> None:
        found = {row["partition"]: (row["start"], row["stop"]) for row in ranges.collect()}
        taken = clipped(found, scope.islands)
        # Spark calls this through its JVM.
        with crossing():
            # Needed for an empty batch too: a checkpoint with a finished batch has a known folder.
            folder.take()
            if taken:
                run.batches.run(spark, taken, batch=batch)
                done(found)

    writer = spark.readStream.format(NAME).options(**options.encoded()).load().writeStream
    if live:
        writer = writer.trigger(processingTime=f"{round(interval * 1_000)} milliseconds")
    else:
        writer = writer.trigger(availableNow=True)
    with without_takeover(spark):
        return writer.option("checkpointLocation", checkpoint).foreachBatch(handle).start()


@dataclass(frozen=True, kw_only=True)
class RangeOptions:
    """The options of the source.

    Attributes:
        replay: Identity of the replay, which its checkpoint keeps.
        spans: Ranges of positions by partition.
        starts: First positions of a new checkpoint, where they differ from those of ``spans``.
        cap: Most positions of a batch.
        islands: The only positions that are read; empty means all.
        fixed: Whether a new partition is refused.
        live: Path of an ``OffsetServer`` that tells the current ``spans``; "" means that they stay.
        begin: Positions before which nothing is selected.
        unnamed: Identity if the topic had no id; "" if it has none.
    """

    topic: str
    replay: str
    spans: Mapping[int, Span]
    starts: Positions
    cap: int
    eras: Eras
    islands: Islands = field(default_factory=dict)
    fixed: bool = False
    live: str = ""
    begin: Positions = field(default_factory=dict)
    unnamed: str = ""

    def encoded(self) -> dict[str, str]:
        """Return the options as Spark passes them to its Python process: text."""
        return {_OPTION: base64.b64encode(pickle.dumps(self)).decode()}


class BatchRanges(DataSource):
    """The source of batch ranges, as Spark wants one; its options are ``RangeOptions``."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        self.options = options

    @classmethod
    def name(cls) -> str:
        """Return ``NAME``."""
        return NAME

    def schema(self) -> str:
        """Return the columns: a range of each partition, ``stop`` exclusive."""
        return "partition int, start long, stop long"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 (as Spark calls it)
        """Return the reader of the ranges."""
        return _Reader(self.options)


class _Reader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: Mapping[str, str]) -> None:
        self._given: RangeOptions = pickle.loads(base64.b64decode(options[_OPTION]))
        self._spans = self._given.spans

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Do nothing: the ends were read before the query began."""

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxRows(self._given.cap)

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        firsts = {partition: first for partition, (first, _) in self._spans.items()}
        return self._offset({**firsts, **self._given.starts})

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        at = self._positions(start)
        if self._given.live:
            spans = ask_offsets(self._given.live, at)
            if spans is None:
                return start
            self._spans = spans
        self._check(at)
        cap = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        return self._offset(next_positions(at, self._spans, cap, self._given.eras, self._given.islands))

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        return self._offset({partition: end for partition, (_, end) in self._spans.items()})

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        before = self._positions(start)
        until = self._positions(end, before)
        ranges = []
        for partition, stop in until.items():
            # A new partition begins with its first position.
            first = before.get(partition, self._spans[partition][0] if partition in self._spans else stop)
            ranges.append((partition, first, stop))
        # Partitions without rows in this batch are listed too: their position is part of the progress.
        return [InputPartition(ranges)] if any(first < stop for _, first, stop in ranges) else []

    def read(self, partition: InputPartition) -> Iterator[tuple[int, int, int]]:
        yield from partition.value

    def _check(self, at: Positions) -> None:
        # Positions that are not selected may be gone. A source that ends before the next selected position must have
        # reached the replay's own.
        ends = {partition: span[1] for partition, span in self._spans.items()}
        begun = {number: max(one, self._given.begin.get(number, 0)) for number, one in at.items()}
        wanted = next_wanted(begun, self._given.islands)
        reached = {number: max(one, min(wanted[number], ends.get(number, one))) for number, one in at.items()}
        check_start(self._given.topic, reached, self._spans)
        added = sorted(set(self._spans) - set(at))
        if self._given.fixed and added:
            begin = {**dict(sorted(at.items())), **dict.fromkeys(added, 0)}
            raise SourceError(
                f"{self._given.topic}: partition {added[0]} is new since this replay was begun, so keys have moved and "
                "earlier messages have to be handled first; go on with another checkpoint, aligned=False, "
                f"from_={begin} and eras=[…], the positions from which on there were more partitions"
            )

    def _offset(self, positions: Mapping[int, int]) -> dict[str, Any]:
        return {
            "replay": self._given.replay,
            "positions": {str(number): at for number, at in sorted(positions.items())},
        }

    def _positions(self, offset: Any, done: Positions | None = None) -> dict[int, int]:
        """Return the positions of an offset. Messages before ``done`` are handled; None means those of the offset."""
        topic = self._given.topic
        # Spark passes the offset of any checkpoint, of any query.
        if not isinstance(offset, dict) or not isinstance(offset.get("positions"), dict):
            raise SourceError(
                f"{topic}: the checkpoint is of another query, which is no replay; give this one a checkpoint of its "
                "own"
            )
        at = {int(number): position for number, position in offset["positions"].items()}
        if self._given.unnamed and offset.get("replay") == self._given.unnamed:
            # Positions do not name their topic: in a copied or recreated one they are of other messages.
            raise SourceError(
                f"{topic}: the checkpoint was begun without a topic id, by brokers before 2.8 or as a table, but the "
                "topic has one now and may be another one. If it is the same one, as after an upgrade, go on with "
                f"another checkpoint and from_={at if done is None else done}; else begin again with another"
            )
        if offset.get("replay") != self._given.replay:
            raise SourceError(
                f"{topic}: the checkpoint is of another replay (other topic, selection or eras, or a topic that was "
                "recreated since); give this one a checkpoint of its own"
            )
        return at
