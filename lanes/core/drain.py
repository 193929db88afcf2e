"""The drain of a partition: the order of the steps, and the time limit of each step.

In most phases of a drain, the runtime performs a task. The tasks are: wait for handlers, cancel handlers, settle
finished messages, write the store of attempts, and release the partition. The runtime reports the result of each task
to the drain. Between phases the drain lets the engine abandon messages, fence the partition, end its commits and forget
the partition.

``Ownership.drain`` decides which messages still start. Without ``close_prefix`` no message starts. With
``close_prefix`` the queued messages below the highest started message also start. These messages are the *prefix*. The
runtime sets ``close_prefix`` if the source commits and ``SourceTraits.hands_over`` is False.

``TRANSITIONS`` lists every allowed pair of phase and event. Any other pair raises ``IllegalEvent``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from lanes.core import effects as fx
from lanes.core.lane import RUNNING
from lanes.core.ownership import Ownership
from lanes.core.types import NEVER, Message, Partition

IDLE: Final = "idle"  # not begun
ENDING: Final = "ending"  # running handlers may end; only messages of the prefix start
CANCELLING: Final = "cancelling"  # running handlers are cancelled; no message closes the prefix
SETTLING: Final = "settling"  # fenced; finished messages are settled
KEEPING: Final = "keeping"  # everything is settled; the store of attempts is written
RELEASING: Final = "releasing"  # no commit begins; the source releases the partition
UNRELEASED: Final = "unreleased"  # the source failed to release the partition
HANDED_OVER: Final = "handed over"
LOST: Final = "lost"

OVER: Final = frozenset({UNRELEASED, HANDED_OVER, LOST})
"""The phases without a further task. This process still owns an unreleased partition, and the runtime reports the
partition as lost.
"""

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
"""(phase, event) -> phase.

``late``: the time of the phase has passed. The code below adds ``lost``. After ``lost``, no event changes the phase.
"""

_PERFORMED: Final = ("ended", "late", "settled", "kept", "released", "refused")

TRANSITIONS.update({(phase, "lost"): LOST for phase in (ENDING, CANCELLING, SETTLING, KEEPING, RELEASING, UNRELEASED)})
TRANSITIONS.update({(LOST, event): LOST for event in (*_PERFORMED, "lost")})


class IllegalEvent(Exception):
    """Error for an event that the phase of a drain does not allow. The cause is a bug of the runtime."""


class Limits(NamedTuple):
    """The times of a drain, in seconds.

    Attributes:
        grace: Seconds for cancelled handlers to end.
        settle: Minimum number of seconds to settle finished messages. If handlers end early, their unused seconds
            replace a smaller minimum.
        last: Seconds to settle finished messages if handlers have no time limit.
    """

    grace: float
    settle: float
    last: float


@dataclass(slots=True, eq=False)
class PartitionDrain:
    """The drain of one assignment. Each drain has a separate ``Drain`` object. Times are seconds of a monotonic clock.

    Attributes:
        engine: The engine that owns the partition.
        partition: The assignment.
        limits: The times of the drain.
        close_prefix: See ``Ownership.drain``.
        phase: The phase, one of the constants of this module.
        until: Time limit of the phase, at which the runtime reports ``late``. ``NEVER`` = the phase has no time limit.
        abandoned: The messages without a running handler that the engine abandoned at the last event. At the fence,
            these are the messages with unconfirmed outputs.
        zombies: The messages whose handlers still ran at the fence.
    """

    engine: Ownership
    partition: Partition
    limits: Limits
    close_prefix: bool = field(kw_only=True)
    phase: str = IDLE
    until: float = NEVER
    abandoned: list[Message] = field(default_factory=list)
    zombies: list[Message] = field(default_factory=list)

    @property
    def left(self) -> bool:
        """Whether the fenced partition has an unsettled finished message."""
        commits = self.partition.commits
        if commits is not None:
            return commits.changes > 0 or commits.sending is not None or bool(self.partition.finished)
        # The ledger of a fenced partition has finished messages only.
        return self.partition.ledger.holes() > 0

    @property
    def unsettled(self) -> int:
        """Number of unsettled finished messages of the fenced partition, which run again."""
        commits = self.partition.commits
        if commits is not None:
            return commits.finished + len(self.partition.finished)
        return self.partition.ledger.holes()

    def begin(self, now: float, timeout: float) -> None:
        """Stop starting messages, and wait at most ``timeout`` seconds for running handlers.

        The engine emits ``Drained`` when no handler runs and no message of the prefix waits, possibly during this call.
        """
        self._move("begun")
        self.until = now + timeout
        interrupted = self.partition.draining
        self.abandoned = self.engine.drain(self.partition, close_prefix=self.close_prefix)
        if interrupted and not self.partition.unended:
            # An interrupted handler has drained the partition before, and the runtime has performed that effect.
            self.engine.effects.append(fx.Drained(self.partition))

    def hasten(self, now: float, timeout: float) -> None:
        """Wait at most ``timeout`` seconds from ``now`` for running handlers.

        The call has an effect only in the phase ``ENDING``.
        """
        if self.phase == ENDING:
            self.until = min(self.until, now + timeout)

    def tell(self, event: str, now: float) -> None:
        """Apply an event, and change to the next phase.

        Args:
            event: The event. After the engine has lost the partition, the caller may repeat ``lost`` in every phase
                except ``idle`` and ``handed over``.
            now: Clock reading in seconds.

        Raises:
            IllegalEvent: The phase does not allow the event.
        """
        before, until = self.phase, self.until
        self._move(event)
        if self.phase == before:
            return
        self.abandoned, self.until = [], NEVER
        if self.phase == CANCELLING:
            self.until = now + self.limits.grace
            # A message that started in the grace would not be cancelled.
            self.abandoned = self.engine.stop_closing(self.partition)
        elif self.phase == SETTLING:
            left = until - now if before == ENDING else 0.0
            self.until = now + max(self.limits.settle, left if left < NEVER else self.limits.last)
            self.abandoned = [m for m in self.partition.ledger.unfinished() if m.state != RUNNING]
            self.zombies = self.engine.fence(self.partition)
        elif self.phase == KEEPING:
            self.until = until
        elif self.phase == RELEASING and self.partition.commits is not None:
            # Messages that could not be settled in time run again. The next owner may commit before the release
            # returns, so this process must begin no further commit.
            self.partition.commits.over = True
        elif self.phase == HANDED_OVER:
            self.engine.release(self.partition)

    def _move(self, event: str) -> None:
        following = TRANSITIONS.get((self.phase, event))
        if following is None:
            raise IllegalEvent(
                f"drain of {self.partition.id}: {event!r} is not allowed while {self.phase}; a bug of lanes, please "
                "report it"
            )
        self.phase = following

    def __repr__(self) -> str:
        return f"<PartitionDrain of {self.partition.id}, {self.phase}>"
