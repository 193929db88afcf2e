"""Messages made in advance, and a source that only delivers the messages.

Figures over the source measure `lanes` and no broker.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Final, Literal

import anyio
import anyio.lowlevel

from lanes.core.types import Message, Partition, PartitionId, Room, Settlement
from lanes.source import Assigned, Delivered, Exhausted, SourceEvent, SourceTraits

SIZE: Final = 100
ZIPF: Final = 1.1

Traffic = Literal["uniform", "zipf", "turns"]


class NoReader:
    """The reader of messages without content."""

    def value(self, raw: object) -> bytes:
        return b""

    def headers(self, raw: object) -> Sequence[tuple[str, bytes]]:
        return ()

    def subject(self, raw: object) -> str:
        return ""


def new_partition(floor: int | None = None) -> Partition:
    """Return a new partition. With a ``floor`` the partition belongs to a source that commits."""
    return Partition(PartitionId("bench", 0), NoReader(), floor=floor)


def messages_of(partition: Partition, count: int, keys: int, traffic: Traffic = "uniform") -> list[Message]:
    """Return ``count`` messages over ``keys`` keys, in the same order every time."""
    # Each message has a key object of its own, as from a broker, so no key was hashed before.
    return [
        Message(partition, position, b"key-%d" % key, SIZE, None, None)
        for position, key in enumerate(keys_of(count, keys, traffic))
    ]


def keys_of(count: int, keys: int, traffic: Traffic) -> Sequence[int]:
    """Return the key numbers of ``count`` messages.

    Args:
        count: Number of messages.
        keys: Number of keys.
        traffic: ``uniform`` = the draw gives each key the same probability. ``zipf`` = the draw selects the n-th key
            n**-1.1 times as often as the first key. ``turns`` = the keys alternate, so all keys can be busy until the
            end.

    Returns:
        The key numbers, in the order of the messages.
    """
    if traffic == "turns":
        return [number % keys for number in range(count)]
    chance = random.Random(count)
    if traffic == "uniform":
        return [chance.randrange(keys) for _ in range(count)]
    weights = [number**-ZIPF for number in range(1, keys + 1)]
    return chance.choices(range(keys), weights, k=count)


def runs_of(messages: Sequence[Message], batch: int) -> list[list[Message]]:
    """Return the messages in runs of ``batch``."""
    return [list(messages[start : start + batch]) for start in range(0, len(messages), batch)]


class FiniteSource:
    """A source that delivers ``count`` messages in runs of at most ``batch``, as room allows, and then ends.

    Args:
        count: Number of messages.
        keys: Number of keys.
        batch: Maximum number of messages in a delivery.
        traffic: Share of each key in the traffic.
        commits: Whether the source commits one position instead of settling each message.
        per_second: Maximum number of messages a second; None = no limit.

    Attributes:
        messages: All messages, in order.
        settled: Number of settled messages.
    """

    def __init__(
        self,
        count: int,
        keys: int,
        batch: int,
        traffic: Traffic = "uniform",
        *,
        commits: bool = False,
        per_second: float | None = None,
    ) -> None:
        self.messages = messages_of(new_partition(floor=0 if commits else None), count, keys, traffic)
        self.settled = 0
        self._commits = commits
        self._batch = batch
        self._per_second = per_second
        self._began = 0.0
        self._next = 0
        self._assigned = False

    async def open(self) -> SourceTraits:
        """Do nothing: a source without a broker needs no opening."""
        return SourceTraits(name="bench", settles="cumulative" if self._commits else "individual")

    async def receive(self, room: Room) -> Sequence[SourceEvent]:
        """Return the assignment, the next run, or ``Exhausted``.

        Without room for a run, wait until a cancellation of the call.
        """
        partition = self.messages[0].partition
        if not self._assigned:
            self._assigned = True
            self._began = time.perf_counter()
            return [Assigned(partition)]
        if self._next == len(self.messages):
            return [Exhausted()]
        count = min(room.messages, self._batch)
        if count <= 0 or partition in room.paused:
            await anyio.sleep_forever()
        if self._per_second is None:
            # A source that never suspends would starve the workers. A real source waits for a socket.
            await anyio.lowlevel.checkpoint()
        else:
            last = min(self._next + self._batch, len(self.messages))
            await anyio.sleep(max(0.0, self._began + last / self._per_second - time.perf_counter()))
        run = self.messages[self._next : self._next + count]
        self._next += len(run)
        return [Delivered(partition, run, SIZE * len(run))]

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        """Count the settled messages."""
        for settlement in settlements:
            if settlement.floor is None:
                self.settled += len(settlement.messages)
            else:
                # Positions count from 0 without a gap.
                self.settled = settlement.floor

    async def extend(self, messages: Sequence[Message]) -> None:
        """Do nothing: no timer runs."""

    async def release(self, partition: Partition) -> None:
        """Do nothing, because no other owner waits."""

    async def aclose(self) -> None:
        """Do nothing: a source without a broker needs no closing."""
