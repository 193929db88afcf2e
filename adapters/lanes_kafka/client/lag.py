"""The end offsets of the owned partitions. The lag is the distance from the committed position to the end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from confluent_kafka import OFFSET_END, OFFSET_INVALID, Consumer, KafkaException

from lanes.clock import Clock
from lanes.core.types import Partition, PartitionId
from lanes_kafka.client.group import Assignment

ASK_AFTER: Final = 5.0
"""Seconds without news of an end offset after which the broker is asked. A client that is paused, or whose queue is
full, fetches nothing and learns nothing."""

_ASK_TIMEOUT: Final = 0.5
"""Seconds allowed for one question about end offsets; the question blocks the thread."""

_NOT_AGAIN_FOR: Final = 30.0
"""Seconds after which a failed question about end offsets is repeated."""


class _End(NamedTuple):
    """The end offset of one partition.

    Attributes:
        offset: The offset after the last readable message; ``OFFSET_INVALID`` while unknown.
        ask_at: Time at which to ask the broker, unless a fetch reports the end earlier.
    """

    offset: int
    ask_at: float


class EndOffsets:
    """The readable end of each partition: the offset after its last message, or the start of an open transaction.

    Used in the thread that owns the client, except for ``of``.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._not_before = 0.0
        # The dict is replaced and never changed, because another thread may be reading it.
        self._known: dict[Partition, _End] = {}

    def of(self, partition: Partition) -> int | None:
        """The end offset, or None while it is unknown. Callable from any thread. Does not block."""
        end = self._known.get(partition)
        return None if end is None or end.offset == OFFSET_INVALID else end.offset

    def refresh(self, client: Consumer, owned: Iterable[Assignment], *, ask: bool) -> None:
        """Update the end offsets from the last fetches, and ask the broker for ends that are too old.

        Args:
            client: The client.
            owned: Assignments whose ends are updated.
            ask: Whether to ask the broker for ends that no fetch has reported for ``ASK_AFTER`` seconds. The question
                blocks for up to half a second.
        """
        now = self._clock()
        known: dict[Partition, _End] = {}
        unknown = []
        for each in owned:
            before = self._known.get(each.partition, _End(OFFSET_INVALID, now + ASK_AFTER))
            offset = cached_end(client, each)
            known[each.partition] = before if offset <= before.offset else _End(offset, now + ASK_AFTER)
            if known[each.partition].ask_at <= now:
                unknown.append(each)
        if unknown and ask and now >= self._not_before:
            known |= self._asked(client, unknown, known, now)
        self._known = known

    def _asked(
        self, client: Consumer, assignments: list[Assignment], known: dict[Partition, _End], now: float
    ) -> dict[Partition, _End]:
        partitions = {each.partition.id: each.partition for each in assignments}
        try:
            answers = client.offsets_for_times([each.at(OFFSET_END) for each in assignments], timeout=_ASK_TIMEOUT)
        except KafkaException:
            # An unknown lag needs no error, because other calls of the client report the outage.
            self._not_before = now + _NOT_AGAIN_FOR
            return {}
        asked = {}
        for answer in answers:
            partition = partitions[PartitionId(answer.topic, answer.partition)]
            if answer.error is None:
                asked[partition] = _End(answer.offset, now + ASK_AFTER)
            else:
                # A partition may have no leader for a moment: keep the known end.
                asked[partition] = _End(known[partition].offset, now + _NOT_AGAIN_FOR)
        return asked


def cached_end(client: Consumer, assignment: Assignment) -> int:
    """The end that the last fetch reported, or ``OFFSET_INVALID`` before the first fetch. Does not ask the broker."""
    try:
        found = client.get_watermark_offsets(assignment.at(), cached=True)
    except KafkaException:
        # A client may own a partition before it has the partition's metadata.
        return OFFSET_INVALID
    return OFFSET_INVALID if found is None else int(found[1])
