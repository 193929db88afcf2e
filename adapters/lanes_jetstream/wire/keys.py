"""Partition keys of JetStream messages: from a subject, a header, or a function."""

from __future__ import annotations

from collections.abc import Callable

from nats.aio.msg import Msg

from lanes.core.types import PartitionKey
from lanes.errors import ConfigError

KeyFunction = Callable[[Msg], PartitionKey | None]
"""A function from the client's message to its key. None = no key, so the message has no order."""


class SubjectTokens:
    """A key function over ``tokens`` of the subject, joined by dots."""

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
            raise LookupError(
                f"{self!r}: the subject has {len(found)} tokens, too few for the index; use a lower index"
            ) from None

    def __repr__(self) -> str:
        return f"subject_token({', '.join(map(str, self.tokens))})"


def subject_token(index: int, *more: int) -> SubjectTokens:
    """Make a key function over one or several tokens of the subject.

    For ``orders.42.paid``, ``subject_token(1)`` returns ``42``, and ``subject_token(0, 1)`` returns ``orders.42``. The
    key function raises ``LookupError`` for a subject with too few tokens.

    Args:
        index: Index of the token, from 0; negative counts from the end.
        *more: Indices of further tokens of the key, in order.

    Returns:
        A key function for ``JetStreamSource(key=…)``.

    Raises:
        ConfigError: An index is not a whole number.
    """
    tokens = (index, *more)
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in tokens):
        raise ConfigError(
            f"subject_token({', '.join(map(repr, tokens))}): an index is no whole number; pass 0 for the first token, "
            "-1 for the last"
        )
    return SubjectTokens(tokens)


def header(name: str) -> KeyFunction:
    """Make a key function over one header. A message without the header has no key.

    Args:
        name: Name of the header.

    Returns:
        A key function for ``JetStreamSource(key=…)``.

    Raises:
        ConfigError: ``name`` is empty or no text.
    """
    if not isinstance(name, str) or not name:
        raise ConfigError(f"header({name!r}) has no name; pass the header's name")

    def key(message: Msg) -> PartitionKey | None:
        headers = message.headers
        return headers.get(name) if headers else None

    return key


def whole_subject(message: Msg) -> PartitionKey:
    """Key function: the key is the whole subject.

    Args:
        message: Message of the nats client.

    Returns:
        The subject as bytes.
    """
    return message.subject.encode()
