"""Dead letters read back: the stream they are in is an ordinary source, and this makes records of its messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from urllib.parse import unquote

from lanes.core.types import Message
from lanes.dead_letter import DeadLetter
from lanes.errors import MessageError
from lanes.letters import FIELD, ORIGIN, letter_of, refusal

__all__ = ["ID", "RESERVED", "letter_parts", "read_letter"]

ID: Final = "Nats-Msg-Id"
"""The header with the id of a letter."""

RESERVED: Final = ("nats-", "lanes-")
"""What the names of original headers that are kept under another one begin with, in small letters."""


def read_letter(message: Message) -> DeadLetter:
    """The letter that ``JetStreamDeadLetters`` wrote, of a message of the stream it is in.

    To be used as ``decode=read_letter`` of a consumer whose source reads that stream. The record is the one that was
    written but for what the wire changed: control characters in the values of original headers are blanks, names that
    no client sends are as good as they can be had, and a body that did not fit is cut (``Lanes-Truncated`` of the
    message says how long it was). Neither blocks nor changes the message.

    Raises ``MessageError`` naming the header that is missing, there twice, or no such value: anybody may publish to
    the subject.
    """
    fields, origin = letter_parts(message)
    return letter_of(fields, lambda what: _refusal(message, what), id_field=ID, value=message.value, headers=origin)


def letter_parts(message: Message) -> tuple[dict[str, str], Sequence[tuple[str, bytes]]]:
    """The headers of the letter, and those of the original message under their own names.

    Raises ``MessageError`` for one that is there twice.
    """
    fields: dict[str, str] = {}
    origin: list[tuple[str, bytes]] = []
    for name, value in message.headers:
        if name.startswith(ORIGIN):
            kept = name[len(ORIGIN) :]
            origin.append((kept if kept.lower().startswith(RESERVED) else unquote(kept), value))
        elif name.startswith(FIELD) or name == ID:
            if name in fields:
                raise _refusal(message, f"has the header {name} twice")
            fields[name] = value.decode("utf-8", "replace")
        elif not name.startswith("Nats-"):
            origin.append((name, value))
    return fields, tuple(origin)


def _refusal(message: Message, what: str) -> MessageError:
    return refusal(message, what, "JetStreamDeadLetters", "by a filter_subject")
