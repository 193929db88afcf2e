"""The dead letters of a subject, for the operator: listed, found, published again, deleted by their sequences."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from lanes.core.types import Message, Partition, PartitionId
from lanes.dead_letters.box import Disposition, Found, Parked
from lanes.errors import ConfigError, MessageError, SourceError
from lanes_jetstream.dead_letters.wire import ID, WIRE, header_text, read_whole
from lanes_jetstream.dead_letters.writer import letters_subject, publish
from lanes_jetstream.wire.connection import ApiError, Connection, NoAnswer, Where

_NOTHING_THERE: Final = (10037, 10043)
"""What the server answers to a request for a message that it does not have."""

_SUBJECT: Final = re.compile(r"(?!\$)[^\s*>.\x00-\x1f\x7f]+(?:\.[^\s*>.\x00-\x1f\x7f]+)*")
"""A subject that a message can have: no pattern, and none of the server's own: commands, buckets, object stores."""

_VERSION: Final = b"NATS/1.0"


class _Stored(NamedTuple):
    """A message of a stream, as the API gives it out."""

    sequence: int
    subject: str
    headers: tuple[tuple[str, bytes], ...]
    value: bytes


class _Reader:
    """Looks into stored messages; see ``lanes.core.types.Reader``."""

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


class JetStreamLetterBox:
    """What ``JetStreamDeadLetters`` has written to ``subject``; see ``lanes.dead_letters.box.LetterBox``.

    Disposing of a letter deletes it, and every copy of it, from the stream: nothing is left to tell that it was there.
    Reads by the API of the stream, message by message, and makes no consumer. asyncio only.
    """

    remembers = False

    def __init__(self, where: Where, subject: str) -> None:
        self._subject = letters_subject(subject)
        self._connection = Connection(where)
        self.strangers = 0
        self._stream = ""
        self._next = 1
        self._places: dict[str, list[int]] = {}

    def __repr__(self) -> str:
        return f"<JetStreamLetterBox {self._subject}: {len(self._places)} letters seen>"

    async def open(self) -> None:
        """Connect, and find the stream that captures the subject. Raises ``ConfigError`` or ``SourceError``."""
        await self._connection.open()
        try:
            streams = await self._streams(self._subject)
            if not streams:
                raise ConfigError(f"no stream captures the dead-letter subject {self._subject!r}: correct the subject")
            self._stream = streams[0]
        except BaseException:
            await self._connection.close()
            raise

    async def ids(self, limit: int | None = None) -> Sequence[str]:
        """See ``lanes.dead_letters.box.LetterBox.ids``."""
        while limit is None or len(self._places) < limit:
            stored = await self._get({"seq": self._next, "next_by_subj": self._subject})
            if stored is None:
                break
            self._next = stored.sequence + 1
            parked = self._parked(stored)
            if parked is None:
                self.strangers += 1
            else:
                self._places.setdefault(parked.letter.id, []).append(stored.sequence)
        return list(self._places)[:limit]

    async def find(self, ids: Sequence[str]) -> Found:
        """See ``lanes.dead_letters.box.LetterBox.find``. One that was disposed of is not found."""
        if any(one not in self._places for one in ids):
            await self.ids()
        found: dict[str, Parked] = {}
        for one in ids:
            for sequence in self._places.get(one, ()):
                stored = await self._get({"seq": sequence})
                parked = None if stored is None else self._parked(stored)
                if parked is not None:
                    found[one] = parked
                    break
            else:
                # Somebody else has deleted it meanwhile.
                self._places.pop(one, None)
        return found

    async def dispose(self, parked: Parked, how: Disposition) -> None:
        """See ``lanes.dead_letters.box.LetterBox.dispose``."""
        # A copy may have come since they were listed.
        await self.ids()
        for sequence in self._places.get(parked.letter.id, ()):
            try:
                await self._connection.api(f"STREAM.MSG.DELETE.{self._stream}", {"seq": sequence})
            except NoAnswer as error:
                raise self._connection.failed(f"{how} letter {parked.letter.id} is not deleted", error) from None
            except ApiError as error:
                # For one that somebody else has deleted there are several answers.
                if await self._get({"seq": sequence}) is not None:
                    raise SourceError(
                        f"{how} letter {parked.letter.id} cannot be deleted: {self._stream} sequence {sequence}: "
                        f"{error}; allow deletion in the stream's configuration, or purge the subject"
                    ) from None
        self._places.pop(parked.letter.id, None)

    async def publish(self, parked: Parked) -> str:
        """See ``lanes.dead_letters.box.LetterBox.publish``. Its ``Nats-Msg-Id`` is made of the letter's id."""
        letter = parked.letter
        # A letter is anybody's text, and a request to the API of the server is a message too.
        if not _SUBJECT.fullmatch(letter.subject) or not await self._streams(letter.subject):
            raise SourceError(
                f"no stream captures {letter.subject[:80]!a}, where letter {letter.id} came from: publish it yourself, "
                "then drop the letter"
            )
        headers = {name: header_text(value or b"") for name, value in WIRE.again(letter)}
        headers[ID] = f"{letter.id}-replayed"
        confirmation = await publish(self._connection.client, letter.subject, letter.value, headers, "message")
        return f"{confirmation['stream']} sequence {confirmation.get('seq')}"

    async def aclose(self) -> None:
        """Close the connection that ``open`` opened. Idempotent."""
        await self._connection.close()

    def _parked(self, stored: _Stored) -> Parked | None:
        message = Message(Partition(PartitionId(self._stream, 0), _READER), stored.sequence, None, 0, stored, None)
        try:
            letter, whole = read_whole(message)
        except MessageError:
            return None
        return Parked(letter=letter, place=f"{self._stream} sequence {stored.sequence}", whole_size=whole)

    async def _streams(self, subject: str) -> Sequence[str]:
        """The streams that capture a subject."""
        try:
            found = await self._connection.api("STREAM.NAMES", {"subject": subject})
        except (ApiError, NoAnswer) as error:
            raise self._connection.failed(f"subject {subject!r}", error) from None
        return found.get("streams") or []

    async def _get(self, request: dict[str, object]) -> _Stored | None:
        try:
            answer = await self._connection.api(f"STREAM.MSG.GET.{self._stream}", request)
        except (ApiError, NoAnswer) as error:
            if isinstance(error, ApiError) and error.err_code in _NOTHING_THERE:
                return None
            raise self._connection.failed(f"letters in stream {self._stream!r}", error) from None
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
                f"a message of {self._stream} came in a form that cannot be read: see that it is a nats-server"
            ) from error


def _headers(block: bytes) -> list[tuple[str, bytes]]:
    """The headers of a stored message, repeated names included."""
    lines = block.split(b"\r\n")
    pairs = [line.partition(b":") for line in lines[1:] if b":" in line] if lines[0].startswith(_VERSION) else []
    return [(name.decode("utf-8", "replace").strip(), value.strip(b" \t")) for name, _, value in pairs]
