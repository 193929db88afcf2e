"""A member that waits for the first answer of its group says so, and is not ready."""

from __future__ import annotations

import logging

import pytest

from lanes_kafka.client.join_watch import WARN_AFTER, WARN_EVERY, JoinWatch
from tests.fakes.grouped import HandClock

SESSION = 45.0


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "lanes.kafka")
    return caplog


def test_a_wait_for_a_dead_member_is_a_warning_after_seconds_and_then_each_minute(
    log: pytest.LogCaptureFixture,
) -> None:
    clock = HandClock()
    watch = JoinWatch("kafka g", clock, tells_nothing=False)
    # The member has not joined yet.
    clock.now += 100.0
    watch.look(SESSION, 3, outage=False)
    watch.joins()
    clock.now += WARN_AFTER - 0.1
    watch.joins()
    watch.look(SESSION, 3, outage=False)
    assert (watch.waits, log.messages) == (True, [])
    clock.now += 0.1
    # Other lines report an outage.
    watch.look(SESSION, 3, outage=True)
    assert log.messages == []
    watch.look(SESSION, 3, outage=False)
    watch.look(SESSION, 3, outage=False)
    (record,) = log.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        "kafka g: the group has assigned no partition for 5 s, so no message is handled. The group may wait for a "
        "member that was killed, at most 45 s with the session.timeout.ms of this process. The group may also wait for "
        "a member that drains, at most for its max.poll.interval.ms. Wait, because a restart does not shorten the time"
    )
    clock.now += WARN_EVERY
    watch.look(SESSION, 3, outage=False)
    assert log.messages[1].startswith("kafka g: the group has assigned no partition for 65 s, ")
    watch.answered(owns=True)
    clock.now += WARN_EVERY
    watch.look(SESSION, 3, outage=False)
    assert (watch.waits, len(log.messages)) == (False, 2)


def test_a_member_without_partitions_says_that_a_rebalance_takes_long(log: pytest.LogCaptureFixture) -> None:
    clock = HandClock()
    watch = JoinWatch("kafka g", clock, tells_nothing=False)
    watch.joins()
    watch.answered(owns=True)
    clock.now += 600.0
    watch.rebalances()
    clock.now += WARN_AFTER - 0.1
    watch.rebalances()
    watch.look(SESSION, 3, outage=False)
    assert log.messages == []
    clock.now += 0.1
    watch.look(SESSION, 3, outage=False)
    (said,) = log.messages
    assert said.startswith("kafka g: the group has assigned no partition for 5 s, so no message is handled. ")
    # The group has answered once, so the member is ready.
    assert not watch.waits
    watch.answered(owns=True)
    clock.now += WARN_EVERY
    watch.look(SESSION, 3, outage=False)
    assert len(log.messages) == 1


def test_under_kip_848_a_group_owes_no_answer_after_a_revocation(log: pytest.LogCaptureFixture) -> None:
    clock = HandClock()
    watch = JoinWatch("kafka g", clock, tells_nothing=True)
    watch.joins()
    watch.answered(owns=True)
    watch.rebalances()
    clock.now += WARN_EVERY
    watch.look(SESSION, 3, outage=False)
    assert log.messages == []


def test_under_kip_848_the_wait_is_no_fault_and_ends_with_the_session(log: pytest.LogCaptureFixture) -> None:
    clock = HandClock()
    watch = JoinWatch("kafka g", clock, tells_nothing=True)
    watch.joins()
    clock.now += 45.0
    watch.look(SESSION, 3, outage=False)
    (record,) = log.records
    assert record.levelno == logging.INFO and "or have more members than partitions" in record.getMessage()
    assert watch.waits
    clock.now += 5.1
    watch.look(SESSION, 3, outage=False)
    assert (watch.waits, len(log.records)) == (False, 1)


def test_a_member_without_a_partition_says_so_once(log: pytest.LogCaptureFixture) -> None:
    clock = HandClock()
    watch = JoinWatch("kafka g", clock, tells_nothing=False)
    watch.joins()
    watch.answered(owns=False)
    clock.now += WARN_AFTER - 0.1
    # Another rebalance, which again leaves this member without a partition.
    watch.answered(owns=False)
    watch.look(SESSION, 3, outage=False)
    assert log.messages == []
    clock.now += 0.1
    watch.look(SESSION, 3, outage=True)
    assert log.messages == []
    for _ in range(3):
        watch.look(SESSION, 3, outage=False)
        clock.now += WARN_EVERY
        watch.answered(owns=False)
    (record,) = log.records
    assert record.levelno == logging.INFO
    assert record.getMessage() == (
        "kafka g: the group has no partition for this member, because other members own all 3. This member handles no "
        "message until a member leaves or the topic gets more partitions. Start at most one member for each partition"
    )
    assert not watch.waits


def test_a_partition_ends_the_report_of_a_member_without_one(log: pytest.LogCaptureFixture) -> None:
    clock = HandClock()
    watch = JoinWatch("kafka g", clock, tells_nothing=False)
    watch.joins()
    # A cooperative group moves a partition in a second rebalance.
    watch.answered(owns=False)
    clock.now += WARN_AFTER - 0.1
    watch.answered(owns=True)
    clock.now += WARN_EVERY
    watch.look(SESSION, 3, outage=False)
    assert log.messages == []
    watch.rebalances()
    watch.answered(owns=False)
    clock.now += WARN_AFTER
    watch.look(SESSION, 3, outage=False)
    assert len(log.messages) == 1
