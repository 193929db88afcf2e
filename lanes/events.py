"""Events about the ownership of partitions and the plans of a group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from lanes.core.types import Partition, PartitionId


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEvent:
    """A change of ownership or of the plan. A field that the event does not use is ``None``.

    Attributes:
        name: ``"assigned"`` = this process has acquired the partition. ``"revoked"`` = this process has drained and
            released the partition. ``"lost"`` = the process lost the partition without a release. ``"generation"`` =
            the group has a new plan. ``"standby"`` = this process owns no partition under the new plan, and waits for
            the next ``"assigned"``. ``"under_provisioned"`` = a process of the group owns more partitions than its
            target under the plan. ``"provisioned"`` = no process exceeds its target any more.
        partition: The partition.
        epoch: Fencing token of the partition, as in ``Message.epoch``.
        generation: Number of the plan.
        reason: Reason why the partition was lost.
    """

    name: Literal["assigned", "revoked", "lost", "generation", "standby", "under_provisioned", "provisioned"]
    partition: PartitionId | None = None
    epoch: int | None = None
    generation: int | None = None
    reason: str | None = None

    @classmethod
    def of(
        cls, name: Literal["assigned", "revoked", "lost"], partition: Partition, reason: str | None = None
    ) -> GroupEvent:
        """Make an event of one partition.

        Args:
            name: Name of the event.
            partition: The assignment.
            reason: Reason why the partition was lost.

        Returns:
            The event.
        """
        return cls(name=name, partition=partition.id, epoch=partition.epoch, reason=reason)


OnEvent = Callable[[GroupEvent], None]
"""A plain function that the consumer calls on the event loop, in the order of the events. The function must not block.

If the function raises an exception, the consumer stops after a drain.
"""
