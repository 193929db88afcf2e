"""The engine: ordered lanes over partitions, bounded, with retries, dead letters, redelivery, commits and drain.

This file is longer than most, because it contains every call for a single message, and the rules for all calls.

Rules
-----
1. A lane has at most one *execution*: its head, or in a batch its head and some successors. The head is the first
   unfinished message of the lane. The next message of the lane starts after the execution is finished. A message that
   waits for a retry or for its dead letter is not finished.
2. In flight = delivered and not settled. If the source settles each message individually, the engine counts a message
   until the source has sent its settlement. If the source commits, the engine counts a message until it is finished.
   The engine stops counting an abandoned message at once. The engine counts a message whose handler runs at the fence
   until the handler ends. A draining partition admits no message.
3. The engine applies a result only while ``message.partition.live`` is True. A handler of a fenced assignment blocks
   its lane: messages of that lane in a new assignment wait until the handler ends.
4. A redelivered position never runs twice at the same time. If the position is in flight, its message receives the new
   token. If the position is settled, the engine settles it again. The engine inserts the message of an unknown position
   into its lane by position, and counts this message as late. The positions of a source that commits always increase.
5. A draining partition starts no message, except to close the prefix. The engine abandons queued and stopped messages
   at once. Running handlers may end. The engine accepts a success, and abandons a failed message. The engine emits
   ``Drained`` once, when no message runs. An interrupted handler (``ABANDON``) drains its partition, because later
   messages of the lane must not overtake the interrupted message. If a source cannot hand over the completed set,
   finished messages above a queued message would run again. For such a source the queued messages below the highest
   started message also run (*prefix-closing*), until ``stop_closing``.
6. A message is settled only after its handler succeeded or the broker confirmed its dead letter. No commit moves past
   an unfinished message. If a message has outputs, the next message of its lane waits until the broker has confirmed
   the outputs. A drain waits for this message as for a running handler. A fence drops unconfirmed outputs.
7. A partition has at most one commit in transit. The floor and the completed set of a commit describe the same state.
   The engine treats a commit with an unknown result as unconfirmed. The engine admits at most ``max_ahead`` messages
   above the confirmed floor.

Operation --------- ``receive`` admits a run. The engine appends each message to its lane. A message that is alone in
its lane is a head, and enters the queue ``ready``. A worker calls ``take``, runs the handler and calls ``finish``. The
finished message enters the ``finished`` list of its partition, and its successor enters ``ready``. ``collect`` returns
the finished messages as settlements. If the source commits, ``collect`` enters them into the ledger and returns the due
commits. ``settled`` or ``unsettled`` reports the result. In ``finish``, one ``if`` separates the outcome ``ACK`` in a
steady partition from all other cases. Time is an argument, in monotonic seconds. Random numbers are part of a
``Failure``.

No call blocks. One thread must make all calls, except ``hold_starts``. The list ``effects`` contains tasks for the
runtime. After each call, the runtime performs these tasks and empties the list.
"""

from __future__ import annotations

from collections.abc import Sequence

from lanes.core import effects as fx
from lanes.core.chains import successors
from lanes.core.lane import (
    ABANDONED,
    DEAD_LETTERING_BLOCKED,
    FINISHED,
    HANDLED,
    PUBLISHING,
    QUEUED,
    RUNNING,
    StoppedLane,
    illegal,
    step,
)
from lanes.core.ledgers import AckLedger
from lanes.core.ownership import Ownership
from lanes.core.policy import Policy
from lanes.core.publishing import Produced
from lanes.core.types import ACK, RETURN, Failure, Message, Outcome, Partition, Room, Settlement


class Engine(Ownership):
    """The engine of one consumer.

    ``lanes.core.ownership`` contains the calls for a whole partition, such as ``assign``.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.concurrency = policy.concurrency
        self._most_running = policy.concurrency  # 0 while no message may start
        self._starts_held = False
        self._outputs_full = False
        self.running_handlers: int = 0
        self.halted: bool = False
        self.retries: int = 0
        self.late: int = 0
        self.zombies: int = 0
        self.settled_count: int = 0
        self.dirty = self.outbox.dirty  # the same list: the hot path saves one attribute access a message
        self._ready = self.chains.ready  # the same queue

    # --- single messages

    def receive(self, partition: Partition, run: list[Message], size: int, now: float) -> None:
        """Admit a run of consecutive messages of one partition.

        Args:
            partition: The assignment.
            run: The messages.
            size: Sum of the sizes of the messages, in bytes.
            now: Current time, in seconds of the engine's clock.

        Raises:
            PositionFell: The source commits, and a position is not above the previous position.
        """
        if not partition.live:
            return
        if self.chains.relabels:
            self.chains.relabel(run)
        ledger = partition.ledger
        if not isinstance(ledger, AckLedger):
            if not partition.draining:
                finished = self.committer.receive(partition, run, now)
                self._admitted(len(run), size, now)
                self._released(*finished)
            return
        if partition.draining:
            self._receive_draining(partition, ledger, run)
            return
        tails, ready = partition.tails, self._ready
        unsettled, highest = ledger.unsettled, ledger.highest
        admitted = len(run)
        for message in run:
            position = message.position
            if position <= highest:
                if not self._redelivered(ledger, message, now):
                    admitted -= 1
                    size -= message.size
                continue
            highest = position
            unsettled[position] = message
            message.received = now
            message.state = QUEUED
            lane = message.lane
            if lane is None:
                ready.append(message)
                continue
            tail = tails.get(lane)
            tails[lane] = message
            if tail is None:
                ready.append(message)
            else:
                tail.next = message
        ledger.highest = highest
        self._admitted(admitted, size, now)

    def progressed(self, partition: Partition, position: int, now: float) -> None:
        """Record that the source has read up to ``position``, and delivers no further message below ``position``.

        The call has no effect for a partition that drains or is fenced, and for a source that does not commit.
        """
        if partition.live and not partition.draining:
            self.committer.progressed(partition, position, now)

    def take(self) -> Message | None:
        """Return the next message to run; None = no lane is ready, or the maximum number of handlers already runs."""
        if not self._ready or self.running_handlers >= self._most_running:
            return None
        message = self._ready.popleft()
        message.state = RUNNING
        self.running_handlers += 1
        return message

    def take_batch(self, limit: int) -> list[Message]:
        """Take up to ``limit`` messages for one call of a handler. The call counts as one of ``concurrency``.

        The batch contains heads of different lanes, each with successors after it.
        """
        batch: list[Message] = []
        if self.running_handlers >= self._most_running:
            return batch
        while self._ready and len(batch) < limit:
            message: Message | None = self._ready.popleft()
            while message is not None and len(batch) < limit:
                message.state = RUNNING
                batch.append(message)
                message = message.next
        self.running_handlers += bool(batch)
        return batch

    def available(self, limit: int) -> int:
        """Return the number of messages that a free handler could take by ``take_batch``, at most ``limit``."""
        count = 0
        if not self._most_running:
            return count
        for head in self._ready:
            message: Message | None = head
            while message is not None and count < limit:
                count += 1
                message = message.next
            if count >= limit:
                break
        return count

    def hold_starts(self) -> None:
        """Return no message from ``take`` and ``take_batch`` until ``resume_starts``.

        Idempotent. This is the only method that any thread may call. Messages already taken continue, and every other
        call of the engine has its usual effect.
        """
        self._starts_held = True
        self._most_running = 0

    def resume_starts(self) -> None:
        """End ``hold_starts``. Idempotent. After this call, the caller must wake the workers."""
        self._starts_held = False
        self._allow_starts()

    def _allow_starts(self) -> None:
        """Start messages again, unless ``hold_starts`` applies or the outputs in memory have reached ``max_bytes``."""
        self._most_running = 0 if self._outputs_full else self.concurrency
        if self._starts_held:
            # Read last: another thread may have called ``hold_starts`` meanwhile.
            self._most_running = 0

    def finish(self, message: Message, outcome: Outcome, now: float) -> None:
        """Apply the outcome of a taken message. Raises ``IllegalTransition`` for a message that does not run."""
        if message.state != RUNNING:
            raise illegal(message, "finish")
        partition = message.partition
        self.running_handlers -= 1
        if outcome is not ACK or not partition.steady or partition.partings:
            if isinstance(outcome, Produced) and partition.live:
                self._publish(message, outcome)
            else:
                self._finish_slow(message, outcome, now)
            return
        message.state = FINISHED
        if not partition.dirty:
            partition.dirty = True
            self.dirty.append(partition)
        partition.finished.append(message)
        following = message.next
        if following is not None:
            message.next = None
            self._ready.append(following)
        elif message.lane is not None:
            del partition.tails[message.lane]

    def finish_batch(self, batch: Sequence[Message], outcomes: Sequence[Outcome], now: float) -> None:
        """Apply the outcomes of a taken batch, one for each message.

        If an outcome is a failure, the engine ignores the later outcomes of the same lane. The messages of the ignored
        outcomes run again. The outcomes after a message with outputs wait until the broker has confirmed the outputs.

        Args:
            batch: The messages.
            outcomes: The outcomes, in the order of the messages.
            now: Current time, in seconds of the engine's clock.

        Raises:
            IllegalTransition: A message does not run.
            ValueError: The number of outcomes is wrong.
        """
        if (stray := next((m for m in batch if m.state != RUNNING), None)) is not None:
            raise illegal(stray, "finish")
        if len(outcomes) != len(batch):
            raise ValueError(f"{len(outcomes)} outcomes for a batch of {len(batch)} messages; return one for each")
        self.running_handlers -= bool(batch)
        behind: set[Message] = set()  # messages whose predecessor in the lane is publishing
        for message, outcome in zip(batch, outcomes, strict=True):
            if message.state != RUNNING:
                continue  # An earlier outcome has returned this message to its lane.
            partition, following = message.partition, message.next
            if behind or (outcome is not ACK and isinstance(outcome, Produced)):
                self._finish_in_turn(message, outcome, now, behind)
                continue
            if following is None or following.state != RUNNING:
                self.running_handlers += 1  # ``finish`` subtracts a handler that is subtracted already.
                # Not ``self.finish``: the method of a subclass counts the end of a call.
                Engine.finish(self, message, outcome, now)
                continue
            while outcome is not ACK and partition.live and following is not None and following.state == RUNNING:
                step(following, "return")
                following = following.next
            self._finish_slow(message, outcome, now)

    def _finish_in_turn(self, message: Message, outcome: Outcome, now: float, behind: set[Message]) -> None:
        """Apply an outcome of a batch in which a message has left outputs.

        Args:
            message: The message.
            outcome: Its outcome.
            now: Current time, in seconds of the engine's clock.
            behind: The messages of the batch whose predecessor is publishing; the call adds the next such message.
        """
        following = message.next
        waits = message in behind
        if message.partition.live:
            publishes = isinstance(outcome, Produced) or (waits and outcome is ACK)
            if publishes and following is not None and following.state == RUNNING:
                behind.add(following)
            while not publishes and outcome is not ACK and following is not None and following.state == RUNNING:
                step(following, "return")
                following = following.next
            if waits:
                step(message, "handle")
                self.publishing.defer(message, outcome, now)
                self._look_at_outputs()
                return
        self._finish_slow(message, outcome, now)

    def _finish_slow(self, message: Message, outcome: Outcome, now: float) -> None:
        partition, chains = message.partition, self.chains
        if not partition.live:
            step(message, "abandon")
            chains.fenced.discard(message)
            self.zombies += 1
            self.effects.append(fx.Zombie(message))
            chains.free(message)
            chains.forget(partition.id, self.partitions)
            self._released(1, message.size)
            return
        if isinstance(outcome, Produced):
            self._publish(message, outcome)
            return
        leaves = self._leaving(message)
        if outcome is ACK:
            step(message, "ack")
            self._finished(message)
        elif isinstance(outcome, Failure) and not partition.draining and leaves is None:
            self._failed(message, outcome, now)
        elif outcome is RETURN and not partition.draining and leaves is None:
            step(message, "return")
            self._ready.append(message)
        else:
            # A lane never continues after an abandoned head.
            if leaves is not None and not partition.draining:
                # Messages of its key that ran in the same batch are queued again. The others have left already.
                abandoned = self._give_up_part(partition, leaves, successors(message), [])
            elif partition.draining:
                abandoned = self._abandon(partition, successors(message))
                partition.unended -= len(abandoned)
            else:
                abandoned = self._stop_starting(partition, set())
            if abandoned:
                self.effects.append(fx.Abandoned(abandoned))
            if isinstance(outcome, Failure):
                self.effects.append(fx.Interrupted(message, outcome, self.policy.follows(message.attempt, outcome)))
            step(message, "abandon")
            partition.ledger.drop(message)
            chains.free(message)
            self._released(1, message.size)
            if leaves is not None and not partition.draining:
                self.effects.append(fx.Abandoned([message]))
        if leaves is not None:
            self._left_part(message, leaves, given_up=message.state == ABANDONED)
        if partition.draining:
            partition.unended -= 1
            self._drained_if_ended(partition)

    def _publish(self, message: Message, produced: Produced) -> None:
        """Keep the outputs of a message, which still counts as running for the drain of its partition or part."""
        step(message, "publish")
        self.publishing.begin(message, produced)
        if self.publishing.size >= self.policy.max_bytes:
            self._look_at_outputs()
        self.effects.append(fx.PublishDue(message, produced))

    def _failed(self, message: Message, failure: Failure, now: float) -> None:
        policy, stopped = self.policy, self.stopped
        follows = policy.follows(message.attempt, failure)
        if follows == "hold":
            self.retries += 1
            delay = policy.retry.delay(message.attempt, failure)
            stopped.hold(message, failure, now + delay)
            self.effects.append(fx.Held(message, failure, follows, delay))
        elif follows == "dead_letter" or follows == "dead_letter_and_block":
            stopped.stop(message, follows, failure)
            self.effects.append(fx.DeadLetterDue(message, failure, follows))
        else:
            # The lane stops under ``exit`` too, because its later messages must not start before the drain abandons
            # them.
            stopped.stop(message, "block", failure)
            self.halted |= follows == "halt"
            effect = fx.Halted if follows == "halt" else fx.Blocked
            self.effects.append(effect(message, failure, follows))

    def published(self, message: Message, now: float) -> None:
        """Record that the broker has confirmed all outputs of a message, which is then finished.

        The call has no effect for an abandoned message.
        """
        if message.state == ABANDONED:
            return
        if message.state != PUBLISHING:
            raise illegal(message, "published")
        partition, following = message.partition, message.next
        self.publishing.forget(message)
        if not partition.steady or partition.partings or (following is not None and following.state != QUEUED):
            self._finish_slow(message, ACK, now)
            self._apply_deferred(following)
        else:
            # As in ``finish``, because this call is made after every message with outputs.
            message.state = FINISHED
            if not partition.dirty:
                partition.dirty = True
                self.dirty.append(partition)
            partition.finished.append(message)
            self.chains.free(message)
        if self._outputs_full:
            self._look_at_outputs()

    def publish_failed(self, message: Message, failure: Failure, now: float) -> None:
        """Record a failed send of the outputs of a message. The handler of the message does not run again.

        The number of sends is unlimited, because the message does not cause an outage. After a terminal failure, the
        engine applies the poison policy. The call has no effect for an abandoned message.

        Args:
            message: The message.
            failure: The failure of the send.
            now: Current time, in seconds of the engine's clock.
        """
        if message.state == ABANDONED:
            return
        if message.state != PUBLISHING:
            raise illegal(message, "publish_failed")
        if not failure.terminal:
            sends = self.publishing.failed(message)
            delay = self.policy.retry.pause(sends, failure)
            self.stopped.hold_outputs(message, failure, now + delay)
            self.effects.append(fx.PublishHeld(message, failure, sends, delay))
            return
        self._stop_publishing(message)
        self._finish_slow(message, failure, now)
        self._look_at_outputs()

    def _stop_publishing(self, message: Message) -> None:
        """Drop the outputs of a message. The later messages of its batch run again, as after a failed handler."""
        self.publishing.forget(message)
        following = message.next
        while following is not None and following.state == HANDLED:
            self.publishing.forget(following)
            step(following, "return")
            following = following.next

    def _apply_deferred(self, message: Message | None) -> None:
        """Apply the outcomes of handled messages in lane order, up to an outcome with outputs or a failure."""
        while message is not None and message.state == HANDLED:
            outcome, at = self.publishing.take(message)
            following = message.next
            self._finish_slow(message, outcome, at)
            if message.state != FINISHED:
                break
            message = following

    def _look_at_outputs(self) -> None:
        """Stop the starts of handlers at ``max_bytes`` of outputs, and resume them at half of this bound."""
        size, bound = self.publishing.size, self.policy.max_bytes
        full = size > bound // 2 if self._outputs_full else size >= bound
        if full != self._outputs_full:
            self._outputs_full = full
            self._allow_starts()

    def kept(self, message: Message) -> None:
        """Record that the store of attempts has saved a failed attempt, so that the engine may retry the message.

        Idempotent. The call has no effect unless the message waits for a retry.
        """
        self.stopped.kept(message)

    def dead_lettered(self, message: Message) -> None:
        """Record that the broker confirmed the dead letter of a message.

        The call has no effect for an abandoned message.
        """
        if message.state == ABANDONED:
            return
        blocked = message.state == DEAD_LETTERING_BLOCKED
        step(message, "dead_lettered")
        if blocked:
            self.effects.append(fx.Blocked(message, self.stopped.by_head[message].failure, "block"))
            return
        del self.stopped.by_head[message]
        self._finished(message)

    def unblock(self, key: bytes | None) -> int:
        """Give the blocked heads of a key one more attempt, and return their number."""
        heads = self.stopped.unblock(key)
        self._ready.extend(heads)
        return len(heads)

    def park(self, key: bytes | None) -> int:
        """Send the blocked and held heads of a key to the dead letters, and return their number."""
        parked = self.stopped.park(key)
        for lane in parked:
            self._stop_publishing(lane.head)
        self._look_at_outputs()
        self.effects += [fx.DeadLetterDue(lane.head, lane.failure, "dead_letter") for lane in parked]
        return len(parked)

    def _finished(self, message: Message) -> None:
        """Finish a head outside the hot path: queue its settlement and its successor."""
        self.outbox.finished(message)
        self.chains.free(message)

    # --- time and budgets

    def due(self, now: float) -> None:
        """Make each lane ready whose hold has ended, and send outputs again whose pause has ended.

        While a bound stops the deliveries, the engine checks every ``LOOK_EVERY`` seconds for an idle handler. If a
        handler is idle and the bounds leave room, the deliveries start again. Otherwise the engine emits ``PauseDue``
        after ``PAUSE_AFTER`` seconds.
        """
        for head in self.stopped.due(now):
            if head.state == PUBLISHING:
                self.effects.append(fx.PublishDue(head, self.publishing.produced[head][0]))
            else:
                self._ready.append(head)
        flow = self.flow
        looks = now >= flow.look_at
        if looks and self._resumed_early():
            return
        if flow.due(now):
            self.effects.append(fx.PauseDue())
        if looks:
            flow.looked(now)

    def next_due(self) -> float:
        """Return the time at which to call ``due`` next. ``NEVER`` = no lane or bound waits for a time."""
        return min(self.stopped.next_due(), self.flow.pause_at, self.flow.look_at)

    def pause(self, *, paused: bool) -> bool:
        """Pause or resume the consumer, and return whether the call changed its state.

        A pause also applies to later assignments.
        """
        before, self.flow.paused = self.flow.paused, paused
        return before != paused

    def room(self) -> Room:
        """Return the bounds of the next delivery, and the partitions to pause."""
        room = self.flow.room()
        if self.flow.paused or self.flow.pausing:
            return room._replace(paused=frozenset(self.partitions.values()))
        return room._replace(paused=frozenset(self.committer.ahead)) if self.committer.ahead else room

    def _admitted(self, count: int, size: int, now: float) -> None:
        if self.flow.admit(count, size, now):
            self.effects.append(fx.Saturated())

    def _freed_in_pause(self) -> None:
        # A paused client has lost its prefetched messages already, so the intake need not wait for the next check.
        if not self._resumed_early() and self.flow.stopped_early:
            self.flow.look_at = min(self.flow.look_at, 0.0)

    def _resumed_early(self) -> bool:
        """Start the deliveries again above the low water if a handler is idle. Return whether the deliveries start.

        Without this rule, the messages that wait for one slow message would stop all other messages.
        """
        if not (self.flow.stopped_early and self._has_idle_handler()):
            return False
        self.flow.resume()
        self.effects.append(fx.Resumed())
        return True

    def _has_idle_handler(self) -> bool:
        """Return whether every handler is idle, or an idle handler could start a new message."""
        busy = self.running_handlers + len(self._ready)
        return not busy or (busy < self.concurrency and any(map(self._could_start, self.partitions.values())))

    def _could_start(self, partition: Partition) -> bool:
        """Return whether a new message of the partition with an idle key could start at once."""
        return partition.steady and not (partition.tails and self.policy.order in ("partition", "serial"))

    # --- redelivery

    def _redelivered(self, ledger: AckLedger, message: Message, now: float) -> bool:
        """Handle a position at or below the highest delivered position.

        Return whether the engine has admitted its message.
        """
        known = ledger.unsettled.get(message.position)
        if known is not None:
            known.token = message.token
            known.raw = message.raw
            self.effects.append(fx.Redelivered(message, fx.STILL_IN_FLIGHT))
            return False
        if ledger.is_settled(message.position):
            step(message, "settle")
            self.outbox.again(message)
            self.effects.append(fx.Redelivered(message, fx.ALREADY_SETTLED))
            return False
        self.late += 1
        self.effects.append(fx.Redelivered(message, fx.LATE))
        ledger.unsettled[message.position] = message
        message.received = now
        step(message, "admit")
        self.chains.insert(message)
        return True

    def _receive_draining(self, partition: Partition, ledger: AckLedger, run: list[Message]) -> None:
        """Handle redeliveries of known positions.

        Drop all other messages, because a draining partition admits no message.
        """
        for message in run:
            if message.position in ledger.unsettled or ledger.is_settled(message.position):
                self._redelivered(ledger, message, 0.0)

    # --- settling

    def collect(self, now: float, *, everything: bool = False) -> list[Settlement]:
        """Collect the settlements to send now, at most one for each partition.

        The caller must later pass each settlement to ``settled`` or ``unsettled``. Until that call the messages to
        acknowledge stay in flight, and a partition with a commit sends no other commit.

        Args:
            now: Current time, in seconds of the engine's clock.
            everything: Whether to collect all pending commits, even before they are due.

        Returns:
            The settlements.
        """
        settlements = self.outbox.collect()
        if not self.committer.partitions:
            return settlements
        sent = []
        for settlement in settlements:
            if settlement.partition.commits is None:
                sent.append(settlement)
            else:
                count, size = self.committer.complete(settlement, now)
                self.settled_count += count
                self._released(count, size)
        return sent + self.committer.due(now, everything=everything)

    def commit_at(self) -> float:
        """Return the time at which the next commit is due. ``NEVER`` = no commit is pending."""
        return self.committer.next_at()

    def settled(self, settlements: list[Settlement]) -> None:
        """Record sent settlements, and commits that the broker has confirmed."""
        for settlement in settlements:
            if settlement.floor is not None:
                self._released(*self.committer.confirmed(settlement))
                continue
            # A partition that was released meanwhile has an empty ledger, so no message is counted twice.
            count, size = settlement.partition.ledger.settle(settlement.messages)
            self.settled_count += count
            self._released(count, size)

    def unsettled(self, settlements: list[Settlement], *, again_at: float = 0.0) -> None:
        """Queue settlements with a failed or unknown result again; commits are due at ``again_at`` or later."""
        for settlement in settlements:
            if not self.owns(settlement.partition):
                continue
            if settlement.partition.commits is None:
                self.outbox.give_back(settlement)
            else:
                self.committer.unknown(settlement.partition, again_at)

    # --- questions

    @property
    def ready(self) -> int:
        """Number of lanes whose head could start now."""
        return len(self._ready)

    def stopped_lanes(self) -> list[StoppedLane]:
        """Return the lanes whose head waits for a retry, is blocked, or waits for its dead letter."""
        return list(self.stopped.by_head.values())

    def in_flight_since(self, time: float) -> list[Message]:
        """Return the admitted, unsettled messages whose delivery was at or before ``time``."""
        return [m for p in self.partitions.values() for m in p.ledger.in_flight() if m.received <= time]

    def oldest(self) -> Message | None:
        """Return the unfinished message with the earliest delivery; None = no message is unfinished."""
        each = (partition.ledger.oldest() for partition in self.partitions.values())
        return min((m for m in each if m is not None), key=lambda message: message.received, default=None)

    def __repr__(self) -> str:
        return (
            f"<Engine {len(self.partitions)} partitions, {self.flow.in_flight} in flight, "
            f"{self.running_handlers} running, {len(self._ready)} ready, "
            f"{len(self.stopped.by_head)} stopped>"
        )
