"""A simulated group removes a member after its session, and follows the rules for polls, static names and outages."""

from __future__ import annotations

import pytest

from memsource.kafka.client import Client
from tests.memsource.kafka.stand import Stand

PROTOCOLS = ("eager", "cooperative", "848")


def two_members(protocol: str, **settings: float) -> Stand:
    """``one`` owns the partition, ``two`` waits for it."""
    stand = Stand(1, 5, protocol=protocol, **settings)
    stand.poll(stand.client("one"))
    two = stand.client("two")
    if protocol == "eager":
        one = stand.broker.coordinator.clients[0]
        stand.to(0.5)
        stand.poll(one)
        stand.release(one, 0)
        stand.poll(one)
    stand.poll(two)
    assert stand.owners() == ["one"]
    return stand


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_crashed_member_keeps_its_partitions_for_a_session(protocol: str) -> None:
    stand = two_members(protocol)
    one, two = stand.broker.coordinator.clients
    stand.now = 1.0
    stand.broker.crash("one", 1.0)
    stand.broker.crash("one", 1.0)
    assert stand.commit(one, 1) == "UNKNOWN_MEMBER_ID"
    assert (stand.told(one), stand.fetch(one)) == ([], [])
    stand.to(6.9)
    assert (stand.told(two), stand.owners()) == ([], ["one"])
    stand.to(7.0)
    stand.to(7.5)
    assert stand.told(two) == [("assign", (0,))]
    assert stand.broker.next_at() == float("inf")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_new_process_of_the_same_name_waits_for_the_session_of_the_crashed_one(protocol: str) -> None:
    stand = Stand(1, 5, protocol=protocol)
    stand.poll(stand.client("one"))
    stand.broker.crash("one", 0.0)
    again = stand.client("one")
    stand.to(5.9)
    assert stand.told(again) == []
    stand.to(6.5)
    assert stand.told(again) == [("assign", (0,))]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_frozen_member_hears_of_its_loss_at_its_next_poll(protocol: str) -> None:
    stand = two_members(protocol)
    one, two = stand.broker.coordinator.clients
    stand.to(1.0)
    stand.broker.freeze("one", 10.0)
    stand.to(9.9)
    assert (stand.told(one), stand.fetch(one)) == ([], [])
    assert stand.told(two) == [("assign", (0,))]
    stand.to(10.0)
    # The first commit comes before the first poll.
    assert stand.commit(one, 5) == "UNKNOWN_MEMBER_ID"
    assert stand.told(one) == [("lost", (0,))]
    assert stand.commit(one, 5) == "UNKNOWN_MEMBER_ID"
    stand.poll(one)
    assert stand.commit(one, 3) is None


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_freeze_shorter_than_a_session_is_not_noticed(protocol: str) -> None:
    stand = two_members(protocol)
    one, two = stand.broker.coordinator.clients
    stand.to(1.0)
    stand.broker.freeze("one", 6.5)
    stand.broker.freeze("one", 3.0)  # the later end counts
    stand.to(6.4)
    assert stand.fetch(one) == []
    stand.to(20.0)
    assert (stand.told(one), stand.told(two), stand.owners()) == ([], [], ["one"])
    assert stand.fetch(one) == [0, 1, 2, 3, 4]


def test_a_frozen_process_can_crash() -> None:
    stand = two_members("cooperative")
    two = stand.broker.coordinator.clients[1]
    stand.broker.freeze("one", 3.0)
    stand.now = 1.0
    stand.broker.crash("one", 1.0)
    stand.to(6.0)
    assert stand.told(two) == [("assign", (0,))]


def test_without_polls_a_classic_member_leaves_at_once() -> None:
    stand = two_members("cooperative", max_poll_interval=6.0)
    one, two = stand.broker.coordinator.clients
    stand.to(1.0)
    stand.broker.polling(one, 1.0, on=False)
    stand.to(6.9)
    assert (stand.owners(), stand.commit(one, 1)) == (["one"], None)
    stand.to(7.0)
    assert stand.told(two) == [("assign", (0,))]
    assert stand.commit(one, 2) == "UNKNOWN_MEMBER_ID"
    assert stand.told(one) == [("lost", (0,))]
    assert stand.failure(one) == "_MAX_POLL_EXCEEDED"
    assert stand.commit(one, 2) == "UNKNOWN_MEMBER_ID"
    stand.poll(one)
    assert stand.commit(one, 2) is None


def test_without_polls_an_848_member_keeps_its_partitions_for_another_session() -> None:
    stand = two_members("848", max_poll_interval=6.0)
    one, two = stand.broker.coordinator.clients
    stand.broker.polling(one, 0.0, on=False)
    stand.to(10.0)
    assert (stand.commit(one, 1), stand.owners()) == (None, ["one"])
    stand.to(11.9)
    assert stand.told(two) == []
    stand.to(12.5)
    assert stand.told(two) == [("assign", (0,))]
    assert stand.commit(one, 2) == "UNKNOWN_MEMBER_ID"
    assert stand.told(one) == [("lost", (0,))]
    assert stand.failure(one) == "_MAX_POLL_EXCEEDED"


def test_an_848_member_that_polls_in_between_has_lost_all_and_may_still_commit() -> None:
    stand = two_members("848", max_poll_interval=6.0)
    one, two = stand.broker.coordinator.clients
    stand.broker.polling(one, 0.0, on=False)
    stand.to(8.0)
    assert stand.told(one) == [("lost", (0,))]
    assert stand.commit(one, 2) is None
    assert stand.failure(one) == "_MAX_POLL_EXCEEDED"
    stand.poll(one)
    stand.to(8.5)
    assert stand.told(two) == [("assign", (0,))]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_heartbeats_stop_during_a_close(protocol: str) -> None:
    stand = two_members(protocol)
    one, two = stand.broker.coordinator.clients
    stand.to(1.0)
    assert stand.broker.begin_close(one, 1.0) == [("revoke", (0,))]
    assert stand.broker.begin_close(one, 1.0) == []
    stand.to(6.9)
    assert (stand.commit(one, 1), stand.told(two)) == (None, [])
    stand.to(7.5)
    # Still draining.
    assert stand.told(two) == [("assign", (0,))]
    assert (stand.commit(one, 2), stand.told(one)) == ("UNKNOWN_MEMBER_ID", [])
    stand.broker.end_close(one, 7.5)
    assert stand.owners() == ["two"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_closed_client_gets_no_partition(protocol: str) -> None:
    stand = Stand(2, protocol=protocol)
    one = stand.client("one")
    stand.broker.begin_close(one, 0.0)
    # Assigned in the middle of its close.
    assert stand.told(one) == []
    stand.broker.end_close(one, 0.0)
    stand.broker.end_close(one, 0.0)
    assert (stand.owners(), stand.broker.next_at()) == ([None, None], float("inf"))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_static_member_that_returns_in_time_causes_no_rebalance(protocol: str) -> None:
    stand = Stand(2, 3, protocol=protocol)
    one = stand.client("one", "static")
    stand.poll(one)
    stand.broker.begin_close(one, 0.0)
    stand.broker.end_close(one, 0.0)
    stand.to(5.9)
    assert len(stand.broker.group.members) == 1
    again = stand.client("again", "static")
    assert stand.told(again) == [("assign", (0, 1))]
    stand.to(20.0)
    assert stand.owners() == ["again", "again"]
    stand.broker.begin_close(again, 20.0)
    stand.broker.end_close(again, 20.0)
    stand.to(26.0)
    assert stand.broker.group.members == []


@pytest.mark.parametrize("protocol", ["eager", "cooperative"])
def test_under_a_classic_protocol_a_second_static_member_of_a_name_ends_the_first(protocol: str) -> None:
    stand = Stand(1, 3, protocol=protocol)
    old = stand.client("old", "static")
    stand.poll(old)
    new = stand.client("new", "static")
    assert stand.told(new) == [("assign", (0,))]
    # Without a callback.
    assert (stand.failure(old), stand.poll(old), list(old.partitions)) == ("_FATAL", [], [])
    assert (stand.commit(old, 1), stand.commit(new, 1)) == ("_FATAL", None)
    assert stand.owners() == ["new"]


def test_under_848_a_second_static_member_of_a_name_fails_itself() -> None:
    stand = Stand(1, 3, protocol="848")
    old = stand.client("old", "static")
    stand.poll(old)
    new = stand.client("new", "static")
    assert (stand.failure(new), stand.commit(new, 1)) == ("_FATAL", "_FATAL")
    assert (stand.poll(old), stand.commit(old, 1), stand.owners()) == ([], None, ["old"])
    stand.broker.crash("old", 0.0)
    assert stand.failure(stand.client("newer", "static")) == "_FATAL"
    stand.to(6.0)
    assert stand.told(stand.client("newest", "static")) == [("assign", (0,))]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_short_outage_changes_nothing(protocol: str) -> None:
    stand = two_members(protocol)
    one, two = stand.broker.coordinator.clients
    stand.broker.crash("two", 0.0)
    stand.broker.stop_broker(1.0)
    stand.to(6.0)
    assert stand.broker.coordinator.knows(two)
    assert (stand.poll(one), stand.commit(one, 1)) == ([], "_WAIT_COORD")
    stand.broker.start_broker(6.0)
    assert (stand.poll(one), stand.commit(one, 1)) == ([], None)
    # Sessions restart.
    stand.to(11.9)
    assert stand.broker.coordinator.knows(two)
    stand.to(12.0)
    assert not stand.broker.coordinator.knows(two)


@pytest.mark.parametrize(("protocol", "lost"), [("eager", True), ("cooperative", True), ("848", False)])
def test_in_a_long_outage_classic_members_lose_all_and_848_ones_nothing(protocol: str, lost: bool) -> None:
    stand = Stand(1, 200, protocol=protocol)
    one = stand.client("one")
    stand.poll(one)
    assert stand.fetch(one, messages=10) == list(range(10))
    stand.broker.stop_broker(1.0)
    # The prefetched messages.
    assert stand.fetch(one, messages=200) == list(range(10, 100))
    stand.to(7.0)
    assert stand.told(one) == ([("lost", (0,))] if lost else [])
    assert stand.told(one) == []
    stand.to(24.0)
    stand.broker.start_broker(24.0)
    assert stand.told(one) == ([("assign", (0,))] if lost else [])
    assert stand.fetch(one, messages=1) == [0 if lost else 100]
    assert stand.commit(one, 1) is None


def test_a_release_while_the_broker_is_down_is_sent_later() -> None:
    stand = Stand(2)
    one = stand.client("one")
    stand.poll(one)
    two = stand.client("two")
    stand.to(0.5)
    ((_, asked),) = stand.told(one)
    stand.broker.stop_broker(0.6)
    stand.release(one, *asked)
    stand.to(1.0)
    assert stand.told(two) == []
    stand.broker.start_broker(2.0)
    assert stand.told(two) == [("assign", asked)]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_member_without_a_connection_loses_its_session_and_runs_on(protocol: str) -> None:
    stand = two_members(protocol)
    one, two = stand.broker.coordinator.clients
    stand.to(1.0)
    stand.fetch(one, messages=1)
    stand.broker.isolate("one", 10.0, 1.0)
    stand.broker.publish(partition=0)
    assert stand.fetch(one) == [1, 2, 3, 4]  # prefetched messages
    stand.to(6.9)
    assert (stand.told(one), stand.told(two)) == ([], [])
    stand.to(7.5)
    assert stand.told(two) == [("assign", (0,))]
    # A classic client counts the time without an answer itself.
    assert stand.told(one) == ([] if protocol == "848" else [("lost", (0,))])
    stand.to(10.0)
    assert stand.told(one) == ([("lost", (0,))] if protocol == "848" else [])
    stand.to(12.0)
    assert len([owner for owner in stand.owners() if owner is not None]) == 1


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_connection_that_comes_back_in_time_keeps_the_session(protocol: str) -> None:
    stand = two_members(protocol)
    one, two = stand.broker.coordinator.clients
    stand.to(1.0)
    stand.broker.isolate("one", 3.0, 1.0)
    stand.broker.isolate("one", 6.5, 2.0)  # the later end counts
    stand.to(20.0)
    assert (stand.told(one), stand.told(two), stand.owners()) == ([], [], ["one"])


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_process_that_stops_before_it_has_joined_runs_again(protocol: str) -> None:
    stand = Stand(1, 5, protocol=protocol)
    client = Client("one", lambda: stand.now)
    stand.broker.introduce(client)
    stand.broker.freeze("one", 3.0)
    stand.broker.isolate("one", 4.0, 0.0)
    stand.to(3.5)
    assert (client.running, client.isolated_since) == (True, 0.0)
    stand.to(4.0)
    assert client.isolated_since is None
    stand.broker.join(client, stand.now)
    assert stand.told(client) == [("assign", (0,))]
