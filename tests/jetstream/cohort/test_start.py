"""start= of a cohort is decided once, and a member that does not join leaves no trace on the client."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import anyio
import nats.errors
import pytest

import lanes
from lanes_jetstream.cohort.lease_store import JetStreamLeaseStore
from tests.jetstream.cohort_workload import FAST, CohortStream, Log, members, settled
from tests.jetstream.workload import moment_behind

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("start", "first"),
    [("beginning", 1), ("next", 9), (3, 3), ("time", 5)],
    ids=["beginning", "next", "sequence", "time"],
)
async def test_a_new_cohort_begins_at_start(cohort_stream: CohortStream, start: Any, first: int) -> None:
    """The start is decided once, at the setup."""
    stream, log = cohort_stream, Log()
    await stream.publish(*stream.a_key_each())
    moment = await moment_behind(stream.client, stream.name, stream.published)
    if start == "time":
        start = moment
    await stream.publish(*stream.a_key_each())
    a = lanes.Consumer(stream.source("a", start=start), log.handler("a"), settings=FAST)
    async with members() as running:
        running.join(a)
        await settled(a, partitions=4)
        await stream.publish(*stream.a_key_each())
        await log.handled(13 - first)
        await running.leave(a)
        if isinstance(start, datetime):
            start = start.astimezone(timezone(timedelta(hours=2)))  # The same time.
        b = lanes.Consumer(stream.source("b", start=start), log.handler("b"), settings=FAST)
        running.join(b)
        await settled(b, partitions=4)
        await stream.publish(*stream.a_key_each())
        await log.handled(17 - first)
    assert log.done == set(range(first, 17))
    assert log.repeats == []


async def test_the_start_of_later_members_is_only_logged(
    cohort_stream: CohortStream, caplog: pytest.LogCaptureFixture
) -> None:
    """The start also holds if it is after the end of the stream, which a later member cannot distinguish from a
    loss."""
    caplog.set_level("INFO", "lanes")
    stream, log = cohort_stream, Log()
    await stream.publish(*stream.a_key_each())
    for member, start in (("a", 7), ("b", 3), ("c", datetime(2026, 1, 1, tzinfo=UTC))):
        consumer = lanes.Consumer(stream.source(member, start=start), log.handler(member), settings=FAST)
        async with members() as running:
            running.join(consumer)
            await settled(consumer, partitions=4)
    assert (
        "start=3 is ignored, because the cohort was set up with 7; the cohort continues from its position"
        in caplog.text
    )
    assert "start=2026-01-01T00:00:00+00:00 is ignored, because the cohort was set up with 7" in caplog.text
    d = lanes.Consumer(stream.source("d"), log.handler("d"), settings=FAST)
    async with members() as running:
        running.join(d)
        await settled(d, partitions=4)
        await stream.publish(*stream.a_key_each())
        await log.handled(2)
    assert log.done == {7, 8}


@pytest.mark.parametrize("fails", [True, False], ids=["fails", "cancelled"])
async def test_a_member_that_does_not_join_leaves_no_subscription(
    cohort_stream: CohortStream, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    async def watch(store: JetStreamLeaseStore, patterns: object, changed: object) -> None:
        if fails:
            raise nats.errors.TimeoutError
        await anyio.sleep_forever()

    monkeypatch.setattr(JetStreamLeaseStore, "watch", watch)
    client = cohort_stream.client
    before = set(client._subs)
    source = cohort_stream.source("a", where=client)
    with anyio.move_on_after(1), pytest.raises(nats.errors.TimeoutError):
        await source.open()
    with anyio.fail_after(5):
        await source.aclose()
        await source.aclose()
    # The remaining subscription is for the client's own requests.
    answers = (client._resp_sub_prefix or b"?").decode()
    left = [client._subs[sid].subject for sid in set(client._subs) - before]
    assert [subject for subject in left if not subject.startswith(answers)] == []
    assert client.is_connected
