"""A membership writes its heartbeat, answers its source, and acts at once after a stop or a hint."""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import Any, Final

import anyio
import pytest

from lanes import ConfigError
from lanes.cohort.leases import UnknownResult
from lanes.cohort.membership import CohortSettings, Membership
from lanes.core.cohort.plan import PLAN_RULES
from lanes.core.cohort.records import CONFIG_KEY, PLAN_KEY, CohortConfig, Heartbeat, PlanRecord, decode, encode
from memsource.jetstream.epoch_consumers import Durable
from memsource.jetstream.lease_store import MemoryLeaseStore
from memsource.sim.loop.virtual import until
from tests.cohort.members import CONFIG, Servers, config_of, once, serve, virtual

ALL: Final[dict[str, Any]] = {
    "weight": 3,
    "active_members": 2,
    "consumer_target": 4,
    "default_consumer_target": 5,
}


def test_a_heartbeat_has_all_settings_of_its_member() -> None:
    async def test() -> None:
        servers = Servers()
        await once(servers.member("a", lease=12.0, **ALL))
        found = decode(Heartbeat, "m.a", servers.bucket.read("m.a", servers.clock()).value or b"")
        assert found == dataclasses.replace(
            Heartbeat(nonce=found.nonce, session=1_000_000_000_000, lease=12, rules=PLAN_RULES, **ALL)
        )
        assert decode(CohortConfig, CONFIG_KEY, servers.bucket.read(CONFIG_KEY, 0.0).value or b"").lease == 12

    virtual(test)


def test_each_member_has_a_nonce_of_its_own() -> None:
    async def test() -> None:
        servers = Servers()
        members = [servers.member(name) for name in "ab"]
        nonces = [member._roster._heartbeat.nonce for member in members]
        assert len({*nonces}) == 2
        assert all(len(nonce) == 16 for nonce in nonces)

    virtual(test)


@pytest.mark.parametrize("name", ["", "a b", "a*", "ä", "a..b", "x" * 129])
def test_an_invalid_name_of_a_member_is_refused(name: str) -> None:
    async def test() -> None:
        with pytest.raises(ConfigError, match=r"^member='.*: .") as refused:
            Servers().member(name)
        assert isinstance(refused.value.__cause__, ValueError)

    virtual(test)


# --- answers to a source


@pytest.mark.parametrize(
    ("start", "first"),
    [("beginning", 0), ("7", 7), ("9" * 20, int("9" * 20)), ("9" * 21, 0), ("2026-11-23T10:00:00Z", 0), ("", 0)],
)
def test_only_a_start_at_a_sequence_has_a_known_first_sequence(start: str, first: int) -> None:
    async def test() -> None:
        assert Servers().member("a", config_of(start=start)).first == first

    virtual(test)


def test_a_member_without_a_plan_is_no_standby() -> None:
    async def test() -> None:
        made = Servers().member("a")
        assert (made.generation, made.planned, made.standby) == (0, 0, False)
        assert (made.under_provisioned, made.target_honoured, made.joined.is_set()) == (False, False, False)
        assert (made.member, made.retention, made.take()) == ("a", "limits", [])
        assert repr(made) == "<Membership of a: 0 of 2 partitions>"
        assert [made.deadline(number) for number in (0, 1)] == [-math.inf, -math.inf]
        assert made.settings == CohortSettings(lease=4.0)

    virtual(test)


@pytest.mark.parametrize("rules", [0, 1])
@pytest.mark.parametrize("owner", ["a", "b"])
def test_a_membership_takes_generation_share_and_standby_from_its_plan(owner: str, rules: int) -> None:
    async def test() -> None:
        made = Servers().member("a")
        made._roster.plan = PlanRecord(5, (owner, owner), ("a", "b"), (), None, False, True, rules=rules)
        assert (made.generation, made.planned, made.standby) == (5, 2 * (owner == "a"), owner == "b")
        assert (made.under_provisioned, made.target_honoured) == (True, rules == 1)

    virtual(test)


def test_a_member_owns_what_the_plan_gives_and_reports_each_event_once() -> None:
    async def test() -> None:
        servers = Servers()
        made = servers.member("a")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(made.run)
            assert await until(lambda: min(made.deadline(0), made.deadline(1)) > 0, 5.0)
            assert repr(made) == "<Membership of a: 2 of 2 partitions>"
            assert sorted(number for number, _ in made.take()) == [0, 1]
            assert made.take() == []
            tasks.cancel_scope.cancel()

    virtual(test)


# --- at once


def test_a_stop_leaves_the_plan_at_once() -> None:
    """The other members plan without this member before its drain, and not only after its next heartbeat."""

    async def test() -> None:
        servers = Servers()
        made = servers.member("a")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(made.run)
            assert await until(lambda: min(made.deadline(0), made.deadline(1)) > 0, 5.0)
            tasks.start_soon(serve, servers.member("b"))
            assert await until(lambda: servers.plan().members == ("a", "b"), 5.0)
            made.stop()
            made.stop()
            await anyio.sleep(0.001)
            assert servers.bucket.read("m.a", servers.clock()).value == b""
            assert servers.plan().members == ("b",)
            tasks.cancel_scope.cancel()

    virtual(test)


def test_a_durable_of_a_lower_epoch_that_appears_late_is_deleted_after_the_next_heartbeat() -> None:
    async def test() -> None:
        servers = Servers()
        made = servers.member("a")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(made.run)
            assert await until(lambda: min(made.deadline(0), made.deadline(1)) > 0, 5.0)
            await anyio.sleep(1.0)
            late = Durable(1, 1, 0)
            servers.stream.create(late, servers.clock(), nonce="late", start=1)
            await anyio.sleep(made._roster.beat_at - servers.clock() - 0.01)
            assert late in servers.stream.names(1)
            await anyio.sleep(0.1)
            assert late not in servers.stream.names(1)
            assert len(servers.stream.names(1)) == len(servers.stream.names(0)) == 1
            tasks.cancel_scope.cancel()

    virtual(test)


@pytest.mark.parametrize(
    ("key", "reads"),
    [
        (PLAN_KEY, True),
        ("drain.b", True),
        ("m.b", True),
        ("m.a", False),
        ("s.1", False),
        (CONFIG_KEY, False),
        ("l.0", False),
        ("l.x", False),
        ("l.2", False),
        ("l.", False),
    ],
)
def test_a_hint_about_plan_drain_or_a_new_member_reads_the_plan_soon(key: str, reads: bool) -> None:
    async def test() -> None:
        servers = Servers()
        made = servers.member("a")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(made.run)
            assert await until(lambda: min(made.deadline(0), made.deadline(1)) > 0, 5.0)
            # Begin just after a heartbeat, so that no other read falls into the next moment.
            await anyio.sleep(made._roster.beat_at - servers.clock() + 0.01)
            before = servers.links["a"].reads
            made.hint(key)
            await anyio.sleep(0.001)
            assert (servers.links["a"].reads > before) == reads
            tasks.cancel_scope.cancel()

    virtual(test)


def test_a_hint_about_a_lease_reads_that_lease_soon() -> None:
    async def test() -> None:
        servers = Servers()
        holder, waiting = servers.member("a"), servers.member("b")
        asked: list[str] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(holder.run)
            assert await until(lambda: min(holder.deadline(0), holder.deadline(1)) > 0, 5.0)
            tasks.start_soon(waiting.run)
            assert await until(lambda: waiting.planned == 1, 10.0)
            await anyio.sleep(1.0)
            number = waiting._roster.plan.owners.index("b") if waiting._roster.plan is not None else 0
            read = servers.bucket.read

            def reading(key: str, now: float) -> Any:
                asked.append(key)
                return read(key, now)

            servers.bucket.read = reading  # type: ignore[method-assign]
            waiting.hint(f"l.{number}")
            await anyio.sleep(0.001)
            assert f"l.{number}" in asked
            servers.bucket.read = read  # type: ignore[method-assign]
            tasks.cancel_scope.cancel()

    virtual(test)


# --- failures


@pytest.mark.parametrize("key", [CONFIG_KEY, PLAN_KEY])
def test_a_request_without_an_answer_is_logged_and_repeated(key: str, caplog: pytest.LogCaptureFixture) -> None:
    class Deaf(MemoryLeaseStore):
        async def read(self, read: str) -> Any:
            if read == key and len(times) < 3:
                times.append(self.link.clock())
                raise UnknownResult("no answer yet")
            return await super().read(read)

    times: list[float] = []

    async def test() -> None:
        await once(Servers().member("a", make=Deaf))

    with caplog.at_level(logging.DEBUG, logger="lanes"):
        virtual(test)
    assert [later - times[0] for later in times] == [pytest.approx(0.1 * number) for number in range(3)]
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.DEBUG]
    assert lines == ["cohort orders, member a: no answer yet"] * 3


def test_a_membership_raises_only_the_first_error_of_its_tasks() -> None:
    class Broken(MemoryLeaseStore):
        async def read(self, read: str) -> Any:
            if read.startswith("l."):
                raise ConfigError(f"no {read}")
            return await super().read(read)

    async def test() -> None:
        with pytest.raises(ConfigError, match=r"^no l\.[01]$") as raised:
            await Servers().member("a", make=Broken).run()
        assert isinstance(raised.value.__cause__, BaseExceptionGroup)

    virtual(test)


@pytest.mark.parametrize(("overdue", "said"), [("keep", "the next owner waits"), ("force", "its handlers are")])
def test_an_overdue_drain_is_logged_with_what_follows_from_it(
    overdue: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        Servers().member("a", overdue=overdue, drain_within=2.5)._overdue(1)

    virtual(test)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(
        "cohort orders, member a: partition 1 must move to another member, and is not drained after 2.5 s; "
    )
    assert said in line


def test_a_plan_that_another_member_wrote_is_followed() -> None:
    async def test() -> None:
        servers = Servers()
        made: Membership = servers.member("a", CONFIG)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(made.run)
            assert await until(lambda: min(made.deadline(0), made.deadline(1)) > 0, 5.0)
            now, key = servers.clock(), "m.b"
            servers.bucket.write(key, encode(dataclasses.replace(made._roster._heartbeat, nonce="b")), now, revision=0)
            other = dataclasses.replace(servers.plan(), owners=("a", "b"), members=("a", "b"), generation=7)
            servers.bucket.write(PLAN_KEY, encode(other), now, revision=servers.revision())
            assert await until(lambda: made.generation == 7, 1.0)
            assert made.planned == 1
            tasks.cancel_scope.cancel()

    virtual(test)
