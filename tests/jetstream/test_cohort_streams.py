"""What becomes of the stream of a cohort while its members handle it: changed, purged, and larger than their room."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

import lanes
from lanes.core.cohort.ledger import Done, decode_done
from tests.jetstream.cohort_workload import FAST, CohortStream, Gate, Log, members, owned, settled
from tests.jetstream.conftest import MakeCohortStream
from tests.jetstream.workload import until

pytestmark = pytest.mark.anyio

SCARCE = lanes.Settings(max_in_flight=4, concurrency=4, drain_timeout=0.2, grace=0.2)


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seconds between two looks tell nothing that a tenth of one does not."""
    monkeypatch.setattr("lanes_jetstream.cohort.watch.CHECK_INTERVAL", 0.1)


@asynccontextmanager
async def stops(consumer: lanes.Consumer, error: type[Exception], words: str) -> AsyncIterator[None]:
    """Run the consumer beside the block, and see that it ends by itself, with an error that says so."""
    ended = anyio.Event()

    async def run() -> None:
        with pytest.raises(error, match=words):
            await consumer.run()
        ended.set()

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            yield
            await ended.wait()


async def test_every_partition_is_served_where_there_is_less_room_than_partitions(
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
        # Whichever partitions ask at this moment, it is hardly the one that a message comes for.
        for number in range(0, 24, 6):
            await stream.publish(stream.key(number))
            await log.handled(stream.published)
    assert log.violations == []
    assert log.repeats == []
    assert caplog.text.count("max_in_flight=2 is less than the ") == 1


async def test_a_stream_that_is_divided_otherwise_in_mid_run_stops_loudly(cohort_stream: CohortStream) -> None:
    """A key may be in two partitions from then on. Once it is as it was, everything goes on."""
    stream, log = cohort_stream, Log()
    gate = Gate(stream.key(0))
    a = lanes.Consumer(stream.source("a"), log.handler("a", gate), settings=SCARCE)
    before = (await stream.api(f"STREAM.INFO.{stream.name}"))["config"]
    eight = before["subject_transform"]["dest"].replace("partition(4,", "partition(8,")
    changed = before | {"subject_transform": before["subject_transform"] | {"dest": eight}}
    async with stops(a, lanes.ConfigError, f"'{stream.name}' was changed while the cohort used it.*change it back"):
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


@pytest.mark.parametrize("retention", ["limits", "workqueue"])
async def test_what_left_the_stream_is_not_kept_as_unfinished(
    make_cohort_stream: MakeCohortStream, retention: str
) -> None:
    """Handed over unfinished, and purged before the next owner gets it: nobody can finish it any more."""
    stream, log = await make_cohort_stream(partitions=1, retention=retention), Log()
    keys = [stream.key(0, number) for number in range(4)]
    gate = Gate(*keys[:3])
    a = lanes.Consumer(stream.source("a"), log.handler("a", gate), settings=SCARCE)
    async with members() as running:
        running.join(a)
        await settled(a, partitions=1)
        await stream.publish(*keys)
        await until(lambda: gate.waiting == 3 and log.done == {4})
        await running.leave(a)
        assert await done_of(stream) == Done(4, (1, 2, 3))
        await stream.api(f"STREAM.PURGE.{stream.name}", {"seq": 3})
        gate.open()
        b = lanes.Consumer(stream.source("b"), log.handler("b"), settings=FAST)
        running.join(b)
        await stream.publish(keys[3])
        await log.handled(3)
        await running.leave(b)
        assert await done_of(stream) == Done(5, ())
    assert log.done == {3, 4, 5}
    assert log.violations == []


async def done_of(stream: CohortStream) -> Done:
    """What is written down of its first partition."""
    state = await stream.read("s.0")
    assert state is not None
    return decode_done(state["done"])


async def backlogged(stream: CohortStream, consumer: lanes.Consumer) -> None:
    """Ten messages of each partition, of which the consumer holds four in all and knows the rest."""
    await until(lambda: consumer.ready and len(owned(consumer)) == 4)
    await stream.publish(*stream.a_key_each(), times=10)
    lags = [40, *[None] * 4]

    def known() -> bool:
        lags[:] = [partition.lag for partition in consumer.status().partitions.values()]
        return consumer.status().in_flight == 4 and None not in lags and sum(lag or 0 for lag in lags) == 40

    await until(known)


@pytest.mark.parametrize("retention", ["limits", "workqueue"])
@pytest.mark.parametrize("what", [{}, {"seq": 30}], ids=["all", "up_to"])
async def test_purge_of_what_was_not_delivered_to_a_cohort(
    make_cohort_stream: MakeCohortStream, retention: str, what: dict[str, Any]
) -> None:
    stream, log = await make_cohort_stream(retention=retention), Log()
    gate = Gate(*stream.a_key_each())
    a = lanes.Consumer(stream.source("a"), log.handler("a", gate), settings=SCARCE)
    async with stops(
        a, lanes.SourceError, r"begins at sequence \d+, so \d+ messages of cohort partition \d were dropped"
    ):
        await backlogged(stream, a)
        await stream.api(f"STREAM.PURGE.{stream.name}", what)
    assert log.done == set()


async def test_a_cohort_goes_on_behind_a_purge_where_that_is_asked_for(
    cohort_stream: CohortStream, caplog: pytest.LogCaptureFixture
) -> None:
    stream, log = cohort_stream, Log()
    gate = Gate(*stream.a_key_each())
    source = stream.source("a", out_of_range="earliest")
    a = lanes.Consumer(source, log.handler("a", gate), settings=SCARCE)
    async with members() as running:
        running.join(a)
        await backlogged(stream, a)
        held = {run.position for run in log.runs}
        await stream.api(f"STREAM.PURGE.{stream.name}")
        await until(lambda: caplog.text.count("dropped before they were delivered") >= 1)
        gate.open()
        await stream.publish(*stream.a_key_each())
        await log.handled(8)
        # What is finished may go: nobody has anything to do with it.
        await until(lambda: all(partition.lag == 0 for partition in a.status().partitions.values()))
        await stream.api(f"STREAM.PURGE.{stream.name}")
        await stream.publish(*stream.a_key_each())
        await log.handled(12)
    assert log.done == held | set(range(41, 49))
    assert log.violations == []


async def test_messages_of_a_subject_that_are_purged_are_warned_of(
    cohort_stream: CohortStream, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those before them are still there: somebody wanted these gone, and the others go on."""
    stream, log = cohort_stream, Log()
    gate = Gate(*stream.a_key_each())
    # What was asked for while there was room for more is given back soon.
    monkeypatch.setattr("lanes_jetstream.cohort.pulls.EXPIRES", 0.5)
    a = lanes.Consumer(stream.source("a"), log.handler("a", gate), settings=SCARCE)
    async with members() as running:
        running.join(a)
        await backlogged(stream, a)
        held = {run.position for run in log.runs}
        await stream.api(f"STREAM.PURGE.{stream.name}", {"filter": f"{stream.name}.3.>"})
        await until(lambda: "messages of cohort partition 3 were deleted before they were delivered" in caplog.text)
        gate.open()
        await log.handled(len(held | set(range(1, 41)) - set(range(4, 41, 4))))
    assert log.violations == []
    assert log.repeats == []
