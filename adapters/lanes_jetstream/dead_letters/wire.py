"""The format of a dead letter in a stream: the headers that are written, and the record that is read back."""

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
"""How dead letters are written to a stream."""


def read_dead_letter(message: Message) -> DeadLetter:
    """Read the dead letter that ``JetStreamDeadLetters`` wrote, from a message of its stream.

    Use it as ``decode=read_dead_letter`` of a consumer whose source reads that stream. It neither blocks nor changes
    the message. The record equals the one that was written, except for three changes by the wire:

    - Control characters in values of original headers are blanks.
    - Original headers of one name are one header, the last.
    - A body that did not fit is cut. The header ``Lanes-Truncated`` of the message holds its original length.

    Args:
        message: Message of the stream that captures the dead-letter subject.

    Returns:
        The record of the dead letter.

    Raises:
        MessageError: A header is missing, repeated or malformed. Any client may publish to the subject.
    """
    return read_whole(message).dead_letter


def read_whole(message: Message) -> ReadDeadLetter:
    """Read a dead letter like ``read_dead_letter``, with the original length of a body that was cut."""
    return WIRE.read(message, WIRE.parts(message))


def dead_letter_headers(letter: DeadLetter, whole: int | None = None) -> dict[str, str]:
    """The headers of a dead letter. ``whole`` is the original length in bytes of a value that was cut."""
    headers = {WIRE.kept_name(name): header_text(value) for name, value in letter.headers}
    # Original headers of one name become one header here, so their indices would be wrong.
    return headers | WIRE.fields(dataclasses.replace(letter, null_headers=()), whole)


def header_text(value: bytes) -> str:
    """A header value in the form that every client can send."""
    return _CONTROL.sub(" ", value.decode("utf-8", "replace"))
