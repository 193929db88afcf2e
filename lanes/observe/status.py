"""What a consumer says about itself: counts and positions; its ``repr`` has neither keys nor payloads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from lanes.core.engine import Engine
from lanes.core.lane import BLOCKED, DEAD_LETTERING, DEAD_LETTERING_BLOCKED, HELD
from lanes.core.ledgers import OffsetLedger
from lanes.core.types import Message, Partition

__all__ = ["Lag", "Oldest", "PartitionStatus", "Status", "snapshot"]


@dataclass(frozen=True, kw_only=True)
class Oldest:
    """An unfinished message, the one that was delivered first. ``age`` is seconds since its delivery.

    ``key`` is the key itself, the user's data, and therefore in no ``repr``.
    """

    partition: str
    position: int
    attempt: int
    age: float
    key: bytes | None = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class PartitionStatus:
    """One partition. ``epoch``: what its handlers get as their fencing token. ``floor``: below it nothing delivered is
    unfinished. ``holes``: deliveries at or above it that are not finished. ``confirmed``: the position the broker has,
    and ``ahead`` how many messages were admitted above it, both None where the source settles each message by itself.
    ``ahead_reached``: nothing more of it is taken. ``lag``: how much the broker has of it that is not settled, as its
    own tools count it; None where the source cannot tell, or not yet. ``oldest``: its unfinished message that was
    delivered first.
    """

    epoch: int
    floor: int
    holes: int
    confirmed: int | None
    ahead: int | None
    ahead_reached: bool
    draining: bool
    lag: int | None
    oldest: Oldest | None


@dataclass(frozen=True, kw_only=True)
class Status:
    """A snapshot of one consumer.

    ``in_flight``, ``in_flight_bytes`` and their bounds and peaks; ``running`` handlers; ``ready`` lanes waiting
    for a worker; ``held`` lanes waiting for a retry; ``blocked`` lanes waiting for ``unblock`` or ``park``; ``parking``
    lanes whose dead letter is not confirmed yet. ``taking``: whether a bound lets more in; ``paused``: by the user.
    ``settled``, ``retries``, ``dead_lettered``, ``zombies`` and ``redelivered`` (by cause) count since the start.
    ``floors``: per partition the position below which nothing delivered is unfinished. ``partitions``: more of each.
    ``oldest``: of all partitions.
    """

    in_flight: int
    max_in_flight: int
    peak_in_flight: int
    in_flight_bytes: int
    max_in_flight_bytes: int
    peak_in_flight_bytes: int
    running: int
    concurrency: int
    ready: int
    held: int
    blocked: int
    parking: int
    taking: bool
    paused: bool
    settled: int
    retries: int
    dead_lettered: int
    zombies: int
    redelivered: Mapping[str, int]
    floors: Mapping[str, int]
    partitions: Mapping[str, PartitionStatus]
    oldest: Oldest | None


Lag = Callable[[Partition], int | None]


def snapshot(engine: Engine, now: float, *, dead_lettered: int, redelivered: Mapping[str, int], lag: Lag) -> Status:
    """The status of an engine at ``now``; ``lag``: of a partition, None where it is not known. O(in flight)."""
    flow = engine.flow
    stopped = engine.stopped
    partitions = {str(p.id): _partition(engine, p, now, lag) for p in engine.partitions.values()}
    oldest = [each.oldest for each in partitions.values() if each.oldest is not None]
    return Status(
        in_flight=flow.in_flight,
        max_in_flight=flow.max_in_flight,
        peak_in_flight=flow.peak,
        in_flight_bytes=flow.bytes,
        max_in_flight_bytes=flow.max_bytes,
        peak_in_flight_bytes=flow.peak_bytes,
        running=engine.running_handlers,
        concurrency=engine.concurrency,
        ready=engine.ready,
        held=stopped.count(HELD),
        blocked=stopped.count(BLOCKED),
        parking=stopped.count(DEAD_LETTERING) + stopped.count(DEAD_LETTERING_BLOCKED),
        taking=flow.taking,
        paused=flow.paused,
        settled=engine.settled_count,
        retries=engine.retries,
        dead_lettered=dead_lettered,
        zombies=engine.zombies,
        redelivered=dict(redelivered),
        floors={name: each.floor for name, each in partitions.items()},
        partitions=partitions,
        oldest=max(oldest, key=lambda each: each.age, default=None),
    )


def _floor(partition: Partition) -> int:
    ledger = partition.ledger
    # Metrics are read from a thread of the exporter: nothing here may change what the consumer's own thread works on.
    return ledger.peek() if isinstance(ledger, OffsetLedger) else ledger.floor()


def _partition(engine: Engine, partition: Partition, now: float, lag: Lag) -> PartitionStatus:
    ledger, commits = partition.ledger, partition.commits
    ahead = None
    if commits is not None and isinstance(ledger, OffsetLedger):
        ahead = ledger.next_ordinal - commits.confirmed_ordinal
    return PartitionStatus(
        epoch=partition.epoch,
        floor=_floor(partition),
        holes=ledger.holes(),
        confirmed=None if commits is None else commits.confirmed,
        ahead=ahead,
        ahead_reached=partition in engine.committer.ahead,
        draining=partition.draining,
        lag=lag(partition),
        oldest=_oldest(partition, now),
    )


def _oldest(partition: Partition, now: float) -> Oldest | None:
    message = partition.ledger.oldest()
    return None if message is None else _described(message, now)


def _described(message: Message, now: float) -> Oldest:
    return Oldest(
        partition=str(message.partition.id),
        position=message.position,
        attempt=message.attempt,
        age=now - message.received,
        key=message.key,
    )
