"""The outputs that a simulated broker shows to readers, for the checkers of outputs."""

from __future__ import annotations

from typing import NamedTuple


class VisibleOutput(NamedTuple):
    """One output that a broker has stored. A repeated send is a second output.

    Attributes:
        at: Time on the clock of the histories, in seconds.
        target: Topic or subject of the output.
        key: Digest of the key of the output; None = no key.
        partition: Partition of the message whose handler made the output.
        position: Position of the message.
        message_key: Digest of the key of the message; None = no key.
        attempt: Number of the attempt.
        number: Number of the output in its attempt, from 1.
    """

    at: float
    target: str
    key: str | None
    partition: str
    position: int
    message_key: str | None
    attempt: int
    number: int
