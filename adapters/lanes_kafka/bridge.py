"""The way from the thread that owns a client to the event loop, and the answers that come back over it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import anyio

from lanes.loops import entry_of_loop


class Bridge:
    """Calls made on the event loop that was running when it was made, in order; the loop is woken once for many."""

    def __init__(self) -> None:
        self._call_on_loop = entry_of_loop()
        self._calls: deque[Callable[[], None]] = deque()
        self._waking = False

    def post(self, call: Callable[[], None]) -> None:
        """Have a plain function called on the loop, unless that is gone. From any thread. Does not block."""
        self._calls.append(call)
        # Two threads may both find it unset: the loop is woken twice, which does no harm.
        if not self._waking:
            self.alive()

    def alive(self) -> bool:
        """Whether the loop is there: it is woken to find out, for it may have gone with a call still to come. From any
        thread. Does not block."""
        self._waking = True
        try:
            self._call_on_loop(self._deliver)
        except RuntimeError:
            self._waking = False
            return False
        return True

    def _deliver(self) -> None:
        # Before the first look: whoever appends after the last one wakes again.
        self._waking = False
        calls = self._calls
        while calls:
            calls.popleft()()


class Answer:
    """What a command is answered with, awaited on the event loop.

    ``given_up``: set there, when nobody waits any more; the thread reads it before it begins.
    """

    def __init__(self, bridge: Bridge) -> None:
        self.given_up = False
        self._bridge = bridge
        self._event = anyio.Event()
        self._error: Exception | None = None

    async def wait(self) -> None:
        """Wait for it; raises what the command failed with. Cancelled, the command is given up."""
        try:
            await self._event.wait()
        except BaseException:
            self.given_up = True
            raise
        if self._error is not None:
            raise self._error

    def give(self, error: Exception | None = None) -> None:
        """Answer, from the thread. The first answer counts. Does not block."""
        self._bridge.post(lambda: self._given(error))

    def _given(self, error: Exception | None) -> None:
        if not self._event.is_set():
            self._error = error
            self._event.set()
