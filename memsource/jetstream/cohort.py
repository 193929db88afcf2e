"""An exclusive cohort as data: members with leases, the owners and epochs of slots, and moves of slots.

It acts only when it is called, and time is an argument. Its rules:

- A running member renews its lease after each third of it. A crashed or frozen one keeps its slots until its lease has
  expired. A frozen member learns of the loss when it wakes, and joins again.
- Every assignment of a slot has an epoch above all earlier ones of the slot.
- A slot that moves is revoked, and assigned after its release. At the deadline it is taken.
- Only a running member can take a slot. Until then the slot is free.
- So a slot has two owners only between the loss of a lease and the moment when its member learns of it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from memsource.memory.group import plan


class SlotNotice(NamedTuple):
    """A message to a member about a slot. ``timeout``: seconds from the revocation to the deadline."""

    kind: Literal["assigned", "revoking", "lost"]
    slot: int
    epoch: int
    timeout: float = 0.0


@dataclass(eq=False, slots=True)
class _Member:
    """The state of a member.

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

    ``lease``: seconds that a lease lasts without a renewal. ``revoke_timeout``: seconds to release a slot. ``changed``
    is called whenever a member may have a notice. ``taken``: (member, slot, epoch) of each slot that was taken.

    No method blocks. Not thread-safe. ``now`` never goes back. Calls of unknown members change nothing.
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
        self._asked: dict[int, float] = {}  # until when
        self._members: dict[str, _Member] = {}
        self.taken: list[tuple[str, int, int]] = []
        self._moves = 0
        self._retake_at = math.inf

    def __repr__(self) -> str:
        free, asked = self._owners.count(None), len(self._asked)
        return f"<Cohort: {len(self._owners)} slots, {free} free, {asked} asked for, {len(self.members)} members>"

    # --- members

    def join(self, member: str, now: float) -> None:
        """Add a member. Raises ``ValueError`` if it is known."""
        if member in self._members:
            raise ValueError(f"member {member!r} has joined already: leave, or crash it, first")
        self._members[member] = _Member(now)
        self._replan(now)

    def leave(self, member: str, now: float) -> None:
        """Remove a member and free its slots at once. Idempotent."""
        if self._members.pop(member, None) is not None:
            for slot in self.slots(member):
                self._free(slot)
            self._replan(now)

    def crash(self, member: str, now: float) -> None:
        """Stop a member for good, without a notice. Idempotent."""
        state = self._members.get(member)
        if state is not None and not state.crashed:
            self._stop_renewing(state, now)
            state.crashed = True
            state.frozen_until = None
            if state.joined is None:
                del self._members[member]

    def freeze(self, member: str, now: float, until: float) -> None:
        """Stop a member until a time."""
        state = self._members.get(member)
        if state is not None and not state.crashed and until > now:
            self._stop_renewing(state, now)
            state.frozen_until = max(until, state.frozen_until or until)

    def poll(self, member: str) -> list[SlotNotice]:
        """The new notices of a member, in order; none while it is frozen."""
        state = self._members.get(member)
        if state is None or not state.runs:
            return []
        notices, state.notices = state.notices, []
        return notices

    def release(self, member: str, slot: int, epoch: int, now: float) -> None:
        """Release a slot that is owned under this epoch. Idempotent.

        Without a revocation its owner is leaving: another member gets it, or it stays free until one joins.
        """
        if self._owners[slot] != member or self._epochs[slot] != epoch:
            return
        if slot not in self._asked:
            self._targets[slot] = self._other(member)
        self._free(slot)
        self._assign(now)

    # --- moves

    def rebalance(self, now: float) -> bool:
        """Plan again, and move at least one slot. Returns whether a slot was revoked."""
        asked = len(self._asked)
        self._replan(now)
        owned = [slot for slot, owner in enumerate(self._owners) if owner is not None and slot not in self._asked]
        if len(self._asked) == asked and owned:
            slot = owned[self._moves % len(owned)]
            self._moves += 1
            self.revoke(slot, now)
        return len(self._asked) > asked

    def revoke(self, slot: int, now: float) -> bool:
        """Revoke a slot, for another member if there is one. Idempotent. Returns whether the slot has an owner."""
        owner = self._owners[slot]
        if owner is None:
            return False
        if slot not in self._asked:
            self._targets[slot] = self._other(owner) or owner
            self._ask(slot, now)
        return True

    def lose(self, slot: int, now: float) -> bool:
        """Take a slot from its owner without asking; False = it is free.

        Another member gets it at once. Without another one its owner gets it again at its next renewal.
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
        """The time when the next lease, freeze or deadline ends; infinity = none does."""
        due = [self._retake_at, *self._asked.values()]
        for state in self._members.values():
            due.append(state.lease_end)
            if state.frozen_until is not None:
                due.append(state.frozen_until)
        return min(due)

    def advance(self, now: float) -> None:
        """Act on everything that has ended, in order of time. Leases come first."""
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
        """Whether a slot is free or revoked, or a member has notices."""
        unheard = any(state.notices for state in self._members.values() if not state.crashed)
        return bool(self._asked) or None in self._owners or unheard

    def owner(self, slot: int) -> str | None:
        """The owner of a slot; None = free."""
        return self._owners[slot]

    def epoch(self, slot: int) -> int:
        """The epoch of the last assignment of a slot; 0 = there was none."""
        return self._epochs[slot]

    def slots(self, member: str) -> list[int]:
        """The slots of a member, rising."""
        return [slot for slot, owner in enumerate(self._owners) if owner == member]

    def runs(self, member: str) -> bool:
        """Whether a member is known, and neither crashed nor frozen."""
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
        self._targets = plan(self._owners, self.members)
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
        """The other running member that owns the fewest slots."""
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
                # A member that never heard of the assignment never had the slot.
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
