"""The drain of a partition: in which order it is given up, and how long each part of that may take.

A drain is in one phase, and a phase is something to perform outside of the core: to let handlers end, to cancel them,
to settle what has finished, to have the source take the partition back. Whoever performs it tells the drain what came
of it. What the engine has to do in between, the drain has it do: abandon, fence, commit no more, forget.

``TRANSITIONS`` is the whole machine: any pair that is not in it raises ``IllegalEvent``.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from lanes.core import effects as fx
from lanes.core.ownership import Ownership
from lanes.core.types import NEVER, Message, Partition

IDLE: Final = "idle"  # nothing has begun
ENDING: Final = "ending"  # nothing starts any more; what runs may end
CANCELLING: Final = "cancelling"  # what runs is cancelled, and nothing closes the prefix any more
SETTLING: Final = "settling"  # fenced; what has finished is settled
KEEPING: Final = "keeping"  # all is settled; what is kept of attempts is written
RELEASING: Final = "releasing"  # nothing is committed any more; the source takes it back
UNRELEASED: Final = "unreleased"  # the source did not
HANDED_OVER: Final = "handed over"
LOST: Final = "lost"

OVER: Final = frozenset({UNRELEASED, HANDED_OVER, LOST})
"""Nothing is left to be performed; what was not released is still owned, and is to be lost."""

TRANSITIONS: Final[dict[tuple[str, str], str]] = {
    (IDLE, "begun"): ENDING,
    (ENDING, "ended"): SETTLING,
    (ENDING, "late"): CANCELLING,
    (CANCELLING, "ended"): SETTLING,
    (CANCELLING, "late"): SETTLING,
    (SETTLING, "settled"): KEEPING,
    (SETTLING, "late"): RELEASING,
    (KEEPING, "kept"): RELEASING,
    (KEEPING, "late"): RELEASING,
    (RELEASING, "released"): HANDED_OVER,
    (RELEASING, "refused"): UNRELEASED,
}
"""(phase, event) -> phase. ``late``: the time of the phase is over. And "lost" besides, below, behind which the end of
whatever was being performed changes nothing."""

_PERFORMED: Final = ("ended", "late", "settled", "kept", "released", "refused")

TRANSITIONS.update({(phase, "lost"): LOST for phase in (ENDING, CANCELLING, SETTLING, KEEPING, RELEASING, UNRELEASED)})
TRANSITIONS.update({(LOST, event): LOST for event in (*_PERFORMED, "lost")})


class IllegalEvent(Exception):
    """An event that the phase of a drain does not allow: a bug of whoever drives it."""


class Limits(NamedTuple):
    """What the parts of a drain may take, in seconds.

    ``grace``: until handlers that were cancelled have ended. ``settle``: until what has finished is settled, where
    less is left of the time for handlers; ``last``: where that has no end.
    """

    grace: float
    settle: float
    last: float


class PartitionDrain:
    """The drain of one partition that ``engine`` owns, in ``phase``. Times are seconds of any one monotonic clock.

    ``until``: when the phase is late; infinite for one that is not late by itself. ``abandoned``: what was given up
    without having started, by the last event; ``zombies``: what still ran at the fence. ``close_prefix``: see
    ``Ownership.drain``.

    No method blocks. It is one for one assignment, and is not used again.
    """

    __slots__ = ("_close_prefix", "_engine", "_limits", "abandoned", "partition", "phase", "until", "zombies")

    def __init__(
        self, engine: Ownership, partition: Partition, limits: Limits, *, close_prefix: bool, phase: str = IDLE
    ) -> None:
        self._engine = engine
        self._limits = limits
        self._close_prefix = close_prefix
        self.partition = partition
        self.phase = phase
        self.until = NEVER
        self.abandoned: list[Message] = []
        self.zombies: list[Message] = []

    @property
    def left(self) -> bool:
        """Whether anything that has finished of the partition, which is fenced, is not settled."""
        commits = self.partition.commits
        if commits is not None:
            return commits.changes > 0 or commits.sending is not None or bool(self.partition.finished)
        # Of a fenced one nothing else is held.
        return self.partition.ledger.holes() > 0

    def begin(self, now: float, timeout: float) -> None:
        """Start nothing more of it; its handlers get ``timeout`` seconds to end. ``Drained`` is among the engine's
        effects once they have, and now already where none runs."""
        self._move("begun")
        self.until = now + timeout
        interrupted = self.partition.draining
        self.abandoned = self._engine.drain(self.partition, close_prefix=self._close_prefix)
        if interrupted and not self.partition.unended:
            # A handler that was interrupted has drained it before, and this effect has come and gone.
            self._engine.effects.append(fx.Drained(self.partition))

    def hasten(self, now: float, timeout: float) -> None:
        """Its handlers get ``timeout`` seconds from ``now`` on, if that is sooner. Nothing once they are cancelled."""
        if self.phase == ENDING:
            self.until = min(self.until, now + timeout)

    def tell(self, event: str, now: float) -> None:
        """What came of what the phase had performed, at ``now``. Raises ``IllegalEvent``.

        ``lost``, once the engine has lost the partition, may come at any time, and more than once.
        """
        before, until = self.phase, self.until
        self._move(event)
        if self.phase == before:
            return
        self.abandoned, self.until = [], NEVER
        if self.phase == CANCELLING:
            self.until = now + self._limits.grace
            # Nothing starts in the grace, where nobody would cancel it.
            self.abandoned = self._engine.stop_closing(self.partition)
        elif self.phase == SETTLING:
            left = until - now if before == ENDING else 0.0
            self.until = now + max(self._limits.settle, left if left < NEVER else self._limits.last)
            self.zombies = self._engine.fence(self.partition)
        elif self.phase == KEEPING:
            self.until = until
        elif self.phase == RELEASING and self.partition.commits is not None:
            # What could not be settled in time runs again. Whoever waits for the partition may commit before the
            # release has returned: no commit of ours may come after that one.
            self.partition.commits.over = True
        elif self.phase == HANDED_OVER:
            self._engine.release(self.partition)

    def _move(self, event: str) -> None:
        following = TRANSITIONS.get((self.phase, event))
        if following is None:
            raise IllegalEvent(
                f"drain of {self.partition.id}: {event!r} is not allowed while {self.phase}: a bug of lanes, please "
                "report it"
            )
        self.phase = following

    def __repr__(self) -> str:
        return f"<PartitionDrain of {self.partition.id}, {self.phase}>"
