"""A broker that does not say yet where a member is to begin, as one that is about to start."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import anyio
import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException

import lanes
from lanes_kafka import KafkaSource
from tests.kafka.conftest import MakeTopic
from tests.kafka.workload import QUIET, Topic, produce, until

pytestmark = pytest.mark.anyio

Make = Callable[[dict[str, Any]], Consumer]


class Refused(Consumer):
    """A client whose questions for committed positions are refused with ``code``, the first ``times``."""

    def __init__(self, config: dict[str, Any], code: int, times: float) -> None:
        super().__init__(config)
        self.code = code
        self.times = times
        self.asked = 0

    def committed(self, *arguments: Any, **named: Any) -> Any:
        self.asked += 1
        if self.asked <= self.times:
            raise KafkaException(KafkaError(self.code))
        return super().committed(*arguments, **named)


class Case:
    """A consumer of three messages. ``clients``: those it has made; ``ended``: positions its handler has run."""

    def __init__(self, topic: Topic, code: int, times: float) -> None:
        produce(topic, 3)
        self.clients: list[Refused] = []
        self.ended: list[int] = []
        config = {**QUIET, "bootstrap.servers": topic.url, "group.id": f"g-{topic.name}"}
        source = KafkaSource(config, topics=topic.name, client=self._make)
        self.consumer = lanes.Consumer(source, self._handle)
        self._code, self._times = code, times

    def _make(self, config: dict[str, Any]) -> Refused:
        self.clients.append(Refused(config, self._code, self._times))
        return self.clients[-1]

    async def _handle(self, message: lanes.Message) -> None:
        self.ended.append(message.position)


async def test_where_to_begin_is_asked_until_the_broker_says_it(topic: MakeTopic) -> None:
    case = Case(topic(), KafkaError.NOT_COORDINATOR, 5)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(case.consumer.run)
        await until(lambda: len(case.ended) == 3)
        case.consumer.stop()
    assert case.ended == [0, 1, 2] and case.clients[0].asked == 6


async def test_a_stop_ends_the_questions(topic: MakeTopic) -> None:
    case = Case(topic(), KafkaError.NOT_COORDINATOR, inf)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(case.consumer.run)
        await until(lambda: bool(case.clients) and case.clients[0].asked > 4)
        case.consumer.stop()
    assert case.ended == []


async def test_what_will_never_be_answered_is_asked_once(topic: MakeTopic) -> None:
    case = Case(topic(), KafkaError.GROUP_AUTHORIZATION_FAILED, inf)
    with pytest.raises(lanes.SourceError, match=r"assigning partitions failed: .*GROUP_AUTHORIZATION_FAILED"):
        await case.consumer.run()
    assert case.clients[0].asked == 1
