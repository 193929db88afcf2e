"""The query of Spark that a replay with a checkpoint and a stream are: batches of positions, one after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from lanes_spark.checkpoint import without_takeover
from lanes_spark.driver.batch import BatchRun
from lanes_spark.driver.prepared import Prepared
from lanes_spark.driver.results_folder import ResultsFolder
from lanes_spark.failures import crossing
from lanes_spark.positions import Span, clipped

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["begin_query"]


def begin_query(
    spark: SparkSession,
    run: BatchRun,
    prepared: Prepared,
    checkpoint: str,
    *,
    rows_per_batch: int,
    done: Callable[[Mapping[int, Span]], None],
    live: str | None = None,
    interval: float = 0.0,
) -> StreamingQuery:
    """Begin it. ``done`` is called after each batch, with the positions that it had of every partition. Raises
    ``ConfigError`` where results are to go to a folder that has those of another checkpoint, or to another one than the
    checkpoint was begun with.

    ``live``: where it asks what there is by now, see ``LiveEnds``, every ``interval`` seconds while there is nothing
    new; None = it ends where ``prepared`` says.
    """
    from lanes_spark.driver.ranges import NAME, BatchRanges, ranges_options

    folder = ResultsFolder(spark, run.results_to, checkpoint)
    folder.check()
    spark.dataSource.register(BatchRanges)
    options = ranges_options(
        topic=run.source.topic,
        replay=prepared.identity,
        unnamed=prepared.unnamed,
        spans=prepared.places,
        starts=prepared.starts,
        cap=rows_per_batch,
        eras=run.source.eras,
        islands=prepared.islands,
        fixed=prepared.fixed,
        live=live,
        begin=prepared.selection.starts(prepared.spans.by_partition),
    )

    def handle(ranges: DataFrame, batch: int) -> None:
        found = {row["partition"]: (row["start"], row["stop"]) for row in ranges.collect()}
        taken = clipped(found, prepared.islands)
        # Spark calls this through its JVM.
        with crossing():
            # Also where nothing is taken: of a batch that is done, the folder is known.
            folder.take()
            if taken:
                run.run(spark, taken, batch=batch)
                done(found)

    writer = spark.readStream.format(NAME).options(**options).load().writeStream
    if live is None:
        writer = writer.trigger(availableNow=True)
    else:
        writer = writer.trigger(processingTime=f"{round(interval * 1_000)} milliseconds")
    with without_takeover(spark):
        return writer.option("checkpointLocation", checkpoint).foreachBatch(handle).start()
