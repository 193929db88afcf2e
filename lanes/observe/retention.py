"""The check for unfinished messages that the broker will soon delete.

The committed position of a partition stops at a message that waits for a retry, blocks its lane or has a slow handler.
A broker that deletes by age or size also deletes such a message. If the process ends after the deletion, the message is
lost. The runtime makes the check once a second. All times are seconds of the engine's clock. No method blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from lanes.core.lane import FINISHED, SETTLED
from lanes.core.types import Message, Partition
from lanes.history.writer import key_hash
from lanes.observe.status import Expiring
from lanes.source import Retaining, Retention

log = logging.getLogger("lanes")

PERIOD: Final = 1.0
"""Seconds between two looks."""

SHARE: Final = 0.1
"""Share of the retention that is left at the alarm, at least."""

_MARGIN: Final = 2 * PERIOD
"""Seconds by which the alarm precedes the deadline, because the facts about the broker are slightly old."""

_UNFINISHED_FOR: Final = 1.0
"""Seconds since its delivery after which an unfinished message counts as delayed."""

_TOLD_EVERY: Final = 30.0
"""Seconds between two log lines about different messages of one partition."""

_NAMED_LIMIT: Final = 5
"""Maximum number of messages that the log lines of one look name."""


@dataclass(slots=True)
class _Danger:
    """An unfinished message that the broker may delete soon, as found by the last check at the time ``seen``."""

    message: Message
    retention: Retention
    seen: float

    def left(self, now: float) -> float:
        return max(0.0, self.retention.left - (now - self.seen))


@dataclass(slots=True)
class _Told:
    """The last log line about a partition; ``gone`` = the line reports a possible deletion of the message."""

    message: Message
    at: float
    gone: bool


class RetentionWatch:
    """The check of the retention of one consumer, for a source that is ``Retaining``.

    Args:
        name: Name of the source, for the log.
        source: The source.
    """

    def __init__(self, name: str, source: Retaining) -> None:
        self._name = name
        self._source = source
        # The dict is replaced and never changed, because another thread may be reading it.
        self._dangers: dict[Partition, _Danger] = {}
        self._told: dict[Partition, _Told] = {}
        self._counted = False

    def look(self, partitions: Iterable[Partition], now: float) -> None:
        """Check the oldest unfinished message of each partition, and log each message that the broker may delete soon.

        A check logs at most five messages, first from partitions without a log line. The next checks log the further
        messages. O(in flight).

        Args:
            partitions: Partitions that the consumer owns.
            now: Current time, in seconds of the engine's clock.
        """
        dangers: dict[Partition, _Danger] = {}
        for partition in partitions:
            head = _head(partition, now)
            retention = None if head is None else self._source.retention(head)
            if head is not None and retention is not None and retention.left <= retention.span * SHARE + _MARGIN:
                dangers[partition] = _Danger(head, retention, now)
        self._dangers = dangers
        self._told = {
            partition: told
            for partition, told in self._told.items()
            if partition in dangers or now - told.at < _TOLD_EVERY
        }
        due = [each for each in dangers.items() if self._is_due(*each, now)]
        due.sort(key=lambda each: each[0] in self._told)
        counted, many = self._counted, len(due) > _NAMED_LIMIT
        self._counted = many
        # Partitions that were due together are due together again, and share a line again.
        at = now - now % _TOLD_EVERY if many or counted else now
        for number, (partition, danger) in enumerate(due):
            if number < _NAMED_LIMIT:
                self._tell(danger, now)
            elif partition not in self._told:
                continue
            self._told[partition] = _Told(danger.message, at, danger.retention.left <= 0.0)
        if many and not counted:
            log.error(
                "%s: %d more partitions have an unfinished message that the broker may delete soon",
                self._name,
                len(due) - _NAMED_LIMIT,
            )

    def expiring(self, partition: Partition, now: float) -> Expiring | None:
        """Return the message of a partition that the broker may delete soon. Any thread may call the method."""
        danger = self._dangers.get(partition)
        if danger is None or danger.message.state in (FINISHED, SETTLED):
            return None
        message = danger.message
        return Expiring(
            partition=str(message.partition.id),
            position=message.position,
            attempt=message.attempt,
            left=danger.left(now),
            rule=danger.retention.rule,
            key=message.key,
        )

    def _is_due(self, partition: Partition, danger: _Danger, now: float) -> bool:
        """Return whether to log a message now."""
        gone, told = danger.retention.left <= 0.0, self._told.get(partition)
        if told is not None:
            if told.message is danger.message:
                if told.gone or not gone:
                    return False
            elif now - told.at < _TOLD_EVERY:
                return False
        return True

    def _tell(self, danger: _Danger, now: float) -> None:
        message, left = danger.message, danger.retention.left
        log.error(
            "%s: %s position %d, key %s, attempt %d, is unfinished for %.1f s, and the broker %s by %s; if this "
            "process ends after the deletion, the message is lost. Let its handler finish, call park for its key, or "
            "raise the limit",
            self._name,
            message.partition.id,
            message.position,
            key_hash(message.key),
            message.attempt,
            now - message.received,
            f"may delete it in {left:.1f} s" if left > 0.0 else "may have deleted it",
            danger.retention.rule,
        )


def _head(partition: Partition, now: float) -> Message | None:
    """Return the lowest message that has been unfinished for a second or longer."""
    if not partition.live:
        return None
    if partition.commits is not None:
        # Positions rise in the order of delivery, and this ledger may have many messages above the first one.
        first = partition.ledger.oldest()
        return first if first is not None and now - first.received >= _UNFINISHED_FOR else None
    old = (message for message in partition.ledger.unfinished() if now - message.received >= _UNFINISHED_FOR)
    return min(old, key=lambda message: message.position, default=None)
