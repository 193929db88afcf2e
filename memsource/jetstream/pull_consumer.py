"""A durable pull consumer of JetStream as data: its deliveries, its redeliveries, and their order.

The consumer acts only during calls of its methods, which take the time as an argument. The rules are those of
nats-server, confirmed by measurements:

- The server delivers the queue of redeliveries strictly before new messages. Each run of the consumer's timer sorts the
  expired messages by sequence and appends them to the queue. A nak without a delay appends its message at once.
- The server redelivers an unacknowledged message of a dead process after its ``ack_wait``. The server delivers new
  messages meanwhile.
- An acknowledgement of any delivery counts while the message is unacknowledged, and removes the message from the queue.
  An in-progress acknowledgement restarts the ``ack_wait``, and leaves the message in the queue.
- ``max_ack_pending`` stops new messages only. The server drops a message silently after ``max_deliver`` deliveries.
- The server writes its state to disk every 0.1 s. ``kill`` discards unwritten changes, even confirmed changes.

Rules and names follow ``server/consumer.go`` of nats-server 2.10 to 2.15 (checkPending, processNak, getNextMsg).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from memsource.memory.broker import Delivery
from memsource.memory.topic import Log

_WRITTEN: Final = 0.1
"""Seconds after which the state is on disk."""

_TIMER_DELAY: Final = 0.001
"""Seconds between the due time and the timer, so that messages of one delivery expire together."""

_LOOK_AFTER_CHANGE: Final = 0.1
"""Seconds after a change of ack_wait until the timer runs."""

_LOOK_AFTER_NAK: Final = 0.01
"""Seconds after a nak with a delay until the timer runs."""

_LOOK_AFTER_START: Final = 1.0
"""Seconds from a start to the run of the timer, unless ``ack_wait`` is shorter. nats-server draws 0.5 to 1.5 s."""

_REMEMBERED: Final = 256
"""Number of the last acknowledgements that the server can still lose."""


@dataclass(frozen=True, kw_only=True)
class ConsumerSettings:
    """Settings of a durable. Raises ``ValueError`` for a value that is not above 0.

    Attributes:
        ack_wait: Seconds until an unacknowledged message is due again, more than 0.
        backoff: Seconds of the first, second and further waits, instead of ``ack_wait``. The last value applies to all
            later waits.
        max_deliver: Maximum number of deliveries of a message, 1 or more; None = no bound.
        max_ack_pending: Number of unacknowledged messages that stops new messages, 1 or more; None = no bound.
    """

    ack_wait: float = 30.0
    backoff: tuple[float, ...] = ()
    max_deliver: int | None = None
    max_ack_pending: int | None = 1000

    def __post_init__(self) -> None:
        if not all(seconds > 0 for seconds in (self.ack_wait, *self.backoff)):
            raise ValueError(f"ack_wait={self.ack_wait}, backoff={self.backoff}: must be more than 0 seconds")
        for name, bound in (("max_deliver", self.max_deliver), ("max_ack_pending", self.max_ack_pending)):
            if bound is not None and bound < 1:
                raise ValueError(f"{name}={bound}: must be 1 or more, or None")

    def wait(self, repeats: int) -> float:
        """Return the seconds until a message is due again after ``repeats`` redeliveries."""
        return self.backoff[min(repeats, len(self.backoff) - 1)] if self.backoff else self.ack_wait


class _Pending(NamedTuple):
    """An unacknowledged message.

    Attributes:
        token: Number of the message's first delivery.
        stamp: Time in seconds at which the wait for an acknowledgement began.
    """

    token: int
    stamp: float


class _Change(NamedTuple):
    """The state that a change at ``time`` has replaced."""

    time: float
    sequence: int
    pending: _Pending | None
    repeats: int
    dropped: bool
    at: int
    deliveries: int


class PullConsumer:
    """One durable consumer of one log.

    No method blocks. Not thread-safe. ``now`` never falls. A method about one message takes the sequence of the
    message. Except for ``lose_ack``, such a method does nothing unless the message is unacknowledged.

    Args:
        log: Messages that the durable delivers.
        settings: Settings of the durable.
        changed: Function that the durable calls whenever it may have a message to deliver.
    """

    def __init__(self, log: Log, settings: ConsumerSettings, changed: Callable[[], None] = lambda: None) -> None:
        self.settings = settings
        self._log = log
        self._changed = changed
        self._original: ConsumerSettings | None = None
        self._at = 0  # index of the next new message in the log's positions
        self._deliveries = 0
        self._pending: dict[int, _Pending] = {}
        self._repeats: dict[int, int] = {}
        self._queue: dict[int, None] = {}  # an ordered set
        self._dropped: set[int] = set()
        self._acks: deque[int] = deque(maxlen=_REMEMBERED)
        self._unwritten: deque[_Change] = deque()
        self._timer = math.inf
        self._removed = 0  # the highest removed sequence that was delivered

    def __repr__(self) -> str:
        return f"<PullConsumer: {len(self._pending)} unacknowledged, {len(self._queue)} to redeliver>"

    # --- deliveries and answers

    def pull(self, messages: int, size: int, now: float) -> list[Delivery]:
        """Deliver at most ``messages`` of the next messages.

        The message that reaches ``size`` bytes is the last message.
        """
        bound = self.settings.max_ack_pending
        deliveries: list[Delivery] = []
        while len(deliveries) < messages and size > 0:
            if self._queue:
                sequence = next(iter(self._queue))
                del self._queue[sequence]
                repeats = self._repeats.get(sequence, 0) + 1
                if self.settings.max_deliver is not None and repeats >= self.settings.max_deliver:
                    self._drop(sequence, now)
                    continue
                first = self._pending[sequence].token
            elif self._at < len(self._log.positions) and (bound is None or len(self._pending) < bound):
                sequence = self._log.positions[self._at]
                repeats = 0
                first = self._deliveries + 1
            else:
                break
            self._set(sequence, _Pending(first, now), repeats, now)
            # Count after _set, which notes the earlier counts.
            self._deliveries += 1
            self._at += not repeats
            wait = self.settings.wait(repeats)
            self._timer = min(self._timer, now + wait + _TIMER_DELAY)
            record = self._log.records[sequence]
            deliveries.append(Delivery(record, self._deliveries, repeats + 1, now + wait))
            size -= record.size
        return deliveries

    def ack(self, sequence: int, now: float) -> None:
        """Acknowledge a message, by any of its deliveries. Idempotent."""
        if sequence in self._pending:
            full = len(self._pending) == self.settings.max_ack_pending
            self._queue.pop(sequence, None)
            self._set(sequence, None, 0, now)
            self._acks.append(sequence)
            if full:
                self._changed()

    def extend(self, sequence: int, now: float) -> None:
        """Restart the wait for the acknowledgement of a message. A queued message stays in the queue."""
        pending = self._pending.get(sequence)
        if pending is not None:
            self._set(sequence, pending._replace(stamp=now), self._repeats.get(sequence, 0), now)

    def nak(self, sequence: int, now: float, delay: float = 0.0) -> None:
        """Queue a message for redelivery now, or redeliver the message after ``delay`` seconds."""
        pending = self._pending.get(sequence)
        if pending is None:
            return
        if delay > 0:
            stamp = now - self.settings.ack_wait + delay
            self._set(sequence, pending._replace(stamp=stamp), self._repeats.get(sequence, 0), now)
            self._timer = now + _LOOK_AFTER_NAK
        else:
            self._queue.setdefault(sequence)
            self._changed()

    def lose_ack(self, sequence: int, now: float) -> bool:
        """Queue a message, as after a lost acknowledgement or an expired wait.

        Returns False for a queued, dropped or undelivered message.
        """
        if sequence in self._queue or sequence in self._dropped or not self._was_delivered(sequence):
            return False
        if sequence not in self._pending:
            self._set(sequence, _Pending(self._deliveries, now), self._repeats.get(sequence, 0), now)
        self._queue[sequence] = None
        self._changed()
        return True

    def remove(self, sequence: int, now: float) -> None:
        """Forget a message that the stream has removed. An unacknowledged message then counts as acknowledged.

        The log must belong to this durable alone. Idempotent.
        """
        place = bisect_left(self._log.positions, sequence)
        if self._log.positions[place : place + 1] != [sequence]:
            return
        self.ack(sequence, now)
        self._dropped.discard(sequence)
        if place < self._at:
            self._at -= 1
            self._removed = max(self._removed, sequence)
        del self._log.positions[place], self._log.records[sequence]
        kept = [change for change in self._unwritten if change.sequence != sequence]
        self._unwritten = deque(each._replace(at=each.at - (place < each.at)) for each in kept)

    # --- administration and crashes

    def reset(self, now: float) -> None:
        """Deliver all messages above the ack floor again, even acknowledged messages, as CONSUMER.RESET does."""
        floor = min(self._pending, default=None)
        for sequence in [*self._pending, *(each for each in self._dropped if floor is not None and each > floor)]:
            self._set(sequence, None, 0, now)
            self._dropped.discard(sequence)
        self._queue.clear()
        self._timer = math.inf
        if floor is not None:
            self._at = bisect_left(self._log.positions, floor)
        self._changed()

    def shrink(self, ack_wait: float, now: float) -> None:
        """Set a short ``ack_wait`` without backoff until ``restore``, so that all unacknowledged messages are due."""
        self._original = self._original or self.settings
        self.configure(replace(self.settings, ack_wait=ack_wait, backoff=()), now)

    def restore(self, now: float) -> None:
        """Restore the settings before ``shrink``. Idempotent."""
        original, self._original = self._original, None
        if original is not None:
            self.configure(original, now)

    def configure(self, settings: ConsumerSettings, now: float) -> None:
        """Change the settings. If messages are unacknowledged, the timer runs 0.1 s after a change of ``ack_wait``."""
        if settings.ack_wait != self.settings.ack_wait and self._pending:
            self._timer = now + _LOOK_AFTER_CHANGE
        self.settings = settings
        self._changed()

    def kill(self, now: float) -> None:
        """Kill and restart the server, which returns to its state of 0.1 s ago and loses the queue of redeliveries."""
        while self._unwritten and self._unwritten[-1].time > now - _WRITTEN:
            change = self._unwritten.pop()
            self._put(change.sequence, change.pending, change.repeats)
            if change.dropped:
                self._dropped.add(change.sequence)
            else:
                self._dropped.discard(change.sequence)
            self._at, self._deliveries = change.at, change.deliveries
        self._unwritten.clear()
        self._queue.clear()
        # On disk the start of a wait has whole seconds.
        self._pending = {
            sequence: each._replace(stamp=math.floor(each.stamp)) for sequence, each in self._pending.items()
        }
        wait = min(self.settings.ack_wait + _TIMER_DELAY, _LOOK_AFTER_START)
        self._timer = now + wait if self._pending else math.inf
        self._changed()

    # --- time

    def next_at(self) -> float:
        """Return the time of the next timer run; infinity = no message can expire."""
        return self._timer

    def advance(self, now: float) -> None:
        """Run the timer once for each time at which it was due."""
        while self._timer <= now:
            self._expire(self._timer)

    def _expire(self, now: float) -> None:
        expired: list[int] = []
        later = math.inf
        for sequence, pending in self._pending.items():
            if sequence not in self._queue:
                due = pending.stamp + self.settings.wait(self._repeats.get(sequence, 0))
                if due <= now:
                    expired.append(sequence)
                else:
                    later = min(later, due)
        self._timer = later
        most = self.settings.max_deliver
        for sequence in sorted(expired):
            if most is not None and self._repeats.get(sequence, 0) + 1 >= most:
                self._drop(sequence, now)
            else:
                self._queue[sequence] = None
        if expired:
            self._changed()

    # --- questions

    @property
    def unacknowledged(self) -> list[int]:
        """Delivered sequences without an acknowledgement or a drop, rising. The list includes queued sequences."""
        return sorted(self._pending)

    @property
    def dropped(self) -> list[int]:
        """Sequences with ``max_deliver`` deliveries and no acknowledgement, rising."""
        return sorted(self._dropped)

    @property
    def unfinished(self) -> list[int]:
        """All unacknowledged sequences, delivered or not, rising."""
        return sorted({*self._pending, *self._dropped, *self._log.positions[self._at :]})

    @property
    def deliveries(self) -> int:
        """Number of all deliveries, repeats included. The last delivery has this number."""
        return self._deliveries

    @property
    def highest(self) -> int:
        """The highest delivered sequence; 0 = no delivery."""
        return max(self._log.positions[self._at - 1] if self._at else 0, self._removed)

    @property
    def undelivered(self) -> int:
        """Number of messages without a delivery."""
        return len(self._log.positions) - self._at

    @property
    def floor(self) -> tuple[int, int]:
        """The delivery number and the sequence up to which the durable has all acknowledgements."""
        if not self._pending:
            return self._deliveries, self.highest
        lowest = min(self._pending)
        return min(each.token for each in self._pending.values()) - 1, lowest - 1

    @property
    def redelivered(self) -> int:
        """Number of unacknowledged messages with more than one delivery."""
        return len(self._repeats.keys() & self._pending.keys())

    @property
    def waiting(self) -> int:
        """Number of messages that wait for delivery."""
        return len(self._queue) + len(self._log.positions) - self._at

    @property
    def last_acked(self) -> int | None:
        """The latest acknowledged sequence whose acknowledgement still counts; None = no known sequence."""
        known = (s for s in reversed(self._acks) if s not in self._pending and self._was_delivered(s))
        return next(known, None)

    # --- inside

    def _was_delivered(self, sequence: int) -> bool:
        return sequence in self._log.records and bisect_left(self._log.positions, sequence) < self._at

    def _drop(self, sequence: int, now: float) -> None:
        self._set(sequence, None, self._repeats.get(sequence, 0), now)
        self._dropped.add(sequence)

    def _set(self, sequence: int, pending: _Pending | None, repeats: int, now: float) -> None:
        """Change the state of a message. Keep its earlier state until the change is on disk."""
        while self._unwritten and self._unwritten[0].time <= now - _WRITTEN:
            self._unwritten.popleft()
        before, times, dropped = self._pending.get(sequence), self._repeats.get(sequence, 0), sequence in self._dropped
        self._unwritten.append(_Change(now, sequence, before, times, dropped, self._at, self._deliveries))
        self._put(sequence, pending, repeats)

    def _put(self, sequence: int, pending: _Pending | None, repeats: int) -> None:
        if pending is None:
            self._pending.pop(sequence, None)
        else:
            self._pending[sequence] = pending
        if repeats:
            self._repeats[sequence] = repeats
        else:
            self._repeats.pop(sequence, None)
