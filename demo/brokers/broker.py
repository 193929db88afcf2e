"""The parent's view of a broker: topics or streams, publishing, the backlog of the consumers, dead letters."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from demo.events import Event
from demo.ledger import Step
from demo.membership import Snapshot
from lanes.history.recorder import Recorder
from lanes.queues.partitioned import PartitionedQueue

Published = Callable[[int], Awaitable[None]]
"""Callback that ``Broker.publish`` calls repeatedly, with the number of events of this call confirmed so far."""


@dataclass(frozen=True, kw_only=True)
class Left:
    """The backlog of the consumers. A broker that stores only positions reports 0 unacknowledged messages.

    Attributes:
        pending: Number of undelivered messages; on Kafka the number of offsets at or above the committed positions.
        unacknowledged: Number of delivered, unacknowledged messages.
        floor: Position below which every message is acknowledged; on Kafka the sum of the committed positions.
    """

    pending: int
    unacknowledged: int
    floor: int


class Broker(Protocol):
    """The topics or streams of one run on one server. Runs on asyncio only.

    ``left``, ``count_dead_letters`` and ``dead_letters`` raise ``NoAnswer`` while the server is unreachable. On
    JetStream, the three methods raise ``DemoError`` if the server refuses the request.

    Attributes:
        stream: Name of the stream or topic of the events.
        durable: Name of the durable consumer, the group or the cohort that reads the events.
        dead_subject: Subject or topic of the dead letters.
        queue: The events' queue: topics, or on JetStream subjects without their last token, the case.
    """

    stream: str
    durable: str
    dead_subject: str
    queue: PartitionedQueue

    @property
    def connected(self) -> bool:
        """Whether the server is reachable, by the client's connection or by the latest answer."""

    async def open(self) -> None:
        """Connect, and create the topics or streams of the run. Raises ``LanesError`` if that fails."""

    async def close(self) -> list[str]:
        """Remove the run's topics or streams, and disconnect. Return the remaining names. Idempotent."""

    async def publish(self, events: Sequence[Event], history: Recorder, published: Published) -> None:
        """Publish the events in order after the events of earlier calls, each exactly once, and record them.

        The call waits for an unreachable server, on Kafka for at most 5 minutes. Raises ``DemoError`` after that time,
        or if the server refuses an event.
        """

    async def left(self) -> Left | None:
        """Return the backlog; None before the creation of a consumer."""

    async def count_dead_letters(self) -> int:
        """Return the number of dead letters."""

    async def dead_letters(self) -> list[Step]:
        """Return case and step of the event of each dead letter."""


@runtime_checkable
class GroupBroker(Broker, Protocol):
    """A broker for several members. ``partitions`` is the number of partitions or pieces that the members share."""

    partitions: int

    async def group(self) -> Snapshot:
        """Return the group's state at the broker. Raises ``NoAnswer`` if the broker does not answer."""
