"""Running a handler over history, in order within a key, on all executors of a Spark cluster."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Literal, cast, overload

from blake3 import blake3

from lanes.config import Settings
from lanes.core.types import PartitionKey
from lanes.dead_letter import error_text
from lanes.errors import ConfigError
from lanes.handlers import Decode, Handler
from lanes.source import DeadLetters
from lanes_spark.batch_run import BatchRun, ReplaySource
from lanes_spark.failures import mapped_errors
from lanes_spark.plan import CHECKED, Effects, Plan, check_conf, make_plan
from lanes_spark.positions import Positions, Span, check_kept
from lanes_spark.selection import Bound, Selection
from lanes_spark.table import Spans
from lanes_spark.task_job import Hook, TaskJob

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["ROWS_PER_BATCH", "Progress", "ReplaySource", "Report", "replay"]

ROWS_PER_BATCH: Final = 200_000
"""Positions of a batch, at most. A batch costs some tenths of a second by itself, whatever is in it."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a replay did.

    ``delivered``: rows that came to the runtime; ``finished``: of these, what was handled or dead-lettered;
    ``dead_lettered``: of these again. They count tasks that have ended well. ``skipped``: rows of the topic
    that were not delivered by this run: not selected, or delivered by an earlier run on the same checkpoint; of a Kafka
    topic also positions that hold no message.
    ``batches``: how many were run. ``seconds``: all in all.
    """

    delivered: int
    finished: int
    dead_lettered: int
    skipped: int
    batches: int
    seconds: float
    plan: Plan


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a replay is. ``batches``, ``delivered``, ``finished``, ``dead_lettered``: as in ``Report``, so far.
    ``positions``: of all that is selected by partition and position, by any run on this checkpoint; ``left``: of these
    what has not been handled. ``seconds``: since this run began."""

    batches: int
    delivered: int
    finished: int
    dead_lettered: int
    positions: int
    left: int
    seconds: float


@overload
def replay(
    spark: SparkSession,
    source: ReplaySource,
    handler: Handler,
    *,
    settings: Settings | None = ...,
    decode: Decode | None = ...,
    dead_letters: Callable[[], DeadLetters] | None = ...,
    setup: Hook | None = ...,
    teardown: Hook | None = ...,
    results: Any = ...,
    results_to: str | None = ...,
    keys: Iterable[PartitionKey] | None = ...,
    slots: Iterable[int] | None = ...,
    partitions: Iterable[int] | None = ...,
    from_: Bound | None = ...,
    to: Bound | None = ...,
    checkpoint: str | None = ...,
    rows_per_batch: int = ...,
    tasks: int | None = ...,
    effects: Effects = ...,
    progress: Callable[[Progress], object] | None = ...,
    explain: Literal[False] = ...,
) -> Report: ...


@overload
def replay(
    spark: SparkSession,
    source: ReplaySource,
    handler: Handler,
    *,
    settings: Settings | None = ...,
    decode: Decode | None = ...,
    dead_letters: Callable[[], DeadLetters] | None = ...,
    setup: Hook | None = ...,
    teardown: Hook | None = ...,
    results: Any = ...,
    results_to: str | None = ...,
    keys: Iterable[PartitionKey] | None = ...,
    slots: Iterable[int] | None = ...,
    partitions: Iterable[int] | None = ...,
    from_: Bound | None = ...,
    to: Bound | None = ...,
    checkpoint: str | None = ...,
    rows_per_batch: int = ...,
    tasks: int | None = ...,
    effects: Effects = ...,
    progress: Callable[[Progress], object] | None = ...,
    explain: Literal[True],
) -> Plan: ...


def replay(
    spark: SparkSession,
    source: ReplaySource,
    handler: Handler,
    *,
    settings: Settings | None = None,
    decode: Decode | None = None,
    dead_letters: Callable[[], DeadLetters] | None = None,
    setup: Hook | None = None,
    teardown: Hook | None = None,
    results: Any = None,
    results_to: str | None = None,
    keys: Iterable[PartitionKey] | None = None,
    slots: Iterable[int] | None = None,
    partitions: Iterable[int] | None = None,
    from_: Bound | None = None,
    to: Bound | None = None,
    checkpoint: str | None = None,
    rows_per_batch: int = ROWS_PER_BATCH,
    tasks: int | None = None,
    effects: Effects = "unfenced",
    progress: Callable[[Progress], object] | None = None,
    explain: bool = False,
) -> Report | Plan:
    """Run ``handler`` over the messages of ``source``; blocks until all of them are handled.

    ``handler``, ``settings``, ``decode``: as for ``lanes.Consumer``; the bounds hold in each task. ``dead_letters``,
    ``setup``, ``teardown``, ``results``: see ``TaskJob``. ``results_to``: the Parquet table that the rows go to which
    handlers return; with a checkpoint every batch has a folder of its own there, which a repeated batch replaces.

    ``keys``, ``slots``, ``partitions`` select; ``from_`` is in and ``to`` is out: a position, positions by partition,
    or an aware time. Files that hold nothing of it are not read, as far as they say so.

    ``checkpoint``: a folder in which Spark notes every batch; a replay that was stopped, however that came about, goes
    on there. Batches have ``rows_per_batch`` rows at most, 1 or more. Without it everything is one batch, and a replay
    that failed begins again. Either way a batch that fails is handled again from its beginning: at least once, as live.

    ``tasks``: of a shuffle, None = 4 for each core. ``effects``: what of the handler stays behind if an attempt of a
    task is repeated, see ``Effects``. ``progress`` is called after each batch, in the driver; what it raises stops the
    replay. ``explain``: run nothing, and return the plan.

    Raises ``ConfigError`` for what cannot be kept, before the first message; ``HandlerHalted`` when a message was given
    up under the poison policy ``exit``; ``SourceError`` for rows that are gone and for failures of Spark.
    """
    started = time.monotonic()
    settings = settings or Settings()
    job = TaskJob(
        topic=source.topic,
        handler=handler,
        name=uuid.uuid4().hex,
        settings=settings,
        results=results,
        decode=decode,
        dead_letters=dead_letters,
        setup=setup,
        teardown=teardown,
    )
    selection = Selection.of(keys, slots, partitions, from_, to)
    if not isinstance(rows_per_batch, int) or isinstance(rows_per_batch, bool) or rows_per_batch < 1:
        raise ConfigError(f"rows_per_batch={rows_per_batch!r}: must be a whole number, 1 or more")
    if (results is None) != (results_to is None):
        raise ConfigError("of results and results_to there is only one: give the schema of the rows and where they go")
    check_conf({name: spark.conf.get(name, None) for name in CHECKED}, effects)
    with mapped_errors(source.topic):
        spans = source.spans(spark)
        _check_timestamps(selection, spans)
        wanted = selection.starts(spans.by_partition) if spans.cut else {}
        if checkpoint is None:
            check_kept(source.topic, wanted, spans.by_partition)
        selected = {
            partition: span
            for partition, whole in spans.by_partition.items()
            if (span := selection.span(partition, whole)) is not None
        }
        plan = make_plan(
            order=settings.order,
            keyless=settings.keyless,
            cores=_cores(spark),
            partitions=len(selected),
            aligned=source.aligned,
            eras=source.eras,
            tasks=tasks,
        )
        if explain:
            return plan
        run = BatchRun(
            source=source,
            selection=selection,
            plan=plan,
            name=job.name,
            payload=_pickled(job),
            results=results,
            results_to=results_to,
        )

        def tell(at: Positions) -> None:
            if progress is not None:
                progress(_progress(run, selected, at, time.monotonic() - started))

        if checkpoint is None:
            if selected:
                run.run(spark, selected, batch=None)
                tell({partition: end for partition, (_, end) in selected.items()})
        else:
            # Also when there is nothing to read: what a checkpoint has not read may be gone, all of it.
            # A partition that has been read, and is empty since, has to be told from one that is gone.
            places = {
                partition: place
                for partition, whole in spans.by_partition.items()
                if (place := selection.place(partition, whole)) is not None
            }
            # Where one has been read beyond a start that is gone, that is no loss: the first batch is told of it.
            starts = {partition: min(start, places[partition][0]) for partition, start in wanted.items()}
            _in_batches(
                spark,
                run,
                places if spans.cut else selected,
                starts,
                checkpoint,
                rows_per_batch=rows_per_batch,
                tell=tell,
            )
    counts = run.counts.by_name
    return Report(
        delivered=counts["delivered"],
        finished=counts["finished"],
        dead_lettered=counts["dead_lettered"],
        skipped=spans.rows - counts["delivered"],
        batches=run.counts.batches,
        seconds=time.monotonic() - started,
        plan=plan,
    )


def _progress(run: BatchRun, selected: Mapping[int, Span], at: Positions, seconds: float) -> Progress:
    return Progress(
        batches=run.counts.batches,
        **run.counts.by_name,
        positions=sum(end - first for first, end in selected.values()),
        left=sum(end - at.get(partition, first) for partition, (first, end) in selected.items()),
        seconds=seconds,
    )


def _in_batches(
    spark: SparkSession,
    run: BatchRun,
    selected: Mapping[int, Span],
    starts: Positions,
    checkpoint: str,
    *,
    rows_per_batch: int,
    tell: Callable[[Positions], None],
) -> None:
    from lanes_spark.batch_ranges import NAME, BatchRanges, ranges_options

    spark.dataSource.register(BatchRanges)
    identity = f"{run.source.topic}\n{run.selection.digest()}\n{[sorted(era.items()) for era in run.source.eras]}"
    options = ranges_options(
        topic=run.source.topic,
        replay=blake3(identity.encode()).hexdigest(length=8),
        spans=selected,
        starts=starts,
        cap=rows_per_batch,
        eras=run.source.eras,
    )

    def handle(ranges: DataFrame, batch: int) -> None:
        found = {row["partition"]: (row["start"], row["stop"]) for row in ranges.collect()}
        taken = {partition: (first, end) for partition, (first, end) in found.items() if first < end}
        if taken:
            run.run(spark, taken, batch=batch)
            tell({partition: end for partition, (_, end) in found.items()})

    query = (
        spark.readStream.format(NAME)
        .options(**options)
        .load()
        .writeStream.trigger(availableNow=True)
        .option("checkpointLocation", checkpoint)
        .foreachBatch(handle)
        .start()
    )
    try:
        query.awaitTermination()
    finally:
        # Also when the caller is interrupted: nothing is handled behind its back.
        query.stop()


def _pickled(job: TaskJob) -> bytes:
    from pyspark import cloudpickle

    try:
        payload: bytes = cast(Any, cloudpickle).dumps(job)
    except Exception as error:
        raise ConfigError(
            f"the handler, or something it uses, cannot be sent to the workers ({type(error).__name__}: "
            f"{error_text(error)}): make clients, locks and open files in setup=…, in variables of the module"
        ) from error
    return payload


def _cores(spark: SparkSession) -> int:
    try:
        return spark.sparkContext.defaultParallelism
    except Exception:
        # Spark Connect has no context; what a shuffle has by default is what its administrator thought right.
        return max(1, int(spark.conf.get("spark.sql.shuffle.partitions", "200") or "200") // 4)


def _check_timestamps(selection: Selection, spans: Spans) -> None:
    asked = isinstance(selection.start, datetime) or isinstance(selection.end, datetime)
    if asked and not spans.timed:
        raise ConfigError(
            "from_ or to is a time, and the source has no column for timestamp: select by positions, or name the column"
        )
