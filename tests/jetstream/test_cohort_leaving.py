"""What a member of a cohort makes of a loss that nobody was told of, when it releases and when it leaves; no server."""

from __future__ import annotations

import asyncio

import anyio
import pytest
from nats.aio.client import Client

import lanes
from lanes.core.cohort.actions import Lost as LostTenure
from lanes.core.cohort.actions import Owned
from lanes.core.cohort.ledger import Done
from lanes.source import Assigned
from lanes_jetstream import Cohort
from lanes_jetstream.cohort_source import CohortSource
from lanes_jetstream.connection import Connection
from tests.jetstream.stub_pulls import Side
from tests.jetstream.test_cohort_deliveries import Held, positions, taken_over, tenancy

pytestmark = pytest.mark.anyio


async def test_a_loss_that_nobody_was_told_of_is_no_release() -> None:
    held = Held()
    held.tell((3, taken_over(7)))
    (_, assigned) = held.holdings.next_events()
    assert isinstance(assigned, Assigned)
    held.holdings.raise_lost(assigned.partition)
    held.tell((3, LostTenure("why")), (3, taken_over(8)))
    with pytest.raises(lanes.SourceError, match="S/3 was lost before it was released"):
        held.holdings.raise_lost(assigned.partition)
    held.holdings.raise_lost(held.holdings.tenancies[3].partition)
    held.holdings.next_events()
    held.holdings.raise_lost(assigned.partition)


class Leaving:
    """A membership whose run ends when one partition's loss was acknowledged and another one was given up."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []
        self.over = asyncio.Event()

    def ended(self, partition: int) -> None:
        self._note("ended", partition)

    def drained(self, partition: int, done: Done) -> None:
        self._note("drained", partition)

    def _note(self, what: str, partition: int) -> None:
        self.told.append((what, partition))
        if len(self.told) == 2:
            self.over.set()


async def test_a_loss_that_nobody_reads_any_more_does_not_keep_a_member_from_leaving() -> None:
    held, leaving = Held(), Leaving()
    held.tell((3, taken_over(7)))
    held.holdings.next_events()
    # What is outstanding of the other one is of owners before: nobody has heard of it here.
    held.tell((3, LostTenure("why")), (4, Owned(8, 0, 8, Done(9, (7,)), False)))
    source = CohortSource(
        Connection(Client()), "S", Cohort("c", member="a"), key=None, start="beginning", ack_wait=30, max_ack_pending=9
    )
    source._inbox, source._holdings = held.side.inbox, held.holdings
    source._membership = leaving  # type: ignore[assignment]
    running = asyncio.create_task(leaving.over.wait())
    running.add_done_callback(lambda _: held.side.inbox.wake.set())
    with anyio.fail_after(5):
        await source._leave(running)  # type: ignore[arg-type]
    assert leaving.told == [("ended", 3), ("drained", 4)]


async def test_a_partition_that_brings_only_what_is_done_is_busy() -> None:
    """Behind a stuck message there may be any number of those, and all of them are read again."""
    side = Side()
    of = tenancy(side.pulls[0], Done(9, ()))
    assert positions(of) == []
    assert of.seen == 0.0
    await side.deliver("c", 5, 1)
    assert positions(of) == []
    assert of.seen > 0.0
