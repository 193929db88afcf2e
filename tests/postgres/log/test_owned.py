"""A turn is over when a message was finished in it, and a lost assignment that nobody has seen is not told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from lanes import PartitionId
from lanes.core.types import Partition
from lanes.ownership import State, StateKey
from lanes.source import Assigned, Lost, Progressed, Revoking
from lanes_postgres.log.reading import READER
from lanes_postgres.subscription.owned import Owned
from lanes_postgres.subscription.visitor import Visitor

ID = PartitionId("orders", 0)


def owned(completed: Sequence[tuple[int, int]]) -> Owned:
    partition = Partition(ID, READER, "i", floor=11, completed=list(completed))
    return Owned(
        number=0,
        partition=partition,
        held=cast(Any, None),
        key=StateKey("billing", ID, "i"),
        epoch=1,
        floor=11,
        read=11,
        since=0.0,
        end=20,
    )


@pytest.mark.parametrize(
    ("floor", "completed", "got_on"),
    [
        (11, [(12, 14), (14, 17)], False),  # the same positions, in runs that touch
        (11, [(12, 14)], False),  # a part of them, while the rest is not stored again yet
        (11, [(12, 17)], False),
        (11, [(12, 18)], True),
        (17, [], True),
    ],
)
def test_a_turn_goes_on_until_a_message_is_finished_that_was_not(
    floor: int, completed: list[tuple[int, int]], got_on: bool
) -> None:
    one = owned([(12, 17)])
    one.stored(State(1, floor, completed))
    assert one.got_on() == got_on


def test_a_loss_takes_back_an_assignment_that_was_not_told() -> None:
    """After a freeze, the next owner may have a higher epoch already."""
    lost, other = owned([]).partition, owned([]).partition
    visitor = Visitor.__new__(Visitor)
    visitor._events = [Assigned(other), Assigned(lost), Progressed(lost, 12), Revoking(lost, 1.0)]
    assert visitor._forget_assigned(lost)
    assert visitor._events == [Assigned(other)]
    visitor._events = [Revoking(lost, 1.0), Lost(other, "why")]
    assert not visitor._forget_assigned(lost)
    assert visitor._events == [Revoking(lost, 1.0), Lost(other, "why")]
