"""The contract between the membership of a cohort and the store of its leases: two small Protocols.

A ``LeaseStore`` is a key-value store with compare-and-set, a time to live and a fence. ``EpochConsumers`` creates and
deletes the durables of the cohort partitions, one or more for each epoch. The membership uses a backend only through
these two Protocols. A call that receives no answer in time raises ``UnknownResult``. The membership then reads the
result back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Entry(NamedTuple):
    """The newest entry of a key.

    Attributes:
        value: The value; None = the key has no value: it was deleted, has expired, or was never written.
        revision: A number that increases with every write to the store; 0 = the store has no record of the key.
    """

    value: bytes | None
    revision: int


class Conflict(Exception):
    """Error for a write whose condition was false: the key, or the fence, has another revision.

    The store did not write the value.
    """


class UnknownResult(Exception):
    """Error for a request without an answer in time.

    The server may have executed the request, or may execute the request later.
    """


class ConsumerExists(Exception):
    """Error of ``EpochConsumers.create``, which found another consumer and therefore created no consumer.

    Args:
        message: The server's description of the other consumer.
        nonce: Nonce of the consumer of the same name; None = a consumer of another name overlaps.

    Attributes:
        nonce: Nonce of the consumer of the same name; None = a consumer of another name overlaps.
    """

    def __init__(self, message: str, *, nonce: str | None) -> None:
        super().__init__(message)
        self.nonce = nonce


class LeaseStore(Protocol):
    """Key-value store of one cohort, with compare-and-set, time to live and a fence.

    Every read is linearizable: the leader answers, never a replica or a cache. A store sends no request after the call
    has ended, so it never buffers a write while the connection is lost. A cancelled write has an unknown result.

    Every method raises ``UnknownResult`` if no answer arrives within the store's own timeout. Every method raises
    ``SourceError`` when no later call can succeed, for example without a bucket or a permission.
    """

    async def read(self, key: str) -> Entry:
        """Read the newest entry of a key.

        Args:
            key: The key.

        Returns:
            The entry.

        Raises:
            UnknownResult: The store did not answer in time.
            SourceError: No later call to the store can succeed.
        """

    async def write(
        self,
        key: str,
        value: bytes,
        *,
        revision: int | None,
        ttl: float | None = None,
        fence: tuple[str, int] | None = None,
    ) -> int:
        """Write a key under one condition, which is either a ``revision`` or a ``fence``.

        Args:
            key: The key.
            value: The new value.
            revision: The revision that the key must have, 0 = no entry; None = ``fence`` is the condition.
            ttl: Seconds until the entry expires, a whole number of 1 or more; None = never.
            fence: Another key and its required revision. The write fails if that key has expired or has another
                revision.

        Returns:
            The new revision.

        Raises:
            Conflict: The condition is false.
            UnknownResult: The store did not answer in time.
            SourceError: No later call to the store can succeed.
        """

    async def entries(self, prefix: str) -> Mapping[str, Entry]:
        """Read all keys that begin with a prefix and have a value. The store may read the entries at different times.

        Args:
            prefix: Beginning of the keys.

        Returns:
            The entries by key.

        Raises:
            UnknownResult: The store did not answer in time.
            SourceError: No later call to the store can succeed.
        """


@dataclass(frozen=True, slots=True)
class EpochConsumer:
    """A durable of one cohort partition.

    Attributes:
        partition: Number of the cohort partition.
        epoch: Epoch of the ownership for which a member created the durable.
        sub: Number of the durable within the epoch.
        nonce: Nonce of the acquisition that created the durable.
        floor: Ack floor of the durable, a sequence of the stream. Every message of the partition up to the floor is
            acknowledged or precedes the durable's first sequence.
        lease: Seconds of the leases of the member that created the durable; 0 = unknown.
    """

    partition: int
    epoch: int
    sub: int
    nonce: str
    floor: int
    lease: int = 0


class EpochConsumers(Protocol):
    """The durables of a cohort, named by partition, epoch and sub-number.

    Every method raises ``UnknownResult`` and ``SourceError`` like the methods of ``LeaseStore``.
    """

    async def found(self, partition: int) -> tuple[Sequence[EpochConsumer], int]:
        """List the durables of one partition.

        Args:
            partition: Number of the cohort partition.

        Returns:
            The durables, sorted by epoch and sub-number, and the server's clock in milliseconds.
        """

    async def marked(self) -> int | None:
        """Read the mark of the cohort.

        A mark shows that members have used the cohort before, even after the loss of the bucket.

        Returns:
            Seconds of the longest lease of all callers of ``mark``, 0 = unknown; None = no member has called ``mark``.
        """

    async def mark(self) -> None:
        """Create a mark that remains after the loss of the durables and the bucket. Idempotent.

        The mark names the lease of this member, unless the mark already names a longer lease. The mark receives no
        messages and overlaps with no durable.
        """

    async def names(self) -> Sequence[tuple[int, int, int]]:
        """List the durables of all partitions with one request. The answer may not include recent changes.

        Returns:
            Partition, epoch and sub-number of each durable.
        """

    async def create(self, partition: int, epoch: int, sub: int, *, nonce: str, start: int | None) -> None:
        """Create a durable without overwriting an existing durable.

        Args:
            partition: Number of the cohort partition.
            epoch: Epoch of the ownership.
            sub: Number of the durable within the epoch.
            nonce: Nonce of the acquisition.
            start: The first sequence to deliver; None = every stored message.

        Raises:
            ConsumerExists: A consumer of this name exists, or the retention forbids a second durable of the partition.
        """

    async def delete(self, partition: int, epoch: int, sub: int) -> None:
        """Delete a durable. Idempotent.

        Args:
            partition: Number of the cohort partition.
            epoch: Epoch of the ownership.
            sub: Number of the durable within the epoch.
        """
