"""One Kafka client and the process it is in, as data: what it believes to own, has fetched, and was told.

Nothing here knows the broker; ``memsource.kafka.coordinator`` and ``memsource.kafka.broker`` change it. Times are in
seconds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from lanes.clock import Clock
from lanes.core.types import NEVER, Partition
from memsource.memory.group import Notice
from memsource.memory.topic import Record

__all__ = [
    "Callback",
    "Client",
    "ClientPartition",
    "Code",
    "Commit",
    "KafkaFailure",
    "OffsetReset",
    "RebalanceProtocol",
]


RebalanceProtocol = Literal["eager", "cooperative", "848"]
"""``eager`` and ``cooperative`` are the classic protocol; ``848`` is ``group.protocol=consumer`` (KIP-848)."""

OffsetReset = Literal["earliest", "latest", "error"]
"""Where to read when there is no committed position, or one that the log does not reach (``auto.offset.reset``)."""

Code = Literal[
    "OFFSET_METADATA_TOO_LARGE",
    "UNKNOWN_MEMBER_ID",
    "UNKNOWN_TOPIC_OR_PART",
    "_AUTO_OFFSET_RESET",
    "_FATAL",
    "_MAX_POLL_EXCEEDED",
    "_WAIT_COORD",
]


class KafkaFailure(Exception):
    """What a client is told of an error: raised by a call, or among the events of a poll. ``code`` is Kafka's."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


class Commit(NamedTuple):
    """What is committed of a partition: ``offset`` is next to read; ``metadata`` is the client's."""

    offset: int
    metadata: str = ""

    def units(self) -> int:
        """UTF-16 units of the metadata as a client sends it, with its NUL.

        Raises for what it cannot send: ``ValueError`` for an offset below 0 or a NUL in metadata, ``TypeError`` for
        metadata that is no ``str``, ``UnicodeEncodeError`` for a lone surrogate.
        """
        if self.offset < 0:
            raise ValueError(f"offset={self.offset}: a position to read next is 0 or more")
        if not isinstance(self.metadata, str):
            raise TypeError(f"commit metadata must be a str, not {type(self.metadata).__name__}")
        if "\0" in self.metadata:
            raise ValueError("commit metadata has a NUL: the client would end it there")
        return len(self.metadata.encode("utf-16-le")) // 2 + 1


class Callback(NamedTuple):
    """A rebalance callback; ``lost`` may name nothing when all was about to be revoked already."""

    kind: Literal["assign", "revoke", "lost"]
    partitions: tuple[int, ...]


class ClientPartition:
    """A partition in the eyes of a client.

    ``position``: next to hand out. ``fetched``: next to fetch; in between is the ``queue``. ``revoking``: asked for.
    ``silent``: it had nowhere to read, and reads nothing any more. ``partition``: what a source made of it,
    None once it was taken.
    """

    __slots__ = ("fetched", "partition", "position", "queue", "revoking", "silent")

    def __init__(self, position: int = 0, *, silent: bool = False) -> None:
        self.position = self.fetched = position
        self.queue: deque[Record] = deque()
        self.revoking = False
        self.silent = silent
        self.partition: Partition | None = None

    def purge(self) -> None:
        """Forget what was fetched and not handed out. Idempotent."""
        self.queue.clear()
        self.fetched = self.position

    def take(self, messages: int, size: int) -> list[Record]:
        """At most ``messages`` that were fetched; the last one is that which reaches ``size`` bytes."""
        run: list[Record] = []
        while self.queue and len(run) < messages and size > 0:
            record = self.queue.popleft()
            run.append(record)
            size -= record.size
            self.position = record.position + 1
        if not self.queue:
            # Behind the last one only a gap was read, or the position was reset.
            self.position = self.fetched
        return run


@dataclass(eq=False, slots=True, repr=False)
class Client:
    """``name`` is the user's; ``id`` the coordinator's, "" before the first join. ``instance``: a static member's.

    ``polling``: somebody waits in a poll, so the process serves its client. ``silent_since``: no heartbeat since then.
    ``exceeded``: it has left, or fallen silent, because nobody polled. ``rejoining``: it is to join with its next poll.
    ``hears_at``: when its next heartbeat brings what the coordinator has decided; ``informed``: it has come;
    ``notices``: what came and was not called back yet. ``releases``: what it could not give back yet.
    ``cut_off``: the broker was down for a session.
    ``paused`` belongs to the client, not to an assignment: it outlives ownership.
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
        """Whether its process takes steps."""
        return not self.crashed and self.frozen_until is None

    def fail(self, failure: KafkaFailure) -> None:
        """It can never go on: it owns nothing, and no callback says so."""
        self.fatal = failure
        self.failures.append(failure)
        self.partitions.clear()

    def pause(self, partition: int) -> None:
        """Hand nothing of it out, and drop what was fetched. Whoever owns it, and until ``resume``. Idempotent."""
        self.paused.add(partition)
        if partition in self.partitions:
            self.partitions[partition].purge()

    def resume(self, partition: int) -> None:
        """Hand it out again. Idempotent."""
        self.paused.discard(partition)
