"""A ``confluent_kafka.admin.AdminClient`` over a broker as data, with the requests of ``lanes_kafka``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import ConfigResource, ResourceType

from memsource.kafka.client import Client, Code, KafkaFailure
from tests.simulated.kafka.link import Link, error_of
from tests.simulated.kafka.producer import LETTERS

if TYPE_CHECKING:
    from tests.simulated.kafka.broker import SimulatedKafka


class SimulatedAdmin:
    """The admin client of a member, with a separate connection.

    Args:
        broker: The broker.
        client: The client of the same process.
    """

    def __init__(self, broker: SimulatedKafka, client: Client) -> None:
        self._broker = broker
        self._member = client.name
        self._link = Link(broker, client)

    def poll(self, timeout: float) -> int:
        return 0

    def describe_topics(
        self, topics: Any, *, request_timeout: float, include_authorized_operations: bool = False
    ) -> dict[str, Future[Any]]:
        def act(name: str) -> Any:
            if name == LETTERS:
                return SimpleNamespace(topic_id=LETTERS, partitions=[0], authorized_operations=None)
            self._check_allowed("TOPIC_AUTHORIZATION_FAILED")
            if name != self._broker.topic or self._broker.topic_id is None:
                raise KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART))
            return SimpleNamespace(topic_id=self._broker.topic_id, partitions=list(self._broker.partitions))

        asked = self._ask("topics", list(topics.topic_names), act, request_timeout)
        self._broker.on_asked(self._member, asked.get(self._broker.topic))
        return asked

    def list_topics(self, *, timeout: float) -> Any:
        """Return the topic that the broker has now."""

        def act() -> Any:
            self._broker.check_allowed(self._member, "TOPIC_AUTHORIZATION_FAILED")
            there = self._broker.topic_id is not None
            return {self._broker.topic: SimpleNamespace(partitions=self._broker.partitions)} if there else {}

        return SimpleNamespace(topics=self._link.call("metadata", act, timeout))

    def describe_cluster(self, *, request_timeout: float) -> Future[Any]:
        asked = self._ask("cluster", ["cluster"], lambda _: SimpleNamespace(nodes=[_NODE]), request_timeout)
        return asked["cluster"]

    def describe_configs(
        self, resources: Iterable[ConfigResource], *, request_timeout: float
    ) -> dict[ConfigResource, Future[Any]]:
        return self._ask("configs", list(resources), self._settings, request_timeout)

    def describe_consumer_groups(self, groups: Iterable[str], *, request_timeout: float) -> dict[str, Future[Any]]:
        def act(_: str) -> Any:
            self._check_allowed("GROUP_AUTHORIZATION_FAILED")
            if self._broker.world.now < self._broker.events.loading_until:
                raise KafkaException(KafkaError(KafkaError.COORDINATOR_LOAD_IN_PROGRESS))
            known = self._broker.group.members
            return SimpleNamespace(members=[SimpleNamespace(member_id=member) for member in known])

        self._broker.events.on_members_asked(self._member)
        return self._ask("members", list(groups), act, request_timeout)

    def list_offsets(
        self, offsets: Mapping[TopicPartition, Any], *, request_timeout: float, isolation_level: object = None
    ) -> dict[TopicPartition, Future[Any]]:
        latest = {(one.topic, one.partition): type(spec).__name__ == "LatestSpec" for one, spec in offsets.items()}

        def act(one: TopicPartition) -> Any:
            self._check_allowed("TOPIC_AUTHORIZATION_FAILED")
            return SimpleNamespace(offset=self._broker.bound(one.partition, latest[one.topic, one.partition]))

        return self._ask("ends", list(offsets), act, request_timeout)

    def _settings(self, resource: ConfigResource) -> dict[str, Any]:
        settings = self._broker.settings
        values: dict[str, str] = {}
        if resource.restype == ResourceType.BROKER:
            values = {"offset.metadata.max.bytes": str(settings.metadata_limit)}
        elif resource.restype == ResourceType.GROUP:
            values = {
                "consumer.session.timeout.ms": str(int(settings.session_timeout * 1000)),
                "consumer.heartbeat.interval.ms": str(int(settings.heartbeat_interval * 1000)),
            }
        return {name: SimpleNamespace(name=name, value=value) for name, value in values.items()}

    def _check_allowed(self, code: Code) -> None:
        try:
            self._broker.check_allowed(self._member, code)
        except KafkaFailure as failure:
            raise KafkaException(error_of(failure)) from None

    def _ask(self, name: str, asked: list[Any], act: Callable[[Any], Any], timeout: float) -> dict[Any, Future[Any]]:
        """Send one request about several objects, and return one future for each object."""
        futures: dict[Any, Future[Any]] = {one: Future() for one in asked}

        def performed() -> dict[Any, Any]:
            found: dict[Any, Any] = {}
            for one in asked:
                try:
                    found[one] = act(one)
                except KafkaException as error:
                    found[one] = error
            return found

        def answered(found: dict[Any, Any] | None, error: KafkaError | None) -> None:
            for one, future in futures.items():
                value = KafkaException(error) if found is None else found[one]
                if isinstance(value, KafkaException):
                    future.set_exception(value)
                else:
                    future.set_result(value)

        if not self._broker.events.forgets(self._member):
            self._link.send(name, performed, answered, timeout)
        return futures


_NODE = SimpleNamespace(id=1)
