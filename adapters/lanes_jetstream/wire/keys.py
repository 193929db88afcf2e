"""Where the partition key of a JetStream message comes from."""

from __future__ import annotations

from collections.abc import Callable

from nats.aio.msg import Msg

from lanes.core.types import PartitionKey
from lanes.errors import ConfigError

__all__ = ["KeyFunction", "header", "subject_token", "whole_subject"]

KeyFunction = Callable[[Msg], PartitionKey | None]
"""A plain function of the client's message; None means "no key": its order is not claimed."""


class SubjectTokens:
    """A key function: these ``tokens`` of the subject, joined by dots, which no token has."""

    __slots__ = ("_first", "tokens")

    def __init__(self, tokens: tuple[int, ...]) -> None:
        self.tokens = tokens
        self._first = tokens[0]

    def __call__(self, message: Msg) -> PartitionKey:
        found = message.subject.split(".")
        try:
            if len(self.tokens) == 1:
                return found[self._first].encode()
            return ".".join([found[token] for token in self.tokens]).encode()
        except IndexError:
            raise LookupError(f"{self!r}: the subject has {len(found)} tokens") from None

    def __repr__(self) -> str:
        return f"subject_token({', '.join(map(str, self.tokens))})"


def subject_token(index: int, *more: int) -> SubjectTokens:
    """The key is one token of the subject, or several of them, counted from 0; negative counts from the end.

    ``subject_token(1)`` of ``orders.42.paid`` is ``42``, ``subject_token(0, 1)`` is ``orders.42``. A subject that is
    too short raises ``LookupError`` at that message.
    """
    tokens = (index, *more)
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in tokens):
        raise ConfigError(
            f"subject_token({', '.join(map(repr, tokens))}): pass the number of each token, 0 for the first, -1 for "
            "the last"
        )
    return SubjectTokens(tokens)


def header(name: str) -> KeyFunction:
    """The key is a header's value; a message without that header has no key."""
    if not isinstance(name, str) or not name:
        raise ConfigError(f"header({name!r}): pass the header's name")

    def key(message: Msg) -> PartitionKey | None:
        headers = message.headers
        return headers.get(name) if headers else None

    return key


def whole_subject(message: Msg) -> PartitionKey:
    """The key is the subject itself."""
    return message.subject.encode()
