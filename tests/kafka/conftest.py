"""Fixtures of the Kafka adapter: asyncio alone, topics on a real broker, and a mock cluster."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator

import pytest

from tests.components import KafkaServer
from tests.kafka.mock_cluster import MockCluster, mock_cluster
from tests.kafka.workload import Topic

_numbers = itertools.count(1)

MakeTopic = Callable[..., Topic]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def short_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow poll intervals too short for a settlement and a release, for tests that wait for their end."""
    monkeypatch.setattr("lanes.config.SETTLE_WITHIN", 0.1)
    monkeypatch.setattr("lanes.config.RELEASE_WITHIN", 0.1)


@pytest.fixture
def topic(request: pytest.FixtureRequest, kafka_prepared: None) -> Iterator[MakeTopic]:
    """Creates topics for this test alone: `topic(partitions=4, on=server, config={"retention.ms": "1000"})`.

    `on` is a running private broker. Without it the topic is on the shared broker, and is deleted after the test.
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


@pytest.fixture(scope="module")
def cluster() -> Iterator[MockCluster]:
    """A mock cluster for this module alone."""
    with mock_cluster() as made:
        yield made


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A name for a topic or another object, used by no other test."""
    return f"{request.path.stem.removeprefix('test_').replace('_', '-')}{next(_numbers)}"
