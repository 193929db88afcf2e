"""The contract suite of stores of attempts: each check raises ``ContractBroken`` if the backend breaks a promise.

The author of a ``lanes.Attempts`` runs every check of ``ATTEMPTS_CHECKS``. Each check receives a function that opens
clients of one empty store. Several clients stand for several processes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import anyio
import anyio.lowlevel

from lanes.attempts import Attempt, Attempts
from lanes.core.types import Message, Partition, PartitionId
from memsource.contract.harness import checks_of, expect
from memsource.memory.topic import Record, RecordReader

__all__ = ["ATTEMPTS_CHECKS", "AttemptsCheck", "MakeAttempts"]

MakeAttempts = Callable[[], Attempts]
"""A function that opens another client of the same store."""

AttemptsCheck = Callable[[MakeAttempts], Awaitable[None]]
"""One promise of the contract, as a function that raises ``ContractBroken`` if the backend breaks it."""

_FIRST: Final = Attempt(1, "held", "ValueError")
_SECOND: Final = Attempt(2, "held", "KeyError")
_BLOCKED: Final = Attempt(2, "blocked", "KeyError")


async def check_a_new_owner_finds_what_was_kept(make: MakeAttempts) -> None:
    """``load`` returns the last attempt of each position of one partition, in every state."""
    one, other = make(), make()
    await _expect(one, _partition(), {})
    for position, attempt in ((0, _FIRST), (7, Attempt(3, "parking", "Term")), (2**53, _BLOCKED)):
        await one.keep(_message(_partition(), position), attempt)
    found = {0: _FIRST, 7: Attempt(3, "parking", "Term"), 2**53: _BLOCKED}
    await _expect(other, _partition(), found)
    await _expect(other, _partition(number=1), {})
    await _expect(other, _partition(source="invoices"), {})


async def check_every_call_may_be_repeated(make: MakeAttempts) -> None:
    """A call repeated after a lost answer changes nothing."""
    store = make()
    for _ in range(2):
        await store.keep(_message(_partition(), 5), _FIRST)
        await _expect(store, _partition(), {5: _FIRST})
    for _ in range(2):
        await store.drop(_partition(), [5])
        await _expect(store, _partition(), {})
    await store.drop(_partition(), [])


async def check_attempts_do_not_count_down(make: MakeAttempts) -> None:
    """A delayed write of a lower attempt changes nothing. A write of the same attempt may change the state."""
    store = make()
    for attempt, there in ((_FIRST, _FIRST), (_SECOND, _SECOND), (_FIRST, _SECOND), (_BLOCKED, _BLOCKED)):
        await store.keep(_message(_partition(), 5), attempt)
        await _expect(store, _partition(), {5: there})


async def check_a_former_owner_changes_nothing(make: MakeAttempts) -> None:
    """A former owner, with a lower fencing token, neither keeps nor drops an attempt."""
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
    """A new owner can drop the attempt that a former owner kept, after the settlement of the message."""
    store = make()
    await store.keep(_message(_partition(token=1), 5), _FIRST)
    await store.drop(_partition(token=2), [5])
    await _expect(store, _partition(token=2), {})


async def check_many_are_dropped_at_once(make: MakeAttempts) -> None:
    """``drop`` accepts hundreds of positions, ignores unknown positions, and keeps the attempts of all others."""
    store = make()
    for position in range(0, 40, 2):
        await store.keep(_message(_partition(), position), _FIRST)
    await store.drop(_partition(), [position for position in range(500) if position != 8])
    await _expect(store, _partition(), {8: _FIRST})


async def check_calls_run_beside_each_other(make: MakeAttempts) -> None:
    """Concurrent calls for different messages are independent.

    A cancelled call takes effect completely or not at all.
    """
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
    expect(not lost, f"keep() returned for the positions {lost}, but load() returned only {dict(found)}")
    expect(all(attempt == _FIRST for attempt in found.values()), f"load() returned {dict(found)}, not {_FIRST}")


async def check_any_error_has_a_name(make: MakeAttempts) -> None:
    """A store accepts any error type. The store may change or truncate an error type that it cannot write."""
    store = make()
    for position, name in enumerate(("é", "a\0b", "\ud800", "x" * 5_000)):
        await store.keep(_message(_partition(), position), Attempt(1, "held", name))
    found = await store.load(_partition())
    expect(
        len(found) == 4 and all(found[position].attempts == 1 for position in found),
        f"load() returned {dict(found)}, but 4 attempts were kept",
    )
    expect(found[0].error_type == "é", f"load() returned the error type {found[0].error_type!r}, but 'é' was kept")


def _partition(number: int = 0, *, source: str = "orders", token: int | None = None) -> Partition:
    return Partition(PartitionId(source, number), RecordReader(), fencing_token=token)


def _message(partition: Partition, position: int) -> Message:
    record = Record(partition.id.number, position, b"key", b"", (), "orders")
    return Message(partition, position, b"key", record.size, record, None)


async def _expect(store: Attempts, partition: Partition, attempts: Mapping[int, Attempt]) -> None:
    found = dict(await store.load(partition))
    expect(found == attempts, f"load() returned {found}, but {attempts} was kept")


async def _cut(store: Attempts, message: Message) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(store.keep, message, _FIRST)
        for _ in range(message.position % 7):
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()


ATTEMPTS_CHECKS: Final[tuple[AttemptsCheck, ...]] = checks_of(globals())
"""All checks, in the order to run them."""
