"""The latest snapshot of a consumer, which its event loop makes and another thread serves."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from lanes.clock import Clock, monotonic
from lanes.consumer import Consumer
from lanes.errors import LanesError
from lanes.observe.health import Health
from lanes.observe.status import Status

log = logging.getLogger("lanes.web")

FRESH: Final = 1.0
"""Seconds after which a snapshot is made again."""

STILL: Final = 10.0
"""Seconds without an answer of the event loop after which the loop stands still."""


@dataclass(frozen=True, kw_only=True)
class View:
    """A snapshot of a consumer. The object never changes, so any thread may read it.

    Attributes:
        taken: Time of the snapshot, in seconds of the board's clock.
        name: Name of the source.
        active: Whether the consumer owned a partition.
        health: Health of the consumer.
        status: Status of the consumer; None = the start of the source has failed.
    """

    taken: float
    name: str
    active: bool
    health: Health
    status: Status | None


class Board:
    """The latest view of one consumer. Any thread may call every method, and no method blocks.

    The event loop of the consumer makes the view, so a loop that stands still makes no view, and ``silent`` grows.
    While
    no loop runs the consumer, the caller of ``ask`` makes the view.

    Args:
        consumer: The consumer.
        clock: Monotonic clock in seconds.
    """

    def __init__(self, consumer: Consumer, clock: Clock = monotonic) -> None:
        self._consumer = consumer
        self._clock = clock
        self._lock = threading.Lock()
        self._asked: float | None = None
        self._waiting: list[Callable[[], object]] = []
        self.view = self._look()

    def __repr__(self) -> str:
        return f"<Board {self.view.name} {self.age:.1f} s old>"

    @property
    def age(self) -> float:
        """Age of the view, in seconds."""
        return max(0.0, self._clock() - self.view.taken)

    @property
    def silent(self) -> float:
        """Seconds for which the event loop has not answered; 0.0 = no question waits for an answer."""
        asked = self._asked
        return 0.0 if asked is None else max(0.0, self._clock() - asked)

    @property
    def draining(self) -> bool:
        """Whether the consumer drains. The value changes at once, also while a handler blocks the event loop."""
        run = self._consumer._life.active_run
        return run is not None and (self._consumer._stopping or run.stopping)

    @property
    def ready(self) -> bool:
        """Whether the consumer is ready and does not drain."""
        return self._consumer.ready and not self.draining and not self._consumer._stopping

    @property
    def failure(self) -> BaseException | None:
        """The error that has ended the consumer; None = no error."""
        return self._consumer._life.failure

    def ask(self, then: Callable[[], object] | None = None) -> None:
        """Request a view, unless a request waits for its answer.

        Args:
            then: Function to call on any thread when the next view is made; None = no function.
        """
        life = self._consumer._life
        enter = life.enter  # read once: the loop's thread may end the run meanwhile
        with self._lock:
            if then is not None:
                self._waiting.append(then)
            if self._asked is not None and enter is not None:
                return
            self._asked = self._clock()
        if enter is None:
            self._make()
            return
        try:
            enter(self._make)
        except RuntimeError:
            # The loop is closed.
            self._make()

    def _make(self) -> None:
        try:
            self.view = self._look()
        except Exception:
            # An error here would end the event loop of the consumer.
            log.exception("%s: the snapshot of the consumer failed", self.view.name)
        with self._lock:
            self._asked = None
            waiting, self._waiting = self._waiting, []
        for then in waiting:
            # A reader that has left has closed its loop.
            try:
                then()
            except RuntimeError:
                log.debug("a reader of the snapshot has left")

    def _look(self) -> View:
        consumer = self._consumer
        try:
            status = consumer.status()
        except LanesError:
            status = None
        return View(
            taken=self._clock(),
            name=consumer._life.name,
            active=consumer.active,
            health=consumer.health(),
            status=status,
        )
