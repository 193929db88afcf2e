"""A world has caught up if only blocked messages are left, and the messages that wait for an unblock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from lanes.observe.status import Capacity, PartitionStatus, Status
from memsource.history.rows import number_of, piece_of
from memsource.memory.topic import Record
from memsource.sim.world.progress import WorldProgress
from tests.fakes.telemetry import status

BOUND = 2


@dataclass
class Broker:
    """A broker whose messages have their piece as their position, and nothing is finished."""

    unfinished: list[Record] = field(default_factory=list)


class Progress(WorldProgress):
    def piece_of(self, record: Record) -> int:
        return record.position


def owned(in_flight: int, *, full: bool = False, **changes: Any) -> PartitionStatus:
    """A piece whose delivered messages are all blocked, or in lanes that are blocked."""
    fields: dict[str, Any] = {
        "in_flight": in_flight,
        "running": 0,
        "capacity": Capacity(concurrency=1, max_in_flight=BOUND),
        "full": full,
        "epoch": 1,
        "floor": 0,
        "holes": in_flight,
        "confirmed": 0,
        "ahead": in_flight,
        "ahead_reached": False,
        "draining": False,
        "lag": None,
        "oldest": None,
    }
    return PartitionStatus(**fields | changes)


def member(blocked: int, **partitions: PartitionStatus) -> Status:
    """A process in which no handler runs and no message waits for a retry."""
    idle = dict.fromkeys(("running", "ready", "held", "parking"), 0)
    names = {f"orders/{name.removeprefix('of_').replace('_', '#')}": each for name, each in partitions.items()}
    room = {"in_flight": blocked, "max_in_flight": 100, "in_flight_bytes": blocked, "max_in_flight_bytes": 1_000}
    return status(blocked=blocked, partitions=names, **idle, **room)


def caught_up(left: dict[str, int], *members: Status) -> bool:
    """Whether a world has caught up, with numbers of unfinished messages by the names of their pieces."""
    records = [
        Record(number_of(name), piece_of(name), None, b"", (), "orders") for name, n in left.items() for _ in range(n)
    ]
    broker: Any = Broker(records)
    return Progress(broker).caught_up(lambda: members)


def test_blocked_messages_of_a_piece_fill_the_other_pieces_of_the_process() -> None:
    both = member(2, of_0_1=owned(1, full=True), of_0_2=owned(1, full=True))
    assert caught_up({"orders/0#1": 20, "orders/0#2": 1}, both)
    keyless = member(2, of_0_1=owned(0, full=True), of_0_2=owned(2, full=True))
    assert caught_up({"orders/0#1": 20, "orders/0#2": 2}, keyless)


@pytest.mark.parametrize("name", ["orders/0#1", "orders/0"])
def test_a_piece_that_is_not_full_receives_its_messages(name: str) -> None:
    partition = "of_" + name.removeprefix("orders/").replace("#", "_")
    assert not caught_up({name: 20}, member(1, **{partition: owned(1)}))
    assert caught_up({name: 1}, member(1, **{partition: owned(1)}))
    assert caught_up({name: 20}, member(2, **{partition: owned(2, full=True)}))
    assert caught_up({name: 20}, member(1, **{partition: owned(1, ahead_reached=True)}))


def test_messages_in_flight_below_half_of_the_bound_fill_no_piece() -> None:
    assert not caught_up({"orders/0#1": 20}, member(1, of_0_1=owned(1, full=True), of_0_2=owned(0, full=True)))


def test_blocked_messages_stop_no_piece_of_another_partition() -> None:
    members = member(3, of_0_1=owned(1, full=True), of_1_2=owned(2, full=True))
    assert not caught_up({"orders/0#1": 20, "orders/1#2": 2}, members)


def test_blocked_messages_stop_no_piece_of_another_process() -> None:
    stuck = member(2, of_0_2=owned(2, full=True))
    assert not caught_up({"orders/0#1": 20, "orders/0#2": 2}, stuck, member(0, of_0_1=owned(0)))
    assert caught_up({"orders/0#2": 20}, stuck, member(0, of_0_1=owned(0)))


def test_blocked_messages_of_a_piece_excuse_no_message_of_another() -> None:
    two = member(6, of_0_1=owned(0), of_0_2=owned(6, capacity=Capacity(concurrency=1, max_in_flight=100)))
    assert not caught_up({"orders/0#1": 3, "orders/0#2": 3}, two)


def test_a_piece_without_an_owner_has_not_caught_up() -> None:
    stuck = member(2, of_0_2=owned(2, full=True))
    assert not caught_up({"orders/0#1": 1, "orders/0#2": 2}, stuck)


def test_the_name_of_a_piece_has_its_number() -> None:
    assert [piece_of(name) for name in ("orders/0", "orders/0#17", "a#3/0", "a#3/12#4")] == [0, 17, 0, 4]
