"""The rules of an engine: its bounds, its order, and what follows a failed attempt. They do not change.

Retries use exponential backoff with full jitter (Brooker, "Exponential Backoff And Jitter", 2015): before attempt
n + 1 the lane waits a random time between 0 and min(``max_backoff``, ``backoff`` · 2ⁿ⁻¹).
"""

from __future__ import annotations

from typing import Final, Literal

from lanes.core.types import Failure

EXHAUSTED: Final = -1.0
"""The answer of ``delay`` for "no further attempt"; every real delay is 0 or more."""

_DOUBLINGS_LIMIT: Final = 60
"""Beyond this many doublings any backoff is above any ``max_backoff``; keeps 2ⁿ a small number."""


class RetryPolicy:
    """``attempts`` in all, the first one included; ``backoff`` and ``max_backoff`` in seconds."""

    __slots__ = ("attempts", "backoff", "max_backoff")

    def __init__(self, attempts: int, backoff: float, max_backoff: float) -> None:
        self.attempts = attempts
        self.backoff = backoff
        self.max_backoff = max_backoff

    def delay(self, attempt: int, failure: Failure) -> float:
        """Seconds to hold after the failed ``attempt`` (1, 2, …), or ``EXHAUSTED``."""
        if failure.terminal or attempt >= self.attempts:
            return EXHAUSTED
        if failure.delay is not None:
            return failure.delay
        ceiling = min(self.max_backoff, self.backoff * 2.0 ** min(attempt - 1, _DOUBLINGS_LIMIT))
        return failure.chance * ceiling


Poison = Literal["skip", "block", "block_and_dlq", "exit"]
"""What becomes of a message whose attempts are used up."""

Order = Literal["key", "partition", "serial", "none"]
"""Within what messages are handled in their order; ``serial``: of one partition at most."""

Keyless = Literal["any", "one_lane"]
"""Messages without a key are each in a lane of their own, or all in one."""

Follows = Literal["hold", "dead_letter", "dead_letter_and_block", "block", "halt"]
"""What follows a failed attempt: its lane waits for the next one; it is done once its dead letter is written; its lane
stands still once that is written; its lane stands still at once; everything stops."""

_GIVEN_UP: Final[dict[Poison, Follows]] = {
    "skip": "dead_letter",
    "block": "block",
    "block_and_dlq": "dead_letter_and_block",
    "exit": "halt",
}


class Policy:
    """The rules of one engine; ``lanes.config.Settings`` documents and checks them for users.

    ``lanes``: keys are folded onto so many lanes a partition; 0 = a lane for every key. For sources that commit:
    ``max_ahead`` messages are admitted above the confirmed floor at most; a commit follows a change after
    ``commit_interval`` seconds, or after ``commit_count`` finished messages. For sources that settle each message by
    itself: ``knows_settled``, whether the engine has to know what was settled when it comes again; False where the
    source passes that over. ``keeps_attempts``: a hold does not end before ``Engine.kept`` says that its failure is in
    a store.
    """

    __slots__ = (
        "commit_count",
        "commit_interval",
        "concurrency",
        "keeps_attempts",
        "keyless",
        "knows_settled",
        "lanes",
        "max_ahead",
        "max_bytes",
        "max_in_flight",
        "order",
        "poison",
        "retry",
    )

    def __init__(
        self,
        *,
        concurrency: int,
        max_in_flight: int,
        max_bytes: int,
        retry: RetryPolicy,
        poison: Poison,
        order: Order,
        keyless: Keyless,
        lanes: int,
        max_ahead: int,
        commit_interval: float,
        commit_count: int,
        knows_settled: bool,
        keeps_attempts: bool,
    ) -> None:
        self.concurrency = concurrency
        self.max_in_flight = max_in_flight
        self.max_bytes = max_bytes
        self.retry = retry
        self.poison = poison
        self.order = order
        self.keyless = keyless
        self.lanes = lanes
        self.max_ahead = max_ahead
        self.commit_interval = commit_interval
        self.commit_count = commit_count
        self.knows_settled = knows_settled
        self.keeps_attempts = keeps_attempts

    def follows(self, attempt: int, failure: Failure) -> Follows:
        """What follows the failed ``attempt`` (1, 2, …); the one place where that is decided."""
        if self.retry.delay(attempt, failure) != EXHAUSTED:
            return "hold"
        return self.given_up(dead_lettered=failure.dead_lettered)

    def given_up(self, *, dead_lettered: bool) -> Follows:
        """What follows when all attempts are used up; ``dead_lettered``: the message has a dead letter already."""
        follows = _GIVEN_UP[self.poison]
        return "block" if dead_lettered and follows == "dead_letter_and_block" else follows
