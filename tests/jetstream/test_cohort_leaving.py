"""What a member of a cohort makes of a loss that nobody was told of when it leaves; no server."""

from __future__ import annotations

import asyncio

import anyio
import anyio.lowlevel
import pytest

from lanes.core.cohort.actions import LeaseLost
from lanes.core.cohort.ledger import Done
from tests.cohort.held import taken_over
from tests.jetstream.stub_pulls import Side
from tests.jetstream.test_cohort_deliveries import Held, owned, positions

pytestmark = pytest.mark.anyio


async def test_a_loss_that_nobody_reads_any_more_does_not_keep_a_member_from_leaving() -> None:
    held = Held()
    held.tell((3, taken_over(7)))
    held.partitions.next_events()
    # What is outstanding of the other one is of owners before: nobody has heard of it here.
    held.tell((3, LeaseLost("why")), (4, taken_over(8, done=Done(9, (7,)))))

    async def until_all_is_given_up() -> None:
        while len(held.told()) < 2:
            await anyio.lowlevel.checkpoint()

    running = asyncio.create_task(until_all_is_given_up())
    running.add_done_callback(lambda _: held.side.inbox.wake.set())
    with anyio.fail_after(5):
        await held.source._leave(running)
    assert held.told() == [("ended", 3), ("drained", 4)]


async def test_a_partition_that_brings_only_what_is_done_is_busy() -> None:
    """Behind a stuck message there may be any number of those, and all of them are read again."""
    side = Side()
    of = owned(side.pulls[0], Done(9, ()))
    assert positions(of) == []
    assert of.seen == 0.0
    await side.deliver("c", 5, 1)
    assert positions(of) == []
    assert of.seen > 0.0
