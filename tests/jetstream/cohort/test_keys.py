"""A key of a cohort must stay in one partition: other keys are refused or detected."""

from __future__ import annotations

import anyio
import pytest
from nats.aio.msg import Msg

import lanes
from lanes_jetstream import header, subject_token
from tests.jetstream.cohort_workload import FAST, CohortStream, Log, members, refused

pytestmark = pytest.mark.anyio


async def test_a_member_with_a_key_in_two_partitions_is_refused(cohort_stream: CohortStream) -> None:
    for key in (header("Key"), lambda message: message.data, subject_token(0)):
        await refused(cohort_stream.source("a", key=key), "key=", "partition()")


async def test_a_key_in_two_partitions_stops_the_member(cohort_stream: CohortStream) -> None:
    """The user promised one partition for each key; the first exception ends the run."""
    stream, seen = cohort_stream, 0

    def key(message: Msg) -> bytes:
        return b"the same"

    async def count(message: lanes.Message) -> None:
        nonlocal seen
        seen += 1

    await stream.publish(*stream.a_key_each())
    with anyio.fail_after(20):
        with pytest.raises(lanes.SourceError, match=r"cohort partitions \d and \d.*key_refines_partition"):
            await lanes.run(stream.source("a", key=key, key_refines_partition=True), count, settings=FAST)
    assert seen < 4


async def test_a_key_that_refines_its_partition_is_accepted(cohort_stream: CohortStream) -> None:
    stream, log = cohort_stream, Log()

    def key(message: Msg) -> str:
        return message.subject.rpartition(".")[2]

    a = lanes.Consumer(stream.source("a", key=key, key_refines_partition=True), log.handler("a"), settings=FAST)
    async with members() as running:
        running.join(a)
        await stream.publish(*stream.a_key_each(), times=3)
        await log.handled(12)
    assert {run.key for run in log.runs} == {each.encode() for each in stream.a_key_each()}
