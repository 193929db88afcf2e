"""Dead letters on the wire: what every backend writes of one into ``Lanes-…`` headers, and reads back."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar
from urllib.parse import quote, unquote, unquote_to_bytes

from lanes.core.types import Message
from lanes.dead_letter import ERROR_TEXT_LIMIT, DeadLetter
from lanes.errors import MessageError

__all__ = ["FIELD", "ORIGIN", "REPLAYED", "TRUNCATED", "Refuse", "letter_fields", "letter_of", "refusal", "whole_size"]

FIELD: Final = "Lanes-"
"""What the names of the headers of a letter begin with."""

ORIGIN: Final = "Lanes-Origin-"
"""In front of the name of an original header that would have a meaning to the broker or to ``lanes``."""

TRUNCATED: Final = "Lanes-Truncated"
"""The header of a letter that did not fit as it was: how many bytes its value had."""

REPLAYED: Final = "Lanes-Dead-Letter"
"""The header of a message that was published again: the id of the letter it was."""

_ID: Final = re.compile(r"[0-9a-f]{32}")
_NUMBER: Final = re.compile(r"[0-9]{1,20}")
_NUMBERS: Final = re.compile(r"[0-9]{1,9}(?:,[0-9]{1,9})*")
_TIME: Final = re.compile(r"[0-9]{1,12}\.[0-9]{6}")
_PERCENT: Final = re.compile(r"(?:[^%]|%[0-9A-Fa-f]{2})*")

_T = TypeVar("_T")

Refuse = Callable[[str], MessageError]
"""Makes the error for a message that is no letter, of what it has."""


def letter_fields(letter: DeadLetter) -> dict[str, str]:
    """The headers that say what a letter is, but for its id. Texts that a sender controls are percent-encoded."""
    fields = {
        "Lanes-Source": letter.source,
        "Lanes-Partition": str(letter.partition),
        "Lanes-Position": str(letter.position),
        "Lanes-Subject": letter.subject,
    }
    if letter.key is not None:
        fields["Lanes-Key"] = quote(letter.key, safe="")
    if letter.record_key is not None:
        fields["Lanes-Record-Key"] = quote(letter.record_key, safe="")
    fields["Lanes-Attempts"] = str(letter.attempts)
    fields["Lanes-Error"] = letter.error_type
    fields["Lanes-Error-Text"] = quote(letter.error_text, safe=" ,.:;()[]'/=-_")
    fields["Lanes-Epoch"] = str(letter.epoch)
    fields["Lanes-Time"] = f"{letter.time:.6f}"
    if letter.timestamp is not None:
        fields["Lanes-Timestamp"] = f"{letter.timestamp:.6f}"
    if letter.tombstone:
        fields["Lanes-Tombstone"] = "1"
    if letter.null_headers:
        fields["Lanes-Null-Headers"] = ",".join(map(str, letter.null_headers))
    return fields


def letter_of(
    fields: Mapping[str, str], refuse: Refuse, *, id_field: str, value: bytes, headers: Sequence[tuple[str, bytes]]
) -> DeadLetter:
    """The letter that has these fields, the id among them, and this value and these original headers.

    Raises what ``refuse`` makes, naming the field that is missing or is nothing that ``letter_fields`` writes.
    """

    def field(name: str, parse: Callable[[str], _T | None]) -> _T:
        text = fields.get(name)
        if text is None:
            raise refuse(f"has no header {name}")
        value = parse(text)
        if value is None:
            raise refuse(f"has a header {name} that lanes does not write: {text[:80]!r}")
        return value

    def optional(name: str, parse: Callable[[str], _T | None]) -> _T | None:
        return field(name, parse) if name in fields else None

    return DeadLetter(
        id=field(id_field, _id),
        source=field("Lanes-Source", _name),
        partition=field("Lanes-Partition", _number),
        position=field("Lanes-Position", _number),
        subject=field("Lanes-Subject", _name),
        key=optional("Lanes-Key", _key),
        value=value,
        headers=headers,
        attempts=field("Lanes-Attempts", _number),
        error_type=field("Lanes-Error", _name),
        error_text=field("Lanes-Error-Text", _text),
        epoch=field("Lanes-Epoch", _number),
        time=field("Lanes-Time", _time),
        record_key=optional("Lanes-Record-Key", _key),
        tombstone=optional("Lanes-Tombstone", lambda text: (text == "1" and not value) or None) is not None,
        null_headers=optional("Lanes-Null-Headers", lambda text: _indices(text, headers)) or (),
        timestamp=optional("Lanes-Timestamp", _time),
    )


def whole_size(fields: Mapping[str, str]) -> int | None:
    """Bytes of the original value of a letter that was cut; None for one that was not."""
    return _number(fields.get(TRUNCATED, ""))


def refusal(message: Message, what: str, writer: str, remedy: str) -> MessageError:
    """The error for a message that is no letter of ``writer``, because it ``what``."""
    return MessageError(
        f"no dead letter: {message.partition.id} position {message.position} {what}; read only what {writer} has "
        f"written, {remedy}"
    )


def _id(text: str) -> str | None:
    return text if text.isascii() and _ID.fullmatch(text) else None


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


def _indices(text: str, headers: Sequence[tuple[str, bytes]]) -> tuple[int, ...] | None:
    """Rising indices of headers without a value."""
    if not text.isascii() or not _NUMBERS.fullmatch(text):
        return None
    found = tuple(map(int, text.split(",")))
    rising = all(one < other for one, other in itertools.pairwise(found))
    return found if rising and found[-1] < len(headers) and not any(headers[one][1] for one in found) else None
