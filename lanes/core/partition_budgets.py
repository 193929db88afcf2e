"""The engine with budgets per partition: running calls, and messages in flight.

A budget counts the use of the bounds per partition. ``make_engine`` makes the plain ``Engine`` for a policy without
these bounds, so that its hot path stays fast. Each partition has a separate budget, but all partitions of a physical
queue (``Policy.queues``) share one budget.

Calls ----- ``FairQueue`` counts the running calls of each budget, and the budgets take turns. With batches, a call
counts once for each budget that has messages in the call.

Messages in flight ------------------ A source receives one bound for all its partitions, ``Room.messages``, and the
partitions that must deliver nothing, ``Room.paused``. The engine therefore requests at most the number of messages that
*each* unpaused budget may still have. The engine pauses the partitions of a nearly full budget. A budget is *full* when
its remaining messages are below ``reserve``: a quarter of the difference between the bound and the number of calls. The
partitions of a full budget deliver again at the low mark. The room of the other budgets is therefore small only if the
bound is close to the number of calls. ``Room.full_queues`` names the full physical queues, because the broker may
assign a further partition of a full queue while the source delivers.

Messages of full budgets may stay in flight for long. The low-water mark of the consumer is therefore halfway between
the bound, and these messages plus ``concurrency``. With the usual mark, a full budget could stop the deliveries of the
other budgets.

A budget counts the messages in flight of the current assignments of its partitions. Messages whose handlers run at the
fence use only the bound of the whole consumer.
"""

from __future__ import annotations

from collections.abc import Sequence

from lanes.core import effects as fx
from lanes.core.engine import Engine
from lanes.core.fair_queue import FairQueue, in_order
from lanes.core.lane import ABANDONED, RUNNING
from lanes.core.ledgers import OffsetLedger
from lanes.core.policy import Policy
from lanes.core.types import BudgetId, Message, Outcome, Part, Parting, Partition, PieceId, Room


def make_engine(policy: Policy) -> Engine:
    """Make the engine for a policy: the plain engine, or an engine with budgets per partition."""
    if policy.concurrency_per_partition or policy.max_in_flight_per_partition:
        return PartitionBudgetEngine(policy)
    return Engine(policy)


class PartitionBudgetEngine(Engine):
    """An engine whose policy has ``concurrency_per_partition`` or ``max_in_flight_per_partition``.

    Args:
        policy: The rules of the engine.

    Attributes:
        fair: The heads that can start.
        full: The budgets whose partitions deliver no message, because ``max_in_flight_per_partition`` is nearly
            reached.
        reserve: Number of remaining messages below which a budget is full.
        low: Number of messages in flight at which a full budget delivers again.
        assigned: The assignments of each budget.
        parting: Number of parts of an assignment that are released and not yet handed over.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.fair = FairQueue(policy.concurrency_per_partition)
        self.chains.ready = self._ready = self.fair
        self.full: set[BudgetId] = set()
        self.assigned: dict[BudgetId, list[Partition]] = {}
        self.parting: dict[Partition, int] = {}
        self._bound = bound = policy.max_in_flight_per_partition
        calls = min(policy.concurrency_per_partition or policy.concurrency, bound)
        self.reserve = max(1, (bound - calls) // 4)
        self.low = min(bound - self.reserve, (bound + calls) // 2)

    def receive(self, partition: Partition, run: list[Message], size: int, now: float) -> None:
        """Admit a run of messages; see ``Engine.receive``."""
        super().receive(partition, run, size, now)
        if self._bound and partition.steady and self._left(partition.budget) < self.reserve:
            self.full.add(partition.budget)

    def take_batch(self, limit: int) -> list[Message]:
        """Take up to ``limit`` messages for one call; the budgets take turns. See ``Engine.take_batch``."""
        batch: list[Message] = []
        if self.running_handlers >= self._most_running:
            return batch
        fair, turns, called = self.fair, self.fair.turns(), dict[BudgetId, None]()
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
            message = head if head.partition.budget in startable else None
            while message is not None and count < limit:
                count += 1
                message = message.next
            if count >= limit:
                break
        return count

    def finish(self, message: Message, outcome: Outcome, now: float) -> None:
        """Apply the outcome of a taken message; see ``Engine.finish``."""
        super().finish(message, outcome, now)
        self.fair.end(message.partition.budget)

    def finish_batch(self, batch: Sequence[Message], outcomes: Sequence[Outcome], now: float) -> None:
        """Apply the outcomes of a taken batch; see ``Engine.finish_batch``."""
        super().finish_batch(batch, outcomes, now)
        for name in {message.partition.budget: None for message in batch}:
            self.fair.end(name)

    def room(self) -> Room:
        """Return the bounds of the next delivery, within each budget."""
        room, full = super().room(), self.full
        if not self._bound:
            return room
        left = {
            budget: self._left(budget)
            for budget, partitions in self.assigned.items()
            # Another partition of a physical queue, or another piece, may be assigned during the delivery.
            if budget not in full and (_is_shared(partitions[0]) or partitions[0].steady)
        }
        # Messages that the runtime has put aside may use up a budget before ``receive`` makes it full. So may those of
        # draining partitions.
        full = full.union(budget for budget, count in left.items() if count < self.reserve)
        # A partition without a queue that is assigned during the delivery may have its whole budget.
        most = min([self._bound, *(count for budget, count in left.items() if budget not in full)])
        room = room._replace(messages=min(room.messages, most))
        if not full:
            return room
        paused = [partition for budget in full for partition in self.assigned[budget]]
        queues = frozenset(budget for budget in full if isinstance(budget, str))
        return room._replace(paused=room.paused.union(paused), full_queues=queues)

    def assign(self, partition: Partition) -> None:
        """Add a partition and number its assignment; see ``Engine.assign``."""
        super().assign(partition)
        self.enter(partition)

    def enter(self, partition: Partition) -> None:
        """Add an assignment to its budget."""
        partition.budget = self.policy.budget_of(partition.id)
        self.assigned.setdefault(partition.budget, []).append(partition)

    def part(self, partition: Partition, part: Part) -> list[Message]:
        """Give up a part of a partition; see ``Engine.part``."""
        if partition.live and not partition.draining:
            self.parting[partition] = self.parting.get(partition, 0) + 1
        abandoned = super().part(partition, part)
        self._resume_full()
        return abandoned

    def parted(self, partition: Partition, parting: Parting, now: float) -> None:
        """Record that the next owner has a part; see ``Engine.parted``."""
        super().parted(partition, parting, now)
        if self.parting.get(partition, 0) > 1:
            self.parting[partition] -= 1
        else:
            self.parting.pop(partition, None)

    def fence(self, partition: Partition) -> list[Message]:
        """Stop accepting results of a partition; see ``Engine.fence``."""
        zombies = super().fence(partition)
        self._resume_full()  # The running messages have left the budget, which other partitions may share.
        return zombies

    def release(self, partition: Partition) -> None:
        """Remove a partition and its unsettled messages. Idempotent."""
        if not self.owns(partition):
            return
        super().release(partition)
        self.parting.pop(partition, None)
        left = self.assigned[partition.budget]
        left.remove(partition)
        if not left:
            del self.assigned[partition.budget]
            self.full.discard(partition.budget)
        self._resume_full()

    def in_flight_of(self, partition: Partition) -> int:
        """Return the number of messages of an assignment in flight, including messages deferred by the runtime."""
        ledger = partition.ledger
        if not partition.steady:
            # An ``OffsetLedger`` still has the holes of abandoned messages.
            return len(ledger.in_flight())
        if not isinstance(ledger, OffsetLedger):
            return ledger.holes() + partition.aside
        if partition in self.parting:
            waiting = sum(message.state != ABANDONED for message in ledger.waiting)
            return len(ledger.in_flight()) + waiting + partition.aside
        return ledger.holes() + len(ledger.waiting) + partition.aside

    def used(self, budget: BudgetId) -> int:
        """Return the number of messages in flight of a budget."""
        return sum(map(self.in_flight_of, self.assigned[budget]))

    def _low_mark(self) -> int:
        """Return the low-water mark of the consumer, above the messages of full budgets.

        These messages may stay in flight for long, while their partitions receive no message.
        """
        flow, slow = self.flow, sum(map(self.used, self.full))
        return min(flow.max_in_flight, (flow.max_in_flight + self.concurrency + slow) // 2)

    def _left(self, budget: BudgetId) -> int:
        return self._bound - self.used(budget)

    def _could_start(self, partition: Partition) -> bool:
        calls = self.policy.concurrency_per_partition
        budget = partition.budget
        busy = budget in self.full or (calls and self.fair.running.get(budget, 0) >= calls)
        return not busy and super()._could_start(partition)

    def _released(self, count: int, size: int) -> None:
        if not self.flow.taking:
            self.flow.low = self._low_mark()
        super()._released(count, size)
        self._resume_full()

    def _resume_full(self) -> None:
        """Resume the partitions of full budgets that are at or below the low mark."""
        if not self.full:
            return
        for budget in in_order([budget for budget in self.full if self.used(budget) <= self.low]):
            self.full.remove(budget)
            self.effects += [fx.PartitionResumed(partition) for partition in self.assigned[budget]]


def _is_shared(partition: Partition) -> bool:
    """Return whether several assignments may share the budget of a partition."""
    return isinstance(partition.budget, str) or isinstance(partition.id, PieceId)
