"""The adapter reads records and commit metadata unchanged, refuses them or ignores them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple, cast

from confluent_kafka import OFFSET_BEGINNING, TIMESTAMP_CREATE_TIME, TIMESTAMP_LOG_APPEND_TIME, TIMESTAMP_NOT_AVAILABLE
from confluent_kafka import Message as Raw
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz.offset_map import ANY, OURS, changed, merged
from lanes.core.ledgers import OffsetLedger
from lanes.core.offset_map import encode
from lanes.core.types import Partition, PartitionId, Runs
from lanes.dead_letter import DeadLetter
from lanes.errors import MessageError, SourceError
from lanes.source import Delivered
from lanes_kafka.client.key_watch import KeyWatch
from lanes_kafka.client.offsets import StartPosition, start_positions
from lanes_kafka.client.records import READER, messages, record_key
from lanes_kafka.client.topics import Topic
from lanes_kafka.dead_letters.box import message_at
from lanes_kafka.dead_letters.wire import dead_letter_record, read_dead_letter, read_disposition
from tests.core.offset_maps import MAPS

PARTITION: Final = PartitionId("t", 0)
Pairs = Sequence[tuple[str, bytes | None]]

# --- commits


class Answer(NamedTuple):
    """A partition in the form in which the client reports it."""

    topic: str
    partition: int
    offset: int
    metadata: str | None = None
    error: None = None


class Committed:
    """A client with a committed position and the bounds of a log."""

    def __init__(self, offset: int, metadata: str | None, low: int, high: int) -> None:
        self._answer = Answer(*PARTITION, offset, metadata)
        self._bounds = low, high

    def committed(self, partitions: object, timeout: float) -> list[Answer]:
        return [self._answer]

    def offsets_for_times(self, partitions: Sequence[Any], timeout: float) -> list[Answer]:
        return [Answer(*PARTITION, self._bounds[each.offset != OFFSET_BEGINNING]) for each in partitions]


def begun(offset: int, metadata: str | None, low: int, high: int, *, hands_over: bool) -> StartPosition:
    """Return the position at which a member with this commit begins."""
    client = cast(Any, Committed(offset, metadata, low, high))
    asked = start_positions(
        client, [PARTITION], start="beginning", sizes={}, out_of_range="fail", hands_over=hands_over, name="kafka g"
    )
    return asked[PARTITION]


def check_committed(metadata: str | None, offset: int, low: int, high: int, hands_over: bool) -> Runs:
    """Compare the position with the commit, and the completed set with the metadata; return the set."""
    try:
        found = begun(offset, metadata, low, high, hands_over=hands_over)
    except SourceError:
        assert offset >= 0 and not low <= offset <= high
        return []
    assert found.floor == (low if offset < 0 else offset) and found.uncommitted == (offset < 0)
    completed = list(found.completed)
    if completed:
        assert hands_over and metadata == encode(found.floor, completed)
        assert found.floor <= completed[0][0] and all(below[1] < above[0] for below, above in pairwise(completed))
    OffsetLedger(found.floor, completed)
    return completed


# --- produced records


def pairs_of(raw: Raw) -> Pairs:
    """Return the headers of a record as a list, which is empty for a record without headers."""
    return cast(Pairs, raw.headers() or [])


def failing(raw: Raw) -> Any:
    """A key function that fails for every record."""
    raise LookupError(raw.key())


KEYS: Final[tuple[Callable[[Raw], Any], ...]] = (
    record_key,
    failing,
    lambda raw: raw.value(),
    lambda raw: len(raw),
    lambda raw: -len(raw),
    lambda raw: [raw.key()],
    lambda raw: next(iter(pairs_of(raw)), ("", b""))[0],
)


def check_records(raws: Sequence[Raw], key: Callable[[Raw], Any]) -> None:
    """Check that each record alone decides whether its message has a key, has no key, or is broken."""
    partition = Partition(PARTITION, READER)
    found, size = messages(partition, raws, key)
    assert [message.position for message in found] == [raw.offset() for raw in raws]
    assert size == sum(message.size for message in found)
    for message, raw in zip(found, raws, strict=True):
        assert message.key is None or isinstance(message.key, bytes)
        assert message.broken is None or (message.key is None and isinstance(message.broken, MessageError))
        assert key is not record_key or (message.key, message.broken) == (raw.key(), None)
        assert key is not failing or message.broken is not None
        pairs = pairs_of(raw)
        assert message.value == (raw.value() or b"")
        assert message.headers == [(name, value or b"") for name, value in pairs]
        assert message.size == len(message.value) + len(raw.key() or b"") + sum(
            len(n.encode()) + len(v) for n, v in message.headers
        )
        known = READER.details(raw)
        assert known.tombstone == (raw.value() is None) and known.record_key == raw.key()
        assert [pairs[index][1] for index in known.null_headers] == [None] * len(known.null_headers)
        assert known.timestamp is None or 0 <= known.timestamp <= 1e11
    watch = KeyWatch("kafka g")
    watch.observe([Delivered(partition, found, size)], {PARTITION.source: Topic("", 2)})
    watch.report({PARTITION.source: Topic("", 3)})


def check_dead_letter(raw: Raw) -> None:
    """Read a record as a dead letter, a disposition or neither, and write a dead letter again."""
    message = message_at(PARTITION.source, raw)
    try:
        disposed = read_disposition(message)
    except MessageError:
        disposed = None
    assert disposed is None or disposed[1] in ("replayed", "dropped")
    try:
        dead_letter = read_dead_letter(message)
    except MessageError as error:
        assert "t/0 position 7 " in str(error)  # noqa: PT017 (the invariant is about the text)
        return
    assert disposed is None
    once = again(dead_letter)
    # Times are written in microseconds.
    assert dataclasses.replace(once, time=dead_letter.time, timestamp=dead_letter.timestamp) == dead_letter
    assert again(once) == once


def again(dead_letter: DeadLetter) -> DeadLetter:
    """Write a dead letter and read it back."""
    record = dead_letter_record(dead_letter)
    return read_dead_letter(message_at(PARTITION.source, made(record.key, record.value, cast(Pairs, record.headers))))


def made(key: bytes | None, value: bytes | None, headers: Pairs | None, stamp: tuple[int, int] = (1, 5)) -> Raw:
    """Return a message in the form in which the client delivers it."""
    content = cast(Any, {"headers": None if headers is None else list(headers), "timestamp": stamp})
    return Raw(topic=PARTITION.source, partition=PARTITION.number, offset=7, key=key, value=value, **content)


# --- examples

NUMBERS = st.integers(0, 2**63 - 1)
BYTES = st.none() | st.binary(max_size=20)
STAMPS = st.tuples(
    st.sampled_from([TIMESTAMP_NOT_AVAILABLE, TIMESTAMP_CREATE_TIME, TIMESTAMP_LOG_APPEND_TIME]),
    st.integers(-(2**63), 2**63 - 1) | st.sampled_from([-1, 0, 10**14, 10**14 + 1]),
)
NAMES = st.text(max_size=8) | st.sampled_from(
    ["traceparent", "Lanes-", "lanes-id", "Lanes-Origin-%41", "Lanes-Origin-%zz"]
)
RECORDS = st.builds(made, BYTES, BYTES, st.none() | st.lists(st.tuples(NAMES, BYTES), max_size=4), STAMPS)

_SAMPLE: Final = DeadLetter(
    id="0" * 32,
    source="s",
    partition=0,
    position=0,
    subject="s",
    key=b"k",
    value=b"v",
    headers=(("a", b"b"),),
    attempts=1,
    error_type="E",
    error_text="",
    epoch=1,
    time=0.0,
    timestamp=1.5,
)
WRITTEN: Final = cast(Pairs, dead_letter_record(_SAMPLE).headers)
EXTRA = st.sampled_from([*dict(WRITTEN), "Lanes-Key", "Lanes-Record-Key", "Lanes-Tombstone", "Lanes-Null-Headers"])
OTHERS = EXTRA | NAMES | st.sampled_from(["Lanes-Disposition", "Lanes-Truncated"])
HOSTILE = BYTES | st.sampled_from(
    [
        *(b"-1", b"1_0", b" 1", b"nan", b"inf", b"1e9", b"%", b"%zz", b"%ff", b"0,1", b"1,0", b"0", b"1", b"1.5"),
        *(b"replayed", b"9" * 5_000, "\u0661".encode(), b"0" * 32),
    ]
)


@st.composite
def dead_letters(draw: st.DrawFn) -> Raw:
    """Return the record of a dead letter with headers changed, added, repeated and missing."""
    changes = draw(st.lists(st.tuples(OTHERS, HOSTILE), max_size=4))
    without = draw(st.lists(EXTRA, max_size=2))
    if draw(st.booleans()):
        without += [name for name, _ in changes]
    kept = [(name, value) for name, value in WRITTEN if name not in without]
    return made(draw(BYTES), draw(BYTES), [*kept, *changes])


def properties(effort: settings, tick: Callable[[], None]) -> list[Callable[[], None]]:
    """Return tests of commits, records and dead letters."""
    texts = st.none() | st.text(ANY, max_size=40) | st.text(OURS, max_size=20).map("\u5a36\u7440".__add__)

    @effort
    @given(texts, st.just(-1001) | NUMBERS, NUMBERS, NUMBERS, st.booleans(), st.booleans())
    def foreign(text: str | None, offset: int, low: int, high: int, inside: bool, hands_over: bool) -> None:
        tick()
        low, high = sorted((low, high))
        check_committed(text, max(low, min(high, offset)) if inside else offset, low, high, hands_over)

    @effort
    @given(MAPS, st.sampled_from([0, 0, 1, -1, 2**20]))
    def of_another(case: tuple[int, Runs], shift: int) -> None:
        tick()
        floor, runs = case
        committed = max(0, min(2**63 - 1, floor + shift))
        found = check_committed(encode(floor, runs), committed, 0, 2**63 - 1, hands_over=True)
        # Metadata of one committed position says nothing about another position.
        assert bool(found) == (bool(runs) and committed == floor and encode(floor, runs) != "")

    @effort
    @given(changed(), st.booleans())
    def ours(case: tuple[str, int, Runs], hands_over: bool) -> None:
        tick()
        text, floor, runs = case
        for start, end in check_committed(text, floor, 0, floor, hands_over):
            assert any(first <= start < end <= last for first, last in merged(runs))

    @effort
    @given(st.lists(RECORDS, min_size=1, max_size=4), st.sampled_from(KEYS))
    def records(raws: list[Raw], key: Callable[[Raw], Any]) -> None:
        tick()
        check_records(raws, key)

    @effort
    @given(dead_letters())
    def hostile_dead_letters(raw: Raw) -> None:
        tick()
        check_dead_letter(raw)

    return [foreign, of_another, ours, records, hostile_dead_letters]
