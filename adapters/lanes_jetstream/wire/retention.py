"""Estimates when a server deletes messages of a stream, by age, or by the number or bytes of newer messages."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from lanes.clock import Clock, monotonic
from lanes.core.types import Message
from lanes.retention import Pace, by_age, by_newer, soonest
from lanes.source import Retention
from lanes_jetstream.wire.answers import number

_SECOND: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits and the size of a stream; a limit of 0 = no limit.

    Attributes:
        age: Seconds after which the server deletes a message.
        messages: Number of messages above which the server deletes the oldest message.
        bytes: Bytes above which the server deletes the oldest message.
        keeps_acknowledged: Whether acknowledged messages stay in the stream.
        stored: Number of messages in the stream.
        stored_bytes: Size of the stored messages in bytes.
    """

    age: float
    messages: int
    bytes: int
    keeps_acknowledged: bool
    stored: int
    stored_bytes: int

    @classmethod
    def of(cls, config: Mapping[str, Any], state: Mapping[str, Any]) -> Limits:
        """Return the limits from the configuration and the state of a stream."""
        # With the discard policy "new", a full stream refuses new messages instead.
        old = config.get("discard", "old") == "old"
        return cls(
            age=int(config.get("max_age") or 0) / _SECOND,
            messages=max(0, int(config.get("max_msgs") or 0)) if old else 0,
            bytes=max(0, int(config.get("max_bytes") or 0)) if old else 0,
            keeps_acknowledged=config.get("retention", "limits") == "limits",
            stored=int(state.get("messages") or 0),
            stored_bytes=int(state.get("bytes") or 0),
        )


NO_LIMITS: Final = Limits(age=0.0, messages=0, bytes=0, keeps_acknowledged=True, stored=0, stored_bytes=0)
"""The limits of a stream that keeps every message."""


class StreamRetention:
    """The retention of the messages of one stream.

    Args:
        wall: Wall clock, in seconds since 1970.
        clock: Monotonic clock, in seconds.
    """

    def __init__(self, wall: Clock = time.time, clock: Clock = monotonic) -> None:
        self._wall = wall
        self._clock = clock
        self._noted = 0.0
        self._limits: Limits | None = None
        self._first = self._last = 0
        self._pace = Pace()

    def note(self, limits: Limits, first: int, last: int) -> None:
        """Record the current state of the stream, with its first and last sequence."""
        self._noted = now = self._clock()
        self._limits, self._first, self._last = limits, first, last
        # If acknowledged messages leave the stream, the number of stored messages grows more slowly than the sequences.
        self._pace.note(last if limits.keeps_acknowledged else limits.stored, now)

    def of(self, message: Message) -> Retention | None:
        """Return the retention of a message by the last recorded state; None = no limit, or no recorded state."""
        limits = self._limits
        if limits is None:
            return None
        if message.position < self._first:
            return Retention(0.0, 1.0, f"a limit of its stream, which begins at sequence {self._first}")
        newer, pace = min(self._last - message.position, max(0, limits.stored - 1)), self._pace.per_second()
        age = self._clock() - self._noted
        written = written_at(str(message.token))
        by_time = by_count = by_bytes = None
        if limits.age and written is not None:
            by_time = by_age(written, limits.age, self._wall(), f"max_age={limits.age:g} s")
        if limits.messages:
            by_count = by_newer(newer, limits.messages, pace, f"max_msgs={limits.messages}", age=age)
        if limits.bytes and limits.stored and limits.stored_bytes:
            kept = limits.bytes * limits.stored / limits.stored_bytes
            by_bytes = by_newer(newer, kept, pace, f"max_bytes={limits.bytes}", age=age)
        return soonest((by_time, by_count, by_bytes))


def written_at(reply: str) -> float | None:
    """Read the time at which the stream stored a message, in seconds since 1970, from a reply subject."""
    tokens = reply.split(".")
    # The long form begins with a domain and an account; see `sequences`.
    place = 7 if len(tokens) == 9 else 9
    found = number(tokens[place]) if len(tokens) > place else None
    return None if found is None else found / _SECOND
