"""Makes messages of ``lanes`` from the client's records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from confluent_kafka import TIMESTAMP_NOT_AVAILABLE
from confluent_kafka import Message as Raw

from lanes.core.types import Message, Partition, PartitionKey, key_bytes
from lanes.dead_letter import Details
from lanes.errors import MessageError

KeyFunction = Callable[[Raw], PartitionKey | None]
"""A plain function from the client's message to its key, called in the thread that owns the client. A message whose key
is None has no order."""

_LATEST: Final = 10**14
"""Milliseconds since the epoch above which ``lanes`` ignores a timestamp. A producer may write any number."""


def record_key(raw: Raw) -> PartitionKey | None:
    """Return the key of the record as the partition key.

    Args:
        raw: The client's message.

    Returns:
        The key of the record; None for a record without a key, which has no order.
    """
    return raw.key()


def messages(partition: Partition, raws: Sequence[Raw], key: KeyFunction) -> tuple[list[Message], int]:
    """Make messages from the records of one partition. Also return the size: bytes of keys, values and headers.

    If the key function fails for a record, the message of this record has no key and is ``broken``. Takes O(records).
    """
    run: list[Message] = []
    append, own_key = run.append, key is record_key
    total = 0
    for raw in raws:
        # A consumer without deserializers returns keys as bytes.
        own = raw.key()
        size = len(raw)
        if own is not None:
            size += len(own)
        # Call ``headers`` once, for a record without headers too. The client stores the list that this call makes.
        headers = raw.headers()
        if headers:
            size += _size_of(headers)
        total += size
        if own_key:
            offset = raw.offset()
            assert offset is not None, "a fetched message has an offset"
            append(Message(partition, offset, own, size, raw, None))
        else:
            append(_keyed(partition, raw, size, key))
    return run, total


def offset_of(raw: Raw) -> int:
    """Return the offset of a message that is not an error."""
    offset = raw.offset()
    assert offset is not None, "a fetched message has an offset"
    return offset


def _size_of(headers: Any) -> int:
    size = 0
    for name, value in headers:
        size += len(name) if name.isascii() else len(name.encode())
        if value:
            size += len(value)
    return size


def _pairs(headers: Any) -> list[tuple[str, bytes]]:
    return [(name, value or b"") for name, value in headers]


def _keyed(partition: Partition, raw: Raw, size: int, key: KeyFunction) -> Message:
    lane, broken = None, None
    try:
        found = key(raw)
        lane = None if found is None else key_bytes(found)
    except Exception as error:
        broken = MessageError(
            f"key=… failed at {partition.id} offset {raw.offset()} with {type(error).__name__}; correct the key "
            "function, which gets the client's message and returns bytes, str, int or None"
        )
        broken.__cause__ = error
    message = Message(partition, offset_of(raw), lane, size, raw, None)
    message.broken = broken
    return message


class _Reader:
    """The reader of the client's messages; see ``lanes.core.types.Reader``."""

    def value(self, raw: object) -> bytes:
        assert isinstance(raw, Raw)
        return raw.value() or b""

    def headers(self, raw: object) -> Sequence[tuple[str, bytes]]:
        assert isinstance(raw, Raw)
        return _pairs(raw.headers() or ())

    def subject(self, raw: object) -> str:
        assert isinstance(raw, Raw)
        return raw.topic() or ""

    def details(self, raw: object) -> Details:
        assert isinstance(raw, Raw)
        headers: Any = raw.headers() or ()
        kind, milliseconds = raw.timestamp()
        known = kind != TIMESTAMP_NOT_AVAILABLE and 0 <= milliseconds <= _LATEST
        return Details(
            record_key=raw.key(),
            tombstone=raw.value() is None,
            null_headers=tuple(index for index, (_, value) in enumerate(headers) if value is None),
            timestamp=milliseconds / 1000 if known else None,
        )


READER: Final = _Reader()
