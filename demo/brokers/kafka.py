"""The demo's topics on a Kafka broker: publishing, the group's backlog and members, and the dead letters."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from confluent_kafka import OFFSET_INVALID, Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from demo.brokers.broker import Left, Published
from demo.brokers.coordinator import Coordinator
from demo.errors import DemoError, NoAnswer
from demo.events import Event
from demo.ledger import Step
from demo.membership import Snapshot
from lanes.clock import monotonic
from lanes.core.types import PartitionId
from lanes.history.recorder import Recorder
from lanes.queues.partitioned import PartitionedQueue

_BATCH: Final = 2_000
"""Maximum number of published and unconfirmed events."""

_WITHIN: Final = 5.0
"""Most seconds for an answer of the broker."""

_POLL: Final = 0.2
"""Maximum seconds for which a call of a client waits before it checks whether the caller has given up."""

_UNCONFIRMED: Final = frozenset({KafkaError.REQUEST_TIMED_OUT, KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND})
"""Errors after which a broker may have appended, or may still append, an event that it has not confirmed."""

_QUIET: Final = {"log_level": 0}

_Answer = TypeVar("_Answer")


class KafkaBroker:
    """A ``GroupBroker`` on Kafka, with its own topics and its own group.

    The ``width`` topics of ``queue`` share ``partitions`` partitions evenly, and ``dead_subject`` has one partition.
    Each topic has one replica. ``stream`` is the first topic.
    """

    def __init__(self, server: str, name: str, partitions: int, width: int = 1) -> None:
        self._server = server
        self.partitions = partitions
        self._made: list[str] = []
        # Threads ask the client, one question at a time.
        self._offsets = threading.Lock()
        self._closing = False
        self._admin: AdminClient
        self._reader: Consumer
        self._producer: Producer
        self.connected = False
        self.stream = f"declarations-{name}"
        self.queue = PartitionedQueue(self.stream, width)
        self.durable = f"approvals-{name}"
        self.dead_subject = f"dead-declarations-{name}"
        self._coordinator = Coordinator(server, self.durable)

    @property
    def _partitions_of_topic(self) -> int:
        return self.partitions // self.queue.partitions

    async def open(self) -> None:
        """See ``Broker.open``."""
        connect: dict[str, Any] = {**_QUIET, "bootstrap.servers": self._server}
        self._admin = AdminClient(connect)
        self._reader = Consumer({**connect, "group.id": self.durable, "enable.auto.commit": False})
        # An idempotent producer writes each event once and keeps the order in a partition, also after lost answers.
        self._producer = Producer({**connect, "enable.idempotence": True, "linger.ms": 5, "compression.type": "lz4"})
        try:
            await asyncio.to_thread(self._make)
        except KafkaException as failure:
            raise DemoError(
                f"no Kafka broker answers at {self._server} ({_said(failure)}): start a broker, or correct the address"
            ) from None
        self.connected = True

    def _make(self) -> None:
        self._admin.list_topics(timeout=_WITHIN)
        topics = [NewTopic(name, self._partitions_of_topic, 1) for name in self.queue.names]
        topics.append(NewTopic(self.dead_subject, 1, 1))
        for topic, made in self._admin.create_topics(topics, operation_timeout=_WITHIN).items():
            try:
                made.result()
            except KafkaException as failure:
                remedy = "see the broker's limits and permissions"
                if failure.args[0].code() == KafkaError.TOPIC_ALREADY_EXISTS:
                    remedy = "delete the topic, or choose another --name"
                raise DemoError(f"topic {topic} cannot be created ({_said(failure)}): {remedy}") from None
            self._made.append(topic)

    async def close(self) -> list[str]:
        """See ``Broker.close``."""
        self._closing = True
        if not hasattr(self, "_admin"):
            return []
        made, self._made = self._made, []
        stayed = await asyncio.to_thread(self._close, made)
        if made and self.connected:
            with contextlib.suppress(NoAnswer):
                await self._coordinator.delete()
        await self._coordinator.close()
        return stayed

    def _close(self, made: list[str]) -> list[str]:
        stayed = []
        with self._offsets:
            asked = self._admin.delete_topics(made, request_timeout=_WITHIN) if made and self.connected else {}
            for topic in made:
                try:
                    if topic in asked:
                        asked[topic].result()
                        continue
                except KafkaException as failure:
                    if failure.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                        continue
                stayed.append(topic)
            self._reader.close()
            self._producer.purge()
        return stayed

    # --- publishing

    async def publish(self, events: Sequence[Event], history: Recorder, published: Published) -> None:
        """See ``Broker.publish``."""
        for begin in range(0, len(events), _BATCH):
            batch = events[begin : begin + _BATCH]
            places = await asyncio.to_thread(self._produce, batch)
            now = monotonic()
            for event, (partition, offset) in zip(batch, places, strict=True):
                history.produced(partition, offset, event.case.encode(), now)
            await published(begin + len(batch))
        history.flush()

    def _produce(self, events: Sequence[Event]) -> list[tuple[PartitionId, int]]:
        """Publish the events, and return partition and offset of each.

        The call blocks until the broker has confirmed all events, or one event fails.
        """
        places: list[tuple[PartitionId, int]] = [(PartitionId(self.stream, -1), -1)] * len(events)
        failures: list[tuple[Event, KafkaError]] = []

        def confirmed(index: int, error: KafkaError | None, message: Message) -> None:
            if error is not None:
                failures.append((events[index], error))
                return
            topic, number, offset = message.topic(), message.partition(), message.offset()
            assert topic is not None and number is not None and offset is not None, "a confirmed message has a place"
            places[index] = PartitionId(topic, number), offset

        for index, event in enumerate(events):
            route = self.queue.route_by_key(event.case)
            self._producer.produce(route.name, event.payload, route.key, on_delivery=partial(confirmed, index))
        while self._producer.flush(_POLL) and not failures and not self._closing:
            pass
        if failures:
            event, error = failures[0]
            # The client's own errors have negative codes. Of the broker's errors, a timeout refuses nothing.
            said, remedy = "did not confirm", "check that the broker runs and can be reached"
            if error.code() > 0 and error.code() not in _UNCONFIRMED:
                said, remedy = "refused", "free space on the broker's disk, or raise its limits"
            raise DemoError(
                f"the broker {said} case {event.case!r} step {event.step}: {error.name()}: {error.str()}: {remedy}"
            )
        return places

    # --- questions

    async def left(self) -> Left | None:
        """Return the backlog at or above the committed positions, see ``Broker.left``."""
        return await self._ask(self._left)

    def _left(self) -> Left:
        numbers = range(self._partitions_of_topic)
        parts = [TopicPartition(name, number) for name in self.queue.names for number in numbers]
        pending = floors = 0
        for part in self._reader.committed(parts, timeout=_WITHIN):
            begin, end = self._reader.get_watermark_offsets(part, timeout=_WITHIN)
            floor = begin if part.offset == OFFSET_INVALID else part.offset
            pending += end - floor
            floors += floor
        return Left(pending=pending, unacknowledged=0, floor=floors)

    async def count_dead_letters(self) -> int:
        """See ``Broker.count_dead_letters``."""
        return await self._ask(self._count_letters)

    def _count_letters(self) -> int:
        begin, end = self._reader.get_watermark_offsets(TopicPartition(self.dead_subject, 0), timeout=_WITHIN)
        return end - begin

    async def dead_letters(self) -> list[Step]:
        """Return the events of the dead letters, with repeats; see ``Broker.dead_letters``."""
        return await self._ask(self._letters)

    def _letters(self) -> list[Step]:
        count, letters = self._count_letters(), list[Step]()
        self._reader.assign([TopicPartition(self.dead_subject, 0, 0)])
        try:
            deadline = monotonic() + _WITHIN
            while len(letters) < count:
                for message in self._reader.consume(count - len(letters), _POLL):
                    if (error := message.error()) is not None:
                        raise KafkaException(error)
                    event = json.loads(message.value() or b"")
                    letters.append((str(event["case"]), int(event["step"])))
                    deadline = monotonic() + _WITHIN
                if monotonic() > deadline or self._closing:
                    raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "the dead letters did not arrive"))
        finally:
            self._reader.unassign()
        return letters

    async def group(self) -> Snapshot:
        """Return the group's state at the broker. Raises ``NoAnswer``."""
        return await self._coordinator.group()

    async def _ask(self, question: Callable[[], _Answer]) -> _Answer:
        def ask() -> _Answer:
            with self._offsets:
                if self._closing:
                    raise KafkaException(KafkaError(KafkaError._DESTROY, "closed"))
                return question()

        try:
            answer = await asyncio.to_thread(ask)
        except KafkaException as failure:
            self.connected = False
            raise NoAnswer(f"{self._server} does not answer ({_said(failure)}): check the broker") from None
        self.connected = True
        return answer


def _said(failure: KafkaException) -> str:
    error: KafkaError = failure.args[0]
    return f"{error.name()}: {error.str()}"
