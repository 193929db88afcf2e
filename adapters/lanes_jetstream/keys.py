"""Where the partition key of a JetStream message comes from."""

from __future__ import annotations

from collections.abc import Callable

from nats.aio.msg import Msg

from lanes.core.types import PartitionKey
from lanes.errors import ConfigError

KeyFunction = Callable[[Msg], PartitionKey | None]
"""A plain function of the client's message; None means "no key": its order is not claimed."""


def subject_token(index: int) -> KeyFunction:
    """The key is one token of the subject, counted from 0; negative counts from the end.

    ``subject_token(1)`` of ``orders.42.paid`` is ``42``. A subject that is too short raises ``LookupError`` at
    that message.
    """
    if not isinstance(index, int) or isinstance(index, bool):
        raise ConfigError(f"subject_token({index!r}): pass the token's number, 0 for the first, -1 for the last")

    def key(message: Msg) -> PartitionKey:
        tokens = message.subject.split(".")
        try:
            return tokens[index].encode()
        except IndexError:
            raise LookupError(f"subject_token({index}): the subject has {len(tokens)} tokens") from None

    return key


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
