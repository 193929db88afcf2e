"""Where a partition is read from: its committed position, the start that was asked for, or the rule for a log that
does not reach it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final, NamedTuple

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, Consumer, KafkaException, TopicPartition

from lanes.core.offset_map import decode
from lanes.core.types import PartitionId, Runs
from lanes.errors import SourceError
from lanes_kafka.config import OutOfRange, Start

log = logging.getLogger("lanes.kafka")

QUERY_TIMEOUT: Final = 5.0
"""Seconds that one question to the broker may take."""


class Beginning(NamedTuple):
    """Where to begin: ``completed`` above ``floor`` is finished already; ``decided``: here, and not committed yet."""

    floor: int
    completed: Runs
    decided: bool


def beginnings(
    client: Consumer,
    ids: Sequence[PartitionId],
    *,
    start: Start,
    sizes: Mapping[str, int],
    out_of_range: OutOfRange,
    hands_over: bool,
    name: str,
) -> dict[PartitionId, Beginning]:
    """Where to begin with each of these. ``sizes``: how many partitions each topic has.

    Where a group has committed nothing of a topic, ``start`` is decided for all of its partitions, also for those that
    are not asked for: so one without a position beside others that have one is newer than the first run, and is read
    from its beginning.

    Asks the broker and blocks for it, up to ``QUERY_TIMEOUT`` a question. Raises ``KafkaException`` when the broker
    does not answer, and ``SourceError`` for a position that is out of range when that is to fail.
    """
    topics = {one.source for one in ids} if start != "beginning" else set()
    others = [PartitionId(topic, number) for topic in sorted(topics) for number in range(sizes.get(topic, 0))]
    asked = list(dict.fromkeys([*ids, *others]))
    answers = _whole(client.committed([TopicPartition(*one) for one in asked], timeout=QUERY_TIMEOUT))
    committed = {_partition_id(each): each for each in answers}
    ran = {one.source for one, each in committed.items() if each.offset >= 0}
    ids = [*ids, *(one for one in asked if one.source not in ran and one not in ids)]
    lows, highs = bounds(client, ids)
    fresh = [one for one in ids if committed[one].offset < 0]
    starts = _starts(client, [one for one in fresh if one.source not in ran], start, lows, highs)
    starts |= {one: lows[one] for one in fresh if one.source in ran}
    found = {}
    for partition_id in ids:
        if partition_id in starts:
            found[partition_id] = Beginning(starts[partition_id], [], decided=True)
            continue
        floor, low, high = committed[partition_id].offset, lows[partition_id], highs[partition_id]
        if low <= floor <= high:
            # Foreign metadata is normal, and says nothing. A transaction that is open keeps the end of what may be read
            # below what was handled before it, so the end bounds nothing here.
            text = committed[partition_id].metadata if hands_over else None
            completed = decode(text or "", floor, _ANY_DISTANCE) or []
            found[partition_id] = Beginning(floor, completed, decided=False)
        else:
            found[partition_id] = Beginning(moved(partition_id, floor, low, high, out_of_range, name), [], decided=True)
    return found


_ANY_DISTANCE: Final = 1 << 63


def moved(partition_id: PartitionId, offset: int, low: int, high: int, out_of_range: OutOfRange, name: str) -> int:
    """Where to go on when the log from ``low`` to ``high`` does not reach ``offset``; says so in the log.

    Raises ``SourceError`` when that is to fail.
    """
    what = f"{partition_id}: offset {offset} is out of range, the log has {low} to {high}: " + (
        f"{low - offset} offsets were deleted before they were read" if offset < low else "it was truncated"
    )
    if out_of_range == "fail":
        raise SourceError(
            f'{name}: {what}. Decide what becomes of the gap: set out_of_range to "earliest" or "latest", or commit '
            "a position of this log for the group"
        )
    target = low if out_of_range == "earliest" else high
    log.error('%s: %s; goes on at %d, as out_of_range="%s" says', name, what, target, out_of_range)
    return target


def bounds(client: Consumer, ids: Sequence[PartitionId]) -> tuple[dict[PartitionId, int], dict[PartitionId, int]]:
    """The first offset that the log of each has, and the end of what may be read. Blocks for the broker."""
    return _offsets(client, ids, OFFSET_BEGINNING), _offsets(client, ids, OFFSET_END)


def _starts(
    client: Consumer, ids: list[PartitionId], start: Start, lows: dict[PartitionId, int], highs: dict[PartitionId, int]
) -> dict[PartitionId, int]:
    if not ids:
        return {}
    if isinstance(start, datetime):
        found = _offsets(client, ids, int(start.timestamp() * 1000))
        # Behind the newest message there is no offset for a time.
        return {one: found[one] if found[one] >= 0 else highs[one] for one in ids}
    bound = lows if start == "beginning" else highs
    return {one: bound[one] for one in ids}


def _offsets(client: Consumer, ids: Sequence[PartitionId], time: int) -> dict[PartitionId, int]:
    # The request knows two times by these numbers: the beginning and the end, of all partitions at once.
    asked = [TopicPartition(*one, time) for one in ids]
    return {_partition_id(each): each.offset for each in _whole(client.offsets_for_times(asked, timeout=QUERY_TIMEOUT))}


def _whole(answers: Sequence[TopicPartition]) -> Sequence[TopicPartition]:
    for answer in answers:
        if answer.error is not None:
            raise KafkaException(answer.error)
    return answers


def _partition_id(answer: TopicPartition) -> PartitionId:
    return PartitionId(answer.topic, answer.partition)
