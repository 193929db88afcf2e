"""The OpenTelemetry SDK of one test, with messages and a status for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    Histogram,
    HistogramDataPoint,
    InMemoryMetricReader,
    Metric,
    NumberDataPoint,
)
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from lanes import (
    Expiring,
    KeptLog,
    Message,
    Oldest,
    Partition,
    PartitionedQueue,
    PartitionId,
    QueueStatus,
    Status,
    Stranded,
)
from lanes.observe.otel import Result, Telemetry
from lanes.observe.status import Capacity, PartitionStatus

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = ("traceparent", f"00-{TRACE}-{PARENT}-01".encode())
CANARY = "canary-7f3a"
# A constant, because the history must have the same hash for this key.
KEY, KEY_HASH = b"customer-42", "579d61fca72136d2"
LABELS = {
    "messaging.system": "kafka",
    "lanes.consumer": "billing",
    "messaging.destination.name": "ORDERS/EU",
    "messaging.destination.partition.id": "3",
}
CONSUMER_LABELS = {name: LABELS[name] for name in ("messaging.system", "lanes.consumer")}
Headers = Sequence[tuple[str, bytes]]
EXPIRING = Expiring(
    partition="ORDERS/EU/5", position=951, attempt=8, left=13.5, rule="retention.ms=60000", key=CANARY.encode()
)
OLDEST = Oldest(partition="ORDERS/EU/5", position=950, attempt=7, age=12.5, key=CANARY.encode())


class Reader:
    """A reader of raw messages. A raw message is its headers, or the exception that their read raises."""

    def value(self, raw: object) -> bytes:
        return CANARY.encode()

    def headers(self, raw: object) -> Headers:
        if isinstance(raw, Exception):
            raise raw
        return raw  # type: ignore[return-value]

    def subject(self, raw: object) -> str:
        return f"orders.{CANARY}"


def message(
    headers: object = (), *, key: bytes | None = KEY, number: int = 3, position: int = 77, source: str = "ORDERS/EU"
) -> Message:
    partition = Partition(PartitionId(source, number), Reader())
    partition.assignment = 4
    made = Message(partition, position, key, 10, headers, "token")
    made.attempt = 2
    return made


def status(**changes: Any) -> Status:
    """A status whose figures all differ."""
    names = [
        *("in_flight", "max_in_flight", "peak_in_flight", "in_flight_bytes", "max_in_flight_bytes"),
        *("peak_in_flight_bytes", "running", "concurrency", "ready", "held", "blocked", "parking"),
        *("publishing", "publish_held", "publishing_bytes", "published"),
        *("settled", "retries", "dead_lettered", "zombies", "loop_held"),
    ]
    fields: dict[str, Any] = {name: 100 + number for number, name in enumerate(names)}
    partitions = {
        f"ORDERS/EU/{number}": PartitionStatus(
            in_flight=920 + number,
            running=930 + number,
            capacity=Capacity(concurrency=940 + number, max_in_flight=950 + number),
            full=False,
            epoch=number,
            floor=900 + number,
            holes=910 + number,
            confirmed=confirmed,
            ahead=ahead,
            ahead_reached=False,
            draining=False,
            lag=lag,
            oldest=oldest,
            expiring=None if oldest is None else EXPIRING,
        )
        for number, confirmed, ahead, lag, oldest in ((3, 890, 17, 23, None), (5, None, None, None, OLDEST))
    }
    fields |= {
        "taking": True,
        "paused": True,
        "under_provisioned": True,
        "partitions": partitions,
        "redelivered": {"held": 1},
        "floors": {},
    }
    fields |= {"kept": KeptLog("orders", "mail", 12, 980, 1_000), "unowned": 990}
    fields |= {"outage": 41.5, "oldest": OLDEST, "consumer_target": None, "target_honoured": None}
    capacity = fields["capacity"] = Capacity(concurrency=960, max_in_flight=961)
    fields["queues"] = {
        "orders": QueueStatus(
            partitions=2,
            assigned=(),
            capacity=capacity,
            in_flight=0,
            running=0,
            lag=None,
            oldest=None,
            stranded=(Stranded("orders", "orders__p2", 970), Stranded("orders", "orders__p3", 971)),
        )
    }
    return Status(**fields | changes)


def count_everything(telemetry: Telemetry, one: Message) -> None:
    """Make each call that changes a counter once."""
    telemetry.consumed(one.partition, 1)
    telemetry.settled(one.partition, 1)
    telemetry.retried(one)
    telemetry.dead_lettered(one)
    telemetry.outputs(one.partition, 1)
    telemetry.publish_failed(one)
    telemetry.zombie(one)
    telemetry.redelivered(one, "held")
    telemetry.loop_held(1.5)


class Sdk:
    """The SDK of one test, with all its exports."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.reader = InMemoryMetricReader()
        self.tracers = TracerProvider(shutdown_on_exit=False)
        self.tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.meters = MeterProvider([self.reader], shutdown_on_exit=False)

    def shutdown(self) -> None:
        self.tracers.shutdown()
        self.meters.shutdown()

    def telemetry(
        self,
        of: Callable[[], Status] = status,
        name: str = "billing",
        system: str = "kafka",
        queues: Sequence[PartitionedQueue] = (),
    ) -> Telemetry:
        telemetry = Telemetry.create(name, system, of, queues=queues)
        assert telemetry is not None
        return telemetry

    def spans(self) -> tuple[ReadableSpan, ...]:
        return self.exporter.get_finished_spans()

    def span(self) -> ReadableSpan:
        (span,) = self.spans()
        return span

    def metrics(self) -> dict[str, Metric]:
        data = self.reader.get_metrics_data()
        scopes = [] if data is None else [scope for one in data.resource_metrics for scope in one.scope_metrics]
        return {metric.name: metric for scope in scopes for metric in scope.metrics}

    def duration(self) -> tuple[Metric, HistogramDataPoint]:
        """The one series of handler times."""
        found = self.metrics()["messaging.process.duration"]
        assert isinstance(found.data, Histogram)
        (point,) = found.data.data_points
        return found, point

    def numbers(self, name: str) -> list[tuple[float, Mapping[str, Any]]]:
        found = self.metrics().get(name)
        points = [] if found is None else found.data.data_points
        return [(point.value, dict(point.attributes or {})) for point in points if isinstance(point, NumberDataPoint)]


def use(monkeypatch: pytest.MonkeyPatch, tracers: object = None, meters: object = None) -> None:
    """Replace the global providers, which the API sets only once."""
    if tracers is not None:
        monkeypatch.setattr(trace, "get_tracer_provider", lambda: tracers)
    if meters is not None:
        monkeypatch.setattr(metrics, "get_meter_provider", lambda: meters)


def handle(
    telemetry: Telemetry, *messages: Message, result: Result = "ack", error: BaseException | None = None
) -> None:
    """Run one handler call without effect."""
    with telemetry.handling(messages[0]) if len(messages) == 1 else telemetry.handling_batch(messages) as handling:
        pass
    handling.end(result, error)
