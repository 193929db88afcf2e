"""Dead letters in memory keep the contract suite of dead letters, and the suite finds backends that break it."""

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
    DEAD_LETTER_CONTRACT_VERSION,
    DeadLetterAbility,
    DeadLetterCheck,
    DeadLetterHarness,
    Origin,
    dead_letter_checks,
)
from memsource.contract.harness import ContractBroken
from tests.memsource.contract.dead_letter_place import Box, Place, PlaceHarness, Writer, size

ASKED: Final = {
    1: {
        "abilities": ["box", "headers", "limit", "outage", "place"],
        "checks": [
            "a_dead_letter_is_published_to_its_origin",
            "a_dead_letter_is_stored_whole",
            "a_dead_letter_put_again_is_one",
            "a_disposed_dead_letter_is_gone",
            "a_forged_origin_is_refused",
            "a_missing_place_is_refused",
            "aclose_is_idempotent",
            "an_outage_is_retryable",
            "an_oversized_dead_letter_is_cut",
            "an_unsendable_header_is_refused",
            "any_copy_is_the_dead_letter",
            "any_header_name_comes_back",
            "concurrent_puts_are_all_stored",
            "dead_letters_are_listed_and_found",
            "headers_come_back_as_they_were",
            "its_own_dead_letters_are_refused",
            "other_messages_are_counted",
        ],
    }
}
"""By version; only the newest is kept."""


def name_of(check: DeadLetterCheck) -> str:
    return check.__name__.removeprefix("check_")


def test_the_dead_letter_contract_has_the_checks_of_its_version() -> None:
    asked = {
        "abilities": sorted(get_args(DeadLetterAbility)),
        "checks": sorted(map(name_of, dead_letter_checks(get_args(DeadLetterAbility)))),
    }
    assert asked == ASKED[DEAD_LETTER_CONTRACT_VERSION], (
        "The contract has changed. If a backend that kept it may break it now, raise DEAD_LETTER_CONTRACT_VERSION and "
        "describe the change in docs/guides/writing-a-source.md and CHANGELOG.md. In any case update ASKED."
    )


def test_an_unknown_ability_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'Box' in can=.* must be one of 'box', 'place'"):
        dead_letter_checks(cast(Collection[DeadLetterAbility], ["Box"]))


# --- dead letters in memory


class MemoryHarness:
    """The dead letters that tests of handlers use. They have no box: a test reads the broker."""

    can: Collection[DeadLetterAbility] = ("headers", "outage")

    origin = Origin("memory", 0, "memory")

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self._made: list[MemoryDeadLetters] = []

    def dead_letters(self) -> DeadLetters:
        self._made.append(MemoryDeadLetters(self.broker))
        return self._made[-1]

    async def stored(self) -> Sequence[DeadLetter]:
        return self.broker.dead_letters

    @contextlib.asynccontextmanager
    async def outage(self) -> AsyncIterator[None]:
        # The check puts twice during the outage.
        for made in self._made:
            made.fail("put", SourceError("away", retryable=True), times=2)
        yield

    async def hang_up(self, dead_letters: DeadLetters) -> None:
        """There is no client."""


@pytest.mark.anyio
@pytest.mark.parametrize("check", dead_letter_checks(MemoryHarness.can), ids=name_of)
async def test_dead_letters_in_memory_keep_the_contract(check: DeadLetterCheck) -> None:
    await check(cast(DeadLetterHarness, MemoryHarness()))


# --- a place with a box, and places with one fault each


@pytest.mark.anyio
@pytest.mark.parametrize("check", dead_letter_checks(PlaceHarness.can), ids=name_of)
async def test_the_simplest_writer_of_dead_letters_keeps_the_contract(check: DeadLetterCheck) -> None:
    kept: DeadLetterHarness = PlaceHarness()
    await check(kept)


class _Buffers(Writer):
    def store(self, dead_letter: DeadLetter) -> None:
        """Store nothing."""


class _WithoutKey(Writer):
    def store(self, dead_letter: DeadLetter) -> None:
        super().store(dataclasses.replace(dead_letter, record_key=None))


class _SpoiltNames(Writer):
    def store(self, dead_letter: DeadLetter) -> None:
        headers = [(name.strip().replace("\0", ""), value) for name, value in dead_letter.headers]
        super().store(dataclasses.replace(dead_letter, headers=tuple(headers)))


class _OneOfAName(Writer):
    def store(self, dead_letter: DeadLetter) -> None:
        super().store(
            dataclasses.replace(dead_letter, headers=tuple(dict(dead_letter.headers).items()), null_headers=())
        )


class _SaysLess(Writer):
    def store(self, dead_letter: DeadLetter) -> None:
        kept, _ = cut_to_fit(dead_letter, PlaceHarness.limit, size)
        self.place.stored.append(StoredDeadLetter(dead_letter=kept, place="the place"))


class _CutsTheValue(Writer):
    def store(self, dead_letter: DeadLetter) -> None:
        super().store(dataclasses.replace(dead_letter, value=dead_letter.value[:1_000]))


class _LosesOneOfTwo(Writer):
    def store(self, dead_letter: DeadLetter) -> None:
        if dead_letter.position % 4 != 2:
            super().store(dead_letter)


class _TakesItsOwn(Writer):
    async def put(self, dead_letter: DeadLetter) -> None:
        self.store(dead_letter)


class _StopsInAnOutage(Writer):
    absence = SourceError("away")


class _Breaks(Writer):
    """The former connection is closed before the next one is open."""

    absence = AttributeError("'Connection' object has no attribute 'client'")


class _Anywhere(Writer):
    async def open(self) -> None:
        """Do not check the place."""


WRONG_WRITERS: Final[Mapping[type[Writer], str]] = {
    _Buffers: "a_dead_letter_is_stored_whole",
    _WithoutKey: "a_dead_letter_is_stored_whole",
    _SpoiltNames: "any_header_name_comes_back",
    _OneOfAName: "headers_come_back_as_they_were",
    _SaysLess: "an_oversized_dead_letter_is_cut",
    _CutsTheValue: "an_oversized_dead_letter_is_cut",
    _LosesOneOfTwo: "concurrent_puts_are_all_stored",
    _TakesItsOwn: "its_own_dead_letters_are_refused",
    _StopsInAnOutage: "an_outage_is_retryable",
    _Breaks: "an_outage_is_retryable",
    _Anywhere: "a_missing_place_is_refused",
}


class _ListsCopies(Box):
    def listed(self, ids: Sequence[str]) -> list[str]:
        return [one for one in ids if one not in self.place.disposed]


class _Sorts(Box):
    def listed(self, ids: Sequence[str]) -> list[str]:
        return sorted(super().listed(ids))


class _FirstCopyAlone(Box):
    """A box that remembers only the first copy of each dead letter."""

    def __init__(self, place: Place, name: str = "dead") -> None:
        super().__init__(place, name)
        self.places: dict[str, StoredDeadLetter] = {}

    async def ids(self, limit: int | None = None) -> Sequence[str]:
        for one in self.place.stored:
            if one:
                self.places.setdefault(one.dead_letter.id, one)
        return await super().ids(limit)

    async def find(self, ids: Sequence[str]) -> FoundDeadLetters:
        found = await super().find(ids)
        return {
            one: it for one, it in found.items() if any(self.places.get(one, it) is each for each in self.place.stored)
        }


class _ForItselfAlone(Box):
    def __init__(self, place: Place, name: str = "dead") -> None:
        super().__init__(place, name)
        self.mine: set[str] = set()

    async def dispose(self, stored: StoredDeadLetter, how: Disposition) -> None:
        self.mine.add(stored.dead_letter.id)

    def listed(self, ids: Sequence[str]) -> list[str]:
        return [one for one in super().listed(ids) if one not in self.mine]


class _Refuses(Box):
    async def ids(self, limit: int | None = None) -> Sequence[str]:
        await super().ids(limit)
        self.other_messages = 0
        return await super().ids(limit) if None not in self.place.stored else []


class _Disposes(Box):
    async def publish(self, stored: StoredDeadLetter) -> str:
        await self.dispose(stored, "replayed")
        return await super().publish(stored)


class _WithoutOurs(Box):
    def again(self, dead_letter: DeadLetter) -> list[tuple[str, bytes]]:
        return [header for header in super().again(dead_letter) if header[0] in ("color", REPLAYED)]


class _LeavesOut(Box):
    def again(self, dead_letter: DeadLetter) -> list[tuple[str, bytes]]:
        return [header for header in super().again(dead_letter) if header[0].isascii()]


class _Trusts(Box):
    def refuses(self, dead_letter: DeadLetter) -> bool:
        return False


WRONG_BOXES: Final[Mapping[type[Box], str]] = {
    _ListsCopies: "any_copy_is_the_dead_letter",
    _Sorts: "dead_letters_are_listed_and_found",
    _FirstCopyAlone: "any_copy_is_the_dead_letter",
    _ForItselfAlone: "a_disposed_dead_letter_is_gone",
    _Refuses: "other_messages_are_counted",
    _Disposes: "a_dead_letter_is_published_to_its_origin",
    _WithoutOurs: "a_dead_letter_is_published_to_its_origin",
    _LeavesOut: "an_unsendable_header_is_refused",
    _Trusts: "a_forged_origin_is_refused",
}


def check_of(name: str) -> DeadLetterCheck:
    (check,) = (check for check in dead_letter_checks(get_args(DeadLetterAbility)) if name_of(check) == name)
    return check


@pytest.mark.anyio
@pytest.mark.parametrize("wrong", WRONG_WRITERS, ids=lambda wrong: wrong.__name__.lstrip("_"))
async def test_the_contract_finds_a_writer_that_breaks_it(wrong: type[Writer]) -> None:
    with pytest.raises(ContractBroken):
        await check_of(WRONG_WRITERS[wrong])(PlaceHarness(writer=wrong))


@pytest.mark.anyio
@pytest.mark.parametrize("wrong", WRONG_BOXES, ids=lambda wrong: wrong.__name__.lstrip("_"))
async def test_the_contract_finds_a_box_that_breaks_it(wrong: type[Box]) -> None:
    with pytest.raises(ContractBroken):
        await check_of(WRONG_BOXES[wrong])(PlaceHarness(box=wrong))
