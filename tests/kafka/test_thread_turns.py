"""Single turns of the thread that owns a client, with a fake client, a fake admin client and manual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from queue import Empty
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from confluent_kafka import KafkaError, TopicPartition
from confluent_kafka import Message as Raw

import lanes
from lanes.core.types import Partition, Settlement
from lanes.source import Assigned, Delivered, Lost, Outage, SourceEvent
from lanes_kafka.client import mailbox, thread
from lanes_kafka.client.commits import Commit
from lanes_kafka.client.mailbox import Close, Demand
from lanes_kafka.client.prefetch import Credit
from lanes_kafka.client.records import record_key
from lanes_kafka.client.thread import (
    BATCH,
    IDLE_AFTER,
    IDLE_POLL,
    PAUSE_AFTER,
    POLL,
    ClientThread,
)
from lanes_kafka.config import client_config
from tests.kafka.fakes import FakeAdmin, FakeAnswer

SETTINGS = {"bootstrap.servers": "b:1", "group.id": "g", "partition.assignment.strategy": "cooperative-sticky"}
MEGABYTE = 1 << 20


class Queue:
    """The queue of a mailbox without real waits. ``waits``: the timeouts of the waits."""

    def __init__(self) -> None:
        self.commands: list[Any] = []
        self.waits: list[float] = []

    def put(self, command: Any) -> None:
        self.commands.append(command)

    def empty(self) -> bool:
        return not self.commands

    def get_nowait(self) -> Any:
        if not self.commands:
            raise Empty
        return self.commands.pop(0)

    def get(self, timeout: float) -> Any:
        if not self.commands:
            self.waits.append(timeout)
        return self.get_nowait()


class Admin(FakeAdmin):
    """An admin client that also answers questions about ends and limits."""

    made: ClassVar[list[Admin]] = []
    refuses: ClassVar[bool] = False

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(t=None if Admin.refuses else "id-A")
        self.settings = settings
        Admin.made.append(self)
        if Admin.refuses:
            settings["error_cb"](KafkaError(KafkaError._AUTHENTICATION, "wrong password"))

    def describe_consumer_groups(self, groups: list[str], **named: Any) -> dict[str, Any]:
        return {each: SimpleNamespace(done=lambda: False) for each in groups}

    def list_offsets(self, wanted: Any, **named: Any) -> dict[Any, Any]:
        return {each: SimpleNamespace(done=lambda: False) for each in wanted}


class Client:
    """A consumer, whose logs have offsets 0 to 100, and in which 5 is committed.

    Attributes:
        settings: Its configuration.
        consumed: The arguments of the calls of ``consume``.
        answers: The result of each call of ``consume``, or a function that makes it.
        calls: The calls that change the client.
        at: The position of the client in each partition.
        commits: The committed positions, and whether each call was asynchronous.
        closed: Whether it was closed.
        mine: Its assignment.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.consumed: list[tuple[int, float]] = []
        self.answers: list[Any] = []
        self.calls: list[tuple[str, list[tuple[int, int]]]] = []
        self.at: dict[int, int] = {}
        self.commits: list[tuple[int, int, bool]] = []
        self.closed = 0
        self.mine: list[TopicPartition] = []

    def subscribe(self, topics: list[str], **callbacks: Callable[..., None]) -> None:
        self.topics, self.callbacks = topics, callbacks

    def unsubscribe(self) -> None:
        self.calls.append(("unsubscribe", []))

    def assignment(self) -> list[TopicPartition]:
        return self.mine

    def memberid(self) -> str:
        return "me"

    def consume(self, count: int, timeout: float) -> list[Raw]:
        self.consumed.append((count, timeout))
        answer = self.answers.pop(0) if self.answers else []
        return answer() if callable(answer) else answer

    def committed(self, places: Sequence[TopicPartition], timeout: float) -> list[TopicPartition]:
        return [TopicPartition(each.topic, each.partition, 5) for each in places]

    def offsets_for_times(self, places: Sequence[TopicPartition], timeout: float) -> list[TopicPartition]:
        return [TopicPartition(each.topic, each.partition, 0 if each.offset == -2 else 100) for each in places]

    def position(self, places: Sequence[TopicPartition]) -> list[TopicPartition]:
        return [TopicPartition(each.topic, each.partition, self.at.get(each.partition, -1001)) for each in places]

    def get_watermark_offsets(self, place: TopicPartition, *, cached: bool) -> tuple[int, int]:
        return 0, 100

    def commit(self, *, offsets: Sequence[TopicPartition], asynchronous: bool) -> None:
        self.commits += [(each.partition, each.offset, asynchronous) for each in offsets]

    def close(self) -> None:
        self.closed += 1

    def __getattr__(self, name: str) -> Any:
        if name in ("incremental_assign", "incremental_unassign", "pause", "resume", "seek"):

            def call(found: Any) -> None:
                places = found if isinstance(found, list) else [found]
                self.calls.append((name, [(each.partition, each.offset) for each in places]))

            return call
        raise AttributeError(name)


class Stand:
    """The thread of a client, without a thread: the test makes its turns.

    Attributes:
        now: Time of the clock.
        told: The delivered events, each with the number of the demand.
        announced: Whether each delivery has announced a further one.
        failures: The reported failures.
        ends: Number of reported ends.
        alive: Whether the loop runs.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], **named: Any) -> None:
        monkeypatch.setattr(thread, "threading", SimpleNamespace(Thread=self._thread))
        monkeypatch.setattr(thread, "AdminClient", Admin)
        monkeypatch.setattr(mailbox, "SimpleQueue", self._queue)
        monkeypatch.setattr(Admin, "made", [])
        self.now = 1_000.0
        self.told: list[tuple[SourceEvent, int]] = []
        self.failures: list[str] = []
        self.ends = 0
        self.announced: list[bool] = []
        self.alive = True
        self.clients: list[Client] = []
        bridge: Any = SimpleNamespace(post=lambda call: call(), is_alive=lambda: self.alive)
        self.config = client_config(SETTINGS | settings, out_of_range="earliest")
        options: dict[str, Any] = {"hands_over": False, "rebuilds": 0} | named
        self.thread = ClientThread(
            self.config,
            ["t"],
            self._make,
            record_key,
            bridge,
            self._deliver,
            lambda failure: self.failures.append(str(failure)),
            self._end,
            lambda: self.now,
            "kafka g/t",
            **options,
        )
        self.opened = FakeAnswer()
        self.partition: Partition

    def _deliver(self, events: Sequence[SourceEvent], number: int, filling: bool) -> None:
        self.told += [(each, number) for each in events]
        self.announced.append(filling)

    def _thread(self, *, target: Callable[[], None], name: str, daemon: bool) -> Any:
        # Python must end although the thread of an abandoned source runs.
        assert daemon and name == "lanes-kafka"
        self.run = target
        return SimpleNamespace(start=lambda: None)

    def _queue(self) -> Queue:
        self.queue = Queue()
        return self.queue

    def _make(self, settings: dict[str, Any]) -> Any:
        self.clients.append(Client(settings))
        return self.clients[-1]

    def _end(self) -> None:
        self.ends += 1

    @property
    def client(self) -> Client:
        return self.clients[-1]

    def open(self) -> Stand:
        self.thread.start(self.opened)
        self.thread._open()
        return self

    def reading(self) -> Stand:
        """Own partition 0, with room for 10 messages in demand 1."""
        self.demand(1)
        (self.partition,) = self.assigned(0)
        return self

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.thread._turn()

    def demand(self, number: int, messages: int = 10, *, received: int = 0, assigned: int = 10, **named: Any) -> None:
        """Give a room for messages, of which the loop has received some since the start."""
        room: dict[str, Any] = {
            "credit": Credit(received + messages, MEGABYTE if messages else 0),
            "assigned": assigned,
            "paused": frozenset[Partition](),
            "rewind": {},
        }
        self.thread.demand(Demand(number, messages, **(room | named)))

    def assigned(self, *numbers: int) -> list[Partition]:
        """Let the group assign partitions within the next poll."""

        def assign() -> list[Raw]:
            self.client.mine = [TopicPartition("t", number) for number in numbers]
            self.client.callbacks["on_assign"](self.client, self.client.mine)
            return []

        self.client.answers = [assign]
        self.turn()
        found = [each.partition for each, _ in self.told if isinstance(each, Assigned)]
        self.forget()
        return found

    def forget(self) -> None:
        del self.told[:], self.client.consumed[:], self.client.calls[:], self.queue.waits[:], self.queue.commands[:]

    def fails(self, code: int, text: str = "", *, fatal: bool = False, offset: int = 7) -> None:
        """Let the next poll return an error."""
        error = KafkaError(code, text, fatal) if text else KafkaError(code)
        self.client.answers = [[Raw(topic="t", partition=0, offset=offset, error=error)]]
        self.demand(10**6)
        self.turn()


def raws(number: int, *offsets: int) -> list[Raw]:
    return [Raw(topic="t", partition=number, offset=offset, value=b"1234") for offset in offsets]


def runs(stand: Stand) -> list[tuple[int, list[int], int]]:
    return [
        (each.partition.id.number, [message.position for message in each.run], number)
        for each, number in stand.told
        if isinstance(each, Delivered)
    ]


def committing(stand: Stand, floor: int = 6) -> FakeAnswer:
    answer = FakeAnswer()
    stand.thread.send(Commit([Settlement(stand.partition, [], floor)], answer))
    return answer


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Stand:
    return Stand(monkeypatch, {}).open()


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> Stand:
    return Stand(monkeypatch, {}).open().reading()


# --- the start


def test_a_thread_makes_one_client_for_its_topics(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    stand = Stand(monkeypatch, {"error_cb": calls.append, "client.id": "c"}).open()
    assert stand.client.topics == ["t"] and stand.thread.partitions == 2 and stand.thread.limit == 0
    assert stand.client.settings["client.id"] == "c" and stand.client.settings["enable.auto.commit"] is False
    stand.client.settings["error_cb"](KafkaError(KafkaError._TRANSPORT))
    assert len(calls) == 1 and stand.thread.last_error() is not None
    assert stand.thread.session.timeout == 45.0 and stand.thread.outage() is None
    assert Admin.made[0].settings["bootstrap.servers"] == "b:1" and "error_cb" in Admin.made[0].settings


def test_a_refused_login_ends_the_start_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Admin, "refuses", True)
    with pytest.raises(lanes.SourceError, match="wrong password"):
        Stand(monkeypatch, {}).open()


def test_an_outage_has_the_last_error_of_the_client(stand: Stand) -> None:
    assert stand.thread.outage() is None
    contact = stand.thread._topics.contact
    for _ in range(2):
        stand.now += 1.0
        contact.unanswered(stand.now, "no answer")
    assert stand.thread.outage() == Outage(2.0, "no answer")
    stand.thread.errors.on_error(KafkaError(KafkaError._TRANSPORT, "no route"))
    stand.now += 1.0
    assert stand.thread.outage() == Outage(3.0, "_TRANSPORT: no route")
    assert stand.thread.last_error() == ("_TRANSPORT: no route", 1.0)


def test_an_answer_about_topics_wakes_the_thread(reading: Stand) -> None:
    Admin.made[0].topics = {"t": None}
    committing(reading)
    reading.turn()
    assert reading.queue.commands == [] and reading.client.commits == []
    Admin.made[0].answer("id-A")
    assert reading.queue.commands == [None]
    reading.turn()
    assert reading.client.commits == [(0, 6, True)]


def test_before_the_start_no_outage_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(monkeypatch, {})
    assert stand.thread.outage() is None and stand.thread.last_error() is None


def test_before_the_first_demand_the_group_is_not_joined(stand: Stand) -> None:
    """The caller may still refuse the source."""
    stand.turn(3)
    assert stand.client.consumed == [] and stand.queue.waits == [POLL] * 3
    stand.demand(1)
    stand.turn()
    assert stand.client.consumed == [(1, POLL)]


def test_a_run_ends_with_a_close_and_reports_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(monkeypatch, {})
    stand.thread.start(stand.opened)
    stand.thread.send(Close())
    stand.run()
    assert stand.opened.given == [None] and stand.ends == 1 and stand.failures == []
    assert stand.client.closed == 1 and stand.client.calls == [("unsubscribe", [])]
    assert stand.thread._topics.admin is None, "the sockets of the admin client end with its last reference"


def test_an_error_of_the_start_is_answered_and_ends_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(monkeypatch, {})
    stand.thread.names = ["t", "missing"]
    monkeypatch.setattr("lanes_kafka.client.topics._APPEARS_WITHIN", 0.0)
    monkeypatch.setattr("lanes_kafka.client.topics.similar_topic", lambda admin, topic, timeout: "")
    stand.thread.start(stand.opened)
    stand.run()
    (error,) = stand.opened.given
    assert isinstance(error, lanes.ConfigError) and "topic 'missing' does not exist" in str(error)
    assert stand.ends == 1 and stand.clients == []


def test_an_error_of_a_turn_ends_the_thread_and_its_ownership(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(monkeypatch, {}).open()
    stand.demand(1)
    (partition,) = stand.assigned(0)

    def fail() -> list[Raw]:
        stand.client.mine = []
        raise RuntimeError("broken")

    monkeypatch.setattr(stand.thread, "_open", lambda: None)
    stand.client.answers = [fail]
    stand.demand(2)
    stand.run()
    (failure,) = stand.failures
    assert failure.startswith("kafka g/t: the client's thread failed: RuntimeError: broken")
    assert [event for event, _ in stand.told] == [Lost(partition, "the client's thread has failed")]
    assert stand.client.closed == 1 and stand.ends == 1


# --- demands and reading


def test_messages_carry_the_number_of_the_demand_that_asked_for_them(reading: Stand) -> None:
    reading.demand(2)
    reading.client.answers = [raws(0, 5), raws(0, 6, 7)]
    reading.turn()
    assert runs(reading) == [(0, [5, 6, 7], 2)]
    assert reading.client.consumed == [(1, POLL), (9, 0.0)]


def test_the_thread_reads_on_without_a_new_demand_until_the_room_of_the_last_is_used_up(reading: Stand) -> None:
    reading.demand(2)
    reading.client.answers = [raws(0, 5), raws(0, 6, 7), raws(0, 8), raws(0, *range(9, 15))]
    reading.turn(2)
    assert reading.client.consumed == [(1, POLL), (9, 0.0), (1, POLL), (6, 0.0)]
    reading.forget()
    reading.turn()
    assert reading.client.consumed == [], "ten messages were demanded"
    assert reading.queue.waits == [pytest.approx(PAUSE_AFTER)]


def test_a_demand_without_a_message_is_polled_again(reading: Stand) -> None:
    reading.turn(2)
    assert reading.client.consumed == [(1, POLL)] * 2 and reading.told == []
    assert reading.thread.polled == reading.now


def test_an_idle_client_is_polled_for_longer_until_a_message_or_a_command_arrives(reading: Stand) -> None:
    reading.turn()
    reading.now += IDLE_AFTER
    reading.client.answers = [[], raws(0, 5)]
    reading.turn(3)
    assert reading.client.consumed == [(1, POLL), (1, IDLE_POLL), (1, IDLE_POLL), (9, 0.0), (1, POLL)]
    reading.now += IDLE_AFTER
    reading.demand(2)
    reading.forget()
    reading.turn()
    assert reading.client.consumed == [(1, POLL)]


def test_a_rewind_seeks_once(reading: Stand) -> None:
    partition = reading.partition
    reading.demand(2, rewind={partition: (2, 5)})
    reading.turn()
    assert reading.client.calls == [("seek", [(0, 5)])]
    reading.demand(3, rewind={partition: (2, 5)})
    reading.turn()
    assert len(reading.client.calls) == 1, "a newer demand repeats the rewinds of the older ones"
    reading.demand(4, rewind={partition: (4, 5)})
    reading.thread._group.release(partition)
    reading.turn()
    assert [name for name, _ in reading.client.calls] == ["seek", "pause"], "a released partition is not read again"


def test_messages_that_were_read_before_a_rewind_keep_the_old_number(reading: Stand) -> None:
    """The loop drops them by this number."""
    partition = reading.partition

    def rewind() -> list[Raw]:
        reading.demand(2, rewind={partition: (2, 5)})
        return raws(0, 5)

    reading.client.answers = [rewind, []]
    reading.turn()
    assert runs(reading) == [(0, [5], 1)]
    reading.client.answers = [raws(0, 5)]
    reading.turn()
    assert runs(reading)[1:] == [(0, [5], 2)]


def test_a_paused_partition_is_paused_in_the_client_only_if_demanded(reading: Stand) -> None:
    partition = reading.partition
    both = frozenset({partition})
    reading.demand(2, paused=both, credit=Credit(0, 0))
    reading.turn()
    assert reading.client.calls == [] and reading.client.consumed == []
    reading.demand(3, paused=both, client_paused=both, credit=Credit(0, 0))
    reading.turn()
    assert reading.client.calls == [("pause", [(0, -1001)])]
    assert reading.client.consumed == [(1, POLL)], "a paused client is polled for its callbacks"
    reading.demand(4)
    reading.turn()
    assert reading.client.calls[1:] == [("resume", [(0, -1001)])]


def test_without_room_the_client_is_paused_after_a_second_and_polled_then(reading: Stand) -> None:
    reading.turn()
    reading.forget()
    reading.demand(2, 0)
    reading.now += PAUSE_AFTER - 0.25
    reading.turn()
    assert reading.client.calls == [] and reading.queue.waits == [0.25] and reading.client.consumed == []
    reading.now += 0.25
    reading.turn()
    assert reading.client.calls == [("pause", [(0, -1001)])] and reading.client.consumed == []
    reading.turn()
    assert reading.client.consumed == [(1, POLL)] and len(reading.client.calls) == 1
    reading.demand(3)
    reading.turn()
    assert reading.client.calls[1:] == [("resume", [(0, -1001)])]


def test_an_assignment_that_takes_long_pauses_no_partition(reading: Stand) -> None:
    """A pause would discard the first fetch of the new partition."""
    reading.demand(2, assigned=1)

    def assign() -> list[Raw]:
        reading.now += 2 * PAUSE_AFTER
        reading.client.callbacks["on_assign"](reading.client, [TopicPartition("t", 1)])
        return []

    reading.client.answers = [assign]
    reading.turn(2)
    assert "pause" not in [name for name, _ in reading.client.calls], "the loop has room"
    reading.forget()
    reading.demand(3, assigned=2)
    reading.turn()
    assert reading.client.consumed == [(1, POLL)] and reading.client.calls == []


def test_a_member_without_partitions_is_polled(stand: Stand) -> None:
    stand.demand(1, 0)
    stand.now += 60.0
    stand.turn()
    assert stand.client.consumed == [(1, POLL)] and stand.client.calls == []


def test_one_call_reads_a_bounded_number_of_messages(reading: Stand) -> None:
    reading.demand(2, 5_000)
    reading.client.answers = [raws(0, 5), raws(0, *range(6, 5 + BATCH))]
    reading.turn()
    assert [count for count, _ in reading.client.consumed] == [1, BATCH - 1]
    assert sum(len(run) for _, run, _ in runs(reading)) == BATCH and reading.announced[-1]
    reading.client.answers = [raws(0, 5 + BATCH), []]
    reading.turn()
    assert sum(len(run) for _, run, _ in runs(reading)) == BATCH + 1 and not reading.announced[-1]


def test_an_announced_delivery_follows_without_a_message_and_without_a_wait(reading: Stand) -> None:
    reading.demand(2, 5_000)
    reading.client.answers = [raws(0, 5), raws(0, *range(6, 5 + BATCH))]
    reading.turn()
    assert reading.announced[-1:] == [True]
    del reading.announced[:-1]
    reading.forget()
    reading.turn()
    assert reading.announced == [True, False] and reading.told == []
    assert reading.client.consumed == [(BATCH, 0.0)], "one call, because it does not wait"
    reading.turn()
    assert reading.client.consumed[1:] == [(1, POLL)]


def test_nothing_is_read_for_a_demand_that_does_not_know_the_newest_assignment(reading: Stand) -> None:
    reading.demand(2, assigned=0)
    reading.turn()
    assert reading.client.consumed == [] and len(reading.queue.waits) == 1
    reading.demand(3, assigned=1)
    reading.turn()
    assert reading.client.consumed == [(1, POLL)]


def test_a_credit_in_bytes_is_exceeded_by_one_message_at_most(reading: Stand) -> None:
    reading.demand(2, credit=Credit(100, 1))
    reading.client.answers = [raws(0, 5)]
    reading.turn(2)
    assert runs(reading) == [(0, [5], 2)] and reading.client.consumed == [(1, POLL)]


def test_messages_without_content_are_read_without_a_bound_in_bytes(reading: Stand) -> None:
    reading.demand(2, 1_000)
    empty = [Raw(topic="t", partition=0, offset=offset) for offset in range(5, 305)]
    reading.client.answers = [empty[:1], empty[1:], raws(0, 305), []]
    reading.turn(2)
    assert [len(run) for _, run, _ in runs(reading)] == [300, 1]


def test_after_a_failure_nothing_is_read(reading: Stand) -> None:
    reading.fails(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    assert len(reading.failures) == 1
    reading.forget()
    reading.demand(10**6 + 1)
    reading.turn()
    assert reading.client.consumed == [], "until the loop closes the client, it is only kept in the group"
    reading.fails(KafkaError.GROUP_AUTHORIZATION_FAILED)
    assert len(reading.failures) == 1, "the first failure counts"
