"""Keys have defined bytes, and the text of a message hides user data."""

from __future__ import annotations

import pytest

from lanes.core.types import NEVER, Failure, Partition, PartitionId, Settlement, key_bytes
from tests.core.builders import READER, new_message, new_partition

HIGHEST = 2**128 - 1


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (b"", b""),
        (b"\x00\xff", b"\x00\xff"),
        ("", b""),
        ("zoë", b"zo\xc3\xab"),
        (0, bytes(16)),
        (1, b"\x01" + bytes(15)),
        (0x0102, b"\x02\x01" + bytes(14)),
        (HIGHEST, b"\xff" * 16),
    ],
)
def test_a_key_is_converted_to_its_bytes(key: bytes | str | int, expected: bytes) -> None:
    assert key_bytes(key) == expected


@pytest.mark.parametrize(
    ("key", "found"),
    [
        (-7777, "is below 0"),
        (-(2**200), "is below 0"),
        (HIGHEST + 1, "has 129 bits"),
        (2**200, "has 201 bits"),
        # The number has more digits than Python converts to text.
        pytest.param(2**20_000, "has 20001 bits", id="long"),
    ],
)
def test_an_int_key_outside_128_bits_is_refused_and_not_shown(key: int, found: str) -> None:
    with pytest.raises(ValueError, match=r"in 0 … 2\*\*128-1, and this one") as refused:
        key_bytes(key)
    assert str(refused.value) == f"an int key must be in 0 … 2**128-1, and this one {found}; pass its bytes instead"


@pytest.mark.parametrize("key", [None, True, False, 1.0, bytearray(b"k"), memoryview(b"k"), ("k",), object()])
def test_a_key_of_another_type_is_refused_by_type(key: object) -> None:
    with pytest.raises(TypeError, match=rf"bytes, str or int, not {type(key).__name__}; return None for 'no key'"):
        key_bytes(key)  # type: ignore[arg-type]


def test_a_partition_id_reads_as_source_and_number() -> None:
    assert str(PartitionId("ORDERS", 3)) == "ORDERS/3"


def test_a_message_reads_its_attributes_from_the_raw_message_on_access() -> None:
    partition = new_partition()
    message = new_message(partition, 7)
    partition.assignment = 4
    assert message.value == b"raw 7"
    assert message.headers == [("raw", b"raw 7")]
    assert message.subject == "subject of raw 7"
    assert (message.epoch, partition.epoch, message.attempt, message.next) == (4, 4, 1, None)
    partition.fencing_token = 0
    assert (message.epoch, partition.epoch, partition.assignment) == (0, 0, 4)


def test_the_repr_of_a_message_shows_its_origin_and_no_user_data() -> None:
    message = new_message(new_partition(), 7, key=b"customer-42")
    assert repr(message) == "<Message S/0 position 7 attempt 1>"


def test_the_repr_of_a_partition_shows_its_state_and_counts() -> None:
    partition = new_partition(2)
    assert repr(partition) == "<Partition S/2 assignment 0 fenced>"
    partition.live, partition.assignment, partition.unended = True, 5, 3
    assert repr(partition) == "<Partition S/2 assignment 5 live>"
    partition.draining = True
    assert repr(partition) == "<Partition S/2 assignment 5 draining, 3 handlers to end>"


def test_a_message_has_no_further_attributes() -> None:
    message = new_message(new_partition(), 7)
    with pytest.raises(AttributeError):
        message.colour = "red"  # type: ignore[attr-defined]


def test_a_failure_is_retried_by_default() -> None:
    error = ValueError("no")
    failure = Failure(error)
    assert (failure.error, failure.chance, failure.delay, failure.terminal) == (error, 0.0, None, False)


def test_a_settlement_without_a_commit_reaches_no_message() -> None:
    assert Settlement(new_partition(), [], None, []).ordinal == 0


def test_a_new_message_and_a_new_settlement_begin_at_zero() -> None:
    message = new_message(new_partition(), 7)
    assert (message.received, message.attempt, message.next, message.broken) == (0.0, 1, None, None)
    assert type(message.received) is float
    assert Settlement(message.partition, [message], 7).ordinal == 0


def test_a_partition_has_the_arguments_of_its_assignment() -> None:
    partition = Partition(
        PartitionId("S", 1), READER, "since May", floor=3, completed=[(5, 6)], deadline=9.0, fencing_token=7
    )
    assert (partition.id, partition.reader, partition.incarnation) == (("S", 1), READER, "since May")
    assert (partition.floor, partition.completed) == (3, [(5, 6)])
    assert (partition.deadline, partition.fencing_token, partition.epoch) == (9.0, 7, 7)
    other = new_partition()
    other.assignment = 4
    assert (other.incarnation, other.deadline, other.fencing_token, other.epoch) == ("", NEVER, None, 4)


def test_a_message_begins_its_first_attempt() -> None:
    message = new_message(new_partition(), 3)
    assert (message.attempt, message.broken, message.next, message.received) == (1, None, None, 0.0)
    assert (message.state, message.ordinal, message.lane) == (0, 0, message.key)
