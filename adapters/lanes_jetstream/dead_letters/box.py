"""Lists, finds, republishes and deletes the dead letters of a subject, for an operator."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from lanes.core.types import Message, Partition, PartitionId
from lanes.dead_letter import DeadLetter
from lanes.dead_letters.box import Disposition, FoundDeadLetters, StoredDeadLetter, check_origin
from lanes.errors import ConfigError, MessageError, SourceError
from lanes_jetstream.dead_letters.wire import ID, WIRE, header_text, read_whole
from lanes_jetstream.dead_letters.writer import capturing_streams, dead_letter_subject, publish
from lanes_jetstream.wire import codes
from lanes_jetstream.wire.answers import ApiError
from lanes_jetstream.wire.connection import Connection, NoAnswer, Server
from lanes_jetstream.wire.subjects import matches
from lanes_jetstream.wire.transforms import Transform, may_make, origins_of, own_transform, published_subject

_SUBJECT: Final = re.compile(r"(?!\$)[^\s*>.\x00-\x1f\x7f]+(?:\.[^\s*>.\x00-\x1f\x7f]+)*")
"""Pattern of subjects for user messages. It excludes wildcards, and subjects of the server (API, buckets, object
stores)."""

_STREAM: Final = re.compile(r"[^\s.*>/\\\x00-\x1f\x7f]{1,255}")
"""Names of streams."""

_NAMED_SUBJECTS: Final = 5
"""Maximum number of subjects with messages that ``why_empty`` names."""

_SYSTEM: Final = "nats"
"""``SourceTraits.system`` of the sources of this package."""

_VERSION: Final = b"NATS/1.0"

_COPIED_FROM: Final = "Nats-Stream-Source"
"""Header that the server adds to a copied message, with stream, sequence, filter, destination and former subject."""

_SUBJECT_AT: Final = 4
"""Index of the subject in the header of a copied message."""


class _Stored(NamedTuple):
    """A message of a stream in an answer of the API."""

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

    ``dispose`` deletes every copy of a dead letter from the stream, and writes no record of the deletion. The box reads
    each message by one request to the stream's API, and creates no consumer. Needs asyncio.

    Args:
        server: URL of a server (several with commas), a connected nats client, or its JetStream context.
        subject: Dead-letter subject, without wildcards.

    Attributes:
        other_messages: Number of messages read by this box that are not dead letters.
        remembers: Whether the latest ``find`` could distinguish disposed dead letters from unknown ids. The box can
            distinguish them only while the stream has lost no message.
    """

    def __init__(self, server: Server, subject: str) -> None:
        self._subject = dead_letter_subject(subject)
        self._connection = Connection(server)
        self.other_messages = 0
        self.remembers = False
        self._stream = ""
        self._next = 1
        self._places: dict[str, list[int]] = {}
        self._infos: dict[str, Mapping[str, Any] | None] = {}

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
        """Find the dead letters that still exist; see ``lanes.dead_letters.box.DeadLetterBox.find``."""
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
        if len(found) < len(set(ids)):
            self.remembers = await self._complete()
        return found

    async def why_empty(self) -> str:
        """Name the stream and the subjects with messages; see ``lanes.dead_letters.box.Explaining.why_empty``."""
        with self._connection.api_errors(f"subjects of stream {self._stream!r}"):
            info = await self._connection.api(f"STREAM.INFO.{self._stream}", {"subjects_filter": ">"})
        found = sorted(info["state"].get("subjects") or {})
        named = ", ".join(found[:_NAMED_SUBJECTS]) + (", …" if len(found) > _NAMED_SUBJECTS else "")
        return f"; stream {self._stream} captures it, and has {'messages of ' + named if named else 'no messages'}"

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
                # If another client has deleted the message, the server may answer with one of several error codes.
                if await self._get({"seq": sequence}) is not None:
                    raise SourceError(
                        f"{how} dead letter {parked.dead_letter.id} cannot be deleted from {self._stream} sequence "
                        f"{sequence}: {error}; allow deletion in the stream's configuration, or purge the subject"
                    ) from None
        self._places.pop(parked.dead_letter.id, None)

    async def publish(self, parked: StoredDeadLetter) -> str:
        """See ``lanes.dead_letters.box.DeadLetterBox.publish``.

        The published message has the header ``Nats-Msg-Id`` with the value ``<id>-replayed``.

        The call undoes the transforms of the original stream, and of the streams that the original stream copies. The
        message therefore has the subject of its first publication.
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
        """Return the subject to which a client published the original message.

        Raises ``SourceError`` if the origin is another stream or broker, if no stream captures this subject, or if
        several subjects are possible.

        A dead letter has the stored subject, because its handler saw the stored subject. A stream with a transform
        captures other subjects, and would transform the stored subject a second time. A stream that only copies another
        stream captures no subject.
        """
        await self._check_origin(letter)
        lost: list[str] = []
        copied = next((value for name, value in letter.headers if name == _COPIED_FROM), b"").decode("utf-8", "replace")
        found = await self._published(letter.source, letter.subject, copied.split(), lost)
        if not found and not lost and await self._is_captured(letter.subject):
            found = [letter.subject]
        # Any client may have written the record, and the subject could be a request to the server's API.
        found = [subject for subject in dict.fromkeys(found) if _SUBJECT.fullmatch(subject)]
        if len(found) == 1:
            return found[0]
        if found:
            raise SourceError(
                f"the message of dead letter {letter.id} may have been published to "
                f"{' or '.join(ascii(subject[:80]) for subject in found)}; publish the message yourself, then drop the "
                "dead letter"
            )
        why = "".join(f"; {one}" for one in dict.fromkeys(lost))
        raise SourceError(
            f"no stream captures {letter.subject[:80]!a}, the origin of dead letter {letter.id}{why}; publish the "
            "message yourself, then drop the dead letter"
        )

    async def _check_origin(self, letter: DeadLetter) -> None:
        """Raise ``SourceError`` if the original stream of a dead letter is not at this server."""
        check_origin(letter, (_SYSTEM,))
        # For a message of a partitioned queue, the source is the name of the physical queue instead of the stream.
        if letter.system != _SYSTEM or not letter.incarnation or letter.queue is not None:
            return
        info = await self._info(letter.source)
        if info is None:
            raise SourceError(
                f"dead letter {letter.id}: its origin, stream {letter.source[:80]!a}, does not exist at this server. "
                "Replay the dead letter with --handler, or add --new-origin to publish to any stream that captures "
                "its subject"
            )
        check_origin(letter, (_SYSTEM,), "creation time", str(info.get("created", "")))

    async def _published(
        self, stream: str, stored: str, copied: Sequence[str], lost: list[str], via: tuple[str, ...] = ()
    ) -> list[str]:
        """Return the subjects to which a client may have published a stored message, before copies and transforms.

        Args:
            stream: Name of the stream that stores the message.
            stored: Subject of the stored message.
            copied: Words of the header that names the copied stream and the former subject; empty = no header.
            lost: List to which the call adds each reason why a subject is unknown.
            via: Streams that copy this stream, on the path to the dead letter.
        """
        info = await self._info(stream)
        if info is None:
            return [stored] if await self._is_captured(stored) else []
        config: Mapping[str, Any] = info["config"]
        origins = origins_of(config)
        if len(copied) > _SUBJECT_AT:
            name, subject = copied[0], copied[_SUBJECT_AT]
            # Any client may have written the header.
            if any(each.name == name and not each.external and each.copies(subject) for each in origins):
                return await self._published(name, subject, (), lost, (*via, stream))
        own, before = own_transform(config), stored
        if own is not None:
            undone = published_subject(stored, *own)
            if undone is None and (matches(own.source, stored) or may_make(stored, own.destination)):
                lost.append(_not_undone(stream, own))
                return []
            before = undone or stored
        found = [before] if any(matches(pattern, before) for pattern in config.get("subjects") or ()) else []
        for origin in origins:
            if origin.external:
                lost.append(f"stream {stream!a} copies stream {origin.name!a} of another account or domain")
                continue
            subjects = origin.subjects_before(before)
            if not subjects:
                lost += [_not_undone(stream, each) for each in origin.transforms if may_make(before, each.destination)]
            if origin.name not in (*via, stream):
                for subject in subjects:
                    found += await self._published(origin.name, subject, (), lost, (*via, stream))
        return found

    async def _is_captured(self, subject: str) -> bool:
        return _SUBJECT.fullmatch(subject) is not None and bool(await capturing_streams(self._connection, subject))

    async def _info(self, stream: str) -> Mapping[str, Any] | None:
        """Read the configuration and the creation time of a stream once; None = the stream does not exist."""
        if not _STREAM.fullmatch(stream):
            return None
        if stream not in self._infos:
            with self._connection.api_errors(f"the transform of stream {stream!r}"):
                info = await self._connection.find(f"STREAM.INFO.{stream}", codes.STREAM_NOT_FOUND)
            self._infos[stream] = info
        return self._infos[stream]

    async def _complete(self) -> bool:
        """Return whether the stream still has every message that it has stored; False = no, or unknown."""
        try:
            state = (await self._connection.api(f"STREAM.INFO.{self._stream}"))["state"]
            return bool(state["messages"] == state["last_seq"])
        except (ApiError, NoAnswer, KeyError, TypeError):
            # An operator may read dead letters without the permission for this request.
            return False

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


def _not_undone(stream: str, transform: Transform) -> str:
    return (
        f"stream {stream!a} stores the message by the transform {transform.source!r} -> {transform.destination!r}, "
        "which cannot be undone"
    )


def _headers(block: bytes) -> list[tuple[str, bytes]]:
    """Parse the headers of a stored message. Names may repeat."""
    lines = block.split(b"\r\n")
    pairs = [line.partition(b":") for line in lines[1:] if b":" in line] if lines[0].startswith(_VERSION) else []
    return [(name.decode("utf-8", "replace").strip(), value.strip(b" \t")) for name, _, value in pairs]
