"""What an engine was asked to do: frozen, and separate from its state."""

from __future__ import annotations

from typing import Final, Literal

from lanes.core.retry import EXHAUSTED, RetryPolicy
from lanes.core.types import Failure

SKIP: Final = "skip"
BLOCK: Final = "block"
BLOCK_AND_DLQ: Final = "block_and_dlq"
EXIT: Final = "exit"

KEY: Final = "key"
PARTITION: Final = "partition"
SERIAL: Final = "serial"
NONE: Final = "none"

ANY: Final = "any"
ONE_LANE: Final = "one_lane"

Follows = Literal["hold", "park", "archive", "block", "halt"]
"""What follows a failed attempt: its lane waits for the next one; it is done once its dead letter is written; its lane
stands still once that is written; its lane stands still at once; everything stops."""

_GIVEN_UP: Final[dict[str, Follows]] = {SKIP: "park", BLOCK: "block", BLOCK_AND_DLQ: "archive", EXIT: "halt"}


class Policy:
    """The rules of one engine; ``lanes.config.Settings`` documents and checks them for users.

    ``poison``: what becomes of a message whose attempts are used up: ``skip``, ``block``, ``block_and_dlq``, ``exit``.
    ``order``: what is kept in order: ``key``, ``partition``, ``serial`` (one partition at most) or ``none``.
    ``keyless``: messages without a key are each in a lane of their own (``any``), or all in ``one_lane``.
    ``lanes``: keys are folded onto so many lanes a partition; 0 = a lane for every key.
    For sources that commit: ``max_ahead`` messages are admitted above the confirmed floor at most; a commit follows
    a change after ``commit_interval`` seconds, or after ``commit_count`` finished messages. ``pause_after``: seconds
    a bound is reached before the client is paused. For sources that settle each message by itself: ``knows_settled``,
    whether the engine has to know what was settled when it comes again; False where the source passes that over.
    ``keeps_attempts``: a hold does not end before ``Engine.kept`` says that its failure is in a store.
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
        "pause_after",
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
        poison: str = EXIT,
        order: str = KEY,
        keyless: str = ANY,
        lanes: int = 0,
        max_ahead: int = 10_000,
        commit_interval: float = 1.0,
        commit_count: int = 5_000,
        pause_after: float = 1.0,
        knows_settled: bool = True,
        keeps_attempts: bool = False,
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
        self.pause_after = pause_after
        self.knows_settled = knows_settled
        self.keeps_attempts = keeps_attempts

    def follows(self, attempt: int, failure: Failure) -> Follows:
        """What follows the failed ``attempt`` (1, 2, …); the one place where that is decided."""
        if self.retry.delay(attempt, failure) != EXHAUSTED:
            return "hold"
        return self.given_up(archived=failure.archived)

    def given_up(self, *, archived: bool) -> Follows:
        """What follows when all attempts are used up; ``archived``: a dead letter of the message is there already."""
        follows = _GIVEN_UP[self.poison]
        return "block" if archived and follows == "archive" else follows
