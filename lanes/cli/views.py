"""Dead letters as text and as JSON. Keys, headers and payloads are anybody's text: none of it may steer a terminal."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from lanes.dead_letter import DeadLetter
from lanes.dead_letters.box import StoredDeadLetter
from lanes.history.writer import key_hash

__all__ = ["document", "fields", "moment", "payload", "printable", "row", "row_headings"]


def printable(text: str) -> str:
    """The text with everything escaped that is not printed as a sign of its own."""
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


def row_headings() -> tuple[str, ...]:
    """Of the columns of ``row``."""
    return "id", "origin", "key", "attempts", "error", "parked", "bytes"


def row(parked: StoredDeadLetter) -> tuple[str, ...]:
    """One letter of a list: neither its key nor anything of its content."""
    letter = parked.dead_letter
    return (
        letter.id,
        _origin(letter),
        key_hash(letter.key),
        str(letter.attempts),
        printable(letter.error_type),
        moment(letter.time),
        str(_size(parked)),
    )


def fields(parked: StoredDeadLetter, *, with_payload: bool = False) -> Iterator[tuple[str, str]]:
    """What there is to know of a letter, by name. ``with_payload``: subject, key and headers too."""
    letter = parked.dead_letter
    yield "id", letter.id
    yield "lies at", printable(parked.place)
    yield "origin", _origin(letter)
    yield "key", f"{key_hash(letter.key)} (hash)"
    yield "published", "unknown" if letter.timestamp is None else moment(letter.timestamp)
    yield "parked", moment(letter.time)
    yield "attempts", str(letter.attempts)
    yield "error", printable(letter.error_type)
    yield "text", printable(letter.error_text)
    yield "epoch", str(letter.epoch)
    size = "none, a tombstone" if letter.tombstone else f"{len(letter.value)} bytes"
    if parked.whole_size is not None:
        size += f" of {parked.whole_size}: it was cut"
    yield "value", size
    if not with_payload:
        yield "headers", str(len(letter.headers))
        return
    yield "subject", printable(letter.subject)
    yield "key", "none" if letter.key is None else _text(letter.key)
    if letter.record_key not in (None, letter.key):
        yield "record key", _text(letter.record_key or b"")
    nulls = set(letter.null_headers)
    for index, (name, value) in enumerate(letter.headers):
        yield f"header {printable(name)}", "no value" if index in nulls else _text(value)


def payload(letter: DeadLetter) -> str:
    """The value, line by line."""
    return "\n".join(_text(line) for line in letter.value.split(b"\n"))


def document(parked: StoredDeadLetter, *, with_payload: bool = False) -> dict[str, Any]:
    """A letter for JSON. ``with_payload``: subject, key, headers and value too, in base64."""
    letter = parked.dead_letter
    found: dict[str, Any] = {
        "id": letter.id,
        "place": parked.place,
        "source": letter.source,
        "partition": letter.partition,
        "position": letter.position,
        "key_hash": key_hash(letter.key),
        "attempts": letter.attempts,
        "error": letter.error_type,
        "error_text": letter.error_text,
        "epoch": letter.epoch,
        "time": letter.time,
        "published": letter.timestamp,
        "bytes": _size(parked),
        "cut": parked.whole_size is not None,
    }
    if with_payload:
        nulls = set(letter.null_headers)
        found |= {
            "subject": letter.subject,
            "key": None if letter.key is None else _base64(letter.key),
            "value": None if letter.tombstone else _base64(letter.value),
            "headers": [
                [name, None if index in nulls else _base64(value)] for index, (name, value) in enumerate(letter.headers)
            ],
        }
    return found


def moment(seconds: float) -> str:
    """Seconds since the epoch as a time in UTC; as they are beyond the year 9999."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    except (OverflowError, ValueError, OSError):
        return f"{seconds:.0f} s"


def _origin(letter: DeadLetter) -> str:
    return f"{printable(letter.source)}/{letter.partition} {letter.position}"


def _size(parked: StoredDeadLetter) -> int:
    return len(parked.dead_letter.value) if parked.whole_size is None else parked.whole_size


def _text(content: bytes) -> str:
    """Text where it is text, else its bytes in hex."""
    try:
        return printable(content.decode())
    except UnicodeDecodeError:
        return f"{len(content)} bytes, hex {content.hex()}"


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()
