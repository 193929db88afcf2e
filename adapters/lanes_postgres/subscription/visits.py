"""Decides the order of a member's visits, the number of its partitions, and the partitions to release.

Pure.
"""

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
        oldest: Time of the first message, in seconds since the epoch. ``None`` = unknown.
    """

    partition: int
    messages: int
    oldest: float | None = None


class Member(NamedTuple):
    """Another member of the subscription.

    Attributes:
        owned: Number of partitions that the member owns.
        waits: Whether the member waits for partitions of other members.
    """

    owned: int
    waits: bool


class Hold(NamedTuple):
    """A partition that a member owns and has not released.

    Attributes:
        since: Time of the acquisition.
        got_on: Whether the member has settled a message since the acquisition, or has no message left.
    """

    since: float
    got_on: bool


def in_order(works: Sequence[Work], visit: Visit) -> list[Work]:
    """Return partitions in the order of the next visits."""
    if visit == "backlog":
        return sorted(works, key=lambda work: (-work.messages, work.partition))
    if visit == "oldest":
        never = float("inf")
        return sorted(works, key=lambda work: (never if work.oldest is None else work.oldest, work.partition))
    return sorted(works, key=lambda work: work.partition)


def most_owned(partitions: int, others: int) -> int:
    """Return the maximum number of partitions that one member owns next to ``others`` other members."""
    return -(-partitions // (others + 1))


def waits(owned: int, partitions: int, others: int) -> bool:
    """Return whether a member that found no free partition waits for partitions of other members."""
    return owned < _least_owned(partitions, others)


def acquirable(owned: int, partitions: int, others: Sequence[Member]) -> int:
    """Return the number of free partitions that a member may acquire.

    While another member waits, a member with its minimum share leaves the free partitions to the waiting member.
    Otherwise, members that release partitions for a slow member would acquire these partitions again.
    """
    if any(member.waits for member in others):
        return max(0, _least_owned(partitions, len(others)) - owned)
    return max(0, most_owned(partitions, len(others)) - owned)


def given_up(
    holds: Mapping[int, Hold], now: float, budget: float, partitions: int, others: Sequence[Member]
) -> list[int]:
    """Return the partitions that a member releases, the longest owned partition first.

    Args:
        holds: The partitions that the member owns and has not released.
        now: Present time, by the clock of ``Hold.since``.
        budget: Seconds for which a member keeps a partition while other members need partitions.
        partitions: Number of partitions of the log.
        others: The other members.

    Returns:
        The numbers of the partitions to release.
    """
    most, least = most_owned(partitions, len(others)), partitions // (len(others) + 1)
    count, takes_turns = 0, False
    if len(holds) > most:
        # Release a partition only if another member is below its maximum, because no other member may acquire it.
        count = len(holds) - most if any(member.owned < most for member in others) else 0
    elif len(holds) > least and _all_settled(most, others):
        # A member may own too few partitions even if no member exceeds its maximum, as with 2, 2 and 0 of 4 partitions.
        # A member keeps its minimum share, because other members may not have acquired the released partitions yet. If
        # a turn could end without a settled message, all turns could. A handler that runs longer than the budget and
        # the drain would start again in each turn.
        count, takes_turns = 1, not least
    held = sorted(
        (hold.since, partition)
        for partition, hold in holds.items()
        if now - hold.since >= budget and (hold.got_on or not takes_turns)
    )
    return [partition for _, partition in held[:count]]


def _least_owned(partitions: int, others: int) -> int:
    """Return the number of partitions below which a member waits: its share, rounded down, but at least 1."""
    return max(1, partitions // (others + 1))


def _all_settled(most: int, others: Sequence[Member]) -> bool:
    return any(member.waits for member in others) and all(member.owned <= most for member in others)
