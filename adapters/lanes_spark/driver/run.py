"""Defines the common parts of a replay and a stream: the options, the run and its report."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypedDict

from lanes.arguments import check_whole
from lanes.config import Settings
from lanes.core.types import PartitionKey
from lanes.errors import ConfigError
from lanes.handlers import Decode, Handler
from lanes.source import DeadLetters
from lanes_spark.driver.batch import BatchRun, pickled
from lanes_spark.driver.progress import Progress, ProgressTracker
from lanes_spark.driver.scope import ReplayScope, ReplaySource, open_scope
from lanes_spark.driver.selection import Bound, Selection
from lanes_spark.failures import mapped_errors
from lanes_spark.plan import Effects, Plan
from lanes_spark.tables.journal_selection import JournalFacts, JournalSelection
from lanes_spark.task.job import Hook, TaskJob

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS_PER_BATCH: Final = 200_000
"""Default maximum number of positions of a batch. The overhead of a batch is 0.7 to 0.9 s, which is 3.5 to 4.5 % at
10,000 messages a second."""


class RunOptions(TypedDict, total=False):
    """Keyword options that ``replay`` and ``stream`` share. Every option has a default.

    Attributes:
        settings: Order, retries, poison policy and limits, as for ``lanes.Consumer``. The limits apply to each task
            separately. Default: ``Settings()``.
        decode: Function that converts a message to the handler's argument, as for ``lanes.Consumer``.
        dead_letters: Function that creates the dead letter store of a task, see ``TaskJob``.
        setup: Function that opens resources of the handler, see ``TaskJob``.
        teardown: Function that closes resources of the handler, see ``TaskJob``.
        results: pyarrow schema of the rows that handlers return. Needs ``results_to``.
        results_to: Parquet folder for the rows that handlers return. With a checkpoint, every batch writes its own
            subfolder, and a repeated batch replaces its subfolder. Each checkpoint has its own folder.
        keys: The only keys to handle, 1 to 10,000 keys. Default: all keys.
        slots: The only slots to handle, numbers 0 to 65,535. Default: all slots.
        partitions: Numbers of the only partitions to handle. Default: all partitions.
        from_: First position: a position for all partitions, positions by partition, or an aware time. Spark skips
            Parquet files whose statistics show no selected row. Default: the first position of the source.
        rows_per_batch: Maximum number of rows of a batch, 1 or more. A replay without a checkpoint has one batch.
            Default: 200,000.
        tasks: Number of shuffle tasks, 1 or more, see ``make_plan``. Default: 4 per core.
        effects: Kind of the handler's effects outside its process, see ``Effects``. Default: ``"unfenced"``.
        progress: Function that the run calls after each batch and about once a second, in a thread of the driver. If
            the function raises an exception, the run stops after the current batch, and raises the exception unchanged.
            A continued run handles this batch again.
        journal: Folder in which every attempt of a task writes its own journal, see ``TaskJob``.
    """

    settings: Settings | None
    decode: Decode | None
    dead_letters: Callable[[], DeadLetters] | None
    setup: Hook | None
    teardown: Hook | None
    results: Any
    results_to: str | None
    keys: Iterable[PartitionKey] | None
    slots: Iterable[int] | None
    partitions: Iterable[int] | None
    from_: Bound | None
    rows_per_batch: int
    tasks: int | None
    effects: Effects
    progress: Callable[[Progress], object] | None
    journal: str | os.PathLike[str] | None


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of a replay or a stream. The counts include only tasks that succeeded.

    Attributes:
        delivered: Number of rows that the run delivered to handlers.
        finished: Number of delivered rows with a handled or dead-lettered message.
        dead_lettered: Number of delivered rows with a dead-lettered message.
        skipped: Number of rows that this run did not deliver: rows outside the selection, and rows that an earlier run
            on the same checkpoint delivered. For a Kafka topic, the number includes positions without a message. For a
            stream, the number includes only positions of its batches.
        batches: Number of finished batches.
        seconds: Duration of the run, in seconds.
        plan: Plan that distributed the rows to the tasks.
        journal: Facts about the positions that ``only=`` selects; None = no ``only=``.
        missing: Number of selected journal positions that the source lacks. The value is None without ``only=``, or
            if keys, slots or times also select messages.
    """

    delivered: int
    finished: int
    dead_lettered: int
    skipped: int
    batches: int
    seconds: float
    plan: Plan
    journal: JournalFacts | None = None
    missing: int | None = None


@dataclass(frozen=True, kw_only=True)
class SparkRun:
    """One run of a replay or a stream. The caller closes the run."""

    scope: ReplayScope
    batches: BatchRun
    tracker: ProgressTracker
    rows_per_batch: int

    def report(self, *, read: int, seconds: float | None = None, missing: int | None = None) -> Report:
        """Return the report of the finished batches.

        Args:
            read: Number of rows in the source. For a stream, the number of positions in its batches.
            seconds: Duration of the run, in seconds. Default: until now.
            missing: Number of journal positions that the source lacks.

        Returns:
            The report.
        """
        counts = self.tracker.counts
        return Report(
            **counts.by_name,
            skipped=read - counts.by_name["delivered"],
            batches=counts.batches,
            seconds=time.monotonic() - self.tracker.started if seconds is None else seconds,
            plan=self.scope.plan,
            journal=None if self.scope.chosen is None else self.scope.chosen.facts,
            missing=missing,
        )

    def close(self) -> None:
        """Stop the progress, and release the checkpoint. Idempotent."""
        try:
            self.tracker.close()
        finally:
            self.scope.close()


def open_run(
    spark: SparkSession,
    source: ReplaySource,
    handler: Handler,
    options: RunOptions,
    *,
    to: Bound | None = None,
    only: JournalSelection | None = None,
    checkpoint: str | None = None,
    explain: bool = False,
) -> SparkRun:
    """Check all arguments, and read the positions of the source. Blocks. Handles no message. Raises like ``replay``."""
    if unknown := sorted(options.keys() - RunOptions.__optional_keys__):
        raise TypeError(
            f"{unknown[0]}= is no option of a replay or a stream: use {', '.join(RunOptions.__annotations__)}"
        )
    settings = options.get("settings") or Settings()
    journal = options.get("journal")
    job = TaskJob(
        topic=source.topic,
        handler=handler,
        name=uuid.uuid4().hex,
        settings=settings,
        results=options.get("results"),
        decode=options.get("decode"),
        dead_letters=options.get("dead_letters"),
        setup=options.get("setup"),
        teardown=options.get("teardown"),
        journal=None if journal is None else os.fspath(journal),
    )
    selection = Selection.of(
        options.get("keys"), options.get("slots"), options.get("partitions"), options.get("from_"), to
    )
    rows_per_batch, results_to = options.get("rows_per_batch", ROWS_PER_BATCH), options.get("results_to")
    check_whole("rows_per_batch", rows_per_batch, 1)
    if (job.results is None) != (results_to is None):
        raise ConfigError(
            "only one of results and results_to is given: give both, the schema of the rows and the folder for the rows"
        )
    with mapped_errors(source.topic), ExitStack() as unless_it_opens:
        scope = open_scope(
            spark,
            source,
            settings,
            selection,
            only=only,
            checkpoint=None if explain else checkpoint,
            cap=None if checkpoint is None else rows_per_batch,
            tasks=options.get("tasks"),
            effects=options.get("effects", "unfenced"),
        )
        # If a later step fails, release the lock on the checkpoint.
        unless_it_opens.callback(scope.close)
        tracker = ProgressTracker(spark, None if explain else options.get("progress"))
        unless_it_opens.callback(tracker.close)
        payload = b"" if explain else pickled(job)
        batches = BatchRun(scope=scope, job=job, payload=payload, results_to=results_to, tracker=tracker)
        unless_it_opens.pop_all()
    return SparkRun(scope=scope, batches=batches, tracker=tracker, rows_per_batch=rows_per_batch)
