"""The operator's access to dead letters: the box of a topic or subject, dispositions, and a replay by a handler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol, runtime_checkable

import anyio.to_thread

from lanes.clock import monotonic
from lanes.config import Settings
from lanes.core.types import Message, Partition, PartitionId
from lanes.dead_letter import DeadLetter, Details
from lanes.errors import SourceError
from lanes.handlers import Decode, async_handler, check_handler, check_returned, is_async, sync_handler

Disposition = Literal["replayed", "dropped"]
"""The end of a dead letter: handled or published again, or dropped permanently."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StoredDeadLetter:
    """A dead letter and its location in a topic or stream.

    Attributes:
        dead_letter: The dead letter.
        place: Topic, partition and offset, or stream and sequence, of the stored dead letter, as text.
        whole_size: Bytes of the original value of a shortened dead letter; None = the dead letter is complete. If the
            value still has this size, only the headers were removed.
    """

    dead_letter: DeadLetter
    place: str
    whole_size: int | None = None

    def __repr__(self) -> str:
        return f"<StoredDeadLetter {self.dead_letter.id} at {self.place}>"


FoundDeadLetters = Mapping[str, StoredDeadLetter | Disposition]
"""Dead letters by id, or their disposition. The mapping lacks an id that the box does not know."""


class DeadLetterBox(Protocol):
    """The dead letters of one topic or subject. A disposition of an id applies to every copy of the dead letter.

    Attributes:
        remembers: Whether the latest ``find`` could distinguish dead letters with a disposition from unknown ids.
        other_messages: Number of messages read by this box that are not dead letters.
    """

    remembers: bool
    other_messages: int

    async def open(self) -> None:
        """Connect.

        Raises:
            ConfigError: The topic or subject does not exist.
            SourceError: The client cannot reach the broker.
        """

    async def ids(self, limit: int | None = None) -> Sequence[str]:
        """List the dead letters without a disposition. The call takes time in proportion to the number of messages.

        Args:
            limit: Maximum number of ids; None = no limit.

        Returns:
            The ids, the oldest dead letter first.

        Raises:
            SourceError: A read from the broker failed.
        """

    async def find(self, ids: Sequence[str]) -> FoundDeadLetters:
        """Read dead letters with their values. All values are in memory at once.

        Args:
            ids: Ids as ``ids`` returns them.

        Returns:
            The dead letters and dispositions by id.

        Raises:
            SourceError: A read from the broker failed.
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

        The call does not dispose of the dead letter. The message omits headers that the broker interprets as
        instructions.

        Args:
            stored: A result of ``find`` of this box.

        Returns:
            Topic, partition and offset, or stream and sequence, of the confirmed message, as text.

        Raises:
            SourceError: The origin is missing, invalid or at another broker, the client cannot send a header, or the
                broker did not confirm the message.
        """

    async def aclose(self) -> None:
        """Close the connection. Idempotent."""


@runtime_checkable
class Explaining(Protocol):
    """A box that can name other locations of dead letters if its own topic or subject has none.

    A box need not implement this Protocol.
    """

    async def why_empty(self) -> str:
        """Name other locations of dead letters, for a topic or subject without dead letters.

        Returns:
            A text for the end of a line that begins with "no dead letters"; "" = no other location.

        Raises:
            SourceError: A read from the broker failed.
        """


def check_origin(dead_letter: DeadLetter, systems: Sequence[str], what: str = "", found: str | None = None) -> None:
    """Raise ``SourceError`` for a dead letter whose origin is not at the broker of its box.

    The function does not check a fact that the dead letter does not contain.

    Args:
        dead_letter: The dead letter.
        systems: Kinds of brokers whose messages the box can publish, beginning with the kind of the box's broker.
        what: Name of the compared fact, such as ``id``.
        found: Incarnation of the topic or stream with the origin's name; "" = unknown, None = missing or not compared.
    """
    own, origin = systems[0], f"{dead_letter.source[:80]}/{dead_letter.partition}"
    if dead_letter.system and dead_letter.system not in systems:
        raise SourceError(
            f"dead letter {dead_letter.id}: its origin {origin!a} is on {dead_letter.system[:80]!a}, but --to-origin "
            f"publishes only to the server of the dead letters, {own}. Replay the dead letter with --handler; or "
            "publish the message yourself, then drop the dead letter"
        )
    recorded = dead_letter.incarnation
    if dead_letter.system == own and recorded and found and found != recorded:
        raise SourceError(
            f"dead letter {dead_letter.id}: its origin {origin!a} has the {what} {recorded[:80]!a}, and here the "
            f"{what} is {found!a}, so the cluster differs or the origin was recreated. Replay the dead letter "
            "with --handler, or add --new-origin to publish here"
        )


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
    """Make the original message of a dead letter as its handler received it, with attempt number 1.

    The size is in bytes: value, key, and names and values of the headers in UTF-8.
    """
    partition = Partition(
        PartitionId(dead_letter.source, dead_letter.partition), _READER, fencing_token=dead_letter.epoch
    )
    size = len(dead_letter.value) + len(dead_letter.key or b"")
    # A name may contain a lone surrogate, which has no bytes in UTF-8.
    size += sum(len(name.encode(errors="replace")) + len(value) for name, value in dead_letter.headers)
    message = Message(partition, dead_letter.position, dead_letter.key, size, dead_letter, None)
    message.received = monotonic()
    return message


async def replay(dead_letter: DeadLetter, handler: Callable[[Message], object], decode: Decode | None) -> None:
    """Call a handler once with the original message of a dead letter, and raise the handler's exception.

    A plain function runs in a thread, and a cancelled call waits for the end of the thread. Raises ``ConfigError`` for
    an object that is not a handler of single messages.
    """
    check_handler(handler, decode, Settings())
    message = message_of(dead_letter)
    if is_async(handler):
        returned = await async_handler(handler, decode)(message)
        if returned is not None:
            check_returned(handler, returned, message)
    else:
        await anyio.to_thread.run_sync(sync_handler(handler, decode), message)
