"""Parses answers of the JetStream API: fields, refusals, listings in pages, numbers and times."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any, Final

from nats.aio.msg import Msg

from lanes.errors import SourceError
from lanes_jetstream.wire import codes

_PAGES: Final = 1_000
"""Maximum number of pages of a listing. The maximum stops the reading of a faulty listing without an end."""


class ApiError(Exception):
    """Error: the JetStream API refused a request.

    Args:
        err_code: Error code of the API; see ``lanes_jetstream.wire.codes``.
        description: Reason, in the words of the server.
        code: HTTP status of the answer; 0 = unknown.

    Attributes:
        temporary: Whether the cause is temporary, for example a stream without a leader.
    """

    def __init__(self, err_code: int, description: str, code: int = 0) -> None:
        remedy = "; enable JetStream on the server (-js) and for this account" if err_code in codes.NO_JETSTREAM else ""
        super().__init__(f"{description} ({err_code}){remedy}")
        self.code = code
        self.err_code = err_code
        self.temporary = code == 503 and err_code not in codes.NO_JETSTREAM


def fields_of(answer: Msg, what: str) -> dict[str, Any]:
    """Return the fields of an answer.

    Args:
        answer: Answer of the API, or of a stream to a published message.
        what: Name of the request, for errors.

    Returns:
        The fields of the JSON object.

    Raises:
        ApiError: The API refused the request.
        SourceError: The answer is no JSON object.
    """
    try:
        fields = json.loads(answer.data)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise SourceError(f"{what}: the answer is no JSON object; check that the server is a nats-server")
    refusal = fields.get("error")
    if refusal:
        description = str(refusal.get("description", "unknown error"))
        raise ApiError(int(refusal.get("err_code", 0)), description, int(refusal.get("code", 0)))
    return fields


async def read_pages(
    api: Callable[[str, dict[str, object]], Awaitable[dict[str, Any] | None]], subject: str, field: str
) -> list[Any]:
    """Read all pages of a listing.

    Args:
        api: Function that sends one request with its fields, such as ``Connection.api``.
        subject: Name of the request.
        field: Field of the answer that holds the entries of a page.

    Returns:
        The entries of all pages.
    """
    listed: list[Any] = []
    for _ in range(_PAGES):
        before = len(listed)
        page = await api(subject, {"offset": before}) or {}
        listed += page.get(field) or []
        if len(listed) == before or len(listed) >= int(page.get("total", 0)):
            break
    return listed


def number(text: str | None, digits: int = 20) -> int | None:
    """Parse a number of at most ``digits`` digits that a server sent; None = the text is no such number."""
    return int(text) if text and len(text) <= digits and text.isascii() and text.isdigit() else None


def unix_seconds(stamp: object) -> float:
    """Convert a server's time stamp to seconds since 1970. Raises ``SourceError`` for an invalid time stamp."""
    try:
        return datetime.fromisoformat(str(stamp)).timestamp()
    except ValueError:
        raise SourceError(
            f"the server sent {stamp!r:.60}, which is not a time; check that the server is a nats-server of 2.11 "
            "or newer"
        ) from None
