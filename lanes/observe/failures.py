"""The log lines about failed attempts, limited in number for each type of exception.

The first failure of a message is a warning. Later failures of the message are debug lines, because the last failure
of a message is an error line. After a warning, the next 10 s give one line with the number of further messages that
failed with the same type. Every failed attempt after which the message runs again is also a debug line with its
traceback.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from lanes.attempts import error_type
from lanes.core import effects as fx
from lanes.core.types import NEVER, Message
from lanes.dead_letter import reason_line
from lanes.errors import Nak

log = logging.getLogger("lanes")

FOLDED_FOR: Final = 10.0
"""Seconds after a warning in which further failures with the same type are counted instead of logged."""

_KINDS_LIMIT: Final = 50
"""Maximum number of types that are counted separately."""

_OTHERS: Final = "other exceptions"


@dataclass(slots=True)
class _Window:
    """The failures with one type since the last line about the type.

    Attributes:
        since: Time of the last line, in seconds.
        count: Number of messages that failed after the last line.
        latest: The message that failed last. ``None`` = no message failed after the last line.
    """

    since: float
    count: int = 0
    latest: Message | None = None


class FailedAttempts:
    """The log lines about the failed attempts of one consumer. Times are seconds of the engine's clock.

    Args:
        name: Name of the source.
        handler: Name of the handler.
    """

    def __init__(self, name: str, handler: str) -> None:
        self._name = name
        self._handler = handler
        self._windows: dict[str, _Window] = {}

    def __repr__(self) -> str:
        return f"<FailedAttempts {len(self._windows)} types>"

    def failed(self, effect: fx.Held | fx.Interrupted, now: float) -> None:
        """Log or count a failed attempt after which the message runs again. Does not block."""
        if not log.isEnabledFor(logging.WARNING):
            return
        message, error = effect.message, effect.failure.error
        log.debug(
            "%s: %s failed at %s position %d, attempt %d",
            self._name,
            self._handler,
            message.partition.id,
            message.position,
            message.attempt,
            exc_info=error,
        )
        if message.attempt != message.partition.recalled.get(message.position, 1):
            return
        kind = error_type(error)
        window = self._window(kind, now)
        if window is not None:
            window.count += 1
            window.latest = message
            return
        self._windows[kind] = _Window(now)
        log.warning(
            "%s: %s failed at %s position %d with %s, attempt %d; %s",
            self._name,
            self._handler,
            message.partition.id,
            message.position,
            _shown(kind, error),
            message.attempt,
            _next_try(effect),
        )

    def next_at(self) -> float:
        """Return the time of the next line about counted failures; ``NEVER`` = nothing is counted."""
        return min((window.since + FOLDED_FOR for window in self._windows.values() if window.count), default=NEVER)

    def due(self, now: float) -> None:
        """Log the counted failures whose line is due."""
        if self.next_at() <= now:
            self._tell(now, FOLDED_FOR)

    def end(self, now: float) -> None:
        """Log all counted failures, because the run ends."""
        self._tell(now, 0.0)

    def _window(self, kind: str, now: float) -> _Window | None:
        """Return the window that counts failures with this type. ``None`` = the failure is logged instead."""
        window = self._windows.get(kind)
        if window is None and len(self._windows) >= _KINDS_LIMIT:
            self._forget(now)
            if len(self._windows) >= _KINDS_LIMIT:
                return self._windows.setdefault(_OTHERS, _Window(now))
        return None if window is None or (not window.count and now >= window.since + FOLDED_FOR) else window

    def _forget(self, now: float) -> None:
        for kind, window in list(self._windows.items()):
            if not window.count and now >= window.since + FOLDED_FOR:
                del self._windows[kind]

    def _tell(self, now: float, least: float) -> None:
        for kind, window in self._windows.items():
            latest, age = window.latest, now - window.since
            if latest is None or age < least:
                continue
            log.warning(
                "%s: %s failed with %s at %d more message(s) in %.1f s, the last at %s position %d",
                self._name,
                self._handler,
                kind,
                window.count,
                age,
                latest.partition.id,
                latest.position,
            )
            window.since, window.count, window.latest = now, 0, None


def _shown(kind: str, error: BaseException) -> str:
    # The text of any other exception may contain user data, so only the traceback shows the text.
    return f"{kind} ({reason_line(kind, error.reason)})" if isinstance(error, Nak) and error.reason else kind


def _next_try(effect: fx.Held | fx.Interrupted) -> str:
    if isinstance(effect, fx.Held):
        return f"next attempt in {effect.delay:.2f} s"
    return "its partition is handed over, so the next owner runs the message again"
