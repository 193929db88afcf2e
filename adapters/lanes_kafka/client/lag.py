"""Reads the end offsets of the owned partitions.

The lag is the distance from the committed position to the end. The backlog is the distance from the position to read to
the end of the readable messages, which is the beginning of an open transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from heapq import nsmallest
from typing import Any, Final, NamedTuple

from confluent_kafka import OFFSET_INVALID, Consumer, IsolationLevel, KafkaException
from confluent_kafka.admin import AdminClient, OffsetSpec

from lanes.clock import Clock
from lanes.core.types import Partition
from lanes_kafka.client.group import Assignment

ASK_AFTER: Final = 5.0
"""Seconds without a higher end offset after which the thread asks the broker. A paused client, a client with a full
queue, and a client without answers to its fetches learn no offsets."""

ASK_TIMEOUT: Final = 5.0
"""Seconds allowed for one request about end offsets."""

PORTION: Final = 250
"""Maximum number of partitions in one request for offsets. Each request costs the thread that owns the client a few
milliseconds.
"""

_NOT_AGAIN_FOR: Final = 30.0
"""Seconds after which the thread repeats a failed request about end offsets."""

_LATEST: Final[OffsetSpec] = OffsetSpec.latest()  # type: ignore[no-untyped-call]


class _End(NamedTuple):
    """The end offset of one partition.

    Attributes:
        offset: The offset after the last message, even in an open transaction; ``OFFSET_INVALID`` while unknown.
        stable: The offset after the last readable message, by the last answer of the broker; ``OFFSET_INVALID`` before
            the first answer. A fetch does not report this offset.
        ask_at: Time at which to ask the broker, unless a fetch reports a higher end earlier.
        position: The next position to deliver.
    """

    offset: int
    stable: int
    ask_at: float
    position: int


class EndOffsets:
    """Tracks the end of each partition, and the end of the readable messages.

    A client that reads only committed messages stops at the beginning of an open transaction. The fetches of such a
    client still report the end of the log. Only a broker's answer shows the number of waiting messages.

    Only the thread that owns the client uses the object, except for ``of`` and ``unread``.

    Args:
        clock: Monotonic clock, in seconds.
        admin: Function that returns the client that requests the ends; None = no requests. This client has its own
            connections, so an unanswered fetch delays no request.
        isolation: Isolation level of the client's fetches.
    """

    def __init__(
        self,
        clock: Clock,
        admin: Callable[[], AdminClient | None],
        isolation: IsolationLevel = IsolationLevel.READ_COMMITTED,
    ) -> None:
        self._clock = clock
        self._admin = admin
        self._isolation = isolation
        self._asked: dict[Partition, Future[Any]] = {}
        # Replace the dict and never change it, because another thread may be reading it.
        self._known: dict[Partition, _End] = {}

    def of(self, partition: Partition) -> int | None:
        """Return the highest known end offset, or None while the end is unknown.

        Any thread may call this method. The call does not block.
        """
        end = self._known.get(partition)
        return None if end is None or end.offset == OFFSET_INVALID else end.offset

    def unread(self, partition: Partition) -> int | None:
        """Return the distance from the next position to the end of the readable messages; None = unknown.

        Any thread may call this method. The call does not block.
        """
        end = self._known.get(partition)
        if end is None:
            return None
        readable = end.stable if self._isolation == IsolationLevel.READ_COMMITTED else end.offset
        return None if readable == OFFSET_INVALID else max(0, readable - end.position)

    def refresh(self, client: Consumer, owned: Iterable[Assignment], *, ask: bool) -> None:
        """Update the end offsets from the last fetches and answers, and ask the broker again for outdated ones.

        The call does not block.

        Args:
            client: The client.
            owned: Assignments whose ends the call updates.
            ask: Whether to ask the broker about partitions whose end or position has not risen for ``ASK_AFTER``
                seconds.
        """
        now = self._clock()
        answers = self._answers(now)
        known: dict[Partition, _End] = {}
        unknown = []
        for each in owned:
            position = each.position
            before = self._known.get(each.partition, _End(OFFSET_INVALID, OFFSET_INVALID, now + ASK_AFTER, position))
            before = answers.get(each.partition, before)
            offset = cached_end(client, each)
            end = before
            if offset > before.offset:
                # The messages before a higher end may belong to an open transaction. If none of them arrives, ask the
                # broker.
                ask_at = before.ask_at if position == before.position else now + ASK_AFTER
                end = before._replace(offset=offset, ask_at=ask_at)
            known[each.partition] = end._replace(position=position)
            if end.ask_at <= now:
                unknown.append(each)
        self._known = known
        if unknown and ask and not self._asked:
            # Ask for the longest unanswered partitions first, so that no partition waits forever.
            self._ask(nsmallest(PORTION, unknown, key=lambda each: known[each.partition].ask_at))

    def _ask(self, assignments: list[Assignment]) -> None:
        admin = self._admin()
        if admin is None:
            return
        futures = admin.list_offsets(
            {each.at(): _LATEST for each in assignments},
            isolation_level=self._isolation,
            request_timeout=ASK_TIMEOUT,
        )
        by_id = {(one.topic, one.partition): future for one, future in futures.items()}
        self._asked = {each.partition: by_id[each.partition.id] for each in assignments}

    def _answers(self, now: float) -> dict[Partition, _End]:
        """Process the answers to the open request when all answers have arrived."""
        if not all(future.done() for future in self._asked.values()):
            return {}
        asked, self._asked = self._asked, {}
        answers = {}
        for partition, future in asked.items():
            before = self._known.get(partition)
            if before is None:
                continue
            try:
                end = int(future.result(0).offset)
                answers[partition] = before._replace(offset=end, stable=end, ask_at=now + ASK_AFTER)
            except KafkaException:
                # A partition may have no leader for a moment, so keep the known end. An unknown lag needs no error,
                # because other calls of the client report an outage.
                answers[partition] = before._replace(ask_at=now + _NOT_AGAIN_FOR)
        return answers


def isolation_of(level: object) -> IsolationLevel:
    """Return the isolation level that a client's setting ``isolation.level`` names; None = the client's default."""
    return (
        IsolationLevel.READ_UNCOMMITTED if str(level).lower() == "read_uncommitted" else IsolationLevel.READ_COMMITTED
    )


def cached_end(client: Consumer, assignment: Assignment) -> int:
    """Return the end that the last fetch reported, or ``OFFSET_INVALID`` before the first fetch.

    Does not ask the broker.
    """
    try:
        found = client.get_watermark_offsets(assignment.at(), cached=True)
    except KafkaException:
        # A client may own a partition before it has the partition's metadata.
        return OFFSET_INVALID
    return OFFSET_INVALID if found is None else int(found[1])
