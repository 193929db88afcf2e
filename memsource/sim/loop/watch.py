"""The watch that interrupts an endless step: by a signal in the main thread, otherwise by another thread."""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from types import FrameType
from typing import Final

from memsource.sim.loop.event_loop import SimLoop

_LOOKS: Final = 4
"""Number of checks within a limit. The watch therefore interrupts a step at most a quarter of the limit late."""


class Interrupted(BaseException):
    """The error that ends a step that takes too long.

    The class is no ``Exception``, because handlers may catch every ``Exception``.
    """


@contextmanager
def watching(loop: SimLoop, limit: float) -> Iterator[None]:
    """Interrupt each step of the calling thread that takes too long.

    In the main thread the watch uses the process's real-time timer, and restores it afterwards. An earlier alarm, such
    as the timeout of a test, still arrives, at most a quarter of the limit late.

    Args:
        loop: The loop of the steps.
        limit: The longest step, in seconds by the wall clock.

    Yields:
        Nothing.
    """
    timer = hasattr(signal, "SIGALRM") and signal.getsignal(signal.SIGALRM) is not None
    if timer and threading.current_thread() is threading.main_thread():
        with _by_signal(loop, limit):
            yield
    else:
        with _by_thread(loop, limit):
            yield


class _Patience:
    """Measures the current step, and decides whether the step has taken too long."""

    def __init__(self, loop: SimLoop, limit: float) -> None:
        self._loop = loop
        self._limit = limit
        self._turn = -1
        self._since = 0.0

    def ended(self) -> bool:
        now = monotonic()
        if self._loop.turns != self._turn:
            self._turn, self._since = self._loop.turns, now
        return now - self._since >= self._limit


@contextmanager
def _by_signal(loop: SimLoop, limit: float) -> Iterator[None]:
    patience = _Patience(loop, limit)
    before = signal.getsignal(signal.SIGALRM)
    delay, interval = signal.getitimer(signal.ITIMER_REAL)
    alarm = monotonic() + delay if delay else None

    def look(number: int, frame: FrameType | None) -> None:
        nonlocal alarm
        if alarm is not None and monotonic() >= alarm:
            alarm = monotonic() + interval if interval else None
            if callable(before):
                try:
                    before(number, frame)
                except BaseException as error:
                    # Without ``fail``, only the task of this step would get the error.
                    loop.fail(error)
                    raise
        if patience.ended():
            loop.overdue(frame)
            raise Interrupted

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, limit / _LOOKS, limit / _LOOKS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if alarm is not None:
            signal.setitimer(signal.ITIMER_REAL, max(alarm - monotonic(), 1e-3), interval)


@contextmanager
def _by_thread(loop: SimLoop, limit: float) -> Iterator[None]:
    patience = _Patience(loop, limit)
    here = ctypes.c_ulong(threading.get_ident())
    over = threading.Event()
    interrupt = ctypes.pythonapi.PyThreadState_SetAsyncExc

    def look() -> None:
        while not over.wait(limit / _LOOKS):
            if patience.ended():
                loop.overdue(sys._current_frames().get(here.value))
                interrupt(here, ctypes.py_object(Interrupted))

    thread = threading.Thread(target=look, name="memsource-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        received = False
        while not received:
            # An interrupt that is on its way arrives here, because its step has ended. Python 3.11 keeps a cancelled
            # interrupt pending for ever, and then hangs in the first function that is called under ``sys.settrace``.
            try:
                over.set()
                thread.join()
                received = not thread.is_alive()
            except Interrupted:
                continue
