"""What a consumer tells its user about ownership, beside messages: what it owns, and how the group goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from lanes.core.types import Partition, PartitionId

__all__ = ["GroupEvent", "OnEvent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEvent:
    """Something about ownership has changed.

    ``name``: ``"assigned"``, this process owns ``partition`` from now on; ``"revoked"``, it was drained and handed
    over; ``"lost"``, it is owned no more without that, for ``reason``. ``"generation"``: the group has a new plan,
    number ``generation``. ``"standby"``: by that plan this process owns nothing and waits; the next ``"assigned"`` ends
    that. ``epoch``: the fencing token of the partition, as in ``Message.epoch``. What an event does not have is None.
    """

    name: Literal["assigned", "revoked", "lost", "generation", "standby"]
    partition: PartitionId | None = None
    epoch: int | None = None
    generation: int | None = None
    reason: str | None = None

    @classmethod
    def of(
        cls, name: Literal["assigned", "revoked", "lost"], partition: Partition, reason: str | None = None
    ) -> GroupEvent:
        """An event of one partition."""
        return cls(name=name, partition=partition.id, epoch=partition.epoch, reason=reason)


OnEvent = Callable[[GroupEvent], None]
"""A plain function, called on the event loop in the order of the events; it must not block. What it raises stops the
consumer in order."""
