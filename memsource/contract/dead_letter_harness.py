"""What a check of dead letters works with: a harness that the author of a backend writes, and letters of it."""

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

__all__ = [
    "NAMES",
    "LetterAbility",
    "LetterCheck",
    "LetterHarness",
    "Origin",
    "Published",
    "letter_from",
    "opened",
    "parked_in",
    "put",
]

LetterAbility = Literal["box", "place", "headers", "limit", "outage"]
"""``box``: there is a ``DeadLetterBox``. ``place``: letters need a topic, a stream, that has to be there. ``headers``:
they are kept whatever they are, repeated names and none of a value included. ``limit``: a letter has at most so many
bytes.
``outage``: the broker can be away."""

TIMEOUT: Final = 30.0
"""Seconds within which a broker does what is expected of it."""

_PAUSE: Final = 0.05
"""Seconds before a letter is written again."""


class Origin(NamedTuple):
    """Where a message comes from, as its letter says it."""

    source: str
    partition: int
    subject: str


class Published(NamedTuple):
    """A message where messages come from."""

    value: bytes
    headers: Sequence[tuple[str, bytes]]


class LetterHarness(Protocol):
    """One place of dead letters with nothing in it, and one with nothing in it where messages come from. Used for one
    check; what it asks for is closed by the check."""

    @property
    def can(self) -> Collection[LetterAbility]:
        """What the backend is able to: see ``LetterAbility``. What is left out is not checked."""

    @property
    def origin(self) -> Origin:
        """Where messages come from."""

    @property
    def limit(self) -> int:
        """Bytes that the broker takes at once, 4,000 or more. Asked for only with ``limit``."""

    def letters(self) -> DeadLetters:
        """What writes to the place, not open."""

    async def stored(self) -> Sequence[DeadLetter]:
        """What lies there, as the backend reads it: every copy."""

    # --- with "box"

    def box(self) -> DeadLetterBox:
        """What reads the place, not open."""

    async def copy(self, letter: DeadLetter) -> None:
        """Write it once more, also where the broker would know that it has it."""

    async def lose(self, letter_id: str) -> None:
        """Take away the first copy of a letter that lies there, as compaction and other people do."""

    async def stranger(self) -> None:
        """Write something to the place that is no letter."""

    async def published(self) -> Sequence[Published]:
        """What lies where messages come from."""

    def acted_on(self, name: str) -> bool:
        """Whether the broker acts on a header of this name: it is not sent a second time."""

    def forged(self) -> Sequence[Origin]:
        """Where nothing may be published to: what is no name, what is not there, what would command the broker. A
        letter is anybody's text."""

    # --- with "place"

    def nowhere(self) -> tuple[DeadLetters, DeadLetterBox]:
        """The same of a place that is not there."""

    def own(self) -> Origin:
        """Where a message comes from that is read from the place itself."""

    # --- with "outage"

    def outage(self) -> contextlib.AbstractAsyncContextManager[None]:
        """The broker is away within it, and back with all it had behind it."""

    async def hang_up(self, letters: DeadLetters) -> None:
        """End the client of these letters for good, as a broker does that hangs up on it. Nothing to do where a client
        always comes back by itself."""


LetterCheck = Callable[[LetterHarness], Awaitable[None]]
"""One promise of the contract, as a function that raises ``ContractBroken`` where it is not kept."""

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
"""What anybody may have called a header, and a broker or its client takes for its own, or cannot send."""


class _Opens(Protocol):
    async def open(self) -> None: ...

    async def aclose(self) -> None: ...


_Opened = TypeVar("_Opened", bound=_Opens)


@contextlib.asynccontextmanager
async def opened(what: _Opened) -> AsyncIterator[_Opened]:
    try:
        await what.open()
        yield what
    finally:
        with anyio.CancelScope(shield=True):
            await what.aclose()


class _Place(Protocol):
    @property
    def origin(self) -> Origin: ...


def letter_from(harness: _Place, position: int, **changes: Any) -> DeadLetter:
    """A letter of the message at a position of where messages come from."""
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


async def put(letters: DeadLetters, letter: DeadLetter) -> None:
    """Write a letter as a consumer does: again and again, until it is confirmed."""
    with anyio.move_on_after(TIMEOUT):
        while True:
            try:
                await letters.put(letter)
                return
            except Exception as error:
                again = isinstance(error, SourceError) and error.retryable
                expect(again, f"put of {letter!r} raised {error!r}, no retryable SourceError")
            await anyio.sleep(_PAUSE)
    raise ContractBroken(f"{letter!r} was not confirmed within {TIMEOUT:g} s")


async def parked_in(box: DeadLetterBox, letter: DeadLetter) -> StoredDeadLetter:
    found = (await box.find([letter.id])).get(letter.id)
    expect(isinstance(found, StoredDeadLetter), f"{letter!r} is parked, and {found!r} was found")
    assert isinstance(found, StoredDeadLetter)
    return found
