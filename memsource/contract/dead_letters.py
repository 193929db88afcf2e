"""The contract suite of dead letters: what ``lanes.source.DeadLetters`` and ``lanes.dead_letters.box.DeadLetterBox``
promise.

Whoever writes a backend's dead letters writes a ``LetterHarness`` for them and runs every check of
``letter_checks(harness.can)``, each with a harness of its own, under any test runner. A check that fails raises
``ContractBroken``. One backend writes the letters and reads them: what the one does the other has to understand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Final, get_args

import anyio
import anyio.lowlevel

from lanes.dead_letter import DeadLetter, dead_letter_id
from lanes.errors import ConfigError, SourceError
from lanes.source import DeadLetters
from memsource.contract.dead_letter_box import BOX_CHECKS
from memsource.contract.dead_letter_harness import (
    NAMES,
    LetterAbility,
    LetterCheck,
    LetterHarness,
    Origin,
    Published,
    letter_from,
    opened,
    parked_in,
    put,
)
from memsource.contract.harness import ContractBroken, expect

__all__ = [
    "LETTER_CONTRACT_VERSION",
    "LetterAbility",
    "LetterCheck",
    "LetterHarness",
    "Origin",
    "Published",
    "letter_checks",
]

LETTER_CONTRACT_VERSION: Final = 1
"""Rises when dead letters that kept the contract may not keep it any more; see ``lanes.source.CONTRACT_VERSION``."""

_CHECKS: Final[list[tuple[LetterCheck, tuple[LetterAbility, ...]]]] = []


def letter_checks(can: Collection[LetterAbility]) -> list[LetterCheck]:
    """The checks for dead letters that are able to do this, in order. Raises ``ValueError`` for what is no ability."""
    known = get_args(LetterAbility)
    for each in can:
        if each not in known:
            raise ValueError(f"{each!r} in can={can!r} is no ability: must be one of {', '.join(map(repr, known))}")
    return [check for check, needs in _CHECKS if all(each in can for each in needs)]


def _check(*needs: LetterAbility) -> Callable[[LetterCheck], LetterCheck]:
    def register(check: LetterCheck) -> LetterCheck:
        _CHECKS.append((check, needs))
        return check

    return register


# --- what is written


@_check()
async def check_a_letter_lies_there_whole(harness: LetterHarness) -> None:
    """When ``put`` returns it is there, with all that it says: keys of its own, none, and empty ones; no value."""
    sent = [
        letter_from(harness, 1),
        letter_from(harness, 2, key=None, value=b"", tombstone=True),
        letter_from(harness, 3, key=None, value=b""),
        letter_from(harness, 4, key=b"", value=bytes(range(256))),
        letter_from(harness, 5, key=b"lane", record_key=b"\xffrecord"),
        letter_from(
            harness, 6, key=b"lane", record_key=None, error_text="no\r\nLanes-Epoch: 9\0 é %41", timestamp=None
        ),
    ]
    async with opened(harness.letters()) as letters:
        for one in sent:
            await letters.put(one)
            expect(one in await harness.stored(), f"{one!r} is not there as it was put: {await harness.stored()}")


@_check()
async def check_a_letter_put_again_is_one(harness: LetterHarness) -> None:
    """Its id says which it is: after an answer that was lost it is put again."""
    one = letter_from(harness, 1)
    async with opened(harness.letters()) as letters:
        await letters.put(one)
        await letters.put(one)
    found = await harness.stored()
    expect(all(each == one for each in found), f"{found} lie there, {one!r} was put")
    if "box" in harness.can:
        async with opened(harness.box()) as box:
            expect(list(await box.ids()) == [one.id], f"{await box.ids()} are listed of {one.id}, which was put twice")


@_check()
async def check_any_name_of_a_header_comes_back(harness: LetterHarness) -> None:
    """Also one that the broker or the letter itself would understand, and one that no client can send."""
    one = letter_from(harness, 1, headers=tuple((name, b"%d" % number) for number, name in enumerate(NAMES)))
    async with opened(harness.letters()) as letters:
        await put(letters, one)
    (found,) = await harness.stored()
    lost = dict(one.headers).items() ^ dict(found.headers).items()
    expect(not lost, f"headers came back otherwise: {sorted(lost)!a}")
    same = dataclasses.replace(found, headers=one.headers) == one
    expect(same, "a header of the original message changed what its letter says")


@_check("headers")
async def check_headers_come_back_as_they_were(harness: LetterHarness) -> None:
    """In order, repeated names, any bytes, and those without a value."""
    headers = (("a", b"1"), ("b", b""), ("a", b"\0\xff\r\n"), ("a", b""), ("c", b" "))
    one = letter_from(harness, 1, headers=headers, null_headers=(3,))
    async with opened(harness.letters()) as letters:
        await put(letters, one)
    expect(list(await harness.stored()) == [one], f"{await harness.stored()} is not what was put")


@_check("limit")
async def check_what_does_not_fit_is_cut(harness: LetterHarness) -> None:
    """The headers go first, then the end of the value; the letter says so, and those beside it are whole."""
    # What does not compress, so that its size is its size.
    noise = b"".join(dead_letter_id("noise", "", 0, number).encode() for number in range(harness.limit // 16))
    large = letter_from(harness, 1, value=noise[: 2 * harness.limit])
    bare = letter_from(harness, 2, value=noise[: harness.limit // 2], headers=(("x", noise[: harness.limit]),))
    small = letter_from(harness, 3)
    async with opened(harness.letters()) as letters, anyio.create_task_group() as tasks:
        for one in (large, bare, small):
            tasks.start_soon(put, letters, one)
    found = {one.id: one for one in await harness.stored()}
    expect(found.get(small.id) == small, "a letter that fits was cut beside one that does not")
    expect(found.get(bare.id) == dataclasses.replace(bare, headers=()), "a value was cut that fits without its headers")
    cut = found[large.id].value
    expect(cut == large.value[: len(cut)] and len(cut) > 0, "what was kept of a value is not its beginning")
    expect(found[large.id] == dataclasses.replace(large, headers=(), value=cut), "more was cut than headers and value")
    if "box" in harness.can:
        async with opened(harness.box()) as box:
            for one, whole in ((large, len(large.value)), (bare, len(bare.value)), (small, None)):
                parked = await parked_in(box, one)
                expect(parked.whole_size == whole, f"whole_size of {one!r} is {parked.whole_size}, not {whole}")


@_check()
async def check_many_at_once_are_all_there(harness: LetterHarness) -> None:
    """Calls of ``put`` beside each other, some of which are cancelled: that is of no matter to the others."""
    sent = [letter_from(harness, number) for number in range(40)]
    async with opened(harness.letters()) as letters, anyio.create_task_group() as tasks:
        for number, one in enumerate(sent):
            tasks.start_soon(_cancelled if number % 4 == 1 else put, letters, one)
    there = {one.id for one in await harness.stored()}
    lost = [one for number, one in enumerate(sent) if number % 4 != 1 and one.id not in there]
    expect(not lost, f"{lost} were confirmed, and are not there")


@_check("place")
async def check_its_own_letters_are_refused(harness: LetterHarness) -> None:
    """A source that reads the place would make another letter of every one: that is said, and for good."""
    one = letter_from(harness, 1, **harness.own()._asdict())
    async with opened(harness.letters()) as letters:
        try:
            await letters.put(one)
        except SourceError as error:
            expect(not error.retryable, "a letter of the letters themselves is put again and again")
        else:
            raise ContractBroken("a letter of a message that was read from the dead letters was written to them")
    expect(not await harness.stored(), "a letter of the letters themselves was refused, and is there")


@_check("outage")
async def check_an_outage_is_waited_for(harness: LetterHarness) -> None:
    """While the broker is away ``put`` fails so that it is put again; also where the client has to be made anew for
    it. When the broker is back it is written."""
    first, second = letter_from(harness, 1), letter_from(harness, 2)
    async with opened(harness.letters()) as letters:
        await put(letters, first)
        await harness.hang_up(letters)
        async with harness.outage():
            for _ in range(2):
                try:
                    await letters.put(second)
                except Exception as error:
                    again = isinstance(error, SourceError) and error.retryable
                    expect(again, f"while the broker is away put raises {error!r}, no retryable SourceError")
                else:
                    raise ContractBroken("a letter was confirmed while the broker was away")
        await put(letters, second)
    expect(first in await harness.stored(), "a letter that was confirmed is gone behind an outage")
    expect(second in await harness.stored(), "a letter was confirmed behind an outage, and is not there")


# --- the box


for box_check in BOX_CHECKS:
    _check("box")(box_check)


# --- opening and closing


@_check("place")
async def check_a_place_that_is_not_there_is_refused(harness: LetterHarness) -> None:
    """``open`` raises ``ConfigError``: letters would be lost. ``aclose`` may follow."""
    for each in harness.nowhere():
        try:
            await each.open()
        except ConfigError:
            await each.aclose()
        else:
            await each.aclose()
            raise ContractBroken(f"{each!r} was opened, which is not there")


@_check()
async def check_aclose_is_idempotent(harness: LetterHarness) -> None:
    """It may be called again, and without ``open``."""
    for make in (harness.letters, harness.box) if "box" in harness.can else (harness.letters,):
        await make().aclose()
        async with opened(make()) as each:
            await each.aclose()


async def _cancelled(letters: DeadLetters, letter: DeadLetter) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(letters.put, letter)
        for _ in range(letter.position % 7):
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
