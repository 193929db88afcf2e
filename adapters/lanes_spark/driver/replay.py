"""Runs a handler over stored messages, in order within a key, on all executors of a Spark cluster."""

from __future__ import annotations

import logging
from contextlib import closing
from typing import TYPE_CHECKING, Literal, Unpack, overload

from lanes.errors import LanesError
from lanes.handlers import Handler
from lanes_spark.driver.run import Report, RunOptions, open_run
from lanes_spark.driver.scope import ReplaySource
from lanes_spark.driver.selection import Bound
from lanes_spark.failures import mapped_errors
from lanes_spark.plan import Plan
from lanes_spark.tables.journal_selection import JournalSelection

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger("lanes")


@overload
def replay(
    spark: SparkSession,
    source: ReplaySource,
    handler: Handler,
    *,
    to: Bound | None = ...,
    only: JournalSelection | None = ...,
    checkpoint: str | None = ...,
    explain: Literal[False] = ...,
    **options: Unpack[RunOptions],
) -> Report: ...


@overload
def replay(
    spark: SparkSession,
    source: ReplaySource,
    handler: Handler,
    *,
    to: Bound | None = ...,
    only: JournalSelection | None = ...,
    checkpoint: str | None = ...,
    explain: Literal[True],
    **options: Unpack[RunOptions],
) -> Plan: ...


def replay(
    spark: SparkSession,
    source: ReplaySource,
    handler: Handler,
    *,
    to: Bound | None = None,
    only: JournalSelection | None = None,
    checkpoint: str | None = None,
    explain: bool = False,
    **options: Unpack[RunOptions],
) -> Report | Plan:
    """Run ``handler`` over the messages of ``source``. Blocks until the end of the replay.

    A continued replay handles a failed batch again from its first message. A replay delivers each message at least
    once, like a live consumer.

    Args:
        spark: Session whose executors run the handler.
        source: Messages to handle: a ``ParquetTable`` or a ``KafkaTopic``.
        handler: Handler of one message or of a batch, as for ``lanes.Consumer``.
        to: End of the replay, exclusive: a position for all partitions, positions by partition, or an aware time.
            Default: the current end.
        only: Selection of the positions to handle, by a journal. The replay reads the journal once, at its first start.
        checkpoint: Folder in which Spark logs every batch. A stopped replay continues from this folder. Without a
            checkpoint the replay is one batch, and a failed replay begins again.
        explain: Whether to return the plan without running a handler.
        **options: Options that ``replay`` and ``stream`` share, see ``RunOptions``.

    Returns:
        The report, or with ``explain`` the plan.

    Raises:
        ConfigError: An argument is invalid, the arguments contradict a promise, or a worker cannot load the handler.
        TypeError: ``options`` has an unknown name.
        HandlerHalted: A message failed under the poison policy ``exit``.
        SourceError: The source has lost rows, the topic was recreated, another replay uses the checkpoint, or Spark or
            the brokers failed. For an error of ``lanes`` in a task, the replay raises an error with the same class,
            text (in one line) and ``retryable``. Its ``__cause__`` is Spark's exception with the task's traceback.
        Exception: The exception of ``progress``, unchanged.
    """
    run = open_run(spark, source, handler, options, to=to, only=only, checkpoint=checkpoint, explain=explain)
    scope, missing = run.scope, None
    try:
        with mapped_errors(source.topic), closing(run):
            if explain:
                return scope.plan
            missing = scope.missing()
            run.tracker.begin(scope.selected, scope.islands)
            if checkpoint is None:
                if scope.selected:
                    run.batches.run(spark, scope.selected, batch=None)
                    run.tracker.done(scope.selected)
            else:
                from lanes_spark.driver.query import begin_query

                # The query runs even without selected rows, because it detects lost positions of its checkpoint.
                query = begin_query(spark, run, checkpoint, done=run.tracker.done)
                try:
                    query.awaitTermination()
                finally:
                    # After an interruption of the caller, stop all handlers.
                    run.batches.given_up.set()
                    query.stop()
    except LanesError:
        # Spark has converted the exception of ``progress`` to text. ``check`` raises the original exception.
        if run.tracker.raised is None:
            raise
    run.tracker.check()
    missing = None if missing is None else missing + run.tracker.counts.missing
    if missing:
        log.warning(
            "%s: the source lacks %d of the positions that the journal selects, so no handler ran for these "
            "positions; restore the messages, and replay again with a new checkpoint",
            source.topic,
            missing,
        )
    return run.report(read=scope.spans.rows, missing=missing)
