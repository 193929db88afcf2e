"""A read returns the written dead letter. With any other headers, it returns a dead letter or raises MessageError."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from lanes.core.types import Message, Partition, PartitionId
from lanes.dead_letter import ERROR_TEXT_LIMIT, DeadLetter
from lanes.errors import MessageError
from lanes_jetstream import read_dead_letter
from lanes_jetstream.dead_letters.wire import dead_letter_headers

Headers = Sequence[tuple[str, bytes]]

# A client sends a name that is a token, and a value without control characters.
NAMES = st.text(st.sampled_from("abNLz-09%!~"), min_size=1, max_size=12)
RESERVED = st.sampled_from(["Nats-Msg-Id", "Lanes-Key", "lanes-x", "NATS-X", "Lanes-Origin-a", "Lanes-Origin-Nats-b"])
VALUES = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12).map(str.encode)
PLAIN = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12)
NUMBERS = st.integers(0, 2**64 - 1)

DEAD_LETTERS = st.builds(
    DeadLetter,
    id=st.text(st.sampled_from("0123456789abcdef"), min_size=32, max_size=32),
    source=PLAIN,
    partition=NUMBERS,
    position=NUMBERS,
    subject=PLAIN,
    key=st.none() | st.binary(max_size=20),
    value=st.binary(max_size=20),
    headers=st.dictionaries(NAMES | RESERVED, VALUES, max_size=4).map(lambda found: tuple(found.items())),
    attempts=NUMBERS,
    error_type=PLAIN,
    error_text=st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    epoch=NUMBERS,
    time=st.integers(0, 2**31).map(float),
)


class Reader:
    """Reader of messages with a body and headers."""

    def value(self, raw: object) -> bytes:
        return raw[0] if isinstance(raw, tuple) else b""

    def headers(self, raw: object) -> Headers:
        return raw[1] if isinstance(raw, tuple) else ()

    def subject(self, raw: object) -> str:
        return "dead.s"


def message_of(value: bytes, headers: Headers) -> Message:
    """Return a message of the stream of dead letters."""
    return Message(Partition(PartitionId("DEAD", 0), Reader()), 7, None, len(value), (value, headers), None)


def on_the_wire(dead_letter: DeadLetter) -> Headers:
    """Return the headers of a message, in the form in which a client returns them."""
    return [(name, value.encode()) for name, value in dead_letter_headers(dead_letter).items()]


def check_written(dead_letter: DeadLetter) -> None:
    """Check that reading returns the written dead letter, with original headers in any order."""
    found = read_dead_letter(message_of(dead_letter.value, on_the_wire(dead_letter)))
    assert dict(found.headers) == dict(dead_letter.headers)
    assert dataclasses.replace(found, headers=dead_letter.headers) == dead_letter


def check_hostile(headers: Headers) -> None:
    """Read headers that any client may publish."""
    try:
        found = read_dead_letter(message_of(b"", headers))
    except MessageError as error:
        assert "no dead letter: DEAD/0 position 7 has " in str(error)  # noqa: PT017 (the invariant is about the text)
        return
    assert len(found.id) == 32
    assert min(found.partition, found.position, found.attempts, found.epoch) >= 0
    assert 0 <= found.time < 1e12
    assert len(found.error_text) <= ERROR_TEXT_LIMIT


def properties(effort: settings, tick: Callable[[], None]) -> list[Callable[[], None]]:
    """Return tests of dead letters, and of headers with foreign entries."""
    hostile_values = st.one_of(
        st.binary(max_size=12),
        st.sampled_from([b"", b"-1", b"1_0", b" 1", b"nan", b"%", b"%zz", b"%ff", b"9" * 5000, "\u0661".encode()]),
    )
    names = st.sampled_from(list(dead_letter_headers(_SAMPLE)))

    @effort
    @given(DEAD_LETTERS)
    def written(dead_letter: DeadLetter) -> None:
        tick()
        check_written(dead_letter)

    @effort
    @given(
        DEAD_LETTERS,
        st.lists(st.tuples(names | NAMES | RESERVED, hostile_values), max_size=4),
        st.lists(names, max_size=2),
        st.booleans(),
    )
    def hostile(dead_letter: DeadLetter, others: list[tuple[str, bytes]], without: list[str], twice: bool) -> None:
        tick()
        changed = {name for name, _ in others} if not twice else set()
        kept = [
            (name, value) for name, value in on_the_wire(dead_letter) if name not in changed and name not in without
        ]
        check_hostile(kept + others)

    return [written, hostile]


_SAMPLE = DeadLetter(
    id="0" * 32,
    source="S",
    partition=0,
    position=0,
    subject="s",
    key=b"k",
    value=b"",
    headers=(),
    attempts=1,
    error_type="E",
    error_text="",
    epoch=1,
    time=0.0,
)
