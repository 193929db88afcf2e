"""Dead letters for the operator: the box of a topic or subject, dispositions, and a replay by the user's handler."""

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

Disposition = Literal["replayed", "dropped"]
"""The end of a dead letter: handled or published again, or dropped for good."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StoredDeadLetter:
    """A dead letter and its location in a topic or stream.

    Attributes:
        dead_letter: The dead letter.
        place: Topic, partition and offset, or stream and sequence, of the stored dead letter, as text.
        whole_size: Number of bytes of the original value, if the value was cut to fit; None = the value is complete.
    """

    dead_letter: DeadLetter
    place: str
    whole_size: int | None = None

    def __repr__(self) -> str:
        return f"<StoredDeadLetter {self.dead_letter.id} at {self.place}>"


FoundDeadLetters = Mapping[str, StoredDeadLetter | Disposition]
"""Dead letters by id, or their disposition. The mapping lacks an id that the box does not know."""


class DeadLetterBox(Protocol):
    """The dead letters of one topic or subject. Disposing of an id disposes of every copy of its dead letter.

    Attributes:
        remembers: Whether ``find`` distinguishes a dead letter that was disposed of from an unknown id.
        other_messages: Number of messages seen so far that are not dead letters.
    """

    remembers: bool
    other_messages: int

    async def open(self) -> None:
        """Connect.

        Raises:
            ConfigError: The topic or subject does not exist.
            SourceError: The broker cannot be reached.
        """

    async def ids(self, limit: int | None = None) -> Sequence[str]:
        """List the dead letters that are not disposed of. Takes time in proportion to the number of messages.

        Args:
            limit: Maximum number of ids; None = no limit.

        Returns:
            The ids, the oldest dead letter first.

        Raises:
            SourceError: The broker cannot be read.
        """

    async def find(self, ids: Sequence[str]) -> FoundDeadLetters:
        """Read dead letters with their values. All values are in memory at once.

        Args:
            ids: Ids as ``ids`` returns them.

        Returns:
            The dead letters and dispositions by id.

        Raises:
            SourceError: The broker cannot be read.
        """

    async def dispose(self, stored: StoredDeadLetter, how: Disposition, /) -> None:
        """Remove the dead letter and all of its copies from the list, and wait for the broker's confirmation.

        Idempotent.

        Args:
            stored: A result of ``find`` of this box.
            how: The disposition.

        Raises:
            SourceError: The broker did not confirm the removal.
        """

    async def publish(self, stored: StoredDeadLetter, /) -> str:
        """Publish the original message at the end of its topic or stream, with the header ``Lanes-Dead-Letter``.

        The call does not dispose of the dead letter. The message omits headers that make the broker act.

        Args:
            stored: A result of ``find`` of this box.

        Returns:
            Topic, partition and offset, or stream and sequence, of the confirmed message, as text.

        Raises:
            SourceError: The origin does not exist or is no valid name, the client cannot send a header, or the broker
                did not confirm the message.
        """

    async def aclose(self) -> None:
        """Close the connection. Idempotent."""


class _DeadLetterReader:
    """The ``lanes.core.types.Reader`` of a dead letter."""

    def value(self, raw: object) -> bytes:
        return _dead_letter(raw).value

    def headers(self, raw: object) -> Sequence[tuple[str, bytes]]:
        return _dead_letter(raw).headers

    def subject(self, raw: object) -> str:
        return _dead_letter(raw).subject

    def details(self, raw: object) -> Details:
        dead_letter = _dead_letter(raw)
        return Details(
            dead_letter.record_key, dead_letter.tombstone, tuple(dead_letter.null_headers), dead_letter.timestamp
        )


_READER: Final = _DeadLetterReader()


def _dead_letter(raw: object) -> DeadLetter:
    assert isinstance(raw, DeadLetter)
    return raw


def message_of(dead_letter: DeadLetter) -> Message:
    """Make the original message of a dead letter as its handler received it, with attempt number 1."""
    partition = Partition(
        PartitionId(dead_letter.source, dead_letter.partition), _READER, fencing_token=dead_letter.epoch
    )
    size = len(dead_letter.value) + len(dead_letter.key or b"")
    size += sum(len(name) + len(value) for name, value in dead_letter.headers)
    message = Message(partition, dead_letter.position, dead_letter.key, size, dead_letter, None)
    message.received = monotonic()
    return message


async def replay(dead_letter: DeadLetter, handler: Callable[[Message], object], decode: Decode | None) -> None:
    """Call a handler once with the original message of a dead letter, and raise the handler's exception.

    A plain function runs in a thread, and a cancelled call waits for the end of the thread. Raises ``ConfigError`` for
    an object that is no handler of single messages.
    """
    check_handler(handler, decode, Settings())
    message = message_of(dead_letter)
    if is_async(handler):
        await async_handler(handler, decode)(message)
    else:
        await anyio.to_thread.run_sync(sync_handler(handler, decode), message)
