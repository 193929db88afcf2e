"""When to commit: one at a time for a partition, only what the broker does not have yet, and never less than that.

A commit counts when the broker says so. One whose result is unknown counts as not made: the next one repeats it.
"""

from __future__ import annotations

from lanes.core.types import Settlement


class Commits:
    """The commits of one assignment.

    ``interval``: seconds a finished message waits for its commit at most; ``count``: so many do not wait.
    ``confirmed``: the floor the broker has; ``confirmed_ordinal``: the number of the first delivery above it. ``over``:
    no commit is begun any more, whatever has changed.
    """

    __slots__ = (
        "_count",
        "_interval",
        "_not_before",
        "changes",
        "confirmed",
        "confirmed_ordinal",
        "over",
        "sending",
        "since",
    )

    def __init__(self, floor: int, interval: float, count: int) -> None:
        self._interval = interval
        self._count = count
        self._not_before: float = 0.0
        self.confirmed = floor
        self.confirmed_ordinal: int = 0
        self.changes: int = 0
        self.since: float = 0.0
        self.sending: Settlement | None = None
        self.over: bool = False

    def changed(self, count: int, now: float) -> None:
        """So much was finished that the broker does not know of."""
        if not self.changes:
            self.since = now
        self.changes += count

    @property
    def pending(self) -> bool:
        """Whether there is something to say, and no commit on its way."""
        return self.changes > 0 and self.sending is None and not self.over

    def due_at(self, *, urgent: bool) -> float:
        """When to commit what is pending. ``urgent``: messages wait for the floor to be confirmed."""
        at = self.since
        if not urgent and self.changes < self._count:
            at += self._interval
        return max(at, self._not_before)

    def send(self, settlement: Settlement) -> None:
        """This commit is on its way: it has everything that has changed so far."""
        self.sending = settlement
        self.changes = 0

    def confirm(self, settlement: Settlement) -> None:
        """The broker has it."""
        assert settlement.floor is not None, "only commits are confirmed"
        self.sending = None
        self.confirmed = settlement.floor
        self.confirmed_ordinal = settlement.ordinal

    def unknown(self, again_at: float) -> None:
        """The commit on its way may not have been made: it is due again, not before ``again_at``."""
        self.sending = None
        self._not_before = again_at
        # Since the time of the first change in it, which is past.
        self.changes += self._count

    def __repr__(self) -> str:
        sending = "none" if self.sending is None else str(self.sending.floor)
        return f"<Commits confirmed {self.confirmed}, sending {sending}, {self.changes} changes since>"
