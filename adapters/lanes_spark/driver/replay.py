"""Running a handler over history, in order within a key, on all executors of a Spark cluster."""

from __future__ import annotations

import functools
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, overload

from lanes.config import Settings
from lanes.core.types import PartitionKey
from lanes.errors import ConfigError, LanesError
from lanes.handlers import Decode, Handler
from lanes.source import DeadLetters
from lanes_spark.driver.batch import ReplaySource
from lanes_spark.driver.meter import Meter
from lanes_spark.driver.prepared import prepare
from lanes_spark.driver.progress import Progress
from lanes_spark.driver.query import begin_query
from lanes_spark.driver.selection import Bound, Selection
from lanes_spark.failures import mapped_errors
from lanes_spark.plan import Effects, Plan
from lanes_spark.tables.journal_selection import JournalFacts, JournalSelection
from lanes_spark.task.job import Hook, TaskJob

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger("lanes")

__all__ = ["ROWS_PER_BATCH", "Progress", "ReplaySource", "Report", "checked_batches", "replay"]

ROWS_PER_BATCH: Final = 200_000
"""Positions of a batch, at most. A batch costs 0.7 s by itself: 3 to 4 % where 10,000 messages are handled a second."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a replay did.

    ``delivered``: rows that came to the runtime; ``finished``: of these, what was handled or dead-lettered;
    ``dead_lettered``: of these again. They count tasks that have ended well. ``skipped``: rows of the topic
    that were not delivered by this run: not selected, or delivered by an earlier run on the same checkpoint; of a Kafka
    topic also positions that hold no message.
    ``batches``: how many were run. ``seconds``: all in all. ``journal``: what ``only=`` found, None without.
    ``missing``: of its positions what the source does not have; None without it, and where more is selected by than
    partition and position.
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
    only: JournalSelection | None = ...,
    checkpoint: str | None = ...,
    rows_per_batch: int = ...,
    tasks: int | None = ...,
    effects: Effects = ...,
    progress: Callable[[Progress], object] | None = ...,
    journal: str | os.PathLike[str] | None = ...,
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
    only: JournalSelection | None = ...,
    checkpoint: str | None = ...,
    rows_per_batch: int = ...,
    tasks: int | None = ...,
    effects: Effects = ...,
    progress: Callable[[Progress], object] | None = ...,
    journal: str | os.PathLike[str] | None = ...,
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
    only: JournalSelection | None = None,
    checkpoint: str | None = None,
    rows_per_batch: int = ROWS_PER_BATCH,
    tasks: int | None = None,
    effects: Effects = "unfenced",
    progress: Callable[[Progress], object] | None = None,
    journal: str | os.PathLike[str] | None = None,
    explain: bool = False,
) -> Report | Plan:
    """Run ``handler`` over the messages of ``source``; blocks until all of them are handled.

    ``handler``, ``settings``, ``decode``: as for ``lanes.Consumer``; the bounds hold in each task. ``dead_letters``,
    ``setup``, ``teardown``, ``results``: see ``TaskJob``. ``results_to``: the Parquet table that the rows go to which
    handlers return; with a checkpoint every batch has a folder of its own there, which a repeated batch replaces. A
    table that any other checkpoint has written to is refused, and so is another table, or none, when a checkpoint goes
    on.

    ``keys``, ``slots``, ``partitions`` select; ``from_`` is in and ``to`` is out: a position, positions by partition,
    or an aware time. Files that hold nothing of it are not read, as far as they say so. ``only``: nothing but what a
    journal names; see ``JournalSelection``. It is read once, when a checkpoint is begun.

    ``checkpoint``: a folder in which Spark notes every batch; a replay that was stopped, however that came about, goes
    on there. Batches have ``rows_per_batch`` rows at most, 1 or more. Without it everything is one batch, and a replay
    that failed begins again. Either way a batch that fails is handled again from its beginning: at least once, as live.

    ``tasks``: of a shuffle, None = 4 for each core. ``effects``: what of the handler stays behind if an attempt of a
    task is repeated, see ``Effects``. ``progress`` is called after each batch, and about once a second meanwhile, in a
    thread of the driver; what it raises stops the replay behind that batch, which is handled again when it goes on, and
    comes out as it is. ``journal``: a folder in which every attempt of a task writes a journal of its own, see
    ``TaskJob``. ``explain``: run nothing, and return the plan.

    Raises ``ConfigError`` for what cannot be kept, before the first message; ``HandlerHalted`` when a message was given
    up under the poison policy ``exit``; ``SourceError`` for rows that are gone, for a topic that was made anew, and for
    failures of Spark. What a task raises comes out with its kind, its text in one line, and its ``retryable``; its
    ``__cause__`` is Spark's exception, in whose text the task's traceback stands.
    """
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
        journal=None if journal is None else os.fspath(journal),
    )
    selection = Selection.of(keys, slots, partitions, from_, to)
    checked_batches(rows_per_batch, results, results_to)
    with mapped_errors(source.topic):
        prepared = prepare(
            spark,
            source,
            settings,
            selection,
            only=only,
            checkpoint=None if explain else checkpoint,
            restartable=checkpoint is not None,
            rows_per_batch=rows_per_batch,
            tasks=tasks,
            effects=effects,
        )
        try:
            meter = Meter(spark, None if explain else progress)
        except BaseException:
            # Else its checkpoint would stay taken.
            prepared.close()
            raise
    try:
        with mapped_errors(source.topic), closing(prepared), closing(meter):
            if explain:
                return prepared.plan
            run = prepared.run(job, results, results_to, meter.reports)
            missing = prepared.missing()
            meter.begin(run, prepared.selected, prepared.islands)
            done = functools.partial(meter.done, run)
            if checkpoint is None:
                if prepared.selected:
                    run.run(spark, prepared.selected, batch=None)
                    done(prepared.selected)
            else:
                # Also when there is nothing to read: what a checkpoint has not read may be gone, all of it.
                query = begin_query(spark, run, prepared, checkpoint, rows_per_batch=rows_per_batch, done=done)
                try:
                    query.awaitTermination()
                finally:
                    # Also when the caller is interrupted: nothing is handled behind its back.
                    run.given_up.set()
                    query.stop()
    except LanesError:
        # Spark has made a text of what ``progress`` raised.
        raised = meter.raised
        if raised is None:
            raise
    else:
        missing = None if missing is None else missing + run.counts.missing
        if missing:
            log.warning("%s: the source lacks %d of the positions that the journal selects", source.topic, missing)
        counts = run.counts.by_name
        return Report(
            delivered=counts["delivered"],
            finished=counts["finished"],
            dead_lettered=counts["dead_lettered"],
            skipped=prepared.spans.rows - counts["delivered"],
            batches=run.counts.batches,
            seconds=time.monotonic() - meter.started,
            plan=prepared.plan,
            journal=None if prepared.chosen is None else prepared.chosen.facts,
            missing=missing,
        )
    raise raised


def checked_batches(rows_per_batch: object, results: object, results_to: object) -> None:
    """Raise ``ConfigError`` for arguments that are none."""
    if not isinstance(rows_per_batch, int) or isinstance(rows_per_batch, bool) or rows_per_batch < 1:
        raise ConfigError(f"rows_per_batch={rows_per_batch!r}: must be a whole number, 1 or more")
    if (results is None) != (results_to is None):
        raise ConfigError("of results and results_to there is only one: give the schema of the rows and where they go")
