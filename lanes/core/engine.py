"""The machine: in-order lanes over partitions, bounded, with retries, dead letters, redelivery and drain.

Rules
-----
1. At most one message of a lane is out of ``QUEUED``; it is the head. The next one becomes the head when the
   head is finished, not before: through retries and through the write of a dead letter.
2. In flight = admitted and not settled. A message leaves the count when its settlement was sent, when it is
   abandoned, or, if its assignment was fenced, when its handler ended. Nothing is admitted while a partition
   drains.
3. A result counts only while ``message.partition.live``: identity fences, not numbers. A fenced handler keeps
   its key: a new assignment of the same partition queues behind it.
4. A position that comes again is never run twice at once: held -> its token is swapped; settled -> it is
   settled again; unknown -> it is admitted in its place, counted as late.
5. Draining starts nothing. Queued, held and parking messages are abandoned at once; running ones may end and
   count. When none runs, ``Drained`` is emitted once. A handler that was interrupted (``ABANDON``) drains its
   partition: its successors must not overtake it.
6. Nothing is settled before it ended well or its dead letter was confirmed.

Theory of operation
-------------------
``receive`` admits a run: each message is chained to the tail of its key, or becomes a head and enters the one
queue, ``_ready``. A worker calls ``take``, runs the handler and calls ``finish``; the acknowledged message goes
to its partition's ``finished`` list and its successor to ``_ready``. ``collect`` hands the finished messages out
as settlements; ``settled`` or ``unsettled`` says how that went. Everything but an ack leaves ``finish`` at one
``if``. Time is an argument (engine seconds, monotonic); chance comes in with a ``Failure``.

Calls are plain, never block, and must come from one thread. What the shell has to do besides running handlers
is in ``effects``; it empties that list after every call.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush

from lanes.core import effects as fx
from lanes.core.flow import Flow
from lanes.core.lane import ABANDONED, FINISHED, HELD, QUEUED, RUNNING, SETTLED, Lane, illegal, insert, step
from lanes.core.ledger import AckLedger
from lanes.core.outbox import Outbox
from lanes.core.retry import EXHAUSTED, RetryPolicy
from lanes.core.types import ACK, Failure, Message, Outcome, Partition, PartitionId, Room, Settlement


class Engine:
    """The engine of one consumer.

    ``dead_letters``: whether a message that is given up goes to the dead letters (else everything halts).
    """

    def __init__(
        self, *, concurrency: int, max_in_flight: int, max_bytes: int, retry: RetryPolicy, dead_letters: bool
    ) -> None:
        self.concurrency = concurrency
        self.flow = Flow(max_in_flight, max_bytes)
        self._retry = retry
        self._dead_letters = dead_letters
        self.effects: list[fx.Effect] = []
        self.partitions: dict[PartitionId, Partition] = {}
        self.epoch: int = 0
        self.running: int = 0
        self.halted: bool = False
        self.retries: int = 0
        self.late: int = 0
        self.zombies: int = 0
        self.settled_count: int = 0
        self._ready: deque[Message] = deque()
        self._lanes: dict[Message, Lane] = {}
        self._fenced: set[Message] = set()  # handlers of fenced assignments that have not ended
        self._heap: list[tuple[float, int, Message]] = []
        self._heap_order: int = 0
        self._tails: dict[PartitionId, dict[bytes, Message]] = {}
        self._outbox = Outbox()
        self.dirty = self._outbox.dirty  # the same list, for one look a message

    # --- ownership

    def assign(self, partition: Partition) -> None:
        """Take a partition on, under a new epoch. Raises ``ValueError`` when it is already assigned."""
        if partition.epoch or partition.id in self.partitions:
            raise ValueError(f"{partition.id} is already assigned: release it, or report it lost, first")
        self.epoch += 1
        partition.epoch = self.epoch
        partition.live = True
        partition.ledger = AckLedger()
        # Shared with a fenced predecessor: its running handlers are the tails this assignment waits behind.
        partition.tails = self._tails.setdefault(partition.id, {})
        self.partitions[partition.id] = partition

    def drain(self, partition: Partition) -> list[Message]:
        """Start nothing more of it; returns what is abandoned. Idempotent; nothing for a fenced partition."""
        if partition.draining or not partition.live:
            return []
        abandoned = self._stop_starting(partition)
        if not partition.running:
            self.effects.append(fx.Drained(partition))
        return abandoned

    def _stop_starting(self, partition: Partition) -> list[Message]:
        partition.draining = True
        abandoned = [m for m in partition.ledger.held.values() if m.state not in (RUNNING, FINISHED)]
        self._forget(partition, abandoned)
        return abandoned

    def fence(self, partition: Partition) -> list[Message]:
        """Accept no result of it any more; returns what still runs. What has finished can still be settled.

        Idempotent.
        """
        if not partition.live:
            return []
        partition.live = False
        held = partition.ledger.held
        zombies = [m for m in held.values() if m.state == RUNNING]
        for message in zombies:
            del held[message.position]
            self._fenced.add(message)
        self._forget(partition, [m for m in held.values() if m.state != FINISHED])
        return zombies

    def lose(self, partition: Partition) -> list[Message]:
        """The partition is gone: nothing of it is settled any more. Returns what it still ran. Idempotent."""
        zombies = self.fence(partition)
        self.release(partition)
        return zombies

    def release(self, partition: Partition) -> None:
        """Forget a partition, what it finished and was not settled included. Idempotent."""
        if self.partitions.get(partition.id) is not partition:
            return
        self.fence(partition)
        del self.partitions[partition.id]
        self._forget(partition, list(partition.ledger.held.values()))
        self._outbox.forget(partition)
        if not partition.tails:
            self._tails.pop(partition.id, None)

    def _forget(self, partition: Partition, messages: list[Message]) -> None:
        """Abandon messages that do not run: out of queue, lanes, ledger and budgets."""
        if not messages:
            return
        held = partition.ledger.held
        size = 0
        for message in messages:
            step(message, "abandon")
            self._lanes.pop(message, None)
            del held[message.position]
            size += message.size
        ready = [m for m in self._ready if m.state == QUEUED]
        self._ready.clear()
        self._ready.extend(ready)
        self._relink(partition)
        self._released(len(messages), size)

    def _relink(self, partition: Partition) -> None:
        """After queued messages went away: whatever still runs is the last of its chain, fenced handlers too."""
        running = [m for m in partition.ledger.held.values() if m.state == RUNNING]
        running += [m for m in self._fenced if m.partition.id == partition.id]
        tails = partition.tails
        for key in [key for key, tail in tails.items() if tail.state == ABANDONED]:
            del tails[key]
        for message in running:
            message.next = None
            if message.key is not None:
                tails[message.key] = message

    # --- the way of a message

    def receive(self, partition: Partition, run: list[Message], size: int, now: float) -> None:
        """Admit a run of consecutive messages of one partition; ``size`` is the sum of their sizes."""
        if not partition.live:
            return
        if partition.draining:
            self._receive_draining(partition, run)
            return
        ledger, tails, ready = partition.ledger, partition.tails, self._ready
        held, highest = ledger.held, ledger.highest
        admitted = len(run)
        for message in run:
            position = message.position
            if position <= highest:
                if not self._redelivered(partition, message, now):
                    admitted -= 1
                    size -= message.size
                continue
            highest = position
            held[position] = message
            message.received = now
            message.state = QUEUED
            key = message.key
            if key is None:
                ready.append(message)
                continue
            tail = tails.get(key)
            tails[key] = message
            if tail is None:
                ready.append(message)
            else:
                tail.next = message
        ledger.highest = highest
        if self.flow.admit(admitted, size):
            self.effects.append(fx.Saturated())

    def take(self) -> Message | None:
        """The next message to run, or None when nothing is ready or ``concurrency`` handlers run."""
        if not self._ready or self.running >= self.concurrency:
            return None
        message = self._ready.popleft()
        message.state = RUNNING
        message.partition.running += 1
        self.running += 1
        return message

    def finish(self, message: Message, outcome: Outcome, now: float) -> None:
        """The handler of a taken message ended. Raises ``IllegalTransition`` when it was not running."""
        if message.state != RUNNING:
            raise illegal(message, "finish")
        partition = message.partition
        partition.running -= 1
        self.running -= 1
        if outcome is not ACK or partition.draining or not partition.live:
            self._finish_slow(message, outcome, now)
            return
        message.state = FINISHED
        if not partition.finished and not partition.resettle:
            self.dirty.append(partition)
        partition.finished.append(message)
        following = message.next
        if following is not None:
            message.next = None
            self._ready.append(following)
        elif message.key is not None:
            del partition.tails[message.key]

    def parked(self, message: Message) -> None:
        """The dead letter of a message is confirmed. Ignored when the message was abandoned meanwhile."""
        if message.state == ABANDONED:
            return
        step(message, "parked")
        del self._lanes[message]
        self._finished(message)

    def due(self, now: float) -> None:
        """Make the lanes ready whose hold is over."""
        heap = self._heap
        while heap and heap[0][0] <= now:
            message = heappop(heap)[2]
            # An abandoned message stays in the heap until here; its state tells.
            if message.state == HELD:
                step(message, "due")
                del self._lanes[message]
                message.attempt += 1
                self._ready.append(message)

    def next_due(self) -> float | None:
        """When ``due`` is to be called next; None when nothing is held."""
        return self._heap[0][0] if self._heap else None

    def _finish_slow(self, message: Message, outcome: Outcome, now: float) -> None:
        partition = message.partition
        if not partition.live:
            step(message, "abandon")
            self._fenced.discard(message)
            self.zombies += 1
            self.effects.append(fx.Zombie(message))
            self._free(message)
            if not partition.tails and partition.id not in self.partitions:
                self._tails.pop(partition.id, None)
            self._released(1, message.size)
            return
        if outcome is ACK:
            step(message, "ack")
            self._finished(message)
        elif isinstance(outcome, Failure) and not partition.draining:
            self._failed(message, outcome, now)
        else:
            if not partition.draining:
                # A lane never goes on past an abandoned head, so the partition can only be drained now.
                self.effects.append(fx.Abandoned(self._stop_starting(partition)))
            step(message, "abandon")
            del partition.ledger.held[message.position]
            self._free(message)
            self._released(1, message.size)
        if partition.draining and not partition.running:
            self.effects.append(fx.Drained(partition))

    def _failed(self, message: Message, failure: Failure, now: float) -> None:
        delay = self._retry.delay(message.attempt, failure)
        if delay != EXHAUSTED:
            step(message, "retry")
            self.retries += 1
            self._lanes[message] = Lane(message, failure, now + delay)
            # The order number keeps the heap from comparing messages.
            self._heap_order += 1
            heappush(self._heap, (now + delay, self._heap_order, message))
            self.effects.append(fx.Held(message, delay))
        elif self._dead_letters:
            step(message, "give up")
            self._lanes[message] = Lane(message, failure, 0.0)
            self.effects.append(fx.DeadLetterDue(message, failure))
        else:
            # Held for ever rather than abandoned: its successors must not start before the drain takes them.
            step(message, "retry")
            self._lanes[message] = Lane(message, failure, float("inf"))
            self.halted = True
            self.effects.append(fx.Halted(message, failure))

    def _finished(self, message: Message) -> None:
        """The slow path's end of a lane's head: to be settled, and its successor is next."""
        self._outbox.finished(message)
        self._free(message)

    def _free(self, message: Message) -> None:
        """Free the lane of a head that is done with."""
        following = message.next
        message.next = None
        if following is not None:
            self._ready.append(following)
        elif message.key is not None and message.partition.tails.get(message.key) is message:
            del message.partition.tails[message.key]

    def _released(self, count: int, size: int) -> None:
        if self.flow.release(count, size):
            self.effects.append(fx.Resumed())

    # --- redelivery

    def _redelivered(self, partition: Partition, message: Message, now: float) -> bool:
        """A position not above the highest delivered; True when it was admitted."""
        ledger = partition.ledger
        known = ledger.held.get(message.position)
        if known is not None:
            known.token = message.token
            known.raw = message.raw
            self.effects.append(fx.Redelivered(message, fx.STILL_HELD))
            return False
        if ledger.is_settled(message.position):
            message.state = SETTLED
            self._outbox.again(message)
            self.effects.append(fx.Redelivered(message, fx.ALREADY_SETTLED))
            return False
        self.late += 1
        self.effects.append(fx.Redelivered(message, fx.LATE))
        ledger.held[message.position] = message
        message.received = now
        step(message, "admit")
        if message.key is None:
            self._ready.append(message)
        else:
            lane = [m for m in ledger.held.values() if m.key == message.key and m.state != FINISHED]
            lane += [m for m in self._fenced if m.key == message.key and m.partition.id == partition.id]
            insert(message, lane, partition.tails, self._ready)
        return True

    def _receive_draining(self, partition: Partition, run: list[Message]) -> None:
        """While draining only what is known matters: held, or settled and to be settled again."""
        ledger = partition.ledger
        for message in run:
            if message.position in ledger.held or ledger.is_settled(message.position):
                self._redelivered(partition, message, 0.0)

    # --- settling

    def collect(self) -> list[Settlement]:
        """What is to be settled now, one settlement a partition. Each must come back to ``settled`` or
        ``unsettled``; until then its messages stay in flight."""
        return self._outbox.collect()

    def settled(self, settlements: list[Settlement]) -> None:
        """These settlements were sent."""
        for settlement in settlements:
            # A partition that was released meanwhile has an empty ledger: nothing is counted twice.
            count, size = settlement.partition.ledger.settle(settlement.messages)
            self.settled_count += count
            if count:
                self._released(count, size)

    def unsettled(self, settlements: list[Settlement]) -> None:
        """These settlements may not have been sent: they are collected again."""
        for settlement in settlements:
            if self.partitions.get(settlement.partition.id) is settlement.partition:
                self._outbox.give_back(settlement)

    # --- questions

    @property
    def ready(self) -> int:
        """Lanes whose head could start now."""
        return len(self._ready)

    def room(self) -> Room:
        """How much more the sources may deliver now."""
        return self.flow.room()

    def lanes(self) -> list[Lane]:
        """The lanes whose head is held or parking."""
        return list(self._lanes.values())

    def held_since(self, time: float) -> list[Message]:
        """Everything in flight of live partitions that was delivered at or before ``time``."""
        return [m for p in self.partitions.values() for m in p.ledger.held.values() if m.received <= time]

    def oldest(self) -> Message | None:
        """The unfinished message that was delivered first, if any."""
        unfinished = (m for p in self.partitions.values() for m in p.ledger.held.values() if m.state != FINISHED)
        return min(unfinished, key=_received, default=None)

    def __repr__(self) -> str:
        return (
            f"<Engine {len(self.partitions)} partitions, {self.flow.in_flight} in flight, {self.running} running, "
            f"{len(self._ready)} ready, {len(self._lanes)} held or parking>"
        )


def _received(message: Message) -> float:
    return message.received
