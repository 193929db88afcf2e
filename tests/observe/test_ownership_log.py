"""Partitions that drain or are lost together share one log line, which counts the messages that run again."""

from __future__ import annotations

import logging

import pytest

from lanes.core.engine import Engine
from lanes.core.types import ABANDON, ACK, NEVER, Message, Partition
from lanes.observe.ownership import UNRELEASED, DrainCost, OwnershipLog
from tests.core.builders import assigned, deliver, failed, new_engine, new_partition, start, take, take_all


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "lanes")
    return caplog


def lines(log: pytest.LogCaptureFixture) -> list[str]:
    """Return the log lines so far, and clear the log."""
    found = log.messages.copy()
    log.clear()
    return found


def test_the_first_assignment_of_a_source_without_plans_is_the_join(log: pytest.LogCaptureFixture) -> None:
    ownership = OwnershipLog("orders", plans=False, handler="charge")
    ownership.opened("key", 8, 100)
    assert lines(log) == ['orders: joining with order="key", concurrency=8, max_in_flight=100']
    for number in range(12):
        ownership.assigned(new_partition(number))
    assert (ownership.noted, lines(log)) == (True, [])
    ownership.tell(12, stopping=False)
    names = ", ".join(f"S/{number}" for number in range(10))
    assert lines(log) == [
        "orders: joined",
        f"orders: assigned 12 partition(s), 12 in all: {names} and 2 more",
    ]
    ownership.assigned(new_partition(12))
    ownership.tell(13, stopping=False)
    assert (ownership.noted, lines(log)) == (False, ["orders: assigned 1 partition(s), 13 in all: S/12"])


def test_the_first_plan_of_a_source_with_plans_is_the_join(log: pytest.LogCaptureFixture) -> None:
    ownership = OwnershipLog("orders", plans=True, handler="charge")
    ownership.opened("key", 8, 100)
    lines(log)
    ownership.planned(4, standby=True)
    ownership.planned(5, standby=False)
    assert lines(log) == [
        "orders: joined",
        "orders: the group has plan 4; this process stands by without a partition",
        "orders: the group has plan 5",
    ]


def test_a_group_above_its_targets_is_a_warning_with_the_remedy(log: pytest.LogCaptureFixture) -> None:
    ownership = OwnershipLog("orders", plans=True, handler="charge")
    ownership.provisioned(4, under=True)
    ownership.provisioned(5, under=False)
    assert [record.levelname for record in log.records] == ["WARNING", "INFO"]
    assert lines(log) == [
        (
            "orders: under plan 4 of the group, a process owns more partitions than its consumer_target; "
            "start more processes, or raise the targets"
        ),
        "orders: under plan 5 of the group, no process exceeds its consumer_target",
    ]


def test_a_revoke_names_partitions_handlers_and_time(log: pytest.LogCaptureFixture) -> None:
    ownership = OwnershipLog("orders", plans=False, handler="charge")
    engine = new_engine()
    partition = assigned(engine)
    deliver(engine, partition, 1, 2, key=None)
    take_all(engine)
    engine.drain(partition)
    ownership.revoked(partition, 30.0, 5.0, first=True)
    ownership.tell(1, stopping=False)
    ownership.revoked(partition, NEVER, 5.0, first=True)
    ownership.tell(1, stopping=True)
    assert lines(log) == [
        f"orders: revoked 1 partition(s), 2 running handler(s) may end within 30 s: {partition.id}",
        f"orders: stopping with 1 partition(s), 2 running handler(s) may end without a limit: {partition.id}",
    ]


def drained(engine: Engine, partition: Partition) -> DrainCost:
    """A drain of the partition that has begun."""
    cost = DrainCost(partition)
    cost.abandoned(engine.drain(partition))
    return cost


def test_a_drain_costs_the_handlers_that_did_not_succeed(log: pytest.LogCaptureFixture) -> None:
    engine = new_engine(concurrency=5)
    partition = assigned(engine)
    deliver(engine, partition, *range(1, 9), key=None)
    first: Message = take(engine)
    engine.finish(first, ACK, 0.0)  # done before the drain
    engine.finish(take(engine), failed(), 0.0)  # held for a retry
    running = [take(engine) for _ in range(4)]
    cost = drained(engine, partition)
    assert (cost.unstarted, cost.again) == (2, 5)
    engine.finish(running[0], ACK, 0.0)
    engine.finish(running[1], ABANDON, 0.0)
    engine.finish(running[2], failed(), 0.0)
    engine.fence(partition)  # the last message becomes a zombie
    engine.settled(engine.collect(0.0))
    assert (cost.unstarted, cost.again) == (2, 4)


def test_a_retry_that_is_due_counts_as_run(log: pytest.LogCaptureFixture) -> None:
    engine = new_engine()
    partition = assigned(engine)
    deliver(engine, partition, 1)
    engine.finish(take(engine), failed(), 0.0)
    engine.due(99.0)
    cost = drained(engine, partition)
    assert (cost.unstarted, cost.again) == (0, 1)


def test_drains_that_end_together_share_a_line(log: pytest.LogCaptureFixture) -> None:
    ownership = OwnershipLog("orders", plans=False, handler="charge")
    ownership.tell_drained(4.0)
    assert lines(log) == []
    engine = new_engine()
    partitions = [assigned(engine, number) for number in (0, 1)]
    costs = []
    for number, partition in enumerate(partitions):
        deliver(engine, partition, 1, 2)  # the second message waits for the first, which has the same key
        take(engine)
        costs.append(drained(engine, partition))
        ownership.revoked(partition, 30.0, 5.0 + number, first=not number)
    for partition, cost in zip(partitions, costs, strict=True):
        engine.fence(partition)
        ownership.drained(partition, cost)
    ownership.tell_drained(7.5)
    assert lines(log) == [
        "orders: drained 2 partition(s) in 2.50 s, 2 message(s) run again, 2 did not start: S/0, S/1",
    ]
    ownership.tell_drained(8.0)
    assert (lines(log), repr(ownership)) == ([], "<OwnershipLog of orders>")


def test_partitions_that_are_lost_together_share_a_line(log: pytest.LogCaptureFixture) -> None:
    ownership = OwnershipLog("orders", plans=False, handler="charge")
    engine = new_engine(concurrency=20)
    partitions = [assigned(engine, number) for number in range(4)]
    for partition, running in zip(partitions, (2, 0, 10, 1), strict=True):
        start(engine, partition, *range(running))
    for partition in partitions:
        reason = "its lease has run out" if partition.id.number == 3 else "the member was fenced"
        ownership.lost(partition, reason, engine.lose(partition))
    ownership.lost(new_partition(4), "the topic was deleted", [])
    for number in (5, 6):
        ownership.lost(new_partition(number), "the stream was deleted", [])
    assert lines(log) == []
    ownership.tell_lost()
    assert lines(log) == [
        (
            "orders: 3 partitions lost (the member was fenced); charge still runs for 12 message(s): S/0, S/1, S/2. "
            "Their results do not count, and the next owner runs the messages again. Positions: S/0: 0, 1; S/2: 0, 1, "
            "2, 3, 4, 5, 6, 7 and 2 more"
        ),
        (
            "orders: S/3 lost (its lease has run out); charge still runs for 1 message(s). Their results do not "
            "count, and the next owner runs the messages again. Positions: S/3: 0"
        ),
        "orders: S/4 lost (the topic was deleted) while no handler ran",
        "orders: 2 partitions lost (the stream was deleted) while no handler ran: S/5, S/6",
    ]
    ownership.tell_lost()
    assert lines(log) == []


def test_partitions_that_are_not_released_together_share_a_line(log: pytest.LogCaptureFixture) -> None:
    ownership = OwnershipLog("orders", plans=False, handler="charge")
    ownership.tell_unreleased()
    assert lines(log) == []
    ownership.unreleased(new_partition(0), "not flushed")
    ownership.lost(new_partition(0), UNRELEASED, [])
    ownership.tell_lost()
    ownership.tell_unreleased()
    assert lines(log) == [
        (
            "orders: the source did not confirm the release of S/0, so its next owner may run finished messages again "
            "(not flushed)"
        )
    ]
    for number in range(3):
        ownership.unreleased(new_partition(number), f"no answer within {number} s")
        ownership.lost(new_partition(number), UNRELEASED, [])
    ownership.tell_lost()
    ownership.tell_unreleased()
    assert lines(log) == [
        (
            "orders: the source did not confirm the release of 3 partitions, so their next owners may run finished "
            "messages again (the last: no answer within 2 s): S/0, S/1, S/2"
        )
    ]
