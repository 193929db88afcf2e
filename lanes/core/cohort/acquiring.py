"""How a partition is taken: steps 1 to 5 of the protocol, and 2 to 5 again when a member takes over from itself."""

from __future__ import annotations

from typing import Any

from lanes.core.cohort import phases
from lanes.core.cohort.actions import (
    Action,
    CreateConsumer,
    DeleteConsumer,
    FindConsumers,
    Found,
    Overlapping,
    Owned,
    Read,
    Refused,
    Revoked,
    Taken,
    Unknown,
    Write,
)
from lanes.core.cohort.holding import Holding
from lanes.core.cohort.ledger import NOTHING
from lanes.core.cohort.records import HIGHEST, Lease, State, decode, encode
from lanes.core.cohort.steps import LOOK_SECONDS, Steps

__all__ = ["Acquiring"]

_NO_STATE = State(0, NOTHING)


class Acquiring(Steps):
    """See ``lanes.core.cohort.tenure.Tenure``, which is the whole."""

    def __init__(self, partition: int, member: str, *, retention: str, ttl: float, margin: float) -> None:
        super().__init__(partition, member, retention=retention, ttl=ttl, margin=margin)
        self.obstructed = False  # this acquisition: a consumer that is not the cohort's excludes the one to create
        self.outlasting = 0.0  # seconds of a lease, longer than its own, that is waited for: the bucket was lost
        self._waited = False  # long enough for a state that is missing
        self._free_revision = 0
        self._claim = ("", 0.0)  # the acquisition under way: its nonce, and when it was sent
        self._state = _NO_STATE

    def _action(self, now: float, nonce: str) -> Action | None:
        match self.phase:
            case phases.LOOKING:
                return self._ask(Read(self._lease_key), self._looked)
            case phases.CHECKING:
                return self._ask(Read(self._state_key), self._checked)
            case phases.SURVEYING:
                return self._ask(FindConsumers(), self._surveyed)
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
                create = CreateConsumer(self._epoch, self._sub, self._held().nonce, start)
                return self._ask(create, self._created)
            case phases.REFINDING:
                return self._ask(FindConsumers(), self._found_again)
            case phases.VERIFYING:
                # It was entered with a renewal demanded, and no phase acts before a demanded renewal has succeeded.
                self._step("verified")
                return None
        raise AssertionError(
            f"cohort partition {self.partition}: no step is known while {self.phase}: a bug of lanes, please report it"
        )

    # --- 1: acquire

    def _look(self) -> None:
        self._waited = False
        super()._look()

    def _fence(self, reason: str) -> None:
        # Somebody may own it in between, and the bucket may be lost again: who begins anew waits for that one too.
        self._waited = False
        super()._fence(reason)

    def _looked(self, result: Any, now: float, sent: float) -> None:
        if result is Unknown:
            return
        value, self._free_revision = result
        if self._lease(value) is None:
            self._step("free")
        else:
            self._step("held")
            self._waited = False
            self._not_before = now + LOOK_SECONDS

    def _checked(self, result: Any, now: float, sent: float) -> None:
        if result is Unknown:
            return
        value, _ = result
        if value:
            decode(State, self._state_key, value)
            self._waited = False
        elif not self._waited:
            self._step("missing")
            return
        self._step("present")

    def _surveyed(self, result: Any, now: float, sent: float) -> None:
        """The state is missing, so the bucket was lost, and its lease too: an owner may believe in that for as long as
        the longest lease of whoever made a consumer, for who owns has one."""
        if result is Unknown:
            return
        found: Found = result
        longest = max([self._ttl, *(consumer.lease for consumer in found.consumers)])
        self.outlasting = longest if longest > self._ttl else 0.0
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
            self._step("refused")  # too late, even if it is this one's
        elif result is not Unknown:
            value, revision = result
            lease = self._lease(value)
            if lease is not None and lease.nonce == nonce:
                self._hold(revision, claimed)
            else:
                # If it is applied later, it expires: this nonce is never used again.
                self._step("refused")

    def _hold(self, revision: int, sent: float) -> None:
        self._holding = Holding(self._claim[0], revision, sent, ttl=self._ttl, margin=self._margin)
        self.obstructed = False
        self.outlasting = 0.0
        self._step("acquired")

    # --- 2: read, and choose the epoch

    def _state_read(self, result: Any, now: float, sent: float) -> None:
        if result is Unknown:
            return
        value, _ = result
        if value:
            self._state = decode(State, self._state_key, value)
        elif self._announced or self._waited:
            self._state = _NO_STATE
        else:
            # It was lost since it was checked, and the lease that was acquired is one in a new bucket.
            self._holding = None
            self._step("missing")
            return
        self._step("read")

    def _found(self, result: Any, now: float, sent: float) -> None:
        if result is Unknown:
            return
        found: Found = result
        highest = max(found.consumers, default=None)
        known = max(self._state.epoch, highest.epoch if highest else 0)
        if not self._announced:
            # The server's clock: of an epoch that came and went with its bucket there is no other trace.
            self._epoch = max(known, found.server_ms) + 1
            self._sub = 0
            if self._epoch > HIGHEST:
                raise ValueError(
                    f"cohort partition {self.partition}: there is no epoch above {known}, which no clock has given: "
                    "delete the durable of that epoch, and let nothing else make durables of such names"
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
            self._done = self._done.merged_with_prefix(highest.floor)
        self._lower = self._below(found)
        self._step("found")

    def _below(self, found: Found) -> list[tuple[int, int]]:
        return sorted(consumer[:2] for consumer in found.consumers if consumer[:2] < (self._epoch, self._sub))

    # --- 3: write them

    def _epoch_written(self, result: Any, now: float, sent: float) -> None:
        if self._is_written(result):
            self._step("written, delete first" if self._alone else "written, create first")

    # --- 4 and 5: create, verify, delete

    def _created(self, result: Any, now: float, sent: float) -> None:
        if result is Unknown:
            return
        if result is Overlapping:
            self._step("overlapping")
        elif isinstance(result, Taken) and result.nonce != self._held().nonce:
            self._step("taken")
        else:
            # Frozen before the create, it may have come behind the sweep of a successor: then the lease is another's.
            self._held().demand()
            self._step("created")

    def _found_again(self, result: Any, now: float, sent: float) -> None:
        if result is Unknown:
            return
        found: Found = result
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
            if result is not Unknown:
                # They may have been listed anew meanwhile.
                self._lower = [name for name in self._lower if name != lowest]

        return self._ask(DeleteConsumer(epoch, sub), deleted)

    def _own(self) -> None:
        again = self._announced
        self._announced = True
        self._waited = False
        self.events.append(Owned(self._epoch, self._sub, self._epoch, self._done, again))
        if not self._wanted:
            self._revoke()

    def _revoke(self) -> None:
        self._step("unplanned")
        self.events.append(Revoked())
