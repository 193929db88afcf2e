"""The rules of an engine: its bounds, its order, and what follows a failed attempt. They do not change.

Retries use exponential backoff with full jitter (Brooker, "Exponential Backoff And Jitter", 2015). Before attempt
n + 1 the lane waits a random time between 0 and min(``max_backoff``, ``backoff`` · 2ⁿ⁻¹).
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from lanes.core.types import Failure

EXHAUSTED: Final = -1.0
"""The ``delay`` that means no further attempt; a real delay is 0 or more."""

_DOUBLINGS_LIMIT: Final = 60
"""Enough for any backoff to exceed any ``max_backoff``; bounds 2ⁿ."""


class RetryPolicy(NamedTuple):
    """The number of ``attempts``, the first one included, and the backoff between them in seconds."""

    attempts: int
    backoff: float
    max_backoff: float

    def delay(self, attempt: int, failure: Failure) -> float:
        """Seconds to hold the lane after the failed ``attempt`` (1, 2, …), or ``EXHAUSTED``."""
        if failure.terminal or attempt >= self.attempts:
            return EXHAUSTED
        if failure.delay is not None:
            return failure.delay
        ceiling = min(self.max_backoff, self.backoff * 2.0 ** min(attempt - 1, _DOUBLINGS_LIMIT))
        return failure.chance * ceiling


Poison = Literal["skip", "block", "block_and_dlq", "exit"]
"""The end of a message without an attempt left."""

Order = Literal["key", "partition", "serial", "none"]
"""The messages that are handled in order: of a key, of a partition, or none. ``serial``: of the only partition."""

Keyless = Literal["any", "one_lane"]
"""The lane of a message without a key: one of its own, or one for all of them."""

Follows = Literal["hold", "dead_letter", "dead_letter_and_block", "block", "halt"]
"""The next step after a failed attempt.

| value | next step |
|---|---|
| ``hold`` | the lane waits for the next attempt |
| ``dead_letter`` | the dead letter is written, then the message is done |
| ``dead_letter_and_block`` | the dead letter is written, then the lane blocks |
| ``block`` | the lane blocks |
| ``halt`` | everything stops |
"""

_GIVEN_UP: Final[dict[Poison, Follows]] = {
    "skip": "dead_letter",
    "block": "block",
    "block_and_dlq": "dead_letter_and_block",
    "exit": "halt",
}


class Policy(NamedTuple):
    """The rules of one engine; ``lanes.config.Settings`` documents and checks most of them for users.

    ``lanes`` is the number of lanes of a partition that keys share; 0 = a lane for each key. ``knows_settled``: the
    engine recognizes a redelivery of a settled position; False for a source that never makes one. ``keeps_attempts``: a
    hold never ends before ``Engine.kept`` reports that its failure is in the store. For sources that commit: at most
    ``max_ahead`` messages are admitted above the confirmed floor, and a commit follows a change after
    ``commit_interval`` seconds or ``commit_count`` finished messages.
    """

    concurrency: int
    max_in_flight: int
    max_bytes: int
    retry: RetryPolicy
    poison: Poison
    order: Order
    keyless: Keyless
    lanes: int
    max_ahead: int
    commit_interval: float
    commit_count: int
    knows_settled: bool
    keeps_attempts: bool

    def follows(self, attempt: int, failure: Failure) -> Follows:
        """The next step after the failed ``attempt`` (1, 2, …)."""
        if self.retry.delay(attempt, failure) != EXHAUSTED:
            return "hold"
        return self.given_up(dead_lettered=failure.dead_lettered)

    def given_up(self, *, dead_lettered: bool) -> Follows:
        """The next step without an attempt left; ``dead_lettered``: the message has a dead letter already."""
        follows = _GIVEN_UP[self.poison]
        return "block" if dead_lettered and follows == "dead_letter_and_block" else follows
