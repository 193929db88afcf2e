"""Attempts that outlive an assignment: the contract between ``lanes`` and a store of attempts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

from lanes.core.types import Message, Partition
from lanes.errors import MessageError

AttemptState = Literal["held", "blocked", "parking"]
"""The next step of a failed message.

``"held"`` = its next attempt, ``"blocked"`` = ``Consumer.unblock`` or ``park``, ``"parking"`` = the confirmation of its
dead letter.
"""


class Attempt(NamedTuple):
    """The attempts of a message that has failed.

    Attributes:
        attempts: Number of attempts so far, 1 or more.
        state: The next step.
        error_type: Type of the exception of the last attempt.
    """

    attempts: int
    state: AttemptState
    error_type: str


class Attempts(Protocol):
    """A store of failed messages, so that the next owner of a partition continues their attempts.

    All calls come from one event loop. Several may run at once, but never two for the same message. Each is idempotent
    and cancel-safe: a cancelled call took effect completely or not at all. An exception counts as retryable, and the
    call is repeated for as long as it takes. A ``SourceError`` that is not retryable, and any other error of
    ``lanes``, stop the consumer in order.
    """

    async def load(self, partition: Partition) -> Mapping[int, Attempt]:
        """Load the attempts that former owners have stored.

        Args:
            partition: The new assignment.

        Returns:
            The attempts by position.
        """

    async def keep(self, message: Message, attempt: Attempt) -> None:
        """Store a failed attempt; durable when it returns.

        A newer entry stays unchanged: one of an owner with a higher fencing token, or with more attempts. That is no
        error, because the source decides about ownership.

        Args:
            message: The message that has failed.
            attempt: Its attempts so far.
        """

    async def drop(self, partition: Partition, positions: Sequence[int]) -> None:
        """Delete the entries of messages that are settled. Those of an owner with a higher fencing token stay.

        Args:
            partition: The assignment that settled the messages.
            positions: One position, or several hundred.
        """


class GivenUpBefore(MessageError):
    """A message was given up under an earlier assignment; its handler is not called again.

    ``error_type``: type of the exception of its last attempt. ``blocked``: whether its lane was blocked, and blocks
    again; otherwise its dead letter may be unwritten.

    Args:
        attempt: Its entry in the store.
    """

    def __init__(self, attempt: Attempt) -> None:
        super().__init__(
            f"the message was given up by an earlier owner of its partition, after {attempt.attempts} attempt(s) with "
            f"{attempt.error_type}"
        )
        self.error_type = attempt.error_type
        self.blocked = attempt.state == "blocked"


def given_up_before(message: Message) -> bool:
    """Whether a message was given up under an earlier assignment, so that its handler must not be called."""
    return isinstance(message.broken, GivenUpBefore)


def error_type(error: BaseException) -> str:
    """The name of an exception's type; for a message that was given up before, the type of its last failure then."""
    return error.error_type if isinstance(error, GivenUpBefore) else type(error).__qualname__
