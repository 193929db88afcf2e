"""The contract suite of state stores: each check raises ``ContractBroken`` if the backend breaks a promise.

The author of a ``lanes.ownership.StateStore`` runs every check of ``STATE_CHECKS``. Each check receives a function that
opens clients of one empty store. Several clients stand for several processes. ``TRANSACTION_CHECKS`` are for a store
that also implements ``lanes.ownership.StoresInTransaction``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, Final, Protocol

import anyio
import anyio.lowlevel

from lanes.core.types import PartitionId
from lanes.ownership.state import (
    Fenced,
    State,
    StateChange,
    StateKey,
    StateLocked,
    StateStore,
    StoresInTransaction,
)
from memsource.contract.harness import ContractBroken, checks_of, cut_short, expect

__all__ = [
    "STATE_CHECKS",
    "TRANSACTION_CHECKS",
    "MakeStates",
    "StateCheck",
    "TransactionCheck",
    "TransactionHarness",
    "TransactionalStates",
]

MakeStates = Callable[[], StateStore]
"""A function that opens another client of the same store."""

StateCheck = Callable[[MakeStates], Awaitable[None]]
"""One promise of the contract, as a function that raises ``ContractBroken`` if the backend breaks it."""

HIGHEST: Final = 2**63 - 1

_WITHIN: Final = 10.0
"""Maximum seconds of a claim during an open transaction, even on a busy machine."""

_AGAIN: Final = 0.002
"""Seconds until the repetition of a claim that found the state locked."""

KEY: Final = StateKey("billing", PartitionId("orders", 7))


class TransactionalStates(StateStore, StoresInTransaction, Protocol):
    """A state store that can also write in a transaction of the caller."""


class TransactionHarness(Protocol):
    """An empty store whose clients write in transactions of the caller. Each check needs a new harness."""

    def store(self) -> TransactionalStates:
        """Return another client of the store."""

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        """Return a block with a new connection in a transaction. The block commits at its end, or rolls back."""

    async def in_transaction(self, store: TransactionalStates, connection: Any, change: StateChange) -> None:
        """Call ``store_in`` as a handler does, and wait for its end.

        Args:
            store: The client.
            connection: A connection of ``transaction``.
            change: The change.
        """


TransactionCheck = Callable[[TransactionHarness], Awaitable[None]]
"""One promise of ``StoresInTransaction``, as a function that raises ``ContractBroken`` if the backend breaks it."""


async def check_a_state_begins_with_its_first_claim(make: MakeStates) -> None:
    """The result omits a state without a claim.

    The first claim begins at ``start``, and a later claim ignores ``start``.
    """
    store, other = make(), make()
    expect(not await store.read([KEY]), "read() returned a state that was never claimed")
    first = await store.claim(KEY, 5)
    expect(first.epoch >= 1, f"claim() returned the epoch {first.epoch}; epochs begin at 1")
    await _expect(other, {KEY: State(first.epoch, 5)})
    again = await other.claim(KEY, 9)
    expect(
        _shown(again)[1:] == (5, ()), f"claim(start=9) returned the floor {again.floor} for a state with the floor 5"
    )


async def check_every_claim_raises_the_epoch(make: MakeStates) -> None:
    """Each claim of any client returns a higher epoch than all former claims of the state.

    Other states are unchanged.
    """
    stores = [make(), make()]
    beside = KEY._replace(partition=PartitionId("orders", 8))
    untouched = await stores[0].claim(beside, 3)
    epochs = [(await stores[number % 2].claim(KEY, 0)).epoch for number in range(6)]
    expect(epochs == sorted(set(epochs)), f"epochs must rise with each claim, but were {epochs}")
    await _expect(stores[0], {KEY: State(epochs[-1], 0), beside: untouched})


async def check_a_stored_state_is_read_by_every_client(make: MakeStates) -> None:
    """``read`` and ``claim`` return the floor and the completed runs of the last write, at any size."""
    store, other = make(), make()
    epoch = (await store.claim(KEY, 0)).epoch
    many = [(position, position + 1) for position in range(2_000, 6_000, 2)]
    for floor, completed in ((0, [(1, 2)]), (3, []), (3, [(5, 9), (11, 12)]), (1_000, many), (HIGHEST - 2, [])):
        answer = await store.store([StateChange(KEY, State(epoch, floor, completed))])
        expect(list(answer) == [True], f"store() by the owner answered {list(answer)}, not [True]")
        await _expect(other, {KEY: State(epoch, floor, completed)})
    last = await other.claim(KEY, 0)
    expect(last.floor == HIGHEST - 2, f"claim() returned the floor {last.floor}, but {HIGHEST - 2} was stored")


async def check_a_claim_returns_the_completed_runs(make: MakeStates) -> None:
    """The next owner receives the completed runs above the floor, and therefore repeats none of them."""
    store = make()
    epoch = (await store.claim(KEY, 0)).epoch
    await store.store([StateChange(KEY, State(epoch, 4, [(6, 8), (9, 10)]))])
    state = await make().claim(KEY, 0)
    expect(_shown(state)[1:] == (4, ((6, 8), (9, 10))), f"claim() returned {state}, but 4 and [(6, 8), (9, 10)] stood")


async def check_a_former_owner_writes_nothing(make: MakeStates) -> None:
    """After a claim, the store refuses every change with an earlier epoch: a lower, an equal and a higher floor."""
    late, owner = make(), make()
    former = (await late.claim(KEY, 0)).epoch
    await late.store([StateChange(KEY, State(former, 10))])
    current = (await owner.claim(KEY, 0)).epoch
    for floor in (5, 10, 20):
        await _refused(late, StateChange(KEY, State(former, floor, [(floor + 1, floor + 2)])))
        await _expect(owner, {KEY: State(current, 10)})
    await owner.store([StateChange(KEY, State(current, 15))])
    await _refused(late, StateChange(KEY, State(former, 20)))
    await _refused(late, StateChange(KEY, State(current + 1, 20)))
    await _expect(owner, {KEY: State(current, 15)})


async def check_a_state_without_a_claim_is_not_written(make: MakeStates) -> None:
    """``store`` creates no state. A state without a claim has no owner for its epoch."""
    store = make()
    for epoch in (0, 1, 7):
        await _refused(store, StateChange(KEY, State(epoch, 1)))
    await _expect(store, {})


async def check_a_position_never_falls(make: MakeStates) -> None:
    """A lower floor of the owner changes nothing and is no error. An equal floor replaces the completed runs."""
    store = make()
    epoch = (await store.claim(KEY, 0)).epoch
    await store.store([StateChange(KEY, State(epoch, 10, [(12, 13)]))])
    for floor in (9, 0):
        answer = list(await store.store([StateChange(KEY, State(epoch, floor, [(40, 41)]))]))
        expect(answer == [True], f"store() of a lower floor by the owner answered {answer}, not [True]")
        await _expect(store, {KEY: State(epoch, 10, [(12, 13)])})
    await store.store([StateChange(KEY, State(epoch, 10, [(12, 14)]))])
    await _expect(store, {KEY: State(epoch, 10, [(12, 14)])})


async def check_every_call_may_be_repeated(make: MakeStates) -> None:
    """A call repeated after a lost answer changes nothing, and returns the answer of the first call."""
    store = make()
    epoch = (await store.claim(KEY, 0)).epoch
    change = StateChange(KEY, State(epoch, 3, [(4, 5)]))
    for _ in range(2):
        answer = list(await store.store([change]))
        expect(answer == [True], f"store() of the same change answered {answer}, not [True]")
        await _expect(store, {KEY: change.state})


async def check_changes_of_one_call_are_independent(make: MakeStates) -> None:
    """One call with several changes returns an answer for each change, in order.

    A refused change does not affect other changes; a call may be empty.
    """
    store = make()
    keys = [KEY._replace(partition=PartitionId("orders", number)) for number in range(200)]
    epochs = {key: (await store.claim(key, 0)).epoch for key in keys}
    for key in keys[::3]:
        await make().claim(key, 0)
    # A store that sorts, or looks up by name, must still answer in the order of the call.
    order = sorted(keys, key=lambda key: key.partition.number * 37 % 200)
    changes = [StateChange(key, State(epochs[key], 1 + key.partition.number)) for key in order]
    answers = list(await store.store(changes))
    wrong = [
        each.partition.number
        for each, answer in zip(order, answers, strict=True)
        if answer is (each.partition.number % 3 == 0)
    ]
    expect(not wrong, f"store() of 200 changes gave the wrong answer for the partitions {wrong}")
    found = await store.read(keys)
    floors = [found[key].floor for key in keys]
    expected = [0 if number % 3 == 0 else 1 + number for number in range(200)]
    expect(floors == expected, "store() of 200 changes has written a wrong floor, or one of a refused change")
    expect(list(await store.store([])) == [], "store() of no change must return no answer")
    expect(dict(await store.read([])) == {}, "read() of no key must return no state")


async def check_each_part_of_the_key_counts(make: MakeStates) -> None:
    """States with another subscription, source, number or incarnation are independent, for texts of any characters."""
    store = make()
    keys = [
        KEY,
        KEY._replace(subscription="Billing"),
        KEY._replace(subscription="billing "),
        KEY._replace(subscription="é/%s{}'\"\\" + "x" * 180),
        KEY._replace(partition=PartitionId("orders/7", 7)),
        KEY._replace(partition=PartitionId("orders", 77)),
        KEY._replace(incarnation="made-2"),
        StateKey("billing/orders", PartitionId("", 7)),
    ]
    states = {}
    for floor, key in enumerate(keys):
        epoch = (await store.claim(key, 0)).epoch
        states[key] = State(epoch, floor)
        await store.store([StateChange(key, states[key])])
    await _expect(make(), states)


async def check_of_many_claims_at_once_the_last_one_stands(make: MakeStates) -> None:
    """Concurrent claims return different epochs, and only the highest of them may write."""
    stores = [make() for _ in range(4)]
    epochs: list[int] = []

    async def claim(store: StateStore) -> None:
        epochs.extend([(await _claim(store, KEY, 0)).epoch for _ in range(5)])

    async with anyio.create_task_group() as tasks:
        for store in stores:
            tasks.start_soon(claim, store)
    expect(len(set(epochs)) == 20, f"20 concurrent claims returned only {len(set(epochs))} different epochs")
    for epoch in sorted(epochs)[:-1]:
        await _refused(stores[0], StateChange(KEY, State(epoch, 1)))
    answer = list(await stores[0].store([StateChange(KEY, State(max(epochs), 1))]))
    expect(answer == [True], "store() refused the highest of the concurrent claims")


async def check_no_write_lies_between_two_of_a_former_owner(make: MakeStates) -> None:
    """A claim during writes of the former owner returns the last accepted write.

    The store refuses writes after the claim.
    """
    former, owner = make(), make()
    for number in range(8):
        key = KEY._replace(partition=PartitionId("orders", number))
        epoch = (await former.claim(key, 0)).epoch
        accepted = [0]

        async def write(key: StateKey = key, epoch: int = epoch, accepted: list[int] = accepted) -> None:
            for floor in range(1, 400):
                if not (await former.store([StateChange(key, State(epoch, floor))]))[0]:
                    return
                accepted.append(floor)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(write)
            while len(accepted) < 3 + number:
                await anyio.lowlevel.checkpoint()
            claimed = await _claim(owner, key, 0)
        stands = (await owner.read([key]))[key].floor
        expect(
            claimed.floor == accepted[-1] == stands,
            f"claim() returned the floor {claimed.floor}, the former owner's last accepted floor is {accepted[-1]}, "
            f"and read() returned {stands} afterwards",
        )


async def check_a_cancelled_call_is_whole_or_nothing(make: MakeStates) -> None:
    """A cancelled claim or store has its complete effect or no effect, and later calls work."""
    store = make()
    for number in range(12):
        key = KEY._replace(partition=PartitionId("orders", number))
        await cut_short(lambda key=key: store.claim(key, 4), number)  # type: ignore[misc]
        before = (await store.read([key])).get(key)
        expect(before is None or before.floor == 4, f"a cancelled claim left {before}")
        owned = await _claim(store, key, 4)
        expect(before is None or owned.epoch > before.epoch, f"a claim after a cancelled one returned {owned}")
        change = StateChange(key, State(owned.epoch, 6, [(7, 8)]))
        await cut_short(lambda change=change: store.store([change]), number)  # type: ignore[misc]
        after = _shown((await store.read([key]))[key])
        expect(after in (_shown(owned), _shown(change.state)), f"a cancelled store left {after}")
        answer = list(await store.store([change]))
        expect(answer == [True], f"store() after a cancelled call answered {answer}, not [True]")


STATE_CHECKS: Final[tuple[StateCheck, ...]] = checks_of(globals())
"""All checks of a ``StateStore``, in the order to run them."""


async def check_a_commit_stores_and_a_rollback_does_not(harness: TransactionHarness) -> None:
    """The commit of the transaction stores the state. A roll-back leaves the state unchanged."""
    store = harness.store()
    epoch = (await store.claim(KEY, 0)).epoch
    change = StateChange(KEY, State(epoch, 3, [(5, 6)]))
    with suppress(_Rollback):
        async with harness.transaction() as connection:
            await harness.in_transaction(store, connection, change)
            raise _Rollback
    await _expect(harness.store(), {KEY: State(epoch, 0)})
    async with harness.transaction() as connection:
        await harness.in_transaction(store, connection, change)
    await _expect(harness.store(), {KEY: change.state})


async def check_a_transaction_of_a_former_owner_is_fenced(harness: TransactionHarness) -> None:
    """``store_in`` raises ``Fenced`` for an earlier epoch, and for an unclaimed state."""
    store = harness.store()
    former = (await store.claim(KEY, 0)).epoch
    current = (await harness.store().claim(KEY, 0)).epoch
    never = KEY._replace(incarnation="never")
    for change in (StateChange(KEY, State(former, 9)), StateChange(never, State(1, 9))):
        try:
            async with harness.transaction() as connection:
                await harness.in_transaction(store, connection, change)
        except Fenced:
            continue
        raise ContractBroken(
            f"store_in() of {change} returned; it must raise Fenced, because another owner has epoch {current}"
        )
    await _expect(store, {KEY: State(current, 0)})


async def check_a_position_in_a_transaction_never_falls(harness: TransactionHarness) -> None:
    """A lower floor of the owner changes nothing, and does not fail the transaction."""
    store = harness.store()
    epoch = (await store.claim(KEY, 0)).epoch
    await store.store([StateChange(KEY, State(epoch, 8))])
    async with harness.transaction() as connection:
        await harness.in_transaction(store, connection, StateChange(KEY, State(epoch, 7)))
    await _expect(store, {KEY: State(epoch, 8)})


async def check_a_claim_beside_an_open_transaction_is_refused(harness: TransactionHarness) -> None:
    """A claim raises ``StateLocked`` while a transaction with a change is open.

    After the transaction, the claim returns the changed floor.

    A claim that waits would stop the other partitions of its member for as long as a frozen process exists.
    """
    store, other = harness.store(), harness.store()
    epoch = (await store.claim(KEY, 0)).epoch
    beside = KEY._replace(partition=PartitionId("orders", 8))
    async with harness.transaction() as connection:
        await harness.in_transaction(store, connection, StateChange(KEY, State(epoch, 4)))
        for _ in range(2):
            claimed = None
            with anyio.move_on_after(_WITHIN) as waiting, suppress(StateLocked):
                claimed = await other.claim(KEY, 0)
            expect(claimed is None, f"claim() returned {claimed} beside an open transaction that had stored the state")
            expect(not waiting.cancelled_caught, f"claim() waited {_WITHIN:g} s for an open transaction")
            await other.claim(beside, 0)
    claimed = await _claim(other, KEY, 0)
    expect(claimed.floor == 4, f"claim() returned {claimed}, but the transaction before had stored the floor 4")


TRANSACTION_CHECKS: Final[tuple[TransactionCheck, ...]] = tuple(
    check for check in checks_of(globals()) if check not in STATE_CHECKS
)
"""All checks of a store that is ``StoresInTransaction``, in the order to run them."""


async def _claim(store: StateStore, key: StateKey, start: int) -> State:
    """Claim a state. Retry while another call locks the state."""
    with anyio.fail_after(_WITHIN):
        while True:
            try:
                return await store.claim(key, start)
            except StateLocked:
                await anyio.sleep(_AGAIN)


class _Rollback(Exception):
    """Rolls a transaction back."""


def _shown(state: State) -> tuple[int, int, tuple[tuple[int, int], ...]]:
    """Return a state as tuples, so that equal states compare equal."""
    return state.epoch, state.floor, tuple((start, end) for start, end in state.completed)


async def _expect(store: StateStore, states: Mapping[StateKey, State]) -> None:
    found = await store.read([*states, KEY])
    expect(
        {key: _shown(state) for key, state in found.items()} == {key: _shown(state) for key, state in states.items()},
        f"read() returned {_brief(found)}, but {_brief(states)} must stand",
    )


def _brief(states: Mapping[StateKey, State]) -> str:
    text = str({key.partition.number: _shown(state) for key, state in states.items()})
    return text if len(text) <= 400 else f"{text[:400]}…"


async def _refused(store: StateStore, change: StateChange) -> None:
    answer = list(await store.store([change]))
    expect(
        answer == [False],
        f"store() with the epoch {change.state.epoch} of no present owner answered {answer}, not [False]",
    )
