"""The lease machine of one member, which acquires, keeps and releases one partition of a cohort.

``docs/model`` describes the protocol, and ``phases`` contains the phases and their transitions. The driver calls
``next``, performs the returned action and passes its result to ``apply``, one action at a time. The driver may pass
inputs between and during actions. After each input the driver calls ``next`` again. After every call the driver acts on
``events``, empties the list, and passes ``deadline`` to the code that starts handlers.

This file is longer than most, because the phases of the machine share their fields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from lanes.core.cohort import phases
from lanes.core.cohort.actions import (
    Action,
    CreateConsumer,
    DeleteConsumer,
    FindConsumers,
    Found,
    LeaseEvent,
    LeaseLost,
    LeaseOwned,
    LeaseReleased,
    LeaseRevoked,
    Overlapping,
    Read,
    Refused,
    Taken,
    Unknown,
    Wait,
    Write,
)
from lanes.core.cohort.held_lease import WRITE, HeldLease
from lanes.core.cohort.ledger import NOTHING, Done
from lanes.core.cohort.phases import IllegalInput, following
from lanes.core.cohort.records import HIGHEST, Lease, State, decode, encode, lease_key, state_key
from lanes.core.types import NEVER

__all__ = ["LOOK_SECONDS", "WORKQUEUE", "Handler", "IllegalInput", "LeaseMachine"]

LOOK_SECONDS: Final = 0.25
"""Seconds until the machine reads another member's lease again, or repeats an action without an answer."""

LIMITS: Final = "limits"
WORKQUEUE: Final = "workqueue"
INTEREST: Final = "interest"

PAST: Final = -NEVER

Handler = Callable[[Any, float, float], None]
"""A function of the result of an action, the present time, and the time just before the request."""

_NO_STATE: Final = State(0, NOTHING)


def _identities(found: Found) -> tuple[tuple[int, int, str], ...]:
    return tuple((consumer.epoch, consumer.sub, consumer.nonce) for consumer in found.consumers)


class LeaseMachine:
    """State machine by which one member acquires, keeps and releases the lease of one cohort partition.

    No method blocks. Times are seconds of a monotonic clock that also runs while the machine is suspended. The error
    ``IllegalInput`` indicates a bug of the driver, and its text contains the phase and the input.

    Args:
        partition: Number of the cohort partition.
        member: Name of this member.
        retention: Retention of the stream.
        ttl: Length of a lease in seconds.
        margin: Number of seconds at the end of a lease in which no handler starts. More than 0, less than half of
            ``ttl``.

    Attributes:
        phase: The phase, one of the constants in ``phases``.
        events: The events for the driver, which removes them from the list.
        obstructed: Whether a foreign consumer prevents the acquisition.
        outlasting: Length in seconds of the longer lease that must expire after a loss of the bucket; 0 = the machine
            does not wait for such a lease.

    Raises:
        ValueError: The retention is unknown, or the margin is out of its range.
    """

    def __init__(self, partition: int, member: str, *, retention: str, ttl: float, margin: float) -> None:
        if retention not in (LIMITS, WORKQUEUE, INTEREST):
            raise ValueError(f"retention={retention!r}: use {LIMITS!r}, {WORKQUEUE!r} or {INTEREST!r}")
        if not 0 < margin < ttl / 2:
            raise ValueError(f"margin={margin}: use more than 0 s and less than half of the lease of {ttl} s")
        self.partition = partition
        self.member = member
        self.phase = phases.IDLE
        self.events: list[LeaseEvent] = []
        # A work queue allows one consumer for each partition, and removes acknowledged messages from the stream.
        self._alone = retention == WORKQUEUE
        self._ttl = ttl
        self._margin = margin
        self._lease_key = lease_key(partition)
        self._state_key = state_key(partition)
        self._wanted = False
        self._asked: Action | None = None
        self._then: Handler | None = None
        self._not_before = PAST
        self._held_lease: HeldLease | None = None
        self._announced = False  # after `LeaseOwned`, until `LeaseLost` or `LeaseReleased`
        self._epoch = 0
        self._sub = 0
        self._done: Done = NOTHING  # the content of the stored state, or of its next write
        self._lower: list[tuple[int, int]] = []  # consumers to delete: epoch and sub-number
        self._checkpoint: Done | None = None
        self._seen = False
        self._unswept = False
        self._release_revision: int | None = None
        self.obstructed = False
        self.outlasting = 0.0
        self._waited = False  # whether the wait was long enough to trust that a state is missing
        self._survey: tuple[tuple[int, int, str], ...] = ()  # the consumers before the wait of ``_waited``
        self._free_revision = 0
        self._claim = ("", 0.0)  # nonce and time of the acquisition under way
        self._state = _NO_STATE
        self._stopped = False
        self._ended = True  # whether no handler of the drained partition runs

    # --- the state for the driver

    @property
    def deadline(self) -> float:
        """The time from which no handler may start; minus infinity unless the member owns or drains the partition.

        During an ownership the deadline never decreases. A deadline that has passed does not change.
        """
        if self._held_lease is None or not self._announced or self.phase in (phases.SAVING, phases.RELEASING):
            return PAST
        return self._held_lease.expires

    @property
    def token(self) -> int | None:
        """The epoch of the acquisition, which handlers receive. ``None`` = this member owns no partition."""
        return self._epoch if self._announced else None

    @property
    def consumer(self) -> tuple[int, int] | None:
        """Epoch and sub-number of the consumer to pull from.

        ``None`` = no consumer to pull from, for example during a takeover.
        """
        return (self._epoch, self._sub) if self.phase in (phases.OWNED, phases.DRAINING) else None

    @property
    def idle(self) -> bool:
        """Whether the machine has no lease, acquires no lease and performs no action.

        After ``stop``, a member with only idle machines may leave.
        """
        return self.phase == phases.IDLE and self._asked is None

    # --- inputs

    def planned(self, mine: bool, now: float) -> None:
        """Record whether the plan gives the partition to this member. Idempotent.

        The machine releases a revoked partition before it acquires the partition again, even if a new plan assigns the
        partition to this member. After ``stop`` the machine acquires no partition.
        """
        self.expire(now)
        self._wanted = mine and not self._stopped
        if self._wanted:
            if self.phase == phases.IDLE:
                self._look()
        elif self.phase == phases.OWNED:
            self._revoke()
        elif self.phase in phases.SEEKING and self._asked is None:
            self._step("unplanned")

    def stop(self, now: float) -> None:
        """Drain and release the partition as for ``planned(False)``, and never acquire the partition again.

        Idempotent.
        """
        self._stopped = True
        self.planned(False, now)

    def hinted(self, now: float) -> None:
        """Read the lease immediately if the machine waits for the lease, because the lease may have changed.

        Idempotent.
        """
        if self.phase == phases.LOOKING:
            self._not_before = now

    def takeover(self, done: Done, now: float) -> None:
        """Create another consumer for the same epoch, after a missing delivery or a lost connection.

        Delivered messages stay in flight, and queued messages may start until the deadline. After this call, the driver
        must enter no delivery until the next ``LeaseOwned``, whose ``again`` is True. The call has no effect unless the
        partition is owned.

        Args:
            done: The whole ledger.
            now: Clock reading in seconds.
        """
        self.expire(now)
        if self.phase == phases.OWNED:
            self._done = self._done.union(done)
            self._checkpoint = None
            self._lower = []
            self._unswept = False
            self._step("takeover")

    def checkpoint(self, done: Done, now: float) -> None:
        """Write the whole ledger now, so that its finished messages do not run again after a crash.

        The machine repeats the write until the write succeeds, a newer checkpoint replaces it, or the ownership ends.
        The call has no effect unless this member owns the partition.
        """
        self.expire(now)
        if self._announced and self.phase not in (phases.SAVING, phases.RELEASING):
            self._checkpoint = done

    def seen(self, consumers: Iterable[tuple[int, int]], now: float) -> None:
        """Process a listing of the partition's durables, and delete the durables below the machine's own durable.

        If no listing arrives between two renewals and the retention allows leftover durables, the machine asks for a
        listing. A listing may be out of date. A higher epoch in a listing therefore does not end the ownership, but the
        machine renews the lease at once.

        Args:
            consumers: Epoch and sub-number of each durable.
            now: Clock reading in seconds.
        """
        self.expire(now)
        if self.phase not in (phases.OWNED, phases.DRAINING):
            return
        self._seen = True
        self._unswept = False
        names = sorted(consumers)
        self._lower = [name for name in names if name < (self._epoch, self._sub)]
        if names and names[-1][0] > self._epoch:
            self._required_lease().demand()

    def gone(self, reason: str, now: float) -> None:
        """Give up the partition, for example because its durable is gone.

        The call has no effect if ``consumer`` is ``None``.
        """
        self.expire(now)
        if self.consumer is not None:
            self._fence(reason)

    def drained(self, done: Done, now: float, *, ended: bool = True) -> None:
        """Answer the event ``LeaseRevoked``.

        After this call the driver must ignore results of the partition. The call has no effect after ``LeaseLost``.
        Raises ``IllegalInput`` if the partition was not revoked.

        Args:
            done: The whole ledger.
            now: Clock reading in seconds.
            ended: Whether no handler of the partition runs. If a handler runs, the machine writes the ledger and lets
                the lease expire. Until then, no other member starts a message that this member still handles.
        """
        self.expire(now)
        if self.phase == phases.FENCED:
            return
        self._step("drained")
        self._ended = ended
        self._done = self._done.union(done)
        self._checkpoint = None

    def ended(self, now: float) -> None:
        """Answer ``LeaseLost``: the consumer has processed the loss, so this member may acquire the partition again."""
        self._step("ended")
        if self._wanted:
            self._look()

    # --- one action at a time, renewals between them, and the end at the deadline

    def next(self, now: float, nonce: str) -> Action:
        """Return the next action.

        A ``Wait`` ends at its time or at the next input, such as ``seen``. Pass the result of any other action to
        ``apply``. While an action runs, the call raises ``IllegalInput``.

        Args:
            now: Clock reading in seconds.
            nonce: Random text for an acquisition, different at every call.

        Returns:
            The action.
        """
        if self._asked is not None:
            raise IllegalInput(
                f"cohort partition {self.partition}: 'next' is not allowed while {self.phase} and {self._asked} has no "
                "result; a bug of lanes, please report it"
            )
        self.expire(now)
        if now < self._not_before:
            held = self._held_lease
            return Wait(self._not_before if held is None else min(self._not_before, held.expires))
        action = self._choose(now, nonce)
        if not isinstance(action, Wait):
            self._asked = action
        return action

    def apply(self, action: Action, result: Any, now: float, sent: float) -> None:
        """Apply the result of the action that ``next`` returned.

        Args:
            action: The action.
            result: The result; ``Unknown`` = no answer arrived.
            now: Clock reading in seconds.
            sent: Clock reading in seconds, from just before the member sent the action.

        Raises:
            IllegalInput: ``next`` did not return this action.
            ValueError: A program other than ``lanes`` wrote a record of the bucket, or no higher epoch is possible. The
                machine gives up its lease, and the driver may continue.
        """
        if action is not self._asked:
            raise IllegalInput(
                f"cohort partition {self.partition}: a result of {action} is not allowed while {self.phase} waits for "
                f"{self._asked}; a bug of lanes, please report it"
            )
        self._asked = None
        self.expire(now)
        handler, self._then = self._then, None
        if handler is None:
            return
        if result is Unknown:
            self._not_before = now + LOOK_SECONDS
            if not isinstance(action, Write) and self.phase != phases.CONFIRMING:
                return  # The next call of ``next`` returns the action again.
        try:
            handler(result, now, sent)
        except ValueError as error:
            if self._held_lease is not None:
                self._give_up(str(error))
            self._not_before = now + LOOK_SECONDS
            raise

    def expire(self, now: float) -> None:
        """Give up a lease past its deadline.

        A driver may call this method at any time, even while an action runs.
        """
        if self._held_lease is not None and now >= self._held_lease.expires:
            self._give_up("the lease was not renewed in time")

    def _choose(self, now: float, nonce: str) -> Action:
        while True:
            if (
                not self._wanted
                and not self._announced
                and (self.phase in phases.SEEKING or self.phase in phases.TAKING)
            ):
                self._step("unplanned")
            held = self._held_lease
            if held is not None and self.phase != phases.RELEASING and held.due(now):
                return self._renew(held)
            action = self._action(now, nonce)
            if action is not None:
                return action

    def _action(self, now: float, nonce: str) -> Action | None:
        """Return the action of the phase. ``None`` = the machine changed to another phase."""
        match self.phase:
            case phases.IDLE | phases.FENCED:
                return self._rest()
            case phases.OWNED | phases.DRAINING:
                return self._keep()
            case phases.SAVING:
                return self._write_state(self._done, self._saved)
            case phases.RELEASING if not self._ended:
                return Wait(self._required_lease().expires)
            case phases.RELEASING if self._release_revision is None:
                return self._ask(Read(self._lease_key), self._release_read)
            case phases.RELEASING:
                value = encode(Lease(self.member, self._required_lease().nonce, self._epoch, released=True))
                return self._ask(
                    Write(self._lease_key, value, self._release_revision, self._ttl), self._release_written
                )
            case phases.LOOKING:
                return self._ask(Read(self._lease_key), self._looked)
            case phases.CHECKING:
                return self._ask(Read(self._state_key), self._checked)
            case phases.SURVEYING:
                return self._ask(FindConsumers(marked=self._alone), self._surveyed)
            case phases.GRACE:
                self._waited = True
                self._step("waited")
                return None
            case phases.ACQUIRING:
                self._claim = (nonce, now)
                value = encode(Lease(self.member, nonce))
                return self._ask(Write(self._lease_key, value, self._free_revision, self._ttl), self._acquired)
            case phases.CONFIRMING:
                return self._ask(Read(self._lease_key), self._read_back)
            case phases.READING:
                return self._ask(Read(self._state_key), self._state_read)
            case phases.FINDING:
                return self._ask(FindConsumers(), self._found)
            case phases.WRITING:
                return self._write_state(self._done, self._epoch_written)
            case phases.CLEARING | phases.SWEEPING if self._lower:
                return self._delete()
            case phases.CLEARING:
                self._step("cleared")
                return None
            case phases.SWEEPING:
                self._step("cleared")
                self._own()
                return None
            case phases.CREATING:
                start = None if self._alone else self._done.floor + 1
                create = CreateConsumer(self._epoch, self._sub, self._required_lease().nonce, start)
                return self._ask(create, self._created)
            case phases.REFINDING:
                return self._ask(FindConsumers(), self._found_again)
            case phases.VERIFYING:
                # ``_created`` demanded a renewal. ``_choose`` acts for no phase before that renewal has succeeded.
                self._step("verified")
                return None
        raise AssertionError(
            f"cohort partition {self.partition}: no step is known while {self.phase}; a bug of lanes, please report it"
        )

    def _ask(self, action: Action, handler: Handler) -> Action:
        self._then = handler
        return action

    def _rest(self) -> Wait:
        return Wait(NEVER if self._held_lease is None else min(self._held_lease.renew_at, self._held_lease.expires))

    def _step(self, event: str) -> None:
        self.phase = following(self.partition, self.phase, event)

    # --- the lease, and the state that it fences

    def _required_lease(self) -> HeldLease:
        assert self._held_lease is not None, f"cohort partition {self.partition} holds no lease while {self.phase}"
        return self._held_lease

    def _lease(self, value: bytes | None) -> Lease | None:
        """Return the lease in a value. ``None`` = the lease is free."""
        if not value:
            return None
        lease = decode(Lease, self._lease_key, value)
        return None if lease.released else lease

    def _renew(self, held: HeldLease) -> Action:
        if held.step != WRITE:
            return self._ask(Read(self._lease_key), self._renewal_read)
        value = encode(Lease(self.member, held.nonce, self._epoch))
        return self._ask(Write(self._lease_key, value, held.revision, self._ttl), self._renewal_written)

    def _renewal_read(self, result: Any, now: float, sent: float) -> None:
        held = self._required_lease()
        value, revision = result
        lease = self._lease(value)
        if lease is None:
            self._fence("the lease is gone")
        elif lease.nonce != held.nonce:
            self._fence(f"the lease is held by {lease.member!r}")
        else:
            held.found(revision)

    def _renewal_written(self, result: Any, now: float, sent: float) -> None:
        held = self._required_lease()
        if result is Unknown:
            held.unknown(sent)
        elif result is Refused:
            held.refused()
        else:
            held.renewed(result, sent)
            if self.phase in (phases.OWNED, phases.DRAINING):
                self._unswept = not self._seen and not self._alone
                self._seen = False

    def _write_state(self, done: Done, handler: Handler) -> Action:
        value = encode(State(self._epoch, done))
        fence = (self._lease_key, self._required_lease().revision)
        return self._ask(Write(self._state_key, value, None, fence=fence), handler)

    def _is_written(self, result: Any) -> bool:
        """Return whether the store applied a fenced write.

        After an unknown result, the machine renews the lease before the next write.

        A renewal by this member may have caused the refusal. The new renewal changes the fence, so a write in transit
        cannot apply after the next write.
        """
        if result is Refused or result is Unknown:
            self._required_lease().demand()
            return False
        return True

    # --- 1: acquire

    def _looked(self, result: Any, now: float, sent: float) -> None:
        value, self._free_revision = result
        if self._lease(value) is None:
            self._step("free")
        else:
            self._step("held")
            self._waited = False
            self._not_before = now + LOOK_SECONDS

    def _checked(self, result: Any, now: float, sent: float) -> None:
        value, _ = result
        if value:
            decode(State, self._state_key, value)
            self._waited = False
        elif not self._waited:
            self._step("missing")
            return
        self._step("present")

    def _surveyed(self, found: Found, now: float, sent: float) -> None:
        """Wait until every lease of a lost bucket has expired, because the state and the lease are missing.

        The consumer of each owner names the length of the owner's lease. The machine waits for the longest of these
        lengths.
        """
        longest = max([self._ttl, found.lease, *(consumer.lease for consumer in found.consumers)])
        self.outlasting = longest if longest > self._ttl else 0.0
        self._survey = _identities(found)
        self._step("surveyed")
        self._not_before = now + longest + self._margin * longest / self._ttl

    def _acquired(self, result: Any, now: float, sent: float) -> None:
        if result is Unknown:
            self._claim = (self._claim[0], sent)
            self._step("unknown")
        elif result is Refused:
            self._step("refused")
        else:
            self._hold(result, sent)

    def _read_back(self, result: Any, now: float, sent: float) -> None:
        nonce, claimed = self._claim
        if now >= claimed + self._ttl - self._margin:
            self._step("refused")  # too late, even if this member has the lease
        elif result is not Unknown:
            value, revision = result
            lease = self._lease(value)
            if lease is not None and lease.nonce == nonce:
                self._hold(revision, claimed)
            else:
                # If the write applies later, its lease expires, because no one uses this nonce again.
                self._step("refused")

    def _hold(self, revision: int, sent: float) -> None:
        self._held_lease = HeldLease(self._claim[0], revision, sent, ttl=self._ttl, margin=self._margin)
        self.obstructed = False
        self.outlasting = 0.0
        self._step("acquired")

    # --- 2: read, and choose the epoch

    def _state_read(self, result: Any, now: float, sent: float) -> None:
        value, _ = result
        if value:
            self._state = decode(State, self._state_key, value)
        elif self._announced or self._waited:
            self._state = _NO_STATE
        else:
            # The state was lost after the check, so the acquired lease is in a new bucket.
            self._held_lease = None
            self._step("missing")
            return
        self._step("read")

    def _found(self, found: Found, now: float, sent: float) -> None:
        highest = max(found.consumers, default=None)
        known = max(self._state.epoch, highest.epoch if highest else 0)
        if not self._announced:
            if self._state is _NO_STATE and _identities(found) != self._survey:
                # Another member acquired the partition during the wait, and then the bucket was lost again.
                self._held_lease = None
                self._waited = False
                self._step("missing")
                return
            # The server's clock is above every earlier epoch, even if only a lost bucket had recorded that epoch.
            self._epoch = max(known, found.server_ms) + 1
            self._sub = 0
            if self._epoch > HIGHEST:
                raise ValueError(
                    f"cohort partition {self.partition}: epoch {known} is the highest possible epoch, above any clock "
                    "of a server; delete the durable of that epoch. Let no other program create durables with names "
                    "of this cohort"
                )
            self._done = self._state.done
        elif known > self._epoch:
            self._fence(f"epoch {known} is above this member's {self._epoch}")
            return
        else:
            subs = [consumer.sub for consumer in found.consumers if consumer.epoch == self._epoch]
            self._sub = max([self._sub, *subs]) + 1
            self._done = self._done.union(self._state.done)
        if highest is not None and not self._alone:
            # The consumer reports every sequence up to its floor as acknowledged.
            self._done = self._done.union(Done(highest.floor, ()))
        self._lower = self._below(found)
        self._step("found")

    def _below(self, found: Found) -> list[tuple[int, int]]:
        return sorted(consumer[:2] for consumer in found.consumers if consumer[:2] < (self._epoch, self._sub))

    # --- 3: write the epoch and the ledger

    def _epoch_written(self, result: Any, now: float, sent: float) -> None:
        if self._is_written(result):
            self._step("written, delete first" if self._alone else "written, create first")

    # --- 4 and 5: create, verify, delete

    def _created(self, result: Any, now: float, sent: float) -> None:
        if result is Overlapping:
            self._step("overlapping")
        elif isinstance(result, Taken) and result.nonce != self._required_lease().nonce:
            self._step("taken")
        else:
            # A member that froze before the create may create after a new owner has deleted the lower durables, so the
            # member verifies its lease.
            self._required_lease().demand()
            self._step("created")

    def _found_again(self, found: Found, now: float, sent: float) -> None:
        highest = max(found.consumers, default=None)
        if highest is not None and highest[:2] > (self._epoch, self._sub):
            self._fence(f"the consumer of epoch {highest.epoch} is above this member's {self._epoch}")
            return
        self._lower = self._below(found)
        if not self._lower:
            self.obstructed |= highest is None
            self._not_before = now + LOOK_SECONDS
        self._step("lower")

    def _delete(self) -> Action:
        lowest = self._lower[0]
        epoch, sub = lowest

        def deleted(result: Any, now: float, sent: float) -> None:
            # A new listing may have replaced ``_lower`` meanwhile.
            self._lower = [name for name in self._lower if name != lowest]

        return self._ask(DeleteConsumer(epoch, sub), deleted)

    def _own(self) -> None:
        again = self._announced
        self._announced = True
        self._waited = False
        self.obstructed = False
        self.events.append(LeaseOwned(self._epoch, self._sub, self._epoch, self._done, again))
        if not self._wanted:
            self._revoke()

    def _revoke(self) -> None:
        self._step("unplanned")
        self.events.append(LeaseRevoked())

    # --- 6, 7 and 9: keep the owned partition, and hand it over

    def _keep(self) -> Action:
        if self._checkpoint is not None:
            self._done = self._done.union(self._checkpoint)
            written = self._checkpoint
            return self._write_state(self._done, lambda result, now, sent: self._checkpointed(written, result))
        if self._lower:
            return self._delete()
        if self._unswept:
            return self._ask(FindConsumers(), self._listed)
        return self._rest()

    def _checkpointed(self, written: Done, result: Any) -> None:
        # A newer checkpoint may have replaced the written checkpoint meanwhile.
        if self._is_written(result) and self._checkpoint is written:
            self._checkpoint = None

    def _listed(self, found: Found, now: float, sent: float) -> None:
        self.seen([consumer[:2] for consumer in found.consumers], now)
        self._seen = False

    def _saved(self, result: Any, now: float, sent: float) -> None:
        if self._is_written(result):
            self._step("written")

    def _release_read(self, result: Any, now: float, sent: float) -> None:
        value, revision = result
        lease = self._lease(value)
        if lease is not None and lease.nonce == self._required_lease().nonce:
            self._release_revision = revision
        else:
            self._released()

    def _release_written(self, result: Any, now: float, sent: float) -> None:
        self._release_revision = None
        if result is not Unknown and result is not Refused:
            self._released()

    # --- the end

    def _give_up(self, reason: str) -> None:
        if self.phase == phases.RELEASING:
            self._released()  # The ledger is stored, so no result is lost.
        else:
            self._fence(reason)

    def _fence(self, reason: str) -> None:
        """Give up a lease that is lost, or may be lost. This member never renews that lease again."""
        # Another member may own the partition meanwhile and the bucket may be lost, so the next acquisition waits
        # again.
        self._waited = False
        self._held_lease = None
        self._then = None
        self._checkpoint = None
        self._not_before = PAST
        if self._announced:
            self._announced = False
            self._step("lost")
            self.events.append(LeaseLost(reason))
        else:
            self._step("failed")

    def _released(self) -> None:
        self._held_lease = None
        self._release_revision = None
        self._then = None
        self._not_before = PAST
        if self._announced:
            self._announced = False
            self.events.append(LeaseReleased())
        self._step("released")
        if self._wanted:
            self._look()

    def _look(self) -> None:
        self._waited = False
        self._step("planned")
        self._not_before = PAST
