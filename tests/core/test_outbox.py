"""What is finished and on its way: dirty partitions, and what comes back when it may not have been sent."""

from __future__ import annotations

from lanes.core.lane import ABANDONED, FINISHED, SETTLED
from lanes.core.outbox import Outbox
from lanes.core.types import Message, Partition
from tests.core.builders import new_message, new_partition


def in_state(partition: Partition, state: int, *positions: int) -> list[Message]:
    messages = [new_message(partition, position) for position in positions]
    for message in messages:
        message.state = state
    return messages


def test_a_partition_is_dirty_once_however_much_is_finished() -> None:
    outbox, one, other = Outbox(), new_partition(0), new_partition(1)
    for message in (*in_state(one, FINISHED, 1, 2), *in_state(other, FINISHED, 3)):
        outbox.finished(message)
    for message in in_state(one, SETTLED, 0):
        outbox.again(message)
    assert outbox.dirty == [one, other]
    assert repr(outbox) == "<Outbox 2 partitions with something to settle>"


def test_what_is_collected_is_out_of_it() -> None:
    outbox, partition = Outbox(), new_partition()
    (again,) = in_state(partition, SETTLED, 0)
    finished = in_state(partition, FINISHED, 1, 2)
    outbox.again(again)
    for message in finished:
        outbox.finished(message)
    dirty = outbox.dirty
    (settlement,) = outbox.collect()
    assert (settlement.partition, settlement.messages) == (partition, [*finished, again])
    assert outbox.collect() == []
    # The engine holds on to this list.
    assert outbox.dirty is dirty
    assert dirty == []


def test_what_comes_back_goes_in_front_without_what_was_abandoned_meanwhile() -> None:
    outbox, partition = Outbox(), new_partition()
    first, second, later = in_state(partition, FINISHED, 1, 2, 3)
    again, again_later = in_state(partition, SETTLED, 0, 4)
    outbox.finished(first)
    outbox.finished(second)
    outbox.again(again)
    (settlement,) = outbox.collect()
    outbox.finished(later)
    outbox.again(again_later)
    first.state = ABANDONED
    outbox.give_back(settlement)
    assert outbox.dirty == [partition]
    assert outbox.collect()[0].messages == [second, later, again, again_later]


def test_what_comes_back_makes_its_partition_dirty() -> None:
    outbox, partition = Outbox(), new_partition()
    outbox.finished(*in_state(partition, FINISHED, 1))
    settlements = outbox.collect()
    outbox.give_back(settlements[0])
    assert outbox.dirty == [partition]
    assert [s.messages for s in outbox.collect()] == [settlements[0].messages]


def test_a_forgotten_partition_is_clean() -> None:
    outbox, one, other = Outbox(), new_partition(0), new_partition(1)
    outbox.finished(*in_state(one, FINISHED, 1))
    outbox.again(*in_state(one, SETTLED, 0))
    outbox.finished(*in_state(other, FINISHED, 1))
    outbox.forget(one)
    outbox.forget(one)
    assert outbox.dirty == [other]
    assert len(outbox.collect()) == 1
