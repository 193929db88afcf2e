"""The keeper of one cohort partition, which performs the actions of the partition's lease machine in order."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, Literal

import anyio

from lanes.clock import Clock
from lanes.cohort.leases import Conflict, ConsumerExists, EpochConsumers, LeaseStore, UnknownResult
from lanes.core.cohort.actions import (
    Action,
    Consumer,
    CreateConsumer,
    DeleteConsumer,
    FindConsumers,
    Found,
    LeaseEvent,
    LeaseLost,
    LeaseOwned,
    LeaseRevoked,
    Overlapping,
    Read,
    Refused,
    Taken,
    Unknown,
    Wait,
    Write,
)
from lanes.core.cohort.checkpoint_pace import CheckpointPace
from lanes.core.cohort.lease_machine import LeaseMachine
from lanes.core.cohort.ledger import Done
from lanes.errors import SourceError

log = logging.getLogger("lanes")

_LOOKS: Final = (0.0, 0.01, 0.05)
"""Seconds between a hint and each read of the key, because a hint may arrive before the store applies its write."""

SLOW: Final = 5
"""Number of requests in a row without an answer in time after which the server counts as slow."""


class Alarm:
    """A wait of one task that other code can end early.

    ``wake`` ends one wait at once; ``hint`` also ends the next waits, at short intervals.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._event = anyio.Event()
        self._looks: deque[float] = deque()

    def __repr__(self) -> str:
        return f"<Alarm: {'woken' if self._event.is_set() else 'waiting'}, {len(self._looks)} looks due>"

    def arm(self) -> None:
        """Prepare the next ``wait``.

        After this call, a ``wake`` ends that ``wait``, even if the ``wake`` happens first.
        """
        self._event = anyio.Event()

    def wake(self) -> None:
        """End the wait. The call does not block. Idempotent."""
        self._event.set()

    def hint(self) -> None:
        """End the wait now, and the next waits after 10 ms and 50 ms. The call does not block."""
        now = self._clock()
        self._looks = deque(now + delay for delay in _LOOKS)
        self._event.set()

    async def wait(self, until: float) -> bool:
        """Wait for a wake after ``arm``, for a hint, or until a time (infinity = no limit). Cancel-safe.

        Return whether a hint is due.
        """
        until = min(until, self._looks[0]) if self._looks else until
        if until < math.inf:
            with anyio.move_on_after(max(0.0, until - self._clock())):
                await self._event.wait()
        else:
            await self._event.wait()
        hinted = False
        while self._looks and self._looks[0] <= self._clock():
            self._looks.popleft()
            hinted = True
        return hinted


class LeaseKeeper:
    """The keeper of one cohort partition. All methods except ``serve`` return at once.

    Args:
        machine: The lease machine of the partition.
        store: Store of the leases.
        consumers: The durables of the cohort.
        named: Function that returns the names of cohort and member, for logs.
        happened: Function that the keeper calls with the number of the partition and each event of the machine.
        changed: Function that the keeper calls after new events, and after a change of the deadline.
        clock: Clock of the deadlines.
        nonce: Function that returns a unique value at each call.
        patience: Maximum number of seconds to wait for the answer to a request for consumers. After this time the
            result is unknown.
        drain_within: Seconds within which the consumer should drain a revoked partition.
        overdue: Function that the keeper calls once with the number of a partition whose drain takes too long. This
            member still owns the partition, and only the consumer can report the finished messages by ``drained``.
        pace: Intervals of the checkpoints, which all keepers of the member share.
    """

    def __init__(
        self,
        machine: LeaseMachine,
        store: LeaseStore,
        consumers: EpochConsumers,
        *,
        named: Callable[[], str],
        happened: Callable[[int, LeaseEvent], None],
        changed: Callable[[], None],
        clock: Clock,
        nonce: Callable[[], str],
        patience: float,
        drain_within: float,
        overdue: Callable[[int], None],
        pace: CheckpointPace,
    ) -> None:
        self.machine = machine
        self.alarm = Alarm(clock)
        self._partition = machine.partition
        self._store = store
        self._consumers = consumers
        self._named = named
        self._happened = happened
        self._changed = changed
        self._clock = clock
        self._nonce = nonce
        self._patience = patience
        self._drain_within = drain_within
        self._overdue = overdue
        self._pace = pace
        self._drain_by = math.inf
        self._ledger: Callable[[], Done | None] | None = None  # makes the ledger of the next checkpoint
        self._checkpoint_at = math.inf
        self._revoked: Literal["no", "asked", "answered"] = "no"
        self._drained: tuple[Done, bool] | None = None
        self._seen = -math.inf  # the deadline at the last call of ``changed``
        self._in_the_way = ""  # the last error about an overlapping consumer
        self._warned = False  # whether the obstacle of this acquisition was logged
        self._waits = 0.0  # the awaited lease that was logged, in seconds
        self._unanswered = 0  # requests for consumers in a row without an answer in time

    def __repr__(self) -> str:
        return f"<LeaseKeeper of {self._partition}: {self.machine.phase}>"

    # --- inputs

    def planned(self, *, mine: bool) -> None:
        """See ``LeaseMachine.planned``."""
        self.machine.planned(mine, self._clock())
        self._tell()

    def stop(self) -> None:
        """See ``LeaseMachine.stop``."""
        self.machine.stop(self._clock())
        self._tell()

    def drained(self, done: Done, *, ended: bool = True) -> None:
        """See ``LeaseMachine.drained``.

        The call may precede the ``LeaseRevoked`` event, and has no effect after the answer to the event.
        """
        if self._revoked == "no":
            self._drained = done, ended
        elif self._revoked == "asked":
            self._answer(done, ended)
        self._tell()

    def checkpoint(self, done: Done) -> None:
        """See ``LeaseMachine.checkpoint``."""
        self._forget_checkpoint()
        self.machine.checkpoint(done, self._clock())
        self._tell()

    def checkpoint_soon(self, outstanding: int, ledger: Callable[[], Done | None]) -> None:
        """Write a checkpoint when it is due by ``pace``. The call has no effect if a checkpoint already waits.

        Args:
            outstanding: Number of outstanding messages of the ledger.
            ledger: Function that the keeper calls when the checkpoint is due. The function returns the whole ledger, or
                None if every finished message is then below the floor or stored.
        """
        if self._ledger is None:
            self._ledger = ledger
            self._checkpoint_at = self._clock() + self._pace.begin(self._partition, outstanding)
            self.alarm.wake()

    def takeover(self, done: Done) -> None:
        """See ``LeaseMachine.takeover``."""
        self.machine.takeover(done, self._clock())
        self._tell()

    def seen(self, consumers: Iterable[tuple[int, int]]) -> None:
        """See ``LeaseMachine.seen``."""
        self.machine.seen(consumers, self._clock())
        self._tell()

    def gone(self, reason: str) -> None:
        """See ``LeaseMachine.gone``."""
        self.machine.gone(reason, self._clock())
        self._tell()

    def ended(self) -> None:
        """See ``LeaseMachine.ended``."""
        self.machine.ended(self._clock())
        self._tell()

    def hint(self) -> None:
        """Schedule an early read of the lease, because the lease may have changed.

        The call has no effect while this member owns the partition.
        """
        if self.machine.deadline == -math.inf:
            self.alarm.hint()

    # --- at work

    async def serve(self, over: Callable[[], bool]) -> None:
        """Perform actions until ``over()`` is true and the machine is idle.

        A cancellation has the same effect as a crash: the lease expires.

        Raises ``SourceError`` when no later call to the store can succeed, or the store has an entry that no member
        wrote.
        """
        machine = self.machine
        while not (over() and machine.idle):
            self.alarm.arm()
            action = machine.next(self._clock(), self._nonce())
            self._pass_on()
            if over() and machine.idle:
                return
            if isinstance(action, Wait):
                # Deletions and listings come first: a server slower than the pace would let checkpoints starve them.
                if self._checkpoint_due():
                    continue
                if await self.alarm.wait(min(action.until, self._drain_by, self._checkpoint_at)):
                    machine.hinted(self._clock())
                if self._clock() >= self._drain_by:
                    self._drain_by = math.inf
                    self._overdue(self._partition)
                continue
            sent = self._clock()
            result: object = Unknown
            wait = machine.deadline - sent
            # An action must not delay the news that the lease is lost at its deadline.
            patience = wait if 0 < wait < math.inf else math.inf
            if not isinstance(action, Read | Write):
                # The lease is renewed between two actions, so an action may not take too long.
                patience = min(patience, self._patience)
            with anyio.move_on_after(patience) as scope:
                result = await self._perform(action)
            if not isinstance(action, Read | Write):
                self._unanswered = self._unanswered + 1 if scope.cancelled_caught else 0
            try:
                machine.apply(action, result, self._clock(), sent)
            except ValueError as error:
                raise SourceError(f"{self._named()}: {error}") from error
            finally:
                self._pass_on()
            self._warn()

    async def _perform(self, action: Action) -> object:
        try:
            match action:
                case Read():
                    return await self._store.read(action.key)
                case Write():
                    return await self._store.write(
                        action.key, action.value, revision=action.revision, ttl=action.ttl, fence=action.fence
                    )
                case FindConsumers():
                    found, server_ms = await self._consumers.found(self._partition)
                    lease = await self._consumers.marked() if action.marked else None
                    known = tuple(Consumer(each.epoch, each.sub, each.nonce, each.floor, each.lease) for each in found)
                    return Found(known, server_ms, lease or 0)
                case CreateConsumer():
                    await self._consumers.create(
                        self._partition, action.epoch, action.sub, nonce=action.nonce, start=action.start
                    )
                case DeleteConsumer():
                    await self._consumers.delete(self._partition, action.epoch, action.sub)
        except Conflict:
            return Refused
        except UnknownResult:
            return Unknown
        except ConsumerExists as error:
            self._in_the_way = str(error)
            return Overlapping if error.nonce is None else Taken(error.nonce)
        return None

    def _checkpoint_due(self) -> bool:
        """Pass the ledger whose checkpoint is due to the machine, which writes the ledger after the current action."""
        now = self._clock()
        if self._ledger is not None and now >= self._checkpoint_at:
            done = self._ledger()
            self._forget_checkpoint()
            if done is not None:
                self.machine.checkpoint(done, now)
                return True
        return False

    def _forget_checkpoint(self) -> None:
        if self._ledger is not None:
            self._ledger, self._checkpoint_at = None, math.inf
            self._pace.end(self._partition)

    def _answer(self, done: Done, ended: bool) -> None:
        self._revoked, self._drained = "answered", None
        self._drain_by = math.inf
        self.machine.drained(done, self._clock(), ended=ended)

    def _tell(self) -> None:
        self._pass_on()
        self.alarm.wake()

    def _pass_on(self) -> None:
        """Report the events of the last call of the lease machine to the membership."""
        machine = self.machine
        changed = bool(machine.events)
        while machine.events:
            event = machine.events.pop(0)
            self._happened(self._partition, event)
            self._revoked, self._drain_by = "no", math.inf
            drained = self._drained
            if not isinstance(event, LeaseRevoked) and not (isinstance(event, LeaseOwned) and event.again):
                # The ledger of the checkpoint belongs to the former ownership.
                self._forget_checkpoint()
            if isinstance(event, LeaseRevoked):
                self._revoked, self._drain_by = "asked", self._clock() + self._drain_within
                if drained is not None:
                    self._answer(*drained)
            elif isinstance(event, LeaseLost) or (isinstance(event, LeaseOwned) and not event.again):
                # The answer belongs to the former ownership, even when the answer came after the loss.
                self._drained = None
        if changed or machine.deadline != self._seen:
            self._seen = machine.deadline
            self._changed()

    def _warn(self) -> None:
        """Log an overlapping consumer or a wait for another lease once for each acquisition, and a slow server once."""
        if self._unanswered == SLOW:
            log.warning(
                "%s: partition %d makes no progress, because %d requests in a row about its durables had no answer "
                "within %g s. If the server is far away, set a longer Cohort(lease=…): a request waits for a sixth of "
                "the lease, at least 0.5 s and at most 2 s",
                self._named(),
                self._partition,
                SLOW,
                self._patience,
            )
        outlasting = self.machine.outlasting
        if outlasting and outlasting != self._waits:
            log.warning(
                "%s: partition %d waits for %g s, because the cohort's bucket was lost and a durable's metadata "
                "names a lease of that length. If the metadata is wrong, correct it and restart this member",
                self._named(),
                self._partition,
                outlasting,
            )
        self._waits = outlasting
        obstructed = self.machine.obstructed
        if obstructed and not self._warned:
            log.warning(
                "%s: partition %d cannot have a durable yet, because a foreign durable is in the way (%s). Delete the "
                "foreign durable, or use a stream that sources this stream",
                self._named(),
                self._partition,
                self._in_the_way,
            )
        self._warned = obstructed
