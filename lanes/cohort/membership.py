"""A member of a cohort: its heartbeat, the plan, and one lease machine for each cohort partition.

``Membership`` performs the decisions of ``lanes.core.cohort`` by calls of a ``LeaseStore`` and ``EpochConsumers``. The
class itself does not decide about ownership. Each cohort partition has a keeper, which performs one action at a time.
The keeper cancels an action at the lease's deadline, so that it reports a loss in time. After a hint about a changed
key, the membership reads the key early. Without hints, the membership reads the keys at regular intervals.
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

from lanes.arguments import check_one_of, check_positive, check_whole, check_whole_seconds, shown_value
from lanes.clock import Clock, monotonic
from lanes.cohort.keeper import Alarm, LeaseKeeper
from lanes.cohort.leases import Conflict, EpochConsumers, LeaseStore, UnknownResult
from lanes.cohort.roster import Roster, margin_of, patience_of
from lanes.core.cohort.actions import LeaseEvent
from lanes.core.cohort.checkpoint_pace import CheckpointPace
from lanes.core.cohort.lease_machine import LeaseMachine
from lanes.core.cohort.ledger import Done
from lanes.core.cohort.records import DRAIN_PREFIX, HIGHEST, LEASE_PREFIX, MEMBER_PREFIX, PLAN_KEY, CohortConfig
from lanes.dead_letter import members_of
from lanes.errors import ConfigError

log = logging.getLogger("lanes")

TTL_LEAST: Final = 3

_DIGITS: Final = 20
"""Maximum number of digits of a sequence."""

HINTED: Final = (f"{LEASE_PREFIX}>", f"{MEMBER_PREFIX}>", f"{DRAIN_PREFIX}>", PLAN_KEY)
"""Patterns of the keys that ``Membership.hint`` needs. No member waits for a state, because members write states often.
"""

_PAUSE: Final = 0.1
"""Seconds after which the member repeats a request without an answer."""


@dataclass(frozen=True, kw_only=True)
class CohortSettings:
    """The settings of one member.

    Attributes:
        lease: Seconds for which a member owns a partition without a renewal, a whole number of 3 or more.
        weight: Weight of this member, 1 or more. Members share the partitions in proportion to their weights.
        active_members: Maximum number of members that share the partitions, 1 or more; None = all. The value of the
            member that joined last applies.
        consumer_target: Largest number of partitions that this member prefers to own, 1 or more; None = the default of
            the cohort. A member owns more partitions if all members have reached their targets.
        default_consumer_target: Target of each member without its own ``consumer_target``, 1 or more; None = no target.
            The value of the member that joined last applies.
        drain_within: Seconds within which the consumer should drain a moving partition, more than 0.
        overdue: Rule for a partition whose drain takes longer than ``drain_within``. ``"keep"`` = log a warning, and
            keep the partition until its handlers end. ``"force"`` = cancel the running handlers, and release the
            partition.

    Raises:
        ConfigError: A value is out of its range.
    """

    lease: float = 10.0
    weight: int = 1
    active_members: int | None = None
    consumer_target: int | None = None
    default_consumer_target: int | None = None
    drain_within: float = 30.0
    overdue: Literal["keep", "force"] = "keep"

    def __post_init__(self) -> None:
        # A server rounds a fraction down, and the owner would trust its lease for too long.
        check_whole_seconds("lease", self.lease, TTL_LEAST)
        for name in ("weight", "active_members", "consumer_target", "default_consumer_target"):
            value = getattr(self, name)
            if name == "weight" or value is not None:
                check_whole(name, value, 1)
                _check_recordable(name, value)
        _check_recordable("lease", int(self.lease))
        check_positive("drain_within", self.drain_within)
        check_one_of("overdue", self.overdue, ("keep", "force"))


def _check_recordable(name: str, value: int) -> None:
    """Raise ``ConfigError`` for a number above the highest number that the cohort's records can store."""
    if value > HIGHEST:
        remedy = "use a lower number" if name in ("weight", "lease") else "use a lower number, or None for no limit"
        raise ConfigError(
            f"{name}={value}: must be at most {HIGHEST}, the highest number in a cohort's records; {remedy}"
        )


class Happened(NamedTuple):
    """An event of a cohort partition.

    Attributes:
        partition: Number of the cohort partition.
        event: The event.
    """

    partition: int
    event: LeaseEvent


class Membership:
    """A member of a cohort.

    Call ``run`` once. Call all other methods on the event loop of ``run``, at any time. Only ``run`` blocks.

    Args:
        store: Store of the leases.
        consumers: The durables of the cohort.
        config: Configuration of the cohort. ``settings.lease``, which all members share, replaces ``config.lease``.
        member: Name of this member.
        settings: Settings of this member; None = the defaults.
        start: First sequence of a cohort that is set up for the first time; None = every stored message.
        changed: Function that the tasks of ``run`` call when ``take`` has events, or when a deadline or the generation
            has changed. The function must not block.
        clock: Clock of the deadlines.
        wall: Clock of the seconds since 1970, for the time of the join.
        nonce: Function that returns a unique value at each call.
        roster: Function that makes the roster. A test of a mixed cohort passes the roster of earlier code.

    Raises:
        ConfigError: The member name or a setting is invalid.

    Attributes:
        settings: Settings of this member.
        member: Name of this member.
        retention: Retention of the stream, as in ``config``.
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
        roster: Callable[..., Roster] = Roster,
    ) -> None:
        self.settings = settings or CohortSettings()
        self.member = member
        self.retention = config.retention
        ttl = self.settings.lease
        config = replace(config, lease=int(ttl))
        try:
            self._roster = roster(
                store,
                consumers,
                config,
                member=member,
                nonce=nonce(),
                session=int(wall() * 1000),
                weight=self.settings.weight,
                active_members=self.settings.active_members,
                consumer_target=self.settings.consumer_target,
                default_consumer_target=self.settings.default_consumer_target,
                ttl=ttl,
                start=start,
                clock=clock,
            )
        except ValueError as error:
            raise ConfigError(f"member={shown_value(member)}: {error}") from error
        self._consumers = consumers
        self._changed = changed
        self._clock = clock
        self._happened: list[Happened] = []
        self._pace = CheckpointPace()
        self._keepers = [
            LeaseKeeper(
                LeaseMachine(partition, member, retention=config.retention, ttl=ttl, margin=margin_of(ttl)),
                store,
                consumers,
                named=lambda: self._name,
                happened=self._note,
                changed=changed,
                clock=clock,
                nonce=nonce,
                patience=patience_of(ttl),
                drain_within=self.settings.drain_within,
                overdue=self._overdue,
                pace=self._pace,
            )
            for partition in range(config.partitions)
        ]
        self._joined = anyio.Event()
        self._alarm = Alarm(clock)
        self._stopping = False

    def __repr__(self) -> str:
        owned = sum(keeper.machine.deadline > -math.inf for keeper in self._keepers)
        return f"<Membership of {self.member}: {owned} of {len(self._keepers)} partitions>"

    @property
    def _name(self) -> str:
        """The name in logs. A member whose configuration has no cohort name reads the name during the set-up."""
        return f"cohort {self._roster.cohort}, member {self.member}"

    # --- running

    async def run(self) -> None:
        """Join, own the partitions that the plan assigns to this member, and leave after ``stop``.

        After a cancellation or a crash, the leases expire.

        Raises:
            ConfigError: The stored configuration of the cohort differs, another process has the member name, or a
                foreign durable overlaps.
            SourceError: No later call to the store can succeed, or the store has an entry that no member wrote.
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
            # Several tasks fail at once for one reason, so the first error is enough.
            raise members_of(group)[0] from group

    @property
    def joined(self) -> anyio.Event:
        """The event that is set when the member has joined and has read the plan, if the bucket has one."""
        return self._joined

    def stop(self) -> None:
        """Drain and release the partitions; then ``run`` returns. Idempotent."""
        if not self._stopping:
            self._stopping = True
            for keeper in self._keepers:
                keeper.stop()
            self._alarm.wake()

    def _is_stopping(self) -> bool:
        return self._stopping

    # --- for the source

    def take(self) -> Sequence[Happened]:
        """Return the events since the last call of this method.

        Returns:
            The events, the oldest first.
        """
        happened, self._happened = self._happened, []
        return happened

    def deadline(self, partition: int) -> float:
        """Return the time until which handlers of a partition may start at this member.

        Args:
            partition: Number of the cohort partition.

        Returns:
            Seconds of ``clock``; minus infinity = no handler of the partition may start at this member.
        """
        return self._keepers[partition].machine.deadline

    @property
    def first(self) -> int:
        """First sequence in the stored configuration of the cohort; 0 = none."""
        begun = self._roster.begun
        return int(begun) if begun.isdecimal() and len(begun) <= _DIGITS else 0

    @property
    def generation(self) -> int:
        """Number of the newest plan that this member has read or written; 0 = no plan."""
        return 0 if self._roster.plan is None else self._roster.plan.generation

    @property
    def planned(self) -> int:
        """The number of partitions that the plan gives this member."""
        return 0 if self._roster.plan is None else self._roster.plan.owners.count(self.member)

    @property
    def standby(self) -> bool:
        """Whether the newest plan gives this member no partition."""
        return self._roster.plan is not None and not self.planned

    @property
    def under_provisioned(self) -> bool:
        """Whether the newest plan gives a member more partitions than its target."""
        return self._roster.under_provisioned

    @property
    def target_honoured(self) -> bool:
        """Whether the rules of the newest plan use the targets of the members."""
        return self._roster.rules >= 1

    def drained(self, partition: int, done: Done, *, ended: bool = True) -> None:
        """Release a partition whose results the engine no longer accepts.

        After ``stop``, the call may precede the event ``LeaseRevoked`` that the call answers.

        Args:
            partition: Number of the cohort partition.
            done: Whole ledger of the partition.
            ended: Whether no handler of the partition runs. False = the machine writes the ledger and lets the
                lease expire; see ``LeaseMachine.drained``.
        """
        self._keepers[partition].drained(done, ended=ended)

    def checkpoint(self, partition: int, done: Done) -> None:
        """Write the ledger of an owned partition, and keep the partition.

        Args:
            partition: Number of the cohort partition.
            done: Whole ledger of the partition.
        """
        self._keepers[partition].checkpoint(done)

    def checkpoint_soon(self, partition: int, outstanding: int, ledger: Callable[[], Done | None]) -> None:
        """Write the ledger of an owned partition within the interval of ``checkpoint_within``.

        The call has no effect while a write waits.

        Args:
            partition: Number of the cohort partition.
            outstanding: Number of outstanding messages of the ledger.
            ledger: Function that returns the whole ledger when the write begins. The function returns None if no write
                is needed.
        """
        self._keepers[partition].checkpoint_soon(outstanding, ledger)

    def checkpoint_within(self, seconds: float) -> None:
        """Set the interval within which the member writes finished messages; see ``lanes.source.Checkpointing``.

        Args:
            seconds: The interval, 0 or more.
        """
        self._pace.interval = seconds

    def takeover(self, partition: int, done: Done) -> None:
        """Request a new durable, because a delivery is missing or the connection is new.

        Queued messages may start until the deadline. The source drops every delivery until the next ``LeaseOwned``.

        Args:
            partition: Number of the cohort partition.
            done: Whole ledger of the partition.
        """
        self._keepers[partition].takeover(done)

    def gone(self, partition: int, reason: str) -> None:
        """Give up a partition, because its durable or the clock shows that this member no longer owns it.

        Args:
            partition: Number of the cohort partition.
            reason: Reason of the loss, for the ``LeaseLost`` event.
        """
        self._keepers[partition].gone(reason)

    def ended(self, partition: int) -> None:
        """Allow this member to acquire a lost partition again, because the consumer has processed the loss.

        Args:
            partition: Number of the cohort partition.
        """
        self._keepers[partition].ended()

    def hint(self, key: str) -> None:
        """Schedule an early read of a key of the bucket that a member has written or is about to write.

        The store may lose hints.

        Args:
            key: The key.
        """
        if key.startswith(LEASE_PREFIX):
            number = key.removeprefix(LEASE_PREFIX)
            if number.isdecimal() and int(number) < len(self._keepers):
                self._keepers[int(number)].hint()
        elif key.startswith(MEMBER_PREFIX):
            if self._roster.heard(key):
                self._alarm.hint()
        elif key == PLAN_KEY or key.startswith(DRAIN_PREFIX):
            self._alarm.hint()

    # --- membership

    async def _attend(self) -> None:
        """Renew the heartbeat and update the plan until ``stop``, then leave."""
        roster = self._roster
        while not self._stopping:
            self._alarm.arm()
            try:
                if self._clock() >= roster.beat_at:
                    await roster.beat()
                    # A slow listing must not delay the next heartbeat.
                    with anyio.move_on_after(patience_of(self.settings.lease)):
                        await self._sweep()
                await roster.look()
            except (Conflict, UnknownResult) as error:
                log.debug("%s: %s", self._name, error)
                await self._alarm.wait(self._clock() + _PAUSE)
            else:
                self._planned()
                self._joined.set()
                await self._alarm.wait(roster.look_at)
        # Leave before the drain, so that the other members plan without this member at once.
        await self._until_heard(roster.leave)

    async def _sweep(self) -> None:
        """List all durables once, so that keepers delete durables of lower epochs that appeared after a takeover."""
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
            "%s: partition %d must move to another member, and is not drained after %g s; %s",
            self._name,
            partition,
            self.settings.drain_within,
            "its handlers are cancelled" if self.settings.overdue == "force" else "the next owner waits",
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
