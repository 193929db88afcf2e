"""A stream as a consumer needs it: its state, where a new consumer begins, and the policy for dropped messages."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from lanes.config import check_aware
from lanes.errors import ConfigError
from lanes_jetstream.wire.connection import STREAM_NOT_FOUND, ApiError, Connection

Start = Literal["beginning", "next"] | int | datetime
"""Where a consumer that is created here begins: ``"beginning"``, ``"next"``, a stream sequence (1 or more), or an aware
``datetime``. A time means the first message stored then or later; ``"next"`` means the next published message.
"""

OutOfRange = Literal["fail", "earliest"]
"""What to do when the stream dropped messages before they were delivered."""


@dataclass(frozen=True, slots=True)
class StreamState:
    """The identity and the range of a stream.

    ``incarnation`` is its creation time; ``first`` and ``last`` are its sequences. ``drops_single_messages``: it drops
    single messages by design (one a subject, a time to live each, rollups), so a missing message means nothing.
    ``loses_last_acks``: a server that is killed loses the last acknowledgements, because there is one copy, on disk.
    """

    incarnation: str
    first: int
    last: int
    retention: str
    drops_single_messages: bool
    loses_last_acks: bool


async def read_stream(connection: Connection, stream: str) -> StreamState:
    """Ask the server for the state. Raises ``ConfigError`` for a missing stream, ``NoAnswer``, and ``SourceError``."""
    try:
        info = await connection.api(f"STREAM.INFO.{stream}")
    except ApiError as error:
        if error.err_code == STREAM_NOT_FOUND:
            raise ConfigError(
                f"stream {stream!r} does not exist at {connection.servers}; create it, or correct stream=…"
            ) from None
        raise connection.failed(f"stream {stream!r}", error) from None
    config, state = info["config"], info["state"]
    return StreamState(
        incarnation=str(info["created"]),
        first=int(state["first_seq"]),
        last=int(state["last_seq"]),
        retention=str(config.get("retention", "limits")),
        drops_single_messages=any(config.get(name) for name in ("allow_rollup_hdrs", "allow_msg_ttl"))
        or int(config.get("max_msgs_per_subject", -1)) > 0,
        loses_last_acks=int(config.get("num_replicas", 1)) <= 1 and config.get("storage", "file") == "file",
    )


def start_fields(start: object) -> dict[str, Any]:
    """The configuration fields for a start. Raises ``ConfigError`` for anything else."""
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
