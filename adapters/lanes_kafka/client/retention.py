"""Estimates when the broker deletes messages of a partition, by age or by the size of the log.

A broker deletes whole segments. A size limit deletes a segment only if the remaining log still reaches the limit. The
broker may therefore keep a message longer than the limits demand. The client asks only about partitions whose oldest
unfinished message waits for a retry, is blocked or is slow.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, OffsetSpec, ResourceType

from lanes.clock import Clock
from lanes.core.types import Message, Partition, PartitionId
from lanes.retention import Pace, by_age, by_newer, soonest
from lanes.source import Retention
from lanes_kafka.client.group import Assignment
from lanes_kafka.client.lag import PORTION, EndOffsets
from lanes_kafka.client.records import READER
from lanes_kafka.errors import NOT_ALLOWED

log = logging.getLogger("lanes.kafka")

ASK_EVERY: Final = 2.0
"""Seconds between two requests for the starts of logs."""

ASK_LIMITS_EVERY: Final = 60.0
"""Seconds between two requests for the limits of a topic."""

_ASK_TIMEOUT: Final = 5.0
"""Seconds allowed for one request."""

_WANTED_FOR: Final = 5.0
"""Seconds after the last call of ``of`` during which the thread asks the broker about the partition."""

_OVERHEAD: Final = 8.0
"""Least number of bytes on disk that a record of a large batch needs in addition to key, value and headers."""

_SAMPLE: Final = 100
"""Number of positions that is a sufficient sample for the average size, even if the log has many more."""

_SMALL_SAMPLE: Final = 10
"""Number of positions that is a sufficient sample if it covers half of all positions after a message."""

_SOON: Final = 1.0
"""Minimum estimate of the remaining seconds while the log still contains the message."""

_EARLIEST: Final[OffsetSpec] = OffsetSpec.earliest()  # type: ignore[no-untyped-call]


class _Limits(NamedTuple):
    """The limits of a topic.

    Attributes:
        known: Whether this user may read the limits.
        deletes: Whether the broker deletes by age and size; False for a topic that is only compacted or deletes no
            messages.
        age: ``retention.ms`` in seconds; None = no limit.
        size: ``retention.bytes``; None = no limit.
        segment: ``segment.bytes``.
    """

    known: bool
    deletes: bool
    age: float | None
    size: float | None
    segment: float

    @classmethod
    def of(cls, values: Mapping[str, str | None]) -> _Limits:
        """Return the limits that the settings of a topic set."""
        milliseconds, size = _number(values.get("retention.ms")), _number(values.get("retention.bytes"))
        policy = values.get("cleanup.policy")
        return cls(
            known=True,
            # An empty policy neither deletes nor compacts.
            deletes=policy is None or "delete" in policy,
            age=None if milliseconds is None or milliseconds < 0 else milliseconds / 1_000,
            size=None if size is None or size < 0 else size,
            segment=_number(values.get("segment.bytes")) or 0.0,
        )


_UNKNOWN: Final = _Limits(known=False, deletes=True, age=None, size=None, segment=0.0)
"""The limits of a topic whose settings this user may not read."""


@dataclass(frozen=True, slots=True)
class _Log:
    """The log of a partition.

    Attributes:
        start: First offset of the log.
        end: Offset after the last readable message.
        keeps: Number of newest messages that the broker keeps, estimated from its deletions; None before a deletion.
        read: Number of positions that the client has read from the log, including gaps.
        size: Size of the messages that the client has read from the log, in bytes.
        pace: Growth of ``end``, in positions per second.
        at: Time at which the broker reported the log.
    """

    start: int
    end: int
    keeps: float | None
    read: int
    size: int
    pace: float
    at: float

    def average(self, message: Message) -> float | None:
        """Return the average size of a position, without ``message``; None = the client has read too few positions."""
        others, newer = self.read - 1, self.end - message.position - 1
        if others < min(_SAMPLE, max(_SMALL_SAMPLE, newer / 2)):
            return None
        return max(0, self.size - message.size) / others


@dataclass(eq=False, repr=False)
class LogRetention:
    """The retention of the partitions of one client.

    The event loop calls ``of``, and the thread that owns the client calls ``refresh``.

    Attributes:
        admin: Function that returns the client to ask; None = do not ask.
        ends: End offsets of the owned partitions.
        clock: Monotonic clock, in seconds.
        wall: Wall clock, in seconds since 1970.
    """

    admin: Callable[[], AdminClient | None]
    ends: EndOffsets
    clock: Clock
    wall: Clock = time.time
    _wanted: dict[Partition, float] = field(default_factory=dict, init=False)
    _limits: dict[str, _Limits] = field(default_factory=dict, init=False)
    _limits_at: dict[str, float] = field(default_factory=dict, init=False)
    _logs: dict[Partition, _Log] = field(default_factory=dict, init=False)
    _paces: dict[Partition, Pace] = field(default_factory=dict, init=False)
    _asked: dict[Partition, Future[Any]] = field(default_factory=dict, init=False)
    # The partitions that the present round still has to ask about. The last entry is next.
    _turns: list[Partition] = field(default_factory=list, init=False)
    _asked_limits: dict[str, Future[Any]] = field(default_factory=dict, init=False)
    _ask_at: float = field(default=0.0, init=False)

    # --- on the event loop

    def of(self, message: Message) -> Retention | None:
        """Return the retention of a message by the last answers of the broker.

        The call also makes ``refresh`` ask again. The call does not block.
        """
        partition = message.partition
        self._wanted[partition] = self.clock()
        limits, found = self._limits.get(partition.id.source), self._logs.get(partition)
        if limits is None or not limits.deletes:
            return None
        written = READER.details(message.raw).timestamp
        by_time = None
        if limits.age is not None and written is not None:
            by_time = by_age(written, limits.age, self.wall(), f"retention.ms={limits.age * 1_000:.0f}")
        if found is None:
            return by_time
        if message.position < found.start:
            return Retention(0.0, 1.0, f"its retention, because the log begins at offset {found.start}")
        by_size = self._by_size(message, limits, found)
        if by_size is not None:
            # The log begins below the message, so the broker has not deleted it yet.
            by_size = by_size._replace(left=max(by_size.left, _SOON))
        return soonest((by_time, by_size))

    def _by_size(self, message: Message, limits: _Limits, found: _Log) -> Retention | None:
        newer, keeps, age = found.end - message.position - 1, found.keeps, self.clock() - found.at
        if not limits.known:
            # Only the observed deletions show a limit.
            return (
                None
                if keeps is None
                else by_newer(newer, keeps, found.pace, "the pace at which its log is deleted", age=age)
            )
        average = found.average(message)
        if limits.size is None or average is None:
            return None
        if keeps is None:
            # No deletion since the first question. A segment is deleted if the log without the segment still has the
            # size.
            keeps = (found.end - found.start) * limits.size / (limits.size + limits.segment)
        # Compressed messages are smaller than the average. The broker deletes nothing from a log below its size limit.
        keeps = max(keeps, limits.size / (average + _OVERHEAD))
        return by_newer(newer, keeps, found.pace, f"retention.bytes={limits.size:.0f}", age=age)

    # --- in the thread that owns the client

    def refresh(self, owned: Collection[Assignment], *, ask: bool) -> None:
        """Process answers, and ask for the log starts of wanted partitions and the limits of their topics.

        The call does not block.

        Each call asks about a portion of the partitions, so that several calls cover every partition.

        Args:
            owned: The assignments of the owned partitions.
            ask: Whether to ask.
        """
        now = self.clock()
        for partition in [one for one, at in list(self._wanted.items()) if now - at > _WANTED_FOR]:
            self._wanted.pop(partition, None)
        wanted = {each.partition: each for each in owned if each.partition in self._wanted}
        self._take(wanted, now)
        for partition in self._paces.keys() - wanted.keys():
            del self._paces[partition]
            self._logs.pop(partition, None)
        due = now >= self._ask_at
        admin = self.admin() if ask and wanted and (due or self._turns) else None
        if admin is None:
            return
        if due:
            self._ask_at = now + ASK_EVERY
            # A round of many partitions takes longer. The next round then begins after its last portion.
            self._turns = self._turns or list(reversed(wanted))
        if not self._asked:
            self._ask(admin, wanted)
        if due and not self._asked_limits:
            self._ask_limits(admin, {partition.id.source for partition in wanted}, now)

    def _ask(self, admin: AdminClient, wanted: Collection[Partition]) -> None:
        """Ask for the log starts of the next partitions of the round."""
        by_id: dict[PartitionId, Partition] = {}
        while self._turns and len(by_id) < PORTION:
            partition = self._turns.pop()
            if partition in wanted:
                by_id[partition.id] = partition
        if by_id:
            question = {TopicPartition(*one): _EARLIEST for one in by_id}
            futures = admin.list_offsets(question, request_timeout=_ASK_TIMEOUT)
            self._asked = {by_id[PartitionId(one.topic, one.partition)]: future for one, future in futures.items()}

    def _ask_limits(self, admin: AdminClient, topics: Collection[str], now: float) -> None:
        due = [topic for topic in topics if self._limits_at.get(topic, 0.0) <= now]
        if due:
            self._limits_at |= dict.fromkeys(due, now + ASK_LIMITS_EVERY)
            resources = [ConfigResource(ResourceType.TOPIC, topic) for topic in due]
            futures = admin.describe_configs(resources, request_timeout=_ASK_TIMEOUT)
            self._asked_limits = {resource.name: future for resource, future in futures.items()}

    def _take(self, wanted: Mapping[Partition, Assignment], now: float) -> None:
        if self._asked_limits and all(future.done() for future in self._asked_limits.values()):
            asked, self._asked_limits = self._asked_limits, {}
            for topic, future in asked.items():
                try:
                    values = {name: entry.value for name, entry in future.result(0).items()}
                except KafkaException as failure:
                    # The next request may succeed. This user may also lack the permission to read the settings.
                    if failure.args[0].code() not in NOT_ALLOWED:
                        self._limits_at[topic] = now + ASK_EVERY
                    log.debug("the settings of topic %r are unknown: %s", topic, failure)
                    self._limits.setdefault(topic, _UNKNOWN)
                else:
                    self._limits[topic] = _Limits.of(values)
        if self._asked and all(future.done() for future in self._asked.values()):
            answers, self._asked = self._asked, {}
            for partition, answer in answers.items():
                assignment, end = wanted.get(partition), self.ends.of(partition)
                if assignment is not None and answer.exception() is None and end is not None:
                    self._note(assignment, int(answer.result(0).offset), end, now)

    def _note(self, assignment: Assignment, start: int, end: int, now: float) -> None:
        partition = assignment.partition
        pace = self._paces.setdefault(partition, Pace())
        pace.note(end, now)
        before = self._logs.get(partition)
        keeps = None if before is None else before.keeps
        read, size = assignment.positions_read, assignment.bytes_read
        found = _Log(start, end, keeps, read, size, pace.per_second(), now)
        if before is not None and start > before.start:
            found = replace(found, keeps=self._kept(partition, start - before.start, end - start))
        self._logs[partition] = found

    def _kept(self, partition: Partition, deleted: int, left: int) -> float:
        """Estimate the number of newest messages that the broker keeps. A deletion has just left ``left`` messages.

        The broker keeps up to one segment more than its limit. The size of the deleted segments shows the average size
        of a message on disk, and thus the number of messages within the limit.
        """
        limits = self._limits.get(partition.id.source, _UNKNOWN)
        if limits.size is None or not limits.segment:
            return float(left)
        return min(float(left), limits.size * deleted / limits.segment)


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
