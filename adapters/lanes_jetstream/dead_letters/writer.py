"""Dead letters to a JetStream subject, confirmed by the server before the message settles."""

from __future__ import annotations

import json
from typing import Any

import nats.errors
from nats.aio.client import Client

from lanes.dead_letter import DeadLetter
from lanes.dead_letters.wire import fitting
from lanes.errors import ConfigError, SourceError
from lanes_jetstream.dead_letters.wire import letter_headers
from lanes_jetstream.wire.connection import API_TIMEOUT, ApiError, Connection, NoAnswer, Where

__all__ = ["JetStreamDeadLetters", "letters_subject", "publish"]


class JetStreamDeadLetters:
    """Publishes each letter to ``subject``, which a stream must capture.

    ``Nats-Msg-Id`` is the letter's id, so the server drops a letter that is written again within the stream's
    duplicate window. Body and headers are the original's; the origin and the reason stand in ``Lanes-…``
    headers: Source, Partition, Position, Subject, Key (percent-encoded), Attempts, Error, Error-Text
    (percent-encoded), Epoch, Time (seconds since the epoch). An original header whose name starts with ``Nats-``
    or ``Lanes-``, or that no client sends, is kept as ``Lanes-Origin-<name>``, percent-encoded: left as it was it could
    change how the letter is stored. ``read_letter`` makes a record of such a message again.
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
        except (ApiError, NoAnswer) as error:
            raise self._connection.failed(f"dead-letter subject {self._subject!r}", error) from None
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
        # The server's limit counts headers and body; it hangs up on more.
        kept, whole = fitting(letter, client.max_payload, _size)
        await publish(client, self._subject, kept.value, letter_headers(kept, whole), "dead letter")

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
        raise SourceError(
            f"{what} not confirmed by {subject}: {type(error).__name__}: see that the server is up, and that the "
            "stream has a leader",
            retryable=True,
        ) from error
    if not isinstance(confirmation, dict) or "error" in confirmation or "stream" not in confirmation:
        why = confirmation.get("error") if isinstance(confirmation, dict) else None
        refusal = why.get("description", "no reason given") if isinstance(why, dict) else "no stream took it"
        raise SourceError(
            f"{what} refused by {subject}: {refusal}: see the limits of the stream that captures it", retryable=True
        )
    return confirmation


def _size(letter: DeadLetter, whole: int | None) -> int:
    # "NATS/1.0", each "name: value", an empty line; CRLF behind every line.
    headers = letter_headers(letter, whole)
    return len(letter.value) + 12 + sum(len(name.encode()) + len(text.encode()) + 4 for name, text in headers.items())
