"""The part of the contract of dead letters that is about the box: what is read, disposed of, and goes back."""

from __future__ import annotations

import contextlib
from typing import Final

import anyio

from lanes.dead_letters.box import StoredDeadLetter
from lanes.dead_letters.wire import REPLAYED
from lanes.errors import SourceError
from memsource.contract.dead_letter_harness import (
    NAMES,
    LetterCheck,
    LetterHarness,
    letter_from,
    opened,
    parked_in,
    put,
)
from memsource.contract.harness import ContractBroken, expect

__all__ = ["BOX_CHECKS"]


async def check_letters_are_listed_and_found(harness: LetterHarness) -> None:
    """By their ids, in the order in which they were parked; whole; what comes meanwhile too. Nothing else is found."""
    sent = [letter_from(harness, number, key=b"same") for number in range(6)]
    async with opened(harness.letters()) as letters, opened(harness.box()) as box:
        expect(not await box.ids(), f"{await box.ids()} are listed where nothing lies")
        for one in sent:
            await put(letters, one)
            # Those of one millisecond may be in no order.
            await anyio.sleep(0.003)
        expect(len(await box.ids(2)) == 2, "ids(2) gave another number of them")
        listed = list(await box.ids())
        expect(listed == [one.id for one in sent], f"{listed} are listed, {[one.id for one in sent]} were parked")
        found = await box.find([*listed, "f" * 32])
        expect(list(found) == listed, f"{sorted(found)} were found of {listed}")
        for one in sent:
            parked = found[one.id]
            expect(
                isinstance(parked, StoredDeadLetter) and parked.dead_letter == one,
                f"{parked!r} is not {one!r} as it was parked",
            )


async def check_what_is_disposed_of_is_gone_for_everybody(harness: LetterHarness) -> None:
    """It is listed no more, by this box or another, and doing it again changes nothing. What became of it is told
    where the box remembers; else it is as if it had never been."""
    first, second, third = [letter_from(harness, number) for number in range(3)]
    async with opened(harness.letters()) as letters:
        for one in (first, second, third):
            await put(letters, one)
    async with opened(harness.box()) as box, opened(harness.box()) as other:
        expect(len(await other.ids()) == 3, "another number is listed than was put")
        parked = await parked_in(box, first)
        await box.dispose(parked, "replayed")
        await box.dispose(parked, "replayed")
        await box.dispose(await parked_in(box, second), "dropped")
        async with opened(harness.box()) as late:
            for each in (box, other, late):
                found = dict(await each.find([first.id, second.id, third.id]))
                expect(isinstance(found.pop(third.id, None), StoredDeadLetter), "a letter is gone with others")
                became = {first.id: "replayed", second.id: "dropped"} if each.remembers else {}
                expect(found == became, f"{found} is told of letters that were replayed and dropped")
                expect(list(await late.ids()) == [third.id], f"{await late.ids()} are listed behind a disposal")


async def check_any_copy_is_the_letter(harness: LetterHarness) -> None:
    """It is listed once, found while there is one of its copies, and disposed of in all."""
    one, other = letter_from(harness, 1), letter_from(harness, 2)
    async with opened(harness.letters()) as letters:
        await put(letters, one)
        await put(letters, other)
    await harness.copy(one)
    async with opened(harness.box()) as box:
        expect(sorted(await box.ids()) == sorted([one.id, other.id]), f"{await box.ids()} are listed of two letters")
        await harness.copy(one)
        expect(len(await box.ids()) == 2, "a copy that came later is listed as another letter")
        await harness.lose(one.id)
        parked = await parked_in(box, one)
        # Nothing of the box is called between this copy and the end of the letter.
        await harness.copy(one)
        await box.dispose(parked, "dropped")
    async with opened(harness.box()) as box:
        expect(
            list(await box.ids()) == [other.id], f"{await box.ids()} are listed, {one!r} was dropped with its copies"
        )


async def check_what_is_no_letter_is_counted(harness: LetterHarness) -> None:
    """Anybody may write to the place: what is no letter is left alone, and in nobody's way."""
    one = letter_from(harness, 1)
    await harness.stranger()
    async with opened(harness.letters()) as letters:
        await put(letters, one)
    await harness.stranger()
    async with opened(harness.box()) as box:
        expect(list(await box.ids()) == [one.id], f"{await box.ids()} are listed of one letter among others")
        expect(box.other_messages == 2, f"{box.other_messages} were counted that are no letters, there are 2")


async def check_a_letter_goes_back_to_where_it_came_from(harness: LetterHarness) -> None:
    """With its value and headers, and with its id in one header; disposing of it is for the caller."""
    headers = (("color", b"red"), (REPLAYED, b"of before"), ("Lanes-Custom", b"mine"))
    one = letter_from(harness, 1, headers=headers)
    async with opened(harness.letters()) as letters:
        await put(letters, one)
    async with opened(harness.box()) as box:
        place = await box.publish(await parked_in(box, one))
        expect(bool(place), "publish does not say where the message is")
        expect(list(await box.ids()) == [one.id], "publish has disposed of the letter")
    (found,) = await harness.published()
    expect(found.value == one.value, f"{found.value!r} was published of {one!r}")
    came = [header for header in found.headers if not harness.acted_on(header[0])]
    wanted = [("color", b"red"), ("Lanes-Custom", b"mine"), (REPLAYED, one.id.encode())]
    expect(sorted(came) == sorted(wanted), f"{came} are the headers of a message that was published again")


async def check_what_cannot_be_sent_is_refused(harness: LetterHarness) -> None:
    """A header of the original message is sent, or the letter is refused as a whole; nothing is left out in silence,
    but for what would command the broker."""
    sent = [letter_from(harness, number, headers=((name, b"x"),)) for number, name in enumerate(NAMES)]
    wanted: set[str] = set()
    async with opened(harness.letters()) as letters:
        for one in sent:
            await put(letters, one)
    async with opened(harness.box()) as box:
        for one in sent:
            parked = await parked_in(box, one)
            with contextlib.suppress(SourceError):
                await box.publish(parked)
                wanted.update(name for name, _ in one.headers)
    came = {name for found in await harness.published() for name, _ in found.headers}
    lost = {name for name in wanted - came if not harness.acted_on(name)}
    expect(not lost, f"headers {sorted(lost)!a} were left out of messages that were published again")


async def check_a_forged_origin_is_refused(harness: LetterHarness) -> None:
    """A letter may say anything of where it came from: what is there and may be written to alone is written to."""
    forged = harness.forged()
    sent = [letter_from(harness, number, **origin._asdict()) for number, origin in enumerate(forged)]
    async with opened(harness.letters()) as letters:
        for one in sent:
            await put(letters, one)
    async with opened(harness.box()) as box:
        for one, origin in zip(sent, forged, strict=True):
            parked = (await box.find([one.id])).get(one.id)
            if not isinstance(parked, StoredDeadLetter):
                continue  # It cannot even be read as a letter.
            try:
                place = await box.publish(parked)
            except SourceError:
                continue
            raise ContractBroken(f"a letter that says it came from {origin} was published: it is {place}")
    expect(not await harness.published(), f"letters of {forged} were published elsewhere: {await harness.published()}")


BOX_CHECKS: Final[tuple[LetterCheck, ...]] = (
    check_letters_are_listed_and_found,
    check_what_is_disposed_of_is_gone_for_everybody,
    check_any_copy_is_the_letter,
    check_what_is_no_letter_is_counted,
    check_a_letter_goes_back_to_where_it_came_from,
    check_what_cannot_be_sent_is_refused,
    check_a_forged_origin_is_refused,
)
"""For backends that have a ``DeadLetterBox``."""
