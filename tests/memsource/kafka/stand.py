"""A simulated Kafka broker with clients and a clock that a test moves by hand."""

from __future__ import annotations

from typing import Any

from memsource.kafka.broker import KafkaBroker, KafkaSettings
from memsource.kafka.client import Callback, Client, Commit, KafkaFailure


class Stand:
    """``partitions`` with ``messages`` in each; ``settings`` as in ``KafkaSettings``. Sessions of 6 s, as measured."""

    def __init__(self, partitions: int = 1, messages: int = 0, **settings: Any) -> None:
        self.now = 0.0
        self.broker = KafkaBroker(partitions, topic="T", settings=KafkaSettings(**settings))
        self.publish(messages)

    def publish(self, messages: int) -> None:
        for partition in self.broker.partitions:
            for _ in range(messages):
                self.broker.publish(partition=partition)

    def client(self, name: str, instance: str | None = None) -> Client:
        client = Client(name, lambda: self.now, instance)
        self.broker.introduce(client)
        self.broker.join(client, self.now)
        client.polling = True
        return client

    def poll(self, client: Client) -> list[Callback | KafkaFailure]:
        return self.broker.poll(client, self.now)

    def told(self, client: Client) -> list[tuple[str, tuple[int, ...]]]:
        """The callbacks of one poll."""
        return [tuple(event) for event in self.poll(client) if isinstance(event, Callback)]  # type: ignore[misc]

    def failure(self, client: Client) -> str:
        """The single failure that a poll returns."""
        (event,) = self.poll(client)
        assert isinstance(event, KafkaFailure)
        return event.code

    def fetch(self, client: Client, partition: int = 0, messages: int = 1_000) -> list[int]:
        return [record.position for record in self.broker.fetch(client, partition, messages, 1 << 20)]

    def commit(self, client: Client, offset: int, metadata: str = "", partition: int = 0) -> str | None:
        """The error of a commit; None = it succeeded."""
        try:
            self.broker.commit(client, {partition: Commit(offset, metadata)}, self.now)
        except KafkaFailure as failure:
            return failure.code
        return None

    def release(self, client: Client, *partitions: int) -> None:
        for partition in partitions:
            self.broker.release(client, partition, self.now)

    def owners(self) -> list[str | None]:
        return [self.broker.owner(partition) for partition in self.broker.partitions]

    def to(self, now: float) -> None:
        """Let time pass until then."""
        self.now = now
        self.broker.advance(now)
