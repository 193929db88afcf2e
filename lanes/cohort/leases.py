"""The contract between a cohort's membership and what stores its leases: two small Protocols.

``LeaseStore`` keeps a handful of keys under compare-and-set, with a time to live and a fence. ``EpochConsumers`` makes
and deletes the durables of the cohort's partitions, one for each epoch. The membership knows a backend only through
these; every answer that does not come is ``UnknownResult``, and whoever asked reads back what became of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

__all__ = ["Conflict", "ConsumerExists", "Entry", "EpochConsumer", "EpochConsumers", "LeaseStore", "UnknownResult"]


class Entry(NamedTuple):
    """What a key holds: ``revision`` rises with every write of the store; ``value`` = None: deleted or expired.

    A key that was never written, or of which nothing is left, has the revision 0.
    """

    value: bytes | None
    revision: int


class Conflict(Exception):
    """A compare-and-set did not hold: the key, or the fence, has another revision. Nothing was written."""


class UnknownResult(Exception):
    """No answer in time: what was asked for may have happened, may happen later, or never."""


class ConsumerExists(Exception):
    """A strict create met what is there: ``nonce`` of the consumer of that name, None where another name overlaps."""

    def __init__(self, message: str, *, nonce: str | None) -> None:
        super().__init__(message)
        self.nonce = nonce


class LeaseStore(Protocol):
    """Keys of one cohort. Every read is linearizable: of the leader, never of a replica or a cache.

    Raises ``UnknownResult`` where no answer came within the store's own timeout, ``SourceError`` where none ever will
    (the bucket is gone, permission is missing). Nothing is sent later than the call that asked for it: a write is never
    buffered over a lost connection. Cancel-safe in the sense that a cancelled write is one with an unknown result.
    """

    async def read(self, key: str) -> Entry:
        """The newest entry of a key."""

    async def write(
        self,
        key: str,
        value: bytes,
        *,
        revision: int | None,
        ttl: float | None = None,
        fence: tuple[str, int] | None = None,
    ) -> int:
        """Write a key and return its new revision.

        A write has one condition: ``revision``, what the key must have, 0 = nothing; or, with ``revision=None``, a
        ``fence``: another key and the revision that *that* one must have, and not have expired. ``ttl``: seconds until
        it expires by itself, whole ones, 1 or more; None = never. Raises ``Conflict`` when the condition does not hold.
        """

    async def entries(self, prefix: str) -> Mapping[str, Entry]:
        """The keys that begin so and hold a value. Not one snapshot: each is as new as its own read."""


@dataclass(frozen=True, slots=True)
class EpochConsumer:
    """A durable of one cohort partition. ``floor``: its ack floor, a sequence of the stream: everything of the
    partition up to it is acknowledged, or was before it began. ``nonce``: of the acquisition that made it; ``lease``:
    seconds of the leases of whoever did, 0 = not said."""

    partition: int
    epoch: int
    sub: int
    nonce: str
    floor: int
    lease: int = 0


class EpochConsumers(Protocol):
    """The durables of a cohort, named by partition, epoch and sub-number. Raises like ``LeaseStore``."""

    async def found(self, partition: int) -> tuple[Sequence[EpochConsumer], int]:
        """Those of one partition, rising by epoch and sub-number, and the server's clock in milliseconds."""

    async def marked(self) -> int | None:
        """Whether the cohort was in use before, with a bucket or without: seconds, the longest lease of whoever called
        ``mark``, 0 = not said; None = nobody did."""

    async def mark(self) -> None:
        """Leave a sign that stays where the durables are, whatever becomes of these and of the bucket. Idempotent.

        It tells the lease of this member, unless there is one that tells a longer one. It takes no message and keeps
        none, and is in the way of no durable of the cohort.
        """

    async def names(self) -> Sequence[tuple[int, int, int]]:
        """Partition, epoch and sub-number of those of all partitions, by one listing, which may be a little old."""

    async def create(self, partition: int, epoch: int, sub: int, *, nonce: str, start: int | None) -> None:
        """Create strictly. ``start``: the first sequence it delivers; None = everything that is there.

        Raises ``ConsumerExists`` for the same name, and, where the retention forbids two, for another one.
        """

    async def delete(self, partition: int, epoch: int, sub: int) -> None:
        """Delete one. Idempotent."""
