"""The question for the members of the group after a freeze, and the session that decides which freezes count.

This file is longer than most, because all its tests share one group and its questions.
"""

from __future__ import annotations

import logging
import re
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from lanes.core.types import Partition, PartitionId
from lanes.source import Lost, SourceEvent
from lanes_kafka.bridge import Answer
from lanes_kafka.broker import COORDINATOR_TIMEOUT, QUESTION_TIMEOUT
from lanes_kafka.client.group import Group
from lanes_kafka.client.mailbox import Confirm
from lanes_kafka.client.membership import SESSION_EVERY, Membership, Session, SessionWatch, session_of
from lanes_kafka.client.records import READER
from lanes_kafka.config import client_config
from tests.components import KafkaServer, wait_until
from tests.conftest import KafkaFactory
from tests.kafka.conftest import MakeTopic
from tests.kafka.members import PROTOCOLS
from tests.kafka.reader import NOTHING, Reader

HERE = {"bootstrap.servers": "localhost:9092", "group.id": "g"}


class Asked(Answer[Sequence[Partition]]):
    """The answer to a command: ``given`` holds the confirmed partitions of each answer."""

    def __init__(self) -> None:
        self.given_up = False
        self.given: list[Sequence[Partition]] = []

    def give(self, value: Sequence[Partition]) -> None:
        self.given.append(value)


class FakeAdmin:
    """An admin client that adds its questions to a list."""

    def __init__(self, questions: list[Future[Any]]) -> None:
        self._questions = questions

    def describe_consumer_groups(self, groups: list[str], request_timeout: float) -> dict[str, Future[Any]]:
        # A shorter timeout may end the process when the coordinator is back.
        assert groups == ["g"] and request_timeout == COORDINATOR_TIMEOUT
        future: Future[Any] = Future()
        self._questions.append(future)
        return {"g": future}

    def poll(self, timeout: float) -> int:
        return 0


class FakeGroup:
    """The admin client of a group, the group's consumer, and what the thread of the consumer does.

    Attributes:
        member: The member id of the consumer.
        lost: The reasons of presumed losses.
        polls: Number of polls.
        taken: Partitions that a poll takes away.
        questions: The questions so far.
        clients: The admin clients so far.
        refused: Errors with which the next admin clients cannot be made.
        doubted: Whether partitions that were presumed lost wait for ``trust``.
        presumed: Whether partitions were presumed lost.
    """

    def __init__(self, *numbers: int) -> None:
        self.now = 100.0
        self.member: str | None = "me"
        self.lost: list[str] = []
        self.polls = 0
        self.taken: list[PartitionId] = []
        self.questions: list[Future[Any]] = []
        self.clients: list[weakref.ref[FakeAdmin]] = []
        self.refused: list[int] = []
        self.doubted = self.presumed = False
        self.partitions = [Partition(PartitionId("t", number), READER, floor=0) for number in numbers]
        self.owned = {each.id: each for each in self.partitions}
        self.membership = Membership(
            client_config(HERE),
            self.make,
            cast(Group, self),
            lambda: Session(6.0, 2.0),
            self.lose,
            lambda: self.now,
            "kafka g/t",
        )

    # the admin client, the consumer, and the group
    def make(self) -> AdminClient:
        if self.refused:
            raise KafkaException(KafkaError(self.refused.pop()))
        admin = FakeAdmin(self.questions)
        self.clients.append(weakref.ref(admin))
        return cast(AdminClient, admin)

    def memberid(self) -> str | None:
        return self.member

    def assignment(self, partition: Partition) -> Partition | None:
        return self.owned.get(partition.id)

    def poll(self) -> None:
        self.polls += 1
        for one in self.taken:
            del self.owned[one]

    def lose(self, reason: str) -> None:
        self.lost.append(reason)
        self.owned.clear()
        self.presumed = True

    def doubt(self) -> None:
        self.doubted = self.presumed

    def trust(self) -> None:
        self.doubted = False

    def in_doubt(self) -> bool:
        return self.doubted

    # the calls of a test
    def confirm(self) -> Asked:
        answer = Asked()
        self.membership.ask(Confirm(self.partitions, answer))
        return answer

    def advance(self) -> None:
        self.membership.advance(cast(Consumer, self), self.poll)

    def members(self, *names: str) -> None:
        """Answer the newest question."""
        self.questions[-1].set_result(SimpleNamespace(members=[SimpleNamespace(member_id=name) for name in names]))
        self.advance()

    def error(self, code: int) -> None:
        self.questions[-1].set_exception(KafkaException(KafkaError(code)))
        self.advance()


def test_a_question_without_an_answer_closes_its_client_and_is_repeated() -> None:
    group = FakeGroup(0)
    asked = group.confirm()
    group.advance()
    group.now += 2 * QUESTION_TIMEOUT - 0.1
    group.advance()
    assert len(group.questions) == 1 and group.clients[0]() is not None
    group.now += 0.2
    group.advance()
    assert group.clients[0]() is None and asked.given == []
    group.advance()
    assert len(group.questions) == 2
    group.members("me")
    assert asked.given == [group.partitions] and group.clients[1]() is None


def test_a_client_that_cannot_be_made_is_made_again() -> None:
    group = FakeGroup(0)
    group.refused = [KafkaError._FAIL]
    asked = group.confirm()
    group.advance()
    assert not group.questions and asked.given == []
    group.now += 1.0
    group.advance()
    group.members("me")
    assert asked.given == [group.partitions]


def test_a_listed_member_owns_its_partitions() -> None:
    group = FakeGroup(0, 1)
    answer = group.confirm()
    assert group.membership
    group.advance()
    assert answer.given == []
    group.members("you", "me")
    assert (answer.given, group.polls, group.lost) == ([group.partitions], 1, [])
    assert not group.membership


def test_a_member_that_is_not_listed_has_lost_its_partitions() -> None:
    group = FakeGroup(0, 1)
    answer = group.confirm()
    group.advance()
    group.members("you")
    assert answer.given == [[]]
    assert group.lost == ["the group removed this member while no thread of the process ran"]
    assert group.in_doubt()


def test_a_newer_list_with_the_member_ends_the_doubt() -> None:
    """The client may believe in its partitions for long, because its heartbeats get no answer."""
    group = FakeGroup(0)
    group.confirm()
    group.advance()
    for number in range(2, 5):
        group.members("you")
        assert group.in_doubt()
        group.advance()
        assert len(group.questions) == number - 1, "the next question waits for its time"
        group.now += 5.0
        group.advance()
        assert len(group.questions) == number
    group.error(KafkaError._TRANSPORT)
    group.now += 5.0
    group.advance()
    assert group.in_doubt()
    group.members("you", "me")
    assert not group.in_doubt()
    group.now += 60.0
    group.advance()
    assert (len(group.questions), len(group.lost)) == (5, 3)


def test_a_list_from_before_a_freeze_does_not_end_the_doubt() -> None:
    group = FakeGroup(0)
    group.confirm()
    group.advance()
    group.members("you")
    group.now += 5.0
    group.advance()
    # The process is frozen between the answer of the broker and this turn.
    answer = group.confirm()
    group.members("me")
    assert group.in_doubt()
    group.advance()
    assert (answer.given, len(group.questions)) == ([[]], 3)
    group.members("me")
    assert not group.in_doubt()


def test_a_freeze_puts_a_presumed_loss_in_doubt() -> None:
    group = FakeGroup(0)
    group.lose("the client was not polled for max.poll.interval.ms")
    assert not group.in_doubt()
    answer = group.confirm()
    group.advance()
    assert (answer.given, group.doubted, len(group.questions)) == ([[]], True, 1)
    group.members("me")
    assert not group.in_doubt()


def test_a_client_that_has_left_its_group_asks_nothing_in_doubt() -> None:
    group = FakeGroup(0)
    group.confirm()
    group.advance()
    group.members("you")
    group.member = None
    group.now += 5.0
    group.advance()
    assert (group.doubted, len(group.questions)) == (True, 1)


def test_a_callback_after_the_answer_takes_partitions_away() -> None:
    group = FakeGroup(0, 1)
    answer = group.confirm()
    group.advance()
    group.taken = [PartitionId("t", 0)]
    group.members("me")
    assert answer.given == [group.partitions[1:]]


@pytest.mark.parametrize("now", ["another", None, ""])
def test_an_answer_about_a_former_member_id_confirms_nothing(now: str | None) -> None:
    group = FakeGroup(0)
    answer = group.confirm()
    group.advance()
    group.member = now
    group.members("me", "another")
    # The client reports the loss by itself.
    assert (answer.given, group.lost) == ([[]], [])


def test_a_client_without_a_member_id_asks_nothing() -> None:
    group = FakeGroup(0)
    group.member = None
    answer = group.confirm()
    group.advance()
    assert (answer.given, group.questions) == ([[]], [])


def test_a_question_from_before_a_command_does_not_answer_it() -> None:
    group = FakeGroup(0)
    first = group.confirm()
    group.advance()
    second = group.confirm()
    group.members("me")
    assert (first.given, second.given) == ([group.partitions], [])
    group.advance()
    group.members("me")
    assert (second.given, len(group.questions)) == ([group.partitions], 2)


def test_a_question_without_answer_is_repeated() -> None:
    group = FakeGroup(0)
    answer = group.confirm()
    group.advance()
    for code in (KafkaError._TRANSPORT, KafkaError._TIMED_OUT, KafkaError.NOT_COORDINATOR):
        group.error(code)
        asked = len(group.questions)
        group.advance()
        assert len(group.questions) == asked
        group.now += 1.0
        group.advance()
        assert (answer.given, len(group.questions)) == ([], asked + 1)
    group.members("me")
    assert answer.given == [group.partitions]


def loading(group: FakeGroup, seconds: int) -> None:
    """Let the coordinator answer every question for some time that it loads the group."""
    for _ in range(10 * seconds):
        group.now += 0.1
        group.advance()
        if group.questions and not group.questions[-1].done():
            group.error(KafkaError.COORDINATOR_LOAD_IN_PROGRESS)


def test_a_coordinator_that_loads_is_logged_once_and_then_every_30_s(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lanes.kafka")
    group = FakeGroup(0)
    answer = group.confirm()
    loading(group, 65)
    assert 60 <= len(group.questions) <= 66
    assert [each.levelname for each in caplog.records] == ["INFO", "WARNING", "WARNING"]
    first, second, third = caplog.messages
    assert first.startswith("kafka g/t: the broker does not list the members of the group, retrying (")
    assert "COORDINATOR_LOAD_IN_PROGRESS" in first
    for line, least in ((second, 30), (third, 60)):
        waited = re.match(r"kafka g/t: handlers wait for (\S+) s after a freeze, because the broker does not", line)
        assert waited and least <= float(waited[1]) < least + 2
    group.now += 1.0
    group.advance()
    group.members("me")
    assert answer.given == [group.partitions]
    # The next confirmation is logged again.
    group.confirm()
    loading(group, 5)
    assert [each.levelname for each in caplog.records[3:]] == ["INFO"]


def test_a_question_that_never_ends_is_repeated() -> None:
    group = FakeGroup(0)
    answer = group.confirm()
    group.advance()
    group.now += 10.0
    group.advance()
    group.advance()
    assert (answer.given, len(group.questions)) == ([], 2)
    group.members("me")
    assert answer.given == [group.partitions]


@pytest.mark.parametrize("code", [KafkaError.GROUP_AUTHORIZATION_FAILED, KafkaError._UNSUPPORTED_FEATURE])
def test_without_permission_a_heartbeat_confirms(code: int, caplog: pytest.LogCaptureFixture) -> None:
    group = FakeGroup(0)
    answer = group.confirm()
    group.advance()
    group.error(code)
    group.now += 2.9
    group.advance()
    assert answer.given == []
    group.now += 0.2
    group.advance()
    assert (answer.given, group.polls) == ([group.partitions], 1)
    (line,) = caplog.messages
    assert "handlers wait 3.0 s for a heartbeat after a freeze" in line
    assert "allow DESCRIBE on the group" in line


def test_a_command_that_was_given_up_asks_nothing() -> None:
    group = FakeGroup(0)
    group.confirm().given_up = True
    group.advance()
    assert (group.questions, bool(group.membership)) == ([], False)


def test_the_end_of_the_client_answers_all_commands() -> None:
    group = FakeGroup(0)
    first = group.confirm()
    group.advance()
    second = group.confirm()
    group.membership.end()
    assert (first.given, second.given, bool(group.membership)) == ([()], [()], False)


class Listing(AdminClient):
    """An admin client whose lists of members are empty while ``hides`` is set. ``lists``: number of lists."""

    hides = False
    lists = 0

    def describe_consumer_groups(  # type: ignore[override]
        self, group_ids: list[str], **named: Any
    ) -> dict[str, Future[Any]]:
        Listing.lists += 1
        if not Listing.hides:
            return super().describe_consumer_groups(group_ids, **named)
        future: Future[Any] = Future()
        future.set_result(SimpleNamespace(members=[]))
        return dict.fromkeys(group_ids, future)


@pytest.mark.anyio
@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_removed_member_starts_nothing_although_its_client_believes_in_its_partitions(
    protocol: str, topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lanes_kafka.client.thread.AdminClient", Listing)
    monkeypatch.setattr("lanes_kafka.client.group._RECLAIM_AFTER", 0.1)
    monkeypatch.setattr("lanes_kafka.client.membership._LOOK_EVERY", 0.1)
    monkeypatch.setattr(Listing, "hides", False)
    reader = Reader(topic(1), protocol)
    await reader.source.open()
    try:
        (partition,) = await reader.assigned()
        assert await reader.source.confirm([partition]) == [partition]
        Listing.hides = True
        assert await reader.source.confirm([partition]) == []
        lost = await reader.next_event()
        assert isinstance(lost, Lost)
        assert lost.reason == "the group removed this member while no thread of the process ran"
        events: list[SourceEvent] = []
        lists = Listing.lists
        with anyio.fail_after(20.0):
            # The thread looks for partitions to reclaim at least every half second.
            while Listing.lists < lists + 10:
                with anyio.move_on_after(0.1):
                    events += await reader.source.receive(NOTHING)
                assert events == []
        # The first list was wrong: the member is in the next one.
        Listing.hides = False
        (again,) = await reader.assigned()
        assert again.id == partition.id and again is not partition
    finally:
        await reader.source.aclose()


@pytest.mark.anyio
async def test_a_question_outlives_a_broker_that_stands_still(
    fresh_kafka: KafkaFactory, topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question that timed out would end the process when the broker is back."""
    monkeypatch.setattr("lanes_kafka.client.membership._GIVEN_UP_AFTER", 0.3)
    monkeypatch.setattr("lanes_kafka.client.thread.AdminClient", Listing)
    monkeypatch.setattr(Listing, "hides", False)
    server = fresh_kafka()
    reader = Reader(topic(1, on=server), "848")
    await reader.source.open()
    try:
        (partition,) = await reader.assigned()
        server.pause()
        confirmed: list[Sequence[Partition]] = []

        async def confirm() -> None:
            confirmed.append(await reader.source.confirm([partition]))

        async with anyio.create_task_group() as tasks:
            lists = Listing.lists
            tasks.start_soon(confirm)
            with anyio.fail_after(20.0):
                while Listing.lists < lists + 3:
                    await anyio.sleep(0.05)
            assert confirmed == []
            server.resume()
    finally:
        await reader.source.aclose()
    assert len(confirmed) == 1


# --- the session


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({}, 41.0),
        ({"session.timeout.ms": 6_000}, 2.0),
        ({"session.timeout.ms": 10_000, "heartbeat.interval.ms": 500}, 8.5),
    ],
)
def test_the_freeze_limit_of_a_classic_client_follows_from_its_intervals(
    settings: dict[str, Any], limit: float
) -> None:
    config = client_config(HERE | settings)
    assert session_of(config, cast(Any, None)).freeze_limit == limit


def test_the_session_under_848_is_that_of_the_group(kafka: KafkaServer, topic: MakeTopic) -> None:
    events = topic(1)
    config = client_config(events.config(**{"group.protocol": "consumer"}))
    # The group has no settings of its own: those of the broker count.
    assert session_of(config, events.admin) == Session(6.0, 0.5)
    resource = ConfigResource(ResourceType.GROUP, config.group)
    for name, value in (("session.timeout", "7000"), ("heartbeat.interval", "900")):
        entry = ConfigEntry(f"consumer.{name}.ms", value, incremental_operation=AlterConfigOpType.SET)
        resource.add_incremental_config(entry)
    events.admin.incremental_alter_configs([resource])[resource].result(10)
    wait_until(lambda: session_of(config, events.admin) == Session(7.0, 0.9), "the settings of the group")


def test_a_session_that_changes_is_read_again(kafka: KafkaServer, topic: MakeTopic) -> None:
    events = topic(1)
    config = client_config(events.config(**{"group.protocol": "consumer"}))
    now = 0.0
    watch = SessionWatch(config, lambda: events.admin, lambda: now, session_of(config, events.admin))
    assert watch.session == Session(6.0, 0.5)
    resource = ConfigResource(ResourceType.GROUP, config.group)
    entry = ConfigEntry("consumer.session.timeout.ms", "5000", incremental_operation=AlterConfigOpType.SET)
    resource.add_incremental_config(entry)
    events.admin.incremental_alter_configs([resource])[resource].result(10)

    def changed() -> bool:
        nonlocal now
        now += SESSION_EVERY
        watch.refresh()
        return watch.session == Session(5.0, 0.5)

    wait_until(changed, "the new session of the group")


class GroupSettings:
    """An admin client that answers questions for the settings of a group. ``asked``: the questions so far."""

    def __init__(self) -> None:
        self.asked: list[Future[Any]] = []

    def describe_configs(self, resources: list[Any], request_timeout: float) -> dict[Any, Future[Any]]:
        self.asked.append(Future())
        return {resources[0]: self.asked[-1]}


def watch_of(settings: dict[str, Any], clock: list[float]) -> tuple[SessionWatch, GroupSettings]:
    admin = GroupSettings()
    config = client_config(HERE | settings)
    return SessionWatch(config, lambda: cast(Any, admin), lambda: clock[0], Session(45.0, 5.0)), admin


def test_the_session_is_asked_for_every_minute() -> None:
    clock = [0.0]
    watch, admin = watch_of({"group.protocol": "consumer"}, clock)
    watch.refresh()
    clock[0] = 59.0
    watch.refresh()
    assert admin.asked == []
    clock[0] = 60.0
    watch.refresh()
    watch.refresh()
    (question,) = admin.asked
    # A setting without a value keeps the former one.
    entry = SimpleNamespace(name="consumer.session.timeout.ms", value="10000")
    question.set_result({entry.name: entry})
    watch.refresh()
    assert watch.session == Session(10.0, 5.0)
    clock[0] = 120.0
    watch.refresh()
    admin.asked[-1].set_exception(KafkaException(KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED)))
    watch.refresh()
    assert (watch.session, len(admin.asked)) == (Session(10.0, 5.0), 2)


def test_the_session_of_a_classic_client_is_its_own() -> None:
    clock = [0.0]
    watch, admin = watch_of({}, clock)
    clock[0] = 1e6
    watch.refresh()
    assert (watch.session, admin.asked) == (Session(45.0, 5.0), [])


class Refusing:
    """An admin client that may read no settings, or only the settings of a broker.

    Args:
        broker: The settings of the broker; None = the user may not read them.
        code: The error of the other questions.
    """

    def __init__(self, broker: dict[str, str] | None, code: int = KafkaError.CLUSTER_AUTHORIZATION_FAILED) -> None:
        self._broker = broker
        self._code = code

    def poll(self, timeout: float) -> None:
        pass

    def describe_cluster(self, request_timeout: float) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(SimpleNamespace(nodes=[SimpleNamespace(id=1)]))
        return future

    def describe_configs(self, resources: list[Any], request_timeout: float) -> dict[Any, Future[Any]]:
        (resource,) = resources
        future: Future[Any] = Future()
        if self._broker is None or resource.restype is ResourceType.GROUP:
            future.set_exception(KafkaException(KafkaError(self._code)))
        else:
            future.set_result({name: SimpleNamespace(name=name, value=value) for name, value in self._broker.items()})
        return {resource: future}


@pytest.mark.parametrize(
    ("broker", "session"),
    [
        (None, Session(45.0, 5.0)),
        ({}, Session(45.0, 5.0)),
        ({"group.consumer.session.timeout.ms": "30000"}, Session(30.0, 5.0)),
        (
            {"group.consumer.session.timeout.ms": "30000", "group.consumer.heartbeat.interval.ms": "2000"},
            Session(30.0, 2.0),
        ),
    ],
)
def test_a_setting_that_cannot_be_read_has_the_default(broker: dict[str, str] | None, session: Session) -> None:
    config = client_config(HERE | {"group.protocol": "consumer"})
    assert session_of(config, cast(Any, Refusing(broker))) == session


@pytest.mark.parametrize("broker", [None, {"group.consumer.session.timeout.ms": "30000"}])
def test_every_freeze_counts_while_no_broker_has_told_the_session(broker: dict[str, str] | None) -> None:
    """The group may have a shorter session than the broker."""
    config = client_config(HERE | {"group.protocol": "consumer"})
    session = session_of(config, cast(Any, Refusing(broker, KafkaError._TIMED_OUT)))
    assert session == Session(45.0, 5.0, known=False)
    assert session.freeze_limit == 0.0


def test_an_unknown_session_is_asked_for_every_five_seconds() -> None:
    clock = [0.0]
    admin = GroupSettings()
    config = client_config(HERE | {"group.protocol": "consumer"})
    unknown = Session(45.0, 5.0, known=False)
    watch = SessionWatch(config, lambda: cast(Any, admin), lambda: clock[0], unknown)
    clock[0] = 4.9
    watch.refresh()
    assert admin.asked == []
    clock[0] = 5.0
    watch.refresh()
    admin.asked[-1].set_exception(KafkaException(KafkaError(KafkaError._TIMED_OUT)))
    watch.refresh()
    assert watch.session == unknown
    clock[0] = 10.0
    watch.refresh()
    entry = SimpleNamespace(name="consumer.session.timeout.ms", value="10000")
    admin.asked[-1].set_result({entry.name: entry})
    watch.refresh()
    assert watch.session == Session(10.0, 5.0)
    clock[0] = 69.9
    watch.refresh()
    assert len(admin.asked) == 2
