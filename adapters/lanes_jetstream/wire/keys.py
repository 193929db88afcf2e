"""Makes the partition keys of JetStream messages from a subject, a header, or a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from nats.aio.msg import Msg

from lanes.arguments import shown_value
from lanes.core.types import PartitionKey
from lanes.errors import ConfigError
from lanes.handlers import check_plain_function
from lanes_jetstream.wire.transforms import function_of, known_tokens, partition_numbers, wildcard_of

KeyFunction = Callable[[Msg], PartitionKey | None]
"""A function from the client's message to its key. None = no key, so the message has no order."""

MISSING_KEY: Final = (
    "key= is subject_token(1) for the second token of the subject, header(name), whole_subject, a function of the "
    "message, or None for no keys, so no order"
)
"""Text that lists the values of ``key=``, for the error about a missing ``key=``."""

_NAMED_PATTERNS: Final = 10
"""Maximum number of patterns that an error names."""


class SubjectTokens:
    """A key function that returns the ``tokens`` of the subject, joined by dots."""

    __slots__ = ("_first", "tokens")

    def __init__(self, tokens: tuple[int, ...]) -> None:
        self.tokens = tokens
        self._first = tokens[0]

    def __call__(self, message: Msg) -> PartitionKey:
        found = message.subject.split(".")
        try:
            if len(self.tokens) == 1:
                return found[self._first].encode()
            return ".".join([found[token] for token in self.tokens]).encode()
        except IndexError:
            raise LookupError(
                f"{self!r}: the subject has {len(found)} tokens, too few for the index; use a lower index"
            ) from None

    def __repr__(self) -> str:
        return f"subject_token({', '.join(map(str, self.tokens))})"


def subject_token(index: int, *more: int) -> SubjectTokens:
    """Return a key function that returns one or several tokens of the subject.

    For ``orders.42.paid``, ``subject_token(1)`` returns ``42``, and ``subject_token(0, 1)`` returns ``orders.42``. The
    key function raises ``LookupError`` for a subject with too few tokens. At the start, the source refuses an index
    that no subject has. It also refuses an index whose token is the same literal in all subjects, or the partition
    number of a transform.

    Args:
        index: Index of the token, from 0; negative counts from the end.
        *more: Indices of further tokens of the key, in order.

    Returns:
        A key function for ``JetStreamSource(key=…)``.

    Raises:
        ConfigError: An index is not a whole number.
    """
    tokens = (index, *more)
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in tokens):
        raise ConfigError(
            f"subject_token({', '.join(map(shown_value, tokens))}): each index must be a whole number; pass 0 for the "
            "first token, -1 for the last"
        )
    return SubjectTokens(tokens)


def header(name: str) -> KeyFunction:
    """Return a key function that returns one header. A message without the header has no key.

    Args:
        name: Name of the header.

    Returns:
        A key function for ``JetStreamSource(key=…)``.

    Raises:
        ConfigError: ``name`` is empty or no text.
    """
    if not isinstance(name, str) or not name:
        raise ConfigError(f"header({shown_value(name)}) has no name; pass the header's name")

    def key(message: Msg) -> PartitionKey | None:
        headers = message.headers
        return headers.get(name) if headers else None

    # Errors show the name of a key function.
    key.__name__ = f"header({shown_value(name)})"
    return key


def check_key(key: object) -> None:
    """Check the argument ``key=`` of a source.

    Args:
        key: The argument.

    Raises:
        ConfigError: ``key`` is not a key function.
    """
    for maker, call in ((subject_token, "subject_token(1)"), (header, 'header("customer")')):
        if key is maker:
            raise ConfigError(
                f"key={maker.__name__}: makes a key function, but is not a key function itself; write key={call}"
            )
    if key is not None and not callable(key):
        raise ConfigError(
            f"key={shown_value(key)}: must be a key function; use subject_token(n), header(name), whole_subject, "
            "or None"
        )
    if key is not None:
        check_plain_function("key", key, "the client's message")


def check_varies(
    key: KeyFunction | None, patterns: Sequence[str], origin: str, destinations: Sequence[str] = ()
) -> None:
    """Check that subjects do not all have the same key.

    Args:
        key: The key function. The call checks only ``subject_token`` and ``whole_subject``.
        patterns: Patterns of all subjects; empty = unknown.
        origin: Name of the consumer or filter with these subjects, for the error.
        destinations: Destinations of the transforms that produce these subjects. The error does not recommend the token
            of a partition number.

    Raises:
        ConfigError: Each token of the key is the same literal in all patterns, the only subject is the key, or no
            subject has a token of the key.
    """
    split = [pattern.split(".") for pattern in patterns]
    named = ", ".join([*patterns[:_NAMED_PATTERNS], *(["…"] if len(patterns) > _NAMED_PATTERNS else [])])
    if isinstance(key, SubjectTokens):
        _check_long_enough(key, split, f"{origin} ({named})")
        same = _one_key(key.tokens, split)
    else:
        same = patterns[0] if key is whole_subject and len(set(patterns)) == 1 and _is_literal(split[0]) else None
    if same is None:
        return
    columns = [{each[place] for each in split} for place in range(min(map(len, split)))]
    numbers = {place for each in destinations for place in partition_numbers(each)}
    varying = [
        place for place, found in enumerate(columns) if place not in numbers and (len(found) > 1 or found & {"*", ">"})
    ]
    remedy = f"another token, such as subject_token({varying[0]})" if varying else "header(name), or another function"
    shown = "whole_subject" if key is whole_subject else repr(key)
    raise ConfigError(
        f"key={shown}: is {same!r} for every subject of {origin} ({named}), so all messages have one key and run one "
        f'at a time. Use {remedy}; or pass key=None with Settings(order="partition"), if all messages need one order'
    )


def check_no_partition_number(key: KeyFunction | None, destinations: Sequence[str], stream: str) -> None:
    """Check that the key is not the number that ``partition()`` of a transform stores in the subject.

    Args:
        key: The key function. The call checks only ``subject_token``.
        destinations: Destinations of the transforms that make the consumer's subjects.
        stream: Name of the stream.

    Raises:
        ConfigError: A token of the key is the number of a partition, and the other tokens are literals.
    """
    if not isinstance(key, SubjectTokens):
        return
    for destination in destinations:
        tokens = known_tokens(destination)
        chosen = [function_of(token) for token in _chosen(key.tokens, tokens) or ()]
        hashed = next((arguments[1:] for name, arguments in chosen if name == "partition"), None)
        if hashed is None or any(name == "wildcard" for name, _ in chosen):
            continue
        # The index of the stored token for each wildcard of the published subject.
        places = {number: place for place, each in enumerate(tokens) if (number := wildcard_of(each)) is not None}
        if hashed and all(number in places for number in hashed):
            remedy = f"{SubjectTokens(tuple(places[number] for number in hashed))!r}, which partition() hashes"
        elif places:
            remedy = f"the token that holds the key, such as subject_token({next(iter(places.values()))})"
        else:
            remedy = "header(name), or another token"
        raise ConfigError(
            f"key={key!r}: is the partition number that stream {stream!r} stores by its transform to {destination!r}, "
            f"so all messages of a partition have one key and run one at a time. Use {remedy}; or pass a function of "
            "the message, if you want one order for each partition number"
        )


def _check_long_enough(key: SubjectTokens, patterns: Sequence[Sequence[str]], origin: str) -> None:
    """Raise ``ConfigError`` if the key has an index that no subject has."""
    longest = max(map(len, patterns), default=0)
    if not longest or any(pattern[-1] == ">" for pattern in patterns):
        return
    missing = next((token for token in key.tokens if not -longest <= token < longest), None)
    if missing is not None:
        raise ConfigError(
            f"key={key!r}: no subject of {origin} has a token {missing}; the subjects have at most {longest} token(s), "
            f"so use an index from 0 to {longest - 1}"
        )


def _chosen(tokens: Sequence[int], pattern: Sequence[str]) -> list[str] | None:
    """Return the tokens of a pattern with these indices; None if a subject may have other or too few tokens."""
    open_end = pattern[-1] == ">"
    if any(not -len(pattern) <= token < len(pattern) or (token < 0 and open_end) for token in tokens):
        return None
    chosen = [pattern[token] for token in tokens]
    return None if ">" in chosen else chosen


def _one_key(tokens: Sequence[int], patterns: Sequence[Sequence[str]]) -> str | None:
    """Return the key of all subjects that match one of the patterns; None = the key may vary, or is missing."""
    found: set[str] = set()
    for pattern in patterns:
        chosen = _chosen(tokens, pattern)
        if chosen is None or "*" in chosen:
            return None
        found.add(".".join(chosen))
    return found.pop() if len(found) == 1 else None


def _is_literal(pattern: Sequence[str]) -> bool:
    return "*" not in pattern and ">" not in pattern


def whole_subject(message: Msg) -> PartitionKey:
    """Return the whole subject as the key; a key function.

    For a durable with a single subject, the source refuses this key function at the start.

    Args:
        message: Message of the nats client.

    Returns:
        The subject as bytes.
    """
    return message.subject.encode()
