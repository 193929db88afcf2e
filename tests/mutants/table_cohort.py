"""The mutants of the cohort: mistakes in its protocol, and in its source."""

from __future__ import annotations

from typing import Final

from tests.mutants import Mutant


def _mutant(
    name: str, module: str, old: str, new: str, breaks: str, *found_by: str, also: tuple[Mutant, ...] = ()
) -> Mutant:
    return Mutant(name, module, old, new, breaks, "cohort", found_by, also=also)


_MACHINE: Final = "lanes.core.cohort.lease_machine"
_OWNED: Final = "lanes.cohort.owned"

COHORT: Final = (
    _mutant(
        "no_barrier",
        _MACHINE,
        '        if self._lease(value) is None:\n            self._step("free")',
        '        if True:\n            self._step("free")',
        "whoever the plan names takes the partition while its owner still holds the lease",
        "Livelock",
        "NewestOwner",
        "NoOverlap",
    ),
    _mutant(
        "watch_as_loss_signal",
        "lanes.core.cohort.held_lease",
        "        self.expires = max(self.expires, sent + self._ttl - self._margin)\n        self.renew_at",
        "        self.expires = sent + 1e9\n        self.renew_at",
        "an owner believes in its lease until it is told otherwise",
        "NewestOwner",
        "NoOverlap",
    ),
    _mutant(
        "no_epoch_bump",
        _MACHINE,
        "            self._epoch = max(known, found.server_ms) + 1\n",
        "            self._epoch = known - 1 if known else found.server_ms\n",
        "a new owner works under an epoch that is not above that of the former one",
        "EpochsRise",
        "NewestOwner",
        "CaughtUp",
        "Converges",
    ),
    _mutant(
        "release_before_drain",
        _OWNED,
        "            owned.revoked = True\n",
        "            owned.revoked = True\n            self.membership.drained(number, owned.ledger.snapshot())\n",
        "the next owner starts while handlers of the former one run",
        "NoOverlap",
    ),
    _mutant(
        "done_set_not_written",
        _MACHINE,
        "        value = encode(State(self._epoch, done))\n",
        "        value = encode(State(self._epoch, Done(done.floor, ())))\n",
        "what was done above the floor is run again by the next owner",
        "NoDuplicateCleanly",
        "RepeatsNothing",
        "RedeliveryNotRun",
    ),
    _mutant(
        "renewed_after_loss",
        _MACHINE,
        '            self._give_up("the lease was not renewed in time")\n',
        "            self._held_lease.expires = now + self._ttl - self._margin\n",
        "a lease that has run out is renewed as if nothing had happened",
        "NewestOwner",
        "NoOverlap",
        also=(
            _mutant(
                "renewed_after_loss",
                _OWNED,
                "            if now < owned.partition.deadline < deadline:\n",
                "            if owned.partition.deadline < deadline:\n",
                "a deadline that has passed is moved on, and whoever starts handlers believes in it again",
            ),
        ),
    ),
    _mutant(
        "gained_in_place",
        _MACHINE,
        "                start = None if self._alone else self._done.floor + 1\n",
        "                start = None if self._alone else self._done.highest + 1\n",
        "the durable of a gained partition begins behind its backlog",
        "NothingLost",
        "AtLeastOnce",
        "CaughtUp",
        "FaultDifferential",
    ),
    _mutant(
        "ttl_rounded_down",
        "lanes.cohort.keeper",
        "action.key, action.value, revision=action.revision, ttl=action.ttl, fence=action.fence",
        "action.key, action.value, revision=action.revision, ttl=action.ttl and action.ttl - 1, fence=action.fence",
        "the server lets the lease expire before its owner stops believing in it",
        "NewestOwner",
        "NoOverlap",
        also=(
            _mutant(
                "ttl_rounded_down",
                "lanes.cohort.roster",
                "                self._key, encode(self._heartbeat), revision=self._revision, ttl=self._ttl\n",
                "                self._key, encode(self._heartbeat), revision=self._revision, ttl=self._ttl - 1\n",
                "whoever it belongs to counts as gone just as early, and the plan gives its partitions away",
            ),
        ),
    ),
    _mutant(
        "no_grace",
        _MACHINE,
        "        self._not_before = now + longest + self._margin * longest / self._ttl\n",
        "        self._not_before = now\n",
        "a bucket that was lost takes the lease from an owner that does not know it yet",
        "NewestOwner",
        "NoOverlap",
    ),
    _mutant(
        "gap_passed_over",
        _OWNED,
        "        if delivery != self.expected:\n",
        "        if False:\n",
        "what was lost on its way comes again behind newer messages of its key",
        "PerKeyOrder",
        "CaughtUp",
    ),
    _mutant(
        "forced_without_ledger",
        "lanes.cohort.membership",
        "    def _overdue(self, partition: int) -> None:\n",
        "    def _overdue(self, partition: int) -> None:\n"
        "        if self.settings.overdue == 'force':\n            return self.gone(partition, 'overdue')\n",
        "of a partition that is forced what was finished is run again by the next owner",
        "RepeatsNothing",
    ),
    _mutant(
        "old_view_planned",
        "lanes.cohort.roster",
        "        entry = await self._store.read(PLAN_KEY)\n"
        "        heartbeats = {\n"
        "            key.removeprefix(MEMBER_PREFIX): self._decode(Heartbeat, key, entry.value)\n"
        "            for key, entry in self._note(await self._store.entries(MEMBER_PREFIX)).items()\n",
        "        living = await self._store.entries(MEMBER_PREFIX)\n"
        "        entry = await self._store.read(PLAN_KEY)\n"
        "        heartbeats = {\n"
        "            key.removeprefix(MEMBER_PREFIX): self._decode(Heartbeat, key, entry.value)\n"
        "            for key, entry in self._note(living).items()\n",
        "who has read too early who lives plans others away",
        "PlansSettle",
    ),
)
