"""The consumer: the public object that connects one source and one handler.

Longer than most: the class is the interface of the library, and each method states its threads, errors and effects.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import Final, Literal, Self, TypedDict

import anyio

from lanes.arguments import check_options, check_settings, check_source
from lanes.attempts import Attempts
from lanes.clock import Clock, monotonic
from lanes.config import Settings
from lanes.core.engine import Engine
from lanes.core.policy import Policy, RetryPolicy
from lanes.core.types import Partition, PartitionKey, key_bytes
from lanes.dead_letter import error_text
from lanes.errors import ConfigError, LanesError
from lanes.events import GroupEvent, OnEvent
from lanes.handlers import Decode, Handler, check_handler
from lanes.history.journal import Journal, close_journal, journal_of, recorder
from lanes.history.recorder import History
from lanes.history.rules import Rules
from lanes.observe.health import Health, examine
from lanes.observe.otel import Telemetry
from lanes.observe.status import Status, snapshot, undisturbed
from lanes.observe.tap import Tap
from lanes.runtime.run import Run
from lanes.source import Addressed, DeadLetters, Declaring, Lagging, Reading, Source, SourceTraits
from lanes.workers.outcomes import cancellation_of

log = logging.getLogger("lanes")

CLOSE_TIMEOUT: Final = 5.0
"""Seconds at the end of a run for the last settlement, and for the end of the journal.

The source and the target of dead letters each get twice as long to close.
"""


class ConsumerOptions(TypedDict, total=False):
    """The keyword arguments of ``Consumer`` that ``run`` and ``main`` also accept."""

    settings: Settings | None
    dead_letters: DeadLetters | None
    attempts: Attempts | None
    history: History | None
    journal: Journal | str | os.PathLike[str] | None
    decode: Decode | None
    on_event: OnEvent | None


class Consumer:
    """One source, one handler, and the lanes between them.

    Either call ``run``, or use the consumer as an async context manager. A context manager runs the consumer
    concurrently with the block, and drains the consumer at the end of the block. An error that stops the consumer
    cancels the block and is raised at the end of the block.

    An instance runs once, and a process may run several consumers. Any thread may call ``stop``, ``pause``, ``resume``,
    ``status`` and ``health``, and read ``ready``, ``active`` and ``healthy``. Every other method raises ``LanesError``
    on another thread than the thread of the event loop that runs the consumer.

    Args:
        source: Source of the messages.
        handler: Async or plain function of one ``Message``, or of a list of them with ``Settings(batch=…)``. A plain
            function runs in threads; see ``Settings.sync_handlers``.
        settings: Bounds, order, retries and times. ``None`` = the defaults.
        dead_letters: Target for messages whose attempts are used up.
        attempts: Store by which the next owner of a partition continues the attempts of its messages.
        history: History that records the events of the run, row by row, in a file of its directory.
        journal: Journal, or the directory of a journal: Parquet files with the rows of a history, for SQL. Writing the
            files delays no handler.
        decode: Plain function that returns ``Message.data`` before the handler is called.
        on_event: Function that is called with each ``GroupEvent``.
        clock: Monotonic clock in seconds, for simulation.

    Raises:
        ConfigError: An argument is of a wrong kind, the handler cannot be called with its argument, or arguments or
            settings contradict each other.
    """

    def __init__(
        self,
        source: Source,
        handler: Handler,
        *,
        settings: Settings | None = None,
        dead_letters: DeadLetters | None = None,
        attempts: Attempts | None = None,
        history: History | None = None,
        journal: Journal | str | os.PathLike[str] | None = None,
        decode: Decode | None = None,
        on_event: OnEvent | None = None,
        clock: Clock = monotonic,
    ) -> None:
        check_source(source)
        check_settings(settings)
        check_options(
            dead_letters=dead_letters,
            attempts=attempts,
            history=history,
            journal=journal,
            on_event=on_event,
            clock=clock,
        )
        self._settings = settings or Settings()
        check_handler(handler, decode, self._settings)
        self._poison = self._settings.poison_policy(has_dead_letters=dead_letters is not None)
        declaring: object = source
        if isinstance(declaring, Declaring):
            self._check_traits(declaring.declared())
        self._source = source
        self._lagging = source if isinstance(source, Lagging) else None
        self._reading = source if isinstance(source, Reading) else None
        self._handler = handler
        self._decode = decode
        self._dead_letters = dead_letters
        target: object = dead_letters
        self._addressed = target if isinstance(target, Addressed) else None
        self._attempts = attempts
        self._journal = journal_of(journal)
        self._recorder = recorder(history, self._journal)
        self._on_event = on_event
        self._clock = clock
        self._name = "source"
        self._state: Literal["new", "starting", "running", "stopped"] = "new"
        self._stopping = False
        self._paused = False
        # The thread that runs the consumer or waits for its start; None = no call has named the thread yet.
        self._thread: threading.Thread | None = None
        self._opened = anyio.Event()
        self._ended = anyio.Event()
        # None until the source is open. The run stays after its end, for `status`.
        self._run: Run | None = None
        self._block: AbstractAsyncContextManager[None] | None = None
        self._failure: BaseException | None = None

    # --- running

    async def run(self) -> None:
        """Consume until ``stop`` is called or a finite source has ended.

        Blocks until every partition is handed over or lost, and the source is closed. A cancellation stops at once:
        handlers are cancelled, finished messages are settled, and all other messages are redelivered later. A
        ``MemoryError`` of a handler, or an exception that is not an ``Exception``, such as ``SystemExit``, stops the
        consumer after a drain and is raised.

        An error that ends the run is also logged, because an application may lose the exception of a task. Only the
        thread of the event loop may call this method; the first call of ``run`` or ``opened`` decides which thread.

        Raises:
            ConfigError: A setting contradicts the broker or the source, mostly found before the first message; or a
                handler returned an awaitable or raised a ``ConfigError``.
            SourceError: The broker cannot be reached at the start, or is gone for good.
            ContractError: The source broke a rule of ``lanes.source``.
            HandlerHalted: A message failed for good under the poison policy ``exit``, or user code cancelled a handler.
            LanesError: ``run`` was called before, or another thread has awaited ``opened``.
        """
        self._check_new()
        try:
            await self._consume()
        except Exception as error:
            log.error(
                "%s: the consumer has stopped and handles no more messages (%s: %s)",
                self._name,
                type(error).__qualname__,
                error_text(error),
            )
            raise

    def _check_new(self) -> None:
        if self._state != "new":
            raise LanesError(f"this consumer is {self._state} already: make a new one for another run")
        self._check_thread("run", "make and run the consumer on one thread")

    async def _consume(self) -> None:
        """Run. The caller reports an error that ends the run."""
        self._check_new()
        self._thread = threading.current_thread()
        self._state = "starting"
        reason = "failed"
        try:
            run = await self._open()
            self._state = "running"
            self._opened.set()
            if self._stopping:
                run.stop()
            await run.run()
            reason = "drained" if run.stopping else "stopped"
        except Exception as error:
            self._failure = error
            raise
        finally:
            self._state = "stopped"
            with anyio.CancelScope(shield=True):
                await self._close(reason)
            self._opened.set()
            self._ended.set()
        if run.fatal is not None:
            self._failure = run.fatal
            raise self._failure

    def stop(self) -> None:
        """Drain: receive no more messages, let running handlers end, settle, release. Then ``run`` returns.

        Does not block. Idempotent. Any thread, and any callback of the event loop, such as a signal handler, may call
        this method. After the next turns of the loop no handler starts, unless the source cannot hand over the
        completed set.
        """
        self._stopping = True
        run = self._active_run  # read once: another thread may end the run meanwhile
        if run is not None:
            run.stop()

    async def opened(self) -> None:
        """Wait until ``run`` has opened the source, so that an application without a working consumer does not start.

        Await this method while another task calls ``run``, or in the block of the context manager. An open source is
        connected, and has checked its topic or stream and the settings. The first partition may come later; see
        ``ready``. Idempotent and cancel-safe. Any number of tasks may wait. Only the thread of the event loop may call
        this method.

        Raises:
            ConfigError: ``run`` has raised this error, for example because a topic is missing. Any other exception of
                ``run`` is raised too.
            SourceError: ``run`` has raised this error, for example because the broker cannot be reached.
            LanesError: ``run`` ended before the source was open, or another thread runs the consumer.
        """
        self._check_thread("opened", "await it in that event loop")
        self._thread = threading.current_thread()
        await self._opened.wait()
        if self._failure is not None:
            raise self._failure
        if self._run is None:
            raise LanesError(f"{self._name}: run() was cancelled before the source was open; start the consumer again")

    async def drain(self) -> None:
        """Call ``stop``, and wait for the end of ``run``.

        Idempotent. The drain continues if this call is cancelled. Only the thread of the event loop may call this
        method; other threads call ``stop``.

        Raises:
            LanesError: Another thread runs the consumer.
        """
        self._check_thread("drain", "call stop(), which any thread may call")
        self.stop()
        if self._state != "new":
            await self._ended.wait()

    async def __aenter__(self) -> Self:
        self._block = self._run_beside()
        await self._block.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        assert self._block is not None, "a block that was entered is left"
        return await self._block.__aexit__(kind, error, traceback)

    @asynccontextmanager
    async def _run_beside(self) -> AsyncIterator[None]:
        """Run concurrently with the block. Raises exceptions outside the task group, which would wrap them."""
        failure: BaseException | None = None

        async def run() -> None:
            nonlocal failure
            try:
                await self.run()
            except anyio.get_cancelled_exc_class():
                raise
            except BaseException as error:
                failure = error
                tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            try:
                yield
                await self.drain()
            except BaseException as error:
                if cancellation_of(error) is not None:
                    raise
                failure = error
                tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure

    # --- questions and commands

    @property
    def ready(self) -> bool:
        """Whether the source is open, and has reported a plan if it reports plans. A hot standby is ready.

        Any thread may read this property.
        """
        run = self._active_run
        return run is not None and run.planned

    @property
    def active(self) -> bool:
        """Whether the consumer owns a partition. Any thread may read this property."""
        run = self._active_run
        return run is not None and bool(run.engine.partitions)

    @property
    def healthy(self) -> bool:
        """Whether ``health`` finds no reason to be unhealthy. O(in flight). Any thread may read this property."""
        return self.health().ok

    def health(self) -> Health:
        """Check whether the consumer makes progress. Does not block; O(in flight).

        Any thread may call this method.

        The consumer does not make progress while at least one condition holds:

        - The oldest unfinished message is older than ``Settings.unhealthy_after``.
        - A partition has waited longer than ``Settings.unhealthy_after`` for the attempt store or a failing settlement.
        - A lane is blocked, or waits for the confirmation of its dead letter.
        - All threads are stuck.
        - ``max_ahead`` is reached.

        Returns:
            The reasons; none while the consumer makes progress. Before ``run`` there is no reason. After ``run``, the
            only possible reason is the error that ended the run.
        """
        run = self._active_run
        if run is None:
            failure = self._failure
            return Health(reasons=() if failure is None else (f"stopped by {type(failure).__qualname__}",))
        now, timeout = self._clock(), self._settings.timeout
        return undisturbed(
            lambda: examine(
                run.engine,
                now,
                unhealthy_after=self._settings.unhealthy_after,
                stuck=[] if timeout is None else run.workers.stuck(now, timeout),
                unknown=run.attempts.asked_since,
                unsettled=run.settler.unsettled.partitions,
            )
        )

    def status(self) -> Status:
        """Take a snapshot of the consumer. Does not block; O(in flight).

        Any thread may call this method. On another thread, two values of one snapshot may differ by the messages that
        finish meanwhile.

        Returns:
            Partitions, lanes and counters. Before ``run`` has opened the source, the status has only the bounds of
            the settings.

        Raises:
            LanesError: The start has failed.
            ConfigError: ``batch`` is above the bound on messages in flight, so ``run`` would fail too.
        """
        if self._state in ("new", "starting"):
            engine = Engine(self._policy(self._settings.in_flight_bound(None)))
            engine.pause(paused=self._paused)
            return snapshot(engine, self._clock(), dead_lettered=0, redelivered={}, loop_held=0.0, lag=self._lag)
        run = self._last_run("ask for its status")
        return undisturbed(
            lambda: snapshot(
                run.engine,
                self._clock(),
                dead_lettered=run.dead_letter_writer.confirmed,
                redelivered=run.redelivered,
                loop_held=run.loop_watch.seconds,
                lag=self._lag,
            )
        )

    def pause(self) -> None:
        """Receive no more messages from the source. Messages in flight continue.

        Does not block. Idempotent. Any thread may call this method, also before ``run``. A pause outlives assignments.
        A drain ignores the pause.
        """
        self._pause(paused=True)

    def resume(self) -> None:
        """Receive messages again after ``pause``.

        Does not block. Idempotent. Any thread may call this method.
        """
        self._pause(paused=False)

    def _pause(self, *, paused: bool) -> None:
        self._paused = paused
        run = self._run  # read once, and after ``_paused`` was set: another thread may open the source meanwhile
        if run is not None and run.engine.pause(paused=paused):
            if threading.current_thread() is self._thread:
                run.room_changed()
            else:
                run.room_changed_elsewhere()

    def unblock(self, key: PartitionKey | None) -> int:
        """Give the heads of a key's blocked lanes one more attempt. Does not block.

        The attempts so far still count. Only the thread of the event loop may call this method.

        Args:
            key: The key. ``None`` = messages without a key.

        Returns:
            Number of lanes that were blocked.

        Raises:
            LanesError: The consumer has not started, or has stopped, or another thread runs the consumer.
        """
        run = self._open_now("unblock", "unblock a key")
        name = None if key is None else key_bytes(key)
        count = run.engine.unblock(name)
        run.tap.unblocked(name, count)
        run.after_command()
        return count

    def park(self, key: PartitionKey | None) -> int:
        """Send the blocked and held heads of a key to the dead letters. Does not block.

        A lane continues after the broker has confirmed its dead letter. Only the thread of the event loop may call this
        method.

        Args:
            key: The key. ``None`` = messages without a key.

        Returns:
            Number of messages that become dead letters.

        Raises:
            ConfigError: The consumer has no target for dead letters.
            LanesError: The consumer has not started, or has stopped, or another thread runs the consumer.
        """
        if self._dead_letters is None:
            raise ConfigError("park needs dead letters, or messages are lost: pass dead_letters=… to the consumer")
        run = self._open_now("park", "park a key")
        count = run.engine.park(None if key is None else key_bytes(key))
        run.after_command()
        return count

    def _lag(self, partition: Partition) -> int | None:
        return None if self._lagging is None else self._lagging.lag(partition)

    @property
    def _active_run(self) -> Run | None:
        """The run while its source is open; None = no run is active."""
        return self._run if self._state == "running" else None

    def _last_run(self, what: str) -> Run:
        """The current or the ended run. Raises ``LanesError`` if the source was never opened."""
        if self._run is None:
            raise LanesError(f"the consumer has not started: {what} after run() has opened the source")
        return self._run

    def _open_now(self, call: str, what: str) -> Run:
        run = self._last_run(what)
        if self._state == "stopped":
            raise LanesError(f"the consumer has stopped: {what} while it runs; unsettled messages are redelivered")
        self._check_thread(
            call, f"use anyio.from_thread.run_sync(consumer.{call}, key), or call_soon_threadsafe of that event loop"
        )
        return run

    def _check_thread(self, call: str, remedy: str) -> None:
        """Raise ``LanesError`` if the consumer belongs to the event loop of another thread."""
        here = threading.current_thread()
        if self._thread is not None and self._thread is not here:
            raise LanesError(
                f"Consumer.{call} was called on the thread {here.name!r}, but the consumer belongs to the event loop "
                f"of the thread {self._thread.name!r}: {remedy}"
            )

    # --- start and end

    async def _open(self) -> Run:
        if self._dead_letters is not None:
            await self._dead_letters.open()
        traits = await self._source.open()
        self._name = traits.name
        settings = self._settings
        bound = self._check_traits(traits)
        self._check_destination()
        if settings.max_in_flight is None and traits.max_in_flight == bound:
            log.info("%s: max_in_flight is %d, the limit of the broker's consumer", self._name, bound)
        engine = Engine(self._policy(bound, knows_settled=not traits.remembers))
        tap = Tap(
            self._clock,
            self._recorder,
            Telemetry.create(traits.name, traits.system, self.status, clock=self._clock),
            None if self._on_event is None else self._notify,
        )
        self._run = Run(
            engine,
            self._source,
            traits,
            self._handler,
            self._decode,
            self._dead_letters,
            self._attempts,
            settings,
            self._clock,
            tap,
        )
        # After ``_run`` was set: from now on, another thread pauses the engine itself.
        engine.pause(paused=self._paused)
        if self._recorder is not None:
            self._recorder.open(
                source=traits.name,
                concurrency=settings.concurrency,
                max_in_flight=bound,
                max_in_flight_bytes=settings.max_in_flight_bytes,
                now=self._clock(),
                rules=Rules.of(settings, traits, self._poison, attempts_kept=self._attempts is not None),
            )
        return self._run

    def _check_traits(self, traits: SourceTraits) -> int:
        """Return the bound on messages in flight. Raises ``ConfigError`` if the settings contradict the source."""
        settings = self._settings
        bound = settings.in_flight_bound(traits.max_in_flight)
        settings.check_drain(traits.revoke_limit)
        settings.check_partitions(traits.name, traits.partitions)
        settings.check_order(traits.name, ordered=traits.ordered)
        return bound

    def _check_destination(self) -> None:
        """Raise ``ConfigError`` if the source reads its own dead letters, because each would make another one."""
        found = self._addressed.destination() if self._addressed is not None else None
        if found is not None and self._reading is not None and self._reading.reads(found):
            subject = f" (subject {found.subject!r})" if found.subject else ""
            raise ConfigError(
                f"{self._name}: the dead letters go to {found.name!r}{subject}, which this source reads too, so each "
                "dead letter would make another one; write the dead letters to a separate topic or stream"
            )

    def _notify(self, event: GroupEvent) -> None:
        assert self._on_event is not None and self._run is not None, (
            "an event follows the start, and only a consumer with on_event notifies"
        )
        try:
            self._on_event(event)
        except Exception as error:
            self._run.stop_because(error)

    def _policy(self, max_in_flight: int, *, knows_settled: bool = True) -> Policy:
        settings = self._settings
        retry = settings.retry
        return Policy(
            concurrency=settings.concurrency,
            max_in_flight=max_in_flight,
            max_bytes=settings.max_in_flight_bytes,
            retry=RetryPolicy(retry.attempts, retry.backoff, retry.max_backoff),
            poison=self._poison,
            order=settings.order,
            keyless=settings.keyless,
            lanes=settings.lanes or 0,
            max_ahead=settings.max_ahead,
            commit_interval=settings.commit_interval,
            commit_count=settings.commit_count,
            knows_settled=knows_settled,
            keeps_attempts=self._attempts is not None,
        )

    async def _close(self, reason: str) -> None:
        """Settle finished messages and close every resource at the end of ``run``, within a bounded time."""
        run = self._run
        if run is not None and run.fatal is not None:
            reason = "failed"
        with anyio.move_on_after(CLOSE_TIMEOUT):
            if run is not None:
                # A cancellation may have left finished messages. After a drain no finished message is left.
                await run.settler.settle()
        for closed in (self._source, self._dead_letters):
            with anyio.move_on_after(2 * CLOSE_TIMEOUT) as closing:
                try:
                    if closed is not None:
                        await closed.aclose()
                except Exception as error:
                    # The error is logged only, because it would hide the reason why the run ended.
                    log.warning(
                        "%s: cannot close %r (%s, %s); the run ends all the same, and the end of the process frees "
                        "what is still open",
                        self._name,
                        closed,
                        type(error).__name__,
                        error,
                    )
            if closing.cancelled_caught:
                log.warning(
                    "%s: %r did not close within %g s; the run ends all the same, and the end of the process frees "
                    "what is still open",
                    self._name,
                    closed,
                    2 * CLOSE_TIMEOUT,
                )
        if self._recorder is not None:
            self._recorder.close(reason, self._clock())
        if self._journal is not None:
            await close_journal(self._journal, self._name, CLOSE_TIMEOUT)
        if run is not None and run.tap.telemetry is not None:
            run.tap.telemetry.close()
