"""Checks a partitioned queue in a stream for messages that no consumer of the durable or cohort reads.

Producers write such messages if they use another number of partitions than the workers. Most checks send only one
request, because the stream stores only the subjects of the queue.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import nats.errors

from lanes.clock import monotonic
from lanes.cohort.leases import UnknownResult
from lanes.errors import LanesError
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
from lanes_jetstream.wire.answers import ApiError
from lanes_jetstream.wire.connection import Connection, NoAnswer, NotPermitted
from lanes_jetstream.wire.intake import Intake
from lanes_jetstream.wire.queue_subjects import subjects_of

log = logging.getLogger("lanes.jetstream")

PORTION: Final = 64
"""Maximum number of physical queues that one check examines."""

_ALL_EVERY: Final = 60.0
"""Seconds between two checks that also ask for physical queues whose subjects the stream no longer stores."""

_PAGES: Final = 10
"""Maximum number of pages of subjects that the check counts. A page has up to 100,000 subjects."""

Consumers = Callable[[Sequence[str]], Awaitable[Mapping[str, Mapping[str, Any]]]]
"""Function that returns the server's descriptions of the existing consumers, by physical queue."""


class QueueWatch:
    """Checks the queue of one source. Needs asyncio.

    Args:
        connection: Connection to the server.
        stream: Name of the stream.
        queue: The queue that the source reads; None = no checks.
        group: Kind and name of the group, such as ``durable 'billing'``.
        consumers: Function that finds the consumers of physical queues.
        name: Name of the source, for log lines.
    """

    def __init__(
        self,
        connection: Connection,
        stream: str,
        queue: PartitionedQueue | None,
        group: str,
        consumers: Consumers,
        name: str,
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._queue = queue
        self._group = group
        self._consumers = consumers
        self._name = name
        self._stranded = StrandedWatch(() if queue is None else (queue,), group, PORTION)
        self._all_at = 0.0
        self._task: asyncio.Task[None] | None = None

    @property
    def found(self) -> tuple[Stranded, ...]:
        """Physical queues with stranded messages at the last check; any thread may read this property."""
        return self._stranded.found

    def findings(self) -> Sequence[str]:
        """Return the text of the alarm; empty = no stranded messages. Any thread may call this method."""
        found = self.found
        return (stranded_text(found, self._group),) if found else ()

    def start(self) -> None:
        """Start the checks, if the source reads a queue. The call does not block."""
        if self._queue is not None:
            self._task = asyncio.create_task(self._run(self._queue))

    async def stop(self) -> None:
        """End the checks. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _run(self, queue: PartitionedQueue) -> None:
        pause = LOOK_EVERY
        while True:
            await asyncio.sleep(pause)
            try:
                pause = CONFIRMED_AFTER if await self._look(queue) else LOOK_EVERY
            except NotPermitted as error:
                log.warning(
                    "%s: %s, then start again. Until then, lanes cannot warn of messages of queue %r without a "
                    "consumer",
                    self._name,
                    error,
                    queue.name,
                )
                return
            except _UNANSWERED as error:
                # The checks of the source report a lasting fault.
                log.debug("%s: cannot look for stranded messages: %s", self._name, error)

    async def _look(self, queue: PartitionedQueue) -> bool:
        """Perform one check. Returns whether the next check is due soon."""
        info = await self._connection.api(f"STREAM.INFO.{self._stream}")
        intake = Intake.of(info["config"])

        def names() -> Iterable[str]:
            everything = monotonic() >= self._all_at
            if everything:
                self._all_at = monotonic() + _ALL_EVERY
            known = queue_names(queue, intake.patterns.get(self._stream, ()))
            suspected = self._stranded.suspected
            return [
                name
                for name in names_beyond(queue, [*known, *suspected])
                if everything or name in suspected or stores(intake, name)
            ]

        asked = self._stranded.next_names(names)
        found = await self._consumers(asked) if asked else {}
        facts = {}
        for name in asked:
            consumer = found.get(name)
            if consumer is not None:
                facts[name] = consumer_facts(consumer, self._group)
            elif stores(intake, name) and partition_number(queue.name, name) < 2 * queue.partitions:
                messages = await count_messages(self._connection, self._stream, name)
                facts[name] = QueueFacts(1, messages, {self._group: messages})
        look = self._stranded.conclude(asked, facts, monotonic())
        for each in look.ended:
            log.info("%s: queue %r: no message waits in %r any more", self._name, each.queue, each.name)
        for due in look.due.values():
            log.warning("%s: %s", self._name, stranded_text(due, self._group))
        return look.again


_UNANSWERED: Final = (
    ApiError,
    LanesError,
    NoAnswer,
    UnknownResult,
    nats.errors.Error,
    OSError,
    KeyError,
    TypeError,
    ValueError,
)
"""Errors that end a check without a result, including the errors of malformed answers."""


def stores(intake: Intake, name: str) -> bool:
    """Return whether the stream stores subjects of a physical queue."""
    return any(intake.may_store(each) for each in subjects_of(name))


def queue_names(queue: PartitionedQueue, patterns: Iterable[str]) -> list[str]:
    """Return the beginnings of patterns, with as many tokens as the queue's name, that may name physical queues."""
    length = queue.name.count(".") + 1
    return list(dict.fromkeys(".".join(pattern.split(".")[:length]) for pattern in patterns))


def reads_only(consumer: Mapping[str, Any], name: str) -> bool:
    """Return whether a consumer delivers the messages of only one physical queue."""
    config = consumer.get("config") or {}
    filters = config.get("filter_subjects") or [config.get("filter_subject") or ">"]
    return bool(set(filters) <= set(subjects_of(name)))


def consumer_facts(consumer: Mapping[str, Any], group: str) -> QueueFacts:
    """Return the facts of a physical queue from the description of the consumer that reads only this queue."""
    unfinished = int(consumer.get("num_pending") or 0) + int(consumer.get("num_ack_pending") or 0)
    return QueueFacts(1, unfinished, {group: unfinished}, {group: int(int(consumer.get("num_waiting") or 0) > 0)})


async def count_messages(connection: Connection, stream: str, name: str) -> int:
    """Count the messages of a physical queue, in up to a million subjects.

    Args:
        connection: Connection to the server.
        stream: Name of the stream.
        name: Name of the physical queue.

    Returns:
        The number of messages.

    Raises:
        ApiError: The server refused a request.
        NoAnswer: The server did not answer.
    """
    messages = 0
    for pattern in subjects_of(name):
        offset = 0
        for _ in range(_PAGES):
            info = await connection.api(f"STREAM.INFO.{stream}", {"subjects_filter": pattern, "offset": offset})
            subjects: Mapping[str, int] = info["state"].get("subjects") or {}
            messages += sum(map(int, subjects.values()))
            offset += len(subjects)
            if not subjects or offset >= int(info.get("total") or 0):
                break
    return messages
