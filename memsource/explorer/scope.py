"""The scope of an exploration: its bounds, and the events that the exploration must reach."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final, ParamSpec

from lanes.core.policy import Policy, RetryPolicy

P = ParamSpec("P")


@dataclass(frozen=True, kw_only=True)
class Scope:
    """The scope of an exploration.

    Attributes:
        messages: Partition and key of each message, in the order of publication.
        gap: Whether the log skips one position after the first message and one position after the last message.
        partitions: Number of partitions.
        members: Number of members. The first member is in the group from the start.
        moves: Maximum number of joins and orderly stops of members, in total.
        faults: Maximum number of losses, expired sessions, crashes, missed deadlines and refused releases, in total.
        failures: Maximum number of failing calls of handlers.
        unknown: Maximum number of commits whose answer is late or missing.
        settles: Whether finished messages may enter the ledger without a commit.
        rotate: Whether the last member that joined receives all partitions. False = the members share the partitions
            evenly.
        cooperative: Whether rebalances are cooperative.
        hands_over: Whether commits contain the completed set above the floor.
        close_prefix: Whether a drain starts queued messages below started messages, so that finished messages do not
            run again.
        concurrency: Maximum number of running handlers of a member.
        max_in_flight: Maximum number of messages in flight, as in ``Settings``.
        max_ahead: Maximum number of messages above the confirmed floor, as in ``Settings``.
        batch: Maximum number of messages of a fetch.
        invariants: Invariants to check; None = all.
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
        """Return the policy of the engines."""
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

    def unreached(self, reached: Collection[str]) -> list[str]:
        """Return the events and branches of ``expected`` that an exploration has not reached, sorted.

        Args:
            reached: Names of the reached events and branches, as in ``Exploration.reached``.

        Returns:
            Names of the missing events and branches. An exploration with missing events has not covered its scope.
        """
        return sorted(self.expected() - set(reached))

    def expected(self) -> frozenset[str]:
        """Return the events and rare branches that a complete exploration must reach."""
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


def check(scope: Scope, invariant: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    """Check an invariant with these arguments if the scope includes the invariant. Raises ``Broken``."""
    if scope.invariants is None or invariant in scope.invariants:
        invariant(*args, **kwargs)


_ALWAYS: Final = "hears, fetches, starts a handler, ends well, commits, confirmed, no further event"
_MOVES: Final = "joins, stops, leaves, drained, releases, abandoned by a drain"
_FAULTS: Final = (
    "crashes, starts again, session expires, joins again, loses, deadline, is cancelled, fences, settles late, "
    "is refused, "
    "fenced while handlers ran, a fenced handler ended, waited behind a fenced handler, "
    "a commit was answered after the end of its assignment"
)
_FAILURES: Final = "fails, gives up, time passes, held for a retry, given to the dead letters, parked"
