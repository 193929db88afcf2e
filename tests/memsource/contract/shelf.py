"""The simplest place of dead letters that keeps the whole contract, for tests of the contract itself."""

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
from memsource.contract.dead_letters import LetterAbility, Origin, Published


class Shelf:
    """A place of letters, and one where messages come from."""

    def __init__(self) -> None:
        self.lying: list[StoredDeadLetter | None] = []
        self.disposed: dict[str, Disposition] = {}
        self.published: list[Published] = []
        self.away = False


class Letters:
    """Dead letters that keep the contract."""

    def __init__(self, shelf: Shelf, name: str = "dead") -> None:
        self.shelf, self.name = shelf, name

    async def open(self) -> None:
        if self.name != "dead":
            raise ConfigError(f"there is no {self.name}")

    async def put(self, letter: DeadLetter) -> None:
        await anyio.lowlevel.checkpoint()
        if self.shelf.away:
            raise self.absence
        if letter.source == self.name:
            raise SourceError("every letter would make another")
        self.lay(letter)

    absence: Exception = SourceError("away", retryable=True)

    def lay(self, letter: DeadLetter) -> None:
        kept, whole = cut_to_fit(letter, ShelfHarness.limit, size)
        self.shelf.lying.append(StoredDeadLetter(dead_letter=kept, place="the shelf", whole_size=whole))

    async def aclose(self) -> None:
        """Nothing is open."""


class Box:
    """A box that keeps the contract."""

    remembers = True
    other_messages = 0

    def __init__(self, shelf: Shelf, name: str = "dead") -> None:
        self.shelf, self.name = shelf, name

    async def open(self) -> None:
        await Letters(self.shelf, self.name).open()

    async def ids(self, limit: int | None = None) -> Sequence[str]:
        await anyio.lowlevel.checkpoint()
        self.other_messages = self.shelf.lying.count(None)
        return self.listed([one.dead_letter.id for one in self.shelf.lying if one])[:limit]

    def listed(self, ids: Sequence[str]) -> list[str]:
        return [one for one in dict.fromkeys(ids) if one not in self.shelf.disposed]

    async def find(self, ids: Sequence[str]) -> FoundDeadLetters:
        await anyio.lowlevel.checkpoint()
        parked = {one.dead_letter.id: one for one in self.shelf.lying if one}
        return {one: self.shelf.disposed.get(one) or parked[one] for one in ids if one in parked}

    async def dispose(self, parked: StoredDeadLetter, how: Disposition) -> None:
        await anyio.lowlevel.checkpoint()
        self.shelf.disposed.setdefault(parked.dead_letter.id, how)

    async def publish(self, parked: StoredDeadLetter) -> str:
        await anyio.lowlevel.checkpoint()
        letter = parked.dead_letter
        if self.refuses(letter):
            raise SourceError(f"{letter.source} is not there")
        self.shelf.published.append(Published(letter.value, self.again(letter)))
        return "the end of orders"

    def refuses(self, letter: DeadLetter) -> bool:
        return letter.source != ShelfHarness.origin.source

    def again(self, letter: DeadLetter) -> list[tuple[str, bytes]]:
        return [*((name, value) for name, value in letter.headers if name != REPLAYED), (REPLAYED, letter.id.encode())]

    async def aclose(self) -> None:
        """Nothing is open."""


def size(letter: DeadLetter, whole: int | None) -> int:
    return len(letter.value) + sum(len(value) for _, value in letter.headers)


class ShelfHarness:
    can: Collection[LetterAbility] = get_args(LetterAbility)
    origin = Origin("orders", 0, "orders")
    limit = 5_000

    def __init__(self, letters: type[Letters] = Letters, box: type[Box] = Box) -> None:
        self._shelf, self._letters, self._box = Shelf(), letters, box

    def letters(self) -> DeadLetters:
        return self._letters(self._shelf)

    async def stored(self) -> Sequence[DeadLetter]:
        return [one.dead_letter for one in self._shelf.lying if one]

    def box(self) -> DeadLetterBox:
        return self._box(self._shelf)

    async def copy(self, letter: DeadLetter) -> None:
        Letters(self._shelf).lay(letter)

    async def lose(self, letter_id: str) -> None:
        lying = self._shelf.lying
        del lying[next(place for place, one in enumerate(lying) if one and one.dead_letter.id == letter_id)]

    async def stranger(self) -> None:
        self._shelf.lying.append(None)

    async def published(self) -> Sequence[Published]:
        return self._shelf.published

    def acted_on(self, name: str) -> bool:
        return False

    def forged(self) -> Sequence[Origin]:
        return [Origin("elsewhere", 0, "elsewhere")]

    def nowhere(self) -> tuple[DeadLetters, DeadLetterBox]:
        return self._letters(self._shelf, "nowhere"), self._box(self._shelf, "nowhere")

    def own(self) -> Origin:
        return Origin("dead", 0, "dead")

    @contextlib.asynccontextmanager
    async def outage(self) -> AsyncIterator[None]:
        self._shelf.away = True
        yield
        self._shelf.away = False

    async def hang_up(self, letters: DeadLetters) -> None:
        """There is no client."""
