"""A stream's state, the start of a new consumer, and the policy for messages that the stream dropped."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Literal

from lanes.clock import monotonic
from lanes.config import check_aware
from lanes.errors import ConfigError
from lanes_jetstream.wire import codes
from lanes_jetstream.wire.connection import API_TIMEOUT, ApiError, Connection, NoAnswer

Start = Literal["beginning", "next"] | int | datetime
"""The first message of a new consumer: ``"beginning"``, ``"next"``, a stream sequence (1 or more), or an aware
``datetime``. A time selects the first message stored at that time or later. ``"next"`` selects the next published
message.
"""

OutOfRange = Literal["fail", "earliest"]
"""The policy for messages that the stream dropped before their delivery."""


_RETRY_DELAY: Final = 0.05
"""Seconds until a stream whose name is taken is requested again."""


@dataclass(frozen=True, slots=True)
class Intake:
    """The subjects that a stream stores.

    Attributes:
        patterns: Patterns of subjects by the name of the stream that they are published to: the stream itself, its
            origin as a mirror, or one of its sources.
        transforms: Whether the stream changes subjects.
    """

    patterns: Mapping[str, Sequence[str]]
    transforms: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Intake:
        """Make the intake of a stream with this configuration."""
        patterns = {str(config["name"]): list(config.get("subjects") or ())}
        transforms = bool(config.get("subject_transform"))
        for origin in (config.get("mirror"), *(config.get("sources") or ())):
            # An origin of another account or domain has a name that means nothing here.
            if origin and not origin.get("external"):
                changes = origin.get("subject_transforms") or ()
                transforms = transforms or bool(changes)
                taken = [each.get("src") or ">" for each in changes] or [origin.get("filter_subject") or ">"]
                patterns.setdefault(str(origin["name"]), []).extend(taken)
        return cls(patterns, transforms)

    def stores(self, stream: str, subject: str) -> bool:
        """Return whether the stream stores messages that are published to a subject of a stream."""
        return any(matches(each, subject) for each in self.patterns.get(stream, ()))


@dataclass(frozen=True, slots=True)
class StreamState:
    """The identity and the range of a stream.

    Attributes:
        incarnation: Creation time of the stream.
        first: Sequence of the first message.
        last: Sequence of the last message.
        retention: Retention of the stream.
        drops_single_messages: Whether the stream drops single messages by design (one message a subject, a time to
            live for each message, rollups), so that a missing message is no fault.
        loses_last_acks: Whether a server that is killed loses the last acknowledgements, because only one copy exists,
            on disk.
        intake: Subjects that the stream stores.
    """

    incarnation: str
    first: int
    last: int
    retention: str
    drops_single_messages: bool
    loses_last_acks: bool
    intake: Intake


async def read_stream(connection: Connection, stream: str) -> StreamState:
    """Read the state of a stream.

    Raises ``ConfigError`` for a missing stream, ``NoAnswer`` without an answer, and ``SourceError`` for a refusal.
    """
    try:
        info = await connection.find(f"STREAM.INFO.{stream}", codes.STREAM_NOT_FOUND)
    except ApiError as error:
        raise connection.failed(f"stream {stream!r}", error) from None
    if info is None:
        raise ConfigError(f"stream {stream!r} does not exist at {connection.servers}; create it, or correct stream=…")
    config, state = info["config"], info["state"]
    return StreamState(
        incarnation=str(info["created"]),
        first=int(state["first_seq"]),
        last=int(state["last_seq"]),
        retention=str(config.get("retention", "limits")),
        drops_single_messages=any(config.get(name) for name in ("allow_rollup_hdrs", "allow_msg_ttl"))
        or int(config.get("max_msgs_per_subject", -1)) > 0,
        loses_last_acks=int(config.get("num_replicas", 1)) <= 1 and config.get("storage", "file") == "file",
        intake=Intake.of(config),
    )


async def find_or_create(
    connection: Connection, stream: str, config: Mapping[str, Any], *, what: str, remedy: str
) -> tuple[dict[str, Any], bool]:
    """Find a stream, or create it.

    Args:
        connection: Connection to the server.
        stream: Name of the stream.
        config: Configuration of the stream if the call creates it.
        what: Name of the stream or bucket, for errors.
        remedy: Remedy in the error for a refused creation.

    Returns:
        The server's description of the stream, and whether this call created the stream.

    Raises:
        ApiError: The server refused to describe the stream.
        ConfigError: The server refused to create the stream.
        NoAnswer: The server did not answer, or contradicted itself for ``API_TIMEOUT`` seconds.
    """
    give_up = monotonic() + API_TIMEOUT
    while True:
        info = await connection.find(f"STREAM.INFO.{stream}", codes.STREAM_NOT_FOUND)
        if info is not None:
            return info, False
        try:
            return await connection.api(f"STREAM.CREATE.{stream}", config), True
        except ApiError as error:
            if error.err_code != codes.STREAM_NAME_TAKEN:
                raise ConfigError(f"{what} cannot be created: {error}; {remedy}") from None
        # Another client created the stream in the meantime. A cluster reserves the name before the stream exists.
        if monotonic() > give_up:
            raise NoAnswer(
                f"{connection.servers}: the server neither finds nor creates the stream {stream!r}, whose name is "
                "taken; check that the servers of the cluster reach each other"
            )
        await asyncio.sleep(_RETRY_DELAY)


def matches(pattern: str, subject: str) -> bool:
    """Return whether a pattern with wildcards matches a subject without wildcards."""
    wanted, found = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted = wanted[:-1]
        if len(found) <= len(wanted):
            return False
        found = found[: len(wanted)]
    return len(wanted) == len(found) and all(one in ("*", other) for one, other in zip(wanted, found, strict=True))


def is_subject(subject: object) -> bool:
    """Return whether a value is a subject, which may have wildcards."""
    if not isinstance(subject, str) or any(c.isspace() for c in subject):
        return False
    tokens = subject.split(".")
    return all(tokens) and ">" not in tokens[:-1]


def start_fields(start: object) -> dict[str, Any]:
    """Return the fields of a consumer's configuration for a start. Raises ``ConfigError`` for an invalid start."""
    if start == "beginning":
        return {"deliver_policy": "all"}
    if start == "next":
        return {"deliver_policy": "new"}
    if isinstance(start, int) and not isinstance(start, bool) and 1 <= start < 1 << 64:
        return {"deliver_policy": "by_start_sequence", "opt_start_seq": start}
    if isinstance(start, datetime):
        check_aware("start", start)
        moment = start.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        return {"deliver_policy": "by_start_time", "opt_start_time": moment}
    raise ConfigError(
        f'start={start!r} is invalid; use "beginning", "next", a stream sequence of 1 or more, or an aware datetime'
    )
