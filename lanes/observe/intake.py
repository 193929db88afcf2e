"""The check for missing deliveries.

It finds partitions that have room and messages at the broker, but no deliveries. A broker may accept requests and never
answer them. In this case no handler runs, no call fails, and no message is unfinished, so only this check detects the
fault. The runtime checks the partitions at regular intervals. All times are seconds of the engine's clock. No method
blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from lanes.core.types import Partition, Room
from lanes.dead_letter import printable
from lanes.source import Backlog, Backlogged

log = logging.getLogger("lanes")

_LOOKS: Final = 4
"""Minimum number of checks within ``unhealthy_after``."""

_LONGEST_PERIOD: Final = 1.0
"""Maximum number of seconds between two checks."""

_LATE: Final = 3.0
"""Number of periods after which a check is late, because the process or the event loop did not run."""

FACTS_AGE: Final = 3.0
"""Maximum age of a backlog in seconds. A shorter silence may only show a backlog from before the last delivery."""

_ERROR_LIMIT: Final = 500
"""Maximum number of characters of an error of the client."""

_NAMED_LIMIT: Final = 5
"""Maximum number of partitions that the health and the log lines of one check name."""


class Silence(NamedTuple):
    """A partition that delivers nothing, although it has waiting messages and room.

    Attributes:
        since: Time of the first check that found the silence.
        backlog: Backlog at the last check.
        seen: Time of the last check.
        reported: Whether a log line has reported the silence.
    """

    since: float
    backlog: Backlog
    seen: float
    reported: bool


class IntakeWatch:
    """The check for missing deliveries of one consumer, for a source that is ``Backlogged``.

    Args:
        name: Name of the source, for the log.
        source: The source.
        unhealthy_after: Seconds, above 0, after which a silent partition makes the consumer unhealthy; the effective
            minimum is ``FACTS_AGE``.

    Attributes:
        period: Seconds between two checks.
    """

    def __init__(self, name: str, source: Backlogged, unhealthy_after: float) -> None:
        self._name = name
        self._source = source
        self._unhealthy_after = max(unhealthy_after, FACTS_AGE)
        self.period = min(_LONGEST_PERIOD, self._unhealthy_after / _LOOKS)
        self._delivered: set[Partition] = set()
        self._looked = 0.0
        # The dict is replaced and never changed, because another thread may be reading it.
        self._silent: dict[Partition, Silence] = {}

    def delivered(self, partition: Partition) -> None:
        """Record that the source has delivered messages of the partition, or has read past a gap.

        The call takes almost no time.
        """
        self._delivered.add(partition)

    def look(self, partitions: Iterable[Partition], room: Room, now: float) -> None:
        """Check the partitions, and log each partition that is silent for too long or delivers again.

        Args:
            partitions: Partitions that the consumer owns; empty after the consumer has begun to stop.
            room: Room that the waiting call of ``Source.receive`` received.
            now: Current time, in seconds of the engine's clock.
        """
        before, delivered = self._silent, self._delivered
        if now - self._looked > self.period * _LATE:
            # While the process or the loop did not run, no message could arrive.
            before = {}
        self._looked, self._delivered = now, set()
        silent: dict[Partition, Silence] = {}
        if room.messages > 0 and room.bytes > 0:
            for partition in partitions:
                if partition in delivered or partition in room.paused or not partition.steady:
                    continue
                backlog = self._source.backlog(partition)
                if backlog.messages:
                    known = before.get(partition)
                    since, reported = (now, False) if known is None else (known.since, known.reported)
                    silent[partition] = Silence(since, backlog, now, reported)
        self._report(before, silent, delivered, now)
        self._silent = silent

    def reasons(self) -> list[str]:
        """Return the reports of the partitions that are silent for too long. Any thread may call the method.

        Returns:
            A text for each of the first five partitions, and a text that counts the further partitions.
        """
        late = self._late(self._silent)
        reasons = [_text(partition, silence) for partition, silence in late[:_NAMED_LIMIT]]
        if len(late) > _NAMED_LIMIT:
            reasons.append(f"{len(late) - _NAMED_LIMIT} more partitions deliver nothing, although messages wait")
        return reasons

    def _late(self, silent: dict[Partition, Silence]) -> list[tuple[Partition, Silence]]:
        return [each for each in silent.items() if each[1].seen - each[1].since > self._unhealthy_after]

    def _report(
        self, before: dict[Partition, Silence], silent: dict[Partition, Silence], delivered: set[Partition], now: float
    ) -> None:
        due = [(partition, silence) for partition, silence in self._late(silent) if not silence.reported]
        for partition, silence in due:
            silent[partition] = silence._replace(reported=True)
        texts = [_text(partition, silence) for partition, silence in due]
        _log_named(logging.WARNING, self._name, texts, "deliver nothing, although messages wait")
        again = [
            f"{partition.id} delivers again after {now - silence.since:.1f} s"
            for partition, silence in before.items()
            if silence.reported and partition in delivered
        ]
        _log_named(logging.INFO, self._name, again, "deliver again")


def _log_named(level: int, name: str, texts: Sequence[str], what: str) -> None:
    for text in texts[:_NAMED_LIMIT]:
        log.log(level, "%s: %s", name, text)
    if len(texts) > _NAMED_LIMIT:
        log.log(level, "%s: %d more partitions %s", name, len(texts) - _NAMED_LIMIT, what)


def _text(partition: Partition, silence: Silence) -> str:
    messages, error, age, cause = silence.backlog
    when = "" if age is None else f", {age:.1f} s ago"
    if cause:
        why = printable(cause[:_ERROR_LIMIT])
    elif error:
        why = f"the last error of the client{when}: {printable(error[:_ERROR_LIMIT])}"
    else:
        why = "the client reports no error"
    return (
        f"{partition.id} delivers nothing for {silence.seen - silence.since:.1f} s, although {messages} messages wait "
        f"at the broker and the buffer has room; {why}"
    )
