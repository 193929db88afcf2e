"""Members of one group in this process: the events of each, the calls of its client, and the runs of its handler."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal, NamedTuple

import anyio
import anyio.abc
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka import Message as Raw
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource

import lanes
from lanes.core.types import Message, Partition, Room, Settlement
from lanes.source import Assigned, DeadLetters, Lost, Revoking, SourceEvent, SourceTraits
from lanes_kafka import KafkaSource
from tests.kafka.workload import QUIET, Topic

_CLASSIC: dict[str, Any] = {"session.timeout.ms": 6_000, "heartbeat.interval.ms": 200}
PROTOCOLS: dict[str, dict[str, Any]] = {
    "eager": _CLASSIC,
    "cooperative": {**_CLASSIC, "partition.assignment.strategy": "cooperative-sticky"},
    "848": {"group.protocol": "consumer"},
}
"""Settings of a member by protocol. For 848 the shared broker has a session of 6 s and heartbeats every 0.5 s."""

What = Literal["assigned", "revoking", "lost", "released", "start", "end", "commit", "close"]


class Happened(NamedTuple):
    """``position``: the start of an assignment, or a position that a handler ran or that was committed."""

    what: What
    member: str
    partition: int = -1
    position: int = -1


class Story:
    """The events of this process, in order, from any thread."""

    def __init__(self) -> None:
        self.events: list[Happened] = []

    def note(self, what: What, member: str, partition: int = -1, position: int = -1) -> None:
        self.events.append(Happened(what, member, partition, position))

    def of(self, what: What, member: str | None = None, partition: int | None = None) -> list[Happened]:
        """The events of this kind, and of this member and partition if they are given."""
        return [
            each
            for each in list(self.events)
            if each.what == what and member in (None, each.member) and partition in (None, each.partition)
        ]

    def at(self, what: What, member: str | None = None, partition: int | None = None) -> int:
        """The index of the last such event. Raises ``IndexError`` without one."""
        return len(self.events) - 1 - self.events[::-1].index(self.of(what, member, partition)[-1])

    def owned(self, member: str) -> set[int]:
        """The partitions that a member owns."""
        owned: set[int] = set()
        for each in self.events:
            if each.member == member and each.what == "assigned":
                owned.add(each.partition)
            elif each.member == member and each.what in ("released", "lost"):
                owned.discard(each.partition)
        return owned


class Work:
    """The handlers of a test: each waits while its key is held, and then for ``pause`` seconds.

    Attributes:
        stubborn: Keys whose handlers ignore their cancellation.
        ended: Number of completions by partition and position.
        running: Partitions and keys of running handlers.
        violations: Two messages of a key at once, and first completions out of order.
    """

    def __init__(self, story: Story, pause: Callable[[Message], float] = lambda message: 0.0) -> None:
        self.story = story
        self.pause = pause
        self.stubborn: set[bytes] = set()
        self.ended: Counter[tuple[int, int]] = Counter()
        self.running: set[tuple[int, bytes | None]] = set()
        self.violations: list[str] = []
        self._last: defaultdict[tuple[int, bytes | None], int] = defaultdict(lambda: -1)
        self._held: dict[bytes, anyio.Event] = {}
        self._events: list[anyio.Event] = []

    def hold(self, *keys: bytes) -> None:
        """Let the next handlers of these keys wait."""
        self._held |= {key: anyio.Event() for key in keys}
        self._events += self._held.values()

    def held(self, key: bytes) -> anyio.Event:
        """The event that the running handlers of a key wait for, to release them alone after another ``hold``."""
        return self._held[key]

    def let_go(self, *keys: bytes) -> None:
        """Release the handlers of these keys, and hold no further ones."""
        for key in keys:
            self._held.pop(key).set()

    def let_all_go(self) -> None:
        """Release every handler, also those of a former ``hold``."""
        self._held.clear()
        for event in self._events:
            event.set()

    async def run(self, member: str, message: Message) -> None:
        number, position = message.partition.id.number, message.position
        lane = (number, message.key)
        self.story.note("start", member, number, position)
        if lane in self.running:
            self.violations.append(f"two at once of {lane} at {position} in {member}")
        self.running.add(lane)
        try:
            with anyio.CancelScope(shield=message.key in self.stubborn):
                held = self._held.get(message.key or b"")
                if held is not None:
                    await held.wait()
                await anyio.sleep(self.pause(message))
        finally:
            self.running.discard(lane)
        if not self.ended[number, position]:
            if self._last[lane] > position:
                self.violations.append(f"{position} of {lane} in {member} after {self._last[lane]}")
            self._last[lane] = position
        self.ended[number, position] += 1
        self.story.note("end", member, number, position)


class Client(Consumer):
    """A client that records its calls. ``freeze`` lets every poll hang until ``thaw``.

    Attributes:
        withhold: Whether answers to commits are dropped.
        paused: Partitions that are paused.
        pauses: Number of calls of ``pause``.
        fetched: Partitions whose messages it handed out.
        inside: The call that has not returned yet.
        polls: Number of polls.
        thread: The thread that created it.
        strangers: Other threads that called it.
    """

    def __init__(self, config: dict[str, Any], member: str, story: Story) -> None:
        self._on_commit: Callable[..., None] = config["on_commit"]
        super().__init__({**config, "on_commit": self._answered})
        self.withhold = False
        self.paused: set[int] = set()
        self.pauses = 0
        self.fetched: set[int] = set()
        self._running = threading.Event()
        self._running.set()
        self.member = member
        self.story = story
        self.inside: str | None = None
        self.polls = 0
        self.strangers: set[int] = set()
        self.thread = threading.get_ident()

    def freeze(self) -> None:
        self._running.clear()

    def thaw(self) -> None:
        self._running.set()

    def consume(self, *arguments: Any, **named: Any) -> Any:
        self._running.wait()
        self.polls += 1
        found: list[Raw] = self._call("consume", *arguments, **named)
        self.fetched |= {number for raw in found if raw.error() is None and (number := raw.partition()) is not None}
        return found

    def commit(self, *arguments: Any, **named: Any) -> Any:
        offsets: list[TopicPartition] = named["offsets"]
        for each in offsets:
            self.story.note("commit", self.member, each.partition, each.offset)
        return self._call("commit", *arguments, **named)

    def close(self) -> None:
        self.story.note("close", self.member)
        self._call("close")

    def pause(self, partitions: list[TopicPartition]) -> None:
        self.pauses += 1
        self.paused |= {each.partition for each in partitions}
        self._call("pause", partitions)

    def resume(self, partitions: list[TopicPartition]) -> None:
        self.paused -= {each.partition for each in partitions}
        self._call("resume", partitions)

    def _answered(self, *arguments: Any) -> None:
        if not self.withhold:
            self._on_commit(*arguments)

    def _call(self, name: str, *arguments: Any, **named: Any) -> Any:
        if threading.get_ident() != self.thread:
            self.strangers.add(threading.get_ident())
        before, self.inside = self.inside, name
        # After a nested call of these, confluent-kafka ends the process at the next callback of the outer call.
        assert before is None or name not in ("consume", "close"), f"{name} was called within {before}"
        try:
            return getattr(super(), name)(*arguments, **named)
        finally:
            self.inside = before


class RecordingSource:
    """A source that records its events."""

    def __init__(self, source: KafkaSource, member: str, story: Story) -> None:
        self._source = source
        self._member = member
        self._story = story

    async def open(self) -> SourceTraits:
        return await self._source.open()

    async def receive(self, room: Room) -> Sequence[SourceEvent]:
        events = await self._source.receive(room)
        for event in events:
            if isinstance(event, Assigned):
                self._note("assigned", event.partition, event.partition.floor)
            elif isinstance(event, Revoking):
                self._note("revoking", event.partition)
            elif isinstance(event, Lost):
                self._note("lost", event.partition)
        return events

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        await self._source.settle(settlements)

    async def extend(self, messages: Sequence[Message]) -> None:
        await self._source.extend(messages)

    async def release(self, partition: Partition) -> None:
        # Recorded before the call, because no other member may own the partition earlier.
        self._note("released", partition)
        await self._source.release(partition)

    async def aclose(self) -> None:
        await self._source.aclose()

    def _note(self, what: What, partition: Partition, position: int | None = None) -> None:
        self._story.note(what, self._member, partition.id.number, -1 if position is None else position)


class Member:
    """One consumer, the clients it has created, and the failure that its run ended with."""

    def __init__(
        self,
        name: str,
        work: Work,
        config: dict[str, Any],
        settings: lanes.Settings,
        dead_letters: DeadLetters | None = None,
        attempts: lanes.Attempts | None = None,
        **source: Any,
    ) -> None:
        self.name = name
        self.clients: list[Client] = []
        self.failure: Exception | None = None
        self.ended = anyio.Event()
        self._work = work
        told = RecordingSource(KafkaSource(config, client=self._make, **source), name, work.story)
        self.consumer = lanes.Consumer(
            told, self._handle, settings=settings, dead_letters=dead_letters, attempts=attempts
        )

    @property
    def client(self) -> Client:
        """The newest client."""
        return self.clients[-1]

    async def run(self) -> None:
        try:
            await self.consumer.run()
        except Exception as failure:
            self.failure = failure
        self.ended.set()

    async def polled(self, times: int) -> None:
        """Wait for a number of further polls of the client."""
        before = self.client.polls
        while self.client.polls < before + times:
            await anyio.sleep(0.01)

    async def _handle(self, message: Message) -> None:
        await self._work.run(self.name, message)

    def _make(self, config: dict[str, Any]) -> Client:
        client = Client(config, self.name, self._work.story)
        self.clients.append(client)
        return client


class Group:
    """A group of one protocol on one topic; its members share ``config``."""

    def __init__(
        self, topic: Topic, protocol: str, work: Work, tasks: anyio.abc.TaskGroup, config: dict[str, Any]
    ) -> None:
        self.topic = topic
        self.id = f"g-{topic.name}"
        self.members: list[Member] = []
        self._work = work
        self._tasks = tasks
        self._config = {
            **QUIET,
            "bootstrap.servers": topic.url,
            "group.id": self.id,
            "max.poll.interval.ms": 60_000,
            **PROTOCOLS[protocol],
            **config,
        }

    def start(
        self, name: str, *, config: dict[str, Any] | None = None, settings: lanes.Settings | None = None, **more: Any
    ) -> Member:
        """Let a member join, without waiting. ``more``: its dead letters and attempts, and arguments of its source."""
        member = Member(
            name,
            self._work,
            {**self._config, **(config or {})},
            settings or lanes.Settings(),
            topics=self.topic.name,
            **more,
        )
        self.members.append(member)
        self._tasks.start_soon(member.run)
        return member

    async def owning(self, **counts: int) -> None:
        """Wait until each member owns its given number of partitions."""
        story = self._work.story
        while any(len(story.owned(name)) != count for name, count in counts.items()):
            self.look()
            await anyio.sleep(0.01)

    def look(self) -> None:
        """Raise the failure of a member."""
        for member in self.members:
            if member.failure is not None:
                raise member.failure

    def size(self) -> int:
        """Number of members that the broker knows. Blocks."""
        return len(self.topic.admin.describe_consumer_groups([self.id])[self.id].result(10).members)

    def committed(self) -> list[int | None]:
        """The committed position of each partition. Blocks."""
        return self.topic.committed(self.id)


def short_sessions(topic: Topic, protocol: str) -> dict[str, Any]:
    """Arguments of ``group`` for sessions of 1 s and a poll interval of 2 s, in which a drain may take 1.6 s."""
    if protocol == "848":
        resource = ConfigResource(ConfigResource.Type.GROUP, f"g-{topic.name}")
        for name, value in (("consumer.session.timeout.ms", "1000"), ("consumer.heartbeat.interval.ms", "200")):
            resource.add_incremental_config(ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET))
        topic.admin.incremental_alter_configs([resource])[resource].result(10)
        return {"max_poll_interval_ms": 2_000}
    return {"max_poll_interval_ms": 2_000, "session_timeout_ms": 1_000, "heartbeat_interval_ms": 200}


@asynccontextmanager
async def group(topic: Topic, protocol: str, work: Work, **config: Any) -> AsyncIterator[Group]:
    """A group whose members are drained at the end of the block. ``config``: settings, with _ for the dots."""
    settings = {name.replace("_", "."): value for name, value in config.items()}
    async with anyio.create_task_group() as tasks:
        group = Group(topic, protocol, work, tasks, settings)
        try:
            yield group
        except BaseException:
            # A handler that ignores its cancellation would never end, and neither would the task group.
            work.let_all_go()
            raise
        for member in group.members:
            member.consumer.stop()
        for member in group.members:
            await member.ended.wait()
