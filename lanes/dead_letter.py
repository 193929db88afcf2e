"""A dead letter: a message that was given up, with where it came from and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, runtime_checkable

from blake3 import blake3

from lanes.attempts import error_type
from lanes.core.types import Failure, Message

__all__ = [
    "ERROR_TEXT_LIMIT",
    "DeadLetter",
    "DetailedReader",
    "Details",
    "dead_letter",
    "dead_letter_id",
    "details",
    "error_text",
]

ERROR_TEXT_LIMIT: Final = 500
"""Characters of an exception's text that a dead letter keeps."""


class Details(NamedTuple):
    """What a broker knows of a message beside what every ``Message`` has.

    ``record_key``: the key it keeps, whatever the key of the lane is. ``tombstone``: it has no value, which is not the
    same as an empty one. ``null_headers``: which of the headers have no value, as rising indices. ``timestamp``: when
    it was published, in seconds since the epoch; None = unknown.
    """

    record_key: bytes | None = None
    tombstone: bool = False
    null_headers: tuple[int, ...] = ()
    timestamp: float | None = None


@runtime_checkable
class DetailedReader(Protocol):
    """What a ``Reader`` may have too, so that dead letters keep the details."""

    def details(self, raw: object) -> Details:
        """Neither blocks nor changes the message."""


@dataclass(frozen=True, kw_only=True, repr=False)
class DeadLetter:
    """One parked message.

    ``id`` is a function of where the message came from alone, so that writing it twice can be recognised.
    ``time`` is wall-clock seconds since the epoch. ``error_text`` is at most ``ERROR_TEXT_LIMIT`` characters.
    ``key`` is the key of the lane. See ``Details`` for the last four.
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

    def __repr__(self) -> str:
        return f"<DeadLetter {self.id} of {self.source}/{self.partition} position {self.position}>"


def dead_letter_id(source: str, incarnation: str, partition: int, position: int) -> str:
    """32 hex digits that name one message of one incarnation of a topic or stream."""
    # The length prefix keeps ("a", "b:0") and ("a:b", "0") apart: names are the user's.
    text = f"{len(source)}:{source}{len(incarnation)}:{incarnation}{partition}:{position}"
    return blake3(text.encode()).hexdigest(length=16)


def dead_letter(message: Message, failure: Failure, wall_time: float) -> DeadLetter:
    """The letter for a message whose handling was given up with ``failure`` at ``wall_time``."""
    partition = message.partition
    error = failure.error
    known = details(message)
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
        error_text=error_text(error),
        epoch=message.epoch,
        time=wall_time,
        record_key=known.record_key,
        tombstone=known.tombstone,
        null_headers=known.null_headers,
        timestamp=known.timestamp,
    )


def details(message: Message) -> Details:
    """The details of a message, as far as its source knows any."""
    reader = message.partition.reader
    return reader.details(message.raw) if isinstance(reader, DetailedReader) else Details()


def error_text(error: BaseException) -> str:
    """The exception's own text, bounded and encodable; one that cannot be rendered says so instead of raising."""
    try:
        text = str(error)
    except Exception as broken:
        text = f"<{type(error).__qualname__}.__str__ raised {type(broken).__qualname__}>"
    # Lone surrogates, as of a file name that is not UTF-8, could not be written anywhere.
    text = text[: ERROR_TEXT_LIMIT + 1].encode(errors="backslashreplace").decode()
    return text if len(text) <= ERROR_TEXT_LIMIT else text[: ERROR_TEXT_LIMIT - 1] + "…"
