"""The frame of a tenure: one action at a time, renewals between them, and the end of all at the deadline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from lanes.core.cohort.actions import Action, Lost, Read, Refused, Released, TenureEvent, Unknown, Wait, Write
from lanes.core.cohort.holding import WRITE, Holding
from lanes.core.cohort.ledger import NOTHING, Done
from lanes.core.cohort.phases import DRAINING, IDLE, OWNED, RELEASING, SEEKING, TAKING, IllegalInput, following
from lanes.core.cohort.records import Lease, State, decode, encode, lease_key, state_key

__all__ = ["LOOK_SECONDS", "PAST", "Handler", "Steps"]

LOOK_SECONDS: Final = 0.25
"""Seconds until a lease that is held is read again, and until what had no answer is asked again."""

LIMITS: Final = "limits"
WORKQUEUE: Final = "workqueue"
INTEREST: Final = "interest"

NEVER: Final = float("inf")
PAST: Final = -NEVER

Handler = Callable[[Any, float, float], None]
"""What an action's result is given to, with the clock now and before it was sent."""


class Steps:
    """See ``lanes.core.cohort.tenure.Tenure``, which is the whole."""

    def __init__(self, partition: int, member: str, *, retention: str, ttl: float, margin: float) -> None:
        if retention not in (LIMITS, WORKQUEUE, INTEREST):
            raise ValueError(f"retention={retention!r}: must be {LIMITS!r}, {WORKQUEUE!r} or {INTEREST!r}")
        if not 0 < margin < ttl / 2:
            raise ValueError(f"margin={margin}: must be more than 0 s and less than half of the lease, of {ttl} s")
        self.partition = partition
        self.member = member
        self.phase = IDLE
        self.events: list[TenureEvent] = []
        # Two consumers of a partition exclude each other, and what is acknowledged is gone from the stream.
        self._alone = retention == WORKQUEUE
        self._ttl = ttl
        self._margin = margin
        self._lease_key = lease_key(partition)
        self._state_key = state_key(partition)
        self._wanted = False
        self._asked: Action | None = None
        self._then: Handler | None = None
        self._not_before = PAST
        self._holding: Holding | None = None
        self._announced = False  # `Owned` was given, and neither `Lost` nor `Released` since
        self._epoch = 0
        self._sub = 0
        self._done: Done = NOTHING  # what the state says, or is about to
        self._lower: list[tuple[int, int]] = []  # consumers to delete: epoch and sub-number
        self._checkpoint: Done | None = None
        self._seen = False
        self._unswept = False
        self._release_revision: int | None = None

    def next(self, now: float, nonce: str) -> Action:
        """What to do next. A ``Wait`` ends at its time or with an input; ``apply`` gets the result of all others.

        ``nonce``: fresh and random at every call, for an acquisition. ``IllegalInput`` while an action is under way.
        """
        if self._asked is not None:
            raise IllegalInput(
                f"cohort partition {self.partition}: 'next' is not allowed while {self.phase} and {self._asked} has no "
                "result: a bug of lanes, please report it"
            )
        self.expire(now)
        if now < self._not_before:
            return Wait(self._not_before if self._holding is None else min(self._not_before, self._holding.expires))
        action = self._choose(now, nonce)
        if not isinstance(action, Wait):
            self._asked = action
        return action

    def apply(self, action: Action, result: Any, now: float, sent: float) -> None:
        """The result of the action that ``next`` returned; ``sent``: the clock before it was sent.

        One that was given up has the result ``Unknown``. ``ValueError`` for a record that ``lanes`` did not write: what
        was held is given up, and the driver may go on. ``IllegalInput`` for any other action.
        """
        if action is not self._asked:
            raise IllegalInput(
                f"cohort partition {self.partition}: a result of {action} is not allowed while {self.phase} waits for "
                f"{self._asked}: a bug of lanes, please report it"
            )
        self._asked = None
        self.expire(now)
        handler, self._then = self._then, None
        if handler is None:
            return
        if result is Unknown:
            self._not_before = now + LOOK_SECONDS
        try:
            handler(result, now, sent)
        except ValueError as error:
            if self._holding is not None:
                self._give_up(str(error))
            self._not_before = now + LOOK_SECONDS
            raise

    def expire(self, now: float) -> None:
        """Give up what is past its deadline. ``next`` does it; a driver does too, while an action is under way."""
        if self._holding is not None and now >= self._holding.expires:
            self._give_up("the lease was not renewed in time")

    def _choose(self, now: float, nonce: str) -> Action:
        while True:
            if not self._wanted and not self._announced and (self.phase in SEEKING or self.phase in TAKING):
                self._step("unplanned")
            holding = self._holding
            if holding is not None and self.phase != RELEASING and holding.due(now):
                return self._renew(holding)
            action = self._action(now, nonce)
            if action is not None:
                return action

    def _action(self, now: float, nonce: str) -> Action | None:
        """What the phase asks for; None where it went on to another one."""
        raise NotImplementedError

    def _ask(self, action: Action, handler: Handler) -> Action:
        self._then = handler
        return action

    def _rest(self) -> Wait:
        return Wait(NEVER if self._holding is None else min(self._holding.renew_at, self._holding.expires))

    def _step(self, event: str) -> None:
        self.phase = following(self.partition, self.phase, event)

    # --- the lease

    def _held(self) -> Holding:
        assert self._holding is not None, f"cohort partition {self.partition} holds no lease while {self.phase}"
        return self._holding

    def _lease(self, value: bytes | None) -> Lease | None:
        """Whose the lease is; None = nobody's."""
        if not value:
            return None
        lease = decode(Lease, self._lease_key, value)
        return None if lease.released else lease

    def _renew(self, holding: Holding) -> Action:
        if holding.step != WRITE:
            return self._ask(Read(self._lease_key), self._renewal_read)
        value = encode(Lease(self.member, holding.nonce, self._epoch))
        return self._ask(Write(self._lease_key, value, holding.revision, self._ttl), self._renewal_written)

    def _renewal_read(self, result: Any, now: float, sent: float) -> None:
        holding = self._held()
        if result is Unknown:
            return
        value, revision = result
        lease = self._lease(value)
        if lease is None:
            self._fence("the lease is gone")
        elif lease.nonce != holding.nonce:
            self._fence(f"the lease is held by {lease.member!r}")
        else:
            holding.found(revision)

    def _renewal_written(self, result: Any, now: float, sent: float) -> None:
        holding = self._held()
        if result is Unknown:
            holding.unknown(sent)
        elif result is Refused:
            holding.refused()
        else:
            holding.renewed(result, sent)
            if self.phase in (OWNED, DRAINING):
                self._unswept = not self._seen and not self._alone
                self._seen = False

    def _write_state(self, done: Done, handler: Handler) -> Action:
        value = encode(State(self._epoch, done))
        return self._ask(Write(self._state_key, value, None, fence=(self._lease_key, self._held().revision)), handler)

    def _is_written(self, result: Any) -> bool:
        """Whether a fenced write is known to be applied. If not, the lease is renewed before the next one.

        A refusal may come from a renewal of this member's own; and a write that is still on its way must not come
        after the next one: with the revision that it is fenced by gone, it cannot.
        """
        if result is Refused or result is Unknown:
            self._held().demand()
            return False
        return True

    # --- the end

    def _give_up(self, reason: str) -> None:
        if self.phase == RELEASING:
            self._released()  # the ledger is written: there is nothing left to lose
        else:
            self._fence(reason)

    def _fence(self, reason: str) -> None:
        """The lease is not held any more, or cannot be shown to be. It is never renewed again, nor read for its own."""
        self._holding = None
        self._then = None
        self._checkpoint = None
        self._not_before = PAST
        if self._announced:
            self._announced = False
            self._step("lost")
            self.events.append(Lost(reason))
        else:
            self._step("failed")

    def _released(self) -> None:
        self._holding = None
        self._release_revision = None
        self._then = None
        self._not_before = PAST
        if self._announced:
            self._announced = False
            self.events.append(Released())
        self._step("released")
        if self._wanted:
            self._look()

    def _look(self) -> None:
        self._step("planned")
        self._not_before = PAST
