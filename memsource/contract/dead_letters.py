"""The contract suite of ``lanes.source.DeadLetters`` and of the ``DeadLetterBox`` over the same target.

The author of a backend writes a ``DeadLetterHarness`` and runs every check of ``dead_letter_checks(harness.can)``,
each with a new harness, under any test runner. A failed check raises ``ContractBroken``. A backend writes and reads
dead letters, so a check compares the written with the read dead letters.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection
from typing import Final, get_args

import anyio
import anyio.lowlevel

from lanes.dead_letter import DeadLetter, dead_letter_id
from lanes.dead_letters.box import StoredDeadLetter
from lanes.dead_letters.wire import REPLAYED
from lanes.errors import ConfigError, SourceError
from lanes.source import DeadLetters
from memsource.contract.dead_letter_harness import (
    NAMES,
    DeadLetterAbility,
    DeadLetterCheck,
    DeadLetterHarness,
    Origin,
    Published,
    dead_letter_from,
    opened,
    put,
    stored_in,
)
from memsource.contract.harness import ContractBroken, checks_within, expect

__all__ = [
    "DEAD_LETTER_CONTRACT_VERSION",
    "DeadLetterAbility",
    "DeadLetterCheck",
    "DeadLetterHarness",
    "Origin",
    "Published",
    "dead_letter_checks",
]

DEAD_LETTER_CONTRACT_VERSION: Final = 1
"""Version of this contract. The version rises by the rule of ``lanes.source.CONTRACT_VERSION``."""

_CHECKS: Final[list[tuple[DeadLetterCheck, tuple[DeadLetterAbility, ...]]]] = []


def dead_letter_checks(can: Collection[DeadLetterAbility]) -> list[DeadLetterCheck]:
    """Return the checks for a backend with some abilities, in order.

    Args:
        can: The abilities, as in ``DeadLetterHarness.can``.

    Returns:
        The checks whose needed abilities are all in ``can``.

    Raises:
        ValueError: A name in ``can`` is not an ability.
    """
    return checks_within(_CHECKS, can, get_args(DeadLetterAbility))


def _check(*needs: DeadLetterAbility) -> Callable[[DeadLetterCheck], DeadLetterCheck]:
    def register(check: DeadLetterCheck) -> DeadLetterCheck:
        _CHECKS.append((check, needs))
        return check

    return register


# --- writing


@_check()
async def check_a_dead_letter_is_stored_whole(harness: DeadLetterHarness) -> None:
    """When ``put`` returns, the target has the dead letter with all its fields, even without key, value or time."""
    sent = [
        dead_letter_from(harness, 1),
        dead_letter_from(harness, 2, key=None, value=b"", tombstone=True),
        dead_letter_from(harness, 3, key=None, value=b""),
        dead_letter_from(harness, 4, key=b"", value=bytes(range(256))),
        dead_letter_from(harness, 5, key=b"lane", record_key=b"\xffrecord"),
        dead_letter_from(
            harness, 6, key=b"lane", record_key=None, error_text="no\r\nLanes-Epoch: 9\0 é %41", timestamp=None
        ),
    ]
    async with opened(harness.dead_letters()) as writer:
        for one in sent:
            await writer.put(one)
            expect(one in await harness.stored(), f"{one!r} was put, but stored is {await harness.stored()}")


@_check()
async def check_a_dead_letter_put_again_is_one(harness: DeadLetterHarness) -> None:
    """If a consumer repeats ``put`` after a lost answer, all copies in the target are equal, and a box lists one id."""
    one = dead_letter_from(harness, 1)
    async with opened(harness.dead_letters()) as writer:
        await writer.put(one)
        await writer.put(one)
    found = await harness.stored()
    expect(all(each == one for each in found), f"{found} are stored, but only {one!r} was put")
    if "box" in harness.can:
        async with opened(harness.box()) as box:
            expect(list(await box.ids()) == [one.id], f"ids() lists {await box.ids()} after two puts of {one.id}")


@_check()
async def check_any_header_name_comes_back(harness: DeadLetterHarness) -> None:
    """A dead letter keeps every header name, even a name that the broker interprets or that no client can send."""
    one = dead_letter_from(harness, 1, headers=tuple((name, b"%d" % number) for number, name in enumerate(NAMES)))
    async with opened(harness.dead_letters()) as writer:
        await put(writer, one)
    (found,) = await harness.stored()
    lost = dict(one.headers).items() ^ dict(found.headers).items()
    expect(not lost, f"the dead letter must keep these headers unchanged: {sorted(lost)!a}")
    same = dataclasses.replace(found, headers=one.headers) == one
    expect(same, "a header of the original message changed a field of its dead letter")


@_check("headers")
async def check_headers_come_back_as_they_were(harness: DeadLetterHarness) -> None:
    """A dead letter keeps the order of its headers, repeated names, any bytes, and missing values."""
    headers = (("a", b"1"), ("b", b""), ("a", b"\0\xff\r\n"), ("a", b""), ("c", b" "))
    one = dead_letter_from(harness, 1, headers=headers, null_headers=(3,))
    async with opened(harness.dead_letters()) as writer:
        await put(writer, one)
    expect(list(await harness.stored()) == [one], f"{await harness.stored()} is stored, but {one!r} was put")


@_check("limit")
async def check_an_oversized_dead_letter_is_cut(harness: DeadLetterHarness) -> None:
    """A dead letter above the limit loses its headers, then the end of its value. A smaller dead letter stays whole."""
    # These bytes do not compress, so their size is the size on the wire.
    noise = b"".join(dead_letter_id("noise", "", 0, number).encode() for number in range(harness.limit // 16))
    large = dead_letter_from(harness, 1, value=noise[: 2 * harness.limit])
    bare = dead_letter_from(harness, 2, value=noise[: harness.limit // 2], headers=(("x", noise[: harness.limit]),))
    small = dead_letter_from(harness, 3)
    async with opened(harness.dead_letters()) as writer, anyio.create_task_group() as tasks:
        for one in (large, bare, small):
            tasks.start_soon(put, writer, one)
    found = {one.id: one for one in await harness.stored()}
    expect(found.get(small.id) == small, "a dead letter within the limit was cut")
    expect(found.get(bare.id) == dataclasses.replace(bare, headers=()), "a value was cut that fits without its headers")
    cut = found[large.id].value
    expect(cut == large.value[: len(cut)] and len(cut) > 0, "a cut value is not the beginning of the whole value")
    expect(found[large.id] == dataclasses.replace(large, headers=(), value=cut), "more was cut than headers and value")
    if "box" in harness.can:
        async with opened(harness.box()) as box:
            for one, whole in ((large, len(large.value)), (bare, len(bare.value)), (small, None)):
                stored = await stored_in(box, one)
                expect(stored.whole_size == whole, f"whole_size of {one!r} is {stored.whole_size}, not {whole}")


@_check()
async def check_concurrent_puts_are_all_stored(harness: DeadLetterHarness) -> None:
    """Concurrent calls of ``put`` are independent: a cancelled call does not affect the others."""
    sent = [dead_letter_from(harness, number) for number in range(40)]
    async with opened(harness.dead_letters()) as writer, anyio.create_task_group() as tasks:
        for number, one in enumerate(sent):
            tasks.start_soon(_cancelled if number % 4 == 1 else put, writer, one)
    there = {one.id for one in await harness.stored()}
    lost = [one for number, one in enumerate(sent) if number % 4 != 1 and one.id not in there]
    expect(not lost, f"put() confirmed {lost}, but they are not stored")


@_check("place")
async def check_its_own_dead_letters_are_refused(harness: DeadLetterHarness) -> None:
    """``put`` refuses the dead letter of a message from its own target, by an error that is not retryable."""
    one = dead_letter_from(harness, 1, **harness.own()._asdict())
    async with opened(harness.dead_letters()) as writer:
        try:
            await writer.put(one)
        except SourceError as error:
            expect(not error.retryable, "put() refused its own target's message, but the error is retryable")
        else:
            raise ContractBroken(
                "put() accepted the dead letter of a message from its own target; it must raise an error"
            )
    expect(not await harness.stored(), "put() refused a dead letter, but the dead letter is stored")


@_check("outage")
async def check_an_outage_is_retryable(harness: DeadLetterHarness) -> None:
    """In an outage ``put`` raises a retryable error. After the outage ``put`` writes, by a new client if needed."""
    first, second = dead_letter_from(harness, 1), dead_letter_from(harness, 2)
    async with opened(harness.dead_letters()) as writer:
        await put(writer, first)
        await harness.hang_up(writer)
        async with harness.outage():
            for _ in range(2):
                try:
                    await writer.put(second)
                except Exception as error:
                    again = isinstance(error, SourceError) and error.retryable
                    expect(again, f"put() raised {error!r} in an outage instead of a retryable SourceError")
                else:
                    raise ContractBroken(
                        "put() confirmed a dead letter while the broker was down; it must raise a retryable error"
                    )
        await put(writer, second)
    expect(first in await harness.stored(), "a confirmed dead letter is lost after an outage")
    expect(second in await harness.stored(), "a dead letter that was confirmed after an outage is not stored")


# --- the box


@_check("box")
async def check_dead_letters_are_listed_and_found(harness: DeadLetterHarness) -> None:
    """A box lists ids in the order of writing, and finds complete dead letters, but no unknown id."""
    sent = [dead_letter_from(harness, number, key=b"same") for number in range(6)]
    async with opened(harness.dead_letters()) as writer, opened(harness.box()) as box:
        expect(not await box.ids(), f"ids() lists {await box.ids()} for an empty target")
        for one in sent:
            await put(writer, one)
            # The order within one millisecond is free.
            await anyio.sleep(0.003)
        expect(len(await box.ids(2)) == 2, "ids(2) must return 2 ids")
        listed = list(await box.ids())
        expect(listed == [one.id for one in sent], f"ids() lists {listed}, but {[one.id for one in sent]} were put")
        found = await box.find([*listed, "f" * 32])
        expect(list(found) == listed, f"find() returned only {sorted(found)} of {listed}")
        for one in sent:
            stored = found[one.id]
            expect(
                isinstance(stored, StoredDeadLetter) and stored.dead_letter == one,
                f"find() returned {stored!r}, but {one!r} was put",
            )


@_check("box")
async def check_a_disposed_dead_letter_is_gone(harness: DeadLetterHarness) -> None:
    """No box lists a disposed dead letter, and a second disposal changes nothing.

    A box with ``remembers`` reports the disposition. A box without ``remembers`` does not find the dead letter.
    """
    first, second, third = [dead_letter_from(harness, number) for number in range(3)]
    async with opened(harness.dead_letters()) as writer:
        for one in (first, second, third):
            await put(writer, one)
    async with opened(harness.box()) as box, opened(harness.box()) as other:
        expect(len(await other.ids()) == 3, "ids() must list the 3 dead letters that were put")
        stored = await stored_in(box, first)
        await box.dispose(stored, "replayed")
        await box.dispose(stored, "replayed")
        await box.dispose(await stored_in(box, second), "dropped")
        async with opened(harness.box()) as late:
            for each in (box, other, late):
                found = dict(await each.find([first.id, second.id, third.id]))
                expect(isinstance(found.pop(third.id, None), StoredDeadLetter), "another dead letter was disposed of")
                became = {first.id: "replayed", second.id: "dropped"} if each.remembers else {}
                expect(found == became, f"find() returned {found} after two disposals, not {became}")
                expect(list(await late.ids()) == [third.id], f"ids() lists {await late.ids()}, not only {third.id}")


@_check("box")
async def check_any_copy_is_the_dead_letter(harness: DeadLetterHarness) -> None:
    """A box lists copies as one dead letter, finds the dead letter while a copy is left, and disposes of all copies."""
    one, other = dead_letter_from(harness, 1), dead_letter_from(harness, 2)
    async with opened(harness.dead_letters()) as writer:
        await put(writer, one)
        await put(writer, other)
    await harness.copy(one)
    async with opened(harness.box()) as box:
        expect(
            sorted(await box.ids()) == sorted([one.id, other.id]), f"ids() lists {await box.ids()} for two dead letters"
        )
        await harness.copy(one)
        expect(len(await box.ids()) == 2, "ids() lists a later copy as a second dead letter")
        await harness.lose(one.id)
        stored = await stored_in(box, one)
        # The box is not called between writing this copy and the disposal.
        await harness.copy(one)
        await box.dispose(stored, "dropped")
    async with opened(harness.box()) as box:
        expect(list(await box.ids()) == [other.id], f"ids() lists {await box.ids()}, although {one!r} was dropped")


@_check("box")
async def check_other_messages_are_counted(harness: DeadLetterHarness) -> None:
    """A box counts a message of the target that is no dead letter, leaves it unchanged, and raises no error for it."""
    one = dead_letter_from(harness, 1)
    await harness.stranger()
    async with opened(harness.dead_letters()) as writer:
        await put(writer, one)
    await harness.stranger()
    async with opened(harness.box()) as box:
        expect(list(await box.ids()) == [one.id], f"ids() lists {await box.ids()}, not only {one.id}")
        expect(box.other_messages == 2, f"other_messages is {box.other_messages}, but must be 2")


@_check("box")
async def check_a_dead_letter_is_published_to_its_origin(harness: DeadLetterHarness) -> None:
    """``publish`` sends value and headers to the origin, with the id in a header. ``publish`` disposes of nothing."""
    headers = (("color", b"red"), (REPLAYED, b"of before"), ("Lanes-Custom", b"mine"))
    one = dead_letter_from(harness, 1, headers=headers)
    async with opened(harness.dead_letters()) as writer:
        await put(writer, one)
    async with opened(harness.box()) as box:
        place = await box.publish(await stored_in(box, one))
        expect(bool(place), "publish() returned an empty text, but must return the position of the message")
        expect(list(await box.ids()) == [one.id], "publish() disposed of the dead letter: only dispose() may do so")
    (found,) = await harness.published()
    expect(found.value == one.value, f"{found.value!r} was published for {one!r}")
    came = [header for header in found.headers if not harness.acted_on(header[0])]
    wanted = [("color", b"red"), ("Lanes-Custom", b"mine"), (REPLAYED, one.id.encode())]
    expect(sorted(came) == sorted(wanted), f"the published message has the headers {came}, but must have {wanted}")


@_check("box")
async def check_an_unsendable_header_is_refused(harness: DeadLetterHarness) -> None:
    """``publish`` sends every header except those of the broker, or refuses the dead letter."""
    sent = [dead_letter_from(harness, number, headers=((name, b"x"),)) for number, name in enumerate(NAMES)]
    wanted: set[str] = set()
    async with opened(harness.dead_letters()) as writer:
        for one in sent:
            await put(writer, one)
    async with opened(harness.box()) as box:
        for one in sent:
            stored = await stored_in(box, one)
            with contextlib.suppress(SourceError):
                await box.publish(stored)
                wanted.update(name for name, _ in one.headers)
    came = {name for found in await harness.published() for name, _ in found.headers}
    lost = {name for name in wanted - came if not harness.acted_on(name)}
    expect(not lost, f"publish() left out the headers {sorted(lost)!a}: send every header or refuse the dead letter")


@_check("box")
async def check_a_forged_origin_is_refused(harness: DeadLetterHarness) -> None:
    """``publish`` refuses a dead letter whose origin is invalid, missing, or a command to the broker."""
    forged = harness.forged()
    sent = [dead_letter_from(harness, number, **origin._asdict()) for number, origin in enumerate(forged)]
    async with opened(harness.dead_letters()) as writer:
        for one in sent:
            await put(writer, one)
    async with opened(harness.box()) as box:
        for one, origin in zip(sent, forged, strict=True):
            stored = (await box.find([one.id])).get(one.id)
            if not isinstance(stored, StoredDeadLetter):
                continue  # The backend refuses to read the forged dead letter.
            try:
                place = await box.publish(stored)
            except SourceError:
                continue
            raise ContractBroken(
                f"publish() accepted the forged origin {origin} and wrote to {place}; it must raise an error"
            )
    expect(not await harness.published(), f"publish() wrote {await harness.published()} for forged origins")


# --- opening and closing


@_check("place")
async def check_a_missing_place_is_refused(harness: DeadLetterHarness) -> None:
    """``open`` raises ``ConfigError`` for a missing target. After that error, ``aclose`` must not raise."""
    for each in harness.nowhere():
        try:
            await each.open()
        except ConfigError:
            await each.aclose()
        else:
            await each.aclose()
            raise ContractBroken(f"open() of {each!r} accepted a missing target; it must raise ConfigError")


@_check()
async def check_aclose_is_idempotent(harness: DeadLetterHarness) -> None:
    """The caller may call ``aclose`` repeatedly, and without ``open``."""
    for make in (harness.dead_letters, harness.box) if "box" in harness.can else (harness.dead_letters,):
        await make().aclose()
        async with opened(make()) as each:
            await each.aclose()


async def _cancelled(dead_letters: DeadLetters, dead_letter: DeadLetter) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(dead_letters.put, dead_letter)
        for _ in range(dead_letter.position % 7):
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
