"""The commits of partitions whose source commits one position.

A partition has at most one commit in transit. The ledger applies a commit when the broker has confirmed it. The ledger
treats a commit with an unknown result as unconfirmed, and the next commit repeats it. ``max_ahead`` limits the number
of messages admitted above the confirmed floor. Further messages wait in their partition, in order and in flight, until
the broker confirms a commit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lanes.core import effects as fx
from lanes.core.chains import Chains
from lanes.core.lane import ABANDONED, SETTLED
from lanes.core.ledgers import OffsetLedger
from lanes.core.policy import Policy
from lanes.core.types import NEVER, Message, Partition, Settlement

PROMPT: Final = 1 / 20
"""Share of ``commit_interval`` after which a commit is due, unless the commits of the engine would cost too much."""

MESSAGE_PACE: Final = 40e-6
"""Seconds between two commits for each message above the confirmed floors. A commit lists the finished messages and
costs up to 1.2 µs of CPU for each of them. At this pace all commits together cost at most about 3 % of a CPU.
"""

PARTITION_PACE: Final = 1e-3
"""Seconds between two commits for each partition with changes, as such a partition costs about 30 µs of CPU."""

PACED_SHARE: Final = 1 / 8
"""Share of ``MESSAGE_PACE`` and ``PARTITION_PACE`` that applies under ``Policy.commit_pace``."""

_UNKNOWN: Final = -NEVER
"""A time in the past, which makes the engine compute the time of the next commit."""


@dataclass(slots=True, eq=False)
class PartitionCommits:
    """The commits of one assignment.

    A commit is due ``Committer.pace`` seconds after its first change, but not before ``not_before``. The commit is due
    sooner if ``_count`` changes wait, or if the floor has risen while ``max_ahead`` stops the partition.

    Attributes:
        confirmed: The floor that the broker has confirmed.
        not_before: Time before which no commit begins, after a commit with an unknown result.
        confirmed_ordinal: Number of the first delivery above the confirmed floor.
        changes: Number of changes since the last commit; after an unknown result, ``_count`` or more.
        since: Time of the first change since the last commit, in seconds of the engine's clock.
        sending: The commit that is sent and not answered; None = no such commit.
        over: Whether no further commit may begin.
        finished: Number of messages that finished in this assignment and are in no confirmed commit.
    """

    confirmed: int
    _count: int
    not_before: float = 0.0
    confirmed_ordinal: int = 0
    changes: int = 0
    since: float = 0.0
    sending: Settlement | None = None
    over: bool = False
    finished: int = 0
    _sent: int = 0

    def changed(self, count: int, now: float) -> None:
        """Count changes that the next commit reports to the broker."""
        if not self.changes:
            self.since = now
        self.changes += count

    @property
    def pending(self) -> bool:
        """Whether the next commit may begin: changes wait, no commit is in transit, and ``over`` is False."""
        return self.changes > 0 and self.sending is None and not self.over

    def due_at(self, pace: float, *, urgent: bool) -> float:
        """Return the time at which the source must commit the pending changes.

        Args:
            pace: Seconds from the first change to the commit.
            urgent: Whether messages wait for the confirmation of the floor.

        Returns:
            The time in seconds of the engine's clock. The time may have passed.
        """
        at = self.since
        if not urgent and self.changes < self._count:
            at += pace
        return max(at, self.not_before)

    def send(self, settlement: Settlement) -> None:
        """Record that the source has sent a commit with every pending change."""
        self.sending = settlement
        self.changes = 0
        self._sent = self.finished

    def confirm(self, settlement: Settlement) -> None:
        """Record that the broker has confirmed a commit."""
        assert settlement.floor is not None, "only commits are confirmed"
        self.sending = None
        self.confirmed = settlement.floor
        self.confirmed_ordinal = settlement.ordinal
        self.finished -= self._sent

    def unknown(self, again_at: float) -> None:
        """Repeat the sent commit, whose result is unknown, at ``again_at`` or later."""
        self.sending = None
        self.not_before = again_at
        # ``since`` has passed. With ``_count`` changes the next commit does not wait for the pace.
        self.changes += self._count

    def __repr__(self) -> str:
        sending = "none" if self.sending is None else str(self.sending.floor)
        return f"<PartitionCommits confirmed {self.confirmed}, sending {sending}, {self.changes} changes since>"


_Pending = tuple[Partition, OffsetLedger, PartitionCommits]
"""A partition with changes, with its ledger and its commits."""


class Committer:
    """The commits of one engine.

    Args:
        policy: The rules of the engine.
        chains: The lanes of the engine.
        effects: The effects of the engine.

    The next commit is due at ``_next_at`` or later. The exact time depends on all partitions. A member with ranges may
    have hundreds of partitions, and reads the time after each handler. The object therefore computes the exact time
    only after ``_next_at``.

    Attributes:
        partitions: The ledger of each partition whose source commits.
        ahead: The partitions that have reached ``max_ahead``.
    """

    __slots__ = ("_chains", "_effects", "_least", "_next_at", "_policy", "ahead", "partitions")

    def __init__(self, policy: Policy, chains: Chains, effects: list[fx.Effect]) -> None:
        self._policy = policy
        self._chains = chains
        self._effects = effects
        self.partitions: dict[Partition, OffsetLedger] = {}
        self.ahead: set[Partition] = set()
        self._next_at = _UNKNOWN
        # The shortest pace, in seconds.
        pace = policy.commit_pace
        self._least = policy.commit_interval * PROMPT if pace is None else pace

    def assign(self, partition: Partition, floor: int) -> None:
        """Add a partition whose source reads from position ``floor``."""
        ledger = OffsetLedger(floor, partition.completed)
        partition.ledger = ledger
        partition.commits = PartitionCommits(floor, self._policy.commit_count)
        self.partitions[partition] = ledger

    def forget(self, partition: Partition) -> None:
        """Stop sending commits of a partition. Idempotent."""
        self.partitions.pop(partition, None)
        self.ahead.discard(partition)
        # The commits of the other partitions may be due sooner.
        self._next_at = _UNKNOWN

    def receive(self, partition: Partition, run: list[Message], now: float) -> tuple[int, int]:
        """Admit the messages of a run that ``max_ahead`` allows; the other messages wait.

        Args:
            partition: The assignment.
            run: Consecutive messages of the partition.
            now: Current time, in seconds of the engine's clock.

        Returns:
            Number and bytes of the admitted messages that a former owner has finished.

        Raises:
            PositionFell: A position is not above the previous position.
        """
        ledger = self.partitions[partition]
        ledger.deliver(run, now)
        if ledger.waiting:
            ledger.waiting += run
            return 0, 0
        return self._admit(partition, ledger, run, now)

    def _admit(self, partition: Partition, ledger: OffsetLedger, run: list[Message], now: float) -> tuple[int, int]:
        commits = _commits(partition)
        space = self._space(ledger, commits)
        ledger.waiting = run[space:]
        if len(run) > space:
            run = run[:space]
        # Messages of a part that was given up while they waited.
        gone = [m for m in run if m.state == ABANDONED]
        finished = [m for m in ledger.admit(run) if m not in gone]
        for message in gone:
            ledger.drop(message)
        left = run if not (finished or gone) else [m for m in run if m.state not in (SETTLED, ABANDONED)]
        self._chains.admit(partition, left)
        if finished:
            self._effects += [fx.Redelivered(message, fx.ALREADY_SETTLED) for message in finished]
            self._changed(partition, ledger, len(finished), now)
        if len(run) >= space and partition not in self.ahead:
            self.ahead.add(partition)
            self._next_at = _UNKNOWN
            self._effects.append(fx.AheadReached(partition, ledger.oldest()))
        return len(finished), sum(m.size for m in finished)

    def progressed(self, partition: Partition, position: int, now: float) -> None:
        """Record that the source has read up to ``position``.

        The call has no effect for a partition without commits.
        """
        ledger = self.partitions.get(partition)
        if ledger is not None:
            before = ledger.floor()
            ledger.progressed(position)
            if ledger.floor() > before:
                self._changed(partition, ledger, 1, now)

    def pass_over(self, partition: Partition, messages: list[Message], now: float) -> None:
        """Allow the floor to move past dropped messages, which another process handles."""
        ledger = self.partitions[partition]
        before = ledger.floor()
        ledger.pass_over(messages)
        if ledger.floor() > before:
            self._changed(partition, ledger, 1, now)

    def complete(self, settlement: Settlement, now: float) -> tuple[int, int]:
        """Record finished messages in the ledger, and return their number and bytes."""
        ledger = self.partitions[settlement.partition]
        count, size = ledger.settle(settlement.messages)
        _commits(settlement.partition).finished += count
        self._changed(settlement.partition, ledger, count, now)
        return count, size

    def _changed(self, partition: Partition, ledger: OffsetLedger, count: int, now: float) -> None:
        commits = _commits(partition)
        first = not commits.changes
        commits.changed(count, now)
        if not commits.pending:
            return  # The confirmation of its commit in transit makes the time unknown.
        if commits.changes >= self._policy.commit_count or self._urgent(partition, ledger):
            self._next_at = _UNKNOWN
        elif first:
            # No pace is shorter than this one.
            self._next_at = min(self._next_at, now + self._least)

    def due(self, now: float, *, everything: bool) -> list[Settlement]:
        """Return the commits to send now. The floor and the completed set of a commit describe the same state.

        Args:
            now: Current time, in seconds of the engine's clock.
            everything: Whether to return all pending commits, even before they are due.

        Returns:
            At most one commit for each partition.
        """
        due: list[Settlement] = []
        if not everything and self._next_at > now:
            return due
        pending = self._pending()
        if not everything:
            self._next_at = self._exactly(pending)
            if self._next_at > now:
                return due
        # Partitions that are due a little later share the call, so that all partitions together are committed rarely.
        for partition, ledger, commits in pending:
            if commits.not_before > now and not everything:
                continue
            settlement = Settlement(partition, [], ledger.floor(), ledger.completed())
            settlement.ordinal = ledger.floor_ordinal
            commits.send(settlement)
            due.append(settlement)
        self._next_at = _UNKNOWN
        return due

    def next_at(self) -> float:
        """Return the time at which to call ``due``.

        No commit is due before this time. ``NEVER`` = no commit is pending.
        """
        if self._next_at == _UNKNOWN:
            self._next_at = self._exactly(self._pending())
        return self._next_at

    def _pending(self) -> list[_Pending]:
        found = ((partition, ledger, _commits(partition)) for partition, ledger in self.partitions.items())
        return [each for each in found if each[2].pending]

    def _exactly(self, pending: list[_Pending]) -> float:
        """Return the time at which the next commit is due."""
        if not pending:
            return NEVER
        pace = self.pace(pending)
        return min(
            commits.due_at(pace, urgent=self._urgent(partition, ledger)) for partition, ledger, commits in pending
        )

    def _urgent(self, partition: Partition, ledger: OffsetLedger) -> bool:
        """Return whether messages wait for a commit of the floor, which is then due immediately."""
        return partition in self.ahead and ledger.floor() > _commits(partition).confirmed

    def pace(self, pending: list[_Pending]) -> float:
        """Return the seconds from the first change of a partition to its commit.

        The result is at most ``commit_interval``, or ``commit_pace`` if this time is longer.
        """
        ahead = sum(ledger.next_ordinal - commits.confirmed_ordinal for _, ledger, commits in pending)
        cost = ahead * MESSAGE_PACE + len(pending) * PARTITION_PACE
        if self._policy.commit_pace is not None:
            # A reader of the outputs waits for the commit, so commits may take a larger share of the CPU.
            cost *= PACED_SHARE
        return max(self._least, min(self._policy.commit_interval, cost))

    def confirmed(self, settlement: Settlement) -> tuple[int, int]:
        """Record a confirmed commit, and admit messages that waited for the commit.

        The call has no effect if the consumer gave the partition up before the confirmation.

        Args:
            settlement: The commit.

        Returns:
            Number and bytes of the admitted messages that a former owner has finished.
        """
        partition = settlement.partition
        ledger = self.partitions.get(partition)
        if ledger is None:
            return 0, 0
        commits = _commits(partition)
        commits.confirm(settlement)
        self._next_at = _UNKNOWN
        if partition not in self.ahead or self._space(ledger, commits) <= 0:
            return 0, 0
        run = ledger.waiting
        released = self._admit(partition, ledger, run, run[0].received) if run else (0, 0)
        if self._space(ledger, commits) > 0:
            self.ahead.discard(partition)
            self._effects.append(fx.AheadLeft(partition))
        return released

    def unknown(self, partition: Partition, again_at: float) -> None:
        """Repeat the sent commit of a partition, whose result is unknown, at ``again_at`` or later."""
        _commits(partition).unknown(again_at)
        self._next_at = _UNKNOWN

    def _space(self, ledger: OffsetLedger, commits: PartitionCommits) -> int:
        return self._policy.max_ahead - (ledger.next_ordinal - commits.confirmed_ordinal)


def _commits(partition: Partition) -> PartitionCommits:
    commits = partition.commits
    assert isinstance(commits, PartitionCommits), "only a partition whose source commits has commits"
    return commits
