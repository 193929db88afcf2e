"""Members agree on a plan through a bucket, and only the necessary partitions move, in virtual time."""

from __future__ import annotations

import math
from collections import Counter
from typing import Final

import anyio
import pytest
from anyio.abc import TaskGroup

from lanes.cohort.membership import Membership
from lanes.core.cohort.plan import plan
from memsource.sim.loop.virtual import until
from tests.cohort.members import Servers, config_of, serve, virtual

MANY: Final = 60


class Team:
    """Members of one cohort of many partitions; ``weights`` has those that take part now."""

    def __init__(self, tasks: TaskGroup) -> None:
        self.servers = Servers(partitions=MANY)
        self.weights: dict[str, int] = {}
        self._tasks = tasks
        self._members: dict[str, Membership] = {}

    def join(self, name: str, weight: int = 1) -> None:
        member = self.servers.member(name, config=config_of(partitions=MANY), weight=weight)
        self._members[name], self.weights[name] = member, weight
        self._tasks.start_soon(serve, member)

    def leave(self, name: str) -> None:
        del self.weights[name]
        self._members[name].stop()

    async def settled(self) -> dict[str, frozenset[int]]:
        """Wait until the plan has these members and each owns its partitions; return these."""

        def agreed() -> bool:
            owners = self.servers.plan().owners
            return set(owners) == set(self.weights) and all(
                self._members[owner or ""].deadline(number) > -math.inf for number, owner in enumerate(owners)
            )

        for name in self.weights:
            await self._members[name].joined.wait()
        assert await until(agreed, 20.0)
        owners = self.servers.plan().owners
        return {name: frozenset(p for p, owner in enumerate(owners) if owner == name) for name in self.weights}

    @property
    def acquired(self) -> int:
        """The number of acquisitions of a partition so far, by its durables."""
        return sum(name.epoch > 0 for _, name in self.servers.stream.created)


def test_a_join_moves_only_the_partitions_that_the_new_member_gets() -> None:
    """Only the new member gains partitions, at most its share."""

    async def test() -> None:
        async with anyio.create_task_group() as tasks:
            team = Team(tasks)
            team.join("m0")
            before, acquired = await team.settled(), team.acquired
            for number in range(1, 6):
                newcomer = f"m{number}"
                team.join(newcomer)
                after = await team.settled()
                share = MANY // (number + 1)
                assert len(after[newcomer]) == share
                assert all(after[name] <= before[name] for name in before)
                assert team.acquired - acquired == share
                before, acquired = after, team.acquired
            tasks.cancel_scope.cancel()

    virtual(test)


@pytest.mark.long
def test_a_leave_moves_only_the_partitions_of_the_member_that_left() -> None:
    """The remaining members keep their partitions, and share the partitions of the member that left."""

    async def test() -> None:
        async with anyio.create_task_group() as tasks:
            team = Team(tasks)
            for number in range(6):
                team.join(f"m{number}")
            before, acquired = await team.settled(), team.acquired
            for number in range(5):
                leaver = f"m{number}"
                orphans = len(before[leaver])
                team.leave(leaver)
                after = await team.settled()
                assert all(before[name] <= after[name] for name in after)
                assert max(map(len, after.values())) - min(map(len, after.values())) <= 1
                assert team.acquired - acquired == orphans
                before, acquired = after, team.acquired
            tasks.cancel_scope.cancel()

    virtual(test)


def test_a_member_owns_by_its_weight() -> None:
    """Each heartbeat has its member's weight, so every planner knows all weights."""

    async def test() -> None:
        async with anyio.create_task_group() as tasks:
            team = Team(tasks)
            team.join("a", 3)
            await team.settled()
            team.join("b", 2)
            await team.settled()
            before, acquired = team.servers.plan().owners, team.acquired
            team.join("c", 5)
            shares = await team.settled()
            assert {name: len(share) for name, share in shares.items()} == {"a": 18, "b": 12, "c": 30}
            assert team.servers.plan().owners == plan(before, team.weights).owners
            assert team.acquired - acquired == 30
            team.leave("a")
            await team.settled()
            counted = Counter(team.servers.plan().owners)
            assert counted == Counter(plan([None] * MANY, team.weights).owners)
            tasks.cancel_scope.cancel()

    virtual(test)
