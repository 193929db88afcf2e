"""A simulated client reads the right positions through prefetch, pauses, resets, retention and recreated topics."""

from __future__ import annotations

import pytest

from memsource.kafka.client import Commit
from tests.memsource.kafka.stand import Stand

PROTOCOLS = ("eager", "cooperative", "848")


def taken_and_given_back(stand: Stand) -> None:
    one = stand.broker.coordinator.clients[0]
    stand.broker.group.revoke(0)
    stand.to(stand.now + 0.5)
    assert stand.told(one) == [("revoke", (0,))]
    stand.release(one, 0)
    stand.to(stand.now + 0.5)
    assert stand.told(one) == [("assign", (0,))]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_pause_in_the_client_outlives_the_ownership(protocol: str) -> None:
    stand = Stand(1, 5, protocol=protocol)
    one = stand.client("one")
    stand.poll(one)
    one.pause(0)
    taken_and_given_back(stand)
    assert stand.fetch(one) == []
    one.resume(0)
    assert stand.fetch(one) == [0, 1, 2, 3, 4]


def test_deleted_messages_are_delivered_from_the_prefetch_unless_a_pause_drops_it() -> None:
    stand = Stand(1, 10, prefetch=6)
    one = stand.client("one")
    stand.poll(one)
    assert stand.fetch(one, messages=2) == [0, 1]
    stand.broker.delete_records(0, 8, stand.now)
    assert stand.fetch(one, messages=2) == [2, 3]
    one.pause(0)
    assert stand.fetch(one) == []
    one.resume(0)
    assert stand.fetch(one) == [8, 9]


def test_a_broker_that_hangs_delivers_only_the_prefetch() -> None:
    stand = Stand(1, 10, prefetch=6)
    one = stand.client("one")
    stand.poll(one)
    assert stand.fetch(one, messages=2) == [0, 1]
    stand.broker.hang(stand.now, on=True)
    assert stand.fetch(one) == [2, 3, 4, 5]
    assert stand.fetch(one) == []
    assert stand.commit(one, 3) is None
    stand.broker.hang(stand.now, on=False)
    assert stand.fetch(one) == [6, 7, 8, 9]


def test_prefetched_messages_are_not_delivered_in_the_next_assignment() -> None:
    stand = Stand(1, 10)
    one = stand.client("one")
    stand.poll(one)
    stand.fetch(one, messages=2)
    stand.commit(one, 1)
    taken_and_given_back(stand)
    assert stand.fetch(one, messages=2) == [1, 2]


def test_positions_continue_after_markers_and_gaps() -> None:
    stand = Stand(1, 2)
    stand.broker.skip(3)
    stand.publish(1)
    stand.broker.skip(4)
    one = stand.client("one")
    stand.poll(one)
    assert (stand.fetch(one, messages=2), one.partitions[0].position) == ([0, 1], 2)
    assert (stand.fetch(one), one.partitions[0].position) == ([5], 10)
    stand.commit(one, 10)
    assert stand.broker.unfinished == []
    stand.broker.skip(2)
    assert (stand.fetch(one), one.partitions[0].position) == ([], 12)


def test_no_message_is_read_from_an_open_transaction_on() -> None:
    stand = Stand(2, 2)
    one = stand.client("one")
    stand.poll(one)
    stand.broker.open_transaction(0, stand.now)
    stand.publish(2)
    # A second beginning changes nothing, and other partitions are read.
    stand.broker.open_transaction(0, stand.now)
    assert (stand.fetch(one), stand.fetch(one, 1)) == ([0, 1], [0, 1, 2, 3])
    assert (one.partitions[0].position, stand.broker.stable_end(0), stand.broker.stable_end(1)) == (2, 2, 4)
    stand.broker.skip(3)
    stand.publish(1)
    assert stand.fetch(one) == []
    for _ in range(2):
        stand.broker.end_transaction(0, stand.now)
    stand.broker.skip(1)
    assert (stand.fetch(one), one.partitions[0].position) == ([2, 3, 7], 9)
    assert stand.broker.stable_end(0) == 9


def test_a_gap_before_an_open_transaction_is_passed() -> None:
    stand = Stand(1, 1)
    stand.broker.skip(4)
    stand.broker.open_transaction(0, stand.now)
    stand.publish(1)
    one = stand.client("one")
    stand.poll(one)
    assert (stand.fetch(one), one.partitions[0].position) == ([0], 5)


def test_the_latest_position_is_the_beginning_of_an_open_transaction() -> None:
    stand = Stand(1, 3, offset_reset="latest")
    stand.broker.open_transaction(0, stand.now)
    stand.publish(2)
    one = stand.client("one")
    stand.poll(one)
    stand.broker.end_transaction(0, stand.now)
    assert stand.fetch(one) == [3, 4]


def test_a_deleted_topic_has_no_transaction() -> None:
    stand = Stand(1, 3)
    stand.broker.open_transaction(0, stand.now)
    stand.broker.delete_topic(stand.now)
    stand.broker.create_topic(stand.now)
    stand.publish(1)
    assert stand.broker.stable_end(0) == stand.broker.group.topic.log(0).end


def test_retention_by_size_deletes_the_oldest_messages() -> None:
    stand = Stand(1, retention_bytes=10)
    for size in (4, 3, 3, 4):
        stand.broker.publish(b"x" * size)
    # Three bytes less, and the log has fewer than it keeps.
    assert (stand.broker.log_start(0), [each.position for each in stand.broker.records]) == (1, [1, 2, 3])
    assert [stand.broker.newer_bytes(0, position) for position in (1, 2, 3)] == [7, 4, 0]
    # A gap may have bytes, such as those of an aborted transaction.
    stand.broker.skip(2, size=5)
    assert (stand.broker.log_start(0), stand.broker.newer_bytes(0, 3)) == (2, 5)
    assert stand.broker.written_bytes(0) == 19
    # The newest message stays, whatever its size.
    stand.broker.publish(b"x" * 50)
    assert (stand.broker.log_start(0), [each.position for each in stand.broker.records]) == (6, [6])
    one = stand.client("one")
    stand.poll(one)
    assert stand.fetch(one) == [6]
    with pytest.raises(ValueError, match="size=-1: must be 0 or more bytes"):
        stand.broker.skip(1, size=-1)
    with pytest.raises(ValueError, match="retention_bytes=0: must be 1 or more, or None"):
        Stand(1, retention_bytes=0)


def test_retention_by_size_deletes_nothing_of_an_open_transaction() -> None:
    stand = Stand(1, retention_bytes=10)
    stand.broker.publish(b"x" * 4)
    stand.broker.open_transaction(0, stand.now)
    for _ in range(4):
        stand.broker.publish(b"x" * 8)
    assert stand.broker.log_start(0) == 1
    stand.broker.end_transaction(0, stand.now)
    assert stand.broker.log_start(0) == 3
    stand.broker.delete_records(0, 4, stand.now)
    stand.broker.publish(b"x" * 8)
    assert (stand.broker.log_start(0), stand.broker.newer_bytes(0, 4)) == (4, 8)


def test_an_empty_message_has_its_place_in_the_log() -> None:
    stand = Stand(1, retention_bytes=10)
    for value in (b"", b"xxxx", b"", b"xxxx"):
        stand.broker.publish(value)
    assert [stand.broker.newer_bytes(0, position) for position in range(4)] == [8, 4, 4, 0]
    stand.broker.publish(b"xxxx")
    assert stand.broker.log_start(0) == 1


@pytest.mark.parametrize(
    ("policy", "committed", "reads"),
    [
        ("earliest", None, [5, 6, 7]),
        ("earliest", 2, [5, 6, 7]),
        ("earliest", 6, [6, 7]),
        ("earliest", 10**9, [5, 6, 7]),
        ("latest", None, []),
        ("latest", 2, []),
        ("latest", 6, [6, 7]),
    ],
)
def test_a_start_out_of_range_follows_the_offset_reset(policy: str, committed: int | None, reads: list[int]) -> None:
    stand = Stand(1, 8, offset_reset=policy)
    stand.broker.delete_records(0, 5, stand.now)
    one = stand.client("one")
    if committed is not None:
        stand.commit(one, committed)
    stand.poll(one)
    assert (stand.fetch(one), stand.poll(one)) == (reads, [])
    stand.publish(1)
    assert stand.fetch(one) == [8]


@pytest.mark.parametrize("committed", [None, 2, 9])
def test_out_of_range_with_the_policy_error_is_one_error_and_no_further_message(committed: int | None) -> None:
    stand = Stand(1, 8, offset_reset="error")
    stand.broker.delete_records(0, 5, stand.now)
    one = stand.client("one")
    if committed is not None:
        stand.commit(one, committed)
    assert stand.told(one) == [("assign", (0,))]
    assert stand.failure(one) == "_AUTO_OFFSET_RESET"
    stand.publish(3)
    assert (stand.fetch(one), stand.poll(one)) == ([], [])


def test_retention_may_overtake_a_reader() -> None:
    stand = Stand(1, 10, prefetch=0)
    one = stand.client("one")
    stand.poll(one)
    stand.fetch(one, messages=1)
    stand.broker.delete_records(0, 6, stand.now)
    stand.broker.delete_records(0, 4, stand.now)
    assert [record.position for record in stand.broker.unfinished] == [6, 7, 8, 9]
    assert stand.fetch(one) == [6, 7, 8, 9]
    stand.broker.end_close(one, stand.now)
    two = stand.client("two")
    stand.poll(two)
    assert two.partitions[0].position == 6
    with pytest.raises(ValueError, match="before=11: must be 0 … 10, the end of partition 0"):
        stand.broker.delete_records(0, 11, stand.now)


def recreated(stand: Stand, after: float) -> None:
    stand.broker.delete_topic(stand.now)
    with pytest.raises(LookupError, match="topic T was deleted"):
        stand.publish(1)
    with pytest.raises(LookupError, match="deleted already"):
        stand.broker.delete_topic(stand.now)
    stand.to(stand.now + after)
    stand.broker.create_topic(stand.now)
    stand.broker.create_topic(stand.now)
    stand.publish(150)


@pytest.mark.parametrize("protocol", ["eager", "cooperative"])
def test_a_topic_recreated_at_once_is_a_silent_loss_for_classic(protocol: str) -> None:
    stand = Stand(1, 100, protocol=protocol)
    one = stand.client("one")
    stand.poll(one)
    stand.fetch(one)
    recreated(stand, 0.2)
    stand.to(stand.now + 1.0)
    assert stand.poll(one) == []
    # 100 of 150 are skipped.
    assert stand.fetch(one) == list(range(100, 150))


def test_a_topic_recreated_at_once_is_revoked_and_assigned_by_848() -> None:
    for commits, first in ((False, 0), (True, 100)):
        stand = Stand(1, 100, protocol="848")
        one = stand.client("one")
        stand.poll(one)
        stand.fetch(one)
        recreated(stand, 0.2)
        stand.to(1.0)
        assert stand.told(one) == [("revoke", (0,))]
        if commits:
            # The old floor, accepted for the new topic.
            assert stand.commit(one, 100) is None
        stand.release(one, 0)
        stand.to(2.0)
        assert stand.told(one) == [("assign", (0,))]
        assert stand.fetch(one)[0] == first


@pytest.mark.parametrize(("protocol", "told"), [("eager", "revoke"), ("cooperative", "lost"), ("848", "revoke")])
def test_a_deleted_topic_is_an_error_and_loses_its_commits(protocol: str, told: str) -> None:
    stand = Stand(1, 5, protocol=protocol)
    one = stand.client("one")
    stand.poll(one)
    stand.commit(one, 4)
    before = stand.broker.topic_id
    stand.broker.delete_topic(stand.now)
    stand.to(1.0)
    assert (stand.broker.committed(0), stand.commit(one, 4), stand.broker.topic_id) == (
        None,
        "UNKNOWN_TOPIC_OR_PART",
        None,
    )
    assert stand.told(one) == [(told, (0,))]
    stand.release(one, 0)
    stand.to(5.0)
    stand.broker.create_topic(5.0)
    stand.publish(3)
    stand.to(6.0)
    assert stand.told(one) == [("assign", (0,))]
    assert (stand.fetch(one), stand.broker.topic_id != before) == ([0, 1, 2], True)
    assert stand.commit(one, 2) is None
    assert stand.broker.committed(0) == Commit(2)
