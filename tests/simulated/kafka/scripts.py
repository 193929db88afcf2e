"""Scripts of the calls that ``lanes_kafka`` makes, for the simulated client and for a real client on a real broker.

A script plays on a ``Stage`` and returns its observations, which must be equal on both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final, Literal, Protocol

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, KafkaError, KafkaException, TopicPartition

from lanes_kafka.dead_letters.producer import producer_settings
from memsource.adapters.choices import DELIVER, Choice, Phase
from memsource.adapters.threads import SteppedThread
from memsource.kafka.broker import KafkaSettings
from memsource.kafka.client import Client, Code
from memsource.sim.loop.choosers import Fifo
from memsource.sim.loop.event_loop import current
from memsource.sim.loop.virtual import run
from tests.simulated.kafka.broker import SimulatedKafka
from tests.simulated.kafka.consumer import SimulatedConsumer
from tests.simulated.kafka.producer import LETTERS, SimulatedProducer

Guarded = Literal["group", "topic"]

_REFUSED: Final[dict[Guarded, Code]] = {
    "group": "GROUP_AUTHORIZATION_FAILED",
    "topic": "TOPIC_AUTHORIZATION_FAILED",
}

TURNS: Final = 300
"""The most calls of ``consume`` that a script makes until it has what it waits for."""

Seen = list[Any]


class Stage(Protocol):
    """A topic of two partitions with clients of one group on it, and the topic that producers write."""

    topic: str
    written: str

    def publish(self, partition: int, count: int) -> None:
        """Publish messages."""

    def delete(self, partition: int, before: int) -> None:
        """Delete the messages below a position, as retention does."""

    def forbid(self, what: Guarded) -> None:
        """Take the permission Read away from the clients."""

    def allow(self, what: Guarded) -> None:
        """Give the permission back."""

    def recreate(self) -> None:
        """Delete the topic with its commits, and create it again under its name."""

    def client(self, on_commit: Callable[..., object], instance: str | None = None) -> Any:
        """Make a client that has not subscribed, as a static member if it has an instance id."""

    def producer(self, settings: dict[str, Any], *, reachable: bool) -> Any:
        """Make a producer with the settings of ``lanes_kafka`` and these settings.

        Unless ``reachable``, the producer finds no broker.
        """


class Member:
    """A client that assigns partition 0 at a given position, as ``lanes_kafka`` does."""

    def __init__(self, stage: Stage, start: int = 0, instance: str | None = None) -> None:
        self.stage = stage
        self.heard: list[tuple[str, list[int]]] = []
        self.commits: list[tuple[str | None, list[tuple[int, int]]]] = []
        self.taken: list[tuple[int, int]] = []
        self.errors: list[tuple[str, int, int]] = []
        self.client = stage.client(self._on_commit, instance)
        self._start = start
        self.client.subscribe(
            [stage.topic], on_assign=self._on_assign, on_revoke=self._hears("revoke"), on_lost=self._hears("lost")
        )

    def at(self, partition: int, *more: Any) -> TopicPartition:
        return TopicPartition(self.stage.topic, partition, *more)

    def until(self, done: Callable[[], bool], count: int = 1) -> None:
        """Call ``consume`` until the condition holds."""
        for _ in range(TURNS):
            if done():
                return
            for message in self.client.consume(count, 0.1):
                error, place = message.error(), (message.partition(), message.offset())
                if error is None:
                    self.taken.append(place)
                else:
                    assert error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.TOPIC_AUTHORIZATION_FAILED), error
                    self.errors.append((error.name(), *place))
        raise AssertionError(f"never: {self.heard}, {self.taken}, {self.commits}")

    @property
    def owned(self) -> list[int]:
        return sorted(each.partition for each in self.client.assignment())

    def until_assigned(self) -> None:
        self.until(lambda: bool(self.heard))

    def position(self, partition: int) -> int:
        (found,) = self.client.position([self.at(partition)])
        return int(found.offset)

    def _on_assign(self, client: Any, partitions: list[TopicPartition]) -> None:
        self.heard.append(("assign", sorted(each.partition for each in partitions)))
        starts = {0: self._start}
        client.incremental_assign([self.at(each.partition, starts.get(each.partition, 0)) for each in partitions])

    def _hears(self, kind: str) -> Callable[[Any, list[TopicPartition]], None]:
        return lambda _, partitions: self.heard.append((kind, sorted(each.partition for each in partitions)))

    def _on_commit(self, error: KafkaError | None, partitions: list[TopicPartition]) -> None:
        self.commits.append(
            (None if error is None else error.name(), [(each.partition, each.offset) for each in partitions])
        )


def a_position_is_unknown_until_a_message_is_read(stage: Stage) -> Seen:
    stage.publish(0, 6)
    member = Member(stage, start=3)
    seen: Seen = [member.client.memberid() or ""]
    member.until_assigned()
    seen += [member.heard[:], bool(member.client.memberid()), sorted(p.partition for p in member.client.assignment())]
    member.until(lambda: len(member.taken) == 2)
    seen += [member.taken[:], member.position(0), member.position(1)]
    member.client.seek(member.at(0, 1))
    seen.append(member.position(0))
    member.until(lambda: len(member.taken) == 4)
    return [*seen, member.taken, member.position(0)]


def a_paused_partition_delivers_nothing(stage: Stage) -> Seen:
    member = Member(stage)
    member.until_assigned()
    member.client.pause([member.at(0)])
    stage.publish(0, 2)
    stage.publish(1, 2)
    member.until(lambda: len(member.taken) == 2)
    seen: Seen = [member.taken[:]]
    member.client.resume([member.at(0)])
    member.until(lambda: len(member.taken) == 4, count=5)
    return [*seen, member.taken]


def a_seek_reads_messages_again(stage: Stage) -> Seen:
    stage.publish(0, 5)
    member = Member(stage)
    member.until(lambda: len(member.taken) >= 5, count=2)
    member.client.seek(member.at(0, 3))
    member.until(lambda: len(member.taken) >= 7)
    return [member.taken]


def a_seek_of_an_unassigned_partition_is_refused(stage: Stage) -> Seen:
    client = stage.client(lambda *_: None)
    try:
        client.seek(TopicPartition(stage.topic, 0, 1))
    except KafkaException as failure:
        return [type(failure).__name__]
    return ["no error"]


def a_start_that_was_deleted_is_an_error(stage: Stage) -> Seen:
    stage.publish(0, 6)
    stage.delete(0, 4)
    member = Member(stage, start=1)
    member.until(lambda: bool(member.errors))
    seen: Seen = [member.errors[:], member.taken[:], member.position(0)]
    stage.publish(1, 1)
    # Another partition delivers its messages, and the error comes only once.
    member.until(lambda: len(member.taken) == 1)
    seen += [member.errors[:], member.taken[:]]
    member.client.incremental_unassign([member.at(0)])
    member.client.incremental_assign([member.at(0, 4)])
    member.until(lambda: len(member.taken) == 3)
    return [*seen, member.errors, member.taken]


def a_position_that_is_deleted_meanwhile_is_an_error(stage: Stage) -> Seen:
    stage.publish(0, 3)
    member = Member(stage)
    member.until(lambda: len(member.taken) == 3)
    member.client.pause([member.at(0)])
    stage.publish(0, 3)
    stage.delete(0, 5)
    member.client.resume([member.at(0)])
    member.until(lambda: bool(member.errors), count=5)
    seen: Seen = [member.errors[:], member.position(0)]
    bounds = [member.at(0, time) for time in (OFFSET_BEGINNING, OFFSET_END)]
    seen += [[each.offset for each in member.client.offsets_for_times([one], timeout=10.0)] for one in bounds]
    member.client.incremental_unassign([member.at(0)])
    member.client.incremental_assign([member.at(0, 5)])
    member.until(lambda: len(member.taken) == 4)
    return [*seen, member.errors, member.taken]


def commits_have_positions_and_metadata(stage: Stage) -> Seen:
    stage.publish(0, 5)
    member = Member(stage)
    member.until_assigned()
    answered = member.client.commit(offsets=[member.at(0, 2, "text")], asynchronous=False)
    seen: Seen = [[(each.partition, each.offset) for each in answered]]
    found = member.client.committed([member.at(0), member.at(1)], timeout=10.0)
    return [*seen, [(each.partition, each.offset, each.metadata or "") for each in found]]


def an_asynchronous_commit_is_answered_in_consume(stage: Stage) -> Seen:
    stage.publish(0, 1)
    member = Member(stage)
    member.until(lambda: len(member.taken) == 1)
    member.client.commit(offsets=[member.at(0, 1, "text")], asynchronous=True)
    seen: Seen = [member.commits[:]]
    # The broker answers the requests of one client in order.
    found = member.client.committed([member.at(0)], timeout=10.0)
    seen += [[(each.offset, each.metadata) for each in found], member.commits[:]]
    member.until(lambda: bool(member.commits))
    return [*seen, member.commits]


def logs_have_a_beginning_and_an_end(stage: Stage) -> Seen:
    stage.publish(0, 4)
    member = Member(stage)
    member.until(lambda: len(member.taken) == 4)
    seen: Seen = []
    for time in (OFFSET_BEGINNING, OFFSET_END):
        found = member.client.offsets_for_times([member.at(0, time), member.at(1, time)], timeout=10.0)
        seen.append([(each.partition, each.offset) for each in found])
    return [*seen, member.client.get_watermark_offsets(member.at(0), cached=True)[1]]


def a_client_that_unsubscribes_hears_of_a_last_revoke(stage: Stage) -> Seen:
    member = Member(stage)
    member.until_assigned()
    member.client.unsubscribe()
    member.until(lambda: not member.client.assignment())
    member.client.close()
    return [member.heard]


def a_recreated_topic_has_no_messages_and_no_commits(stage: Stage) -> Seen:
    asking = stage.client(lambda *_: None)

    def committed() -> list[tuple[int, int]]:
        places = [TopicPartition(stage.topic, 0)]
        return [(each.partition, each.offset) for each in asking.committed(places, timeout=10.0)]

    stage.publish(0, 3)
    member = Member(stage)
    member.until(lambda: len(member.taken) == 3)
    member.client.commit(offsets=[member.at(0, 3)], asynchronous=False)
    member.client.close()
    seen: Seen = [committed()]
    stage.recreate()
    seen.append(committed())
    stage.publish(0, 2)
    member = Member(stage)
    member.until(lambda: len(member.taken) == 2)
    return [*seen, member.taken]


def _together(members: Sequence[Member], done: Callable[[], bool]) -> None:
    """Let several members poll in turns until the condition holds."""
    for _ in range(TURNS):
        if done():
            return
        for each in members:
            each.client.consume(1, 0.1)
    raise AssertionError(f"never: {[each.heard for each in members]}")


def a_static_member_that_closes_keeps_its_partitions(stage: Stage) -> Seen:
    first, second = Member(stage, instance="i-0"), Member(stage, instance="i-1")
    _together([first, second], lambda: len(first.owned) == len(second.owned) == 1)
    (kept,), before = first.owned, len(second.heard)
    first.client.close()
    turns = iter(range(10))
    _together([second], lambda: next(turns, None) is None)
    back = Member(stage, instance="i-0")
    _together([second, back], lambda: bool(back.owned))
    return [back.owned == [kept], second.heard[before:]]


def a_static_member_that_unsubscribes_leaves(stage: Stage) -> Seen:
    first, second = Member(stage, instance="i-0"), Member(stage, instance="i-1")
    _together([first, second], lambda: len(first.owned) == len(second.owned) == 1)
    first.client.unsubscribe()
    _together([first, second], lambda: len(second.owned) == 2)
    return [second.owned]


SCRIPTS: Final[tuple[Callable[[Stage], Seen], ...]] = (
    a_position_is_unknown_until_a_message_is_read,
    a_paused_partition_delivers_nothing,
    a_seek_reads_messages_again,
    a_seek_of_an_unassigned_partition_is_refused,
    a_start_that_was_deleted_is_an_error,
    a_position_that_is_deleted_meanwhile_is_an_error,
    commits_have_positions_and_metadata,
    an_asynchronous_commit_is_answered_in_consume,
    logs_have_a_beginning_and_an_end,
    a_client_that_unsubscribes_hears_of_a_last_revoke,
    a_recreated_topic_has_no_messages_and_no_commits,
    a_static_member_that_closes_keeps_its_partitions,
    a_static_member_that_unsubscribes_leaves,
)


def _outcome(call: Callable[[], list[TopicPartition]]) -> list[Any]:
    """The name of the error of a call, or its result. A real client raises some errors, and returns other errors."""
    try:
        found = call()
    except KafkaException as failure:
        return [failure.args[0].name()]
    errors = sorted({each.error.name() for each in found if each.error is not None})
    return errors or [(each.partition, each.offset) for each in found]


def _answers(member: Member) -> Seen:
    client, places = member.client, [member.at(0), member.at(1)]
    ends = [member.at(number, OFFSET_END) for number in range(2)]
    member.commits.clear()
    seen: Seen = [_outcome(lambda: client.commit(offsets=[member.at(0, 1, "text")], asynchronous=False))]
    client.commit(offsets=[member.at(0, 2, "text")], asynchronous=True)
    member.until(lambda: bool(member.commits))
    seen.append(member.commits[:])
    return [
        *seen,
        _outcome(lambda: client.committed(places, timeout=10.0)),
        _outcome(lambda: client.offsets_for_times(ends, timeout=10.0)),
    ]


def a_group_without_permission_refuses_commits(stage: Stage) -> Seen:
    stage.publish(0, 3)
    member = Member(stage)
    member.until(lambda: len(member.taken) == 3)
    stage.forbid("group")
    seen = _answers(member)
    stage.publish(0, 1)
    # Reading goes on, because only the topic guards it.
    member.until(lambda: len(member.taken) == 4)
    stage.allow("group")
    return [*seen, *_answers(member), member.taken, member.errors]


def a_topic_without_permission_refuses_reads_and_commits(stage: Stage) -> Seen:
    stage.publish(0, 3)
    member = Member(stage)
    member.until(lambda: len(member.taken) == 3)
    stage.forbid("topic")
    member.until(lambda: len(member.errors) == 2)
    seen = [sorted(member.errors), *_answers(member)]
    stage.publish(0, 1)
    stage.allow("topic")
    member.until(lambda: len(member.taken) == 4)
    return [*seen, *_answers(member), member.taken, sorted(member.errors)]


GUARDED_SCRIPTS: Final[tuple[Callable[[Stage], Seen], ...]] = (
    a_group_without_permission_refuses_commits,
    a_topic_without_permission_refuses_reads_and_commits,
)
"""Scripts for a broker on which each operation needs a permission."""


class _CalmWorld:
    """A world without faults."""

    faulty = False

    @property
    def now(self) -> float:
        return current().time()

    def step(self, member: str, call: str, phase: Phase) -> None:
        pass

    def exchange(self, member: str, call: str, phase: Phase) -> Choice:
        return DELIVER

    def on_recreated(self) -> None:
        pass


class SimulatedStage:
    """The simulated broker and client, in virtual time and without faults."""

    written = LETTERS

    def __init__(self) -> None:
        self.broker = SimulatedKafka(Random(0), partitions=2, settings=KafkaSettings(protocol="cooperative"))
        self.topic = self.broker.topic
        self._names = 0

    def publish(self, partition: int, count: int) -> None:
        for _ in range(count):
            self.broker.publish(b"", partition=partition)

    def delete(self, partition: int, before: int) -> None:
        self.broker.delete_records(partition, before, self.broker.world.now)

    def forbid(self, what: Guarded) -> None:
        self.broker.forbid(_REFUSED[what], math.inf)

    def allow(self, what: Guarded) -> None:
        self.broker.forbid(_REFUSED[what], 0.0)

    def recreate(self) -> None:
        self.broker.delete_topic(self.broker.world.now)
        self.broker.create_topic(self.broker.world.now)

    def client(self, on_commit: Callable[..., object], instance: str | None = None) -> SimulatedConsumer:
        self._names += 1
        client = Client(f"c-{self._names}", lambda: self.broker.world.now, instance)
        self.broker.introduce(client)
        return SimulatedConsumer(self.broker, client, {"on_commit": on_commit, "error_cb": lambda error: None})

    def producer(self, settings: dict[str, Any], *, reachable: bool) -> SimulatedProducer:
        self.broker.introduce(Client("p", lambda: self.broker.world.now))
        if not reachable:
            self.broker.stop_broker(self.broker.world.now)
        return self.broker.producer("p", produced_with("simulated:9092", settings))


def produced_with(address: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a producer of ``lanes_kafka``."""
    return producer_settings({"bootstrap.servers": address} | settings) | {"error_cb": lambda error: None}


def simulated(script: Callable[[Stage], Seen]) -> Seen:
    """Play a script on the simulated client."""
    seen: Seen = []

    async def main() -> None:
        stage = SimulatedStage()
        world: Any = _CalmWorld()
        stage.broker.bind(world)
        thread = SteppedThread(target=lambda: seen.extend(script(stage)))
        thread.start()
        await thread.ended()

    run(main, chooser=Fifo())
    return seen
