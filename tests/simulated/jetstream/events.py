"""Events of the simulated server that only some runs have: removed messages and refused permissions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Final, Literal, Protocol

from tests.simulated.jetstream.server.server import NatsServer, Session
from tests.simulated.jetstream.server.stream import MessageStream

Use = Literal["cohort", "durable", "shared", "contended"]
"""The members of a run: a cohort, processes that take turns on one durable, processes that share one durable, or
processes that start on one durable although another one may run."""

_REMOVALS: Final = 4
_REMOVED_WITHIN: Final = 30.0
"""Number of times that the stream removes messages without a fault, and the first seconds of a run in which it does."""

_FORBIDDEN: Final = ("$JS.API.CONSUMER.MSG.NEXT.>", "$JS.ACK.>", "$KV.>")
_FORBIDDEN_FOR: Final = (0.5, 3.0, 12.0)
_FORBIDDEN_WITHIN: Final = 20.0
"""Subjects that the user of the members may not publish to for a while, the seconds until the permission is given back,
and the first seconds of a run in which this happens without a fault."""

_FAILS_WITHIN: Final = 15.0
"""Seconds within which a source fails or is closed whose request was denied."""

_RECENTLY: Final = 30.0
"""Seconds after a denied request within which its process may end by it."""

_LOSES_WITHIN: Final = 15.0
_LOSES_FROM: Final = 46.0
_LOSES_UNTIL: Final = 70.0
"""First seconds of a run in which a delivery is lost, and then a connection ends; and the seconds between which further
deliveries are lost. In between, a process may take deliveries for those of its earlier connection."""

_EXTRA: Final = 0.6
"""Share of the callbacks of a run with extra events that are such events."""


@dataclass(frozen=True)
class Extras:
    """The events of a run.

    Attributes:
        removes: Whether the stream removes its first messages, even undelivered messages, as by its limits.
        forbids: Whether the user of the members loses a permission for some time.
        loses: Whether the server loses deliveries of a durable before and long after it ends a connection.
    """

    removes: bool = False
    forbids: bool = False
    loses: bool = False


class Host(Protocol):
    """The part of the broker that the events use."""

    server: NatsServer
    stream: MessageStream
    losses: list[float]

    @property
    def now(self) -> float:
        """The time, in seconds."""

    def removed(self, sequence: int) -> None:
        """Record the removal of a message."""

    def disconnect_all(self) -> None:
        """End the connections of all members."""

    def works_on(self, session: Session, since: float) -> bool:
        """Whether the source of a connection works, and no fault has hindered its process since a time."""

    def find(self, check: str, what: str) -> None:
        """Report a broken promise."""


class Events:
    """The events of one run. No method blocks.

    Args:
        host: The broker.
        rng: Source of all choices.
        extras: The events that happen.

    Attributes:
        extras: The events that happen.
        denials: Time of the last denied request of each member.
    """

    def __init__(self, host: Host, rng: Random, extras: Extras) -> None:
        self.extras = extras
        self._host = host
        self._rng = rng
        self._call_at: Callable[..., object]
        self.denials: dict[str, float] = {}

    def begin(self, call_at: Callable[[float, Callable[[], object]], object]) -> None:
        """Plan the events that happen without a fault.

        Args:
            call_at: Function that calls a function at a time.
        """
        rng = self._rng
        self._call_at = call_at
        for _ in range(_REMOVALS if self.extras.removes else 0):
            call_at(rng.random() * _REMOVED_WITHIN, self._remove)
        if self.extras.forbids:
            call_at(rng.random() * _FORBIDDEN_WITHIN, self._forbid)
        if self.extras.loses:
            first = rng.random() * _LOSES_WITHIN
            later = sorted(rng.uniform(_LOSES_FROM, _LOSES_UNTIL) for _ in range(2))
            self._host.losses = [first, *later]
            call_at(rng.uniform(first, _LOSES_WITHIN), self._host.disconnect_all)

    def callback(self) -> bool:
        """Let one event happen instead of a callback, in some cases. Return whether an event has happened."""
        extras, rng = self.extras, self._rng
        if extras.removes and rng.random() < _EXTRA and self._remove():
            return True
        return extras.forbids and rng.random() < _EXTRA and self._forbid()

    def denied(self, session: Session, subject: str, now: float) -> None:
        """Record a denied request, and check that its source ends."""
        self.denials[session.member] = now

        if subject.startswith("$KV."):
            # A member repeats a write, and the permission may be back by then.
            return

        def check() -> None:
            if self._host.works_on(session, now):
                what = f"the source of {session.member} works {_FAILS_WITHIN:g} s after {subject} was denied"
                self._host.find("RefusedStops", what)

        self._call_at(now + _FAILS_WITHIN, check)

    def excuses(self, member: str, error: str, now: float) -> bool:
        """Whether a process may end by this error, because the server denied a request of the process."""
        return "ermission" in error and now - self.denials.get(member, -_RECENTLY) < _RECENTLY

    # --- inside

    def _remove(self) -> bool:
        """Remove the messages below a drawn message, mostly only a few messages."""
        stored, rng = self._host.stream.stored, self._rng
        if not stored:
            return False
        count = min(len(stored), rng.choice([1, 2, 2, 4, 12]))
        for sequence in stored[:count]:
            self._host.stream.remove(sequence, self._host.now)
            self._host.removed(sequence)
        return True

    def _forbid(self) -> bool:
        server, subject = self._host.server, self._rng.choice(_FORBIDDEN)
        if subject in server.denied:
            return False
        server.denied.append(subject)
        self._call_at(self._host.now + self._rng.choice(_FORBIDDEN_FOR), lambda: server.denied.remove(subject))
        return True
