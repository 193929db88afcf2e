"""What a dead member had finished behind a stuck message: on a real server too, most of it was written down."""

from __future__ import annotations

import pytest

import lanes
from lanes.cohort.membership import Membership
from tests.jetstream.cohort_workload import Gate, Log, members, settled
from tests.jetstream.conftest import MakeCohortStream
from tests.jetstream.workload import until

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

IN_FLIGHT = 10
FINISHED = 100


@pytest.mark.parametrize("written", [True, False], ids=["written down", "planted: never written down"])
async def test_a_crash_repeats_what_was_not_written_down(
    make_cohort_stream: MakeCohortStream, monkeypatch: pytest.MonkeyPatch, written: bool
) -> None:
    if not written:
        monkeypatch.setattr(Membership, "checkpoint", lambda *_: None)
    stream, log = await make_cohort_stream(partitions=1), Log()
    stuck, last, *others = (stream.key(0, number) for number in range(FINISHED + 2))
    gate = Gate(stuck)
    settings = lanes.Settings(concurrency=IN_FLIGHT, max_in_flight=IN_FLIGHT)
    a = lanes.Consumer(stream.source("a"), log.handler("a", gate), settings=settings)
    b = lanes.Consumer(stream.source("b"), log.handler("b"), settings=settings)
    async with members() as running:
        running.join(a)
        await settled(a, partitions=1)
        await stream.publish(stuck)
        await until(lambda: gate.waiting == 1)
        await stream.publish(*others)
        await log.handled(FINISHED)
        await running.crash(a)
        running.join(b)
        # What comes again is delivered before it.
        await stream.publish(last)
        await log.handled(FINISHED + 2)
        await until(lambda: b.status().in_flight == 0)
    assert log.violations == []
    repeated = len(set(log.repeats))
    assert (repeated <= 2 * IN_FLIGHT) == written, repeated
    assert written or repeated == FINISHED
