"""A roster plans for its cohort, and reports members without a heartbeat."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math

import pytest

from lanes import SourceError
from lanes.cohort.leases import UnknownResult
from lanes.core.cohort.records import PLAN_KEY, PlanRecord, encode
from tests.cohort.desk import TTL, Desk, lines
from tests.cohort.members import virtual

# --- the plan


def test_a_plan_follows_the_newest_settings_weights_targets_and_drains() -> None:
    async def test() -> None:
        desk = Desk(partitions=6)
        mine = await desk.joined("a")
        desk.heartbeat("b", weight=2)
        await mine.look()
        assert sorted(map(str, desk.servers.plan().owners)) == ["a"] * 2 + ["b"] * 4
        desk.heartbeat("b", consumer_target=1)
        await mine.look()
        assert sorted(map(str, desk.servers.plan().owners)) == ["a"] * 5 + ["b"]
        assert not desk.servers.plan().under_provisioned
        desk.heartbeat("b", session=2000, default_consumer_target=1)
        await mine.look()
        assert (desk.servers.plan().default_consumer_target, mine.under_provisioned) == (1, True)
        desk.heartbeat("b", session=2000, active_members=1)
        await mine.look()
        assert (desk.servers.plan().active_members, len({*desk.servers.plan().owners})) == (1, 1)
        desk.heartbeat("b", session=2000, rules=0)
        desk.servers.drain("a")
        await mine.look()
        assert desk.servers.plan().owners == ("b",) * 6
        assert (desk.servers.plan().rules, mine.rules) == (0, 0)
        desk.heartbeat("b", weight=0)
        with pytest.raises(
            SourceError, match=r"^cohort 'orders' has a wrong heartbeat in its bucket: the weight of .*'b'"
        ):
            await mine.look()

    virtual(test)


def test_a_plan_without_a_change_keeps_its_number_and_is_not_written() -> None:
    async def test() -> None:
        desk = Desk()
        mine = await desk.joined("a")
        revision = desk.servers.revision()
        await mine.look()
        assert desk.servers.revision() == revision
        desk.heartbeat("b")
        await mine.look()
        assert (desk.servers.plan().generation, mine.plan) == (2, desk.servers.plan())
        # Another member has written a later plan.
        desk.write(PLAN_KEY, encode(dataclasses.replace(desk.servers.plan(), generation=8)))
        desk.servers.bucket.drop("m.b", desk.clock())
        await mine.look()
        assert (desk.servers.plan().generation, desk.servers.plan().owners) == (9, ("a", "a"))

    virtual(test)


def test_a_plan_that_is_written_again_after_the_loss_of_the_bucket_is_not_older() -> None:
    async def test() -> None:
        desk = Desk()
        mine = await desk.joined("a")
        desk.write(PLAN_KEY, encode(dataclasses.replace(desk.servers.plan(), generation=5)))
        await mine.look()
        # A member that knows no plan begins to count from 1.
        desk.write(PLAN_KEY, encode(dataclasses.replace(desk.servers.plan(), generation=1)))
        await mine.look()
        assert desk.servers.plan().generation == 6

    virtual(test)


def test_a_plan_of_another_number_of_partitions_is_refused() -> None:
    async def test() -> None:
        desk = Desk()
        mine = await desk.joined("a")
        wrong = dataclasses.replace(desk.servers.plan(), owners=("a", "a", "a"))
        desk.write(PLAN_KEY, encode(wrong))
        with pytest.raises(SourceError, match=r"^the key 'plan' of cohort 'orders' plans 3 partitions, not 2; delete"):
            await mine.look()
        desk.write(PLAN_KEY, b"{}")
        with pytest.raises(SourceError, match=r"^the key 'plan' of the cohort's bucket"):
            await mine.look()
        assert isinstance(mine.plan, PlanRecord)

    virtual(test)


# --- members without a heartbeat


@pytest.mark.parametrize("partitions", [10, 11])
def test_a_takeover_after_a_crash_is_logged_with_at_most_ten_partitions(
    partitions: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        desk = Desk(partitions=partitions)
        mine = desk.roster("a")
        await mine.set_up()
        desk.heartbeat("x", session=2000, active_members=1)
        before = PlanRecord(1, ("x",) * partitions, ("x",), (), active_members=1, too_few_members=False)
        desk.write(PLAN_KEY, encode(before))
        await mine.join()
        await mine.look()
        assert desk.servers.plan().owners == before.owners
        await asyncio.sleep(TTL - 0.5)
        await mine.beat()
        await asyncio.sleep(0.8)
        await mine.look()
        assert desk.servers.plan().owners == ("a",) * partitions
        await mine.look()

    with caplog.at_level(logging.INFO, logger="lanes"):
        virtual(test)
    more = " and 1 more" if partitions == 11 else ""
    assert lines(caplog) == [
        (
            "cohort orders, member a: member x sent no heartbeat for 6 s, as after a crash; this member takes over "
            f"{partitions} of its {partitions} partition(s): 0, 1, 2, 3, 4, 5, 6, 7, 8, 9{more}"
        )
    ]


def test_a_member_that_takes_over_nothing_after_a_crash_logs_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        desk = Desk(partitions=4)
        mine = await desk.joined("a")
        for name in ("b", "x"):
            desk.heartbeat(name)
        await mine.look()
        before = desk.servers.plan()
        (lost,) = [number for number, owner in enumerate(before.owners) if owner == "x"] or [0]
        await asyncio.sleep(TTL - 0.5)
        desk.heartbeat("b")
        await mine.beat()
        await asyncio.sleep(0.8)
        # Another member plans first, and takes the partition over.
        owners = tuple("b" if number == lost else owner for number, owner in enumerate(before.owners))
        desk.write(PLAN_KEY, encode(dataclasses.replace(before, owners=owners, members=("a", "b"), generation=9)))
        mine._believe_from = math.inf
        await mine.look()

    with caplog.at_level(logging.INFO, logger="lanes"):
        virtual(test)
    assert lines(caplog) == [
        (
            "cohort orders, member a: member x sent no heartbeat for 6 s, as after a crash; this member takes over "
            "none of its 1 partition(s)"
        )
    ]
    assert [record.levelno for record in caplog.records] == [logging.INFO]


@pytest.mark.parametrize("removed", [True, False])
def test_a_member_that_left_in_order_is_never_reported_as_crashed(
    removed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Even when its last heartbeat was old, and the plan without it is written late."""

    async def test() -> None:
        desk = Desk()
        mine = await desk.joined("a")
        desk.heartbeat("x")
        await mine.look()
        await asyncio.sleep(TTL - 0.5)
        await mine.beat()
        if removed:
            desk.write("m.x", b"", ttl=1.0)
        else:
            desk.servers.bucket.drop("m.x", desk.clock())
        desk.stores[0].before[PLAN_KEY] = lambda: UnknownResult("no answer")
        with pytest.raises(UnknownResult):
            await mine.look()
        await mine.beat()
        await asyncio.sleep(TTL - 0.5)
        await mine.look()
        assert desk.servers.plan().members == ("a",)

    with caplog.at_level(logging.INFO, logger="lanes"):
        virtual(test)
    assert len(lines(caplog)) == (not removed)


def test_a_heartbeat_that_returns_is_no_crash(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        desk = Desk()
        mine = await desk.joined("a")
        desk.heartbeat("x")
        await mine.look()
        await asyncio.sleep(TTL - 0.5)
        await mine.beat()
        desk.servers.bucket.drop("m.x", desk.clock())
        desk.stores[0].before[PLAN_KEY] = lambda: UnknownResult("no answer")
        with pytest.raises(UnknownResult):
            await mine.look()
        desk.heartbeat("x")
        await mine.look()
        desk.write("m.x", b"", ttl=1.0)
        await mine.look()
        assert desk.servers.plan().members == ("a",)

    with caplog.at_level(logging.INFO, logger="lanes"):
        virtual(test)
    assert lines(caplog) == []


def test_a_member_looks_at_the_heartbeats_with_its_own_heartbeat_or_soon_after_an_overdue_one() -> None:
    async def test() -> None:
        desk = Desk()
        mine = await desk.joined("a")
        assert mine.look_at == mine.beat_at == desk.clock() + TTL / 3
        assert mine.heard("m.x"), "a new member"
        assert not mine.heard("m.a"), "the own heartbeat"
        desk.heartbeat("x")
        await mine.look()
        seen = desk.clock()
        assert not mine.heard("m.x")
        mine.beat_at = math.inf
        assert mine.look_at == pytest.approx(seen + 2 / 3 * TTL + 0.25)
        await asyncio.sleep(3.0)
        mine.heard("m.x")
        assert mine.look_at == pytest.approx(seen + 3.0 + 2 / 3 * TTL + 0.25), "a hint counts as a heartbeat"
        await asyncio.sleep(TTL)
        assert mine.look_at == pytest.approx(desk.clock() + 0.25), "no busy loop for an overdue heartbeat"
        # A look without a new revision is no sign of life, and a new revision is one.
        await asyncio.sleep(0.5)
        desk.heartbeat("x")
        await mine.look()
        mine.beat_at = math.inf
        assert mine.look_at == pytest.approx(desk.clock() + 2 / 3 * TTL + 0.25)

    virtual(test)
