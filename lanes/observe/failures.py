"""The log lines about failed attempts and given-up messages.

A limit for each type of exception prevents a flood of lines.

The first failure of a message is a warning. Later failures of the message are debug lines. The last failure of a
message is an error line. Ten seconds after a warning, one line counts the further messages that failed with the same
exception type. Every failed attempt after which the message runs again is also a debug line with its traceback. An
error line with the traceback reports the first message that the consumer gives up. Ten seconds later, one line counts
the further messages that the consumer gave up with the same exception type. Each of them also causes a debug line with
its traceback.
"""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Final

from lanes.attempts import error_type
from lanes.core import effects as fx
from lanes.core.types import Message
from lanes.dead_letter import error_text, members_of, printable, reason_line
from lanes.errors import MessageError, Nak, Term
from lanes.line_limit import Counted, LineLimit

log = logging.getLogger("lanes")

_OTHERS: Final = "other exceptions"

_MEMBERS_SHOWN: Final = 3
"""Maximum number of exceptions of a group in one line."""

ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None]
"""An exception and its traceback for a line of the log."""


class FailedAttempts:
    """The log lines about the failures and given-up messages of one consumer. Times are seconds of the engine's clock.

    Args:
        name: Name of the source.
        handler: Name of the handler.
    """

    def __init__(self, name: str, handler: str) -> None:
        self._name = name
        self._handler = handler
        self._limit: LineLimit[Message] = LineLimit(_OTHERS)
        self._given_up: LineLimit[Message] = LineLimit(_OTHERS)

    def __repr__(self) -> str:
        return f"<FailedAttempts {len(self._limit)} types>"

    def failed(self, effect: fx.Held | fx.Interrupted, now: float) -> None:
        """Log or count a failed attempt after which the message runs again. The call does not block."""
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
            shown(error),
            message.attempt,
            _next_try(effect),
        )

    def given_up(self, message: Message, error: BaseException, now: float) -> None:
        """Log or count a message that goes to the dead letters. The call does not block."""
        if not log.isEnabledFor(logging.ERROR):
            return
        unread = _decode_failed(error)
        kind = _shown_unread(error) if unread else error_type(error)
        log.log(
            logging.ERROR if self._given_up.logs(kind, message, now) else logging.DEBUG,
            "%s: giving up %s position %d after %d attempt(s) with %s; the message goes to the dead letters",
            self._name,
            message.partition.id,
            message.position,
            message.attempt,
            kind if unread else shown(error),
            exc_info=user_traceback(error),
        )

    def next_at(self) -> float:
        """Return the time of the next line about counted messages; infinity = no counted message."""
        return min(self._limit.next_at(), self._given_up.next_at())

    def due(self, now: float) -> None:
        """Log the counted messages whose line is due."""
        self._tell(self._limit.due(now), self._given_up.due(now))

    def end(self, now: float) -> None:
        """Log all counted messages, because the run ends."""
        self._tell(self._limit.end(now), self._given_up.end(now))

    def _tell(self, failed: list[Counted[Message]], given_up: list[Counted[Message]]) -> None:
        for each in failed:
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
        for each in given_up:
            log.error(
                "%s: gave up %d more message(s) in %.1f s with %s, the last at %s position %d; these messages go to "
                "the dead letters",
                self._name,
                each.count,
                each.seconds,
                each.kind,
                each.latest.partition.id,
                each.latest.position,
            )


def shown(error: BaseException) -> str:
    """Return the type of an exception for a line of the log, with the reason of a ``Nak`` or ``Term``.

    For an exception group, the text also lists the types of the group's members.
    """
    kind = error_type(error)
    if isinstance(error, BaseExceptionGroup):
        members = members_of(error)
        more = f" and {len(members) - _MEMBERS_SHOWN} more" if len(members) > _MEMBERS_SHOWN else ""
        return f"{kind} of {', '.join(map(shown, members[:_MEMBERS_SHOWN]))}{more}"
    # The text of any other exception may contain user data, so only the traceback shows the text.
    return f"{kind} ({reason_line(kind, error.reason)})" if isinstance(error, Nak | Term) and error.reason else kind


def traceback_of(error: BaseException) -> BaseException | None:
    """Return the exception whose traceback the log line needs; None = the handler raised ``Nak`` or ``Term``."""
    return None if isinstance(error, Nak | Term) else error


def _decode_failed(error: BaseException) -> bool:
    """Return whether ``lanes`` created this error because ``decode=`` raised the exception in its cause.

    A decoder may also raise ``MessageError`` itself. The text of that error may contain user data, and its frames
    belong to code of the user.
    """
    frames = error.__traceback__
    return isinstance(error, MessageError) and error.unread and frames is not None and users_part(frames) is None


def _shown_unread(error: BaseException) -> str:
    return f"{error_type(error)} ({printable(error_text(error))})"


def user_traceback(error: BaseException) -> ExcInfo | None:
    """Return an exception for a line of the log, without the calls in ``lanes`` that led to the user's function.

    The result is None if the handler raised ``Nak`` or ``Term``.
    """
    if traceback_of(error) is None:
        return None
    if _decode_failed(error) and error.__cause__ is not None:
        # The line has the text of the error itself.
        cause = error.__cause__
        return type(cause), cause, users_part(cause.__traceback__)
    frames = users_part(error.__traceback__)
    if frames is None and not isinstance(error, MessageError):
        frames = error.__traceback__
    return type(error), error, frames


def users_part(frames: TracebackType | None) -> TracebackType | None:
    """Return a traceback without its first frames in ``lanes``; None = every frame belongs to ``lanes``."""
    while frames is not None and str(frames.tb_frame.f_globals.get("__name__")).partition(".")[0] == "lanes":
        frames = frames.tb_next
    return frames


def _next_try(effect: fx.Held | fx.Interrupted) -> str:
    if isinstance(effect, fx.Held):
        return f"next attempt in {effect.delay:.2f} s"
    return "its partition is handed over, so the next owner runs the message again"
