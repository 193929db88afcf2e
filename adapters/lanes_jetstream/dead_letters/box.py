"""The operator's view of a dead-letter subject: lists, finds, republishes and deletes dead letters."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from lanes.core.types import Message, Partition, PartitionId
from lanes.dead_letter import DeadLetter
from lanes.dead_letters.box import Disposition, FoundDeadLetters, StoredDeadLetter
from lanes.errors import ConfigError, MessageError, SourceError
from lanes_jetstream.dead_letters.wire import ID, WIRE, header_text, read_whole
from lanes_jetstream.dead_letters.writer import capturing_streams, dead_letter_subject, publish
from lanes_jetstream.wire import codes
from lanes_jetstream.wire.connection import ApiError, Connection, NoAnswer, Server
from lanes_jetstream.wire.transforms import published_subject, transforms_of

_SUBJECT: Final = re.compile(r"(?!\$)[^\s*>.\x00-\x1f\x7f]+(?:\.[^\s*>.\x00-\x1f\x7f]+)*")
"""Subjects of user messages: no wildcards, and no subject of the server (API, buckets, object stores)."""

_STREAM: Final = re.compile(r"[^\s.*>/\\\x00-\x1f\x7f]{1,255}")
"""Names of streams."""

_VERSION: Final = b"NATS/1.0"


class _Stored(NamedTuple):
    """A message of a stream, as the API returns it."""

    sequence: int
    subject: str
    headers: tuple[tuple[str, bytes], ...]
    value: bytes


class _Reader:
    """Reads stored messages; see ``lanes.core.types.Reader``."""

    def value(self, raw: object) -> bytes:
        return _stored(raw).value

    def headers(self, raw: object) -> Sequence[tuple[str, bytes]]:
        return _stored(raw).headers

    def subject(self, raw: object) -> str:
        return _stored(raw).subject


_READER: Final = _Reader()


def _stored(raw: object) -> _Stored:
    assert isinstance(raw, _Stored)
    return raw


class JetStreamDeadLetterBox:
    """The dead letters that ``JetStreamDeadLetters`` wrote to a subject; see ``lanes.dead_letters.box.DeadLetterBox``.

    ``dispose`` deletes every copy of a dead letter from the stream, without a trace. The box reads message by message
    through the stream's API, and creates no consumer. Needs asyncio.

    Args:
        server: URL of a server (several with commas), a connected nats client, or its JetStream context.
        subject: Dead-letter subject, without wildcards.

    Attributes:
        other_messages: Number of messages on the subject that are no dead letters.
    """

    remembers = False

    def __init__(self, server: Server, subject: str) -> None:
        self._subject = dead_letter_subject(subject)
        self._connection = Connection(server)
        self.other_messages = 0
        self._stream = ""
        self._next = 1
        self._places: dict[str, list[int]] = {}
        self._read: dict[str, list[tuple[str, str]]] = {}

    def __repr__(self) -> str:
        return f"<JetStreamDeadLetterBox {self._subject}: {len(self._places)} dead letters seen>"

    async def open(self) -> None:
        """Connect, and find the stream that captures the subject."""
        await self._connection.open()
        try:
            streams = await capturing_streams(self._connection, self._subject)
            if not streams:
                raise ConfigError(f"no stream captures the dead-letter subject {self._subject!r}; correct the subject")
            self._stream = streams[0]
        except BaseException:
            await self._connection.close()
            raise

    async def ids(self, limit: int | None = None) -> Sequence[str]:
        """See ``lanes.dead_letters.box.DeadLetterBox.ids``."""
        while limit is None or len(self._places) < limit:
            stored = await self._get({"seq": self._next, "next_by_subj": self._subject})
            if stored is None:
                break
            self._next = stored.sequence + 1
            parked = self._parked(stored)
            if parked is None:
                self.other_messages += 1
            else:
                self._places.setdefault(parked.dead_letter.id, []).append(stored.sequence)
        return list(self._places)[:limit]

    async def find(self, ids: Sequence[str]) -> FoundDeadLetters:
        """Find dead letters that were not disposed of; see ``lanes.dead_letters.box.DeadLetterBox.find``."""
        if any(one not in self._places for one in ids):
            await self.ids()
        found: dict[str, StoredDeadLetter] = {}
        for one in ids:
            for sequence in self._places.get(one, ()):
                stored = await self._get({"seq": sequence})
                parked = None if stored is None else self._parked(stored)
                if parked is not None:
                    found[one] = parked
                    break
            else:
                # Another client deleted the dead letter.
                self._places.pop(one, None)
        return found

    async def dispose(self, parked: StoredDeadLetter, how: Disposition) -> None:
        """See ``lanes.dead_letters.box.DeadLetterBox.dispose``."""
        # A copy may have arrived since the last listing.
        await self.ids()
        for sequence in self._places.get(parked.dead_letter.id, ()):
            try:
                await self._connection.api(f"STREAM.MSG.DELETE.{self._stream}", {"seq": sequence})
            except NoAnswer as error:
                raise self._connection.failed(
                    f"{how} dead letter {parked.dead_letter.id} is not deleted", error
                ) from None
            except ApiError as error:
                # The server has several error codes for a message that another client has deleted.
                if await self._get({"seq": sequence}) is not None:
                    raise SourceError(
                        f"{how} dead letter {parked.dead_letter.id} cannot be deleted from {self._stream} sequence "
                        f"{sequence}: {error}; allow deletion in the stream's configuration, or purge the subject"
                    ) from None
        self._places.pop(parked.dead_letter.id, None)

    async def publish(self, parked: StoredDeadLetter) -> str:
        """See ``lanes.dead_letters.box.DeadLetterBox.publish``. The header ``Nats-Msg-Id`` holds ``<id>-replayed``.

        If possible, the call undoes the transform of the original stream, so that the message has the subject of its
        first publication.
        """
        letter = parked.dead_letter
        subject = await self._origin(letter)
        headers = {name: header_text(value or b"") for name, value in WIRE.republished(letter)}
        headers[ID] = f"{letter.id}-replayed"
        confirmation = await publish(self._connection.client, subject, letter.value, headers, "message")
        return f"{confirmation['stream']} sequence {confirmation.get('seq')}"

    async def aclose(self) -> None:
        """Close the connection that ``open`` opened. Idempotent."""
        await self._connection.close()

    async def _origin(self, letter: DeadLetter) -> str:
        """Return the subject that the original message was published to.

        Raises ``SourceError`` if no stream captures this subject.

        A dead letter has the stored subject, because its handler saw the stored subject. A stream with a transform
        captures another subject, and would transform the stored subject a second time.
        """
        transforms = await self._transforms(letter.source)
        undone = [published_subject(letter.subject, *transform) for transform in transforms]
        for subject in [*filter(None, undone), letter.subject]:
            # Any client may have written the record, and its subject could be a request to the server's API.
            if _SUBJECT.fullmatch(subject) and await capturing_streams(self._connection, subject):
                return subject
        through = "".join(
            f"; stream {letter.source!a} stores it by the transform {source!r} -> {destination!r}, which "
            "cannot be undone"
            for (source, destination), subject in zip(transforms, undone, strict=True)
            if subject is None
        )
        raise SourceError(
            f"no stream captures {letter.subject[:80]!a}, the origin of dead letter {letter.id}{through}; publish "
            "the message yourself, then drop the dead letter"
        )

    async def _transforms(self, stream: str) -> list[tuple[str, str]]:
        """Read the transforms of the stream that stored the original message; empty for a missing stream."""
        if not _STREAM.fullmatch(stream):
            return []
        if stream not in self._read:
            with self._connection.api_errors(f"the transform of stream {stream!r}"):
                info = await self._connection.find(f"STREAM.INFO.{stream}", codes.STREAM_NOT_FOUND)
            self._read[stream] = [] if info is None else [*transforms_of(info["config"])]
        return self._read[stream]

    def _parked(self, stored: _Stored) -> StoredDeadLetter | None:
        message = Message(Partition(PartitionId(self._stream, 0), _READER), stored.sequence, None, 0, stored, None)
        try:
            letter, whole = read_whole(message)
        except MessageError:
            return None
        return StoredDeadLetter(
            dead_letter=letter, place=f"{self._stream} sequence {stored.sequence}", whole_size=whole
        )

    async def _get(self, request: dict[str, object]) -> _Stored | None:
        subject = f"STREAM.MSG.GET.{self._stream}"
        with self._connection.api_errors(f"dead letters in stream {self._stream!r}"):
            answer = await self._connection.find(subject, *codes.MESSAGE_NOT_FOUND, request=request)
        if answer is None:
            return None
        try:
            message = answer["message"]
            return _Stored(
                int(message["seq"]),
                str(message["subject"]),
                tuple(_headers(base64.b64decode(message.get("hdrs", "")))),
                base64.b64decode(message.get("data", "")),
            )
        except (KeyError, TypeError, ValueError, binascii.Error) as error:
            raise SourceError(
                f"stream {self._stream!r} returned a malformed message; check that the server is a nats-server"
            ) from error


def _headers(block: bytes) -> list[tuple[str, bytes]]:
    """Parse the headers of a stored message. Names may repeat."""
    lines = block.split(b"\r\n")
    pairs = [line.partition(b":") for line in lines[1:] if b":" in line] if lines[0].startswith(_VERSION) else []
    return [(name.decode("utf-8", "replace").strip(), value.strip(b" \t")) for name, _, value in pairs]
