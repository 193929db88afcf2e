"""The scenario of the demo: the faults of a group, one after another, each during a part of the log."""

from __future__ import annotations

from typing import Final

from demo.group.members import Members

_INTO: Final = 0.1
"""Share of a part's events that is handled before the fault. Members then have hundreds of messages in flight."""


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


async def _begin(group: Members, phase: str, share: float, *, into: float = _INTO) -> int:
    """Publish until ``share`` of all events is published, and wait until part ``into`` of the new events is handled.

    Return the total number of published events.
    """
    group.progress.phase = phase
    before = group.progress.published
    count = await group.feed(share)
    await group.handled(before + int((count - before) * into))
    return count
