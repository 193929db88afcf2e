"""Messages of the client become runs of their partitions, in order and once, and gaps between messages are found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import OFFSET_INVALID, KafkaError, TopicPartition
from confluent_kafka import Message as Raw

from lanes.core.types import Partition, PartitionId
from lanes.source import Delivered, Progressed
from lanes_kafka.client import intake as intake_module
from lanes_kafka.client.group import Assignment, Group
from lanes_kafka.client.intake import Intake, partition_id_of
from lanes_kafka.client.records import READER, record_key
from lanes_kafka.config import client_config


def raw(number: int, offset: int, value: bytes = b"12", error: int | None = None, topic: str = "t") -> Raw:
    return Raw(
        topic=topic,
        partition=number,
        offset=offset,
        value=value,
        error=KafkaError(error) if error is not None else None,
    )


class Stand:
    """An intake with a client that returns prepared messages.

    Attributes:
        answers: The result of each call of ``consume``, or a function that makes it.
        consumed: Arguments of the calls of ``consume``.
        calls: The other calls that change the client.
        at: Position of the client in each partition.
        end: End of each log that the client knows.
        errors: Messages that were reported as errors, each with the position of partition 0 at that time.
    """

    def __init__(self, *numbers: int, position: int = 0) -> None:
        client: Any = self
        group: Any = Group(
            client_config({"bootstrap.servers": "b:1", "group.id": "g"}),
            client,
            lambda events: None,
            lambda until: None,
            lambda failure: None,
            lambda: 0.0,
            "kafka g/t",
            is_full=lambda: False,
            hands_over=False,
        )
        self.group: Group = group
        self.answers: list[list[Raw] | Callable[[], list[Raw]]] = []
        self.consumed: list[tuple[int, float]] = []
        self.calls: list[tuple[str, int, int]] = []
        self.at: dict[int, int] = {}
        self.end: dict[int, int] = {}
        self.errors: list[tuple[int | None, int]] = []
        for number in numbers:
            self.assign(number, position)
        self.intake = Intake(client, self.group, record_key, self._failed)

    def assign(self, number: int, position: int = 0, topic: str = "t") -> Assignment:
        self.group.rebalances += 1
        one = PartitionId(topic, number)
        found = Assignment(Partition(one, READER, floor=position), position, self.group.rebalances)
        self.group.owned[one] = found
        return found

    def owned(self, number: int = 0) -> Assignment:
        return self.group.owned[PartitionId("t", number)]

    def _failed(self, error: KafkaError, raw: Raw) -> None:
        self.errors.append((raw.offset(), self.owned().position))

    # --- the client

    def consume(self, count: int, timeout: float) -> list[Raw]:
        self.consumed.append((count, timeout))
        answer = self.answers.pop(0) if self.answers else []
        return answer if isinstance(answer, list) else answer()

    def position(self, places: Sequence[TopicPartition]) -> list[TopicPartition]:
        return [TopicPartition(one.topic, one.partition, self.at.get(one.partition, OFFSET_INVALID)) for one in places]

    def get_watermark_offsets(self, place: TopicPartition, *, cached: bool) -> tuple[int, int]:
        return 0, self.end.get(place.partition, OFFSET_INVALID)

    def seek(self, place: TopicPartition) -> None:
        self.calls.append(("seek", place.partition, place.offset))

    def pause(self, places: Sequence[TopicPartition]) -> None:
        self.calls += [("pause", each.partition, 0) for each in places]

    def resume(self, places: Sequence[TopicPartition]) -> None:
        self.calls += [("resume", each.partition, 0) for each in places]


def told(events: Sequence[Delivered]) -> list[tuple[int, list[int]]]:
    return [(each.partition.id.number, [message.position for message in each.run]) for each in events]


def test_one_message_is_awaited_and_further_ones_are_taken_without_a_wait() -> None:
    stand = Stand(0)
    stand.answers = [[raw(0, 0)], [raw(0, 1), raw(0, 2)]]
    events, more = stand.intake.read(3, 0.5)
    assert (told(events), more) == ([(0, [0, 1, 2])], True)
    assert stand.consumed == [(1, 0.5), (2, 0.0)]


def test_fewer_messages_than_asked_for_are_the_last_ones() -> None:
    stand = Stand(0)
    stand.answers = [[raw(0, 0)], [raw(0, 1)]]
    events, more = stand.intake.read(3, 0.5)
    assert (told(events), more) == ([(0, [0, 1])], False)
    assert stand.intake.read(3, 0.5) == ([], False)
    assert stand.consumed[2:] == [(1, 0.5)], "nothing follows a first message that does not come"


def test_the_first_message_joins_the_run_of_its_own_partition() -> None:
    stand = Stand(0, 1)
    stand.answers = [[raw(0, 0)], [raw(1, 0), raw(0, 1), raw(1, 1)]]
    events, _ = stand.intake.read(4, 0.5)
    assert sorted(told(events)) == [(0, [0, 1]), (1, [0, 1])]
    assert [each.size for each in events] == [4, 4]
    stand.answers = [[raw(0, 2)], [raw(1, 2)]]
    assert told(stand.intake.read(3, 0.5)[0]) == [(0, [2]), (1, [2])]


def test_a_single_message_needs_a_single_call() -> None:
    stand = Stand(0)
    stand.answers = [[raw(0, 0)]]
    events, more = stand.intake.read(1, 0.5)
    assert (told(events), more, stand.consumed) == ([(0, [0])], True, [(1, 0.5)])


def test_each_partition_gets_one_run_of_a_call_in_its_order() -> None:
    stand = Stand(0, 1)
    stand.answers = [[raw(0, 0), raw(1, 0), raw(1, 1), raw(0, 3), raw(1, 2)]]
    events, _ = stand.intake.read(1, 0.0)
    assert told(events) == [(0, [0, 3]), (1, [0, 1, 2])]
    assert [each.partition for each in events] == [stand.owned(0).partition, stand.owned(1).partition]
    assert [each.size for each in events] == [4, 6]


def test_partitions_with_one_number_of_two_topics_get_their_own_runs() -> None:
    stand = Stand(0)
    other = stand.assign(0, topic="u")
    stand.answers = [[raw(0, 0), raw(0, 0, topic="u"), raw(0, 1, topic="u"), raw(0, 1)]]
    events, _ = stand.intake.read(1, 0.0)
    assert told(events) == [(0, [0, 1]), (0, [0, 1])]
    assert [each.partition for each in events] == [stand.owned(0).partition, other.partition]
    raws: list[Any] = [message.raw for each in events for message in each.run]
    assert [each.topic() for each in raws] == ["t", "t", "u", "u"]


def test_messages_before_an_error_are_processed_before_it() -> None:
    """The error may move the position of its partition."""
    stand = Stand(0)
    stand.answers = [[raw(0, 0), raw(0, 1), raw(0, 2, error=KafkaError._AUTO_OFFSET_RESET), raw(0, 7)]]
    events, _ = stand.intake.read(1, 0.0)
    assert told(events) == [(0, [0, 1]), (0, [7])]
    assert stand.errors == [(2, 2)]


def test_messages_of_foreign_and_of_drained_partitions_are_dropped() -> None:
    stand = Stand(0, 1)
    stand.group.drained(stand.owned(1).partition)
    stand.answers = [[raw(7, 0), raw(1, 0), raw(0, 0)]]
    events, _ = stand.intake.read(1, 0.0)
    assert told(events) == [(0, [0])]
    assert (stand.owned(1).position, stand.owned(1).positions_read) == (0, 0)


def test_no_position_is_delivered_twice() -> None:
    stand = Stand(0, position=5)
    stand.answers = [[raw(0, 3), raw(0, 4)], [raw(0, 4), raw(0, 5), raw(0, 6)], [raw(0, 6), raw(0, 7)]]
    assert [told(stand.intake.read(1, 0.0)[0]) for _ in range(3)] == [[], [(0, [5, 6])], [(0, [7])]]


def test_a_partition_counts_positions_with_gaps_and_bytes() -> None:
    stand = Stand(0, position=5)
    stand.answers = [[raw(0, 6, b"123"), raw(0, 9, b"1234")], [raw(0, 10, b"1")]]
    stand.intake.read(1, 0.0)
    found = stand.owned()
    assert (found.position, found.end, found.positions_read, found.bytes_read) == (10, 10, 5, 7)
    stand.intake.read(1, 0.0)
    assert (found.position, found.end, found.positions_read, found.bytes_read) == (11, 11, 6, 8)


def test_the_average_size_follows_a_hundred_messages() -> None:
    stand = Stand(0)
    assert stand.intake.average == 1_024
    stand.answers = [[raw(0, offset, bytes(24)) for offset in range(50)]]
    stand.intake.read(1, 0.0)
    assert stand.intake.average == 524
    stand.answers = [[raw(0, offset, bytes(24)) for offset in range(50, 250)]]
    stand.intake.read(1, 0.0)
    assert stand.intake.average == 24


# --- a rebalance within consume


def test_messages_that_come_with_an_assignment_of_their_partition_are_read_again() -> None:
    """They may belong to the former assignment."""
    stand = Stand(0, 1, 2)

    def reassign() -> list[Raw]:
        stand.assign(0, 4)
        stand.assign(2, 6)
        error = raw(0, 9, error=KafkaError._PARTITION_EOF)
        return [raw(0, 7), raw(1, 0), raw(0, 8), error, raw(2, 6)]

    stand.answers = [reassign]
    events, _ = stand.intake.read(1, 0.0)
    assert told(events) == [(1, [0])]
    assert stand.calls == [("seek", 0, 4), ("seek", 2, 6)]
    assert stand.errors == [(9, 4)], "an error is reported all the same"
    stand.answers = [[raw(0, 4)]]
    assert told(stand.intake.read(1, 0.0)[0]) == [(0, [4])]
    assert len(stand.calls) == 2


def test_messages_of_the_other_partitions_survive_a_rebalance() -> None:
    stand = Stand(0, 1)

    def revoke() -> list[Raw]:
        del stand.group.owned[PartitionId("t", 1)]
        stand.group.rebalances += 1
        return [raw(1, 0), raw(0, 0)]

    stand.answers = [revoke]
    events, _ = stand.intake.read(1, 0.0)
    assert (told(events), stand.calls) == ([(0, [0])], [])


# --- gaps


def test_progress_reports_positions_without_a_message() -> None:
    stand = Stand(0, 1, 2, 3)
    stand.at = {0: 4, 2: 0, 3: 9}
    stand.group.release(stand.owned(3).partition)
    first = stand.intake.progress()
    assert [(type(each), each.partition, each.position) for each in first] == [
        (Progressed, stand.owned(0).partition, 4)
    ]
    assert (stand.owned().position, stand.owned().positions_read) == (4, 4)
    assert stand.intake.progress() == []
    stand.at[0] = 7
    assert [each.position for each in stand.intake.progress()] == [7]
    assert (stand.owned().position, stand.owned().positions_read) == (7, 7)
    assert Stand().intake.progress() == []


def test_a_gap_after_the_committed_position_ends_at_the_position_of_the_client() -> None:
    stand = Stand(0, position=5)
    partition = stand.owned().partition
    assert stand.intake.gap_after(partition, 5) is None, "the client has no position yet"
    stand.at[0] = 5
    assert stand.intake.gap_after(partition, 5) is None
    stand.at[0] = 6
    assert stand.intake.gap_after(partition, 5) == 6


def test_no_gap_follows_a_position_below_a_message() -> None:
    stand = Stand(0, position=5)
    partition = stand.owned().partition
    stand.at[0] = 9
    assert stand.intake.gap_after(partition, 4) is None
    stand.group.lose_all("test")
    assert stand.intake.gap_after(partition, 5) is None


# --- reading past the last message


def test_a_released_partition_is_read_until_a_gap_is_known() -> None:
    stand = Stand(0, 1, position=5)
    stand.at[0], stand.end[0] = 5, 7
    stand.group.set_paused(stand.intake.client, [stand.owned()], True)
    seen: list[bool] = []

    def other() -> list[Raw]:
        seen.append(stand.owned().returning)
        return [raw(1, 5)]

    def marker() -> list[Raw]:
        stand.at[0] = 7
        return []

    stand.answers = [other, [], marker]
    others = stand.intake.read_past(stand.owned().partition, 5, 60.0)
    assert told(others) == [(1, [5])], "no message of another partition is lost"
    assert seen == [True] and not stand.owned().returning
    assert stand.calls == [("pause", 0, 0), ("resume", 0, 0)], "a paused client reads nothing"
    assert stand.intake.gap_after(stand.owned().partition, 5) == 7


def test_a_message_after_the_committed_position_ends_the_reading() -> None:
    stand = Stand(0, position=5)
    stand.at[0], stand.end[0] = 5, 7
    stand.answers = [[raw(0, 5)]]
    assert stand.intake.read_past(stand.owned().partition, 5, 60.0) == []
    assert stand.consumed == [(1, 0.02), (99, 0.0)]


@pytest.mark.parametrize(("end", "committed"), [(5, 5), (OFFSET_INVALID, 5), (7, 4)])
def test_nothing_is_read_past_the_end_of_a_log_or_below_a_message(end: int, committed: int) -> None:
    stand = Stand(0, position=5)
    stand.at[0], stand.end[0] = 5, end
    assert stand.intake.read_past(stand.owned().partition, committed, 60.0) == []
    assert stand.consumed == []


def test_a_partition_that_is_lost_meanwhile_is_read_no_further() -> None:
    stand = Stand(0, 1, position=5)
    stand.at[0], stand.end[0] = 5, 7

    def lose() -> list[Raw]:
        stand.group.lose_all("test")
        return []

    stand.answers = [lose]
    partition = stand.owned().partition
    assert stand.intake.read_past(partition, 5, 60.0) == []
    assert len(stand.consumed) == 1
    assert stand.intake.read_past(partition, 5, 60.0) == [] and len(stand.consumed) == 1


def test_the_reading_past_a_gap_ends_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(intake_module, "time", SimpleNamespace(monotonic=lambda: now))
    stand = Stand(0, position=5)
    stand.at[0], stand.end[0] = 5, 7

    def slow() -> list[Raw]:
        nonlocal now
        now += 0.25
        return []

    stand.answers = [slow, slow, slow]
    assert stand.intake.read_past(stand.owned().partition, 5, 0.51) == []
    assert [count for count, _ in stand.consumed] == [1, 1, 1]
    # Each call waits a moment for a message, and never longer than the patience.
    assert [timeout for _, timeout in stand.consumed] == [0.02, 0.02, pytest.approx(0.01)]
    assert stand.intake.read_past(stand.owned().partition, 5, 0.0) == [] and len(stand.consumed) == 3


def test_the_reading_past_a_gap_reads_a_bounded_number_of_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake_module, "_READ_PAST_LIMIT", 150)
    stand = Stand(0, 1, position=0)
    stand.at[0], stand.end[0] = 0, 7
    offsets = iter(range(10_000))

    def flood() -> list[Raw]:
        count, _ = stand.consumed[-1]
        return [raw(1, next(offsets)) for _ in range(count)]

    stand.answers = [flood] * 20
    others = stand.intake.read_past(stand.owned().partition, 0, 60.0)
    assert sum(len(each.run) for each in others) == 150
    assert [count for count, _ in stand.consumed] == [1, 99, 1, 49]


def test_an_error_while_reading_past_a_gap_leaves_the_partition_revocable() -> None:
    stand = Stand(0, position=5)
    stand.at[0], stand.end[0] = 5, 7

    def fail() -> list[Raw]:
        raise RuntimeError("the client is closed")

    stand.answers = [fail]
    with pytest.raises(RuntimeError, match="closed"):
        stand.intake.read_past(stand.owned().partition, 5, 60.0)
    assert not stand.owned().returning


def test_the_partition_of_a_message_has_topic_and_number() -> None:
    assert partition_id_of(raw(3, 0)) == PartitionId("t", 3)
