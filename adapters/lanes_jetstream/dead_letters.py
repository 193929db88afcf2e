"""Dead letters to a JetStream subject, confirmed by the server before the message settles."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any, Final
from urllib.parse import quote

import nats.errors
from nats.aio.client import Client

from lanes.dead_letter import DeadLetter
from lanes.errors import ConfigError, SourceError
from lanes.letters import ORIGIN, TRUNCATED, letter_fields
from lanes_jetstream.connection import API_TIMEOUT, ApiError, Connection, NoAnswer, Where
from lanes_jetstream.letters import ID, RESERVED

__all__ = ["HEADER_NAME", "JetStreamDeadLetters", "header_text", "letter_headers", "letters_subject", "publish"]

HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""A header name that any client sends: a token of RFC 9110."""

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")


class JetStreamDeadLetters:
    """Publishes each letter to ``subject``, which a stream must capture.

    ``Nats-Msg-Id`` is the letter's id, so the server drops a letter that is written again within the stream's
    duplicate window. Body and headers are the original's; the origin and the reason stand in ``Lanes-…``
    headers: Source, Partition, Position, Subject, Key (percent-encoded), Attempts, Error, Error-Text
    (percent-encoded), Epoch, Time (seconds since the epoch). An original header whose name starts with ``Nats-``
    or ``Lanes-`` is kept as ``Lanes-Origin-<name>``: left as it was it could change how the letter is stored.
    ``read_letter`` makes a record of such a message again.
    """

    def __init__(self, where: Where, subject: str) -> None:
        self._subject = letters_subject(subject)
        self._connection = Connection(where)

    def __repr__(self) -> str:
        return f"<JetStreamDeadLetters to {self._subject}>"

    async def open(self) -> None:
        """Connect, and check that a stream captures the subject. Raises ``ConfigError`` or ``SourceError``."""
        await self._connection.open()
        try:
            found = await self._connection.api("STREAM.NAMES", {"subject": self._subject})
        except ApiError as error:
            raise SourceError(f"dead-letter subject {self._subject!r}: {error}") from None
        except NoAnswer as error:
            raise SourceError(str(error), retryable=True) from None
        if not found.get("streams"):
            raise ConfigError(
                f"no stream captures the dead-letter subject {self._subject!r}: letters would be lost; create a "
                "stream with this subject"
            )

    async def put(self, letter: DeadLetter) -> None:
        """Publish and wait for the stream's confirmation.

        Raises ``SourceError``: retryable when the confirmation does not come, else when it never can.
        """
        if letter.subject == self._subject:
            raise SourceError(
                f"the source also reads the dead-letter subject {self._subject!r}, so every letter would make another; "
                "use a subject outside the source's stream, or a filter_subject that excludes it"
            )
        client = self._connection.client
        if client.is_closed and self._connection.own:
            await self._connection.reopen()
            client = self._connection.client
        body, headers = fitting(letter, client.max_payload)
        await publish(client, self._subject, body, headers, "dead letter")

    async def aclose(self) -> None:
        """Close the connection that ``open`` opened. Idempotent."""
        await self._connection.close()


def letters_subject(subject: str) -> str:
    """A subject for dead letters; raises ``ConfigError`` for what can be none."""
    if not subject or any(c.isspace() or c in "*>" for c in subject):
        raise ConfigError(f"dead-letter subject {subject!r}: must be a subject without blanks and wildcards")
    return subject


async def publish(client: Client, subject: str, body: bytes, headers: dict[str, str], what: str) -> dict[str, Any]:
    """Publish and wait for the stream's confirmation, which is returned. Raises a retryable ``SourceError``."""
    try:
        answer = await client.request(subject, body, timeout=API_TIMEOUT, headers=headers)
        confirmation = json.loads(answer.data)
    except (nats.errors.Error, TimeoutError, OSError, ValueError) as error:
        raise SourceError(f"{what} not confirmed by {subject}: {type(error).__name__}", retryable=True) from error
    if not isinstance(confirmation, dict) or "error" in confirmation or "stream" not in confirmation:
        refusal = confirmation.get("error", "no stream") if isinstance(confirmation, dict) else "no stream"
        raise SourceError(f"{what} refused by {subject}: {refusal}", retryable=True)
    return confirmation


def fitting(letter: DeadLetter, max_payload: int) -> tuple[bytes, dict[str, str]]:
    """Body and headers of a letter within the server's limit, which counts both; it hangs up on more.

    What does not fit goes in this order: the original headers, then the end of the body; ``Lanes-Truncated`` says how
    many bytes the original had. Stream and sequence lead to the whole of it.
    """
    headers = letter_headers(letter)
    if len(letter.value) + _size(headers) <= max_payload:
        return letter.value, headers
    headers = letter_headers(dataclasses.replace(letter, headers=()))
    headers[TRUNCATED] = str(len(letter.value))
    room = max(0, max_payload - _size(headers))
    return letter.value[:room], headers


def _size(headers: dict[str, str]) -> int:
    # "NATS/1.0", each "name: value", an empty line; CRLF behind every line.
    return 12 + sum(len(name.encode()) + len(value.encode()) + 4 for name, value in headers.items())


def letter_headers(letter: DeadLetter) -> dict[str, str]:
    """The headers of a letter on the wire. Texts that a sender controls are percent-encoded."""
    headers: dict[str, str] = {}
    for name, value in letter.headers:
        if not HEADER_NAME.fullmatch(name):
            # The client refuses to send such a name, and a letter that cannot be sent would park its lane for ever.
            kept = ORIGIN + quote(name, safe="")
        else:
            kept = ORIGIN + name if name.lower().startswith(RESERVED) else name
        headers[kept] = header_text(value)
    # Two original headers of one name are one here, so that indices of them would name others.
    return headers | {ID: letter.id} | letter_fields(dataclasses.replace(letter, null_headers=()))


def header_text(value: bytes) -> str:
    """The value of a header as any client sends it."""
    return _CONTROL.sub(" ", value.decode("utf-8", "replace"))
