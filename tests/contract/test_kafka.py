"""The Kafka source keeps the contract of a source that commits, on a real broker and in every rebalance protocol."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final

import anyio
import anyio.to_thread
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from lanes.core.offset_map import decode
from lanes.core.types import Partition
from lanes.source import Source
from lanes_kafka import KafkaSource
from memsource.contract import Ability, Check, Sample, checks
from tests.components import KafkaServer, wait_until

QUIET: Final = {"log_level": 0}
GROUP: Final = "contract"
PROTOCOLS: Final[dict[str, dict[str, Any]]] = {
    "eager": {"heartbeat.interval.ms": 300, "session.timeout.ms": 6_000},
    "cooperative": {"partition.assignment.strategy": "cooperative-sticky", "session.timeout.ms": 6_000},
    "848": {"group.protocol": "consumer"},
}


class KafkaHarness:
    """A topic of its own with a group of its own."""

    patience = 0.3
    ack_wait = 0.0

    def __init__(self, url: str, protocol: str, partitions: int, can: Collection[Ability], tasks: list[Any]) -> None:
        self.can = can
        self._group = f"{GROUP}-{uuid.uuid4().hex[:12]}"
        self._topic = f"{self._group}-topic"
        self._partitions = partitions
        self._config = {**QUIET, "bootstrap.servers": url, "group.id": self._group, **PROTOCOLS[protocol]}
        self._url = url
        self._producer = Producer({**QUIET, "bootstrap.servers": url, "linger.ms": 0})
        self._admin = AdminClient({**QUIET, "bootstrap.servers": url})
        self._peers: list[threading.Thread] = tasks

    def create(self) -> None:
        self._admin.create_topics([NewTopic(self._topic, self._partitions, 1)])[self._topic].result(20)
        wait_until(self._is_led, f"topic {self._topic}")

    def _is_led(self) -> bool:
        known = self._admin.list_topics(timeout=20).topics.get(self._topic)
        return (
            known is not None and len([one for one in known.partitions.values() if one.leader >= 0]) == self._partitions
        )

    def delete(self) -> None:
        self._admin.delete_topics([self._topic])[self._topic].result(20)

    async def publish(self, samples: Sequence[Sample]) -> None:
        # By key, as any producer does: with one partition the order is that of the samples.
        for sample in samples:
            self._producer.produce(self._topic, sample.value, key=sample.key, headers=list(sample.headers))
        left = await anyio.to_thread.run_sync(self._producer.flush, 20)
        assert not left

    def source(self) -> Source:
        return KafkaSource(self._config, topics=self._topic)

    async def unsettled(self) -> int:
        return await anyio.to_thread.run_sync(self._unsettled)

    def _unsettled(self) -> int:
        outsider = Consumer({**QUIET, "bootstrap.servers": self._url, "group.id": self._group})
        try:
            places = [TopicPartition(self._topic, number) for number in range(self._partitions)]
            count = 0
            for committed in outsider.committed(places, timeout=20):
                _, end = outsider.get_watermark_offsets(committed, timeout=20)
                floor = max(0, committed.offset)
                completed = decode(committed.metadata or "", floor, end - floor) or []
                count += end - floor - sum(stop - start for start, stop in completed)
            return count
        finally:
            outsider.close()

    async def elapse(self, seconds: float) -> None:
        raise NotImplementedError("a broker of positions waits for no acknowledgement")

    async def revoke(self, partition: Partition) -> None:
        """Somebody joins: under the eager protocol that takes everything away for a moment."""
        peer = threading.Thread(target=self._join_and_leave, daemon=True)
        self._peers.append(peer)
        peer.start()

    def _join_and_leave(self) -> None:
        joined = threading.Event()
        peer = Consumer({**self._config, "enable.auto.commit": False})
        peer.subscribe([self._topic], on_assign=lambda *_: joined.set())
        try:
            while not joined.is_set():
                peer.poll(0.05)
        finally:
            peer.close()

    async def lose(self, partition: Partition) -> None:
        raise NotImplementedError("no call takes a partition from a member that lives")

    async def finish(self) -> None:
        raise NotImplementedError("a topic has no end")


@pytest.fixture
def harness(kafka: KafkaServer) -> Iterator[Callable[..., KafkaHarness]]:
    made: list[KafkaHarness] = []
    peers: list[threading.Thread] = []

    def make(protocol: str, partitions: int, can: Collection[Ability]) -> KafkaHarness:
        one = KafkaHarness(kafka.url, protocol, partitions, can, peers)
        one.create()
        made.append(one)
        return one

    yield make
    for peer in peers:
        peer.join(20)
        assert not peer.is_alive(), "a peer did not come to its end"
    for one in made:
        one.delete()


def name_of(check: Check) -> str:
    return check.__name__.removeprefix("check_")


def cases(*, slow: bool) -> Iterator[Any]:
    """Every check in every protocol, with one partition and with three; but for a few of them, only in ``slow``."""
    for protocol in PROTOCOLS:
        for partitions in (1, 3):
            # With one partition and the eager protocol it is known what a peer that joins takes away.
            can: tuple[Ability, ...] = ("commits", "revoke") if (protocol, partitions) == ("eager", 1) else ("commits",)
            for check in checks(can):
                often = name_of(check) == "start_is_cancel_safe"  # a group is joined thirty times
                fast = (protocol, partitions) in (("eager", 1), ("848", 3)) and not often
                if fast != slow:
                    name = f"{name_of(check)}-{protocol}-{partitions}"
                    yield pytest.param(check, protocol, partitions, can, id=name)


MakeHarness = Callable[..., KafkaHarness]


@pytest.mark.anyio
@pytest.mark.parametrize(("check", "protocol", "partitions", "can"), list(cases(slow=False)))
async def test_the_kafka_source_keeps_the_contract(
    check: Check, protocol: str, partitions: int, can: tuple[Ability, ...], harness: MakeHarness
) -> None:
    await check(harness(protocol, partitions, can))


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.anyio
@pytest.mark.parametrize(("check", "protocol", "partitions", "can"), list(cases(slow=True)))
async def test_the_kafka_source_keeps_the_contract_in_every_protocol(
    check: Check, protocol: str, partitions: int, can: tuple[Ability, ...], harness: MakeHarness
) -> None:
    await check(harness(protocol, partitions, can))
