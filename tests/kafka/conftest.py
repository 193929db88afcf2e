"""The Kafka adapter runs on asyncio alone; topics here are on a real broker."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator

import pytest

from tests.components import KafkaServer
from tests.kafka.workload import Topic

_numbers = itertools.count(1)

MakeTopic = Callable[..., Topic]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> Iterator[MakeTopic]:
    """Makes topics of this test's own: `topic(partitions=4, on=server, config={"retention.ms": "1000"})`.

    `on` is a private broker that is running; without it the topic is on the shared one, and deleted after the test.
    """
    shared: list[Topic] = []

    def make(partitions: int = 1, *, on: KafkaServer | None = None, config: dict[str, str] | None = None) -> Topic:
        server: KafkaServer = on or request.getfixturevalue("kafka")
        topic = Topic(server.admin_url, f"T{os.getpid()}x{next(_numbers)}", partitions)
        topic.create(config)
        if on is None:
            shared.append(topic)
        return topic

    yield make
    for one in shared:
        if one.exists():
            one.delete()
