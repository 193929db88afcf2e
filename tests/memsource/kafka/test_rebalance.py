"""The simulated clients get the callbacks of their rebalance protocol when partitions move."""

from __future__ import annotations

import pytest

from tests.memsource.kafka.stand import Stand


def four(protocol: str) -> Stand:
    return Stand(4, 5, protocol=protocol)


def test_an_eager_rebalance_revokes_everything() -> None:
    stand = four("eager")
    one = stand.client("one")
    assert stand.told(one) == [("assign", (0, 1, 2, 3))]
    two = stand.client("two")
    assert stand.told(two) == []
    stand.to(0.5)
    assert stand.told(one) == [("revoke", (0, 1, 2, 3))]
    stand.release(one, 0, 1, 2)
    assert (stand.told(one), stand.told(two)) == ([], [])
    stand.release(one, 3)
    assert stand.told(one) == [("assign", (0, 1))]
    assert stand.told(two) == [("assign", (2, 3))]
    stand.broker.begin_close(two, stand.now)
    stand.broker.end_close(two, stand.now)
    stand.to(1.0)
    assert stand.told(one) == [("revoke", (0, 1))]
    stand.release(one, 0, 1)
    assert stand.told(one) == [("assign", (0, 1, 2, 3))]


@pytest.mark.parametrize("protocol", ["cooperative", "848"])
def test_cooperative_and_848_revoke_only_partitions_that_move(protocol: str) -> None:
    stand = four(protocol)
    one = stand.client("one")
    assert stand.told(one) == [("assign", (0, 1, 2, 3))]
    two = stand.client("two")
    stand.to(0.5)
    assert stand.told(one) == [("revoke", (2, 3))]
    assert stand.fetch(one, 0) == [0, 1, 2, 3, 4]
    assert stand.fetch(one, 2) == []
    stand.release(one, 2, 3)
    stand.to(1.0)
    assert stand.told(two) == [("assign", (2, 3))]
    stand.broker.begin_close(two, stand.now)
    stand.broker.end_close(two, stand.now)
    stand.to(1.5)
    assert stand.told(one) == [("assign", (2, 3))]


@pytest.mark.parametrize(("protocol", "at_once"), [("cooperative", True), ("848", False)])
def test_848_assigns_at_a_heartbeat_and_classic_at_once(protocol: str, at_once: bool) -> None:
    stand = Stand(2, protocol=protocol)
    one = stand.client("one")
    stand.poll(one)
    stand.to(0.1)
    two = stand.client("two")
    assert stand.told(one) == []
    assert stand.broker.next_at() == 0.5
    stand.to(0.5)
    assert stand.told(one) == [("revoke", (1,))]
    stand.release(one, 1)
    assert (stand.told(two) == [("assign", (1,))]) is at_once
    stand.to(0.6)
    assert (stand.told(two) == [("assign", (1,))]) is not at_once
    assert stand.broker.next_at() == float("inf")


@pytest.mark.parametrize("protocol", ["eager", "cooperative", "848"])
def test_every_rebalance_revokes_a_partition_of_a_member(protocol: str) -> None:
    for partitions in (1, 4):
        stand = Stand(partitions, protocol=protocol)
        assert not stand.broker.rebalance(stand.now)
        one = stand.client("one")
        stand.poll(one)
        before = stand.owners()
        assert stand.broker.rebalance(stand.now)
        stand.to(0.5)
        ((kind, asked),) = stand.told(one)
        assert kind == "revoke"
        assert (len(asked) == partitions) is (protocol == "eager" or partitions == 1)
        stand.release(one, *asked)
        stand.to(1.0)
        assert stand.told(one) == [("assign", asked)]
        assert stand.owners() == before
        assert len(stand.broker.group.members) == 1


def test_a_partition_cannot_be_released_without_a_revocation() -> None:
    stand = Stand(2)
    one = stand.client("one")
    stand.poll(one)
    stand.release(one, 0)
    assert (stand.told(one), stand.owners(), list(one.partitions)) == ([], ["one", "one"], [1])
    two = stand.client("two")
    stand.broker.group.revoke(0)
    stand.to(0.5)
    # Partition 0 is revoked now, and returns without a callback because the client has released it.
    assert stand.told(one) == [("revoke", (1,))]
    assert stand.told(two) == [("assign", (0,))]


@pytest.mark.parametrize(("protocol", "fenced"), [("eager", True), ("cooperative", False), ("848", True)])
def test_a_revoke_beyond_the_poll_interval_loses_the_partitions(protocol: str, fenced: bool) -> None:
    stand = Stand(2, 3, protocol=protocol, max_poll_interval=6.0)
    one = stand.client("one")
    stand.poll(one)
    two = stand.client("two")
    stand.to(0.5)
    ((_, asked),) = stand.told(one)
    kept = [number for number in (0, 1) if number not in asked]
    # The callback takes longer than a session; heartbeats continue.
    stand.to(6.4)
    assert (stand.commit(one, 1), stand.owners().count("one")) == (None, 2)
    stand.to(6.5)
    assert stand.commit(one, 2) == ("UNKNOWN_MEMBER_ID" if fenced else None)
    assert stand.owners().count("two") == (2 if fenced else 0)
    stand.to(7.0)
    assert stand.told(two) == ([("assign", (0, 1))] if fenced else [])
    # A partition that is being revoked gets no callback.
    assert stand.told(one) == ([("lost", tuple(kept))] if fenced else [])


@pytest.mark.parametrize("protocol", ["cooperative", "848"])
def test_an_owner_continues_until_a_heartbeat_brings_its_loss(protocol: str) -> None:
    stand = Stand(1, 4, protocol=protocol)
    one = stand.client("one")
    stand.poll(one)
    stand.fetch(one, messages=1)
    two = stand.client("two")
    stand.to(0.4)
    assert stand.broker.lose(0, 0.4)
    stand.to(0.45)
    assert (stand.told(one), stand.owners()) == ([], ["two"])
    assert (stand.fetch(one, messages=1), stand.commit(one, 2)) == ([1], None)
    stand.to(0.5)
    assert stand.told(one)[-1] == ("lost", (0,))
    assert stand.told(two) == [("assign", (0,))]
    assert stand.fetch(two) == [2, 3]


def test_the_only_member_gets_a_lost_partition_again_after_a_session() -> None:
    stand = Stand(1, 4)
    assert not stand.broker.lose(0, 0.0)
    one = stand.client("one")
    stand.poll(one)
    stand.broker.lose(0, 0.0)
    stand.to(5.9)
    assert (stand.told(one), stand.owners()) == ([("lost", (0,))], [None])
    stand.to(6.0)
    assert stand.told(one) == [("assign", (0,))]
