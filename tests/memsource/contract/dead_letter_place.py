"""The simplest store of dead letters that keeps the whole contract, for tests of the contract itself."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Collection, Sequence
from typing import get_args

import anyio
import anyio.lowlevel

from lanes.dead_letter import DeadLetter
from lanes.dead_letters.box import DeadLetterBox, Disposition, FoundDeadLetters, StoredDeadLetter
from lanes.dead_letters.wire import REPLAYED, cut_to_fit
from lanes.errors import ConfigError, SourceError
from lanes.source import DeadLetters
from memsource.contract.dead_letters import DeadLetterAbility, Origin, Published


class Place:
    """A store of dead letters, and the origin of their messages."""

    def __init__(self) -> None:
        self.stored: list[StoredDeadLetter | None] = []
        self.disposed: dict[str, Disposition] = {}
        self.published: list[Published] = []
        self.away = False


class Writer:
    """A writer that keeps the contract."""

    def __init__(self, place: Place, name: str = "dead") -> None:
        self.place, self.name = place, name

    async def open(self) -> None:
        if self.name != "dead":
            raise ConfigError(f"there is no {self.name}")

    async def put(self, dead_letter: DeadLetter) -> None:
        await anyio.lowlevel.checkpoint()
        if self.place.away:
            raise self.absence
        if dead_letter.source == self.name:
            raise SourceError("every dead letter would make another")
        self.store(dead_letter)

    absence: Exception = SourceError("away", retryable=True)

    def store(self, dead_letter: DeadLetter) -> None:
        kept, whole = cut_to_fit(dead_letter, PlaceHarness.limit, size)
        self.place.stored.append(StoredDeadLetter(dead_letter=kept, place="the place", whole_size=whole))

    async def aclose(self) -> None:
        """There is no connection to close."""


class Box:
    """A box that keeps the contract."""

    remembers = True
    other_messages = 0

    def __init__(self, place: Place, name: str = "dead") -> None:
        self.place, self.name = place, name

    async def open(self) -> None:
        await Writer(self.place, self.name).open()

    async def ids(self, limit: int | None = None) -> Sequence[str]:
        await anyio.lowlevel.checkpoint()
        self.other_messages = self.place.stored.count(None)
        return self.listed([one.dead_letter.id for one in self.place.stored if one])[:limit]

    def listed(self, ids: Sequence[str]) -> list[str]:
        return [one for one in dict.fromkeys(ids) if one not in self.place.disposed]

    async def find(self, ids: Sequence[str]) -> FoundDeadLetters:
        await anyio.lowlevel.checkpoint()
        stored = {one.dead_letter.id: one for one in self.place.stored if one}
        return {one: self.place.disposed.get(one) or stored[one] for one in ids if one in stored}

    async def dispose(self, stored: StoredDeadLetter, how: Disposition) -> None:
        await anyio.lowlevel.checkpoint()
        self.place.disposed.setdefault(stored.dead_letter.id, how)

    async def publish(self, stored: StoredDeadLetter) -> str:
        await anyio.lowlevel.checkpoint()
        dead_letter = stored.dead_letter
        if self.refuses(dead_letter):
            raise SourceError(f"{dead_letter.source} is not there")
        self.place.published.append(Published(dead_letter.value, self.again(dead_letter)))
        return "the end of orders"

    def refuses(self, dead_letter: DeadLetter) -> bool:
        return dead_letter.source != PlaceHarness.origin.source

    def again(self, dead_letter: DeadLetter) -> list[tuple[str, bytes]]:
        return [
            *((name, value) for name, value in dead_letter.headers if name != REPLAYED),
            (REPLAYED, dead_letter.id.encode()),
        ]

    async def aclose(self) -> None:
        """There is no connection to close."""


def size(dead_letter: DeadLetter, whole: int | None) -> int:
    return len(dead_letter.value) + sum(len(value) for _, value in dead_letter.headers)


class PlaceHarness:
    can: Collection[DeadLetterAbility] = get_args(DeadLetterAbility)
    origin = Origin("orders", 0, "orders")
    limit = 5_000

    def __init__(self, writer: type[Writer] = Writer, box: type[Box] = Box) -> None:
        self._place, self._writer, self._box = Place(), writer, box

    def dead_letters(self) -> DeadLetters:
        return self._writer(self._place)

    async def stored(self) -> Sequence[DeadLetter]:
        return [one.dead_letter for one in self._place.stored if one]

    def box(self) -> DeadLetterBox:
        return self._box(self._place)

    async def copy(self, dead_letter: DeadLetter) -> None:
        Writer(self._place).store(dead_letter)

    async def lose(self, dead_letter_id: str) -> None:
        stored = self._place.stored
        del stored[next(place for place, one in enumerate(stored) if one and one.dead_letter.id == dead_letter_id)]

    async def stranger(self) -> None:
        self._place.stored.append(None)

    async def published(self) -> Sequence[Published]:
        return self._place.published

    def acted_on(self, name: str) -> bool:
        return False

    def forged(self) -> Sequence[Origin]:
        return [Origin("elsewhere", 0, "elsewhere")]

    def nowhere(self) -> tuple[DeadLetters, DeadLetterBox]:
        return self._writer(self._place, "nowhere"), self._box(self._place, "nowhere")

    def own(self) -> Origin:
        return Origin("dead", 0, "dead")

    @contextlib.asynccontextmanager
    async def outage(self) -> AsyncIterator[None]:
        self._place.away = True
        yield
        self._place.away = False

    async def hang_up(self, dead_letters: DeadLetters) -> None:
        """Do nothing: there is no client."""
