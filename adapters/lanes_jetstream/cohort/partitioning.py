"""Reads and checks how the server's ``partition()`` divides a stream by subject tokens.

The stream has a transform with ``partition()``, or sources another stream through such a transform. A user or ``lanes``
creates the stream. ``lanes`` never changes the transform of an existing stream. The member always reads the
partitioning from the server, because the server decides the partition of each message.

A cohort over a partitioned queue needs no partitioning by the server: each physical queue is one cohort partition.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from lanes.errors import ConfigError, SourceError
from lanes.history.writer import key_hash
from lanes.queues.partitioned import PartitionedQueue
from lanes_jetstream.wire.intake import Intake
from lanes_jetstream.wire.keys import KeyFunction, SubjectTokens, whole_subject
from lanes_jetstream.wire.queue_subjects import check_stream, subjects_of
from lanes_jetstream.wire.subjects import covers
from lanes_jetstream.wire.transforms import destination_tokens, function_of, wildcard_of

log = logging.getLogger("lanes.jetstream")

Choice = Literal["transform", "created", "sourced", "queue"]

MANAGED: Final = "lanes-cohort-stream"
"""Metadata key of a stream that ``lanes`` created for a cohort."""

DEFAULT_PARTITIONS: Final = 64
MOST_PARTITIONS: Final = 256
"""Recommended maximum number of partitions. With 256 consumers the throughput is half the throughput with 64."""

KEYS_WATCHED: Final = 100_000
"""Number of keys whose partition a ``KeyWatch`` remembers, in about 10 MB of memory."""


def partition_of(tokens: Iterable[str], partitions: int) -> int:
    """Compute the partition that the server's ``partition()`` selects, by the 32-bit FNV-1a hash of the tokens."""
    value = 0x811C9DC5
    for byte in "".join(tokens).encode():
        value = (value ^ byte) * 0x01000193 & 0xFFFFFFFF
    return value % partitions


@dataclass(frozen=True, slots=True)
class Rule:
    """One subject transform of a stream, with one ``partition()``.

    Attributes:
        source: Pattern of the published subjects.
        destination: Pattern of the stored subjects.
        partitions: Number of partitions.
        partition_token: Index of the stored token that holds the partition.
        hashed: Indices of the stored tokens that ``partition()`` hashes; None = the whole subject.
        length: Number of stored tokens; None = any number.
    """

    source: str
    destination: str
    partitions: int
    partition_token: int
    hashed: tuple[int, ...] | None
    length: int | None

    def filter(self, partition: int) -> str:
        """Return the pattern of the stored subjects of one partition."""
        tokens = destination_tokens(self.destination)
        before = ["*" if wildcard_of(token) is not None else token for token in tokens[: self.partition_token]]
        return ".".join([*before, str(partition), *([">"] if len(tokens) > self.partition_token + 1 else [])])


@dataclass(frozen=True, slots=True)
class Partitioning:
    """The partitioning of a stream. All ``rules`` have the same number of partitions."""

    choice: Choice
    partitions: int
    rules: tuple[Rule, ...]

    def filters(self, partition: int) -> list[str]:
        """Return the patterns of the stored subjects of one partition, without duplicates."""
        return list(dict.fromkeys(rule.filter(partition) for rule in self.rules))

    @property
    def hashed(self) -> tuple[int, ...]:
        """Indices of the stored tokens that ``partition()`` hashes in any rule, sorted."""
        return tuple(sorted({token for rule in self.rules for token in rule.hashed or ()}))

    @property
    def detail(self) -> str:
        """The rules as text. Members compare this text, so it must not change while the cohort exists."""
        return "; ".join(f"{rule.source} -> {rule.destination}" for rule in self.rules)

    def check_key(self, key: KeyFunction | None, *, refines: bool) -> bool:
        """Check that each key occurs in one partition only.

        Args:
            key: The key function; None = no keys.
            refines: Whether the user promises that each key occurs in one partition only.

        Returns:
            Whether the member must check the key of each message, because only the user's promise keeps a key in one
            partition.

        Raises:
            ConfigError: A key may occur in two partitions.
        """
        if key is None or key is whole_subject:
            return False
        tokens: tuple[int, ...] | None = getattr(key, "tokens", None)
        if tokens is None:
            if refines:
                return True
            name = getattr(key, "__name__", type(key).__name__)
            raise ConfigError(
                f"key={name}: the server partitions by subject tokens, so this key may occur in two partitions; use "
                "subject_token(…) with every token of partition(), or Cohort(…, key_refines_partition=True)"
            )
        for rule in self.rules:
            self._check_tokens(rule, tokens)
        return False

    def check_unchanged(self, stream: str, retention: str, config: Mapping[str, Any]) -> None:
        """Raise ``ConfigError`` if the stream no longer has this partitioning and the given retention."""
        changed = _changed(stream)
        remedy = (
            "so a key may be in two partitions. Change the stream back, and start again; docs/reference/jetstream.md "
            'has the steps to another partitioning ("The partition count has to change")'
        )
        try:
            now = read_partitioning(stream, config)
        except ConfigError as error:
            raise ConfigError(f"{changed} and is no longer divided by {self.detail}, {remedy}; {error}") from None
        if set(now.rules) != set(self.rules):
            raise ConfigError(f"{changed}, from {self.detail} to {now.detail}, {remedy}")
        check_retention(stream, retention, config)

    def _check_tokens(self, rule: Rule, tokens: Sequence[int]) -> None:
        if any(token < 0 for token in tokens) and rule.length is None:
            raise ConfigError(
                f"key={SubjectTokens(tuple(tokens))!r}: the length of {rule.destination!r} varies, so an index from "
                "its end may mean different tokens; count from the beginning"
            )
        found = {token if token >= 0 else (rule.length or 0) + token for token in tokens}
        if rule.hashed is None:
            raise ConfigError(
                f"key={SubjectTokens(tuple(tokens))!r}: the stream's partition() hashes the whole subject "
                f"({rule.destination!r}), so one key may occur in two partitions; use key=whole_subject"
            )
        missing = sorted(set(rule.hashed) - found)
        if missing:
            # A key without any hashed token is probably a mistake of the user, such as the token with the partition
            # number.
            some = len(missing) < len(set(rule.hashed))
            remedy = "add these tokens to the key" if some else f"use {SubjectTokens(rule.hashed)!r}"
            raise ConfigError(
                f"key={SubjectTokens(tuple(tokens))!r}: the stream's partition() also hashes the subject token(s) "
                f"{', '.join(map(str, missing))} ({rule.destination!r}, counted from 0), so one key may occur in two "
                f"partitions; {remedy}"
            )


@dataclass(frozen=True, slots=True)
class QueuePartitioning:
    """The partitioning of a stream by the subjects of a partitioned queue; see ``Partitioning``.

    The producers choose the partition of each message by the routing key.
    """

    queue: PartitionedQueue
    choice: Choice = "queue"
    hashed: tuple[int, ...] = ()

    @property
    def partitions(self) -> int:
        """Number of cohort partitions."""
        return self.queue.partitions

    def filters(self, partition: int) -> Sequence[str]:
        """Return the patterns of the subjects of one partition."""
        return subjects_of(self.queue.names[partition])

    @property
    def detail(self) -> str:
        """The queue as text, which ``divides`` reads.

        Members compare this text, so it must not change while the cohort exists.
        """
        return repr(self.queue)

    def check_key(self, key: KeyFunction | None, *, refines: bool) -> bool:
        """Accept any key; see ``Partitioning.check_key``. Returns ``refines`` for a key function."""
        return refines and key is not None

    def check_unchanged(self, stream: str, retention: str, config: Mapping[str, Any]) -> None:
        """Raise ``ConfigError`` if the stream no longer stores the queue, or has another retention."""
        check_stream(self.queue, stream, Intake.of(config))
        check_retention(stream, retention, config)


def divides(detail: str, queue: str) -> bool:
    """Return whether ``detail`` begins with the text of a partitioning by the queue of this name."""
    return detail.startswith((f"PartitionedQueue({queue!r}, ", f"PartitionedQueue.of({queue!r}, "))


def check_retention(stream: str, retention: str, config: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` if a stream no longer has this retention."""
    if config.get("retention") != retention:
        raise ConfigError(
            f"{_changed(stream)}, from retention {retention} to {config.get('retention')}, which moves partitions "
            "differently; change the retention back, and start again"
        )


def _changed(stream: str) -> str:
    return f"stream {stream!r} was changed while the cohort used it"


def read_partitioning(stream: str, config: Mapping[str, Any]) -> Partitioning:
    """Read the partitioning from a stream's configuration. Raises ``ConfigError`` if it is missing or invalid."""
    origins = config.get("sources") or ([config["mirror"]] if config.get("mirror") else [])
    own = config.get("subject_transform")
    if origins and own:
        raise ConfigError(
            f"stream {stream!r} has sources and its own transform, but only one of them may make partitions; use "
            "another stream that only sources this stream"
        )
    if origins:
        pairs = [pair for origin in origins for pair in origin.get("subject_transforms") or [{}]]
    else:
        pairs = [own] if own else []
    rules = tuple(_read_rule(stream, pair.get("src") or ">", pair.get("dest") or "") for pair in pairs)
    if not rules:
        raise ConfigError(
            f"stream {stream!r} has no transform with partition(), so a cohort cannot divide it. Add a transform such "
            f'as "orders.*" -> "{{{{partition({DEFAULT_PARTITIONS},1)}}}}.orders.{{{{wildcard(1)}}}}" before its first '
            "message. Or set stream= to the name of a new stream, and pass create=CohortStream(…, "
            f"origin={stream!r}) to create the new stream as a copy of this stream"
        )
    if len({rule.partitions for rule in rules}) > 1:
        raise ConfigError(
            f"stream {stream!r}: its transforms make {' and '.join(sorted({str(r.partitions) for r in rules}))} "
            "partitions; give all transforms the same number"
        )
    uncovered = [
        subject
        for subject in config.get("subjects") or []
        if origins or not any(covers(rule.source, subject) for rule in rules)
    ]
    if uncovered:
        raise ConfigError(
            f"stream {stream!r} also stores {', '.join(uncovered)}, which its transform leaves without a partition, "
            "so no member would receive them; remove these subjects from the stream, or extend the transform to them"
        )
    made = (config.get("metadata") or {}).get(MANAGED)
    choice: Choice = "sourced" if origins else "created" if made else "transform"
    return Partitioning(choice, rules[0].partitions, rules)


def _read_rule(stream: str, source: str, destination: str) -> Rule:
    tokens = destination_tokens(destination)
    found: list[tuple[int, list[int]]] = []
    references: dict[int, int] = {}  # wildcard of the source -> token of the destination
    fixed = True
    for place, token in enumerate(tokens):
        name, arguments = function_of(token)
        if name == "partition":
            found.append((place, arguments))
        reference = wildcard_of(token)
        if reference is not None and fixed:
            references[reference] = place
        # Other functions may split a token, or use a part of a token.
        fixed = fixed and (name in ("", "partition", "wildcard")) and token != ">"
    if len(found) != 1 or not found[0][1] or found[0][1][0] < 1:
        raise ConfigError(
            f"stream {stream!r}: its transform {source!r} -> {destination!r} has {len(found) or 'no'} valid "
            "partition(); use exactly one, with the number of partitions as its first argument"
        )
    (place, (partitions, *hashed)) = found[0]
    for token in tokens[:place]:
        if "{{" in token and wildcard_of(token) is None:
            raise ConfigError(
                f"stream {stream!r}: its transform {source!r} -> {destination!r} has {token} before partition(), "
                f"where filters need literal tokens or {{{{wildcard(n)}}}}; put partition() first"
            )
    lost = [str(wildcard) for wildcard in hashed if wildcard not in references]
    if lost:
        raise ConfigError(
            f"stream {stream!r}: its transform {source!r} -> {destination!r} gives wildcard(s) {', '.join(lost)} to "
            f"partition() but does not store them, so a key cannot include them; add {{{{wildcard({lost[0]})}}}} to "
            "the destination"
        )
    return Rule(
        source,
        destination,
        partitions,
        place,
        tuple(references[wildcard] for wildcard in hashed) if hashed else None,
        len(tokens) if fixed else None,
    )


class KeyWatch:
    """Checks that each key arrives in only one partition of this process. The check stores up to ``limit`` keys.

    Above ``limit`` keys, the check warns once, and discards the oldest key for each new key. The check sees no keys of
    another member's partitions until these partitions move to this process.
    """

    def __init__(self, limit: int = KEYS_WATCHED) -> None:
        # Store a 64-bit hash of each key, because a key may be long. A collision among 100,000 keys is very unlikely.
        self._partitions: dict[int, int] = {}
        self._limit = limit
        self._forgets = False

    def see(self, key: bytes, partition: int) -> None:
        """Record the partition of a key. Raises ``SourceError`` if the key has arrived in a different partition."""
        known = self._partitions.setdefault(hash(key), partition)
        if known != partition:
            raise SourceError(
                f"key {key_hash(key)} arrived in cohort partitions {known} and {partition}, so its order cannot be "
                "kept and key_refines_partition=True does not hold; use a key that includes every token given to "
                "partition()"
            )
        if len(self._partitions) > self._limit:
            if not self._forgets:
                self._forgets = True
                log.warning(
                    "key_refines_partition=True: more than %d keys arrived, so the check forgets the oldest keys; "
                    "a forgotten key in another cohort partition is not detected; use key=subject_token(…) if possible",
                    self._limit,
                )
            del self._partitions[next(iter(self._partitions))]
