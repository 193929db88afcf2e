"""One Kafka client and its process as data: its partitions, its prefetched messages, and its notices.

A client has no reference to its broker. ``memsource.kafka.coordinator`` and ``memsource.kafka.broker`` change the
client. Times are in seconds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from lanes.clock import Clock
from lanes.core.types import NEVER, Partition
from memsource.memory.group import Notice
from memsource.memory.topic import Record

RebalanceProtocol = Literal["eager", "cooperative", "848"]
"""``eager`` and ``cooperative`` are the classic protocol; ``848`` is ``group.protocol=consumer`` (KIP-848)."""

OffsetReset = Literal["earliest", "latest", "error"]
"""Position at which a client without a committed position in the log reads (``auto.offset.reset``)."""

Code = Literal[
    "GROUP_AUTHORIZATION_FAILED",
    "ILLEGAL_GENERATION",
    "LEADER_NOT_AVAILABLE",
    "NOT_ENOUGH_REPLICAS",
    "OFFSET_METADATA_TOO_LARGE",
    "TOPIC_AUTHORIZATION_FAILED",
    "UNKNOWN_MEMBER_ID",
    "UNKNOWN_TOPIC_OR_PART",
    "_AUTO_OFFSET_RESET",
    "_FATAL",
    "_MAX_POLL_EXCEEDED",
    "_WAIT_COORD",
]


class KafkaFailure(Exception):
    """An error of a client, raised by a call or returned by a poll.

    Args:
        code: Kafka's name of the error.
        text: The explanation.

    Attributes:
        code: Kafka's name of the error.
    """

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


class Commit(NamedTuple):
    """The commit of a partition.

    Attributes:
        offset: The next position to read, 0 or more.
        metadata: The client's metadata.
    """

    offset: int
    metadata: str = ""

    def units(self) -> int:
        """Count the UTF-16 units of the metadata as a client sends them.

        Returns:
            The number of units, a NUL included.

        Raises:
            ValueError: The offset is below 0, or the metadata contains a NUL.
            TypeError: The metadata is not a ``str``.
            UnicodeEncodeError: The metadata contains a lone surrogate.
        """
        if self.offset < 0:
            raise ValueError(f"offset={self.offset}: the position to read next must be 0 or more")
        if not isinstance(self.metadata, str):
            raise TypeError(f"commit metadata is of type {type(self.metadata).__name__}; must be a str")
        if "\0" in self.metadata:
            raise ValueError("commit metadata contains a NUL, at which a client would end it; remove the NUL")
        return len(self.metadata.encode("utf-16-le")) // 2 + 1


class Callback(NamedTuple):
    """A rebalance callback.

    Attributes:
        kind: Kind of the callback.
        partitions: Numbers of the partitions. At the end of the membership, a callback ``lost`` omits partitions during
            their revocation.
    """

    kind: Literal["assign", "revoke", "lost"]
    partitions: tuple[int, ...]


class ClientPartition:
    """A partition that a client considers its own.

    Args:
        position: The next position to deliver.

    Attributes:
        position: The next position to deliver.
        fetched: The next position to fetch.
        queue: The prefetched messages, between ``position`` and ``fetched``.
        revoking: Whether the partition is in its revocation.
        silent: Whether the partition has no valid position and therefore delivers no message.
        partition: The source's object for the assignment; None before the assignment, and after the loss.
    """

    __slots__ = ("fetched", "partition", "position", "queue", "revoking", "silent")

    def __init__(self, position: int = 0) -> None:
        self.position = self.fetched = position
        self.queue: deque[Record] = deque()
        self.revoking = self.silent = False
        self.partition: Partition | None = None

    def purge(self) -> None:
        """Drop the prefetched messages. Idempotent."""
        self.queue.clear()
        self.fetched = self.position

    def take(self, messages: int, size: int) -> list[Record]:
        """Remove and return at most ``messages`` prefetched messages.

        The message that reaches ``size`` bytes is the last message.
        """
        run: list[Record] = []
        while self.queue and len(run) < messages and size > 0:
            record = self.queue.popleft()
            run.append(record)
            size -= record.size
            self.position = record.position + 1
        if not self.queue:
            # After the last message the client read only a gap, or its position was reset.
            self.position = self.fetched
        return run


@dataclass(eq=False, slots=True, repr=False)
class Client:
    """One client.

    Attributes:
        name: The user's name of the member.
        clock: Clock of the process, in seconds.
        instance: Id of a static member; None = dynamic.
        id: The coordinator's name of the member; empty before the first join.
        joined: Time of the last join.
        partitions: The partitions that the client considers its own, by number.
        paused: Paused partitions, which stay paused when the ownership ends.
        polling: Whether a poll is waiting for messages.
        last_poll: Time of the last poll.
        silent_since: Time from which the session timeout counts; None = the client sends heartbeats.
        frozen_until: Time at which a frozen process runs again; None = the process is not frozen.
        isolated_since: Time from which no request of the client reaches the broker; None = the requests arrive.
        isolated_until: Time from which the requests arrive again.
        deaf: Whether only the connection of this client is dead, while other connections of its process work.
        revoking_since: Time of the oldest revocation; None = no revoked partition.
        hears_at: Time of the next heartbeat whose answer carries a decision of the coordinator.
        informed: Whether a heartbeat has brought a decision since the last poll.
        crashed: Whether the process has ended.
        closing: Whether the close has begun.
        closed: Whether the close has ended.
        exceeded: Whether the client left the group or stopped its heartbeats, because it did not poll.
        cut_off: Whether the broker was down for longer than the session timeout.
        rejoining: Whether the next poll joins the group again.
        fatal: The error that ended the client permanently; None = the client works.
        failures: Errors for the next polls.
        notices: Notices for which no callback has run yet.
        releases: Partitions whose release waits until the process and the broker run.
    """

    name: str
    clock: Clock
    instance: str | None = None
    id: str = ""
    joined: float = 0.0
    partitions: dict[int, ClientPartition] = field(default_factory=dict)
    paused: set[int] = field(default_factory=set)
    polling: bool = False
    last_poll: float = 0.0
    silent_since: float | None = None
    frozen_until: float | None = None
    isolated_since: float | None = None
    isolated_until: float = NEVER
    deaf: bool = False
    revoking_since: float | None = None
    hears_at: float = NEVER
    informed: bool = False
    crashed: bool = False
    closing: bool = False
    closed: bool = False
    exceeded: bool = False
    cut_off: bool = False
    rejoining: bool = False
    fatal: KafkaFailure | None = None
    failures: deque[KafkaFailure] = field(default_factory=deque)
    notices: deque[Notice] = field(default_factory=deque)
    releases: set[int] = field(default_factory=set)

    def __repr__(self) -> str:
        return f"<Client {self.name}: {len(self.partitions)} partitions, {len(self.paused)} paused>"

    @property
    def running(self) -> bool:
        """Whether the process of the client runs."""
        return not self.crashed and self.frozen_until is None

    def fail(self, failure: KafkaFailure) -> None:
        """End the client permanently. The client loses its partitions without a callback."""
        self.fatal = failure
        self.failures.append(failure)
        self.partitions.clear()

    def pause(self, partition: int) -> None:
        """Pause a partition until ``resume``, and drop its prefetched messages. Idempotent."""
        self.paused.add(partition)
        if partition in self.partitions:
            self.partitions[partition].purge()

    def resume(self, partition: int) -> None:
        """Resume a partition. Idempotent."""
        self.paused.discard(partition)
