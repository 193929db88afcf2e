"""Represents one ownership of a partition: its lock, its epoch, and the messages that wait for ``receive``."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from lanes.clock import monotonic
from lanes.core.types import Message, Partition, Room
from lanes.ownership import Held, State, StateKey
from lanes.source import Delivered
from lanes_postgres.log.reading import READER, StoredMessage


def lock_name(schema: str, log_name: str, subscription: str, number: int) -> str:
    """Return the name of the lock of a partition."""
    names = (name.replace("%", "%25").replace("/", "%2F") for name in (schema, log_name, subscription))
    return "/".join([*names, str(number)])


@dataclass(eq=False, repr=False)
class Owned:
    """The ownership of a partition by this member. Only one event loop uses the object, and no call waits.

    Attributes:
        number: Number of the partition.
        partition: Assignment that the consumer receives for this ownership.
        held: Lock of the partition.
        key: Name of the partition's state.
        epoch: Epoch of this ownership.
        floor: Last stored position, below which all messages are finished.
        settled: Whether the consumer has settled a message in this ownership.
        read: Next position to read from the log.
        since: Time of the acquisition, in seconds of ``lanes.clock.monotonic``.
        end: The last known end of the partition.
        waiting: Read messages that wait for their delivery.
        revoked: Whether the source has revoked the partition from the consumer.
        over: Whether the ownership has ended by a loss or a release.
    """

    number: int
    partition: Partition
    held: Held
    key: StateKey
    epoch: int
    floor: int
    read: int
    since: float
    end: int = 0
    settled: bool = False
    waiting: deque[StoredMessage] = field(default_factory=deque)
    revoked: bool = False
    over: bool = False

    @classmethod
    def begin(cls, key: StateKey, held: Held, state: State, end: int) -> Self:
        """Return the ownership of a state that the member has just claimed."""
        partition = Partition(
            key.partition,
            READER,
            key.incarnation,
            floor=state.floor,
            completed=[(start, end) for start, end in state.completed],
            deadline=held.deadline,
            fencing_token=state.epoch,
        )
        return cls(
            number=key.partition.number,
            partition=partition,
            held=held,
            key=key,
            epoch=state.epoch,
            floor=state.floor,
            read=state.floor,
            since=monotonic(),
            end=max(end, state.floor),
        )

    @property
    def unit(self) -> int:
        """Number of the piece, or of the partition if the member owns whole partitions."""
        return self.partition.id.piece or self.number

    def __repr__(self) -> str:
        return f"<Owned {self.partition.id} epoch {self.epoch}, {len(self.waiting)} messages waiting>"

    def lost(self) -> str:
        """Return the reason why the member may not own the partition any more; "" = the member owns the partition."""
        if self.held.lost:
            return self.held.lost
        deadline = self.held.deadline
        now = monotonic()
        if now >= self.partition.deadline:
            # The runtime may have treated the partition as lost already, so a later renewal has no effect.
            return "its lock was not renewed in time"
        if deadline > self.partition.deadline:
            self.partition.deadline = deadline
        return ""

    def stored(self, state: State) -> None:
        """Record a stored position."""
        # Several lists of ranges may represent the same finished messages, because ranges may be adjacent.
        before = _finished(self.partition.floor or 0, self.partition.completed)
        self.settled = self.settled or _finished(state.floor, state.completed) > before
        self.floor = max(self.floor, state.floor)

    def got_on(self) -> bool:
        """Return whether the member has settled a message in this ownership, or has no message left."""
        return self.settled or self.floor >= self.end

    def rest(self) -> None:
        """Stop the delivery of messages, and drop the waiting messages. Idempotent."""
        if self.waiting:
            self.read = self.waiting[0].position
            self.waiting.clear()

    def take(self, room: Room) -> Delivered | None:
        """Remove and return waiting messages within ``room``; None = no message.

        The last message may exceed the bytes.
        """
        run: list[Message] = []
        size = 0
        while self.waiting and len(run) < room.messages and size < room.bytes:
            stored = self.waiting.popleft()
            length = stored.size
            run.append(Message(self.partition, stored.position, stored.key, length, stored, None))
            size += length
        return Delivered(self.partition, run, size) if run else None


def _finished(floor: int, completed: Sequence[tuple[int, int]]) -> int:
    """Return a number that increases with each message that the consumer finishes."""
    return floor + sum(end - start for start, end in completed)
