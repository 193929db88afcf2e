"""The contract suite of stores of attempts: what each promises, as functions that fail with ``ContractBroken``.

Whoever writes a ``lanes.Attempts`` runs every check of ``ATTEMPTS_CHECKS``, each with a function of its own that makes
stores of one place with nothing in it: several of them are several processes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

import anyio
import anyio.lowlevel

from lanes.attempts import Attempt, Attempts
from lanes.core.types import Message, Partition, PartitionId
from memsource.contract.harness import expect

__all__ = ["ATTEMPTS_CHECKS", "AttemptsCheck", "MakeAttempts"]

MakeAttempts = Callable[[], Attempts]
"""A new store of the same place."""

AttemptsCheck = Callable[[MakeAttempts], Awaitable[None]]
"""One promise of the contract, as a function that raises ``ContractBroken`` where it is not kept."""

_FIRST: Final = Attempt(1, "held", "ValueError")
_SECOND: Final = Attempt(2, "held", "KeyError")
_BLOCKED: Final = Attempt(2, "blocked", "KeyError")


async def check_a_new_owner_finds_what_was_kept(make: MakeAttempts) -> None:
    """The last word about each position, of that partition alone; whatever the state, and at any position."""
    one, other = make(), make()
    await _expect(one, _partition(), {})
    for position, attempt in ((0, _FIRST), (7, Attempt(3, "parking", "Term")), (2**53, _BLOCKED)):
        await one.keep(_message(_partition(), position), attempt)
    found = {0: _FIRST, 7: Attempt(3, "parking", "Term"), 2**53: _BLOCKED}
    await _expect(other, _partition(), found)
    await _expect(other, _partition(number=1), {})
    await _expect(other, _partition(source="invoices"), {})


async def check_every_call_may_be_repeated(make: MakeAttempts) -> None:
    """As behind an answer that was lost."""
    store = make()
    for _ in range(2):
        await store.keep(_message(_partition(), 5), _FIRST)
        await _expect(store, _partition(), {5: _FIRST})
    for _ in range(2):
        await store.drop(_partition(), [5])
        await _expect(store, _partition(), {})
    await store.drop(_partition(), [])


async def check_attempts_do_not_count_down(make: MakeAttempts) -> None:
    """A write that was on its way for long changes nothing; the state may change between two attempts."""
    store = make()
    for attempt, there in ((_FIRST, _FIRST), (_SECOND, _SECOND), (_FIRST, _SECOND), (_BLOCKED, _BLOCKED)):
        await store.keep(_message(_partition(), 5), attempt)
        await _expect(store, _partition(), {5: there})


async def check_a_former_owner_changes_nothing(make: MakeAttempts) -> None:
    """By the fencing token, where there is one: neither its attempts nor what it takes for finished."""
    late, owner = make(), make()
    former, current = _partition(token=1_700_000_000_001), _partition(token=1_700_000_000_002)
    await late.keep(_message(former, 5), _FIRST)
    await late.keep(_message(former, 6), _FIRST)
    await owner.keep(_message(current, 5), _SECOND)
    await late.keep(_message(former, 5), Attempt(9, "parking", "Term"))
    await late.drop(former, [5, 6])
    await _expect(owner, current, {5: _SECOND})
    await owner.drop(current, [5])
    await _expect(owner, current, {})


async def check_an_owner_drops_what_a_former_one_kept(make: MakeAttempts) -> None:
    """It was finished and settled meanwhile."""
    store = make()
    await store.keep(_message(_partition(token=1), 5), _FIRST)
    await store.drop(_partition(token=2), [5])
    await _expect(store, _partition(token=2), {})


async def check_many_are_dropped_at_once(make: MakeAttempts) -> None:
    """Some hundred, and those that are not there are in nobody's way; what is not named stays."""
    store = make()
    for position in range(0, 40, 2):
        await store.keep(_message(_partition(), position), _FIRST)
    await store.drop(_partition(), [position for position in range(500) if position != 8])
    await _expect(store, _partition(), {8: _FIRST})


async def check_calls_run_beside_each_other(make: MakeAttempts) -> None:
    """Several at once, about different messages; some are cancelled, and have happened or not."""
    store = make()
    async with anyio.create_task_group() as tasks:
        for position in range(30):
            message = _message(_partition(), position)
            if position % 3 == 1:
                tasks.start_soon(_cut, store, message)
            else:
                tasks.start_soon(store.keep, message, _FIRST)
    found = await store.load(_partition())
    lost = [position for position in range(30) if position % 3 != 1 and found.get(position) != _FIRST]
    expect(not lost, f"positions {lost} were kept, and are not there: {dict(found)}")
    expect(all(attempt == _FIRST for attempt in found.values()), f"{dict(found)} is there, {_FIRST} was kept")


async def check_any_error_has_a_name(make: MakeAttempts) -> None:
    """A type is called as its author likes: what cannot be written as it is may be changed and cut, not refused."""
    store = make()
    for position, name in enumerate(("é", "a\0b", "\ud800", "x" * 5_000)):
        await store.keep(_message(_partition(), position), Attempt(1, "held", name))
    found = await store.load(_partition())
    expect(len(found) == 4 and all(found[position].attempts == 1 for position in found), f"{dict(found)} of 4 is there")
    expect(found[0].error_type == "é", f"an error type é came back as {found[0].error_type!r}")


ATTEMPTS_CHECKS: Final[tuple[AttemptsCheck, ...]] = (
    check_a_new_owner_finds_what_was_kept,
    check_every_call_may_be_repeated,
    check_attempts_do_not_count_down,
    check_a_former_owner_changes_nothing,
    check_an_owner_drops_what_a_former_one_kept,
    check_many_are_dropped_at_once,
    check_calls_run_beside_each_other,
    check_any_error_has_a_name,
)
"""In the order in which they are best run."""


class _Reader:
    def value(self, raw: object) -> bytes:
        return b""

    def headers(self, raw: object) -> Sequence[tuple[str, bytes]]:
        return ()

    def subject(self, raw: object) -> str:
        return "orders"


def _partition(number: int = 0, *, source: str = "orders", token: int | None = None) -> Partition:
    return Partition(PartitionId(source, number), _Reader(), fencing_token=token)


def _message(partition: Partition, position: int) -> Message:
    return Message(partition, position, b"key", 0, None, None)


async def _expect(store: Attempts, partition: Partition, attempts: Mapping[int, Attempt]) -> None:
    found = dict(await store.load(partition))
    expect(found == attempts, f"{found} is there, {attempts} was kept")


async def _cut(store: Attempts, message: Message) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(store.keep, message, _FIRST)
        for _ in range(message.position % 7):
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
