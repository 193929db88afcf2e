"""Members of a cohort join, leave, refuse wrong identities, and agree on a plan."""

from __future__ import annotations

import logging
import re
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import anyio
import pytest

from lanes import ConfigError, Retry, Settings, SourceError
from lanes.cohort.leases import ConsumerExists, Entry, UnknownResult
from lanes.cohort.membership import CohortSettings, Membership
from lanes.core.cohort.phases import IllegalInput
from lanes.core.cohort.records import (
    CONFIG_KEY,
    HIGHEST,
    LEASE_PREFIX,
    MEMBER_PREFIX,
    PLAN_KEY,
    Lease,
    decode,
    member_key,
    state_key,
)
from memsource.jetstream.epoch_consumers import Durable, MemoryEpochConsumers
from memsource.jetstream.lease_store import MemoryLeaseStore
from memsource.jetstream.link import Link
from memsource.sim.loop.virtual import until
from tests.cohort.members import CONFIG, Servers, config_of, never, once, serve, virtual
from tests.cohort.stage import Stage, staged

SERIAL: Final = Settings(order="serial", poison="block", drain_timeout=600.0, retry=Retry(attempts=2, backoff=0.1))


# --- named


def test_with_order_serial_only_one_of_two_members_gets_messages() -> None:
    async def scene(stage: Stage) -> None:
        before = stage.publish(0, 0, 0)
        joined = [stage.join() for _ in range(2)]
        await stage.world.settled()
        assert stage.ends() == before
        (winner,) = {each.member for each in stage.log}
        first, second = joined if winner == "w-1" else joined[::-1]
        assert (first[1].owned, second[1].owned) == ([0], [])
        assert second[0].consumer.ready
        more = stage.publish(0, 0)
        await stage.world.settled()
        assert {each.member for each in stage.log} == {winner}
        stage.stop(first[0])
        await stage.owns(second[1], 0)
        last = stage.publish(0)
        await stage.world.settled()
        assert stage.ends() == before + more + last
        assert stage.starts(second[0].name) == last

    staged(scene, settings=SERIAL)


def test_with_order_serial_a_cohort_refuses_the_policy_skip() -> None:
    with pytest.raises(ConfigError, match=r'order="serial" with poison="skip"'):
        Settings(order="serial", poison="skip")

    async def scene(stage: Stage) -> None:
        worker, _ = stage.join()
        await worker.ended.wait()

    with pytest.raises(ConfigError, match=r'order="serial".*partition'):
        staged(scene, settings=SERIAL, partitions=2)


def test_unblock_runs_the_blocked_message_again_and_keeps_its_attempts() -> None:
    async def scene(stage: Stage) -> None:
        worker, first = stage.join()
        await stage.owns(first, 0)
        head = stage.publish(0, key="one")
        behind = stage.publish(0, key="one")
        stage.failing.update(head)
        await stage.wait(lambda: worker.consumer.status().blocked, "its head is blocked")
        assert [(each.position, each.attempt) for each in stage.log] == [(head[0], attempt) for attempt in (1, 2, 3)]
        stage.failing.clear()
        with worker.acting():
            assert worker.consumer.unblock("one") == 1
        await stage.world.settled()
        starts = [(each.position, each.attempt) for each in stage.log if each.what == "start"]
        assert starts == [*[(head[0], attempt) for attempt in (1, 2, 3, 4)], (behind[0], 1)]

    staged(scene)


def test_the_same_member_id_in_two_cohorts_is_two_members() -> None:
    async def test() -> None:
        orders, billing = Servers(), Servers()
        async with anyio.create_task_group() as tasks:
            members = [each.member("a") for each in (orders, billing)]
            for member in members:
                tasks.start_soon(serve, member)
            assert await until(lambda: all(member.deadline(1) > 0 for member in members), 5.0)
            members[0].stop()
            assert await until(lambda: members[0].deadline(0) < 0, 5.0)
            await anyio.sleep(20.0)
            # The other process with this name does not know of the drain.
            assert [member.deadline(0) > orders.clock() for member in members] == [False, True]
            tasks.cancel_scope.cancel()

    virtual(test)


@pytest.mark.parametrize("crashes", [True, False])
def test_a_member_says_what_it_takes_over_from_a_crashed_member(
    crashes: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        servers = Servers(partitions=4)
        config = config_of(partitions=4)
        leaving, staying = servers.member("a", config), servers.member("b", config)
        life = anyio.CancelScope()

        async def live() -> None:
            with life:
                await serve(leaving)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(live)
            tasks.start_soon(serve, staying)
            assert await until(lambda: leaving.planned == staying.planned == 2, 20.0)
            await anyio.sleep(20.0)
            if crashes:
                life.cancel()
            else:
                leaving.stop()
            assert await until(lambda: staying.planned == 4, 20.0)
            await anyio.sleep(20.0)
            tasks.cancel_scope.cancel()

    virtual(test)
    # Python shows warnings without a configuration of the log. A clean stop is no fault.
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(told) == crashes
    if crashes:
        assert re.fullmatch(
            r"cohort orders, member b: member a sent no heartbeat for 4 s, as after a crash; this member takes over 2 "
            r"of its 2 partition\(s\): \d, \d",
            told[0],
        )


def test_the_highest_target_of_a_member_is_read_by_the_others() -> None:
    async def test() -> None:
        servers = Servers()
        highest: dict[str, Any] = dict.fromkeys(
            ("weight", "active_members", "consumer_target", "default_consumer_target"), HIGHEST
        )
        async with anyio.create_task_group() as tasks:
            for name in "ab":
                tasks.start_soon(serve, servers.member(name, **highest))
            assert await until(lambda: servers.bucket.read(PLAN_KEY, servers.clock()).value is not None, 10.0)
            assert await until(lambda: servers.plan().members == ("a", "b"), 10.0)
            assert Counter(servers.plan().owners) == {"a": 1, "b": 1}
            tasks.cancel_scope.cancel()

    virtual(test)


def test_a_member_without_a_name_for_the_cohort_logs_the_name_of_its_cohort(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        servers = Servers()
        async with anyio.create_task_group() as tasks:
            first = servers.member("a")
            tasks.start_soon(serve, first)
            await first.joined.wait()
            unnamed = servers.member("b", config=config_of(cohort=None), drain_within=0.5)
            tasks.start_soon(unnamed.run)
            assert await until(lambda: any(unnamed.deadline(number) > 0 for number in range(2)), 30.0)
            # Nobody answers the revoked partition, so its drain is overdue.
            servers.drain("b")
            assert await until(lambda: "is not drained" in caplog.text, 30.0)
            tasks.cancel_scope.cancel()

    virtual(test)
    assert "cohort orders, member b: partition " in caplog.text


def test_a_second_cohort_in_the_same_namespace_is_refused() -> None:
    async def test() -> None:
        servers = Servers()
        async with anyio.create_task_group() as tasks:
            first = servers.member("a")
            tasks.start_soon(first.run)
            await first.joined.wait()
            other = servers.member("b", config=config_of(cohort="billing"))
            with pytest.raises(ConfigError, match=r"'orders' has other settings.*'billing'.*another namespace"):
                await other.run()
            assert first.generation == servers.plan().generation == 1
            tasks.cancel_scope.cancel()

    virtual(test)


# --- joining


@pytest.mark.parametrize(
    ("field", "value"), [("partitions", 3), ("choice", "transform"), ("tokens", (2,)), ("incarnation", "2")]
)
def test_every_join_compares_the_cohort_record(field: str, value: Any) -> None:
    async def test() -> None:
        servers = Servers(partitions=3)
        await once(servers.member("a"))
        with pytest.raises(ConfigError, match=field):
            await servers.member("b", config=config_of(**{field: value})).run()

    virtual(test)


def test_the_member_id_of_a_live_member_is_refused() -> None:
    async def test() -> None:
        servers = Servers()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(servers.member("a").run)
            await until(lambda: servers.bucket.writes > 5, 5.0)
            began = servers.clock()
            with pytest.raises(ConfigError, match="member id 'a' is used by another live process of cohort 'orders'"):
                await servers.member("a").run()
            # The refused process sees the next heartbeat of the live process.
            assert servers.clock() - began <= 4.0 / 3 + 0.5
            tasks.cancel_scope.cancel()

    virtual(test)


def test_the_member_id_of_a_dead_member_is_free_after_its_heartbeat() -> None:
    async def test() -> None:
        servers = Servers()
        async with anyio.create_task_group() as tasks:
            first = servers.member("a")
            tasks.start_soon(first.run)
            assert await until(lambda: first.deadline(0) > 0, 5.0)
            tasks.cancel_scope.cancel()
        began = servers.clock()
        async with anyio.create_task_group() as tasks:
            second = servers.member("a")
            tasks.start_soon(second.run)
            assert await until(lambda: second.deadline(0) > 0 and second.deadline(1) > 0, 10.0)
            assert 2.0 < servers.clock() - began < 8.0
            tasks.cancel_scope.cancel()

    virtual(test)


def test_a_member_whose_id_was_taken_stops() -> None:
    async def test() -> None:
        servers = Servers()
        first, second = servers.member("a"), servers.member("a")
        async with anyio.create_task_group() as tasks:
            # The heartbeat of the first process is lost, and another process writes one earlier.
            tasks.start_soon(_refused, first)
            await first.joined.wait()
            servers.bucket.drop(member_key("a"), servers.clock())
            tasks.start_soon(second.run)
            await anyio.sleep(30.0)
            assert second.deadline(0) > servers.clock()
            tasks.cancel_scope.cancel()

    virtual(test)


async def _refused(member: Membership) -> None:
    with pytest.raises(ConfigError, match="member id 'a' is used by another live process"):
        await member.run()


def test_the_first_set_up_writes_the_state_and_a_lost_bucket_gets_none() -> None:
    async def test() -> None:
        servers = Servers()
        await once(servers.member("a"))
        states = [servers.bucket.read(state_key(partition), servers.clock()).value for partition in (0, 1)]
        assert all(states)
        servers.bucket.lose(servers.clock())
        async with anyio.create_task_group() as tasks:
            second = servers.member("b")
            tasks.start_soon(second.run)
            await second.joined.wait()
            began = servers.clock()
            assert servers.bucket.read(CONFIG_KEY, began).value
            assert not servers.bucket.read(state_key(0), began).value
            assert await until(lambda: second.deadline(0) > 0, 20.0)
            # An owner may trust a lease that the lost bucket had.
            assert servers.clock() - began >= 4.0 + 0.5
            tasks.cancel_scope.cancel()

    virtual(test)


def test_a_foreign_durable_on_a_work_queue_is_refused() -> None:
    class Foreign(MemoryEpochConsumers):
        async def create(self, partition: int, epoch: int, sub: int, *, nonce: str, start: int | None) -> None:
            self.stream.create(Durable(partition, epoch, sub), 0.0, nonce=nonce, start=start)

        async def found(self, partition: int) -> Any:
            return [], 1

    async def test() -> None:
        servers = Servers(retention="workqueue")
        servers.stream.create(Durable(1, 7, 0), 0.0, nonce="x", start=None)
        way = Link(servers.clock, never)
        member = Membership(
            MemoryLeaseStore(servers.bucket, way),
            Foreign(servers.stream, way),
            CONFIG,
            member="a",
            changed=lambda: None,
            clock=servers.clock,
        )
        with pytest.raises(ConfigError, match="partition 1 cannot have a durable, because another durable is in "):
            await member.run()

    virtual(test)


@pytest.mark.parametrize("gone", [1, 2])
def test_a_durable_that_a_second_listing_no_longer_has_is_not_foreign(gone: int) -> None:
    """A new owner on a work queue deletes the old durable before it creates a new durable."""

    class Moving(MemoryEpochConsumers):
        async def create(self, partition: int, epoch: int, sub: int, *, nonce: str, start: int | None) -> None:
            if partition == 1 and len(refused) < gone:
                refused.append(partition)
                raise ConsumerExists("it exists", nonce="of somebody")
            await super().create(partition, epoch, sub, nonce=nonce, start=start)

    async def test() -> None:
        servers = Servers(retention="workqueue")
        member = servers.member("a", config_of(retention="workqueue"), consumers=Moving)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(member.run)
            assert await until(lambda: min(member.deadline(0), member.deadline(1)) > 0, 5.0)
            tasks.cancel_scope.cancel()

    refused = list[int]()
    virtual(test)
    assert len(refused) == gone


# --- leaving


def test_a_member_that_stops_during_its_join_or_an_acquisition_still_leaves_in_order() -> None:
    async def test() -> None:
        for steps in range(80):
            servers = Servers()
            member = servers.member("a")
            with anyio.fail_after(10.0):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(serve, member)
                    for _ in range(steps):
                        await anyio.lowlevel.checkpoint()
                    member.stop()
            now = servers.clock()
            assert not servers.bucket.read(member_key("a"), now).value
            leases = servers.bucket.entries(LEASE_PREFIX, now).items()
            assert all(decode(Lease, key, entry.value or b"").released for key, entry in leases)

    virtual(test)


# --- the plan


def test_the_generation_of_a_plan_rises_only_with_a_change() -> None:
    async def test() -> None:
        servers = Servers()
        async with anyio.create_task_group() as tasks:
            first, second = servers.member("a"), servers.member("b")
            tasks.start_soon(first.run)
            await first.joined.wait()
            assert servers.plan().generation == 1
            await anyio.sleep(30.0)
            assert servers.plan().generation == 1
            tasks.start_soon(second.run)
            await second.joined.wait()
            assert servers.plan().generation == 2
            assert sorted(map(str, servers.plan().owners)) == ["a", "b"]
            # The bucket is lost, and the members continue with the last known plan.
            servers.bucket.lose(servers.clock())
            await anyio.sleep(30.0)
            assert (servers.plan().generation, set(servers.plan().members)) == (2, {"a", "b"})
            tasks.cancel_scope.cancel()

    virtual(test)


def test_a_plan_that_could_not_be_written_does_not_raise_the_generation() -> None:
    class Deaf(MemoryLeaseStore):
        async def write(self, key: str, *args: Any, **kwargs: Any) -> int:
            if key == PLAN_KEY and len(tried) < 5:
                tried.append(key)
                raise UnknownResult("no answer")
            return await super().write(key, *args, **kwargs)

    tried: list[str] = []

    async def test() -> None:
        servers = Servers()
        await once(servers.member("a", make=Deaf))
        assert len(tried) == 5
        assert servers.plan().generation == 1

    virtual(test)


def test_a_plan_from_old_heartbeats_does_not_replace_a_newer_plan() -> None:
    class Slow(MemoryLeaseStore):
        async def entries(self, prefix: str) -> Mapping[str, Entry]:
            found = await super().entries(prefix)
            if prefix == MEMBER_PREFIX and slow:
                await anyio.sleep(1.0)
            return found

    slow: list[None] = []

    async def test() -> None:
        servers = Servers()
        async with anyio.create_task_group() as tasks:
            first = servers.member("a", make=Slow)
            tasks.start_soon(first.run)
            await first.joined.wait()
            slow.append(None)
            # Another member joins and writes a plan while the first member reads the bucket.
            await until(lambda: first.deadline(0) > 0, 5.0)
            first.hint(PLAN_KEY)
            await anyio.sleep(0.5)
            second = servers.member("b")
            tasks.start_soon(second.run)
            await second.joined.wait()
            assert (servers.plan().generation, servers.plan().members) == (2, ("a", "b"))
            await anyio.sleep(20.0)
            assert (servers.plan().generation, servers.plan().members) == (2, ("a", "b"))
            tasks.cancel_scope.cancel()

    virtual(test)


@pytest.mark.parametrize(("key", "said"), [(PLAN_KEY, "'plan'"), (member_key("x"), "'m.x'"), (CONFIG_KEY, "'config'")])
def test_a_foreign_entry_stops_the_member_and_is_named(key: str, said: str) -> None:
    async def test() -> None:
        servers = Servers()
        servers.bucket.write(key, b"\xff nonsense", 0.0, revision=0)
        with pytest.raises(SourceError, match=f"the key {said} of the cohort's bucket holds"):
            await servers.member("a").run()

    virtual(test)


def test_a_bug_in_a_lease_machine_is_not_reported_as_a_foreign_entry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def illegal(*given: object) -> None:
        raise IllegalInput("a bug of lanes")

    monkeypatch.setattr("lanes.core.cohort.lease_machine.LeaseMachine.apply", illegal)

    async def test() -> None:
        with pytest.raises(IllegalInput, match="a bug of lanes"):
            await Servers().member("a").run()

    virtual(test)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lease": -1}, "lease=-1: must be whole seconds, 3 or more$"),
        ({"lease": 2.0}, r"lease=2\.0: must be whole seconds, 3 or more$"),
        ({"lease": "10"}, "lease='10': must be whole seconds, 3 or more, not a str"),
        ({"lease": True}, "lease=True: must be whole seconds, 3 or more, not a bool"),
        ({"lease": 3.5}, r"lease=3\.5: must be whole seconds, 3 or more$"),
        ({"lease": float("inf")}, "lease=inf"),
        ({"weight": 0}, "weight=0: must be a whole number, 1 or more"),
        ({"active_members": 0}, "active_members=0: must be a whole number, 1 or more"),
        ({"consumer_target": 0}, "consumer_target=0: must be a whole number, 1 or more"),
        ({"consumer_target": 1.0}, "consumer_target=1.0: must be a whole number, 1 or more"),
        ({"default_consumer_target": -1}, "default_consumer_target=-1: must be a whole number, 1 or more"),
        # A heartbeat with a higher number would stop every member of the cohort.
        ({"weight": HIGHEST + 1}, "weight=9007199254740993: must be at most 9007199254740992, .*; use a lower number$"),
        ({"active_members": sys.maxsize}, "active_members=9223372036854775807: must be at most .*None for no limit"),
        ({"consumer_target": sys.maxsize}, "consumer_target=9223372036854775807: must be at most .* None for no limit"),
        ({"default_consumer_target": HIGHEST + 1}, "default_consumer_target=9007199254740993: must be at most "),
        ({"lease": 1e17}, "lease=100000000000000000: must be at most .*; use a lower number$"),
        ({"weight": None}, "weight=None: must be a whole number, 1 or more"),
        ({"drain_within": 0.0}, "drain_within=0.0: must be more than 0 seconds"),
        ({"drain_within": None}, "drain_within=None: must be a finite number"),
        ({"drain_within": "5"}, "drain_within='5': must be a finite number"),
        ({"drain_within": True}, "drain_within=True: must be a finite number"),
        ({"overdue": "never"}, 'overdue=\'never\' is unknown: use "keep" or "force"'),
    ],
)
def test_invalid_cohort_settings_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        CohortSettings(**settings)
