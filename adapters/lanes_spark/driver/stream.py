"""Replays a Kafka topic, and continues with new messages until the caller stops the stream."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final, Unpack

from lanes.errors import ConfigError, LanesError
from lanes.handlers import Handler
from lanes_spark.driver.offset_server import OffsetServer
from lanes_spark.driver.progress import Progress
from lanes_spark.driver.run import Report, RunOptions, SparkRun, open_run
from lanes_spark.failures import mapped_errors
from lanes_spark.positions import Span, check_incarnation
from lanes_spark.tables.kafka_topic import KafkaTopic

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger("lanes")

INTERVAL: Final = 1.0
"""Seconds between two requests for new messages of an idle topic."""

_LOOK: Final = 0.2
"""Maximum time in seconds until the stream's thread detects the end of the query."""


def stream(
    spark: SparkSession,
    source: KafkaTopic,
    handler: Handler,
    *,
    checkpoint: str,
    interval: float = INTERVAL,
    **options: Unpack[RunOptions],
) -> Stream:
    """Run ``handler`` over all existing and new messages of a topic, in batches, until the caller stops the stream.

    The call blocks until the query runs. A stream may continue the checkpoint of a replay with the same selection. A
    replay may likewise continue the checkpoint of a stream.

    Args:
        spark: Session whose executors run the handler.
        source: Topic to read.
        handler: Handler of one message or of a batch, as for ``lanes.Consumer``.
        checkpoint: Folder in which Spark logs every batch. After a crash the stream continues from this folder.
        interval: Seconds between two checks of an idle topic for new messages, 0.001 or more.
        **options: Options that ``replay`` and ``stream`` share, see ``RunOptions``.

    Returns:
        The running stream.

    Raises:
        ConfigError: An argument is invalid, or the arguments contradict a promise.
        TypeError: ``options`` has an unknown name.
        SourceError: The topic has lost positions, another replay uses the checkpoint, or Spark or the brokers failed.
            ``Stream.join`` raises later errors.
    """
    if not isinstance(source, KafkaTopic):
        raise ConfigError(f"stream of a {type(source).__name__}: only a KafkaTopic gets new messages; use replay")
    if not isinstance(checkpoint, str) or not checkpoint:
        raise ConfigError(f"checkpoint={checkpoint!r}: a stream needs a checkpoint; name a folder")
    if not isinstance(interval, int | float) or isinstance(interval, bool) or not 0.001 <= interval < math.inf:
        raise ConfigError(f"interval={interval!r}: must be a number of seconds, 0.001 or more")
    run = open_run(spark, source, handler, options, checkpoint=checkpoint)
    with mapped_errors(source.topic), ExitStack() as unless_it_runs:
        unless_it_runs.callback(run.close)
        running = Stream(spark, run, checkpoint, float(interval))
        unless_it_runs.pop_all()
    return running


class Stream:
    """A running stream, returned by ``stream``.

    Used as a context manager, the object stops the stream and waits for its end when the block ends. If the block
    raises an exception, the object cancels the stream. Any thread may call the methods. A ``progress`` callback must
    not call ``cancel`` or ``join``, because these methods wait for the callback.
    """

    def __init__(self, _spark: SparkSession, _run: SparkRun, _checkpoint: str, _interval: float) -> None:
        from lanes_spark.driver.query import begin_query

        self._spark = _spark
        self._run = _run
        self._seconds: float | None = None
        self._read = 0
        self._offsets = OffsetServer(self._look)
        self._ended = threading.Event()
        _run.tracker.begin(_run.scope.places, {})
        self._offsets.start()
        try:
            self._query = begin_query(
                _spark, _run, _checkpoint, done=self._done, live=self._offsets.path, interval=_interval
            )
        except BaseException:
            self._offsets.close()
            raise
        threading.Thread(target=self._watch, name="lanes-stream", daemon=True).start()

    def __repr__(self) -> str:
        state = "ended" if self._ended.is_set() else "runs"
        return f"<Stream of {self._run.scope.source.topic} {state}: {self._run.tracker.counts.batches} batches>"

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
        """The current progress of the stream.

        Without a ``progress`` callback, the counts change only between batches.
        """
        return self._run.tracker.progress()

    @property
    def report(self) -> Report:
        """Report of the finished batches."""
        return self._run.report(read=self._read, seconds=self._seconds)

    def stop(self) -> None:
        """Stop the stream after the current batch.

        Does not block. Idempotent. A signal handler may call ``stop``.
        """
        self._offsets.stop()

    def cancel(self) -> None:
        """Stop the stream at once. A continued stream handles the current batch again.

        Handlers may run for some more seconds. Blocks until the query has ended. Idempotent.
        """
        self._run.batches.given_up.set()
        with mapped_errors(self._run.scope.source.topic):
            self._query.stop()

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the stream has ended.

        Args:
            timeout: Maximum time to wait, in seconds. Default: no limit.

        Returns:
            Whether the stream has ended.

        Raises:
            SourceError: The topic has lost positions or was recreated, or Spark or the brokers failed.
            HandlerHalted: A message failed under the poison policy ``exit``.
            LanesError: A task failed with another error of ``lanes``.
            Exception: The exception of ``progress``, unchanged.
        """
        if not self._ended.wait(timeout):
            return False
        try:
            with mapped_errors(self._run.scope.source.topic):
                self._query.awaitTermination()
        except LanesError:
            # Spark has converted the exception of ``progress`` to text; ``check`` raises the exception itself.
            if self._run.tracker.raised is None:
                raise
        self._run.tracker.check()
        return True

    def _look(self, at: Mapping[int, int]) -> Mapping[int, Span]:
        """Return the selected positions up to the current end of the topic.

        The thread of the offset server calls this method.
        """
        scope = self._run.scope
        found = scope.source.spans(self._spark)
        check_incarnation(scope.source.topic, scope.spans.incarnation, found.incarnation)
        spans = scope.selection.places(found.by_partition)
        self._run.tracker.look(spans, at)
        return spans

    def _done(self, ranges: Mapping[int, Span]) -> None:
        self._read += sum(end - first for first, end in ranges.values())
        self._run.tracker.done(ranges)

    def _watch(self) -> None:
        """Stop the query after a call of ``stop``, and release the resources of the stream when the query has ended."""
        try:
            while self._query.isActive:
                if self._offsets.stopped.wait(_LOOK):
                    self._query.stop()
        except Exception as error:
            # Ignore this error, because Spark has ended or the query has failed during its stop. ``join`` raises the
            # error of the query.
            log.debug("%r: %s: %s", self, type(error).__name__, error)
        finally:
            self._seconds = time.monotonic() - self._run.tracker.started
            # Run every callback, even after a failure, so that ``join`` always returns.
            with ExitStack() as closing_all:
                closing_all.callback(self._ended.set)
                closing_all.callback(self._run.close)
                closing_all.callback(self._offsets.close)
