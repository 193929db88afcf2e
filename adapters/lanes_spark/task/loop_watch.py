"""Who keeps the event loop of a task from running. Timers, retries and all other handlers wait for whoever does."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Final, TypeVar

__all__ = ["LoopWatch"]

log = logging.getLogger("lanes")

STANDS_AFTER: Final = 10.0
"""Seconds without a sign of the loop before it is asked for one, and again before that is worth a word."""

_FRAMES: Final = 3

T = TypeVar("T")


class LoopWatch:
    """Looks after the event loop of ``thread``, from another thread, while that waits for it. ``call`` has the loop run
    a function, without waiting for that."""

    def __init__(self, topic: str, thread: threading.Thread, call: Callable[[Callable[[], None]], None]) -> None:
        self._topic = topic
        self._thread = thread
        self._call = call
        self._asked = False
        self._told = False

    def get(self, inbox: SimpleQueue[T]) -> T:
        """The next element. Blocks; where the loop stands still meanwhile, that is said once, with the place."""
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
            "%s on Spark: the event loop of a task has stood still for %.0f s or more: a handler, setup or teardown "
            "blocks it, at %s; await there, or make it a plain function, which runs in a thread",
            self._topic,
            STANDS_AFTER,
            places,
        )
