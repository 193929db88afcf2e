"""Dead letters as records of a topic: what ``KafkaDeadLetters`` writes of one, and what is read back."""

from __future__ import annotations

import dataclasses
from typing import Final, NamedTuple

from lanes.core.types import Message
from lanes.dead_letter import DeadLetter, DetailedReader
from lanes.dead_letters.box import Disposition
from lanes.dead_letters.wire import ReadDeadLetter, Wire, cut_to_fit

__all__ = ["WIRE", "Record", "disposition_record", "letter_record", "read_disposition", "read_letter", "read_whole"]

Headers = list[tuple[str, str | bytes | None]]

ID: Final = "Lanes-Id"
"""The header with the id of a letter."""

DISPOSITION: Final = "Lanes-Disposition"
"""The header of a record that says what became of a letter."""

_KEYS: Final = ("Lanes-Key", "Lanes-Record-Key")
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
    compacted, its key is the letter's id, because two letters of one key would be one, and it is no tombstone.
    """
    letter, whole = cut_to_fit(letter, limit, lambda letter, whole: _record(letter, by_id, whole).size)
    return _record(letter, by_id, whole)


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
    return read_whole(message).dead_letter


def read_whole(message: Message) -> ReadDeadLetter:
    """What ``read_letter`` reads, and how long its value was. Raises ``MessageError``."""
    parts = WIRE.parts(message)
    if DISPOSITION in parts.fields:
        raise WIRE.refusal(message, f"has the header {DISPOSITION}: it says what became of a letter")
    letter, whole = WIRE.read(message, parts)
    kept = _kept_key(message)
    if not any(name in parts.fields for name in _KEYS) and kept is not None and kept != letter.id.encode():
        letter = dataclasses.replace(letter, key=kept, record_key=kept)
    return ReadDeadLetter(letter, whole)


def read_disposition(message: Message) -> tuple[str, Disposition] | None:
    """The id of the letter that a record of the topic disposes of, and how; None for any other record.

    Raises ``MessageError`` for a record that looks like one and is none. Neither blocks nor changes the message.
    """
    fields = WIRE.parts(message).fields
    how = fields.get(DISPOSITION)
    if how is None:
        return None
    letter_id = fields.get(ID, "")
    if how not in ("replayed", "dropped") or not letter_id:
        raise WIRE.refusal(message, f"has a header {DISPOSITION} or {ID} that lanes does not write")
    return letter_id, "replayed" if how == "replayed" else "dropped"


def _record(letter: DeadLetter, by_id: bool, whole: int | None) -> Record:
    key = letter.key if letter.record_key is None else letter.record_key
    fields = WIRE.fields(letter, whole)
    if by_id:
        key = letter.id.encode()
    elif letter.key == letter.record_key and key != letter.id.encode():
        # The key of the record says both.
        for name in _KEYS:
            fields.pop(name, None)
    without = set(letter.null_headers)
    headers: Headers = [
        (WIRE.kept_name(name), None if index in without else value)
        for index, (name, value) in enumerate(letter.headers)
    ]
    headers += ((name, text.encode()) for name, text in fields.items())
    # A tombstone would take its own key out of a compacted topic.
    return Record(key, None if letter.tombstone and not by_id else letter.value, headers)


def _is_sendable(name: str) -> bool:
    # The client cuts a name at a NUL, and ends the process with a segmentation fault over a lone surrogate.
    if "\0" in name:
        return False
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


WIRE: Final = Wire(
    writer="KafkaDeadLetters", remedy="and give its topic to nobody else", id_field=ID, sendable=_is_sendable
)
"""How letters are written to a topic."""


def _kept_key(message: Message) -> bytes | None:
    # A consumer of the letters may take the keys of its lanes from elsewhere.
    reader = message.partition.reader
    return reader.details(message.raw).record_key if isinstance(reader, DetailedReader) else message.key
