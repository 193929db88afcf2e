"""A member leaves the cohort in order, also with an unread loss, and after a cancelled close."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from lanes.core.cohort.actions import LeaseLost
from lanes.core.cohort.ledger import Done
from tests.cohort.stub_cohort import taken_over
from tests.jetstream.cohort.stubs import Held, StubInbox, owned_partition, positions
from tests.jetstream.cohort_workload import CohortStream

pytestmark = pytest.mark.anyio


async def test_a_loss_that_the_consumer_has_not_read_does_not_keep_a_member_from_leaving() -> None:
    held = Held()
    held.tell((3, taken_over(7)))
    held.partitions.next_events()
    # The outstanding messages of the other partition belong to earlier owners and never arrived here.
    held.tell((3, LeaseLost("why")), (4, taken_over(8, done=Done(9, (7,)))))

    async def until_all_is_given_up() -> None:
        while len(held.told()) < 2:
            await anyio.lowlevel.checkpoint()

    running = asyncio.create_task(until_all_is_given_up())
    running.add_done_callback(lambda _: held.side.inbox.wake.set())
    with anyio.fail_after(5):
        await held.source._leave(running)
    assert held.told() == [("ended", 3), ("drained", 4)]


async def test_a_partition_that_only_repeats_finished_messages_is_busy() -> None:
    """A stuck message may precede any number of such redeliveries, and all of them are read."""
    side = StubInbox()
    of = owned_partition(side.pulls[0], Done(9, ()))
    assert positions(of) == []
    assert of.seen == 0.0
    await side.deliver("c", 5, 1)
    assert positions(of) == []
    assert of.seen > 0.0


async def test_a_cancelled_close_leaves_no_member_behind(
    cohort_stream: CohortStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = cohort_stream.source("a", where=cohort_stream.client)
    await source.open()
    inner: Any = source._source
    membership = inner._membership_task

    leaving = anyio.Event()

    async def stays(_: object) -> None:
        leaving.set()
        await anyio.sleep_forever()

    monkeypatch.setattr(inner, "_leave", stays)
    closing = asyncio.create_task(source.aclose())
    await leaving.wait()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await source.aclose()
    await asyncio.wait([membership], timeout=5)
    assert membership.done()
