"""The dead letter: a message that the consumer gave up, with its origin and its error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, runtime_checkable

from blake3 import blake3

from lanes.attempts import error_type
from lanes.core.types import Failure, Message
from lanes.errors import MessageError
from lanes.queues.registered import QueuePartition

ERROR_TEXT_LIMIT: Final = 500
"""Maximum number of characters of an exception's text in a dead letter."""


REASON_LIMIT: Final = 80
"""Maximum number of characters of the one-line reason of a failure."""


class Details(NamedTuple):
    """Properties of a message at its broker that are not in ``Message``.

    Attributes:
        record_key: Key of the record at the broker, which may differ from ``Message.key``. ``None`` = no key.
        tombstone: Whether the record has no value. A record with an empty value is no tombstone.
        null_headers: Indices of the headers without a value, in ascending order.
        timestamp: Time of publication in seconds since 1970. ``None`` = unknown.
    """

    record_key: bytes | None = None
    tombstone: bool = False
    null_headers: tuple[int, ...] = ()
    timestamp: float | None = None


@runtime_checkable
class DetailedReader(Protocol):
    """An optional method of a ``Reader`` that reads the details of a message for its dead letter."""

    def details(self, raw: object) -> Details:
        """Read the details of a message. The call does not block, and changes nothing.

        Args:
            raw: The message as the client library delivered it.

        Returns:
            The details.
        """


@dataclass(frozen=True, kw_only=True, repr=False)
class DeadLetter:
    """A message that the consumer gave up.

    Attributes:
        id: 32 hex digits, which depend only on the origin. A second write of the dead letter has the same id.
        source: Name of the topic or stream.
        partition: Number of the partition.
        position: Position of the message.
        subject: Subject of the message; on a broker without subjects, the topic.
        key: Partition key of the message. ``None`` = no key.
        value: Payload of the message.
        headers: Headers of the message.
        attempts: Number of attempts, 1 or more.
        error_type: Name of the type of the last exception.
        error_text: Text of the last exception, at most ``ERROR_TEXT_LIMIT`` characters.
        epoch: Epoch of the assignment, as in ``Message.epoch``.
        time: Wall-clock time at which the consumer gave the message up, in seconds since 1970.
        record_key: See ``Details``.
        tombstone: See ``Details``.
        null_headers: See ``Details``.
        timestamp: See ``Details``.
        queue: Name of the source's partitioned queue, as the consumer registered it. ``None`` = the source belongs to
            no partitioned queue.
        queue_partition: Number of the source's physical queue in the partitioned queue. ``None`` = the source belongs
            to no partitioned queue.
        system: Kind of the broker of the source, as in ``SourceTraits.system``. "" = unknown.
        incarnation: Identity of the topic or stream: the id of the topic on Kafka, the creation time of the stream on
            JetStream. A topic or stream that is created again, or on another cluster, has another identity. "" =
            unknown.
    """

    id: str
    source: str
    partition: int
    position: int
    subject: str
    key: bytes | None
    value: bytes
    headers: Sequence[tuple[str, bytes]]
    attempts: int
    error_type: str
    error_text: str
    epoch: int
    time: float
    record_key: bytes | None = None
    tombstone: bool = False
    null_headers: Sequence[int] = ()
    timestamp: float | None = None
    queue: str | None = None
    queue_partition: int | None = None
    system: str = ""
    incarnation: str = ""

    def __repr__(self) -> str:
        return f"<DeadLetter {self.id} of {self.source}/{self.partition} position {self.position}>"


def dead_letter_id(source: str, incarnation: str, partition: int, position: int) -> str:
    """Return 32 hex digits that identify one message of one incarnation of a topic or stream."""
    # Users choose the names. Without the lengths, ("a", "b:0") and ("a:b", "0") would have the same id.
    text = f"{len(source)}:{source}{len(incarnation)}:{incarnation}{partition}:{position}"
    return blake3(text.encode()).hexdigest(length=16)


def dead_letter(
    message: Message, failure: Failure, wall_time: float, place: QueuePartition | None = None, system: str = ""
) -> DeadLetter:
    """Create the dead letter of a message that the consumer gave up.

    Args:
        message: The message.
        failure: The last failure.
        wall_time: Time at which the consumer gave the message up, in seconds since 1970.
        place: Physical queue of the message; None = the message belongs to no partitioned queue.
        system: Kind of the broker of the source; "" = unknown.

    Returns:
        The dead letter.
    """
    partition = message.partition
    error = failure.error
    return DeadLetter(
        id=dead_letter_id(partition.id.source, partition.incarnation, partition.id.number, message.position),
        source=partition.id.source,
        partition=partition.id.number,
        position=message.position,
        subject=message.subject,
        key=message.key,
        value=message.value,
        headers=message.headers,
        attempts=message.attempt,
        error_type=error_type(error),
        error_text=_reason_text(error),
        epoch=message.epoch,
        time=wall_time,
        **details(message)._asdict(),
        queue=None if place is None else place.queue,
        queue_partition=None if place is None else place.number,
        system=system,
        incarnation=partition.incarnation,
    )


def _reason_text(error: BaseException) -> str:
    """Return the text of an exception for a dead letter.

    The text begins with the error of ``decode=``, and the remedy of ``lanes`` follows.
    """
    text = error_text(error)
    if not isinstance(error, MessageError) or not error.decoder_error:
        return text
    remedy = f" ({text})"
    return _cut(error.decoder_error, ERROR_TEXT_LIMIT - len(remedy)) + remedy


def details(message: Message) -> Details:
    """Return the details that the reader of a message adds to its dead letter.

    Without such details, the result is empty.
    """
    reader = message.partition.reader
    return reader.details(message.raw) if isinstance(reader, DetailedReader) else Details()


def error_text(error: BaseException) -> str:
    """Return at most ``ERROR_TEXT_LIMIT`` characters of the text of an exception, encodable as UTF-8.

    If the ``__str__`` of the exception raises an error, the result names this error. The text of an exception group
    begins with the types and texts of its members, because the group's own text contains only their number.
    """
    text = _own_text(error)
    if isinstance(error, BaseExceptionGroup):
        members = "; ".join(
            f"{type(one).__qualname__}: {_own_text(one)}".removesuffix(": ") for one in members_of(error)
        )
        text = f"{members} ({text})"
    # A lone surrogate, such as from a file name that is not UTF-8, could not be encoded later.
    return _cut(text[: ERROR_TEXT_LIMIT + 1].encode(errors="backslashreplace").decode(), ERROR_TEXT_LIMIT)


def members_of(error: BaseException) -> list[BaseException]:
    """Return the exceptions in an exception group and its nested groups, in order.

    For any other exception, return the exception itself.
    """
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [member for one in error.exceptions for member in members_of(one)]


def _own_text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:
        return f"<{type(error).__qualname__}.__str__ raised {type(broken).__qualname__}>"


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def printable(text: str) -> str:
    """Escape every character of a text that is not printable."""
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


def described(error: BaseException) -> str:
    """Return the type and the escaped text of an exception as one line. If the text is empty, return only the type."""
    text = printable(error_text(error))
    return f"{type(error).__qualname__}: {text}" if text else type(error).__qualname__


def reason_line(kind: str, text: str) -> str:
    """Return the reason of a failure as one escaped line of at most ``REASON_LIMIT`` characters.

    Args:
        kind: Type of the exception.
        text: Text of the exception, which may be empty.

    Returns:
        The type and the text. For ``Nak``, ``Term`` or ``MessageError`` with a text, only the text, which the handler
        or ``decode=`` chose.
    """
    shown = text if text and kind in ("Nak", "Term", "MessageError") else f"{kind}: {text}" if text else kind
    # An escaped character is up to ten characters long, so the text is cut after it was escaped.
    shown = printable(shown[: REASON_LIMIT + 1])
    return _cut(shown, REASON_LIMIT)
