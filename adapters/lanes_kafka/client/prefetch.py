"""Reading more messages than the event loop has room for, so that all partitions share the room.

The client has one queue, which holds thousands of messages of one partition, then thousands of the next partition. In
the order of the queue, handlers would run for one partition at a time, and at most one handler for each key of this
partition. ``ReadAhead`` decides in the client's thread how many messages to read. ``Prefetched`` keeps the messages on
the event loop, and divides the room among the partitions.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence, Set
from typing import Final

from lanes.core.types import Partition, Room
from lanes.source import Delivered, Lost, Progressed, Revoking, SourceEvent
from lanes_kafka.client.group import Group
from lanes_kafka.client.mailbox import Demand

READ_AHEAD: Final = 20_000
"""Maximum number of messages read beyond the room when several partitions are read. Messages of paused partitions count
until they are dropped."""

READ_AHEAD_BYTES: Final = 8 * 1024 * 1024
"""Maximum size in bytes of the messages read beyond the room, estimated from the average size of a message."""

REWIND_AFTER: Final = 1.0
"""Seconds that a partition stays paused before its messages are dropped and the client is paused for it. The drop and
the pause discard fetched messages, and fetching messages again takes time."""

_NEVER: Final = (0, 0)


class ReadAhead:
    """Messages that the thread has not sent to the event loop yet. Also decides the number of messages to read next.

    Used in the thread that owns the client. Without messages the object is False.
    """

    def __init__(self) -> None:
        self._gathered: list[Delivered] = []
        self._count = 0
        self._sent = 0
        self._rebalances = self._sent_at = -1

    def __bool__(self) -> bool:
        return bool(self._gathered)

    def to_read(self, demand: Demand, group: Group, average: float) -> int:
        """Choose the number of messages to read now.

        Args:
            demand: The room on the event loop.
            group: Assignments of the client.
            average: Average size of a message, in bytes.

        Returns:
            The number of messages, 0 or more.
        """
        others, paused = len(group.owned), demand.paused
        if paused:
            # The demand may still name a partition that was given back since.
            others -= sum(each.partition in paused for each in group.owned.values())
        if not others and paused:
            return 0
        several = others > 1
        # While handlers keep up, no reading ahead is needed, except at the first read after a rebalance.
        ahead = several and (demand.messages <= 0 or group.rebalances != self._sent_at)
        self._rebalances = group.rebalances
        # This demand does not count messages that were on their way to the loop when the loop made it.
        waiting = demand.waiting + self._sent - demand.received
        room = max(0, demand.messages)
        if waiting and waiting >= room + (READ_AHEAD // 2 if ahead else 0):
            return 0
        size = max(0, demand.bytes) + (READ_AHEAD_BYTES if ahead else 0)
        most = min(room + (READ_AHEAD if ahead else 0), int(size / average)) - waiting
        # Prefetched messages of paused partitions use up the read-ahead until they are dropped.
        most = min(most, room + READ_AHEAD - waiting - demand.waiting_paused) - self._count
        # A message that is larger than the whole room is read alone.
        return max(most, 1 if room and not waiting and not self._count else 0)

    def gather(self, events: list[Delivered]) -> None:
        """Keep these events until ``take``."""
        self._gathered += events
        self._count += sum(len(event.run) for event in events)

    def take(self) -> list[Delivered]:
        """Remove and return all kept events, in the order in which they were read."""
        events, self._gathered = self._gathered, []
        self._sent += self._count
        self._count = 0
        if events:
            self._sent_at = self._rebalances
        return events


class Prefetched:
    """Events from the client's thread that are not delivered yet, in the order of arrival. Used on the event loop.

    Attributes:
        messages: Number of prefetched messages.
        received: Number of messages added since the start, dropped messages included.
        bytes_received: Bytes of the messages added since the start, dropped messages included.
        client_paused: Partitions for which the client is paused.
    """

    def __init__(self) -> None:
        self.messages = 0
        self.received = self.bytes_received = 0
        self.client_paused: frozenset[Partition] = frozenset()
        self._events: deque[SourceEvent] = deque()
        self._rewound: dict[Partition, tuple[int, int]] = {}
        self._paused_at: dict[Partition, float] = {}
        self._is_taking = False

    def add(self, events: Sequence[SourceEvent], number: int) -> None:
        """Add events that were read for demand ``number``, except those read before a rewind of their partition."""
        for event in events:
            if isinstance(event, Delivered):
                self.received += len(event.run)
                self.bytes_received += event.size
            if isinstance(event, Delivered | Progressed) and self._rewound.get(event.partition, _NEVER)[0] > number:
                continue
            if isinstance(event, Delivered):
                self.messages += len(event.run)
            elif isinstance(event, Lost | Revoking):
                self.drop(event.partition)
                self._rewound.pop(event.partition, None)
            self._events.append(event)

    def drop(self, partition: Partition) -> None:
        """Drop the messages of a partition. Idempotent."""
        kept: deque[SourceEvent] = deque()
        for event in self._events:
            if not (isinstance(event, Delivered | Progressed) and event.partition is partition):
                kept.append(event)
            elif isinstance(event, Delivered):
                self.messages -= len(event.run)
        self._events = kept

    def waiting(self, paused: frozenset[Partition]) -> int:
        """Number of messages that only wait for room, because their partition is not ``paused``."""
        return self.messages - sum(
            len(event.run) for event in self._events if isinstance(event, Delivered) and event.partition in paused
        )

    def due(self) -> float:
        """Time at which ``rewind`` must act next on the partitions that were paused at its last call; inf = never."""
        if not self._paused_at:
            return math.inf
        crowded = self._is_crowded()
        has = {event.partition for event in self._events if isinstance(event, Delivered)}
        return min(
            (
                -math.inf if crowded else since + REWIND_AFTER
                for partition, since in self._paused_at.items()
                if partition in has or partition not in self.client_paused
            ),
            default=math.inf,
        )

    def rewind(self, room: Room, owned: Set[Partition], number: int, now: float) -> dict[Partition, tuple[int, int]]:
        """Drop the messages of partitions that stay paused, and choose the partitions for which the client is paused.

        A partition counts as staying paused after ``REWIND_AFTER`` seconds, or as soon as the messages of paused
        partitions use up half of the read-ahead.

        Args:
            room: The room on the event loop, with the paused partitions.
            owned: All owned partitions.
            number: Number of the next demand.
            now: Time of the clock, in seconds.

        Returns:
            For every partition rewound so far, the demand of the rewind and the position to read again. Each call
            returns all of them, because a newer demand may replace a demand before the thread has seen it.
        """
        self._paused_at = {partition: self._paused_at.get(partition, now) for partition in room.paused}
        self._is_taking = room.messages > 0
        crowded = self._is_crowded()
        over = {each for each, since in self._paused_at.items() if crowded or now - since >= REWIND_AFTER}
        if room.messages <= 0 and room.paused >= owned:
            # The user paused all partitions, or the consumer has been full for a while.
            self.client_paused = room.paused
        else:
            # A partition that waits for a commit may resume in a moment.
            self.client_paused = (self.client_paused & room.paused) | over
        positions: dict[Partition, int] = {}
        for event in self._events:
            if isinstance(event, Delivered) and event.partition in over:
                positions.setdefault(event.partition, event.run[0].position)
        for partition, position in positions.items():
            self.drop(partition)
            self._rewound[partition] = number, position
        return dict(self._rewound)

    def _is_crowded(self) -> bool:
        if not self._is_taking or not self._paused_at:
            return False
        waiting = [each for each in self._events if isinstance(each, Delivered) and each.partition in self._paused_at]
        messages, size = sum(len(event.run) for event in waiting), sum(event.size for event in waiting)
        return messages > READ_AHEAD // 2 or size > READ_AHEAD_BYTES // 2

    def take(self, room: Room) -> list[SourceEvent]:
        """Remove and return the events that fit into ``room``, in order within each partition.

        Partitions get equal shares of the room. A share that a partition does not fill goes to the other partitions.
        """
        if not self._events:
            return []
        taken: list[SourceEvent] = []
        kept: deque[SourceEvent] = deque()
        shares, size, full = self._shares(room), room.bytes, set[Partition]()
        for event in self._events:
            if isinstance(event, Delivered):
                partition, run = event.partition, event.run
                share = shares.get(partition, 0)
                if share <= 0 or size <= 0 or partition in full:
                    full.add(partition)
                    kept.append(event)
                    continue
                count = min(share, max(1, size * len(run) // max(1, event.size)))
                if len(run) > count:
                    event, rest = _split(event, count)
                    full.add(partition)
                    kept.append(rest)
                shares[partition] = share - len(event.run)
                self.messages -= len(event.run)
                size -= event.size
            elif isinstance(event, Progressed) and event.partition in full:
                kept.append(event)
                continue
            taken.append(event)
        self._events = kept
        return taken

    def _shares(self, room: Room) -> dict[Partition, int]:
        """Number of messages of each partition that fit.

        Room that a partition does not need goes to the other partitions.
        """
        available: dict[Partition, int] = {}
        for event in self._events:
            if isinstance(event, Delivered) and not room.closed_to(event.partition):
                available[event.partition] = available.get(event.partition, 0) + len(event.run)
        left, shares = max(0, room.messages), {}
        for sharing, partition in zip(
            range(len(available), 0, -1), sorted(available, key=available.__getitem__), strict=True
        ):
            shares[partition] = min(available[partition], left // sharing)
            left -= shares[partition]
        return shares


def _split(event: Delivered, count: int) -> tuple[Delivered, Delivered]:
    first, rest = event.run[:count], event.run[count:]
    size = sum(message.size for message in first)
    return Delivered(event.partition, first, size), Delivered(event.partition, rest, event.size - size)
