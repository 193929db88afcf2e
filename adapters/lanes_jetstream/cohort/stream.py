"""A stream that ``lanes`` creates for a cohort: one that takes subjects itself, or one that sources another stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lanes.errors import ConfigError
from lanes_jetstream.cohort.partitioning import MANAGED, Partitioning, read_partitioning
from lanes_jetstream.wire.api_codes import STREAM_NAME_TAKEN, STREAM_NOT_FOUND
from lanes_jetstream.wire.connection import ApiError, Connection

__all__ = ["CohortStream", "ensure_stream"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CohortStream:
    """How to create the stream of a cohort, where there is none of its name.

    ``subject``: the pattern that messages are published to, such as ``"orders.*.>"``. ``tokens``: which tokens of that,
    counted from 0, make the partition; each must be a ``*``. None = the whole subject, which behind a ``>`` needs a
    server of 2.12. ``origin``: the stream to source such messages from; None = the stream takes them itself.
    ``retention``: ``"workqueue"`` = a message goes when it is finished. ``replicas``: 1 … 5. ``storage``: ``"file"`` or
    ``"memory"``.

    What is stored, and seen by handlers and by ``key=``, has the partition as its first token: ``orders.42.paid``
    becomes ``17.orders.42.paid``, so its customer is ``subject_token(2)``.
    """

    subject: str
    tokens: tuple[int, ...] | None = None
    origin: str | None = None
    retention: Literal["limits", "workqueue", "interest"] = "workqueue"
    replicas: int = 1
    storage: Literal["file", "memory"] = "file"

    def __post_init__(self) -> None:
        parts = self.subject.split(".")
        if not all(parts) or any(c.isspace() for c in self.subject) or ">" in parts[:-1]:
            raise ConfigError(
                f"CohortStream(subject={self.subject!r}): must be a subject; * and a last > are wildcards"
            )
        if "*" not in parts and ">" not in parts:
            raise ConfigError(f"CohortStream(subject={self.subject!r}): without a wildcard all of it is one partition")
        if isinstance(self.tokens, str | int) or self.tokens == ():
            raise ConfigError(f"CohortStream(tokens={self.tokens!r}): pass a tuple of numbers such as (1,), or None")
        for token in self.tokens or ():
            if not 0 <= token < len(parts) or parts[token] != "*":
                raise ConfigError(f"CohortStream(tokens={self.tokens!r}): token {token} of {self.subject!r} is no *")
        if not 1 <= self.replicas <= 5:
            raise ConfigError(f"CohortStream(replicas={self.replicas}): must be 1 … 5")

    def transform(self, partitions: int) -> dict[str, str]:
        """The server's transform from what is published to what is stored."""
        parts = self.subject.split(".")
        stars = [place for place, part in enumerate(parts) if part == "*"]
        hashed = stars if self.tokens is None else list(self.tokens)
        # Of the whole subject where it has no fixed length; else its wildcards say as much.
        numbers = [] if self.tokens is None and parts[-1] == ">" else [stars.index(place) + 1 for place in hashed]
        stored = [
            f"{{{{wildcard({stars.index(place) + 1})}}}}" if place in stars else parts[place]
            for place in range(len(parts))
        ]
        arguments = ",".join(map(str, [partitions, *numbers]))
        return {"src": self.subject, "dest": ".".join([f"{{{{partition({arguments})}}}}", *stored])}

    def config(self, name: str, partitions: int) -> dict[str, Any]:
        """What the server is asked to create."""
        config: dict[str, Any] = {
            "name": name,
            "retention": self.retention,
            "storage": self.storage,
            "num_replicas": self.replicas,
            "discard": "old",
            "metadata": {MANAGED: "1"},
        }
        transform = self.transform(partitions)
        if self.origin is None:
            return config | {"subjects": [self.subject], "subject_transform": transform}
        return config | {"sources": [{"name": self.origin, "subject_transforms": [transform]}]}


async def ensure_stream(
    connection: Connection, stream: str, create: CohortStream | None, partitions: int
) -> tuple[Partitioning, Mapping[str, Any]]:
    """Find the stream, or create it, and read how it is divided; with the server's own description of the stream.

    ``partitions``: of a stream that is created. Raises ``ConfigError`` for a stream that does not fit, ``SourceError``
    for what the server refuses, ``NoAnswer``.
    """
    try:
        info = await _find(connection, stream)
        if info is None and create is not None:
            info = await _create(connection, stream, create.config(stream, partitions))
    except ApiError as error:
        raise connection.failed(f"stream {stream!r}", error) from None
    if info is None:
        raise ConfigError(
            f"stream {stream!r} does not exist at {connection.servers}: create it, correct stream=…, or pass "
            "create=CohortStream(…)"
        )
    partitioning = read_partitioning(stream, info["config"])
    if create is not None:
        wanted = read_partitioning(stream, create.config(stream, partitioning.partitions))
        if wanted.rules != partitioning.rules:
            raise ConfigError(
                f"stream {stream!r} exists and is divided by {partitioning.detail}, not by {wanted.detail} as "
                "create=CohortStream(…) says: correct that, or name another stream"
            )
    return partitioning, info


async def _find(connection: Connection, stream: str) -> dict[str, Any] | None:
    try:
        return await connection.api(f"STREAM.INFO.{stream}")
    except ApiError as error:
        if error.err_code != STREAM_NOT_FOUND:
            raise
    return None


async def _create(connection: Connection, stream: str, config: Mapping[str, Any]) -> dict[str, Any] | None:
    try:
        return await connection.api(f"STREAM.CREATE.{stream}", config)
    except ApiError as error:
        if error.err_code != STREAM_NAME_TAKEN:
            raise ConfigError(
                f"stream {stream!r} cannot be created: {error}; correct create=CohortStream(…), or create the stream "
                "yourself"
            ) from None
    # Another member was faster.
    return await _find(connection, stream)
