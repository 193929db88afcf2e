"""Watches how long a member waits for the group's answer. The wait may last for the session of a dead member.

A new member waits for the first answer of the broker. A member whose partitions were all revoked waits again, until the
end of the rebalance. A member that lost its partitions, for example in an outage, waits until it has joined the group
again.

Under the classic protocol a group also sends an empty assignment. Under KIP-848 the client reports no empty assignment.
Therefore the wait also ends after one session, when the group has removed every dead member.

If a group has more members than partitions, some members have no partition. The watch logs this once.
"""

from __future__ import annotations

import logging
from typing import Final

from lanes.clock import Clock
from lanes.core.types import NEVER

log = logging.getLogger("lanes.kafka")

WARN_AFTER: Final = 5.0
"""Seconds without an answer before the first log line. A new group forms within 3 s by default."""

WARN_EVERY: Final = 60.0
"""Seconds between two further log lines."""

_MARGIN: Final = 5.0
"""Seconds that the group may need, after a dead member's session, to assign the member's partitions."""


class JoinWatch:
    """The wait of one member for the first answer of its group.

    Args:
        name: Name of the source, for log lines.
        clock: Monotonic clock, in seconds.
        tells_nothing: Whether the client does not report an empty assignment, as under KIP-848.

    Attributes:
        waits: Whether the group has never answered; any thread may read this attribute.
    """

    def __init__(self, name: str, clock: Clock, *, tells_nothing: bool) -> None:
        self.waits = True
        self._name = name
        self._clock = clock
        self._tells_nothing = tells_nothing
        self._rebalances = False
        self._since = self._due = NEVER
        # The time of the first empty assignment. A cooperative group often sends one before it moves partitions.
        self._spare_since = NEVER
        self._spare_said = False

    def joins(self) -> None:
        """Record that the member joins its group. Idempotent."""
        if self._since == NEVER:
            self._since = self._clock()
            self._due = self._since + WARN_AFTER

    def answered(self, *, owns: bool) -> None:
        """Record that the group has sent an assignment. Idempotent.

        Args:
            owns: Whether the member owns a partition now, from this or an earlier assignment.
        """
        self.waits = self._rebalances = False
        if owns:
            self._spare_since, self._spare_said = NEVER, False
        elif self._spare_since == NEVER:
            self._spare_since = self._clock()

    def rebalances(self) -> None:
        """Record that the member has released all its partitions, and waits for the group's answer. Idempotent.

        The call has no effect under KIP-848, where the group may send no answer.
        """
        if not (self.waits or self._rebalances or self._tells_nothing):
            self._rebalances = True
            self._since = self._clock()
            self._due = self._since + WARN_AFTER

    def rejoins(self) -> None:
        """Record that the member has lost all its partitions, and waits from now on for the group's answer."""
        if not self.waits:
            self._rebalances = True
            self._since = self._clock()
            self._due = self._since + WARN_AFTER

    def look(self, session: float, partitions: int, *, outage: bool) -> None:
        """Report the wait when a log line is due.

        Args:
            session: Session of the members of the group, in seconds.
            partitions: Number of partitions of all topics together.
            outage: Whether no broker answers, which other lines report.
        """
        now = self._clock()
        if not (self.waits or self._rebalances) or self._since == NEVER:
            self._look_at_spare(now, partitions, outage=outage)
            return
        if self._tells_nothing and now - self._since > session + _MARGIN:
            self.waits = self._rebalances = False
            return
        if now < self._due or outage:
            return
        self._due = now + WARN_EVERY
        waited = now - self._since
        if self._tells_nothing:
            # A group may have more members than partitions, so an empty assignment is no fault.
            log.info(
                "%s: the group has assigned no partition for %.0f s. The group may wait for a member that was "
                "killed, at most %g s from the start (its session), or have more members than partitions",
                self._name,
                waited,
                session,
            )
            return
        log.warning(
            "%s: the group has assigned no partition for %.0f s, so no message is handled. The group may wait for a "
            "member that was killed, at most %g s with the session.timeout.ms of this process. The group may also "
            "wait for a member that drains, at most for its max.poll.interval.ms. Wait, because a restart does not "
            "shorten the time",
            self._name,
            waited,
            session,
        )

    def _look_at_spare(self, now: float, partitions: int, *, outage: bool) -> None:
        if self._spare_said or now - self._spare_since < WARN_AFTER or outage:
            return
        self._spare_said = True
        log.info(
            "%s: the group has no partition for this member, because other members own all %d. This member handles no "
            "message until a member leaves or the topic gets more partitions. Start at most one member for each "
            "partition",
            self._name,
            partitions,
        )
