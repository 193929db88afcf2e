"""The latest snapshot of a consumer, which its event loop makes and another thread serves."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import Final

from lanes.attempts import error_type
from lanes.clock import Clock, monotonic
from lanes.consumer import Consumer
from lanes.core.lane import BLOCKED, DEAD_LETTERING, DEAD_LETTERING_BLOCKED, HELD, PUBLISH_HELD
from lanes.errors import LanesError
from lanes.observe.health import Health
from lanes.observe.status import Status, undisturbed
from lanes.runtime.run import Run

log = logging.getLogger("lanes.web")

FRESH: Final = 1.0
"""Seconds after which a snapshot is made again."""

STILL: Final = 10.0
"""Seconds without an answer of the event loop after which the loop stands still."""


SHOWN: Final = 50
"""Maximum number of stopped lanes in a view."""

_WAITS: Final = {
    HELD: "retry",
    BLOCKED: "blocked",
    DEAD_LETTERING: "parking",
    DEAD_LETTERING_BLOCKED: "parking",
    PUBLISH_HELD: "outputs",
}


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """A lane whose head, its first unfinished message, waits.

    Attributes:
        waits: Event that the head waits for: ``"retry"`` = the next attempt. ``"blocked"`` = a command of an operator.
            ``"parking"`` = the confirmation of the dead letter. ``"outputs"`` = the next send of its outputs.
        partition: Source and number of the partition.
        position: Position of the head.
        attempt: Number of the attempts so far.
        age: Seconds since the delivery of the head.
        left: Seconds until the next attempt or send; 0.0 for another wait.
        error: Name of the type of the last exception, without its text.
        key: Key of the head; None = no key. A key is user data, so no ``repr`` shows the key.
    """

    waits: str
    partition: str
    position: int
    attempt: int
    age: float
    left: float
    error: str
    key: bytes | None = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class View:
    """A snapshot of a consumer. The object never changes, so any thread may read it.

    Attributes:
        taken: Time of the snapshot, in seconds of the board's clock.
        name: Name of the source.
        active: Whether the consumer owned a partition.
        health: Health of the consumer.
        status: Status of the consumer; None = the start of the source has failed.
        stopped: The oldest lanes that wait for a retry, an operator or the confirmation of a dead letter.
    """

    taken: float
    name: str
    active: bool
    health: Health
    status: Status | None
    stopped: tuple[Stopped, ...] = ()


class Board:
    """The latest view of one consumer. Any thread may call every method, and no method blocks.

    The event loop of the consumer makes the view. While the loop does not answer, the view does not change, and
    ``silent`` increases. While no loop runs the consumer, the caller of ``ask`` makes the view.

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
        """Seconds for which the event loop has not answered; 0.0 = no request waits for an answer."""
        asked = self._asked
        return 0.0 if asked is None else max(0.0, self._clock() - asked)

    @property
    def draining(self) -> bool:
        """Whether the consumer drains. The value changes at once, even while a handler blocks the event loop."""
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
            stopped=undisturbed(lambda: self._stopped(consumer._life.active_run)),
        )

    def _stopped(self, run: Run | None) -> tuple[Stopped, ...]:
        if run is None:
            return ()
        now = run.clock()
        # Blocked lanes first, because they wait for the reader of the page.
        lanes = nsmallest(
            SHOWN, run.engine.stopped_lanes(), key=lambda lane: (lane.head.state != BLOCKED, lane.head.received)
        )
        return tuple(
            Stopped(
                waits=_WAITS.get(lane.head.state, "retry"),
                partition=str(lane.head.partition.id),
                position=lane.head.position,
                attempt=lane.head.attempt,
                age=max(0.0, now - lane.head.received),
                left=max(0.0, lane.until - now),
                error=error_type(lane.failure.error),
                key=lane.head.key,
            )
            for lane in lanes
        )
