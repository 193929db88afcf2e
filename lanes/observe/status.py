"""The status of a consumer: counts and positions. The ``repr`` of a status contains neither keys nor payloads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeVar

from lanes.core.engine import Engine
from lanes.core.lane import BLOCKED, DEAD_LETTERING, DEAD_LETTERING_BLOCKED, HELD, PUBLISH_HELD, RUNNING
from lanes.core.ledgers import OffsetLedger
from lanes.core.partition_budgets import PartitionBudgetEngine
from lanes.core.types import Partition
from lanes.queues.partitioned import PartitionedQueue
from lanes.queues.registered import QueuePartition, queue_partitions
from lanes.queues.stranded import Stranded
from lanes.source import KeptLog

T = TypeVar("T")

_TRIES: Final = 20
"""Maximum number of attempts to read collections that the thread of the event loop may change."""


@dataclass(frozen=True, kw_only=True)
class Oldest:
    """The unfinished message with the earliest delivery.

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
class Capacity:
    """The effective bounds of one partition, or of all assigned partitions together.

    Attributes:
        concurrency: Maximum number of running handlers; with batches, maximum number of running calls.
        max_in_flight: Maximum number of messages in flight.
    """

    concurrency: int
    max_in_flight: int


@dataclass(frozen=True, kw_only=True)
class Expiring:
    """An unfinished message that the broker may delete soon, because about a tenth of its retention remains.

    Attributes:
        partition: Source and number of the message's partition, as in ``Status.partitions``.
        position: Position of the message.
        attempt: Number of the current attempt, from 1.
        left: Minimum number of seconds until the broker may delete the message. 0 = the broker may have deleted it.
        rule: Rule by which the broker deletes, such as ``retention.ms=60000``.
        key: Key of the message; None = no key. A key is user data, so no ``repr`` shows the key.
    """

    partition: str
    position: int
    attempt: int
    left: float
    rule: str
    key: bytes | None = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class PartitionStatus:
    """The status of one partition.

    Attributes:
        in_flight: Number of delivered and unsettled messages of this assignment.
        running: Number of messages of this assignment whose handlers run.
        capacity: Bounds of the partition: the bounds per partition, or the bounds of the consumer.
        full: Whether ``max_in_flight_per_partition`` stops the partition.
        epoch: Epoch that the handlers of the partition receive as fencing token.
        floor: Position below which every delivered message is finished.
        holes: Number of unfinished messages at or above the floor. If the source settles each message, number of
            unsettled messages.
        confirmed: Position that the broker has confirmed; None = the source settles each message.
        ahead: Number of messages admitted above ``confirmed``; None = the source settles each message.
        ahead_reached: Whether ``max_ahead`` stops the partition.
        draining: Whether the partition drains.
        lag: Number of unsettled messages at the broker; if the source commits positions, number of positions; None =
            unknown.
        oldest: Unfinished message with the earliest delivery; None = every message is finished.
        expiring: Unfinished message that the broker may delete soon; None = no such message is known.
        queue: Name of the partition's partitioned queue; None = the partition belongs to no partitioned queue.
        queue_partition: Number of the partition's physical queue; None = the partition belongs to no partitioned queue.
    """

    in_flight: int
    running: int
    capacity: Capacity
    full: bool
    epoch: int
    floor: int
    holes: int
    confirmed: int | None
    ahead: int | None
    ahead_reached: bool
    draining: bool
    lag: int | None
    oldest: Oldest | None
    expiring: Expiring | None = None
    queue: str | None = None
    queue_partition: int | None = None


@dataclass(frozen=True, kw_only=True)
class QueueStatus:
    """The status of a partitioned queue in this process: its physical queues together.

    Attributes:
        partitions: Number of physical queues of the queue, including the physical queues that other processes read.
        assigned: Numbers of the physical queues that this process reads, in ascending order.
        capacity: Bounds of the assigned partitions together: the sum of their capacities, at most ``concurrency`` and
            ``max_in_flight`` of the consumer.
        in_flight: Number of delivered and unsettled messages.
        running: Number of messages whose handlers run.
        lag: Sum of the lags of the assigned partitions; None = an assigned partition has an unknown lag, or no
            partition is assigned.
        oldest: Unfinished message with the earliest delivery; None = every message is finished.
        stranded: Physical queues outside the ``partitions`` that have messages of the queue. No consumer of the group
            reads these physical queues, because producers use another number of partitions. Empty = no such physical
            queue is known.
    """

    partitions: int
    assigned: tuple[int, ...]
    capacity: Capacity
    in_flight: int
    running: int
    lag: int | None
    oldest: Oldest | None
    stranded: tuple[Stranded, ...] = ()


class Provision(NamedTuple):
    """The target of this process, and whether the group exceeds its targets, as in ``Status``."""

    consumer_target: int | None = None
    target_honoured: bool | None = None
    under_provisioned: bool = False


@dataclass(frozen=True, kw_only=True)
class Status:
    """A snapshot of one consumer.

    Attributes:
        in_flight: Number of delivered and unsettled messages.
        max_in_flight: Bound of ``in_flight``.
        peak_in_flight: Highest value of ``in_flight`` since the start.
        in_flight_bytes: Bytes of the messages in flight.
        max_in_flight_bytes: Bound of ``in_flight_bytes``.
        peak_in_flight_bytes: Highest value of ``in_flight_bytes`` since the start.
        running: Number of running handlers.
        concurrency: Bound of ``running``.
        capacity: Bounds of the assigned partitions together: the sum of their capacities, at most ``concurrency`` and
            ``max_in_flight``.
        ready: Number of lanes that wait for a worker. ``Consumer.ready`` shows whether the consumer is ready.
        held: Number of lanes that wait for a retry.
        blocked: Number of lanes that wait for ``unblock`` or ``park``.
        parking: Number of lanes whose dead letter is not confirmed.
        publishing: Number of messages with unconfirmed outputs, and of messages of the same batch that wait for these
            outputs.
        publish_held: Number of messages in ``publishing`` whose last send failed, and that wait for the next send.
        publishing_bytes: Bytes of the unconfirmed outputs in memory. At ``max_in_flight_bytes`` no handler starts.
        taking: Whether the source may deliver: False from the high water until the low water, or until a handler is
            idle and the bounds leave room.
        paused: Whether the user has paused the consumer.
        settled: Number of settled messages since the start.
        retries: Number of failed attempts since the start after which the lane waited for a retry.
        dead_lettered: Number of confirmed dead letters since the start.
        published: Number of confirmed outputs since the start.
        zombies: Number of results since the start that arrived after the fence of their assignment.
        redelivered: Number of redelivered messages since the start, by cause.
        consumer_target: Largest number of partitions that this process prefers to own; None = this process has no
            target.
        target_honoured: Whether the assignment of the partitions uses the target; None = this process has no target.
            False for a source whose broker assigns the partitions, and while a member of a cohort runs a version of
            ``lanes`` that knows no targets.
        under_provisioned: Whether a process of the group owns more partitions than its target under the plan. Without a
            plan of the group, whether this process owns more partitions than its target.
        loop_held: Sum of the seconds since the start for which calls of at least 0.1 s blocked the event loop.
        floors: Position below which every delivered message is finished, by partition.
        partitions: Status of each partition, by its source and number.
        oldest: The oldest unfinished message of all partitions; None = every message is finished.
        outage: Seconds since the last answer of a broker, if requests have no answer; 0.0 = a broker answers; None =
            unknown. The value is unknown if the source reports no outages or is not open.
        queues: Status of each partitioned queue that the source reads, by its logical name.
        kept: Messages that the log keeps for its slowest subscription; None = unknown, or the broker does not keep
            messages for subscriptions.
        unowned: Number of messages whose keys no process owns, at the last count. The count may stop at a bound. None =
            unknown, or the source has no ranges.
    """

    in_flight: int
    max_in_flight: int
    peak_in_flight: int
    in_flight_bytes: int
    max_in_flight_bytes: int
    peak_in_flight_bytes: int
    running: int
    concurrency: int
    capacity: Capacity
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
    consumer_target: int | None
    target_honoured: bool | None
    under_provisioned: bool
    loop_held: float
    floors: Mapping[str, int]
    partitions: Mapping[str, PartitionStatus]
    oldest: Oldest | None
    outage: float | None = None
    queues: Mapping[str, QueueStatus] = field(default_factory=dict)
    kept: KeptLog | None = None
    unowned: int | None = None
    publishing: int = 0
    publish_held: int = 0
    publishing_bytes: int = 0
    published: int = 0


Lag = Callable[[Partition], int | None]
ExpiringMessage = Callable[[Partition, float], Expiring | None]
"""Returns the message of a partition that the broker may delete soon, at a time."""


def undisturbed(read: Callable[[], T]) -> T:
    """Call ``read`` on any thread, and repeat the call if the loop's thread changed a collection during the call."""
    for _ in range(_TRIES - 1):
        try:
            return read()
        except (RuntimeError, LookupError, ValueError):
            # The interpreter seldom switches threads, so another try almost always succeeds.
            continue
    return read()


def snapshot(
    engine: Engine,
    now: float,
    *,
    dead_lettered: int,
    redelivered: Mapping[str, int],
    provision: Provision,
    loop_held: float,
    lag: Lag,
    expiring: ExpiringMessage | None = None,
    outage: float | None = None,
    queues: Sequence[PartitionedQueue] = (),
    stranded: Sequence[Stranded] = (),
    kept: KeptLog | None = None,
    unowned: int | None = None,
    published: int = 0,
) -> Status:
    """Return the status of an engine at ``now``; ``lag`` returns the lag of a partition. O(in flight)."""
    flow = engine.flow
    stopped = engine.stopped
    places = queue_partitions(queues)
    partitions = {
        str(p.id): _partition(engine, p, now, lag, expiring, places.get(p.id.source))
        for p in engine.partitions.values()
    }
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
        capacity=_capacity(engine, len({partition.budget for partition in engine.partitions.values()})),
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
        consumer_target=provision.consumer_target,
        target_honoured=provision.target_honoured,
        under_provisioned=provision.under_provisioned,
        loop_held=loop_held,
        floors={name: each.floor for name, each in partitions.items()},
        partitions=partitions,
        oldest=max(oldest, key=lambda each: each.age, default=None),
        outage=outage,
        queues={queue.name: _queue(engine, queue, partitions.values(), stranded) for queue in queues},
        kept=kept,
        unowned=unowned,
        publishing=len(engine.publishing.produced) + len(engine.publishing.handled),
        publish_held=stopped.count(PUBLISH_HELD),
        publishing_bytes=engine.publishing.size,
        published=published,
    )


def _queue(
    engine: Engine, queue: PartitionedQueue, partitions: Iterable[PartitionStatus], stranded: Sequence[Stranded]
) -> QueueStatus:
    own = [each for each in partitions if each.queue == queue.name]
    assigned = tuple(sorted({each.queue_partition for each in own if each.queue_partition is not None}))
    lags = [each.lag for each in own if each.lag is not None]
    oldest = [each.oldest for each in own if each.oldest is not None]
    return QueueStatus(
        partitions=queue.partitions,
        assigned=assigned,
        capacity=_capacity(engine, len(assigned)),
        in_flight=sum(each.in_flight for each in own),
        running=sum(each.running for each in own),
        lag=sum(lags) if own and len(lags) == len(own) else None,
        oldest=max(oldest, key=lambda each: each.age, default=None),
        stranded=tuple(each for each in stranded if each.queue == queue.name),
    )


def _capacity(engine: Engine, width: int) -> Capacity:
    """Return the effective bounds of ``width`` budgets together."""
    policy = engine.policy
    calls, messages = policy.concurrency_per_partition, policy.max_in_flight_per_partition
    return Capacity(
        concurrency=min(engine.concurrency, width * (calls or engine.concurrency)),
        max_in_flight=min(policy.max_in_flight, width * (messages or policy.max_in_flight)),
    )


def _floor(partition: Partition) -> int:
    ledger = partition.ledger
    # An exporter's thread calls this function, and must not change the ledger of the consumer's thread.
    return ledger.peek() if isinstance(ledger, OffsetLedger) else ledger.floor()


def _partition(
    engine: Engine,
    partition: Partition,
    now: float,
    lag: Lag,
    expiring: ExpiringMessage | None,
    place: QueuePartition | None,
) -> PartitionStatus:
    ledger, commits = partition.ledger, partition.commits
    ahead = None
    if commits is not None and isinstance(ledger, OffsetLedger):
        ahead = ledger.next_ordinal - commits.confirmed_ordinal
    waiting = len(ledger.waiting) if isinstance(ledger, OffsetLedger) else 0
    # Abandoned messages of a draining partition have left the bounds, and an ``OffsetLedger`` still has their holes.
    in_flight = ledger.in_flight()
    return PartitionStatus(
        in_flight=len(in_flight) + waiting,
        running=sum(1 for message in in_flight if message.state == RUNNING),
        capacity=_capacity(engine, 1),
        full=isinstance(engine, PartitionBudgetEngine) and partition.budget in engine.full,
        epoch=partition.epoch,
        floor=_floor(partition),
        holes=ledger.holes(),
        confirmed=None if commits is None else commits.confirmed,
        ahead=ahead,
        ahead_reached=partition in engine.committer.ahead,
        draining=partition.draining,
        lag=lag(partition),
        oldest=_oldest(partition, now),
        expiring=None if expiring is None else expiring(partition, now),
        queue=None if place is None else place.queue,
        queue_partition=None if place is None else place.number,
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
