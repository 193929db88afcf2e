"""From the client's message to that of the core: how to look into it, its key, and what one is without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from nats.aio.msg import Msg

from lanes.core.types import Message, Partition, key_bytes
from lanes.errors import MessageError
from lanes_jetstream.wire.keys import KeyFunction


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


def message_of(partition: Partition, raw: Msg, position: int, key: KeyFunction | None) -> Message:
    """The core's message of a delivery. One whose key cannot be had has none, and is ``broken``."""
    lane, broken = None, None
    if key is not None:
        try:
            found = key(raw)
            lane = None if found is None else key_bytes(found)
        except Exception as error:
            broken = error
    message = Message(partition, position, lane, _size_of(raw), raw, raw.reply)
    if broken is not None:
        _break(message, broken)
    return message


def _size_of(raw: Msg) -> int:
    """The bytes a message counts for: payload, subject and headers."""
    size = len(raw.data) + len(raw.subject)
    if raw.headers:
        size += sum(len(name) + len(value) for name, value in raw.headers.items())
    return size


def _break(message: Message, error: Exception) -> None:
    message.broken = MessageError(
        f"key=… failed at {message.partition.id.source} sequence {message.position} with {type(error).__name__}: "
        "correct the key function, or exclude such messages with filter_subject"
    )
    message.broken.__cause__ = error
