"""Dead letters read back: the stream they are in is an ordinary source, and this makes records of its messages."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Final, TypeVar
from urllib.parse import quote, unquote, unquote_to_bytes

from lanes.core.types import Message
from lanes.dead_letter import ERROR_TEXT_LIMIT, DeadLetter
from lanes.errors import MessageError

ORIGIN: Final = "Lanes-Origin-"
"""In front of the name of an original header that has a meaning to the server or to ``lanes``."""

RESERVED: Final = ("nats-", "lanes-")
"""What the names of such headers begin with, in small letters."""

_ID: Final = re.compile(r"[0-9a-f]{32}")
_NUMBER: Final = re.compile(r"[0-9]{1,20}")
_TIME: Final = re.compile(r"[0-9]{1,12}\.[0-9]{6}")
_PERCENT: Final = re.compile(r"(?:[^%]|%[0-9A-Fa-f]{2})*")

_T = TypeVar("_T")


def read_letter(message: Message) -> DeadLetter:
    """The letter that ``JetStreamDeadLetters`` wrote, of a message of the stream it is in.

    To be used as ``decode=read_letter`` of a consumer whose source reads that stream. The record is the one that was
    written but for what the wire changed: control characters in the values of original headers are blanks, names that
    no client sends are as good as they can be had, and a body that did not fit is cut (``Lanes-Truncated`` of the
    message says how long it was). Neither blocks nor changes the message.

    Raises ``MessageError`` naming the header that is missing, there twice, or no such value: anybody may publish to
    the subject.
    """
    fields, origin = _sorted(message)

    def field(name: str, parse: Callable[[str], _T | None]) -> _T:
        text = fields.get(name)
        if text is None:
            raise _refusal(message, f"has no header {name}")
        value = parse(text)
        if value is None:
            raise _refusal(message, f"has a header {name} that lanes does not write: {text[:80]!r}")
        return value

    return DeadLetter(
        id=field("Nats-Msg-Id", lambda text: text if _ID.fullmatch(text) else None),
        source=field("Lanes-Source", _name),
        partition=field("Lanes-Partition", _number),
        position=field("Lanes-Position", _number),
        subject=field("Lanes-Subject", _name),
        key=field("Lanes-Key", _key) if "Lanes-Key" in fields else None,
        value=message.value,
        headers=origin,
        attempts=field("Lanes-Attempts", _number),
        error_type=field("Lanes-Error", _name),
        error_text=field("Lanes-Error-Text", _text),
        epoch=field("Lanes-Epoch", _number),
        time=field("Lanes-Time", _time),
    )


def _sorted(message: Message) -> tuple[dict[str, str], Sequence[tuple[str, bytes]]]:
    """The headers of the letter, and those of the original message under their own names."""
    fields: dict[str, str] = {}
    origin: list[tuple[str, bytes]] = []
    for name, value in message.headers:
        if name.startswith(ORIGIN):
            kept = name[len(ORIGIN) :]
            origin.append((kept if kept.lower().startswith(RESERVED) else unquote(kept), value))
        elif name.startswith("Lanes-") or name == "Nats-Msg-Id":
            if name in fields:
                raise _refusal(message, f"has the header {name} twice")
            fields[name] = value.decode("utf-8", "replace")
        elif not name.startswith("Nats-"):
            origin.append((name, value))
    return fields, tuple(origin)


def _refusal(message: Message, what: str) -> MessageError:
    return MessageError(
        f"no dead letter: {message.partition.id} position {message.position} {what}; read only what "
        "JetStreamDeadLetters has written, by a filter_subject"
    )


def _name(text: str) -> str | None:
    return text or None


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and _NUMBER.fullmatch(text) else None


def _time(text: str) -> float | None:
    time = float(text) if text.isascii() and _TIME.fullmatch(text) else math.nan
    return time if math.isfinite(time) else None


def _key(text: str) -> bytes | None:
    key = unquote_to_bytes(text)
    return key if quote(key, safe="") == text else None


def _text(text: str) -> str | None:
    if not _PERCENT.fullmatch(text):
        return None
    try:
        found = unquote(text, errors="strict")
    except UnicodeDecodeError:
        return None
    return found if len(found) <= ERROR_TEXT_LIMIT else None
