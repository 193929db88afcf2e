"""The chains of all lanes, and the queue of the heads that can start.

The head of a lane is its first unfinished message. On the hot path, the engine itself links and unlinks messages. This
module chooses the lane of a message, inserts a late message by its position, and removes abandoned messages from their
lanes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from operator import attrgetter
from typing import Final

from lanes.core import ring
from lanes.core.fair_queue import FairQueue
from lanes.core.lane import ABANDONED, HANDLED, QUEUED, UNENDED, step
from lanes.core.ledgers import OffsetLedger
from lanes.core.policy import Policy
from lanes.core.types import WHOLE_PARTITION, Message, Partition, PartitionId

KEYLESS: Final = -1
"""The lane that all messages without a key may share."""


class Chains:
    """The lanes of one engine.

    Args:
        policy: The rules of the engine.

    Attributes:
        ready: The heads that can start. An engine with budgets per partition puts its ``FairQueue`` here.
        fenced: Messages whose handlers still run although their assignment is fenced. Each of these messages keeps its
            lane.
        tails: The last message of each lane, by whole partition. All assignments and all pieces of a partition share
            its lanes, because a key may move from a piece with a fenced handler to another piece.
        relabels: Whether the lane of a message may differ from its key.
    """

    __slots__ = ("_key", "_keyless", "_lanes", "_ordered", "fenced", "ready", "relabels", "tails")

    def __init__(self, policy: Policy) -> None:
        self.ready: deque[Message] | FairQueue = deque()
        self.fenced: set[Message] = set()
        self.tails: dict[PartitionId, dict[bytes | int, Message]] = {}
        self._ordered = policy.order != "none"
        self._key = policy.order == "key"
        self._keyless = None if policy.keyless == "any" else KEYLESS
        self._lanes = policy.lanes
        self.relabels = not self._key or self._keyless is not None or self._lanes > 0

    def relabel(self, run: list[Message]) -> None:
        """Set the lane of each message whose lane is not its key."""
        for message in run:
            if not self._ordered:
                message.lane = None
            elif not self._key:
                message.lane = WHOLE_PARTITION
            elif message.key is None:
                message.lane = self._keyless
            elif self._lanes:
                message.lane = ring.lane(message.key, self._lanes)

    def admit(self, partition: Partition, run: list[Message]) -> None:
        """Append new messages to their lanes. A message that is alone in its lane is ready."""
        tails, ready = partition.tails, self.ready
        for message in run:
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

    def free(self, message: Message) -> None:
        """Remove the head from its lane. The call then makes a queued successor ready."""
        following = message.next
        message.next = None
        if following is not None:
            # A successor of the same batch already runs, or is handled.
            if following.state == QUEUED:
                self.ready.append(following)
        elif message.lane is not None and message.partition.tails.get(message.lane) is message:
            del message.partition.tails[message.lane]

    def insert(self, message: Message) -> None:
        """Put a late message into the chain of its lane by position.

        The late message runs after every started message, and before queued messages of higher positions. The call is
        O(messages in flight). The engine makes the call only for a late message.
        """
        if message.lane is None:
            self.ready.append(message)
            return
        tails = message.partition.tails
        others = [m for m in self._lane(message) if m is not message]
        if not others:
            tails[message.lane] = message
            self.ready.append(message)
            return
        started = [m for m in others if _has_started(m)]
        below = [m for m in others if m not in started and m.position < message.position]
        if not started and not below:
            # The head of a lane without a started message is in the ready queue. The late message takes its place.
            head = min(others, key=_position)
            self.ready[self.ready.index(head)] = message
            message.next = head
            return
        # A chain has its started messages first, then its queued messages by position. The late message follows the
        # highest queued message below it. Without such a message, it follows the last started message.
        before = max(below, key=_position) if below else _last(started)
        message.next = before.next
        before.next = message
        if message.next is None:
            tails[message.lane] = message

    def _lane(self, message: Message) -> list[Message]:
        """Return the unfinished messages of a lane, and its messages with fenced handlers."""
        partition = message.partition
        lane = [m for m in partition.ledger.unfinished() if m.lane == message.lane]
        return lane + [m for m in self.fenced if m.lane == message.lane and m.partition.id.whole == partition.id.whole]

    def prefix(self, partition: Partition) -> set[Message]:
        """Return the queued messages below the highest started message, except those in stopped lanes."""
        ledger = partition.ledger
        assert isinstance(ledger, OffsetLedger), "only a source that commits has a completed set"
        heads = [m for m in ledger.unfinished() if m.state in UNENDED]
        started = [m.position for m in heads] + [m.position for m in partition.finished]
        limit = max(started, default=-1)
        limit = max(limit, ledger.last_finished())
        kept = set()
        for head in heads + [m for m in self.ready if m.partition is partition]:
            message: Message | None = head
            while message is not None and message.position < limit:
                if message.state == QUEUED:
                    kept.add(message)
                message = message.next
        return kept

    def abandon(self, partition: Partition, messages: list[Message]) -> None:
        """Mark messages as abandoned, and remove them from the queue and from their lanes."""
        for message in messages:
            step(message, "abandon")
        ready = [m for m in self.ready if m.state == QUEUED]
        self.ready.clear()
        self.ready.extend(ready)
        tails = partition.tails
        for lane in [lane for lane, tail in tails.items() if tail.state == ABANDONED]:
            del tails[lane]
        left = [m for m in partition.ledger.unfinished() if m.state == QUEUED or m.state in UNENDED]
        left += [m for m in self.fenced if m.partition.id.whole == partition.id.whole]
        for message in left:
            while message.next is not None and message.next.state == ABANDONED:
                message.next = message.next.next
            if message.next is None and message.lane is not None:
                tails[message.lane] = message

    def forget(self, ended: PartitionId, assigned: Collection[PartitionId]) -> None:
        """Remove the lanes of a partition that has neither an assignment nor a running handler. Idempotent.

        Args:
            ended: The partition, or a piece of it, whose assignment or last handler has ended.
            assigned: The assigned partitions and pieces.
        """
        whole = ended.whole
        if self.tails.get(whole):
            return
        # Only a partition of pieces has several assignments. Without pieces, the cost must not grow with the others.
        if not (any(each.whole == whole for each in assigned) if ended.piece else whole in assigned):
            self.tails.pop(whole, None)

    def __repr__(self) -> str:
        return f"<Chains {len(self.ready)} ready, {len(self.fenced)} fenced handlers>"


def successors(message: Message) -> list[Message]:
    """Return the queued or handled messages after a head, in order."""
    found = []
    following = message.next
    while following is not None and following.state in (QUEUED, HANDLED):
        found.append(following)
        following = following.next
    return found


def _has_started(message: Message) -> bool:
    """Return whether a message has started, so that a late message with a lower position runs after this message.

    A started message has left the queue, or waits in the queue for a further attempt. A message with the outcome
    ``RETURN`` has not started, because its attempt does not count.
    """
    return message.state != QUEUED or message.attempt > message.partition.recalled.get(message.position, 1)


def _last(started: list[Message]) -> Message:
    """Return the last started message of a lane. A batch runs several messages of a lane in sequence."""
    return next(message for message in started if message.next not in started)


_position: Final = attrgetter("position")
