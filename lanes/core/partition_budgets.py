"""The engine with budgets per partition: running calls, and messages in flight.

``make_engine`` makes the plain ``Engine`` for a policy without these budgets, so that its hot path stays the same.

Calls
-----
``FairQueue`` counts the running calls of each partition, and takes the partitions in turn. With batches, a call counts
once for each partition that has messages in the call.

Messages in flight
------------------
A source knows one bound for all its partitions, ``Room.messages``, and the partitions that deliver nothing,
``Room.paused``. The engine therefore asks for no more messages than *each* unpaused partition may still have, and a
partition with little left is paused. A partition becomes *full* when the messages left are less than a quarter of the
bound beyond the calls. A full partition delivers again at the low mark. So one nearly full partition never reduces the
room of the other partitions to a few messages, except where the bound is close to the number of calls.

Messages of full partitions may stay in flight for long. The low-water mark of the consumer is therefore halfway between
the bound, and these messages plus ``concurrency``. Otherwise a full partition could stop the intake of the others.

A partition's messages in flight are those of its current assignment. Messages whose handlers run at the fence count
against the bound of the whole consumer only.
"""

from __future__ import annotations

from collections.abc import Sequence

from lanes.core import effects as fx
from lanes.core.engine import Engine
from lanes.core.fair_queue import FairQueue
from lanes.core.lane import RUNNING
from lanes.core.ledgers import OffsetLedger
from lanes.core.policy import Policy
from lanes.core.types import Message, Outcome, Partition, PartitionId, Room


def make_engine(policy: Policy) -> Engine:
    """Make the engine for a policy: the plain one, or one with budgets per partition."""
    if policy.concurrency_per_partition or policy.max_in_flight_per_partition:
        return PartitionBudgetEngine(policy)
    return Engine(policy)


class PartitionBudgetEngine(Engine):
    """An engine whose policy has ``concurrency_per_partition`` or ``max_in_flight_per_partition``.

    Args:
        policy: The rules of the engine.

    Attributes:
        fair: The heads that can start.
        full: The partitions that deliver no message, because ``max_in_flight_per_partition`` is nearly reached.
        reserve: Number of messages below which the rest of a partition's budget makes the partition full.
        low: Number of messages in flight at which a full partition delivers again.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.fair = FairQueue(policy.concurrency_per_partition)
        self.chains.ready = self._ready = self.fair
        self.full: set[Partition] = set()
        self._bound = bound = policy.max_in_flight_per_partition
        calls = min(policy.concurrency_per_partition or policy.concurrency, bound)
        self.reserve = max(1, (bound - calls) // 4)
        self.low = min(bound - self.reserve, (bound + calls) // 2)

    def receive(self, partition: Partition, run: list[Message], size: int, now: float) -> None:
        """Admit a run of messages; see ``Engine.receive``."""
        super().receive(partition, run, size, now)
        if self._bound and partition.steady and self._left(partition) < self.reserve:
            self.full.add(partition)

    def take_batch(self, limit: int) -> list[Message]:
        """Take up to ``limit`` messages for one call, from the partitions in turn; see ``Engine.take_batch``."""
        batch: list[Message] = []
        if self.running_handlers >= self._most_running:
            return batch
        fair, turns, called = self.fair, self.fair.turns(), dict[PartitionId, None]()
        while turns and len(batch) < limit:
            name = turns.pop(0)
            called[name] = None
            message: Message | None = fair.pop_head(name)
            while message is not None and len(batch) < limit:
                message.state = RUNNING
                batch.append(message)
                message = message.next
            if fair.heads(name):
                turns.append(name)
        for name in called:
            fair.begin(name)
        self.running_handlers += bool(batch)
        return batch

    def available(self, limit: int) -> int:
        """Return the number of messages that a free handler could take by ``take_batch``, at most ``limit``."""
        startable, count = set(self.fair.turns()) if self._most_running else set(), 0
        for head in self.fair:
            message = head if head.partition.id in startable else None
            while message is not None and count < limit:
                count += 1
                message = message.next
            if count >= limit:
                break
        return count

    def finish(self, message: Message, outcome: Outcome, now: float) -> None:
        """Apply the outcome of a taken message; see ``Engine.finish``."""
        super().finish(message, outcome, now)
        self.fair.end(message.partition.id)

    def finish_batch(self, batch: Sequence[Message], outcomes: Sequence[Outcome], now: float) -> None:
        """Apply the outcomes of a taken batch; see ``Engine.finish_batch``."""
        super().finish_batch(batch, outcomes, now)
        for name in {message.partition.id: None for message in batch}:
            self.fair.end(name)

    def room(self) -> Room:
        """Return the bounds of the next delivery, within the budget of each partition."""
        room = super().room()
        if not self._bound:
            return room
        open_to = [p for p in self.partitions.values() if p.steady and p not in self.full]
        # A partition that is assigned during the delivery may have its whole budget.
        left = min([self._bound, *map(self._left, open_to)])
        return room._replace(messages=min(room.messages, left), paused=room.paused | self.full)

    def release(self, partition: Partition) -> None:
        """Forget a partition and its unsettled messages. Idempotent."""
        super().release(partition)
        self.full.discard(partition)

    def in_flight_of(self, partition: Partition) -> int:
        """Return the number of messages of an assignment in flight."""
        ledger = partition.ledger
        waiting = len(ledger.waiting) if isinstance(ledger, OffsetLedger) else 0
        return ledger.holes() + waiting

    def _low_mark(self) -> int:
        """Return the low-water mark of the consumer, above the messages of full partitions.

        These messages may stay in flight for long, and their partitions receive no message meanwhile.
        """
        flow, slow = self.flow, sum(map(self.in_flight_of, self.full))
        return min(flow.max_in_flight, (flow.max_in_flight + self.concurrency + slow) // 2)

    def _left(self, partition: Partition) -> int:
        return self._bound - self.in_flight_of(partition)

    def _could_start(self, partition: Partition) -> bool:
        calls = self.policy.concurrency_per_partition
        busy = partition in self.full or (calls and self.fair.running.get(partition.id, 0) >= calls)
        return not busy and super()._could_start(partition)

    def _released(self, count: int, size: int) -> None:
        if not self.flow.taking:
            self.flow.low = self._low_mark()
        super()._released(count, size)
        for partition in [p for p in self.full if self.in_flight_of(p) <= self.low]:
            self.full.remove(partition)
            self.effects.append(fx.PartitionResumed(partition))
