"""The source over the JetStream personality keeps the contract of a source, and takes over in order."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import anyio
import anyio.lowlevel
import pytest

from lanes.core.types import Partition, Room
from lanes.source import Source
from memsource.contract.source import Ability, Check, Sample, checks
from memsource.jetstream.pull_consumer import ConsumerSettings
from memsource.jetstream.source import JetStreamMemberSource, JetStreamPersonality
from memsource.jetstream.takeover import SHRINK_SECONDS

EVERYTHING: Final[tuple[Ability, ...]] = ("ack wait", "revoke", "lose", "finish")
ALL = Room(100, 1 << 20)


class JetStreamHarness:
    """A broker whose clock moves by ``elapse``, and by itself for as long as a takeover takes."""

    can: Collection[Ability] = EVERYTHING
    patience = 0.02
    ack_wait = 3.0

    def __init__(self, partitions: int) -> None:
        self.now = 0.0
        self.broker = JetStreamPersonality(partitions, settings=ConsumerSettings(ack_wait=self.ack_wait))
        self._newest: JetStreamMemberSource
        self._sources = 0

    async def keep_time(self) -> None:
        while True:
            await anyio.lowlevel.checkpoint()
            if self.broker.next_at() - self.now <= SHRINK_SECONDS:
                self.now = self.broker.next_at()
                self.broker.advance(self.now)

    async def publish(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            record = self.broker.publish(sample.value, key=sample.key, headers=sample.headers)
            self.broker.skip(record.position % 3)

    def source(self) -> Source:
        self._sources += 1
        self._newest = self.broker.source(f"member-{self._sources}", lambda: self.now)
        return self._newest

    async def unsettled(self) -> int:
        return sum(len(self.broker.consumer(number).unacknowledged) for number in self.broker.partitions)

    async def elapse(self, seconds: float) -> None:
        self.now += seconds
        self.broker.advance(self.now)

    async def revoke(self, partition: Partition) -> None:
        assert self.broker.cohort.revoke(partition.id.number, self.now)

    async def lose(self, partition: Partition) -> None:
        assert self.broker.lose(partition.id.number, self.now)

    async def finish(self) -> None:
        self._newest.finish()


@pytest.mark.anyio
@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("check", checks(EVERYTHING), ids=lambda check: check.__name__.removeprefix("check_"))
async def test_the_jetstream_personality_keeps_the_contract(check: Check, partitions: int) -> None:
    harness = JetStreamHarness(partitions)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(harness.keep_time)
        await check(harness)
        tasks.cancel_scope.cancel()
