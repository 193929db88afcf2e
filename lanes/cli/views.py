"""Dead letters as text and JSON. Keys, headers and payloads are untrusted text, which must not steer a terminal."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Final

from lanes.dead_letter import DeadLetter, printable, reason_line
from lanes.dead_letters.box import StoredDeadLetter
from lanes.history.writer import key_hash

ROW_HEADINGS: Final = ("id", "origin", "key", "attempts", "reason", "dead-lettered", "bytes")
"""The headings of ``row``."""


def row(stored: StoredDeadLetter) -> tuple[str, ...]:
    """Return the row of a dead letter for a list, with the hash of its key and without its content.

    The reason may contain user data.
    """
    dead_letter = stored.dead_letter
    return (
        dead_letter.id,
        _origin(dead_letter),
        key_hash(dead_letter.key),
        str(dead_letter.attempts),
        reason_line(dead_letter.error_type, dead_letter.error_text),
        moment(dead_letter.time),
        str(_size(stored)),
    )


def fields(stored: StoredDeadLetter, *, with_payload: bool = False) -> Iterator[tuple[str, str]]:
    """Return the names and values of a dead letter; with ``with_payload`` subject, key and headers too."""
    dead_letter = stored.dead_letter
    yield "id", dead_letter.id
    yield "stored at", printable(stored.place)
    yield "origin", _origin(dead_letter)
    if dead_letter.queue is not None:
        yield "queue", f"{printable(dead_letter.queue)}, partition {dead_letter.queue_partition}"
    if dead_letter.system:
        known = f", {printable(dead_letter.incarnation)}" if dead_letter.incarnation else ""
        yield "system", printable(dead_letter.system) + known
    yield "key", "none" if dead_letter.key is None else f"{key_hash(dead_letter.key)} (hash)"
    yield "published", "unknown" if dead_letter.timestamp is None else moment(dead_letter.timestamp)
    yield "dead-lettered", moment(dead_letter.time)
    yield "attempts", str(dead_letter.attempts)
    yield "error", printable(dead_letter.error_type)
    yield "text", printable(dead_letter.error_text)
    yield "epoch", str(dead_letter.epoch)
    size = "none, a tombstone" if dead_letter.tombstone else f"{len(dead_letter.value)} bytes"
    bare = stored.whole_size == len(dead_letter.value)
    if stored.whole_size is not None and not bare:
        size += f" of {stored.whole_size}: it was cut"
    yield "value", size
    if bare:
        yield "headers", "removed, because the dead letter was too large"
    elif not with_payload:
        yield "headers", str(len(dead_letter.headers))
    if not with_payload:
        return
    yield "subject", printable(dead_letter.subject)
    yield "key", "none" if dead_letter.key is None else _text(dead_letter.key)
    if dead_letter.record_key not in (None, dead_letter.key):
        yield "record key", _text(dead_letter.record_key or b"")
    nulls = set(dead_letter.null_headers)
    for index, (name, value) in enumerate(dead_letter.headers):
        yield f"header {printable(name)}", "no value" if index in nulls else _text(value)


def payload(dead_letter: DeadLetter) -> str:
    """Return the lines of a dead letter's value."""
    return "\n".join(_text(line) for line in dead_letter.value.split(b"\n"))


def document(stored: StoredDeadLetter, *, with_payload: bool = False) -> dict[str, Any]:
    """Return a dead letter for JSON; with ``with_payload`` subject, key, headers and value too, in base64."""
    dead_letter = stored.dead_letter
    found: dict[str, Any] = {
        "id": dead_letter.id,
        "place": stored.place,
        "source": dead_letter.source,
        "partition": dead_letter.partition,
        "position": dead_letter.position,
        "queue": dead_letter.queue,
        "queue_partition": dead_letter.queue_partition,
        "system": dead_letter.system or None,
        "incarnation": dead_letter.incarnation or None,
        "key_hash": key_hash(dead_letter.key),
        "attempts": dead_letter.attempts,
        "error": dead_letter.error_type,
        "error_text": dead_letter.error_text,
        "epoch": dead_letter.epoch,
        "time": dead_letter.time,
        "published": dead_letter.timestamp,
        "bytes": _size(stored),
        "cut": stored.whole_size is not None,
    }
    if with_payload:
        nulls = set(dead_letter.null_headers)
        found |= {
            "subject": dead_letter.subject,
            "key": None if dead_letter.key is None else _base64(dead_letter.key),
            "value": None if dead_letter.tombstone else _base64(dead_letter.value),
            "headers": [
                [name, None if index in nulls else _base64(value)]
                for index, (name, value) in enumerate(dead_letter.headers)
            ],
        }
    return found


def moment(seconds: float) -> str:
    """Format seconds since the epoch as a time in UTC; a time after the year 9999 stays a number."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    except (OverflowError, ValueError, OSError):
        return f"{seconds:.0f} s"


def _origin(dead_letter: DeadLetter) -> str:
    return f"{printable(dead_letter.source)}/{dead_letter.partition} {dead_letter.position}"


def _size(stored: StoredDeadLetter) -> int:
    return len(stored.dead_letter.value) if stored.whole_size is None else stored.whole_size


def _text(content: bytes) -> str:
    """Decode text, or show bytes in hex."""
    try:
        return printable(content.decode())
    except UnicodeDecodeError:
        return f"{len(content)} bytes, hex {content.hex()}"


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()
