"""The effects of the engine: rare tasks that the runtime performs, in the order of the list ``Engine.effects``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lanes.core.policy import Follows
from lanes.core.publishing import Produced
from lanes.core.types import Failure, Message, Parting, Partition

STILL_IN_FLIGHT: Final = "held"
ALREADY_SETTLED: Final = "settled"
LATE: Final = "late"


class Effect:
    """Base of the effects, which are plain records."""

    __slots__ = ()


@dataclass(slots=True, eq=False)
class Failed(Effect):
    """Base of the effects of a failed attempt.

    Attributes:
        message: The message that failed.
        failure: The failed attempt.
        follows: The next step under the retry and poison policies.
    """

    message: Message
    failure: Failure
    follows: Follows


@dataclass(slots=True, eq=False)
class Held(Failed):
    """The head of a lane waits for its next attempt.

    Attributes:
        delay: Minimum number of seconds from the end of the failed attempt to the next attempt.
    """

    delay: float


@dataclass(slots=True, eq=False)
class PublishDue(Effect):
    """Send the outputs of the message; then call ``Engine.published`` or ``Engine.publish_failed``.

    Attributes:
        message: The message, which keeps its lane.
        produced: The outputs.
    """

    message: Message
    produced: Produced


@dataclass(slots=True, eq=False)
class PublishHeld(Effect):
    """A send of the outputs failed. A ``PublishDue`` for the next send follows.

    Attributes:
        message: The message, which keeps its lane.
        failure: The failed send.
        sends: Number of failed sends of the message.
        delay: Seconds until the next send.
    """

    message: Message
    failure: Failure
    sends: int
    delay: float


class DeadLetterDue(Failed):
    """Write the message to the dead letters until the broker confirms it; then call ``Engine.dead_lettered``.

    The message is then finished (``dead_letter``), or its lane blocks (``dead_letter_and_block``).
    """

    __slots__ = ()


class Halted(Failed):
    """The poison policy stops the consumer: drain every partition. The failed message stays unsettled."""

    __slots__ = ()


class Blocked(Failed):
    """The poison policy blocks the lane until ``Engine.unblock`` or ``Engine.park``."""

    __slots__ = ()


class Interrupted(Failed):
    """The message failed while its partition drained, and the engine abandoned it.

    A store of attempts keeps ``follows`` for the next owner.
    """

    __slots__ = ()


@dataclass(slots=True, eq=False)
class Abandoned(Effect):
    """The engine abandoned the messages.

    The runtime interrupted the handler of an earlier message, or the handler of a message of a released part failed.
    """

    messages: list[Message]


@dataclass(slots=True, eq=False)
class Drained(Effect):
    """No handler of the draining partition runs. Settle finished messages, and then release the partition."""

    partition: Partition


@dataclass(slots=True, eq=False)
class Redelivered(Effect):
    """The source delivered a known position, or a position below the highest delivered position.

    Attributes:
        message: The new delivery.
        cause: ``held`` = the message is still in flight, and now has the token of the new delivery. ``settled`` = the
            message is finished; the engine settles it again, and no handler runs. ``late`` = the position is unknown
            and below a delivered position, and the engine has admitted the message.
    """

    message: Message
    cause: str


@dataclass(slots=True, eq=False)
class Parted(Effect):
    """No handler of a released part of a partition runs: store the finished messages, and hand the part over.

    Attributes:
        partition: The assignment, which keeps its other messages.
        parting: The part.
    """

    partition: Partition
    parting: Parting


@dataclass(slots=True, eq=False)
class Zombie(Effect):
    """A handler of a fenced assignment ended, and the engine ignored its result."""

    message: Message


class Saturated(Effect):
    """Messages or bytes in flight have reached a bound. Stop receiving messages from the source."""

    __slots__ = ()


class Resumed(Effect):
    """Receive messages from the source again.

    Messages and bytes in flight are at or below their low water, or a handler has been idle although they are below
    their bounds.
    """

    __slots__ = ()


@dataclass(slots=True, eq=False)
class AheadReached(Effect):
    """The engine has admitted ``max_ahead`` messages above the confirmed floor.

    Stop receiving messages of the partition.

    Attributes:
        partition: The assignment.
        oldest: The unfinished message at the floor; None = every message is finished, and the broker has not confirmed
            the floor.
    """

    partition: Partition
    oldest: Message | None


@dataclass(slots=True, eq=False)
class AheadLeft(Effect):
    """The broker confirmed a higher floor. Receive messages of the partition again."""

    partition: Partition


@dataclass(slots=True, eq=False)
class PartitionResumed(Effect):
    """The budget of a full partition is at or below its low water.

    Receive messages of the partition again.
    """

    partition: Partition


class PauseDue(Effect):
    """A bound has stopped the deliveries for ``PAUSE_AFTER`` seconds.

    Pause the partitions that ``Engine.room`` names.
    """

    __slots__ = ()
