"""The wire format of dead letters: the ``Lanes-…`` headers that every backend writes and reads.

This module defines the headers of a dead letter, the shortening of a large dead letter, and the headers of a
republished message. The ``Wire`` of a backend adds the limits of its broker.
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

_FIELD: Final = "Lanes-"
"""Prefix of the headers that describe a dead letter."""

_ORIGIN: Final = "Lanes-Origin-"
"""Prefix for the name of an original header that would have a meaning to the broker or to ``lanes``."""

TRUNCATED: Final = "Lanes-Truncated"
"""Header of a shortened dead letter: the number of bytes of its original value."""

REPLAYED: Final = "Lanes-Dead-Letter"
"""Header of a republished message: the id of its dead letter."""

_ID: Final = re.compile(r"[0-9a-f]{32}")
_NUMBER: Final = re.compile(r"[0-9]{1,20}")
_NUMBERS: Final = re.compile(r"[0-9]{1,9}(?:,[0-9]{1,9})*")
_TIME: Final = re.compile(r"[0-9]{1,12}\.[0-9]{6}")
_PERCENT: Final = re.compile(r"(?:[^%]|%[0-9A-Fa-f]{2})*")

_READABLE: Final = "!#$&'*+.^_`|~-"
"""Characters that a quoted name keeps besides letters and digits, because every broker accepts them in a name."""

_T = TypeVar("_T")

_Refuse = Callable[[str], MessageError]
"""Makes the error for a message that is not a dead letter."""

RepublishedHeaders = list[tuple[str, bytes | None]]
"""Headers of a republished message; a header without a value has None."""


class Parts(NamedTuple):
    """The headers of a stored message in two groups.

    Attributes:
        fields: Headers that describe the dead letter, by name.
        origin: Headers of the original message.
    """

    fields: Mapping[str, str]
    origin: Sequence[tuple[str, bytes]]


class ReadDeadLetter(NamedTuple):
    """A dead letter that a box has read from a stored message.

    Attributes:
        dead_letter: The dead letter.
        whole_size: Bytes of the original value of a shortened dead letter; None = the dead letter is complete. If the
            value still has this size, only the headers were removed.
    """

    dead_letter: DeadLetter
    whole_size: int | None


@dataclass(frozen=True, kw_only=True)
class Wire:
    """The rules by which one backend writes and reads dead letters. No method does I/O.

    Attributes:
        writer: Name of the backend's ``DeadLetters``, for error texts.
        remedy: Advice on reading only dead letters, for error texts.
        id_field: Header with the id.
        sendable: Whether the client can send a header of this name.
        acted_on: Prefixes, in lower case, of headers that the broker interprets as instructions.
    """

    writer: str
    remedy: str
    id_field: str
    sendable: Callable[[str], bool]
    acted_on: tuple[str, ...] = ()

    def kept_name(self, name: str) -> str:
        """Return the name of an original header in a dead letter."""
        reserved = name.lower().startswith((_FIELD.lower(), *self.acted_on))
        return _quoted(name) if reserved or not self.sendable(name) else name

    def fields(self, dead_letter: DeadLetter, whole_size: int | None) -> dict[str, str]:
        """Return the headers that describe a dead letter."""
        cut = {} if whole_size is None else {TRUNCATED: str(whole_size)}
        return {self.id_field: dead_letter.id, **_fields(dead_letter), **cut}

    def parts(self, message: Message) -> Parts:
        """Split the headers of a stored message, and restore the names of the original headers.

        Raises ``MessageError`` if a header of ``lanes`` appears twice, or if the quoted name of an original header is
        malformed.
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

    def read(self, message: Message, parts: Parts) -> ReadDeadLetter:
        """Read the dead letter of a stored message.

        Raises ``MessageError`` with the name of the missing or invalid header.
        """
        fields, origin = parts
        dead_letter = _read_fields(
            fields,
            lambda what: self.refusal(message, what),
            id_field=self.id_field,
            value=message.value,
            headers=origin,
        )
        return ReadDeadLetter(dead_letter, _number(fields.get(TRUNCATED, "")))

    def republished(self, dead_letter: DeadLetter) -> RepublishedHeaders:
        """Return the headers of the republished message: the original headers, and the id of the dead letter.

        The result omits headers that the broker interprets as instructions. Raises ``SourceError`` for a name that the
        client cannot send, because the call must not drop a header without an error.
        """
        headers: RepublishedHeaders = []
        nulls = set(dead_letter.null_headers)
        for index, (name, value) in enumerate(dead_letter.headers):
            if name == REPLAYED or name.lower().startswith(self.acted_on):
                continue
            if not self.sendable(name):
                raise SourceError(
                    f"dead letter {dead_letter.id} has a header {name[:80]!a}, a name that this client cannot send; "
                    "publish it with another client, then drop the dead letter"
                )
            headers.append((name, None if index in nulls else value))
        return [*headers, (REPLAYED, dead_letter.id.encode())]

    def refusal(self, message: Message, what: str) -> MessageError:
        """Make the error for a message that is not a dead letter; ``what`` = the fault, as in ``has no header …``."""
        return MessageError(
            f"no dead letter: {message.partition.id} position {message.position} {what}; read only messages that "
            f"{self.writer} has written, {self.remedy}"
        )

    def _original_name(self, message: Message, kept: str) -> str:
        name = kept[len(_ORIGIN) :]
        # Old dead letters may be quoted by other rules; unquoting gives the same name.
        if _PERCENT.fullmatch(name):
            with contextlib.suppress(UnicodeDecodeError):
                return unquote(name, errors="surrogatepass")
        raise self.refusal(message, f"has the header name {kept[:80]!r}, which lanes does not write")


def cut_to_fit(
    dead_letter: DeadLetter, limit: int | None, size: Callable[[DeadLetter, int | None], int]
) -> tuple[DeadLetter, int | None]:
    """Shorten a dead letter to ``limit`` bytes if possible.

    Also return the size of the original value; None = the value is complete. The function first removes all original
    headers, and then the end of the value. ``size`` returns the bytes of a dead letter with the headers that
    ``Wire.fields`` adds to a shortened dead letter.
    """
    if limit is None or size(dead_letter, None) <= limit:
        return dead_letter, None
    whole_size = len(dead_letter.value)
    bare = dataclasses.replace(dead_letter, headers=(), null_headers=())
    room = max(0, limit - size(bare, whole_size) + whole_size)
    return dataclasses.replace(bare, value=dead_letter.value[:room]), whole_size


def _quoted(name: str) -> str:
    return _ORIGIN + quote(name, safe=_READABLE, errors="surrogatepass")


def _fields(dead_letter: DeadLetter) -> dict[str, str]:
    """Return the headers of a dead letter without its id. Keys and the error text are percent-encoded."""
    fields = {
        "Lanes-Source": dead_letter.source,
        "Lanes-Partition": str(dead_letter.partition),
        "Lanes-Position": str(dead_letter.position),
        "Lanes-Subject": dead_letter.subject,
    }
    if dead_letter.key is not None:
        fields["Lanes-Key"] = quote(dead_letter.key, safe="")
    if dead_letter.record_key is not None:
        fields["Lanes-Record-Key"] = quote(dead_letter.record_key, safe="")
    fields["Lanes-Attempts"] = str(dead_letter.attempts)
    fields["Lanes-Error"] = dead_letter.error_type
    fields["Lanes-Error-Text"] = quote(dead_letter.error_text, safe=" ,.:;()[]'/=-_")
    fields["Lanes-Epoch"] = str(dead_letter.epoch)
    fields["Lanes-Time"] = f"{dead_letter.time:.6f}"
    if dead_letter.timestamp is not None:
        fields["Lanes-Timestamp"] = f"{dead_letter.timestamp:.6f}"
    if dead_letter.tombstone:
        fields["Lanes-Tombstone"] = "1"
    if dead_letter.null_headers:
        fields["Lanes-Null-Headers"] = ",".join(map(str, dead_letter.null_headers))
    if dead_letter.queue is not None:
        fields["Lanes-Queue"] = quote(dead_letter.queue, safe=_READABLE, errors="surrogatepass")
    if dead_letter.queue_partition is not None:
        fields["Lanes-Queue-Partition"] = str(dead_letter.queue_partition)
    if dead_letter.system:
        fields["Lanes-System"] = quote(dead_letter.system, safe=_READABLE, errors="surrogatepass")
    if dead_letter.incarnation:
        fields["Lanes-Incarnation"] = quote(dead_letter.incarnation, safe=_READABLE + "/:", errors="surrogatepass")
    return fields


def _read_fields(
    fields: Mapping[str, str], refuse: _Refuse, *, id_field: str, value: bytes, headers: Sequence[tuple[str, bytes]]
) -> DeadLetter:
    """Make a dead letter from its describing headers, its value and its original headers.

    Raises the error that ``refuse`` makes, with the name of the missing or invalid header.
    """

    def field(name: str, parse: Callable[[str], _T | None]) -> _T:
        text = fields.get(name)
        if text is None:
            raise refuse(f"has no header {name}")
        value = parse(text)
        if value is None:
            found = "" if name.endswith("-Key") else f": {text[:80]!r}"  # keys are private
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
        queue=optional("Lanes-Queue", _quoted_name),
        queue_partition=optional("Lanes-Queue-Partition", _number),
        system=optional("Lanes-System", _quoted_name) or "",
        incarnation=optional("Lanes-Incarnation", _quoted_name) or "",
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


def _quoted_name(text: str) -> str | None:
    if not _PERCENT.fullmatch(text):
        return None
    try:
        return unquote(text, errors="surrogatepass") or None
    except UnicodeDecodeError:
        return None


def _indices(text: str, headers: Sequence[tuple[str, bytes]]) -> tuple[int, ...] | None:
    """Read the indices of headers without a value, in ascending order."""
    if not text.isascii() or not _NUMBERS.fullmatch(text):
        return None
    found = tuple(map(int, text.split(",")))
    rising = all(one < other for one, other in itertools.pairwise(found))
    return found if rising and found[-1] < len(headers) and not any(headers[one][1] for one in found) else None
