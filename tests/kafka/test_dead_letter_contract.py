"""Dead letters in Kafka keep the contract of dead letters: on the mock cluster, and on a real broker."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from functools import partial

import pytest
from anyio.to_thread import run_sync
from confluent_kafka import Producer, TopicPartition

from lanes.dead_letter import DeadLetter
from lanes.dead_letters.box import DeadLetterBox
from lanes.errors import MessageError
from lanes.source import DeadLetters
from lanes_kafka import KafkaDeadLetters, read_dead_letter
from lanes_kafka.client.records import READER
from lanes_kafka.dead_letters.box import KafkaDeadLetterBox, message_at
from lanes_kafka.dead_letters.wire import dead_letter_record
from memsource.contract.dead_letters import (
    DeadLetterAbility,
    DeadLetterCheck,
    DeadLetterHarness,
    Origin,
    Published,
    dead_letter_checks,
)
from tests.components import KafkaServer
from tests.kafka.conftest import MakeTopic
from tests.kafka.dead_letters import records
from tests.kafka.mock_cluster import MockCluster
from tests.kafka.workload import QUIET, Topic
from tests.memsource.contract.outage import killed

pytestmark = pytest.mark.anyio

LIMIT = 20_000


class KafkaHarness:
    """Two topics on ``server``, which is killed in an outage."""

    limit = LIMIT

    def __init__(
        self, orders: Topic, dead: Topic, can: Collection[DeadLetterAbility], server: KafkaServer | None = None
    ) -> None:
        self.can = can
        self.origin = Origin(orders.name, 0, orders.name)
        self._orders, self._dead, self._server = orders, dead, server
        self._config = {"bootstrap.servers": dead.url, "message.timeout.ms": 2_000}

    def dead_letters(self) -> DeadLetters:
        return KafkaDeadLetters(self._config, self._dead.name)

    async def stored(self) -> Sequence[DeadLetter]:
        found = []
        for raw in await run_sync(records, self._dead):
            with contextlib.suppress(MessageError):
                found.append(read_dead_letter(message_at(self._dead.name, raw)))
        return found

    def box(self) -> DeadLetterBox:
        return KafkaDeadLetterBox(self._config, self._dead.name)

    async def copy(self, dead_letter: DeadLetter) -> None:
        key, value, headers = dead_letter_record(dead_letter)
        await run_sync(partial(self._write, value, key=key, headers=headers))

    async def lose(self, dead_letter_id: str) -> None:
        await run_sync(self._lose, dead_letter_id)

    async def stranger(self) -> None:
        await run_sync(self._write, b"anything")

    async def published(self) -> Sequence[Published]:
        found = await run_sync(records, self._orders)
        return [Published(one.value() or b"", READER.headers(one)) for one in found]

    def acted_on(self, name: str) -> bool:
        return False

    def forged(self) -> Sequence[Origin]:
        there = self._orders.name
        names = [f"{there}\0x", f"{there}-not", "a b", "..", "x" * 300, "é"]
        return [*(Origin(name, 0, there) for name in names), Origin(there, 1, there), Origin(there, 10**19, there)]

    def nowhere(self) -> tuple[DeadLetters, DeadLetterBox]:
        name = f"{self._dead.name}-not"
        return KafkaDeadLetters(self._config, name), KafkaDeadLetterBox(self._config, name)

    def own(self) -> Origin:
        return Origin(self._dead.name, 0, self._dead.name)

    def outage(self) -> contextlib.AbstractAsyncContextManager[None]:
        return killed(self._server)

    async def hang_up(self, dead_letters: DeadLetters) -> None:
        """The client reconnects by itself."""

    def _write(self, value: bytes | None, **more: object) -> None:
        producer = Producer({**QUIET, "bootstrap.servers": self._dead.url})
        producer.produce(self._dead.name, value, **more)  # type: ignore[arg-type]
        assert producer.flush(20) == 0

    def _lose(self, dead_letter_id: str) -> None:
        first = next(
            raw for raw in records(self._dead) if dict(raw.headers() or []).get("Lanes-Id") == dead_letter_id.encode()
        )
        offset = first.offset()
        assert offset is not None
        # All records before it are deleted as well.
        for done in self._dead.admin.delete_records([TopicPartition(self._dead.name, 0, offset + 1)]).values():
            done.result(20)


ON_THE_MOCK: tuple[DeadLetterAbility, ...] = ("place", "headers")
ON_A_BROKER: tuple[DeadLetterAbility, ...] = ("place", "headers", "box", "limit")
"""The topic can lose copies, and has a size limit."""


@pytest.mark.parametrize("check", dead_letter_checks(ON_THE_MOCK), ids=lambda check: check.__name__)
async def test_the_contract_holds_on_the_mock_cluster(check: DeadLetterCheck, cluster: MockCluster, name: str) -> None:
    orders, dead = (Topic(cluster.url, f"{name}-{which}", 1) for which in ("orders", "dead"))
    for one in (orders, dead):
        cluster.create(one.name, 1)
    harness: DeadLetterHarness = KafkaHarness(orders, dead, ON_THE_MOCK)
    await check(harness)


@pytest.mark.parametrize(
    "check",
    [
        # Checks that passed on the mock cluster are slow here.
        pytest.param(check, marks=pytest.mark.slow if check in dead_letter_checks(ON_THE_MOCK) else ())
        for check in dead_letter_checks(ON_A_BROKER)
    ],
    ids=lambda check: check.__name__,
)
async def test_the_contract_holds_on_a_broker(check: DeadLetterCheck, topic: MakeTopic) -> None:
    await check(KafkaHarness(topic(), topic(config={"max.message.bytes": str(LIMIT)}), ON_A_BROKER))


@pytest.fixture
def private(kafka_prepared: None) -> Iterator[KafkaServer]:
    """A broker that the test may kill."""
    with KafkaServer() as server:
        yield server


@pytest.mark.slow
@pytest.mark.parametrize(
    "check",
    [check for check in dead_letter_checks(["outage"]) if check not in dead_letter_checks([])],
    ids=lambda check: check.__name__,
)
async def test_the_contract_holds_on_a_broker_that_is_killed(
    check: DeadLetterCheck, private: KafkaServer, topic: MakeTopic
) -> None:
    await check(KafkaHarness(topic(on=private), topic(on=private), ["outage"], private))
