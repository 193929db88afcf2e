"""Messages made from the client's records: their order key, their size, and the parts that a dead letter keeps."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import TIMESTAMP_CREATE_TIME, TIMESTAMP_NOT_AVAILABLE
from confluent_kafka import Message as Raw

import lanes
from lanes.core.types import Message, Partition, PartitionId
from lanes_kafka.client.records import READER, messages, record_key

PARTITION = Partition(PartitionId("t", 2), READER)


def raw(offset: int = 0, **fields: Any) -> Raw:
    return Raw(topic="t", partition=2, offset=offset, **fields)


def made(*raws: Raw, key: Any = record_key) -> list[Message]:
    found, _ = messages(PARTITION, raws, key)
    return found


def test_each_record_becomes_a_message_with_its_offset_and_its_record_key() -> None:
    raws = [raw(5, key=b"a", value=b"one"), raw(9, value=b"two")]
    first, second = made(*raws)
    assert (first.position, first.key, first.raw, first.partition) == (5, b"a", raws[0], PARTITION)
    assert (second.position, second.key, second.raw) == (9, None, raws[1])
    assert (first.broken, first.token, second.broken, second.token) == (None, None, None, None)


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ({}, 0),
        ({"value": b"12345"}, 5),
        ({"key": b"", "value": b"12345"}, 5),
        ({"key": b"123", "value": b"12345"}, 8),
        ({"key": b"123"}, 3),
        ({"value": b"1", "headers": [("ab", b"123"), ("c", None), ("d", b"")]}, 1 + 4 + 3),
        # Names count as they are sent, in UTF-8.
        ({"headers": [("ä", b"1")]}, 3),
    ],
)
@pytest.mark.parametrize("key", [record_key, lambda record: b"a long key of another function"])
def test_the_size_of_a_message_is_that_of_key_value_and_headers(fields: dict[str, Any], size: int, key: Any) -> None:
    found, total = messages(PARTITION, [raw(1, **fields), raw(2, value=b"12")], key)
    assert [each.size for each in found] == [size, 2]
    assert total == size + 2


@pytest.mark.parametrize(("returned", "key"), [(b"k", b"k"), ("k", b"k"), (None, None)])
def test_a_key_function_decides_the_order_key(returned: Any, key: bytes | None) -> None:
    asked = []

    def function(record: Raw) -> Any:
        asked.append(record)
        return returned

    record = raw(4, key=b"own", value=b"v")
    (message,) = made(record, key=function)
    assert (message.key, message.position, message.raw, message.broken) == (key, 4, record, None)
    assert asked == [record]


def test_a_key_function_that_fails_breaks_its_message_alone() -> None:
    failure = KeyError("a value of the user")

    def function(record: Raw) -> bytes:
        if record.offset() == 5:
            raise failure
        return b"k"

    before, broken, after = made(raw(4), raw(5, value=b"123"), raw(6), key=function)
    assert (before.key, before.broken, after.key, after.broken) == (b"k", None, b"k", None)
    assert (broken.key, broken.position, broken.size) == (None, 5, 3)
    assert isinstance(broken.broken, lanes.MessageError) and broken.broken.__cause__ is failure
    assert str(broken.broken).startswith("key=… failed at t/2 offset 5 with KeyError; correct the key function")


def test_a_key_of_a_wrong_type_breaks_its_message() -> None:
    (message,) = made(raw(4), key=lambda record: 1.5)
    assert message.key is None and message.broken is not None


def test_a_reader_shows_value_headers_and_topic() -> None:
    record = raw(value=b"v", headers=[("a", b"1"), ("b", None), ("a", b"")])
    assert READER.value(record) == b"v" and READER.subject(record) == "t"
    assert READER.headers(record) == [("a", b"1"), ("b", b""), ("a", b"")]


def test_a_reader_shows_what_a_record_lacks_as_empty() -> None:
    record = raw()
    assert READER.value(record) == b"" and READER.headers(record) == []
    assert READER.subject(Raw(partition=2, offset=0)) == ""


def test_a_dead_letter_keeps_the_difference_between_empty_and_missing() -> None:
    """A later replay writes the same record again."""
    details = READER.details(raw(key=b"k", headers=[("a", b"1"), ("b", None), ("c", b""), ("d", None)]))
    assert (details.record_key, details.tombstone, details.null_headers) == (b"k", True, (1, 3))
    details = READER.details(raw(value=b""))
    assert (details.record_key, details.tombstone, details.null_headers) == (None, False, ())


@pytest.mark.parametrize(
    ("kind", "milliseconds", "seconds"),
    [
        (TIMESTAMP_CREATE_TIME, 1_500, 1.5),
        (TIMESTAMP_CREATE_TIME, 0, 0.0),
        (TIMESTAMP_CREATE_TIME, 10**14, 1e11),
        (TIMESTAMP_CREATE_TIME, 10**14 + 1, None),
        (TIMESTAMP_CREATE_TIME, -1, None),
        (TIMESTAMP_NOT_AVAILABLE, 1_500, None),
    ],
)
def test_a_timestamp_out_of_any_range_is_ignored(kind: int, milliseconds: int, seconds: float | None) -> None:
    """A producer may write any number."""
    assert READER.details(raw(timestamp=(kind, milliseconds))).timestamp == seconds
