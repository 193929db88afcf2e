"""Judges the ownership of the partitions of a cohort, by the leases and durables of the simulated server."""

from __future__ import annotations

from typing import Final, Protocol

from lanes.core.cohort.records import Lease, decode, lease_key
from lanes.core.types import Message, Partition
from lanes_jetstream import Cohort
from lanes_jetstream.cohort.epoch_consumers import EpochName
from lanes_jetstream.cohort.lease_store import bucket_name
from memsource.sim.loop.event_loop import current
from memsource.sim.world.worker import Worker
from tests.simulated.jetstream.member import STREAM, SimulatedMember
from tests.simulated.jetstream.server.bucket import BucketStream
from tests.simulated.jetstream.server.server import NatsServer
from tests.simulated.jetstream.server.stream import MessageStream

COHORT: Final = Cohort("orders")
NAMESPACE: Final = COHORT.namespace
BUCKET: Final = bucket_name(STREAM, NAMESPACE)
KEPT: Final = f"KV_{BUCKET}"
"""Stream of the bucket."""

_LATE: Final = 0.3
"""Seconds after the end of a lease within which its member reports the loss."""

_SURELY: Final = 0.1
"""Seconds before the end of a lease from which a loss needs no other reason."""


class Host(Protocol):
    """The part of the broker that the judge uses."""

    server: NatsServer
    stream: MessageStream
    members: list[SimulatedMember]
    deleted: set[tuple[str, int]]

    @property
    def now(self) -> float:
        """The time, in seconds."""

    def worker(self, member: str) -> Worker | None:
        """The process of a member."""

    def find(self, check: str, what: str) -> None:
        """Report a broken promise."""


class Ownership:
    """The assignments of one run, and the judgement of their use by the members.

    Args:
        host: The broker.

    Attributes:
        deleted: Partitions whose lease or durable an operator has deleted.
    """

    def __init__(self, host: Host) -> None:
        self.deleted: set[int] = set()
        self._host = host
        self._owned: dict[int, tuple[int, str]] = {}

    def assigned(self, member: SimulatedMember, partition: Partition) -> None:
        """Record an assignment. A fencing token that is not above all earlier tokens is a finding."""
        number, token = partition.id.number, partition.fencing_token
        if token is None:
            return
        before, whose = self._owned.get(number, (0, ""))
        if token <= before:
            self._host.find("EpochsRise", f"partition {number}: {member.member} got {token}, and {whose} had {before}")
        self._owned[number] = token, member.member
        member.announced[number, token] = partition

    def on_started(self, member: str, message: Message) -> None:
        """Judge the start of a handler.

        The server has the lease of the ownership, and no newer ownership has begun.
        """
        number = message.partition.id.number
        bucket = self._host.server.api.buckets.get(KEPT)
        if bucket is not None and number not in self.deleted and not self._holds(member, message.partition, bucket):
            self._host.find("LeaseHolds", f"{member} starts a handler of {message.partition.id} without its lease")
        newest, owner = self._owned.get(number, (0, ""))
        if message.epoch is not None and message.epoch < newest:
            what = f"{member} starts {message.partition.id} position {message.position} under epoch {message.epoch}"
            self._host.find("NewestOwner", f"{what}, and {owner} owns the partition under epoch {newest}")

    def relied(self, member: SimulatedMember) -> None:
        """Judge the deadlines of a member: it relies on no lease after the server ends the lease."""
        bucket = self._host.server.api.buckets.get(KEPT)
        if bucket is None:
            return
        for owned in member.owned:
            if owned.backlog.missed and not self._host.deleted:
                what = f"{member.member} misses {owned.backlog.missed} messages of partition {owned.number}"
                self._host.find("MissedIsReal", f"{what}, and the server has deleted none")
        for (number, _), partition in member.announced.items():
            late = partition.deadline - bucket.data.expires(lease_key(number))
            if late > 0 and self._holds(member.member, partition, bucket):
                what = f"{member.member} relies on its lease of {partition.id} for {late:g} s after its end"
                self._host.find("LeaseCovers", what)

    def lost(self, member: SimulatedMember, partition: Partition, reason: str) -> None:
        """Judge a loss. Without a freeze, a member keeps its lease until its end, and learns of the end in time."""
        worker = self._host.worker(member.member)
        assert worker is not None, "a member is the source of a process"
        since = max(partition.deadline, worker.frozen_until)
        late = self._host.now - since
        # A slow processor delays a member like a freeze. The results of a drained partition count no more, so its loss
        # is not urgent.
        excused = worker.gone or partition.id.number in member.leaving
        if late - current().slow_since(since) > _LATE and not excused:
            self._host.find("LossInTime", f"{member.member} learns {late:g} s late that {partition.id} is lost")
        bucket, number, token = self._host.server.api.buckets.get(KEPT), partition.id.number, partition.fencing_token
        # A second freeze may begin in the moment in which the first one ends, which makes no loss early.
        early = partition.deadline - self._host.now
        if early > _SURELY and bucket is not None and number not in self.deleted:
            names = [EpochName.parse(NAMESPACE, name) for name in self._host.stream.consumers]
            there = any(each is not None and each[:2] == (number, token) for each in names)
            if there and self._holds(member.member, partition, bucket):
                self._host.find(
                    "LossHasReason", f"{member.member} loses {partition.id}, whose lease it holds: {reason}"
                )

    def _holds(self, member: str, partition: Partition, bucket: BucketStream) -> bool:
        """Return whether the server has the lease of an ownership."""
        key = lease_key(partition.id.number)
        value = bucket.data.read(key, self._host.now).value
        if not value:
            return False
        lease = decode(Lease, key, value)
        return (lease.member, lease.epoch, lease.released) == (member, partition.fencing_token, False)

    @property
    def taken(self) -> list[tuple[str, Partition]]:
        """The earlier assignments of reassigned partitions that the members neither released nor reported as lost."""
        return [
            (source.member, partition)
            for source in self._host.members
            for (number, token), partition in source.announced.items()
            if token < self._owned[number][0] and not source.lacks(partition)
        ]
