"""What the parent needs of a broker: topics or streams, publishing, what the consumers have left, dead letters."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from demo.events import Event
from demo.ledger import Step
from demo.membership import Snapshot
from lanes.history.recorder import Recorder

Published = Callable[[int], Awaitable[None]]
"""Told again and again how many events of a call are confirmed."""


@dataclass(frozen=True, kw_only=True)
class Left:
    """What the consumers have left: never delivered, and delivered but not acknowledged.

    ``floor``: what everything below is acknowledged. A broker that knows positions alone has nothing unacknowledged.
    """

    pending: int
    unacknowledged: int
    floor: int


class Broker(Protocol):
    """One run's place on one server; asyncio only.

    ``stream`` is where the events are, ``durable`` who reads them there, ``dead_subject`` where dead letters go: what
    a worker is told. Questions raise ``NoAnswer`` while the server is gone, and ``DemoError`` for what will not pass.
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
        """What the consumers have left; None before there is one."""

    async def count_dead_letters(self) -> int:
        """How many dead letters there are."""

    async def dead_letters(self) -> list[Step]:
        """The events in the dead letters."""


@runtime_checkable
class GroupBroker(Broker, Protocol):
    """One that several members read from together. ``partitions``: what they share."""

    partitions: int

    async def group(self) -> Snapshot:
        """What the broker knows of the group now. Raises ``NoAnswer``."""
