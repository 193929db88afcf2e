"""The life of one consumer: its state and thread, the waits for its start, and its readiness and health."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Final, Literal

import anyio

from lanes.clock import Clock
from lanes.config import Settings
from lanes.dead_letter import described
from lanes.errors import LanesError
from lanes.loops import entry_of_loop
from lanes.observe.health import Health, examine
from lanes.observe.status import undisturbed
from lanes.runtime.run import Run
from lanes.source import Connected, Outage, Rejoining, Reporting

log = logging.getLogger("lanes")

RUN_WITHIN: Final = 10.0
"""Seconds in which ``until_opened`` and ``until_ready`` wait for the start of the consumer without a log line."""

_LOOK_EVERY: Final = 0.05
"""Seconds between two looks of ``until_ready`` at the group."""


class Lifecycle:
    """The life of one consumer, from its constructor to the end of its only run.

    Any thread may call ``health`` and ``outage_seconds``, and read the properties. Every other method belongs to the
    thread of the event loop.

    Args:
        name: Name of the source, until the source is open.
        settings: Settings of the consumer.
        clock: Monotonic clock in seconds.
        connected: The source, if it reports outages; else None.
        rejoining: The source, if it reports a wait for its group; else None.
        reporting: The source, if it reports findings; else None.

    Attributes:
        name: Name of the source in logs and errors.
        state: State of the consumer. ``"running"`` = its source is open.
        thread: The thread that runs the consumer or waits for its start; None = unknown before the first such call.
        enter: Function that schedules a call on the event loop of the consumer; None = no event loop runs the consumer.
        run: The run; None until the source is open. The run remains available for the status after its end.
        failure: The error that has ended the run; None = no error.
        opened: Event that is set when the source is open, or the consumer has stopped.
        ended: Event that is set when the consumer has stopped.
    """

    def __init__(
        self,
        name: str,
        settings: Settings,
        clock: Clock,
        connected: Connected | None = None,
        rejoining: Rejoining | None = None,
        reporting: Reporting | None = None,
    ) -> None:
        self.name = name
        self.state: Literal["new", "starting", "running", "stopped"] = "new"
        self.thread: threading.Thread | None = None
        self.run: Run | None = None
        self.failure: BaseException | None = None
        self.enter: Callable[[Callable[[], None]], object] | None = None
        self.opened = anyio.Event()
        self.ended = anyio.Event()
        self._settings = settings
        self._clock = clock
        self._connected = connected
        self._rejoining = rejoining
        self._reporting = reporting
        self._started_at = 0.0
        # Whether the log has said that a task waits for a consumer that nobody runs.
        self._told_unrun = False

    # --- the states

    def check_new(self) -> None:
        """Check that the consumer has not run before, and belongs to this thread. Raises ``LanesError``."""
        if self.state == "stopped":
            raise LanesError("this consumer has stopped: make a new consumer for another run")
        if self.state != "new":
            raise LanesError(
                f"this consumer is {self.state} already: await consumer.ended() to wait for its end, or make a new "
                "consumer for another run"
            )
        self.check_thread("run", "make and run the consumer on one thread")

    def start(self) -> None:
        """Record that this thread runs the consumer. Raises ``LanesError`` if the consumer has run before."""
        self.check_new()
        self.thread = threading.current_thread()
        self.enter = entry_of_loop()
        self._started_at = self._clock()
        self.state = "starting"

    def open(self) -> None:
        """Record that the source is open."""
        self.state = "running"
        self.opened.set()

    def stop(self) -> None:
        """Record that the consumer has stopped, and is about to close its source."""
        self.state = "stopped"

    def end(self) -> None:
        """Record that all resources are closed, and wake all waiting tasks."""
        self.enter = None
        self.opened.set()
        self.ended.set()
        if self.run is not None:
            # A cancellation may end the run before its first step.
            self.run.has_plan.set()

    def failed_in_drain(self, error: BaseException | None) -> None:
        """Store and log the error that has stopped a cancelled run, because ``run`` raises the cancellation instead."""
        # The end of ``asyncio.run`` cancels the handlers too, which is no error of theirs.
        if error is not None and not isinstance(error.__cause__, anyio.get_cancelled_exc_class()):
            self.failure = error
            self.log_end(error)

    def log_end(self, error: BaseException) -> None:
        """Log the error that has ended the run."""
        log.error("%s: the consumer has stopped and handles no more messages (%s)", self.name, described(error))

    # --- the thread and the run of a call

    @property
    def active_run(self) -> Run | None:
        """The run while its source is open; None = no run is active."""
        return self.run if self.state == "running" else None

    def last_run(self, what: str) -> Run:
        """Return the current or the ended run. Raises ``LanesError`` before the source is open.

        ``what`` is the remedy in the error, such as "ask for its status".
        """
        if self.run is None:
            raise LanesError(f"the consumer has not started: {what} after run() has opened the source")
        return self.run

    def open_run(self, call: str, what: str) -> Run:
        """Return the run of a consumer that has not stopped, for a ``call`` on the thread of its event loop.

        Raises ``LanesError`` otherwise.
        """
        run = self.last_run(what)
        if self.state == "stopped":
            raise LanesError(f"the consumer has stopped: {what} while it runs; unsettled messages are redelivered")
        self.check_thread(
            call, f"use anyio.from_thread.run_sync(consumer.{call}, key), or call_soon_threadsafe of that event loop"
        )
        return run

    def check_thread(self, call: str, remedy: str) -> None:
        """Raise ``LanesError`` if the consumer belongs to the event loop of another thread."""
        here = threading.current_thread()
        if self.thread is not None and self.thread is not here:
            raise LanesError(
                f"Consumer.{call} was called on the thread {here.name!r}, but the consumer belongs to the event loop "
                f"of the thread {self.thread.name!r}: {remedy}"
            )

    def check_not_in_handler(self, call: str) -> None:
        """Raise ``LanesError`` in a handler of this consumer, because the call waits for the end of all handlers."""
        run = self.active_run
        frame: FrameType | None = sys._getframe() if run is not None else None
        while run is not None and frame is not None:
            if run.workers.message_in(frame) is not None:
                raise LanesError(
                    f"a handler of this consumer awaits Consumer.{call}, which waits for the end of the handler: call "
                    "consumer.stop() in the handler, which does not wait, and return"
                )
            frame = frame.f_back

    # --- the waits for the start

    async def until_opened(self) -> None:
        """Wait until the source is open; see ``lanes.Consumer.opened``.

        The method logs a warning if no task runs the consumer.
        """
        self.check_thread("opened", "await it in that event loop")
        self.thread = threading.current_thread()
        if self.state == "new":
            with anyio.move_on_after(RUN_WITHIN):
                await self.opened.wait()
            # The first of several waiting tasks writes the line.
            if self.state == "new" and not self._told_unrun:
                self._told_unrun = True
                log.warning(
                    "%s: opened(), until_ready() or ended() waits for the consumer, but run() was not called within "
                    "%g s; await consumer.run() in another task, or use `async with consumer`",
                    self.name,
                    RUN_WITHIN,
                )
        await self.opened.wait()
        if self.failure is not None:
            raise self.failure
        if self.run is None:
            raise LanesError(
                f"{self.name}: run() was cancelled before the source was open; make and run a new consumer"
            )

    async def until_ended(self) -> None:
        """Wait until the run has ended; see ``lanes.Consumer.ended``."""
        self.check_thread("ended", "await it in that event loop")
        self.check_not_in_handler("ended")
        await self.until_opened()
        await self.ended.wait()
        if self.failure is not None:
            raise self.failure

    async def until_ready(self) -> None:
        """Wait until the consumer is ready; see ``lanes.Consumer.until_ready``."""
        self.check_thread("until_ready", "await it in that event loop")
        await self.until_opened()
        run = self.last_run("wait for it")
        await run.has_plan.wait()
        waits = self._waits_since_start(run)
        while waits and not self.ended.is_set():
            # The source's thread sets no event.
            with anyio.move_on_after(_LOOK_EVERY):
                await self.ended.wait()
            waits = self.ended.is_set() or self._waits_since_start(run)
        if not run.planned or waits:
            # The run has ended. Wait until ``failure`` has the error of the run.
            await self.ended.wait()
            if self.failure is not None:
                raise self.failure
            raise LanesError(f"{self.name}: run() ended before the group had answered; start the consumer again")

    # --- readiness and health

    @property
    def ready(self) -> bool:
        """See ``lanes.Consumer.ready``. A ready consumer stays ready during an outage of the broker."""
        run = self.active_run
        return run is not None and run.planned and not self._waits_since_start(run)

    def _waits_since_start(self, run: Run) -> bool:
        """Return whether the source has waited for its group since the start. Any thread may call this method."""
        if self._rejoining is None or run.engine.latest_assignment:
            return False
        return self._rejoining.rejoining()

    @property
    def active(self) -> bool:
        """See ``lanes.Consumer.active``."""
        run = self.active_run
        return run is not None and bool(run.engine.partitions)

    def health(self) -> Health:
        """Return the health; see ``lanes.Consumer.health``."""
        run = self.active_run
        if run is None:
            return self._health_without_run()
        now, timeout, unhealthy_after = self._clock(), self._settings.timeout, self._settings.unhealthy_after
        return undisturbed(
            lambda: examine(
                run.engine,
                now,
                unhealthy_after=unhealthy_after,
                stuck=[] if timeout is None else run.workers.stuck(now, timeout),
                unknown=run.attempts.asked_since,
                unsettled=run.settler.unsettled.partitions,
                intake=run.intake,
                outage=self._outage(),
                rejoining=self._rejoining is not None and self._rejoining.rejoining(),
                findings=() if self._reporting is None else self._reporting.findings(),
            )
        )

    def _health_without_run(self) -> Health:
        """The health before the source is open, or after the end of the run."""
        state, failure = self.state, self.failure
        if state == "new":
            return Health(reasons=("not started: run() was not called",))
        if state == "starting" and (lasted := self._clock() - self._started_at) > self._settings.unhealthy_after:
            return Health(reasons=(f"the source is not open after {lasted:.1f} s",))
        return Health(reasons=() if failure is None else (f"stopped by {type(failure).__qualname__}",))

    def outage_seconds(self) -> float | None:
        """Return the length of the current outage, for a status; 0.0 = a broker answers; None = unknown."""
        if self._connected is None or self.state != "running":
            return None
        outage = self._outage()
        return 0.0 if outage is None else outage.seconds

    def _outage(self) -> Outage | None:
        return None if self._connected is None else self._connected.outage()
