"""In a cohort the subject picks the partition, so only the owner of the partition handles a message without a key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

import lanes
from lanes_jetstream import header
from tests.jetstream.cohort_workload import FAST, CohortStream, Log, members, owned, settled
from tests.jetstream.workload import until

pytestmark = pytest.mark.anyio

NO_KEY = [
    pytest.param(None, {}, id="key=None"),
    pytest.param(header("Key"), {"key_refines_partition": True}, id="header"),
]
"""Keys of a source for which no message of these tests has a key."""


@pytest.mark.parametrize(("key", "promise"), NO_KEY)
async def test_a_message_without_a_key_waits_for_the_owner_of_its_partition(
    cohort_stream: CohortStream, key: Callable[..., Any] | None, promise: dict[str, bool]
) -> None:
    """All handlers of one member are busy and the other member is idle; the idle member gets none of its messages."""
    stream, log, release = cohort_stream, Log(), anyio.Event()

    async def wait(message: lanes.Message) -> None:
        assert message.key is None
        await release.wait()

    def member(name: str, *inner: Any) -> lanes.Consumer:
        settings = lanes.Settings(concurrency=2, max_in_flight=4, drain_timeout=10)
        return lanes.Consumer(stream.source(name, key=key, **promise), log.handler(name, *inner), settings=settings)

    a, b = member("a", wait), member("b")
    async with members() as running:
        running.join(a, b)
        await settled(a, b, partitions=stream.partitions)
        of_a, of_b = ([stream.key(partition) for partition in owned(each)] for each in (a, b))
        await stream.publish(*of_a, times=5)
        await until(lambda: a.status().in_flight == 4)
        await stream.publish(*of_b, times=5)
        await log.handled(10)
        assert {run.partition for run in log.of("b")} == owned(b)
        assert {run.partition for run in log.of("a")} <= owned(a)
        release.set()
        await log.handled(20)
        assert {run.partition for run in log.of("a")} == owned(a)
        assert len(log.of("a")) == len(log.of("b")) == 10
    assert log.repeats == []


async def test_messages_without_a_key_move_with_their_partition(cohort_stream: CohortStream) -> None:
    stream, log = cohort_stream, Log()
    a, b = (lanes.Consumer(stream.source(name, key=None), log.handler(name), settings=FAST) for name in "ab")
    subject = stream.key(0)
    async with members() as running:
        running.join(a, b)
        await settled(a, b, partitions=stream.partitions)
        owner, other = (a, b) if 0 in owned(a) else (b, a)
        await stream.publish(subject, times=5)
        await log.handled(5)
        await running.leave(owner)
        await stream.publish(subject, times=5)
        await log.handled(10)
        assert 0 in owned(other)
    members_of = [run.member for run in log.runs]
    assert members_of == members_of[:1] * 5 + members_of[-1:] * 5
    assert members_of[0] != members_of[-1]


async def test_messages_of_one_partition_without_keys_run_at_once(cohort_stream: CohortStream) -> None:
    """Without a key no message waits for another message, although all of them have the same owner."""
    stream, running_now, most = cohort_stream, 0, 0

    async def handle(message: lanes.Message) -> None:
        nonlocal running_now, most
        running_now += 1
        most = max(most, running_now)
        await anyio.sleep(0.2)
        running_now -= 1

    a = lanes.Consumer(stream.source("a", key=None), handle, settings=FAST)
    async with members() as running:
        running.join(a)
        await settled(a, partitions=stream.partitions)
        await stream.publish(stream.key(0), times=5)
        await until(lambda: most == 5)
