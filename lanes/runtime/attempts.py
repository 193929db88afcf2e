"""The attempts of messages in a store.

The runtime loads them before a partition starts, and stores them while a lane waits.

Operation --------- A new partition is *loading* until the store has returned the attempts of its former owners. The
runtime defers messages that arrive before the answer. The bounds include these messages. After the answer, the messages
enter the engine in their order. Other partitions continue. A message with attempts continues with the next attempt. If
a former owner gave a message up, and the poison policy does so again, the runtime sets ``Message.broken``. When the
message is the first of its lane, the engine applies the poison policy without a call of the handler.

The keeper writes a failure while its lane waits. A lane that waits for a retry waits at least until the write has
ended. A drain releases the partition after the write, or when the drain's time has passed. If a process dies during an
attempt or its write, the message has one extra attempt. If the writes of a drain end in time, the message has no extra
attempt. The keeper writes the entries of one message in sequence. One call drops up to 500 entries of settled messages.
No lane waits for such a call. After a long freeze no call begins before the source has confirmed the partition, because
another process may own the partition. Unless the error is permanent, the keeper repeats a failed call until the call
succeeds or the consumer gives up the partition. Only lanes with a failure, loading partitions and drains wait for a
repeated call. A message that never fails causes no call.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf
from typing import Final

import anyio

from lanes.attempts import Attempt, Attempts, AttemptState, GivenUpBefore, error_type, given_up_before
from lanes.core.effects import Failed
from lanes.core.policy import Follows
from lanes.core.types import Message, Partition, Room, Settlement
from lanes.dead_letter import error_text, printable
from lanes.errors import is_retryable
from lanes.runtime.contract_checks import check_loaded
from lanes.source import Delivered, Progressed, RevokingPart, SourceEvent
from lanes.workers.context import RunContext

log = logging.getLogger("lanes")

STORE_RETRY: Final = (0.2, 30.0)
"""Seconds before the repetition of a failed call of the store: the first time, and the maximum."""

_STATES: Final[dict[Follows, AttemptState]] = {
    "hold": "held",
    "dead_letter": "parking",
    "dead_letter_and_block": "parking",
    "block": "blocked",
    "halt": "held",
}
"""The state in the store, by the step that follows a failure."""

_WRITERS: Final = 8
"""Maximum number of concurrent calls for one partition."""

_DROPS: Final = 500
"""Maximum number of positions that one call drops."""


class _Loading:
    """The loading of one partition: start time, deferred events, and cancel scope of the task."""

    def __init__(self, since: float) -> None:
        self.since = since
        self.events: list[Delivered | Progressed | RevokingPart] = []
        self.scope = anyio.CancelScope()


@dataclass(slots=True, eq=False)
class _Entry:
    """The entry of one message, as the keeper must write it to the store.

    Attributes:
        message: The failed message; None = no failure to write.
        wanted: The attempt to write next. ``None`` = nothing to write.
        drop: Whether to delete the entry.
        busy: Whether a task writes the entry now.
    """

    message: Message | None = None
    wanted: Attempt | None = None
    drop: bool = False
    busy: bool = False


class _Entries:
    """The entries of one partition.

    Attributes:
        given_up: Attempts of messages whose handler must not run again, by position.
        by_position: All entries by position.
        urgent: Failures that a task must write. A lane or a drain waits for each write.
        waiting: Entries to drop, and entries whose last write failed.
        writers: Scopes of the tasks that write.
        written: Event that is set when a task has written entries, and when a task ends.
    """

    def __init__(self) -> None:
        self.given_up: dict[int, Attempt] = {}
        self.by_position: dict[int, _Entry] = {}
        self.urgent: dict[int, _Entry] = {}
        self.waiting: dict[int, _Entry] = {}
        self.writers: set[anyio.CancelScope] = set()
        self.written = anyio.Event()

    def put(self, position: int, entry: _Entry) -> None:
        """Queue an entry for its write."""
        queue, other = (self.waiting, self.urgent) if entry.drop else (self.urgent, self.waiting)
        other.pop(position, None)
        queue[position] = entry

    def writing(self, positions: Collection[int] | None) -> bool:
        """Return whether entries of these positions are queued or written now; None = of any position."""
        if positions is None:
            return bool(self.writers)
        return any(
            each in self.urgent or each in self.waiting or ((entry := self.by_position.get(each)) and entry.busy)
            for each in positions
        )

    def take(self) -> dict[int, _Entry]:
        """Remove the entries of the next call from the queue: one failure, or up to 500 entries to drop."""
        # A full call of drops goes first, or endless failures would starve the drops.
        queue = self.urgent if self.urgent and len(self.waiting) < _DROPS else self.waiting
        positions = list(islice(queue, 1))
        if positions and queue[positions[0]].drop:
            positions = list(islice((position for position, entry in queue.items() if entry.drop), _DROPS))
        return {position: queue.pop(position) for position in positions}


class AttemptKeeper:
    """Loads and stores the attempts of one consumer. Without a store every call does nothing. Only ``flush`` blocks.

    Args:
        context: The run.
        store: The store. ``None`` = attempts are not stored.

    Attributes:
        active: Whether the consumer has a store.
    """

    def __init__(self, context: RunContext, store: Attempts | None) -> None:
        self.active = store is not None
        self._store = store
        self._engine = context.engine
        self._context = context
        self._name = context.name
        self._loading: dict[Partition, _Loading] = {}
        self._entries: dict[Partition, _Entries] = {}

    # --- attempts of former owners

    @property
    def asked_since(self) -> dict[Partition, float]:
        """The time at which loading began, for each partition that is loading."""
        return {partition: loading.since for partition, loading in self._loading.items()}

    def begin(self, partition: Partition, now: float) -> None:
        """Load the attempts of a new assignment."""
        if not self.active:
            return
        self._entries[partition] = _Entries()
        self._loading[partition] = _Loading(now)
        self._context.start_soon(self._load, partition)

    def put_aside(self, event: SourceEvent) -> bool:
        """Defer an event whose partition is loading. For any other event, set the stored attempts of its messages.

        Args:
            event: An event of the source.

        Returns:
            Whether the call deferred the event.
        """
        # A part is given up after the messages that were delivered before.
        if not isinstance(event, Delivered | Progressed | RevokingPart):
            return False
        loading = self._loading.get(event.partition)
        if loading is not None:
            loading.events.append(event)
            if isinstance(event, Delivered):
                event.partition.aside += len(event.run)
            return True
        self._recall(event)
        return False

    def room(self, room: Room) -> Room:
        """Reduce the room for the source by the deferred messages, which the bounds of the consumer include.

        The partitions of deferred messages are paused, so a bound per partition in ``room`` applies only to other
        partitions.
        """
        if not self._loading:
            return room
        aside = [event for loading in self._loading.values() for event in loading.events]
        delivered = [event for event in aside if isinstance(event, Delivered)]
        messages = min(room.messages, self._engine.flow.room().messages - sum(len(event.run) for event in delivered))
        size = room.bytes - sum(event.size for event in delivered)
        return room._replace(
            messages=max(0, messages), bytes=max(0, size), paused=room.paused.union(self._loading.keys())
        )

    async def _load(self, partition: Partition) -> None:
        loading = self._loading.get(partition)
        if loading is None:
            return  # The partition was given up before this task began.
        known: Mapping[int, Attempt] | None = None
        with loading.scope:
            known = await self._loaded(partition)
        if known is None or self._loading.get(partition) is not loading:
            return
        del self._loading[partition]
        partition.aside = 0
        self._take_over(partition, known)
        for event in loading.events:
            self._recall(event)
            self._context.enter(event)
        self._context.room_changed()
        self._context.after()

    async def _loaded(self, partition: Partition) -> Mapping[int, Attempt] | None:
        assert self._store is not None, "only a consumer with a store loads attempts"
        pause = STORE_RETRY[0]
        while True:
            try:
                return check_loaded(self._name, partition, await self._store.load(partition))
            except Exception as error:
                if not self._repeats(error, f"attempts of {partition.id} are not loaded, so its messages wait", pause):
                    return None
            await anyio.sleep(pause)
            pause = min(pause * 2, STORE_RETRY[1])

    def _take_over(self, partition: Partition, known: Mapping[int, Attempt]) -> None:
        entries = self._entries[partition]
        begin = {}
        for position, attempt in known.items():
            # The store knows partitions. An entry may belong to another piece, whatever the floor of this piece is, so
            # an entry of a piece counts only after its message was delivered.
            if not partition.id.piece:
                entries.by_position[position] = _Entry()
                if partition.floor is not None and _is_done(position, partition.floor, partition.completed):
                    self._drop(partition, entries, position)
                    continue
            if self._stays_given_up(attempt.state):
                entries.given_up[position] = attempt
                begin[position] = attempt.attempts
            else:
                begin[position] = attempt.attempts + 1
        partition.recalled = begin

    def _stays_given_up(self, state: AttemptState) -> bool:
        """Return whether the poison policy gives the message up again; False = the message gets one more attempt."""
        policy = self._engine.policy
        if state == "blocked":
            return policy.given_up(dead_lettered=True) == "block"
        return state == "parking" and policy.given_up(dead_lettered=False) in ("dead_letter", "dead_letter_and_block")

    def _recall(self, event: Delivered | Progressed | RevokingPart) -> None:
        partition = event.partition
        if not isinstance(event, Delivered) or not partition.recalled:
            return
        entries = self._entries.get(partition)
        for message in event.run:
            attempt = partition.recalled.get(message.position)
            if attempt is not None:
                message.attempt = attempt
                if entries is None:
                    continue
                entries.by_position.setdefault(message.position, _Entry())
                known = entries.given_up.get(message.position)
                if known is not None and message.broken is None:
                    message.broken = GivenUpBefore(known)

    # --- attempts for the next owner

    def failed(self, failed: Failed) -> None:
        """Store a failure for the next owner."""
        message = failed.message
        if failed.follows == "block" and given_up_before(message):
            # `unblock` may follow, and then the handler must be called.
            message.broken = None
        entries = self._entries.get(message.partition)
        if entries is None:
            return
        entry = entries.by_position.setdefault(message.position, _Entry())
        entry.message = message
        entry.wanted = Attempt(message.attempt, _STATES[failed.follows], error_type(failed.failure.error))
        entry.drop = False
        self._write_soon(message.partition, entries, message.position, entry)

    def settled(self, settlements: Iterable[Settlement]) -> None:
        """Drop the entries of settled messages."""
        for settlement in settlements:
            entries = self._entries.get(settlement.partition)
            if entries is None or not entries.by_position:
                continue
            if settlement.floor is None:
                done = [m.position for m in settlement.messages if m.position in entries.by_position]
            else:
                done = [p for p in entries.by_position if _is_done(p, settlement.floor, settlement.completed)]
            for position in done:
                self._drop(settlement.partition, entries, position)

    def _drop(self, partition: Partition, entries: _Entries, position: int) -> None:
        entry = entries.by_position[position]
        if not entry.drop:
            entry.drop = True
            entry.wanted = None
            self._write_soon(partition, entries, position, entry)

    def _write_soon(self, partition: Partition, entries: _Entries, position: int, entry: _Entry) -> None:
        if not entry.busy:
            entries.put(position, entry)
            if len(entries.writers) < _WRITERS:
                entries.writers.add(scope := anyio.CancelScope())
                self._context.start_soon(self._write, partition, scope)

    async def _write(self, partition: Partition, scope: anyio.CancelScope) -> None:
        """Write queued entries.

        Only one task at a time writes an entry, so the last write contains the newest state.
        """
        entries = self._entries.get(partition)
        if entries is None:
            return
        pause = STORE_RETRY[0]
        freezes = self._context.freezes
        with scope:
            while True:
                # A loss of the partition cancels the wait.
                while freezes is not None and freezes.look(self._context.clock()):
                    await freezes.wait()
                if not (taken := entries.take()):
                    break
                written = await self._written(partition, entries, taken, pause)
                entries.written.set()
                if written:
                    pause = STORE_RETRY[0]
                    continue
                await anyio.sleep(pause)
                pause = min(pause * 2, STORE_RETRY[1])
        entries.writers.discard(scope)
        entries.written.set()

    async def _written(self, partition: Partition, entries: _Entries, taken: dict[int, _Entry], pause: float) -> bool:
        assert self._store is not None, "only a consumer with a store writes attempts"
        position, entry = next(iter(taken.items()))
        wanted, message, drop = entry.wanted, entry.message, entry.drop
        for each in taken.values():
            each.busy = True
        try:
            if drop:
                await self._store.drop(partition, list(taken))
            elif wanted is not None and message is not None:
                await self._store.keep(message, wanted)
        except Exception as error:
            which = f"position {position}" if len(taken) == 1 else f"position {position} and {len(taken) - 1} more"
            what = f"attempts of {partition.id} {which} are not {'dropped' if drop else 'stored'}"
            if not self._repeats(error, what, pause):
                entries.urgent.clear()
                entries.waiting.clear()
                return True
            # These entries go last: an entry that can never be written must not delay the others.
            entries.waiting.update(taken)
            return False
        finally:
            for each in taken.values():
                each.busy = False
        for position, entry in taken.items():
            if entry.drop is not drop or entry.wanted is not wanted:
                entries.put(position, entry)
            elif drop:
                del entries.by_position[position]
            elif message is not None:
                entry.wanted = entry.message = None
                self._engine.kept(message)
                self._context.look_for_due()
        return True

    def _repeats(self, error: Exception, what: str, pause: float) -> bool:
        """Log a failed call that the caller repeats. If the error is not retryable, stop the run and return False."""
        if not is_retryable(error, unknown=True):
            self._context.stop_because(error)
            return False
        kind = type(error).__qualname__
        log.warning(
            "%s: %s (%s, %s); the next call is in %.1f s", self._name, what, kind, printable(error_text(error)), pause
        )
        return True

    # --- drains, and the end of the run

    def leave(self, partition: Partition) -> None:
        """Stop loading a partition that drains. The next owner receives the deferred messages. Idempotent."""
        loading = self._loading.pop(partition, None)
        if loading is not None:
            partition.aside = 0
            loading.scope.cancel()

    def part(self, partition: Partition, messages: Iterable[Message]) -> None:
        """Stop changing the entries of messages, because their part has a new owner.

        Call this method after ``flush``.
        """
        entries = self._entries.get(partition)
        if entries is not None:
            for message in messages:
                entries.by_position.pop(message.position, None)

    async def flush(self, partition: Partition, positions: Collection[int] | None = None) -> None:
        """Wait until the writes of a partition's queued entries end, for its next owner. Cancel-safe.

        Args:
            partition: The assignment.
            positions: Positions whose entries to wait for; None = all.
        """
        entries = self._entries.get(partition)
        while entries is not None and entries.writing(positions) and partition in self._entries:
            if entries.written.is_set():
                entries.written = anyio.Event()
            await entries.written.wait()

    def forget(self, partition: Partition) -> None:
        """Write no further entry of a partition. Idempotent."""
        self.leave(partition)
        entries = self._entries.pop(partition, None)
        if entries is not None:
            entries.written.set()
            for scope in entries.writers:
                scope.cancel()

    def end(self) -> None:
        """Write no further entry, because the run has ended."""
        self._entries.clear()


def _is_done(position: int, floor: int, completed: Sequence[tuple[int, int]]) -> bool:
    # The runs and the failures may be many, so the search in the sorted runs is binary.
    at = bisect_right(completed, (position, inf))
    return position < floor or (at > 0 and position < completed[at - 1][1])
