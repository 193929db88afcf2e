"""The parts that a replay and a stream share: options, one run over Spark, and its report."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypedDict

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
"""Most positions of a batch. A batch itself costs 0.7 s: 3 to 4 % at 10,000 messages a second."""


class RunOptions(TypedDict, total=False):
    """Keyword options that ``replay`` and ``stream`` share. All may be left out.

    Attributes:
        settings: Order, retries, poison policy and limits, as for ``lanes.Consumer``. The limits hold in each task.
            Default: ``Settings()``.
        decode: Turns a message into the handler's argument, as for ``lanes.Consumer``.
        dead_letters: Creates the dead letter store of a task, see ``TaskJob``.
        setup: Opens resources of the handler, see ``TaskJob``.
        teardown: Closes them, see ``TaskJob``.
        results: pyarrow schema of the rows that handlers return. It needs ``results_to``.
        results_to: Parquet folder for those rows. With a checkpoint every batch has its own folder in it, which a
            repeated batch replaces. A folder of another checkpoint is refused; so is a checkpoint that was begun with
            another folder or without one.
        keys: Only messages with these keys, 1 to 10,000.
        slots: Only messages whose keys have these slots, 0 to 65,535.
        partitions: Only these partitions, by number.
        from_: First position: one number, one by partition, or an aware time. Files without any selected row are
            skipped where their statistics tell.
        rows_per_batch: Most rows of a batch, 1 or more. Without a checkpoint there is one batch. Default 200,000.
        tasks: Number of shuffle tasks. Default: 4 per core.
        effects: Effects that remain when Spark repeats an attempt of a task, see ``Effects``. Default ``"unfenced"``.
        progress: Called after each batch and about once a second, in a thread of the driver. Its exception stops the
            run after that batch and is raised unchanged; the batch is handled again when the run continues.
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
    """The outcome of a replay or a stream. Counts include only tasks that succeeded.

    Attributes:
        delivered: Rows that were delivered to handlers.
        finished: Delivered rows that were handled or dead-lettered.
        dead_lettered: Delivered rows that were dead-lettered.
        skipped: Rows of the topic that this run did not deliver: not selected, or delivered by an earlier run on the
            same checkpoint. For a Kafka topic, positions without a message count too. For a stream, positions of its
            batches that were not delivered.
        batches: Number of batches.
        seconds: Duration of the run, in seconds.
        plan: How rows reached the tasks.
        journal: Positions that ``only=`` found, None without it.
        missing: Selected journal positions that the source lacks. It is None without ``only=``, and if keys, slots or
            times select too.
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
    """One run of a replay or a stream. The caller closes it."""

    scope: ReplayScope
    batches: BatchRun
    tracker: ProgressTracker
    rows_per_batch: int

    def report(self, *, read: int, seconds: float | None = None, missing: int | None = None) -> Report:
        """Report the counts so far; ``read`` rows were there to deliver."""
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
        """Stop the progress and release the checkpoint. Idempotent."""
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
    """Check all arguments and look at the source. Blocks; handles no message. Raises as ``replay``."""
    if unknown := sorted(options.keys() - RunOptions.__optional_keys__):
        raise TypeError(
            f"{unknown[0]} is no option of a replay or a stream: use {', '.join(RunOptions.__annotations__)}"
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
    if not isinstance(rows_per_batch, int) or isinstance(rows_per_batch, bool) or rows_per_batch < 1:
        raise ConfigError(f"rows_per_batch={rows_per_batch!r}: must be a whole number, 1 or more")
    if (job.results is None) != (results_to is None):
        raise ConfigError(
            "only one of results and results_to is given: give the schema of the rows and the folder for them"
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
        # A failure below must not keep the checkpoint locked.
        unless_it_opens.callback(scope.close)
        tracker = ProgressTracker(spark, None if explain else options.get("progress"))
        unless_it_opens.callback(tracker.close)
        payload = b"" if explain else pickled(job)
        batches = BatchRun(scope=scope, job=job, payload=payload, results_to=results_to, tracker=tracker)
        unless_it_opens.pop_all()
    return SparkRun(scope=scope, batches=batches, tracker=tracker, rows_per_batch=rows_per_batch)
