"""A lane: the messages of one key, in order, at most one of them running.

A live lane is a *chain*: ``Partition.tails[key]`` is its last message, ``Message.next`` the one behind, and its
head is queued in the engine or runs. There is no object for it. Only a lane whose head is out of the ordinary,
held for a retry, blocked or on its way to the dead letters, has a ``Lane``.

The state of a lane is the state of its head. ``TRANSITIONS`` is the whole machine: any pair that is not in it
raises ``IllegalTransition``. The engine writes the two transitions of the hot path, ``start`` and ``ack``, in
line; everything else goes through ``step``.
"""

from __future__ import annotations

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
BLOCKED: Final = 8
ARCHIVING: Final = 9

STATE_NAMES: Final = (
    "new",
    "queued",
    "running",
    "held",
    "parking",
    "finished",
    "settled",
    "abandoned",
    "blocked",
    "archiving",
)

TRANSITIONS: Final[dict[tuple[int, str], int]] = {
    (NEW, "admit"): QUEUED,
    (NEW, "settle"): SETTLED,
    (NEW, "abandon"): ABANDONED,
    (QUEUED, "start"): RUNNING,
    (QUEUED, "abandon"): ABANDONED,
    (RUNNING, "ack"): FINISHED,
    (RUNNING, "return"): QUEUED,
    (RUNNING, "retry"): HELD,
    (RUNNING, "give up"): PARKING,
    (RUNNING, "block"): BLOCKED,
    (RUNNING, "archive"): ARCHIVING,
    (RUNNING, "abandon"): ABANDONED,
    (HELD, "due"): QUEUED,
    (HELD, "park"): PARKING,
    (HELD, "abandon"): ABANDONED,
    (BLOCKED, "unblock"): QUEUED,
    (BLOCKED, "park"): PARKING,
    (BLOCKED, "abandon"): ABANDONED,
    (ARCHIVING, "parked"): BLOCKED,
    (ARCHIVING, "abandon"): ABANDONED,
    (PARKING, "parked"): FINISHED,
    (PARKING, "abandon"): ABANDONED,
    (FINISHED, "settle"): SETTLED,
    (FINISHED, "abandon"): ABANDONED,
}
"""(state, event) -> state. ``admit`` and ``settle`` happen to whole runs, ``start`` and ``ack`` in line; ``return`` is
what becomes of the rest of a lane in a batch behind one that was not acknowledged."""


class IllegalTransition(Exception):
    """An event that the state of a lane does not allow: a bug in ``lanes`` or in a source, never in a handler."""


class Lane:
    """A lane whose head is held, blocked or parking: why, and until when (engine seconds) if it is held.

    ``kept``: the failure is in the store of attempts, or there is none; a hold does not end before.
    """

    __slots__ = ("failure", "head", "kept", "until")

    def __init__(self, head: Message, failure: Failure, until: float, kept: bool = True) -> None:
        self.head = head
        self.failure = failure
        self.until = until
        self.kept = kept

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
        f"{STATE_NAMES[message.state]}: a bug of lanes or of its source, please report it"
    )
