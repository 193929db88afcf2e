"""The decisions of a member: which partitions it visits first, how many it owns, and which it gives up. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

Visit = Literal["oldest", "backlog", "name"]
"""Order in which a member visits the partitions that have work: by the time of their oldest message, by the number of
their messages, or by their number."""


class Work(NamedTuple):
    """The messages of a partition that this subscription has not read.

    Attributes:
        partition: Number of the partition.
        messages: Number of messages, 1 or more.
        oldest: Time of the first one, in seconds since the epoch. ``None`` = not known.
    """

    partition: int
    messages: int
    oldest: float | None = None


class Member(NamedTuple):
    """Another member of the subscription.

    Attributes:
        owned: Number of partitions that the member owns.
        waits: Whether the member waits for partitions that others own.
    """

    owned: int
    waits: bool


def in_order(works: Sequence[Work], visit: Visit) -> list[Work]:
    """Return partitions in the order in which to visit them."""
    if visit == "backlog":
        return sorted(works, key=lambda work: (-work.messages, work.partition))
    if visit == "oldest":
        never = float("inf")
        return sorted(works, key=lambda work: (never if work.oldest is None else work.oldest, work.partition))
    return sorted(works, key=lambda work: work.partition)


def most_owned(partitions: int, others: int) -> int:
    """Return the number of partitions that a member owns at most, beside ``others`` other members."""
    return -(-partitions // (others + 1))


def waits(owned: int, partitions: int, others: int) -> bool:
    """Return whether a member that could acquire no further partition waits for partitions of the others."""
    return owned < max(1, partitions // (others + 1))


def given_up(
    since: Mapping[int, float], now: float, budget: float, partitions: int, others: Sequence[Member]
) -> list[int]:
    """Return the partitions that a member gives up, the one that it has held longest first.

    Args:
        since: The time of the acquisition of each partition that the member owns and has not given up.
        now: The present time.
        budget: Seconds for which a member holds a partition, although others wait.
        partitions: Number of partitions of the log.
        others: The other members.

    Returns:
        The numbers of the partitions.
    """
    waiting = [member for member in others if member.waits]
    if not waiting:
        return []
    count = len(since) - most_owned(partitions, len(others))
    if count <= 0 and any(not member.owned for member in waiting):
        # More members than partitions take turns.
        count = 1
    held = sorted((start, partition) for partition, start in since.items() if now - start >= budget)
    return [partition for _, partition in held[: max(0, count)]]
