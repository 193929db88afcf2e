"""Keeps count of a replay or a stream, and tells its user about once a second how far it is."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from lanes.dead_letter import error_text
from lanes.errors import LanesError
from lanes_spark.driver.batch import BatchRun
from lanes_spark.driver.progress import NOTHING_RUNS, Progress, Pulse, TaskReports
from lanes_spark.positions import Islands, Span, wanted_count

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Meter"]

log = logging.getLogger("lanes")


class Meter:
    """``tell`` is called after each batch and meanwhile; None = nobody asks, and tasks tell nothing. To be closed.
    ``raised``: what ``tell`` has raised, where the run was stopped by it."""

    def __init__(self, spark: SparkSession, tell: Callable[[Progress], object] | None) -> None:
        self.started = time.monotonic()
        self.reports = None if tell is None else TaskReports(spark)
        self._lock = threading.Lock()
        self._spans: Mapping[int, Span] = {}
        self._islands: Islands = {}
        self._at: dict[int, int] = {}
        self._batches = 0
        self._counts: Mapping[str, int] = {}
        self._pulse = None if tell is None else Pulse(lambda: tell(self.progress()))
        self.raised: BaseException | None = None

    def begin(self, run: BatchRun, spans: Mapping[int, Span], islands: Islands) -> None:
        """``spans``: what is to be handled, and of it only ``islands``."""
        self._counts = dict(run.counts.by_name)
        self._spans, self._islands = spans, islands
        if self._pulse is not None:
            self._pulse.start()

    def look(self, spans: Mapping[int, Span], at: Mapping[int, int]) -> None:
        """What is to be handled has changed, and everything in front of ``at`` is done."""
        with self._lock:
            self._spans = spans
            self._at = dict(at)

    def done(self, run: BatchRun, ranges: Mapping[int, Span]) -> None:
        """A batch is. Raises ``LanesError`` where telling raises, or has raised since the last one; ``raised`` is
        what."""
        with self._lock:
            self._batches, self._counts = run.counts.batches, dict(run.counts.by_name)
            self._at |= {partition: end for partition, (_, end) in ranges.items()}
            if self.reports is not None:
                # What they told is in the counts now.
                self.reports.begin(self._batches)
        if self._pulse is not None:
            try:
                self._pulse.now()
            except BaseException as error:
                self.raised = error
                # Spark's own thread is to end by it, which only an exception of this kind does for sure.
                raise LanesError(f"progress= raised {type(error).__name__}") from error

    def check(self) -> None:
        """Raise what telling has raised, as it is, where the run was stopped by it."""
        if self.raised is not None:
            raise self.raised

    def progress(self) -> Progress:
        """How far it is, now."""
        with self._lock:
            running = NOTHING_RUNS if self.reports is None else self.reports.running()
            left = {number: (self._at.get(number, first), end) for number, (first, end) in self._spans.items()}
            return Progress(
                batches=self._batches,
                delivered=self._counts.get("delivered", 0) + running.delivered,
                finished=self._counts.get("finished", 0) + running.finished,
                dead_lettered=self._counts.get("dead_lettered", 0) + running.dead_lettered,
                positions=wanted_count(self._spans, self._islands),
                left=max(0, wanted_count(left, self._islands) - running.finished),
                seconds=time.monotonic() - self.started,
                running=running.tasks,
                oldest=running.oldest,
            )

    def close(self) -> None:
        """Tell no more. Idempotent."""
        if self._pulse is not None:
            self._pulse.stop()
            if (error := self._pulse.error) is not None and self.raised is None:
                log.warning("progress= was called no more: it raised %s: %s", type(error).__name__, error_text(error))
        if self.reports is not None:
            self.reports.close()
