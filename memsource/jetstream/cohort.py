"""An exclusive cohort as data: members with leases, and the owners, epochs and moves of slots.

In this module a slot is a cohort partition. The cohort acts only during calls of its methods, which take the time as an
argument. Its rules:

- A running member renews its lease after each third of the lease time. A crashed or frozen member keeps its slots until
  its lease has expired. A frozen member receives the notice of the loss when its process runs again, and then joins
  again.
- Every assignment of a slot has an epoch above all earlier epochs of the slot.
- The cohort revokes a slot that moves, and assigns the slot after its release. At the deadline of the revocation the
  cohort takes the slot from its owner.
- Only a running member can receive a slot. Without a running member, a free slot stays free.
- Two members therefore work on a slot only between its loss and the notice of the loss to the former owner.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from memsource.memory.group import plan


class SlotNotice(NamedTuple):
    """A message to a member about a slot.

    Attributes:
        kind: Event of the slot.
        slot: Number of the slot.
        epoch: Epoch of the assignment.
        timeout: Seconds from a revocation to its deadline; 0 for other events.
    """

    kind: Literal["assigned", "revoking", "lost"]
    slot: int
    epoch: int
    timeout: float = 0.0


@dataclass(eq=False, slots=True)
class _Member:
    """The state of a member. Times are in seconds of the caller's clock.

    Attributes:
        joined: Time from which the member renews its lease; None = the lease has expired.
        lease_end: Time when the lease expires; infinity = the member renews the lease.
        frozen_until: Time when the process runs again; None = the process runs.
        crashed: Whether the process has ended.
        notices: Notices that the member has not received yet.
    """

    joined: float | None
    lease_end: float = math.inf
    frozen_until: float | None = None
    crashed: bool = False
    notices: list[SlotNotice] = field(default_factory=list)

    @property
    def runs(self) -> bool:
        return not self.crashed and self.frozen_until is None


class Cohort:
    """A cohort with some slots, numbered from 0.

    No method blocks. Not thread-safe. ``now`` never falls. Except for ``join``, a call with the name of an unknown
    member changes nothing.

    Args:
        slots: Number of slots.
        lease: Seconds that a lease lasts without a renewal, more than 0.
        revoke_timeout: Seconds after which the cohort takes a revoked slot that its owner has not released, more than
            0.
        changed: Function that the cohort calls whenever a member may have a notice.

    Attributes:
        taken: Member, slot and epoch of each assignment that the cohort took from its member, in order.
        planned: Slots that the cohort assigns. A change takes effect at the next plan, and the other slots stay free.

    Raises:
        ValueError: A time is not more than 0.
    """

    def __init__(self, slots: int, *, lease: float, revoke_timeout: float, changed: Callable[[], None]) -> None:
        for name, seconds in (("lease", lease), ("revoke_timeout", revoke_timeout)):
            if not seconds > 0:
                raise ValueError(f"{name}={seconds}: must be more than 0 seconds")
        self._lease = lease
        self._revoke_timeout = revoke_timeout
        self._changed = changed
        self._owners: list[str | None] = [None] * slots
        self._epochs = [0] * slots
        self._targets: list[str | None] = [None] * slots
        self._asked: dict[int, float] = {}  # deadline of each revoked slot
        self._members: dict[str, _Member] = {}
        self.taken: list[tuple[str, int, int]] = []
        self.planned: Collection[int] = range(slots)
        self._moves = 0
        self._retake_at = math.inf

    def __repr__(self) -> str:
        free, asked = self._owners.count(None), len(self._asked)
        return f"<Cohort: {len(self._owners)} slots, {free} free, {asked} asked for, {len(self.members)} members>"

    # --- members

    def join(self, member: str, now: float) -> None:
        """Add a member. Raises ``ValueError`` if the member has already joined."""
        if member in self._members:
            raise ValueError(f"member {member!r} has joined already; call leave() or crash() first")
        self._members[member] = _Member(now)
        self._replan(now)

    def leave(self, member: str, now: float) -> None:
        """Remove a member and free its slots at once. Idempotent."""
        if self._members.pop(member, None) is not None:
            for slot in self.slots(member):
                self._free(slot)
            self._replan(now)

    def crash(self, member: str, now: float) -> None:
        """End the process of a member. The member's slots become free when its lease expires. Idempotent."""
        state = self._members.get(member)
        if state is not None and not state.crashed:
            self._stop_renewing(state, now)
            state.crashed = True
            state.frozen_until = None
            if state.joined is None:
                del self._members[member]

    def freeze(self, member: str, now: float, until: float) -> None:
        """Stop the process of a member until ``until``. Until then the member renews no lease."""
        state = self._members.get(member)
        if state is not None and not state.crashed and until > now:
            self._stop_renewing(state, now)
            state.frozen_until = max(until, state.frozen_until or until)

    def poll(self, member: str) -> list[SlotNotice]:
        """Remove and return the unread notices of a member, in order; empty if the member does not run."""
        state = self._members.get(member)
        if state is None or not state.runs:
            return []
        notices, state.notices = state.notices, []
        return notices

    def release(self, member: str, slot: int, epoch: int, now: float) -> None:
        """Release a slot if the member owns the slot under this epoch. Idempotent.

        An owner that releases a slot without a revocation is leaving. Another running member receives the slot, or the
        slot stays free until the cohort plans again.
        """
        if self._owners[slot] != member or self._epochs[slot] != epoch:
            return
        if slot not in self._asked:
            self._targets[slot] = self._other(member)
        self._free(slot)
        self._assign(now)

    # --- moves

    def rebalance(self, now: float) -> bool:
        """Plan again, and revoke at least one slot if possible. Returns whether the cohort revoked a slot."""
        asked = len(self._asked)
        self._replan(now)
        owned = [slot for slot, owner in enumerate(self._owners) if owner is not None and slot not in self._asked]
        if len(self._asked) == asked and owned:
            slot = owned[self._moves % len(owned)]
            self._moves += 1
            self.revoke(slot, now)
        return len(self._asked) > asked

    def revoke(self, slot: int, now: float) -> bool:
        """Revoke a slot, to move it to another member if possible. Idempotent. Returns False if the slot is free."""
        owner = self._owners[slot]
        if owner is None:
            return False
        if slot not in self._asked:
            self._targets[slot] = self._other(owner) or owner
            self._ask(slot, now)
        return True

    def lose(self, slot: int, now: float) -> bool:
        """Take a slot from its owner without a revocation. Returns False if the slot is free.

        Another running member receives the slot at once. Without such a member, the cohort plans again within a third
        of the lease time.
        """
        owner = self._owners[slot]
        if owner is None:
            return False
        self._take(slot)
        self._targets[slot] = self._other(owner)
        if self._targets[slot] is None:
            self._retake_at = now + self._lease / 3
        self._assign(now)
        return True

    # --- time

    def next_at(self) -> float:
        """Return the time when the next lease, freeze, deadline or wait for a new plan ends; infinity = none."""
        due = [self._retake_at, *self._asked.values()]
        for state in self._members.values():
            due.append(state.lease_end)
            if state.frozen_until is not None:
                due.append(state.frozen_until)
        return min(due)

    def advance(self, now: float) -> None:
        """Act on all leases, freezes and deadlines that have ended, in order of time.

        Leases expire before the deadlines and freezes of the same time.
        """
        while (at := self.next_at()) <= now:
            for member, state in list(self._members.items()):
                if state.lease_end <= at:
                    self._expire(member, at)
            for slot in [slot for slot, deadline in self._asked.items() if deadline <= at]:
                self._take(slot)
            for state in self._members.values():
                if state.frozen_until is not None and state.frozen_until <= at:
                    state.frozen_until = None
                    state.lease_end = math.inf
                    state.joined = at
                    self._changed()
            self._replan(at)

    # --- questions

    @property
    def members(self) -> list[str]:
        """The members whose lease has not expired, in the order of ``join``."""
        return [member for member, state in self._members.items() if state.joined is not None]

    @property
    def moving(self) -> bool:
        """Whether a slot is free or revoked, or a member that has not crashed has unread notices."""
        unheard = any(state.notices for state in self._members.values() if not state.crashed)
        free = any(self._owners[slot] is None for slot in self.planned)
        return bool(self._asked) or free or unheard

    def owner(self, slot: int) -> str | None:
        """Return the owner of a slot; None = the slot is free."""
        return self._owners[slot]

    def epoch(self, slot: int) -> int:
        """Return the epoch of the last assignment of a slot; 0 = no assignment yet."""
        return self._epochs[slot]

    def slots(self, member: str) -> list[int]:
        """Return the slots of a member, rising."""
        return [slot for slot, owner in enumerate(self._owners) if owner == member]

    def runs(self, member: str) -> bool:
        """Return whether the cohort knows a member that neither crashed nor is frozen."""
        state = self._members.get(member)
        return state is not None and state.runs

    # --- inside

    def _stop_renewing(self, state: _Member, now: float) -> None:
        if state.joined is not None and state.lease_end == math.inf:
            third = self._lease / 3
            renewed = state.joined + max(0, math.floor((now - state.joined) / third)) * third
            state.lease_end = renewed + self._lease

    def _expire(self, member: str, now: float) -> None:
        state = self._members[member]
        for slot in self.slots(member):
            self._take(slot)
        state.lease_end = math.inf
        state.joined = None
        if state.crashed:
            del self._members[member]

    def _replan(self, now: float) -> None:
        self._retake_at = math.inf
        slots = sorted(self.planned)
        self._targets = [None] * len(self._owners)
        for slot, owner in zip(slots, plan([self._owners[slot] for slot in slots], self.members), strict=True):
            self._targets[slot] = owner
        for slot, owner in enumerate(self._owners):
            if owner is not None and owner != self._targets[slot]:
                self._ask(slot, now)
        self._assign(now)

    def _assign(self, now: float) -> None:
        for slot, target in enumerate(self._targets):
            if self._owners[slot] is None and target is not None and self.runs(target):
                self._owners[slot] = target
                self._epochs[slot] += 1
                self._tell(slot, "assigned")

    def _other(self, member: str) -> str | None:
        """Return the other running member that owns the fewest slots; None = no other member runs."""
        loads = Counter(self._owners)
        others = [other for other in self.members if other != member and self.runs(other)]
        return min(others, key=lambda other: loads[other], default=None)

    def _ask(self, slot: int, now: float) -> None:
        if slot not in self._asked:
            self._asked[slot] = now + self._revoke_timeout
            self._tell(slot, "revoking", self._revoke_timeout)

    def _take(self, slot: int) -> None:
        name, epoch = self._owners[slot] or "", self._epochs[slot]
        owner = self._members.get(name)
        if owner is not None:
            self.taken.append((name, slot, epoch))
            unheard = [each for each in owner.notices if each.slot == slot and each.epoch == epoch]
            if any(each.kind == "assigned" for each in unheard):
                # A member that never received the notice of the assignment never had the slot.
                owner.notices = [each for each in owner.notices if each not in unheard]
            else:
                self._tell(slot, "lost")
        self._free(slot)

    def _free(self, slot: int) -> None:
        self._owners[slot] = None
        self._asked.pop(slot, None)

    def _tell(self, slot: int, kind: Literal["assigned", "revoking", "lost"], timeout: float = 0.0) -> None:
        owner = self._owners[slot]
        assert owner is not None
        self._members[owner].notices.append(SlotNotice(kind, slot, self._epochs[slot], timeout))
        self._changed()
