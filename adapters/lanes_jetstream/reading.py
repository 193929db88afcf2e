"""From the client's message to that of the core: how to look into it, and what one is without its key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from nats.aio.msg import Msg

from lanes.core.types import Message
from lanes.errors import MessageError


class _Reader:
    """Looks into the client's messages; see ``lanes.core.types.Reader``."""

    def value(self, raw: object) -> bytes:
        assert isinstance(raw, Msg)
        return raw.data

    def headers(self, raw: object) -> Sequence[tuple[str, bytes]]:
        assert isinstance(raw, Msg)
        return [(name, value.encode()) for name, value in (raw.headers or {}).items()]

    def subject(self, raw: object) -> str:
        assert isinstance(raw, Msg)
        return raw.subject


READER: Final = _Reader()


def without_key(message: Message, error: Exception) -> None:
    """Its key cannot be had: it has none, and is ``broken``."""
    message.broken = MessageError(
        f"key=… failed at {message.partition.id.source} sequence {message.position} with {type(error).__name__}: "
        "correct the key function, or exclude such messages with filter_subject"
    )
    message.broken.__cause__ = error
