"""The mutants of the cohort: mistakes in its protocol, and in its source."""

from __future__ import annotations

from typing import Final

from tests.mutants import Mutant


def _mutant(
    name: str, module: str, old: str, new: str, breaks: str, *found_by: str, also: tuple[Mutant, ...] = ()
) -> Mutant:
    return Mutant(name, module, old, new, breaks, "cohort", found_by, also=also)


def _walked(name: str, module: str, old: str, new: str, breaks: str, *found_by: str) -> Mutant:
    return Mutant(name, module, old, new, breaks, "lease_walks", found_by)


_MACHINE: Final = "lanes.core.cohort.lease_machine"
_OWNED: Final = "lanes.cohort.owned"

COHORT: Final = (
    _mutant(
        "no_barrier",
        _MACHINE,
        '        if self._lease(value) is None:\n            self._step("free")',
        '        if True:\n            self._step("free")',
        "the planned member takes the partition while the former owner still has the lease",
        "Livelock",
        "NewestOwner",
        "NoOverlap",
    ),
    _mutant(
        "watch_as_loss_signal",
        "lanes.core.cohort.held_lease",
        "        self.expires = max(self.expires, sent + self._ttl - self._margin)\n        self.renew_at",
        "        self.expires = sent + 1e9\n        self.renew_at",
        "an owner relies on its lease after the deadline",
        "NewestOwner",
        "NoOverlap",
    ),
    _mutant(
        "no_epoch_bump",
        _MACHINE,
        "            self._epoch = max(known, found.server_ms) + 1\n",
        "            self._epoch = known - 1 if known else found.server_ms\n",
        "the epoch of a new owner is not above the epoch of the former owner",
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
        "the next owner starts handlers while handlers of the former owner run",
        "NoOverlap",
    ),
    _mutant(
        "done_set_not_written",
        _MACHINE,
        "        value = encode(State(self._epoch, done))\n",
        "        value = encode(State(self._epoch, Done(done.floor, ())))\n",
        "the next owner repeats messages finished above the floor",
        "NoDuplicateCleanly",
        "RepeatsNothing",
        "RedeliveryNotRun",
    ),
    _mutant(
        "renewed_after_loss",
        _MACHINE,
        '            self._give_up("the lease was not renewed in time")\n',
        "            self._held_lease.expires = now + self._ttl - self._margin\n",
        "an expired lease is renewed",
        "NewestOwner",
        "NoOverlap",
        also=(
            _mutant(
                "renewed_after_loss",
                _OWNED,
                "            if now < owned.partition.deadline < deadline:\n",
                "            if owned.partition.deadline < deadline:\n",
                "a passed deadline is moved, and handlers start again",
            ),
        ),
    ),
    _mutant(
        "gained_in_place",
        _MACHINE,
        "                start = None if self._alone else self._done.floor + 1\n",
        "                start = None if self._alone else self._done.highest + 1\n",
        "the durable of a gained partition begins after the backlog",
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
        "the lease expires at the server before the deadline of its owner",
        "NewestOwner",
        "NoOverlap",
        also=(
            _mutant(
                "ttl_rounded_down",
                "lanes.cohort.roster",
                "                self._key, encode(self._heartbeat), revision=self._revision, ttl=self._ttl\n",
                "                self._key, encode(self._heartbeat), revision=self._revision, ttl=self._ttl - 1\n",
                "the heartbeat of a member expires as early, and the plan assigns its partitions to other members",
            ),
        ),
    ),
    _mutant(
        "no_grace",
        _MACHINE,
        "        self._not_before = now + longest + self._margin * longest / self._ttl\n",
        "        self._not_before = now\n",
        "after the loss of a bucket, a lease is acquired while its former owner still relies on it",
        "NewestOwner",
        "NoOverlap",
    ),
    _mutant(
        "gap_passed_over",
        _OWNED,
        "        if delivery != self.expected:\n",
        "        if False:\n",
        "a lost delivery is redelivered after newer messages of its key",
        "PerKeyOrder",
        "CaughtUp",
    ),
    Mutant(
        "forced_without_ledger",
        "lanes.cohort.membership",
        "    def _overdue(self, partition: int) -> None:\n",
        "    def _overdue(self, partition: int) -> None:\n"
        "        if self.settings.overdue == 'force':\n            return self.gone(partition, 'overdue')\n",
        "after a forced move, the next owner repeats finished messages",
        "cohort_forced",
        ("RepeatsNothing",),
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
        "a member with an old list of members writes a plan without the newer members",
        "PlansSettle",
    ),
    Mutant(
        "own_plan_rules",
        "lanes.cohort.roster",
        "        rules = min(PLAN_RULES, *(each.rules for each in heartbeats.values()))\n",
        "        rules = PLAN_RULES\n",
        "members with newer code plan by their own rules, and members with the former code change each plan back",
        "cohort_targets",
        ("PlansSettle", "Converges"),
        # Most runs of this fault take seconds, because the plans change without end. This one finds it at once.
        first=13,
    ),
    Mutant(
        "target_of_the_newest",
        "lanes.cohort.roster",
        "        default = newest.default_consumer_target\n",
        "        default = newest.consumer_target\n",
        "the target of the member that joined last limits each member without a target",
        "cohort_targets",
        ("LeastExcess",),
    ),
    _mutant(
        "heartbeat_on_old_revision",
        "lanes.cohort.roster",
        "            self._revision = entry.revision\n            raise\n",
        "            if entry.value:\n                self._revision = entry.revision\n            raise\n",
        "after its heartbeat has expired or its bucket was lost, a member never writes another heartbeat",
        "StopEnds",
        "Converges",
    ),
    _walked(
        "lost_renewal_counts",
        "lanes.core.cohort.held_lease",
        "        if revision != self.revision and self._unsure is not None:\n",
        "        if self._unsure is not None:\n",
        "a renewal whose request was lost counts as applied, and another member acquires the lease meanwhile",
        "(a)",
    ),
    _walked(
        "second_loss_unnoticed",
        _MACHINE,
        "            if self._state is _NO_STATE and _identities(found) != self._survey:\n",
        "            if False:\n",
        "after two losses of the bucket, a member that waited after the first one takes the partition from its owner",
        "(a)",
    ),
    _walked(
        "own_lease_outlasted",
        _MACHINE,
        "        longest = max([self._ttl, found.lease, *(consumer.lease for consumer in found.consumers)])\n",
        "        longest = max(self._ttl, found.lease)\n",
        "after the loss of a bucket, a member does not wait for the longer lease of another member",
        "(a)",
    ),
    _walked(
        "lost_save_counts",
        _MACHINE,
        '        if self._is_written(result):\n            self._step("written")',
        '        if self._is_written(result) or result is Unknown:\n            self._step("written")',
        "a lease is released although the request to write the ledger was lost",
        "(j)",
    ),
    _walked(
        "release_on_old_revision",
        _MACHINE,
        "        self._release_revision = None\n        if result is not Unknown",
        "        if result is not Unknown",
        "the retry of a release does not read the lease again, so a release whose reply was lost is refused for ever",
        "(g)",
    ),
)
