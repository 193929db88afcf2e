"""A lane: messages that run in order, by default the messages of one key.

A live lane is a *chain* without a separate object. ``Partition.tails[key]`` is the last message of the lane, and
``Message.next`` is the successor of a message. The *head* is the first unfinished message, which is queued in the
engine or runs. A lane has a ``StoppedLane`` only while its head waits for a retry, is blocked, or waits for its dead
letter.

The state of a lane is the state of its head. ``TRANSITIONS`` lists every allowed pair of state and event. Any other
pair raises ``IllegalTransition``. The hot path makes the transitions ``admit``, ``start``, ``ack`` and ``settle``
itself. ``step`` makes all other transitions.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final

from lanes.core.types import NEVER, Failure, Message

# Plain ints, because the engine compares a state for every message, and members of an Enum compare more slowly.
NEW: Final = 0
QUEUED: Final = 1
RUNNING: Final = 2
HELD: Final = 3
DEAD_LETTERING: Final = 4
FINISHED: Final = 5
SETTLED: Final = 6
ABANDONED: Final = 7
BLOCKED: Final = 8
DEAD_LETTERING_BLOCKED: Final = 9
PUBLISHING: Final = 10
PUBLISH_HELD: Final = 11
HANDLED: Final = 12

STATE_NAMES: Final = (
    "new",
    "queued",
    "running",
    "held",
    "dead_lettering",
    "finished",
    "settled",
    "abandoned",
    "blocked",
    "dead_lettering_blocked",
    "publishing",
    "publish_held",
    "handled",
)

UNENDED: Final = frozenset({RUNNING, PUBLISHING, PUBLISH_HELD, HANDLED})
"""The states of a message that a drain waits for: its handler runs, or has succeeded and left unconfirmed outputs."""

TRANSITIONS: Final[dict[tuple[int, str], int]] = {
    (NEW, "admit"): QUEUED,
    (NEW, "settle"): SETTLED,
    (NEW, "abandon"): ABANDONED,
    (QUEUED, "start"): RUNNING,
    (QUEUED, "abandon"): ABANDONED,
    (RUNNING, "ack"): FINISHED,
    (RUNNING, "return"): QUEUED,
    (RUNNING, "retry"): HELD,
    (RUNNING, "dead_letter"): DEAD_LETTERING,
    (RUNNING, "block"): BLOCKED,
    (RUNNING, "dead_letter_and_block"): DEAD_LETTERING_BLOCKED,
    (RUNNING, "abandon"): ABANDONED,
    (RUNNING, "publish"): PUBLISHING,
    (RUNNING, "handle"): HANDLED,
    (PUBLISHING, "ack"): FINISHED,
    (PUBLISHING, "retry_publish"): PUBLISH_HELD,
    (PUBLISHING, "dead_letter"): DEAD_LETTERING,
    (PUBLISHING, "block"): BLOCKED,
    (PUBLISHING, "dead_letter_and_block"): DEAD_LETTERING_BLOCKED,
    (PUBLISHING, "abandon"): ABANDONED,
    (PUBLISH_HELD, "due"): PUBLISHING,
    (PUBLISH_HELD, "park"): DEAD_LETTERING,
    (PUBLISH_HELD, "abandon"): ABANDONED,
    (HANDLED, "ack"): FINISHED,
    (HANDLED, "return"): QUEUED,
    (HANDLED, "publish"): PUBLISHING,
    (HANDLED, "retry"): HELD,
    (HANDLED, "dead_letter"): DEAD_LETTERING,
    (HANDLED, "block"): BLOCKED,
    (HANDLED, "dead_letter_and_block"): DEAD_LETTERING_BLOCKED,
    (HANDLED, "abandon"): ABANDONED,
    (HELD, "due"): QUEUED,
    (HELD, "park"): DEAD_LETTERING,
    (HELD, "abandon"): ABANDONED,
    (BLOCKED, "unblock"): QUEUED,
    (BLOCKED, "park"): DEAD_LETTERING,
    (BLOCKED, "abandon"): ABANDONED,
    (DEAD_LETTERING_BLOCKED, "dead_lettered"): BLOCKED,
    (DEAD_LETTERING_BLOCKED, "abandon"): ABANDONED,
    (DEAD_LETTERING, "dead_lettered"): FINISHED,
    (DEAD_LETTERING, "abandon"): ABANDONED,
    (FINISHED, "settle"): SETTLED,
    (FINISHED, "abandon"): ABANDONED,
}
"""(state, event) -> state.

``return`` is an event of batches and leases: an earlier message of the lane was not acknowledged, another message of
the batch interrupted the call, or the lease had expired. ``handle`` is an event of batches: the outcome of the message
waits, because an earlier message of its lane is publishing. ``retry_publish``: the runtime sends the outputs again
later.
"""


class IllegalTransition(Exception):
    """Error for an event that the state of a lane does not allow.

    The cause is a bug of ``lanes`` or of a source, never of a handler.
    """


@dataclass(slots=True, eq=False)
class StoppedLane:
    """A lane whose head waits for a retry, a dead letter or the next send of its outputs, or is blocked.

    Attributes:
        head: The first message of the lane.
        failure: The last failure of the head.
        until: Earliest time at which the hold may end, in seconds of the engine's clock; 0 = the lane waits without a
            time limit.
        kept: Whether the hold may end: the store of attempts has the failure, or the consumer has no store.
    """

    head: Message
    failure: Failure
    until: float
    kept: bool = True

    def __repr__(self) -> str:
        return f"<StoppedLane {STATE_NAMES[self.head.state]} at {self.head.partition.id} position {self.head.position}>"


def step(message: Message, event: str) -> None:
    """Apply an event to a message. Raises ``IllegalTransition`` if the message's state does not allow the event."""
    following = TRANSITIONS.get((message.state, event))
    if following is None:
        raise illegal(message, event)
    message.state = following


def illegal(message: Message, event: str) -> IllegalTransition:
    """Make the error for an event that the state of a message does not allow."""
    return IllegalTransition(
        f"lane of {message.partition.id} position {message.position}: {event!r} is not allowed while "
        f"{STATE_NAMES[message.state]}; a bug of lanes or of its source, please report it"
    )


def _may_park(head: Message) -> bool:
    partition = head.partition
    held = head.state == PUBLISH_HELD and partition.steady and not partition.partings
    return held or head.state in (BLOCKED, HELD)


class StoppedLanes:
    """The stopped lanes of one engine.

    Args:
        keeps: Whether a hold ends only after a call of ``kept`` for its head.

    Attributes:
        by_head: The lanes by their heads.
    """

    __slots__ = ("_heap", "_keeps", "_order", "by_head")

    def __init__(self, *, keeps: bool = False) -> None:
        self._keeps = keeps
        self.by_head: dict[Message, StoppedLane] = {}
        self._heap: list[tuple[float, int, Message]] = []
        self._order: int = 0

    def hold(self, message: Message, failure: Failure, until: float) -> None:
        """Hold a head for its next attempt."""
        step(message, "retry")
        self.by_head[message] = StoppedLane(message, failure, until, kept=not self._keeps)
        if not self._keeps:
            self._push(until, message)

    def hold_outputs(self, message: Message, failure: Failure, until: float) -> None:
        """Hold a head for the next send of its outputs."""
        step(message, "retry_publish")
        self.by_head[message] = StoppedLane(message, failure, until)
        self._push(until, message)

    def kept(self, message: Message) -> None:
        """Allow the hold of a message to end at its time.

        Idempotent. The call has no effect for a message that is not held.
        """
        lane = self.by_head.get(message)
        if lane is not None and not lane.kept and message.state == HELD:
            lane.kept = True
            self._push(lane.until, message)

    def _push(self, until: float, message: Message) -> None:
        # The order number keeps the heap from comparing messages.
        self._order += 1
        heappush(self._heap, (until, self._order, message))

    def stop(self, message: Message, event: str, failure: Failure) -> None:
        """Stop a head without a time limit.

        Args:
            message: The head.
            event: ``block``, ``dead_letter`` or ``dead_letter_and_block``.
            failure: The last failure of the head.
        """
        step(message, event)
        self.by_head[message] = StoppedLane(message, failure, 0.0)

    def due(self, now: float) -> list[Message]:
        """Remove and return the heads whose hold has ended.

        The call adds 1 to the attempt of each head that is queued again. The other heads are publishing again.
        """
        heap = self._heap
        over = []
        while heap and heap[0][0] <= now:
            message = heappop(heap)[2]
            # The heap may still contain abandoned or parked heads, which their state shows.
            if message.state in (HELD, PUBLISH_HELD):
                message.attempt += message.state == HELD
                step(message, "due")
                del self.by_head[message]
                over.append(message)
        return over

    def next_due(self) -> float:
        """Return the time at which the next hold ends. ``NEVER`` = no hold may end yet."""
        heap = self._heap
        while heap and heap[0][2].state not in (HELD, PUBLISH_HELD):
            heappop(heap)
        return heap[0][0] if heap else NEVER

    def unblock(self, key: bytes | None) -> list[Message]:
        """Remove and return the blocked heads of a key. The call adds 1 to the attempt of each head."""
        over = [m for m in self.by_head if m.key == key and m.state == BLOCKED]
        for message in over:
            step(message, "unblock")
            del self.by_head[message]
            message.attempt += 1
        return over

    def park(self, key: bytes | None) -> list[StoppedLane]:
        """Send the blocked and held heads of a key to the dead letters, and return their lanes.

        A head with unconfirmed outputs stays during a drain or the hand-over of a part, because both wait for the
        confirmation.
        """
        parked = [lane for m, lane in self.by_head.items() if m.key == key and _may_park(m)]
        for lane in parked:
            step(lane.head, "park")
        return parked

    def count(self, state: int) -> int:
        """Return the number of heads in a state."""
        return sum(1 for message in self.by_head if message.state == state)

    def __repr__(self) -> str:
        return f"<StoppedLanes {len(self.by_head)} stopped lanes>"
