"""A member's part in keeping its cohort's records: the set-up, its own heartbeat, and the plan.

Every call may raise ``UnknownResult`` or ``Conflict`` of ``lanes.cohort.leases``: then it is called again a little
later, and finds out by reading what has become of it. Nothing here decides who owns a partition: that is the leases'
to say.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

import anyio

from lanes.clock import Clock
from lanes.cohort.leases import Conflict, ConsumerExists, Entry, EpochConsumers, LeaseStore
from lanes.core.cohort.lease_machine import WORKQUEUE
from lanes.core.cohort.ledger import NOTHING
from lanes.core.cohort.plan import plan
from lanes.core.cohort.records import (
    CONFIG_KEY,
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

__all__ = ["GONE", "GONE_TTL", "Roster", "margin_of", "patience_of"]

log = logging.getLogger("lanes")

_R = TypeVar("_R", CohortConfig, PlanRecord, Heartbeat)

LOOK_AGAIN: Final = 0.25
"""Seconds after which a key is read again that is awaited: a server lets expire what is due so often."""

_TRIES: Final = 3
"""How often a durable is asked for before what is in its way is said not to be the cohort's."""

GONE: Final = b""
"""The value of a key whose writer wants it gone: a lease store deletes nothing."""

GONE_TTL: Final = 1.0


def margin_of(ttl: float) -> float:
    """Seconds before the end of its lease after which an owner starts nothing more."""
    return max(0.5, ttl / 6)


def patience_of(ttl: float) -> float:
    """Seconds after which an answer is not waited for any more: the next renewal, or heartbeat, comes first."""
    return min(2.0, margin_of(ttl))


@dataclass(slots=True)
class _Seen:
    """What was seen of another member: the revision of its heartbeat, and since when."""

    revision: int
    since: float


class Roster:
    """What ``member`` writes and reads of the cohort of ``config``, and what it wishes for: ``weight``, ``target``.

    ``nonce`` is of this process. ``ttl``: seconds of a heartbeat. ``start``: the first sequence of a cohort that is set
    up for the first time; None = everything. ``plan``: the last one that was read or written, None before. ``begun``:
    where the cohort was told to begin, as its record says once ``set_up`` has returned.
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
        target: int | None = None,
        ttl: float,
        start: int | None,
        clock: Clock,
    ) -> None:
        self.plan: PlanRecord | None = None
        self.begun = config.start
        self._store = store
        self._consumers = consumers
        self._config = config
        self._member = member
        self._key = member_key(member)
        self._heartbeat = Heartbeat(nonce=nonce, weight=weight, target=target, session=session, lease=int(ttl))
        self._ttl = ttl
        self._start = start
        self._clock = clock
        self._revision = 0
        self._beat_at = -math.inf
        self._seen: dict[str, _Seen] = {}
        self._beaten = -math.inf
        self._believe_from = -math.inf  # before, a heartbeat that is missing may be missing with all the others
        self._highest = 0
        self._leaving = False

    def __repr__(self) -> str:
        generation = "no plan" if self.plan is None else f"generation {self.plan.generation}"
        return f"<Roster of {self._member}: {generation}>"

    # --- set-up

    async def set_up(self) -> None:
        """Write what a cohort never changes, or compare it with what is there. Idempotent.

        Raises ``ConfigError`` for a cohort that was set up otherwise. Where the record is missing although there are
        durables, or the mark of a cohort, the bucket was lost: then no state is written, and whoever takes a partition
        waits for its lease. The same where it is lost behind this look, however long this stands still in between.
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
            await self._store.write(CONFIG_KEY, encode(self._config), revision=entry.revision)
            return
        config = self._decode(CohortConfig, CONFIG_KEY, entry.value)
        wanted = difference(config, self._config)
        if wanted is not None:
            raise ConfigError(wanted)
        # Of a cohort that an earlier version has set up, or whose mark somebody has deleted.
        await self._mark()
        self.begun = config.start
        if self.begun != self._config.start:
            log.info(
                "cohort %s: start=%s is for its first member; it was set up with %s and goes on where it stands",
                self._config.cohort,
                self._config.start,
                self.begun,
            )

    async def _marked(self) -> bool:
        """Whether somebody may own what has no durable just now.

        On a work queue an owner that takes over from itself deletes one before it makes the next.
        """
        return self._config.retention == WORKQUEUE and await self._consumers.marked() is not None

    async def _mark(self) -> None:
        if self._config.retention == WORKQUEUE:
            await self._consumers.mark()

    async def _claim(self, key: str) -> int | None:
        """Have an empty state there, which is as good as none, and return its revision; None = it is not empty.

        No other bucket has that revision: so what is written over it, and over nothing else, is written into this one.
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
            log.debug("cohort %s: %s was written by somebody else, or lost with its bucket", self._config.cohort, key)

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
            # What was in the way may be gone by now: another member that has set up meanwhile, and takes the partition,
            # deletes the lower durable before it makes its own. Or it is so new that not every server lists it.
            await anyio.sleep(LOOK_AGAIN)
        raise ConfigError(
            f"cohort {self._config.cohort!r}: partition {partition} cannot have a durable of its own, for "
            f"another one is there ({refused}): delete what is not the cohort's, or use a stream that sources it"
        ) from refused

    # --- the own heartbeat

    async def join(self) -> None:
        """Become a member. Raises ``ConfigError`` when another process of this member id lives.

        Waits for the heartbeat of a process that is gone to expire: its time to live, and a margin.
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

    @property
    def beat_at(self) -> float:
        """When the next heartbeat is due."""
        return self._beat_at

    async def beat(self) -> None:
        """Write the heartbeat, or find out what became of it. Raises ``ConfigError`` like ``join``."""
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
            # Expired, lost with its bucket, or an own write whose answer was: the next one begins with what is there.
            self._revision = entry.revision
            raise
        self._beat_at = began + self._ttl / 3
        self._beaten = began

    def _missed(self) -> None:
        """The own heartbeat is not there: if it cannot have expired, the bucket was lost."""
        if self._clock() < self._beaten + self._ttl - margin_of(self._ttl):
            self._doubt()

    def _doubt(self) -> None:
        """The bucket was lost: until everybody has written a heartbeat into the new one, nobody is missed."""
        self._believe_from = self._clock() + self._ttl / 3 + 2 * LOOK_AGAIN

    def _is_mine(self, value: bytes) -> bool:
        return self._decode(Heartbeat, self._key, value).nonce == self._heartbeat.nonce

    def _used_twice(self) -> ConfigError:
        return ConfigError(
            f"member id {self._member!r} is used by another process of cohort {self._config.cohort!r} that lives: give "
            "each process a member id of its own, or wait until the other one has ended"
        )

    async def leave(self) -> None:
        """Be a member no more, in the eyes of the others too: with a plan that leaves it out. Idempotent."""
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
        """Read what is planned and who lives, and write a better plan where there is one.

        In this order: whoever writes over a plan has seen who lived after it was made.
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
            self._beat_at = -math.inf
        wishes = await self._store.entries(DRAIN_PREFIX)
        if entry.value is None:
            # The first plan of all, or the bucket was lost.
            await self.set_up()
        else:
            self.plan = self._read_plan(entry.value)
        better = self.plan
        # Who is in doubt plans nothing: whoever is not would plan it back, and both again and again.
        if heartbeats and self._clock() >= self._believe_from:
            draining = {key.removeprefix(DRAIN_PREFIX) for key, wish in wishes.items() if wish.value}
            better = self._planned(heartbeats, draining)
        if better is not None and (entry.value is None or better != self.plan):
            await self._store.write(PLAN_KEY, encode(better), revision=entry.revision)
            self.plan = better
            self._highest = max(self._highest, better.generation)

    def _planned(self, heartbeats: dict[str, Heartbeat], draining: set[str]) -> PlanRecord:
        before = self.plan
        newest = max(heartbeats, key=lambda member: (heartbeats[member].session, member))
        target = heartbeats[newest].target
        try:
            made = plan(
                [None] * self._config.partitions if before is None else before.owners,
                {member: each.weight for member, each in heartbeats.items()},
                target=target,
                draining=draining,
            )
        except ValueError as error:
            raise SourceError(f"cohort {self._config.cohort!r}: a heartbeat in its bucket is wrong: {error}") from error
        same = before is not None and (before.owners, before.standbys) == (made.owners, made.standbys)
        # Where the bucket was lost, somebody who did not know how far it was may have begun to count anew.
        kept = before is not None and same and before.generation >= self._highest
        return PlanRecord(
            generation=before.generation if before is not None and kept else self._highest + 1,
            owners=made.owners,
            members=tuple(sorted(heartbeats)),
            standbys=made.standbys,
            target=target,
            under_provisioned=made.under_provisioned,
        )

    def _read_plan(self, value: bytes) -> PlanRecord:
        read = self._decode(PlanRecord, PLAN_KEY, value)
        if len(read.owners) != self._config.partitions:
            raise SourceError(
                f"the key {PLAN_KEY!r} of cohort {self._config.cohort!r} plans {len(read.owners)} partitions, and it "
                f"has {self._config.partitions}: delete the key, and let nothing else write to the bucket"
            )
        self._highest = max(self._highest, read.generation)
        return read

    def _note(self, entries: Mapping[str, Entry]) -> Mapping[str, Entry]:
        """Keep since when each heartbeat stands."""
        now = self._clock()
        self._seen = {
            key: seen
            if (seen := self._seen.get(key)) is not None and seen.revision == entry.revision
            else _Seen(entry.revision, now)
            for key, entry in entries.items()
            if entry.value and key != self._key
        }
        return entries

    def heard(self, key: str) -> bool:
        """A heartbeat was written, as a hint says; whether it is of somebody who was not there."""
        seen = self._seen.get(key)
        if seen is not None:
            seen.since = self._clock()
        return seen is None and key != self._key

    @property
    def look_at(self) -> float:
        """When to look again: with the own heartbeat, or when one of another member is missed.

        Who lives writes one every third of its time to live, and it is seen a third later at worst.
        """
        missed = [seen.since + 2 / 3 * self._ttl + LOOK_AGAIN for seen in self._seen.values()]
        now = self._clock()
        again = self._believe_from if self._believe_from > now else math.inf
        return min(self._beat_at, again, max(min(missed, default=math.inf), now + LOOK_AGAIN))

    # --- inside

    def _decode(self, kind: type[_R], key: str, value: bytes) -> _R:
        try:
            return decode(kind, key, value)
        except ValueError as error:
            raise SourceError(str(error)) from error
