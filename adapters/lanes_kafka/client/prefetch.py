"""The only buffer between a client and the engine, shared by the messages of all partitions.

The queue of the client contains thousands of messages of one partition, then thousands of the next partition. If the
engine received messages in the order of the queue, handlers would run for one partition at a time. ``Prefetched`` keeps
messages on the event loop, and divides the room among the partitions. ``credit`` bounds the messages that the client's
thread reads. The thread keeps no messages itself.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence, Set
from typing import Final, NamedTuple

from lanes.core.types import Partition, Room
from lanes.source import Assigned, Delivered, Lost, Progressed, Revoking, SourceEvent

READ_AHEAD: Final = 20_000
"""Maximum number of messages that the thread reads beyond the room if it reads several partitions. The number includes
prefetched messages of paused partitions."""

READ_AHEAD_BYTES: Final = 8 * 1024 * 1024
"""Maximum size in bytes of the messages that the thread reads beyond the room. One message may exceed this size."""

REWIND_AFTER: Final = 1.0
"""Seconds of a pause after which the source drops the prefetched messages of the partition. The client then pauses the
partition too. A pause and a rewind discard fetched messages, which the client must fetch again later.
"""

_NEVER: Final = (0, 0)


class Credit(NamedTuple):
    """Upper limit of the messages that the thread reads in total since its start.

    A total needs no correction for messages in transit to the loop.

    Attributes:
        messages: Number of messages.
        bytes: Size of the messages. The last message may exceed the size.
    """

    messages: int
    bytes: int


class Prefetched:
    """Undelivered events from the client's thread, in the order of arrival. Only the event loop uses the object.

    Attributes:
        messages: Number of prefetched messages.
        bytes: Size of the prefetched messages.
        received: Messages and bytes that the thread has added since the start, including dropped messages.
        granted: The last credit that the loop gave the thread.
        assigned: Number of assignments added since the start.
        client_paused: Partitions that the thread tells the client to pause.
    """

    def __init__(self) -> None:
        self.messages = self.bytes = self.assigned = 0
        self.received = self.granted = Credit(0, 0)
        self.client_paused: frozenset[Partition] = frozenset()
        self._events: deque[SourceEvent] = deque()
        self._rewound: dict[Partition, tuple[int, int]] = {}
        self._paused_at: dict[Partition, float] = {}
        self._is_taking = False
        # Whether an assignment is new, and whether the thread is still reading the first messages after the assignment.
        self._is_new = self._is_filling = False

    def add(self, events: Sequence[SourceEvent], number: int, *, filling: bool = False) -> None:
        """Add events that the thread read for demand ``number``, except events before a rewind of their partition.

        ``filling``: whether the thread continues to read at once. The thread then calls again, even without a message.
        """
        self._is_new = self._is_new and (filling or not self._is_filling)
        self._is_filling = filling
        for event in events:
            if isinstance(event, Delivered):
                self.received = Credit(self.received.messages + len(event.run), self.received.bytes + event.size)
                self._is_new = self._is_new and filling
            if isinstance(event, Delivered | Progressed) and self._rewound.get(event.partition, _NEVER)[0] > number:
                continue
            if isinstance(event, Delivered):
                self.messages += len(event.run)
                self.bytes += event.size
            elif isinstance(event, Assigned):
                self.assigned += 1
                self._is_new = True
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
                self._remove(event)
        self._events = kept

    def _remove(self, event: Delivered) -> None:
        self.messages -= len(event.run)
        self.bytes -= event.size

    def credit(self, room: Room, owned: Set[Partition]) -> Credit:
        """Return the credit of the thread for a room on the event loop.

        Args:
            room: The room on the event loop, with the paused partitions.
            owned: All owned partitions.

        Returns:
            The credit, at least the total of received messages.
        """
        messages, size = self.received
        paused = room.paused
        reading = len(owned - paused) if paused else len(owned)
        if paused and not reading:
            return self.received
        aside, bytes_aside = self._aside(paused)
        waiting, bytes_waiting = self.messages - aside, self.bytes - bytes_aside
        places = max(0, room.messages)
        # While handlers keep up, the thread reads no further than the room, except in the first read after an
        # assignment.
        ahead = reading > 1 and (places == 0 or self._is_new)
        if waiting and waiting >= places + (READ_AHEAD // 2 if ahead else 0):
            return self.received
        most = places + (READ_AHEAD if ahead else 0) - waiting
        # Prefetched messages of paused partitions use up the read-ahead until ``rewind`` drops them.
        most = min(most, places + READ_AHEAD - waiting - aside)
        most_bytes = max(0, room.bytes) + (READ_AHEAD_BYTES if ahead else 0) - bytes_waiting
        most_bytes = min(most_bytes, max(0, room.bytes) + READ_AHEAD_BYTES - bytes_waiting - bytes_aside)
        return Credit(messages + max(0, most), size + max(0, most_bytes))

    def needs_credit(self, credit: Credit) -> bool:
        """Return whether to send this credit now, because the thread has used half of its former credit."""
        return _is_due(credit.messages, self.granted.messages, self.received.messages) or _is_due(
            credit.bytes, self.granted.bytes, self.received.bytes
        )

    def _aside(self, paused: frozenset[Partition]) -> tuple[int, int]:
        """Return the number and the size of the prefetched messages of paused partitions."""
        if not paused or not self._events:
            return 0, 0
        found = [event for event in self._events if isinstance(event, Delivered) and event.partition in paused]
        return sum(len(event.run) for event in found), sum(event.size for event in found)

    def due(self) -> float:
        """Return the time at which partitions paused at the last ``rewind`` need another ``rewind``; inf = never."""
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
        """Drop the messages of partitions that stay paused, and choose the partitions that the client pauses.

        A partition counts as staying paused after ``REWIND_AFTER`` seconds, or when the messages of paused partitions
        fill half of the read-ahead.

        Args:
            room: The room on the event loop, with the paused partitions.
            owned: All owned partitions.
            number: Number of the next demand.
            now: Time of the clock, in seconds.

        Returns:
            For every rewound partition, the demand of the rewind and the position from which to read again. Each call
            returns all rewinds, because a newer demand may replace a demand that the thread has not read.
        """
        self._paused_at = {partition: self._paused_at.get(partition, now) for partition in room.paused}
        self._is_taking = room.messages > 0
        crowded = self._is_crowded()
        over = {each for each, since in self._paused_at.items() if crowded or now - since >= REWIND_AFTER}
        if room.messages <= 0 and room.paused >= owned:
            # The user has paused all partitions, or the consumer has had no room for a while.
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
        """Remove and return the events that fit into ``room``. The events of each partition keep their order.

        Partitions get equal shares of the room. The other partitions use any part of a share that a partition leaves
        free.
        """
        if not self._events:
            return []
        if self._is_new and self._is_filling and self._is_granted():
            # Without messages of the other partitions, the first partition would get the whole room.
            room = Room(0, 0, room.paused)
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
                self._remove(event)
                size -= event.size
            elif isinstance(event, Progressed) and event.partition in full:
                kept.append(event)
                continue
            taken.append(event)
        self._events = kept
        return taken

    def _is_granted(self) -> bool:
        received, granted = self.received, self.granted
        return received.messages < granted.messages and received.bytes < granted.bytes

    def _shares(self, room: Room) -> dict[Partition, int]:
        """Return the number of messages of each partition that fit.

        The other partitions use any room that a partition does not need.
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


def _is_due(wanted: int, granted: int, received: int) -> bool:
    left = max(0, granted - received)
    return left < wanted - received and left <= (wanted - received) // 2


def _split(event: Delivered, count: int) -> tuple[Delivered, Delivered]:
    first, rest = event.run[:count], event.run[count:]
    size = sum(message.size for message in first)
    return Delivered(event.partition, first, size), Delivered(event.partition, rest, event.size - size)
