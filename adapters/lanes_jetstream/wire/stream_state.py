"""What a stream says of itself: which one it is, where it begins and ends, and what it does with its messages."""

from __future__ import annotations

from dataclasses import dataclass

from lanes.errors import ConfigError
from lanes_jetstream.wire.api_codes import STREAM_NOT_FOUND
from lanes_jetstream.wire.connection import ApiError, Connection


@dataclass(frozen=True, slots=True)
class StreamState:
    """``first``, ``last``: the sequences it has. ``incarnation``: its creation time.

    ``thins``: it drops single messages by design (one a subject, a time to live each, rollups), so one that is gone
    says nothing. ``forgets``: a server that is killed forgets what it was told last: one copy, on disk.
    """

    incarnation: str
    first: int
    last: int
    retention: str
    thins: bool
    forgets: bool


async def read_stream(connection: Connection, stream: str) -> StreamState:
    """Ask the server. Raises ``ConfigError`` for a stream that is not there, ``NoAnswer``, and ``SourceError``."""
    try:
        info = await connection.api(f"STREAM.INFO.{stream}")
    except ApiError as error:
        if error.err_code == STREAM_NOT_FOUND:
            raise ConfigError(
                f"stream {stream!r} does not exist at {connection.servers}: create it, or correct stream=…"
            ) from None
        raise connection.failed(f"stream {stream!r}", error) from None
    config, state = info["config"], info["state"]
    return StreamState(
        incarnation=str(info["created"]),
        first=int(state["first_seq"]),
        last=int(state["last_seq"]),
        retention=str(config.get("retention", "limits")),
        thins=any(config.get(name) for name in ("allow_rollup_hdrs", "allow_msg_ttl"))
        or int(config.get("max_msgs_per_subject", -1)) > 0,
        forgets=int(config.get("num_replicas", 1)) <= 1 and config.get("storage", "file") == "file",
    )
