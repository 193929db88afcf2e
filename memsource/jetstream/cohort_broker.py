"""A stream and the bucket of an exclusive cohort as data, for members that run the real lease protocol.

``memsource.jetstream.broker`` instead decides all assignments in one object, without delay. In this module the network
can lose a member's request or its answer, and can delay the effect of a request.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from heapq import heappop, heappush
from typing import Final, Generic, Protocol, TypeVar

from lanes.clock import Clock
from lanes.cohort.membership import CohortSettings
from lanes.cohort.roster import Roster
from lanes.core.cohort.records import CohortConfig, DrainRequest, drain_key, encode
from lanes.core.types import Partition
from memsource.jetstream.epoch_consumers import Durable, EpochStream, Retention
from memsource.jetstream.lease_store import Bucket
from memsource.jetstream.link import Link, LinkFault
from memsource.jetstream.pull_consumer import ConsumerSettings
from memsource.memory.broker import KeepsDeadLetters
from memsource.memory.topic import Record
from memsource.personality import PersonalityName

NAMESPACE: Final = "orders"

Before = Callable[[str, bool], Awaitable[LinkFault | None]]
"""An async function that the link calls before each request and after each answer, with the name of the member and
whether the request writes; see ``Link``.
"""


class CohortMember(Protocol):
    """The source of a member, as the broker sees the source; see ``CohortMemberSource``."""

    member: str
    number: int
    link: Link

    @property
    def announced(self) -> Mapping[tuple[int, int], Partition]: ...
    @property
    def released(self) -> Collection[Partition]: ...
    @property
    def alive(self) -> bool: ...
    def sever(self) -> None: ...
    def poke(self) -> None: ...


M = TypeVar("M", bound=CohortMember)


class CohortBroker(KeepsDeadLetters, Generic[M]):
    """A stream with partitions, numbered from 0, and its cohort. ``CohortPersonality`` adds the sources.

    Args:
        partitions: Number of partitions.
        name: Name of the stream.
        retention: Retention of the stream.
        settings: Settings of all durables; None = defaults.
        cohort: Settings of the members; None = defaults.
        drift: Excess speeds of the clocks of successive members; a clock with 0.1 runs 10 % fast.
        latency: Seconds that a request takes, for successive members.
        targets: Targets of successive members, which replace ``cohort.consumer_target``; empty = ``cohort`` applies.
        rosters: Functions that make the rosters of successive members; see ``lanes.cohort.Membership``.
        hints: Whether members receive a hint after each write of a key.
        markers: Whether the expiry of a key uses up a revision; see ``Bucket``.
        seed: Seed of the delays of expiries and of all nonces.
        in_flight: Number of finished messages above the floor after which a member writes its state.
        before: Function that decides the faults of requests; see ``Before``; None = no faults.

    Attributes:
        members: All sources that the broker has created.
        owned: Partition, fencing token and member of each assignment, in order.
        targets: Targets of successive members.
        rosters: Makers of the rosters of successive members.
        publish: Method that appends one message and returns its record; see ``EpochStream.publish``.
    """

    name: PersonalityName = "jetstream"
    takes_in_at_once = True

    def __init__(
        self,
        partitions: int = 1,
        *,
        name: str = "memory",
        retention: Retention = "limits",
        settings: ConsumerSettings | None = None,
        cohort: CohortSettings | None = None,
        drift: Iterable[float] = (0.0,),
        latency: Iterable[float] = (0.0,),
        targets: Iterable[int | None] = (),
        rosters: Iterable[Callable[..., Roster]] = (Roster,),
        hints: bool = True,
        markers: bool = False,
        seed: int = 0,
        in_flight: int = 1000,
        before: Before | None = None,
    ) -> None:
        super().__init__()
        self.stream = EpochStream(partitions, retention=retention, name=name, settings=settings)
        self.publish = self.stream.publish
        self.bucket = Bucket(seed=seed, markers=markers, first=self.stream.server_ms(0.0))
        self.cohort = cohort or CohortSettings()
        self.config = CohortConfig(
            cohort=NAMESPACE,
            partitions=partitions,
            choice="created",
            detail="",
            tokens=(1,),
            incarnation=name,
            retention=retention,
            start="beginning",
        )
        self.hints = hints
        self.seed = seed
        self.in_flight = in_flight
        self.restarts = 0
        self.before = before
        self.lost_deliveries: dict[int, int] = {}
        self.members: list[M] = []
        self.owned: list[tuple[int, int, str]] = []
        self.targets = list(targets)
        self.rosters = list(rosters)
        self._drifts = list(drift)
        self._latencies = list(latency)
        self._later: list[tuple[float, int, Callable[[float], object]]] = []
        self._asked = 0
        self._redelivered = 0
        self._drained: str | None = None

    # --- producers

    def skip(self, count: int, *, partition: int = 0) -> None:
        """Leave a gap of ``count`` sequences, as deleted messages do."""
        self.stream.skip(count)

    @property
    def partitions(self) -> range:
        """The numbers of the partitions."""
        return self.stream.topic.partitions

    @property
    def records(self) -> list[Record]:
        """All published messages, by partition and sequence."""
        return [log.records[position] for log in self.stream.topic.logs for position in log.positions]

    @property
    def unfinished(self) -> list[Record]:
        """The unacknowledged messages, delivered or not."""
        return [record for partition in self.partitions for record in self.stream.left(partition)]

    # --- members

    def roster_of(self, member: M) -> Callable[..., Roster]:
        """Return the function that makes the roster of a member."""
        return self.rosters[member.number % len(self.rosters)]

    def link(self, member: str, clock: Clock) -> Link:
        """Return the link of a new member."""

        async def before(writes: bool) -> LinkFault | None:
            return None if self.before is None else await self.before(member, writes)

        return Link(clock, self.later, before=before)

    @property
    def taken(self) -> list[tuple[str, Partition]]:
        """The earlier assignments of reassigned partitions that the members neither released nor reported as lost.

        See ``memsource.personality.Personality.taken``.
        """
        newest: dict[int, int] = {}
        for source in self.members:
            for number, token in source.announced:
                newest[number] = max(token, newest.get(number, 0))
        return [
            (source.member, partition)
            for source in self.members
            for (number, token), partition in source.announced.items()
            if token < newest[number] and partition not in source.released
        ]

    def crash(self, member: str, now: float) -> None:
        """End a member's process. The leases of the member expire after the lease time. Idempotent."""
        for source in self.members:
            if source.member == member:
                source.sever()

    def freeze(self, member: str, until: float) -> None:
        """Do nothing, because the world stops the tasks of the member until ``until``."""

    def rebalance(self, now: float) -> bool:
        """Request a drain of a member, or withdraw the last request. Returns False if no member is alive."""
        if self._drained is None:
            living = sorted({source.member for source in self.members if source.alive})
            if not living:
                return False
            member = self._drained = living[self._redelivered % len(living)]
            value = encode(DrainRequest(since=self.stream.server_ms(now)))
        else:
            member, self._drained, value = self._drained, None, b""
        key = drain_key(member)
        self.bucket.write(key, value, now, revision=self.bucket.read(key, now).revision)
        return True

    def lose(self, partition: int, now: float) -> bool:
        """Delete the bucket with all its leases, and create an empty bucket."""
        self.bucket.lose(now, first=self.stream.server_ms(now))
        return True

    def redeliver(self, partition: int, now: float) -> bool:
        """Lose the next delivery of a partition; every second call loses the last acknowledgement instead.

        Returns False if the partition has no durable or no acknowledgement to lose.
        """
        self._redelivered += 1
        names = self.stream.names(partition)
        if not names:
            return False
        if self._redelivered % 2:
            self.lost_deliveries[partition] = self.lost_deliveries.get(partition, 0) + 1
            return True
        last = self.stream.consumer(names[-1]).last_acked
        return last is not None and self.stream.consumer(names[-1]).lose_ack(last, now)

    def restart(self, now: float) -> bool:
        """Kill and restart the only server, which loses its connections and its changes of the last 0.1 s."""
        self.restarts += 1
        self.stream.kill(now)
        for source in self.members:
            source.poke()
        return True

    # --- time

    def later(self, at: float, act: Callable[[float], object]) -> None:
        """Schedule an action. Actions for the same time run in the order of their scheduling."""
        self._asked += 1
        heappush(self._later, (at, self._asked, act))

    def advance(self, now: float) -> None:
        """Run every due scheduled action, and every due expiry of a key or of an ``ack_wait``."""
        while self._later and self._later[0][0] <= now:
            _, _, act = heappop(self._later)
            act(now)
        self.bucket.advance(now)
        self.stream.advance(now)

    def next_at(self) -> float:
        """Return the time of the next due action; infinity = no action is due."""
        return min(self.bucket.next_at(), self.stream.next_at(), self._later[0][0] if self._later else math.inf)

    # --- durables

    def loses_delivery(self, name: Durable) -> bool:
        """Use up one of the losses that ``redeliver`` planned, and return whether the server loses this delivery."""
        left = self.lost_deliveries.get(name.partition, 0)
        if left:
            self.lost_deliveries[name.partition] = left - 1
        return left > 0
