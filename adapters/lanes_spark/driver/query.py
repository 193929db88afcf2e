"""Runs the Spark query of a replay with a checkpoint, or of a stream. A query is a sequence of batches.

The query itself reads no messages. Each row of the query's source is the range of positions of one partition in a
batch. Spark logs the ranges before the batch runs, and then the end of the batch. A killed replay therefore repeats
exactly the logged ranges of its unfinished batch.
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
"""Name of the source in Spark."""

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
    """Begin the query. Does not wait for the first batch.

    Args:
        spark: Session that runs the query.
        run: The replay or stream.
        checkpoint: Folder in which Spark logs the batches.
        done: Function that receives the ranges of each finished batch with positions to handle.
        live: Path of an ``OffsetServer`` for a stream; "" = a replay, which ends with the last position of its scope.
        interval: Seconds between two requests to the server.

    Returns:
        The running query.

    Raises:
        ConfigError: The folder for results does not fit the checkpoint, see ``ResultsFolder.check``.
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
        # Spark calls ``handle`` through the JVM, which passes on only the text of an error.
        with crossing():
            # Check the folder for results even for a batch without positions.
            folder.take()
            run.tracker.reach({partition: first for partition, (first, _) in found.items()})
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
    """The options of the source of batch ranges.

    Attributes:
        topic: Topic name.
        replay: Identity of the replay, which the checkpoint stores.
        spans: Ranges of positions, by partition.
        starts: First positions of a new checkpoint, for partitions whose first position may differ from ``spans``.
        cap: Maximum number of positions of a batch.
        eras: Changes of the number of partitions.
        islands: The only ranges to read, by partition; empty = all positions.
        fixed: Whether an additional partition raises an error after the start.
        live: Path of an ``OffsetServer`` with the current ``spans``; "" = ``spans`` never change.
        begin: Positions of ``from_``, by partition; empty = ``from_`` is None or a time.
        unnamed: Identity of the same replay over a topic without an id; "" = the topic has no id.
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
        """Return the options as text, because Spark passes only text to its Python process."""
        return {_OPTION: base64.b64encode(pickle.dumps(self)).decode()}


class BatchRanges(DataSource):
    """A Spark data source of batch ranges, with ``RangeOptions`` as its options."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        self.options = options

    @classmethod
    def name(cls) -> str:
        """Return ``NAME``."""
        return NAME

    def schema(self) -> str:
        """Return the columns of a range: the partition, its first position, and the end, exclusive."""
        return "partition int, start long, stop long"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 (as Spark calls it)
        """Return the reader of the ranges."""
        return _Reader(self.options)


class _Reader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: Mapping[str, str]) -> None:
        self._given: RangeOptions = pickle.loads(base64.b64decode(options[_OPTION]))
        self._spans = self._given.spans

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Do nothing, because the replay has read the end of each partition before the query."""

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
            # Begin a new partition at its first position.
            first = before.get(partition, self._spans[partition][0] if partition in self._spans else stop)
            ranges.append((partition, first, stop))
        # The progress needs the positions of all partitions, including partitions without rows in this batch.
        return [InputPartition(ranges)] if any(first < stop for _, first, stop in ranges) else []

    def read(self, partition: InputPartition) -> Iterator[tuple[int, int, int]]:
        yield from partition.value

    def _check(self, at: Positions) -> None:
        # The source may have lost positions outside the selection. If the source ends below the next selected position,
        # it must still reach the replay's own position.
        ends = {partition: span[1] for partition, span in self._spans.items()}
        begun = {number: max(one, self._given.begin.get(number, 0)) for number, one in at.items()}
        wanted = next_wanted(begun, self._given.islands)
        reached = {number: max(one, min(wanted[number], ends.get(number, one))) for number, one in at.items()}
        check_start(self._given.topic, reached, self._spans)
        added = sorted(set(self._spans) - set(at))
        if self._given.fixed and added:
            begin = {**dict(sorted(at.items())), **dict.fromkeys(added, 0)}
            raise SourceError(
                f"{self._given.topic}: partition {added[0]} is new since this replay was begun, so keys have moved "
                "and earlier messages must be handled first. Continue with another checkpoint, aligned=False, "
                f"from_={begin} and eras=[…] with the first position of each old partition after the change"
            )

    def _offset(self, positions: Mapping[int, int]) -> dict[str, Any]:
        return {
            "replay": self._given.replay,
            "positions": {str(number): at for number, at in sorted(positions.items())},
        }

    def _positions(self, offset: Any, done: Positions | None = None) -> dict[int, int]:
        """Return the positions in an offset of the query.

        The query has handled all messages below ``done``. Without ``done``, the query has handled all messages below
        the returned positions.
        """
        topic = self._given.topic
        # Spark may pass the offset of another query's checkpoint.
        if not isinstance(offset, dict) or not isinstance(offset.get("positions"), dict):
            raise SourceError(
                f"{topic}: the checkpoint belongs to a query that is not a replay; give this replay its own checkpoint"
            )
        at = {int(number): position for number, position in offset["positions"].items()}
        if self._given.unnamed and offset.get("replay") == self._given.unnamed:
            # Positions do not name their topic. In a copied or recreated topic, the same positions belong to other
            # messages.
            raise SourceError(
                f"{topic}: the checkpoint has no topic id, because its replay began with a broker before 2.8 or over a "
                "table. The topic now has an id and may be another topic. For the same topic, for example after an "
                f"upgrade, use another checkpoint with from_={at if done is None else done}; for another topic, begin "
                "again with another checkpoint"
            )
        if offset.get("replay") != self._given.replay:
            raise SourceError(
                f"{topic}: the checkpoint belongs to another replay (other topic, selection or eras, or a topic that "
                "was recreated since); give this replay its own checkpoint"
            )
        return at
