"""The generation of a member and its partitions as one value, for transactions.

A broker accepts the offsets of a transaction from any member that names the current generation of its group, also for
partitions of other members. A generation that is fetched for the commit proves nothing, because the client may have
learned of a newer generation than its callbacks have told. The client's thread therefore takes the generation inside
each callback, before the client may join again, together with the partitions that the callback leaves. A transaction
with an older snapshot is refused by the broker.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from confluent_kafka import Consumer

from lanes.core.types import Partition, PartitionId


class GroupSnapshot(NamedTuple):
    """A generation, and the partitions that this member owned in it.

    Attributes:
        metadata: The client's object for the generation; None = no generation.
        owned: The assignments.
    """

    metadata: object | None
    owned: frozenset[Partition]


class Assigned(Protocol):
    """An assignment of the client's thread."""

    @property
    def partition(self) -> Partition:
        """The assigned partition."""

    @property
    def released(self) -> bool:
        """Whether the thread has released the partition."""


class Snapshots:
    """The newest snapshot of one client. Only the client's thread changes the object; any thread may read ``latest``.

    Args:
        wanted: Whether a transaction uses the snapshots. If False, the object asks the client for nothing.

    Attributes:
        latest: The newest snapshot.
    """

    def __init__(self, *, wanted: bool) -> None:
        self._wanted = wanted
        self.latest = GroupSnapshot(None, frozenset())

    def enter(self, client: Consumer) -> None:
        """Take the generation, at the start of a callback."""
        if self._wanted:
            self.latest = GroupSnapshot(client.consumer_group_metadata(), self.latest.owned)

    def own(self, owned: Mapping[PartitionId, Assigned]) -> None:
        """Replace the owned partitions, in the same generation.

        Args:
            owned: The current assignments; the snapshot omits the released ones.
        """
        if self._wanted:
            partitions = frozenset(each.partition for each in owned.values() if not each.released)
            self.latest = GroupSnapshot(self.latest.metadata, partitions)
