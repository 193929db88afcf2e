"""Backpressure on a real broker: a stuck key, max_ahead, a full process and paused partitions."""

from __future__ import annotations

from functools import partial
from typing import Any

import anyio
import pytest
from anyio.to_thread import run_sync
from confluent_kafka import TopicPartition

import lanes
from lanes.core import flow
from lanes.observe import health
from lanes_kafka.client import prefetch, thread
from lanes_kafka.client.mailbox import Demand
from tests.kafka import members as group_members
from tests.kafka.conftest import MakeTopic
from tests.kafka.members import PROTOCOLS, Client, Story, Work, group
from tests.kafka.workload import produce, until

pytestmark = pytest.mark.anyio

STUCK = b"7"


def stalled(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings about partitions at ``max_ahead``."""
    return [record.getMessage() for record in caplog.records if "max_ahead" in record.getMessage()]


# --- a stuck key


async def test_a_stuck_key_does_not_stop_other_keys(topic: MakeTopic) -> None:
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
        # A further commit covers the messages below it in its partition, and may come later.
        await until(
            lambda: behind[0].offset in [each.position for each in work.story.of("commit", None, stuck_in)],
        )
        # The engine counts a completion one turn of the loop after the handler.
        await until(lambda: one.consumer.status().in_flight == len(behind))
        # No later message of the stuck key has started, and no position above the stuck message is committed.
        assert len(work.running) == one.consumer.status().running == 1
        assert max(each.position for each in work.story.of("commit", None, stuck_in)) == behind[0].offset
        work.let_go(STUCK)
        await until(lambda: len(work.ended) == 1_000)
    assert set(work.ended.values()) == {1} and work.violations == []
    assert members.committed() == events.ends()


async def test_a_partition_at_max_ahead_names_the_message_that_blocks_it(
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
        # Every fourth message waits for the first message.
        assert sum(position < 100 for number, position in work.ended if number == 0) == 75
        assert max(position for number, position in work.ended if number == 0) < 100
        assert any(f"{events.name}/0 has reached max_ahead=100" in reason for reason in one.consumer.health().reasons)
        work.let_go(STUCK)
        await until(lambda: len(work.ended) == 800)
    # A second warning may name a slow broker.
    (warning,) = [said for said in stalled(caplog) if "until position 0 is finished" in said]
    assert f"{events.name}/0 has reached max_ahead=100" in warning
    assert set(work.ended.values()) == {1} and work.violations == []


@pytest.mark.parametrize(("max_ahead", "count"), [(20, 600), (1_000, 6_000)])
async def test_late_commits_are_requested_without_a_warning(
    max_ahead: int, count: int, topic: MakeTopic, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "REWIND_AFTER", 3_600.0)
    monkeypatch.setattr(thread, "PAUSE_AFTER", 3_600.0)
    # A process that gets no CPU for a second may be at a bound for as long.
    monkeypatch.setattr(flow, "PAUSE_AFTER", 3_600.0)
    # A commit may take more than a second; without a request, no commit is sent.
    monkeypatch.setattr(health, "STALLED_AFTER", 30.0)
    events = topic(3)
    work = Work(Story())
    async with group(events, "848", work) as members:
        # All messages can finish only if no commit waits for the interval.
        one = members.start("one", settings=lanes.Settings(max_ahead=max_ahead, commit_interval=3_600.0))
        # The last partition always has room, so not all partitions are at max_ahead.
        await until(lambda: len(one.consumer.status().partitions) == 3)
        for number in (0, 1):
            await run_sync(partial(produce, events, count // 2, keys=100, partition=number))
        await until(lambda: len(work.ended) == count)
        # A short pause discards no fetched messages.
        assert one.client.pauses == 0
    assert stalled(caplog) == []
    assert members.committed() == events.ends()


# --- calls of the client


class Asked(Client):
    """Records the timeout and count of each poll, and the polls before each pause and resume."""

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
async def test_a_pause_takes_effect_between_two_calls_of_the_client(
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
            """Record the number of polls at the time of the request, because the loop may be late."""
            asking(self, demand)
            polls.setdefault(bool(demand.paused), client.polls)

        def to_read(self: thread.ClientThread, demand: Demand) -> int:
            """Restart the count while the loop, which may be late, still has messages to take."""
            count = choosing(self, demand)
            if not count and False in polls:
                polls[False] = client.polls
            return count

        choosing = thread.ClientThread._to_read
        monkeypatch.setattr(thread.ClientThread, "_to_read", to_read)
        monkeypatch.setattr(thread.ClientThread, "demand", demand)
        for command, call in ((one.consumer.pause, "pause"), (one.consumer.resume, "resume")):
            before = len(client.told)
            polls.clear()
            command()
            await until(lambda: len(client.told) > before)  # noqa: B023
            what, after = client.told[before]
            # An open call may still return half of its batch, and another call has just begun.
            assert what == call and after - polls[call == "pause"] <= 4
        produce(events, 1)
        await until(lambda: len(work.ended) == 2 + backlog)
        # A request waits for at most one call of the client.
        assert max(timeout for _, timeout in client.asked) <= thread.POLL == 0.02
        assert max(count for count, _ in client.asked) <= thread.BATCH == 1_000
    assert set(work.ended.values()) == {1}


async def test_a_full_process_is_paused_once(topic: MakeTopic, asked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room that changes many times a second causes no pause, which would discard fetched messages."""

    def pause_after(seconds: float) -> None:
        for module in (flow, thread):
            monkeypatch.setattr(module, "PAUSE_AFTER", seconds)

    # A process that gets no CPU for a second may be full for as long.
    pause_after(3_600.0)
    events = topic()
    produce(events, 500, keys=50)
    work = Work(Story())
    async with group(events, "cooperative", work) as members:
        one = members.start("one", settings=lanes.Settings(concurrency=10, max_in_flight=10))
        await until(lambda: len(work.ended) == 500)
        client = one.client
        assert isinstance(client, Asked)
        assert [what for what, _ in client.told] == ["resume"]
        pause_after(0.2)
        work.hold(*[b"%d" % number for number in range(50)])
        produce(events, 50, keys=50)
        await until(lambda: len(client.told) > 1)
        # The source still polls the client, which returns no message.
        await one.polled(20)
        assert [what for what, _ in client.told] == ["resume", "pause"]
        pause_after(3_600.0)
        work.let_go(*[b"%d" % number for number in range(50)])
        await until(lambda: len(work.ended) == 550)
        assert [what for what, _ in client.told] == ["resume", "pause", "resume"]
    assert work.violations == [] and set(work.ended.values()) == {1}


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("short_polls")
@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_full_process_keeps_polling(protocol: str, topic: MakeTopic) -> None:
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
        # All handlers that can start: ten, or one for each message.
        await until(lambda: len(work.running) == 10 or (bool(work.running) and one.consumer.status().ready == 0))
        await until(lambda: not one.consumer.status().taking)
        running = len(work.running)
        # Three times the deadline of the broker.
        await anyio.sleep(3 * interval)
        members.look()
        assert story.of("lost") == [] and len(story.of("assigned")) == 2 and len(work.running) == running
        work.let_go(*held)
        await until(lambda: len(work.ended) == 200)
        await one.consumer.drain()
    assert set(work.ended.values()) == {1} and work.violations == []
    assert members.committed() == events.ends()
