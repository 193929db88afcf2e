"""A lane: the messages of one key, in order, at most one of them running.

A live lane is a *chain*: ``Partition.tails[key]`` is its last message, ``Message.next`` the one behind, and its
head is queued in the engine or runs. There is no object for it. Only a lane whose head is out of the ordinary,
held for a retry or on its way to the dead letters, has a ``Lane``.

The state of a lane is the state of its head. ``TRANSITIONS`` is the whole machine: any pair that is not in it
raises ``IllegalTransition``. The engine writes the two transitions of the hot path, ``start`` and ``ack``, in
line; everything else goes through ``step``.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from lanes.core.types import Failure, Message

# Plain ints, not an Enum: the engine compares one of them for every message.
NEW: Final = 0
QUEUED: Final = 1
RUNNING: Final = 2
HELD: Final = 3
PARKING: Final = 4
FINISHED: Final = 5
SETTLED: Final = 6
ABANDONED: Final = 7

STATE_NAMES: Final = ("new", "queued", "running", "held", "parking", "finished", "settled", "abandoned")

TRANSITIONS: Final[dict[tuple[int, str], int]] = {
    (NEW, "admit"): QUEUED,
    (QUEUED, "start"): RUNNING,
    (QUEUED, "abandon"): ABANDONED,
    (RUNNING, "ack"): FINISHED,
    (RUNNING, "retry"): HELD,
    (RUNNING, "give up"): PARKING,
    (RUNNING, "abandon"): ABANDONED,
    (HELD, "due"): QUEUED,
    (HELD, "abandon"): ABANDONED,
    (PARKING, "parked"): FINISHED,
    (PARKING, "abandon"): ABANDONED,
    (FINISHED, "settle"): SETTLED,
    (FINISHED, "abandon"): ABANDONED,
}
"""(state, event) -> state. ``admit`` and ``settle`` happen to whole runs, ``start`` and ``ack`` in line."""


class IllegalTransition(ValueError):
    """An event that the state of a lane does not allow: a bug in ``lanes`` or in a source, never in a handler."""


class Lane:
    """A lane whose head is held or parking: why, and until when (engine seconds; 0.0 while parking)."""

    __slots__ = ("failure", "head", "until")

    def __init__(self, head: Message, failure: Failure, until: float) -> None:
        self.head = head
        self.failure = failure
        self.until = until

    def __repr__(self) -> str:
        return f"<Lane {STATE_NAMES[self.head.state]} at {self.head.partition.id} position {self.head.position}>"


def step(message: Message, event: str) -> None:
    """Move a message along the table, or raise ``IllegalTransition`` naming lane, state and event."""
    following = TRANSITIONS.get((message.state, event))
    if following is None:
        raise illegal(message, event)
    message.state = following


def illegal(message: Message, event: str) -> IllegalTransition:
    """The error for an event that the message's state does not allow."""
    return IllegalTransition(
        f"lane of {message.partition.id} position {message.position}: {event!r} is not allowed while "
        f"{STATE_NAMES[message.state]}"
    )


def insert(message: Message, lane: list[Message], tails: dict[bytes, Message], ready: deque[Message]) -> None:
    """Put a late message into the chain of its key by position.

    ``lane`` is every unfinished message of that key, fenced handlers and the new message included. O(in flight):
    it happens only to deliveries that were lost on the way. A head that still waits in ``ready`` gives way to a
    lower position; one that has started cannot, and the late message follows it.
    """
    key = message.key
    assert key is not None
    others = [m for m in lane if m is not message]
    if not others:
        tails[key] = message
        ready.append(message)
        return
    # A head that waits in the queue for its next attempt has started: it stays the head, even above lower ones.
    started = [m for m in others if m.state != QUEUED or m.attempt > 1]
    below = [m for m in others if m not in started and m.position < message.position]
    if not started and not below:
        # The head of a lane in which nothing has started is in the ready queue: take its place there.
        head = min(others, key=_position)
        ready[ready.index(head)] = message
        message.next = head
        return
    # Behind the last queued one below it, else right behind the message that has started: the chain's own order
    # is started first, then queued by position.
    before = max(below, key=_position) if below else started[0]
    message.next = before.next
    before.next = message
    if message.next is None:
        tails[key] = message


def _position(message: Message) -> int:
    return message.position
