"""How a stream is divided into cohort partitions: by the server's own ``partition()`` over tokens of the subject.

Three ways: the stream has a transform of its own, ``lanes`` creates the stream with one, or creates a stream that
sources another through one (``cohort_stream``). A stream that is somebody else's never gets a transform from here.
However it came about, it is read back from the stream: what counts is what the server does.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from lanes.errors import ConfigError, SourceError
from lanes.history.writer import key_hash
from lanes_jetstream.wire.keys import KeyFunction, whole_subject

__all__ = [
    "DEFAULT_PARTITIONS",
    "MANAGED",
    "MOST_PARTITIONS",
    "Choice",
    "KeyWatch",
    "Partitioning",
    "Rule",
    "partition_of",
    "read_partitioning",
]

log = logging.getLogger("lanes.jetstream")

Choice = Literal["transform", "created", "sourced"]

MANAGED: Final = "lanes-cohort-stream"
"""Metadata of a stream that ``lanes`` created for a cohort."""

DEFAULT_PARTITIONS: Final = 64
MOST_PARTITIONS: Final = 256
"""More cost the server more than they bring: 256 consumers have half the throughput of 64."""

KEYS_WATCHED: Final = 100_000
"""Keys whose partition a ``KeyWatch`` remembers, in some 10 MB."""

_FUNCTION: Final = re.compile(r"\{\{\s*([A-Za-z]+)\s*(?:\(([^)]*)\))?\s*\}\}")
_DOLLAR: Final = re.compile(r"\$(\d+)")
_DOTS: Final = re.compile(r"\.(?![^{]*\}\})")
"""The dots between tokens, not those within a function."""


def partition_of(tokens: Iterable[str], partitions: int) -> int:
    """Which of ``partitions`` the server's ``partition()`` puts these tokens into: FNV-1a, 32 bits, of them joined."""
    value = 0x811C9DC5
    for byte in "".join(tokens).encode():
        value = (value ^ byte) * 0x01000193 & 0xFFFFFFFF
    return value % partitions


@dataclass(frozen=True, slots=True)
class Rule:
    """One transform with one ``partition()``: subjects of the pattern ``source`` are stored as ``destination``.

    ``partitions``: their number. ``partition_token``: index of the stored subject's token that holds the partition.
    ``hashed``: indices of the tokens that ``partition()`` hashes; None = the whole subject. ``length``: tokens;
    None = any number.
    """

    source: str
    destination: str
    partitions: int
    partition_token: int
    hashed: tuple[int, ...] | None
    length: int | None

    def filter(self, partition: int) -> str:
        """The subjects of one partition."""
        tokens = _DOTS.split(self.destination)
        before = ["*" if _reference(token) is not None else token for token in tokens[: self.partition_token]]
        return ".".join([*before, str(partition), *([">"] if len(tokens) > self.partition_token + 1 else [])])


@dataclass(frozen=True, slots=True)
class Partitioning:
    """How a stream is divided. ``partitions``: how many, all ``rules`` alike."""

    choice: Choice
    partitions: int
    rules: tuple[Rule, ...]

    def filters(self, partition: int) -> list[str]:
        """The subjects of one partition; no two patterns are the same."""
        return list(dict.fromkeys(rule.filter(partition) for rule in self.rules))

    @property
    def detail(self) -> str:
        """What has to stay as it is for as long as the cohort lives, as text."""
        return "; ".join(f"{rule.source} -> {rule.destination}" for rule in self.rules)

    def check_key(self, key: KeyFunction | None, *, refines: bool) -> bool:
        """Whether each key has to be watched, because nothing shows that it stays in its partition.

        ``refines``: the user says that it does. Raises ``ConfigError`` for a key that may be in two partitions.
        """
        if key is None or key is whole_subject:
            return False
        tokens: tuple[int, ...] | None = getattr(key, "tokens", None)
        if tokens is None:
            if refines:
                return True
            name = getattr(key, "__name__", type(key).__name__)
            raise ConfigError(
                f"key={name}: a cohort's partition is made of subject tokens by the server, and nothing shows that a "
                "key of a header or a function is in one partition only: use subject_token(…) with every token given "
                "to partition(), or pass key_refines_partition=True where each key has one value of them"
            )
        for rule in self.rules:
            self._check_tokens(rule, tokens)
        return False

    def check_unchanged(self, stream: str, retention: str, config: Mapping[str, Any]) -> None:
        """Raise ``ConfigError`` for the configuration of a stream that had this division, and this retention, and has
        another one now."""
        changed = f"stream {stream!r} was changed while the cohort used it"
        remedy = (
            "what is stored stays as it is, so a key may be in two partitions by now: change it back, and start again; "
            'docs/reference/jetstream.md has the steps to another division ("The partition count has to change")'
        )
        try:
            now = read_partitioning(stream, config)
        except ConfigError as error:
            raise ConfigError(f"{changed}: {error}. It was divided by {self.detail}; {remedy}") from None
        if set(now.rules) != set(self.rules):
            raise ConfigError(f"{changed}: it was divided by {self.detail}, and is by {now.detail}; {remedy}")
        if config.get("retention") != retention:
            raise ConfigError(
                f"{changed}: its retention was {retention}, and is {config.get('retention')}: partitions change hands "
                "in another way there; change it back, and start again"
            )

    def _check_tokens(self, rule: Rule, tokens: Sequence[int]) -> None:
        if any(token < 0 for token in tokens) and rule.length is None:
            raise ConfigError(
                f"key=subject_token{tuple(tokens)}: {rule.destination!r} has any number of tokens, so counting from "
                "its end may mean others each time: count from the beginning"
            )
        found = {token if token >= 0 else (rule.length or 0) + token for token in tokens}
        if rule.hashed is None:
            raise ConfigError(
                f"key=subject_token{tuple(tokens)}: the stream's partition() is of the whole subject "
                f"({rule.destination!r}), so one such key may be in two partitions: use key=whole_subject"
            )
        missing = sorted(set(rule.hashed) - found)
        if missing:
            raise ConfigError(
                f"key=subject_token{tuple(tokens)}: the stream's partition() is also of the subject token(s) "
                f"{', '.join(map(str, missing))} ({rule.destination!r}, counted from 0), so one such key may be in two "
                "partitions: put them into the key"
            )


def read_partitioning(stream: str, config: Mapping[str, Any]) -> Partitioning:
    """How a stream with this configuration is divided. Raises ``ConfigError`` where it is not, with the remedy."""
    origins = config.get("sources") or ([config["mirror"]] if config.get("mirror") else [])
    own = config.get("subject_transform")
    if origins and own:
        raise ConfigError(
            f"stream {stream!r} has sources and a transform of its own: one of both has to make the partitions; use a "
            "stream that only sources it"
        )
    if origins:
        pairs = [pair for origin in origins for pair in origin.get("subject_transforms") or [{}]]
    else:
        pairs = [own] if own else []
    rules = tuple(_read_rule(stream, pair.get("src") or ">", pair.get("dest") or "") for pair in pairs)
    if not rules:
        raise ConfigError(
            f"stream {stream!r} has no transform with partition(), so a cohort cannot divide it: give it one such as "
            f'"orders.*" -> "{{{{partition({DEFAULT_PARTITIONS},1)}}}}.orders.{{{{wildcard(1)}}}}" before its first '
            "message, or pass create=CohortStream(…) to have lanes create a stream that sources it"
        )
    if len({rule.partitions for rule in rules}) > 1:
        raise ConfigError(
            f"stream {stream!r}: its transforms make {' and '.join(sorted({str(r.partitions) for r in rules}))} "
            "partitions: make them the same number"
        )
    uncovered = [
        subject
        for subject in config.get("subjects") or []
        if origins or not any(_covers(rule.source, subject) for rule in rules)
    ]
    if uncovered:
        raise ConfigError(
            f"stream {stream!r} also takes {', '.join(uncovered)}, which its transform leaves without a partition: "
            "nobody would get those messages; take these subjects out of the stream, or have the transform match them"
        )
    made = (config.get("metadata") or {}).get(MANAGED)
    choice: Choice = "sourced" if origins else "created" if made else "transform"
    return Partitioning(choice, rules[0].partitions, rules)


def _read_rule(stream: str, source: str, destination: str) -> Rule:
    tokens = _DOTS.split(destination)
    found: list[tuple[int, list[int]]] = []
    references: dict[int, int] = {}  # wildcard of the source -> token of the destination
    fixed = True
    for place, token in enumerate(tokens):
        name, arguments = _function(token)
        if name == "partition":
            found.append((place, arguments))
        reference = _reference(token)
        if reference is not None and fixed:
            references[reference] = place
        # The others may make several tokens of one, or one of a part.
        fixed = fixed and (name in ("", "partition", "wildcard")) and token != ">"
    if len(found) != 1 or not found[0][1] or found[0][1][0] < 1:
        raise ConfigError(
            f"stream {stream!r}: its transform {source!r} -> {destination!r} has {len(found) or 'no'} partition() that "
            "is understood, not one: a cohort needs exactly one, with the number of partitions as its first argument"
        )
    (place, (partitions, *hashed)) = found[0]
    for token in tokens[:place]:
        if "{{" in token and _reference(token) is None:
            raise ConfigError(
                f"stream {stream!r}: its transform {source!r} -> {destination!r} has {token} before partition(): no "
                "filter finds a partition behind a token that is not literal or {{wildcard(n)}}; move it behind "
                "partition(), or put partition() first"
            )
    lost = [str(wildcard) for wildcard in hashed if wildcard not in references]
    if lost:
        raise ConfigError(
            f"stream {stream!r}: its transform {source!r} -> {destination!r} gives wildcard(s) {', '.join(lost)} to "
            "partition() and does not keep them as tokens of their own: no key could include them; add "
            f"{{{{wildcard({lost[0]})}}}} to what is stored"
        )
    return Rule(
        source,
        destination,
        partitions,
        place,
        tuple(references[wildcard] for wildcard in hashed) if hashed else None,
        len(tokens) if fixed else None,
    )


def _function(token: str) -> tuple[str, list[int]]:
    """The function that a token of a destination is, in lower case, with those arguments that are numbers."""
    match = _FUNCTION.fullmatch(token)
    if match is None:
        return ("wildcard", [int(token[1:])]) if _DOLLAR.fullmatch(token) else ("", [])
    arguments = [argument.strip() for argument in (match[2] or "").split(",")]
    return match[1].lower(), [int(a) for a in arguments if a.isascii() and a.isdigit()]


def _reference(token: str) -> int | None:
    """Which wildcard of the source a token of the destination repeats."""
    name, arguments = _function(token)
    return arguments[0] if name == "wildcard" and arguments else None


def _covers(pattern: str, subject: str) -> bool:
    """Whether every subject that ``subject`` matches, ``pattern`` matches too."""
    wide, narrow = pattern.split("."), subject.split(".")
    for place, token in enumerate(wide):
        if token == ">":
            return len(narrow) > place
        if place >= len(narrow) or narrow[place] == ">" or (token != "*" and token != narrow[place]):
            return False
    return len(narrow) == len(wide)


class KeyWatch:
    """Sees that no key comes to this process in two partitions, for as many keys as ``limit``.

    With one more it says so, once, and forgets those that came first. What other members get it does not see: a key
    of theirs is compared once its partition has moved here.
    """

    def __init__(self, limit: int = KEYS_WATCHED) -> None:
        # By a hash of 64 bits: a key may be long, and two of so many with one hash are not to be expected.
        self._partitions: dict[int, int] = {}
        self._limit = limit
        self._forgets = False

    def see(self, key: bytes, partition: int) -> None:
        """A key came in this partition. Raises ``SourceError`` when it came in another one before."""
        known = self._partitions.setdefault(hash(key), partition)
        if known != partition:
            raise SourceError(
                f"key {key_hash(key)} came in the cohort partitions {known} and {partition}: its order cannot be kept; "
                "key_refines_partition=True does not hold for this key=…: use a key that includes every token given to "
                "partition()"
            )
        if len(self._partitions) > self._limit:
            if not self._forgets:
                self._forgets = True
                log.warning(
                    "key_refines_partition=True: more than %d keys have come; those that came first are forgotten from "
                    "now on, and nobody sees any more when one of them comes in another cohort partition",
                    self._limit,
                )
            del self._partitions[next(iter(self._partitions))]
