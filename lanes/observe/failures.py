"""The log lines about failed attempts, limited in number for each type of exception.

The first failure of a message is a warning. Later failures of the message are debug lines, because the last failure
of a message is an error line. After a warning, the next 10 s give one line with the number of further messages that
failed with the same type. Every failed attempt after which the message runs again is also a debug line with its
traceback.
"""

from __future__ import annotations

import logging
from typing import Final

from lanes.attempts import error_type
from lanes.core import effects as fx
from lanes.core.types import Message
from lanes.dead_letter import reason_line
from lanes.errors import Nak
from lanes.line_limit import Counted, LineLimit

log = logging.getLogger("lanes")

_OTHERS: Final = "other exceptions"


class FailedAttempts:
    """The log lines about the failed attempts of one consumer. Times are seconds of the engine's clock.

    Args:
        name: Name of the source.
        handler: Name of the handler.
    """

    def __init__(self, name: str, handler: str) -> None:
        self._name = name
        self._handler = handler
        self._limit: LineLimit[Message] = LineLimit(_OTHERS)

    def __repr__(self) -> str:
        return f"<FailedAttempts {len(self._limit)} types>"

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
        if not self._limit.logs(kind, message, now):
            return
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
        """Return the time of the next line about counted failures; infinity = nothing is counted."""
        return self._limit.next_at()

    def due(self, now: float) -> None:
        """Log the counted failures whose line is due."""
        self._tell(self._limit.due(now))

    def end(self, now: float) -> None:
        """Log all counted failures, because the run ends."""
        self._tell(self._limit.end(now))

    def _tell(self, counted: list[Counted[Message]]) -> None:
        for each in counted:
            log.warning(
                "%s: %s failed with %s at %d more message(s) in %.1f s, the last at %s position %d",
                self._name,
                self._handler,
                each.kind,
                each.count,
                each.seconds,
                each.latest.partition.id,
                each.latest.position,
            )


def _shown(kind: str, error: BaseException) -> str:
    # The text of any other exception may contain user data, so only the traceback shows the text.
    return f"{kind} ({reason_line(kind, error.reason)})" if isinstance(error, Nak) and error.reason else kind


def _next_try(effect: fx.Held | fx.Interrupted) -> str:
    if isinstance(effect, fx.Held):
        return f"next attempt in {effect.delay:.2f} s"
    return "its partition is handed over, so the next owner runs the message again"
