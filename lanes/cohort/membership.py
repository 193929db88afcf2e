"""A member of a cohort at work: its heartbeat, the plan, and one lease machine for each cohort partition.

``Membership`` performs what ``lanes.core.cohort`` decides, over a ``LeaseStore`` and ``EpochConsumers``, and decides
nothing about ownership itself. Each cohort partition has one actor, which performs one action after the other; an
action that is under way at the lease's deadline is given up, so that nobody hears of the loss late. A hint that a key
has changed makes it look at once; without any hint everything happens a little later.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple

import anyio

from lanes.clock import Clock, monotonic
from lanes.cohort.keeper import Bell, LeaseKeeper
from lanes.cohort.leases import Conflict, EpochConsumers, LeaseStore, UnknownResult
from lanes.cohort.roster import Roster, margin_of, patience_of
from lanes.config import check_one_of, check_positive, check_seconds, check_whole
from lanes.core.cohort.actions import LeaseEvent
from lanes.core.cohort.lease_machine import LeaseMachine
from lanes.core.cohort.ledger import Done
from lanes.core.cohort.records import DRAIN_PREFIX, LEASE_PREFIX, MEMBER_PREFIX, PLAN_KEY, CohortConfig
from lanes.errors import ConfigError

__all__ = ["CohortSettings", "Happened", "Membership"]

log = logging.getLogger("lanes")

TTL_LEAST: Final = 3.0

_DIGITS: Final = 20
"""No sequence has more."""

_PAUSE: Final = 0.1
"""Seconds between two tries where the first was not answered, however fast that came out."""


@dataclass(frozen=True, kw_only=True)
class CohortSettings:
    """``lease``: seconds a partition is held without a renewal, whole ones, 3 or more. ``weight``: how much of the
    partitions, in proportion to the other members', 1 or more. ``target``: how many members should share them, 1 or
    more, None = all; the wish of the member that came last counts. ``drain_within``: seconds after which a partition
    that is to move should be drained, more than 0; ``overdue``: what then, ``"keep"`` it and warn (whoever is to get it
    waits), or ``"force"``: what runs of it is cancelled, and it moves.

    Raises ``ConfigError`` for anything else.
    """

    lease: float = 10.0
    weight: int = 1
    target: int | None = None
    drain_within: float = 30.0
    overdue: Literal["keep", "force"] = "keep"

    def __post_init__(self) -> None:
        check_seconds("lease", self.lease, TTL_LEAST)
        if self.lease != int(self.lease):
            raise ConfigError(
                f"lease={self.lease}: must be whole seconds: a server rounds a fraction down, and the owner would "
                "believe in its lease for too long"
            )
        check_whole("weight", self.weight, 1)
        if self.target is not None:
            check_whole("target", self.target, 1)
        check_positive("drain_within", self.drain_within)
        check_one_of("overdue", self.overdue, ("keep", "force"))


class Happened(NamedTuple):
    """Something that concerns a cohort partition, in the order in which it came about."""

    partition: int
    event: LeaseEvent


class Membership:
    """``member`` of the cohort of ``config``, over ``store`` and ``consumers``.

    The lease of ``config`` is that of the ``settings``: all members have the same, and ``consumers`` tell it with each
    durable they make. ``changed`` is called, from the tasks of ``run``, whenever ``take`` has something, a deadline has
    moved, or ``generation`` is another one; it must not block. ``start``: the first sequence of a cohort that is set up
    for the first time, None = everything that is there. ``nonce`` makes one that was never there before; ``wall``:
    seconds since the epoch, for status only. ``retention``: of the stream, as ``config`` says.

    ``run`` it once; everything else is for the same event loop, does not block, and may be called any number of times.
    Raises ``ConfigError`` for a member name or settings that cannot be.
    """

    def __init__(
        self,
        store: LeaseStore,
        consumers: EpochConsumers,
        config: CohortConfig,
        *,
        member: str,
        settings: CohortSettings | None = None,
        start: int | None = None,
        changed: Callable[[], None],
        clock: Clock = monotonic,
        wall: Clock = time.time,
        nonce: Callable[[], str] = lambda: secrets.token_hex(8),
    ) -> None:
        self.settings = settings or CohortSettings()
        self.member = member
        self.retention = config.retention
        ttl = self.settings.lease
        config = replace(config, lease=int(ttl))
        try:
            self._roster = Roster(
                store,
                consumers,
                config,
                member=member,
                nonce=nonce(),
                session=int(wall() * 1000),
                weight=self.settings.weight,
                target=self.settings.target,
                ttl=ttl,
                start=start,
                clock=clock,
            )
        except ValueError as error:
            raise ConfigError(f"member={member!r}: {error}") from error
        self._consumers = consumers
        self._changed = changed
        self._clock = clock
        self._name = f"cohort {config.cohort}, member {member}"
        self._happened: list[Happened] = []
        self._keepers = [
            LeaseKeeper(
                LeaseMachine(partition, member, retention=config.retention, ttl=ttl, margin=margin_of(ttl)),
                store,
                consumers,
                named=self._name,
                happened=self._note,
                changed=changed,
                clock=clock,
                nonce=nonce,
                patience=patience_of(ttl),
                drain_within=self.settings.drain_within,
                overdue=self._overdue,
            )
            for partition in range(config.partitions)
        ]
        self._joined = anyio.Event()
        self._bell = Bell(clock)
        self._stopping = False

    def __repr__(self) -> str:
        owned = sum(keeper.machine.deadline > -math.inf for keeper in self._keepers)
        return f"<Membership of {self.member}: {owned} of {len(self._keepers)} partitions>"

    # --- running

    async def run(self) -> None:
        """Join, hold what the plan gives, and leave after ``stop``. Cancelling it is a crash: leases then expire.

        Raises ``ConfigError`` for a cohort that was set up otherwise and for a member id that is used twice,
        ``SourceError`` when the store is gone for good or holds what no member has written.
        """
        try:
            for step in (self._roster.set_up, self._roster.join):
                if not self._stopping:
                    await self._until_heard(step)
            if self._stopping:
                await self._until_heard(self._roster.leave)
            else:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._attend)
                    for keeper in self._keepers:
                        tasks.start_soon(keeper.serve, self._is_stopping)
        except BaseExceptionGroup as group:
            # Of several tasks that fail at once for one reason the first says it all.
            raise _first(group) from group

    @property
    def joined(self) -> anyio.Event:
        """Set once it is a member and has seen a plan."""
        return self._joined

    def stop(self) -> None:
        """Leave in order: everything is to be drained, is released, and ``run`` returns. Idempotent."""
        if not self._stopping:
            self._stopping = True
            for keeper in self._keepers:
                keeper.stop()
            self._bell.ring()

    def _is_stopping(self) -> bool:
        return self._stopping

    # --- for the source

    def take(self) -> Sequence[Happened]:
        """What has happened since the last call, in order."""
        happened, self._happened = self._happened, []
        return happened

    def deadline(self, partition: int) -> float:
        """Until when a partition is certainly this member's, by its clock; minus infinity = it is not."""
        return self._keepers[partition].machine.deadline

    @property
    def first(self) -> int:
        """The sequence that the cohort was told to begin with when it was set up; 0 = none was named."""
        begun = self._roster.begun
        return int(begun) if begun.isdecimal() and len(begun) <= _DIGITS else 0

    @property
    def generation(self) -> int:
        """The number of the plan that was read last; 0 = none yet."""
        return 0 if self._roster.plan is None else self._roster.plan.generation

    @property
    def planned(self) -> int:
        """How many partitions that plan gives this member."""
        return 0 if self._roster.plan is None else self._roster.plan.owners.count(self.member)

    @property
    def standby(self) -> bool:
        """Whether there is a plan, and it gives this member nothing."""
        return self._roster.plan is not None and not self.planned

    def drained(self, partition: int, done: Done, *, ended: bool = True) -> None:
        """No result of a partition counts any more, and it may be released; ``done``: its whole ledger.

        ``ended``: nothing of it runs. Else the ledger is written and the lease runs out: see ``LeaseMachine.drained``.
        It may come before the ``LeaseRevoked`` it answers, where the member has been told to stop.
        """
        self._keepers[partition].drained(done, ended=ended)

    def checkpoint(self, partition: int, done: Done) -> None:
        """Write down what is done of a partition that is held, without giving it up."""
        self._keepers[partition].checkpoint(done)

    def takeover(self, partition: int, done: Done) -> None:
        """Take a partition over from oneself: a delivery is missing, or the connection is another one.

        ``done``: its whole ledger. What is queued may start within the deadline; nothing that is delivered from now on
        is to be taken in before the ``LeaseOwned`` that follows.
        """
        self._keepers[partition].takeover(done)

    def gone(self, partition: int, reason: str) -> None:
        """The durable of a partition does not answer as its owner's: it is lost."""
        self._keepers[partition].gone(reason)

    def ended(self, partition: int) -> None:
        """Nothing of a partition that was lost is in the way any more: it may be acquired again."""
        self._keepers[partition].ended()

    def hint(self, key: str) -> None:
        """A key of the bucket was written, or is about to be. Best effort: what is decided is read."""
        if key.startswith(LEASE_PREFIX):
            number = key.removeprefix(LEASE_PREFIX)
            if number.isdecimal() and int(number) < len(self._keepers):
                self._keepers[int(number)].hint()
        elif key.startswith(MEMBER_PREFIX):
            if self._roster.heard(key):
                self._bell.hint()
        elif key == PLAN_KEY or key.startswith(DRAIN_PREFIX):
            self._bell.hint()

    # --- membership

    async def _attend(self) -> None:
        """Keep the heartbeat and the plan, until it is told to stop; then leave."""
        roster = self._roster
        while not self._stopping:
            self._bell.arm()
            try:
                if self._clock() >= roster.beat_at:
                    await roster.beat()
                    # A listing that does not end is no reason for a late heartbeat.
                    with anyio.move_on_after(patience_of(self.settings.lease)):
                        await self._sweep()
                await roster.look()
            except (Conflict, UnknownResult) as error:
                log.debug("%s: %s", self._name, error)
                await self._bell.wait(self._clock() + _PAUSE)
            else:
                self._planned()
                self._joined.set()
                await self._bell.wait(roster.look_at)
        # Before everything is drained: others then wait for each partition alone.
        await self._until_heard(roster.leave)

    async def _sweep(self) -> None:
        """Have lower epochs deleted that came behind a takeover: one listing for all, in place of one for each."""
        if any(keeper.machine.consumer is not None for keeper in self._keepers):
            found: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
            for partition, epoch, sub in await self._consumers.names():
                found[partition].append((epoch, sub))
            for partition, keeper in enumerate(self._keepers):
                keeper.seen(found[partition])

    def _planned(self) -> None:
        plan = self._roster.plan
        if plan is not None and not self._stopping:
            for keeper, owner in zip(self._keepers, plan.owners, strict=True):
                keeper.planned(mine=owner == self.member)
            self._changed()

    def _overdue(self, partition: int) -> None:
        log.warning(
            "%s: partition %d is to move and is not drained after %g s; %s",
            self._name,
            partition,
            self.settings.drain_within,
            "what runs of it is cancelled" if self.settings.overdue == "force" else "whoever is to get it waits",
        )

    def _note(self, partition: int, event: LeaseEvent) -> None:
        self._happened.append(Happened(partition, event))

    async def _until_heard(self, call: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await call()
            except (Conflict, UnknownResult) as error:
                log.debug("%s: %s", self._name, error)
                await anyio.sleep(_PAUSE)
            else:
                return


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    found: BaseException = group
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found
