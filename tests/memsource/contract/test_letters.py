"""The dead letters in memory keep the contract of dead letters, and the contract finds those that do not."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Final, cast, get_args

import pytest

from lanes.dead_letter import DeadLetter
from lanes.dead_letters.box import Disposition, FoundDeadLetters, StoredDeadLetter
from lanes.dead_letters.wire import REPLAYED, cut_to_fit
from lanes.errors import SourceError
from lanes.source import DeadLetters
from memsource import MemoryBroker, MemoryDeadLetters
from memsource.contract.dead_letters import (
    LETTER_CONTRACT_VERSION,
    LetterAbility,
    LetterCheck,
    LetterHarness,
    Origin,
    letter_checks,
)
from memsource.contract.harness import ContractBroken
from tests.memsource.contract.shelf import Box, Letters, Shelf, ShelfHarness, size

ASKED: Final = {
    1: {
        "abilities": ["box", "headers", "limit", "outage", "place"],
        "checks": [
            "a_forged_origin_is_refused",
            "a_letter_goes_back_to_where_it_came_from",
            "a_letter_lies_there_whole",
            "a_letter_put_again_is_one",
            "a_place_that_is_not_there_is_refused",
            "aclose_is_idempotent",
            "an_outage_is_waited_for",
            "any_copy_is_the_letter",
            "any_name_of_a_header_comes_back",
            "headers_come_back_as_they_were",
            "its_own_letters_are_refused",
            "letters_are_listed_and_found",
            "many_at_once_are_all_there",
            "what_cannot_be_sent_is_refused",
            "what_does_not_fit_is_cut",
            "what_is_disposed_of_is_gone_for_everybody",
            "what_is_no_letter_is_counted",
        ],
    }
}
"""By version; an older one is not kept."""


def name_of(check: LetterCheck) -> str:
    return check.__name__.removeprefix("check_")


def test_the_version_rises_with_what_is_asked_of_dead_letters() -> None:
    asked = {
        "abilities": sorted(get_args(LetterAbility)),
        "checks": sorted(map(name_of, letter_checks(get_args(LetterAbility)))),
    }
    assert asked == ASKED[LETTER_CONTRACT_VERSION], (
        "The contract has changed. If dead letters that kept it may not keep it now, raise LETTER_CONTRACT_VERSION and "
        "say so in docs/guides/writing-a-source.md and CHANGELOG.md. In any case write down here what it asks now."
    )


def test_an_ability_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'Box' in can=.* must be one of 'box', 'place'"):
        letter_checks(cast(Collection[LetterAbility], ["Box"]))


# --- what there is in memory


class MemoryHarness:
    """What every test of a handler uses: it writes, and a test looks at what there is."""

    can: Collection[LetterAbility] = ("headers", "outage")

    origin = Origin("memory", 0, "memory")

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self._made: list[MemoryDeadLetters] = []

    def letters(self) -> DeadLetters:
        self._made.append(MemoryDeadLetters(self.broker))
        return self._made[-1]

    async def stored(self) -> Sequence[DeadLetter]:
        return self.broker.dead_letters

    @contextlib.asynccontextmanager
    async def outage(self) -> AsyncIterator[None]:
        # As many as are tried while it lasts.
        for made in self._made:
            made.fail("put", SourceError("away", retryable=True), times=2)
        yield

    async def hang_up(self, letters: DeadLetters) -> None:
        """There is no client."""


@pytest.mark.anyio
@pytest.mark.parametrize("check", letter_checks(MemoryHarness.can), ids=name_of)
async def test_dead_letters_in_memory_keep_the_contract(check: LetterCheck) -> None:
    await check(cast(LetterHarness, MemoryHarness()))


# --- a place with a box, and places that do one thing wrong


@pytest.mark.anyio
@pytest.mark.parametrize("check", letter_checks(ShelfHarness.can), ids=name_of)
async def test_a_shelf_keeps_the_contract(check: LetterCheck) -> None:
    kept: LetterHarness = ShelfHarness()
    await check(kept)


class _Buffers(Letters):
    def lay(self, letter: DeadLetter) -> None:
        """Later, as it may be."""


class _WithoutKey(Letters):
    def lay(self, letter: DeadLetter) -> None:
        super().lay(dataclasses.replace(letter, record_key=None))


class _SpoiltNames(Letters):
    def lay(self, letter: DeadLetter) -> None:
        headers = [(name.strip().replace("\0", ""), value) for name, value in letter.headers]
        super().lay(dataclasses.replace(letter, headers=tuple(headers)))


class _OneOfAName(Letters):
    def lay(self, letter: DeadLetter) -> None:
        super().lay(dataclasses.replace(letter, headers=tuple(dict(letter.headers).items()), null_headers=()))


class _SaysLess(Letters):
    def lay(self, letter: DeadLetter) -> None:
        kept, _ = cut_to_fit(letter, ShelfHarness.limit, size)
        self.shelf.lying.append(StoredDeadLetter(dead_letter=kept, place="the shelf"))


class _CutsTheValue(Letters):
    def lay(self, letter: DeadLetter) -> None:
        super().lay(dataclasses.replace(letter, value=letter.value[:1_000]))


class _LosesOneOfTwo(Letters):
    def lay(self, letter: DeadLetter) -> None:
        if letter.position % 4 != 2:
            super().lay(letter)


class _TakesItsOwn(Letters):
    async def put(self, letter: DeadLetter) -> None:
        self.lay(letter)


class _StopsInAnOutage(Letters):
    absence = SourceError("away")


class _Breaks(Letters):
    """As a connection that was forgotten before there was another."""

    absence = AttributeError("'Connection' object has no attribute 'client'")


class _Anywhere(Letters):
    async def open(self) -> None:
        """It will be there."""


WRONG_LETTERS: Final[Mapping[type[Letters], str]] = {
    _Buffers: "a_letter_lies_there_whole",
    _WithoutKey: "a_letter_lies_there_whole",
    _SpoiltNames: "any_name_of_a_header_comes_back",
    _OneOfAName: "headers_come_back_as_they_were",
    _SaysLess: "what_does_not_fit_is_cut",
    _CutsTheValue: "what_does_not_fit_is_cut",
    _LosesOneOfTwo: "many_at_once_are_all_there",
    _TakesItsOwn: "its_own_letters_are_refused",
    _StopsInAnOutage: "an_outage_is_waited_for",
    _Breaks: "an_outage_is_waited_for",
    _Anywhere: "a_place_that_is_not_there_is_refused",
}


class _ListsCopies(Box):
    def listed(self, ids: Sequence[str]) -> list[str]:
        return [one for one in ids if one not in self.shelf.disposed]


class _Sorts(Box):
    def listed(self, ids: Sequence[str]) -> list[str]:
        return sorted(super().listed(ids))


class _FirstCopyAlone(Box):
    """It knows one place of a letter."""

    def __init__(self, shelf: Shelf, name: str = "dead") -> None:
        super().__init__(shelf, name)
        self.places: dict[str, StoredDeadLetter] = {}

    async def ids(self, limit: int | None = None) -> Sequence[str]:
        for one in self.shelf.lying:
            if one:
                self.places.setdefault(one.dead_letter.id, one)
        return await super().ids(limit)

    async def find(self, ids: Sequence[str]) -> FoundDeadLetters:
        found = await super().find(ids)
        return {
            one: it for one, it in found.items() if any(self.places.get(one, it) is each for each in self.shelf.lying)
        }


class _ForItselfAlone(Box):
    def __init__(self, shelf: Shelf, name: str = "dead") -> None:
        super().__init__(shelf, name)
        self.mine: set[str] = set()

    async def dispose(self, parked: StoredDeadLetter, how: Disposition) -> None:
        self.mine.add(parked.dead_letter.id)

    def listed(self, ids: Sequence[str]) -> list[str]:
        return [one for one in super().listed(ids) if one not in self.mine]


class _Refuses(Box):
    async def ids(self, limit: int | None = None) -> Sequence[str]:
        await super().ids(limit)
        self.other_messages = 0
        return await super().ids(limit) if None not in self.shelf.lying else []


class _Disposes(Box):
    async def publish(self, parked: StoredDeadLetter) -> str:
        await self.dispose(parked, "replayed")
        return await super().publish(parked)


class _WithoutOurs(Box):
    def again(self, letter: DeadLetter) -> list[tuple[str, bytes]]:
        return [header for header in super().again(letter) if header[0] in ("color", REPLAYED)]


class _LeavesOut(Box):
    def again(self, letter: DeadLetter) -> list[tuple[str, bytes]]:
        return [header for header in super().again(letter) if header[0].isascii()]


class _Trusts(Box):
    def refuses(self, letter: DeadLetter) -> bool:
        return False


WRONG_BOXES: Final[Mapping[type[Box], str]] = {
    _ListsCopies: "any_copy_is_the_letter",
    _Sorts: "letters_are_listed_and_found",
    _FirstCopyAlone: "any_copy_is_the_letter",
    _ForItselfAlone: "what_is_disposed_of_is_gone_for_everybody",
    _Refuses: "what_is_no_letter_is_counted",
    _Disposes: "a_letter_goes_back_to_where_it_came_from",
    _WithoutOurs: "a_letter_goes_back_to_where_it_came_from",
    _LeavesOut: "what_cannot_be_sent_is_refused",
    _Trusts: "a_forged_origin_is_refused",
}


def check_of(name: str) -> LetterCheck:
    (check,) = (check for check in letter_checks(get_args(LetterAbility)) if name_of(check) == name)
    return check


@pytest.mark.anyio
@pytest.mark.parametrize("wrong", WRONG_LETTERS, ids=lambda wrong: wrong.__name__.lstrip("_"))
async def test_the_contract_finds_letters_that_break_it(wrong: type[Letters]) -> None:
    with pytest.raises(ContractBroken):
        await check_of(WRONG_LETTERS[wrong])(ShelfHarness(letters=wrong))


@pytest.mark.anyio
@pytest.mark.parametrize("wrong", WRONG_BOXES, ids=lambda wrong: wrong.__name__.lstrip("_"))
async def test_the_contract_finds_a_box_that_breaks_it(wrong: type[Box]) -> None:
    with pytest.raises(ContractBroken):
        await check_of(WRONG_BOXES[wrong])(ShelfHarness(box=wrong))
