"""What is explored: how much of everything there is, and what must be met on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from lanes.core.policy import Policy, RetryPolicy

__all__ = ["Scope"]


@dataclass(frozen=True, kw_only=True)
class Scope:
    """What is explored.

    ``messages``: a (partition, key) each, in the order of their publication. ``gap``: one position is left out behind
    the first and behind the last. ``members``: how many there are; the first is there from the beginning. ``moves``:
    how often one comes, or is stopped. ``faults``: how many losses, expired sessions, crashes, missed deadlines and
    refused releases there are in all. ``failures``: how many handlers fail. ``unknown``: how many commits are answered
    late or never. ``settles``: what has finished may enter the ledger without a commit.
    ``rotate``: everything goes to the member that came last; else partitions are shared evenly. ``hands_over``:
    commits keep what is completed above the floor; ``close_prefix``: drains run what would be repeated without that.
    ``invariants``: check these alone, None = all.
    """

    messages: tuple[tuple[int, str], ...]
    gap: bool = True
    partitions: int = 1
    members: int = 2
    moves: int = 1
    faults: int = 0
    failures: int = 0
    unknown: int = 0
    settles: bool = False
    rotate: bool = True
    cooperative: bool = False
    hands_over: bool = True
    close_prefix: bool = False
    concurrency: int = 2
    max_in_flight: int = 10
    max_ahead: int = 10
    batch: int = 1
    invariants: frozenset[Callable[..., None]] | None = None

    def policy(self) -> Policy:
        """What the engines go by."""
        return Policy(
            concurrency=self.concurrency,
            max_in_flight=self.max_in_flight,
            max_bytes=1 << 20,
            retry=RetryPolicy(2, 1.0, 1.0),
            poison="skip",
            order="key",
            keyless="any",
            lanes=0,
            max_ahead=self.max_ahead,
            commit_interval=1.0,
            commit_count=5_000,
            knows_settled=True,
            keeps_attempts=False,
        )

    def expected(self) -> frozenset[str]:
        """The events and rare branches that an exploration must reach, or it has proved less than it says."""
        mixed = max(Counter(number for number, _ in set(self.messages)).values()) > 1
        applies = {
            _ALWAYS: True,
            _MOVES: self.moves > 0,
            _FAULTS: self.faults > 0,
            _FAILURES: self.failures > 0,
            "made, unanswered": self.unknown > 0,
            "settles": self.settles,
            "two lanes of a partition ran at once": mixed and self.concurrency > 1,
            "finished on arrival": mixed and self.hands_over and self.moves > 0,
            "started to close the prefix": self.close_prefix,
            "abandoned at the deadline of a drain": self.close_prefix and self.faults > 0,
            "max_ahead was reached, max_ahead was left": self.max_ahead < len(self.messages),
            "a bound was reached, below the low mark again": self.max_in_flight < len(self.messages),
        }
        return frozenset(word for words, wanted in applies.items() if wanted for word in words.split(", "))


_ALWAYS: Final = "hears, fetches, takes, ends well, commits, confirmed, came to rest"
_MOVES: Final = "joins, stops, leaves, drained, releases, abandoned by a drain"
_FAULTS: Final = (
    "crashes, starts again, session expires, joins again, loses, deadline, is cancelled, fences, settles late, "
    "is refused, "
    "fenced while handlers ran, a fenced handler ended, waited behind a fenced handler, "
    "a commit was answered behind the end of its assignment"
)
_FAILURES: Final = "fails, gives up, time passes, held for a retry, given to the dead letters, parked"
