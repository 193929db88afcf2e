"""What this process owns, and how it gives it up: assign, drain, fence, release, lose.

The state of an engine, and what changes all that it has of a partition at once. ``lanes.core.engine`` is this and the
way of a single message, which takes nothing of a partition away.
"""

from __future__ import annotations

from lanes.core import effects as fx
from lanes.core.chains import Chains
from lanes.core.commits import Committer
from lanes.core.flow import Flow
from lanes.core.lane import RUNNING, StoppedLanes
from lanes.core.ledgers import AckLedger, OffsetLedger
from lanes.core.outbox import Outbox
from lanes.core.policy import Policy
from lanes.core.types import Message, Partition, PartitionId


class AlreadyAssigned(ValueError):
    """A partition was assigned that is owned, or was: every assignment has an object of its own."""


class SecondPartition(ValueError):
    """A partition was assigned beside another one under the order ``serial``, which handles one."""


class Ownership:
    """The partitions of one engine, and everything that is kept of them."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.effects: list[fx.Effect] = []
        self.partitions: dict[PartitionId, Partition] = {}
        self.latest_assignment: int = 0
        self.flow = Flow(policy.max_in_flight, policy.max_bytes, concurrency=policy.concurrency)
        self.chains = Chains(policy)
        self.stopped = StoppedLanes(keeps=policy.keeps_attempts)
        self.outbox = Outbox()
        self.committer = Committer(policy, self.chains, self.effects)

    def owns(self, partition: Partition) -> bool:
        """Whether it is this very assignment that is owned: not given up, and nothing assigned in its place."""
        return self.partitions.get(partition.id) is partition

    def assign(self, partition: Partition) -> None:
        """Take a partition on, and number the assignment.

        Raises ``AlreadyAssigned``, and ``SecondPartition`` under the order ``serial``.
        """
        if partition.assignment or partition.id in self.partitions:
            raise AlreadyAssigned(f"{partition.id} is already assigned: release it, or report it lost, first")
        if self.policy.order == "serial" and self.partitions:
            raise SecondPartition(f'{partition.id} would be a second partition: order="serial" handles one at most')
        self.latest_assignment += 1
        partition.assignment = self.latest_assignment
        partition.live = True
        partition.steady = True
        if partition.floor is None:
            partition.ledger = AckLedger(knows_settled=self.policy.knows_settled)
        else:
            self.committer.assign(partition, partition.floor)
        # Shared with a fenced predecessor: its running handlers are the tails this assignment waits behind.
        partition.tails = self.chains.tails.setdefault(partition.id, {})
        self.partitions[partition.id] = partition

    def drain(self, partition: Partition, *, close_prefix: bool = False) -> list[Message]:
        """Start nothing more of it; returns what is abandoned. Idempotent; nothing for a fenced partition.

        ``close_prefix``: what is completed above the floor cannot be handed over, so run what is queued below the
        highest message that has started. Only for sources that commit.
        """
        if partition.draining or not partition.live:
            return []
        kept = self.chains.prefix(partition) if close_prefix else set()
        abandoned = self._stop_starting(partition, kept)
        self._drained_if_ended(partition)
        return abandoned

    def stop_closing(self, partition: Partition) -> list[Message]:
        """Start nothing more of a draining partition, what was to close its prefix neither; returns what is abandoned
        of that. Idempotent; nothing for a partition that does not drain, or is fenced.
        """
        if not (partition.live and partition.unended):
            return []
        abandoned = self._stop_starting(partition, set())
        self._drained_if_ended(partition)
        return abandoned

    def _stop_starting(self, partition: Partition, kept: set[Message]) -> list[Message]:
        partition.draining = True
        partition.steady = False
        unfinished = partition.ledger.unfinished()
        partition.unended = len(kept) + sum(1 for m in unfinished if m.state == RUNNING)
        abandoned = [m for m in unfinished if m.state != RUNNING and m not in kept]
        return self._abandon(partition, abandoned)

    def _drained_if_ended(self, partition: Partition) -> None:
        if not partition.unended:
            self.effects.append(fx.Drained(partition))

    def fence(self, partition: Partition) -> list[Message]:
        """Accept no result of it any more; returns what still runs. What has finished can still be settled.

        Idempotent.
        """
        if not partition.live:
            return []
        partition.live = False
        partition.steady = False
        unfinished = partition.ledger.unfinished()
        zombies = [m for m in unfinished if m.state == RUNNING]
        for message in zombies:
            partition.ledger.drop(message)
            self.chains.fenced.add(message)
        self._abandon(partition, [m for m in unfinished if m.state != RUNNING])
        return zombies

    def lose(self, partition: Partition) -> list[Message]:
        """The partition is gone: nothing of it is settled any more. Returns what it still ran. Idempotent."""
        zombies = self.fence(partition)
        self.release(partition)
        return zombies

    def release(self, partition: Partition) -> None:
        """Forget a partition, what it finished and was not settled included. Idempotent."""
        if not self.owns(partition):
            return
        self.fence(partition)
        del self.partitions[partition.id]
        self._abandon(partition, partition.ledger.in_flight())
        self.outbox.forget(partition)
        self.committer.forget(partition)
        self.chains.forget(partition.id)

    def _abandon(self, partition: Partition, messages: list[Message]) -> list[Message]:
        """Out of queue, lanes, ledger and budgets with messages that do not run, and with those that wait."""
        ledger = partition.ledger
        for message in messages:
            self.stopped.by_head.pop(message, None)
            ledger.drop(message)
        if isinstance(ledger, OffsetLedger):
            messages = messages + ledger.drop_waiting()
        if messages:
            self.chains.abandon(partition, messages)
            self._released(len(messages), sum(m.size for m in messages))
        return messages

    def _released(self, count: int, size: int) -> None:
        if count and self.flow.release(count, size):
            self.effects.append(fx.Resumed())
