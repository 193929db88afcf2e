"""Attempts that outlive their assignment: the contract between ``lanes`` and a store of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

from lanes.core.types import Message, Partition
from lanes.errors import MessageError

__all__ = ["Attempt", "AttemptState", "Attempts", "GivenUpBefore", "error_type", "given_up_before"]

AttemptState = Literal["held", "blocked", "parking"]
"""What a failed message waits for: its next attempt; for somebody to unblock or park it; for its dead letter."""


class Attempt(NamedTuple):
    """What is known of a message that has failed: ``attempts`` so far, 1 or more; ``error_type`` of the last one."""

    attempts: int
    state: AttemptState
    error_type: str


class Attempts(Protocol):
    """Where failed messages are kept, so that the next owner of their partition goes on with their attempts.

    All calls come from one event loop, several of them at once, never two about one message. Each is cancel-safe (it
    has happened or not) and idempotent. Any exception is taken for one that will pass, and the call is repeated for as
    long as it takes; but a ``SourceError`` that is not retryable, and any other error of ``lanes``, such as
    ``ConfigError``, stop the consumer in order.
    """

    async def load(self, partition: Partition) -> Mapping[int, Attempt]:
        """What former owners have kept of a partition that was assigned just now, by position."""

    async def keep(self, message: Message, attempt: Attempt) -> None:
        """Keep that a message has failed; durable when it returns.

        Changes nothing where something newer is there: of an owner with a higher fencing token, or more attempts. Who
        owns a partition is for the source to say, so nobody is told.
        """

    async def drop(self, partition: Partition, positions: Sequence[int]) -> None:
        """Forget messages of a partition that are finished and settled: one position, or some hundred.

        What an owner with a higher fencing token has kept stays.
        """


class GivenUpBefore(MessageError):
    """The attempts of a message were used up under an earlier assignment; its handler is not called again.

    ``error_type``: the type of what it failed with last. ``blocked``: its lane stood still, and does so again; else its
    dead letter was not known to be written.
    """

    def __init__(self, attempt: Attempt) -> None:
        super().__init__(
            f"given up by an earlier owner of its partition, after {attempt.attempts} attempt(s) with "
            f"{attempt.error_type}"
        )
        self.error_type = attempt.error_type
        self.blocked = attempt.state == "blocked"


def given_up_before(message: Message) -> bool:
    """Whether its handler is not to be called because it was given up under an earlier assignment."""
    return isinstance(message.broken, GivenUpBefore)


def error_type(error: BaseException) -> str:
    """The name of its type; of a message that was given up before, what it failed with then."""
    return error.error_type if isinstance(error, GivenUpBefore) else type(error).__qualname__
