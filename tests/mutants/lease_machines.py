"""Lease machines with one plausible mistake each: a walk has to find every one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lanes.core.cohort import phases
from lanes.core.cohort.actions import Action, Found, Unknown, Write
from lanes.core.cohort.held_lease import REST
from lanes.core.cohort.lease_machine import Handler, LeaseMachine
from lanes.core.cohort.ledger import NOTHING, Done
from lanes.core.cohort.records import Lease, State, encode


class NoVerify(LeaseMachine):
    """It pulls without looking at the lease once more."""

    def _created(self, result: Any, now: float, sent: float) -> None:
        super()._created(result, now, sent)
        if self.phase == phases.VERIFYING:
            self._required_lease().step = REST


class NoBump(LeaseMachine):
    """The epoch is that of the state or of a consumer, not above them."""

    def _found(self, result: Any, now: float, sent: float) -> None:
        super()._found(result, now, sent)
        if self.phase == phases.WRITING and not self._announced:
            self._epoch = max([self._state.epoch, *(consumer.epoch for consumer in result.consumers)])
            self._lower = self._below(result)


class NoServerClock(LeaseMachine):
    """Of an epoch whose bucket and consumer are gone nothing is known."""

    def _found(self, result: Any, now: float, sent: float) -> None:
        super()._found(replace(result, server_ms=0) if isinstance(result, Found) else result, now, sent)


class ReleaseBeforeState(LeaseMachine):
    """The lease is released, and the ledger is not written."""

    def _action(self, now: float, nonce: str) -> Action | None:
        if self.phase == phases.SAVING:
            self._step("written")
            return None
        return super()._action(now, nonce)


class ReleaseBeforeDrain(LeaseMachine):
    """It does not wait for what runs."""

    def _revoke(self) -> None:
        super()._revoke()
        self._step("drained")


class StateWithoutLedger(LeaseMachine):
    """Only the epoch is written."""

    def _write_state(self, done: Done, handler: Handler) -> Action:
        return super()._write_state(NOTHING, handler)


class DrainWithoutLedger(LeaseMachine):
    """What was finished since the acquisition is not handed over."""

    def drained(self, done: Done, now: float, *, ended: bool = True) -> None:
        super().drained(NOTHING, now, ended=ended)


class AdoptedAfterRestart(LeaseMachine):
    """A lease in its own name is taken for its own, with consumer and all."""

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
    """The state is written whoever holds the lease."""

    def _write_state(self, done: Done, handler: Handler) -> Action:
        return self._ask(Write(self._state_key, encode(State(self._epoch, done)), None), handler)


class UnknownIsMine(UnfencedState, NoVerify):
    """An acquisition without an answer is taken for a success, and nothing looks again."""

    def _read_back(self, result: Any, now: float, sent: float) -> None:
        self._hold(self._free_revision + 1, self._claim[1])


class NoGrace(LeaseMachine):
    """A state that is missing is one that was never written."""

    def _surveyed(self, result: Any, now: float, sent: float) -> None:
        super()._surveyed(result, now, sent)
        self._not_before = now

    def _checked(self, result: Any, now: float, sent: float) -> None:
        self._waited = True
        super()._checked(result, now, sent)


class TakesWhatIsHeld(LeaseMachine):
    """It does not wait until the lease is free."""

    def _lease(self, value: bytes | None) -> Lease | None:
        lease = super()._lease(value)
        return None if self.phase == phases.LOOKING else lease


class NoDeadline(LeaseMachine):
    """It goes by what renewals say, and by no clock of its own."""

    def expire(self, now: float) -> None:
        if self._held_lease is not None:
            self._held_lease.expires = max(self._held_lease.expires, now + 1)


class RenewedAfterLoss(LeaseMachine):
    """What it finds in the lease is overwritten."""

    def _renewal_read(self, result: Any, now: float, sent: float) -> None:
        if result is Unknown or not self._announced:
            super()._renewal_read(result, now, sent)
        else:
            self._required_lease().found(result[1])

    def expire(self, now: float) -> None:
        pass


class DeadlineFromTheAnswer(LeaseMachine):
    """The lease counts from when the answer came."""

    def apply(self, action: Action, result: Any, now: float, sent: float) -> None:
        super().apply(action, result, now, now)


class DeleteFirst(LeaseMachine):
    """Lower epochs go before the new consumer is there, whatever the retention."""

    def _epoch_written(self, result: Any, now: float, sent: float) -> None:
        if self._is_written(result):
            self._step("written, delete first")


class PullBeforeDelete(LeaseMachine):
    """It pulls while a lower epoch is there, whose acks count."""

    def _action(self, now: float, nonce: str) -> Action | None:
        if self.phase == phases.SWEEPING:
            self._step("cleared")
            self._own()
            return None
        return super()._action(now, nonce)


class NoSweep(LeaseMachine):
    """A consumer that was made late stays."""

    def _listed(self, result: Any, now: float, sent: float) -> None:
        self._unswept = False

    def seen(self, consumers: Any, now: float) -> None:
        pass


class StaleState(LeaseMachine):
    """A state without an answer is followed by the next one under the same fence."""

    def _is_written(self, result: Any) -> bool:
        if result is Unknown:
            return False
        return super()._is_written(result)


class ResumedAfterRelease(LeaseMachine):
    """A release without an answer is taken for one that did not happen."""

    def _release_written(self, result: Any, now: float, sent: float) -> None:
        if result is Unknown and self._announced:
            self.phase = phases.OWNED
            self._wanted = True
            self._release_revision = None
        else:
            super()._release_written(result, now, sent)


class FloorUnread(LeaseMachine):
    """What the last consumer knows is acknowledged is not asked."""

    def _found(self, result: Any, now: float, sent: float) -> None:
        if isinstance(result, Found):
            result = replace(result, consumers=tuple(one._replace(floor=0) for one in result.consumers))
        super()._found(result, now, sent)


MUTANTS: list[type[LeaseMachine]] = [
    value
    for value in list(globals().values())
    if isinstance(value, type) and issubclass(value, LeaseMachine) and value is not LeaseMachine
]
