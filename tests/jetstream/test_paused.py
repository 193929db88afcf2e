"""Messages for a paused partition wait in the source, and their ack_wait is extended, so none is redelivered."""

from __future__ import annotations

import anyio
import pytest

from lanes.core.types import Message, Partition, Room, Settlement
from lanes.source import Assigned
from memsource.contract.harness import messages_of
from tests.jetstream.cohort_workload import CohortStream
from tests.jetstream.workload import Stream, inner

pytestmark = pytest.mark.anyio


LARGE = 1 << 20


async def test_messages_for_a_paused_durable_wait_and_stay_alive(stream: Stream) -> None:
    """Without the extensions, the server would redeliver these messages."""
    source = stream.source(ack_wait=5.0)
    await source.open()
    try:
        (assigned,) = await source.receive(Room(0, 0))
        assert isinstance(assigned, Assigned)
        paused = Room(10, LARGE, frozenset([assigned.partition]))
        await stream.publish(2)
        with anyio.move_on_after(0.4):
            await source.receive(paused)
        assert await stream.ack_pending() == 0, "the source has sent a request"
        first = messages_of(await source.receive(Room(10, LARGE)))
        await source.settle([Settlement(assigned.partition, first)])
        with anyio.move_on_after(0.4):
            await source.receive(Room(10, LARGE))
        await stream.publish(5)
        with anyio.move_on_after(7.0):
            # The pause is longer than ack_wait.
            assert await source.receive(paused) == []
        # The source has room for more messages, and the server redelivered no message.
        assert len(inner(source)._pulls.arrived) == 5
        assert [message.position for message in messages_of(await source.receive(Room(10, LARGE)))] == [3, 4, 5, 6, 7]
    finally:
        await source.aclose()


async def test_messages_for_a_paused_member_wait(cohort_stream: CohortStream) -> None:
    source = cohort_stream.source("a")
    await source.open()
    try:
        owned: set[Partition] = set()
        with anyio.fail_after(20):
            while len(owned) < 4:
                owned |= {event.partition for event in await source.receive(Room(0, 0)) if isinstance(event, Assigned)}
        with anyio.move_on_after(0.5):
            await source.receive(Room(100, LARGE))
        await cohort_stream.publish(*cohort_stream.a_key_each())
        one = next(partition for partition in owned if partition.id.number == 1)
        came: list[Message] = []
        with anyio.fail_after(10):
            while len(came) < 3:
                came += messages_of(await source.receive(Room(100, LARGE, frozenset([one]))))
            with anyio.move_on_after(0.5):
                came += messages_of(await source.receive(Room(100, LARGE, frozenset([one]))))
            assert {message.partition.id.number for message in came} == {0, 2, 3}
            (last,) = messages_of(await source.receive(Room(100, LARGE)))
        assert last.partition is one
    finally:
        await source.aclose()
