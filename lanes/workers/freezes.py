"""The check for freezes, which are spans in which no thread of this process ran.

Some brokers assign the partitions of a silent process to other processes. The thread of a client sends heartbeats while
a handler blocks the event loop, but not while the process is frozen. SIGSTOP, ``docker pause`` and a suspended machine
freeze a process. After a freeze the process still has its messages, and would start their handlers although another
process may own the partitions. After a long freeze the workers therefore start no handler until the source has
confirmed the partitions.

The check compares the time of each ``look`` with the time of the last ``look``. The thread that watches the event loop
calls ``look`` every ``PULSE`` seconds, so a longer time between two calls is a freeze. A slow handler or a long drain
is not a freeze. The thread may wake later than the workers, so the workers also call ``look`` before they start a
handler. A woken worker passes its wake-up time to ``look``, and so does not read the clock again. ``StartLooks`` bounds
the rate of the other calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

import anyio

from lanes.clock import Clock

PULSE: Final = 0.25
"""Maximum number of seconds between two looks of a process that runs."""

SHORTEST: Final = 1.0
"""Minimum number of seconds between two looks that count as a freeze. A busy machine may delay a thread so long."""

_LOOKS: Final = 500
_PERIOD: Final = 0.1
"""Seconds in which each of ``_LOOKS`` starts looks for a freeze."""

_STRIDE: Final = 16
"""Number of starts from one look to the next, after ``_LOOKS`` looks in a period."""


class FreezeWatch:
    """The check for freezes of one run.

    Args:
        clock: Clock of the run.
        limit: Function that returns the seconds of a freeze after which the broker may have reassigned the partitions.
            Any thread may call the function.
        noticed: Function that the thread which detected a freeze calls after each freeze above the limit.

    Attributes:
        held: True until ``open`` allows handlers to start.
        number: Number of detected freezes.
        seconds: Length of the last detected freeze, in seconds.
    """

    def __init__(self, clock: Clock, limit: Callable[[], float], noticed: Callable[[], None]) -> None:
        self._limit = limit
        self._noticed = noticed
        self.held = False
        self.number = 0
        self.seconds = 0.0
        self._seen = clock()
        self._lock = threading.Lock()
        self._opened = anyio.Event()

    def look(self, now: float) -> bool:
        """Check for a freeze since the last call. Any thread may call this method.

        Args:
            now: The current time of the clock.

        Returns:
            Whether no handler may start.
        """
        gap = now - self._seen
        if gap > SHORTEST and gap > self._limit():
            # The flag is set before the time of this look, so a thread that finds the new time finds the flag too.
            with self._lock:
                self.held = True
                self.number += 1
                self.seconds = gap
            self._noticed()
        self._seen = now
        return self.held

    def open(self, number: int, now: float) -> bool:
        """Allow handlers to start, if freeze ``number`` is still the last detected freeze.

        Return whether handlers may start.

        The caller must call this method on the event loop.
        """
        self.look(now)
        with self._lock:
            # Another thread may notice a freeze between these two steps.
            if self.number != number:
                return False
            self.held = False
        opened, self._opened = self._opened, anyio.Event()
        opened.set()
        return True

    async def wait(self) -> None:
        """Wait until handlers may start."""
        while self.held:
            await self._opened.wait()


class StartLooks:
    """Decides which starts of handlers check for a freeze, to avoid a read of the clock for each message.

    A woken worker checks with the time of its wake-up. Up to 5,000 starts per second, each other start also checks for
    a freeze, because the process may have been frozen since the last check. Above this rate, one start in 16 checks.

    Args:
        watch: The watch.
        clock: Clock of the run.

    Attributes:
        until: Number of starts until the next check. The worker counts this number down, and calls ``look`` at 0.
    """

    def __init__(self, watch: FreezeWatch, clock: Clock) -> None:
        self._watch = watch
        self._clock = clock
        self._looks = 0
        self._since = clock()
        self.until = 1

    def woken(self, now: float) -> bool:
        """Check for a freeze with the time of a wake-up, and return whether the handler must wait.

        The next start makes no check, so the worker must start its handler before it suspends.
        """
        held = self._watch.look(now)
        self.until = max(self.until, 2)
        return held

    def look(self) -> bool:
        """Check for a freeze, and return whether the handler must wait."""
        now = self._clock()
        if now - self._since >= _PERIOD:
            self._since, self._looks = now, 0
        self._looks += 1
        self.until = 1 if self._looks < _LOOKS else _STRIDE
        return self._watch.look(now)
