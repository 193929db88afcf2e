"""The consumer: the public object that connects one source and one handler.

This file is longer than most, because the docstring of each public method states the threads, errors and effects.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Final, NoReturn, Self, TypedDict

import anyio

from lanes.arguments import OF_MAIN, names_unknown_options
from lanes.attempts import Attempts
from lanes.clock import Clock, monotonic
from lanes.config import Settings
from lanes.core.partition_budgets import make_engine
from lanes.core.policy import Policy, RetryPolicy
from lanes.core.types import Message, Partition, PartitionKey, key_bytes
from lanes.errors import ConfigError, LanesError
from lanes.events import GroupEvent, OnEvent
from lanes.handlers import Decode, Handler, check_handler, handler_name
from lanes.history.journal import Journal, close_journal, journal_of, recorder
from lanes.history.recorder import History
from lanes.history.rules import Rules
from lanes.observe.health import Health
from lanes.observe.otel import Telemetry
from lanes.observe.status import Provision, Status, snapshot, undisturbed
from lanes.observe.tap import Tap
from lanes.outputs.publisher import Publisher, Transacted, Transacting
from lanes.runtime.cancellation import drain_on_cancel, stop_on_second_cancel, to_its_end
from lanes.runtime.consumer_arguments import check_import, check_options, check_settings, check_source, use_source
from lanes.runtime.lifecycle import Lifecycle
from lanes.runtime.run import Run
from lanes.runtime.survivors import report_survivors
from lanes.source import (
    Addressed,
    Checkpointing,
    Connected,
    DeadLetters,
    Declaring,
    Keeping,
    Lagging,
    Ranged,
    Reading,
    Rejoining,
    Reporting,
    Source,
    SourceTraits,
    Stranding,
)
from lanes.workers.crossing import refuse_in_main_import
from lanes.workers.outcomes import cancellation_of

log = logging.getLogger("lanes")

CLOSE_TIMEOUT: Final = 5.0
"""Seconds at the end of a run for the last settlement, and for the end of the journal.

The source, the target of dead letters and the publisher each get twice as long to close.
"""


class ConsumerOptions(TypedDict, total=False):
    """The keyword arguments of ``Consumer`` that ``run`` and ``main`` also accept."""

    settings: Settings | None
    dead_letters: DeadLetters | None
    publisher: Publisher | None
    attempts: Attempts | None
    history: History | None
    journal: Journal | str | os.PathLike[str] | None
    decode: Decode | None
    on_event: OnEvent | None


@names_unknown_options("lanes.Consumer", homes=OF_MAIN)
class Consumer:
    """One source, one handler, and the lanes between them.

    Either call ``run``, or use the consumer as an async context manager. The context manager runs the consumer
    concurrently with the block, and drains the consumer at the end of the block. An error that stops the consumer
    cancels the block, and the end of the block raises this error.

    An instance runs once, and a process may run several consumers. Any thread may call ``stop``, ``pause``, ``resume``,
    ``status`` and ``health``, and read ``ready``, ``active`` and ``healthy``. Every other method raises ``LanesError``
    outside the thread of the consumer's event loop.

    Args:
        source: Source of the messages.
        handler: Async or plain function of one ``Message``, or of a list of messages with ``Settings(batch=…)``. A
            plain function runs in threads; see ``Settings.sync_handlers``.
        settings: Bounds, order, retries and times. ``None`` = the defaults.
        dead_letters: Target for messages that the consumer gives up, for example after their last attempt.
        publisher: Sender of the outputs of handlers; see ``Message.publish_soon``. ``None`` = handlers publish nothing.
        attempts: Store of failed attempts, from which the next owner of a partition continues.
        history: History that records the events of the run, row by row, in a file of its directory.
        journal: Journal, or the directory of a journal, which contains the rows of a history as Parquet files for SQL.
            No handler waits while the consumer writes the files.
        decode: Plain function that returns ``Message.data`` before the call of the handler.
        on_event: Function that the consumer calls with each ``GroupEvent``.
        clock: Monotonic clock in seconds, for simulation.

    Raises:
        ConfigError: An argument is of a wrong kind, the handler cannot be called with its argument, or arguments or
            settings contradict each other.
    """

    # A setting that is assigned to the consumer, such as `consumer.concurrency = 5`, would have no effect.
    __slots__ = (
        "__weakref__",
        "_addressed",
        "_at_once",
        "_attempts",
        "_block",
        "_clock",
        "_dead_letters",
        "_decode",
        "_end_process",
        "_handler",
        "_journal",
        "_keeping",
        "_lagging",
        "_life",
        "_on_event",
        "_paused",
        "_poison",
        "_publisher",
        "_queues",
        "_ranged",
        "_reading",
        "_recorder",
        "_settings",
        "_source",
        "_source_closed",
        "_stopping",
        "_stranding",
        "_transacted",
    )

    def __init__(
        self,
        source: Source,
        handler: Handler,
        *,
        settings: Settings | None = None,
        dead_letters: DeadLetters | None = None,
        publisher: Publisher | None = None,
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
            publisher=publisher,
            attempts=attempts,
            history=history,
            journal=journal,
            on_event=on_event,
            clock=clock,
        )
        self._settings = settings or Settings()
        check_handler(handler, decode, self._settings)
        if publisher is not None:
            self._settings.check_publisher()
        transacting: object = source
        self._transacted: Transacted | None = None
        if isinstance(transacting, Transacting):
            self._transacted = transacting.transacted(publisher)
            publisher = publisher if self._transacted is None else self._transacted.publisher
        self._poison = self._settings.poison_policy(has_dead_letters=dead_letters is not None)
        declaring: object = source
        if isinstance(declaring, Declaring):
            self._check_traits(declaring.declared())
        self._queues = declaring.declared().queues if isinstance(declaring, Declaring) else ()
        self._source = source
        self._lagging = source if isinstance(source, Lagging) else None
        self._stranding = source if isinstance(source, Stranding) else None
        self._keeping = source if isinstance(source, Keeping) else None
        self._ranged = source if isinstance(source, Ranged) else None
        self._reading = source if isinstance(source, Reading) else None
        self._handler = handler
        self._decode = decode
        self._dead_letters = dead_letters
        self._publisher = publisher
        target: object = dead_letters
        self._addressed = target if isinstance(target, Addressed) else None
        self._attempts = attempts
        self._journal = journal_of(journal)
        self._recorder = recorder(history, self._journal)
        self._on_event = on_event
        self._clock = clock
        self._life = Lifecycle(
            declaring.declared().name if isinstance(declaring, Declaring) else "source",
            self._settings,
            clock,
            source if isinstance(source, Connected) else None,
            source if isinstance(source, Rejoining) else None,
            source if isinstance(source, Reporting) else None,
        )
        self._stopping = False
        self._at_once = False
        self._paused = False
        self._block: AbstractAsyncContextManager[None] | None = None
        self._source_closed = False
        # Ends a process whose only job is this consumer, although a handler ignores its cancellation.
        self._end_process: Callable[[BaseException | None], NoReturn] | None = None

    # --- running

    async def run(self) -> None:
        """Deliver messages to the handler until a caller calls ``stop`` or a finite source has ended.

        The call blocks until the consumer has released or lost every partition, and has closed the source. After a
        ``MemoryError`` of a handler, or an exception that is not an ``Exception``, such as ``SystemExit``, the consumer
        drains, stops and raises that exception.

        After a cancellation, the consumer drains for at most ``Settings.longest_drain`` seconds, closes the source, and
        raises the cancellation. On asyncio a second ``Task.cancel`` ends the drain. After the cancellation of a scope,
        only this limit or ``stop(at_once=True)`` ends the drain. The consumer stops without a drain if the settings
        have ``on_cancel="stop"``, or if the source is not open yet. To stop without a drain, the consumer cancels async
        handlers, waits ``grace`` seconds for handlers in threads, and settles finished messages. The broker redelivers
        all other messages later.

        The consumer also logs an error that ends the run, because an application may lose the exception of a task. Only
        the thread of the event loop may call this method; the first call of ``run`` or ``opened`` decides which thread.

        Raises:
            ConfigError: A setting contradicts the broker, the source or a limit of the system. A handler returned an
                exception or an awaitable, or raised a ``ConfigError``. Another consumer has used the source.
            SourceError: The consumer cannot reach the broker at the start, the broker refuses a request, or a later
                call fails without a retry.
            ContractError: The source broke a rule of ``lanes.source``.
            HandlerHalted: A message failed all its attempts under the poison policy ``exit``, or user code cancelled a
                handler.
            LanesError: The program has already called ``run``, or another thread has awaited ``opened``.
        """
        if self._block is not None and self._life.state != "stopped":
            # The task of the block may not have begun yet.
            raise LanesError(
                "this consumer is run by `async with consumer` already: await consumer.ended() in the block to wait "
                "for its end"
            )
        await self._run()

    async def _run(self) -> None:
        check_import()
        self._life.check_new()
        try:
            await self._consume()
        except Exception as error:
            self._life.log_end(error)
            raise

    async def _consume(self) -> None:
        """Run. Run the consumer; the caller reports the error that ends the run."""
        life = self._life
        refuse_in_main_import()
        life.start()
        reason = "failed"
        used = False
        try:
            use_source(self._source)
            used = True
            run = await self._open()
            life.open()
            if self._at_once:
                run.stop_at_once()
            elif self._stopping:
                run.stop()
            if self._settings.on_cancel == "drain":
                await drain_on_cancel(run, self._settings.longest_drain)
            else:
                await run.run()
            reason = run.ending
        except anyio.get_cancelled_exc_class():
            if life.run is not None:
                reason = life.run.ending
                life.failed_in_drain(life.run.fatal)
            raise
        except Exception as error:
            life.failure = error
            raise
        finally:
            life.stop()
            try:
                if used:
                    # Otherwise another consumer closes the source, and this consumer has opened nothing.
                    await to_its_end(lambda: self._close(reason))
            finally:
                life.end()
        if run.fatal is not None:
            life.failure = run.fatal
            raise run.fatal

    def stop(self, *, at_once: bool = False) -> None:
        """Drain: stop receiving messages, wait for running handlers, settle messages, and release partitions.

        After the drain ``run`` returns. The call does not block. Idempotent. Any thread, and any callback of the event
        loop, such as a signal handler, may call this method. After this call no further handler starts, unless the
        source cannot hand over the completed set. On such a source, queued messages below the highest started message
        still start.

        Args:
            at_once: Whether to stop without a drain, or to end a drain that has begun; see ``run``.
        """
        self._stopping = True
        self._at_once = self._at_once or at_once
        run = self._life.active_run  # read once: another thread may end the run meanwhile
        if run is not None and at_once:
            run.stop_at_once()
        elif run is not None:
            run.stop()

    async def opened(self) -> None:
        """Wait until ``run`` has opened the source, so that an application starts only with a working consumer.

        Await this method while another task runs ``run``, or in the block of the context manager. An open source has
        connected, and has checked its topic or stream and the settings. The group may assign the first partition later;
        see ``ready``. Idempotent and cancel-safe. Any number of tasks may wait. If ``run`` was not called within 10 s,
        the method logs a warning and continues to wait. Only the thread of the event loop may call this method.

        Raises:
            ConfigError: ``run`` has raised this error, for example because a topic is missing. The method also raises
                any other exception of ``run``.
            SourceError: ``run`` has raised this error, for example because the broker cannot be reached.
            LanesError: ``run`` ended before the source was open, or another thread runs the consumer.
        """
        await self._life.until_opened()

    async def until_ready(self) -> None:
        """Wait until the consumer is ready; see ``ready``.

        Await this method while another task runs ``run``, or in the block of the context manager. Idempotent and
        cancel-safe. Any number of tasks may wait. The call returns at once if the consumer has been ready before. This
        also holds if ``run`` has ended without an error. Only the thread of the event loop may call this method.

        Raises:
            ConfigError: ``run`` has raised this error, for example because a topic is missing. The method also raises
                any other exception of ``run``.
            SourceError: ``run`` has raised this error, for example because the broker cannot be reached.
            LanesError: ``run`` ended before the consumer was ready, or another thread runs the consumer.
        """
        await self._life.until_ready()

    async def ended(self) -> None:
        """Wait until ``run`` has ended, for example because another task has called ``stop``.

        Await this method while another task runs ``run``, or in the block of the context manager. The end of that block
        drains the consumer. The call does not stop the consumer. The call returns at once if ``run`` has ended.
        Idempotent and cancel-safe. Any number of tasks may wait. Only the thread of the event loop may call this
        method.

        Raises:
            ConfigError: ``run`` has raised this error, for example because a topic is missing. The method also raises
                any other exception of ``run``.
            SourceError: ``run`` has raised this error, for example because the broker cannot be reached.
            LanesError: ``run`` was cancelled before the source was open, another thread runs the consumer, or a handler
                of the consumer makes the call.
        """
        await self._life.until_ended()

    async def drain(self) -> None:
        """Call ``stop``, and wait for the end of ``run``.

        Idempotent. If this call is cancelled, the drain continues. Only the thread of the event loop may call this
        method; other threads must call ``stop``.

        Raises:
            LanesError: Another thread runs the consumer, or a handler of the consumer makes the call.
        """
        self._life.check_thread("drain", "call stop(), which any thread may call")
        self._life.check_not_in_handler("drain")
        self.stop()
        if self._life.state != "new":
            await self._life.ended.wait()

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
        """Run concurrently with the block.

        The method raises an exception outside the task group, because the group would wrap the exception.
        """
        failure: BaseException | None = None
        ended = anyio.Event()

        async def run() -> None:
            nonlocal failure
            try:
                await self._run()
            except anyio.get_cancelled_exc_class():
                raise
            except BaseException as error:
                failure = error
                tasks.cancel_scope.cancel()
            finally:
                ended.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            try:
                yield
                await self.drain()
            except BaseException as error:
                cancelled = cancellation_of(error) is not None
                if not cancelled:
                    failure = error
                tasks.cancel_scope.cancel()
                stop = partial(self.stop, at_once=True)
                interruption = await stop_on_second_cancel(ended, stop, int(cancelled))
                if interruption is not None:
                    failure = interruption
                elif cancelled:
                    raise
        if failure is not None:
            raise failure

    # --- questions and commands

    @property
    def ready(self) -> bool:
        """Whether the source is open and its group has answered.

        A source that reports plans must also have a plan. A member without partitions, such as a standby, is ready too.

        Any thread may read this property.
        """
        return self._life.ready

    @property
    def active(self) -> bool:
        """Whether the consumer owns a partition. Any thread may read this property."""
        return self._life.active

    @property
    def healthy(self) -> bool:
        """Whether ``health`` finds no reason to be unhealthy.

        The call takes time in proportion to the messages in flight. Any thread may read this property.
        """
        return self.health().ok

    def health(self) -> Health:
        """Check whether the consumer makes progress.

        The call does not block, and takes time in proportion to the messages in flight.

        Any thread may call this method.

        The consumer does not make progress while at least one of these conditions is true:

        - ``run`` was not called, or has been opening the source for longer than ``Settings.unhealthy_after``.
        - The oldest unfinished message is older than ``Settings.unhealthy_after``.
        - A partition has waited longer than ``Settings.unhealthy_after`` for the attempt store or a failing settlement.
        - A lane is blocked, or waits for the confirmation of its dead letter.
        - Every thread for handlers is stuck.
        - ``max_ahead`` is reached.
        - The consumer is not paused, and a partition has delivered nothing for ``Settings.unhealthy_after``, although
          messages wait at the broker and the bounds leave room. This condition requires a source that is
          ``lanes.source.Backlogged``.
        - No broker has answered for 30 s, or for a shorter ``Settings.unhealthy_after``. This condition requires a
          source that is ``lanes.source.Connected``. A restart of the process does not end this condition; see
          ``Health.no_broker``.

        Returns:
            The reasons; none while the consumer makes progress. After ``run``, the only possible reason is the error
            that ended the run.
        """
        return self._life.health()

    def status(self) -> Status:
        """Take a snapshot of the consumer.

        The call does not block, and takes time in proportion to the messages in flight.

        Any thread may call this method. On another thread, two values of one snapshot may disagree by the messages that
        finish during the call.

        Returns:
            Partitions, lanes and counters. Before ``run`` has opened the source, the status has only the bounds of the
            settings and ``paused``.

        Raises:
            LanesError: The start of the source failed.
            ConfigError: ``batch`` is above the bound on messages in flight; ``run`` would raise the same error.
        """
        if self._life.state in ("new", "starting"):
            engine = make_engine(self._policy(self._settings.in_flight_bound(None)))
            engine.pause(paused=self._paused)
            return snapshot(
                engine,
                self._clock(),
                dead_lettered=0,
                redelivered={},
                provision=Provision(),
                loop_held=0.0,
                lag=self._lag,
                queues=self._queues,
            )
        run = self._life.last_run("ask for its status")
        return undisturbed(
            lambda: snapshot(
                run.engine,
                self._clock(),
                dead_lettered=run.dead_letter_writer.confirmed,
                redelivered=run.redelivered,
                provision=run.provision(),
                loop_held=run.loop_watch.seconds,
                lag=self._lag,
                expiring=None if run.retention is None else run.retention.expiring,
                outage=self._life.outage_seconds(),
                queues=self._queues,
                stranded=() if self._stranding is None else self._stranding.stranded(),
                kept=None if self._keeping is None else self._keeping.kept_log(),
                unowned=None if self._ranged is None else self._ranged.unowned(),
                published=0 if run.output_sender is None else run.output_sender.confirmed,
            )
        )

    def pause(self) -> None:
        """Stop receiving messages from the source. The consumer still handles the messages in flight.

        The call does not block. Idempotent. Any thread may call this method, also before ``run``. A pause also applies
        to later assignments. A drain continues during a pause.
        """
        self._pause(paused=True)

    def resume(self) -> None:
        """Receive messages again after ``pause``.

        The call does not block. Idempotent. Any thread may call this method.
        """
        self._pause(paused=False)

    def _pause(self, *, paused: bool) -> None:
        self._paused = paused
        run = self._life.run  # read once, and after ``_paused`` was set: another thread may open the source meanwhile
        if run is not None and run.engine.pause(paused=paused):
            if threading.current_thread() is self._life.thread:
                run.room_changed()
            else:
                run.room_changed_elsewhere()

    def unblock(self, key: PartitionKey | None) -> int:
        """Give the first message of each blocked lane of a key one more attempt.

        The call does not block. The number of the new attempt follows the number of the last attempt. Only the thread
        of the event loop may call this method.

        Args:
            key: The key. ``None`` = messages without a key.

        Returns:
            Number of blocked lanes that the call released.

        Raises:
            LanesError: The consumer has not started, or has stopped, or another thread runs the consumer.
        """
        run = self._life.open_run("unblock", "unblock a key")
        name = None if key is None else key_bytes(key)
        count = run.engine.unblock(name)
        run.tap.unblocked(name, count)
        run.after_command()
        return count

    def park(self, key: PartitionKey | None) -> int:
        """Send the first message of each blocked or held lane of a key to the dead letters.

        The call does not block. A lane continues after the broker has confirmed its dead letter. Only the thread of the
        event loop may call this method.

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
        run = self._life.open_run("park", "park a key")
        count = run.engine.park(None if key is None else key_bytes(key))
        run.after_command()
        return count

    def _lag(self, partition: Partition) -> int | None:
        return None if self._lagging is None else self._lagging.lag(partition)

    # --- start and end

    async def _open(self) -> Run:
        if self._dead_letters is not None:
            await self._dead_letters.open()
        if self._publisher is not None:
            await self._publisher.open()
        checkpointing: object = self._source
        if isinstance(checkpointing, Checkpointing):
            checkpointing.checkpoint_within(self._settings.commit_interval)
        traits = await self._source.open()
        self._life.name, self._queues = traits.name, traits.queues
        settings = self._settings
        bound = self._check_traits(traits)
        if traits.divides and self._journal is not None:
            raise ConfigError(
                f"{traits.name} owns ranges of keys, but a journal records only whole partitions; leave out journal=, "
                "or pass history="
            )
        self._check_destination()
        if settings.max_in_flight is None and traits.max_in_flight == bound:
            log.info("%s: max_in_flight is %d, the limit of the broker's consumer", self._life.name, bound)
        engine = make_engine(self._policy(bound, knows_settled=not traits.remembers))
        tap = Tap(
            self._clock,
            self._recorder,
            Telemetry.create(traits.name, traits.system, self.status, queues=traits.queues, clock=self._clock),
            None if self._on_event is None else self._notify,
        )
        self._life.run = run = Run(
            engine,
            self._source,
            traits,
            self._handler,
            self._decode,
            self._dead_letters,
            self._publisher,
            self._attempts,
            settings,
            self._clock,
            tap,
            self._outlived,
        )
        # The run is set, so from now on ``pause`` of another thread reaches the engine itself.
        engine.pause(paused=self._paused)
        if self._recorder is not None:
            self._recorder.open(
                source=traits.name,
                concurrency=settings.running_limit,
                max_in_flight=bound,
                max_in_flight_bytes=settings.max_in_flight_bytes,
                now=self._clock(),
                rules=Rules.of(settings, traits, self._poison, attempts_kept=self._attempts is not None),
                queues=traits.queues,
            )
        return run

    def _check_traits(self, traits: SourceTraits) -> int:
        """Return the bound on messages in flight. Raises ``ConfigError`` if the settings contradict the source."""
        settings = self._settings
        bound = settings.in_flight_bound(traits.max_in_flight)
        settings.check_drain(traits.revoke_limit, traits.revoke_limit_from)
        settings.check_partitions(traits.name, traits.partitions)
        settings.check_order(traits.name, ordered=traits.ordered)
        if traits.divides:
            settings.check_divided(traits.name)
        return bound

    def _check_destination(self) -> None:
        """Raise ``ConfigError`` if the source would read its own dead letters."""
        found = self._addressed.destination() if self._addressed is not None else None
        if found is not None and self._reading is not None and self._reading.reads(found):
            subject = f" (subject {found.subject!r})" if found.subject else ""
            raise ConfigError(
                f"{self._life.name}: the dead letters go to {found.name!r}{subject}, which this source also reads, so "
                "each dead letter would create another dead letter. Write the dead letters to a separate topic or "
                "stream"
            )

    def _notify(self, event: GroupEvent) -> None:
        run = self._life.run
        assert self._on_event is not None and run is not None, (
            "an event follows the start, and only a consumer with on_event notifies"
        )
        try:
            self._on_event(event)
        except (Exception, SystemExit) as error:
            run.stop_because(error, function=f"on_event, called with {event.name!r}")

    def _policy(self, max_in_flight: int, *, knows_settled: bool = True) -> Policy:
        settings, transacted = self._settings, self._transacted
        retry = settings.retry
        return Policy(
            concurrency=settings.running_limit,
            max_in_flight=max_in_flight,
            max_bytes=settings.max_in_flight_bytes,
            retry=RetryPolicy(retry.attempts, retry.backoff, retry.max_backoff),
            poison=self._poison,
            order=settings.order,
            keyless=settings.keyless,
            lanes=settings.lanes or 0,
            max_ahead=settings.max_ahead,
            commit_interval=settings.commit_interval,
            commit_count=settings.commit_count if transacted is None else transacted.messages,
            knows_settled=knows_settled,
            keeps_attempts=self._attempts is not None,
            concurrency_per_partition=settings.concurrency_per_partition or 0,
            max_in_flight_per_partition=settings.max_in_flight_per_partition or 0,
            queues=frozenset(name for queue in self._queues for name in queue.names),
            commit_pace=None if transacted is None else transacted.every,
        )

    async def _close(self, reason: str) -> None:
        """Settle finished messages and close every resource at the end of ``run``, within a bounded time."""
        run = self._life.run
        if run is not None and run.fatal is not None:
            reason = "failed"
        if not self._source_closed:
            await self._close_source(run)
        if self._recorder is not None:
            self._recorder.close(reason, self._clock())
        if self._journal is not None:
            await close_journal(self._journal, self._life.name, CLOSE_TIMEOUT)
        if run is not None and run.tap.telemetry is not None:
            run.tap.telemetry.close()

    async def _close_source(self, run: Run | None) -> None:
        """Settle finished messages, and close source, dead letters and publisher, within a bounded time."""
        self._source_closed = True
        with anyio.move_on_after(CLOSE_TIMEOUT):
            if run is not None:
                # A cancellation may have left finished messages. After a drain no finished message is left.
                await run.settler.settle()
        for closed in (self._source, self._dead_letters, self._publisher):
            with anyio.move_on_after(2 * CLOSE_TIMEOUT) as closing:
                try:
                    if closed is not None:
                        await closed.aclose()
                except Exception as error:
                    # The error is logged only, because it would hide the reason why the run ended.
                    log.warning(
                        "%s: cannot close %r (%s, %s); the run ends nevertheless, and open connections close with "
                        "the process",
                        self._life.name,
                        closed,
                        type(error).__name__,
                        error,
                    )
            if closing.cancelled_caught:
                log.warning(
                    "%s: %r did not close within %g s; the run ends nevertheless, and open connections close with "
                    "the process",
                    self._life.name,
                    closed,
                    2 * CLOSE_TIMEOUT,
                )

    async def _outlived(self, messages: list[Message]) -> None:
        """Close the source while handlers still run, so that other members acquire its partitions."""
        run, end_process = self._life.last_run("close it"), self._end_process
        if self._at_once and end_process is not None:
            return  # A thread ends the process soon; see ``lanes.serve``.
        report_survivors(self._life.name, handler_name(self._handler), messages, ends_process=end_process is not None)
        self._life.stop()
        if end_process is None:
            await self._close_source(run)
        else:
            try:
                await self._close(run.ending)
            finally:
                # Nothing else ends the process: the run waits for a handler that may never end.
                end_process(run.fatal)
