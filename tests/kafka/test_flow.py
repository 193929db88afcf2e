"""What a stuck key, a full process and an absent broker hold up on a real broker, and what goes on."""

from __future__ import annotations

import threading
from collections import Counter
from functools import partial
from typing import Any

import anyio
import pytest
from anyio.to_thread import run_sync
from confluent_kafka import TopicPartition

import lanes
from lanes.observe import health
from lanes_kafka.client import prefetch, thread
from lanes_kafka.client.commits import Commit, TopicIdCheck
from lanes_kafka.client.mailbox import Demand
from tests.conftest import KafkaFactory
from tests.kafka import members as group_members
from tests.kafka.conftest import MakeTopic
from tests.kafka.members import PROTOCOLS, Client, Story, Work, group
from tests.kafka.workload import produce, until

pytestmark = pytest.mark.anyio

STUCK = b"7"
OUTAGE = {"reconnect_backoff_ms": 50, "reconnect_backoff_max_ms": 200}


def stalled(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was said of partitions that stand at ``max_ahead``."""
    return [record.getMessage() for record in caplog.records if "max_ahead" in record.getMessage()]


# --- a key that is stuck


async def test_stuck_key_does_not_stop_others(topic: MakeTopic) -> None:
    events = topic(2)
    sent = produce(events, 1_000, keys=20)
    behind = [one for one in sent if one.key == STUCK]
    (stuck_in,) = {one.partition for one in behind}
    work = Work(Story())
    work.hold(STUCK)
    async with group(events, "cooperative", work) as members:
        one = members.start("one", settings=lanes.Settings(commit_interval=0.0))
        await until(lambda: len(work.ended) == 1_000 - len(behind))
        await until(lambda: events.ends()[1 - stuck_in] in [each.position for each in work.story.of("commit")])
        # What lies below it in its own partition is committed by a commit of its own, which may come later.
        await until(
            lambda: behind[0].offset in [each.position for each in work.story.of("commit", None, stuck_in)],
        )
        # What has ended in the handler is collected a turn of the loop later.
        await until(lambda: one.consumer.status().in_flight == len(behind))
        # Nothing behind it has started, and nothing above it is committed.
        assert len(work.running) == one.consumer.status().running == 1
        assert max(each.position for each in work.story.of("commit", None, stuck_in)) == behind[0].offset
        work.let_go(STUCK)
        await until(lambda: len(work.ended) == 1_000)
    assert set(work.ended.values()) == {1} and work.violations == []
    assert members.committed() == events.ends()


async def test_max_ahead_names_the_blocker(
    topic: MakeTopic, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "STALLED_AFTER", 0.05)
    events = topic(2)
    for number in (0, 1):
        produce(events, 400, keys=[STUCK, b"1", b"2", b"3"] if number == 0 else [b"4", b"5"], partition=number)
    work = Work(Story())
    work.hold(STUCK)
    async with group(events, "848", work) as members:
        one = members.start("one", settings=lanes.Settings(max_ahead=100))
        await until(lambda: 400 in [each.position for each in work.story.of("commit", None, 1)])
        await until(lambda: any("until position 0 is finished" in said for said in stalled(caplog)))
        await one.polled(10)
        owned = one.consumer.status().partitions
        assert (owned[f"{events.name}/0"].ahead, owned[f"{events.name}/0"].ahead_reached) == (100, True)
        # Every fourth is stuck behind the first one.
        assert sum(position < 100 for number, position in work.ended if number == 0) == 75
        assert max(position for number, position in work.ended if number == 0) < 100
        assert any(f"{events.name}/0 has reached max_ahead=100" in reason for reason in one.consumer.health().reasons)
        work.let_go(STUCK)
        await until(lambda: len(work.ended) == 800)
    # A broker that takes its time may be named, too.
    (warning,) = [said for said in stalled(caplog) if "until position 0 is finished" in said]
    assert f"{events.name}/0: max_ahead=100 is reached" in warning
    assert set(work.ended.values()) == {1} and work.violations == []


@pytest.mark.parametrize(("max_ahead", "count"), [(20, 600), (1_000, 6_000)])
async def test_commits_that_lag_are_asked_for_and_not_complained_of(
    max_ahead: int, count: int, topic: MakeTopic, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "REWIND_AFTER", 3_600.0)
    monkeypatch.setattr(thread, "PAUSE_AFTER", 3_600.0)
    # A broker may take more than a second for one commit; one that is not asked for never comes.
    monkeypatch.setattr(health, "STALLED_AFTER", 30.0)
    events = topic(3)
    work = Work(Story())
    async with group(events, "848", work) as members:
        # So many can be done only where no commit waits for the interval.
        one = members.start("one", settings=lanes.Settings(max_ahead=max_ahead, commit_interval=3_600.0))
        # The last one is always ready for more: not all of what is owned stands at max_ahead.
        await until(lambda: len(one.consumer.status().partitions) == 3)
        for number in (0, 1):
            await run_sync(partial(produce, events, count // 2, keys=100, partition=number))
        await until(lambda: len(work.ended) == count)
        # A moment costs the client nothing of what it has fetched.
        assert one.client.pauses == 0
    assert stalled(caplog) == []
    assert members.committed() == events.ends()


# --- what is asked of the client


class Asked(Client):
    """Notes how long it is asked to wait and for how many, and after how many polls it is paused and resumed."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.asked: list[tuple[int, float]] = []
        self.told: list[tuple[str, int]] = []

    def consume(self, num_messages: int = 1, timeout: float = -1) -> Any:
        self.asked.append((num_messages, timeout))
        return super().consume(num_messages, timeout)

    def pause(self, partitions: list[TopicPartition]) -> None:
        self.told.append(("pause", self.polls))
        super().pause(partitions)

    def resume(self, partitions: list[TopicPartition]) -> None:
        self.told.append(("resume", self.polls))
        super().resume(partitions)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_members, "Client", Asked)


@pytest.mark.parametrize("backlog", [0, 10_000], ids=["idle", "busy"])
async def test_pause_command_is_served_between_consumes(
    backlog: int, topic: MakeTopic, asked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = topic()
    produce(events, 1 + backlog)
    work = Work(Story())
    async with group(events, "cooperative", work) as members:
        one = members.start("one")
        await until(lambda: bool(work.ended))
        client = one.client
        assert isinstance(client, Asked)
        polls: dict[bool, int] = {}
        asking = thread.ClientThread.demand

        def demand(self: thread.ClientThread, demand: Demand) -> None:
            """Note after how many polls the loop asks for it: it may be late itself."""
            polls.setdefault(bool(demand.paused), client.polls)
            asking(self, demand)

        monkeypatch.setattr(thread.ClientThread, "demand", demand)
        for command, call in ((one.consumer.pause, "pause"), (one.consumer.resume, "resume")):
            before = len(client.told)
            polls.clear()
            command()
            await until(lambda: len(client.told) > before)  # noqa: B023
            what, after = client.told[before]
            # One that is under way, with the second half of its batch, and one that has just begun.
            assert what == call and after - polls[call == "pause"] <= 4
        produce(events, 1)
        await until(lambda: len(work.ended) == 2 + backlog)
        # Whoever asks waits for one call of the client at most.
        assert max(timeout for _, timeout in client.asked) <= thread.POLL == 0.02
        assert max(count for count, _ in client.asked) <= thread.BATCH == 1_000
    assert set(work.ended.values()) == {1}


async def test_a_full_process_is_paused_once_and_not_for_a_moment(topic: MakeTopic, asked: None) -> None:
    """Room that comes and goes many times a second costs no pause: that would throw away what was fetched."""
    events = topic()
    produce(events, 500, keys=50)
    work = Work(Story())
    async with group(events, "cooperative", work) as members:
        one = members.start("one", settings=lanes.Settings(concurrency=10, max_in_flight=10))
        await until(lambda: len(work.ended) == 500)
        client = one.client
        assert isinstance(client, Asked)
        assert [what for what, _ in client.told] == ["resume"]
        work.hold(*[b"%d" % number for number in range(50)])
        produce(events, 50, keys=50)
        await until(lambda: len(client.told) > 1)
        # It is polled on, for the broker's sake, and is given nothing.
        await one.polled(20)
        assert [what for what, _ in client.told] == ["resume", "pause"]
        work.let_go(*[b"%d" % number for number in range(50)])
        await until(lambda: len(work.ended) == 550)
        assert [what for what, _ in client.told] == ["resume", "pause", "resume"]
    assert work.violations == [] and set(work.ended.values()) == {1}


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("short_polls")
@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_poll_goes_on_while_saturated(protocol: str, topic: MakeTopic) -> None:
    events = topic(2)
    produce(events, 200, keys=20)
    held = [b"%d" % number for number in range(20)]
    story = Story()
    work = Work(story)
    work.hold(*held)
    interval = 6.0
    async with group(events, protocol, work, max_poll_interval_ms=int(interval * 1000)) as members:
        settings = lanes.Settings(concurrency=10, max_in_flight=20, drain_timeout=1.0)
        one = members.start("one", settings=settings)
        # All that can: they are ten, or there is nobody left to start.
        await until(lambda: len(work.running) == 10 or (bool(work.running) and one.consumer.status().ready == 0))
        await until(lambda: not one.consumer.status().taking)
        running = len(work.running)
        # The broker's own deadline, three times over.
        await anyio.sleep(3 * interval)
        members.look()
        assert story.of("lost") == [] and len(story.of("assigned")) == 2 and len(work.running) == running
        work.let_go(*held)
        await until(lambda: len(work.ended) == 200)
        await one.consumer.drain()
    assert set(work.ended.values()) == {1} and work.violations == []
    assert members.committed() == events.ends()


# --- a broker that is gone


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("protocol", ["cooperative", "848"])
async def test_broker_restart_keeps_order(protocol: str, fresh_kafka: KafkaFactory, topic: MakeTopic) -> None:
    server = fresh_kafka(warm=True)
    events = topic(4, on=server)
    produce(events, 2_000, keys=50)
    story = Story()
    work = Work(story, lambda message: 0.02)
    async with group(events, protocol, work, **OUTAGE) as members:
        one = members.start("one", settings=lanes.Settings(concurrency=10, max_in_flight=100, max_ahead=100))
        for ended in (200, 1_000):
            await until(lambda: len(work.ended) >= ended)  # noqa: B023
            members.look()
            await run_sync(server.kill)
            await one.polled(20)
            await run_sync(server.start)
        await run_sync(produce, events, 500)
        await until(lambda: len(work.ended) == 2_500)
        await until(lambda: sum(max(c.position for c in story.of("commit", None, n)) for n in range(4)) == 2_500)
    assert work.violations == []
    # Only a session that ended meanwhile repeats anything, and that is what was not committed.
    assert sum(work.ended.values()) - 2_500 <= 100 * len(story.of("lost"))
    assert events.committed(members.id) == events.ends()


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("protocol", ["cooperative", "848"])
async def test_broker_outage_never_blocks_the_loop(
    protocol: str, fresh_kafka: KafkaFactory, topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    due: list[Commit] = []
    commit = TopicIdCheck.commit

    def noted(self: TopicIdCheck, client: Any, asked: Commit, *, until: float | None) -> None:
        due.append(asked)
        commit(self, client, asked, until=until)

    monkeypatch.setattr(TopicIdCheck, "commit", noted)
    server = fresh_kafka(warm=True)
    events = topic(2, on=server)
    produce(events, 200, keys=20)
    story = Story()
    work = Work(story)
    work.hold(*[b"%d" % number for number in range(20)])
    async with group(events, protocol, work, **OUTAGE) as members:
        one = members.start("one", settings=lanes.Settings(commit_interval=0.0))
        await until(lambda: len(work.running) == 20)
        # It hangs: whoever asked it something waits.
        server.pause()
        before = len(due)
        work.let_go(*[b"%d" % number for number in range(20)])
        await until(lambda: len(work.ended) == 200 and len(due) > before)
        # With a commit under way the client is polled on, and the loop turns.
        await one.polled(50)
        assert one.client.inside in (None, "consume") and one.consumer.status().in_flight == 0
        one.consumer.pause()
        await one.polled(50)
        one.consumer.resume()
        server.resume()
        await until(lambda: sum(max(c.position for c in story.of("commit", None, n)) for n in range(2)) == 200)
    # The loop has never called the client itself.
    assert one.client.strangers == set() and one.client.thread != threading.get_ident()
    assert work.violations == []
    assert members.committed() == events.ends()
    assert Counter(work.ended.values()) == {1: 200}
