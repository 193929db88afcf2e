"""The partitions of an engine, and the calls that assign, drain, fence, release or lose a partition.

This module contains the state of the engine and every call that changes a whole partition. ``lanes.core.engine`` adds
the calls for single messages.
"""

from __future__ import annotations

from lanes.core import effects as fx
from lanes.core.chains import Chains
from lanes.core.commits import Committer
from lanes.core.flow import Flow
from lanes.core.lane import ABANDONED, RUNNING, UNENDED, StoppedLanes
from lanes.core.ledgers import AckLedger, OffsetLedger
from lanes.core.outbox import Outbox
from lanes.core.policy import Policy
from lanes.core.publishing import Publishing
from lanes.core.types import Message, Part, Parting, Partition, PartitionId


class AlreadyAssigned(ValueError):
    """Error for a source that passed one ``Partition`` object twice. Every assignment needs a new object."""


class SecondPartition(ValueError):
    """Error for a source that assigned a second partition under the order ``serial``, which allows one partition."""


class Ownership:
    """The partitions of one engine and their state."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.effects: list[fx.Effect] = []
        self.partitions: dict[PartitionId, Partition] = {}
        self.latest_assignment: int = 0
        self.flow = Flow(policy.max_in_flight, policy.max_bytes, concurrency=policy.concurrency)
        self.chains = Chains(policy)
        self.stopped = StoppedLanes(keeps=policy.keeps_attempts)
        self.outbox = Outbox()
        self.publishing = Publishing()
        self.committer = Committer(policy, self.chains, self.effects)

    def owns(self, partition: Partition) -> bool:
        """Return whether this process still owns this assignment, and has neither released nor replaced it."""
        return self.partitions.get(partition.id) is partition

    def assign(self, partition: Partition) -> None:
        """Add a partition and number its assignment. Raises ``AlreadyAssigned`` or ``SecondPartition``."""
        if partition.assignment or partition.id in self.partitions:
            raise AlreadyAssigned(f"{partition.id} is already assigned; release it or report it lost first")
        if self.policy.order == "serial" and self.partitions:
            raise SecondPartition(f'order="serial": {partition.id} would be a second partition; assign at most one')
        self.latest_assignment += 1
        partition.assignment = self.latest_assignment
        partition.live = True
        partition.steady = True
        if partition.floor is None:
            partition.ledger = AckLedger(knows_settled=self.policy.knows_settled)
        else:
            self.committer.assign(partition, partition.floor)
        # Fenced assignments share the lanes: a message waits for a handler of its key that a fence has left running.
        partition.tails = self.chains.tails.setdefault(partition.id.whole, {})
        self.partitions[partition.id] = partition

    def drain(self, partition: Partition, *, close_prefix: bool = False) -> list[Message]:
        """Stop starting messages of a partition, except messages that ``close_prefix`` allows.

        Idempotent. The call has no effect for a fenced partition.

        Args:
            partition: The assignment.
            close_prefix: Whether to run the queued messages below the highest started message, because the source
                cannot hand over the completed set. Only for sources that commit.

        Returns:
            The abandoned messages.
        """
        if partition.draining or not partition.live:
            return []
        kept = self.chains.prefix(partition) if close_prefix else set()
        abandoned = self._stop_starting(partition, kept)
        self._drained_if_ended(partition)
        return abandoned

    def part(self, partition: Partition, part: Part) -> list[Message]:
        """Give up a part of a partition, and keep the other messages.

        The engine abandons queued and stopped messages of the part at once. Running handlers may end: the engine
        accepts a success, and abandons a failed message. The engine treats publishing messages as running. After the
        part's last handler, the engine emits ``Parted`` and does not wait for other parts. Until ``parted``, the floor
        stays below each unfinished message of the part, so that a commit is also correct for the part. A drain of the
        partition replaces the hand-over of the part. The call has no effect for a draining or fenced partition.

        Args:
            partition: The assignment of a source that commits. The source delivers no further message of the part.
            part: The part. A part contains either all messages of a lane or no message of the lane. Parts do not
                overlap.

        Returns:
            The abandoned messages.
        """
        if partition.draining or not partition.live:
            return []
        ledger = partition.ledger
        assert isinstance(ledger, OffsetLedger), "only a source that commits has parts"
        moved = [m for m in ledger.unfinished() if part(m)]
        parting = Parting(part, {m for m in moved if m.state in UNENDED})
        partition.partings.append(parting)
        waiting = [m for m in ledger.waiting if m.state != ABANDONED and part(m)]
        abandoned = self._give_up_part(partition, parting, [m for m in moved if m not in parting.running], waiting)
        self._parted_if_ended(partition)
        return abandoned

    def parted(self, partition: Partition, parting: Parting, now: float) -> None:
        """Record that the next owner has a part, so that the floor may move past the messages of the part.

        Idempotent.
        """
        if partition.live and not partition.draining:
            self.committer.pass_over(partition, parting.given_up, now)
            parting.given_up = []

    def _leaving(self, message: Message) -> Parting | None:
        """Return the part of a message that runs or publishes; None = the assignment keeps the message."""
        return next((each for each in message.partition.partings if message in each.running), None)

    def _give_up_part(
        self, partition: Partition, parting: Parting, admitted: list[Message], waiting: list[Message]
    ) -> list[Message]:
        """Abandon and return the messages of a part that do not run. Other messages of the partition continue."""
        for message in admitted:
            self.stopped.by_head.pop(message, None)
            self.publishing.forget(message)
            partition.ledger.drop(message)
        abandoned = admitted + waiting
        if abandoned:
            self.chains.abandon(partition, abandoned)
            self._released(len(abandoned), sum(m.size for m in abandoned))
        self._look_at_outputs()
        parting.running.difference_update(abandoned)
        parting.given_up += abandoned
        return abandoned

    def _left_part(self, message: Message, parting: Parting, *, given_up: bool) -> None:
        """Record that the handler of a message of a part has ended."""
        parting.running.discard(message)
        if given_up:
            parting.given_up.append(message)
        self._parted_if_ended(message.partition)

    def _parted_if_ended(self, partition: Partition) -> None:
        if partition.draining:
            return
        for parting in [each for each in partition.partings if not each.running]:
            partition.partings.remove(parting)
            self.effects.append(fx.Parted(partition, parting))

    def stop_closing(self, partition: Partition) -> list[Message]:
        """Stop closing the prefix of a draining partition, and return the messages that it abandons.

        Idempotent. The call has no effect unless the partition drains and is not fenced.
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
        partition.unended = len(kept) + sum(1 for m in unfinished if m.state in UNENDED)
        abandoned = [m for m in unfinished if m.state not in UNENDED and m not in kept]
        return self._abandon(partition, abandoned)

    def _drained_if_ended(self, partition: Partition) -> None:
        if not partition.unended:
            self.effects.append(fx.Drained(partition))

    def fence(self, partition: Partition) -> list[Message]:
        """Stop accepting results of a partition, and return its running messages. Idempotent.

        The runtime can still settle finished messages. The engine drops outputs that the broker has not confirmed.
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
        """Give up a lost partition without settling its messages, and return its running messages. Idempotent."""
        zombies = self.fence(partition)
        self.release(partition)
        return zombies

    def release(self, partition: Partition) -> None:
        """Remove a partition and its unsettled messages. Idempotent."""
        if not self.owns(partition):
            return
        self.fence(partition)
        del self.partitions[partition.id]
        self._abandon(partition, partition.ledger.in_flight())
        self.outbox.forget(partition)
        self.committer.forget(partition)
        self.chains.forget(partition.id, self.partitions)

    def _abandon(self, partition: Partition, messages: list[Message]) -> list[Message]:
        """Remove messages that do not run, and all waiting messages, from queue, lanes, ledger and budgets."""
        ledger = partition.ledger
        for message in messages:
            self.stopped.by_head.pop(message, None)
            self.publishing.forget(message)
            ledger.drop(message)
        if isinstance(ledger, OffsetLedger):
            messages = messages + ledger.drop_waiting()
        if messages:
            self.chains.abandon(partition, messages)
            self._released(len(messages), sum(m.size for m in messages))
            self._look_at_outputs()
        return messages

    def _released(self, count: int, size: int) -> None:
        if count and self.flow.release(count, size):
            self.effects.append(fx.Resumed())
        elif self.flow.pausing:
            self._freed_in_pause()

    def _freed_in_pause(self) -> None:
        """Check whether deliveries can start again although the counts are above the low-water marks."""
        raise NotImplementedError

    def _look_at_outputs(self) -> None:
        """Compare the outputs in memory with their bound."""
        raise NotImplementedError
