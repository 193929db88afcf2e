"""The connection of one client to the broker.

Requests keep their order, and the chooser decides the fate of each request.
"""

from __future__ import annotations

import math
from asyncio import TimerHandle
from collections import deque
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from confluent_kafka import KafkaError, KafkaException

from memsource.adapters.choices import Choice, Phase
from memsource.adapters.threads import pause, stepped
from memsource.adapters.world import AdapterWorld
from memsource.kafka.client import Client, KafkaFailure
from memsource.sim.loop.event_loop import SimLoop

T = TypeVar("T")

LATENCY: Final = 0.001
"""Seconds that a request or a reply takes."""

_NOBODY: Final = Context()
"""The context of calls that belong to no process."""

RETRY: Final = 0.1
"""Seconds between two attempts to reach the broker."""

Answered = Callable[[Any, KafkaError | None], None]


class Host(Protocol):
    """The part of the broker that its links use."""

    world: AdapterWorld
    loop: SimLoop

    def reachable(self, client: Client, *, own: bool) -> bool:
        """Whether requests of a client arrive now; with ``own``, requests of the client's own connection to the
        coordinator.
        """

    def phase(self, member: str) -> Phase:
        """The present activity of a member."""


@dataclass(eq=False)
class _Request:
    ready_at: float
    act: Callable[[], Any]
    answered: Answered
    fate: Choice
    over: bool = False
    timer: TimerHandle | None = None

    def end(self, value: Any, error: KafkaError | None) -> None:
        if not self.over:
            self.over = True
            if self.timer is not None:
                self.timer.cancel()
            self.answered(value, error)


class Link:
    """One connection. A delayed request delays the requests after it.

    Args:
        host: The broker.
        client: The client as data.
        own: Whether the client itself has this connection, and not another client of its process.
    """

    def __init__(self, host: Host, client: Client, *, own: bool = False) -> None:
        self._host = host
        self._own = own
        self._client = client
        self._queue: deque[_Request] = deque()
        self._armed = math.inf

    def call(self, name: str, act: Callable[[], T], timeout: float, phase: Phase | None = None) -> T:
        """Send a request and wait for its reply, in the thread that calls.

        Args:
            name: Name of the request.
            act: Performs the request at the broker; may raise ``KafkaFailure``.
            timeout: Maximum seconds to wait.
            phase: Activity of the member; None = the present activity.

        Raises:
            KafkaException: The broker answers with an error, or does not answer.
        """
        found: list[tuple[T, KafkaError | None]] = []
        thread = stepped()
        assert thread is not None, "only the thread of the client waits"

        def answered(value: T, error: KafkaError | None) -> None:
            found.append((value, error))
            thread.wake()

        until = self._host.loop.time() + timeout
        self.send(name, act, answered, timeout, phase)
        while not found and self._host.loop.time() < until:
            thread.pause(until)
        if not found:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "Local: Timed out"))
        value, error = found[0]
        if error is not None:
            raise KafkaException(error)
        return value

    def send(
        self,
        name: str,
        act: Callable[[], Any],
        answered: Answered,
        timeout: float,
        phase: Phase | None = None,
        fate: Choice | None = None,
    ) -> None:
        """Send a request, and call ``answered`` once, with its value or its error. See ``call``.

        Without a ``fate`` the chooser decides.
        """
        host, member = self._host, self._client.name
        fate = fate or host.world.exchange(member, name, phase or host.phase(member))
        # The process may be frozen or dead now.
        pause()
        now = host.loop.time()
        late = fate.amount if fate.kind == "delay" else 0.0
        request = _Request(now + LATENCY + late, act, answered, fate)
        self._queue.append(request)
        self._arm(request.ready_at)
        request.timer = self._at(now + timeout, lambda: self._expire(request))

    def _expire(self, request: _Request) -> None:
        request.end(None, timed_out())
        self._pump()

    def _at(self, at: float, call: Callable[[], object]) -> TimerHandle:
        # The network belongs to no process.
        return self._host.loop.call_at(at, call, context=_NOBODY)

    def _arm(self, at: float) -> None:
        if at < self._armed:
            self._armed = at
            self._at(at, self._pump)

    def _pump(self) -> None:
        now = self._host.loop.time()
        if self._armed <= now:
            self._armed = math.inf
        while self._queue and (self._queue[0].over or self._queue[0].ready_at <= now):
            request = self._queue[0]
            if self._client.crashed or request.over:
                # After a timeout the client uses a new connection.
                self._queue.popleft()
                continue
            if not self._host.reachable(self._client, own=self._own):
                self._arm(now + RETRY)
                return
            self._queue.popleft()
            self._arrive(request, now)
        if self._queue:
            self._arm(self._queue[0].ready_at)

    def _arrive(self, request: _Request, now: float) -> None:
        kind = request.fate.kind
        value, error = None, None
        if kind != "drop_request":
            for _ in range(2 if kind == "duplicate" else 1):
                try:
                    value, error = request.act(), None
                except KafkaFailure as failure:
                    value, error = None, error_of(failure)
        if kind in ("drop_request", "drop_reply"):
            # The client learns from its own timer that no reply comes.
            self._at(now + request.fate.amount, lambda: request.end(None, timed_out()))
        else:
            self._at(now + LATENCY, lambda: request.end(value, error))


def timed_out() -> KafkaError:
    """The client's error of a request without a reply."""
    return KafkaError(KafkaError._TIMED_OUT, "Local: Timed out")


def error_of(failure: KafkaFailure) -> KafkaError:
    """The client's error for an answer of the broker."""
    return KafkaError(getattr(KafkaError, failure.code), str(failure), fatal=failure.code == "_FATAL")
