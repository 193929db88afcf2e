"""Reading ahead of what there is room for, so that partitions share the room.

The client has one queue, in which what was fetched of a partition lies together: thousands of messages of one, then
of the next. Taken as they come, one partition after the other would be handled alone, with as few handlers at once as
it has keys.
"""

from __future__ import annotations

from typing import Final

from lanes.source import Delivered
from lanes_kafka.client.group import Group
from lanes_kafka.client.requests import Want

AHEAD: Final = 20_000
"""Messages that are read beside what there is room for, at most, where several partitions are read; what was read of
paused partitions, until it is forgotten, is among them."""

AHEAD_BYTES: Final = 8 * 1024 * 1024
"""Their bytes, roughly: it goes by the size of a message of late."""


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
