"""Dead letters on the wire: what every backend writes of one into ``Lanes-…`` headers, and reads back.

Which names original headers have in a letter, what goes first where it does not fit, and what a message has that is
published again is decided here, once. A backend's ``Wire`` says what its broker does not take.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar
from urllib.parse import quote, unquote, unquote_to_bytes

from lanes.core.types import Message
from lanes.dead_letter import ERROR_TEXT_LIMIT, DeadLetter
from lanes.errors import MessageError, SourceError

__all__ = ["REPLAYED", "TRUNCATED", "Again", "Letter", "Parts", "Wire", "fitting"]

_FIELD: Final = "Lanes-"
"""What the names of the headers of a letter begin with."""

_ORIGIN: Final = "Lanes-Origin-"
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

_READABLE: Final = "!#$&'*+.^_`|~-"
"""What stays of a name that is quoted, beside letters and digits: every broker takes it in a name."""

_T = TypeVar("_T")

_Refuse = Callable[[str], MessageError]
"""Makes the error for a message that is no letter, of what it has."""

Again = list[tuple[str, bytes | None]]
"""Headers of a message that is published again; one without a value has None."""


class Parts(NamedTuple):
    """The headers of a message: those that say what the letter is, and those of the original message."""

    fields: Mapping[str, str]
    origin: Sequence[tuple[str, bytes]]


class Letter(NamedTuple):
    """A letter that was read. ``whole``: bytes of the original value of one that was cut."""

    letter: DeadLetter
    whole: int | None


@dataclass(frozen=True, kw_only=True)
class Wire:
    """How the letters of one backend are written and read. Pure.

    ``writer``, ``remedy``: its dead letters, and how to read nothing else, for messages. ``id_field``: the header with
    the id. ``sendable``: whether its client can send a header of this name. ``acted_on``: what the names of headers
    begin with, in small letters, that its broker acts on.
    """

    writer: str
    remedy: str
    id_field: str
    sendable: Callable[[str], bool]
    acted_on: tuple[str, ...] = ()

    def kept_name(self, name: str) -> str:
        """The name that an original header has in a letter."""
        reserved = name.lower().startswith((_FIELD.lower(), *self.acted_on))
        return _quoted(name) if reserved or not self.sendable(name) else name

    def fields(self, letter: DeadLetter, whole: int | None) -> dict[str, str]:
        """The headers that say what a letter is. ``whole``: bytes its value had, where it was cut."""
        cut = {} if whole is None else {TRUNCATED: str(whole)}
        return {self.id_field: letter.id, **_letter_fields(letter), **cut}

    def parts(self, message: Message) -> Parts:
        """The headers of a message, those of the original message under their own names.

        Raises ``MessageError`` for one that is there twice, or a name that is not what ``lanes`` writes.
        """
        fields: dict[str, str] = {}
        origin: list[tuple[str, bytes]] = []
        for name, value in message.headers:
            if name.startswith(_ORIGIN):
                origin.append((self._original_name(message, name), value))
            elif name.startswith(_FIELD) or name == self.id_field:
                if name in fields:
                    raise self.refusal(message, f"has the header {name} twice")
                fields[name] = value.decode("utf-8", "replace")
            elif not name.lower().startswith(self.acted_on):
                origin.append((name, value))
        return Parts(fields, tuple(origin))

    def letter(self, message: Message, parts: Parts) -> Letter:
        """The letter that a message of these parts is.

        Raises ``MessageError`` naming the header that is missing or is nothing that ``fields`` writes.
        """
        fields, origin = parts
        letter = _letter_of(
            fields,
            lambda what: self.refusal(message, what),
            id_field=self.id_field,
            value=message.value,
            headers=origin,
        )
        return Letter(letter, _number(fields.get(TRUNCATED, "")))

    def again(self, letter: DeadLetter) -> Again:
        """The headers with which the original message of a letter is published again: its own, and the letter's id.

        What the broker would act on was meant for the first time. Raises ``SourceError`` for a name that the client
        cannot send: nothing is left out in silence.
        """
        headers: Again = []
        nulls = set(letter.null_headers)
        for index, (name, value) in enumerate(letter.headers):
            if name == REPLAYED or name.lower().startswith(self.acted_on):
                continue
            if not self.sendable(name):
                raise SourceError(
                    f"letter {letter.id} has a header {name[:80]!a}, a name that this client cannot send: publish it "
                    "with another client, then drop the letter"
                )
            headers.append((name, None if index in nulls else value))
        return [*headers, (REPLAYED, letter.id.encode())]

    def refusal(self, message: Message, what: str) -> MessageError:
        """The error for a message that is no letter, because it ``what``."""
        return MessageError(
            f"no dead letter: {message.partition.id} position {message.position} {what}; read only what {self.writer} "
            f"has written, {self.remedy}"
        )

    def _original_name(self, message: Message, kept: str) -> str:
        name = kept[len(_ORIGIN) :]
        # Quoted more or less than it would be by now, as in letters that have lain for long, it is the same name.
        if _PERCENT.fullmatch(name):
            with contextlib.suppress(UnicodeDecodeError):
                return unquote(name, errors="surrogatepass")
        raise self.refusal(message, f"has a header {kept[:80]!r}, a name that lanes does not write")


def fitting(
    letter: DeadLetter, limit: int | None, size: Callable[[DeadLetter, int | None], int]
) -> tuple[DeadLetter, int | None]:
    """A letter as it fits into ``limit`` bytes if it can be cut to that, and how many its value had if it was.

    What does not fit goes in this order: the original headers, then the end of the value. ``size``: bytes that a letter
    takes, with what ``Wire.fields`` says of one that was cut.
    """
    if limit is None or size(letter, None) <= limit:
        return letter, None
    whole = len(letter.value)
    bare = dataclasses.replace(letter, headers=(), null_headers=())
    room = max(0, limit - size(bare, whole) + whole)
    return dataclasses.replace(bare, value=letter.value[:room]), whole


def _quoted(name: str) -> str:
    return _ORIGIN + quote(name, safe=_READABLE, errors="surrogatepass")


def _letter_fields(letter: DeadLetter) -> dict[str, str]:
    """What a letter is, but for its id. Texts that a sender controls are percent-encoded."""
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


def _letter_of(
    fields: Mapping[str, str], refuse: _Refuse, *, id_field: str, value: bytes, headers: Sequence[tuple[str, bytes]]
) -> DeadLetter:
    """The letter that has these fields, the id among them, and this value and these original headers.

    Raises what ``refuse`` makes, naming the field that is missing or is nothing that ``_letter_fields`` writes.
    """

    def field(name: str, parse: Callable[[str], _T | None]) -> _T:
        text = fields.get(name)
        if text is None:
            raise refuse(f"has no header {name}")
        value = parse(text)
        if value is None:
            found = "" if name.endswith("-Key") else f": {text[:80]!r}"  # a key is private
            raise refuse(f"has a header {name} that lanes does not write{found}")
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
