"""The thread of the transactions gives each request one outcome, whatever the producer answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import anyio
import pytest
from confluent_kafka import KafkaError, KafkaException

from lanes.core.types import Partition, PartitionId
from lanes.errors import ConfigError, SourceError
from lanes_kafka.client.group_snapshot import GroupSnapshot
from lanes_kafka.client.records import READER
from lanes_kafka.transactions.coverage import Coverage
from lanes_kafka.transactions.performer import TransactionThread
from lanes_kafka.transactions.requests import Request
from tests.kafka.transactions.fakes import (
    ABORTABLE,
    FATAL,
    FORBIDDEN,
    MOVED,
    NO_GROUP,
    NO_TOPIC,
    PURGED,
    RETRIABLE,
    TOO_LARGE,
    Cluster,
    installed,
    output,
)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return installed(monkeypatch)


class Work:
    """A thread of transactions with two owned partitions."""

    def __init__(self) -> None:
        self.partitions = [Partition(PartitionId("in", number), READER, floor=0) for number in range(2)]
        self.snapshot = GroupSnapshot("generation 1", frozenset(self.partitions))
        self.ended: list[tuple[int, list[int]]] = []
        self.thread = TransactionThread(
            {"transactional.id": "t", "sasl.password": "hunter2"},
            {},
            "g",
            "source",
            lambda: self.snapshot,
            self._on_end,
        )

    def _on_end(self, request: Request) -> None:
        self.ended.append((request.partition.id.number, [each.position for each in request.arrived or ()]))

    def submit(self, number: int, *positions: int) -> Request:
        """Commit the outputs of some positions of a partition."""
        partition = self.partitions[number]
        request = Request(
            partition,
            Coverage(max(positions) + 1, [], ""),
            [output(partition, each) for each in positions],
            self.thread.answer(),
        )
        self.thread.submit(request)
        return request


@pytest.fixture
async def work(cluster: Cluster, anyio_backend: str) -> Any:
    made = Work()
    await made.thread.open()
    cluster.calls.clear()
    yield made
    await made.thread.aclose()


async def outcome(request: Request) -> SourceError | None:
    with anyio.fail_after(20):
        try:
            await request.answer.wait()
        except SourceError as error:
            return error
    return None


pytestmark = pytest.mark.anyio


async def test_a_transaction_has_outputs_and_positions(cluster: Cluster, work: Work) -> None:
    assert await outcome(work.submit(0, 0, 1)) is None
    assert cluster.calls == ["begin", "offsets", "commit"]
    assert cluster.visible == [0, 1] and cluster.stored == {PartitionId("in", 0): (2, "")}
    assert cluster.metadata == ["generation 1"] and work.ended == [(0, [0, 1])]
    assert (work.thread.counts.committed, work.thread.counts.outputs) == (1, 2)


async def test_a_commit_without_an_answer_is_asked_again(cluster: Cluster, work: Work) -> None:
    cluster.answers = {"offsets": [RETRIABLE], "commit": [RETRIABLE, RETRIABLE]}
    assert await outcome(work.submit(0, 0)) is None
    assert cluster.calls == ["begin", "offsets", "offsets", "commit", "commit", "commit"]
    assert cluster.visible == [0]


@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("error", [FATAL, ABORTABLE])
async def test_the_stored_position_tells_an_unknown_outcome(
    cluster: Cluster, work: Work, committed: bool, error: KafkaError
) -> None:
    cluster.answers = {"commit": [error]}
    cluster.commits = committed
    failure = await outcome(work.submit(0, 0, 1))
    assert (failure is None) == committed
    assert failure is None or failure.retryable
    assert cluster.calls == ["begin", "offsets", "commit", *(["make", "init"] if error is FATAL else ["abort"]), "look"]
    assert work.ended == [(0, [0, 1] if committed else [])]
    assert work.thread.counts.unknown == 1
    if not committed:
        assert await outcome(work.submit(0, 0, 1)) is None
    assert cluster.visible == [0, 1]


async def test_the_look_is_repeated_until_a_broker_answers(cluster: Cluster, work: Work) -> None:
    cluster.answers = {"commit": [FATAL], "look": [RETRIABLE, RETRIABLE], "init": [RETRIABLE]}
    cluster.commits = True
    assert await outcome(work.submit(0, 0)) is None
    assert cluster.calls == ["begin", "offsets", "commit", "make", "init", "init", "look", "look", "look"]
    assert cluster.visible == [0]


async def test_a_lost_partition_aborts_and_the_others_are_sent_again(cluster: Cluster, work: Work) -> None:
    def lose() -> None:
        work.snapshot = GroupSnapshot("generation 2", frozenset(work.partitions[1:]))

    cluster.before = {"offsets": lose}
    requests = [work.submit(0, 0), work.submit(1, 5)]
    lost, kept = [await outcome(request) for request in requests]
    assert kept is None and lost is not None and lost.retryable
    assert "a partition was given up meanwhile" in str(lost)
    assert cluster.visible == [105] and sorted(work.ended) == [(0, []), (1, [5])]
    assert PartitionId("in", 0) not in cluster.stored


async def test_a_request_that_was_given_up_is_not_committed(cluster: Cluster, work: Work) -> None:
    request = work.submit(0, 0)
    request.answer.given_up = True
    assert await outcome(work.submit(1, 1)) is None
    assert 0 not in cluster.visible


async def test_an_old_generation_is_sent_again_under_the_next_snapshot(cluster: Cluster, work: Work) -> None:
    def move() -> None:
        work.snapshot = GroupSnapshot("generation 2", frozenset(work.partitions))

    cluster.answers = {"offsets": [MOVED]}
    cluster.before = {"abort": move}
    assert await outcome(work.submit(0, 0)) is None
    assert cluster.metadata == ["generation 1", "generation 2"] and cluster.visible == [0]


async def test_a_transaction_names_the_generation_of_its_beginning(cluster: Cluster, work: Work) -> None:
    def move() -> None:
        # The partition was lost and came back, so the present generation would let a former owner commit.
        work.snapshot = GroupSnapshot("generation 3", frozenset(work.partitions))

    cluster.before = {"begin": move}
    assert await outcome(work.submit(0, 0)) is None
    assert cluster.metadata == ["generation 1"]


async def test_an_old_generation_without_a_next_snapshot_fails_for_now(cluster: Cluster, work: Work) -> None:
    cluster.answers = {"offsets": [MOVED]}
    failure = await outcome(work.submit(0, 0))
    assert failure is not None and failure.retryable and "ILLEGAL_GENERATION" in str(failure)
    assert cluster.visible == []


@pytest.mark.parametrize("call", ["offsets", "commit"])
async def test_a_refused_output_is_permanent(cluster: Cluster, work: Work, call: str) -> None:
    cluster.answers = {"produce": [None, TOO_LARGE], call: [ABORTABLE]}
    failure = await outcome(work.submit(0, 3, 4))
    assert failure is not None and not failure.retryable
    assert "out refused output 1 of in/0 position 4 (MSG_SIZE_TOO_LARGE" in str(failure)
    assert cluster.visible == [] and "abort" in cluster.calls


async def test_a_refused_producer_is_permanent(cluster: Cluster, work: Work) -> None:
    cluster.answers = {"commit": [FATAL], "init": [FORBIDDEN]}
    failure = await outcome(work.submit(0, 0))
    assert failure is not None and not failure.retryable
    assert "allow this user Write and Describe on the transactional id" in str(failure)


@pytest.mark.parametrize(
    ("raised", "remedy"),
    [
        (
            KafkaException(KafkaError(KafkaError._INVALID_ARG, "no file of hunter2")),
            "correct the cause, and start again",
        ),
        (ValueError("hunter2"), "report this bug of lanes"),
    ],
)
async def test_a_thread_that_fails_ends_the_consumer(
    cluster: Cluster,
    work: Work,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    raised: Exception,
    remedy: str,
) -> None:
    def make(settings: dict[str, Any]) -> Any:
        raise raised

    cluster.answers = {"commit": [FATAL]}
    monkeypatch.setattr("lanes_kafka.transactions.performer.Producer", make)
    failures = [await outcome(work.submit(0, 0)), await outcome(work.submit(1, 0))]
    for failure in failures:
        assert failure is not None and not failure.retryable
        assert "the thread of the transactions has failed (" in str(failure) and remedy in str(failure)
        assert "hunter2" not in str(failure)
    assert sorted(work.ended) == [(0, []), (1, [])]
    assert remedy in caplog.text and "hunter2" not in caplog.text


async def test_a_close_ends_every_wait(cluster: Cluster, work: Work) -> None:
    cluster.answers = {"commit": [RETRIABLE] * 1_000_000}
    request = work.submit(0, 0)
    with anyio.fail_after(20):
        while "commit" not in cluster.calls:
            await anyio.sleep(0.001)
        await work.thread.aclose()
    failure = await outcome(request)
    assert failure is not None and failure.retryable and "the transactions have ended" in str(failure)
    late = await outcome(work.submit(1, 0))
    assert late is not None and late.retryable


@pytest.mark.parametrize(
    ("answers", "awaited"),
    [
        ({"offsets": [RETRIABLE] * 1_000_000}, "offsets"),
        ({"offsets": [ABORTABLE], "abort": [RETRIABLE] * 20}, "abort"),
        ({"commit": [ABORTABLE], "abort": [RETRIABLE] * 20}, "abort"),
    ],
)
async def test_a_close_aborts_an_open_transaction(
    cluster: Cluster, work: Work, answers: dict[str, list[KafkaError | None]], awaited: str
) -> None:
    cluster.answers = answers
    request = work.submit(0, 0)
    with anyio.fail_after(20):
        while awaited not in cluster.calls:
            await anyio.sleep(0.001)
        await work.thread.aclose()
    assert cluster.calls[-1] == "abort" and not cluster.answers.get("abort")
    failure = await outcome(request)
    assert failure is not None and failure.retryable and cluster.visible == []


@pytest.mark.parametrize("answers", [{"commit": [RETRIABLE] * 1_000_000}, {}])
async def test_a_close_never_aborts_a_sent_commit(
    cluster: Cluster, work: Work, answers: dict[str, list[KafkaError | None]]
) -> None:
    cluster.answers = answers
    work.submit(0, 0)
    with anyio.fail_after(20):
        while "commit" not in cluster.calls:
            await anyio.sleep(0.001)
        await work.thread.aclose()
    assert "abort" not in cluster.calls


async def test_the_abort_of_a_close_has_a_limit(cluster: Cluster, work: Work) -> None:
    cluster.answers = {"offsets": [RETRIABLE] * 1_000_000, "abort": [RETRIABLE] * 1_000_000}
    work.submit(0, 0)
    with anyio.fail_after(10):
        while "offsets" not in cluster.calls:
            await anyio.sleep(0.001)
        await work.thread.aclose()
    assert "abort" in cluster.calls


async def test_a_refusal_aborts_the_transaction(cluster: Cluster, work: Work) -> None:
    cluster.answers = {"offsets": [NO_GROUP]}
    failure = await outcome(work.submit(0, 0))
    assert failure is not None and not failure.retryable
    assert cluster.calls == ["begin", "offsets", "abort"]


@pytest.mark.parametrize("said", ["Failed to add partition(s) to transaction", "simulated"])
@pytest.mark.parametrize("reported", [None, NO_TOPIC, PURGED])
@pytest.mark.parametrize("call", ["offsets", "commit"])
async def test_a_forbidden_topic_is_named(
    cluster: Cluster, work: Work, call: str, reported: KafkaError | None, said: str
) -> None:
    error = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED, said, txn_requires_abort=True)
    cluster.answers = {"produce": [reported], call: [error]}
    failure = await outcome(work.submit(0, 3))
    assert failure is not None and not failure.retryable
    assert "out refused output 1 of in/0 position 3 (TOPIC_AUTHORIZATION_FAILED" in str(failure)
    assert "Write and Describe on the topic" in str(failure) and "transactional" not in str(failure).partition(" (")[0]
    assert "abort" in cluster.calls


@pytest.mark.parametrize("call", ["offsets", "commit"])
@pytest.mark.parametrize(
    "code", [KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._MSG_TIMED_OUT]
)
async def test_a_missing_topic_is_named(
    cluster: Cluster, work: Work, caplog: pytest.LogCaptureFixture, code: int, call: str
) -> None:
    cluster.missing = {"out"}
    named = "output 1 of in/0 position 4 to 'out': the topic does not exist ("
    for _ in range(3):
        cluster.answers = {"produce": [PURGED, KafkaError(code, "simulated")], call: [ABORTABLE]}
        failure = await outcome(work.submit(0, 3, 4))
        assert failure is not None and failure.retryable
        assert named in str(failure) and str(failure).endswith("; create this topic")
    assert caplog.text.count(named) == 1 and caplog.text.count("create this topic") == 1


async def test_a_topic_that_exists_is_not_called_missing(cluster: Cluster, work: Work) -> None:
    cluster.answers = {"produce": [KafkaError(KafkaError._MSG_TIMED_OUT, "simulated")], "offsets": [ABORTABLE]}
    failure = await outcome(work.submit(0, 3))
    assert failure is not None and failure.retryable and "create" not in str(failure)
    assert "out: _MSG_TIMED_OUT" in str(failure)


async def test_all_topics_that_may_be_forbidden_are_named(cluster: Cluster, work: Work) -> None:
    cluster.answers = {"offsets": [NO_TOPIC]}
    partition = work.partitions[0]
    outputs = [replace(output(partition, 3), target=target) for target in ("b", "a")]
    request = Request(partition, Coverage(4, [], ""), outputs, work.thread.answer())
    work.thread.submit(request)
    failure = await outcome(request)
    assert failure is not None and not failure.retryable
    assert "a or b refused output 1 of in/0 position 3 or a later output (" in str(failure)


@pytest.mark.parametrize(
    ("code", "named"),
    [
        (KafkaError.GROUP_AUTHORIZATION_FAILED, "group.id='g': the broker refuses the positions of a transaction"),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, "the broker refuses the positions of in ("),
        (KafkaError.CLUSTER_AUTHORIZATION_FAILED, "IdempotentWrite on the cluster"),
        (KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, "transactional.id='t': the broker refuses the producer"),
    ],
)
async def test_a_refusal_names_what_is_refused(cluster: Cluster, work: Work, code: int, named: str) -> None:
    cluster.answers = {"offsets": [KafkaError(code, "Failed to commit offsets", txn_requires_abort=True)]}
    failure = await outcome(work.submit(0, 0))
    assert failure is not None and not failure.retryable and named in str(failure)
    assert ("transactional.id" in str(failure)) == (code == KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)


async def test_a_start_that_is_refused_raises(cluster: Cluster) -> None:
    cluster.answers = {"init": [FORBIDDEN]}
    work = Work()
    with anyio.fail_after(20), pytest.raises(ConfigError, match="allow this user Write and Describe"):
        await work.thread.open()
    await work.thread.aclose()
