"""The scenarios of the demo: the faults of a group, one after another, each during a part of the log."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from demo.errors import NoAnswer
from demo.group.members import Members, Process

if TYPE_CHECKING:
    from demo.brokers.ranges import RangedBroker

_INTO: Final = 0.1
"""Share of a part's events that the members handle before the fault. Members then have hundreds of messages in flight.
"""

_AGAIN: Final = 0.5
"""Seconds until the next change of a map, while the server does not answer."""


async def scenario(group: Members) -> None:
    """Kill a member, add a member, freeze a member until it loses its partitions, and stop a member after a drain."""
    await _begin(group, "settling", 0.0)
    await group.until(group.settled)
    await group.handled(await _begin(group, "undisturbed", 0.2, into=1.0))
    await _killed(group)
    await _added(group)
    await _frozen(group)
    await _stopped(group)


async def _killed(group: Members) -> None:
    count = await _begin(group, "one member killed with -9", 0.4)
    group.kill(group.busiest())
    await group.until(group.settled)
    await group.handled(count)


async def _added(group: Members) -> None:
    count = await _begin(group, "one more member joins", 0.55)
    await group.join()
    await group.until(group.settled)
    await group.handled(count)


async def _frozen(group: Members) -> None:
    await _begin(group, "one member frozen until it has lost its partitions", 0.75)
    thaw = group.freeze(group.busiest())
    # After this wait, the other members own the partitions of the frozen member, which does not know that.
    await group.until(group.settled)
    # The other members run messages of the same keys while the frozen member resumes its old messages.
    count = await group.feed(0.85)
    thaw()
    group.progress.phase = "the frozen member resumes"
    await group.until(group.settled)
    await group.handled(count)


async def _stopped(group: Members) -> None:
    count = await _begin(group, "one member drains and stops", 1.0)
    await group.stop(group.running[-1])
    await group.until(group.settled)
    await group.handled(count)


# --- with ranges


async def ranged_scenario(group: Members) -> None:
    """Move and split ranges, and kill, freeze and stop the owners of ranges. A new member receives parts of ranges.

    The ranges of an ended or frozen member wait until the scenario assigns these ranges to other members.
    """
    await _begin(group, "settling", 0.0)
    await group.until(group.settled)
    await group.handled(await _begin(group, "undisturbed", 0.2, into=1.0))
    await _moved(group)
    await _without_owner(group)
    await _parts_for_a_new_member(group)
    await _frozen_owner(group)
    await _stopped_owner(group)


async def _moved(group: Members) -> None:
    count = await _begin(group, "ranges move and split", 0.4)
    owner = group.busiest()
    others = [one.name for one in group.running if one is not owner]
    await _operate(group, lambda ranges: ranges.give_part(owner.name, others[0]))
    await _operate(group, lambda ranges: ranges.give_away(owner.name, others))
    # The ranges that the former owner gets back have messages of the others in flight.
    await _operate(group, lambda ranges: ranges.give_part(others[-1], owner.name))
    await group.until(group.settled)
    await group.handled(count)


async def _without_owner(group: Members) -> None:
    count = await _begin(group, "the owner of ranges killed with -9", 0.55)
    owner = group.busiest()
    group.kill(owner)
    await _give_away(group, owner)
    await group.until(group.settled)
    await group.handled(count)


async def _parts_for_a_new_member(group: Members) -> None:
    count = await _begin(group, "one more member joins and gets parts", 0.65)
    owners = [one.name for one in group.running]
    member = await group.join()
    for owner in owners:
        await _operate(group, lambda ranges, owner=owner: ranges.give_part(owner, member.name))  # type: ignore[misc]
    await group.until(group.settled)
    await group.handled(count)


async def _frozen_owner(group: Members) -> None:
    await _begin(group, "the owner of ranges frozen until others own them", 0.8)
    owner = group.busiest()
    thaw = group.freeze(owner)
    await _give_away(group, owner)
    await group.until(group.settled)
    count = await group.feed(0.9)
    thaw()
    group.progress.phase = "the frozen member resumes"
    await group.until(group.settled)
    await group.handled(count)


async def _stopped_owner(group: Members) -> None:
    count = await _begin(group, "the owner of ranges drains and stops", 1.0)
    owner = group.busiest()
    await group.stop(owner)
    await _give_away(group, owner)
    await group.until(group.settled)
    await group.handled(count)


async def _give_away(group: Members, owner: Process) -> None:
    others = [one.name for one in group.running if one is not owner]
    await _operate(group, lambda ranges: ranges.give_away(owner.name, others))


async def _operate(group: Members, action: Callable[[RangedBroker], Awaitable[None]]) -> None:
    """Change the map like an operator, who repeats the change while the server does not answer."""
    ranges: RangedBroker = group.broker  # type: ignore[assignment]
    while True:
        with suppress(NoAnswer):
            await action(ranges)
            return
        await asyncio.sleep(_AGAIN)


async def _begin(group: Members, phase: str, share: float, *, into: float = _INTO) -> int:
    """Publish up to the ``share`` of all events, and wait for the part ``into`` of the new events.

    Return the total number of published events.
    """
    group.progress.phase = phase
    before = group.progress.published
    count = await group.feed(share)
    await group.handled(before + int((count - before) * into))
    return count
