"""The state store in memory keeps the contract of such stores, and the contract finds those that do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import anyio
import pytest

from lanes.ownership import State, StateChange, StateKey, StateStore
from memsource.contract.harness import ContractBroken
from memsource.contract.states import STATE_CHECKS, StateCheck
from memsource.memory.states import MemoryStates

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("check", STATE_CHECKS, ids=lambda check: check.__name__)
async def test_the_store_of_positions_in_memory_keeps_the_contract(check: StateCheck) -> None:
    store: StateStore = MemoryStates()
    await check(lambda: store)


class _ClaimsExist(MemoryStates):
    async def read(self, keys: Sequence[StateKey]) -> Mapping[StateKey, State]:
        return {key: State(0, 0) for key in keys} | dict(await super().read(keys))


class _SameEpoch(MemoryStates):
    """A store that keeps the epoch at an acquisition, as a store without a fence."""

    async def claim(self, key: StateKey, start: int) -> State:
        self._epoch = 0
        return await super().claim(key, start)


class _StartsAgain(MemoryStates):
    async def claim(self, key: StateKey, start: int) -> State:
        state = self._states[key] = (await super().claim(key, start))._replace(floor=start)
        return state


class _ForgetsRuns(MemoryStates):
    async def claim(self, key: StateKey, start: int) -> State:
        return (await super().claim(key, start))._replace(completed=())


class _StoresAnyway(MemoryStates):
    """A store that compares nothing: the lock was lost, and the late write was stored anyway."""

    def _store(self, key: StateKey, state: State) -> bool:
        self._states[key] = state
        return True


class _AcceptsHigherEpochs(MemoryStates):
    def _store(self, key: StateKey, state: State) -> bool:
        stored = self._states.get(key)
        if stored is not None and state.epoch > stored.epoch:
            self._states[key] = state
            return True
        return super()._store(key, state)


class _Creates(MemoryStates):
    def _store(self, key: StateKey, state: State) -> bool:
        self._states.setdefault(key, state._replace(floor=0))
        return super()._store(key, state)


class _Falls(MemoryStates):
    """A store that lets a position fall, as after a failure of the first message of a batch."""

    def _store(self, key: StateKey, state: State) -> bool:
        stored = self._states.get(key)
        if stored is not None and stored.epoch == state.epoch:
            self._states[key] = state
        return super()._store(key, state)


class _RefusesRepeats(MemoryStates):
    def _store(self, key: StateKey, state: State) -> bool:
        return self._states.get(key) != state._replace(completed=tuple(state.completed)) and super()._store(key, state)


class _AllOrNone(MemoryStates):
    async def store(self, changes: Sequence[StateChange]) -> Sequence[bool]:
        stored = await self.read([each.key for each in changes])
        if any(each.key not in stored or stored[each.key].epoch != each.state.epoch for each in changes):
            return [False] * len(changes)
        return await super().store(changes)


class _Sorted(MemoryStates):
    async def store(self, changes: Sequence[StateChange]) -> Sequence[bool]:
        return await super().store(sorted(changes, key=lambda each: each.key))


class _WithoutIncarnation(MemoryStates):
    async def claim(self, key: StateKey, start: int) -> State:
        return await super().claim(key._replace(incarnation=""), start)

    async def read(self, keys: Sequence[StateKey]) -> Mapping[StateKey, State]:
        found = await super().read([key._replace(incarnation="") for key in keys])
        return {key: found[key._replace(incarnation="")] for key in keys if key._replace(incarnation="") in found}

    def _store(self, key: StateKey, state: State) -> bool:
        return super()._store(key._replace(incarnation=""), state)


class _ReadThenWrite(MemoryStates):
    """A store that compares and writes in two steps, between which a claim may come."""

    async def store(self, changes: Sequence[StateChange]) -> Sequence[bool]:
        found = await self.read([each.key for each in changes])
        owned = [each.key in found and found[each.key].epoch == each.state.epoch for each in changes]
        for _ in range(3):
            await anyio.lowlevel.checkpoint()
        for (key, state), mine in zip(changes, owned, strict=True):
            if mine and state.floor >= found[key].floor:
                self._states[key] = state._replace(epoch=self._states[key].epoch)
        return owned


class _HalfAWrite(MemoryStates):
    async def store(self, changes: Sequence[StateChange]) -> Sequence[bool]:
        await super().store([StateChange(key, state._replace(completed=())) for key, state in changes])
        for _ in range(4):
            await anyio.lowlevel.checkpoint()
        return await super().store(changes)


WRONG: Final[Mapping[type[MemoryStates], str]] = {
    _ClaimsExist: "check_a_state_begins_with_its_first_claim",
    _SameEpoch: "check_every_claim_raises_the_epoch",
    _StartsAgain: "check_a_state_begins_with_its_first_claim",
    _ForgetsRuns: "check_a_claim_returns_the_completed_runs",
    _StoresAnyway: "check_a_former_owner_writes_nothing",
    _AcceptsHigherEpochs: "check_a_former_owner_writes_nothing",
    _Creates: "check_a_state_without_a_claim_is_not_written",
    _Falls: "check_a_position_never_falls",
    _RefusesRepeats: "check_every_call_may_be_repeated",
    _AllOrNone: "check_changes_of_one_call_are_independent",
    _Sorted: "check_changes_of_one_call_are_independent",
    _WithoutIncarnation: "check_each_part_of_the_key_counts",
    _ReadThenWrite: "check_no_write_lies_between_two_of_a_former_owner",
    _HalfAWrite: "check_a_cancelled_call_is_whole_or_nothing",
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__.lstrip("_"))
async def test_the_contract_finds_a_store_of_positions_that_breaks_it(wrong: type[MemoryStates]) -> None:
    (check,) = [check for check in STATE_CHECKS if check.__name__ == WRONG[wrong]]
    store = wrong()
    with pytest.raises(ContractBroken):
        await check(lambda: store)
