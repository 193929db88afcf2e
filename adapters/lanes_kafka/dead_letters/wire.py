"""Makes records from dead letters, and reads dead letters from records."""

from __future__ import annotations

import dataclasses
from typing import Final, NamedTuple

from lanes.core.types import Message
from lanes.dead_letter import DeadLetter, DetailedReader
from lanes.dead_letters.box import Disposition
from lanes.dead_letters.wire import ReadDeadLetter, Wire, cut_to_fit

Headers = list[tuple[str, str | bytes | None]]

ID: Final = "Lanes-Id"
"""Header with the id of a dead letter."""

DISPOSITION: Final = "Lanes-Disposition"
"""Header of a record that disposes of a dead letter."""

_KEYS: Final = ("Lanes-Key", "Lanes-Record-Key")
_OVERHEAD: Final = 128
_OVERHEAD_OF_HEADER: Final = 10
"""Upper bound of the bytes of a header in the log, without name and value. ``_OVERHEAD`` bounds a whole record."""


class Record(NamedTuple):
    """A record to produce.

    Attributes:
        key: Key of the record; None for a record without a key.
        value: Value of the record; None for a tombstone.
        headers: Headers, in order.
    """

    key: bytes | None
    value: bytes | None
    headers: Headers

    @property
    def size(self) -> int:
        """Return an upper bound of the uncompressed size of the record in the log, in bytes."""
        size = _OVERHEAD + len(self.key or b"") + len(self.value or b"")
        for name, value in self.headers:
            size += _OVERHEAD_OF_HEADER + len(name.encode()) + len(value or b"")
        return size


def dead_letter_record(dead_letter: DeadLetter, *, by_id: bool = False, limit: int | None = None) -> Record:
    """Make the record of a dead letter.

    Without ``by_id``, the key of the record is the key of the original record, or else the key of the lane.

    Args:
        dead_letter: The dead letter.
        by_id: Whether the topic is compacted, so that a record replaces earlier records with its key. The key is then
            the id of the dead letter, and the record is never a tombstone.
        limit: Size in bytes to which the function shortens the record if possible; None = no limit.

    Returns:
        The record to produce.
    """
    dead_letter, whole = cut_to_fit(dead_letter, limit, lambda cut, whole: _record(cut, by_id, whole).size)
    return _record(dead_letter, by_id, whole)


def disposition_record(dead_letter_id: str, how: Disposition, wall_time: float) -> Record:
    """Make the record that disposes of a dead letter. In a compacted topic the record replaces the dead letter."""
    headers: Headers = [
        (DISPOSITION, how.encode()),
        (ID, dead_letter_id.encode()),
        ("Lanes-Time", f"{wall_time:.6f}".encode()),
    ]
    return Record(dead_letter_id.encode(), None, headers)


def read_dead_letter(message: Message) -> DeadLetter:
    """Read the dead letter that ``KafkaDeadLetters`` wrote, from a message of its topic.

    Use the function as ``decode=read_dead_letter`` of a consumer whose source reads the dead-letter topic. The function
    neither blocks nor changes the message. A dead letter that was too large for the topic has no original headers, and
    may have a shortened value. The header ``Lanes-Truncated`` of the message then contains the original length of the
    value in bytes. Any other dead letter equals the written dead letter.

    Args:
        message: Message of the dead-letter topic.

    Returns:
        The record of the dead letter.

    Raises:
        MessageError: A header is missing, repeated or malformed, or the message disposes of a dead letter. Any client
            may produce to the topic.
    """
    return read_whole(message).dead_letter


def read_whole(message: Message) -> ReadDeadLetter:
    """Read a dead letter like ``read_dead_letter``, and also return the original length of a truncated value."""
    parts = WIRE.parts(message)
    if DISPOSITION in parts.fields:
        raise WIRE.refusal(message, f"has the header {DISPOSITION}, so it disposes of a dead letter")
    dead_letter, whole = WIRE.read(message, parts)
    kept = _kept_key(message)
    if not any(name in parts.fields for name in _KEYS) and kept is not None and kept != dead_letter.id.encode():
        dead_letter = dataclasses.replace(dead_letter, key=kept, record_key=kept)
    return ReadDeadLetter(dead_letter, whole)


def read_disposition(message: Message) -> tuple[str, Disposition] | None:
    """Read the disposition in a message of the dead-letter topic. Neither blocks nor changes the message.

    Args:
        message: Message of the dead-letter topic.

    Returns:
        The id of the dead letter, and ``"replayed"`` or ``"dropped"``; None for a message without a disposition.

    Raises:
        MessageError: A header is repeated or malformed, or the headers of a disposition have values that ``lanes``
            never writes.
    """
    fields = WIRE.parts(message).fields
    how = fields.get(DISPOSITION)
    if how is None:
        return None
    dead_letter_id = fields.get(ID, "")
    if how not in ("replayed", "dropped") or not dead_letter_id:
        raise WIRE.refusal(message, f"has a header {DISPOSITION} or {ID} that lanes does not write")
    return dead_letter_id, "replayed" if how == "replayed" else "dropped"


def _record(dead_letter: DeadLetter, by_id: bool, whole: int | None) -> Record:
    key = dead_letter.key if dead_letter.record_key is None else dead_letter.record_key
    fields = WIRE.fields(dead_letter, whole)
    if by_id:
        key = dead_letter.id.encode()
    elif dead_letter.key == dead_letter.record_key and key != dead_letter.id.encode():
        # The key of the record is the key of the original record and the key of its lane.
        for name in _KEYS:
            fields.pop(name, None)
    without = set(dead_letter.null_headers)
    headers: Headers = [
        (WIRE.kept_name(name), None if index in without else value)
        for index, (name, value) in enumerate(dead_letter.headers)
    ]
    headers += ((name, text.encode()) for name, text in fields.items())
    # A tombstone would remove itself from a compacted topic.
    return Record(key, None if dead_letter.tombstone and not by_id else dead_letter.value, headers)


def _is_sendable(name: str) -> bool:
    # The client truncates a header name at a NUL, and a lone surrogate in a name crashes the process.
    if "\0" in name:
        return False
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


WIRE: Final = Wire(
    writer="KafkaDeadLetters", remedy="and let no other producer write to its topic", id_field=ID, sendable=_is_sendable
)
"""The wire format of dead letters in a topic."""


def _kept_key(message: Message) -> bytes | None:
    # A consumer of dead letters may have its own key function, so prefer the key of the record.
    reader = message.partition.reader
    return reader.details(message.raw).record_key if isinstance(reader, DetailedReader) else message.key
