"""Passes calls from a client's thread to the event loop, and the thread's answers to commands."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import anyio

from lanes.loops import entry_of_loop

T = TypeVar("T")


class Bridge:
    """Calls functions on the event loop that created the bridge, in the order of ``post``.

    If threads post several calls before the loop runs, the loop usually wakes only once.
    """

    def __init__(self) -> None:
        self._call_on_loop = entry_of_loop()
        self._calls: deque[Callable[[], None]] = deque()
        self._waking = False

    def post(self, call: Callable[[], None]) -> None:
        """Call a plain function on the loop, unless the loop has ended.

        Any thread may call this method. The call does not block.
        """
        self._calls.append(call)
        # If two threads find the flag unset, they wake the loop twice. The second wake-up does no harm.
        if not self._waking:
            self.is_alive()

    def is_alive(self) -> bool:
        """Whether the loop still runs. Any thread may call this method. The call does not block.

        The call wakes the loop for the check. A running loop therefore also performs all posted calls.
        """
        self._waking = True
        try:
            self._call_on_loop(self._deliver)
        except RuntimeError:
            self._waking = False
            return False
        return True

    def _deliver(self) -> None:
        # Reset the flag before reading the queue. A thread that appends a call after the last read then wakes the loop
        # again.
        self._waking = False
        calls = self._calls
        while calls:
            calls.popleft()()


class Answer(Generic[T]):
    """The answer of the client's thread to one command. The event loop awaits the answer.

    Args:
        bridge: Bridge to the event loop that awaits the answer.

    Attributes:
        given_up: Whether the waiting task has cancelled ``wait``. The thread checks this flag before it performs the
            command.
    """

    def __init__(self, bridge: Bridge) -> None:
        self.given_up = False
        self._bridge = bridge
        self._event = anyio.Event()
        self._value: list[T] = []
        self._error: Exception | None = None

    async def wait(self) -> T:
        """Wait for the answer, and return it or raise its error. A cancelled wait sets ``given_up``."""
        try:
            await self._event.wait()
        except BaseException:
            self.given_up = True
            raise
        if self._error is not None:
            raise self._error
        return self._value[0]

    def give(self, value: T) -> None:
        """Answer with ``value``.

        Any thread may call this method. A second answer has no effect. The call does not block.
        """
        self._bridge.post(lambda: self._end([value], None))

    def fail(self, error: Exception) -> None:
        """Answer with ``error``.

        Any thread may call this method. A second answer has no effect. The call does not block.
        """
        self._bridge.post(lambda: self._end([], error))

    def _end(self, value: list[T], error: Exception | None) -> None:
        if not self._event.is_set():
            self._value, self._error = value, error
            self._event.set()
