"""The position at which each partition starts, by the committed positions and the bounds of the logs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

import lanes
from lanes.core.offset_map import encode
from lanes.core.types import PartitionId
from lanes_kafka.client.offsets import QUERY_TIMEOUT, StartPosition, log_bounds, milliseconds, start_positions
from lanes_kafka.config import OutOfRange, Start

T0, T1, T2, U0, U1 = (
    PartitionId("t", 0),
    PartitionId("t", 1),
    PartitionId("t", 2),
    PartitionId("u", 0),
    PartitionId("u", 1),
)
SIZES = {"t": 3, "u": 2}
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
NOTHING: dict[PartitionId, int] = {}


class FakeClient:
    """A client that is asked for committed positions, and for offsets by time.

    Attributes:
        positions: The committed positions with their metadata.
        bounds: First offset and end of each log. Default: 3 and 10.
        written: The first offset at or after ``NOON``; -1 if all messages are older.
        refused: Partitions whose questions fail, by the kind of the question.
        asked: The partitions of each question for committed positions.
        timeouts: The timeouts of all questions.
    """

    def __init__(self, positions: dict[PartitionId, int], metadata: str | None = None) -> None:
        self.positions = positions
        self.metadata = metadata
        self.bounds: dict[PartitionId, tuple[int, int]] = {}
        self.written: dict[PartitionId, int] = {}
        self.refused: dict[str, PartitionId] = {}
        self.asked: list[list[PartitionId]] = []
        self.timeouts: list[float] = []

    def committed(self, places: Sequence[TopicPartition], timeout: float) -> list[TopicPartition]:
        self.timeouts.append(timeout)
        ids = [PartitionId(each.topic, each.partition) for each in places]
        self.asked.append(ids)
        return [self._answer("committed", one, self.positions.get(one, -1001), self.metadata) for one in ids]

    def offsets_for_times(self, places: Sequence[TopicPartition], timeout: float) -> list[TopicPartition]:
        self.timeouts.append(timeout)
        found = []
        for each in places:
            one = PartitionId(each.topic, each.partition)
            low, high = self.bounds.get(one, (3, 10))
            offset = {-2: low, -1: high, milliseconds(NOON): self.written.get(one, 0)}[each.offset]
            found.append(self._answer("times", one, offset))
        return found

    def _answer(self, question: str, one: PartitionId, offset: int, metadata: str | None = None) -> TopicPartition:
        answer = TopicPartition(*one, offset) if metadata is None else TopicPartition(*one, offset, metadata)
        if self.refused.get(question) == one:
            refused: Any = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)
            answer = type(
                "Refused", (), {"topic": one.source, "partition": one.number, "offset": -1, "error": refused}
            )()
        return answer


def starts(
    client: FakeClient,
    *ids: PartitionId,
    start: Start = "beginning",
    out_of_range: OutOfRange = "fail",
    hands_over: bool = True,
) -> dict[PartitionId, StartPosition]:
    asked: Any = client
    return start_positions(
        asked, ids, start=start, sizes=SIZES, out_of_range=out_of_range, hands_over=hands_over, name="kafka g/t"
    )


@pytest.mark.parametrize("committed", [3, 7, 10])
def test_a_committed_position_in_the_log_is_the_start(committed: int) -> None:
    """The start may be the first offset of the log, or its end."""
    client = FakeClient({T0: committed})
    assert starts(client, T0) == {T0: StartPosition(committed, [], uncommitted=False)}
    assert client.asked == [[T0]] and client.timeouts == [QUERY_TIMEOUT] * 3


def test_a_committed_position_of_0_is_the_start() -> None:
    client = FakeClient({T0: 0})
    client.bounds[T0] = 0, 10
    assert starts(client, T0, start="next") == {T0: StartPosition(0, [], uncommitted=False)}


def test_completed_messages_of_the_former_owner_are_taken_over() -> None:
    """They may lie above the readable end, because a transaction may be open."""
    runs = [(8, 9), (12, 15)]
    client = FakeClient({T0: 7}, encode(7, runs, 100))
    assert starts(client, T0) == {T0: StartPosition(7, runs, uncommitted=False)}
    assert starts(client, T0, hands_over=False) == {T0: StartPosition(7, [], uncommitted=False)}


def test_the_metadata_of_other_clients_are_ignored() -> None:
    assert starts(FakeClient({T0: 7}, "made by another client"), T0)[T0].completed == []


@pytest.mark.parametrize(
    ("committed", "what"), [(1, "2 offsets were deleted before they were read"), (11, "it was truncated")]
)
@pytest.mark.parametrize(("rule", "target"), [("earliest", 3), ("latest", 10)])
def test_out_of_range_decides_about_a_position_that_the_log_does_not_have(
    committed: int, what: str, rule: OutOfRange, target: int, caplog: pytest.LogCaptureFixture
) -> None:
    client = FakeClient({T0: committed}, encode(committed, [(committed + 1, committed + 2)], 100))
    assert starts(client, T0, out_of_range=rule) == {T0: StartPosition(target, [], uncommitted=True)}
    (line,) = caplog.records
    assert line.levelno == logging.ERROR and line.getMessage() == (
        f"kafka g/t: t/0: offset {committed} is out of range, because the log has 3 to 10, and {what}; reading "
        f'continues at {target} because of out_of_range="{rule}"'
    )
    with pytest.raises(lanes.SourceError) as failed:
        starts(client, T0)
    assert str(failed.value) == (
        f"kafka g/t: t/0: offset {committed} is out of range, because the log has 3 to 10, and {what}; set "
        'out_of_range to "earliest" or "latest", or commit a position of this log'
    )


def test_from_the_beginning_only_the_asked_partitions_are_decided() -> None:
    client = FakeClient({})
    assert starts(client, T1, U0) == {one: StartPosition(3, [], uncommitted=True) for one in (T1, U0)}
    assert client.asked == [[T1, U0]]


def test_the_first_start_decides_all_partitions_of_the_topic() -> None:
    """Another member may own them, and would otherwise start them later."""
    client = FakeClient({})
    client.bounds |= {T0: (0, 20), T2: (5, 30)}
    found = starts(client, T1, start="next")
    assert found == {one: StartPosition(end, [], uncommitted=True) for one, end in ((T0, 20), (T1, 10), (T2, 30))}
    assert client.asked == [[T1, T0, T2]]


def test_a_partition_without_a_position_in_a_topic_with_positions_is_new_and_read_from_its_beginning() -> None:
    client = FakeClient({T0: 5})
    found = starts(client, T1, U1, start="next")
    assert found == {
        T1: StartPosition(3, [], uncommitted=True),
        U1: StartPosition(10, [], uncommitted=True),
        U0: StartPosition(10, [], uncommitted=True),
    }


def test_a_time_selects_the_first_message_at_or_after_it() -> None:
    client = FakeClient({T0: 7})
    client.written = {U0: 6, U1: -1}
    found = starts(client, T0, U0, start=NOON)
    assert found == {
        T0: StartPosition(7, [], uncommitted=False),
        U0: StartPosition(6, [], uncommitted=True),
        # All messages are older than the time.
        U1: StartPosition(10, [], uncommitted=True),
    }
    client.written = {U0: 0}
    client.bounds[U0] = 0, 10
    assert starts(client, U0, start=NOON)[U0].floor == 0


def test_a_time_is_rounded_up_to_milliseconds_and_never_negative() -> None:
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    times = [0, 1, 1_000, 1_001, -1, -5_000_000]
    assert [milliseconds(epoch + timedelta(microseconds=each)) for each in times] == [0, 1, 1, 2, 0, 0]


@pytest.mark.parametrize("question", ["committed", "times"])
def test_an_error_of_one_partition_decides_nothing(question: str) -> None:
    client = FakeClient({T0: 5, T1: 5})
    client.refused = {question: T1}
    with pytest.raises(KafkaException, match="TOPIC_AUTHORIZATION_FAILED"):
        starts(client, T0, T1)


def test_the_bounds_of_a_log_are_its_first_offset_and_its_end() -> None:
    client: Any = FakeClient({})
    client.bounds[T1] = 4, 8
    assert log_bounds(client, [T0, T1]) == ({T0: 3, T1: 4}, {T0: 10, T1: 8})
