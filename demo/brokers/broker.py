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
"""Function that takes the number of confirmed events of a call, several times during the call."""


@dataclass(frozen=True, kw_only=True)
class Left:
    """The backlog of the consumers. A broker that stores only positions reports 0 unacknowledged messages.

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
        """Whether the server answers, by the latest knowledge."""

    async def open(self) -> None:
        """Connect, and create the topics or streams of the run. Raises ``LanesError`` if that fails."""

    async def close(self) -> list[str]:
        """Remove the topics or streams of the run, and disconnect. Return the names of those that stay. Idempotent."""

    async def publish(self, events: Sequence[Event], history: Recorder, published: Published) -> None:
        """Publish the events behind those of earlier calls, in their order, each exactly once, and record them.

        Waits for a server that is gone, for as long as it takes; raises ``DemoError`` when it refuses an event.
        """

    async def left(self) -> Left | None:
        """Return the backlog, or None before the first consumer."""

    async def count_dead_letters(self) -> int:
        """Return the number of dead letters."""

    async def dead_letters(self) -> list[Step]:
        """Return the events in the dead letters."""


@runtime_checkable
class GroupBroker(Broker, Protocol):
    """A broker for several members. ``partitions`` is the number of partitions that the members share."""

    partitions: int

    async def group(self) -> Snapshot:
        """Return the group's state at the broker. Raises ``NoAnswer``."""
