"""out_of_range= of a cohort: messages that a purge dropped before their delivery stop the member, or are skipped."""

from __future__ import annotations

from typing import Any

import pytest

import lanes
from lanes.core.cohort.ledger import Done, decode_done
from tests.jetstream.cohort.test_stream_changes import SCARCE
from tests.jetstream.cohort_workload import FAST, CohortStream, Gate, Log, members, owned, settled
from tests.jetstream.conftest import MakeCohortStream
from tests.jetstream.workload import stops, until

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("frequent_checks")]


async def done_of(stream: CohortStream) -> Done:
    """The ledger of the first partition."""
    state = await stream.read("s.0")
    assert state is not None
    return decode_done(state["done"])


async def backlogged(stream: CohortStream, consumer: lanes.Consumer) -> None:
    """Publish ten messages to each partition; the consumer holds four in all and knows the backlog."""
    await until(lambda: consumer.ready and len(owned(consumer)) == 4)
    await stream.publish(*stream.a_key_each(), times=10)
    lags = [40, *[None] * 4]

    def known() -> bool:
        lags[:] = [partition.lag for partition in consumer.status().partitions.values()]
        return consumer.status().in_flight == 4 and None not in lags and sum(lag or 0 for lag in lags) == 40

    await until(known)


@pytest.mark.parametrize("retention", ["limits", "workqueue"])
async def test_a_message_that_left_the_stream_is_not_unfinished(
    make_cohort_stream: MakeCohortStream, retention: str
) -> None:
    """A purge drops an unfinished message after its handover, so no member can finish the message."""
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


@pytest.mark.parametrize("retention", ["limits", "workqueue"])
@pytest.mark.parametrize("what", [{}, {"seq": 30}], ids=["all", "up_to"])
async def test_a_purge_of_undelivered_messages_stops_the_member(
    make_cohort_stream: MakeCohortStream, retention: str, what: dict[str, Any]
) -> None:
    stream, log = await make_cohort_stream(retention=retention), Log()
    gate = Gate(*stream.a_key_each())
    a = lanes.Consumer(stream.source("a"), log.handler("a", gate), settings=SCARCE)
    async with stops(a, r"begins at sequence \d+, so \d+ messages of cohort partition \d were dropped"):
        await backlogged(stream, a)
        await stream.api(f"STREAM.PURGE.{stream.name}", what)
    assert log.done == set()


async def test_a_purge_is_skipped_with_out_of_range_earliest(
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
        # Finished messages may be purged: no member needs them.
        await until(lambda: all(partition.lag == 0 for partition in a.status().partitions.values()))
        await stream.api(f"STREAM.PURGE.{stream.name}")
        await stream.publish(*stream.a_key_each())
        await log.handled(12)
    # Four messages were in flight at the purge. Their handlers start one after the other.
    kept = log.done - set(range(41, 49))
    assert len(kept) == 4 and held <= kept <= set(range(1, 41))
    assert log.done >= set(range(41, 49))
    assert log.violations == []


async def test_a_purge_of_one_subject_is_logged(
    cohort_stream: CohortStream, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier messages still exist, so the purge was deliberate, and the other messages continue."""
    stream, log = cohort_stream, Log()
    gate = Gate(*stream.a_key_each())
    # Requests from before the room became scarce end soon.
    monkeypatch.setattr("lanes_jetstream.wire.turns.EXPIRES", 0.5)
    a = lanes.Consumer(stream.source("a"), log.handler("a", gate), settings=SCARCE)
    async with members() as running:
        running.join(a)
        await backlogged(stream, a)
        held = {run.position for run in log.runs}
        await stream.api(f"STREAM.PURGE.{stream.name}", {"filter": f"{stream.name}.3.>"})
        await until(
            lambda: (
                "messages of cohort partition 3 were deleted one by one or by subject before they were delivered"
                in caplog.text
            )
        )
        gate.open()
        await log.handled(len(held | set(range(1, 41)) - set(range(4, 41, 4))))
    assert log.violations == []
    assert log.repeats == []
