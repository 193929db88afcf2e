"""A source on the event loop: demands, commits, releases and the watch over its client's thread, with a fake thread."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

import lanes
from lanes.core.types import Message, Partition, PartitionId, Room, Settlement
from lanes.source import Assigned, Backlog, Delivered, Destination, Lost, Outage, Retention, Revoking, SourceEvent
from lanes_kafka import KafkaSource
from lanes_kafka import source as source_module
from lanes_kafka.client.commits import Commit
from lanes_kafka.client.mailbox import Close, Confirm, Demand, Expire, Release
from lanes_kafka.client.membership import Session
from lanes_kafka.client.records import READER

pytestmark = pytest.mark.anyio

CONFIG = {"bootstrap.servers": "b:1", "group.id": "g", "session.timeout.ms": 6_000, "max.poll.interval.ms": 10_000}
ROOM = Room(10, 1_000)


class FakeThread:
    """The thread of a client, whose part the test plays.

    Attributes:
        demands: The demands of the loop.
        sent: The commands of the loop.
        reply: Called with each command.
        running: Whether the thread runs.
        polled: Time of the last poll.
        limit: Room for metadata.
        refuses: Error of the start.
        heard: The last error of the client.
        ended: The present outage.
        ends: The end of each log, and the number of its unread messages.
    """

    limit = 1_000
    refuses: Exception | None = None

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.arguments, self.named = arguments, named
        self.bridge, self.deliver, self.failed, self.end = arguments[4:8]
        self.demands: list[Demand] = []
        self.sent: list[Any] = []
        self.reply: Callable[[Any], None] = self._agree
        self.running = False
        self.polled = 1_000.0
        self.partitions = 6
        self.session = Session(6.0, 2.0)
        self.heard: tuple[str, float] | None = None
        self.dark: Outage | None = None
        self.ends: dict[Partition, tuple[int | None, int | None]] = {}
        self.kept: list[Message] = []
        self.thread = SimpleNamespace(is_alive=lambda: self.running, join=self._join)
        self.joined = 0
        unknown = (None, None)
        self.end_offsets = SimpleNamespace(
            of=lambda partition: self.ends.get(partition, unknown)[0],
            unread=lambda partition: self.ends.get(partition, unknown)[1],
        )
        self.retention = SimpleNamespace(of=self._retention)
        self.queue_watch = SimpleNamespace(found=())
        self.growth = SimpleNamespace(grown={})

    def _retention(self, message: Message) -> Retention:
        self.kept.append(message)
        return Retention(1.0, 2.0, "a rule")

    def _join(self) -> None:
        assert not self.running
        self.joined += 1

    def _agree(self, command: Any) -> None:
        if isinstance(command, Close):
            self.running = False
            self.end()
        elif isinstance(command, Confirm):
            command.answer.give(command.partitions[:1])
        elif not isinstance(command, Expire):
            command.answer.give(None)

    def start(self, answer: Any) -> None:
        self.running = True
        if self.refuses is None:
            answer.give(None)
        else:
            answer.fail(self.refuses)

    def demand(self, demand: Demand) -> None:
        self.demands.append(demand)

    def send(self, command: Any) -> None:
        self.sent.append(command)
        self.reply(command)

    def last_error(self) -> tuple[str, float] | None:
        return self.heard

    def outage(self) -> Outage | None:
        return self.dark


class Stand:
    """A source, its thread, and a manual clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **named: Any) -> None:
        self.now = 1_000.0
        self.threads: list[FakeThread] = []
        monkeypatch.setattr(source_module, "ClientThread", self._make)
        monkeypatch.setattr(source_module, "monotonic", lambda: self.now)
        self.source = KafkaSource(CONFIG, topics=["t", "u"], **named)
        self.partitions = [Partition(PartitionId("t", n), READER, floor=5) for n in range(3)]

    def _make(self, *arguments: Any, **named: Any) -> FakeThread:
        self.threads.append(FakeThread(*arguments, **named))
        return self.threads[-1]

    @property
    def thread(self) -> FakeThread:
        return self.threads[-1]

    async def take(self, *events: SourceEvent, room: Room = ROOM, number: int = 10**6) -> Sequence[SourceEvent]:
        """Deliver events and receive what fits."""
        self.thread.deliver(list(events), number)
        return await self.source.receive(room)

    async def ask(self, room: Room = ROOM) -> None:
        """Receive until the demand is sent."""
        with anyio.move_on_after(0):
            await self.source.receive(room)

    def run(self, number: int, first: int, count: int) -> Delivered:
        partition = self.partitions[number]
        found = [Message(partition, position, None, 1, None, None) for position in range(first, first + count)]
        return Delivered(partition, found, count)


@pytest.fixture
async def stand(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stand]:
    made = Stand(monkeypatch)
    await made.source.open()
    yield made
    await made.source.aclose()


# --- open and close


async def test_an_open_source_has_the_traits_of_its_configuration_and_of_the_broker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand = Stand(monkeypatch, consumer_target=3, rebuilds=2)
    source = stand.source
    declared = source.declared()
    assert (declared.name, declared.system, declared.settles) == ("kafka g/t,u", "kafka", "cumulative")
    assert (declared.hands_over, declared.revoke_limit, declared.consumer_target) == (True, 8.0, 3)
    assert declared.revoke_limit_from == "max.poll.interval.ms, of which 0.8 may pass" and declared.partitions is None
    traits = await source.open()
    assert (traits.partitions, traits.hands_over, traits.name) == (6, True, "kafka g/t,u")
    assert stand.thread.named == {
        "hands_over": True,
        "rebuilds": 2,
        "queues": (),
        "on_growth": "alarm",
        "transacts": False,
    }
    assert stand.thread.arguments[1] == ("t", "u") and stand.thread.arguments[9] == "kafka g/t,u"
    await source.aclose()


@pytest.mark.parametrize(("wanted", "room"), [(False, 1_000), (True, 0), (False, 0)])
async def test_a_source_hands_over_only_with_room_for_metadata(
    wanted: bool, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeThread, "limit", room)
    stand = Stand(monkeypatch, commit_metadata=wanted)
    assert not (await stand.source.open()).hands_over
    assert stand.source.declared().hands_over == wanted and stand.thread.named["hands_over"] == wanted
    await stand.source.aclose()


async def test_an_error_of_the_start_is_raised_by_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeThread, "refuses", lanes.ConfigError("there is no topic"))
    stand = Stand(monkeypatch)
    with pytest.raises(lanes.ConfigError, match="no topic"):
        await stand.source.open()
    stand.thread.running = False
    await stand.source.aclose()
    assert stand.thread.sent == [], "the thread has ended by itself"


async def test_a_closed_source_has_ended_its_thread_and_refuses_commands(stand: Stand) -> None:
    await stand.source.aclose()
    await stand.source.aclose()
    assert [type(each) for each in stand.thread.sent] == [Close] and stand.thread.joined == 1
    for call in (
        stand.source.settle([Settlement(stand.partitions[0], [], 6)]),
        stand.source.confirm(stand.partitions),
        stand.source.release(stand.partitions[0]),
    ):
        with pytest.raises(lanes.SourceError, match=r"^kafka g/t,u: the client is closed; make a new source$"):
            await call


async def test_commands_of_a_source_fail_once_its_thread_has_ended(stand: Stand) -> None:
    stand.thread.reply = lambda command: None
    failures: list[str] = []

    async def settle() -> None:
        with pytest.raises(lanes.SourceError) as failed:
            await stand.source.settle([Settlement(stand.partitions[0], [], 6)])
        failures.append(str(failed.value))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(settle)
        while not stand.thread.sent:
            await checkpoint()
        stand.thread.running = False
        stand.thread.end()
    assert failures == ["kafka g/t,u: the client is closed; make a new source"]


async def test_the_first_failure_of_the_thread_is_raised(stand: Stand) -> None:
    stand.thread.failed(lanes.SourceError("first"))
    stand.thread.failed(lanes.SourceError("second"))
    lost = Lost(stand.partitions[0], "gone")
    assert await stand.take(lost) == [lost], "events come before the failure"
    with pytest.raises(lanes.SourceError, match=r"^first$"):
        await stand.source.receive(ROOM)
    stand.thread.running = False
    stand.thread.end()
    with pytest.raises(lanes.SourceError, match=r"^first$"):
        await stand.source.settle([Settlement(stand.partitions[0], [], 6)])


async def test_a_source_that_is_not_open_reports_no_lag_outage_or_retention(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(monkeypatch)
    source, partition = stand.source, stand.partitions[0]
    message = Message(partition, 5, None, 1, None, None)
    assert (source.lag(partition), source.outage(), source.retention(message)) == (None, None, None)
    assert (source.stranded(), source.findings()) == ((), ())
    assert source.backlog(partition) == Backlog(None) and source.freeze_limit() == math.inf
    with pytest.raises(lanes.SourceError, match="the client is closed"):
        await source.confirm([partition])
    await source.aclose()
    assert repr(source) == "<KafkaSource kafka g/t,u: 0 partitions>"


# --- demands


async def test_a_demand_is_sent_for_each_change_of_paused_or_assigned_partitions(stand: Stand) -> None:
    await stand.ask()
    await stand.ask()
    assert [(each.number, each.messages, each.credit) for each in stand.thread.demands] == [(1, 10, (10, 1_000))]
    await stand.ask(Room(3, 50, frozenset(stand.partitions[:1])))
    demand = stand.thread.demands[-1]
    assert (demand.number, demand.messages, demand.credit) == (2, 3, (0, 0)) and demand.paused == {stand.partitions[0]}
    await stand.take(Assigned(stand.partitions[0]), stand.run(0, 5, 2))
    await stand.ask(Room(3, 50, frozenset(stand.partitions[:1])))
    await stand.ask(Room(3, 50, frozenset(stand.partitions[:1])))
    await stand.ask(Room(2, 50, frozenset(stand.partitions[:1])))
    assert [(each.number, each.assigned) for each in stand.thread.demands] == [(1, 0), (2, 0), (3, 1)]


@pytest.mark.parametrize(("count", "size"), [(5, 1), (1, 500)])
async def test_the_next_demand_is_sent_when_half_of_the_room_is_used_up(stand: Stand, count: int, size: int) -> None:
    await stand.ask()
    first = stand.run(0, 5, count - 1) if count > 1 else None
    if first is not None:
        await stand.take(first)
    await stand.ask()
    assert len(stand.thread.demands) == 1, "more than half of the room is left"
    run = stand.run(0, 5 + count, 1)
    await stand.take(Delivered(run.partition, run.run, size))
    await stand.ask()
    assert [each.number for each in stand.thread.demands] == [1, 2]


async def test_a_room_that_closes_and_opens_is_told_at_once(stand: Stand) -> None:
    await stand.ask()
    await stand.ask(Room(0, 1_000, frozenset()))
    await stand.ask(Room(0, 1_000, frozenset()))
    await stand.ask(Room(1, 1_000, frozenset()))
    assert [each.messages for each in stand.thread.demands] == [10, 0, 1]


async def test_a_demand_counts_the_messages_on_the_loop(stand: Stand) -> None:
    paused = frozenset(stand.partitions[:1])
    await stand.take(Assigned(stand.partitions[0]), Assigned(stand.partitions[1]))
    found = await stand.take(stand.run(0, 5, 7), stand.run(1, 5, 4), room=Room(2, 1_000, paused))
    assert [len(each.run) for each in found if isinstance(each, Delivered)] == [2]
    await stand.ask(Room(0, 1_000, paused))
    demand = stand.thread.demands[-1]
    assert demand.credit.messages == 11, "two messages wait for room already"
    await stand.ask(Room(20, 1_000, paused))
    await stand.ask(Room(20, 1_000, paused))
    assert stand.thread.demands[-1].credit.messages == 11 + 20
    assert demand.rewind == {} and demand.client_paused == frozenset()


async def test_a_long_pause_drops_messages_and_asks_for_them_again(stand: Stand) -> None:
    paused = Room(10, 1_000, frozenset(stand.partitions[:1]))
    await stand.take(Assigned(stand.partitions[0]))
    stand.thread.deliver([stand.run(0, 5, 7)], 1)
    await stand.ask(paused)
    stand.now += 1.0
    stand.thread.polled = stand.now
    await stand.ask(paused)
    demand = stand.thread.demands[-1]
    assert demand.rewind == {stand.partitions[0]: (demand.number, 5)}
    assert demand.client_paused == {stand.partitions[0]} and stand.source._prefetched.messages == 0
    assert demand.number == len(stand.thread.demands) == 2


async def test_a_pause_of_the_other_partitions_ends_the_wait_for_their_first_messages(stand: Stand) -> None:
    await stand.take(Assigned(stand.partitions[0]), Assigned(stand.partitions[1]))
    await stand.ask()
    stand.thread.deliver([stand.run(0, 5, 12)], 1, True)
    await stand.ask()
    with anyio.fail_after(0.5):
        (found,) = await stand.source.receive(Room(10, 1_000, frozenset(stand.partitions[1:2])))
    assert isinstance(found, Delivered) and len(found.run) == 10
    assert stand.thread.demands[-1].credit.messages == 12, "the thread delivers no further message"


async def test_a_user_who_pauses_all_partitions_pauses_the_client(stand: Stand) -> None:
    await stand.take(Assigned(stand.partitions[0]))
    await stand.ask(Room(0, 0, frozenset(stand.partitions[:1])))
    assert stand.thread.demands[-1].client_paused == {stand.partitions[0]}
    assert repr(stand.source) == "<KafkaSource kafka g/t,u: 1 partitions>"


async def test_a_waiting_receive_is_woken_by_a_delivery(stand: Stand) -> None:
    found: list[Sequence[SourceEvent]] = []

    async def receive() -> None:
        found.append(await stand.source.receive(ROOM))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(receive)
        while not stand.thread.demands:
            await checkpoint()
        stand.thread.deliver([Assigned(stand.partitions[0])], 1)
    assert found == [[Assigned(stand.partitions[0])]]


# --- commits and releases


async def test_a_commit_names_its_settlements_and_moves_the_position(stand: Stand) -> None:
    first, second, foreign = stand.partitions
    await stand.take(Assigned(first), Assigned(second))
    stand.thread.ends = {first: (20, 9), second: (20, 9), foreign: (20, 9)}
    assert [stand.source.lag(each) for each in stand.partitions] == [15, 15, None]
    settlements = [Settlement(first, [], 8), Settlement(foreign, [], 9)]
    await stand.source.settle(settlements)
    (commit,) = stand.thread.sent
    assert isinstance(commit, Commit) and commit.settlements == settlements and commit.releases is None
    assert [stand.source.lag(each) for each in stand.partitions] == [12, 15, None]
    stand.thread.ends[first] = 7, 0
    assert stand.source.lag(first) == 0, "a lag is never negative"
    stand.thread.ends[first] = None, None
    assert stand.source.lag(first) is None


async def test_nothing_to_settle_sends_nothing(stand: Stand) -> None:
    await stand.source.settle([])
    await stand.source.extend([Message(stand.partitions[0], 5, None, 1, None, None)])
    assert stand.thread.sent == []


async def test_a_settlement_without_a_position_is_refused_as_a_whole(stand: Stand) -> None:
    settlements = [Settlement(stand.partitions[0], [], 8), Settlement(stand.partitions[1], [], None)]
    with pytest.raises(lanes.ContractError, match=r"^kafka g/t,u: a settlement without a floor"):
        await stand.source.settle(settlements)
    assert stand.thread.sent == []


async def test_a_failed_commit_moves_no_position(stand: Stand) -> None:
    partition = stand.partitions[0]
    await stand.take(Assigned(partition))
    stand.thread.ends = {partition: (20, 9)}
    stand.thread.reply = lambda command: command.answer.fail(lanes.SourceError("refused"))
    with pytest.raises(lanes.SourceError, match="refused"):
        await stand.source.settle([Settlement(partition, [], 8)])
    assert stand.source.lag(partition) == 15
    stand.thread.reply = stand.thread._agree


@pytest.mark.parametrize(("completed", "committed"), [([], 8), ([(9, 10)], None)])
async def test_a_release_names_the_position_unless_messages_above_are_completed(
    completed: list[tuple[int, int]], committed: int | None, stand: Stand
) -> None:
    partition = stand.partitions[0]
    await stand.take(Assigned(partition))
    await stand.source.settle([Settlement(partition, [], 8, completed)])
    stand.thread.deliver([stand.run(0, 8, 3)], 1)
    await stand.source.release(partition)
    release = stand.thread.sent[-1]
    assert isinstance(release, Release) and (release.partition, release.committed) == (partition, committed)
    await stand.ask()
    assert stand.source._prefetched.messages == 0, "its messages are dropped"
    await stand.source.release(partition)
    assert stand.thread.sent[-1].committed is None, "the source knows nothing about a partition that it gave back"


@pytest.mark.parametrize(("completed", "committed"), [([], 5), ([(7, 8)], None)])
async def test_an_assignment_brings_its_committed_position(
    completed: list[tuple[int, int]], committed: int | None, stand: Stand
) -> None:
    partition = Partition(PartitionId("t", 0), READER, floor=5, completed=completed)
    await stand.take(Assigned(partition))
    await stand.source.release(partition)
    assert stand.thread.sent[-1].committed == committed


async def test_a_lost_partition_has_no_position(stand: Stand) -> None:
    partition = stand.partitions[0]
    await stand.take(Assigned(partition))
    stand.thread.ends = {partition: (20, 9)}
    await stand.take(Revoking(partition, 1.0))
    assert stand.source.lag(partition) == 15
    await stand.take(Lost(partition, "gone"))
    assert stand.source.lag(partition) is None


async def test_the_thread_confirms_partitions(stand: Stand) -> None:
    assert await stand.source.confirm(stand.partitions) == stand.partitions[:1]
    (command,) = stand.thread.sent
    assert isinstance(command, Confirm) and command.partitions == stand.partitions
    assert stand.source.freeze_limit() == 3.0


async def test_a_source_reports_the_lag_outage_and_retention_of_its_thread(stand: Stand) -> None:
    source, partition = stand.source, stand.partitions[0]
    stand.thread.ends = {partition: (20, 9)}
    assert source.backlog(partition) == Backlog(9, "", None)
    stand.thread.heard = "timed out", 2.5
    assert source.backlog(partition) == Backlog(9, "timed out", 2.5)
    assert source.outage() is None
    stand.thread.dark = Outage(3.0, "no route")
    assert source.outage() == Outage(3.0, "no route")
    message = Message(partition, 5, None, 1, None, None)
    assert source.retention(message) == Retention(1.0, 2.0, "a rule") and stand.thread.kept == [message]


async def test_a_source_reports_stranded_messages_by_queue_and_grown_topics(monkeypatch: pytest.MonkeyPatch) -> None:
    queues = [lanes.PartitionedQueue(name, 2) for name in ("q", "r")]
    stand = Stand(monkeypatch)
    stand.source = KafkaSource(CONFIG, topics=queues, on_growth="stop")
    await stand.source.open()
    assert (stand.thread.named["queues"], stand.thread.named["on_growth"]) == (tuple(queues), "stop")
    assert (stand.source.stranded(), stand.source.findings()) == ((), [])
    found = tuple(lanes.Stranded(name, f"{name}__p2", number) for number, name in enumerate("qr", 1))
    stand.thread.queue_watch = SimpleNamespace(found=found)
    stand.thread.growth = SimpleNamespace(grown={"q": "topic 'q' has grown"})
    assert stand.source.stranded() == found
    first, second, growth = stand.source.findings()
    assert first.startswith("queue 'q': no consumer of group 'g' reads the messages in 'q__p2' (1). The")
    assert (
        second.startswith("queue 'r': no consumer of group 'g' reads the messages in 'r__p2' (2). ")
        and growth == "topic 'q' has grown"
    )
    await stand.source.aclose()


def test_a_source_reads_its_own_topics(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Stand(monkeypatch).source
    assert source.reads(Destination("kafka", "t")) and source.reads(Destination("kafka", "u"))
    assert not source.reads(Destination("kafka", "v")) and not source.reads(Destination("nats", "t"))


# --- the watch over the polls


async def watch(stand: Stand, age: float) -> None:
    """Let the last poll be some seconds old, and let the source look."""
    stand.now = stand.thread.polled + age
    stand.source._check_polling()


async def test_a_client_that_is_not_polled_is_reported_once(stand: Stand, caplog: pytest.LogCaptureFixture) -> None:
    await stand.take(Assigned(stand.partitions[0]))
    await watch(stand, 7.9)
    assert caplog.messages == []
    for age in (8.0, 9.0, 9.9):
        await watch(stand, age)
    (line,) = caplog.records
    assert line.levelname == "WARNING" and line.getMessage().startswith(
        "kafka g/t,u: the client was not polled for 8.0 s, and max.poll.interval.ms is 10 s; make the callbacks"
    )
    await watch(stand, 1.0)
    await watch(stand, 8.5)
    assert len(caplog.records) == 2, "a poll ends the silence"
    assert stand.thread.sent == []


async def test_a_client_that_was_not_polled_for_the_interval_has_lost_its_partitions(
    stand: Stand, caplog: pytest.LogCaptureFixture
) -> None:
    await stand.take(Assigned(stand.partitions[0]), Assigned(stand.partitions[1]))
    stand.thread.deliver([stand.run(0, 5, 3)], 1)
    await watch(stand, 10.0)
    assert [type(each) for each in stand.thread.sent] == [Expire]
    assert [each.levelname for each in caplog.records] == ["ERROR"]
    assert caplog.messages[0].startswith(
        "kafka g/t,u: the client was not polled for 10.0 s, so its partitions are presumed"
    )
    lost = await stand.source.receive(ROOM)
    reason = "the client was not polled for max.poll.interval.ms"
    assert lost == [Lost(each, reason) for each in stand.partitions[:2]], "its messages are dropped"
    await watch(stand, 11.0)
    assert len(stand.thread.sent) == 1, "nothing is left to lose"


@pytest.mark.parametrize(
    ("age", "seconds"), [(0.0, 1.0), (8.5, 1.0), (9.0, 1.0), (9.75, 0.25), (10.0, 1.0), (12.0, 1.0)]
)
async def test_the_next_look_is_at_the_poll_deadline_at_the_latest(age: float, seconds: float, stand: Stand) -> None:
    stand.now = stand.thread.polled + age
    assert stand.source._wait_time() == seconds


async def test_the_next_look_is_when_prefetched_messages_must_be_dropped(stand: Stand) -> None:
    await stand.take(Assigned(stand.partitions[0]))
    stand.thread.deliver([stand.run(0, 5, 7)], 1)
    await stand.ask(Room(10, 1_000, frozenset(stand.partitions[:1])))
    stand.now += 0.75
    assert stand.source._wait_time() == 0.25
    stand.now += 0.5
    assert stand.source._wait_time() == 0.0


# --- names of topics


@pytest.mark.parametrize(
    ("topics", "text"),
    [
        (7, "topics=7: must be the name of a topic, a str, or a list of names"),
        (b"orders", "topics=a bytes: must be the name of a topic, a str, or a list of names"),
        ({"t": 1}, "topics=a dict: must be the name of a topic, a str, or a list of names"),
        ([], "topics=[]: name at least one topic"),
        (["t", 7], "must be the name of a topic, a str, or a list of names"),
        (["t", ""], "must be the name of a topic, a str, or a list of names"),
        ("", "must be the name of a topic, a str, or a list of names"),
        (["t", "^t.*"], "patterns are not supported, because the source checks"),
        ("kafka://t", "a URL is not the name of a topic; pass the names of topics"),
        ("t,u", "a name has no comma; write several topics as a list of names"),
        (["t", "u", "t"], "are named twice; name each topic"),
    ],
)
def test_a_wrong_list_of_topics_is_refused(topics: Any, text: str) -> None:
    with pytest.raises(lanes.ConfigError) as failed:
        KafkaSource(CONFIG, topics=topics)
    assert str(failed.value).startswith("topics=") and text in str(failed.value)


def test_a_source_takes_the_name_of_one_topic_or_several() -> None:
    assert KafkaSource(CONFIG, topics="t").declared().name == "kafka g/t"
    assert KafkaSource(CONFIG, topics=(name for name in "tu")).declared().name == "kafka g/t,u"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("named", "text"),
    [
        ({"key": 5}, "key=5: pass a function of the client's message, or leave it out"),
        ({"client": "c"}, "client=str: pass a function that makes the consumer from a dictionary"),
        ({"client": dict}, "client=dict: must be confluent_kafka.Consumer, a subclass of it, or a function"),
        ({"rebuilds": -1}, "rebuilds=-1: must be a whole number, 0 or more"),
        ({"rebuilds": "1"}, "rebuilds='1': must be a whole number, 0 or more, not a str"),
        ({"rebuilds": True}, "rebuilds=True: must be a whole number, 0 or more"),
        ({"rebuilds": 1.5}, "rebuilds=1.5: must be a whole number, 0 or more"),
        ({"commit_metadata": 1}, "commit_metadata=1"),
        ({"consumer_target": 0}, "consumer_target=0"),
    ],
)
def test_a_wrong_argument_is_refused(named: dict[str, Any], text: str) -> None:
    with pytest.raises(lanes.ConfigError) as failed:
        KafkaSource(CONFIG, topics="t", **named)
    assert str(failed.value).startswith(text)


def test_the_lowest_values_of_the_arguments_are_accepted() -> None:
    source = KafkaSource(CONFIG, topics="t", rebuilds=0, consumer_target=1)
    assert source.declared().consumer_target == 1
