"""Reads or creates a stream, and converts the start of a new consumer to configuration fields."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Literal

from lanes.arguments import check_aware, did_you_mean, shown_value
from lanes.clock import monotonic
from lanes.errors import ConfigError, SourceError
from lanes_jetstream.wire import codes
from lanes_jetstream.wire.answers import ApiError, read_pages
from lanes_jetstream.wire.connection import API_TIMEOUT, Connection, NoAnswer
from lanes_jetstream.wire.intake import Intake
from lanes_jetstream.wire.retention import NO_LIMITS, Limits

Start = Literal["beginning", "next"] | int | datetime
"""The first message of a new consumer: ``"beginning"``, ``"next"``, a stream sequence (1 or more), or an aware
``datetime``. A time selects the first message stored at that time or later. ``"next"`` selects the next published
message.
"""

OutOfRange = Literal["fail", "earliest"]
"""The policy for messages that the stream dropped before their delivery."""


_NAME: Final = re.compile(r"[^\s.*>/\\]+")
"""The valid names of streams and durables."""

START_PATIENCE: Final = 15.0
"""Seconds at a start during which the source requests a stream without a leader again. Another process may be creating
the stream, and the servers of a cluster elect the leader of a new stream.
"""

_RETRY_DELAY: Final = 0.05
"""Seconds until a repeated request for a stream without a leader, or with a name that another stream has."""


@dataclass(frozen=True, slots=True)
class StreamState:
    """The identity and the range of a stream.

    Attributes:
        incarnation: Creation time of the stream.
        first: Sequence of the first message.
        last: Sequence of the last message.
        retention: Retention of the stream.
        drops_single_messages: Whether the stream drops single messages by design (one message a subject, a time to live
            for each message, rollups). The source then accepts missing messages.
        loses_last_acks: Whether a killed server loses the last acknowledgements, because the only copy is on disk.
        intake: Subjects that the stream stores.
        limits: Limits and size of the stream.
    """

    incarnation: str
    first: int
    last: int
    retention: str
    drops_single_messages: bool
    loses_last_acks: bool
    intake: Intake
    limits: Limits = NO_LIMITS


def check_name(setting: str, name: object) -> None:
    """Raise ``ConfigError`` for an invalid name of a stream or a durable."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"{setting}={shown_value(name)}: must be a name without blanks, dots, slashes and wildcards")


async def read_stream(connection: Connection, stream: str, *, option: str = "stream=…") -> StreamState:
    """Read the state of a stream. ``option`` is the argument that names the stream, for an error.

    Raises ``ConfigError`` for a missing stream, ``NoAnswer`` without an answer, and ``SourceError`` for a refusal.
    """
    try:
        info = await connection.find(f"STREAM.INFO.{stream}", codes.STREAM_NOT_FOUND)
    except ApiError as error:
        raise connection.failed(f"stream {stream!r}", error) from None
    if info is None:
        raise ConfigError(
            f"stream {stream!r} does not exist at {connection.servers}; create it, or correct "
            f"{option}{await similar_stream(connection, stream)}"
        )
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
        limits=Limits.of(config, state),
    )


async def similar_stream(connection: Connection, stream: str) -> str:
    """Return a "did you mean" text about streams with names like a missing stream.

    Returns "" if no similar stream exists, or if this client may not list the streams.
    """
    try:
        names = await read_pages(connection.api, "STREAM.NAMES", "streams")
    except (ApiError, NoAnswer, SourceError):
        return ""
    return did_you_mean(stream, map(str, names))


async def find_or_create(
    connection: Connection, stream: str, config: Mapping[str, Any], *, what: str, remedy: str, patience: float = 0.0
) -> tuple[dict[str, Any], bool]:
    """Find a stream, or create it.

    Args:
        connection: Connection to the server.
        stream: Name of the stream.
        config: Configuration of the stream if the call creates it.
        what: Name of the stream or bucket, for errors.
        remedy: Remedy in the error for a refused creation.
        patience: Seconds for which the call retries temporary errors.

    Returns:
        The server's description of the stream, and whether this call created the stream.

    Raises:
        ApiError: The server refused to describe the stream, or the stream has no leader.
        ConfigError: The server refused to create the stream.
        NoAnswer: The server did not answer. For ``API_TIMEOUT`` seconds, the server did not find the stream, but
            reported its name as taken.
    """
    began = monotonic()
    while True:
        try:
            info = await connection.find(f"STREAM.INFO.{stream}", codes.STREAM_NOT_FOUND)
            if info is not None:
                return info, False
            return await _create(connection, stream, config, what=what, remedy=remedy), True
        except (ApiError, NoAnswer) as error:
            failure = error
        if isinstance(failure, ApiError) and failure.err_code == codes.STREAM_NAME_TAKEN:
            # Another client has created the stream meanwhile. A cluster reserves the name before the stream exists.
            patience = max(patience, API_TIMEOUT)
            failure = NoAnswer(
                f"{connection.servers}: the server cannot find the stream {stream!r}, although its name is taken; "
                "check that the servers of the cluster reach each other"
            )
        if not failure.temporary or monotonic() - began > patience:
            raise failure
        await asyncio.sleep(_RETRY_DELAY)


async def _create(
    connection: Connection, stream: str, config: Mapping[str, Any], *, what: str, remedy: str
) -> dict[str, Any]:
    """Create a stream. Raises ``ApiError`` for a taken name and a missing leader, ``ConfigError`` for a refusal."""
    try:
        return await connection.api(f"STREAM.CREATE.{stream}", config)
    except ApiError as error:
        if error.err_code in (codes.STREAM_NAME_TAKEN, codes.NO_LEADER):
            raise
        raise ConfigError(f"{what} cannot be created: {error}; {remedy}") from None


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
        f'start={shown_value(start)} is invalid; use "beginning", "next", a stream sequence of 1 or more, or an aware '
        "datetime"
    )
