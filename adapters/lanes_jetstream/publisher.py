"""Publishes the outputs of handlers to JetStream subjects. The stream deduplicates a repeated output by its id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import nats.errors

from lanes.arguments import kind_of, names_unknown_options
from lanes.errors import ConfigError, SourceError
from lanes.outputs.publisher import Output, Report, output_id
from lanes_jetstream.dead_letters.writer import capturing_streams, confirmation_of, unconfirmed
from lanes_jetstream.wire.confirmations import Confirmations
from lanes_jetstream.wire.connection import Connection, Server

_ROLLUP: Final = "Nats-Rollup"

_ID: Final = "Nats-Msg-Id"

KEY: Final = "Lanes-Key"
"""Header with the key of an output, as UTF-8."""

_OWN: Final = frozenset({_ID.lower(), KEY.lower()})
"""Headers that the publisher sets, in lower case. These headers replace headers of the handler with the same name."""

_PERMANENT: Final = frozenset(
    {
        10054,  # message size exceeds maximum allowed
        10060,  # expected stream does not match
        10070,  # wrong last msg ID
        10071,  # wrong last sequence
        10165,  # invalid per-message TTL
        10166,  # per-message TTL is disabled
    }
)
"""Values of ``err_code`` with which a stream refuses an output because of its size or its headers."""


@names_unknown_options("JetStreamPublisher")
class JetStreamPublisher:
    """Publishes outputs to subjects that streams capture. The target of an output is a subject.

    The header ``Nats-Msg-Id`` is a blake3 hash of 32 hex digits. The hash covers the name of the service, the origin
    and the number of the output, and its target, key, headers and value. The stream therefore drops a repeated output
    within its duplicate window. Outputs of two services never have the same id, because the names of the services
    differ.

    A key must be UTF-8. The publisher writes the key to the header ``Lanes-Key``, which a consumer reads with
    ``key=lanes_jetstream.header("Lanes-Key")``. JetStream supports neither repeated headers nor messages without a
    value, so such an output fails permanently.

    Needs asyncio.

    Args:
        server: URL of a server (several with commas), a connected nats client, or its JetStream context. The object
            never closes a client of the caller.
        name: Name of the consumer, the same in all its processes. Each other consumer needs another name, because equal
            outputs of two consumers with one name have the same id.

    Raises:
        ConfigError: ``server`` is no NATS connection, or ``name`` is empty or no text.
    """

    def __init__(self, server: Server, name: str) -> None:
        if not isinstance(name, str) or not name:
            raise ConfigError(
                f"JetStreamPublisher: name is {kind_of(name) if name != '' else 'empty'}; pass the name of this "
                "consumer, the same in all its processes"
            )
        self._name = name
        self._connection = Connection(server)
        self._connection.serve(f"outputs of {name}")
        self._confirmations: Confirmations[Output] | None = None

    def __repr__(self) -> str:
        return f"<JetStreamPublisher {self._name}>"

    async def open(self) -> None:
        """Connect. Idempotent.

        Raises:
            SourceError: The server does not answer, or refuses a request.
        """
        await self._connection.open()

    async def publish(self, outputs: Sequence[Output], report: Report) -> None:
        """Publish outputs and wait until their streams confirm them; see ``lanes.outputs.publisher.Publisher.publish``.

        Args:
            outputs: The outputs.
            report: Called once for each output.
        """
        await self._connection.reopen()
        confirmations = self._confirmations
        if confirmations is None or confirmations.client is not self._connection.client:
            # The client of a URL is replaced after its end. An answer to the former client does not arrive here.
            confirmations = self._confirmations = Confirmations(self._connection.client)
        sound = []
        for output in outputs:
            try:
                sound.append((output, output.target, *self._content(output)))
            except SourceError as error:
                report(output, error)
        failed: list[tuple[Output, Exception]] = []

        def ended(output: Output, answer: bytes | Exception) -> None:
            if isinstance(answer, Exception):
                failed.append((output, answer))
                return
            failure: SourceError | None = None
            try:
                confirmation_of(answer, output.target, "output", _PERMANENT)
            except SourceError as error:
                failure = error
            report(output, failure)

        await confirmations.publish(sound, ended)
        for output, cause in failed:
            report(output, await self._failure(output, cause))

    def _content(self, output: Output) -> tuple[bytes, dict[str, str]]:
        """Return the payload and the headers of an output. Raises ``SourceError`` for an output that is no message."""
        if not _is_subject(output.target):
            raise SourceError(
                f"output to {output.target!r}: the target is no subject; use one without blanks and wildcards"
            )
        if output.value is None:
            raise SourceError(
                f"output to {output.target}: JetStream has no messages without a value; publish b'' in place of None"
            )
        headers = self._headers(output)
        most = self._connection.client.max_payload
        size = len(output.value) + 12 + sum(len(f"{name}{text}".encode()) + 4 for name, text in headers.items())
        if size > most:
            raise SourceError(
                f"output to {output.target}: {size} bytes with headers are above the server's max_payload of {most}; "
                "publish less, or raise max_payload"
            )
        return output.value, headers

    async def _failure(self, output: Output, failure: Exception) -> SourceError:
        """Return the error of an output without an answer of a stream."""
        if isinstance(failure, nats.errors.NoRespondersError) and await self._is_uncaptured(output.target):
            error = SourceError(
                f"no stream captures the subject {output.target!r} of an output; create a stream with this subject",
                retryable=True,
            )
        else:
            error = unconfirmed(output.target, "output", failure)
        error.__cause__ = failure
        return error

    def _headers(self, output: Output) -> dict[str, str]:
        headers: dict[str, str] = {}
        # A handler may copy the headers of its message. The id and the key in these headers do not belong to the
        # output.
        pairs = [pair for pair in (*output.headers, *output.trace) if pair[0].lower() not in _OWN]
        if output.key is not None:
            pairs.append((KEY, output.key))
        for name, value in pairs:
            if name.lower() == _ROLLUP.lower():
                raise SourceError(
                    f"output to {output.target}: the header {_ROLLUP} would delete earlier outputs; leave it out"
                )
            if name in headers:
                raise SourceError(
                    f"output to {output.target}: the header {name!r} occurs twice, which the client cannot send"
                )
            try:
                text = value.decode()
            except UnicodeDecodeError:
                raise SourceError(
                    f"output to {output.target}: the header {name!r} is not UTF-8, which the client cannot send; "
                    "encode its bytes"
                ) from None
            if not name or any(sign in name for sign in ": \r\n\t") or any(sign in text for sign in "\r\n"):
                raise SourceError(
                    f"output to {output.target}: the header {name!r} has a blank, a colon or a line break, which NATS "
                    "does not allow"
                )
            headers[name] = text
        headers[_ID] = output_id(self._name, output)
        return headers

    async def _is_uncaptured(self, subject: str) -> bool:
        try:
            return not await capturing_streams(self._connection, subject)
        except SourceError:
            return False

    async def aclose(self) -> None:
        """Close the connection that ``open`` opened. Idempotent."""
        confirmations, self._confirmations = self._confirmations, None
        if confirmations is not None:
            await confirmations.close()
        await self._connection.close()


def _is_subject(target: str) -> bool:
    return all(target.split(".")) and not any(sign.isspace() or sign in "*>" for sign in target)
