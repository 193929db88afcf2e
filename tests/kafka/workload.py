"""Topics, messages and committed positions for the tests of the Kafka adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import anyio
from confluent_kafka import OFFSET_INVALID, Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from tests.components import wait_until

_SECONDS = 60.0
_NO_COORDINATOR = (
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
)
# A client logs much to stderr about a broker that a test has killed.
QUIET: dict[str, Any] = {"log_level": 0}
Headers = list[tuple[str, str | bytes | None]]


class Sent(NamedTuple):
    """The partition and offset of a message."""

    partition: int
    offset: int
    key: bytes | None


class Topic:
    """One topic on one broker. All calls block."""

    def __init__(self, url: str, name: str, partitions: int) -> None:
        self.url = url
        self.name = name
        self.partitions = partitions
        # Kept alive, because futures of a collected admin client never complete.
        self.admin = AdminClient({**QUIET, "bootstrap.servers": url})

    def __repr__(self) -> str:
        return f"<Topic {self.name} of {self.partitions} on {self.url}>"

    def config(self, **more: Any) -> dict[str, Any]:
        """Settings of a consumer in the group of this topic."""
        return {**QUIET, "bootstrap.servers": self.url, "group.id": f"g-{self.name}", **more}

    def create(self, config: dict[str, str] | None = None) -> None:
        """Create the topic, and wait until every partition has a leader."""
        new = NewTopic(self.name, self.partitions, 1, config=config or {})
        self.admin.create_topics([new])[self.name].result(_SECONDS)
        wait_until(self.exists, f"{self!r} to be there", seconds=_SECONDS)

    def exists(self) -> bool:
        """Whether all partitions exist and have a leader."""
        known = self.admin.list_topics(timeout=_SECONDS).topics.get(self.name)
        led = [one for one in known.partitions.values() if one.leader >= 0] if known else []
        return len(led) == self.partitions

    def delete(self) -> None:
        self.admin.delete_topics([self.name])[self.name].result(_SECONDS)

    def ends(self) -> list[int]:
        """The offset after the last message, by partition."""
        found: list[int] = []

        def ask() -> bool:
            try:
                found[:] = [consumer.get_watermark_offsets(one, timeout=_SECONDS)[1] for one in self._all()]
            except KafkaException as error:
                if error.args[0].code() != KafkaError.NOT_LEADER_FOR_PARTITION:
                    raise
            return bool(found)  # a broker that has just started leads no partition yet

        with self._outsider("nobody") as consumer:
            wait_until(ask, f"the ends of {self!r}", seconds=_SECONDS)
        return found

    def committed(self, group: str) -> list[int | None]:
        """The committed position of each partition, or None. Does not join the group."""
        found: list[TopicPartition] = []

        def ask() -> bool:
            try:
                found[:] = consumer.committed(self._all(), timeout=_SECONDS)
            except KafkaException as error:
                if error.args[0].code() not in _NO_COORDINATOR:
                    raise
            return bool(found)  # a broker that has just started, or was frozen, coordinates no group yet

        with self._outsider(group) as consumer:
            wait_until(ask, f"what {group} has committed of {self!r}", seconds=_SECONDS)
        return [None if one.offset == OFFSET_INVALID else one.offset for one in found]

    def _all(self) -> list[TopicPartition]:
        return [TopicPartition(self.name, number) for number in range(self.partitions)]

    @contextmanager
    def _outsider(self, group: str) -> Iterator[Consumer]:
        consumer = Consumer({**QUIET, "bootstrap.servers": self.url, "group.id": group})
        try:
            yield consumer
        finally:
            consumer.close()


def transactions(topic: Topic, *sizes: int, partition: int = 0) -> None:
    """Write one transaction for each size; a negative one is aborted. Keys are the offsets. Blocks."""
    producer = Producer({**QUIET, "bootstrap.servers": topic.url, "transactional.id": topic.name})
    producer.init_transactions(20)
    offset = topic.ends()[partition]
    for size in sizes:
        producer.begin_transaction()
        for _ in range(abs(size)):
            producer.produce(topic.name, value=b"v", key=b"%d" % offset, partition=partition)
            offset += 1
        if size > 0:
            producer.commit_transaction(20)
        else:
            # Unsent records would be dropped and leave no gap.
            producer.flush(20)
            producer.abort_transaction(20)
        offset += 1


def produce(
    topic: Topic,
    count: int,
    *,
    keys: int | Sequence[bytes | None] = 20,
    partition: int | None = None,
    value: Callable[[int], bytes | None] = b"%d".__mod__,
    headers: Headers | None = None,
) -> list[Sent]:
    """Produce `count` messages, wait for all confirmations, and return their places in order. Blocks.

    Args:
        topic: The topic.
        count: Number of messages.
        keys: Number of keys (`b"0"`, `b"1"`, …), or the keys themselves, taken in turn.
        partition: The partition of all messages; by default the client's partitioner decides by the key.
        value: Makes the value of message n.
    """
    names = [b"%d" % number for number in range(keys)] if isinstance(keys, int) else list(keys)
    confirmed: dict[int, Sent] = {}
    failures: list[KafkaError] = []

    def note(number: int, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            failures.append(error)
            return
        there, offset = message.partition(), message.offset()
        assert there is not None and offset is not None
        confirmed[number] = Sent(there, offset, names[number % len(names)])

    settings = {"bootstrap.servers": topic.url, "enable.idempotence": True, "linger.ms": 5}
    producer = Producer({**QUIET, **settings})
    for number in range(count):
        while True:
            try:
                producer.produce(
                    topic.name,
                    value=value(number),
                    key=names[number % len(names)],
                    partition=-1 if partition is None else partition,
                    headers=headers,
                    on_delivery=partial(note, number),
                )
                break
            except BufferError:
                producer.poll(_SECONDS)  # until the queue has room
    left = producer.flush(_SECONDS)
    assert not failures and not left, f"{failures[:1]} and {left} unconfirmed of {count} messages to {topic!r}"
    return [confirmed[number] for number in range(count)]


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition by polling."""
    while not condition():
        await anyio.sleep(0.01)
