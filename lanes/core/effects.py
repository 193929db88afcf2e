"""What leaves the engine besides messages to run: rare things the shell performs, in the order given."""

from __future__ import annotations

from typing import Final

from lanes.core.policy import Follows
from lanes.core.types import Failure, Message, Partition

STILL_IN_FLIGHT: Final = "held"
ALREADY_SETTLED: Final = "settled"
LATE: Final = "late"


class Effect:
    """Base of the effects; each is a plain record."""

    __slots__ = ()


class Failed(Effect):
    """Base of those that say what ``follows`` a failed attempt."""

    __slots__ = ("failure", "follows", "message")

    def __init__(self, message: Message, failure: Failure, follows: Follows) -> None:
        self.message = message
        self.failure = failure
        self.follows = follows


class Held(Failed):
    """The head of a lane waits for its next attempt, ``delay`` seconds from the call that failed."""

    __slots__ = ("delay",)

    def __init__(self, message: Message, failure: Failure, delay: float) -> None:
        super().__init__(message, failure, "hold")
        self.delay = delay


class DeadLetterDue(Failed):
    """Write the message to the dead letters, for as long as it takes, then call ``Engine.dead_lettered``: it is
    done then (``dead_letter``), or its lane stands still (``dead_letter_and_block``)."""

    __slots__ = ()


class Halted(Failed):
    """The poison policy says stop: drain everything; the message itself stays unsettled."""

    __slots__ = ()

    def __init__(self, message: Message, failure: Failure) -> None:
        super().__init__(message, failure, "halt")


class Blocked(Failed):
    """The poison policy says block: the lane stands still until ``Engine.unblock`` or ``Engine.park``."""

    __slots__ = ()

    def __init__(self, message: Message, failure: Failure) -> None:
        super().__init__(message, failure, "block")


class Interrupted(Failed):
    """It failed while its partition drained, and was abandoned: what ``follows`` is up to the next owner."""

    __slots__ = ()


class Abandoned(Effect):
    """These will not be handled under this assignment: a handler before them was interrupted."""

    __slots__ = ("messages",)

    def __init__(self, messages: list[Message]) -> None:
        self.messages = messages


class Drained(Effect):
    """Nothing of the draining partition runs any more: settle what is finished, then release it."""

    __slots__ = ("partition",)

    def __init__(self, partition: Partition) -> None:
        self.partition = partition


class Redelivered(Effect):
    """A position came again. ``cause``: ``held`` (its token was swapped), ``settled`` (it is settled again, not
    run) or ``late`` (unknown and below what was already delivered: admitted in its place)."""

    __slots__ = ("cause", "message")

    def __init__(self, message: Message, cause: str) -> None:
        self.message = message
        self.cause = cause


class Zombie(Effect):
    """A handler of a fenced assignment ended; its result changed nothing."""

    __slots__ = ("message",)

    def __init__(self, message: Message) -> None:
        self.message = message


class Saturated(Effect):
    """A bound is reached: stop taking from the sources."""

    __slots__ = ()


class Resumed(Effect):
    """Below the low mark again: go on taking."""

    __slots__ = ()


class AheadReached(Effect):
    """``max_ahead`` messages were admitted above the confirmed floor: nothing more of the partition is taken.

    ``oldest`` is the unfinished message that holds the floor, or None when only a confirmation is missing.
    """

    __slots__ = ("oldest", "partition")

    def __init__(self, partition: Partition, oldest: Message | None) -> None:
        self.partition = partition
        self.oldest = oldest


class AheadLeft(Effect):
    """The floor was confirmed further on: go on taking from the partition."""

    __slots__ = ("partition",)

    def __init__(self, partition: Partition) -> None:
        self.partition = partition


class PauseDue(Effect):
    """Nothing was taken for so long that the clients should be paused: ``Engine.room`` says so from now on."""

    __slots__ = ()
