"""Converts a delivery of the client to the core's message, with position, key and size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from nats.aio.msg import Msg

from lanes.core.types import Message, Partition, key_bytes
from lanes.dead_letter import Details
from lanes.errors import MessageError, SourceError
from lanes_jetstream.wire.answers import number
from lanes_jetstream.wire.keys import KeyFunction


class _Reader:
    """Reads the client's messages; see ``lanes.core.types.Reader`` and ``lanes.observe.health.SettledReader``."""

    def value(self, raw: object) -> bytes:
        assert isinstance(raw, Msg)
        return raw.data

    def headers(self, raw: object) -> Sequence[tuple[str, bytes]]:
        assert isinstance(raw, Msg)
        return [(name, value.encode()) for name, value in (raw.headers or {}).items()]

    def subject(self, raw: object) -> str:
        assert isinstance(raw, Msg)
        return raw.subject

    def details(self, raw: object) -> Details:
        assert isinstance(raw, Msg)
        tokens = raw.reply.split(".")
        nanoseconds = number(tokens[7] if len(tokens) == 9 else tokens[9] if len(tokens) > 9 else "")
        return Details(timestamp=nanoseconds / 1e9 if nanoseconds else None)

    def settled(self, raw: object) -> bool:
        # The client records a call of ack, nak or term in the message. ``lanes`` acknowledges without such a call, by
        # the reply subject.
        return bool(getattr(raw, "_ackd", False))


READER: Final = _Reader()


def message_of(partition: Partition, raw: Msg, position: int, key: KeyFunction | None) -> Message:
    """Return the core's message for a delivery. If the key function fails, the message has no key and is ``broken``."""
    lane, broken = None, None
    if key is not None:
        try:
            found = key(raw)
            lane = None if found is None else key_bytes(found)
        except Exception as error:
            broken = error
    message = Message(partition, position, lane, _size_of(raw), raw, raw.reply)
    if broken is not None:
        message.broken = MessageError(
            f"key=… failed at {partition.id.source} sequence {position} with {type(broken).__name__}; correct the key "
            "function, or exclude the message with filter_subject"
        )
        message.broken.__cause__ = broken
    return message


def _size_of(raw: Msg) -> int:
    """Return the size of a message in bytes: payload, subject, and names and values of the headers in UTF-8."""
    text = raw.subject
    if raw.headers:
        text = "".join([text, *raw.headers, *raw.headers.values()])
    return len(raw.data) + len(text if text.isascii() else text.encode(errors="replace"))


def sequences(reply: str) -> tuple[int, int]:
    """Read the stream sequence and the delivery number of the consumer from a reply subject.

    The short form is ``$JS.ACK.<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>.<time>.<pending>``. The long
    form has ``<domain>.<account hash>`` before the stream, and possibly one more token at the end (NATS ADR-15). Raises
    ``SourceError`` for any other subject.
    """
    tokens = reply.split(".")
    if len(tokens) == 9:
        stream, consumer = tokens[5], tokens[6]
    else:
        stream, consumer = tokens[7:9] if len(tokens) in (11, 12) else ("", "")
    # Sequences have 64 bits. Python refuses to parse numbers of thousands of digits.
    both = stream + consumer
    if not (stream and consumer and both.isascii() and both.isdigit() and len(stream) <= 20 >= len(consumer)):
        raise SourceError(
            f"a delivery has the reply subject {reply!r:.200}, which JetStream does not use; check that no other "
            "client publishes to the inbox of this client"
        )
    return int(stream), int(consumer)


def pending(reply: str) -> int:
    """Read the consumer's number of undelivered messages at the delivery from a reply subject."""
    tokens = reply.split(".")
    # Without the number the source cannot detect a loss, so return 0.
    return number(tokens[8] if len(tokens) == 9 else tokens[10]) or 0
