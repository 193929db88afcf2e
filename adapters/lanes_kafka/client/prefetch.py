"""Reading ahead of what there is room for, so that partitions share the room.

The client has one queue, in which what was fetched of a partition lies together: thousands of messages of one, then
of the next. Taken as they come, one partition after the other would be handled alone, with as few handlers at once as
it has keys.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence, Set
from typing import Final

from lanes.core.types import Partition, Room
from lanes.source import Delivered, Lost, Progressed, Revoking, SourceEvent
from lanes_kafka.client.group import Group
from lanes_kafka.client.mailbox import Want

AHEAD: Final = 20_000
"""Messages that are read beside what there is room for, at most, where several partitions are read; what was read of
paused partitions, until it is forgotten, is among them."""

AHEAD_BYTES: Final = 8 * 1024 * 1024
"""Their bytes, roughly: it goes by the size of a message of late."""

REWIND_AFTER: Final = 1.0
"""Seconds that a partition is not to be delivered before the client is paused, and what was read of it is forgotten:
both throw away what was fetched, and reading it again takes its time."""

_NEVER: Final = (0, 0)


class Ahead:
    """What was read and is not told yet, and how much more is to be read; used in the thread that owns the client."""

    def __init__(self) -> None:
        self._gathered: list[Delivered] = []
        self._count = 0
        self._told = 0
        self._rounds = self._looked = -1

    def __bool__(self) -> bool:
        return bool(self._gathered)

    def wanted(self, want: Want, group: Group, average: float) -> int:
        """How many messages of ``average`` bytes are to be read now of what the group owns; 0 or more."""
        others = len(group.owned) - len(want.paused)
        if not others and want.paused:
            return 0
        several = others > 1
        # Handlers that keep up need no choice, but for the first look at what there is.
        ahead = several and (want.messages <= 0 or group.rounds != self._looked)
        self._rounds = group.rounds
        # What is on its way to the loop is not among what it held when it asked.
        held = want.held + self._told - want.received
        room = max(0, want.messages)
        if held and held >= room + (AHEAD // 2 if ahead else 0):
            return 0
        size = max(0, want.bytes) + (AHEAD_BYTES if ahead else 0)
        most = min(room + (AHEAD if ahead else 0), int(size / average)) - held
        # What is kept of paused partitions, until it is forgotten, takes its place of what may be read ahead.
        most = min(most, room + AHEAD - held - want.aside) - self._count
        # A message that is larger than all the room comes alone.
        return max(most, 1 if room and not held and not self._count else 0)

    def gather(self, events: list[Delivered]) -> None:
        """Keep these until they are told."""
        self._gathered += events
        self._count += sum(len(event.run) for event in events)

    def taken(self) -> list[Delivered]:
        """What is to be told now, in the order it was read."""
        events, self._gathered = self._gathered, []
        self._told += self._count
        self._count = 0
        if events:
            self._looked = self._rounds
        return events


class Held:
    """In the order they came: what was read ahead, plus a few messages that came beside answers of the broker.

    ``messages``: how many of them there are; ``received``: how many were ever added. ``resting``: the partitions that
    the client is to be paused for.
    """

    def __init__(self) -> None:
        self.messages = 0
        self.received = 0
        self.resting: frozenset[Partition] = frozenset()
        self._events: deque[SourceEvent] = deque()
        self._rewound: dict[Partition, tuple[int, int]] = {}
        self._paused_at: dict[Partition, float] = {}
        self._is_taking = False

    def __bool__(self) -> bool:
        return bool(self._events)

    def add(self, events: Sequence[SourceEvent], number: int) -> None:
        """Hold what was read for request ``number``: what was read before its partition was rewound comes again."""
        for event in events:
            if isinstance(event, Delivered):
                self.received += len(event.run)
            if isinstance(event, Delivered | Progressed) and self._rewound.get(event.partition, _NEVER)[0] > number:
                continue
            if isinstance(event, Delivered):
                self.messages += len(event.run)
            elif isinstance(event, Lost | Revoking):
                self.drop(event.partition)
                self._rewound.pop(event.partition, None)
            self._events.append(event)

    def drop(self, partition: Partition) -> None:
        """Deliver nothing of a partition any more. Idempotent."""
        kept: deque[SourceEvent] = deque()
        for event in self._events:
            if not (isinstance(event, Delivered | Progressed) and event.partition is partition):
                kept.append(event)
            elif isinstance(event, Delivered):
                self.messages -= len(event.run)
        self._events = kept

    def waiting(self, paused: frozenset[Partition]) -> int:
        """How many messages wait for nothing but room."""
        return self.messages - sum(
            len(event.run) for event in self._events if isinstance(event, Delivered) and event.partition in paused
        )

    def due(self) -> float:
        """When ``rewind`` has something to do next, going by what was paused when it was called last; inf: never."""
        if not self._paused_at:
            return math.inf
        crowded = self._is_crowded()
        has = {event.partition for event in self._events if isinstance(event, Delivered)}
        return min(
            (
                -math.inf if crowded else since + REWIND_AFTER
                for partition, since in self._paused_at.items()
                if partition in has or partition not in self.resting
            ),
            default=math.inf,
        )

    def rewind(self, room: Room, owned: Set[Partition], number: int, now: float) -> dict[Partition, tuple[int, int]]:
        """Forget the messages of partitions that are paused for a while, or of all of them where they take what may be
        read ahead for the others, and let the client rest from these.

        Returns of every partition for which that was ever done, by which request, ``number`` for those of now, and
        where it is to be read from again: a request may be replaced before anybody has seen it.
        """
        self._paused_at = {partition: self._paused_at.get(partition, now) for partition in room.paused}
        self._is_taking = room.messages > 0
        crowded = self._is_crowded()
        over = {each for each, since in self._paused_at.items() if crowded or now - since >= REWIND_AFTER}
        if room.messages <= 0 and room.paused >= owned:
            # By the user, or it has been full for a while.
            self.resting = room.paused
        else:
            # One that waits for a commit may go on in a moment.
            self.resting = (self.resting & room.paused) | over
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
        return messages > AHEAD // 2 or size > AHEAD_BYTES // 2

    def take(self, room: Room) -> list[SourceEvent]:
        """What may be delivered into ``room`` now: in order within a partition, and each with an equal share of it as
        far as there is enough of each."""
        if not self._events:
            return []
        taken: list[SourceEvent] = []
        kept: deque[SourceEvent] = deque()
        shares, size, behind = self._shares(room), room.bytes, set[Partition]()
        for event in self._events:
            if isinstance(event, Delivered):
                partition, run = event.partition, event.run
                share = shares.get(partition, 0)
                if share <= 0 or size <= 0 or partition in behind:
                    behind.add(partition)
                    kept.append(event)
                    continue
                count = min(share, max(1, size * len(run) // max(1, event.size)))
                if len(run) > count:
                    event, rest = _split(event, count)
                    behind.add(partition)
                    kept.append(rest)
                shares[partition] = share - len(event.run)
                self.messages -= len(event.run)
                size -= event.size
            elif isinstance(event, Progressed) and event.partition in behind:
                kept.append(event)
                continue
            taken.append(event)
        self._events = kept
        return taken

    def _shares(self, room: Room) -> dict[Partition, int]:
        """How many messages of each partition fit; what one does not need is for those that have more."""
        available: dict[Partition, int] = {}
        for event in self._events:
            if isinstance(event, Delivered) and event.partition not in room.paused:
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
