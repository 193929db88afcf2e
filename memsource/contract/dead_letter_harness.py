"""The tools of the checks of dead letters: the harness that the author of a backend writes, and test data."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeVar

import anyio

from lanes.dead_letter import DeadLetter, dead_letter_id
from lanes.dead_letters.box import DeadLetterBox, StoredDeadLetter
from lanes.errors import SourceError
from lanes.source import DeadLetters
from memsource.contract.harness import ContractBroken, expect

DeadLetterAbility = Literal["box", "place", "headers", "limit", "outage"]
"""An ability of a backend or its harness.

- ``box``: The backend has a ``DeadLetterBox``.
- ``place``: Dead letters need an existing topic or stream.
- ``headers``: The backend keeps all headers, also repeated names and headers without a value.
- ``limit``: A dead letter has a maximum size in bytes.
- ``outage``: The harness can stop the broker for a time.
"""

TIMEOUT: Final = 30.0
"""Seconds within which a broker must confirm a dead letter."""

_PAUSE: Final = 0.05
"""Seconds before the repetition of a failed write of a dead letter."""


class Origin(NamedTuple):
    """The origin of a message, as its dead letter states it.

    Attributes:
        source: Name of the source, which is a topic or a stream.
        partition: Number of the partition, 0 or more.
        subject: Subject of the message.
    """

    source: str
    partition: int
    subject: str


class Published(NamedTuple):
    """A message at the origin.

    Attributes:
        value: The payload.
        headers: All headers, in order.
    """

    value: bytes
    headers: Sequence[tuple[str, bytes]]


class DeadLetterHarness(Protocol):
    """An empty target for dead letters, and an empty origin of messages. Each check needs a new harness.

    A check closes every writer and every box that the harness returned.
    """

    @property
    def can(self) -> Collection[DeadLetterAbility]:
        """The abilities of the backend. The suite omits a check that needs any other ability."""

    @property
    def origin(self) -> Origin:
        """The origin of the messages that a check uses."""

    @property
    def limit(self) -> int:
        """Maximum bytes of one message at the broker, 4,000 or more.

        Only checks of the ability ``limit`` use this member.
        """

    def dead_letters(self) -> DeadLetters:
        """Return an unopened writer to the target."""

    async def stored(self) -> Sequence[DeadLetter]:
        """Return all dead letters of the target as the backend reads them, with every copy."""

    # --- with "box"

    def box(self) -> DeadLetterBox:
        """Return an unopened box over the target."""

    async def copy(self, dead_letter: DeadLetter) -> None:
        """Write one more copy of a dead letter, which the broker must not drop as a duplicate.

        Args:
            dead_letter: The dead letter to write again.
        """

    async def lose(self, dead_letter_id: str) -> None:
        """Delete the first copy of a dead letter, as compaction does.

        Args:
            dead_letter_id: The id of the dead letter.
        """

    async def stranger(self) -> None:
        """Write a message to the target that is no dead letter."""

    async def published(self) -> Sequence[Published]:
        """Return all messages at the origin."""

    def acted_on(self, name: str) -> bool:
        """Return whether the broker interprets a header, which ``publish`` therefore leaves out.

        Args:
            name: Name of the header.

        Returns:
            True if the broker interprets the header.
        """

    def forged(self) -> Sequence[Origin]:
        """Return origins that ``publish`` must refuse: invalid names, missing topics, and commands to the broker.

        A client with access to the target can write any origin into a dead letter.
        """

    # --- with "place"

    def nowhere(self) -> tuple[DeadLetters, DeadLetterBox]:
        """Return a writer and a box of a target that does not exist."""

    def own(self) -> Origin:
        """Return the origin of a message from the target itself."""

    # --- with "outage"

    def outage(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Return a context in which the broker is down. After the context the broker is up again with all its data."""

    async def hang_up(self, dead_letters: DeadLetters) -> None:
        """Close the client of a writer permanently, as after a broker closed the connection of the client.

        Args:
            dead_letters: The writer. The call does nothing if the client reconnects automatically.
        """


DeadLetterCheck = Callable[[DeadLetterHarness], Awaitable[None]]
"""One promise of the contract, as a function that raises ``ContractBroken`` if the backend breaks it."""

NAMES: Final = (
    "color",
    "Lanes-Id",
    "Lanes-Error",
    "lanes-partition",
    "Lanes-Disposition",
    "Lanes-Origin-color",
    "Lanes-Origin-%41",
    "lanes- é",
    "Nats-Msg-Id",
    "nats-é",
    "%41",
    "",
    "a b",
    "a:b",
    "é",
    "a\0b",
    "a\r\nLanes-Error: b",
    "\ud800",
)
"""Header names of users. A broker or its client interprets many of them, or cannot send them."""


class _Opens(Protocol):
    async def open(self) -> None: ...

    async def aclose(self) -> None: ...


_Opened = TypeVar("_Opened", bound=_Opens)


@contextlib.asynccontextmanager
async def opened(one: _Opened) -> AsyncIterator[_Opened]:
    """Open a writer or a box, and close it at the end."""
    try:
        await one.open()
        yield one
    finally:
        with anyio.CancelScope(shield=True):
            await one.aclose()


class _Place(Protocol):
    @property
    def origin(self) -> Origin: ...


def dead_letter_from(harness: _Place, position: int, **changes: Any) -> DeadLetter:
    """Return the dead letter of the message at a position of the origin, with some fields changed."""
    origin = harness.origin
    whole: dict[str, Any] = {
        **origin._asdict(),
        "id": dead_letter_id(origin.source, "", origin.partition, position),
        "position": position,
        "key": b"key",
        "value": b"value",
        "headers": (("color", b"red"),),
        "attempts": 3,
        "error_type": "ValueError",
        "error_text": "no such customer",
        "epoch": 2,
        "time": 1_700_000_000.25,
        "timestamp": 1_600_000_000.125,
    }
    whole |= changes
    whole.setdefault("record_key", whole["key"])
    return DeadLetter(**whole)


async def put(dead_letters: DeadLetters, dead_letter: DeadLetter) -> None:
    """Write a dead letter as a consumer does: repeat the call after each retryable error, for at most 30 s."""
    with anyio.move_on_after(TIMEOUT):
        while True:
            try:
                await dead_letters.put(dead_letter)
                return
            except Exception as error:
                again = isinstance(error, SourceError) and error.retryable
                expect(again, f"put({dead_letter!r}) raised {error!r} instead of a retryable SourceError")
            await anyio.sleep(_PAUSE)
    raise ContractBroken(
        f"put({dead_letter!r}) confirmed nothing within {TIMEOUT:g} s; it must confirm when the target works"
    )


async def stored_in(box: DeadLetterBox, dead_letter: DeadLetter) -> StoredDeadLetter:
    """Return the stored form of a dead letter that the box must find."""
    found = (await box.find([dead_letter.id])).get(dead_letter.id)
    expect(isinstance(found, StoredDeadLetter), f"find() returned {found!r} for the stored dead letter {dead_letter!r}")
    assert isinstance(found, StoredDeadLetter)
    return found
