"""Gives an operator access to a cohort: reads its bucket and its durables, and writes drain requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from lanes.cohort.leases import Conflict, UnknownResult
from lanes.cohort.roster import GONE, GONE_TTL
from lanes.core.cohort.records import (
    CONFIG_KEY,
    DEFAULT_NAME,
    DRAIN_PREFIX,
    LEASE_PREFIX,
    MEMBER_PREFIX,
    PLAN_KEY,
    CohortConfig,
    DrainRequest,
    Heartbeat,
    Lease,
    PlanRecord,
    decode,
    drain_key,
    encode,
    member_key,
)
from lanes.errors import ConfigError, SourceError
from lanes_jetstream.cohort.epoch_consumers import EpochName, floor_of
from lanes_jetstream.cohort.lease_store import JetStreamLeaseStore, bucket_name, namespace_of
from lanes_jetstream.wire import codes
from lanes_jetstream.wire.answers import ApiError, read_pages, unix_seconds
from lanes_jetstream.wire.connection import Connection

_R = TypeVar("_R", CohortConfig, DrainRequest, Heartbeat, Lease, PlanRecord)


_ASKED: Final = 16
"""Maximum number of concurrent requests."""


@dataclass(frozen=True, slots=True)
class DurableView:
    """The newest durable of a cohort partition.

    Attributes:
        epoch: Epoch of the ownership.
        sub: Number of the durable within the epoch, from 0.
        pending: Number of undelivered messages.
        unacknowledged: Number of delivered and unacknowledged messages.
        floor: Sequence up to which the durable has no unacknowledged message.
        subject: First filter subject.
    """

    epoch: int
    sub: int
    pending: int
    unacknowledged: int
    floor: int
    subject: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionView:
    """A cohort partition with its owner and its lag.

    Attributes:
        number: Number of the cohort partition, from 0.
        owner: Member with the lease; None = no member.
        planned: Member to which the plan assigns the partition; None = no member.
        epoch: Epoch of the newest durable; None = no durable.
        lag: Number of unfinished messages; None = unknown.
        oldest: Age in seconds of the first unfinished message; None = no unfinished message, or unknown.
    """

    number: int
    owner: str | None
    planned: str | None
    epoch: int | None
    lag: int | None
    oldest: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberView:
    """A member of a cohort.

    Attributes:
        name: Name of the member.
        live: Whether the member has an unexpired heartbeat.
        partitions: Number of leases that the member holds.
        planned: Number of partitions that the plan assigns to the member.
        weight: Weight of the member; None = unknown.
        consumer_target: Largest number of partitions that the member prefers to own, by its own setting or the cohort's
            default; None = no target, or unknown.
        standby: Whether the member is a standby.
        draining: Whether an operator requested a drain.
        since: Time of the join in seconds since 1970, by the clock of the member; None = unknown.
    """

    name: str
    live: bool
    partitions: int
    planned: int
    weight: int | None
    consumer_target: int | None
    standby: bool
    draining: bool
    since: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CohortStatus:
    """A cohort with its members, partitions and progress.

    Attributes:
        stream: Name of the stream.
        namespace: Namespace of the cohort.
        cohort: Name of the cohort.
        generation: Number of the plan; 0 = no plan.
        active_members: Number of members that share the partitions; None = all members.
        too_few_members: Whether the current plan has fewer than ``active_members`` live members that do not drain.
        under_provisioned: Whether the current plan gives a member more partitions than its target.
        plan_rules: Version of the rules that made the current plan; None = no plan. Every live member knows these
            rules. Version 0 ignores targets.
        members: Members, by name.
        partitions: Cohort partitions, by number.
    """

    stream: str
    namespace: str
    cohort: str
    generation: int
    active_members: int | None
    too_few_members: bool
    under_provisioned: bool
    plan_rules: int | None
    members: Sequence[MemberView]
    partitions: Sequence[PartitionView]

    @property
    def lag(self) -> int:
        """Number of unfinished messages of all partitions with a known lag."""
        return sum(one.lag or 0 for one in self.partitions)

    @property
    def oldest(self) -> float | None:
        """Age in seconds of the oldest unfinished message; None = no unfinished message, or unknown."""
        return max((one.oldest for one in self.partitions if one.oldest is not None), default=None)


class CohortView:
    """Reads the cohort in a namespace of a stream, and writes drain requests.

    Call ``check`` first, because a read creates a missing bucket. Needs asyncio.

    Each call raises ``SourceError`` if the server does not answer or the bucket has a malformed record. ``check``,
    ``config`` and ``status`` raise ``ConfigError`` if the cohort does not exist.

    Args:
        connection: Connection to the server.
        stream: Name of the stream.
        namespace: Namespace of the cohort.
    """

    def __init__(self, connection: Connection, stream: str, namespace: str) -> None:
        self._connection = connection
        self._stream = stream
        self._namespace = namespace
        self._bucket = bucket_name(stream, namespace)
        self._store = JetStreamLeaseStore(connection, self._bucket)

    async def check(self) -> None:
        """Raise ``ConfigError`` if the bucket does not exist, because a read would create the bucket."""
        with self._connection.api_errors(f"bucket {self._bucket!r}"):
            found = await self._connection.find(f"STREAM.INFO.KV_{self._bucket}", codes.STREAM_NOT_FOUND)
        if found is None:
            raise ConfigError(
                f"stream {self._stream!r} has no cohort in the namespace {self._namespace!r} (no bucket "
                f"{self._bucket!r}); name another namespace, or start a member"
            )

    async def config(self) -> CohortConfig:
        """Read the facts of the cohort that never change."""
        found = await self._one(CohortConfig, CONFIG_KEY)
        if found is None:
            raise ConfigError(
                f"bucket {self._bucket!r} has no record of a cohort, because its first member is starting; run "
                "the command again"
            )
        if (found.stream, found.namespace) not in ((self._stream, self._namespace), (None, None)):
            raise ConfigError(
                f"bucket {self._bucket!r} belongs to cohort {found.cohort!r} on stream {found.stream!r} in namespace "
                f"{found.namespace!r}, not on {self._stream!r} in {self._namespace!r}; correct --stream or --namespace"
            )
        return found

    async def plan(self) -> PlanRecord | None:
        """Read the current plan; None = no plan yet."""
        return await self._one(PlanRecord, PLAN_KEY)

    async def heartbeats(self) -> dict[str, Heartbeat]:
        """Read the heartbeats of the live members, by name."""
        return await self._all(Heartbeat, MEMBER_PREFIX)

    async def leases(self) -> dict[int, Lease]:
        """Read the leases with a holder, by cohort partition."""
        found = await self._all(Lease, LEASE_PREFIX)
        return {int(number): lease for number, lease in found.items() if number.isdecimal() and not lease.released}

    async def drains(self) -> dict[str, DrainRequest]:
        """Read the drain requests, by member."""
        return await self._all(DrainRequest, DRAIN_PREFIX)

    async def durables(self) -> dict[int, DurableView]:
        """Read the newest durable of each cohort partition."""
        found: dict[int, DurableView] = {}

        for info in await read_pages(self._api, f"CONSUMER.LIST.{self._stream}", "consumers"):
            name = EpochName.parse(self._namespace, info.get("name"))
            if name is None:
                continue
            newest = found.get(name.partition)
            if newest is None or (newest.epoch, newest.sub) < (name.epoch, name.sub):
                found[name.partition] = _durable(name, info)
        return found

    async def status(self) -> CohortStatus:
        """Read the status of the cohort.

        The call reads the parts one after another, so the parts may be of different times.
        """
        config, plan, durables = await self.config(), await self.plan(), await self.durables()
        heartbeats, leases, drains = await self.heartbeats(), await self.leases(), await self.drains()
        owners = plan.owners if plan is not None and len(plan.owners) == config.partitions else ()
        turns = asyncio.Semaphore(_ASKED)

        async def partition(number: int) -> PartitionView:
            lease, durable = leases.get(number), durables.get(number)
            lag = None if durable is None else durable.pending + durable.unacknowledged
            oldest = None
            if durable is not None and lag:
                async with turns:
                    oldest = await self._age(durable.subject, durable.floor + 1)
            return PartitionView(
                number=number,
                owner=None if lease is None else lease.member,
                planned=owners[number] if owners else None,
                epoch=None if durable is None else durable.epoch,
                lag=lag,
                oldest=oldest,
            )

        def member(name: str) -> MemberView:
            heartbeat = heartbeats.get(name)
            target = None if heartbeat is None else heartbeat.consumer_target
            if target is None and heartbeat is not None and plan is not None:
                target = plan.default_consumer_target
            return MemberView(
                name=name,
                live=heartbeat is not None,
                partitions=sum(lease.member == name for lease in leases.values()),
                planned=owners.count(name),
                weight=None if heartbeat is None else heartbeat.weight,
                consumer_target=target,
                standby=plan is not None and name in plan.standbys,
                draining=name in drains,
                since=None if heartbeat is None else heartbeat.session / 1000,
            )

        holders = (lease.member for lease in leases.values())
        names = {*heartbeats, *holders, *(owner for owner in owners if owner), *drains}
        return CohortStatus(
            stream=self._stream,
            namespace=self._namespace,
            cohort=config.cohort or DEFAULT_NAME,
            generation=0 if plan is None else plan.generation,
            active_members=None if plan is None else plan.active_members,
            too_few_members=plan is not None and plan.too_few_members,
            under_provisioned=plan is not None and plan.under_provisioned,
            plan_rules=None if plan is None else plan.rules,
            members=[member(name) for name in sorted(names)],
            partitions=list(await asyncio.gather(*map(partition, range(config.partitions)))),
        )

    async def drain(self, member: str) -> bool:
        """Request that a member receives no partition while another member is live.

        Args:
            member: Name of the member.

        Returns:
            Whether the call wrote a request; False if a request existed, or another client changed the request at the
            same time.

        Raises:
            ConfigError: The member is not live, or ``member`` is no valid name of a member.
        """
        wish = _key_of(member, drain_key)
        if await self._one(Heartbeat, _key_of(member, member_key)) is None:
            names = ", ".join(sorted(await self.heartbeats()))
            remedy = f"name one of {names}" if names else "the cohort has none, so start a member first"
            raise ConfigError(f"{member!a} is no live member; {remedy}")
        return await self._wish(wish, encode(DrainRequest(int(time.time() * 1000))))

    async def undrain(self, member: str) -> bool:
        """Withdraw a drain request. The member need not be live.

        Args:
            member: Name of the member.

        Returns:
            Whether the call withdrew a request; False if no request existed, or another client changed the request at
            the same time.

        Raises:
            ConfigError: ``member`` is no valid name of a member.
        """
        return await self._wish(_key_of(member, drain_key), GONE, ttl=GONE_TTL)

    async def forget_partitions(self) -> bool:
        """Delete the settings and the plan of the cohort. The next member may then have another queue.

        The call keeps durables, leases and positions. The call changes nothing while a member is live.

        Returns:
            Whether the call deleted the settings; False if a member is live, or wrote them at the same time.

        Raises:
            SourceError: The server did not answer.
        """
        if await self.heartbeats():
            return False
        with _answered():
            # Delete the plan before the settings. After an interrupted call, the next call finds the settings and
            # continues.
            for key in (PLAN_KEY, CONFIG_KEY):
                entry = await self._store.read(key)
                if entry.value is None:
                    continue
                try:
                    await self._store.delete(key, revision=entry.revision)
                except Conflict:
                    return False
        return True

    # --- inside

    async def _wish(self, key: str, value: bytes, *, ttl: float | None = None) -> bool:
        """Write or clear a drain request.

        Returns False if no change is needed, or if another client made a change meanwhile.
        """
        with _answered():
            entry = await self._store.read(key)
            if bool(entry.value) == bool(value):
                return False
            try:
                await self._store.write(key, value, revision=entry.revision, ttl=ttl)
            except Conflict:
                return False
        return True

    async def _one(self, kind: type[_R], key: str) -> _R | None:
        with _answered():
            value = (await self._store.read(key)).value
        return self._decoded(kind, key, value) if value else None

    async def _all(self, kind: type[_R], prefix: str) -> dict[str, _R]:
        with _answered():
            entries = await self._store.entries(prefix)
        found = {key: entry.value for key, entry in entries.items() if entry.value}
        return {key.removeprefix(prefix): self._decoded(kind, key, value) for key, value in found.items()}

    def _decoded(self, kind: type[_R], key: str, value: bytes) -> _R:
        try:
            return decode(kind, key, value)
        except ValueError as error:
            raise SourceError(f"bucket {self._bucket!r}: {error}") from None

    async def _age(self, subject: str, sequence: int) -> float | None:
        """Return the age in seconds of the first message of a subject from a sequence on; None = no such message."""
        answer = await self._api(f"STREAM.MSG.GET.{self._stream}", {"seq": sequence, "next_by_subj": subject})
        if answer is None:
            return None
        return max(0.0, time.time() - unix_seconds((answer.get("message") or {}).get("time")))

    async def _api(self, subject: str, request: Mapping[str, object]) -> dict[str, Any] | None:
        """Send one request; None = the requested message does not exist."""
        with self._connection.api_errors(f"stream {self._stream!r}"):
            try:
                return await self._connection.find(subject, *codes.MESSAGE_NOT_FOUND, request=request)
            except ApiError as error:
                if error.err_code != codes.STREAM_NOT_FOUND:
                    raise
        raise ConfigError(
            f"stream {self._stream!r} does not exist at {self._connection.servers}; correct --stream or --server"
        )


async def read_namespaces(connection: Connection, stream: str) -> list[str]:
    """Find the namespaces of a stream that have a cohort. The names of the buckets contain the namespaces.

    Raises ``SourceError`` if the server does not answer.
    """
    with connection.api_errors(f"the buckets of stream {stream!r}"):
        names = await read_pages(connection.api, "STREAM.NAMES", "streams")
    buckets = (str(name).removeprefix("KV_") for name in names if str(name).startswith("KV_"))
    return sorted(namespace for bucket in buckets if (namespace := namespace_of(bucket, stream)) is not None)


@contextmanager
def _answered() -> Iterator[None]:
    """Turn ``UnknownResult`` into a retryable ``SourceError``."""
    try:
        yield
    except UnknownResult as error:
        raise SourceError(
            f"{error}; check that the bucket has a leader, and run the command again", retryable=True
        ) from None


def _key_of(member: str, key: Callable[[str], str]) -> str:
    try:
        return key(member)
    except ValueError as error:
        raise ConfigError(f"MEMBER {member!a}: {error}") from None


def _durable(name: EpochName, info: Mapping[str, Any]) -> DurableView:
    config = info.get("config") or {}
    subjects = config.get("filter_subjects") or [config.get("filter_subject") or ">"]
    pending, unacknowledged = int(info.get("num_pending", 0)), int(info.get("num_ack_pending", 0))
    return DurableView(name.epoch, name.sub, pending, unacknowledged, floor_of(info), str(subjects[0]))
