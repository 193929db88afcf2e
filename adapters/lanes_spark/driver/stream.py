"""A replay that does not end: the same query over a Kafka topic, for as long as nobody stops it."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

from lanes.config import Settings
from lanes.core.types import PartitionKey
from lanes.errors import ConfigError, LanesError
from lanes.handlers import Decode, Handler
from lanes.source import DeadLetters
from lanes_spark.driver.batch import BatchRun
from lanes_spark.driver.live_ends import LiveEnds
from lanes_spark.driver.meter import Meter
from lanes_spark.driver.prepared import Prepared, prepare
from lanes_spark.driver.progress import Progress
from lanes_spark.driver.query import begin_query
from lanes_spark.driver.replay import ROWS_PER_BATCH, Report, checked_batches
from lanes_spark.driver.selection import Bound, Selection
from lanes_spark.failures import mapped_errors
from lanes_spark.plan import Effects
from lanes_spark.positions import Span, check_incarnation
from lanes_spark.tables.kafka_topic import KafkaTopic
from lanes_spark.task.job import Hook, TaskJob

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["INTERVAL", "Stream", "stream"]

log = logging.getLogger("lanes")

INTERVAL: Final = 1.0
"""Seconds between two looks at a topic that has nothing new."""

_LOOK: Final = 0.2
"""Seconds after which it is seen that the query has ended by itself."""


def stream(
    spark: SparkSession,
    source: KafkaTopic,
    handler: Handler,
    *,
    checkpoint: str,
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
    rows_per_batch: int = ROWS_PER_BATCH,
    interval: float = INTERVAL,
    tasks: int | None = None,
    effects: Effects = "unfenced",
    progress: Callable[[Progress], object] | None = None,
    journal: str | os.PathLike[str] | None = None,
) -> Stream:
    """Run ``handler`` over the messages of a topic, and over those that come, batch after batch, until it is stopped.

    Blocks until the query runs. All arguments are those of ``replay``; a checkpoint of that goes on here, and the other
    way round. ``interval``: seconds between two looks at a topic that has nothing new, more than 0.

    Raises what ``replay`` raises before its first message; what comes later, ``Stream.join`` raises.
    """
    settings = settings or Settings()
    if not isinstance(source, KafkaTopic):
        raise ConfigError(f"stream of a {type(source).__name__}: what it has is there already; use replay")
    if not isinstance(checkpoint, str) or not checkpoint:
        raise ConfigError(f"checkpoint={checkpoint!r}: a stream needs a folder to go on from after a crash")
    if not isinstance(interval, int | float) or isinstance(interval, bool) or not 0.001 <= interval < math.inf:
        raise ConfigError(f"interval={interval!r}: must be a number of seconds, 0.001 or more")
    checked_batches(rows_per_batch, results, results_to)
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
    selection = Selection.of(keys, slots, partitions, from_)
    with mapped_errors(source.topic):
        prepared = prepare(
            spark,
            source,
            settings,
            selection,
            only=None,
            checkpoint=checkpoint,
            restartable=True,
            rows_per_batch=rows_per_batch,
            tasks=tasks,
            effects=effects,
        )
        with ExitStack() as unless_it_runs:
            unless_it_runs.callback(prepared.close)
            meter = Meter(spark, progress)
            unless_it_runs.callback(meter.close)
            run = prepared.run(job, results, results_to, meter.reports)
            running = Stream(spark, prepared, run, meter, checkpoint, rows_per_batch, float(interval))
            unless_it_runs.pop_all()
        return running


class Stream:
    """A stream that runs. Made by ``stream``; used as a context it is stopped and joined at the end of it, and stopped
    at once where that raises. Its methods may be called by any thread, but by a ``progress`` only ``stop``: ``cancel``
    and ``join`` wait for that itself."""

    def __init__(
        self,
        spark: SparkSession,
        prepared: Prepared,
        run: BatchRun,
        meter: Meter,
        checkpoint: str,
        rows_per_batch: int,
        interval: float,
    ) -> None:
        self._spark = spark
        self._prepared = prepared
        self._run = run
        self._meter = meter
        self._seconds: float | None = None
        self._read = 0
        self._ends = LiveEnds(self._look)
        self._ended = threading.Event()
        meter.begin(run, prepared.places, {})
        self._ends.start()
        try:
            self._query = begin_query(
                spark,
                run,
                prepared,
                checkpoint,
                rows_per_batch=rows_per_batch,
                done=self._done,
                live=self._ends.path,
                interval=interval,
            )
        except BaseException:
            self._ends.close()
            raise
        threading.Thread(target=self._watch, name="lanes-stream", daemon=True).start()

    def __repr__(self) -> str:
        state = "ended" if self._ended.is_set() else "runs"
        return f"<Stream of {self._prepared.source.topic} {state}: {self._run.counts.batches} batches>"

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.stop()
            self.join()
        else:
            self.cancel()

    @property
    def progress(self) -> Progress:
        """How far it is, now: within a batch only where ``stream`` was given a ``progress``."""
        return self._meter.progress()

    @property
    def report(self) -> Report:
        """What it did so far, as of a replay. ``skipped``: positions of its batches that were not delivered."""
        counts = self._run.counts.by_name
        return Report(
            delivered=counts["delivered"],
            finished=counts["finished"],
            dead_lettered=counts["dead_lettered"],
            skipped=self._read - counts["delivered"],
            batches=self._run.counts.batches,
            seconds=time.monotonic() - self._meter.started if self._seconds is None else self._seconds,
            plan=self._prepared.plan,
        )

    def stop(self) -> None:
        """End in order: the batch under way is handled and noted, and none follows. Does not block. Idempotent; a
        signal handler may call it."""
        self._ends.stop()

    def cancel(self) -> None:
        """End at once: the batch under way is handled again from its beginning when the stream goes on. Handlers may go
        on for some seconds. Blocks until the query has ended. Idempotent."""
        self._run.given_up.set()
        with mapped_errors(self._prepared.source.topic):
            self._query.stop()

    def join(self, timeout: float | None = None) -> bool:
        """Wait until it has ended, ``timeout`` seconds at most, None = for ever; whether it has.

        Raises as ``replay`` what it has ended by: ``SourceError`` for positions that are gone, for a topic that was
        made anew, and for failures of Spark and of the brokers; ``HandlerHalted`` for a message that was given up under
        the poison policy ``exit``; what ``progress`` has raised, as it is.
        """
        if not self._ended.wait(timeout):
            return False
        try:
            with mapped_errors(self._prepared.source.topic):
                self._query.awaitTermination()
        except LanesError:
            # Spark has made a text of it.
            if self._meter.raised is None:
                raise
        self._meter.check()
        return True

    def _look(self, at: Mapping[int, int]) -> Mapping[int, Span]:
        """What the topic has now of what is selected; in the thread that is asked."""
        selection = self._prepared.selection
        found = self._prepared.source.spans(self._spark)
        check_incarnation(self._prepared.source.topic, self._prepared.spans.incarnation, found.incarnation)
        spans = {
            partition: place
            for partition, whole in found.by_partition.items()
            if (place := selection.place(partition, whole)) is not None
        }
        self._meter.look(spans, at)
        return spans

    def _done(self, ranges: Mapping[int, Span]) -> None:
        self._read += sum(end - first for first, end in ranges.values())
        self._meter.done(self._run, ranges)

    def _watch(self) -> None:
        """Stop the query when it has heard that nothing follows; clean up when it has ended."""
        try:
            while self._query.isActive:
                if self._ends.stopped.wait(_LOOK):
                    self._query.stop()
        except Exception as error:
            # Spark is gone, or the query has failed while it was stopped: ``join`` asks it, and raises that.
            log.debug("%r: %s: %s", self, type(error).__name__, error)
        finally:
            self._seconds = time.monotonic() - self._meter.started
            # Whatever fails here, the others are closed, from the last one on, and nobody waits for ever.
            with ExitStack() as closing_all:
                closing_all.callback(self._ended.set)
                closing_all.callback(self._prepared.close)
                closing_all.callback(self._meter.close)
                closing_all.callback(self._ends.close)
