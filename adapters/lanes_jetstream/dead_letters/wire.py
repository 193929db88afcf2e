"""Dead letters read back: the stream they are in is an ordinary source, and this makes records of its messages."""

from __future__ import annotations

import dataclasses
import re
from typing import Final

from lanes.core.types import Message
from lanes.dead_letter import DeadLetter
from lanes.dead_letters.wire import Letter, Wire

__all__ = ["ID", "WIRE", "header_text", "letter_headers", "read_letter", "read_whole"]

ID: Final = "Nats-Msg-Id"
"""The header with the id of a letter."""

_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""A header name that any client sends: a token of RFC 9110."""

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")

WIRE: Final = Wire(
    writer="JetStreamDeadLetters",
    remedy="by a filter_subject",
    id_field=ID,
    sendable=lambda name: _HEADER_NAME.fullmatch(name) is not None,
    acted_on=("nats-",),
)
"""How letters are written to a stream."""


def read_letter(message: Message) -> DeadLetter:
    """The letter that ``JetStreamDeadLetters`` wrote, of a message of the stream it is in.

    To be used as ``decode=read_letter`` of a consumer whose source reads that stream. The record is the one that was
    written but for what the wire changed: control characters in the values of original headers are blanks, of headers
    of one name there is the last, and a body that did not fit is cut (``Lanes-Truncated`` of the message says how long
    it was). Neither blocks nor changes the message.

    Raises ``MessageError`` naming the header that is missing, there twice, or no such value: anybody may publish to
    the subject.
    """
    return read_whole(message).letter


def read_whole(message: Message) -> Letter:
    """What ``read_letter`` reads, and how long its body was. Raises ``MessageError``."""
    return WIRE.letter(message, WIRE.parts(message))


def letter_headers(letter: DeadLetter, whole: int | None = None) -> dict[str, str]:
    """The headers of a letter on the wire. ``whole``: bytes its value had, where it was cut."""
    headers = {WIRE.kept_name(name): header_text(value) for name, value in letter.headers}
    # Two original headers of one name are one here, so that indices of them would name others.
    return headers | WIRE.fields(dataclasses.replace(letter, null_headers=()), whole)


def header_text(value: bytes) -> str:
    """The value of a header as any client sends it."""
    return _CONTROL.sub(" ", value.decode("utf-8", "replace"))
