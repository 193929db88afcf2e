"""Lease machines with one plausible mistake each; a random walk must find every mistake."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lanes.core.cohort import phases
from lanes.core.cohort.actions import Action, Found, Unknown, Write
from lanes.core.cohort.held_lease import REST
from lanes.core.cohort.lease_machine import Handler, LeaseMachine, _identities
from lanes.core.cohort.ledger import NOTHING, Done
from lanes.core.cohort.records import Lease, State, encode


class NoVerify(LeaseMachine):
    """The member pulls without a last check of its lease."""

    def _created(self, result: Any, now: float, sent: float) -> None:
        super()._created(result, now, sent)
        if self.phase == phases.VERIFYING:
            self._required_lease().step = REST


class NoBump(LeaseMachine):
    """The new epoch equals the epoch of the state or of a consumer, instead of exceeding both."""

    def _found(self, result: Any, now: float, sent: float) -> None:
        super()._found(result, now, sent)
        if self.phase == phases.WRITING and not self._announced:
            self._epoch = max([self._state.epoch, *(consumer.epoch for consumer in result.consumers)])
            self._lower = self._below(result)


class NoServerClock(LeaseMachine):
    """The server's clock is ignored, so the epoch can repeat after the loss of the bucket and the consumer."""

    def _found(self, result: Any, now: float, sent: float) -> None:
        super()._found(replace(result, server_ms=0) if isinstance(result, Found) else result, now, sent)


class ReleaseBeforeState(LeaseMachine):
    """The member releases the lease without writing the ledger."""

    def _action(self, now: float, nonce: str) -> Action | None:
        if self.phase == phases.SAVING:
            self._step("written")
            return None
        return super()._action(now, nonce)


class ReleaseBeforeDrain(LeaseMachine):
    """The member releases the lease while handlers run."""

    def _revoke(self) -> None:
        super()._revoke()
        self._step("drained")


class StateWithoutLedger(LeaseMachine):
    """The written state has only the epoch, and no ledger."""

    def _write_state(self, done: Done, handler: Handler) -> Action:
        return super()._write_state(NOTHING, handler)


class DrainWithoutLedger(LeaseMachine):
    """The member does not hand over the messages that finished since the acquisition."""

    def drained(self, done: Done, now: float, *, ended: bool = True) -> None:
        super().drained(NOTHING, now, ended=ended)


class AdoptedAfterRestart(LeaseMachine):
    """After a restart, the member adopts a lease with its own name, together with the consumer."""

    def _looked(self, result: Any, now: float, sent: float) -> None:
        lease = None if result is Unknown else self._lease(result[0])
        if lease is None or lease.member != self.member:
            super()._looked(result, now, sent)
        else:
            self._claim = (lease.nonce, sent)
            self.phase = phases.ACQUIRING
            self._hold(result[1], sent)

    def _found(self, result: Any, now: float, sent: float) -> None:
        super()._found(result, now, sent)
        if self.phase == phases.WRITING and not self._announced and result.consumers[-1:] and self._state.epoch:
            self._epoch, self._sub = result.consumers[-1][:2]
            self._lower = []
            self.phase = phases.SWEEPING


class UnfencedState(LeaseMachine):
    """The member writes the state without a check of the lease."""

    def _write_state(self, done: Done, handler: Handler) -> Action:
        return self._ask(Write(self._state_key, encode(State(self._epoch, done)), None), handler)


class UnknownIsMine(UnfencedState, NoVerify):
    """The member treats an acquisition without an answer as a success, and checks nothing later."""

    def _read_back(self, result: Any, now: float, sent: float) -> None:
        self._hold(self._free_revision + 1, self._claim[1])


class NoGrace(LeaseMachine):
    """The member treats a missing state as a state that was never written."""

    def _surveyed(self, result: Any, now: float, sent: float) -> None:
        super()._surveyed(result, now, sent)
        self._not_before = now

    def _checked(self, result: Any, now: float, sent: float) -> None:
        self._waited = True
        super()._checked(result, now, sent)

    def _found(self, result: Any, now: float, sent: float) -> None:
        self._survey = _identities(result)
        super()._found(result, now, sent)


class TakesWhatIsHeld(LeaseMachine):
    """The member acquires a lease that another member still holds."""

    def _lease(self, value: bytes | None) -> Lease | None:
        lease = super()._lease(value)
        return None if self.phase == phases.LOOKING else lease


class NoDeadline(LeaseMachine):
    """The member relies on the results of renewals, and not on its own clock."""

    def expire(self, now: float) -> None:
        if self._held_lease is not None:
            self._held_lease.expires = max(self._held_lease.expires, now + 1)


class RenewedAfterLoss(LeaseMachine):
    """A renewal overwrites the lease of another member."""

    def _renewal_read(self, result: Any, now: float, sent: float) -> None:
        if result is Unknown or not self._announced:
            super()._renewal_read(result, now, sent)
        else:
            self._required_lease().found(result[1])

    def expire(self, now: float) -> None:
        pass


class DeadlineFromTheAnswer(LeaseMachine):
    """The deadline counts from the arrival of the answer, not from the request."""

    def apply(self, action: Action, result: Any, now: float, sent: float) -> None:
        super().apply(action, result, now, now)


class DeleteFirst(LeaseMachine):
    """The member deletes consumers of lower epochs before it creates the new consumer, with any retention."""

    def _epoch_written(self, result: Any, now: float, sent: float) -> None:
        if self._is_written(result):
            self._step("written, delete first")


class PullBeforeDelete(LeaseMachine):
    """The member pulls while a consumer of a lower epoch exists, so acks to that consumer count."""

    def _action(self, now: float, nonce: str) -> Action | None:
        if self.phase == phases.SWEEPING:
            self._step("cleared")
            self._own()
            return None
        return super()._action(now, nonce)


class NoSweep(LeaseMachine):
    """A consumer of a lower epoch that was created late is not deleted."""

    def _listed(self, result: Any, now: float, sent: float) -> None:
        self._unswept = False

    def seen(self, consumers: Any, now: float) -> None:
        pass


class StaleState(LeaseMachine):
    """After a state write without an answer, the member writes the next state with the same fence."""

    def _is_written(self, result: Any) -> bool:
        if result is Unknown:
            return False
        return super()._is_written(result)


class ResumedAfterRelease(LeaseMachine):
    """The member treats a release without an answer as a release that did not happen."""

    def _release_written(self, result: Any, now: float, sent: float) -> None:
        if result is Unknown and self._announced:
            self.phase = phases.OWNED
            self._wanted = True
            self._release_revision = None
        else:
            super()._release_written(result, now, sent)


class FloorUnread(LeaseMachine):
    """The member ignores the acknowledged floor of the last consumer."""

    def _found(self, result: Any, now: float, sent: float) -> None:
        if isinstance(result, Found):
            result = replace(result, consumers=tuple(one._replace(floor=0) for one in result.consumers))
        super()._found(result, now, sent)


MUTANTS: list[type[LeaseMachine]] = [
    value
    for value in list(globals().values())
    if isinstance(value, type) and issubclass(value, LeaseMachine) and value is not LeaseMachine
]
