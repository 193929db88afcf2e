"""The contract between ``lanes`` and a store of attempts, from which the next owner of a partition continues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

from lanes.core.types import Message, Partition
from lanes.errors import MessageError

AttemptState = Literal["held", "blocked", "parking"]
"""The event that a failed message waits for.

``"held"`` = its next attempt, ``"blocked"`` = ``Consumer.unblock`` or ``park``, ``"parking"`` = the confirmation of its
dead letter.
"""


class Attempt(NamedTuple):
    """The attempts of a message that has failed.

    Attributes:
        attempts: Number of failed attempts, 1 or more.
        state: The event that the message waits for.
        error_type: Type of the exception of the last attempt.
    """

    attempts: int
    state: AttemptState
    error_type: str


class Attempts(Protocol):
    """A store of failed messages, from which the next owner of a partition continues their attempts.

    The runtime makes all calls from one event loop. Several calls may run at once, but never two calls for the same
    message. Each call is idempotent and cancel-safe: a cancelled call has its complete effect or no effect. The
    consumer repeats a call after a retryable ``SourceError``, or after an exception that is not an error of ``lanes``.
    The consumer stops repeating the call when the call succeeds, or when the consumer releases or loses the partition.
    Any other error of ``lanes`` stops the consumer after a drain.
    """

    async def load(self, partition: Partition) -> Mapping[int, Attempt]:
        """Load the attempts that former owners have stored.

        Args:
            partition: The new assignment.

        Returns:
            The attempts by position. A position is 0 or more, and an entry has 1 … 2³¹−2 attempts. The consumer checks
            the entries. An invalid entry stops the consumer with ``ContractError`` after a drain.
        """

    async def keep(self, message: Message, attempt: Attempt) -> None:
        """Store a failed attempt durably before the call returns.

        The store does not replace an entry with a higher fencing token or more attempts. The store raises no error for
        an entry that it does not change, because the source decides about ownership.

        Args:
            message: The message that has failed.
            attempt: The failed attempts of the message.
        """

    async def drop(self, partition: Partition, positions: Sequence[int]) -> None:
        """Delete the entries of settled messages.

        The call does not delete entries of an owner with a higher fencing token.

        Args:
            partition: The assignment that settled the messages.
            positions: Positions of 1 to 500 messages.
        """


class GivenUpBefore(MessageError):
    """An earlier owner of the partition gave the message up, so the consumer does not call the handler again.

    Args:
        attempt: The entry of the message in the store.

    Attributes:
        error_type: Type of the exception of the message's last attempt.
        blocked: Whether the message blocked its lane in the earlier assignment, and therefore blocks the lane again.
            False = the earlier owner may not have written the dead letter of the message.
    """

    def __init__(self, attempt: Attempt) -> None:
        super().__init__(
            f"the message was given up by an earlier owner of its partition, after {attempt.attempts} attempt(s) with "
            f"{attempt.error_type}"
        )
        self.error_type = attempt.error_type
        self.blocked = attempt.state == "blocked"


def given_up_before(message: Message) -> bool:
    """Return whether an earlier owner gave up a message. If so, the consumer must not call the handler."""
    return isinstance(message.broken, GivenUpBefore)


def error_type(error: BaseException) -> str:
    """Return the type name of an exception; for ``GivenUpBefore``, the type name of the message's last failure."""
    return error.error_type if isinstance(error, GivenUpBefore) else type(error).__qualname__
