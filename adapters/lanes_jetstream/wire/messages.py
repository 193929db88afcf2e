"""From the client's message to that of the core: how to look into it, its key, and what one is without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from nats.aio.msg import Msg

from lanes.core.types import Message, Partition, key_bytes
from lanes.errors import MessageError, SourceError
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


def sequences(reply: str) -> tuple[int, int]:
    """Stream sequence and delivery number of the consumer, from either form of the reply subject.

    ``$JS.ACK.<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>.<time>.<pending>``, or with
    ``<domain>.<account hash>`` before the stream and possibly a token behind (NATS ADR-15). Raises ``SourceError``
    for any other.
    """
    dots = reply.count(".")
    if dots == 8:
        _, stream, consumer, _, _ = reply.rsplit(".", 4)
    else:
        stream, consumer = reply.split(".")[7:9] if dots in (10, 11) else ("", "")
    # Sequences have 64 bits; Python refuses to read numbers of thousands of digits.
    both = stream + consumer
    if not (stream and consumer and both.isascii() and both.isdigit() and len(stream) <= 20 >= len(consumer)):
        raise SourceError(
            f"a delivery has the reply subject {reply!r:.200}, which is not one of JetStream's: see that nobody else "
            "publishes to the inbox of this client"
        )
    return int(stream), int(consumer)


def pending(reply: str) -> int:
    """How many messages the consumer had still to deliver behind one, as that one's reply subject says."""
    tokens = reply.split(".")
    number = tokens[8] if len(tokens) == 9 else tokens[10]
    # Of one that does not say it nothing can be missed.
    return int(number) if number.isascii() and number.isdigit() and len(number) <= 20 else 0
