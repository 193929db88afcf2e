"""The log lines about an outage. If a broker hangs, neither the client nor another log line reports the outage."""

from __future__ import annotations

import logging

from lanes.clock import Clock
from lanes.dead_letter import printable
from lanes.source import Outage

log = logging.getLogger("lanes.kafka")


class OutageWatch:
    """Writes a line when an outage begins, and a line when a broker answers again.

    Args:
        name: Name of the source, for log lines.
        clock: Monotonic clock, in seconds.
    """

    def __init__(self, name: str, clock: Clock) -> None:
        self._name = name
        self._clock = clock
        self._since: float | None = None

    def look(self, outage: Outage | None) -> None:
        """Report a change.

        Args:
            outage: The present outage; None = a broker answers.
        """
        now = self._clock()
        if outage is not None and self._since is None:
            self._since = now - outage.seconds
            log.warning(
                "%s: no broker has answered for %.0f s (%s). Until a broker answers, no message arrives and no "
                "commit is confirmed. Start the broker, or correct the network and the credentials",
                self._name,
                outage.seconds,
                printable(outage.error) or "the client reports no error",
            )
        elif outage is None and self._since is not None:
            since, self._since = self._since, None
            log.info("%s: a broker answers again after %.0f s", self._name, now - since)
