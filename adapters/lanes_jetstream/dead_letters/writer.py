"""Writes dead letters to a JetStream subject.

The server confirms a dead letter before the consumer settles its message.
"""

from __future__ import annotations

import json
from collections.abc import Container, Sequence
from typing import Any

import nats.errors
from nats.aio.client import Client

from lanes.arguments import kind_of, names_unknown_options, shown_value
from lanes.dead_letter import DeadLetter
from lanes.dead_letters.wire import cut_to_fit
from lanes.errors import ConfigError, SourceError
from lanes.source import Destination
from lanes_jetstream.dead_letters.wire import dead_letter_headers
from lanes_jetstream.wire.connection import API_TIMEOUT, Connection, Server


@names_unknown_options("JetStreamDeadLetters")
class JetStreamDeadLetters:
    """Publishes each dead letter to a subject that a stream captures.

    The dead letter has the body and the headers of the original message. Headers named ``Lanes-…`` contain the origin
    and the reason. The origin is in Source, Partition, Position, Subject, Key, Epoch, System (kind of the broker) and
    Incarnation (creation time of the stream). The reason is in Attempts, Error, Error-Text and Time (seconds since
    1970). The writer percent-encodes Key, Error-Text, System and Incarnation. For a message of a partitioned queue, the
    writer adds Queue (percent-encoded) and Queue-Partition. ``read_dead_letter`` reads the record of a stored dead
    letter.

    ``Nats-Msg-Id`` is the id of the dead letter. The server therefore drops a second copy within the duplicate window
    of the stream. If the name of an original header starts with ``Nats-`` or ``Lanes-``, the writer renames it to
    ``Lanes-Origin-<name>`` and percent-encodes its value. The writer does the same with a header that a client cannot
    send. An unchanged ``Nats-`` header could change how the server stores the message.

    Needs asyncio.

    Args:
        server: URL of a server (several with commas), a connected nats client, or its JetStream context. The object
            never closes a client of the caller.
        subject: Subject to publish to, without wildcards.

    Raises:
        ConfigError: ``server`` is no NATS connection, or ``subject`` is empty or contains blanks or wildcards.
    """

    def __init__(self, server: Server, subject: str) -> None:
        self._subject = dead_letter_subject(subject)
        self._connection = Connection(server)
        self._connection.serve(f"dead letters to {self._subject}")
        self._stream = ""

    def __repr__(self) -> str:
        return f"<JetStreamDeadLetters to {self._subject}>"

    async def open(self) -> None:
        """Connect, and check that a stream captures the subject.

        Raises:
            ConfigError: No stream captures the subject.
            SourceError: The server does not answer, or refuses a request.
        """
        await self._connection.open()
        streams = await capturing_streams(self._connection, self._subject, "dead-letter subject")
        if not streams:
            raise ConfigError(_uncaptured(self._subject))
        self._stream = streams[0]

    async def put(self, dead_letter: DeadLetter) -> None:
        """Publish a dead letter and wait until the stream confirms it.

        Args:
            dead_letter: Record to write. A record that exceeds the server's limit loses its original headers, and if
                necessary the end of its value.

        Raises:
            SourceError: The stream did not confirm the dead letter (retryable), or the source reads the dead-letter
                subject too.
        """
        if dead_letter.subject == self._subject:
            raise SourceError(
                f"the source also reads the dead-letter subject {self._subject!r}, so each dead letter would create "
                "another dead letter; use a subject outside the source's stream, or a filter_subject that excludes it"
            )
        await self._connection.reopen()
        client = self._connection.client
        # The server's limit counts headers and body together. The server disconnects a client that sends more.
        kept, whole = cut_to_fit(dead_letter, client.max_payload, _size)
        try:
            await publish(client, self._subject, kept.value, dead_letter_headers(kept, whole), "dead letter")
        except SourceError as error:
            if isinstance(error.__cause__, nats.errors.NoRespondersError) and await self._is_uncaptured():
                raise SourceError(_uncaptured(self._subject), retryable=True) from error
            raise

    def destination(self) -> Destination:
        """Return the stream that captures the subject; see ``lanes.source.Addressed.destination``.

        Returns:
            The stream, and the subject.
        """
        return Destination("nats", self._stream, self._subject)

    async def aclose(self) -> None:
        """Close the connection that ``open`` opened. Idempotent."""
        await self._connection.close()

    async def _is_uncaptured(self) -> bool:
        """Return whether the server reports that no stream captures the subject, for example after a deletion."""
        try:
            return not await capturing_streams(self._connection, self._subject)
        except SourceError:
            return False


def dead_letter_subject(subject: str) -> str:
    """Return a valid dead-letter subject. Raises ``ConfigError`` for blanks, wildcards, "" and other types."""
    if not isinstance(subject, str):
        raise ConfigError(f"dead-letter subject is {kind_of(subject)}; use a plain subject, a str")
    if "://" in subject:
        raise ConfigError(
            f"dead-letter subject {shown_value(subject)} is a URL; pass the server first and the subject second"
        )
    if not subject or any(c.isspace() or c in "*>" for c in subject):
        raise ConfigError(
            f"dead-letter subject {shown_value(subject)} is empty, or has blanks or wildcards; use a plain subject"
        )
    return subject


async def capturing_streams(connection: Connection, subject: str, what: str = "subject") -> Sequence[str]:
    """Return the names of the streams that capture a subject.

    Raises ``SourceError``, whose text begins with ``what``, if the request fails.
    """
    with connection.api_errors(f"{what} {subject!r}"):
        found = await connection.api("STREAM.NAMES", {"subject": subject})
    return found.get("streams") or []


async def publish(
    client: Client,
    subject: str,
    body: bytes,
    headers: dict[str, str],
    what: str,
    permanent: Container[int] = (),
) -> dict[str, Any]:
    """Publish a message, and return the stream's confirmation.

    Raises a ``SourceError`` that names ``what`` if the stream does not confirm the message. The error is retryable,
    except after a refusal whose ``err_code`` is in ``permanent``.
    """
    try:
        answer = await client.request(subject, body, timeout=API_TIMEOUT, headers=headers)
    except (nats.errors.Error, TimeoutError, OSError) as error:
        raise unconfirmed(subject, what, error) from error
    return confirmation_of(answer.data, subject, what, permanent)


def unconfirmed(subject: str, what: str, error: Exception) -> SourceError:
    """Return the error of a message without a confirmation of a stream."""
    return SourceError(
        f"{subject} did not confirm a {what} ({type(error).__name__}); check that the server is up and that the "
        "stream has a leader",
        retryable=True,
    )


def confirmation_of(answer: bytes, subject: str, what: str, permanent: Container[int] = ()) -> dict[str, Any]:
    """Return the confirmation in an answer; see ``publish``."""
    try:
        confirmation = json.loads(answer)
    except ValueError as error:
        raise unconfirmed(subject, what, error) from error
    if not isinstance(confirmation, dict) or "error" in confirmation or "stream" not in confirmation:
        why = confirmation.get("error") if isinstance(confirmation, dict) else None
        refusal = why.get("description", "no reason given") if isinstance(why, dict) else "no stream accepted it"
        final = isinstance(why, dict) and why.get("err_code") in permanent
        raise SourceError(f"{subject} refused a {what}: {refusal}; check the limits of the stream", retryable=not final)
    return confirmation


def _uncaptured(subject: str) -> str:
    return f"no stream captures the dead-letter subject {subject!r}; create a stream with this subject"


def _size(letter: DeadLetter, whole: int | None) -> int:
    # "NATS/1.0", each "name: value", an empty line; each line ends with CRLF.
    headers = dead_letter_headers(letter, whole)
    return len(letter.value) + 12 + sum(len(name.encode()) + len(text.encode()) + 4 for name, text in headers.items())
