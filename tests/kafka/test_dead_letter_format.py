"""The format of dead letters in a topic: read back as written, with other records refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from confluent_kafka import Message as Raw
from hypothesis import given
from hypothesis import strategies as st

from lanes import DeadLetter, MessageError
from lanes.core.types import Message, Partition, PartitionId
from lanes.dead_letters.wire import TRUNCATED
from lanes_kafka import read_dead_letter, read_disposition
from lanes_kafka.dead_letters.box import message_at
from lanes_kafka.dead_letters.wire import Record, dead_letter_record, disposition_record

NAMES = st.one_of(
    st.text(max_size=8),
    st.sampled_from(["Lanes-Key", "lanes-x", "LANES-%41", "Lanes-Origin-a", "Lanes-Id", "a\0b", "\ud800", "", "é"]),
    st.text(st.characters(categories=["Cs", "L"]), max_size=3),
)
VALUES = st.none() | st.binary(max_size=6)
PLAIN = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=8)
NUMBERS = st.integers(0, 2**64 - 1)
IDS = st.text(st.sampled_from("0123456789abcdef"), min_size=32, max_size=32)
SAMPLE = DeadLetter(
    id="0" * 32,
    source="orders",
    partition=3,
    position=17,
    subject="orders",
    key=b"k",
    value=b"payload",
    headers=(("color", b"red"), ("none", b"")),
    attempts=5,
    error_type="ValueError",
    error_text="no such customer",
    epoch=2,
    time=1_700_000_000.25,
    record_key=b"k",
    null_headers=(1,),
    timestamp=1_600_000_000.125,
)


@st.composite
def letters(draw: st.DrawFn) -> DeadLetter:
    """A dead letter with any keys, value and headers."""
    letter_id = draw(IDS)
    keys = st.none() | st.binary(max_size=6) | st.just(letter_id.encode())
    key = draw(keys)
    tombstone = draw(st.booleans())
    headers = draw(st.lists(st.tuples(NAMES, VALUES), max_size=5))
    return DeadLetter(
        id=letter_id,
        source=draw(PLAIN),
        partition=draw(NUMBERS),
        position=draw(NUMBERS),
        subject=draw(PLAIN),
        key=key,
        value=b"" if tombstone else draw(st.binary(max_size=50)),
        headers=tuple((name, value or b"") for name, value in headers),
        attempts=draw(NUMBERS),
        error_type=draw(PLAIN),
        error_text=draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=20)),
        epoch=draw(NUMBERS),
        time=draw(st.integers(0, 2**40)) / 1000,
        record_key=draw(st.just(key) | keys),
        tombstone=tombstone,
        null_headers=tuple(index for index, (_, value) in enumerate(headers) if value is None),
        timestamp=draw(st.none() | st.integers(0, 2**40).map(lambda ms: ms / 1000)),
        queue=draw(st.none() | st.text(min_size=1, max_size=20)),
        queue_partition=draw(st.none() | NUMBERS),
        system=draw(st.text(max_size=20)),
        incarnation=draw(st.text(max_size=20)),
    )


def read_back(record: Record) -> Message:
    """The message of a consumer that reads this record."""
    raw = Raw("dead", 0, 7, record.key, record.value, record.headers or None, None, (1, 5))
    return message_at("dead", raw)


@given(letter=letters(), by_id=st.booleans())
def test_a_dead_letter_is_read_back_as_written(letter: DeadLetter, by_id: bool) -> None:
    record = dead_letter_record(letter, by_id=by_id)
    assert read_dead_letter(read_back(record)) == letter
    assert read_disposition(read_back(record)) is None
    # Names that the client cuts, or that crash the process.
    assert not any("\0" in name or "\ud800" <= sign <= "\udfff" for name, _ in record.headers for sign in name)


@given(letter=letters())
def test_the_record_keeps_the_original_key_value_and_headers(letter: DeadLetter) -> None:
    key, value, headers = dead_letter_record(letter)
    assert key == (letter.key if letter.record_key is None else letter.record_key)
    assert value == (None if letter.tombstone else letter.value)
    nulls = set(letter.null_headers)
    for index, ((name, value), (kept, content)) in enumerate(zip(letter.headers, headers, strict=False)):
        assert content == (None if index in nulls else value)
        if not name.lower().startswith("lanes-") and name.isprintable():
            assert kept == name


@given(letter=letters())
def test_in_a_compacted_topic_the_key_is_the_id(letter: DeadLetter) -> None:
    key, value, _ = dead_letter_record(letter, by_id=True)
    assert key == letter.id.encode()
    assert value == letter.value  # not a tombstone, which compaction would remove


@given(letter=letters(), limit=st.integers(0, 2_000))
def test_a_record_above_the_limit_is_cut(letter: DeadLetter, limit: int) -> None:
    whole = dead_letter_record(letter)
    record = dead_letter_record(letter, limit=limit)
    if whole.size <= limit:
        assert record == whole
        return
    found = read_dead_letter(read_back(record))
    assert found.headers == ()
    assert letter.value.startswith(found.value)
    assert dataclasses.replace(letter, headers=(), null_headers=(), value=found.value) == found
    assert dict(record.headers)[TRUNCATED] == str(len(letter.value)).encode()
    # The record uses the whole limit and no more, unless nothing fits.
    assert record.size == limit or (record.size > limit and not found.value) or found.value == letter.value


@pytest.mark.parametrize("how", ["replayed", "dropped"])
def test_a_disposition_is_read_back_and_is_no_dead_letter(how: Any) -> None:
    message = read_back(disposition_record(SAMPLE.id, how, 5.0))
    assert read_disposition(message) == (SAMPLE.id, how)
    assert message.key == SAMPLE.id.encode()
    with pytest.raises(MessageError, match="has the header Lanes-Disposition, so it disposes of a dead letter"):
        read_dead_letter(message)


def wire() -> list[tuple[str, Any]]:
    return list(dead_letter_record(SAMPLE).headers)


def without(name: str) -> list[tuple[str, Any]]:
    return [pair for pair in wire() if pair[0] != name]


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ([], "has no header Lanes-Id"),
        (without("Lanes-Source"), "has no header Lanes-Source"),
        ([*wire(), ("Lanes-Id", b"0" * 32)], "has the header Lanes-Id twice"),
        ([*without("Lanes-Id"), ("Lanes-Id", None)], "Lanes-Id that lanes does not write: ''"),
        ([*without("Lanes-Id"), ("Lanes-Id", b"\xff" * 32)], "Lanes-Id that lanes does not write"),
        ([*without("Lanes-Position"), ("Lanes-Position", b"-1")], "Lanes-Position that lanes does not write: '-1'"),
        ([*without("Lanes-Time"), ("Lanes-Time", b"nan")], "Lanes-Time that lanes does not write: 'nan'"),
        ([*wire(), ("Lanes-Tombstone", b"1")], "Lanes-Tombstone that lanes does not write: '1'"),
        ([*without("Lanes-Null-Headers"), ("Lanes-Null-Headers", b"0")], "Lanes-Null-Headers that lanes does not"),
        ([*without("Lanes-Null-Headers"), ("Lanes-Null-Headers", b"2")], "Lanes-Null-Headers that lanes does not"),
        ([*without("Lanes-Null-Headers"), ("Lanes-Null-Headers", b"1,1")], "Lanes-Null-Headers that lanes does not"),
        ([*wire(), ("Lanes-Key", b"%zz")], "Lanes-Key that lanes does not write;"),
        ([*wire(), ("Lanes-Origin-%zz", b"")], "the header name 'Lanes-Origin-%zz', which lanes does not write"),
        ([*wire(), ("Lanes-Origin-%FF", b"")], "the header name 'Lanes-Origin-%FF', which lanes does not write"),
    ],
)
def test_an_invalid_record_is_refused_by_its_fault(headers: Any, said: str) -> None:
    with pytest.raises(MessageError, match="no dead letter: dead/0 position 7 has") as refused:
        read_dead_letter(read_back(Record(b"k", b"payload", headers)))
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("kept", "name"),
    [("lanes-a(b", "lanes-a(b"), ("%6canes-%61", "lanes-a"), ("Lanes-%C3%A9é", "Lanes-éé"), ("", "")],
    ids=["less", "more", "half", "nothing"],
)
def test_a_header_name_may_be_quoted_differently(kept: str, name: str) -> None:
    read = read_dead_letter(read_back(Record(b"k", b"payload", [*wire(), (f"Lanes-Origin-{kept}", b"x")])))
    assert read.headers[-1] == (name, b"x")


@given(
    letter=letters(),
    changes=st.lists(st.tuples(st.integers(0, 20), st.none() | st.binary(max_size=8)), max_size=3),
    others=st.lists(st.tuples(st.text(st.sampled_from("Lanes-OrigKey%F0\ud800"), max_size=20), VALUES), max_size=3),
)
def test_hostile_headers_make_a_dead_letter_or_a_message_error(
    letter: DeadLetter, changes: list[tuple[int, bytes | None]], others: list[tuple[str, bytes | None]]
) -> None:
    record = dead_letter_record(letter)
    for index, value in changes:
        place = index % len(record.headers)
        record.headers[place] = (record.headers[place][0], value)
    message = read_back(record._replace(headers=[*record.headers, *others]))
    for read in (read_dead_letter, read_disposition):
        try:
            read(message)
        except MessageError:
            continue


class PlainReader:
    """A source without details of its records."""

    def value(self, raw: object) -> bytes:
        return b""

    def headers(self, raw: object) -> Sequence[tuple[str, bytes]]:
        return [
            (name, value if isinstance(value, bytes) else b"") for name, value in dead_letter_record(SAMPLE).headers
        ]

    def subject(self, raw: object) -> str:
        return "dead"


def test_without_details_the_key_is_that_of_the_lane() -> None:
    message = Message(Partition(PartitionId("dead", 0), PlainReader()), 7, b"k", 0, None, None)
    assert read_dead_letter(message) == dataclasses.replace(SAMPLE, value=b"")


# --- settings
