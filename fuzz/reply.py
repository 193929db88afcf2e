"""Reading a reply subject gives numbers or SourceError, and a key function gives a key or LookupError."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st
from nats.aio.client import Client
from nats.aio.msg import Msg

from lanes.core.types import key_bytes
from lanes.errors import SourceError
from lanes_jetstream import header, subject_token, whole_subject
from lanes_jetstream.wire.messages import sequences

CLIENT = Client()

# Characters that a name in a subject may have, and some that it may not.
NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=". *>"), min_size=1, max_size=8)
NUMBERS = st.integers(0, 2**64 - 1)
WORDS = st.one_of(
    NAMES,
    NUMBERS.map(str),
    st.sampled_from(
        ["", "$JS", "ACK", "-1", "+1", "1_0", " 1", "1e9", "\u0661", "\u00b2", "9" * 5000, "\x00", "*", ">"]
    ),
)


def check_reply(names: tuple[str, str], numbers: tuple[int, int, int, int, int], form: str) -> None:
    """Check the numbers of a reply subject as a server makes it."""
    prefix = {"plain": "", "domain": "_.hash.", "token": "domain.hash."}[form]
    suffix = ".token" if form == "token" else ""
    reply = f"$JS.ACK.{prefix}{'.'.join(names)}.{'.'.join(map(str, numbers))}{suffix}"
    assert sequences(reply) == numbers[1:3]


def check_hostile(reply: str) -> None:
    """Read a reply subject that any client may have made."""
    try:
        found = sequences(reply)
    except SourceError:
        return
    assert all(type(number) is int for number in found)


def check_keys(subject: str, index: int, headers: dict[str, str] | None, name: str) -> None:
    """Check the key functions on any message."""
    message = Msg(CLIENT, subject, "", b"", headers)
    assert key_bytes(known(whole_subject(message))) == subject.encode()
    tokens = subject.split(".")
    try:
        key = subject_token(index)(message)
    except LookupError:
        assert not -len(tokens) <= index < len(tokens)
    else:
        assert key_bytes(known(key)) == tokens[index].encode()
    value = header(name)(message)
    assert value == (headers or {}).get(name)
    assert value is None or isinstance(key_bytes(value), bytes)


def known(key: bytes | str | int | None) -> bytes | str | int:
    """Return the key, and fail if the key is None."""
    assert key is not None
    return key


def properties(effort: settings, tick: Callable[[], None]) -> list[Callable[[], None]]:
    """Return tests of reply subjects, and of messages with keys."""

    @effort
    @given(
        st.tuples(NAMES, NAMES),
        st.tuples(NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS),
        st.sampled_from(["plain", "domain", "token"]),
    )
    def reply(names: tuple[str, str], numbers: tuple[int, int, int, int, int], form: str) -> None:
        tick()
        check_reply(names, numbers, form)

    @effort
    @given(st.one_of(st.lists(WORDS, max_size=14).map(".".join), st.text(max_size=30)))
    def hostile(text: str) -> None:
        tick()
        check_hostile(text)

    @effort
    @given(
        st.lists(WORDS, max_size=5).map(".".join),
        st.integers(-7, 7),
        st.none() | st.dictionaries(WORDS, WORDS, max_size=2),
        WORDS.filter(bool),
    )
    def keys(subject: str, index: int, headers: dict[str, str] | None, name: str) -> None:
        tick()
        check_keys(subject, index, headers, name)

    return [reply, hostile, keys]
