"""Dead letters as records of a topic: what ``KafkaDeadLetters`` writes of one, and what is read back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final, NamedTuple
from urllib.parse import quote, unquote

from lanes.core.types import Message
from lanes.dead_letter import DeadLetter, DetailedReader
from lanes.errors import MessageError
from lanes.letter_box import Disposition
from lanes.letters import FIELD, ORIGIN, TRUNCATED, letter_fields, letter_of, refusal

__all__ = [
    "Headers",
    "Record",
    "disposition_record",
    "is_sendable",
    "letter_parts",
    "letter_record",
    "read_disposition",
    "read_letter",
]

Headers = list[tuple[str, str | bytes | None]]

ID: Final = "Lanes-Id"
"""The header with the id of a letter."""

DISPOSITION: Final = "Lanes-Disposition"
"""The header of a record that says what became of a letter."""

_KEYS: Final = ("Lanes-Key", "Lanes-Record-Key")
_READABLE: Final = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")
_OVERHEAD: Final = 128
_OVERHEAD_OF_HEADER: Final = 10
"""More bytes than a batch of one record, and a header of it, take beside what is in them."""


class Record(NamedTuple):
    """What is produced. ``value`` None is a tombstone."""

    key: bytes | None
    value: bytes | None
    headers: Headers

    @property
    def size(self) -> int:
        """Bytes it takes in the log, uncompressed: a few more than it does."""
        size = _OVERHEAD + len(self.key or b"") + len(self.value or b"")
        for name, value in self.headers:
            size += _OVERHEAD_OF_HEADER + len(name.encode()) + len(value or b"")
        return size


def letter_record(letter: DeadLetter, *, by_id: bool = False, limit: int | None = None) -> Record:
    """The record of a letter, of at most ``limit`` bytes if it can be cut to that.

    Its key is that of the original record; where there was none, that of the lane. ``by_id``: for a topic that is
    compacted, its key is the letter's id, because two letters of one key would be one, and it is no tombstone. What
    does not fit goes in this order: the original headers, then the end of the value.
    """
    record = _record(letter, by_id)
    if limit is None or record.size <= limit:
        return record
    record = _record(dataclasses.replace(letter, headers=(), null_headers=()), by_id)
    record.headers.append((TRUNCATED, str(len(letter.value)).encode()))
    room = max(0, limit - record.size + len(letter.value))
    return record if record.value is None else record._replace(value=record.value[:room])


def disposition_record(letter_id: str, how: Disposition, wall_time: float) -> Record:
    """The record that says what became of a letter. In a compacted topic it takes the letter's place."""
    headers: Headers = [
        (DISPOSITION, how.encode()),
        (ID, letter_id.encode()),
        ("Lanes-Time", f"{wall_time:.6f}".encode()),
    ]
    return Record(letter_id.encode(), None, headers)


def read_letter(message: Message) -> DeadLetter:
    """The letter that ``KafkaDeadLetters`` wrote, of a record of its topic.

    To be used as ``decode=read_letter`` of a consumer whose source reads that topic. The letter is the one that was
    written, unless it did not fit: then it has no original headers, and ``Lanes-Truncated`` of the message says how
    long its value was. Neither blocks nor changes the message.

    Raises ``MessageError`` naming the header that is missing, there twice, or no such value: anybody may produce to
    the topic. So it does for what ``read_disposition`` reads.
    """
    fields, origin = letter_parts(message)
    if DISPOSITION in fields:
        raise _refusal(message, f"has the header {DISPOSITION}: it says what became of a letter")
    letter = letter_of(fields, lambda what: _refusal(message, what), id_field=ID, value=message.value, headers=origin)
    kept = _kept_key(message)
    if any(name in fields for name in _KEYS) or kept is None or kept == letter.id.encode():
        return letter
    return dataclasses.replace(letter, key=kept, record_key=kept)


def read_disposition(message: Message) -> tuple[str, Disposition] | None:
    """The id of the letter that a record of the topic disposes of, and how; None for any other record.

    Raises ``MessageError`` for a record that looks like one and is none. Neither blocks nor changes the message.
    """
    fields, _ = letter_parts(message)
    how = fields.get(DISPOSITION)
    if how is None:
        return None
    letter_id = fields.get(ID, "")
    if how not in ("replayed", "dropped") or not letter_id:
        raise _refusal(message, f"has a header {DISPOSITION} or {ID} that lanes does not write: {how[:80]!r}")
    return letter_id, "replayed" if how == "replayed" else "dropped"


def letter_parts(message: Message) -> tuple[dict[str, str], Sequence[tuple[str, bytes]]]:
    """The headers of the letter, and those of the original message under their own names.

    Raises ``MessageError`` for one that is there twice, or a name that is not what ``lanes`` writes.
    """
    fields: dict[str, str] = {}
    origin: list[tuple[str, bytes]] = []
    for name, value in message.headers:
        if name.startswith(ORIGIN):
            origin.append((_original_name(message, name), value))
        elif name.startswith(FIELD):
            if name in fields:
                raise _refusal(message, f"has the header {name} twice")
            fields[name] = value.decode("utf-8", "replace")
        else:
            origin.append((name, value))
    return fields, tuple(origin)


def _record(letter: DeadLetter, by_id: bool) -> Record:
    key = letter.key if letter.record_key is None else letter.record_key
    fields = letter_fields(letter)
    if by_id:
        key = letter.id.encode()
    elif letter.key == letter.record_key and key != letter.id.encode():
        # The key of the record says both.
        for name in _KEYS:
            fields.pop(name, None)
    without = set(letter.null_headers)
    headers: Headers = [
        (_kept_name(name), None if index in without else value) for index, (name, value) in enumerate(letter.headers)
    ]
    headers.append((ID, letter.id.encode()))
    headers += ((name, text.encode()) for name, text in fields.items())
    # A tombstone would take its own key out of a compacted topic.
    return Record(key, None if letter.tombstone and not by_id else letter.value, headers)


def _kept_name(name: str) -> str:
    """The name that an original header has in the letter."""
    if name.lower().startswith(FIELD.lower()) or not is_sendable(name):
        return _quoted(name)
    return name


def _quoted(name: str) -> str:
    return ORIGIN + quote(name, safe=_READABLE, errors="surrogatepass")


def _original_name(message: Message, kept: str) -> str:
    try:
        name = unquote(kept[len(ORIGIN) :], errors="surrogatepass")
    except UnicodeDecodeError:
        name = ""
    if _quoted(name) != kept:
        raise _refusal(message, f"has a header {kept[:80]!r}, a name that lanes does not write")
    return name


def is_sendable(name: str) -> bool:
    """Whether the client can send a header of this name."""
    # It cuts a name at a NUL, and ends the process with a segmentation fault over a lone surrogate.
    if "\0" in name:
        return False
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _kept_key(message: Message) -> bytes | None:
    # A consumer of the letters may take the keys of its lanes from elsewhere.
    reader = message.partition.reader
    return reader.details(message.raw).record_key if isinstance(reader, DetailedReader) else message.key


def _refusal(message: Message, what: str) -> MessageError:
    return refusal(message, what, "KafkaDeadLetters", "and give its topic to nobody else")
