"""Runs one batch of a replay. Spark tasks handle the rows of ranges of positions."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, cast

from lanes.dead_letter import error_text
from lanes.errors import ConfigError, SourceError
from lanes_spark.driver.progress import ProgressTracker
from lanes_spark.driver.scope import ReplayScope
from lanes_spark.driver.selection import select_slots
from lanes_spark.failures import crossing
from lanes_spark.plan import era_column
from lanes_spark.positions import Span, check_incarnation, clipped
from lanes_spark.task.job import TaskJob, begin
from lanes_spark.task.journal import check_reached, member_of_attempt, shared
from lanes_spark.task.progress import Address, sender
from lanes_spark.task.results import COUNTS, output_schema
from lanes_spark.task.task import run_task

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_PATIENCE: Final = 180.0
"""Maximum time in seconds to wait for the topic's id after a batch."""

_PAUSE: Final = 1.0
"""Seconds between two requests for the topic's id."""


@dataclass(frozen=True, kw_only=True)
class BatchRun:
    """Runs the batches of one replay or stream.

    Attributes:
        scope: Positions to handle, and their plan.
        job: Handler and its resources.
        payload: Pickled job, for the workers.
        results_to: Folder for rows that handlers return; None = the job has no results.
        tracker: Counter of the progress.
        given_up: Event that a caller sets to end the run at once. After this event the run does not wait for the
            brokers.
    """

    scope: ReplayScope
    job: TaskJob
    payload: bytes = field(repr=False)
    results_to: str | None
    tracker: ProgressTracker
    given_up: threading.Event = field(default_factory=threading.Event, repr=False)

    def run(self, spark: SparkSession, ranges: Mapping[int, Span], *, batch: int | None) -> None:
        """Handle the rows of these positions. Blocks until the tasks have handled all rows.

        Args:
            spark: Session whose executors run the handler.
            ranges: Positions by partition, the end exclusive.
            batch: Number of the batch in its checkpoint; None without a checkpoint.

        Raises:
            ConfigError: The driver cannot write to the folder of the journal, or the source is not aligned.
            SourceError: The topic was recreated, or its brokers did not answer for 180 s. The batch is unfinished.
        """
        from pyspark.sql import Observation
        from pyspark.sql import functions as F  # noqa: N812
        from pyspark.sql.pandas.types import from_arrow_schema

        scope, job, counts = self.scope, self.job, self.tracker.counts
        # A checkpoint may continue at a position below ``from_``.
        ranges = clipped(scope.selection.places(ranges), scope.islands)
        if not ranges:
            return
        rows = self._arranged(self._selected(scope.source.rows(spark, ranges, scope.spans.incarnation), ranges))
        schema = from_arrow_schema(output_schema(job.results))
        observed = Observation()
        address, number = self.tracker.begin_batch(), counts.batches
        in_task = functools.partial(_in_task, name=job.name, payload=self.payload, address=address, number=number)
        handled = rows.mapInArrow(in_task, schema).observe(observed, *[F.sum(name).alias(name) for name in COUNTS])
        with shared(job.journal, job.name):
            if job.results is None:
                handled.write.format("noop").mode("overwrite").save()
            else:
                path = self.results_to if batch is None else f"{self.results_to}/batch={batch}"
                # A repeated batch replaces the rows of its first run.
                mode = "errorifexists" if batch is None else "overwrite"
                handled.where("result IS NOT NULL").select("result.*").write.mode(mode).parquet(str(path))
        if scope.spans.incarnation:
            self._check_incarnation(spark)
        counts.batches += 1
        for name, count in observed.get.items():
            counts.by_name[name] += count or 0
        if scope.chosen is not None and not scope.selection.by_row:
            counts.missing += scope.chosen.count(ranges) - (observed.get["delivered"] or 0)

    def _check_incarnation(self, spark: SparkSession) -> None:
        """Raise ``SourceError`` if a user recreated the topic during the batch. Tasks cannot detect this.

        During an outage of the brokers, the check waits up to ``_PATIENCE`` seconds, because a failure repeats the
        whole batch. After the wait, the check still detects a recreation, because Kafka never reuses a topic id.
        """
        source = self.scope.source
        until = time.monotonic() + _PATIENCE
        while True:
            try:
                now = source.spans(spark).incarnation
            except SourceError as error:
                if not error.retryable or time.monotonic() > until or self.given_up.wait(_PAUSE):
                    raise
            else:
                check_incarnation(source.topic, self.scope.spans.incarnation, now, read=True)
                return

    def _selected(self, rows: DataFrame, ranges: dict[int, Span]) -> DataFrame:
        from pyspark.sql import functions as F  # noqa: N812

        selection, chosen = self.scope.selection, self.scope.chosen
        if chosen is not None:
            rows = chosen.near(rows, ranges)
        if selection.keys is not None:
            rows = rows.where(_key_in(rows, selection.keys))
        if isinstance(selection.start, datetime):
            rows = rows.where(F.col("timestamp") >= F.lit(selection.start))
        if isinstance(selection.end, datetime):
            rows = rows.where(F.col("timestamp") < F.lit(selection.end))
        # Put conditions on the table's own columns before the casts, so that Spark can skip files.
        rows = rows.withColumns({name: F.col(name).cast("binary") for name in ("key", "value")})
        rows = rows.withColumns({"partition": F.col("partition").cast("int"), "offset": F.col("offset").cast("bigint")})
        if chosen is not None:
            rows = chosen.join(rows, ranges)
        if selection.slots is not None:
            rows = rows.mapInArrow(functools.partial(select_slots, slots=selection.slots), rows.schema)
        return rows

    def _arranged(self, rows: DataFrame) -> DataFrame:
        from pyspark.sql import functions as F  # noqa: N812

        plan, source = self.scope.plan, self.scope.source
        era = era_column(source.eras)
        if plan.kind == "aligned":
            source.check_aligned(rows)
        if era is not None and plan.kind == "reshard":
            rows = rows.withColumn("era", F.expr(era))
        columns = rows.columns
        if plan.bucket is not None and plan.tasks is not None:
            rows = rows.withColumn("bucket", F.expr(plan.bucket)).repartitionById(plan.tasks, "bucket")
        if plan.sort:
            rows = rows.sortWithinPartitions(*plan.sort)
        return rows.select(*columns)


def _in_task(
    batches: Iterator[Any], *, name: str, payload: bytes, address: Address | None, number: int
) -> Iterator[Any]:
    """Run one task of a batch in Spark's worker, and report its progress to ``address``."""
    from pyspark import TaskContext

    with crossing():
        job = begin(name, lambda: _loaded(payload))
        check_reached(job.journal, name)
        task = TaskContext.get()
        assert task is not None, "only a task may call this function"
        with sender(address, number, task.partitionId(), task.attemptNumber()) as tell:
            yield from run_task(batches, job, member=member_of_attempt(), tell=tell)


def pickled(job: TaskJob) -> bytes:
    """Pickle a job for the workers. Raises ``ConfigError`` if ``pickle`` refuses the job."""
    from pyspark import cloudpickle

    try:
        payload: bytes = cast(Any, cloudpickle).dumps(job)
    except Exception as error:
        raise ConfigError(
            f"the handler, or an object that it uses, cannot be sent to the workers ({type(error).__name__}: "
            f"{error_text(error)}). Create clients, locks and open files in setup=…, in variables of the module"
        ) from error
    return payload


def _loaded(payload: bytes) -> TaskJob:
    from pyspark import cloudpickle

    try:
        job: TaskJob = cloudpickle.loads(payload)
    except Exception as error:
        raise ConfigError(
            f"the handler, or an object that it uses, cannot be loaded by the workers' Python {sys.executable} "
            f"({type(error).__name__}: {error_text(error)}). Send the modules by spark.submit.pyFiles, or install "
            "them for that Python"
        ) from error
    return job


def _key_in(rows: DataFrame, keys: tuple[bytes, ...]) -> Column:
    from pyspark.sql import functions as F  # noqa: N812

    if rows.schema["key"].dataType.simpleString() == "string":
        # Every key in a string column is valid UTF-8.
        texts = [key.decode(errors="replace") for key in keys]
        return F.col("key").isin([text for text, key in zip(texts, keys, strict=True) if text.encode() == key])
    return F.col("key").isin([bytearray(key) for key in keys])
