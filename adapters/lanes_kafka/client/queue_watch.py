"""Checks partitioned queues for messages in topics that no member of the group reads.

Producers write such messages if they use another number of partitions than the workers. A check requests the existing
topics, the bounds of their logs, and the members and positions of the group. Most checks end after the first request,
because no further topic of the queue exists.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final, TypeAlias

from confluent_kafka import (
    Consumer,
    ConsumerGroupState,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, OffsetSpec

from lanes.clock import Clock
from lanes.queues.partitioned import PartitionedQueue
from lanes.queues.stranded import (
    CONFIRMED_AFTER,
    LOOK_EVERY,
    QueueFacts,
    Stranded,
    StrandedWatch,
    names_beyond,
    partition_number,
    stranded_text,
)
from lanes_kafka.broker import COORDINATOR_TIMEOUT, QUESTION_TIMEOUT
from lanes_kafka.client.lag import PORTION
from lanes_kafka.client.offsets import answered
from lanes_kafka.errors import NOT_ALLOWED

log = logging.getLogger("lanes.kafka")

_POSITIONS_EVERY: Final = 60.0
"""Seconds between two searches for topics of a former, larger number of partitions in which the group has positions."""

_ANSWER_WITHIN: Final = 1.0
"""Seconds that one request for topics or positions may block the thread. If the broker is unreachable, the earlier
requests of the check already fail.
"""

_GIVEN_UP_AFTER: Final = 2 * QUESTION_TIMEOUT
"""Seconds without an answer after which the object ends a check."""

_MOVING: Final = (ConsumerGroupState.PREPARING_REBALANCING, ConsumerGroupState.COMPLETING_REBALANCING)
"""States of a group in which its members briefly own no partitions."""

_EARLIEST: Final[OffsetSpec] = OffsetSpec.earliest()  # type: ignore[no-untyped-call]
_LATEST: Final[OffsetSpec] = OffsetSpec.latest()  # type: ignore[no-untyped-call]

_Look: TypeAlias = Generator[Collection["Future[Any]"], None, None]
"""A generator that runs one check, and yields the requests whose answers the check needs."""


class QueueWatch:
    """The check of the queues of one source. The object is True during a check.

    Only the thread that owns the client uses the object, except for ``found``.

    Args:
        queues: The queues that the source reads; without a queue, no check runs.
        group: Name of the group.
        admin: Function that returns the client that asks for topics and logs; None = do not ask.
        make: Function that makes a client for requests about the members of the group.
        consumer: Function that returns the client that asks for positions of the group.
        wake: Function that a thread of the client calls with None when ``advance`` may continue.
        clock: Monotonic clock, in seconds.
        name: Name of the source, for log lines.
    """

    def __init__(
        self,
        queues: Sequence[PartitionedQueue],
        group: str,
        admin: Callable[[], AdminClient | None],
        make: Callable[[], AdminClient],
        consumer: Callable[[], Consumer],
        wake: Callable[[None], None],
        clock: Clock,
        name: str,
    ) -> None:
        self._queues = queues
        self._group = group
        self._admin = admin
        self._make = make
        self._consumer = consumer
        self._wake = wake
        self._clock = clock
        self._name = name
        self._stranded = StrandedWatch(queues, group, PORTION)
        self._look: _Look | None = None
        self._waiting: Collection[Future[Any]] = ()
        # Keep this client only during a check. After a lost request for the coordinator, the client must be closed.
        self._own: AdminClient | None = None
        self._next = clock() + LOOK_EVERY
        self._given_up_at = 0.0
        # Topics in which the group has committed positions.
        self._known: frozenset[str] = frozenset()
        self._known_at = 0.0

    @property
    def found(self) -> tuple[Stranded, ...]:
        """Topics with stranded messages at the last check; any thread may read this property."""
        return self._stranded.found

    def __bool__(self) -> bool:
        """Whether a check waits for an answer."""
        return self._look is not None

    def advance(self, *, ask: bool) -> None:
        """Start a due check, or continue a check after the answers to its requests.

        The call blocks for at most 1 s for each of two requests: for positions, and once a minute for the list of
        topics.

        Args:
            ask: Whether to start checks.
        """
        now = self._clock()
        if self._look is None:
            if now < self._next or not ask or not self._queues:
                return
            self._next, self._given_up_at = now + LOOK_EVERY, now + _GIVEN_UP_AFTER
            self._look = self._one_look()
        elif not all(future.done() for future in self._waiting):
            if self._own is not None:
                # A poll serves the callbacks and the log of this client.
                self._own.poll(0)
            if now >= self._given_up_at:
                self.end()
            return
        try:
            self._waiting = next(self._look)
        except StopIteration:
            self.end()
        except KafkaException as failure:
            log.debug("%s: cannot look for stranded messages: %s", self._name, failure)
            self.end()
        else:
            for future in self._waiting:
                future.add_done_callback(lambda _: self._wake(None))

    def end(self) -> None:
        """End the running check without a result. Idempotent."""
        self._look, self._waiting, self._own = None, (), None

    def _one_look(self) -> _Look:
        admin = self._admin()
        if admin is None:
            return
        if self._clock() >= self._known_at:
            self._known_at = self._clock() + _POSITIONS_EVERY
            self._known = self._former_names(admin)
        asked = self._stranded.next_names(self._names)
        if not asked:
            return
        topics = admin.describe_topics(TopicCollection(asked), request_timeout=QUESTION_TIMEOUT)
        yield topics.values()
        places = self._existing(topics)
        if not places:
            self._conclude(asked, {})
            return
        starts = admin.list_offsets(dict.fromkeys(places, _EARLIEST), request_timeout=QUESTION_TIMEOUT)
        ends = admin.list_offsets(dict.fromkeys(places, _LATEST), request_timeout=QUESTION_TIMEOUT)
        yield [*starts.values(), *ends.values()]
        bounds = {place: (_offset(starts[place]), _offset(ends[place])) for place in places}
        facts: Mapping[str, QueueFacts] = {}
        if any(start < end for start, end in bounds.values()):
            own = self._own = self._make()
            members = own.describe_consumer_groups([self._group], request_timeout=COORDINATOR_TIMEOUT)[self._group]
            yield [members]
            described = members.result(0)
            if described.state in _MOVING:
                self._next = self._clock() + CONFIRMED_AFTER
                return
            facts = queue_facts(self._group, bounds, described.members, self._positions(places))
        self._conclude(asked, facts)

    def _former_names(self, admin: AdminClient) -> frozenset[str]:
        """Return the topics of a former, larger number of partitions in which the group has positions."""
        try:
            topics = admin.list_topics(timeout=_ANSWER_WITHIN).topics
            places = [
                TopicPartition(name, number)
                for queue in self._queues
                for name, topic in topics.items()
                if partition_number(queue.name, name) >= 2 * queue.partitions
                for number in topic.partitions
            ]
            positions = self._positions(places) if places else []
        except KafkaException as failure:
            log.debug("%s: cannot look for topics of a former width: %s", self._name, failure)
            return self._known
        return frozenset(each.topic for each in positions if each.offset >= 0)

    def _positions(self, places: list[TopicPartition]) -> list[TopicPartition]:
        """Ask for positions of the group.

        An ``AdminClient`` is unsafe for this request: after a change of the coordinator, librdkafka 2.16 crashes the
        process by a null pointer.
        """
        return answered(self._consumer().committed(places, timeout=_ANSWER_WITHIN))

    def _names(self) -> list[str]:
        return [name for queue in self._queues for name in names_beyond(queue, self._known)]

    def _existing(self, topics: Mapping[str, Future[Any]]) -> list[TopicPartition]:
        """Return the partitions of the topics that exist and that this user may see."""
        places = []
        for name, future in topics.items():
            try:
                places += [TopicPartition(name, each.id) for each in future.result(0).partitions]
            except KafkaException as failure:
                absent = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.TOPIC_EXCEPTION, *NOT_ALLOWED)
                if failure.args[0].code() not in absent:
                    raise
        return places

    def _conclude(self, asked: Collection[str], facts: Mapping[str, QueueFacts]) -> None:
        now = self._clock()
        look = self._stranded.conclude(asked, facts, now)
        if look.again:
            self._next = now + CONFIRMED_AFTER
        for each in look.ended:
            log.info("%s: queue %r: no message waits in %r any more", self._name, each.queue, each.name)
        for due in look.due.values():
            log.warning("%s: %s", self._name, stranded_text(due, f"group {self._group!r}"))


def queue_facts(
    group: str,
    bounds: Mapping[TopicPartition, tuple[int, int]],
    members: Sequence[Any],
    positions: Sequence[TopicPartition],
) -> dict[str, QueueFacts]:
    """Return the facts of topics for one group.

    Args:
        group: Name of the group.
        bounds: First offset and end of the log of each partition of the topics.
        members: Members of the group, as the broker describes them.
        positions: Committed positions of the group; a negative offset = none.

    Returns:
        The facts of each topic, by the name of the topic.
    """
    committed = {(each.topic, each.partition): each.offset for each in positions}
    owned = [
        {(each.topic, each.partition) for each in member.assignment.topic_partitions} if member.assignment else set()
        for member in members
    ]
    sizes = Counter(place.topic for place in bounds)
    read = Counter(topic for topic, _ in set().union(*owned))
    readers = Counter(topic for places in owned for topic in {topic for topic, _ in places})
    messages: Counter[str] = Counter()
    unfinished: Counter[str] = Counter()
    for place, (start, end) in bounds.items():
        messages[place.topic] += end - start
        unfinished[place.topic] += max(0, end - max(start, committed.get((place.topic, place.partition), start)))
    return {
        name: QueueFacts(
            size,
            messages[name],
            {group: unfinished[name]},
            {group: readers[name] if read[name] >= size else 0},
        )
        for name, size in sizes.items()
    }


def _offset(future: Future[Any]) -> int:
    return int(future.result(0).offset)
