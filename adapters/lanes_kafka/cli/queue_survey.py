"""Reads the facts of a partitioned queue from a broker, and creates and removes its topics. All calls block.

``lanes queue`` makes a ``Cluster`` by ``queue_broker``; see ``lanes.cli.queue.QueueBroker``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, ConfigSource, NewTopic, OffsetSpec, ResourceType

from lanes.arguments import shown_value
from lanes.errors import ConfigError, SourceError
from lanes.queues.partitioned import PartitionedQueue
from lanes.queues.stranded import QueueFacts
from lanes.queues.widths import Survey
from lanes_kafka.broker import (
    COORDINATOR_MOVES,
    COORDINATOR_TIMEOUT,
    LEADER_MOVES,
    QUESTION_TIMEOUT,
    unanswered,
    wait_for,
)
from lanes_kafka.cli.config_file import given_settings
from lanes_kafka.client.offsets import answered
from lanes_kafka.client.queue_watch import queue_facts
from lanes_kafka.config import connects
from lanes_kafka.errors import client_text, is_login_refused, settings_error
from lanes_kafka.topic_names import NO_TOPIC, is_topic

_LIMIT: Final = 20.0
"""Seconds allowed for one survey, or one change of topics."""

_AT_ONCE: Final = 100
"""Maximum number of groups in one request for positions."""

_QUESTION: Final = 1.0
"""Maximum seconds of one request for positions. After this time the client repeats the request or fails."""

_QUESTIONS: Final = 16
"""Maximum number of concurrent requests for positions of groups."""

_ABSENT: Final = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.TOPIC_EXCEPTION)
"""Error codes for a missing topic, and for an invalid topic name."""

_AGAIN: Final = 0.1
"""Seconds between two requests about a created or removed topic."""

_EARLIEST: Final[OffsetSpec] = OffsetSpec.earliest()  # type: ignore[no-untyped-call]
_LATEST: Final[OffsetSpec] = OffsetSpec.latest()  # type: ignore[no-untyped-call]


def queue_broker(queue: PartitionedQueue, server: str, config: Path | None, settings: list[str]) -> Cluster:
    """Create the client of ``lanes queue`` for Kafka.

    Args:
        queue: The queue, with all its physical queues.
        server: Address of a broker, which overrides the address in the file; "" = no address.
        config: File with the client's settings; None = no file.
        settings: Texts ``name=value``, which override the file and ``server``.

    Returns:
        The client.

    Raises:
        ConfigError: The file, a setting or a name is invalid.
        Misuse: The file and the arguments name no address of a broker.
    """
    for name in queue.names:
        check_name(name)
    return Cluster(given_settings(config, settings, server=server), queue.name)


def check_name(name: str) -> None:
    """Raise ``ConfigError`` if no topic can have this name of a physical queue."""
    if not is_topic(name):
        raise ConfigError(f"physical queue {shown_value(name)}: {NO_TOPIC}")


class Cluster:
    """A client that asks a broker about topics and changes topics. Each request to the broker has a deadline.

    Args:
        settings: Configuration of the client, whose secrets no error shows.
        name: Name of the queue, for errors.

    Raises:
        ConfigError: The client refuses its settings.
    """

    noun: Final = "topic"
    what: Final = "the Kafka broker"

    def __init__(self, settings: Mapping[str, Any], name: str) -> None:
        self._settings = settings
        self._name = f"queue {name!r}"
        self._reported: list[KafkaError] = []
        self._asking = False
        connecting: dict[str, Any] = {
            "log_level": 0,
            **settings,
            "enable.idempotence": False,
            "error_cb": self._reported.append,
        }
        try:
            self._admin = AdminClient(connecting)
        except (KafkaException, TypeError, ValueError) as failure:
            raise settings_error(failure.args[0], settings) from None

    def names(self) -> Iterable[str]:
        """Ask for all topics.

        Returns:
            The names of the topics.

        Raises:
            SourceError: The broker does not answer, or refuses the request.
        """
        try:
            return self._admin.list_topics(timeout=QUESTION_TIMEOUT).topics
        except KafkaException as failure:
            raise self._error(failure, self._name) from None

    def survey(self, names: Sequence[str], named: Collection[str] = ()) -> Survey:
        """Ask for the facts of topics.

        Args:
            names: Names of the topics, beginning with partition 0.
            named: Names of groups to report for each topic, even groups without a position, which have finished no
                message. Empty = the groups of the first topic.

        Returns:
            The facts.

        Raises:
            SourceError: The broker does not answer, or refuses a request.
        """
        deadline = monotonic() + _LIMIT
        topics = self._described(names, deadline)
        places = [TopicPartition(name, number) for name, numbers in topics.items() for number in numbers]
        starts, ends = (self._bounds(places, spec, deadline) for spec in (_EARLIEST, _LATEST))
        bounds = {place: (starts[place], ends[place]) for place in places}
        groups = sorted({*named, *self._groups(deadline)})
        positions = self._positions(groups, places, deadline) if places else {}
        members = self._members(groups, deadline)
        merged = {name: QueueFacts(size=len(topics.get(name, ()))) for name in names}
        present = set()
        for group in groups:
            positioned = {each.topic for each in positions.get(group, ()) if each.offset >= 0}
            found = queue_facts(group, bounds, members.get(group, ()), positions.get(group, ()))
            here = {name for name, fact in found.items() if name in positioned or fact.readers[group]}
            everywhere = group in named if named else names[0] in here
            for name, fact in found.items():
                if everywhere or name in here:
                    present.add(group)
                    merged[name] = QueueFacts(
                        fact.size,
                        fact.messages,
                        {**merged[name].unfinished, **fact.unfinished},
                        {**merged[name].readers, **fact.readers},
                    )
        for name, fact in queue_facts("", bounds, (), ()).items():
            merged[name] = merged[name]._replace(messages=fact.messages)
        sums = dict.fromkeys(topics, 0)
        for place, end in ends.items():
            sums[place.topic] += end
        return Survey(merged, tuple(sorted(present)), sums)

    def arrived(self, earlier: Survey, later: Survey) -> dict[str, int]:
        """Return the number of messages that arrived in each topic between two surveys."""
        return {name: later.ends.get(name, 0) - end for name, end in earlier.ends.items()}

    def create(self, names: Mapping[str, int], like: str) -> list[str]:
        """Create topics with the replicas and the settings of an existing topic, and wait until they exist.

        Args:
            names: Number of partitions of each topic.
            like: The existing topic.

        Returns:
            A line for each created topic. Another process may have created the other topics during the call.

        Raises:
            ConfigError: A name is invalid for a topic.
            SourceError: The broker does not answer, or refuses a topic.
        """
        for name in names:
            check_name(name)
        deadline = monotonic() + _LIMIT
        described = self._ask(
            list(self._admin.describe_topics(TopicCollection([like]), request_timeout=QUESTION_TIMEOUT).values()),
            deadline,
        )[0]
        resource = ConfigResource(ResourceType.TOPIC, like)
        settings = self._ask(
            list(self._admin.describe_configs([resource], request_timeout=QUESTION_TIMEOUT).values()), deadline
        )[0]
        own = {
            name: entry.value
            for name, entry in settings.items()
            if entry.source == ConfigSource.DYNAMIC_TOPIC_CONFIG.value and entry.value is not None
        }
        replicas = len(described.partitions[0].replicas)
        new = [NewTopic(name, size, replicas, config=own) for name, size in names.items()]
        asked = self._admin.create_topics(new, request_timeout=QUESTION_TIMEOUT)
        created = self._changed(asked, KafkaError.TOPIC_ALREADY_EXISTS, deadline)
        self._until(lambda: set(names) <= self._described(list(names), deadline).keys(), deadline)
        return [f"created topic {name!r} with {names[name]} partition(s)" for name in created]

    def remove(self, names: Sequence[str]) -> list[str]:
        """Remove topics, and wait for the end of their deletion.

        Args:
            names: Names of existing topics.

        Returns:
            A line for each removed topic. Another process may have removed the other topics during the call.

        Raises:
            SourceError: The broker does not answer, or refuses a removal.
        """
        deadline = monotonic() + _LIMIT
        asked = self._admin.delete_topics(list(names), request_timeout=QUESTION_TIMEOUT)
        removed = self._changed(asked, KafkaError.UNKNOWN_TOPIC_OR_PART, deadline)
        self._until(lambda: not self._described(names, deadline), deadline)
        return [f"removed topic {name!r}" for name in removed]

    def forget(self, groups: Sequence[str], partitions: int) -> list[str]:
        """Do nothing, because a group of Kafka stores no number of partitions; see ``lanes.cli.queue.QueueBroker``."""
        return []

    def close(self) -> None:
        """Do nothing, because the client needs no close."""

    def _described(self, names: Sequence[str], deadline: float) -> dict[str, list[int]]:
        """Return the numbers of the partitions of the topics that exist."""
        asked = self._admin.describe_topics(TopicCollection(list(names)), request_timeout=QUESTION_TIMEOUT)
        self._wait(asked.values(), deadline)
        found = {}
        for name, future in asked.items():
            try:
                found[name] = [each.id for each in future.result(0).partitions]
            except KafkaException as failure:
                if failure.args[0].code() not in _ABSENT:
                    raise self._error(failure, f"topic {name!r}") from None
        return found

    def _bounds(self, places: Sequence[TopicPartition], spec: OffsetSpec, deadline: float) -> dict[TopicPartition, int]:
        if not places:
            return {}
        while True:
            asked = self._admin.list_offsets(dict.fromkeys(places, spec), request_timeout=QUESTION_TIMEOUT)
            self._wait(asked.values(), deadline)
            try:
                return {place: int(future.result(0).offset) for place, future in asked.items()}
            except KafkaException as failure:
                if failure.args[0].code() not in LEADER_MOVES or monotonic() + _AGAIN > deadline:
                    raise self._error(failure, self._name) from None
            sleep(_AGAIN)

    def _groups(self, deadline: float) -> list[str]:
        """Return the names of all groups.

        If one broker does not answer, the call raises the broker's error, because this broker may know another group.
        """
        while True:
            (listed,) = self._ask([self._admin.list_consumer_groups(request_timeout=QUESTION_TIMEOUT)], deadline)
            if not listed.errors:
                # librdkafka ends the process after an empty group id, which old clients could have.
                return [each.group_id for each in listed.valid if each.group_id]
            for failure in listed.errors:
                if failure.args[0].code() not in COORDINATOR_MOVES or monotonic() + _AGAIN > deadline:
                    raise self._error(failure, "the list of groups")
            sleep(_AGAIN)

    def _positions(
        self, groups: Sequence[str], places: list[TopicPartition], deadline: float
    ) -> dict[str, Sequence[TopicPartition]]:
        def ask(some: Sequence[str]) -> dict[str, Future[Any]]:
            return {group: pool.submit(self._positions_of, group, places, deadline) for group in some}

        pool = ThreadPoolExecutor(_QUESTIONS)
        self._asking = True
        try:
            return self._of_groups(groups, ask, deadline)
        finally:
            # After Ctrl+C, the interpreter waits for the running requests.
            self._asking = False
            pool.shutdown(wait=False, cancel_futures=True)

    def _positions_of(self, group: str, places: list[TopicPartition], deadline: float) -> list[TopicPartition]:
        """Ask for the positions of a group, by a consumer that does not join the group.

        An ``AdminClient`` is unsafe for this request: after a change of the coordinator, librdkafka 2.16 crashes the
        process by a null pointer.
        """
        connecting = {name: value for name, value in self._settings.items() if connects(name)}
        consumer = Consumer({"log_level": 0, **connecting, "group.id": group, "enable.auto.commit": False})
        try:
            while True:
                try:
                    return answered(consumer.committed(places, timeout=_QUESTION))
                except KafkaException as failure:
                    timed_out = failure.args[0].code() == KafkaError._TIMED_OUT
                    if not timed_out or not self._asking or monotonic() + _QUESTION > deadline:
                        raise
        finally:
            consumer.close()

    def _members(self, groups: Sequence[str], deadline: float) -> dict[str, Sequence[Any]]:
        def ask(some: Sequence[str]) -> dict[str, Future[Any]]:
            return self._admin.describe_consumer_groups(list(some), request_timeout=COORDINATOR_TIMEOUT)

        return {group: found.members for group, found in self._of_groups(groups, ask, deadline).items()}

    def _of_groups(
        self, groups: Sequence[str], ask: Callable[[Sequence[str]], Mapping[str, Future[Any]]], deadline: float
    ) -> dict[str, Any]:
        """Return the answers for the existing groups.

        The call repeats a request if the coordinator is starting or moving.
        """
        found: dict[str, Any] = {}
        left = list(groups)
        while left:
            some, left = left[:_AT_ONCE], left[_AT_ONCE:]
            asked = ask(some)
            self._wait(asked.values(), deadline)
            moves = []
            for group, future in asked.items():
                try:
                    found[group] = future.result(0)
                except KafkaException as failure:
                    code = failure.args[0].code()
                    if code in COORDINATOR_MOVES and monotonic() + _AGAIN <= deadline:
                        moves.append(group)
                    elif code != KafkaError.GROUP_ID_NOT_FOUND:
                        raise self._error(failure, f"group {group!r}") from None
            if moves:
                left += moves
                sleep(_AGAIN)
        return found

    def _changed(self, asked: Mapping[str, Future[Any]], settled: int, deadline: float) -> list[str]:
        """Wait for the changes of topics, and return the changed topics.

        The error code ``settled`` means that another process has made the change.
        """
        self._wait(asked.values(), deadline)
        changed = []
        for name, future in asked.items():
            try:
                future.result(0)
                changed.append(name)
            except KafkaException as failure:
                if failure.args[0].code() != settled:
                    raise self._error(failure, self._name) from None
        return changed

    def _ask(self, futures: Sequence[Future[Any]], deadline: float) -> list[Any]:
        self._wait(futures, deadline)
        try:
            return [future.result(0) for future in futures]
        except KafkaException as failure:
            raise self._error(failure, self._name) from None

    def _wait(self, futures: Iterable[Future[Any]], deadline: float) -> None:
        if not wait_for(self._admin, list(futures), deadline, lambda: any(map(is_login_refused, self._reported))):
            raise self._error(KafkaException(KafkaError(KafkaError._TIMED_OUT, "no answer in time")), self._name)

    def _until(self, condition: Callable[[], bool], deadline: float) -> None:
        while not condition():
            if monotonic() > deadline:
                raise SourceError("the broker has not applied the change of the topics in time; run the command again")
            sleep(_AGAIN)

    def _error(self, failure: KafkaException, what: str) -> SourceError:
        error: KafkaError = failure.args[0]
        # The errors of the client itself are negative.
        if error.code() < 0:
            return unanswered(self._settings, what, error, self._reported, QUESTION_TIMEOUT, self._name)
        text = client_text(error, self._settings)
        return SourceError(f"{what}: the broker refuses the request ({text}); correct the named cause")
