"""The metric instruments of this process, and the values of its gauges.

Each meter provider has one set of instruments, which all consumers of the process use. The SDK calls only the callbacks
of the first instrument of a name, so these callbacks iterate over the open consumers. Labels distinguish consumers and
partitions. Keys, payloads and positions are never labels, but a gauge may have a position as its value.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

from opentelemetry.metrics import CallbackOptions, Meter, MeterProvider, Observation

from lanes.clock import Clock
from lanes.core.types import PartitionId
from lanes.observe.status import Expiring, Oldest, PartitionStatus, Status, undisturbed
from lanes.queues.registered import QueuePartition

Labels = Mapping[str, str]

SYSTEM: Final = "messaging.system"
OPERATION_NAME: Final = "messaging.operation.name"
DESTINATION: Final = "messaging.destination.name"
PARTITION: Final = "messaging.destination.partition.id"
CONSUMER: Final = "lanes.consumer"
SUBSCRIPTION: Final = "lanes.subscription"
QUEUE: Final = "lanes.queue.name"
QUEUE_PARTITION: Final = "lanes.queue.partition"

DURATION_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
"""Bucket limits in seconds, as the messaging conventions of OpenTelemetry define them."""

_SNAPSHOT_AGE: Final = 1.0
"""Maximum age in seconds of a snapshot that a gauge may read."""


class Gauge(NamedTuple):
    """One observable gauge; ``read`` returns the values of a status and the labels of each value."""

    name: str
    unit: str
    description: str
    read: Callable[[Status], Iterable[tuple[float, Labels]]]


def partition_labels(partition: PartitionId, place: QueuePartition | None = None) -> dict[str, str]:
    """Return the labels of a partition; ``place`` = the partition's physical queue, if it has one."""
    labels = {DESTINATION: partition.source, PARTITION: str(partition.number)}
    return labels if place is None else labels | queue_labels(place)


def queue_labels(place: QueuePartition) -> dict[str, str]:
    """Return the labels of a physical queue."""
    return {QUEUE: place.queue, QUEUE_PARTITION: str(place.number)}


def _one(read: Callable[[Status], float]) -> Callable[[Status], Iterable[tuple[float, Labels]]]:
    return lambda status: [(read(status), {})]


def _labels_of(name: str, partition: PartitionStatus) -> Labels:
    """Return the labels of a partition that a status names as ``TOPIC/NUMBER``; the topic may contain slashes."""
    source, _, number = name.rpartition("/")
    labels = {DESTINATION: source, PARTITION: number}
    if partition.queue is None or partition.queue_partition is None:
        return labels
    return labels | queue_labels(QueuePartition(partition.queue, partition.queue_partition))


def _each(read: Callable[[PartitionStatus], float | None]) -> Callable[[Status], Iterable[tuple[float, Labels]]]:
    def read_each(status: Status) -> Iterator[tuple[float, Labels]]:
        for name, partition in status.partitions.items():
            value = read(partition)
            if value is not None:
                yield value, _labels_of(name, partition)

    return read_each


def _oldest(read: Callable[[Oldest], float]) -> Callable[[Status], Iterable[tuple[float, Labels]]]:
    return _each(lambda partition: None if partition.oldest is None else read(partition.oldest))


def _stranded(status: Status) -> Iterator[tuple[float, Labels]]:
    for queue in status.queues.values():
        for each in queue.stranded:
            yield each.messages, {QUEUE: each.queue, DESTINATION: each.name}


def _kept(status: Status) -> Iterator[tuple[float, Labels]]:
    if status.kept is not None:
        yield status.kept.bytes, {DESTINATION: status.kept.log, SUBSCRIPTION: status.kept.subscription}


def _expiring(read: Callable[[Expiring], float]) -> Callable[[Status], Iterable[tuple[float, Labels]]]:
    return _each(lambda partition: None if partition.expiring is None else read(partition.expiring))


GAUGES: Final = (
    Gauge("lanes.in_flight.messages", "{message}", "Delivered and not yet settled.", _one(lambda s: s.in_flight)),
    Gauge(
        "lanes.in_flight.max_messages", "{message}", "Bound of the messages in flight.", _one(lambda s: s.max_in_flight)
    ),
    Gauge("lanes.in_flight.bytes", "By", "Bytes of the messages in flight.", _one(lambda s: s.in_flight_bytes)),
    Gauge("lanes.in_flight.max_bytes", "By", "Bound of the bytes in flight.", _one(lambda s: s.max_in_flight_bytes)),
    Gauge("lanes.running", "{handler}", "Handlers that run.", _one(lambda s: s.running)),
    Gauge("lanes.concurrency", "{handler}", "Bound of the running handlers.", _one(lambda s: s.concurrency)),
    Gauge(
        "lanes.ready",
        "{lane}",
        "Lanes that wait for a worker; not the readiness of the consumer.",
        _one(lambda s: s.ready),
    ),
    Gauge("lanes.held", "{lane}", "Lanes that wait for a retry.", _one(lambda s: s.held)),
    Gauge("lanes.blocked", "{lane}", "Lanes that wait for unblock or park.", _one(lambda s: s.blocked)),
    Gauge("lanes.parking", "{lane}", "Lanes whose dead letter is not confirmed yet.", _one(lambda s: s.parking)),
    Gauge("lanes.publishing", "{message}", "Messages with unconfirmed outputs.", _one(lambda s: s.publishing)),
    Gauge(
        "lanes.publish_held",
        "{message}",
        "Messages whose outputs wait for the next send after a failure.",
        _one(lambda s: s.publish_held),
    ),
    Gauge("lanes.publishing.bytes", "By", "Bytes of unconfirmed outputs.", _one(lambda s: s.publishing_bytes)),
    Gauge("lanes.taking", "1", "1 while intake runs, 0 from a high to the low water mark.", _one(lambda s: s.taking)),
    Gauge("lanes.paused", "1", "1 while the user has paused the consumer.", _one(lambda s: s.paused)),
    Gauge(
        "lanes.under_provisioned",
        "1",
        "1 while a process of the group owns more partitions than its target.",
        _one(lambda s: s.under_provisioned),
    ),
    Gauge(
        "lanes.outage",
        "s",
        "Time since the last answer of a broker, once requests stay unanswered; 0 while a broker answers.",
        lambda status: [] if status.outage is None else [(status.outage, {})],
    ),
    Gauge(
        "lanes.floor",
        "{position}",
        "Position below which every delivered message is finished.",
        _each(lambda p: p.floor),
    ),
    Gauge("lanes.holes", "{message}", "Unfinished messages at or above the floor.", _each(lambda p: p.holes)),
    Gauge("lanes.confirmed", "{position}", "Position that the broker has confirmed.", _each(lambda p: p.confirmed)),
    Gauge("lanes.ahead", "{message}", "Messages admitted above the confirmed position.", _each(lambda p: p.ahead)),
    Gauge("lanes.lag", "{message}", "Messages at the broker that are not settled.", _each(lambda p: p.lag)),
    Gauge(
        "lanes.oldest.age", "s", "Time since the delivery of the oldest unfinished message.", _oldest(lambda m: m.age)
    ),
    Gauge(
        "lanes.oldest.attempt", "{attempt}", "Attempt of the oldest unfinished message.", _oldest(lambda m: m.attempt)
    ),
    Gauge(
        "lanes.oldest.position",
        "{position}",
        "Position of the oldest unfinished message.",
        _oldest(lambda m: m.position),
    ),
    Gauge(
        "lanes.expiring.left",
        "s",
        "Time until the broker may delete an unfinished message; exists from a tenth of its retention on.",
        _expiring(lambda m: m.left),
    ),
    Gauge(
        "lanes.stranded",
        "{message}",
        "Messages of a partitioned queue in a physical queue that no consumer of the group reads.",
        _stranded,
    ),
    Gauge(
        "lanes.kept.bytes",
        "By",
        "Size of the messages that a log keeps for its slowest subscription.",
        _kept,
    ),
    Gauge(
        "lanes.unowned",
        "{message}",
        "Messages in slots of the ring that no process owns.",
        lambda status: [] if status.unowned is None else [(status.unowned, {})],
    ),
)
"""Every gauge, by name."""


class Reading:
    """The gauge values of one consumer. All gauges of one collection share a snapshot.

    ``status`` makes a snapshot. The thread that collects the metrics calls ``status``, not the consumer's thread.
    """

    def __init__(self, labels: Labels, status: Callable[[], Status], clock: Clock) -> None:
        self._labels = labels
        self._status: Callable[[], Status] | None = status
        self._clock = clock
        self._snapshot: tuple[Status, float, set[str]] | None = None

    def observations(self, gauge: Gauge) -> list[Observation]:
        """Return the observations of a gauge; empty without a status or after ``close``.

        The call never raises an exception.
        """
        try:
            status = self._read(gauge.name)
            if status is None:
                return []
            return [
                Observation(int(value) if isinstance(value, bool) else value, {**self._labels, **labels})
                for value, labels in gauge.read(status)
            ]
        except Exception:
            # A consumer whose start failed has no status, and the exporter must go on without that consumer.
            return []

    def _read(self, gauge: str) -> Status | None:
        now = self._clock()
        snapshot = self._snapshot
        # A gauge that reads a snapshot for the second time belongs to a new collection.
        if snapshot is not None and gauge not in snapshot[2] and now - snapshot[1] < _SNAPSHOT_AGE:
            snapshot[2].add(gauge)
            return snapshot[0]
        # Read the attribute once, because close() may set it to None at any time.
        make = self._status
        if make is None:
            return None
        status = undisturbed(make)
        self._snapshot = (status, now, {gauge})
        if self._status is None:
            self._snapshot = None
        return status

    def close(self) -> None:
        """Stop returning values, and drop the reference to the consumer. Idempotent."""
        self._status = None
        self._snapshot = None


class Instruments:
    """The instruments of one meter. Thread-safe."""

    def __init__(self, meter: Meter) -> None:
        self._lock = threading.Lock()
        # Each change makes a new tuple, because the collecting thread may iterate over the old tuple.
        self._open: tuple[Reading, ...] = ()
        self.consumed = meter.create_counter(
            "messaging.client.consumed.messages", "{message}", "Messages delivered, redelivered messages included."
        )
        self.settled = meter.create_counter("lanes.settled", "{message}", "Messages settled.")
        self.retries = meter.create_counter("lanes.retries", "{message}", "Attempts that failed and are repeated.")
        self.dead_letters = meter.create_counter("lanes.dead_letters", "{message}", "Dead letters confirmed.")
        self.outputs = meter.create_counter("lanes.outputs", "{output}", "Outputs confirmed.")
        self.output_failures = meter.create_counter(
            "lanes.output_failures", "{message}", "Sends of a message's outputs that failed."
        )
        self.zombies = meter.create_counter("lanes.zombies", "{message}", "Results after the fence of an assignment.")
        self.redelivered = meter.create_counter("lanes.redelivered", "{message}", "Redelivered and late positions.")
        self.loop_held = meter.create_counter("lanes.loop.held", "s", "Time for which calls held the event loop.")
        self.duration = meter.create_histogram(
            "messaging.process.duration",
            "s",
            "Time that handlers took.",
            explicit_bucket_boundaries_advisory=DURATION_BUCKETS,
        )
        for gauge in GAUGES:
            meter.create_observable_gauge(gauge.name, [self._callback(gauge)], gauge.unit, gauge.description)

    def open(self, reading: Reading) -> None:
        """Add a consumer to the gauges."""
        with self._lock:
            self._open = (*self._open, reading)

    def close(self, reading: Reading) -> None:
        """Remove a consumer from the gauges. Idempotent."""
        reading.close()
        with self._lock:
            self._open = tuple(one for one in self._open if one is not reading)

    def _callback(self, gauge: Gauge) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_options: CallbackOptions) -> Iterable[Observation]:
            return [observation for reading in self._open for observation in reading.observations(gauge)]

        return observe


_made: Final[WeakKeyDictionary[MeterProvider, Instruments]] = WeakKeyDictionary()
_making: Final = threading.Lock()


def instruments_of(provider: MeterProvider, version: str) -> Instruments:
    """Return the instruments of a provider; the first call makes them. Thread-safe."""
    with _making:
        found = _made.get(provider)
        if found is None:
            found = _made[provider] = Instruments(provider.get_meter("lanes", version))
        return found
