"""The outputs of handlers that the broker has not confirmed, and the batch messages that wait for them.

The handler of a message may leave *outputs*, which the runtime sends after the handler has succeeded. The message is
``PUBLISHING`` until the broker has confirmed its outputs. Until then the next message of its lane does not start, but
another handler may start.

A batch calls a handler with several messages of a lane. While an earlier message of the lane is publishing, a later
message of the batch is ``HANDLED``. The engine stores the outcome of the later message, and applies the outcome when
the message is the head.
"""

from __future__ import annotations

from dataclasses import dataclass

from lanes.core.types import Message, Outcome


@dataclass(slots=True, eq=False, repr=False)
class Produced(Outcome):
    """The outcome of a handler that succeeded and has left outputs, which the runtime must now send.

    Attributes:
        outputs: The outputs, which only the runtime reads.
        size: Size of the outputs in memory, in bytes.
    """

    outputs: object
    size: int


class Publishing:
    """The unconfirmed outputs of one engine.

    Attributes:
        produced: The outputs of each message in the state ``PUBLISHING`` or ``PUBLISH_HELD``, and the number of their
            failed sends.
        handled: The outcome of each ``HANDLED`` message, and the time of its handler's end.
        size: Sum of the sizes of all outputs in memory, in bytes.
    """

    __slots__ = ("handled", "produced", "size")

    def __init__(self) -> None:
        self.produced: dict[Message, tuple[Produced, int]] = {}
        self.handled: dict[Message, tuple[Outcome, float]] = {}
        self.size: int = 0

    def begin(self, message: Message, produced: Produced) -> None:
        """Add the outputs of a message."""
        self.produced[message] = produced, 0
        self.size += produced.size

    def failed(self, message: Message) -> int:
        """Count a failed send of a message, and return the number of its failed sends."""
        produced, sends = self.produced[message]
        self.produced[message] = produced, sends + 1
        return sends + 1

    def defer(self, message: Message, outcome: Outcome, now: float) -> None:
        """Store the outcome of a message of a batch whose predecessor is publishing."""
        self.handled[message] = outcome, now
        self.size += _size(outcome)

    def take(self, message: Message) -> tuple[Outcome, float]:
        """Remove and return the outcome of a ``HANDLED`` message, and the time of its handler's end."""
        outcome, at = self.handled.pop(message)
        self.size -= _size(outcome)
        return outcome, at

    def forget(self, message: Message) -> None:
        """Drop the outputs and the outcome of a message. Idempotent."""
        if message in self.produced:
            self.size -= self.produced.pop(message)[0].size
        elif message in self.handled:
            self.take(message)

    def __repr__(self) -> str:
        return f"<Publishing {len(self.produced)} messages, {self.size} bytes>"


def _size(outcome: Outcome) -> int:
    return outcome.size if isinstance(outcome, Produced) else 0
