"""Estimates of the time until a broker deletes a message, for sources that are ``lanes.source.Retaining``.

A broker deletes messages above an age, or keeps only a number of newest messages. Times are in seconds. No function
blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from lanes.source import Retention

__all__ = ["Pace", "by_age", "by_newer", "soonest"]

PACE_OVER: Final = 60.0
"""Length in seconds of the measurement of a pace."""

_LEAST: Final = 1e-3
"""Shortest span in seconds."""


class Pace:
    """The growth rate of a number, such as the end of a log, over the last minute."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque()

    def __repr__(self) -> str:
        return f"<Pace {self.per_second():g} a second, from {len(self._samples)} samples>"

    def note(self, value: float, now: float) -> None:
        """Record the number at a time. If the number is below the last number, discard the earlier numbers.

        Args:
            value: The number.
            now: Time of the number, in seconds of one clock.
        """
        samples = self._samples
        if samples and value < samples[-1][1]:
            samples.clear()
        samples.append((now, value))
        # One sample beyond the minute stays, so that the samples always cover the whole minute.
        while len(samples) > 2 and samples[1][0] <= now - PACE_OVER:
            samples.popleft()

    def per_second(self) -> float:
        """Return the growth per second.

        Returns:
            The growth, 0 or more; 0 before the second sample.
        """
        (begin, first), (end, last) = (self._samples[0], self._samples[-1]) if self._samples else ((0.0, 0.0),) * 2
        return (last - first) / (end - begin) if end > begin else 0.0


def by_age(written: float, span: float, now: float, rule: str) -> Retention:
    """Estimate the retention of a message that the broker deletes by its age.

    Args:
        written: Time of the message in seconds since 1970.
        span: Seconds for which the broker keeps a message.
        now: Current time in seconds since 1970.
        rule: The rule.

    Returns:
        The retention.
    """
    return Retention(max(0.0, written + span - now), max(_LEAST, span), rule)


def by_newer(newer: float, limit: float, pace: float, rule: str, *, age: float = 0.0) -> Retention | None:
    """Estimate the retention of a message that the broker deletes when ``limit`` newer messages exist.

    Args:
        newer: Number of newer messages.
        limit: Number of newer messages that the broker keeps, 0 or more.
        pace: Number of messages that producers write per second, 0 or more.
        rule: The rule.
        age: Seconds since the caller counted ``newer``. The estimate includes the messages that producers wrote in this
            time.

    Returns:
        The retention; None while producers write no message.
    """
    if pace <= 0.0:
        return None
    return Retention(max(0.0, (limit - newer) / pace - age), max(_LEAST, limit / pace), rule)


def soonest(found: Iterable[Retention | None]) -> Retention | None:
    """Return the retention that has the smallest part of its span left.

    Args:
        found: Retentions of one message, by several rules.

    Returns:
        The retention; None if no rule applies.
    """
    return min((each for each in found if each is not None), key=lambda each: each.left / each.span, default=None)
