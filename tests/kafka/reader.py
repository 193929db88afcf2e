"""One source on a mock cluster, called as an engine calls it, and the calls of its client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple

import anyio
from anyio.to_thread import run_sync
from confluent_kafka import Consumer, KafkaError, TopicPartition
from confluent_kafka import Message as Raw

from lanes.core.types import Message, Partition, Room, Settlement
from lanes.source import Assigned, Delivered, SourceEvent
from lanes_kafka import KafkaSource
from tests.kafka.members import PROTOCOLS
from tests.kafka.mock_cluster import MockCluster
from tests.kafka.remove_member import remove_member
from tests.kafka.workload import QUIET, Topic

ROOM: Final = Room(1_000, 1 << 20)
NOTHING: Final = Room(0, 0)
WITHIN: Final = 60.0


class Called(NamedTuple):
    """One call of a client; ``inside``: within a callback."""

    name: str
    inside: bool
    asynchronous: bool = False


class RecordingClient(Consumer):
    """A client that records its calls.

    Attributes:
        on_error: The ``error_cb`` of the source.
        calls: Calls of the client.
        member: Its id in the group.
        change: A function applied to the messages that ``consume`` returns.
        called_back: Callbacks of rebalances, before ``close`` and in it.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.on_error: Callable[[KafkaError], None] = config["error_cb"]
        self.calls: list[Called] = []
        self.member = ""
        self.change: Callable[[list[Raw]], list[Raw]] = lambda raws: raws
        self.called_back: dict[str, list[str]] = {"before": [], "in close": []}
        self._inside = False
        self._when = "before"

    def subscribe(self, topics: list[str], *arguments: Any, **callbacks: Any) -> None:
        super().subscribe(topics, *arguments, **{name: self._noting(name, call) for name, call in callbacks.items()})

    def _noting(self, name: str, call: Callable[..., None]) -> Callable[..., None]:
        def noted(*arguments: Any) -> None:
            self.called_back[self._when].append(name)
            call(*arguments)

        return noted

    def close(self) -> None:
        self._when = "in close"
        super().close()

    def consume(self, *arguments: Any, **named: Any) -> list[Raw]:
        self._inside = True
        try:
            raws = super().consume(*arguments, **named)
        finally:
            self._inside = False
        return self.change(raws)

    def commit(self, *arguments: Any, **named: Any) -> Any:
        self.calls.append(Called("commit", self._inside, named["asynchronous"]))
        return super().commit(*arguments, **named)

    def committed(self, *arguments: Any, **named: Any) -> list[TopicPartition]:
        self.calls.append(Called("committed", self._inside))
        return super().committed(*arguments, **named)

    def assign(self, *arguments: Any, **named: Any) -> None:
        self._assigned("assign")
        super().assign(*arguments, **named)

    def incremental_assign(self, *arguments: Any, **named: Any) -> None:
        self._assigned("incremental_assign")
        super().incremental_assign(*arguments, **named)

    def _assigned(self, name: str) -> None:
        self.calls.append(Called(name, self._inside))
        self.member = self.memberid() or ""

    def pause(self, *arguments: Any, **named: Any) -> None:
        self.calls.append(Called("pause", self._inside))
        super().pause(*arguments, **named)

    def resume(self, *arguments: Any, **named: Any) -> None:
        self.calls.append(Called("resume", self._inside))
        super().resume(*arguments, **named)


class Reader:
    """An open source; each wait has a timeout. ``instance``: its id as a static member."""

    def __init__(self, topic: Topic, protocol: str, *, instance: str | None = None, **source: Any) -> None:
        self.topic = topic
        self.group = f"g-{topic.name}"
        self.clients: list[RecordingClient] = []
        self._kept: Sequence[SourceEvent] = ()
        self._classic = protocol != "848"
        config = {
            **QUIET,
            "bootstrap.servers": topic.url,
            "group.id": self.group,
            "max.poll.interval.ms": 20_000,
            **PROTOCOLS[protocol],
            **({} if instance is None else {"group.instance.id": instance}),
        }
        self.source = KafkaSource(config, topics=topic.name, client=self._make, **source)

    def _make(self, config: dict[str, Any]) -> RecordingClient:
        self.clients.append(RecordingClient(config))
        return self.clients[-1]

    @property
    def client(self) -> RecordingClient:
        """The newest client."""
        return self.clients[-1]

    @property
    def rests(self) -> bool:
        """Whether the last of pauses and resumes was a pause."""
        return [call.name for call in self.client.calls if call.name in ("pause", "resume")][-1] == "pause"

    async def receive(self, room: Room = ROOM) -> Sequence[SourceEvent]:
        """Events that ``next_event`` has left over, or else new events of the source."""
        if self._kept:
            kept, self._kept = self._kept, ()
            return kept
        with anyio.fail_after(WITHIN):
            return await self.source.receive(room)

    async def next_event(self, room: Room = NOTHING) -> SourceEvent:
        """The next event; events that came with it are received later."""
        event, *self._kept = await self.receive(room)
        return event

    async def assigned(self, count: int = 1) -> list[Partition]:
        """The next assigned partitions."""
        found: list[Partition] = []
        while len(found) < count:
            for event in await self.receive(NOTHING):
                assert isinstance(event, Assigned), event
                found.append(event.partition)
        return found

    async def take(self, count: int) -> list[Message]:
        """The next messages; other events fail."""
        found: list[Message] = []
        while len(found) < count:
            for event in await self.receive(Room(count - len(found), 1 << 20)):
                assert isinstance(event, Delivered), event
                found += event.run
        return found

    async def settle(self, partition: Partition, floor: int, completed: Sequence[tuple[int, int]] = ()) -> None:
        with anyio.fail_after(WITHIN):
            await self.source.settle([Settlement(partition, [], floor, list(completed))])

    async def removed(self, client: RecordingClient | None = None) -> None:
        """Remove the client, or a former one, from its group."""
        member = (client or self.client).member
        await run_sync(lambda: remove_member(self.topic.url, self.group, member, classic=self._classic))

    async def committed(self) -> list[int | None]:
        return await run_sync(self.topic.committed, self.group)


@asynccontextmanager
async def reading(
    cluster: MockCluster, protocol: str, name: str, partitions: int = 1, **source: Any
) -> AsyncIterator[Reader]:
    """A source on a topic of this name, which is created if it is missing; closed at the end."""
    reader = Reader(topic_of(cluster, name, partitions), protocol, **source)
    await reader.source.open()
    try:
        yield reader
    finally:
        with anyio.CancelScope(shield=True):
            await reader.source.aclose()


def topic_of(cluster: MockCluster, name: str, partitions: int) -> Topic:
    """A topic of the mock cluster; an existing one keeps its messages."""
    topic = Topic(cluster.url, name, partitions)
    known = topic.admin.list_topics(timeout=WITHIN).topics
    if name not in known:
        cluster.create(name, partitions)
    return topic
