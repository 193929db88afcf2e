"""Stranded messages, whose physical queue has no reader in a group, because producers use another number of partitions.

The functions are pure. A backend reads the facts from its broker, and logs the lines.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from lanes.queues.partitioned import MOST_PARTITIONS, PartitionedQueue

LOOK_EVERY: Final = 5.0
"""Seconds between two looks for stranded messages."""

TOLD_EVERY: Final = 30.0
"""Seconds between two log lines about one physical queue."""

CONFIRMED_AFTER: Final = 1.0
"""Seconds until the second look at newly found messages."""

_NAMED_LIMIT: Final = 5
"""Maximum number of physical queues that one log line names."""


class QueueFacts(NamedTuple):
    """The facts of a physical queue.

    Attributes:
        size: Number of partitions that the broker gives the queue; 0 = the queue does not exist.
        messages: Number of messages in the queue.
        unfinished: Number of messages that each group has not finished, by the name of the group.
        readers: Number of members that read the queue, by the name of the group. 0 = the group does not read all broker
            partitions of the queue.
    """

    size: int = 0
    messages: int = 0
    unfinished: Mapping[str, int] = {}
    readers: Mapping[str, int] = {}


class Stranded(NamedTuple):
    """A physical queue whose messages no consumer of the group reads.

    Attributes:
        queue: Name of the logical queue.
        name: Name of the physical queue.
        messages: Number of messages that the group has not finished.
    """

    queue: str
    name: str
    messages: int


def names_beyond(queue: PartitionedQueue, known: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the names of physical queues that may have stranded messages of a queue.

    The result contains the computed names up to twice the number of partitions, and the names of an earlier, larger
    number. The result omits the names of the queue itself.

    Args:
        queue: The queue with the number of partitions that its consumers use.
        known: Names of physical queues that the group has read at any time. The function ignores all other names than
            computed names of the queue.

    Returns:
        The names, in the order of their partitions.
    """
    own = set(queue.names)
    computed = PartitionedQueue(queue.name, min(2 * queue.partitions, MOST_PARTITIONS)).names
    retired = {number: name for name in known if (number := partition_number(queue.name, name)) >= len(computed)}
    return tuple(name for name in (*computed, *(retired[one] for one in sorted(retired))) if name not in own)


def stranded_in(queue: PartitionedQueue, facts: Mapping[str, QueueFacts], group: str) -> tuple[Stranded, ...]:
    """Return the stranded messages of a queue.

    Args:
        queue: The queue with the number of partitions that its consumers use.
        facts: Facts by the name of the physical queue.
        group: The group.

    Returns:
        The physical queues outside ``queue`` that have unfinished messages and no reader in the group.
    """
    own = set(queue.names)
    return tuple(
        Stranded(queue.name, name, fact.unfinished[group])
        for name, fact in facts.items()
        if name not in own and fact.size and fact.unfinished.get(group, 0) > 0 and not fact.readers.get(group, 0)
    )


def stranded_text(stranded: Sequence[Stranded], group: str) -> str:
    """Return a line that names physical queues with stranded messages, and the remedy.

    Args:
        stranded: The physical queues of one logical queue, at least one.
        group: Words and name of the group, such as ``group 'billing'``.

    Returns:
        The line.
    """
    named = ", ".join(f"{each.name!r} ({each.messages})" for each in stranded[:_NAMED_LIMIT])
    more = f" and {len(stranded) - _NAMED_LIMIT} more" if len(stranded) > _NAMED_LIMIT else ""
    return (
        f"queue {stranded[0].queue!r}: no consumer of {group} reads the messages in {named}{more}. The producers use "
        "another number of partitions; start the consumers with that number"
    )


class StrandedLog:
    """Decides when a physical queue with stranded messages is due for a log line: at once, and then every 30 s."""

    def __init__(self) -> None:
        self._told: dict[str, float] = {}

    def due(self, found: Iterable[Stranded], now: float) -> list[Stranded]:
        """Return the entries of ``found`` to log now, and record that the caller logs them.

        Args:
            found: All physical queues with stranded messages. The call removes the record of a queue that is not in
                ``found``.
            now: Current time, in seconds.

        Returns:
            The entries, in the order of ``found``.
        """
        found = list(found)
        names = {each.name for each in found}
        self._told = {name: at for name, at in self._told.items() if name in names}
        due = [each for each in found if now - self._told.get(each.name, -TOLD_EVERY) >= TOLD_EVERY]
        self._told |= dict.fromkeys((each.name for each in due), now)
        return due


class Look(NamedTuple):
    """The result of a check.

    Attributes:
        again: Whether the next check is due after ``CONFIRMED_AFTER``.
        due: Findings to log now, by the name of the logical queue.
        ended: Findings of the last check whose messages no longer wait.
    """

    again: bool
    due: Mapping[str, Sequence[Stranded]]
    ended: Sequence[Stranded]


class StrandedWatch:
    """Decides about the findings of repeated checks of partitioned queues. The object does no I/O.

    Args:
        queues: The queues that a source reads.
        group: Name of the group, by which the facts name its messages and readers.
        portion: Maximum number of physical queues of one check.

    Attributes:
        found: Findings of the last checks. Any thread may read this tuple, because each check replaces the tuple.
    """

    def __init__(self, queues: Sequence[PartitionedQueue], group: str, portion: int) -> None:
        self.found: tuple[Stranded, ...] = ()
        self._queues = queues
        self._group = group
        self._portion = portion
        self._log = StrandedLog()
        self._doubted: set[str] = set()
        # Names whose turn in the present round has not come.
        self._turns: list[str] = []

    @property
    def suspected(self) -> frozenset[str]:
        """The names in ``found``, and the names that the last check found for the first time."""
        return frozenset(self._doubted.union(each.name for each in self.found))

    def next_names(self, names: Callable[[], Iterable[str]]) -> list[str]:
        """Return the names for the next check: all names, or ``portion`` of them if there are more.

        Args:
            names: Function that returns the names of a new round. The call omits names of ``queues``.

        Returns:
            The names, each once.
        """
        if not self._turns:
            read = {name for queue in self._queues for name in queue.names}
            self._turns = [name for name in dict.fromkeys(names()) if name not in read]
        asked, self._turns = self._turns[: self._portion], self._turns[self._portion :]
        return asked

    def conclude(self, asked: Collection[str], facts: Mapping[str, QueueFacts], now: float) -> Look:
        """Update ``found`` from the facts that one check has read from the broker.

        The alarm includes a physical queue only after its second check, because partitions briefly have no reader
        during a rebalance.

        Args:
            asked: Names of the check.
            facts: Facts by the name of the physical queue. A name without facts has no message.
            now: Current time, in seconds.

        Returns:
            The result.
        """
        before = {each.name: each for each in self.found}
        stranded = {each.name: each for queue in self._queues for each in stranded_in(queue, facts, self._group)}
        sure = {name: each for name, each in stranded.items() if name in before or name in self._doubted}
        self._doubted = self._doubted - set(asked) | stranded.keys()
        found = {name: each for name, each in before.items() if name not in asked} | sure
        self.found = tuple(found.values())
        due: dict[str, list[Stranded]] = {}
        for each in self._log.due(self.found, now):
            due.setdefault(each.queue, []).append(each)
        ended = [each for name, each in before.items() if name not in found]
        return Look(stranded.keys() != sure.keys(), due, ended)


def partition_number(logical: str, name: str) -> int:
    """Return the number of the partition with the computed name ``name``; 0 = partition 0, or no such partition.

    Pass only names that the group has read, because a queue of another user may have a name like ``orders__p7``.
    """
    text = name.removeprefix(f"{logical}__p")
    if text == name or not (text.isascii() and text.isdecimal()) or text.startswith("0"):
        return 0
    return number if len(text) <= len(str(MOST_PARTITIONS)) and (number := int(text)) < MOST_PARTITIONS else 0
