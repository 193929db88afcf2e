"""The status of a consumer: counts and positions. The ``repr`` of a status has neither keys nor payloads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar

from lanes.core.engine import Engine
from lanes.core.lane import BLOCKED, DEAD_LETTERING, DEAD_LETTERING_BLOCKED, HELD
from lanes.core.ledgers import OffsetLedger
from lanes.core.types import Partition

T = TypeVar("T")

_TRIES: Final = 20
"""Maximum number of tries to read collections that the thread of the event loop changes meanwhile."""


@dataclass(frozen=True, kw_only=True)
class Oldest:
    """The unfinished message that was delivered first.

    Attributes:
        partition: Source and number of the message's partition, as in ``Status.partitions``.
        position: Position of the message.
        attempt: Number of the current attempt, from 1.
        age: Seconds since the delivery of the message.
        key: Key of the message; None = no key. A key is user data, so no ``repr`` shows the key.
    """

    partition: str
    position: int
    attempt: int
    age: float
    key: bytes | None = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class PartitionStatus:
    """The status of one partition.

    Attributes:
        epoch: Epoch that the handlers of the partition receive as fencing token.
        floor: Position below which every delivered message is finished.
        holes: Number of unfinished messages at or above the floor; of unsettled messages, if the source settles each
            message.
        confirmed: Position that the broker has confirmed; None = the source settles each message.
        ahead: Number of messages admitted above ``confirmed``; None = the source settles each message.
        ahead_reached: Whether ``max_ahead`` stops the partition.
        draining: Whether the partition drains.
        lag: Number of unsettled messages at the broker, or of positions if the source commits positions; None =
            unknown.
        oldest: Unfinished message that was delivered first; None = every message is finished.
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

    Attributes:
        in_flight: Number of messages that were delivered and are not settled.
        max_in_flight: Bound of ``in_flight``.
        peak_in_flight: Highest value of ``in_flight``.
        in_flight_bytes: Bytes of the messages in flight.
        max_in_flight_bytes: Bound of ``in_flight_bytes``.
        peak_in_flight_bytes: Highest value of ``in_flight_bytes``.
        running: Number of running handlers.
        concurrency: Bound of ``running``.
        ready: Number of lanes that wait for a worker.
        held: Number of lanes that wait for a retry.
        blocked: Number of lanes that wait for ``unblock`` or ``park``.
        parking: Number of lanes whose dead letter is not confirmed.
        taking: Whether intake runs: False from the high water mark until the low water mark.
        paused: Whether the user has paused the consumer.
        settled: Number of settled messages since the start.
        retries: Number of failed attempts since the start after which the lane waited for a retry.
        dead_lettered: Number of confirmed dead letters since the start.
        zombies: Number of results since the start that arrived after the fence of their assignment.
        redelivered: Number of redelivered messages since the start, by cause.
        loop_held: Seconds since the start for which a call held the event loop, in pieces of 0.1 s or longer.
        floors: Position below which every delivered message is finished, by partition.
        partitions: Status of each partition, by its source and number.
        oldest: The oldest unfinished message of all partitions; None = every message is finished.
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
    loop_held: float
    floors: Mapping[str, int]
    partitions: Mapping[str, PartitionStatus]
    oldest: Oldest | None


Lag = Callable[[Partition], int | None]


def undisturbed(read: Callable[[], T]) -> T:
    """Call ``read`` on any thread, and again if the event loop's thread has changed a collection meanwhile."""
    for _ in range(_TRIES - 1):
        try:
            return read()
        except (RuntimeError, LookupError, ValueError):
            # The interpreter seldom switches threads, so another try almost always succeeds.
            continue
    return read()


def snapshot(
    engine: Engine, now: float, *, dead_lettered: int, redelivered: Mapping[str, int], loop_held: float, lag: Lag
) -> Status:
    """Return the status of an engine at ``now``; ``lag`` returns the lag of a partition. O(in flight)."""
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
        loop_held=loop_held,
        floors={name: each.floor for name, each in partitions.items()},
        partitions=partitions,
        oldest=max(oldest, key=lambda each: each.age, default=None),
    )


def _floor(partition: Partition) -> int:
    ledger = partition.ledger
    # An exporter's thread calls this function, and must not change the ledger of the consumer's thread.
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
    if message is None:
        return None
    return Oldest(
        partition=str(message.partition.id),
        position=message.position,
        attempt=message.attempt,
        age=now - message.received,
        key=message.key,
    )
