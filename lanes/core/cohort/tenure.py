"""One member's ownership of one partition of a cohort: what to ask of the bucket and of the consumers, in which order.

The protocol is that of ``docs/model``; the phases and their transitions are in ``phases``. Whoever drives a tenure
calls ``next``, performs what it returns, one action at a time, and gives the result to ``apply``; inputs come between
and during actions as they please, and after each of them ``next`` is asked again. After every call the driver acts on
``events`` and empties the list, and moves ``deadline`` to whatever starts handlers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lanes.core.cohort import phases
from lanes.core.cohort.acquiring import Acquiring
from lanes.core.cohort.actions import Action, FindConsumers, Found, Read, Refused, Unknown, Wait, Write
from lanes.core.cohort.ledger import Done
from lanes.core.cohort.phases import IllegalInput
from lanes.core.cohort.records import Lease, encode
from lanes.core.cohort.steps import LOOK_SECONDS, PAST

__all__ = ["LOOK_SECONDS", "IllegalInput", "Tenure"]


class Tenure(Acquiring):
    """The machine of one partition at one member. Times are seconds of a monotonic clock that counts suspension.

    ``retention``: of the stream, ``limits``, ``workqueue`` or ``interest``. ``ttl``: of the lease, whole seconds;
    ``margin``: so much before its end nothing starts any more. ``phase``: for status. Raises ``ValueError`` for another
    retention, and for a margin that is not above 0 and below half of the lease.

    No method blocks. ``IllegalInput`` names the phase and the input: a bug of the driver.
    """

    def __init__(self, partition: int, member: str, *, retention: str, ttl: float, margin: float) -> None:
        super().__init__(partition, member, retention=retention, ttl=ttl, margin=margin)
        self._stopped = False
        self._ended = True  # of what was drained nothing runs any more

    # --- what a driver looks at

    @property
    def deadline(self) -> float:
        """Nothing of the partition starts at or after it; minus infinity while it is not owned, or is handed over.

        It only rises while the partition is owned, and never once it has passed.
        """
        if self._holding is None or not self._announced or self.phase in (phases.SAVING, phases.RELEASING):
            return PAST
        return self._holding.expires

    @property
    def token(self) -> int | None:
        """The epoch of the acquisition, what handlers get; None while the partition is not owned."""
        return self._epoch if self._announced else None

    @property
    def consumer(self) -> tuple[int, int] | None:
        """Epoch and sub-number of the consumer to pull from; None while there is none, in a takeover too."""
        return (self._epoch, self._sub) if self.phase in (phases.OWNED, phases.DRAINING) else None

    @property
    def idle(self) -> bool:
        """It holds nothing, wants nothing and has nothing under way: after ``stop`` the member may leave."""
        return self.phase == phases.IDLE and self._asked is None

    # --- inputs

    def planned(self, mine: bool, now: float) -> None:
        """The plan gives the partition to this member, or does not. Idempotent; nothing is mine after ``stop``.

        One that was revoked is handed over, whatever the plan says meanwhile, and then acquired anew.
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
        """The member leaves: drain and release as after ``planned(False)``, and take nothing again. Idempotent."""
        self._stopped = True
        self.planned(False, now)

    def hinted(self, now: float) -> None:
        """The lease may have changed: look again at once, if it is that what ``next`` waits for. Idempotent."""
        if self.phase == phases.LOOKING:
            self._not_before = now

    def takeover(self, done: Done, now: float) -> None:
        """A delivery is missing, or the connection was lost: make another consumer for the same epoch.

        ``done``: the whole ledger. What is held and what runs stays, and what is queued may start within the deadline;
        from the gap on nothing is taken in before the ``Owned`` that follows, with ``again``. No effect where it is not
        owned, drains, or is taken over already.
        """
        self.expire(now)
        if self.phase == phases.OWNED:
            self._done = self._done.union(done)
            self._checkpoint = None
            self._lower = []
            self._unswept = False
            self._step("takeover")

    def checkpoint(self, done: Done, now: float) -> None:
        """Write the whole ledger now, so that a crash repeats only what follows. The last one given counts.

        It is tried until it is written, drained or lost. No effect where the partition is not owned.
        """
        self.expire(now)
        if self._announced and self.phase not in (phases.SAVING, phases.RELEASING):
            self._checkpoint = done

    def seen(self, consumers: Iterable[tuple[int, int]], now: float) -> None:
        """Epoch and sub-number of the partition's durables, as a listing has them: lower ones are deleted.

        Without one between two renewals the tenure asks for its own, where the retention lets garbage be made.

        A listing may be late: a higher epoch is a reason to look at the lease, and nothing else is one for anything.
        """
        self.expire(now)
        if self.phase not in (phases.OWNED, phases.DRAINING):
            return
        self._seen = True
        self._unswept = False
        names = sorted(consumers)
        self._lower = [name for name in names if name < (self._epoch, self._sub)]
        if names and names[-1][0] > self._epoch:
            self._held().demand()

    def gone(self, reason: str, now: float) -> None:
        """The consumer that is pulled from does not exist any more: lost. No effect while ``consumer`` is None."""
        self.expire(now)
        if self.consumer is not None:
            self._fence(reason)

    def drained(self, done: Done, now: float, *, ended: bool = True) -> None:
        """After ``Revoked``: no result of the partition counts any more, and ``done`` is the whole ledger.

        ``ended``: nothing of it runs. Where something does, the ledger is written all the same, and the lease is not
        released but left to run out: nobody is to start what still runs before its deadline.

        No effect after ``Lost``, which may have come meanwhile. ``IllegalInput`` where nothing was revoked.
        """
        self.expire(now)
        if self.phase == phases.FENCED:
            return
        self._step("drained")
        self._ended = ended
        self._done = self._done.union(done)
        self._checkpoint = None

    def ended(self, now: float) -> None:
        """After ``Lost``: every handler of the partition has ended, and it may be acquired again."""
        self._step("ended")
        if self._wanted:
            self._look()

    # --- 6, 7 and 9: while it is owned, and how it is handed over

    def _action(self, now: float, nonce: str) -> Action | None:
        match self.phase:
            case phases.IDLE | phases.FENCED:
                return self._rest()
            case phases.OWNED | phases.DRAINING:
                return self._keep()
            case phases.SAVING:
                return self._write_state(self._done, self._saved)
            case phases.RELEASING if not self._ended:
                return Wait(self._held().expires)
            case phases.RELEASING if self._release_revision is None:
                return self._ask(Read(self._lease_key), self._release_read)
            case phases.RELEASING:
                value = encode(Lease(self.member, self._held().nonce, self._epoch, released=True))
                return self._ask(
                    Write(self._lease_key, value, self._release_revision, self._ttl), self._release_written
                )
        return super()._action(now, nonce)

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
        # Another one may have been given meanwhile.
        if self._is_written(result) and self._checkpoint is written:
            self._checkpoint = None

    def _listed(self, result: Any, now: float, sent: float) -> None:
        if result is not Unknown:
            found: Found = result
            self.seen([consumer[:2] for consumer in found.consumers], now)
            self._seen = False

    def _saved(self, result: Any, now: float, sent: float) -> None:
        if self._is_written(result):
            self._step("written")

    def _release_read(self, result: Any, now: float, sent: float) -> None:
        if result is Unknown:
            return
        value, revision = result
        lease = self._lease(value)
        if lease is not None and lease.nonce == self._held().nonce:
            self._release_revision = revision
        else:
            self._released()

    def _release_written(self, result: Any, now: float, sent: float) -> None:
        self._release_revision = None
        if result is not Unknown and result is not Refused:
            self._released()
