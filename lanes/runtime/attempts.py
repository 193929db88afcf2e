"""Attempts in a store: read before the first start of a partition, written while their lane waits anyway.

Theory of operation
-------------------
A partition that was assigned is *loading* until the store has said what former owners kept of it. What is delivered of
it until then is put aside, counts against the bounds, and goes to the engine in its order behind the answer; other
partitions go on. A message that had attempts goes on with the next one. One that was given up gets ``broken``: it
comes to the head of its lane like any other, no handler is called, and the poison policy does again what it did.

A failure is written while its lane waits: a hold does not end before that is kept, and a drain hands the partition over
behind it, as far as its time allows. So a message has one attempt more than its policy allows for each process that
died while it ran, and none for a hand-over. Writes about one message follow each other. What is settled is dropped,
many positions in a call, and behind the failures: nothing waits for that.

Where the store fails, everything is repeated until it does not; only lanes that have failed, and partitions that were
not loaded, wait for it. A message that never fails costs nothing.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from math import inf
from typing import Final

import anyio

from lanes.attempts import Attempt, Attempts, AttemptState, GivenUpBefore, error_type, given_up_before
from lanes.core.effects import Failed
from lanes.core.engine import Engine
from lanes.core.policy import Follows
from lanes.core.types import Message, Partition, Room, Settlement
from lanes.dead_letter import error_text
from lanes.errors import is_retryable
from lanes.source import Delivered, Progressed, SourceEvent
from lanes.workers.context import RunContext

log = logging.getLogger("lanes")

STORE_RETRY: Final = (0.2, 30.0)
"""Seconds before a call of the store that failed is repeated: first, and at most."""

_STATES: Final[dict[Follows, AttemptState]] = {
    "hold": "held",
    "dead_letter": "parking",
    "dead_letter_and_block": "parking",
    "block": "blocked",
    "halt": "held",
}
"""What follows a failure -> what the next owner is told that the message waits for."""

_WRITERS: Final = 8
"""Calls about one partition that are under way at once, at most."""

_DROPS: Final = 500
"""Positions that are dropped in one call, at most."""


class _Loading:
    """A partition of which the store has not answered yet: what is put aside of it, and the scope of who asks."""

    def __init__(self, since: float) -> None:
        self.since = since
        self.events: list[Delivered | Progressed] = []
        self.scope = anyio.CancelScope()


class _Row:
    """What the store has of one message, or gets. ``wanted``: what is to be written next, if anything; ``drop``:
    nothing is to be there. ``busy``: somebody writes it."""

    __slots__ = ("busy", "drop", "message", "wanted")

    def __init__(self) -> None:
        self.message: Message | None = None
        self.wanted: Attempt | None = None
        self.drop = False
        self.busy = False


class _Kept:
    """Of one partition: the rows by position, those that wait to be written, and the scopes of who writes.

    ``given_up``: what is not to be handled again. ``urgent``: failures, for a lane or a drain waits for each;
    ``waiting``: what is to be dropped, and what could not be written yet.
    """

    def __init__(self) -> None:
        self.given_up: dict[int, Attempt] = {}
        self.rows: dict[int, _Row] = {}
        self.urgent: dict[int, _Row] = {}
        self.waiting: dict[int, _Row] = {}
        self.writers: set[anyio.CancelScope] = set()
        self.written = anyio.Event()

    def put(self, position: int, row: _Row) -> None:
        """It is to be written."""
        queue, other = (self.waiting, self.urgent) if row.drop else (self.urgent, self.waiting)
        other.pop(position, None)
        queue[position] = row

    def take(self) -> dict[int, _Row]:
        """What the next call writes, taken out: a failure, or all that is to be dropped; empty when nothing waits."""
        # Failures that come without end do not keep the drops from their turn: a full call of those goes first.
        queue = self.urgent if self.urgent and len(self.waiting) < _DROPS else self.waiting
        positions = list(islice(queue, 1))
        if positions and queue[positions[0]].drop:
            positions = list(islice((position for position, row in queue.items() if row.drop), _DROPS))
        return {position: queue.pop(position) for position in positions}


class AttemptKeeper:
    """The attempts of one consumer; without a ``store`` it does nothing.

    ``active``: whether there is a store. Nothing blocks but ``flush``.
    """

    def __init__(self, store: Attempts | None, engine: Engine, context: RunContext, name: str) -> None:
        self.active = store is not None
        self._store = store
        self._engine = engine
        self._context = context
        self._name = name
        self._loading: dict[Partition, _Loading] = {}
        self._kept: dict[Partition, _Kept] = {}

    # --- what former owners kept

    @property
    def loading(self) -> bool:
        """Whether anything may be put aside."""
        return bool(self._loading)

    @property
    def asked_since(self) -> dict[Partition, float]:
        """The partitions of which the store has not answered yet, and since when."""
        return {partition: loading.since for partition, loading in self._loading.items()}

    def begin(self, partition: Partition, now: float) -> None:
        """It was assigned: ask for its attempts."""
        if not self.active:
            return
        self._kept[partition] = _Kept()
        self._loading[partition] = _Loading(now)
        self._context.start_soon(self._load, partition)

    def put_aside(self, event: SourceEvent) -> bool:
        """Whether it has to wait for the store; else its messages begin at the attempts that are known of them."""
        if not isinstance(event, Delivered | Progressed):
            return False
        loading = self._loading.get(event.partition)
        if loading is not None:
            loading.events.append(event)
            return True
        self._recall(event)
        return False

    def room(self, room: Room) -> Room:
        """What is left of it for the source: what is put aside is in flight, too."""
        if not self._loading:
            return room
        aside = [event for loading in self._loading.values() for event in loading.events]
        delivered = [event for event in aside if isinstance(event, Delivered)]
        messages = room.messages - sum(len(event.run) for event in delivered)
        size = room.bytes - sum(event.size for event in delivered)
        return Room(max(0, messages), max(0, size), room.paused | self._loading.keys())

    async def _load(self, partition: Partition) -> None:
        loading = self._loading.get(partition)
        if loading is None:
            return  # It was given up before this task began.
        known: Mapping[int, Attempt] | None = None
        with loading.scope:
            known = await self._loaded(partition)
        if known is None or self._loading.get(partition) is not loading:
            return
        del self._loading[partition]
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
                return await self._store.load(partition)
            except Exception as error:
                if not self._repeats(error, f"attempts of {partition.id} not loaded, nothing of it starts", pause):
                    return None
            await anyio.sleep(pause)
            pause = min(pause * 2, STORE_RETRY[1])

    def _take_over(self, partition: Partition, known: Mapping[int, Attempt]) -> None:
        kept = self._kept[partition]
        begin = {}
        for position, attempt in known.items():
            kept.rows[position] = _Row()
            if partition.floor is not None and _is_done(position, partition.floor, partition.completed):
                self._drop(partition, kept, position)
            elif self._stays_given_up(attempt.state):
                kept.given_up[position] = attempt
                begin[position] = attempt.attempts
            else:
                begin[position] = attempt.attempts + 1
        partition.recalled = begin

    def _stays_given_up(self, state: AttemptState) -> bool:
        """Whether the poison policy would do that again. Under another one the message has one more attempt."""
        policy = self._engine.policy
        if state == "blocked":
            return policy.given_up(dead_lettered=True) == "block"
        return state == "parking" and policy.given_up(dead_lettered=False) in ("dead_letter", "dead_letter_and_block")

    def _recall(self, event: Delivered | Progressed) -> None:
        partition = event.partition
        if not isinstance(event, Delivered) or not partition.recalled:
            return
        given_up = self._kept[partition].given_up if partition in self._kept else {}
        for message in event.run:
            attempt = partition.recalled.get(message.position)
            if attempt is not None:
                message.attempt = attempt
                known = given_up.get(message.position)
                if known is not None and message.broken is None:
                    message.broken = GivenUpBefore(known)

    # --- what is kept for the next one

    def failed(self, failed: Failed) -> None:
        """A message has failed, and waits for what follows: here, or at the next owner."""
        message = failed.message
        if failed.follows == "block" and given_up_before(message):
            # From here on somebody may unblock it: then its handler is to be called.
            message.broken = None
        kept = self._kept.get(message.partition)
        if kept is None:
            return
        row = kept.rows.setdefault(message.position, _Row())
        row.message = message
        row.wanted = Attempt(message.attempt, _STATES[failed.follows], error_type(failed.failure.error))
        row.drop = False
        self._write_soon(message.partition, kept, message.position, row)

    def settled(self, settlements: Iterable[Settlement]) -> None:
        """These were settled: what was kept of their messages has served."""
        for settlement in settlements:
            kept = self._kept.get(settlement.partition)
            if kept is None or not kept.rows:
                continue
            if settlement.floor is None:
                done = [m.position for m in settlement.messages if m.position in kept.rows]
            else:
                done = [p for p in kept.rows if _is_done(p, settlement.floor, settlement.completed)]
            for position in done:
                self._drop(settlement.partition, kept, position)

    def _drop(self, partition: Partition, kept: _Kept, position: int) -> None:
        row = kept.rows[position]
        if not row.drop:
            row.drop = True
            row.wanted = None
            self._write_soon(partition, kept, position, row)

    def _write_soon(self, partition: Partition, kept: _Kept, position: int, row: _Row) -> None:
        if not row.busy:
            kept.put(position, row)
            if len(kept.writers) < _WRITERS:
                kept.writers.add(scope := anyio.CancelScope())
                self._context.start_soon(self._write, partition, scope)

    async def _write(self, partition: Partition, scope: anyio.CancelScope) -> None:
        """Write what waits; each row by one task at a time, so that the last word about it is the last one."""
        kept = self._kept.get(partition)
        if kept is None:
            return
        pause = STORE_RETRY[0]
        with scope:
            while rows := kept.take():
                if await self._written(partition, kept, rows, pause):
                    pause = STORE_RETRY[0]
                    continue
                await anyio.sleep(pause)
                pause = min(pause * 2, STORE_RETRY[1])
        kept.writers.discard(scope)
        kept.written.set()

    async def _written(self, partition: Partition, kept: _Kept, rows: dict[int, _Row], pause: float) -> bool:
        assert self._store is not None, "only a consumer with a store writes attempts"
        position, row = next(iter(rows.items()))
        wanted, message, drop = row.wanted, row.message, row.drop
        for each in rows.values():
            each.busy = True
        try:
            if drop:
                await self._store.drop(partition, list(rows))
            elif wanted is not None and message is not None:
                await self._store.keep(message, wanted)
        except Exception as error:
            which = f"position {position}" if len(rows) == 1 else f"position {position} and {len(rows) - 1} more"
            what = f"attempts of {partition.id} {which} not {'dropped' if drop else 'kept'}"
            if not self._repeats(error, what, pause):
                kept.urgent.clear()
                kept.waiting.clear()
                return True
            # Behind the others: one that can never be written is not in the way of what can.
            kept.waiting.update(rows)
            return False
        finally:
            for each in rows.values():
                each.busy = False
        for position, row in rows.items():
            if row.drop is not drop or row.wanted is not wanted:
                kept.put(position, row)
            elif drop:
                del kept.rows[position]
            elif message is not None:
                row.wanted = row.message = None
                self._engine.kept(message)
                self._context.look_for_due()
        return True

    def _repeats(self, error: Exception, what: str, pause: float) -> bool:
        """Whether the same call may succeed later; else everything stops in order."""
        if not is_retryable(error, unknown=True):
            self._context.stop_because(error)
            return False
        kind = type(error).__qualname__
        log.warning("%s: %s (%s: %s), again in %.1f s", self._name, what, kind, error_text(error), pause)
        return True

    # --- giving a partition up, and the end

    def leave(self, partition: Partition) -> None:
        """Its drain begins: what is put aside is not handled here. Idempotent."""
        loading = self._loading.pop(partition, None)
        if loading is not None:
            loading.scope.cancel()

    async def flush(self, partition: Partition) -> None:
        """Wait until everything of it is written that is to be: its next owner is to find it. Cancel-safe."""
        kept = self._kept.get(partition)
        while kept is not None and kept.writers and partition in self._kept:
            if kept.written.is_set():
                kept.written = anyio.Event()
            await kept.written.wait()

    def forget(self, partition: Partition) -> None:
        """It is over: nothing more of it is written from here. Idempotent."""
        self.leave(partition)
        kept = self._kept.pop(partition, None)
        if kept is not None:
            kept.written.set()
            for scope in kept.writers:
                scope.cancel()

    def end(self) -> None:
        """The run is over: nothing more is written."""
        self._kept.clear()


def _is_done(position: int, floor: int, completed: Sequence[tuple[int, int]]) -> bool:
    # Sorted disjoint runs: what failed may be many, and so may they be.
    at = bisect_right(completed, (position, inf))
    return position < floor or (at > 0 and position < completed[at - 1][1])
