"""``KafkaMemberSource`` keeps the contract of a source that commits, in every rebalance protocol."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, get_args

import anyio
import anyio.lowlevel
import pytest

from lanes.core.types import Partition
from lanes.source import Source
from memsource.contract.source import Ability, Check, Sample, checks
from memsource.kafka.broker import KafkaBroker, KafkaSettings
from memsource.kafka.client import RebalanceProtocol
from memsource.kafka.source import KafkaMemberSource
from tests.memsource.contract.delegate import name_of

ABILITIES: Final[tuple[Ability, ...]] = ("revoke", "lose", "finish", "commits", "hands over")
PROTOCOLS: Final = get_args(RebalanceProtocol)


class KafkaHarness:
    """A broker with one member at a time, and a clock that jumps from timer to timer of the broker."""

    can: Collection[Ability] = ABILITIES
    # Every event arrives within a few turns of the loop.
    patience = 0.01
    ack_wait = 0.0

    def __init__(self, partitions: int, protocol: RebalanceProtocol, *, prefetch: int = 100) -> None:
        self.now = 0.0
        self.broker = KafkaBroker(partitions, settings=KafkaSettings(protocol=protocol, prefetch=prefetch))
        self._members = 0
        self._newest = KafkaMemberSource(self.broker, "nobody")

    async def run(self, check: Check) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._turn_time)
            await check(self)
            tasks.cancel_scope.cancel()

    async def _turn_time(self) -> None:
        while True:
            await anyio.lowlevel.checkpoint()
            at = self.broker.next_at()
            # Heartbeats continue, and no deadline passes between two calls of a check.
            if at <= self.now + self.broker.settings.heartbeat_interval:
                self.now = max(self.now, at)
                self.broker.advance(self.now)

    async def publish(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            record = self.broker.publish(sample.value, key=sample.key, headers=sample.headers)
            # Positions have gaps, at the end too, so no check may expect consecutive positions.
            self.broker.skip(record.position % 3, partition=record.partition)

    def source(self) -> Source:
        self._members += 1
        self._newest = KafkaMemberSource(self.broker, f"m-{self._members}", lambda: self.now)
        return self._newest

    async def unsettled(self) -> int:
        return len(self.broker.unfinished)

    async def elapse(self, seconds: float) -> None:
        raise NotImplementedError("a broker of positions waits for no acknowledgement")

    async def revoke(self, partition: Partition) -> None:
        self.broker.group.revoke(partition.id.number)

    async def lose(self, partition: Partition) -> None:
        # Taken from the group itself, so the partition does not return later.
        self.broker.group.lose(self._newest.client.id, partition.id.number)

    async def finish(self) -> None:
        self._newest.finish()


@pytest.mark.anyio
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("check", checks(ABILITIES), ids=name_of)
async def test_the_kafka_source_keeps_the_contract(check: Check, partitions: int, protocol: RebalanceProtocol) -> None:
    await KafkaHarness(partitions, protocol).run(check)


@pytest.mark.anyio
@pytest.mark.parametrize("check", checks(ABILITIES), ids=name_of)
async def test_the_kafka_source_keeps_the_contract_without_prefetch(check: Check) -> None:
    await KafkaHarness(3, "848", prefetch=0).run(check)
