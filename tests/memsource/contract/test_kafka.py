"""The Kafka source keeps the contract of a source that commits, on a real broker, in every rebalance protocol, and on a
mock."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final

import anyio
import anyio.to_thread
import pytest
from confluent_kafka import Consumer, ConsumerGroupState, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from lanes.core.offset_map import decode
from lanes.core.types import Partition
from lanes.source import Source
from lanes_kafka import KafkaSource
from memsource.contract.source import Ability, Check, Sample, checks
from tests.components import KafkaServer, wait_until
from tests.kafka.mock_cluster import MockCluster, mock_cluster
from tests.kafka.remove_member import remove_member
from tests.memsource.contract.delegate import name_of

QUIET: Final = {"log_level": 0}
GROUP: Final = "contract"
PROTOCOLS: Final[dict[str, dict[str, Any]]] = {
    "eager": {"heartbeat.interval.ms": 300, "session.timeout.ms": 6_000},
    "cooperative": {"partition.assignment.strategy": "cooperative-sticky", "session.timeout.ms": 6_000},
    "848": {"group.protocol": "consumer"},
}


RIVAL: Final = "rival"
MOCK: Final[tuple[Ability, ...]] = ("commits", "hands over")


class KafkaHarness:
    """A separate topic with a separate group. ``mock``: the broker is a mock."""

    patience = 0.3
    ack_wait = 0.0

    def __init__(
        self,
        url: str,
        protocol: str,
        partitions: int,
        can: Collection[Ability],
        tasks: list[Any],
        ending: threading.Event,
        mock: MockCluster | None = None,
    ) -> None:
        self.can = can
        self._group = f"{GROUP}-{uuid.uuid4().hex[:12]}"
        self._topic = f"{self._group}-topic"
        self._partitions = partitions
        self._config = {**QUIET, "bootstrap.servers": url, "group.id": self._group, **PROTOCOLS[protocol]}
        self._url = url
        self._producer = Producer({**QUIET, "bootstrap.servers": url, "linger.ms": 0, "enable.idempotence": True})
        self._admin = AdminClient({**QUIET, "bootstrap.servers": url})
        self._peers: list[threading.Thread] = tasks
        self._ending = ending
        self._classic = protocol != "848"
        self._mock = mock

    def create(self) -> None:
        if self._mock is not None:
            self._mock.create(self._topic, self._partitions)
        else:
            self._admin.create_topics([NewTopic(self._topic, self._partitions, 1)])[self._topic].result(20)
        wait_until(self._is_led, f"topic {self._topic}")

    def _is_led(self) -> bool:
        known = self._admin.list_topics(timeout=20).topics.get(self._topic)
        return (
            known is not None and len([one for one in known.partitions.values() if one.leader >= 0]) == self._partitions
        )

    def delete(self) -> None:
        if self._mock is None:
            self._admin.delete_topics([self._topic])[self._topic].result(20)

    async def publish(self, samples: Sequence[Sample]) -> None:
        # The partition follows from the key, as with any producer; in one partition the samples keep their order.
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
        """Let a member join; the eager protocol revokes all partitions for a moment."""
        self._start(self._join_and_leave)

    def _start(self, peer: Callable[[], None]) -> None:
        thread = threading.Thread(target=peer, daemon=True)
        self._peers.append(thread)
        thread.start()

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
        """Let a waiting rival remove the member and own its partition afterwards."""
        self._start(self._join_and_stay)
        await anyio.to_thread.run_sync(self._remove_the_other)

    def _join_and_stay(self) -> None:
        rival = Consumer({**self._config, "client.id": RIVAL, "enable.auto.commit": False})
        rival.subscribe([self._topic])
        try:
            while not self._ending.is_set():
                rival.poll(0.05)
        finally:
            rival.close()

    def _remove_the_other(self) -> None:
        found: list[str] = []

        def both() -> bool:
            described = self._admin.describe_consumer_groups([self._group])[self._group].result(20)
            found[:] = [member.member_id for member in described.members if member.client_id != RIVAL]
            return described.state == ConsumerGroupState.STABLE and len(described.members) == 2

        wait_until(both, f"a rival in group {self._group}")
        (member,) = found
        remove_member(self._url, self._group, member, classic=self._classic)

    async def finish(self) -> None:
        raise NotImplementedError("a topic has no end")


@pytest.fixture
def mock() -> Iterator[MockCluster]:
    with mock_cluster() as cluster:
        yield cluster


@pytest.fixture
def harness(request: pytest.FixtureRequest) -> Iterator[Callable[..., KafkaHarness]]:
    made: list[KafkaHarness] = []
    peers: list[threading.Thread] = []
    ending = threading.Event()

    def make(protocol: str, partitions: int, can: Collection[Ability]) -> KafkaHarness:
        if can is MOCK:
            mock: MockCluster = request.getfixturevalue("mock")
            one = KafkaHarness(mock.url, protocol, partitions, can, peers, ending, mock)
        else:
            server: KafkaServer = request.getfixturevalue("kafka")
            one = KafkaHarness(server.url, protocol, partitions, can, peers, ending)
        one.create()
        made.append(one)
        return one

    yield make
    ending.set()
    for peer in peers:
        peer.join(20)
        assert not peer.is_alive(), "a peer did not end"
    for one in made:
        one.delete()


def cases(*, slow: bool) -> Iterator[Any]:
    """Yield every check for every protocol, partition count and event loop, either the fast cases or the slow ones."""
    for protocol in PROTOCOLS:
        for partitions in (1, 3):
            # With one partition, only two effects are certain. In the eager protocol, a joining peer causes a revoke.
            # In 848, a rival keeps the partition; in the other protocols, the removed member may rejoin and own it
            # again.
            taken: dict[tuple[str, int], tuple[Ability, ...]] = {("eager", 1): ("revoke",), ("848", 1): ("lose",)}
            can: tuple[Ability, ...] = (*MOCK, *taken.get((protocol, partitions), ()))
            for check in checks(can):
                often = name_of(check) == "start_is_cancel_safe"  # the check joins a group thirty times
                loss = protocol == "848" and name_of(check) in ("loss_is_told_without_room", "nothing_more_after_loss")
                for backend in ("asyncio", "trio"):
                    eager = (protocol, partitions) == ("eager", 1)
                    by_848 = (protocol, backend) == ("848", "asyncio") and (partitions == 3 or loss)
                    if ((eager or by_848) and not often) != slow:
                        name = f"{name_of(check)}-{protocol}-{partitions}-{backend}"
                        yield pytest.param(check, protocol, partitions, can, backend, id=name)


MakeHarness = Callable[..., KafkaHarness]


@pytest.mark.process
@pytest.mark.usefixtures("kafka_prepared")
@pytest.mark.anyio
@pytest.mark.parametrize(("check", "protocol", "partitions", "can", "anyio_backend"), list(cases(slow=False)))
async def test_the_kafka_source_keeps_the_contract(
    check: Check, protocol: str, partitions: int, can: tuple[Ability, ...], harness: MakeHarness
) -> None:
    await check(harness(protocol, partitions, can))


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.usefixtures("kafka_prepared")
@pytest.mark.anyio
@pytest.mark.parametrize(("check", "protocol", "partitions", "can", "anyio_backend"), list(cases(slow=True)))
async def test_the_kafka_source_keeps_the_contract_in_every_protocol(
    check: Check, protocol: str, partitions: int, can: tuple[Ability, ...], harness: MakeHarness
) -> None:
    await check(harness(protocol, partitions, can))


def mock_cases(*, slow: bool) -> Iterator[Any]:
    """Yield every check for every protocol and event loop, either the fast cases or the slow ones."""
    for protocol in PROTOCOLS:
        for check in checks(MOCK):
            often = name_of(check) == "start_is_cancel_safe"
            for backend in ("asyncio", "trio"):
                fast = (protocol, backend) == ("848", "asyncio") and not often
                if fast != slow:
                    yield pytest.param(check, protocol, backend, id=f"{name_of(check)}-{protocol}-{backend}")


@pytest.mark.anyio
@pytest.mark.parametrize(("check", "protocol", "anyio_backend"), list(mock_cases(slow=False)))
async def test_the_kafka_source_keeps_the_contract_on_a_mock(check: Check, protocol: str, harness: MakeHarness) -> None:
    await check(harness(protocol, 3, MOCK))


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.anyio
@pytest.mark.parametrize(("check", "protocol", "anyio_backend"), list(mock_cases(slow=True)))
async def test_the_kafka_source_keeps_the_contract_on_a_mock_in_every_protocol(
    check: Check, protocol: str, harness: MakeHarness
) -> None:
    await check(harness(protocol, 3, MOCK))
