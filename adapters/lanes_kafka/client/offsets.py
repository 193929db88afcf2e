"""Finds the position at which the source starts to read a partition.

The source starts at the committed position. In a topic without committed positions ``start`` decides. If the log does
not contain the committed position, ``out_of_range`` decides.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, Consumer, KafkaException, TopicPartition

from lanes.core.offset_map import decode
from lanes.core.types import PartitionId, Runs
from lanes.errors import SourceError
from lanes_kafka.config import OutOfRange, Start

log = logging.getLogger("lanes.kafka")

QUERY_TIMEOUT: Final = 5.0
"""Seconds allowed for one request to the broker."""

_ANY_DISTANCE: Final = 1 << 63
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class StartPosition(NamedTuple):
    """The position at which the source starts to read a partition.

    Attributes:
        floor: The first position to read.
        completed: Runs of positions above ``floor`` that an earlier owner completed.
        uncommitted: Whether the client must commit ``floor``, because the broker has no such position.
    """

    floor: int
    completed: Runs
    uncommitted: bool


def start_positions(
    client: Consumer,
    ids: Sequence[PartitionId],
    *,
    start: Start,
    sizes: Mapping[str, int],
    out_of_range: OutOfRange,
    hands_over: bool,
    name: str,
    timeout: Callable[[], float] = lambda: QUERY_TIMEOUT,
) -> dict[PartitionId, StartPosition]:
    """Find the position at which the source starts to read each partition.

    If the group has no committed position for a topic, a ``start`` other than ``"beginning"`` decides the positions of
    all its partitions, not only of ``ids``. If only some partitions have positions later, the other partitions are
    therefore newer than the first run. The source reads a newer partition from its beginning.

    The call sends three or four requests in sequence. The call blocks until the broker has answered.

    Args:
        client: The client to ask.
        ids: Partitions to start.
        start: Choice of the start position in a topic without committed positions.
        sizes: Number of partitions of each topic.
        out_of_range: Position to continue at if the log does not contain the committed position.
        hands_over: Whether the metadata of commits list completed positions.
        name: Name of the source, for errors and log lines.
        timeout: Function that returns the maximum seconds of the next request.

    Returns:
        The start position of each partition in ``ids``, and of all partitions for which ``start`` decided.

    Raises:
        KafkaException: The broker does not answer, or answers with an error.
        SourceError: A position is out of range, and ``out_of_range`` is ``"fail"``.
    """
    topics = {one.source for one in ids} if start != "beginning" else set()
    others = [PartitionId(topic, number) for topic in sorted(topics) for number in range(sizes.get(topic, 0))]
    asked = list(dict.fromkeys([*ids, *others]))
    answers = answered(client.committed([TopicPartition(*one) for one in asked], timeout=timeout()))
    committed = {_partition_id(each): each for each in answers}
    ran = {one.source for one, each in committed.items() if each.offset >= 0}
    ids = [*ids, *(one for one in asked if one.source not in ran and one not in ids)]
    lows, highs = log_bounds(client, ids, timeout)
    fresh = [one for one in ids if committed[one].offset < 0]
    starts = _starts(client, [one for one in fresh if one.source not in ran], start, lows, highs, timeout)
    starts |= {one: lows[one] for one in fresh if one.source in ran}
    found = {}
    for partition_id in ids:
        if partition_id in starts:
            found[partition_id] = StartPosition(starts[partition_id], [], uncommitted=True)
            continue
        floor, low, high = committed[partition_id].offset, lows[partition_id], highs[partition_id]
        # Ignore metadata that another client wrote. While a transaction is open, the readable end may lie below
        # completed messages. The readable end therefore does not bound the completed runs.
        text = committed[partition_id].metadata if hands_over else None
        completed = decode(text or "", floor, _ANY_DISTANCE) or []
        if low <= floor <= high:
            found[partition_id] = StartPosition(floor, completed, uncommitted=False)
        else:
            target = position_in_range(partition_id, floor, low, high, out_of_range, name)
            # After a truncation, the log has other messages at the completed positions.
            found[partition_id] = _beyond(target, completed if floor < low else [])
    return found


def _beyond(target: int, completed: Runs) -> StartPosition:
    """Return the start at ``target``, above a committed position that the log no longer contains.

    Completed positions at and above ``target`` stay completed. The client does not commit a start with completed
    positions, because a commit without metadata would discard these positions.
    """
    left = [(max(begin, target), end) for begin, end in completed if end > target]
    if left and left[0][0] == target:
        target = left.pop(0)[1]
    return StartPosition(target, left, uncommitted=not left)


def position_in_range(
    partition_id: PartitionId, offset: int, low: int, high: int, out_of_range: OutOfRange, name: str
) -> int:
    """Choose and log the position to continue at when the log from ``low`` to ``high`` does not contain ``offset``.

    Raises ``SourceError`` when ``out_of_range`` is ``"fail"``.
    """
    what = f"{partition_id}: offset {offset} is out of range, because the log has {low} to {high}, and " + (
        f"{low - offset} offsets were deleted before they were read" if offset < low else "it was truncated"
    )
    if out_of_range == "fail":
        raise SourceError(
            f'{name}: {what}; set out_of_range to "earliest" or "latest", or commit a position of this log'
        )
    target = low if out_of_range == "earliest" else high
    log.error('%s: %s; reading continues at %d because of out_of_range="%s"', name, what, target, out_of_range)
    return target


def log_bounds(
    client: Consumer, ids: Sequence[PartitionId], timeout: Callable[[], float] = lambda: QUERY_TIMEOUT
) -> tuple[dict[PartitionId, int], dict[PartitionId, int]]:
    """Ask for the first offset and the readable end of each log.

    The call blocks for up to twice ``timeout`` seconds.
    """
    return _offsets(client, ids, OFFSET_BEGINNING, timeout), _offsets(client, ids, OFFSET_END, timeout)


def _starts(
    client: Consumer,
    ids: list[PartitionId],
    start: Start,
    lows: dict[PartitionId, int],
    highs: dict[PartitionId, int],
    timeout: Callable[[], float],
) -> dict[PartitionId, int]:
    if not ids:
        return {}
    if isinstance(start, datetime):
        found = _offsets(client, ids, milliseconds(start), timeout)
        # The broker reports no offset for a time after the newest message.
        return {one: found[one] if found[one] >= 0 else highs[one] for one in ids}
    bound = lows if start == "beginning" else highs
    return {one: bound[one] for one in ids}


def milliseconds(start: datetime) -> int:
    """Return the first millisecond since 1970 at or after ``start``.

    Message times are whole milliseconds. The function rounds up, so that the start includes no earlier message. A time
    before 1970 becomes 0, because negative times have a special meaning for the broker.
    """
    return max(0, -((_EPOCH - start) // timedelta(milliseconds=1)))


def _offsets(
    client: Consumer, ids: Sequence[PartitionId], time: int, timeout: Callable[[], float]
) -> dict[PartitionId, int]:
    # A request for offsets by time has special times for the beginning and the end, and covers all partitions at once.
    asked = [TopicPartition(*one, time) for one in ids]
    answers = answered(client.offsets_for_times(asked, timeout=timeout()))
    return {_partition_id(each): each.offset for each in answers}


def answered(answers: list[TopicPartition]) -> list[TopicPartition]:
    """Return the answers about partitions. Raises ``KafkaException`` if one of them is an error."""
    for answer in answers:
        if answer.error is not None:
            raise KafkaException(answer.error)
    return answers


def _partition_id(answer: TopicPartition) -> PartitionId:
    return PartitionId(answer.topic, answer.partition)
