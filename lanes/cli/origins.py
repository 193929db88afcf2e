"""The dead letters that ``--queue`` and ``--partitions`` select, and those of the same queues' other partitions.

A dead letter names its physical queue, and the logical queue if its consumer registered one. For dead letters without a
registered queue, the number of partitions is unknown. The physical names then show whether a command omits dead letters
of a queue.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from lanes.cli.kit import EXIT_USAGE, Misuse, stop
from lanes.dead_letter import DeadLetter
from lanes.errors import ConfigError
from lanes.queues.partitioned import PartitionedQueue, is_partition_name

_NAMED: Final = 4
"""Maximum number of physical queues that a line names."""


class Origins:
    """The physical queues of the options. Without the options, the object is false and selects every dead letter.

    Args:
        queues: Values of ``--queue``.
        partitions: Value of ``--partitions``; None = the command has no such option.

    Attributes:
        others: Number of dead letters from each further partition that ``has`` has seen, by the name of the partition.

    Raises:
        Misuse: ``--partitions`` is given without ``--queue``. A wrong name or number ends the process.
    """

    def __init__(self, queues: Sequence[str], partitions: int | None) -> None:
        if not queues and partitions is not None:
            raise Misuse("has --partitions without --queue NAME; name the queue")
        self._queues = queues
        self._partitions = partitions
        number = 1 if partitions is None else partitions
        try:
            self._names = frozenset(name for queue in queues for name in PartitionedQueue(queue, number).names)
        except ConfigError as error:
            stop("--queue '': must not be empty" if "" in queues else f"--{error}", EXIT_USAGE)
        self.others: Counter[str] = Counter()

    def __bool__(self) -> bool:
        return bool(self._names)

    def __str__(self) -> str:
        return _listed(sorted(self._names))

    def has(self, letter: DeadLetter) -> bool:
        """Return whether a dead letter is selected. Count a dead letter of a further partition in ``others``."""
        if not self._names:
            return True
        if letter.queue in self._queues and letter.queue_partition is not None:
            if self._partitions is None or letter.queue_partition < self._partitions:
                return True
            self.others[letter.source] += 1
            return False
        places = (letter.source, letter.subject)
        if not self._names.isdisjoint(places):
            return True
        if letter.queue is not None:
            # The dead letter has another registered queue, so its physical name does not count.
            return False
        for name in places:
            if any(is_partition_name(queue, name) for queue in self._queues):
                self.others[name] += 1
                break
        return False

    def check(self) -> None:
        """Raise ``Misuse`` if ``--partitions`` is missing and ``others`` is not empty."""
        if self.others and self._partitions is None:
            raise Misuse(
                f"has --queue without --partitions, and there are dead letters of {self._others()}; add --partitions "
                "NUMBER for all partitions of the queue, or --partitions 1"
            )

    def left_out(self) -> str:
        """Return a line about the dead letters in ``others``; "" = there are none."""
        if not self.others:
            return ""
        remedy = "add --partitions NUMBER" if self._partitions is None else "raise --partitions"
        return (
            f"left out: {self.others.total()} dead letter(s) of {self._others()}; {remedy} to select all partitions of "
            "the queue"
        )

    def _others(self) -> str:
        return _listed(sorted(self.others, key=lambda name: (len(name), name)))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
