"""A roster sets a cohort up, joins, writes heartbeats and leaves."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
from typing import Any

import pytest

from lanes import ConfigError, SourceError
from lanes.cohort.leases import Conflict, ConsumerExists, EpochConsumer
from lanes.cohort.roster import margin_of, patience_of
from lanes.core.cohort.ledger import NOTHING
from lanes.core.cohort.plan import PLAN_RULES
from lanes.core.cohort.records import (
    CONFIG_KEY,
    PLAN_KEY,
    CohortConfig,
    Heartbeat,
    State,
    decode,
    drain_key,
    encode,
    state_key,
)
from memsource.jetstream.epoch_consumers import MemoryEpochConsumers
from tests.cohort.desk import MARGIN, TTL, Desk, lines
from tests.cohort.members import CONFIG, config_of, virtual

# --- times


def test_the_margin_and_the_patience_of_a_member_are_shares_of_its_lease() -> None:
    assert [margin_of(ttl) for ttl in (3, 6, 30)] == [0.5, 1.0, 5.0]
    assert [patience_of(ttl) for ttl in (3, 6, 30)] == [0.5, 1.0, 2.0]


# --- set-up


def test_the_first_member_of_a_cohort_writes_its_settings_states_and_durables() -> None:
    async def test() -> None:
        desk = Desk()
        first = desk.roster("a", start=7)
        assert (first.cohort, first.begun, first.plan, first.rules) == ("orders", "beginning", None, 0)
        assert repr(first) == "<Roster of a: no plan>"
        await first.set_up()
        assert decode(CohortConfig, CONFIG_KEY, desk.read(CONFIG_KEY) or b"") == CONFIG
        for partition in range(2):
            assert desk.read(state_key(partition)) == encode(State(0, NOTHING))
            found, _ = await first._consumers.found(partition)
            assert found == [EpochConsumer(partition, 0, 0, "", 6, 6)]
        assert await first._consumers.marked() is None, "only a work queue needs a mark"
        # Nothing to doubt: the first plan is written at once.
        await first.join()
        await first.look()
        assert desk.servers.plan().owners == ("a", "a")
        assert repr(first) == "<Roster of a: generation 1>"

    virtual(test)


def test_a_cohort_without_a_name_has_the_default_name_until_it_learns_another() -> None:
    async def test() -> None:
        desk = Desk()
        unnamed = desk.roster("a", config_of(cohort=None))
        assert unnamed.cohort == "default"
        await unnamed.set_up()
        other = desk.roster("b", config_of(cohort=None))
        await other.set_up()
        assert (unnamed.cohort, other.cohort) == ("default", "default")
        named = Desk()
        await named.roster("a").set_up()
        later = named.roster("b", config_of(cohort=None))
        await later.set_up()
        assert later.cohort == "orders"

    virtual(test)


@pytest.mark.parametrize("start", ["beginning", "next"])
def test_only_the_start_of_the_first_member_counts_and_another_start_is_logged(
    start: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        desk = Desk()
        await desk.roster("a").set_up()
        later = desk.roster("b", config_of(start=start))
        assert later.begun == start
        await later.set_up()
        assert later.begun == "beginning"

    with caplog.at_level(logging.INFO, logger="lanes"):
        virtual(test)
    assert lines(caplog) == [
        (
            "cohort orders: start=next is ignored, because the cohort was set up with beginning; the cohort continues "
            "from its position"
        )
    ] * (start != "beginning")


@pytest.mark.parametrize("known", ["durable", "mark"])
def test_a_cohort_whose_bucket_was_lost_gets_no_state_and_no_plan_at_once(known: str) -> None:
    async def test() -> None:
        desk = Desk(retention="workqueue")
        before = desk.roster("a")
        await before._consumers.mark()
        if known == "durable":
            await before._consumers.create(1, 5, 0, nonce="n", start=None)
        after = desk.roster("b")
        await after.set_up()
        assert [desk.read(state_key(partition)) for partition in (0, 1)] == [b"", b""]
        assert [len((await after._consumers.found(partition))[0]) for partition in (0, 1)] == [1, 1]
        await after.join()
        await after.look()
        assert desk.read(PLAN_KEY) is None, "other members need time for a new heartbeat"
        assert after.look_at == pytest.approx(desk.clock() + TTL / 3)
        await asyncio.sleep(TTL / 3 + 0.49)
        await after.look()
        assert desk.read(PLAN_KEY) is None
        await asyncio.sleep(0.02)
        await after.look()
        assert desk.servers.plan().owners == ("b", "b")

    virtual(test)


def test_a_work_queue_is_marked_by_every_member() -> None:
    async def test() -> None:
        desk = Desk(retention="workqueue")
        first = desk.roster("a")
        await first.set_up()
        assert await first._consumers.marked() == 6
        longer = desk.roster("b", ttl=30.0)
        await longer.set_up()
        assert await first._consumers.marked() == 30

    virtual(test)


def test_a_state_that_another_member_writes_during_the_set_up_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        desk = Desk()
        first = desk.roster("a")
        desk.write(state_key(1), encode(State(4, NOTHING)))
        desk.stores[0].before[state_key(0)] = lambda: desk.stores[0].before.update(
            {state_key(0): lambda: desk.write(state_key(0), encode(State(9, NOTHING)))}
        )
        await first.set_up()
        found = [decode(State, key, desk.read(key) or b"").epoch for key in map(state_key, range(2))]
        assert found == [9, 4]

    with caplog.at_level(logging.DEBUG, logger="lanes"):
        virtual(test)
    assert lines(caplog, logging.DEBUG) == ["cohort orders: s.0 was written by another member, or lost with its bucket"]


def test_a_foreign_durable_is_named_after_three_tries() -> None:
    class Foreign(MemoryEpochConsumers):
        async def create(self, *where: int, **about: Any) -> None:
            tried.append(about["nonce"])
            raise ConsumerExists("consumer S/other", nonce=None)

    tried: list[str] = []

    async def test() -> None:
        desk = Desk()
        began = desk.clock()
        said = (
            r"^cohort 'orders': partition 0 cannot have a durable, because another .* in the way \(consumer S/other\)"
        )
        with pytest.raises(ConfigError, match=said) as refused:
            await desk.roster("a", consumers=Foreign).set_up()
        assert isinstance(refused.value.__cause__, ConsumerExists)
        assert desk.clock() - began == pytest.approx(0.75)

    virtual(test)
    assert tried == [""] * 3


@pytest.mark.parametrize(("field", "value"), [("partitions", 3), ("tokens", (2,)), ("incarnation", "2")])
def test_a_member_with_another_configuration_is_refused(field: str, value: Any) -> None:
    async def test() -> None:
        desk = Desk()
        await desk.roster("a").set_up()
        with pytest.raises(ConfigError, match=field):
            await desk.roster("b", config_of(**{field: value})).set_up()

    virtual(test)


# --- heartbeats


def test_a_heartbeat_has_the_settings_of_its_member_and_expires() -> None:
    async def test() -> None:
        desk = Desk()
        about: dict[str, Any] = {"weight": 3, "active_members": 2, "consumer_target": 4, "default_consumer_target": 5}
        made = desk.roster("a", nonce="n", session=77, **about)
        assert made.beat_at == -math.inf
        await made.set_up()
        await made.join()
        assert decode(Heartbeat, "m.a", desk.read("m.a") or b"") == Heartbeat(
            nonce="n", session=77, lease=6, rules=PLAN_RULES, **about
        )
        assert made.beat_at == desk.clock() + TTL / 3
        await asyncio.sleep(3.0)
        await made.beat()
        assert made.beat_at == desk.clock() + TTL / 3
        await asyncio.sleep(TTL - 0.01)
        assert desk.read("m.a")
        await asyncio.sleep(0.3)
        assert desk.read("m.a") is None

    virtual(test)


@pytest.mark.parametrize("lease", [6, 12, None])
def test_a_process_waits_until_the_heartbeat_of_its_dead_predecessor_has_expired(lease: int | None) -> None:
    async def test() -> None:
        desk = Desk()
        again = desk.roster("a", nonce="again")
        await again.set_up()
        ttl = float(lease or TTL)
        made = Heartbeat(nonce="dead", weight=1, active_members=None, session=1, lease=lease)
        desk.write("m.a", encode(made), ttl=ttl)
        began = desk.clock()
        await again.join()
        assert ttl <= desk.clock() - began <= ttl + 0.5
        assert decode(Heartbeat, "m.a", desk.read("m.a") or b"").nonce == "again"

    virtual(test)


@pytest.mark.parametrize("lives", ["renews", "never expires"])
def test_the_name_of_a_live_process_is_refused(lives: str) -> None:
    async def test() -> None:
        desk = Desk()
        other = desk.roster("a", nonce="another process")
        await other.set_up()
        desk.write("m.a", encode(dataclasses.replace(other._heartbeat, lease=6)))
        began = desk.clock()

        async def renew() -> None:
            await asyncio.sleep(1.0)
            desk.write("m.a", encode(other._heartbeat), ttl=TTL)

        renewing = asyncio.create_task(renew()) if lives == "renews" else None
        with pytest.raises(ConfigError, match=r"^member id 'a' is used by another live process of cohort 'orders'"):
            await desk.roster("a", nonce="mine").join()
        wait = 1.0 if lives == "renews" else TTL + MARGIN
        assert desk.clock() - began == pytest.approx(wait, abs=0.26)
        assert renewing is None or renewing.done()

    virtual(test)


def test_a_member_whose_id_another_process_uses_ends_at_its_next_heartbeat() -> None:
    async def test() -> None:
        desk = Desk()
        mine = await desk.joined("a")
        desk.write("m.a", encode(dataclasses.replace(mine._heartbeat, nonce="another")), ttl=TTL)
        with pytest.raises(ConfigError, match=r"^member id 'a' is used by another"):
            await mine.beat()
        desk.write("m.a", b"nonsense")
        with pytest.raises(SourceError, match=r"^the key 'm.a' of the cohort's bucket"):
            await mine.beat()
        with pytest.raises(SourceError, match=r"^the key 'm.a' of the cohort's bucket"):
            await mine.leave()

    virtual(test)


@pytest.mark.parametrize(("after", "doubts"), [(1.0, True), (4.9, True), (5.1, False)])
def test_a_heartbeat_that_cannot_have_expired_shows_the_loss_of_the_bucket(after: float, doubts: bool) -> None:
    async def test() -> None:
        desk = Desk()
        mine = await desk.joined("a")
        await asyncio.sleep(after)
        desk.servers.bucket.drop("m.a", desk.clock())
        with pytest.raises(Conflict):
            await mine.beat()
        assert (mine._believe_from > desk.clock()) == doubts
        await mine.beat()
        assert desk.read("m.a"), "the revision of the next beat is known"
        assert mine.beat_at == desk.clock() + TTL / 3
        # Until the other members had time for a heartbeat, the plan is not changed.
        desk.heartbeat("b")
        await mine.look()
        assert (desk.servers.plan().members == ("a",)) == doubts
        if doubts:
            assert mine.look_at == pytest.approx(min(mine.beat_at, mine._believe_from))
            await asyncio.sleep(TTL / 3 + 0.5)
            await mine.look()
            assert desk.servers.plan().members == ("a", "b")

    virtual(test)


def test_a_member_whose_own_heartbeat_is_missing_writes_it_at_once() -> None:
    async def test() -> None:
        desk = Desk()
        mine = await desk.joined("a")
        desk.heartbeat("b")
        desk.servers.bucket.drop("m.a", desk.clock())
        await mine.look()
        assert mine.beat_at == mine.look_at == -math.inf
        assert desk.servers.plan().members == ("a",)

    virtual(test)


# --- leaving


def test_a_leaving_member_removes_its_records_and_plans_for_the_others() -> None:
    async def test() -> None:
        desk = Desk()
        mine = await desk.joined("a")
        desk.heartbeat("b")
        desk.servers.drain("a")
        await mine.leave()
        assert [desk.read("m.a"), desk.read(drain_key("a"))] == [b"", b""]
        assert (desk.servers.plan().owners, desk.servers.plan().members) == (("b", "b"), ("b",))
        generation = desk.servers.plan().generation
        await mine.leave()
        assert desk.servers.plan().generation == generation
        await asyncio.sleep(1.3)
        assert [desk.read("m.a"), desk.read(drain_key("a"))] == [None, None], "both expire after a second"

    virtual(test)


def test_a_leaving_member_leaves_the_heartbeat_of_another_process_and_the_last_plan() -> None:
    async def test() -> None:
        desk = Desk()
        mine = await desk.joined("a")
        other = encode(dataclasses.replace(mine._heartbeat, nonce="another"))
        desk.write("m.a", other, ttl=TTL)
        before = desk.servers.plan()
        await mine.leave()
        assert desk.read("m.a") == other
        assert desk.servers.plan() == before, "without another member there is nobody to plan for"

    virtual(test)
