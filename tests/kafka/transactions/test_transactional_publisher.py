"""The publisher of a source with transactions keeps outputs until a commit covers their messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from lanes.core.types import Partition, PartitionId, Settlement
from lanes.errors import SourceError
from lanes.outputs.publisher import Output
from lanes.source import SettlementError
from lanes_kafka.client.group_snapshot import GroupSnapshot
from lanes_kafka.client.records import READER
from lanes_kafka.transactions.publisher import TransactionalPublisher
from tests.kafka.transactions.fakes import ABORTABLE, FATAL, RETRIABLE, Cluster, installed, output

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return installed(monkeypatch)


class Source:
    """A publisher, and the client's thread of its source."""

    def __init__(self) -> None:
        self.partition = Partition(PartitionId("in", 0), READER, floor=0)
        self.snapshot = GroupSnapshot("generation 1", frozenset([self.partition]))
        self.prepared = 0
        settings: dict[str, Any] = {"transactional.id": "t"}
        self.publisher = TransactionalPublisher(settings, {}, "g", "source", lambda: self.snapshot, self._prepare)

    async def _prepare(self, settlements: Sequence[Settlement]) -> None:
        self.prepared += 1

    async def publish(self, *positions: int) -> dict[int, Exception | None]:
        """Publish an output of each position, and return their errors."""
        found: dict[int, Exception | None] = {}

        def report(one: Output, error: Exception | None) -> None:
            found[one.position] = error

        await self.publisher.publish([output(self.partition, each) for each in positions], report)
        return found

    async def settle(self, floor: int, *completed: int) -> None:
        runs = [(each, each + 1) for each in completed]
        with anyio.fail_after(20):
            await self.publisher.settle([Settlement(self.partition, [], floor, runs)])


@pytest.fixture
async def source(cluster: Cluster, anyio_backend: str) -> Any:
    made = Source()
    await made.publisher.open()
    made.publisher.opened(40)
    made.publisher.assigned(made.partition)
    cluster.calls.clear()
    yield made
    await made.publisher.aclose()


async def test_outputs_wait_for_the_position_of_their_message(cluster: Cluster, source: Source) -> None:
    assert await source.publish(0, 2, 5) == {0: None, 2: None, 5: None}
    await source.settle(1, 2)
    assert cluster.visible == [0, 2]
    await source.settle(6)
    assert cluster.visible == [0, 2, 5]


async def test_an_output_above_the_set_as_encoded_waits(cluster: Cluster, source: Source) -> None:
    source.publisher.opened(13)
    await source.publish(3, 600, 900)
    await source.settle(1, 3, 600, 900)
    # The metadata has room for two runs, and the next owner runs the message at 900 again.
    assert cluster.visible == [3, 600]
    await source.settle(1, 3, 600, 900)
    assert cluster.visible == [3, 600]
    await source.settle(901)
    assert cluster.visible == [3, 600, 900]


async def test_a_position_without_outputs_is_a_transaction_too(cluster: Cluster, source: Source) -> None:
    # A plain commit could arrive late, after a transaction, and make the next owner repeat visible outputs.
    await source.settle(4, 6)
    assert cluster.calls == ["begin", "offsets", "commit"] and source.prepared == 1
    cluster.answers = {"commit": [FATAL]}
    with pytest.raises(SettlementError):
        await source.settle(5, 6)
    await source.settle(5, 6)
    assert cluster.stored[source.partition.id][0] == 5


async def test_an_aborted_transaction_is_repeated_with_the_next_settlement(cluster: Cluster, source: Source) -> None:
    await source.publish(0)
    cluster.answers = {"offsets": [ABORTABLE]}
    with pytest.raises(SettlementError) as error:
        await source.settle(1)
    assert list(error.value.partitions) == [source.partition] and cluster.visible == []
    await source.settle(1)
    assert cluster.visible == [0]


@pytest.mark.parametrize("committed", [True, False])
async def test_a_cancelled_settlement_leaves_the_decision_to_its_outcome(
    cluster: Cluster, source: Source, committed: bool
) -> None:
    await source.publish(0)
    cluster.answers = {"commit": [RETRIABLE] * 1_000_000}
    cluster.commits = committed
    with anyio.move_on_after(0.05) as scope:
        await source.settle(1)
    assert scope.cancelled_caught
    cluster.answers = {"commit": [FATAL]}
    await source.publish(1)
    # The call waits for the outcome of the former transaction, and sends only what is not visible.
    await source.settle(2)
    assert cluster.visible == [0, 1] and cluster.calls.count("look") == 1


async def test_outputs_of_a_lost_partition_never_become_visible(cluster: Cluster, source: Source) -> None:
    await source.publish(0)
    source.publisher.gone(source.partition)
    with pytest.raises(SourceError, match="a partition was given up meanwhile"):
        await source.settle(1)
    found = await source.publish(1)
    error = found[1]
    assert isinstance(error, SourceError) and error.retryable
    assert cluster.visible == []


async def test_an_output_waits_while_there_is_no_room(
    cluster: Cluster, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source.publisher._waiting, "_most", 1)
    await source.publish(3)
    found: dict[int, Exception | None] = {}

    async def publish() -> None:
        found.update(await source.publish(4))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(publish)
        await anyio.sleep(0.05)
        assert found == {}
        await source.settle(4)
    assert found == {4: None} and cluster.visible == [3]


async def test_a_refused_output_takes_the_other_outputs_of_its_message_back(cluster: Cluster, source: Source) -> None:
    await source.publish(0, 1)
    wrong = output(source.partition, 1)
    wrong.target = "no topic"
    errors: list[Exception | None] = []
    await source.publisher.publish([wrong], lambda one, error: errors.append(error))
    assert isinstance(errors[0], SourceError) and not errors[0].retryable
    await source.settle(2)
    assert cluster.visible == [0]


@pytest.mark.parametrize("targets", [("no topic", "out"), ("out", "no topic")], ids=" then ".join)
async def test_no_output_of_a_refused_attempt_becomes_visible(
    cluster: Cluster, source: Source, targets: tuple[str, str]
) -> None:
    errors = await attempt(source, 1, 1, *targets)
    assert [isinstance(error, SourceError) and not error.retryable for error in errors] == [
        target == "no topic" or targets[0] == "no topic" for target in targets
    ]
    # The message has ended, such as by its dead letter, so its position is committed.
    await source.settle(2)
    assert cluster.visible == []


async def test_the_next_attempt_replaces_the_outputs_of_a_refused_one(cluster: Cluster, source: Source) -> None:
    await attempt(source, 1, 1, "out", "no topic")
    assert await attempt(source, 1, 2, "out") == [None]
    await source.settle(2)
    assert cluster.visible == [1]


async def test_the_outputs_of_an_earlier_attempt_are_dropped(cluster: Cluster, source: Source) -> None:
    assert await attempt(source, 1, 1, "out") == [None]
    assert await attempt(source, 1, 2, "out") == [None]
    await source.settle(2)
    assert cluster.visible == [1]


async def attempt(source: Source, position: int, number: int, *targets: str) -> list[Exception | None]:
    """Publish an output to each target in one attempt of a message, and return their errors."""
    outputs: list[Output] = []
    errors: dict[int, Exception | None] = {}
    for index, target in enumerate(targets):
        one = output(source.partition, position)
        one.target, one.attempt, one.number = target, number, index + 1
        outputs.append(one)
    await source.publisher.publish(outputs, lambda one, error: errors.__setitem__(one.number, error))
    return [errors[one.number] for one in outputs]
