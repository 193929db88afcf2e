"""Members prefer a number of partitions, in one cohort with members of earlier code, in virtual time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
from anyio.abc import TaskGroup

from lanes.cohort.membership import Membership
from lanes.cohort.roster import Roster
from lanes.core.cohort.records import PlanRecord
from memsource.sim.loop.virtual import until
from tests.cohort.former import former_roster
from tests.cohort.members import Servers, config_of, serve, virtual

PARTITIONS = 12


class Team:
    """Members of one cohort with their own settings; some of them may run the former code."""

    def __init__(self, tasks: TaskGroup) -> None:
        self.servers = Servers(partitions=PARTITIONS)
        self.members: dict[str, Membership] = {}
        self._tasks = tasks

    def join(self, name: str, *, former: bool = False, **settings: Any) -> None:
        roster = former_roster if former else Roster
        member = self.servers.member(name, config=config_of(partitions=PARTITIONS), roster=roster, **settings)
        self.members[name] = member
        self._tasks.start_soon(serve, member)

    def leave(self, name: str) -> None:
        self.members.pop(name).stop()

    async def settled(self) -> PlanRecord:
        """Wait until each member owns its part of the plan, and the plan stays; return the plan."""

        def agreed() -> bool:
            plan = self.servers.plan()
            owned = [sum(each.deadline(n) > 0 for n in range(PARTITIONS)) for each in self.members.values()]
            return set(plan.members) == set(self.members) and owned == [
                plan.owners.count(name) for name in self.members
            ]

        for each in self.members.values():
            await each.joined.wait()
        assert await until(agreed, 30.0)
        await anyio.sleep(5.0)
        plan, revision = self.servers.plan(), self.servers.revision()
        await anyio.sleep(60.0)
        assert self.servers.revision() == revision, "the plan is written again and again"
        assert agreed()
        return plan

    async def shares(self) -> dict[str, int]:
        return dict(Counter(str(owner) for owner in (await self.settled()).owners))


def played(play: Callable[[Team], Awaitable[None]]) -> None:
    """Play with a team in virtual time."""

    async def test() -> None:
        async with anyio.create_task_group() as tasks:
            await play(Team(tasks))
            tasks.cancel_scope.cancel()

    virtual(test)


def test_a_member_gets_its_target_at_most_while_others_can_own_the_rest() -> None:
    async def play(team: Team) -> None:
        team.join("a", consumer_target=2)
        assert await team.shares() == {"a": 12}
        assert team.members["a"].under_provisioned
        team.join("b", consumer_target=3)
        plan = await team.settled()
        assert Counter(plan.owners) == {"a": 6, "b": 6}
        assert plan.under_provisioned
        team.join("c")
        plan = await team.settled()
        assert Counter(plan.owners) == {"a": 2, "b": 3, "c": 7}
        assert not plan.under_provisioned
        assert not any(each.under_provisioned for each in team.members.values())
        team.leave("c")
        assert (await team.settled()).under_provisioned
        assert all(each.under_provisioned for each in team.members.values())

    played(play)


def test_the_newest_member_gives_the_default_and_an_own_target_overrides_it() -> None:
    async def play(team: Team) -> None:
        team.join("a", consumer_target=5, default_consumer_target=9)
        await anyio.sleep(1.0)
        team.join("b")
        # The newest member gives no default.
        assert await team.shares() == {"a": 5, "b": 7}
        team.join("c", default_consumer_target=3)
        plan = await team.settled()
        assert plan.default_consumer_target == 3
        assert Counter(plan.owners) == {"a": 5, "b": 4, "c": 3} or Counter(plan.owners) == {"a": 5, "b": 3, "c": 4}
        assert plan.under_provisioned

    played(play)


def test_a_plan_gets_the_new_flag_without_a_new_generation() -> None:
    async def play(team: Team) -> None:
        team.join("a", consumer_target=20)
        before = await team.settled()
        team.join("b", active_members=1, default_consumer_target=3)
        plan = await team.settled()
        assert (before.owners, plan.owners) == (("a",) * 12, ("a",) * 12)
        assert (plan.active_members, plan.too_few_members, plan.under_provisioned) == (1, False, False)
        assert plan.standbys == ("b",)

    played(play)


@pytest.mark.parametrize("first", [False, True])
def test_members_plan_by_the_lowest_version_of_the_live_members(first: bool) -> None:
    async def play(team: Team) -> None:
        if first:
            team.join("old", former=True)
            await team.settled()
        team.join("a", consumer_target=1)
        team.join("b", consumer_target=2)
        await team.settled()
        if not first:
            team.join("old", former=True)
        # The former code knows no targets. If the new code planned by them, each would change the other's plan.
        plan = await team.settled()
        assert Counter(plan.owners) == {"a": 4, "b": 4, "old": 4}
        # The former code does not write the new fields. The new code adds the flag without a new generation.
        assert plan.rules == 0
        assert plan.under_provisioned
        team.leave("old")
        plan = await team.settled()
        assert (plan.rules, Counter(plan.owners)) == (1, {"a": 6, "b": 6})
        team.join("new")
        plan = await team.settled()
        assert (plan.rules, Counter(plan.owners)) == (1, {"a": 1, "b": 2, "new": 9})
        team.join("old", former=True)
        plan = await team.settled()
        assert plan.rules == 0
        assert max(Counter(plan.owners).values()) == 3

    played(play)


def test_without_targets_a_rolling_upgrade_moves_only_the_partitions_of_restarted_members() -> None:
    async def play(team: Team) -> None:
        for name in "abc":
            team.join(name, former=True, weight=1 + (name == "b"))
        before = await team.settled()
        for name in "abc":
            team.leave(name)
            team.join(f"{name}2", weight=1 + (name == "b"))
            await team.settled()
        plan = await team.settled()
        assert plan.rules == 1
        assert sorted(Counter(plan.owners).values()) == sorted(Counter(before.owners).values())
        # A stop and a start move the partitions of the stopped member away and back: one plan for each.
        assert plan.generation <= before.generation + 6

    played(play)


def test_a_drained_member_of_the_lowest_version_still_decides_the_rules() -> None:
    """A drained member still plans, so the others must plan as it does."""

    async def play(team: Team) -> None:
        team.join("a", consumer_target=1)
        team.join("old", former=True)
        team.join("b")
        await team.settled()
        team.servers.drain("old")
        plan = await team.settled()
        assert (plan.rules, Counter(plan.owners)) == (0, {"a": 6, "b": 6})

    played(play)


def test_the_rules_rise_and_fall_again_with_the_heartbeat_of_the_former_code() -> None:
    """A member that is cut off loses its heartbeat, and returns with it."""

    async def play(team: Team) -> None:
        team.join("a", consumer_target=1)
        team.join("b")
        team.join("old", former=True)
        await team.settled()
        team.servers.links["old"].cut = True
        assert await until(lambda: team.servers.plan().rules == 1, 30.0)
        assert Counter(team.servers.plan().owners) == {"a": 1, "b": 11}
        team.servers.links["old"].cut = False
        assert await until(lambda: team.servers.plan().rules == 0, 30.0)
        plan = await team.settled()
        assert (plan.rules, Counter(plan.owners)) == (0, {"a": 4, "b": 4, "old": 4})
        member = team.members["a"]
        assert (member.target_honoured, member.under_provisioned) == (False, True)

    played(play)
