"""The JSON of a view: counts, positions and ages, and no key, payload or text of an exception.

The field ``version`` increases with each incompatible change of the format. A new field does not change the version.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from heapq import nlargest
from typing import Any, Final

from lanes.dead_letter import printable
from lanes.history.writer import key_hash
from lanes.observe.status import PartitionStatus, Status
from lanes.web.board import STILL, Board, View

VERSION: Final = 1
"""Version of the format of ``/status``."""

SHOWN_PARTITIONS: Final = 100
"""Maximum number of partitions in a snapshot for the page."""


def page_of(board: Board, *, show_keys: bool, operate: bool, lines: Sequence[str]) -> dict[str, Any]:
    """Return a snapshot for the page.

    Args:
        board: The board of the consumer.
        show_keys: Whether to show keys in addition to their hashes.
        operate: Whether the server accepts commands.
        lines: The last lines of the log, the newest first.

    Returns:
        The content of ``/status`` with at most ``SHOWN_PARTITIONS`` partitions: the partitions with the oldest
        messages.
    """
    view = board.view
    status = view.status
    found: dict[str, Any] = {"lag": None, "partition_count": 0}
    if status is not None:
        lags = [each.lag for each in status.partitions.values() if each.lag is not None]
        found = {
            "lag": sum(lags) if len(lags) == len(status.partitions) else None,
            "partition_count": len(status.partitions),
        }
        shown = nlargest(SHOWN_PARTITIONS, status.partitions.items(), key=lambda item: _attention(item[1]))
        status = replace(status, partitions=dict(shown), floors={})
    return {
        **_content(board, status, show_keys=show_keys),
        **found,
        "at": round(view.taken, 3),
        "operate": operate,
        "events": list(lines),
    }


def _attention(partition: PartitionStatus) -> tuple[float, int]:
    """Return a sort key, by which the page shows first the partitions that need attention."""
    return -1.0 if partition.oldest is None else partition.oldest.age, partition.lag or 0


def status_of(board: Board, *, show_keys: bool) -> dict[str, Any]:
    """Return the content of ``/status``.

    Args:
        board: The board of the consumer.
        show_keys: Whether to show keys in addition to their hashes.

    Returns:
        An object that ``json`` can write.
    """
    return _content(board, board.view.status, show_keys=show_keys)


def _content(board: Board, status: Status | None, *, show_keys: bool) -> dict[str, Any]:
    view = board.view
    return {
        "version": VERSION,
        "name": view.name,
        "age": round(board.age, 3),
        "loop_silent": round(board.silent, 3),
        "live": reason_not_live(board) is None,
        "ready": board.ready,
        "active": view.active,
        "draining": board.draining,
        **_health(view),
        "status": None if status is None else plain(status, show_keys=show_keys),
        "stopped": plain(view.stopped, show_keys=show_keys),
    }


def reason_not_live(board: Board) -> str | None:
    """Return the reason why a restart of the process would help; None = no restart is needed."""
    if board.failure is not None:
        return f"the consumer was stopped by {type(board.failure).__qualname__}"
    if board.silent >= STILL:
        return f"the event loop has not answered for {board.silent:.1f} s"
    return None


def written(value: Mapping[str, Any]) -> bytes:
    """Return the JSON text of an object."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def plain(value: Any, *, show_keys: bool) -> Any:
    """Return a status, or a part of a status, as objects that ``json`` can write.

    Args:
        value: The status or its part.
        show_keys: Whether to show keys in addition to their hashes.

    Returns:
        The objects. The result contains the field ``key_hash`` for each field ``key``, and the field ``key`` itself
        only with ``show_keys``.
    """
    if is_dataclass(value) and not isinstance(value, type):
        made: dict[str, Any] = {}
        for field in fields(value):
            inner = getattr(value, field.name)
            if field.name != "key":
                made[field.name] = plain(inner, show_keys=show_keys)
                continue
            made["key_hash"] = None if inner is None else key_hash(inner)
            if show_keys:
                made["key"] = None if inner is None else key_text(inner)
        return made
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: plain(inner, show_keys=show_keys) for name, inner in value._asdict().items()}
    if isinstance(value, Mapping):
        return {str(name): plain(inner, show_keys=show_keys) for name, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(inner, show_keys=show_keys) for inner in value]
    return value


def key_text(key: bytes) -> str:
    """Return a key as printable text, with other bytes escaped."""
    return printable(key.decode("utf-8", "backslashreplace"))


def _health(view: View) -> dict[str, Any]:
    health = view.health
    return {
        "healthy": health.ok,
        "reasons": list(health.reasons),
        "no_broker": health.no_broker,
        "rejoining": health.rejoining,
        "findings": list(health.findings),
    }
