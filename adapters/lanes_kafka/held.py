"""Events that have come from the thread that owns the client and are not delivered yet, on the event loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from lanes.core.types import Partition, Room
from lanes.source import Delivered, Lost, Progressed, Revoking, SourceEvent


class Held:
    """In the order they came. At most what was asked for while there was room for it, plus a few messages that came
    beside answers of the broker."""

    def __init__(self) -> None:
        self._events: deque[SourceEvent] = deque()
        self._rewound: dict[Partition, int] = {}

    def __bool__(self) -> bool:
        return bool(self._events)

    def add(self, events: Sequence[SourceEvent], number: int) -> None:
        """Hold what was read for request ``number``: what was read before its partition was rewound comes again."""
        for event in events:
            if isinstance(event, Delivered | Progressed) and self._rewound.get(event.partition, 0) > number:
                continue
            if isinstance(event, Lost | Revoking):
                self.drop(event.partition)
                self._rewound.pop(event.partition, None)
            self._events.append(event)

    def drop(self, partition: Partition) -> None:
        """Deliver nothing of a partition any more. Idempotent."""
        if any(isinstance(event, Delivered | Progressed) and event.partition is partition for event in self._events):
            self._events = deque(
                event
                for event in self._events
                if not (isinstance(event, Delivered | Progressed) and event.partition is partition)
            )

    def rewind(self, paused: frozenset[Partition], number: int) -> dict[Partition, int]:
        """Forget the messages of partitions that are paused; returns where each is to be read from again, by request
        ``number``. So little is kept for what may stay paused for long."""
        positions: dict[Partition, int] = {}
        for event in self._events:
            if isinstance(event, Delivered) and event.partition in paused:
                positions.setdefault(event.partition, event.run[0].position)
        for partition in positions:
            self.drop(partition)
            self._rewound[partition] = number
        return positions

    def take(self, room: Room) -> list[SourceEvent]:
        """What may be delivered into ``room`` now, in order."""
        taken: list[SourceEvent] = []
        kept: deque[SourceEvent] = deque()
        messages, size, behind = room.messages, room.bytes, set[Partition]()
        for event in self._events:
            if isinstance(event, Delivered):
                partition, run = event.partition, event.run
                if messages <= 0 or size <= 0 or partition in behind or partition in room.paused:
                    behind.add(partition)
                    kept.append(event)
                    continue
                if len(run) > messages:
                    event, rest = _split(event, messages)
                    behind.add(partition)
                    kept.append(rest)
                messages -= len(event.run)
                size -= event.size
            elif isinstance(event, Progressed) and event.partition in behind:
                kept.append(event)
                continue
            taken.append(event)
        self._events = kept
        return taken


def _split(event: Delivered, count: int) -> tuple[Delivered, Delivered]:
    first, rest = event.run[:count], event.run[count:]
    size = sum(message.size for message in first)
    return Delivered(event.partition, first, size), Delivered(event.partition, rest, event.size - size)
