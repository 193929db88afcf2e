"""The errors of ``lanes``. Each text names the subject and the fault, and in most cases the value and the remedy.

``Nak`` and ``Term`` are not errors of ``lanes``: a handler raises them to choose its outcome.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable
from typing import Any, ParamSpec

_Options = ParamSpec("_Options")


class LanesError(Exception):
    """Base class of the errors that ``lanes`` raises."""


class ConfigError(LanesError):
    """A setting is invalid, or contradicts the broker or another setting.

    The text names the setting, the value and the remedy.
    """


class SourceError(LanesError):
    """The broker, or the connection to it, failed.

    Args:
        message: The text of the error.
        retryable: Whether the same call may succeed later; also an attribute of the error.
    """

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable


def is_retryable(error: Exception, *, unknown: bool) -> bool:
    """Return whether the same call may succeed later.

    For a ``SourceError``, return its attribute ``retryable``. No other error of ``lanes`` is retryable.

    Args:
        error: The exception of the call.
        unknown: Answer for an exception that is not an error of ``lanes``, such as an exception of a driver. True for
            dead letters and stores of attempts, which may raise any exception. False for a source, which must raise
            ``SourceError`` for a retryable failure.

    Returns:
        The answer.
    """
    return error.retryable if isinstance(error, SourceError) else unknown and not isinstance(error, LanesError)


class ContractError(LanesError):
    """A source broke a rule of ``lanes.source``, which is a bug of the adapter; please report it.

    A store of attempts that returns an invalid entry raises this error too.
    """


class HandlerHalted(LanesError):
    """A message failed all its attempts under the poison policy ``exit``, or user code cancelled a handler.

    The consumer settles finished messages. The broker redelivers the unsettled failed message at the next start.
    ``__cause__`` is the last exception of the handler.

    Attributes:
        place: Partition and position of the message; empty = the error does not concern a single message.
    """

    place: str = ""


class MessageError(LanesError):
    """Error for a message with an unreadable key or value.

    ``__cause__`` is the reason. The consumer does not retry the message, and applies the poison policy to it.

    Attributes:
        unread: Whether ``decode=`` raised the error before the call of the handler.
        decoder_error: Type and text of the exception that ``decode=`` raised, for the dead letter; empty = ``decode=``
            raised this error itself.
    """

    unread: bool = False
    decoder_error: str = ""


class HandlerProcessError(LanesError):
    """The process of a handler ended during a call, or the handler raised an exception that cannot leave the process.

    This error occurs only with ``Settings(sync_handlers="processes")``. The attempt of each message of that call has
    failed.
    """


def _names_the_delay(initialize: Callable[_Options, None]) -> Callable[_Options, None]:
    """Make the constructor of ``Nak`` name the right call after a delay without a name, or after an unknown option."""

    @functools.wraps(initialize)
    def checked(*values: _Options.args, **options: _Options.kwargs) -> None:
        given: tuple[Any, ...] = values[1:]
        if len(given) > 1:
            shown = ", ".join(map(repr, given))
            raise TypeError(f"Nak({shown}): the delay needs its name; write Nak({given[0]!r}, delay={given[1]!r})")
        for name in options:
            if name not in ("reason", "delay"):
                meant = difflib.get_close_matches(name, ("reason", "delay"), n=1)
                guess = f"did you mean {meant[0]}=?" if meant else "write Nak(reason, delay=…)"
                raise TypeError(f"Nak has no option {name}=: {guess}")
        initialize(*values, **options)

    return checked


class Nak(Exception):
    """Exception that a handler raises to fail an attempt, with a reason, and to choose the delay of the next attempt.

    Args:
        reason: Text of the error, for the log and the dead letter. Empty = no reason.
        delay: Seconds until the next attempt, finite and 0 or more. ``None`` = the backoff of ``Retry``.

    Raises:
        TypeError: The reason is not a str, or the delay has no name.
        ValueError: The delay is out of its range.
    """

    @_names_the_delay
    def __init__(self, reason: str = "", *, delay: float | None = None) -> None:
        if not isinstance(reason, str):
            raise TypeError(f"Nak({reason!r}): the reason must be a str; write Nak(delay=…) for a number of seconds")
        if delay is not None and not (isinstance(delay, int | float) and 0 <= delay < float("inf")):
            raise ValueError(f"Nak(delay={delay!r}): the delay must be a finite number of seconds, 0 or more")
        super().__init__(reason or ("no reason given" if delay is None else f"no reason given, retry in {delay} s"))
        self.reason = reason
        self.delay = delay


class Term(Exception):
    """Exception that a handler raises for a message that can never succeed. The consumer does not retry the message.

    Args:
        reason: Text of the error, for the log and the dead letter. Empty = no reason.

    Raises:
        TypeError: The reason is not a str.
    """

    def __init__(self, reason: str = "") -> None:
        if not isinstance(reason, str):
            raise TypeError(f"Term({reason!r}): the reason must be a str; write Term(str(error)) for an exception")
        super().__init__(reason or "no reason given")
        self.reason = reason
