"""How far the partitions reach that a client owns: with what is committed, that is the lag."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from confluent_kafka import OFFSET_END, OFFSET_INVALID, Consumer, KafkaException

from lanes.clock import Clock
from lanes.core.types import Partition, PartitionId
from lanes_kafka.client.group import Assignment

ASK_AFTER: Final = 5.0
"""Seconds without news of an end after which the broker is asked: a client that is paused, or has its queue full,
fetches nothing and hears nothing."""

_ASK_TIMEOUT: Final = 0.5
"""Seconds that it may take to answer: nothing else is done meanwhile."""

_NOT_AGAIN_FOR: Final = 30.0
"""Seconds after which one that did not answer is asked again."""


class _End(NamedTuple):
    """``offset``: next to be written, ``OFFSET_INVALID`` while unknown; ``ask_at``: when the broker is asked, unless it
    is heard of before."""

    offset: int
    ask_at: float


class Ends:
    """The end of what may be read of each partition: behind its last message, or before an open transaction.

    Used in the thread that owns the client, but for ``of``.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._not_before = 0.0
        # Replaced, never changed: another thread may be looking into it.
        self._known: dict[Partition, _End] = {}

    def of(self, partition: Partition) -> int | None:
        """The end as it is known, None where it is not. From any thread; does not block."""
        end = self._known.get(partition)
        return None if end is None or end.offset == OFFSET_INVALID else end.offset

    def look(self, client: Consumer, owned: Iterable[Assignment], *, ask: bool) -> None:
        """Take in what the client has heard of what it owns, and ask the broker where it has heard nothing for long.

        ``ask``: whether the broker may be asked, for which this blocks up to half a second.
        """
        now = self._clock()
        known: dict[Partition, _End] = {}
        unheard = []
        for each in owned:
            before = self._known.get(each.partition, _End(OFFSET_INVALID, now + ASK_AFTER))
            offset = heard(client, each)
            known[each.partition] = before if offset <= before.offset else _End(offset, now + ASK_AFTER)
            if known[each.partition].ask_at <= now:
                unheard.append(each)
        if unheard and ask and now >= self._not_before:
            known |= self._asked(client, unheard, known, now)
        self._known = known

    def _asked(
        self, client: Consumer, assignments: list[Assignment], known: dict[Partition, _End], now: float
    ) -> dict[Partition, _End]:
        partitions = {each.partition.id: each.partition for each in assignments}
        try:
            answers = client.offsets_for_times([each.at(OFFSET_END) for each in assignments], timeout=_ASK_TIMEOUT)
        except KafkaException:
            # Nobody acts on a lag: an outage is told of by what fails in it.
            self._not_before = now + _NOT_AGAIN_FOR
            return {}
        asked = {}
        for answer in answers:
            partition = partitions[PartitionId(answer.topic, answer.partition)]
            if answer.error is None:
                asked[partition] = _End(answer.offset, now + ASK_AFTER)
            else:
                # As while it has no leader: what is known of it stays.
                asked[partition] = _End(known[partition].offset, now + _NOT_AGAIN_FOR)
        return asked


def heard(client: Consumer, assignment: Assignment) -> int:
    """The end as it came with the last fetch, ``OFFSET_INVALID`` where none did. Asks nobody."""
    try:
        found = client.get_watermark_offsets(assignment.at(), cached=True)
    except KafkaException:
        # A client may own what it has no metadata of yet.
        return OFFSET_INVALID
    return OFFSET_INVALID if found is None else int(found[1])
