"""Runs one task of Spark: a consumer of ``lanes`` that reads Arrow batches and returns Arrow batches.

A task is a plain generator for ``mapInArrow``. The generator itself needs neither Spark nor a JVM. The consumer runs on
an event loop in a separate thread. Timers and heartbeats therefore continue while Spark does not advance the generator.
One call passes a batch to this thread, and the thread returns rows in batches of a few thousand.

``Settings.max_in_flight`` and ``max_in_flight_bytes`` limit the messages, and ``AHEAD`` limits the Arrow batches with
undelivered rows. The task handles and settles all rows before the generator ends, except after a failure or an early
close. If ``batches`` raises an exception, or the caller closes the generator early, the task cancels its handlers. At
its end the task closes its loop, thread and clients.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeVar, cast

import anyio

from lanes.consumer import Consumer
from lanes.core.types import Message
from lanes.errors import LanesError
from lanes.handlers import is_async
from lanes.runtime.garbage import tuned_gc
from lanes_spark.task.job import TaskJob
from lanes_spark.task.journal import Pace, task_journal
from lanes_spark.task.progress import Tell, telling
from lanes_spark.task.results import Result, Returns, rows_batch, summary_batch
from lanes_spark.task.source import ArrowSource

log = logging.getLogger("lanes")

AHEAD: Final = 2
"""Maximum number of Arrow batches that the source has received, but not completely delivered."""

_ROWS_AT_ONCE: Final = 4_096
"""Number of returned rows at which the loop passes the rows to the generator."""

_HOOK_TIMEOUT: Final = 30.0
"""Seconds allowed for an async ``teardown``."""

_JOIN_TIMEOUT: Final = 60.0
"""Seconds that an ending task waits for its event loop, in addition to the limits of the drain and of ``teardown``."""

STANDS_AFTER: Final = 10.0
"""Seconds without an event after which the task asks the loop for an answer. After the same time without an answer, the
task logs a warning."""

_FRAMES: Final = 3

T = TypeVar("T")


class _Ready:
    """Event: the loop runs and accepts calls."""


class _Taken:
    """Event: the source has delivered all rows of one more batch."""


class _Ended:
    """Event: the loop has ended. ``error`` is the cause; None = the loop ended after the last row or a cancellation."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


_Event = _Ready | _Taken | _Ended | list[Result]


def run_task(
    batches: Iterable[Any], job: TaskJob, *, member: str | None = None, tell: Tell | None = None
) -> Iterator[Any]:
    """Handle the rows of Arrow batches, in their order within a key.

    The returned iterator blocks; do not use it on an event loop.

    Args:
        batches: Arrow batches with columns of ``task.rows.COLUMNS``, and at least the columns of ``task.rows.NEEDED``.
        job: Handler and its resources.
        member: Name of this attempt of the task in its journal. Default: a random name.
        tell: Function that receives a report of the task about once a second, on the event loop.

    Returns:
        An iterator over batches of ``output_schema(job.results)``: rows that handlers returned, in the order of the
        settlements, and at the end one row with the counts.

    Raises:
        LanesError: The consumer failed, or a returned row does not fit ``job.results``.
        Exception: An exception of an async ``setup`` or ``teardown``, or of ``dead_letters`` or ``batches``, unchanged.
    """
    return _Task(job, member, tell).run(batches)


class _Task:
    def __init__(self, job: TaskJob, member: str | None, tell: Tell | None) -> None:
        self._job = job
        self._tell = tell
        self._journal = task_journal(job.journal, member)
        self._inbox: SimpleQueue[_Event] = SimpleQueue()
        self._results: list[Result] = []
        self._returns = Returns()
        self._source = ArrowSource(job.topic, taken=self._batch_taken, settled=self._settled)
        if self._journal is not None:
            self._source.pace = Pace(self._journal).wait
        self._finished = self._dead_lettered = 0
        self._ended: _Ended | None = None
        self._waiting = 0  # number of batches with undelivered rows
        self._ready = False
        self._consumer: Consumer
        self._misfit: LanesError | None = None
        self._loop: asyncio.AbstractEventLoop
        self._scope: anyio.CancelScope
        self._thread = threading.Thread(target=self._main, name=f"lanes-task-{job.topic}", daemon=True)
        self._watch = LoopWatch(job.topic, self._thread, self._call)

    # --- in the thread of the task

    def run(self, batches: Iterable[Any]) -> Generator[Any, None, None]:
        self._thread.start()
        try:
            yield from self._next(block=True)  # _Ready, or the error that ended the loop
            for batch in batches:
                if not batch.num_rows:
                    continue
                self._waiting += 1
                self._call(self._source.offer, batch)
                yield from self._next(block=False)
                while self._waiting >= AHEAD:
                    yield from self._next(block=True)
            self._call(self._source.finish)
            while self._ended is None:
                yield from self._next(block=True)
            yield summary_batch(
                self._job.results,
                {
                    "delivered": self._source.delivered,
                    "finished": self._finished,
                    "dead_lettered": self._dead_lettered,
                },
            )
        finally:
            self._close()

    def _next(self, *, block: bool) -> Iterator[Any]:
        """Process the events from the loop. With ``block``, wait for at least one event.

        Raises the error that ended the loop.
        """
        while True:
            try:
                event = self._watch.get(self._inbox) if block and self._ready else self._inbox.get(block=block)
            except Empty:
                return
            block = False
            self._ready = True
            if isinstance(event, _Ended):
                self._ended = event
                if event.error is not None:
                    raise event.error
                if self._source.left:
                    raise LanesError(
                        f"{self._source!r}: the consumer ended before its rows were settled; please report this bug"
                    )
                return
            if isinstance(event, _Taken):
                self._waiting -= 1
            elif isinstance(event, list):
                yield rows_batch(self._job.results, event)

    def _call(self, function: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            # The loop is closed, so the last event in the inbox contains its error.
            pass

    def _close(self) -> None:
        """Cancel the loop and wait for its thread."""
        if self._ended is None:
            while not self._ready:
                # The cancellation needs a running loop.
                self._ready = isinstance(self._inbox.get(), _Ready | _Ended)
            if hasattr(self, "_scope"):
                self._call(self._scope.cancel)
        settings = self._job.settings
        self._thread.join(settings.drain_timeout + settings.grace + _HOOK_TIMEOUT + _JOIN_TIMEOUT)
        if self._thread.is_alive():
            log.error(
                "%s on Spark: the event loop of a task did not end. A handler, setup or teardown ignores its "
                "cancellation and keeps a thread until the worker process ends; await in that function",
                self._job.topic,
            )

    # --- in the thread of the loop

    def _main(self) -> None:
        error: BaseException | None = None
        try:
            # The block does not call ``gc.freeze``, because a process of Spark runs many short tasks, and has many
            # objects of pandas.
            with tuned_gc(freeze=False):
                anyio.run(self._consume, backend="asyncio")
        except BaseException as failure:
            error = failure
        self._inbox.put(_Ended(error))

    async def _consume(self) -> None:
        job = self._job
        self._loop = asyncio.get_running_loop()
        with anyio.CancelScope() as self._scope:
            self._inbox.put(_Ready())
            try:
                if job.setup is not None and is_async(job.setup):
                    await cast(Callable[[], Awaitable[object]], job.setup)()
                await self._run()
            finally:
                if job.teardown is not None and is_async(job.teardown):
                    with anyio.move_on_after(_HOOK_TIMEOUT, shield=True):
                        await cast(Callable[[], Awaitable[object]], job.teardown)()
        if self._results:
            self._inbox.put(self._results)

    async def _run(self) -> None:
        job = self._job
        handler = job.handler
        if job.results is not None:
            handler = self._returns.recording(handler, batch=job.settings.batch is not None)
        self._consumer = Consumer(
            self._source,
            handler,
            # Do not drain a task that ends early, because Spark may run the next attempt at the same time.
            settings=dataclasses.replace(job.settings, on_cancel="stop"),
            dead_letters=None if job.dead_letters is None else job.dead_letters(),
            decode=job.decode,
            journal=self._journal,
        )
        with telling(self._tell, lambda: self._source.delivered, lambda: self._finished, self._consumer.status):
            await self._consumer.run()
        if self._misfit is not None:
            raise self._misfit
        self._dead_lettered = self._consumer.status().dead_lettered

    def _batch_taken(self) -> None:
        self._inbox.put(_Taken())

    def _settled(self, messages: Sequence[Message]) -> None:
        self._finished += len(messages)
        if self._job.results is None:
            return
        try:
            self._results += self._returns.take(messages)
        except LanesError as error:
            # Do not raise this error in the source. The consumer first drains, and then the task raises the error.
            self._misfit = self._misfit or error
            self._consumer.stop()
        if len(self._results) >= _ROWS_AT_ONCE:
            results, self._results = self._results, []
            self._inbox.put(results)


class LoopWatch:
    """Watches an event loop, from the thread that waits for the loop's events.

    Args:
        topic: Topic name, for the warning.
        thread: Thread of the event loop.
        call: Function that schedules a function on the event loop.
    """

    def __init__(self, topic: str, thread: threading.Thread, call: Callable[[Callable[[], None]], None]) -> None:
        self._topic = topic
        self._thread = thread
        self._call = call
        self._asked = False
        self._told = False

    def get(self, inbox: SimpleQueue[T]) -> T:
        """Return the next event.

        Blocks. If the loop does not answer, the call logs the line that its thread executes.
        """
        while True:
            try:
                return inbox.get(timeout=STANDS_AFTER)
            except Empty:
                if not self._asked:
                    self._asked = True
                    self._call(self._answer)
                elif not self._told:
                    self._told = True
                    self._tell()

    def _answer(self) -> None:
        self._asked = self._told = False

    def _tell(self) -> None:
        frame = sys._current_frames().get(self._thread.ident or 0)
        if frame is None:
            return
        inner = traceback.extract_stack(frame)[-_FRAMES:]
        places = ", called at ".join(f"{one.filename}:{one.lineno} in {one.name}" for one in reversed(inner))
        log.warning(
            "%s on Spark: the event loop of a task has been blocked for %.0f s or more. A handler, setup or teardown "
            "blocks the loop at %s. Await there, or write a plain function, which runs in a thread",
            self._topic,
            STANDS_AFTER,
            places,
        )
