"""Commits: the partitions whose source commits one position, what enters their ledgers, and which commits are due.

A partition has one commit on its way at a time. A commit counts when the broker confirms it; one with an unknown
result counts as not made, and the next one repeats it.

``max_ahead`` bounds the messages admitted above the floor that the broker confirmed. Messages delivered beyond it wait
in their partition, in order and in flight, until a commit is confirmed.
"""

from __future__ import annotations

from dataclasses import dataclass

from lanes.core import effects as fx
from lanes.core.chains import Chains
from lanes.core.lane import SETTLED
from lanes.core.ledgers import OffsetLedger
from lanes.core.policy import Policy
from lanes.core.types import NEVER, Message, Partition, Settlement


@dataclass(slots=True, eq=False)
class PartitionCommits:
    """The commits of one assignment.

    A finished message waits at most ``_interval`` seconds for its commit. ``_count`` finished messages do not wait.

    Attributes:
        confirmed: The floor that the broker has confirmed.
        confirmed_ordinal: Number of the first delivery above the confirmed floor.
        changes: Number of changes since the last commit.
        since: Time of the first of these changes.
        sending: The commit on its way.
        over: Whether no further commit may begin.
    """

    confirmed: int
    _interval: float
    _count: int
    _not_before: float = 0.0
    confirmed_ordinal: int = 0
    changes: int = 0
    since: float = 0.0
    sending: Settlement | None = None
    over: bool = False

    def changed(self, count: int, now: float) -> None:
        """Add changes that the broker does not know of."""
        if not self.changes:
            self.since = now
        self.changes += count

    @property
    def pending(self) -> bool:
        """Whether a change waits for a commit while no commit is on its way."""
        return self.changes > 0 and self.sending is None and not self.over

    def due_at(self, *, urgent: bool) -> float:
        """When to commit the pending changes. ``urgent``: messages wait for the floor to be confirmed."""
        at = self.since
        if not urgent and self.changes < self._count:
            at += self._interval
        return max(at, self._not_before)

    def send(self, settlement: Settlement) -> None:
        """Note a commit on its way, with every change so far."""
        self.sending = settlement
        self.changes = 0

    def confirm(self, settlement: Settlement) -> None:
        """Note a commit that the broker confirmed."""
        assert settlement.floor is not None, "only commits are confirmed"
        self.sending = None
        self.confirmed = settlement.floor
        self.confirmed_ordinal = settlement.ordinal

    def unknown(self, again_at: float) -> None:
        """Repeat the commit on its way, whose result is unknown, at ``again_at`` or later."""
        self.sending = None
        self._not_before = again_at
        # ``since`` is the time of its first change, so ``count`` changes make it due at once.
        self.changes += self._count

    def __repr__(self) -> str:
        sending = "none" if self.sending is None else str(self.sending.floor)
        return f"<PartitionCommits confirmed {self.confirmed}, sending {sending}, {self.changes} changes since>"


class Committer:
    """The committing partitions of one engine. ``ahead``: those that have reached ``max_ahead``."""

    __slots__ = ("_chains", "_effects", "_policy", "ahead", "partitions")

    def __init__(self, policy: Policy, chains: Chains, effects: list[fx.Effect]) -> None:
        self._policy = policy
        self._chains = chains
        self._effects = effects
        self.partitions: dict[Partition, OffsetLedger] = {}
        self.ahead: set[Partition] = set()

    def assign(self, partition: Partition, floor: int) -> None:
        """Add a partition that its source reads from ``floor``."""
        ledger = OffsetLedger(floor, partition.completed)
        partition.ledger = ledger
        partition.commits = PartitionCommits(floor, self._policy.commit_interval, self._policy.commit_count)
        self.partitions[partition] = ledger

    def forget(self, partition: Partition) -> None:
        """Commit no more of a partition. Idempotent."""
        self.partitions.pop(partition, None)
        self.ahead.discard(partition)

    def receive(self, partition: Partition, run: list[Message], now: float) -> tuple[int, int]:
        """Admit a run as far as ``max_ahead`` allows; returns count and bytes of the messages finished before.

        Raises ``PositionFell`` for a position that does not rise.
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
        finished = ledger.admit(run)
        self._chains.admit(partition, [m for m in run if m.state != SETTLED] if finished else run)
        if finished:
            self._effects += [fx.Redelivered(message, fx.ALREADY_SETTLED) for message in finished]
            commits.changed(len(finished), now)
        if len(run) >= space and partition not in self.ahead:
            self.ahead.add(partition)
            self._effects.append(fx.AheadReached(partition, ledger.oldest()))
        return len(finished), sum(m.size for m in finished)

    def progressed(self, partition: Partition, position: int, now: float) -> None:
        """Note that the source has read up to ``position``. Ignored for other partitions."""
        ledger = self.partitions.get(partition)
        if ledger is not None:
            before = ledger.floor()
            ledger.progressed(position)
            if ledger.floor() > before:
                _commits(partition).changed(1, now)

    def complete(self, settlement: Settlement, now: float) -> tuple[int, int]:
        """Enter finished messages into the ledger; returns their count and bytes."""
        count, size = self.partitions[settlement.partition].settle(settlement.messages)
        _commits(settlement.partition).changed(count, now)
        return count, size

    def due(self, now: float, *, everything: bool) -> list[Settlement]:
        """The commits to make now, each of one snapshot. ``everything``: also commits that are not due yet."""
        due = []
        for partition, ledger in self.partitions.items():
            commits = _commits(partition)
            if not commits.pending or not (everything or self._at(partition, ledger, commits) <= now):
                continue
            settlement = Settlement(partition, [], ledger.floor(), ledger.completed())
            settlement.ordinal = ledger.floor_ordinal
            commits.send(settlement)
            due.append(settlement)
        return due

    def next_at(self) -> float:
        """When ``due`` has the next commit; ``NEVER`` while there is nothing to commit."""
        pending = ((p, ledger, _commits(p)) for p, ledger in self.partitions.items())
        return min((self._at(p, ledger, c) for p, ledger, c in pending if c.pending), default=NEVER)

    def _at(self, partition: Partition, ledger: OffsetLedger, commits: PartitionCommits) -> float:
        # A floor that messages wait for is committed at once.
        return commits.due_at(urgent=partition in self.ahead and ledger.floor() > commits.confirmed)

    def confirmed(self, settlement: Settlement) -> tuple[int, int]:
        """Note a confirmed commit; returns count and bytes of the messages it admitted that were finished before.

        Ignored for a partition that was given up meanwhile.
        """
        partition = settlement.partition
        ledger = self.partitions.get(partition)
        if ledger is None:
            return 0, 0
        commits = _commits(partition)
        commits.confirm(settlement)
        if partition not in self.ahead or self._space(ledger, commits) <= 0:
            return 0, 0
        run = ledger.waiting
        released = self._admit(partition, ledger, run, run[0].received) if run else (0, 0)
        if self._space(ledger, commits) > 0:
            self.ahead.discard(partition)
            self._effects.append(fx.AheadLeft(partition))
        return released

    def _space(self, ledger: OffsetLedger, commits: PartitionCommits) -> int:
        return self._policy.max_ahead - (ledger.next_ordinal - commits.confirmed_ordinal)


def _commits(partition: Partition) -> PartitionCommits:
    commits = partition.commits
    assert isinstance(commits, PartitionCommits), "only a partition whose source commits has commits"
    return commits
