"""One batch of a replay: the rows of some positions, through the tasks of Spark."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Protocol

from lanes.dead_letter import error_text
from lanes.errors import ConfigError, SourceError
from lanes_spark.driver.progress import TaskReports
from lanes_spark.driver.selection import Selection, select_slots
from lanes_spark.failures import crossing
from lanes_spark.plan import Eras, Plan, era_column
from lanes_spark.positions import Span, check_incarnation, clipped
from lanes_spark.tables.journal_selection import Chosen
from lanes_spark.tables.table import Spans
from lanes_spark.task.job import TaskJob, begin
from lanes_spark.task.journal import check_reached, member_of_attempt, shared
from lanes_spark.task.progress import Address, sender
from lanes_spark.task.results import COUNTS, output_schema
from lanes_spark.task.task import run_task

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

__all__ = ["BatchRun", "Counts", "ReplaySource"]

_PATIENCE: Final = 180.0
"""Seconds that the brokers have behind a batch to say which topic it was of, as many as a stream has before one."""

_PAUSE: Final = 1.0
"""Seconds between two of these questions."""


class ReplaySource(Protocol):
    """Where history is read from: ``ParquetTable`` and ``KafkaTopic``."""

    @property
    def topic(self) -> str:
        """What the messages are of."""

    @property
    def aligned(self) -> bool:
        """Whether one task reads whole partitions, in order."""

    @property
    def eras(self) -> Eras:
        """Where the number of partitions has changed."""

    def spans(self, spark: SparkSession) -> Spans:
        """What there is to read, now. Blocks."""

    def rows(self, spark: SparkSession, ranges: Mapping[int, Span], incarnation: str = "") -> DataFrame:
        """The messages of these positions, in the columns key, partition, offset and value, and timestamp and headers
        where they are known. Raises ``SourceError`` where it is not that ``incarnation`` any more, see ``Spans``."""

    def since(self, spark: SparkSession, time: datetime, spans: Mapping[int, Span]) -> dict[int, int]:
        """By partition the first position of these spans at or behind which all rows of that ``time`` or later are,
        where the source can tell without reading them. Blocks."""

    def check_aligned(self, rows: DataFrame) -> None:
        """Raise ``ConfigError`` where it is not as ``aligned`` says. ``rows``: of ``rows``, or fewer. Blocks."""


@dataclass
class Counts:
    """What the batches so far have come to. ``missing``: positions that a journal selects, and that had no row."""

    batches: int = 0
    missing: int = 0
    by_name: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))


@dataclass(frozen=True, kw_only=True)
class BatchRun:
    """A replay whose arguments are found good. ``payload``: the pickled ``TaskJob`` of that ``name``.
    ``incarnation``: of the source, as the run has found it, see ``Spans``. ``journal``: its folder. ``chosen``: by a
    journal, None = whatever is selected otherwise. ``reports`` hears of running tasks. ``given_up``: set by who ends
    the run at once, so that nobody is waited for."""

    source: ReplaySource
    selection: Selection
    plan: Plan
    name: str
    payload: bytes = field(repr=False)
    results: Any
    results_to: str | None
    incarnation: str = ""
    journal: str | None = None
    chosen: Chosen | None = None
    reports: TaskReports | None = None
    counts: Counts = field(default_factory=Counts)
    given_up: threading.Event = field(default_factory=threading.Event, repr=False)

    def run(self, spark: SparkSession, ranges: Mapping[int, Span], *, batch: int | None) -> None:
        """Handle the rows of these positions. Blocks until that is done. Raises ``SourceError`` where the source was
        made anew, before or meanwhile, and where it does not say that for minutes: the batch is not done then."""
        from pyspark.sql import Observation
        from pyspark.sql import functions as F  # noqa: N812
        from pyspark.sql.pandas.types import from_arrow_schema

        # A checkpoint that was begun before the source had come to ``from_``, is in front of it.
        inside = {number: span for number, one in ranges.items() if (span := self.selection.span(number, one))}
        ranges = clipped(inside, {} if self.chosen is None else self.chosen.islands)
        if not ranges:
            return
        rows = self._arranged(self._selected(self.source.rows(spark, ranges, self.incarnation), ranges))
        schema = from_arrow_schema(output_schema(self.results))
        observed = Observation()
        number, address = self.counts.batches, None
        if self.reports is not None:
            self.reports.begin(number)
            address = self.reports.address
        in_task = functools.partial(_in_task, name=self.name, payload=self.payload, address=address, number=number)
        handled = rows.mapInArrow(in_task, schema).observe(observed, *[F.sum(name).alias(name) for name in COUNTS])
        with shared(self.journal, self.name):
            if self.results is None:
                handled.write.format("noop").mode("overwrite").save()
            else:
                path = self.results_to if batch is None else f"{self.results_to}/batch={batch}"
                # A batch that is run again replaces what it has left behind.
                mode = "errorifexists" if batch is None else "overwrite"
                handled.where("result IS NOT NULL").select("result.*").write.mode(mode).parquet(str(path))
        if self.incarnation:
            self._check_incarnation(spark)
        self.counts.batches += 1
        for name, count in observed.get.items():
            self.counts.by_name[name] += count or 0
        if self.chosen is not None and not self.selection.by_row:
            self.counts.missing += self.chosen.count(ranges) - (observed.get["delivered"] or 0)

    def _check_incarnation(self, spark: SparkSession) -> None:
        """Tasks read by the name of the topic, and cannot tell: what they read was of this one, if it is there yet.

        A pause of the brokers is waited for: else all that was handled would be handled again. That hides nothing: no
        topic gets the id of another one, so a later answer says as much."""
        until = time.monotonic() + _PATIENCE
        while True:
            try:
                now = self.source.spans(spark).incarnation
            except SourceError as error:
                if not error.retryable or time.monotonic() > until or self.given_up.wait(_PAUSE):
                    raise
            else:
                check_incarnation(self.source.topic, self.incarnation, now, read=True)
                return

    def _selected(self, rows: DataFrame, ranges: dict[int, Span]) -> DataFrame:
        from pyspark.sql import functions as F  # noqa: N812

        selection = self.selection
        if self.chosen is not None:
            rows = self.chosen.near(rows, ranges)
        if selection.keys is not None:
            rows = rows.where(_key_in(rows, selection.keys))
        if isinstance(selection.start, datetime):
            rows = rows.where(F.col("timestamp") >= F.lit(selection.start))
        if isinstance(selection.end, datetime):
            rows = rows.where(F.col("timestamp") < F.lit(selection.end))
        # What is asked of the columns as they are in the table, is asked before: the files can leave it out then.
        rows = rows.withColumns({name: F.col(name).cast("binary") for name in ("key", "value")})
        rows = rows.withColumns({"partition": F.col("partition").cast("int"), "offset": F.col("offset").cast("bigint")})
        if self.chosen is not None:
            rows = self.chosen.join(rows, ranges)
        if selection.slots is not None:
            rows = rows.mapInArrow(functools.partial(select_slots, slots=selection.slots), rows.schema)
        return rows

    def _arranged(self, rows: DataFrame) -> DataFrame:
        from pyspark.sql import functions as F  # noqa: N812

        plan, era = self.plan, era_column(self.source.eras)
        if plan.kind == "aligned":
            self.source.check_aligned(rows)
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
    """What a task of Spark runs. ``number`` of the batch; ``address``: who hears of the task."""
    from pyspark import TaskContext

    with crossing():
        job = begin(name, lambda: _loaded(payload))
        check_reached(job.journal, name)
        task = TaskContext.get()
        assert task is not None, "this function is run by tasks alone"
        with sender(address, number, task.partitionId(), task.attemptNumber()) as tell:
            yield from run_task(batches, job, member=member_of_attempt(), tell=tell)


def _loaded(payload: bytes) -> TaskJob:
    from pyspark import cloudpickle

    try:
        job: TaskJob = cloudpickle.loads(payload)
    except Exception as error:
        raise ConfigError(
            f"the handler, or something it uses, cannot be loaded by the workers, whose Python is {sys.executable} "
            f"({type(error).__name__}: {error_text(error)}): send its modules along by spark.submit.pyFiles, or "
            "install them there"
        ) from error
    return job


def _key_in(rows: DataFrame, keys: tuple[bytes, ...]) -> Column:
    from pyspark.sql import functions as F  # noqa: N812

    if rows.schema["key"].dataType.simpleString() == "string":
        # One that is not UTF-8 is in no such column.
        texts = [key.decode(errors="replace") for key in keys]
        return F.col("key").isin([text for text, key in zip(texts, keys, strict=True) if text.encode() == key])
    return F.col("key").isin([bytearray(key) for key in keys])
