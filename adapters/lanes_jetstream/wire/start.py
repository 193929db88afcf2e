"""Where a consumer begins that is made here: decided once, when it is made."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Literal

from lanes.config import check_aware
from lanes.errors import ConfigError

Start = Literal["beginning", "next"] | int | datetime
"""``"beginning"`` of the stream, the ``"next"`` message that is published, a stream sequence (1 or more), or an aware
``datetime``: the first message stored then or later."""


def start_fields(start: object) -> dict[str, Any]:
    """The fields of a consumer's configuration for it. Raises ``ConfigError`` for what is none."""
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
    raise ConfigError(f'start={start!r}: use "beginning", "next", a stream sequence of 1 or more, or an aware datetime')
