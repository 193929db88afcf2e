"""Where a partition is read from: its committed position, the start that was asked for, or the rule for a log that
does not reach it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final, NamedTuple

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, Consumer, KafkaException, TopicPartition

from lanes.core.offset_map import decode
from lanes.core.types import Runs
from lanes.errors import SourceError
from lanes_kafka.client.assignment import Place
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
    places: Sequence[Place],
    *,
    start: Start,
    sizes: Mapping[str, int],
    out_of_range: OutOfRange,
    hands_over: bool,
    name: str,
) -> dict[Place, Beginning]:
    """Where to begin with each of these. ``sizes``: how many partitions each topic has.

    Where a group has committed nothing of a topic, ``start`` is decided for all of its partitions, also for those that
    are not asked for: so one without a position beside others that have one is newer than the first run, and is read
    from its beginning.

    Asks the broker and blocks for it, up to ``QUERY_TIMEOUT`` a question. Raises ``KafkaException`` when the broker
    does not answer, and ``SourceError`` for a position that is out of range when that is to fail.
    """
    topics = {place.topic for place in places} if start != "beginning" else set()
    others = [Place(topic, number) for topic in sorted(topics) for number in range(sizes.get(topic, 0))]
    asked = list(dict.fromkeys([*places, *others]))
    answers = _whole(client.committed([TopicPartition(*place) for place in asked], timeout=QUERY_TIMEOUT))
    committed = {_place(each): each for each in answers}
    ran = {place.topic for place, each in committed.items() if each.offset >= 0}
    places = [*places, *(place for place in asked if place.topic not in ran and place not in places)]
    lows, highs = bounds(client, places)
    fresh = [place for place in places if committed[place].offset < 0]
    starts = _starts(client, [place for place in fresh if place.topic not in ran], start, lows, highs)
    starts |= {place: lows[place] for place in fresh if place.topic in ran}
    found = {}
    for place in places:
        if place in starts:
            found[place] = Beginning(starts[place], [], decided=True)
            continue
        floor, low, high = committed[place].offset, lows[place], highs[place]
        if low <= floor <= high:
            # Foreign metadata is normal, and says nothing. A transaction that is open keeps the end of what may be read
            # below what was handled before it, so the end bounds nothing here.
            text = committed[place].metadata if hands_over else None
            completed = decode(text or "", floor, _ANY_DISTANCE) or []
            found[place] = Beginning(floor, completed, decided=False)
        else:
            found[place] = Beginning(moved(place, floor, low, high, out_of_range, name), [], decided=True)
    return found


_ANY_DISTANCE: Final = 1 << 63


def moved(place: Place, offset: int, low: int, high: int, out_of_range: OutOfRange, name: str) -> int:
    """Where to go on when the log from ``low`` to ``high`` does not reach ``offset``; says so in the log.

    Raises ``SourceError`` when that is to fail.
    """
    what = f"{place.topic}/{place.number}: offset {offset} is out of range, the log has {low} to {high}: " + (
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


def bounds(client: Consumer, places: Sequence[Place]) -> tuple[dict[Place, int], dict[Place, int]]:
    """The first offset that the log of each has, and the end of what may be read. Blocks for the broker."""
    return _offsets(client, places, OFFSET_BEGINNING), _offsets(client, places, OFFSET_END)


def _starts(
    client: Consumer, places: list[Place], start: Start, lows: dict[Place, int], highs: dict[Place, int]
) -> dict[Place, int]:
    if not places:
        return {}
    if isinstance(start, datetime):
        found = _offsets(client, places, int(start.timestamp() * 1000))
        # Behind the newest message there is no offset for a time.
        return {place: found[place] if found[place] >= 0 else highs[place] for place in places}
    bound = lows if start == "beginning" else highs
    return {place: bound[place] for place in places}


def _offsets(client: Consumer, places: Sequence[Place], time: int) -> dict[Place, int]:
    # The request knows two times by these numbers: the beginning and the end, of all partitions at once.
    asked = [TopicPartition(*place, time) for place in places]
    return {_place(each): each.offset for each in _whole(client.offsets_for_times(asked, timeout=QUERY_TIMEOUT))}


def _whole(answers: Sequence[TopicPartition]) -> Sequence[TopicPartition]:
    for answer in answers:
        if answer.error is not None:
            raise KafkaException(answer.error)
    return answers


def _place(answer: TopicPartition) -> Place:
    return Place(answer.topic, answer.partition)
