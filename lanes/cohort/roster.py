"""The records of a cohort that a member writes: the set-up, its own heartbeat, and the plan.

Every method that uses the store may raise ``UnknownResult`` or ``Conflict``. The caller then repeats the call after a
short wait, and the new call reads the result of the former call. Only the leases, not this module, decide about
ownership.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import anyio

from lanes.clock import Clock
from lanes.cohort.leases import Conflict, ConsumerExists, Entry, EpochConsumers, LeaseStore
from lanes.core.cohort.lease_machine import WORKQUEUE
from lanes.core.cohort.ledger import NOTHING
from lanes.core.cohort.plan import PLAN_RULES, plan
from lanes.core.cohort.records import (
    CONFIG_KEY,
    DEFAULT_NAME,
    DRAIN_PREFIX,
    MEMBER_PREFIX,
    PLAN_KEY,
    CohortConfig,
    Heartbeat,
    PlanRecord,
    State,
    decode,
    difference,
    drain_key,
    encode,
    member_key,
    state_key,
)
from lanes.errors import ConfigError, SourceError

log = logging.getLogger("lanes")

_R = TypeVar("_R", CohortConfig, PlanRecord, Heartbeat)

LOOK_AGAIN: Final = 0.25
"""Seconds between two reads of an awaited key: the server expires keys at about this interval."""

_TRIES: Final = 3
"""Number of tries to create a durable before the overlapping durable counts as foreign."""

GONE: Final = b""
"""The value of a key that its writer has removed, because a lease store cannot delete."""

GONE_TTL: Final = 1.0

_NAMED_LIMIT: Final = 10
"""Maximum number of partitions in one log line."""

_SILENT: Final = 0.8
"""Share of a heartbeat's time to live after which a missing heartbeat has expired. A leaving member removes any younger
heartbeat.
"""


def _named(partitions: Sequence[int]) -> str:
    """Return the numbers of partitions for a log line, at most ten."""
    more = len(partitions) - _NAMED_LIMIT
    names = ", ".join(map(str, partitions[:_NAMED_LIMIT]))
    return f"{names} and {more} more" if more > 0 else names


def margin_of(ttl: float) -> float:
    """Return the length of the last part of a lease, in seconds, in which the owner starts no handler."""
    return max(0.5, ttl / 6)


def patience_of(ttl: float) -> float:
    """Return the maximum seconds to wait for an answer, which leaves time for the next renewal or heartbeat."""
    return min(2.0, margin_of(ttl))


@dataclass(slots=True)
class _Seen:
    """The revision of another member's heartbeat, and the time of its last change or hint."""

    revision: int
    since: float


class Roster:
    """The records of a cohort, as one member reads and writes them.

    Args:
        store: Store of the leases.
        consumers: The durables of the cohort.
        config: Configuration of the cohort.
        member: Name of the member.
        nonce: Text that identifies this process.
        session: Time of the join, in milliseconds since 1970.
        weight: Weight of the member. Members share the partitions in proportion to their weights.
        active_members: Maximum number of members that share the partitions; None = all.
        consumer_target: Largest number of partitions that this member prefers to own; None = the default of the cohort.
        default_consumer_target: Target of each member without its own target; None = no target.
        ttl: Seconds after which a heartbeat expires.
        start: First sequence of a cohort that is set up for the first time; None = every stored message.
        clock: Clock of the times, in seconds.

    Attributes:
        plan: The newest plan that this member has read or written; None = no plan.
        begun: ``start`` in the configuration of the cohort; before ``set_up``, in the configuration of this member.
        cohort: Name of the cohort; before ``set_up``, the name in the configuration of this member, or the default.
    """

    def __init__(
        self,
        store: LeaseStore,
        consumers: EpochConsumers,
        config: CohortConfig,
        *,
        member: str,
        nonce: str,
        session: int,
        weight: int = 1,
        active_members: int | None = None,
        consumer_target: int | None = None,
        default_consumer_target: int | None = None,
        ttl: float,
        start: int | None,
        clock: Clock,
    ) -> None:
        self.plan: PlanRecord | None = None
        self.begun = config.start
        self._store = store
        self._consumers = consumers
        self._config = config
        self.cohort = config.cohort or DEFAULT_NAME
        self._member = member
        self._key = member_key(member)
        self._heartbeat = Heartbeat(
            nonce=nonce,
            weight=weight,
            active_members=active_members,
            session=session,
            lease=int(ttl),
            consumer_target=consumer_target,
            default_consumer_target=default_consumer_target,
            rules=PLAN_RULES,
        )
        self._ttl = ttl
        self._start = start
        self._clock = clock
        self._revision = 0
        self.beat_at = -math.inf
        self._seen: dict[str, _Seen] = {}
        self._beaten = -math.inf
        self._believe_from = -math.inf  # before that time, a missing heartbeat proves nothing
        self._highest = 0
        self._leaving = False
        # The members whose heartbeats have expired, and the plan for which ``_tell_silent`` was called last.
        self._silent: set[str] = set()
        self._told: PlanRecord | None = None

    def __repr__(self) -> str:
        generation = "no plan" if self.plan is None else f"generation {self.plan.generation}"
        return f"<Roster of {self._member}: {generation}>"

    @property
    def under_provisioned(self) -> bool:
        """Whether the newest plan gives a member more partitions than its target."""
        return self.plan is not None and self.plan.under_provisioned

    @property
    def rules(self) -> int:
        """The version of the rules of the plan; 0 without a plan."""
        return 0 if self.plan is None else self.plan.rules

    # --- set-up

    async def set_up(self) -> None:
        """Write the configuration of the cohort, or compare it with the existing record. Idempotent.

        Raises ``ConfigError`` for a cohort with another configuration. If the record is missing while durables or the
        mark of the cohort exist, the bucket was lost. In that case the call writes no state, and a member waits for the
        length of a lease before it acquires a partition. The loss of the bucket during this call has the same effect.
        """
        entry = await self._store.read(CONFIG_KEY)
        if entry.value is None:
            partitions = range(self._config.partitions)
            claims = [await self._claim(state_key(partition)) for partition in partitions]
            found = [await self._consumers.found(partition) for partition in partitions]
            first = not any(consumers for consumers, _ in found) and not await self._marked()
            if not first:
                self._doubt()
            for partition, claim, (consumers, _) in zip(partitions, claims, found, strict=True):
                if first and claim is not None:
                    await self._begin(state_key(partition), claim)
                if not consumers:
                    await self._create_consumer(partition)
            await self._mark()
            named = replace(self._config, cohort=self.cohort)
            await self._store.write(CONFIG_KEY, encode(named), revision=entry.revision)
            return
        config = self._decode(CohortConfig, CONFIG_KEY, entry.value)
        wanted = difference(config, self._config)
        if wanted is not None:
            raise ConfigError(wanted)
        self.cohort = config.cohort or self.cohort
        # An earlier version may have set the cohort up without a mark, or a user may have deleted the mark.
        await self._mark()
        self.begun = config.start
        if self.begun != self._config.start:
            log.info(
                "cohort %s: start=%s is ignored, because the cohort was set up with %s; the cohort continues "
                "from its position",
                self.cohort,
                self._config.start,
                self.begun,
            )

    async def _marked(self) -> bool:
        """Return whether a partition without a durable may have an owner.

        On a work queue an owner deletes its durable before it creates its next durable.
        """
        return self._config.retention == WORKQUEUE and await self._consumers.marked() is not None

    async def _mark(self) -> None:
        if self._config.retention == WORKQUEUE:
            await self._consumers.mark()

    async def _claim(self, key: str) -> int | None:
        """Write an empty state, and return its revision; None = the state is not empty.

        An empty state means that no state exists. If a new bucket replaces this bucket, a later write that requires
        this revision fails.
        """
        try:
            return await self._store.write(key, b"", revision=0)
        except Conflict:
            entry = await self._store.read(key)
            return entry.revision if entry.value == b"" else None

    async def _begin(self, key: str, claim: int) -> None:
        try:
            await self._store.write(key, encode(State(0, NOTHING)), revision=claim)
        except Conflict:
            log.debug("cohort %s: %s was written by another member, or lost with its bucket", self.cohort, key)

    async def _create_consumer(self, partition: int) -> None:
        refused: ConsumerExists | None = None
        for _ in range(_TRIES):
            try:
                await self._consumers.create(partition, 0, 0, nonce="", start=self._start)
                return
            except ConsumerExists as error:
                refused = error
            found, _ = await self._consumers.found(partition)
            if found:
                return
            # The overlapping durable may be gone by now. Another member that acquires the partition deletes the lower
            # durable before it creates its own durable. Or the durable is so new that some server does not list it.
            await anyio.sleep(LOOK_AGAIN)
        raise ConfigError(
            f"cohort {self.cohort!r}: partition {partition} cannot have a durable, because another durable "
            f"is in the way ({refused}); delete the foreign durable, or use a stream that sources this stream"
        ) from refused

    # --- the own heartbeat

    async def join(self) -> None:
        """Become a member. Raises ``ConfigError`` when another live process has this member id.

        The call waits until the heartbeat of a dead process has expired, for at most the heartbeat's time to live and a
        margin.
        """
        entry = await self._store.read(self._key)
        began, revision = self._clock(), entry.revision
        while entry.value and not self._is_mine(entry.value):
            ttl = max(self._ttl, self._decode(Heartbeat, self._key, entry.value).lease or 0)
            if entry.revision != revision or self._clock() > began + ttl + margin_of(ttl):
                raise self._used_twice()
            await anyio.sleep(LOOK_AGAIN)
            entry = await self._store.read(self._key)
        self._revision = entry.revision
        await self.beat()

    async def beat(self) -> None:
        """Write the heartbeat, or read the result of the last write. Raises ``ConfigError`` like ``join``."""
        began = self._clock()
        try:
            self._revision = await self._store.write(
                self._key, encode(self._heartbeat), revision=self._revision, ttl=self._ttl
            )
        except Conflict:
            entry = await self._store.read(self._key)
            if entry.value and not self._is_mine(entry.value):
                raise self._used_twice() from None
            if not entry.value:
                self._missed()
            # The heartbeat expired, its bucket was lost, or the answer to an own write was lost. The entry tells the
            # revision of the next write.
            self._revision = entry.revision
            raise
        self.beat_at = began + self._ttl / 3
        self._beaten = began

    def _missed(self) -> None:
        """Record that this member's heartbeat is missing. If the heartbeat cannot have expired, the bucket was lost."""
        if self._clock() < self._beaten + self._ttl - margin_of(self._ttl):
            self._doubt()

    def _doubt(self) -> None:
        """Postpone plans after the loss of the bucket, so that every member has time to write a new heartbeat."""
        self._believe_from = self._clock() + self._ttl / 3 + 2 * LOOK_AGAIN

    def _is_mine(self, value: bytes) -> bool:
        return self._decode(Heartbeat, self._key, value).nonce == self._heartbeat.nonce

    def _used_twice(self) -> ConfigError:
        return ConfigError(
            f"member id {self._member!r} is used by another live process of cohort {self.cohort!r}; give each "
            "process its own member id, or wait until the other process has ended"
        )

    async def leave(self) -> None:
        """Remove the heartbeat and the drain request, and write a plan for the other members. Idempotent."""
        self._leaving = True
        entry = await self._store.read(self._key)
        if entry.value and self._is_mine(entry.value):
            await self._store.write(self._key, GONE, revision=entry.revision, ttl=GONE_TTL)
        wish = drain_key(self._member)
        entry = await self._store.read(wish)
        if entry.value:
            await self._store.write(wish, GONE, revision=entry.revision, ttl=GONE_TTL)
        await self.look()

    # --- the plan

    async def look(self) -> None:
        """Read the plan, then the heartbeats, and write a changed plan if the heartbeats require a change.

        Because of this order, a member that replaces a plan has read heartbeats that are newer than that plan.
        """
        entry = await self._store.read(PLAN_KEY)
        heartbeats = {
            key.removeprefix(MEMBER_PREFIX): self._decode(Heartbeat, key, entry.value)
            for key, entry in self._note(await self._store.entries(MEMBER_PREFIX)).items()
            if entry.value
        }
        if self._leaving:
            heartbeats.pop(self._member, None)
        elif self._member not in heartbeats:
            self._missed()
            self.beat_at = -math.inf
        wishes = await self._store.entries(DRAIN_PREFIX)
        if entry.value is None:
            # The cohort has no plan yet, or the bucket was lost.
            await self.set_up()
        else:
            self.plan = self._read_plan(entry.value)
        better = self.plan
        # While a heartbeat may be missing, write no plan, because another member would change the plan back.
        if heartbeats and self._clock() >= self._believe_from:
            draining = {key.removeprefix(DRAIN_PREFIX) for key, wish in wishes.items() if wish.value}
            better = self._planned(heartbeats, draining)
        if better is not None and (entry.value is None or better != self.plan):
            await self._store.write(PLAN_KEY, encode(better), revision=entry.revision)
            self.plan = better
            self._highest = max(self._highest, better.generation)
        self._tell_silent()

    def _planned(self, heartbeats: dict[str, Heartbeat], draining: set[str]) -> PlanRecord:
        before = self.plan
        newest = heartbeats[max(heartbeats, key=lambda member: (heartbeats[member].session, member))]
        default = newest.default_consumer_target
        own = {member: each.consumer_target for member, each in heartbeats.items()}
        targets = {member: default if target is None else target for member, target in own.items()}
        # A member with earlier code plans by its own rules, so any other plan would be changed back.
        rules = min(PLAN_RULES, *(each.rules for each in heartbeats.values()))
        try:
            made = plan(
                [None] * self._config.partitions if before is None else before.owners,
                {member: each.weight for member, each in heartbeats.items()},
                active_members=newest.active_members,
                targets={member: target for member, target in targets.items() if target is not None},
                draining=draining,
                rules=rules,
            )
        except ValueError as error:
            raise SourceError(f"cohort {self.cohort!r} has a wrong heartbeat in its bucket: {error}") from error
        same = before is not None and (before.owners, before.standbys) == (made.owners, made.standbys)
        # After the loss of a bucket, another member may have started to count from 1.
        kept = before is not None and same and before.generation >= self._highest
        return PlanRecord(
            generation=before.generation if before is not None and kept else self._highest + 1,
            owners=made.owners,
            members=tuple(sorted(heartbeats)),
            standbys=made.standbys,
            active_members=newest.active_members,
            too_few_members=made.too_few_members,
            under_provisioned=made.under_provisioned,
            default_consumer_target=default,
            rules=rules,
        )

    def _read_plan(self, value: bytes) -> PlanRecord:
        read = self._decode(PlanRecord, PLAN_KEY, value)
        if len(read.owners) != self._config.partitions:
            raise SourceError(
                f"the key {PLAN_KEY!r} of cohort {self.cohort!r} plans {len(read.owners)} partitions, not "
                f"{self._config.partitions}; delete the key, and let no other program write to the bucket"
            )
        self._highest = max(self._highest, read.generation)
        return read

    def _note(self, entries: Mapping[str, Entry]) -> Mapping[str, Entry]:
        """Record the time of the last change of each heartbeat."""
        now = self._clock()
        for key, last in self._seen.items():
            if (key not in entries or entries[key].value is None) and now - last.since > _SILENT * self._ttl:
                self._silent.add(key.removeprefix(MEMBER_PREFIX))
        self._silent -= {key.removeprefix(MEMBER_PREFIX) for key, entry in entries.items() if entry.value}
        self._seen = {
            key: seen
            if (seen := self._seen.get(key)) is not None and seen.revision == entry.revision
            else _Seen(entry.revision, now)
            for key, entry in entries.items()
            if entry.value and key != self._key
        }
        return entries

    def _tell_silent(self) -> None:
        """Log that the newest plan assigns the partitions of a member without a heartbeat to other members."""
        before, self._told = self._told, self.plan
        if before is None or self.plan is None:
            return
        for member in sorted(self._silent.intersection(before.members).difference(self.plan.members)):
            moved = [
                (number, after)
                for number, (owner, after) in enumerate(zip(before.owners, self.plan.owners, strict=True))
                if owner == member
            ]
            own = [number for number, after in moved if after == self._member]
            if own:
                log.warning(
                    "cohort %s, member %s: member %s sent no heartbeat for %g s, as after a crash; this member takes "
                    "over %d of its %d partition(s): %s",
                    self.cohort,
                    self._member,
                    member,
                    self._ttl,
                    len(own),
                    len(moved),
                    _named(own),
                )
            else:
                log.info(
                    "cohort %s, member %s: member %s sent no heartbeat for %g s, as after a crash; this member takes "
                    "over none of its %d partition(s)",
                    self.cohort,
                    self._member,
                    member,
                    self._ttl,
                    len(moved),
                )

    def heard(self, key: str) -> bool:
        """Record a hint about a written heartbeat, and return whether its member is new."""
        seen = self._seen.get(key)
        if seen is not None:
            seen.since = self._clock()
        return seen is None and key != self._key

    @property
    def look_at(self) -> float:
        """Time of the next read of plan and heartbeats, the earliest of three times.

        The times are this member's next heartbeat, another member's overdue heartbeat, and the end of the wait after a
        lost bucket. A live member writes a heartbeat every third of its time to live. This member reads the heartbeat
        at most a further third of the interval later.
        """
        missed = [seen.since + 2 / 3 * self._ttl + LOOK_AGAIN for seen in self._seen.values()]
        now = self._clock()
        again = self._believe_from if self._believe_from > now else math.inf
        return min(self.beat_at, again, max(min(missed, default=math.inf), now + LOOK_AGAIN))

    # --- inside

    def _decode(self, kind: type[_R], key: str, value: bytes) -> _R:
        try:
            return decode(kind, key, value)
        except ValueError as error:
            raise SourceError(str(error)) from error
