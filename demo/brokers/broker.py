"""The parent's view of a broker: topics or streams, publishing, the backlog of the consumers, dead letters."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from demo.events import Event
from demo.ledger import Step
from demo.membership import Snapshot
from lanes.history.recorder import Recorder

Published = Callable[[int], Awaitable[None]]
"""A callback that receives how many events of a call are confirmed, several times a call."""


@dataclass(frozen=True, kw_only=True)
class Left:
    """The backlog of the consumers. A broker that stores positions alone reports nothing unacknowledged.

    Attributes:
        pending: Number of messages that were never delivered.
        unacknowledged: Number of messages that were delivered and not acknowledged.
        floor: Position below which every message is acknowledged.
    """

    pending: int
    unacknowledged: int
    floor: int


class Broker(Protocol):
    """One run's place on one server; asyncio only.

    ``stream`` holds the events, ``durable`` reads them, and ``dead_subject`` takes the dead letters; a worker receives
    all three. A request raises ``NoAnswer`` while the server is gone, and ``DemoError`` for a permanent failure.
    """

    stream: str
    durable: str
    dead_subject: str

    @property
    def connected(self) -> bool:
        """Whether the server is there, as far as is known."""

    async def open(self) -> None:
        """Connect and make what the run needs. Raises ``LanesError`` when that cannot be."""

    async def close(self) -> list[str]:
        """Remove what ``open`` made, and disconnect; the names of what stayed. Idempotent."""

    async def publish(self, events: Sequence[Event], history: Recorder, published: Published) -> None:
        """Publish the events behind those of earlier calls, in their order, each exactly once, and record them.

        Waits for a server that is gone, for as long as it takes; raises ``DemoError`` when it refuses an event.
        """

    async def left(self) -> Left | None:
        """Return the backlog, or None before the first consumer."""

    async def count_dead_letters(self) -> int:
        """How many dead letters there are."""

    async def dead_letters(self) -> list[Step]:
        """The events in the dead letters."""


@runtime_checkable
class GroupBroker(Broker, Protocol):
    """A broker that several members read from. ``partitions``: how many they share."""

    partitions: int

    async def group(self) -> Snapshot:
        """Return the group as the broker knows it now. Raises ``NoAnswer``."""
