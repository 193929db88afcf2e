"""The store of attempts in memory keeps the contract of such stores, and the contract finds those that do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import pytest

from lanes.attempts import Attempt, Attempts
from lanes.core.types import Message, Partition
from memsource import MemoryAttempts
from memsource.contract.attempts import ATTEMPTS_CHECKS, AttemptsCheck
from memsource.contract.harness import ContractBroken

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("check", ATTEMPTS_CHECKS, ids=lambda check: check.__name__)
async def test_the_store_of_attempts_in_memory_keeps_the_contract(check: AttemptsCheck) -> None:
    store: Attempts = MemoryAttempts()
    await check(lambda: store)


class _Forgets(MemoryAttempts):
    async def load(self, partition: Partition) -> Mapping[int, Attempt]:
        return {}


class _OnePartition(MemoryAttempts):
    async def load(self, partition: Partition) -> Mapping[int, Attempt]:
        return {position: attempt for rows in self.kept().values() for position, attempt in rows.items()}


class _Adds(MemoryAttempts):
    async def keep(self, message: Message, attempt: Attempt) -> None:
        before = (await self.load(message.partition)).get(message.position)
        count = attempt.attempts if before is None else before.attempts + 1
        await super().keep(message, attempt._replace(attempts=count))


class _LastOneWins(MemoryAttempts):
    async def keep(self, message: Message, attempt: Attempt) -> None:
        self._rows.setdefault((message.partition.id, ""), {}).pop(message.position, None)
        await super().keep(message, attempt)


class _FirstStateStays(MemoryAttempts):
    async def keep(self, message: Message, attempt: Attempt) -> None:
        before = (await self.load(message.partition)).get(message.position)
        if before is None or before.attempts < attempt.attempts:
            await super().keep(message, attempt)


class _DropsUnfenced(MemoryAttempts):
    async def drop(self, partition: Partition, positions: Sequence[int]) -> None:
        for position in positions:
            self._rows.get((partition.id, ""), {}).pop(position, None)


class _DropsItsOwn(MemoryAttempts):
    async def drop(self, partition: Partition, positions: Sequence[int]) -> None:
        rows = self._rows.get((partition.id, ""), {})
        own = [position for position in positions if position in rows and rows[position][1] == partition.fencing_token]
        await super().drop(partition, own)


class _DropsAll(MemoryAttempts):
    async def drop(self, partition: Partition, positions: Sequence[int]) -> None:
        self._rows.pop((partition.id, ""), None)


class _LosesSome(MemoryAttempts):
    async def keep(self, message: Message, attempt: Attempt) -> None:
        if message.position != 15:
            await super().keep(message, attempt)


class _Encodes(MemoryAttempts):
    async def keep(self, message: Message, attempt: Attempt) -> None:
        await super().keep(message, attempt._replace(error_type=ascii(attempt.error_type)))


WRONG: Final[Mapping[type[MemoryAttempts], str]] = {
    _Forgets: "check_a_new_owner_finds_what_was_kept",
    _OnePartition: "check_a_new_owner_finds_what_was_kept",
    _Adds: "check_every_call_may_be_repeated",
    _LastOneWins: "check_attempts_do_not_count_down",
    _FirstStateStays: "check_attempts_do_not_count_down",
    _DropsUnfenced: "check_a_former_owner_changes_nothing",
    _DropsItsOwn: "check_an_owner_drops_what_a_former_one_kept",
    _DropsAll: "check_many_are_dropped_at_once",
    _LosesSome: "check_calls_run_beside_each_other",
    _Encodes: "check_any_error_has_a_name",
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__.lstrip("_"))
async def test_the_contract_finds_a_store_of_attempts_that_breaks_it(wrong: type[MemoryAttempts]) -> None:
    (check,) = [check for check in ATTEMPTS_CHECKS if check.__name__ == WRONG[wrong]]
    store = wrong()
    with pytest.raises(ContractBroken):
        await check(lambda: store)
