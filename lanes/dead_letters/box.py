"""The operator's side of dead letters: where they lie, what becomes of them, and the user's handler over one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

import anyio.to_thread

from lanes.clock import monotonic
from lanes.config import Settings
from lanes.core.types import Message, Partition, PartitionId
from lanes.dead_letter import DeadLetter, Details
from lanes.handlers import Decode, async_handler, check_handler, is_async, sync_handler

__all__ = ["Disposition", "Found", "LetterBox", "Parked", "message_of", "replay"]

Disposition = Literal["replayed", "dropped"]
"""What became of a letter: handled or published again, or given up for good."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Parked:
    """A letter where it lies. ``place``: for people. ``whole_size``: bytes its value had, where it was cut."""

    letter: DeadLetter
    place: str
    whole_size: int | None = None

    def __repr__(self) -> str:
        return f"<Parked {self.letter.id} at {self.place}>"


Found = Mapping[str, Parked | Disposition]
"""Letters by their ids; of one that is disposed of, how. One that is not there is not in it."""


class LetterBox(Protocol):
    """The dead letters of one topic or subject. A letter is disposed of by its id, once.

    ``remembers``: whether a letter that was disposed of is told from one that never was. ``strangers``: messages seen
    so far that are no dead letters.
    """

    remembers: bool
    strangers: int

    async def open(self) -> None:
        """Connect. Raises ``ConfigError`` when there is no such place, ``SourceError`` when it cannot be reached."""

    async def ids(self, limit: int | None = None) -> Sequence[str]:
        """The ids of the letters that are not disposed of, in the order they were parked, at most ``limit`` of them.

        Takes time with the number of messages. Raises ``SourceError``.
        """

    async def find(self, ids: Sequence[str]) -> Found:
        """The letters of these ids, whole: they are all in memory. Raises ``SourceError``."""

    async def dispose(self, parked: Parked, how: Disposition) -> None:
        """Have the letter listed no more, nor any copy of it, confirmed by the broker.

        ``parked``: as ``find`` of this box gave it. Idempotent. Raises ``SourceError``.
        """

    async def publish(self, parked: Parked) -> str:
        """Publish the original message at the end of where it came from, with the header ``Lanes-Dead-Letter``.

        Headers that the broker would act on are left out: they were meant for the first time. Returns where it is now,
        when the broker has confirmed that. Does not dispose of the letter. Raises ``SourceError``, also for a letter
        whose origin is not there or is no name, and for a header that the client cannot send: a letter is anybody's
        text.
        """

    async def aclose(self) -> None:
        """Close what ``open`` opened. Idempotent."""


class _LetterReader:
    """Looks into letters; see ``lanes.core.types.Reader``."""

    def value(self, raw: object) -> bytes:
        return _letter(raw).value

    def headers(self, raw: object) -> Sequence[tuple[str, bytes]]:
        return _letter(raw).headers

    def subject(self, raw: object) -> str:
        return _letter(raw).subject

    def details(self, raw: object) -> Details:
        letter = _letter(raw)
        return Details(letter.record_key, letter.tombstone, tuple(letter.null_headers), letter.timestamp)


_READER: Final = _LetterReader()


def _letter(raw: object) -> DeadLetter:
    assert isinstance(raw, DeadLetter)
    return raw


def message_of(letter: DeadLetter) -> Message:
    """The message that a letter was made of, as its handler saw it: a first attempt, in the assignment of then."""
    partition = Partition(PartitionId(letter.source, letter.partition), _READER, fencing_token=letter.epoch)
    size = len(letter.value) + len(letter.key or b"")
    size += sum(len(name) + len(value) for name, value in letter.headers)
    message = Message(partition, letter.position, letter.key, size, letter, None)
    message.received = monotonic()
    return message


async def replay(letter: DeadLetter, handler: Callable[[Message], object], decode: Decode | None) -> None:
    """Run a handler of one message over a letter, once, and raise what it raises.

    A plain function is called in a thread, as a consumer does it; cancelled, its end is waited for. Raises
    ``ConfigError`` for what is no handler.
    """
    check_handler(handler, decode, Settings())
    message = message_of(letter)
    if is_async(handler):
        await async_handler(handler, decode)(message)
    else:
        await anyio.to_thread.run_sync(sync_handler(handler, decode), message)
