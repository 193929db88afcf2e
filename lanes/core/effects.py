"""The effects of the engine: rare things that the runtime performs, in the order given."""

from __future__ import annotations

from typing import Final

from lanes.core.policy import Follows
from lanes.core.types import Failure, Message, Partition

STILL_IN_FLIGHT: Final = "held"
ALREADY_SETTLED: Final = "settled"
LATE: Final = "late"


class Effect:
    """Base of the effects, which are plain records."""

    __slots__ = ()


class Failed(Effect):
    """Base of the effects of a failed attempt; ``follows`` is the next step."""

    __slots__ = ("failure", "follows", "message")

    def __init__(self, message: Message, failure: Failure, follows: Follows) -> None:
        self.message = message
        self.failure = failure
        self.follows = follows


class Held(Failed):
    """The head of a lane waits ``delay`` seconds for its next attempt, counted from the failed call."""

    __slots__ = ("delay",)

    def __init__(self, message: Message, failure: Failure, delay: float) -> None:
        super().__init__(message, failure, "hold")
        self.delay = delay


class DeadLetterDue(Failed):
    """Write the message to the dead letters, for as long as it takes, then call ``Engine.dead_lettered``.

    The message is then done (``dead_letter``), or its lane blocks (``dead_letter_and_block``).
    """

    __slots__ = ()


class Halted(Failed):
    """The poison policy stops the consumer: drain everything. The message itself stays unsettled."""

    __slots__ = ()


class Blocked(Failed):
    """The poison policy blocks the lane until ``Engine.unblock`` or ``Engine.park``."""

    __slots__ = ()


class Interrupted(Failed):
    """The message failed while its partition drained, and was abandoned: ``follows`` happens at the next owner."""

    __slots__ = ()


class Abandoned(Effect):
    """These messages are not handled under this assignment, because a handler before them was interrupted."""

    __slots__ = ("messages",)

    def __init__(self, messages: list[Message]) -> None:
        self.messages = messages


class Drained(Effect):
    """No handler of the draining partition runs any more: settle its finished messages, then release it."""

    __slots__ = ("partition",)

    def __init__(self, partition: Partition) -> None:
        self.partition = partition


class Redelivered(Effect):
    """A position came again, for one of three causes.

    ``held``: the message is in flight, and its token was swapped. ``settled``: it is settled again, not run. ``late``:
    it is unknown and below delivered positions, and was admitted in its place.
    """

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
    """A bound is reached: stop taking from the source."""

    __slots__ = ()


class Resumed(Effect):
    """Both budgets are below their low marks: take from the source again."""

    __slots__ = ()


class AheadReached(Effect):
    """``max_ahead`` messages were admitted above the confirmed floor: no more of the partition is taken.

    ``oldest`` is the unfinished message that holds the floor; None when only a confirmation is missing.
    """

    __slots__ = ("oldest", "partition")

    def __init__(self, partition: Partition, oldest: Message | None) -> None:
        self.partition = partition
        self.oldest = oldest


class AheadLeft(Effect):
    """The broker confirmed a higher floor: take from the partition again."""

    __slots__ = ("partition",)

    def __init__(self, partition: Partition) -> None:
        self.partition = partition


class PauseDue(Effect):
    """A bound lasts: pause the clients, as ``Engine.room`` says from now on."""

    __slots__ = ()
