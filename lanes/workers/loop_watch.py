"""The check for calls that block the event loop of a run.

A separate thread asks the loop for a turn up to ten times a second. The thread does not ask a loop that waits for
events, because the request would only wake the loop. If the loop has waited for a second, the thread checks it four
times a second. The thread recognizes a waiting loop by its stack frames, but only for asyncio's own loop and for trio.

A handler on the loop *holds* the loop while it blocks, for example in ``time.sleep`` or in a client without asyncio.
During a hold, the loop runs no other handler, no settlement and no renewal of a lease. If a turn is missing, the thread
finds the handler in the stack of the loop's thread, and names the handler in the log.

A C function that keeps the interpreter's lock also stops the thread. When the function returns, the thread runs again,
finds the function's caller in the stack, and names the caller in the log. A freeze of the process also stops the
thread. During a freeze the loop's thread uses no processor time, so the check reports no function. Many short calls can
also keep the interpreter's lock from the thread, because CPython does not pass the lock to the thread that has waited
longest. During such calls the workers report turns of the loop, so the check reports no function.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Final

from lanes.clock import Clock, monotonic
from lanes.core.types import Message
from lanes.loops import entry_of_loop
from lanes.workers.freezes import PULSE

log = logging.getLogger("lanes")

INTERVAL: Final = 0.1
"""Seconds between an answer of the loop and the next request."""

IDLE_INTERVAL: Final = 0.25
"""Seconds between two looks at an idle loop. The longer time saves CPU and shortens the measured time of a hold."""

IDLE_AFTER: Final = 10
"""Number of consecutive looks with a waiting loop after which the loop is idle."""

HELD_AFTER: Final = 0.1
"""Seconds without an answer after which the loop counts as held."""

WARNED_AFTER: Final = 1.0
"""Seconds without an answer after which the log names the function that holds the loop."""

WARNED_EVERY: Final = 30.0
"""Minimum number of seconds between the warnings about two holds, because each message may hold the loop."""

REMEMBERED_FOR: Final = 5.0
"""Seconds after a hold in which the log names the hold as a cause when a partition is lost."""

_REST_SHARE: Final = 0.01
"""Part of the held time that the workers leave to the loop after a hold."""

_REST_LIMIT: Final = 0.05
"""Maximum number of seconds that the workers leave to the loop, for example for the answers of a broker."""

_LATE_AFTER: Final = 0.5
"""Excess of a wait of the thread over its length, in seconds, above which the thread could not run."""

_COMPUTED_SHARE: Final = 0.1
"""Minimum part of that excess for which the loop's thread used a processor, if a function kept the interpreter's lock.

The part is small, because other processes may also use the processor.
"""

_JOINED_WITHIN: Final = 1.0
"""Seconds that the thread gets to end, which a log handler may delay."""

_IDLE: Final = ("asyncio", "selectors", "trio", "anyio", "uvloop")
"""Modules that run on the loop's thread while no code of the user holds the loop."""

_WAITING: Final = {"selectors": "asyncio.base_events", "trio._core._io_epoll": "trio._core._run"}
"""Modules in which the thread of a loop waits for events, each with the module of the loop that calls it."""

_WORKERS: Final = ("lanes.workers.tasks", "lanes.workers.batches")
"""Modules that call handlers on the event loop."""


@dataclass(frozen=True, slots=True)
class Hold:
    """A period in which one call held the event loop.

    Attributes:
        seconds: Length of the period.
        ended: End of the period, in seconds of the run's clock.
        by: Name of the handler or of another function; "" = unknown.
    """

    seconds: float
    ended: float
    by: str

    def __str__(self) -> str:
        return f"{self.by or 'other code'} held the event loop for {self.seconds:.1f} s before"


@dataclass(frozen=True, slots=True)
class _Holder:
    """The function that holds the loop. ``message``: the handler's message; None = the function is not the handler."""

    name: str
    line: str
    message: Message | None

    def __str__(self) -> str:
        if self.message is None:
            return f"{self.name} ({self.line})"
        return f"{self.name} at {self.message.partition.id} position {self.message.position} ({self.line})"


class LoopWatch:
    """The check of one event loop, for one consumer.

    The public methods and the answers run on the loop, and the check runs in a separate thread. Any thread may read the
    attributes.

    Args:
        name: Name of the source in log lines.
        handler: Name of the handler.
        remedy: Remedy for a handler that holds the loop, for the log.
        clock: Clock of the run. In a simulation, without a real clock, no thread checks the loop.
        lost: Function that the thread calls with the seconds of each hold.
        pulse: Function that the thread calls with the time, at least every ``PULSE`` seconds; None = no function.

    Attributes:
        seconds: Sum of the seconds since the start for which calls of at least 0.1 s held the loop.
    """

    def __init__(
        self,
        name: str,
        handler: str,
        remedy: str,
        clock: Clock,
        lost: Callable[[float], None],
        pulse: Callable[[float], object] | None = None,
    ) -> None:
        self._name = name
        self._handler = handler
        self._remedy = remedy
        self._clock = clock
        self._lost = lost
        self._pulse = pulse
        self.seconds = 0.0
        self._message_in: Callable[[FrameType], Message | None]
        self._enter: Callable[[Callable[[], None]], object]
        self._loop_thread = 0
        self._computed: Callable[[], float]
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._turn = threading.Event()
        # The time of the question that the loop has not answered for HELD_AFTER; 0 = the loop is not held.
        self._since = 0.0
        self._answered = 0.0
        self._frozen = 0.0
        # The last turn of the loop that the workers have told of, and the longest time between two of them. The thread
        # resets both while the workers may write, which can only make the longest time too long.
        self._turned = 0.0
        self._longest = 0.0
        # The last hold in which the thread could not run, and the function that kept the interpreter's lock.
        self._locked = 0.0
        self._locked_by: _Holder | None = None
        self._by = ""
        self._last: Hold | None = None
        self._warn_at = 0.0
        self._untold = 0
        self._untold_seconds = 0.0

    # --- on the event loop

    def start(self, message_in: Callable[[FrameType], Message | None]) -> bool:
        """Start the thread.

        Args:
            message_in: Function that returns the message whose handler a frame calls, or None. The thread calls the
                function.

        Returns:
            Whether the thread runs.
        """
        if self._clock is not monotonic:
            return False
        self._message_in = message_in
        self._enter = entry_of_loop()
        self._loop_thread = threading.get_ident()
        self._computed = _processor_clock()
        # The name does not begin like those of the threads for handlers.
        thread = threading.Thread(target=self._watch, name="lanes.loop", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            log.warning(
                "%s: the system refused the thread that watches the event loop (%s); raise the limit of threads of "
                "this process. Until then no warning names a handler that holds the loop",
                self._name,
                error,
            )
            return False
        self._thread = thread
        return True

    def stop(self) -> None:
        """End the thread after it has written its last log lines. Idempotent."""
        if self._since:
            # The loop has had a turn, whose answer may come too late.
            self._answer()
        self._over.set()
        self._turn.set()
        if self._thread is not None:
            self._thread.join(_JOINED_WITHIN)

    def turned(self, now: float) -> None:
        """Record that the loop has a turn now, or has had a turn since the last call."""
        if now - self._turned > self._longest:
            self._longest = now - self._turned
        self._turned = now

    def rest(self, now: float) -> float:
        """Return the seconds for which the workers must now pause for other tasks; 0 = one turn is enough."""
        self.turned(now)
        since = self._since
        return min(_REST_LIMIT, (now - since) * _REST_SHARE) if since else 0.0

    def held_before(self, now: float) -> Hold | None:
        """Return the hold of a second or more that continues or ended within ``REMEMBERED_FOR`` seconds, or None."""
        since, last = self._since, self._last
        if since and now - since >= WARNED_AFTER:
            return Hold(now - since, now, self._by)
        return last if last is not None and now - last.ended < REMEMBERED_FOR else None

    def _answer(self) -> None:
        since, now = self._since, self._clock()
        if since and now - since - self._frozen >= WARNED_AFTER:
            # The loop sets this attribute, not the thread, because the loss of a partition may be reported in this turn
            # of the loop.
            self._last = Hold(now - since - self._frozen, now, self._by)
        self._answered = now
        self._since = 0.0
        self._turn.set()

    # --- in the thread

    def _watch(self) -> None:
        waited = 0
        while True:
            over = self._waits(self._over, INTERVAL if waited < IDLE_AFTER else IDLE_INTERVAL)
            self._report_locked()
            self._turn.clear()
            if over or self._over.is_set():
                break
            self._frozen = 0.0
            if self._loop_waits():
                waited += 1
                continue
            waited = 0
            asked = self._clock()
            try:
                self._enter(self._answer)
            except RuntimeError:
                # The loop is closed.
                break
            if not self._waits(self._turn, HELD_AFTER):
                self._follow(asked)
            self._report_locked()
        if self._untold:
            log.warning(
                "%s: %s has held the event loop %d more time(s) since the last such warning, for %.1f s; %s",
                self._name,
                self._handler,
                self._untold,
                self._untold_seconds,
                self._remedy,
            )

    def _waits(self, event: threading.Event, within: float) -> bool:
        """Wait for an event, and determine why this thread could not run during the wait."""
        before, computed = self._clock(), self._computed()
        found, now = False, before
        self._turned, self._longest = before, 0.0
        while not found and (left := before + within - now) > 0.0:
            found = event.wait(left if self._pulse is None else min(left, PULSE))
            now = self._clock()
            if self._pulse is not None:
                self._pulse(now)
        late = now - before - within
        if late > _LATE_AFTER and max(self._longest, now - self._turned) > _LATE_AFTER:
            # The loop may have computed for the whole wait that was asked for.
            busy = self._computed() - computed - within > late * _COMPUTED_SHARE
            # The function that kept the lock has returned just now, so its caller is still on the stack.
            holder = self._holder() if busy and not self._over.is_set() else None
            if holder is None:
                self._frozen += late
            else:
                self._locked, self._locked_by = late, holder
        return found

    def _loop_waits(self) -> bool:
        """Return whether the loop waits for events now, and therefore is not held."""
        frame = sys._current_frames().get(self._loop_thread)
        loop = None if frame is None else _WAITING.get(frame.f_globals.get("__name__", ""))
        if frame is None or loop is None:
            return False
        # A handler may wait in a selector too, but the loop does not call this selector.
        return frame.f_back is not None and frame.f_back.f_globals.get("__name__") == loop

    def _follow(self, asked: float) -> None:
        """Wait for the end of a hold."""
        self._by = "" if self._locked_by is None else self._locked_by.name
        self._since = asked
        holder, told = None, False
        if not self._waits(self._turn, WARNED_AFTER - HELD_AFTER) and not self._frozen:
            holder = self._holder()
            if holder is not None:
                self._by = holder.name
                told = self._tell(holder, self._clock() - asked)
        while not self._waits(self._turn, 1.0):
            pass
        self._since = 0.0
        seconds = self._answered - asked - self._frozen
        if seconds <= 0.0:
            # The run has ended, and no function held the loop.
            return
        if holder is None and self._locked_by is not None:
            # ``_report_locked`` follows, with the whole time.
            self._locked = seconds
            return
        self._locked_by = None
        self._count(seconds)
        if seconds < WARNED_AFTER:
            return
        if told:
            log.warning(
                "%s: %s held the event loop for %.1f s; %s", self._name, holder, seconds, self._what_to_do(holder)
            )
        elif holder is not None:
            self._untold += 1
            self._untold_seconds += seconds

    def _report_locked(self) -> None:
        """Report a hold in which no thread could run, once."""
        holder, seconds = self._locked_by, self._locked
        if holder is None:
            return
        self._locked_by = None
        self._count(seconds)
        if seconds < WARNED_AFTER:
            return
        self._last = Hold(seconds, self._clock(), holder.name)
        before = self._time_for_a_line()
        if before is None:
            self._untold += 1
            self._untold_seconds += seconds
            return
        log.warning(
            "%s: %s held the event loop and the interpreter's lock for %.1f s, and no thread of this process ran. "
            "Run the call in a process of its own, or give the call less to do%s",
            self._name,
            holder,
            seconds,
            before,
        )

    def _count(self, seconds: float) -> None:
        self.seconds += seconds
        self._lost(seconds)

    def _tell(self, holder: _Holder, seconds: float) -> bool:
        """Log that a hold continues, unless the last line is too new, and return whether the call logged a line."""
        before = self._time_for_a_line()
        if before is None:
            return False
        log.warning(
            "%s: %s has been holding the event loop for %.1f s, and nothing else on this loop runs; %s%s",
            self._name,
            holder,
            seconds,
            self._what_to_do(holder),
            before,
        )
        return True

    def _time_for_a_line(self) -> str | None:
        """Return the last part of a line, which counts the unlogged holds; None = the last line is too new."""
        now = self._clock()
        if now < self._warn_at:
            return None
        self._warn_at = now + WARNED_EVERY
        if not self._untold:
            return ""
        times, lasted = self._untold, self._untold_seconds
        before = f". Since the last such warning, the loop was held {times} more time(s), for {lasted:.1f} s"
        self._untold, self._untold_seconds = 0, 0.0
        return before

    def _what_to_do(self, holder: _Holder | None) -> str:
        in_handler = holder is not None and holder.message is not None
        return self._remedy if in_handler else "await the slow call, or run it in a thread"

    def _holder(self) -> _Holder | None:
        """Find the function that holds the loop; None = another consumer reports the function, or the loop is idle."""
        frame = sys._current_frames().get(self._loop_thread)
        innermost = frame
        inside: FrameType | None = None
        of_another_consumer = False
        while frame is not None:
            module = frame.f_globals.get("__name__", "")
            if module in _WORKERS:
                message = self._message_in(frame)
                if message is not None:
                    return _Holder(self._handler, _line(inside or frame), message)
                of_another_consumer = True
            if not module.startswith("lanes."):
                # The frame of the user that is nearest to the workers: the handler, and not its client library.
                inside = frame
            frame = frame.f_back
        if of_another_consumer or innermost is None:
            return None
        if innermost.f_globals.get("__name__", "").partition(".")[0] in _IDLE:
            return None
        return _Holder(innermost.f_code.co_qualname.rpartition("<locals>.")[2], _line(innermost), None)


def _processor_clock() -> Callable[[], float]:
    """Return a clock of the seconds for which the calling thread, or else the process, has used a processor."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.process_time
    clock = time.pthread_getcpuclockid(threading.get_ident())

    def read() -> float:
        try:
            return time.clock_gettime(clock)
        except OSError:
            # The loop's thread has ended.
            return 0.0

    return read


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
