"""The fixed rules of an engine: its bounds, its order, and the next step after a failed attempt.

Retries use exponential backoff with full jitter (Brooker, "Exponential Backoff And Jitter", 2015). If the failure names
no delay, the lane waits a random time before attempt n + 1. The time is between 0 and min(``max_backoff``, ``backoff``
· 2ⁿ⁻¹) seconds.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from lanes.core.types import BudgetId, Failure, PartitionId

EXHAUSTED: Final = -1.0
"""The ``delay`` of a message without a further attempt. A real delay is 0 or more."""

_DOUBLINGS_LIMIT: Final = 60
"""Bound of n in 2ⁿ, so that the power stays a finite float."""


class RetryPolicy(NamedTuple):
    """The retries of a message.

    Attributes:
        attempts: Maximum number of attempts, 1 or more.
        backoff: Maximum number of seconds before the second attempt; the maximum doubles with every attempt.
        max_backoff: Bound of the backoff in seconds.
    """

    attempts: int
    backoff: float
    max_backoff: float

    def delay(self, attempt: int, failure: Failure) -> float:
        """Return the seconds to hold the lane after the failed ``attempt`` (1, 2, …), or ``EXHAUSTED``."""
        if failure.terminal or attempt >= self.attempts:
            return EXHAUSTED
        return self.pause(attempt, failure)

    def pause(self, failures: int, failure: Failure) -> float:
        """Return the seconds to wait after failure number ``failures`` (1, 2, …), which has no maximum."""
        if failure.delay is not None:
            return failure.delay
        ceiling = min(self.max_backoff, self.backoff * 2.0 ** min(failures - 1, _DOUBLINGS_LIMIT))
        return failure.chance * ceiling


Poison = Literal["skip", "block", "block_and_dlq", "exit"]
"""The policy for a message without an attempt left."""

Order = Literal["key", "partition", "serial", "none"]
"""The unit within which messages run in order. ``serial``: the one partition of the source."""

Keyless = Literal["any", "one_lane"]
"""The lane of a message without a key. ``any``: no lane. ``one_lane``: the lane of all messages without a key."""

Follows = Literal["hold", "dead_letter", "dead_letter_and_block", "block", "halt"]
"""The next step after a failed attempt.

| value | next step |
|---|---|
| ``hold`` | the lane waits for the next attempt |
| ``dead_letter`` | write the dead letter, then finish the message |
| ``dead_letter_and_block`` | write the dead letter, then block the lane |
| ``block`` | the lane blocks |
| ``halt`` | the consumer stops |
"""

_GIVEN_UP: Final[dict[Poison, Follows]] = {
    "skip": "dead_letter",
    "block": "block",
    "block_and_dlq": "dead_letter_and_block",
    "exit": "halt",
}


class Policy(NamedTuple):
    """The rules of one engine; ``lanes.config.Settings`` documents and checks most of them for users.

    Attributes:
        lanes: Number of lanes of a partition that keys share. 0 = a lane for each key.
        max_ahead: Maximum number of messages admitted above the confirmed floor. Only for sources that commit.
        commit_interval: Maximum number of seconds until the commit of a finished message is due; see
            ``lanes.core.commits.Committer.pace``. Only for sources that commit.
        commit_count: Number of finished messages at which a commit is due at once. Only for sources that commit.
        knows_settled: Whether the engine recognizes a redelivery of a settled position. False for a source that never
            redelivers a settled position.
        keeps_attempts: Whether a hold ends only after a call of ``Engine.kept``, which reports that the store has the
            failure.
        concurrency_per_partition: Maximum number of running handlers of a budget. 0 = no bound.
        max_in_flight_per_partition: Maximum number of messages in flight of the assignments of a budget. 0 = no bound.
        queues: Names of physical queues of partitioned queues. All partitions of such a source share one budget. Every
            other partition has a separate budget.
        commit_pace: Seconds from the first change of a partition to its commit, while commits cost little. ``None`` = a
            share of ``commit_interval``.
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
    concurrency_per_partition: int = 0
    max_in_flight_per_partition: int = 0
    queues: frozenset[str] = frozenset()
    commit_pace: float | None = None

    def budget_of(self, partition: PartitionId) -> BudgetId:
        """Return the budget of a partition or of a piece: its physical queue, or the whole partition."""
        return partition.source if partition.source in self.queues else partition.whole

    def follows(self, attempt: int, failure: Failure) -> Follows:
        """Return the next step after the failed ``attempt`` (1, 2, …)."""
        if self.retry.delay(attempt, failure) != EXHAUSTED:
            return "hold"
        return self.given_up(dead_lettered=failure.dead_lettered)

    def given_up(self, *, dead_lettered: bool) -> Follows:
        """Return the next step of a message without a further attempt; ``dead_lettered`` = a dead letter exists."""
        follows = _GIVEN_UP[self.poison]
        return "block" if dead_lettered and follows == "dead_letter_and_block" else follows
