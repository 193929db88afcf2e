"""The errors of ``lanes``. Each says what, where, in which state, and what to do.

``Nak`` and ``Term`` are not errors of ``lanes``: a handler raises them to choose its own outcome.
"""

from __future__ import annotations

__all__ = [
    "ConfigError",
    "ContractError",
    "HandlerHalted",
    "LanesError",
    "MessageError",
    "Nak",
    "SourceError",
    "Term",
    "is_retryable",
]


class LanesError(Exception):
    """Base of everything ``lanes`` raises by itself."""


class ConfigError(LanesError):
    """A setting that cannot be kept: names it, the value found, and the remedy."""


class SourceError(LanesError):
    """The broker's side failed. ``retryable`` says whether the same call may succeed later."""

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable


def is_retryable(error: Exception, *, unknown: bool) -> bool:
    """Whether the same call may succeed later.

    A ``SourceError`` says so itself; what else ``lanes`` raises does not pass. ``unknown``: whether an error not of
    ``lanes`` does, such as a driver's. Dead letters and stores of attempts may raise any, and are called again; a
    source says what passes, and anything else is a bug of it.
    """
    return error.retryable if isinstance(error, SourceError) else unknown and not isinstance(error, LanesError)


class ContractError(LanesError):
    """A source broke a rule of ``lanes.source``: a bug in the adapter, please report it."""


class HandlerHalted(LanesError):
    """A message could not be handled and the poison policy is ``exit``, or its handler was cancelled by somebody else.

    Everything that had finished was settled, the message itself was not: it is delivered again at the next
    start. ``__cause__`` is what the handler raised last.
    """


class MessageError(LanesError):
    """A message that cannot be handled as it is: its key or its value cannot be read. ``__cause__`` says why.

    An outcome of that one message: it is not retried, and the poison policy decides what becomes of it.
    """


class Nak(Exception):
    """Raised by a handler: this attempt failed, try again after ``delay`` seconds (None = the backoff)."""

    def __init__(self, *, delay: float | None = None) -> None:
        if delay is not None and not 0 <= delay < float("inf"):
            raise ValueError(f"Nak(delay={delay!r}): the delay must be a finite number of seconds, 0 or more")
        super().__init__("nak" if delay is None else f"nak, retry in {delay} s")
        self.delay = delay


class Term(Exception):
    """Raised by a handler: this message can never succeed; do not retry it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
