"""A cohort stops if its stream is divided again, and serves every partition even with more partitions than room."""

from __future__ import annotations

import pytest

import lanes
from tests.jetstream.cohort_workload import FAST, LEASE, CohortStream, Gate, Log, members, owned, settled
from tests.jetstream.conftest import MakeCohortStream
from tests.jetstream.workload import stops, until

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("frequent_checks")]


SCARCE = lanes.Settings(max_in_flight=4, concurrency=4, drain_timeout=0.2, grace=0.2)


async def test_every_partition_is_served_in_scarce_room(
    make_cohort_stream: MakeCohortStream, caplog: pytest.LogCaptureFixture
) -> None:
    stream, log = await make_cohort_stream(partitions=24), Log()
    settings = lanes.Settings(max_in_flight=2, concurrency=2)
    a = lanes.Consumer(stream.source("a"), log.handler("a"), settings=settings)
    async with members(within=20.0) as running:
        running.join(a)
        await settled(a, partitions=24)
        await stream.publish(*stream.a_key_each())
        await log.handled(24)
        # The partitions with a request at this moment are hardly those with a new message.
        for number in range(0, 24, 6):
            await stream.publish(stream.key(number))
            await log.handled(stream.published)
    assert log.violations == []
    assert log.repeats == []
    assert caplog.text.count("one delivery brings at most 2 messages, fewer than the ") == 1


async def test_a_changed_partitioning_stops_the_members(cohort_stream: CohortStream) -> None:
    """After the change, a key may be in two partitions. After the change is reverted, the cohort continues."""
    stream, log = cohort_stream, Log()
    stream.lease = LEASE
    gate = Gate(stream.key(0))
    a = lanes.Consumer(stream.source("a"), log.handler("a", gate), settings=SCARCE)
    before = (await stream.api(f"STREAM.INFO.{stream.name}"))["config"]
    eight = before["subject_transform"]["dest"].replace("partition(4,", "partition(8,")
    changed = before | {"subject_transform": before["subject_transform"] | {"dest": eight}}
    async with stops(
        a,
        f"'{stream.name}' was changed while the cohort used it.*hange the (stream|retention) back",
        error=lanes.ConfigError,
    ):
        await until(lambda: a.ready and len(owned(a)) == 4)
        await stream.publish(*stream.a_key_each())
        await log.handled(3)
        await stream.api(f"STREAM.UPDATE.{stream.name}", changed)
    await stream.api(f"STREAM.UPDATE.{stream.name}", before)
    gate.open()
    b = lanes.Consumer(stream.source("b"), log.handler("b"), settings=FAST)
    async with members() as running:
        running.join(b)
        await stream.publish(*stream.a_key_each())
        await log.handled(8)
    assert log.violations == []
    assert log.repeats == []
