"""The log lines about the partitions of a run: joined, planned, assigned, revoked, drained.

The lines are the same for every source. Partitions that change together share one line. After the last drain, one line
states how many messages run again because of the drains.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Final

from lanes.core.lane import FINISHED, QUEUED, RUNNING, SETTLED
from lanes.core.types import NEVER, Message, Partition, PartitionId
from lanes.dead_letter import printable
from lanes.observe.cut_off import named

log = logging.getLogger("lanes")

_NAMED_LIMIT: Final = 10
"""Maximum number of partitions in one log line."""


UNRELEASED: Final = "the source did not confirm its release"
"""Reason of the loss of a drained partition that the source did not release."""


class DrainCost:
    """The numbers of messages that one drain affects. The runtime makes the object before the drain begins.

    Args:
        partition: The assignment.

    Attributes:
        unstarted: Number of delivered messages that the engine abandoned before the call of their handlers.
        unsettled: Number of finished messages whose settlement failed.
    """

    def __init__(self, partition: Partition) -> None:
        self.unstarted = self.unsettled = 0
        self._again = 0
        # A drain that is not logged costs no list.
        self._open: set[Message] = set(partition.ledger.unfinished()) if log.isEnabledFor(logging.INFO) else set()
        self._ran = {message for message in self._open if _has_run(message)}

    def abandoned(self, messages: Iterable[Message]) -> None:
        """Count messages that the drain abandons before their handlers start, or start again."""
        for message in messages:
            if message in self._ran:
                self._again += 1
            else:
                self.unstarted += 1
            self._open.discard(message)

    @property
    def again(self) -> int:
        """Number of messages that ran in this process, and that the next owner runs again."""
        unfinished = sum(1 for message in self._open if message.state not in (FINISHED, SETTLED))
        return self._again + self.unsettled + unfinished


def _has_run(message: Message) -> bool:
    """Return whether this assignment called the handler of a message that is not running."""
    if message.state == RUNNING:
        return False
    return message.state != QUEUED or message.attempt > message.partition.recalled.get(message.position, 1)


class OwnershipLog:
    """The log lines of one consumer about its partitions. Times are seconds of the engine's clock. No method blocks.

    Args:
        name: Name of the source.
        plans: Whether the source reports the plans of the group.
        handler: Name of the handler.

    Attributes:
        noted: Whether ``tell`` has recorded events to log.
    """

    def __init__(self, name: str, *, plans: bool, handler: str) -> None:
        self._name = name
        self._handler = printable(handler)
        self.noted = False
        self._plans = plans
        self._joining = False
        self._assigned: list[PartitionId] = []
        self._revoked: list[PartitionId] = []
        self._running = 0
        self._timeout = 0.0
        # Partitions by the reason of their loss, and the messages of their running handlers.
        self._lost: dict[str, tuple[list[PartitionId], list[Message]]] = {}
        self._unreleased: list[PartitionId] = []
        self._unreleased_why = ""
        # The drains since the last line about drains.
        self._drains_since = 0.0
        self._drained: list[PartitionId] = []
        self._again = 0
        self._unstarted = 0

    def __repr__(self) -> str:
        return f"<OwnershipLog of {self._name}>"

    def opened(self, order: str, concurrency: int, max_in_flight: int) -> None:
        """Log that the source is open, and waits for its partitions."""
        self._joining = True
        log.info(
            '%s: joining with order="%s", concurrency=%d, max_in_flight=%d',
            self._name,
            order,
            concurrency,
            max_in_flight,
        )

    def planned(self, number: int, *, standby: bool) -> None:
        """Log a plan of the group."""
        self._joined()
        note = "; this process stands by without a partition" if standby else ""
        log.info("%s: the group has plan %d%s", self._name, number, note)

    def provisioned(self, number: int, *, under: bool) -> None:
        """Log that a process of the group owns more partitions than its target, or that no process does so any more."""
        if under:
            log.warning(
                "%s: under plan %d of the group, a process owns more partitions than its consumer_target; start more "
                "processes, or raise the targets",
                self._name,
                number,
            )
        else:
            log.info("%s: under plan %d of the group, no process exceeds its consumer_target", self._name, number)

    def assigned(self, partition: Partition) -> None:
        """Record a new assignment for ``tell``."""
        self.noted = True
        self._assigned.append(partition.id)

    def revoked(self, partition: Partition, timeout: float, now: float, *, first: bool) -> None:
        """Record the start of a drain for ``tell``.

        Args:
            partition: The assignment.
            timeout: Maximum number of seconds for running handlers to end.
            now: Current time, in seconds of the engine's clock.
            first: Whether no other partition drains.
        """
        if first:
            self._drains_since = now
        self.noted = True
        self._revoked.append(partition.id)
        self._running += partition.unended
        self._timeout = max(self._timeout, timeout)

    def tell(self, owned: int, *, stopping: bool) -> None:
        """Log the recorded assignments and drains.

        Args:
            owned: Number of partitions that this process owns, including draining partitions.
            stopping: Whether the drains began because the consumer stops.
        """
        self.noted = False
        if self._assigned:
            if not self._plans:
                self._joined()
            log.info(
                "%s: assigned %d partition(s), %d in all: %s",
                self._name,
                len(self._assigned),
                owned,
                _named(self._assigned),
            )
            self._assigned.clear()
        if self._revoked:
            log.info(
                "%s: %s %d partition(s), %d running handler(s) may end %s: %s",
                self._name,
                "stopping with" if stopping else "revoked",
                len(self._revoked),
                self._running,
                f"within {self._timeout:g} s" if self._timeout < NEVER else "without a limit",
                _named(self._revoked),
            )
            self._revoked.clear()
            self._running, self._timeout = 0, 0.0

    def lost(self, partition: Partition, reason: str, running: list[Message]) -> None:
        """Record a lost partition for ``tell_lost``.

        Args:
            partition: The assignment.
            reason: Reason of the loss.
            running: The messages of its running handlers.
        """
        if partition.id in self._unreleased and reason.startswith(UNRELEASED):
            # The line about the release names the partition and its next owner too.
            return
        partitions, messages = self._lost.setdefault(reason, ([], []))
        partitions.append(partition.id)
        messages += running

    def tell_lost(self) -> None:
        """Log the recorded losses, with one line for each reason."""
        if not self._lost:
            return
        lost, self._lost = self._lost, {}
        for reason, (partitions, running) in lost.items():
            places = str(partitions[0]) if len(partitions) == 1 else f"{len(partitions)} partitions"
            names = "" if len(partitions) == 1 else f": {_named(partitions)}"
            if running:
                log.warning(
                    "%s: %s lost (%s); %s still runs for %d message(s)%s. Their results do not count, and the next "
                    "owner runs the messages again. Positions: %s",
                    self._name,
                    places,
                    reason,
                    self._handler,
                    len(running),
                    names,
                    named(running),
                )
            else:
                log.warning("%s: %s lost (%s) while no handler ran%s", self._name, places, reason, names)

    def unreleased(self, partition: Partition, why: str) -> None:
        """Record a partition for ``tell_unreleased``, because the source did not confirm its release."""
        self._unreleased.append(partition.id)
        self._unreleased_why = why

    def tell_unreleased(self) -> None:
        """Log the recorded, unconfirmed releases in one line."""
        if not self._unreleased:
            return
        partitions, self._unreleased = sorted(self._unreleased), []
        if len(partitions) == 1:
            log.warning(
                "%s: the source did not confirm the release of %s, so its next owner may run finished messages again "
                "(%s)",
                self._name,
                partitions[0],
                self._unreleased_why,
            )
        else:
            log.warning(
                "%s: the source did not confirm the release of %d partitions, so their next owners may run finished "
                "messages again (the last: %s): %s",
                self._name,
                len(partitions),
                self._unreleased_why,
                _named(partitions),
            )

    def drained(self, partition: Partition, cost: DrainCost) -> None:
        """Record a drained and released partition for ``tell_drained``."""
        self._drained.append(partition.id)
        self._again += cost.again
        self._unstarted += cost.unstarted

    def tell_drained(self, now: float) -> None:
        """Log the recorded releases, because the last drain has ended."""
        if not self._drained:
            return
        log.info(
            "%s: drained %d partition(s) in %.2f s, %d message(s) run again, %d did not start: %s",
            self._name,
            len(self._drained),
            now - self._drains_since,
            self._again,
            self._unstarted,
            _named(self._drained),
        )
        self._drained.clear()
        self._again = self._unstarted = 0

    def _joined(self) -> None:
        if self._joining:
            log.info("%s: joined", self._name)
            self._joining = False


def _named(partitions: Sequence[PartitionId]) -> str:
    names = ", ".join(map(str, partitions[:_NAMED_LIMIT]))
    more = len(partitions) - _NAMED_LIMIT
    return f"{names} and {more} more" if more > 0 else names
