"""The source of a cohort's member in memory keeps the contract of a source, over the real membership."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final

import anyio.lowlevel
import pytest

from lanes.cohort.membership import CohortSettings
from lanes.core.cohort.records import (
    PLAN_KEY,
    DrainRequest,
    Heartbeat,
    PlanRecord,
    decode,
    drain_key,
    encode,
    member_key,
)
from lanes.core.types import Partition, PartitionId
from lanes.source import Source
from memsource.contract.harness import numbered, opened, rising
from memsource.contract.source import Ability, Check, Sample, checks
from memsource.jetstream.cohort_source import CohortMemberSource, CohortPersonality
from memsource.jetstream.epoch_consumers import Retention
from memsource.jetstream.pull_consumer import ConsumerSettings

EVERYTHING: Final[tuple[Ability, ...]] = ("ack wait", "revoke", "lose", "finish")
LEASE: Final = 10_000.0
"""Seconds; longer than any check runs, because not every check allows the end of a lease."""


class CohortHarness:
    """A broker whose clock moves by ``elapse`` alone."""

    can: Collection[Ability] = EVERYTHING
    patience = 0.02
    ack_wait = 3.0

    def __init__(self, partitions: int, retention: Retention) -> None:
        self.now = 0.0
        self.broker = CohortPersonality(
            partitions,
            retention=retention,
            settings=ConsumerSettings(ack_wait=self.ack_wait),
            cohort=CohortSettings(lease=LEASE),
        )
        self._newest: CohortMemberSource
        self._sources = 0

    async def publish(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            record = self.broker.publish(sample.value, key=sample.key, headers=sample.headers)
            self.broker.skip(record.position % 3)

    def source(self) -> Source:
        if self._sources:
            # The former member's leases expire.
            self.now += 2 * LEASE
            self.broker.advance(self.now)
        self._sources += 1
        self._newest = self.broker.source(f"member-{self._sources}", lambda: self.now)
        return self._newest

    async def unsettled(self) -> int:
        stream = self.broker.stream
        names = [stream.names(number)[-1] for number in self.broker.partitions]
        return sum(len(stream.consumer(name).unacknowledged) for name in names)

    async def elapse(self, seconds: float) -> None:
        self.now += seconds
        self.broker.advance(self.now)

    async def revoke(self, partition: Partition) -> None:
        """Let another member join, and give the partition to that member in the plan."""
        bucket, key = self.broker.bucket, member_key("another")
        asked, quiet = -1, 0
        while quiet < 10:
            # Not during a read of the bucket: the plan would not include the new member.
            quiet = quiet + 1 if asked == self._newest.link.reads else 0
            asked = self._newest.link.reads
            await anyio.lowlevel.checkpoint()
        entry = bucket.read(PLAN_KEY, self.now)
        plan = decode(PlanRecord, PLAN_KEY, entry.value or b"")
        owners = tuple("another" if n == partition.id.number else owner for n, owner in enumerate(plan.owners))
        count = owners.count("another")
        # A weight this large moves no other partition, and none back.
        beat = encode(Heartbeat(nonce="x", weight=count, active_members=None, session=0))
        if count == len(owners):
            bucket.write(drain_key(self._newest.member), encode(DrainRequest(since=0)), self.now, revision=0)
        bucket.write(key, beat, self.now, revision=bucket.read(key, self.now).revision, ttl=LEASE)
        value = encode(replace(plan, generation=plan.generation + 1, owners=owners))
        bucket.write(PLAN_KEY, value, self.now, revision=entry.revision)

    async def lose(self, partition: Partition) -> None:
        """Report to the member that its durable is gone."""
        self._newest.membership.gone(partition.id.number, "its durable is gone")

    async def finish(self) -> None:
        self._newest.finish()


RETENTIONS: Final[tuple[Retention, ...]] = ("limits", "workqueue")
CASES: Final = [
    pytest.param(check, retention, id=f"{check.__name__.removeprefix('check_')}-{retention}")
    for retention in RETENTIONS
    for check in checks(EVERYTHING)
    # Except on a work queue, the server keeps no single message: the last test shows the repeats after a crash.
    if retention == "workqueue" or check.__name__ != "check_unsettled_comes_back"
]


@pytest.mark.anyio
@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize(("check", "retention"), CASES)
async def test_the_cohort_personality_keeps_the_contract(check: Check, partitions: int, retention: Retention) -> None:
    if check.__name__ == "check_start_is_cancel_safe":
        # The check drops the events of cancelled calls, and a member of a cohort gets one event for each partition.
        partitions = 1
    await check(CohortHarness(partitions, retention))


@pytest.mark.anyio
@pytest.mark.parametrize("partitions", [1, 3])
async def test_on_limits_a_crash_repeats_what_was_settled_above_the_oldest_unsettled(partitions: int) -> None:
    """The next owner knows the floor of the former owner, and no position that is settled above the floor."""
    harness = CohortHarness(partitions, "limits")
    samples = numbered(12)
    await harness.publish(samples[:8])
    async with opened(harness) as session:
        messages = await session.take(8)
        settled = session.to_settle(messages, (0, 2, 5))
        await session.settle(settled)
        await session.expect_unsettled(5)
    oldest: dict[PartitionId, int] = {}
    for message in messages:
        if message not in settled:
            oldest.setdefault(message.partition.id, message.position)
    again = [one for one in messages if one.position >= oldest.get(one.partition.id, one.position + 1)]
    assert any(one in settled for one in again) and not all(one in again for one in settled)
    await harness.publish(samples[8:])
    async with opened(harness) as session:
        came = await session.take(len(again) + 4)
        rising(came)
        expected = [*(one.value for one in again), *(sample.value for sample in samples[8:])]
        assert sorted(one.value for one in came) == sorted(expected)
        await session.expect_nothing()
