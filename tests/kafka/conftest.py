"""The Kafka adapter runs on asyncio alone; topics here are on a real broker."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator

import pytest

from lanes.cli import app as cli
from tests.components import KafkaServer
from tests.kafka.letter_places import Command, JetStreamPlace, KafkaPlace, Place, Said
from tests.kafka.mock_cluster import MockCluster, mock_cluster
from tests.kafka.workload import Topic

_numbers = itertools.count(1)

MakeTopic = Callable[..., Topic]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def short_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Intervals between two polls pass that are too short to settle and release in, for a test that waits for them."""
    monkeypatch.setattr("lanes.config.SETTLE_WITHIN", 0.1)
    monkeypatch.setattr("lanes.config.RELEASE_WITHIN", 0.1)


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


@pytest.fixture(scope="module")
def cluster() -> Iterator[MockCluster]:
    """A mock cluster of this module's own."""
    with mock_cluster() as made:
        yield made


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """Of a topic, or of whatever else this test makes: no other test has it."""
    return f"{request.path.stem.removeprefix('test_').replace('_', '-')}{next(_numbers)}"


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """`lanes dead-letters …` in this process."""

    def run(*arguments: str) -> Said:
        monkeypatch.setattr("sys.argv", ["lanes", "dead-letters", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return Said(ended.value.code or 0, captured.out, captured.err)

    return run


@pytest.fixture(params=["kafka", "jetstream"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """Somewhere to park letters, on each broker."""
    if request.param == "kafka":
        made: KafkaPlace | JetStreamPlace = KafkaPlace(request.getfixturevalue("kafka"))
    else:
        made = JetStreamPlace(request.getfixturevalue("nats_server"))
    yield made
    made.delete()
