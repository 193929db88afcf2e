"""Writes the headers of dead letters, and reads dead letters from messages of a stream."""

from __future__ import annotations

import dataclasses
import re
from typing import Final

from lanes.core.types import Message
from lanes.dead_letter import DeadLetter
from lanes.dead_letters.wire import ReadDeadLetter, Wire

ID: Final = "Nats-Msg-Id"
"""Header with the id of a dead letter."""

_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""Header names that every client can send: tokens of RFC 9110."""

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")

WIRE: Final = Wire(
    writer="JetStreamDeadLetters",
    remedy="by a filter_subject",
    id_field=ID,
    sendable=lambda name: _HEADER_NAME.fullmatch(name) is not None,
    acted_on=("nats-",),
)
"""The wire format of dead letters in a stream."""


def read_dead_letter(message: Message) -> DeadLetter:
    """Read the dead letter that ``JetStreamDeadLetters`` wrote, from a message of its stream.

    Pass ``decode=read_dead_letter`` to a consumer whose source reads that stream. The function neither blocks nor
    changes the message. The record equals the written record, except for changes by the format, for example:

    - Control characters in values of original headers become blanks, and bytes outside UTF-8 become U+FFFD.
    - If several original headers have the same name, only the last header remains.
    - A record above the server's limit has no original headers, and may have a truncated body. The header
      ``Lanes-Truncated`` contains the original length of a truncated body in bytes.

    Args:
        message: Message of the stream that captures the dead-letter subject.

    Returns:
        The record of the dead letter.

    Raises:
        MessageError: A header is missing, repeated or malformed; any client may publish to the subject.
    """
    return read_whole(message).dead_letter


def read_whole(message: Message) -> ReadDeadLetter:
    """Read a dead letter like ``read_dead_letter``, and also return the original length of a truncated body."""
    return WIRE.read(message, WIRE.parts(message))


def dead_letter_headers(letter: DeadLetter, whole: int | None = None) -> dict[str, str]:
    """Return the headers of a dead letter. ``whole`` is the original length in bytes of a truncated value."""
    headers = {WIRE.kept_name(name): header_text(value) for name, value in letter.headers}
    # Original headers with the same name become one header, so their indices would be wrong.
    return headers | WIRE.fields(dataclasses.replace(letter, null_headers=()), whole)


def header_text(value: bytes) -> str:
    """Return a header value in a form that every client can send."""
    return _CONTROL.sub(" ", value.decode("utf-8", "replace"))
